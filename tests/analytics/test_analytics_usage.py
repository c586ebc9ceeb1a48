"""The job `usage`: equal to the proxy's own totals; closed rows stay; late samples are kept out and told."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import rollup, usage
from analytics.tables import commits
from analytics.tables.schemas import SERIES
from analytics.tables.store import Tables
from analytics.tables.transaction import Transaction
from analytics.transforms.counter_state import Sample
from analytics.transforms.usage import WHAT
from tests.analytics.transforms_data import DAY_MS, HOUR_MS, Raw, counter, ingest, moment, table_rows

BYTES, MESSAGES, SESSIONS = (f"pulsar_proxy_principal_{what}_total" for what in ("bytes", "messages", "sessions"))


class Killed(BaseException):
    pass


def add_series(spark: SparkSession, root: Path, *series: tuple[int, str, dict[str, str]]) -> None:
    rows = [(number, metric, labels, "counter", moment(DAY_MS)) for number, metric, labels in series]
    with Tables.open(spark, str(root)).transaction("series") as change:
        change.append_rows("series", spark.createDataFrame(rows, SERIES))


def labels(cluster: str, principal: str, direction: str | None = None, worker: str = "0") -> dict[str, str]:
    found = {"cluster": cluster, "principal": principal, "role": "forwarder", "worker": worker, "instance": "a:8080"}
    return found | ({"direction": direction} if direction else {})


def run(spark: SparkSession, root: Path, hour: float) -> usage.UsageReport:
    """Roll up, and sum the usage as of so many hours after DAY."""
    rollup.run(spark, str(root))
    return usage.run(spark, str(root), now=moment(DAY_MS) + timedelta(hours=hour))


def totals(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, int]]:
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
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
    run(spark, tmp_path, 30)
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
    assert hours == {1: True, 2: True, 26: True, 27: True}


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
        ingest(spark, tmp_path, counter(number, [1, 2], start=1000.0 * number) + created(number + 10, [1, 2], *moments))
    ingest(spark, tmp_path, counter(6, [1, 2], start=6000.0))
    tables = Tables.open(spark, str(tmp_path))
    run(spark, tmp_path, 4)  # hour 1 is closed, hour 2 will be computed again

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
    ingest(spark, tmp_path, counter(5, [3], start=900_000.0) + created(15, [3], restarted))
    ingest(spark, tmp_path, counter(1, [3], start=1000.0 + 24 * 7) + created(11, [3], *since[1]))
    run(spark, tmp_path, 5)
    assert usage_of("dave") == [5000 + first, second, 900_000 + first]
    assert usage_of("alice") == [1000 + 3000 + 2 * first, 2 * second, first]


def by_hour(tables: Tables) -> dict[int, tuple[int, bool]]:
    rows = table_rows(tables, "usage_hourly")["usage_hourly"]
    return {(row["window"] - DAY_MS) // HOUR_MS: (row["bytes_in"], row["closed"]) for row in rows}


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
    first = run(spark, tmp_path, 4)
    assert first.closed_until == moment(DAY_MS + 2 * HOUR_MS)
    assert by_hour(tables) == {1: (0, True), 2: (20, False), 3: (30, False)}
    new_worker = [
        (2, Sample(DAY_MS + int(hour * HOUR_MS), value, DAY_MS)) for hour, value in ((1.5, 7.0), (2.5, 100.0))
    ]
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + int(1.9 * HOUR_MS), 25.0)), *new_worker])
    second = run(spark, tmp_path, 4.9)
    assert second.late_samples == {moment(DAY_MS + HOUR_MS): 2}
    assert "KEPT OUT: 2 samples for 1 closed hours, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (0, True), 2: (20 + 100, False), 3: (30, False)}
    rolled = {
        row["window"]: row["increase"] for row in table_rows(tables, "rollup_1h")["rollup_1h"] if row["series_id"] == 1
    }
    assert rolled[DAY_MS + HOUR_MS] == 15  # the rollup has it
    again = usage.run(spark, str(tmp_path), now=moment(DAY_MS + 4 * HOUR_MS), reopen_from=moment(DAY_MS + HOUR_MS + 1))
    assert (again.late_samples, again.reopened) == ({}, (moment(DAY_MS + HOUR_MS),))  # late samples are told once
    assert "REOPENED: 1 closed hours were recomputed, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (15 + 7, True), 2: (5 + 93, False), 3: (30, False)}
    tables.files.delete("rollup_1h")
    with pytest.raises(usage.CannotReopen, match="1 hours from 2026-11-20 01:00"):
        usage.run(spark, str(tmp_path), now=moment(DAY_MS + 9 * HOUR_MS), reopen_from=moment(DAY_MS))
    assert by_hour(tables)[1] == (15 + 7, True)


def test_an_hour_that_waits_for_its_rollup_does_not_close(spark: SparkSession, tmp_path: Path) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    ingest(spark, tmp_path, counter(1, [1, 2]))
    rollup.run(spark, str(tmp_path))
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + 2 * HOUR_MS + 1, 1e6))])
    report = usage.run(spark, str(tmp_path), now=moment(DAY_MS + 20 * HOUR_MS))
    assert report.closed_until == moment(DAY_MS + 2 * HOUR_MS)


def test_killed_before_or_after_the_commit_and_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_series(spark, tmp_path, (1, BYTES, labels("c", "alice", "to_broker")))
    tables = ingest(spark, tmp_path, counter(1, [1, 2]))

    def dies(*arguments: object) -> None:
        raise Killed

    rollup.run(spark, str(tmp_path))
    for owner, name in ((Transaction, "commit_change"), (commits, "apply_change")):
        with monkeypatch.context() as patched:
            patched.setattr(Transaction, "discard_staged", lambda self: None)
            patched.setattr(owner, name, dies)
            with pytest.raises(Killed):
                usage.run(spark, str(tmp_path), now=moment(DAY_MS + 4 * HOUR_MS))
    run(spark, tmp_path, 4)
    once = table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily")
    assert by_hour(tables) == {1: (77, True), 2: (84, False)}
    run(spark, tmp_path, 4)
    assert table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily") == once


def test_without_any_usage_nothing_happens(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    report = usage.run(spark, str(tmp_path), now=datetime(2026, 11, 21, 12, 30, tzinfo=UTC))
    assert (report.hours, report.closed_until) == (0, datetime(2026, 11, 21, 10, tzinfo=UTC))
    assert not tables.read("usage_hourly").count()
