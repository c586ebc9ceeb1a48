"""Tables of format 1, as the version before Delta tables wrote them, become Delta tables."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.jobs import import_tables, rollup, usage
from analytics.series import series_id
from analytics.tables.change import TableChange
from analytics.tables.errors import TablesError
from analytics.tables.schemas import VIEWS
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample
from tests.analytics.transforms_data import DAY, DAY_MS, HOUR_MS, Raw, counter, ingest, table_rows

NAME = "pulsar_proxy_principal_bytes"
LABELS = {"cluster": "east", "direction": "to_broker", "job": "proxy", "principal": "alice"}
COUNTER, CREATED = (series_id([("__name__", NAME + end), *LABELS.items()]) for end in ("_total", "_created"))
ROWS: Raw = [
    *counter(COUNTER, range(6), start=100.0),
    (CREATED, Sample(DAY_MS + 13_000, DAY_MS / 1000)),
]
NEW_COLUMNS = ("replica", "last_replica", "counter_id", "width", "entry_ts")


def write_old(tables: Tables, root: Path) -> None:
    """Write the rows of tables in format 1: plain Parquet below date and hour, and sums in two parts."""
    for view, (_, _, by) in VIEWS.items():
        frame = tables.read(view).drop(*NEW_COLUMNS)
        if "entry" in frame.columns:
            frame = frame.withColumns({"sum_lo": F.lit(0.25), "increase_lo": F.lit(-0.25)})
            frame = frame.withColumns({"sum": F.col("sum") - 0.25, "increase": F.col("increase") + 0.25})
        if view in {"samples", "histograms"}:
            frame = frame.withColumn("batch_id", F.lit(1).cast("long"))
        write(
            frame if by else frame.drop("date", "hour"),
            root / view,
            {"hour": ["date", "hour"], "day": ["date"]}.get(by, []),
        )
    (root / "_manifest-000001.json").write_text('{"schema_version": 1}')


def write(frame: DataFrame, path: Path, partitions: list[str]) -> None:
    rows = frame if "hour" in partitions else frame.drop("hour")
    rows.coalesce(1).write.partitionBy(*partitions).parquet(f"file://{path}")


class Made(NamedTuple):
    """Tables of today with their rows, and the same in format 1."""

    new: Path
    old: Path
    rows: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("import")
    new, old = directory / "new", directory / "old"
    tables = ingest(spark, new, ROWS, {CREATED: COUNTER})
    with tables.change("series") as change:
        rows = [(number, NAME + end, LABELS, None, DAY) for number, end in ((COUNTER, "_total"), (CREATED, "_created"))]
        columns = "series_id bigint, metric string, labels map<string,string>, kind string, first_seen timestamp"
        change.append(change.write("series", spark.createDataFrame(rows, columns)))
    rollup.run(spark, str(new))
    usage.run(spark, str(new), usage.UsageOptions(DAY + timedelta(hours=6), lateness=timedelta(hours=1)))
    write_old(tables, old)
    return Made(new, old, content(tables))


def content(tables: Tables) -> dict[str, list[dict[str, Any]]]:
    """All rows, without the column that format 1 had nothing for."""
    found = table_rows(tables, *VIEWS)
    return {view: [row | {"entry_ts": None} for row in rows] for view, rows in found.items()}


def test_every_row_comes_over_and_the_jobs_go_on_with_them(spark: SparkSession, tmp_path: Path, made: Made) -> None:
    new = Tables.open(spark, str(shutil.copytree(made.new, tmp_path / "new")))
    counts = import_tables.run(spark, str(made.old), str(tmp_path / "there"))
    there, expected = Tables.open(spark, str(tmp_path / "there")), made.rows
    assert content(there) == expected
    assert {view for view, rows in expected.items() if rows} == set(VIEWS) - {view for view in VIEWS if "histo" in view}
    assert counts["samples"] == len(ROWS)
    assert sum(counts.values()) == sum(map(len, expected.values()))
    assert set(import_tables.run(spark, str(made.old), str(tmp_path / "there")).values()) == {0}
    late: Raw = [(COUNTER, Sample(DAY_MS + 6 * HOUR_MS, 1000.0))]
    for tables in (new, there):
        root = tables.location.delta_url
        ingest(spark, Path(root), late)
        rollup.run(spark, root)
        usage.run(spark, root, usage.UsageOptions(DAY + timedelta(hours=8), lateness=timedelta(hours=1)))
    views = ("usage_hourly", "usage_daily")
    assert table_rows(there, *views) == table_rows(new, *views)


def test_a_killed_import_goes_on_where_it_was(
    spark: SparkSession, tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = TableChange.commit

    def killed(change: TableChange) -> None:
        if change.snapshot.table == "rollup":
            raise KeyboardInterrupt
        commit(change)

    monkeypatch.setattr(TableChange, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        import_tables.run(spark, str(made.old), str(tmp_path / "there"))
    monkeypatch.undo()
    counts = import_tables.run(spark, str(made.old), str(tmp_path / "there"))
    assert counts["samples"] == 0 < counts["rollup"]
    assert content(Tables.open(spark, str(tmp_path / "there"))) == made.rows


def test_tables_that_cannot_be_imported_are_refused_and_left_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    old, there = tmp_path / "old", tmp_path / "there"
    with pytest.raises(TablesError, match="there are no tables at"):
        import_tables.run(spark, str(old), str(there))
    old.mkdir()
    with pytest.raises(TablesError, match="has no tables: this job copies those of format 1"):
        import_tables.run(spark, str(old), str(there))
    ingest(spark, there, ROWS[:1])
    with pytest.raises(TablesError, match="has tables of format 2: this job"):
        import_tables.run(spark, str(there), str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()
    (old / "_commits/pending").mkdir(parents=True)
    (old / "_manifest-000001.json").write_text("{}")
    (old / "_commits/pending/a.json").write_text("{}")
    with pytest.raises(TablesError, match="changes that a killed job began: run `compact` of the version that wrote"):
        import_tables.run(spark, str(old), str(tmp_path / "third"))
    (old / "_commits/pending/a.json").unlink()
    with pytest.raises(TablesError, match="samples has rows already: tables are imported to an empty place only"):
        import_tables.run(spark, str(old), str(there))
    assert Tables.open(spark, str(there)).read("samples").count() == 1
