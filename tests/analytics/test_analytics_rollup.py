"""The job `rollup`: the tables equal the model, whatever came when, and wherever it was killed."""

import random
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import rollup
from analytics.tables.change import TableChange
from analytics.tables.partitions import hour_of
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample
from tests.analytics.transforms_data import (
    DAY,
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    WIDTHS_MS,
    Raw,
    counter,
    expected,
    got,
    ingest,
    moment,
    table_rows,
)

LOOKBACK = 2


class Killed(BaseException):
    """As if by SIGKILL: nothing cleans up."""


def run(spark: SparkSession, tables: Tables, **options: int) -> rollup.RollupReport:
    return rollup.run(spark, tables.location.spark_url, lookback_days=LOOKBACK, **options)


def expire(tables: Tables, view: str, days: int = 1) -> None:
    """Take the files of the first days out of a table."""
    hours = [DAY + timedelta(hours=hour) for hour in range(24 * days)]
    table = {"samples": "samples"}.get(view, "rollup")
    with tables.change(table) as change:
        change.remove(change.snapshot.files_of(view, hours))


def noisy(seed: int) -> Raw:
    """Four series over three days: resets, gaps, duplicates, start timestamps, fractions, replicas."""
    chance = random.Random(seed)
    rows: Raw = []
    for series in (-(2**63), -5, 9, 2**63 - 1):
        value, start = float(chance.randrange(1000)), 0
        hours = chance.choices((3, 4, 5, 23, 24, 26, 60, 71), k=60)
        for ts in sorted({DAY_MS + hour * HOUR_MS + chance.randrange(480) * 7_500 for hour in hours}):
            value += chance.choice([0.0, 3.0, 0.1, 1e6]) if series > 0 else float(chance.randrange(1 << 40))
            if chance.random() < 0.1:
                value, start = value * chance.random() // 1, chance.choice([0, ts - 3000])
            rows.append((series, Sample(ts, value, start)))
            if series == 9:
                rows.append((series, Sample(ts + chance.randrange(90_000), value, start, replica=4)))
    return rows


def test_the_tables_equal_the_model_however_often_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    rows = [row for row in noisy(1) if row[1].replica == 0]
    tables = ingest(spark, tmp_path, rows)
    report = run(spark, tables)
    assert got(tables) == expected(rows, LOOKBACK)
    assert (report.samples, report.kept_rows, report.hours_left) == (len(rows), 0, 0)
    version = tables.snapshot("rollup").version
    assert run(spark, tables).hours == 0
    assert tables.snapshot("rollup").version == version
    ingest(spark, tmp_path, rows)  # a resend that nothing left out
    assert run(spark, tables).samples == len(rows)
    assert got(tables) == expected(rows, LOOKBACK)


def test_samples_in_goes_and_small_changes_give_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late data, in hours long rolled up: growth over the gaps moves to where the model has it."""
    rows = noisy(2)
    tables = ingest(spark, tmp_path, rows[::2])
    with monkeypatch.context() as patched:
        patched.setattr(rollup, "CHANGES_MAX", 1)
        first = run(spark, tables, hours_per_change=5)
    assert (first.hours, first.hours_left) == (5, 4)
    ingest(spark, tmp_path, rows[1::2])
    assert run(spark, tables, hours_per_change=5).hours_left == 0
    assert got(tables) == expected(rows, LOOKBACK)


def test_late_samples_change_the_first_hour_after_them_and_no_other(spark: SparkSession, tmp_path: Path) -> None:
    on_time = counter(1, [1, 6, 7]) + counter(2, [1, 2, 6, 7])
    late = [(1, Sample(DAY_MS + 3 * HOUR_MS, 40.0))]
    tables = ingest(spark, tmp_path, on_time)
    run(spark, tables)
    before = {file.path: file.partition.hour for file in tables.snapshot("rollup").files_of("rollup_1m")}
    ingest(spark, tmp_path, late)
    report = run(spark, tables)
    assert got(tables) == expected(on_time + late, LOOKBACK)
    after = {file.path: file.partition.hour for file in tables.snapshot("rollup").files_of("rollup_1m")}
    assert {hour for path, hour in after.items() if path not in before} == {3, 6}
    assert {hour for path, hour in before.items() if path not in after} == {6}
    assert report.hours == 2


def test_growth_over_midnight_and_a_gap_within_the_lookback(spark: SparkSession, tmp_path: Path) -> None:
    first, second = counter(1, [1]), counter(1, [70], start=1000.0)
    far = counter(1, [150], start=5000.0)
    for rows in (first, second + far):
        tables = ingest(spark, tmp_path, rows)
        run(spark, tables)
    assert got(tables) == expected(first + second + far, LOOKBACK)
    entries = {row["window"]: row["entry"] for row in table_rows(tables, "rollup_1h")["rollup_1h"]}
    assert entries[DAY_MS + 70 * HOUR_MS] == 1007 - 84
    assert entries[DAY_MS + 150 * HOUR_MS] == 0  # longer than the lookback: unknown


def test_a_gauge_with_creation_times_tells_its_counter_s_starts(spark: SparkSession, tmp_path: Path) -> None:
    """Its own rows are rolled up as well."""
    rows: Raw = [(1, Sample(DAY_MS + minute * MINUTE_MS, value)) for minute, value in ((1, 100.0), (2, 199.0))]
    created = [DAY_MS / 1000, (DAY_MS + 90_000) / 1000]
    rows += [(2, Sample(DAY_MS + minute * MINUTE_MS, when)) for minute, when in enumerate(created, 1)]
    tables = ingest(spark, tmp_path, rows, counter_ids={2: 1})
    run(spark, tables)
    found = {row["series_id"]: row for row in table_rows(tables, "rollup_1h")["rollup_1h"]}
    assert (found[1]["increase"], found[1]["resets"]) == (299, 1)
    assert (found[2]["n"], found[2]["last_v"]) == (2, created[1])


def test_killed_at_any_step_before_the_commit_nothing_has_happened(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = counter(1, [1, 2, 4]) + counter(2, [4])
    tables = ingest(spark, tmp_path, rows)
    run(spark, tables)
    before = got(tables)
    rows += counter(1, [3], start=500.0)
    ingest(spark, tmp_path, rows[-12:])
    for step in ("write_widths", "write", "commit"):
        with monkeypatch.context() as patched:
            patched.setattr(TableChange, "discard", lambda self: None)
            patched.setattr(TableChange, step, _killed)
            with pytest.raises(Killed):
                run(spark, tables)
        assert got(tables) == before, step
        assert rollup.waiting_hours(tables) == [moment(DAY_MS + 3 * HOUR_MS)], step
    run(spark, tables)
    assert got(tables) == expected(rows, LOOKBACK)
    assert rollup.waiting_hours(tables) == []


def _killed(*_arguments: object) -> None:
    raise Killed


def test_a_kill_within_a_backlog_costs_one_block(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came meanwhile for hours that are done is rolled up with the last block."""
    rows = counter(1, range(8))
    tables = ingest(spark, tmp_path, rows)
    with monkeypatch.context() as patched:
        patched.setattr(rollup, "CHANGES_MAX", 1)
        run(spark, tables, hours_per_change=3)
    late = [(1, Sample(DAY_MS + HOUR_MS + 14_000, 92.0))]
    ingest(spark, tmp_path, late)
    assert rollup.waiting_hours(tables) == [moment(DAY_MS + hour * HOUR_MS) for hour in (1, 3, 4, 5, 6, 7)]
    assert run(spark, tables, hours_per_change=3).hours == 7  # with the hour after the late one
    assert got(tables) == expected(rows + late, LOOKBACK)


def test_a_second_rollup_at_the_same_time_is_refused_and_computed_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, late = counter(1, [1, 2]), counter(1, [3], start=500.0)
    tables = ingest(spark, tmp_path, rows)
    commit, others = TableChange.commit, [1]

    def commit_behind_another(self: TableChange) -> None:
        if self.snapshot.table == "rollup" and others:
            others.pop()
            ingest(spark, tmp_path, late)
            run(spark, tables)
        commit(self)

    monkeypatch.setattr(TableChange, "commit", commit_behind_another)
    run(spark, tables)
    assert not others
    assert got(tables) == expected(rows + late, LOOKBACK)


TEN_SERIES = [row for series in range(10) for row in counter(series, [1, 23, 24])]
TWO_DAYS = counter(1, [1, 30])


@pytest.fixture(scope="module")
def expired(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten series, rolled up, whose samples of the first day have expired: tests begin with a copy."""
    root = tmp_path_factory.mktemp("expired")
    tables = ingest(spark, root, TEN_SERIES)
    run(spark, tables)
    expire(tables, "samples")
    return root


@pytest.fixture(scope="module")
def two_days(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series of two days, rolled up: tests begin with a copy."""
    root = tmp_path_factory.mktemp("two_days")
    run(spark, ingest(spark, root, TWO_DAYS))
    return root


def copied(spark: SparkSession, root: Path, to: Path) -> Tables:
    return Tables.open(spark, str(shutil.copytree(root, to, dirs_exist_ok=True)))


@pytest.mark.parametrize("late_hour", [1, 23])
def test_hours_of_which_samples_are_gone_are_not_recomputed(
    spark: SparkSession, expired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], late_hour: int
) -> None:
    """Late samples of another series, and of one of them, for an hour whose samples have expired: ten series stay."""
    tables = copied(spark, expired, tmp_path)
    other = [(99, Sample(DAY_MS + late_hour * HOUR_MS + step, 5.0 + step)) for step in range(30)]
    ingest(spark, tmp_path, [*other, (3, Sample(DAY_MS + late_hour * HOUR_MS, 1.0)), *counter(3, [24])[:1]])
    report = run(spark, tables)
    assert got(tables) == expected(TEN_SERIES + other, LOOKBACK)
    assert report.kept_rows == 10
    assert "LEFT AS THEY WERE: 10 rows" in capsys.readouterr().err
    assert rollup.waiting_hours(tables) == []


def test_days_whose_hours_are_gone_stay(spark: SparkSession, two_days: Path, tmp_path: Path) -> None:
    tables = copied(spark, two_days, tmp_path)
    for view in ("samples", "rollup_1m", "rollup_1h"):
        expire(tables, view)
    late = [(2, Sample(DAY_MS + HOUR_MS, 1.0))]
    ingest(spark, tmp_path, late)
    run(spark, tables)
    assert got(tables)["rollup_1d"] == expected(TWO_DAYS + late, LOOKBACK)["rollup_1d"]


def test_hours_of_views_are_found(spark: SparkSession, two_days: Path) -> None:
    tables = Tables.open(spark, str(two_days))
    hours = sorted({hour_of(moment(sample.ts)) for _, sample in TWO_DAYS})
    end = DAY + timedelta(days=9)
    assert tables.hours("rollup_1m", DAY, end) == hours
    assert tables.hours("rollup_1h", DAY, end) == [DAY, DAY + timedelta(days=1)]
    assert {view: len(rows) for view, rows in table_rows(tables, *WIDTHS_MS).items()} == {
        "rollup_1m": 24,
        "rollup_1h": 2,
        "rollup_1d": 2,
    }
