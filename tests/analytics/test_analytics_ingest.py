"""From the spool to the tables: everything once, whatever is killed, sent twice or read again.

A real process that is really killed: tests/e2e/test_analytics.py.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from analytics.jobs import batches, ingest
from analytics.jobs.defaults import KEEP_SPOOL_FOREVER
from analytics.jobs.progress import Progress
from analytics.remote_write.remote_pb2 import BucketSpan, Histogram
from analytics.sources.spool import LostSegments
from analytics.spool import reader
from analytics.spool.positions import IDENTITY, spool_id
from analytics.tables.change import TableChange
from analytics.tables.store import Tables
from tests.analytics.spool_files import SpoolFiles, body_v2, labels

UP, DOWN = labels("up", job="x"), labels("down", job="x")
HOUR_MS = 3_600_000
T0 = datetime(2025, 11, 21, 8, tzinfo=UTC)


class Killed(BaseException):
    """As if by SIGKILL: nothing cleans up."""


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolFiles]:
    files = SpoolFiles(tmp_path / "spool", segment_bytes_max=400)
    yield files
    files.close()


def histogram(count: int) -> Histogram:
    return Histogram(
        count_int=count, sum=1.0, schema=0, positive_spans=[BucketSpan(offset=1, length=1)], positive_deltas=[count]
    )


def fill(spool: SpoolFiles) -> None:
    """Ten scrapes of two series in two hours, with a request sent twice, a replica's, and a histogram."""
    for number in range(10):
        at_ms = number * HOUR_MS // 6
        spool.v1((UP, at_ms, float(number)), (DOWN, at_ms, -float(number)))
        if number % 4 == 1:
            spool.v1((UP, at_ms, float(number)), (DOWN, at_ms, -float(number)))
        if number == 3:
            spool.v1(
                ({**UP, "__replica__": "b"}, at_ms + 3, float(number)), ({**UP, "__replica__": "b"}, at_ms + 7, 3.5)
            )
        if number % 5 == 0:
            spool.add(body_v2([], histograms=[(labels("h"), at_ms, histogram(number + 1))]), 2)


SAMPLES = sorted(
    [("up", n * 600_000, float(n)) for n in range(10)]
    + [("down", n * 600_000, -float(n)) for n in range(10)]
    + [("up", 3 * 600_000 + 3, 3.0), ("up", 3 * 600_000 + 7, 3.5)]  # of the replica
)
HISTOGRAMS = [(0, 1.0), (3_000_000, 6.0)]
SERIES = [("down", "x"), ("h", None), ("up", "x")]
EXPECTED = (SAMPLES, HISTOGRAMS, SERIES)


def contents(tables: Tables) -> tuple[Any, Any, Any]:
    """Read without Spark, since the tests of kills look at them often."""
    series = {row["series_id"]: (row["metric"], dict(row["labels"]).get("job")) for row in rows_of(tables, "series")}
    samples = [(series[row["series_id"]][0], since_8_ms(row), row["value"]) for row in rows_of(tables, "samples")]
    histograms = [(since_8_ms(row), row["count"]) for row in rows_of(tables, "histograms")]
    return sorted(samples), sorted(histograms), sorted(series.values(), key=str)


def rows_of(tables: Tables, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(f"{tables.location.delta_url}/{table}").to_pyarrow_table().to_pylist()
    return found


def since_8_ms(row: dict[str, Any]) -> int:
    return round((row["ts"] - T0).total_seconds() * 1000)


def run(tables: Tables, spool: SpoolFiles, **options: Any) -> ingest.IngestReport:
    options = {"max_bytes": 1200, "keep_hours": KEEP_SPOOL_FOREVER} | options
    return ingest.Ingest(tables, str(spool.directory), **options).run(batches.KnownSeries(tables), Progress())


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables.open(spark, str(tmp_path / "tables"))


def test_everything_comes_once_in_several_batches_and_again_nothing(tables: Tables, spool: SpoolFiles) -> None:
    fill(spool)
    first = run(tables, spool)
    assert contents(tables) == EXPECTED
    assert first.batches > 1
    assert first.samples == len(SAMPLES)
    assert {row["replica"] == 0 for row in rows_of(tables, "samples")} == {True, False}
    assert run(tables, spool).batches == 0
    # A spool that is another one by its name begins at the oldest segment again.
    (spool.directory / IDENTITY).unlink()
    again = run(tables, spool, max_bytes=1 << 20)
    assert (again.batches, again.samples) == (1, 0)
    assert contents(tables) == EXPECTED
    # What comes later goes on where it ended; consumed segments go when they are told to.
    before = len(reader.list_segments(spool.directory))
    spool.v1((UP, 11, 11.0))
    late = run(tables, spool, keep_hours=0)
    assert (late.batches, late.samples) == (1, 1)
    assert len(reader.list_segments(spool.directory)) < before


def test_young_segments_stay(tables: Tables, spool: SpoolFiles) -> None:
    fill(spool)
    before = reader.list_segments(spool.directory)
    run(tables, spool, keep_hours=1)
    assert reader.list_segments(spool.directory) == before


def test_killed_at_each_commit_and_run_again(
    tables: Tables, spool: SpoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kill follows the other. A batch that was killed has another end when it is read again, since more has come
    meanwhile.
    """
    fill(spool)
    commit = TableChange.commit
    kills = [("series", "before"), ("histograms", "before"), ("samples", "before"), ("samples", "after")]
    for number, (table, moment) in enumerate(kills, 1):

        def dies(self: TableChange, table: str = table, moment: str = moment) -> None:
            if moment == "after" or self.snapshot.table != table:
                commit(self)
            if self.snapshot.table == table:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(TableChange, "commit", dies)
            with pytest.raises(Killed):
                run(tables, spool, max_bytes=500 * number)
    run(tables, spool, max_bytes=1 << 20)
    assert contents(tables) == EXPECTED


def test_two_ingests_and_receivers_at_once_add_a_row_once(
    tables: Tables, spool: SpoolFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second commits while the first has compared its rows with the table, before it commits."""
    fill(spool)
    other = SpoolFiles(tmp_path / "other")
    fill(other)
    commit, interrupted = TableChange.commit, []

    def commit_behind_the_other(self: TableChange) -> None:
        if self.snapshot.table == "samples" and not interrupted:
            interrupted.append(True)
            run(tables, other, max_bytes=1 << 20)
        commit(self)

    monkeypatch.setattr(TableChange, "commit", commit_behind_the_other)
    report = run(tables, spool, max_bytes=1 << 20)
    other.close()
    assert interrupted
    assert report.samples == 0
    assert contents(tables) == EXPECTED


def test_rows_far_apart_are_compared_with_what_is_there(tables: Tables, spool: SpoolFiles) -> None:
    """Late data for an hour that has rows of other batches: doubles are found by instant, not by arrival."""
    spool.v1((UP, 0, 1.0), (DOWN, HOUR_MS, 1.0))
    run(tables, spool)
    spool.v1((UP, HOUR_MS // 2, 2.0), (UP, 0, 9.0), (DOWN, 3 * HOUR_MS, 3.0))
    assert run(tables, spool).samples == 2
    assert contents(tables)[0] == [
        ("down", HOUR_MS, 1.0),
        ("down", 3 * HOUR_MS, 3.0),
        ("up", 0, 1.0),
        ("up", HOUR_MS // 2, 2.0),
    ]


@pytest.mark.parametrize("first", ["with", "without"])
def test_a_sample_without_a_replica_is_that_of_any(tables: Tables, spool: SpoolFiles, first: str) -> None:
    """Backfilled and ingested, in any order: Prometheus' API names no replica."""
    names = {"with": {**UP, "__replica__": "b"}, "without": UP}
    second = "without" if first == "with" else "with"
    spool.v1((names[first], 0, 1.0), (names[first], 1, 1.0))
    run(tables, spool)
    spool.v1((names[second], 0, 1.0), (names[second], 2, 2.0))
    run(tables, spool)
    assert contents(tables)[0] == [("up", 0, 1.0), ("up", 1, 1.0), ("up", 2, 2.0)]
    spool.v1(({**UP, "__replica__": "c"}, 1, 1.0))
    run(tables, spool)
    assert len(contents(tables)[0]) == (4 if first == "with" else 3)


def test_gauges_of_creation_times_name_their_counter(tables: Tables, spool: SpoolFiles) -> None:
    counter, created = labels("bytes_total", a="b"), labels("bytes_created", a="b")
    spool.v1((counter, 0, 1.0), (created, 0, 2.0))
    run(tables, spool)
    rows = {row["value"]: row for row in rows_of(tables, "samples")}
    assert rows[2.0]["counter_id"] == rows[1.0]["series_id"]
    assert rows[1.0]["counter_id"] is None


def test_series_are_added_once_and_forgotten_ones_again(
    tables: Tables, spool: SpoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers get each once."""
    spool.v1((UP, 0, 1.0))
    run(tables, spool)
    spool.v1((UP, 1, 1.0), (DOWN, 1, 1.0))
    run(tables, spool)
    assert len(rows_of(tables, "series")) == 2
    monkeypatch.setattr(batches, "SERIES_KNOWN_MAX", 0)
    known = batches.KnownSeries(tables)
    read = ingest.Ingest(tables, str(spool.directory))
    begin, end = reader.Position(0, 0), reader.committed_end(spool.directory)
    monkeypatch.setattr(known, "_known", known._known[:0])
    batches.write_batch(tables, known, read._read(begin, end))
    assert len(rows_of(tables, "series")) == 4
    assert tables.read("series").count() == 2
    assert not len(known._known)


def test_a_spool_that_lost_segments_is_told(tables: Tables, spool: SpoolFiles) -> None:
    fill(spool)
    run(tables, spool)
    for number in range(20):
        spool.v1((UP, 12 + number, 1.0))
    for segment in reader.list_segments(spool.directory)[:-1]:
        Path(segment.path).unlink()
    with pytest.raises(LostSegments, match="delete the file `id` of the spool"):
        run(tables, spool)


def test_an_empty_spool_has_nothing(tables: Tables, spool: SpoolFiles) -> None:
    assert run(tables, spool).samples == 0
    assert run(tables, spool).batches == 0


def test_hours_beyond_all_reason_are_refused(
    tables: Tables, spool: SpoolFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "HOURS_MAX", 2)
    spool.v1(*((UP, hour * HOUR_MS, 1.0) for hour in range(4)))
    run(tables, spool)
    spool.v1((DOWN, 0, 1.0), (DOWN, 4 * HOUR_MS, 1.0))
    with pytest.raises(batches.TooManyHours, match="compared with 4 hours"):
        run(tables, spool)


def test_a_spool_has_one_identity(tmp_path: Path) -> None:
    assert spool_id(tmp_path) == spool_id(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY]
