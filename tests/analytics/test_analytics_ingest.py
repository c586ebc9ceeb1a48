"""From the spool to the tables: everything once, whatever is killed, sent twice or read again.

A real process that is really killed: tests/e2e/test_analytics.py.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from analytics.jobs import ingest
from analytics.jobs.batches import write_batch
from analytics.remote_write.remote_pb2 import BucketSpan, Histogram
from analytics.sources.spool import PrometheusSpool
from analytics.spool import reader
from analytics.tables import commits
from analytics.tables.store import Tables
from tests.analytics.faulty_files import Killed, Steps
from tests.analytics.spool_files import SpoolFiles, body_v2, labels

UP, DOWN = labels("up", job="x"), labels("down", job="x")
HOUR_MS = 3_600_000
HOURS = tuple(datetime(2025, 11, 21, hour, tzinfo=UTC) for hour in (8, 9))


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
            spool.v1(({**UP, "__replica__": "b"}, at_ms, float(number)), ({**UP, "__replica__": "b"}, at_ms + 7, 3.5))
        if number % 5 == 0:
            spool.add(body_v2([], histograms=[(labels("h"), at_ms, histogram(number + 1))]), 2)


SAMPLES = sorted(
    [("up", n * 600_000, float(n)) for n in range(10)]
    + [("down", n * 600_000, -float(n)) for n in range(10)]
    + [("up", 3 * 600_000 + 7, 3.5)]
)
HISTOGRAMS = [(0, 1.0), (3_000_000, 6.0)]
SERIES = [("down", "x"), ("h", None), ("up", "x")]


def contents(tables: Tables) -> tuple[Any, Any, Any, Any]:
    """Read without Spark, since the tests of kills look at them often."""
    series = {row["series_id"]: (row["metric"], dict(row["labels"]).get("job")) for row in rows_of(tables, "series")}
    samples = [(series[row["series_id"]][0], since_8_ms(row), row["value"]) for row in rows_of(tables, "samples")]
    histograms = [(since_8_ms(row), row["count"]) for row in rows_of(tables, "histograms")]
    assert len(series) == len(rows_of(tables, "series"))
    return sorted(samples), sorted(histograms), sorted(series.values()), tables.dirty_hours("rollup").hours


def rows_of(tables: Tables, table: str) -> list[dict[str, Any]]:
    directory = Path(tables.files.root.removeprefix("file:")) / table
    if not directory.exists():
        return []
    rows: list[dict[str, Any]] = ds.dataset(directory, format="parquet", partitioning="hive").to_table().to_pylist()
    return rows


def since_8_ms(row: dict[str, Any]) -> int:
    return round((row["ts"].replace(tzinfo=UTC) - HOURS[0]).total_seconds() * 1000)


EXPECTED = (SAMPLES, HISTOGRAMS, SERIES, HOURS)


def options(spool: SpoolFiles, **others: str) -> dict[str, str]:
    return {"path": str(spool.directory), "maxBytesPerBatch": "1200"} | others


def test_everything_comes_once_in_several_batches_and_again_nothing(
    spark: SparkSession, spool: SpoolFiles, tmp_path: Path
) -> None:
    fill(spool)
    root = str(tmp_path / "tables")
    first = ingest.run(spark, root, options(spool))
    tables = Tables.open(spark, root)
    assert contents(tables) == EXPECTED
    assert first.batches > 1
    assert first.total_samples == len(SAMPLES)
    assert ingest.run(spark, root, options(spool)).batches == 0
    # Another checkpoint begins at the oldest segment again.
    again = ingest.run(spark, root, {"path": str(spool.directory)}, checkpoint=str(tmp_path / "other"))
    assert (again.batches, again.total_samples) == (1, 0)
    assert contents(tables) == EXPECTED
    # What comes later goes on where it ended; consumed segments go when they are told to.
    before = len(reader.list_segments(spool.directory))
    spool.v1((UP, 11, 11.0))
    late = ingest.run(spark, root, options(spool, removeConsumedAfterSeconds="0"))
    assert (late.batches, late.total_samples) == (1, 1)
    assert len(reader.list_segments(spool.directory)) < before


def test_killed_at_every_step_of_a_batch_and_run_again(
    spark: SparkSession, spool: SpoolFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(spool)
    spark.dataSource.register(PrometheusSpool)
    read = spark.read.format("prometheus_spool").options(path=str(spool.directory), table="all").load()
    rows = spark.createDataFrame(read.collect(), read.schema)  # decoded once, not for each kill
    steps = Steps(monkeypatch)
    tables = Tables.open(spark, str(tmp_path / "whole"))
    steps.kill_after(None)
    write_batch(tables, "batch-s-0", rows, 0)
    total = steps.count
    assert contents(tables) == EXPECTED
    assert total > 8
    for killed_after in range(total):
        root = str(tmp_path / str(killed_after))
        tables = Tables.open(spark, root)
        steps.kill_after(killed_after)
        with pytest.raises(Killed):
            write_batch(tables, "batch-s-0", rows, 0)
        steps.kill_after(None)
        tables = Tables.open(spark, root)
        write_batch(tables, "batch-s-0", rows, 0)
        assert contents(tables) == EXPECTED, killed_after


def test_killed_between_the_tables_and_sparks_own_note(
    spark: SparkSession, spool: SpoolFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(spool)
    root = str(tmp_path / "tables")

    def killed(*_: Any) -> None:
        raise Killed("after the tables' commit")

    with monkeypatch.context() as patched:
        patched.setattr(commits, "delete_earlier_batches", killed)
        with pytest.raises(Killed):
            ingest.run(spark, root, options(spool))
    again = ingest.run(spark, root, options(spool))
    assert again.batches > 1
    assert contents(Tables.open(spark, root)) == EXPECTED


def test_rows_far_apart_are_compared_with_what_is_there(spark: SparkSession, spool: SpoolFiles, tmp_path: Path) -> None:
    """Late data for an hour that has rows of other batches: doubles are found by instant, not by arrival."""
    root = str(tmp_path / "tables")
    spool.v1((UP, 0, 1.0), (DOWN, HOUR_MS, 1.0))
    ingest.run(spark, root, options(spool))
    spool.v1((UP, HOUR_MS // 2, 2.0), (UP, 0, 9.0), (DOWN, 3 * HOUR_MS, 3.0))
    late = ingest.run(spark, root, options(spool))
    assert late.total_samples == 2
    assert contents(Tables.open(spark, root))[0] == [
        ("down", HOUR_MS, 1.0),
        ("down", 3 * HOUR_MS, 3.0),
        ("up", 0, 1.0),
        ("up", HOUR_MS // 2, 2.0),
    ]
