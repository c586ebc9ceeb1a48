"""The job `usage`: equal to the proxy's own totals; closed rows stay; late samples are kept out and told."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import rollup, usage
from analytics.tables.change import TableChange
from analytics.tables.schemas import SERIES
from analytics.tables.store import Tables
from analytics.transforms.usage import WHAT
from tests.analytics.counter_model import Sample
from tests.analytics.transforms_data import DAY_MS, HOUR_MS, MINUTE_MS, Raw, counter, ingest, moment, table_rows

BYTES, MESSAGES, SESSIONS = (f"pulsar_proxy_principal_{what}_total" for what in ("bytes", "messages", "sessions"))


class Killed(BaseException):
    pass


def add_series(spark: SparkSession, root: Path, *series: tuple[int, str, dict[str, str]]) -> None:
    rows = [(number, metric, labels, "counter", moment(DAY_MS)) for number, metric, labels in series]
    with Tables.open(spark, str(root)).change("series") as change:
        change.append(change.write("series", spark.createDataFrame(rows, SERIES)))


def labels(
    cluster: str, principal: str, direction: str | None = None, worker: str = "0", **others: str
) -> dict[str, str]:
    found = {"cluster": cluster, "principal": principal, "role": "forwarder", "worker": worker}
    found |= {"instance": "a:8080", "job": "proxy"} | others
    return found | ({"direction": direction} if direction else {})


CLOCKS = {"c": 900, "east": 901, "west": 902}
"""Counters that say up to which time a cluster's samples have come; they do not grow."""


def tick(spark: SparkSession, root: Path, hour: float, *clusters: str) -> None:
    """A sample of the clusters' instance at this hour after DAY: everything before has come."""
    at_ms = DAY_MS + int(hour * HOUR_MS)
    ingest(spark, root, [(CLOCKS[cluster], Sample(at_ms, 0.0)) for cluster in clusters or CLOCKS])


def run(spark: SparkSession, root: Path, hour: float | None = None, **options: Any) -> usage.UsageReport:
    """Roll up, and sum the usage; `hour`: samples have come up to this hour after DAY."""
    if hour is not None:
        tick(spark, root, hour)
    rollup.run(spark, str(root))
    return usage.run(spark, str(root), usage.UsageOptions(moment(DAY_MS + 1000 * HOUR_MS), **options))


@pytest.fixture(autouse=True)
def _clock(spark: SparkSession, tmp_path: Path) -> None:
    add_series(spark, tmp_path, *((number, SESSIONS, labels(name, "clock")) for name, number in CLOCKS.items()))


def totals(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, int]]:
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row["principal"] == "clock":
            continue
        sums = found.setdefault((row["cluster"], row["principal"]), dict.fromkeys(WHAT.values(), 0))
        for name in sums:
            sums[name] += row[name]
    return found


def started(rows: Raw) -> Raw:
    """With the start a second before the first sample: all that was counted is known."""
    start = rows[0][1].ts - 1000
    return [(series, Sample(sample.ts, sample.value, start)) for series, sample in rows]


def test_usage_equals_the_counters_over_workers_directions_and_clusters(spark: SparkSession, tmp_path: Path) -> None:
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("east", "alice", "to_broker")),
        (2, BYTES, labels("east", "alice", "to_broker", worker="1")),
        (3, BYTES, labels("east", "alice", "to_client")),
        (4, MESSAGES, labels("east", "alice", "to_broker")),
        (5, SESSIONS, labels("east", "alice")),
        (6, BYTES, labels("west", "alice", "to_broker")),
        (7, MESSAGES, labels("west", "other", "to_client")),
        (8, "pulsar_proxy_binary_bytes_total", labels("west", "alice", "to_client")),
    )
    rows = [sample for series in range(1, 9) for sample in started(counter(series, [1, 2, 26], by=float(series)))]
    restart = [(2, Sample(DAY_MS + 27 * HOUR_MS, 1000.0, DAY_MS + 27 * HOUR_MS - 500))]
    ingest(spark, tmp_path, rows + restart)
    run(spark, tmp_path, 30.5)
    tables = Tables.open(spark, str(tmp_path))
    found = table_rows(tables, "usage_hourly", "usage_daily")
    expected = {
        ("east", "alice"): {
            "bytes_in": 36 + 36 * 2 + 1000,
            "bytes_out": 36 * 3,
            "messages_in": 36 * 4,
            "messages_out": 0,
            "sessions": 36 * 5,
        },
        ("west", "alice"): {"bytes_in": 36 * 6, "bytes_out": 0, "messages_in": 0, "messages_out": 0, "sessions": 0},
        ("west", "other"): {"bytes_in": 0, "bytes_out": 0, "messages_in": 0, "messages_out": 36 * 7, "sessions": 0},
    }
    assert totals(found["usage_hourly"]) == expected == totals(found["usage_daily"])
    days = {(row["window"], row["closed"]) for row in found["usage_daily"]}
    assert days == {(DAY_MS, True), (DAY_MS + 24 * HOUR_MS, False)}
    hours = {(row["window"] - DAY_MS) // HOUR_MS: row["closed"] for row in found["usage_hourly"]}
    assert hours == {1: True, 2: True, 26: True, 27: True, 30: False}


def created(series: int, hours: list[int], *moments_ms: int) -> Raw:
    """The series that tells since when a counter counts; the moments one after the other, the last goes on."""
    rows = counter(series, hours)
    later = [moments_ms[-1]] * (len(rows) - len(moments_ms))
    return [(series, Sample(row.ts, ms / 1000)) for (_, row), ms in zip(rows, [*moments_ms, *later], strict=True)]


def test_what_was_used_before_the_first_scrape_is_billed_where_a_series_tells_since_when(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Remote write 1.0 has no start timestamps, but `…_created` is a series like any other."""
    mark = BYTES.removesuffix("_total") + "_created"
    names = [("alice", "0"), ("bob", "0"), ("alice", "1"), ("carol", "0"), ("dave", "0")]
    marked = {who: (index + 1, index + 11) for index, who in enumerate(names)}
    for (principal, worker), (number, mark_number) in marked.items():
        mine = labels("c", principal, "to_broker", worker)
        add_series(spark, tmp_path, (number, BYTES, mine), (mark_number, mark, mine))
    add_series(spark, tmp_path, (6, BYTES, labels("c", "erin", "to_broker")))
    first_scrape, week = DAY_MS + HOUR_MS + 13_000, 7 * 24 * HOUR_MS
    since = {
        1: [first_scrape - 10_000],
        2: [first_scrape + 90_000],  # a clock that is ahead
        3: [first_scrape - 10_000],
        4: [DAY_MS - week - 1],  # before the lookback: it may be billed already
        5: [first_scrape - 10_000],
    }
    for number, moments in since.items():
        rows = counter(number, [1, 2], start=1000.0 * number) + created(number + 10, [1, 2], *moments)
        ingest(spark, tmp_path, rows, {number + 10: number})
    ingest(spark, tmp_path, counter(6, [1, 2], start=6000.0))
    tables = Tables.open(spark, str(tmp_path))
    run(spark, tmp_path, 4.2)  # hour 1 is closed, hour 2 will be computed again

    def usage_of(name: str) -> list[int]:
        rows = table_rows(tables, "usage_hourly")["usage_hourly"]
        mine = sorted((row["window"], row["bytes_in"]) for row in rows if row["principal"] == name)
        return [used for _, used in mine]

    first, second = 12 * 7, 12 * 7
    expected = {
        "alice": [1000 + 3000 + 2 * first, 2 * second],
        "bob": [2000 + first, second],
        "carol": [first - 7, second],
        "dave": [5000 + first, second],
        "erin": [first - 7, second],  # nobody knows
    }
    assert {name: usage_of(name) for name in expected} == expected
    # The cluster was restarted, and the new counter is above the old one at its first scrape, in an open hour.
    restarted = DAY_MS + 3 * HOUR_MS + 1
    ingest(spark, tmp_path, counter(5, [3], start=900_000.0) + created(15, [3], restarted), {15: 5})
    ingest(spark, tmp_path, counter(1, [3], start=1000.0 + 24 * 7) + created(11, [3], *since[1]), {11: 1})
    run(spark, tmp_path, 5)
    assert usage_of("dave") == [5000 + first, second, 900_000 + first]
    assert usage_of("alice") == [1000 + 3000 + 2 * first, 2 * second, first]


def by_hour(tables: Tables, cluster: str = "c") -> dict[int, tuple[int, bool]]:
    rows = table_rows(tables, "usage_hourly")["usage_hourly"]
    mine = [row for row in rows if row["cluster"] == cluster and row["principal"] != "clock"]
    return {(row["window"] - DAY_MS) // HOUR_MS: (row["bytes_in"], row["closed"]) for row in mine}


def end(hour: int) -> datetime:
    return moment(DAY_MS + hour * HOUR_MS)


def test_late_samples_of_a_closed_hour_are_kept_out_and_the_total_stays_right(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("c", "alice", "to_broker")),
        (2, BYTES, labels("c", "alice", "to_broker", worker="1")),
    )
    at = [(1, Sample(DAY_MS + int(hour * HOUR_MS), value)) for hour, value in ((1.1, 10.0), (2.1, 30.0), (3.1, 60.0))]
    tables = ingest(spark, tmp_path, at)
    first = run(spark, tmp_path, 4.5)
    assert first.closed_until["c"] == end(2)
    assert by_hour(tables) == {1: (0, True), 2: (20, False), 3: (30, False)}
    new_worker = [
        (2, Sample(DAY_MS + int(hour * HOUR_MS), value, DAY_MS)) for hour, value in ((1.5, 7.0), (2.5, 100.0))
    ]
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + int(1.9 * HOUR_MS), 25.0)), *new_worker])
    second = run(spark, tmp_path)
    assert second.late_samples == {end(1): 2}
    assert "KEPT OUT: 2 samples for 1 closed hours, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (0, True), 2: (20 + 100, False), 3: (30, False)}
    rolled = {
        row["window"]: row["increase"] for row in table_rows(tables, "rollup_1h")["rollup_1h"] if row["series_id"] == 1
    }
    assert rolled[DAY_MS + HOUR_MS] == 15  # the rollup has it
    again = run(spark, tmp_path, reopen_from=moment(DAY_MS + HOUR_MS + 1))
    assert (again.late_samples, again.reopened) == ({}, (end(1),))  # late samples are told once
    assert "REOPENED: 1 closed hours were recomputed, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (15 + 7, True), 2: (5 + 93, False), 3: (30, False)}
    with tables.change("rollup") as change:
        change.remove(change.snapshot.files_of("rollup_1h"))
    with pytest.raises(usage.CannotReopen, match="1 hours from 2026-11-20 01:00"):
        run(spark, tmp_path, reopen_from=moment(DAY_MS))
    assert by_hour(tables)[1] == (15 + 7, True)


def test_an_hour_that_waits_for_its_rollup_does_not_close(spark: SparkSession, tmp_path: Path) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    ingest(spark, tmp_path, counter(1, [1, 2]))
    tick(spark, tmp_path, 8)
    rollup.run(spark, str(tmp_path))
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + 2 * HOUR_MS + 1, 1e6))])
    report = usage.run(spark, str(tmp_path), usage.UsageOptions(end(20)))
    assert report.closed_until["c"] == end(2)


def test_hours_close_by_the_samples_of_every_instance_and_never_by_the_clock(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A zone whose samples are late is waited for, one that is gone is not; a closed end never goes back."""
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("c", "alice", "to_broker", instance="near")),
        (2, BYTES, labels("c", "alice", "to_broker", instance="far")),
        (3, BYTES, labels("east", "alice", "to_broker", instance="far")),
    )
    tables = ingest(spark, tmp_path, counter(1, [1, 2, 3, 4, 5, 6]) + counter(2, [1]))
    report = run(spark, tmp_path)
    assert report.closed_until == {"c": end(-1)}  # the far one has sent until 1:55, so what it has until 23:55 is there
    ingest(spark, tmp_path, counter(2, [2, 3], start=84.0))
    assert run(spark, tmp_path).closed_until["c"] == end(1)
    assert by_hour(tables)[1] == (2 * 77, False)
    # The far one is silent for more than six hours of the others' time: it is gone.
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + 9 * HOUR_MS + 55 * MINUTE_MS, 1000.0))])
    assert run(spark, tmp_path).closed_until["c"] == end(1)
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + 9 * HOUR_MS + 56 * MINUTE_MS, 1000.0))])
    assert run(spark, tmp_path).closed_until["c"] == end(7)
    # It comes back late: nothing opens again. A sample of the future closes nothing.
    ingest(spark, tmp_path, [*counter(2, [4], start=252.0), (1, Sample(DAY_MS + 5000 * HOUR_MS, 2000.0))])
    late = run(spark, tmp_path)
    assert late.closed_until["c"] == end(7)
    assert late.late_samples == {end(4): 12}
    # Another cluster lives on for long: the first one is gone, and closes with it.
    ingest(spark, tmp_path, counter(3, [40]))
    assert run(spark, tmp_path).closed_until == {"c": end(38), "east": end(38)}
    assert run(spark, tmp_path).closed_until == {"c": end(38), "east": end(38)}


def test_a_new_cluster_is_billed_from_its_first_hour_however_old(spark: SparkSession, tmp_path: Path) -> None:
    """Brought in by a backfill, while others' hours are closed for days."""
    add_series(spark, tmp_path, (1, BYTES, labels("new", "alice", "to_broker")))
    run(spark, tmp_path, 200)
    tables = ingest(spark, tmp_path, counter(1, [1, 199]))
    assert run(spark, tmp_path).closed_until["new"] == end(197)
    assert by_hour(tables, "new") == {1: (77, True), 199: (77, False)}


@pytest.mark.parametrize(("minutes", "closed"), [(26 * 60, True), (26 * 60 - 1, False)])
def test_a_day_closes_with_its_last_hour(spark: SparkSession, tmp_path: Path, minutes: int, closed: bool) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    tables = ingest(spark, tmp_path, counter(1, [22, 23]))
    run(spark, tmp_path, minutes / 60)
    rows = table_rows(tables, "usage_daily")["usage_daily"]
    assert {row["closed"] for row in rows if row["window"] == DAY_MS} == {closed}
    assert by_hour(tables)[23][1] is closed
    assert by_hour(tables)[22][1]


def test_a_day_without_samples_in_its_last_hours_closes_as_well(spark: SparkSession, tmp_path: Path) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    tables = ingest(spark, tmp_path, counter(1, [1]))
    run(spark, tmp_path, 22)
    run(spark, tmp_path, 27)
    days = {(row["window"], row["closed"]) for row in table_rows(tables, "usage_daily")["usage_daily"]}
    assert (DAY_MS, True) in days
    assert (DAY_MS, False) not in days


@pytest.mark.parametrize(
    ("value", "why"), [(1e300, "too large"), (-5.0, "negative"), (70.5, "a fraction"), (float("inf"), "too large")]
)
def test_a_sample_that_is_no_count_is_set_aside_and_stops_nothing(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, why: str
) -> None:
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("c", "alice", "to_broker")),
        (2, BYTES, labels("c", "bob", "to_broker")),
    )
    rows = counter(1, [1, 2, 3]) + counter(2, [1, 2, 3])
    tables = ingest(spark, tmp_path, [*rows, (1, Sample(DAY_MS + 2 * HOUR_MS + 1, value))])
    ingest(spark, tmp_path, [(2, Sample(DAY_MS + 2 * HOUR_MS + 2, float("nan")))])
    report = run(spark, tmp_path)
    assert report.no_counts == {why: 1}
    assert f"SET ASIDE: 1 hours of a counter have a sample that is no count ({why})" in capsys.readouterr().err
    sums = totals(table_rows(tables, "usage_hourly")["usage_hourly"])
    assert sums["c", "bob"]["bytes_in"] == 35 * 7
    assert sums["c", "alice"]["bytes_in"] == 35 * 7  # of the hours before and after, by their own samples


def test_only_series_of_the_proxy_s_scrape_jobs_are_billed(spark: SparkSession, tmp_path: Path) -> None:
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("c", "alice", "to_broker", job="pulsar-proxy")),
        (2, BYTES, labels("c", "alice", "to_broker", job="anybody")),
        (3, BYTES, labels("c", "alice", "to_broker", job="")),
    )
    tables = ingest(spark, tmp_path, [row for number in (1, 2, 3) for row in started(counter(number, [1]))])
    run(spark, tmp_path)
    assert by_hour(tables) == {1: (84, False)}
    run(spark, tmp_path, jobs=("anybody", "pulsar-proxy"))
    assert by_hour(tables) == {1: (2 * 84, False)}


@pytest.mark.parametrize("table", ["usage_ledger", "usage"])
def test_killed_before_a_commit_and_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    tables = ingest(spark, tmp_path, counter(1, [1, 2]))
    commit = TableChange.commit

    def dies(self: TableChange) -> None:
        if self.snapshot.table == table:
            raise Killed
        commit(self)

    with monkeypatch.context() as patched:
        patched.setattr(TableChange, "commit", dies)
        with pytest.raises(Killed):
            run(spark, tmp_path, 4.5)
    run(spark, tmp_path)
    once = table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily")
    assert by_hour(tables) == {1: (77, True), 2: (84, False)}
    run(spark, tmp_path)
    assert table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily") == once


def test_without_any_usage_nothing_happens(spark: SparkSession, tmp_path: Path) -> None:
    report = run(spark, tmp_path)
    assert (report.hours, report.closed_until) == (0, {})
    assert not Tables.open(spark, str(tmp_path)).read("usage_hourly").count()
