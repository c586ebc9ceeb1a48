"""The job `rollup`: the tables equal the definition, whatever came when, and wherever it was killed."""

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import rollup
from analytics.tables import commits
from analytics.tables.filesystem import Filesystem
from analytics.tables.partitions import hour_of
from analytics.tables.store import Tables
from analytics.tables.transaction import Transaction
from analytics.transforms.counter_state import Sample
from tests.analytics.transforms_data import (
    DAY_MS,
    HOUR_MS,
    Raw,
    counter,
    expected,
    got,
    ingest,
    moment,
    table_rows,
)

LOOKBACK = 2
ROLLUPS = ("rollup_1m", "rollup_1h", "rollup_1d")


class Killed(BaseException):
    """As if by SIGKILL: nothing cleans up."""


def run(spark: SparkSession, tables: Tables, **options: int) -> rollup.RollupReport:
    return rollup.run(spark, tables.files.root, lookback_days=LOOKBACK, **options)


def noisy(seed: int) -> Raw:
    """Four series over three days: resets, gaps, duplicates, start timestamps, fractions."""
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
    return rows


def test_the_tables_equal_the_definition_however_often_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    rows = noisy(1)
    tables = ingest(spark, tmp_path, rows)
    report = run(spark, tables)
    assert got(tables) == expected(rows, LOOKBACK)
    assert (report.samples, report.mixed_hours, report.expired_hours) == (len(rows), set(), set())
    assert not tables.dirty_hours("rollup").marks
    assert set(tables.dirty_hours("usage").hours) == {hour_of(moment(sample.ts)) for _, sample in rows}
    before = table_rows(tables, *ROLLUPS)
    assert run(spark, tables).hours == 0
    with tables.transaction("again") as change:
        change.mark_dirty("rollup", [hour_of(moment(sample.ts)) for _, sample in rows])
    assert run(spark, tables).samples == len(rows)
    assert table_rows(tables, *ROLLUPS) == before


def test_samples_in_goes_and_small_changes_give_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late data, in hours long rolled up: growth over the gaps moves to where the definition has it."""
    rows = noisy(2)
    tables = ingest(spark, tmp_path, rows[::2])
    with monkeypatch.context() as patched:
        patched.setattr(rollup, "CHANGES_MAX", 1)
        first = run(spark, tables, hours_per_change=5)
    assert (first.hours, first.hours_left) == (5, 3)
    ingest(spark, tmp_path, rows[1::2])
    assert run(spark, tables).hours_left == 0
    assert got(tables) == expected(rows, LOOKBACK)


def test_late_samples_change_the_first_hour_after_them_and_no_other(spark: SparkSession, tmp_path: Path) -> None:
    on_time = counter(1, [1, 6, 7]) + counter(2, [1, 2, 6, 7])
    late = [(1, Sample(DAY_MS + 3 * HOUR_MS, 40.0))]
    tables = ingest(spark, tmp_path, on_time)
    run(spark, tables)
    before = {name: tables.files.names(f"rollup_1m/date=2026-11-20/hour={name}") for name in (1, 2, 6, 7)}
    ingest(spark, tmp_path, late)
    report = run(spark, tables)
    assert got(tables) == expected(on_time + late, LOOKBACK)
    after = {name: tables.files.names(f"rollup_1m/date=2026-11-20/hour={name}") for name in (1, 2, 6, 7)}
    assert {name for name in before if before[name] != after[name]} == {6}
    assert report.hours == 2
    assert set(tables.dirty_hours("usage").hours) >= {moment(DAY_MS + 3 * HOUR_MS), moment(DAY_MS + 6 * HOUR_MS)}


def test_growth_over_midnight_and_a_gap_within_the_lookback(spark: SparkSession, tmp_path: Path) -> None:
    first, second = counter(1, [1]), counter(1, [70], start=1000.0)
    far = counter(1, [150], start=5000.0)
    for rows in (first, second + far):
        tables = ingest(spark, tmp_path, rows)
        run(spark, tables)
    assert got(tables) == expected(first + second + far, LOOKBACK)
    entries = {row["window"]: row["entry"] for row in table_rows(tables, "rollup_1h")["rollup_1h"]}
    assert entries[DAY_MS + 70 * HOUR_MS] == 1007 - 84
    assert entries[DAY_MS + 150 * HOUR_MS] == 0  # longer than the lookback: nobody knows


def test_files_with_the_same_samples_are_computed_sample_by_sample(spark: SparkSession, tmp_path: Path) -> None:
    rows = counter(1, [1, 2], step_s=15) + counter(2, [4])
    tables = ingest(spark, tmp_path, rows, repeat=2)
    spark.conf.set("spark.sql.files.openCostInBytes", str(128 << 20))  # a task for each file
    try:
        report = run(spark, tables)
    finally:
        spark.conf.unset("spark.sql.files.openCostInBytes")
    assert got(tables) == expected(rows, LOOKBACK)
    assert report.mixed_hours == {moment(DAY_MS + hour * HOUR_MS) for hour in (1, 2)}


def _dies_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    original, calls = getattr(owner, name), iter(range(1000))

    def dying(*arguments: object, **options: object) -> object:
        if next(calls) == call:
            raise Killed
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, dying)


def _run_and_die(
    spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch, step: tuple[object, str, int]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "discard_staged", lambda self: None)
        _dies_at(patched, *step)
        with pytest.raises(Killed):
            run(spark, tables)


def test_killed_before_the_commit_nothing_has_happened_and_after_it_all_has(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = counter(1, [1, 2, 4]) + counter(2, [4])
    tables = ingest(spark, tmp_path, rows)
    run(spark, tables)
    before = got(tables)
    rows += counter(1, [3], start=500.0)
    ingest(spark, tmp_path, rows[-12:])
    dirty = tables.dirty_hours("rollup")
    steps: list[tuple[object, str, int]] = [
        (Transaction, "stage_rows", 0),
        (Transaction, "stage_rows", 2),
        (commits, "commit_change", 0),
    ]
    for step in steps:
        _run_and_die(spark, tables, monkeypatch, step)
        assert got(tables) == before
        assert tables.dirty_hours("rollup") == dirty
    for moves, minute in ((7, 0), (3, 7), (1, 11)):  # files in part; 1: the record alone is there
        _run_and_die(spark, tables, monkeypatch, (Filesystem, "move", moves))
        tables = Tables.open(spark, str(tmp_path))
        assert got(tables) == expected(rows, LOOKBACK)
        assert not tables.dirty_hours("rollup").marks
        assert set(tables.dirty_hours("usage").hours) >= {moment(DAY_MS + hour * HOUR_MS) for hour in (1, 2, 3, 4)}
        rows.append((2, Sample(DAY_MS + 5 * HOUR_MS + minute * 60_000, 500.0 + minute)))
        ingest(spark, tmp_path, rows[-1:])


def test_late_samples_for_expired_hours_change_nothing_and_are_told(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = counter(1, [1, 2, 30])
    tables = ingest(spark, tmp_path, rows)
    run(spark, tables)
    tables.files.delete("samples/date=2026-11-20")
    ingest(spark, tmp_path, [(1, Sample(DAY_MS + HOUR_MS, 1.0))])
    report = run(spark, tables)
    assert got(tables) == expected(rows, LOOKBACK)
    assert report.expired_hours == {moment(DAY_MS + HOUR_MS)}
    assert "LEFT AS THEY WERE: 1 hours from 2026-11-20 01:00" in capsys.readouterr().err
    assert not tables.dirty_hours("rollup").marks
