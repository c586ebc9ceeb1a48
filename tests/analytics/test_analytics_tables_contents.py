"""Whole files of a table, for who reads Parquet without Spark."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import rollup
from analytics.transforms.rollup import minutes, minutes_of_files
from tests.analytics.transforms_data import DAY_MS, HOUR_MS, counter, expected, got, ingest, moment, rows_of

HOURS = [moment(DAY_MS + hour * HOUR_MS) for hour in (1, 2, 3)]
ALL = 1 << 40


def test_files_up_to_a_size_come_whole_and_the_rows_of_all_others(spark: SparkSession, tmp_path: Path) -> None:
    """Each sample once, and none of other hours; blanks and signs in the root's name are nobody's business."""
    root = tmp_path / "all of it, 100 % ä"
    ingest(spark, root, counter(1, [1, 2, 5]))
    tables = ingest(spark, root, counter(2, [2], step_s=1))
    sizes = {file.name: file.stat().st_size for file in root.glob("samples/*/hour=[123]/*.parquet")}
    assert len(sizes) == 3
    largest = max(sizes.values())
    contents, rows = tables.read_file_contents("samples", HOURS, bytes_max=largest - 1)
    assert sorted(len(row["content"]) for row in contents.collect()) == sorted(sizes.values())[:2]
    assert {row["series_id"] for row in rows.collect()} == {2}
    assert rows.count() == len(counter(2, [2], step_s=1))
    contents, rows = tables.read_file_contents("samples", HOURS, bytes_max=largest)
    assert (contents.count(), rows.count()) == (3, 0)


def test_nothing_is_nothing(spark: SparkSession, tmp_path: Path) -> None:
    tables = ingest(spark, tmp_path, counter(1, [1]))
    contents, rows = tables.read_file_contents("samples", [moment(DAY_MS + 9 * HOUR_MS)], bytes_max=ALL)
    assert (contents.count(), rows.count()) == (0, 0)


def test_files_and_rows_give_the_same_minutes(spark: SparkSession, tmp_path: Path) -> None:
    tables = ingest(spark, tmp_path, [*counter(1, [1, 2, 3], step_s=7), *counter(-4, [1, 3], step_s=90)])
    contents, _ = tables.read_file_contents("samples", HOURS, bytes_max=ALL)
    _, rows = tables.read_file_contents("samples", HOURS, bytes_max=0)
    assert rows_of(minutes_of_files(contents)) == rows_of(minutes(rows))


def test_older_files_without_starts(spark: SparkSession, tmp_path: Path) -> None:
    """Columns are only added: one that a file does not have is null."""
    tables = ingest(spark, tmp_path, counter(1, [1], step_s=30))
    (file,) = tmp_path.glob("samples/*/hour=1/*.parquet")
    older = spark.read.parquet(str(file)).drop("start_ts").coalesce(1)
    older.write.parquet(str(tmp_path / "older"))
    (written,) = (tmp_path / "older").glob("*.parquet")
    written.rename(file)
    rollup.run(spark, str(tmp_path))
    assert got(tables) == expected(counter(1, [1], step_s=30), rollup.LOOKBACK_DAYS)


def test_a_rollup_takes_large_files_too(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = counter(1, [1, 2]) + counter(2, [2], step_s=1)
    tables = ingest(spark, tmp_path, rows)
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("samples/*/*/*.parquet"))
    monkeypatch.setattr(rollup, "FILE_BYTES_MAX", sizes[0])
    rollup.run(spark, str(tmp_path))
    assert got(tables) == expected(rows, rollup.LOOKBACK_DAYS)
