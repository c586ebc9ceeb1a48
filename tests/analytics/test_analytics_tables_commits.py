"""A change of the tables is made wholly or not at all, wherever its process is killed."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from analytics.tables import commits
from analytics.tables.commits import BrokenCommit, ChangedMeanwhile, ChangeRecord
from analytics.tables.filesystem import Filesystem, FilesystemError
from analytics.tables.manifest import NewerTables
from analytics.tables.schemas import SCHEMA_VERSION
from analytics.tables.store import NoSnapshot, NoTables, Tables
from tests.analytics.faulty_files import Killed, Steps

HOUR_8, HOUR_9 = datetime(2026, 11, 21, 8, tzinfo=UTC), datetime(2026, 11, 21, 9, tzinfo=UTC)


def samples(spark: SparkSession, *rows: tuple[int, int, float]) -> DataFrame:
    """Rows (series, hour, value) of 2026-11-21."""
    text = ", ".join(
        f"({series}L, timestamp'2026-11-21 {hour:02}:00:00Z', {value}D, {hour})" for series, hour, value in rows
    )
    return spark.sql(
        f"select s as series_id, t as ts, cast(null as timestamp) as start_ts, v as value, 1L as batch_id, "
        f"date'2026-11-21' as date, h as hour from values {text} as x(s, t, v, h)"
    )


def content(tables: Tables, table: str = "samples", hours: Any = None) -> list[tuple[Any, ...]]:
    rows = tables.read(table, hours).select("series_id", "hour", "value").collect()
    return sorted(tuple(row) for row in rows)


def test_rows_come_back_with_their_types_and_partitions(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    with tables.transaction("test") as change:
        change.append_rows("samples", samples(spark, (1, 8, 1.5), (2, 9, 2.5)))
    assert content(tables) == [(1, 8, 1.5), (2, 9, 2.5)]
    assert content(tables, hours=[HOUR_9]) == [(2, 9, 2.5)]
    assert tables.partitions("samples") == ["date=2026-11-21/hour=8", "date=2026-11-21/hour=9"]
    assert tables.hours("samples", HOUR_9, HOUR_9) == [HOUR_9]
    # What other programs see: Hive's layout, without anything of ours.
    assert spark.read.parquet(str(tmp_path / "samples")).where("hour = 9").count() == 1


def test_an_exception_inside_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    with pytest.raises(ZeroDivisionError), tables.transaction("test") as change:  # noqa: PT012
        change.append_rows("samples", samples(spark, (1, 8, 1.0)))
        raise ZeroDivisionError
    assert content(tables) == []
    assert tables.files.names("_staging") == []


def test_overwriting_replaces_just_these_partitions_and_empties_some(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    with tables.transaction("test") as change:
        change.append_rows("samples", samples(spark, (1, 7, 7.0), (1, 8, 8.0), (1, 9, 9.0)))
    with tables.transaction("test") as change:
        kept = tables.read("samples", [HOUR_8])
        change.overwrite_partitions("samples", kept.withColumn("value", kept["value"] + 1), hours=[HOUR_8, HOUR_9])
    assert content(tables) == [(1, 7, 7.0), (1, 8, 9.0)]


def test_rows_outside_of_what_is_overwritten_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    with pytest.raises(ValueError, match="hour=9"), tables.transaction("test") as change:
        change.overwrite_partitions("samples", samples(spark, (1, 8, 8.0), (1, 9, 9.0)), hours=[HOUR_8])
    assert content(tables) == []


def test_a_table_is_added_to_once_in_a_change(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    rows = samples(spark, (1, 8, 8.0))
    with pytest.raises(ValueError, match="samples: rows were added"), tables.transaction("test") as change:  # noqa: PT012
        change.append_rows("samples", rows)
        change.append_rows("samples", rows)
    assert content(tables) == []


def prepared(spark: SparkSession, root: Path) -> Tables:
    tables = Tables.open(spark, str(root))
    with tables.transaction("before") as change:
        change.append_rows("samples", samples(spark, (1, 7, 7.0), (1, 8, 8.0)))
        change.mark_dirty("rollup", [HOUR_8])
    return tables


def copied(spark: SparkSession, source: Path, root: Path) -> Tables:
    """Tables as they were prepared, without what it costs to write them by Spark."""
    shutil.copytree(source, root)
    return Tables.open(spark, str(root))


def one_change(tables: Tables, identity: str) -> None:
    """Adds, removes, marks and clears."""
    if tables.is_done(identity):
        return
    dirty = tables.dirty_hours("rollup")
    with tables.transaction("test", identity=identity) as change:
        change.overwrite_partitions(
            "samples", samples(tables.spark, (1, 8, 80.0), (2, 9, 90.0)), hours=[HOUR_8, HOUR_9]
        )
        change.mark_dirty("usage", [HOUR_8, HOUR_9])
        change.clear_marks(dirty)


BEFORE = [(1, 7, 7.0), (1, 8, 8.0)]
AFTER = [(1, 7, 7.0), (1, 8, 80.0), (2, 9, 90.0)]


def test_killed_at_every_step_and_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    prepared(spark, tmp_path / "before")
    tables = copied(spark, tmp_path / "before", tmp_path / "whole")
    steps.kill_after(None)
    one_change(tables, "change")
    total = steps.count
    assert content(tables) == AFTER
    assert total > 7
    for killed_after in range(total):
        tables = copied(spark, tmp_path / "before", tmp_path / str(killed_after))
        steps.kill_after(killed_after)
        with pytest.raises(Killed):
            one_change(tables, "change")
        steps.kill_after(None)
        seen = content(tables)  # a reader that comes then sees all of it or nothing
        assert seen in (BEFORE, AFTER), killed_after
        again = Tables.open(spark, str(tmp_path / str(killed_after)))
        if seen == AFTER:
            assert content(again) == AFTER
            assert again.dirty_hours("usage").hours == (HOUR_8, HOUR_9)
            assert again.is_done("change")
        one_change(again, "change")
        assert content(again) == AFTER, killed_after
        assert again.dirty_hours("usage").hours == (HOUR_8, HOUR_9)
        assert again.dirty_hours("rollup").hours == ()
        assert again.files.names("_staging") == []


def test_two_processes_apply_one_record(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is at each of its steps."""
    files = Filesystem(spark, str(tmp_path))
    move = Filesystem.move
    for before in range(3):
        staged = {f"_staging/c{before}/{n}": f"samples/c{before}-{n}" for n in range(2)}
        for path in staged:
            files.create_text(path, path)
        record = ChangeRecord(adds=staged, dirty={"rollup": ["2026-11-21T08"]})
        files.create_text(f"_commits/pending/c{before}.json", json.dumps({"adds": record.adds, "dirty": record.dirty}))
        calls = iter(range(100))

        def slow(
            self: Filesystem,
            source: str,
            target: str,
            *,
            before: int = before,
            calls: Any = calls,
            record: Any = record,
        ) -> bool:
            if not source.rpartition("/")[2].startswith(".") and next(calls) == before:
                with monkeypatch.context() as undone:
                    undone.setattr(Filesystem, "move", move)
                    commits.apply_change(files, f"c{before}", record)
            return move(self, source, target)

        with monkeypatch.context() as patched:
            patched.setattr(Filesystem, "move", slow)
            commits.apply_pending(files)
        assert commits.is_done(files, f"c{before}")
        assert all(files.exists(path) for path in staged.values())
        assert commits.list_pending(files) == []


def test_a_file_deleted_by_hand_is_told(spark: SparkSession, tmp_path: Path) -> None:
    files = Filesystem(spark, str(tmp_path))
    with pytest.raises(BrokenCommit, match=r"_commits/pending/c\.json"):
        commits.commit_change(files, "c", ChangeRecord(adds={"_staging/c/x": "samples/x"}))


def test_of_two_rewrites_of_one_partition_the_later_fails(spark: SparkSession, tmp_path: Path) -> None:
    tables = prepared(spark, tmp_path)
    with pytest.raises(ChangedMeanwhile, match="nothing was"), tables.transaction("a") as first:  # noqa: PT012
        first.overwrite_partitions("samples", samples(spark, (1, 8, 1.0)), hours=[HOUR_8])
        with tables.transaction("b") as second:
            second.overwrite_partitions("samples", samples(spark, (1, 8, 2.0)), hours=[HOUR_8])
    assert content(tables) == [(1, 7, 7.0), (1, 8, 2.0)]
    assert commits.list_pending(tables.files) == []


def test_a_mark_that_comes_while_hours_are_recomputed_stays(spark: SparkSession, tmp_path: Path) -> None:
    tables = prepared(spark, tmp_path)
    taken = tables.dirty_hours("rollup")
    with tables.transaction("late") as change:
        change.mark_dirty("rollup", [HOUR_8])
    with tables.transaction("rollup") as change:
        change.clear_marks(taken)
    assert tables.dirty_hours("rollup").hours == (HOUR_8,)


def test_a_pending_change_is_finished_before_anything_is_read(spark: SparkSession, tmp_path: Path) -> None:
    tables = prepared(spark, tmp_path)
    record = ChangeRecord(removes=[f"samples/{p}/{e.name}" for p in tables.partitions("samples")
                             for e in tables.visible_files("samples", p)])  # fmt: skip
    text = json.dumps({"removes": record.removes})
    tables.files.create_text("_commits/pending/x.json", text)
    assert content(tables) == []


def test_a_reader_gives_up_where_changes_never_end(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = prepared(spark, tmp_path)
    states = iter(range(1000))
    monkeypatch.setattr(commits, "read_state", lambda files: ([], [str(next(states))]))
    with pytest.raises(NoSnapshot, match="60 times"):
        tables.read("samples", [HOUR_8])


def test_newer_tables_are_refused_and_older_read(spark: SparkSession, tmp_path: Path) -> None:
    prepared(spark, tmp_path)
    newer = tmp_path / f"_manifest-{SCHEMA_VERSION + 1:06}.json"
    newer.write_text("{}")
    with pytest.raises(NewerTables, match=f"version {SCHEMA_VERSION + 1}.*upgrade"):
        Tables.open(spark, str(tmp_path))
    newer.unlink()
    (tmp_path / f"_manifest-{SCHEMA_VERSION:06}.json").rename(tmp_path / "_manifest-000000.json")
    older = samples(spark, (5, 9, 5.0)).drop("start_ts", "date", "hour")
    older.write.parquet(str(tmp_path / "samples" / "date=2026-11-21" / "hour=9"))
    tables = Tables.open(spark, str(tmp_path))
    row = tables.read("samples", [HOUR_9]).collect()[0]
    assert (row.series_id, row.start_ts, row.hour) == (5, None, 9)
    assert (tmp_path / f"_manifest-{SCHEMA_VERSION:06}.json").exists()


def test_no_tables_at_all_is_told(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NoTables, match="has `ingest` run"):
        Tables.open(spark, str(tmp_path / "nowhere"), create=False)
    with pytest.raises(FilesystemError, match="cannot use 'nonsense://x'"):
        Tables.open(spark, "nonsense://x")


def test_only_the_last_batch_of_a_stream_is_remembered(spark: SparkSession, tmp_path: Path) -> None:
    files = Filesystem(spark, str(tmp_path))
    for stream in ("a", "b"):
        for number in (8, 9, 10):
            commits.commit_change(files, commits.batch_id(stream, number), ChangeRecord())
    commits.delete_earlier_batches(files, commits.batch_id("a", 10))
    left = [commits.batch_id(*one) for one in (("a", 10), ("b", 8), ("b", 9), ("b", 10))]
    assert [name.removesuffix(".json") for name in files.names("_commits/done")] == left
