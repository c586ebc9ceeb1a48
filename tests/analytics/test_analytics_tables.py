"""The Delta tables: a change is there whole or not at all, and never behind another one."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from analytics.commands.upkeep import parse_retention
from analytics.jobs import compact, expire
from analytics.jobs.defaults import KEEP_DAYS
from analytics.tables import manifest, store
from analytics.tables.change import TableChange
from analytics.tables.errors import ChangedMeanwhile, NoTables, OtherFormat, TablesError
from analytics.tables.locations import locate
from analytics.tables.store import Tables, attempt
from tests.analytics.counter_model import Sample
from tests.analytics.transforms_data import DAY, DAY_MS, HOUR_MS, Raw, ingest, moment, samples_frame

HOURS = [DAY + timedelta(hours=hour) for hour in range(24)]
ROWS: Raw = [
    (1, Sample(DAY_MS + hour * HOUR_MS + minute * 60_000, float(minute))) for hour in (8, 10) for minute in (1, 2)
]
NOW = DAY + timedelta(hours=11, minutes=30)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each row is a file."""
    root = tmp_path_factory.mktemp("filled")
    for row in ROWS:
        ingest(spark, root, [row])
    return root


@pytest.fixture
def tables(spark: SparkSession, filled: Path, tmp_path: Path) -> Tables:
    """A test's own copy."""
    return Tables.open(spark, str(shutil.copytree(filled, tmp_path, dirs_exist_ok=True)))


def content(tables: Tables, **options: Any) -> Raw:
    rows = tables.read("samples", **options).selectExpr("series_id", "unix_millis(ts)", "value").collect()
    return sorted((row[0], Sample(row[1], row[2])) for row in rows)


def test_rows_come_back_with_their_partitions_and_hours(tables: Tables) -> None:
    assert content(tables) == ROWS
    assert content(tables, hours=[HOURS[8]]) == ROWS[:2]
    rows = tables.read("samples").select("date", "hour").distinct().collect()
    assert sorted(tuple(row) for row in rows) == [(DAY.date(), 8), (DAY.date(), 10)]
    assert tables.hours("samples", HOURS[0], HOURS[23]) == [HOURS[8], HOURS[10]]
    assert tables.hours("samples", HOURS[9], HOURS[23]) == [HOURS[10]]
    assert content(tables, hours=[]) == []


def test_other_tools_read_the_same(tables: Tables) -> None:
    delta = DeltaTable(f"{tables.location.delta_url}/samples")
    assert delta.count() == delta.to_pyarrow_table().num_rows == len(ROWS)
    assert {row["hour"] for row in delta.to_pyarrow_table().to_pylist()} == {8, 10}
    for field, value, found in (
        ("value", 1.0, 2),
        ("series_id", 1, 4),
        ("hour", 8, 2),
        ("ts", moment(ROWS[0][1].ts), 1),
    ):
        assert delta.to_pyarrow_dataset().to_table(filter=ds.field(field) == value).num_rows == found, field


def test_names_of_directories_may_have_any_signs(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "all of it, 100 % ä"
    tables = ingest(spark, root, ROWS)
    assert content(tables) == ROWS
    with tables.change("samples") as change:
        change.replace(change.write("samples", samples_frame(spark, ROWS[:1])), hours=[HOURS[8]])
    assert content(Tables.open(spark, f"file://{root}")) == [ROWS[0], *ROWS[2:]]


# ---- changes


def test_a_replacement_takes_out_what_was_there_and_nothing_else(spark: SparkSession, tables: Tables) -> None:
    new: Raw = [(7, Sample(DAY_MS + 8 * HOUR_MS, 7.0))]
    with tables.change("samples") as change:
        change.replace(change.write("samples", samples_frame(spark, new)), hours=[HOURS[8], HOURS[9]])
    assert content(tables) == sorted(new + ROWS[2:])
    with (
        pytest.raises(ValueError, match="rows outside of the partitions to replace"),
        tables.change("samples") as change,
    ):
        change.replace(change.write("samples", samples_frame(spark, new)), hours=[HOURS[9]])
    assert content(tables) == sorted(new + ROWS[2:])


@pytest.mark.parametrize("second", ["append", "replace"])
def test_of_two_changes_at_once_the_second_is_refused(spark: SparkSession, tables: Tables, second: str) -> None:
    """Delta itself lets two appends pass, and two first writers of an hour."""
    new: Raw = [(7, Sample(DAY_MS + 9 * HOUR_MS, 7.0))]
    change = TableChange(tables, tables.snapshot("samples"))
    written = change.write("samples", samples_frame(spark, new))
    change.append(written) if second == "append" else change.replace(written, hours=[HOURS[9]])
    ingest(spark, Path(tables.location.delta_url), new)
    with pytest.raises(ChangedMeanwhile, match="another process changed samples"):
        change.commit()
    assert content(tables) == sorted(new + ROWS)


def test_a_replacement_that_began_before_a_compaction_is_refused(spark: SparkSession, tables: Tables) -> None:
    change = TableChange(tables, tables.snapshot("samples"))
    change.replace(change.write("samples", samples_frame(spark, ROWS[:2])), hours=[HOURS[8]])
    assert compact.run(spark, tables.location.delta_url, now=NOW) == 1
    with pytest.raises(ChangedMeanwhile):
        change.commit()
    assert content(tables) == ROWS


def interrupt_compaction(monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]) -> None:
    """Call ``interrupt`` once, when a compaction has the snapshot that it is computed from."""
    snapshot, seen = Tables.snapshot, []

    def then_interrupt(self: Tables, table: str, version: Any = None) -> store.Snapshot:
        found = snapshot(self, table, version)
        if table == "samples":
            seen.append(found)
            if len(seen) == 2:  # the first looks for partitions
                interrupt()
        return found

    monkeypatch.setattr(Tables, "snapshot", then_interrupt)


def test_a_compaction_that_began_before_another_change_is_refused(
    spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And done again with what is there then."""

    def change_meanwhile() -> None:
        with tables.change("samples") as change:
            change.replace(change.write("samples", samples_frame(spark, ROWS[:1])), hours=[HOURS[8]])
        ingest(spark, Path(tables.location.delta_url), [(9, Sample(DAY_MS + 8 * HOUR_MS, 9.0))])

    interrupt_compaction(monkeypatch, change_meanwhile)
    compact.run(spark, tables.location.delta_url, now=NOW)
    assert content(tables) == sorted([ROWS[0], *ROWS[2:], (9, Sample(DAY_MS + 8 * HOUR_MS, 9.0))])


def test_of_two_compactions_at_once_one_is_refused(
    spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would add the same rows: delta-rs' own compaction passes here."""

    def compact_meanwhile() -> None:
        assert compact.run(spark, tables.location.delta_url, now=NOW) == 1

    interrupt_compaction(monkeypatch, compact_meanwhile)
    assert compact.run(spark, tables.location.delta_url, now=NOW) == 0
    assert content(tables) == ROWS
    assert files_of(tables, 8) == 1


def test_a_change_is_computed_again_until_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compute() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ChangedMeanwhile("again")
        return "done"

    assert attempt(compute) == "done"
    monkeypatch.setattr(store, "ATTEMPTS_MAX", 2)
    calls.clear()
    with pytest.raises(ChangedMeanwhile):
        attempt(compute)
    assert len(calls) == 2


def test_after_an_exception_nothing_is_changed_and_no_file_left(spark: SparkSession, tables: Tables) -> None:
    before = files_below(tables)

    def fail() -> None:
        with tables.change("samples") as change:
            change.append(change.write("samples", samples_frame(spark, ROWS)))
            assert files_below(tables) > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files_below(tables) == before
    assert content(tables) == ROWS


def test_an_error_in_the_commit_deletes_no_file(
    spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit may be there, although its answer was lost."""
    commit = TableChange.commit

    def loses_the_answer(self: TableChange) -> None:
        commit(self)
        raise TablesError("the connection was lost")

    monkeypatch.setattr(TableChange, "commit", loses_the_answer)
    new: Raw = [(7, Sample(DAY_MS + 9 * HOUR_MS, 7.0))]
    with pytest.raises(TablesError), tables.change("samples") as change:
        change.append(change.write("samples", samples_frame(spark, new)))
    assert content(tables) == sorted(ROWS + new)


def test_a_recorded_number_is_there_with_its_change(spark: SparkSession, tables: Tables) -> None:
    with tables.change("samples") as change:
        change.append(change.write("samples", samples_frame(spark, ROWS[:1])))
        change.record("ingest/x", 1 << 50)
    with tables.change("samples") as change:
        change.record("ingest/y", 7)
    with tables.change("samples"):
        pass  # nothing is no version
    snapshot = tables.snapshot("samples")
    assert (snapshot.recorded("ingest/x"), snapshot.recorded("ingest/y"), snapshot.recorded("z")) == (1 << 50, 7, None)
    assert snapshot.version == len(ROWS) + 2


def test_the_past_can_be_read(tables: Tables) -> None:
    assert tables.snapshot("samples", 2).read("samples").count() == 2
    first = datetime(2026, 11, 23, tzinfo=UTC)
    for version in range(tables.snapshot("samples").version + 1):  # a version's time is that of its file
        commit = Path(tables.location.delta_url) / f"samples/_delta_log/{version:020}.json"
        os.utime(commit, ((first + timedelta(hours=version)).timestamp(),) * 2)
    assert tables.snapshot("samples", first + timedelta(hours=2, minutes=59)).read("samples").count() == 2
    assert tables.snapshot("samples", first + timedelta(hours=4)).read("samples").count() == len(ROWS)


def files_below(tables: Tables) -> set[str]:
    root = Path(tables.location.delta_url)
    return {str(path) for path in root.rglob("*.parquet") if "_delta_log" not in path.parts}


# ---- changed hours


def test_changed_hours_are_those_to_which_rows_were_added(spark: SparkSession, tables: Tables) -> None:
    snapshot = tables.snapshot("samples")
    assert tables.changed_hours(snapshot, 2) == [HOURS[10]]
    assert tables.changed_hours(snapshot, snapshot.version) == []
    everything = [HOURS[8], HOURS[10]]
    assert tables.changed_hours(snapshot, None) == tables.changed_hours(snapshot, 99) == everything
    compact.run(spark, tables.location.delta_url, now=NOW, closed_after_hours=0)
    with tables.change("samples") as change:
        change.remove(change.snapshot.files_of("samples", [HOURS[8]]))
    later = tables.snapshot("samples")
    assert later.version > snapshot.version
    assert tables.changed_hours(later, snapshot.version) == []
    assert tables.changed_hours(later, 2) == [HOURS[10]]
    (Path(tables.location.delta_url) / "samples/_delta_log/00000000000000000003.json").unlink()
    assert tables.changed_hours(later, 2) == [HOURS[10]]  # all that there is: no more is known


# ---- compact and expire


def files_of(tables: Tables, hour: int) -> int:
    return len(tables.snapshot("samples").files_of("samples", [HOURS[hour]]))


def test_closed_hours_become_one_file_with_the_same_rows(spark: SparkSession, tables: Tables) -> None:
    root = tables.location.delta_url
    schema = tables.read("samples").schema
    assert compact.run(spark, root, now=NOW) == 1
    assert (files_of(tables, 8), files_of(tables, 10)) == (1, 2)  # hour 10 ended half an hour ago
    assert content(tables) == ROWS
    assert tables.read("samples").schema == schema
    assert compact.run(spark, root, now=NOW) == 0
    assert compact.run(spark, root, now=NOW, closed_after_hours=0) == 1
    assert content(tables) == ROWS


def test_series_are_rewritten_each_once(spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = spark.createDataFrame([(1, "up", {"a": "b"}, None, DAY)], store.SCHEMAS["series"])
    for _ in range(3):
        with tables.change("series") as change:
            change.append(change.write("series", frame))
    monkeypatch.setattr(compact, "_SERIES_FILES_MIN", 3)
    compact.run(spark, tables.location.delta_url, now=NOW)
    rows = DeltaTable(f"{tables.location.delta_url}/series").to_pyarrow_table().to_pylist()
    assert [(row["metric"], row["labels"]) for row in rows] == [("up", [("a", "b")])]


def test_days_go_when_their_last_instant_is_too_old(spark: SparkSession, tables: Tables) -> None:
    root, last = tables.location.delta_url, DAY + timedelta(days=7, hours=23, minutes=59)
    assert expire.run(spark, root, {"samples": 0}, now=last + timedelta(days=900)) == []
    assert expire.run(spark, root, {"samples": 7}, now=last) == []
    assert content(tables) == ROWS
    assert expire.run(spark, root, {"samples": 7}, now=last + timedelta(minutes=1)) == ["samples 2026-11-20"]
    assert content(tables) == []
    assert len(files_below(tables)) == len(ROWS)  # for versions of the past


def test_files_that_no_version_needs_go_with_their_directories_when_they_are_old(
    spark: SparkSession, tables: Tables
) -> None:
    """Replaced ones, and those of killed jobs; not of jobs that run."""
    root = tables.location.delta_url
    TableChange(tables, tables.snapshot("samples")).write("samples", samples_frame(spark, ROWS))  # and it was killed
    compact.run(spark, root, now=NOW, closed_after_hours=0)
    left = files_below(tables)
    expire.run(spark, root, {}, now=NOW)
    assert files_below(tables) == left
    old_s = 1_700_000_000
    for directory, _, names in os.walk(f"{root}/samples", topdown=False):
        for name in names:
            if "_delta_log" not in directory:
                os.utime(f"{directory}/{name}", (old_s, old_s))
    expire.run(spark, root, {}, now=NOW)
    needed = {f"{root}/samples/{file.path}" for file in tables.snapshot("samples").files}
    young = {path for path in left if any(path.endswith(file.path) for file in tables.snapshot("samples", 4).files)}
    assert needed <= files_below(tables) <= needed | young
    assert content(tables) == ROWS


def test_empty_directories_go_when_they_are_old(tmp_path: Path) -> None:
    (tmp_path / "a/1/date=2026-11-20").mkdir(parents=True)
    (tmp_path / "b/1").mkdir(parents=True)
    (tmp_path / "b/1/file").touch()
    (tmp_path / "_delta_log/sub").mkdir(parents=True)
    expire._delete_empty_directories(tmp_path, before_s=0)
    assert (tmp_path / "a/1/date=2026-11-20").exists()
    expire._delete_empty_directories(tmp_path, before_s=4e9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_delta_log", "b"]


# ---- the root


def test_there_are_no_tables(spark: SparkSession, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NoTables, match="has `ingest` run, with the same --tables"):
            Tables.open(spark, str(root), create=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("version", "said"), [(1, "by `backfill`|from before Delta tables"), (3, "upgrade it")])
def test_tables_of_another_format_are_neither_read_nor_written(
    spark: SparkSession, tmp_path: Path, version: int, said: str
) -> None:
    (tmp_path / f"_manifest-{version:06}.json").write_text(json.dumps({"schema_version": version}))
    with pytest.raises(OtherFormat, match=said):
        Tables.open(spark, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"_manifest-{version:06}.json"]


def test_an_older_program_finds_the_manifest_that_it_refuses(tables: Tables) -> None:
    """Format 1 looked for the highest number of these names."""
    names = [path.name for path in Path(tables.location.delta_url).iterdir() if path.name.startswith("_manifest-")]
    assert names == [f"_manifest-{manifest.SCHEMA_VERSION:06}.json"] == ["_manifest-000002.json"]


def fake_spark(**settings: str) -> Any:
    found = {name.replace("_", "."): value for name, value in settings.items()}
    configuration = SimpleNamespace(get=found.get)
    return SimpleNamespace(_jsc=SimpleNamespace(hadoopConfiguration=lambda: configuration))


def test_spark_and_delta_name_the_same_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spark = fake_spark(
        fs_s3a_endpoint="127.0.0.1:9000",
        fs_s3a_access_key="me",
        fs_s3a_secret_key="not to be seen",
        fs_s3a_connection_ssl_enabled="false",
    )
    for root in ("x", f"{tmp_path}/x", f"file://{tmp_path}/x/", f"file:{tmp_path}/x"):
        found = locate(spark, root)
        assert (found.spark_url, found.delta_url, found.options) == (f"file://{tmp_path}/x", f"{tmp_path}/x", {})
    bucket = locate(spark, "s3a://bucket/metrics")
    assert (bucket.spark_url, bucket.delta_url) == ("s3a://bucket/metrics", "s3://bucket/metrics")
    assert bucket.options == {
        "aws_access_key_id": "me",
        "aws_secret_access_key": "not to be seen",
        "aws_endpoint_url": "http://127.0.0.1:9000",
        "aws_allow_http": "true",
    }
    assert "not to be seen" not in repr(bucket)
    assert locate(fake_spark(fs_s3a_endpoint="s3.eu.example"), "s3a://b").options == {
        "aws_endpoint_url": "https://s3.eu.example"
    }
    assert locate(fake_spark(fs_defaultFS="hdfs://names:8020"), "/metrics").delta_url == "hdfs://names:8020/metrics"


def test_secrets_are_in_no_error(spark: SparkSession) -> None:
    location = store.Location("s3a://b/x", "s3://b/x", {"aws_secret_access_key": "not to be seen", "aws_region": "x"})
    with pytest.raises(TablesError) as caught:
        Tables(spark, location).snapshot("samples")
    assert "not to be seen" not in str(caught.value)


def test_the_option_of_retentions_is_checked() -> None:
    assert parse_retention(("samples=7",)) == KEEP_DAYS | {"samples": 7}
    for text, said in (("sample=7", "no table that can expire"), ("series=7", "no table"), ("samples=x", "TABLE=DAYS")):
        with pytest.raises(click.BadParameter, match=said):
            parse_retention((text,))
