"""Compaction changes the files and nothing else."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import compact
from analytics.tables.commits import ChangedMeanwhile
from analytics.tables.store import Tables
from tests.analytics.faulty_files import Killed, Steps
from tests.analytics.test_analytics_tables_commits import HOUR_8, content, samples

NOW = datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
ROWS = [(1, 8, 1.0), (1, 8, 2.0), (1, 10, 5.0), (2, 8, 3.0), (2, 10, 6.0)]


def small_files(spark: SparkSession, root: Path) -> Tables:
    tables = Tables.open(spark, str(root))
    for row in ROWS:
        with tables.transaction("batch") as change:
            change.append_rows("samples", samples(spark, row))
    return tables


def files(tables: Tables, hour: int) -> int:
    return len(tables.visible_files("samples", f"date=2026-11-21/hour={hour}"))


def test_closed_hours_become_one_file_with_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    tables = small_files(spark, tmp_path)
    assert (files(tables, 8), files(tables, 10)) == (3, 2)
    assert compact.run(spark, str(tmp_path), now=NOW) == 1
    assert (files(tables, 8), files(tables, 10)) == (1, 2)  # hour 10 ended half an hour ago
    assert content(tables) == ROWS
    assert spark.read.parquet(str(tmp_path / "samples")).count() == len(ROWS)
    assert compact.run(spark, str(tmp_path), now=NOW) == 0
    assert compact.run(spark, str(tmp_path), now=NOW, closed_after_hours=0) == 1
    assert content(tables) == ROWS


def test_killed_at_every_step_and_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    tables = small_files(spark, tmp_path)
    killed_after, finished = 0, False
    while not finished:
        steps.kill_after(killed_after)
        try:
            compact.compact_partition(tables, "samples", "date=2026-11-21/hour=8")
            finished = True
        except Killed:
            pass
        steps.kill_after(None)
        assert content(tables) == ROWS, killed_after  # also by the reader's own recovery
        tables = Tables.open(spark, str(tmp_path))
        assert spark.read.parquet(str(tmp_path / "samples")).count() == len(ROWS)
        if files(tables, 8) == 1:  # that kill came after the commit: small files again for the next
            with tables.transaction("again") as change:
                rows = tables.read("samples", [HOUR_8])
                change.overwrite_partitions("samples", rows.repartition(3, "value"), hours=[HOUR_8])
        killed_after += 1
    assert killed_after > 6


def test_files_that_come_meanwhile_stay(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = small_files(spark, tmp_path)
    read_files = Tables.read_files

    def slow(self: Tables, *arguments: Any) -> Any:
        rows = read_files(self, *arguments)
        with self.transaction("late") as change:
            change.append_rows("samples", samples(spark, (9, 8, 9.0)))
        return rows

    monkeypatch.setattr(Tables, "read_files", slow)
    compact.compact_partition(tables, "samples", "date=2026-11-21/hour=8")
    assert content(tables) == sorted([*ROWS, (9, 8, 9.0)])


def test_a_rewrite_meanwhile_wins(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = small_files(spark, tmp_path)
    read_files = Tables.read_files

    def slow(self: Tables, *arguments: Any) -> Any:
        rows = read_files(self, *arguments).cache()
        rows.count()
        with self.transaction("rollup") as change:
            change.overwrite_partitions("samples", samples(spark, (7, 8, 7.0)), hours=[HOUR_8])
        return rows

    monkeypatch.setattr(Tables, "read_files", slow)
    with pytest.raises(ChangedMeanwhile):
        compact.compact_partition(tables, "samples", "date=2026-11-21/hour=8")
    assert content(tables, hours=[HOUR_8]) == [(7, 8, 7.0)]
