"""The job `usage`: equal to the proxy's own totals; closed rows stay; late samples are kept out and told.

Each run of a job costs seconds, whatever the data is: a run proves several rules, by a cluster or a series for each,
and tests that begin alike copy their tables.
"""

import io
import shutil
from contextlib import redirect_stderr
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

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


def tick(hour: float, *clusters: str) -> Raw:
    """A sample of the clusters' instance at this hour after DAY: everything before has come."""
    at_ms = DAY_MS + int(hour * HOUR_MS)
    return [(CLOCKS[cluster], Sample(at_ms, 0.0)) for cluster in clusters or CLOCKS]


def run(spark: SparkSession, root: Path, **options: Any) -> usage.UsageReport:
    """Roll up, and sum the usage."""
    rollup.run(spark, str(root))
    return usage.run(spark, str(root), usage.UsageOptions(moment(DAY_MS + 1000 * HOUR_MS), **options))


@pytest.fixture(scope="module")
def clocks(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables that have the clocks' series."""
    root = tmp_path_factory.mktemp("clocks")
    add_series(spark, root, *((number, SESSIONS, labels(name, "clock")) for name, number in CLOCKS.items()))
    return root


@pytest.fixture(scope="module")
def rolled(spark: SparkSession, clocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hours of a counter, rolled up; the first one can close."""
    root = shutil.copytree(clocks, tmp_path_factory.mktemp("rolled"), dirs_exist_ok=True)
    add_series(
        spark,
        root,
        (1, BYTES, labels("c", "alice", "to_broker")),
        (2, BYTES, labels("c", "alice", "to_broker", worker="1")),
    )
    ingest(spark, root, counter(1, [1, 2, 3]) + tick(4.5))
    rollup.run(spark, str(root))
    return root


@pytest.fixture(scope="module")
def summed(spark: SparkSession, rolled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and the first hour is closed."""
    root = shutil.copytree(rolled, tmp_path_factory.mktemp("summed"), dirs_exist_ok=True)
    report = run(spark, root)
    assert report.closed_until["c"] == end(2)
    assert by_hour(Tables.open(spark, str(root))) == {1: (77, True), 2: (84, False), 3: (84, False)}
    return root


@pytest.fixture
def tables(spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    """A test's own copy, at tmp_path: of `clocks`, or of what it names by `begins_with`."""
    shutil.copytree(request.getfixturevalue(getattr(request, "param", "clocks")), tmp_path, dirs_exist_ok=True)
    return Tables.open(spark, str(tmp_path))


def begins_with(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tables", [name], indirect=True)


def by_hour(tables: Tables, cluster: str = "c") -> dict[int, tuple[int, bool]]:
    rows = table_rows(tables, "usage_hourly")["usage_hourly"]
    mine = [row for row in rows if row["cluster"] == cluster and row["principal"] != "clock"]
    return {(row["window"] - DAY_MS) // HOUR_MS: (row["bytes_in"], row["closed"]) for row in mine}


def end(hour: int) -> datetime:
    return moment(DAY_MS + hour * HOUR_MS)


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


def test_usage_equals_the_counters_of_the_proxy_over_workers_directions_and_clusters(
    spark: SparkSession, tmp_path: Path, tables: Tables
) -> None:
    """Whoever may write to the receiver may send any series: those of other scrape jobs are not the proxy's."""
    add_series(
        spark,
        tmp_path,
        (1, BYTES, labels("east", "alice", "to_broker")),
        (2, BYTES, labels("east", "alice", "to_broker", worker="1")),
        (3, BYTES, labels("east", "alice", "to_client")),
        (4, MESSAGES, labels("east", "alice", "to_broker", job="pulsar-proxy")),
        (5, SESSIONS, labels("east", "alice")),
        (6, BYTES, labels("west", "alice", "to_broker")),
        (7, MESSAGES, labels("west", "other", "to_client")),
        (8, "pulsar_proxy_binary_bytes_total", labels("west", "alice", "to_client")),
        (9, BYTES, labels("east", "alice", "to_broker", job="anybody")),
        (10, BYTES, labels("east", "alice", "to_broker", job="")),
    )
    rows = [sample for series in range(1, 11) for sample in started(counter(series, [1, 2, 26], by=float(series)))]
    restart = [(2, Sample(DAY_MS + 27 * HOUR_MS, 1000.0, DAY_MS + 27 * HOUR_MS - 500))]
    ingest(spark, tmp_path, rows + restart + tick(30.5))
    run(spark, tmp_path)
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


def test_use_before_the_first_scrape_is_billed_where_a_series_tells_since_when(
    spark: SparkSession, tmp_path: Path, tables: Tables
) -> None:
    """Remote write 1.0 has no start timestamps, but `…_created` is a series like any other."""
    mark = BYTES.removesuffix("_total") + "_created"
    names = [("alice", "0"), ("bob", "0"), ("alice", "1"), ("carol", "0"), ("dave", "0")]
    marked = {who: (index + 1, index + 11) for index, who in enumerate(names)}
    series = [(6, BYTES, labels("c", "erin", "to_broker"))]
    for (principal, worker), (number, mark_number) in marked.items():
        mine = labels("c", principal, "to_broker", worker)
        series += [(number, BYTES, mine), (mark_number, mark, mine)]
    add_series(spark, tmp_path, *series)
    first_scrape, week = DAY_MS + HOUR_MS + 13_000, 7 * 24 * HOUR_MS
    since = {
        1: [first_scrape - 10_000],
        2: [first_scrape + 90_000],  # a clock that is ahead
        3: [first_scrape - 10_000],
        4: [DAY_MS - week - 1],  # before the lookback: it may be billed already
        5: [first_scrape - 10_000],
    }
    rows = counter(6, [1, 2], start=6000.0)
    for number, moments in since.items():
        rows += counter(number, [1, 2], start=1000.0 * number) + created(number + 10, [1, 2], *moments)
    counter_ids = {mark_number: number for number, mark_number in marked.values()}
    ingest(spark, tmp_path, rows + tick(4.2), counter_ids)
    run(spark, tmp_path)  # hour 1 is closed, hour 2 will be computed again

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
        "erin": [first - 7, second],  # unknown
    }
    assert {name: usage_of(name) for name in expected} == expected
    # The cluster was restarted, and the new counter is above the old one at its first scrape, in an open hour.
    restarted = DAY_MS + 3 * HOUR_MS + 1
    rows = counter(5, [3], start=900_000.0) + created(15, [3], restarted)
    rows += counter(1, [3], start=1000.0 + 24 * 7) + created(11, [3], *since[1])
    ingest(spark, tmp_path, rows + tick(5), counter_ids)
    run(spark, tmp_path)
    assert usage_of("dave") == [5000 + first, second, 900_000 + first]
    assert usage_of("alice") == [1000 + 3000 + 2 * first, 2 * second, first]


@begins_with("summed")
def test_late_samples_of_a_closed_hour_are_kept_out_and_the_total_stays_right(
    spark: SparkSession, tmp_path: Path, tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    late = (1, Sample(DAY_MS + HOUR_MS + 59 * MINUTE_MS, 84.0 + 3))
    new_worker = [
        (2, Sample(DAY_MS + int(hour * HOUR_MS), value, DAY_MS)) for hour, value in ((1.5, 7.0), (2.5, 100.0))
    ]
    ingest(spark, tmp_path, [late, *new_worker])
    second = run(spark, tmp_path)
    assert second.late_samples == {end(1): 2}
    assert "KEPT OUT: 2 samples for 1 closed hours, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (77, True), 2: (84 + 100, False), 3: (84, False)}
    rolled = {
        row["window"]: row["increase"] for row in table_rows(tables, "rollup_1h")["rollup_1h"] if row["series_id"] == 1
    }
    assert rolled[DAY_MS + HOUR_MS] == 77 + 3  # the rollup has it
    again = run(spark, tmp_path, reopen_from=moment(DAY_MS + HOUR_MS + 1))
    assert (again.late_samples, again.reopened) == ({}, (end(1),))  # late samples are told once
    assert "REOPENED: 1 closed hours were recomputed, from 2026-11-20 01:00" in capsys.readouterr().err
    assert by_hour(tables) == {1: (77 + 3 + 7, True), 2: (84 - 3 + 93, False), 3: (84, False)}
    with tables.change("rollup") as change:
        change.remove(change.snapshot.files_of("rollup_1h"))
    with pytest.raises(usage.CannotReopen, match="1 hours from 2026-11-20 01:00"):
        run(spark, tmp_path, reopen_from=moment(DAY_MS))
    assert by_hour(tables)[1] == (77 + 3 + 7, True)


@begins_with("rolled")
def test_an_hour_that_waits_for_its_rollup_does_not_close(spark: SparkSession, tmp_path: Path, tables: Tables) -> None:
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + HOUR_MS + 1, 1e6))])
    report = usage.run(spark, str(tmp_path), usage.UsageOptions(end(20)))
    assert report.closed_until["c"] == end(1)
    assert by_hour(tables)[1] == (77, False)


@begins_with("rolled")
def test_an_hour_that_a_rollup_changes_after_its_rows_were_read_does_not_close(
    spark: SparkSession, tmp_path: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + HOUR_MS + 1, 1e6))])
    open_rows = usage._open_rows

    def read_then_roll_up(*args: Any) -> DataFrame:
        rows = open_rows(*args)
        rollup.run(spark, str(tmp_path))
        return rows

    monkeypatch.setattr(usage, "_open_rows", read_then_roll_up)
    assert usage.run(spark, str(tmp_path), usage.UsageOptions(end(20))).closed_until["c"] == end(1)
    assert by_hour(tables)[1] == (77, False)


def test_hours_close_by_the_samples_of_every_instance_and_never_by_the_clock(
    spark: SparkSession, tmp_path: Path, tables: Tables
) -> None:
    """A zone whose samples are late is waited for, one that is gone is not; a closed end never goes back."""
    clusters = ("late", "silent", "gone")
    near, far = ({name: number + index for index, name in enumerate(clusters)} for number in (1, 11))
    add_series(
        spark,
        tmp_path,
        *((near[name], BYTES, labels(name, "alice", "to_broker", instance="near")) for name in clusters),
        *((far[name], BYTES, labels(name, "alice", "to_broker", instance="far")) for name in clusters),
        (4, BYTES, labels("alone", "alice", "to_broker", instance="far")),
    )

    def at(series: int, ms: int, value: float) -> tuple[int, Sample]:
        return series, Sample(DAY_MS + ms, value)

    last_ms = 3 * HOUR_MS + 55 * MINUTE_MS
    rows = counter(near["late"], [1]) + counter(far["late"], [1]) + [at(near["late"], 6 * HOUR_MS, 100.0)]
    rows += [at(near["gone"], 6 * HOUR_MS, 1.0)]
    for name, silent_ms in (("silent", 6 * HOUR_MS), ("gone", 6 * HOUR_MS + 1)):
        rows += [at(far[name], last_ms, 1.0), at(near[name], last_ms + silent_ms, 1.0)]
    ingest(spark, tmp_path, rows)
    ends = {
        "late": end(-1),  # the far one has sent until 1:55, so what it has until 23:55 is there
        "silent": end(1),  # for six hours of the others' time
        "gone": end(7),  # for longer
    }
    assert run(spark, tmp_path).closed_until == ends
    # The one that was gone comes back late: nothing opens again. A sample of the future closes nothing.
    ingest(
        spark,
        tmp_path,
        [
            at(far["late"], last_ms, 100.0),
            *counter(far["gone"], [4], start=252.0),
            at(far["gone"], 8 * HOUR_MS, 400.0),
            at(near["gone"], 5000 * HOUR_MS, 2000.0),
        ],
    )
    report = run(spark, tmp_path)
    assert report.closed_until == ends | {"late": end(1)}
    assert by_hour(tables, "late")[1] == (2 * 77, False)
    assert report.late_samples == {end(4): 12}
    # Another cluster lives on for long: the others are gone, and close with it.
    ingest(spark, tmp_path, counter(4, [40]))
    ends = dict.fromkeys([*clusters, "alone"], end(38))
    assert run(spark, tmp_path).closed_until == ends
    once = table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily")
    assert run(spark, tmp_path).closed_until == ends
    assert table_rows(tables, "usage_ledger", "usage_hourly", "usage_daily") == once


@begins_with("summed")
def test_a_new_cluster_is_billed_from_its_first_hour_however_old(
    spark: SparkSession, tmp_path: Path, tables: Tables
) -> None:
    """Brought in by a backfill, while others' hours are closed for days."""
    add_series(spark, tmp_path, (3, BYTES, labels("new", "alice", "to_broker")))
    ingest(spark, tmp_path, counter(3, [-200, 4]))
    assert run(spark, tmp_path).closed_until["new"] == end(2)
    assert by_hour(tables, "new") == {-200: (77, True), 4: (77, False)}


def test_a_day_closes_with_its_last_hour_also_one_without_samples(
    spark: SparkSession, tmp_path: Path, tables: Tables
) -> None:
    numbers = {"c": 1, "east": 2, "west": 3}
    add_series(
        spark, tmp_path, *((number, BYTES, labels(name, "alice", "to_broker")) for name, number in numbers.items())
    )

    def days(cluster: str) -> dict[int, bool]:
        rows = table_rows(tables, "usage_daily")["usage_daily"]
        mine = [row for row in rows if row["cluster"] == cluster and row["principal"] == "alice"]
        return {(row["window"] - DAY_MS) // (24 * HOUR_MS): row["closed"] for row in mine}

    ingest(spark, tmp_path, counter(numbers["west"], [-23]) + tick(1.9))  # closed until 23:00 of the day before
    run(spark, tmp_path)
    assert days("west") == {-1: False}
    rows = counter(numbers["c"], [22, 23]) + counter(numbers["east"], [22, 23])
    ingest(spark, tmp_path, rows + tick(26, "c", "west") + tick(26 - 1 / 60, "east"))
    run(spark, tmp_path)
    assert days("west") == {-1: True}
    assert (days("c"), days("east")) == ({0: True}, {0: False})
    assert by_hour(tables, "c") == {22: (77, True), 23: (84, True)}
    assert by_hour(tables, "east") == {22: (77, True), 23: (84, False)}


NO_COUNTS = {"huge": 1e300, "infinite": float("inf"), "negative": -5.0, "fraction": 70.5}


class Run(NamedTuple):
    tables: Tables
    report: usage.UsageReport
    told: str


@pytest.fixture(scope="module")
def run_for_jobs(spark: SparkSession, clocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One with the option --job, of alice's counters in four scrape jobs, and of samples that are no counts."""
    root = shutil.copytree(clocks, tmp_path_factory.mktemp("jobs"), dirs_exist_ok=True)
    by_job = enumerate(("pulsar-proxy", "anybody", "", "proxy"), start=1)
    add_series(spark, root, *((number, BYTES, labels("c", "alice", "to_broker", job=job)) for number, job in by_job))
    rows = [row for number in (1, 2, 3, 4) for row in started(counter(number, [1], by=10.0**number))]
    # Prometheus' mark of a series that ended is none of them.
    values = {"ended": float("nan")} | NO_COUNTS
    numbers = {name: number for number, name in enumerate(values, start=5)}
    add_series(
        spark,
        root,
        *((number, BYTES, labels("counts", name, "to_broker", job="pulsar-proxy")) for name, number in numbers.items()),
    )
    rows += [row for number in numbers.values() for row in counter(number, [1, 2, 3])]
    rows += [(numbers[name], Sample(DAY_MS + 2 * HOUR_MS + 1, value)) for name, value in values.items()]
    ingest(spark, root, rows)
    with redirect_stderr(io.StringIO()) as told:
        report = run(spark, root, jobs=("anybody", "pulsar-proxy"))
    return Run(Tables.open(spark, str(root)), report, told.getvalue())


def test_a_sample_that_is_no_count_is_set_aside_and_stops_nothing(run_for_jobs: Run) -> None:
    no_counts = run_for_jobs.report.no_counts
    assert no_counts == {"too large": 2, "negative": 1, "a fraction": 1}
    for why, count in no_counts.items():
        assert f"SET ASIDE: {count} hours of a counter have a sample that is no count ({why})" in run_for_jobs.told
    # Those that are set aside are billed by the samples of the hours before and after.
    sums = totals(table_rows(run_for_jobs.tables, "usage_hourly")["usage_hourly"])
    names = ("ended", *NO_COUNTS)
    assert {name: sums["counts", name]["bytes_in"] for name in names} == dict.fromkeys(names, 35 * 7)


def test_scrape_jobs_named_by_the_option_are_billed_and_no_others(run_for_jobs: Run) -> None:
    assert by_hour(run_for_jobs.tables) == {1: (12 * (10 + 100), False)}


@begins_with("rolled")
def test_killed_before_each_commit_and_run_again_it_sums_as_without(
    spark: SparkSession, tmp_path: Path, tables: Tables, summed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = TableChange.commit
    views = ("usage_ledger", "usage_hourly", "usage_daily")

    def killed_before(table: str) -> None:
        def dies(self: TableChange) -> None:
            if self.snapshot.table == table:
                raise Killed
            commit(self)

        with monkeypatch.context() as patched:
            patched.setattr(TableChange, "commit", dies)
            with pytest.raises(Killed):
                run(spark, tmp_path)

    def versions() -> list[int]:
        return [tables.snapshot(table).version for table in ("rollup", "usage_ledger", "usage")]

    before = versions()
    killed_before("usage_ledger")
    assert versions() == before  # so the next run begins as the first one did
    killed_before("usage")
    rolled, ledger, sums = before
    assert versions() == [rolled, ledger + 1, sums]
    run(spark, tmp_path)
    assert by_hour(tables) == {1: (77, True), 2: (84, False), 3: (84, False)}
    assert table_rows(tables, *views) == table_rows(Tables.open(spark, str(summed)), *views)


@begins_with("summed")
def test_what_the_last_run_summed_is_not_summed_again(spark: SparkSession, tmp_path: Path, tables: Tables) -> None:
    def changes(**options: Any) -> bool:
        before = [tables.snapshot(table).version for table in ("usage_ledger", "usage")]
        usage.run(spark, str(tmp_path), usage.UsageOptions(**{"now": end(1000)} | options))
        return before != [tables.snapshot(table).version for table in ("usage_ledger", "usage")]

    assert not changes()
    # The sample of hour 4.5 is of the future, and counts when its time has come.
    assert changes(jobs=("proxy",), now=end(4))
    assert changes(jobs=("proxy",))
    assert not changes(jobs=("proxy",))
    assert changes(jobs=("proxy",), reopen_from=end(1))


def test_without_any_usage_nothing_happens(spark: SparkSession, tmp_path: Path, tables: Tables) -> None:
    report = run(spark, tmp_path)
    assert (report.hours, report.closed_until) == (0, {})
    assert not tables.read("usage_hourly").count()
