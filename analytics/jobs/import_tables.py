"""The job `import-tables`: copies tables of format 1, from before Delta tables, to an empty place.

Each table is one change, so a job that was killed is run again and copies the rest. Sums stay as they were; the next
rollup computes again what it still has samples of. Where `ingest` had come to in the spool is not known any more: it
begins at the spool's start, and skips the samples that the tables have.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from pyarrow.fs import FileSelector
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.jobs.progress import Progress
from analytics.series import METRIC_NAME, counter_id
from analytics.tables import manifest
from analytics.tables.errors import TablesError
from analytics.tables.locations import locate
from analytics.tables.schemas import SCHEMAS, VIEWS
from analytics.tables.store import Tables, partition_columns, storage_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_FORMAT: Final = 1
_IMPORTED: Final = "import-tables"
"""The name under which each table records that it was imported."""
_PENDING: Final = "_commits/pending"


def run(spark: SparkSession, old_root: str, root: str) -> dict[str, int]:
    """Copy the tables at `old_root` to `root`; return the number of rows of each table. Raises TablesError."""
    old = Tables(spark, locate(spark, old_root))
    with storage_errors(old.location.spark_url, f"there are no tables at {old_root}"):
        version = manifest.newest_version(old.filesystem())
    if version != _FORMAT:
        there = f"tables of format {version}" if version else "no tables"
        raise TablesError(f"{old_root} has {there}: this job copies those of format {_FORMAT} (nothing was copied)")
    if _has_files(old, _PENDING, ".json"):
        raise TablesError(
            f"{old_root}/{_PENDING} has changes that a killed job began: run `compact` of the version that wrote these "
            "tables, which completes them; nothing was copied"
        )
    tables, progress = Tables.open(spark, root), Progress()
    rows = {}
    for done, table in enumerate(SCHEMAS, 1):
        rows[table] = _copy(old, tables, table)
        progress.print_line(f"{table}: {rows[table]:,} rows", left=f"{done} of {len(SCHEMAS)} tables")
    progress.print_summary(f"{sum(rows.values()):,} rows copied")
    return rows


def _copy(old: Tables, tables: Tables, table: str) -> int:
    """Copy one table, if that has not happened yet; return the number of its rows."""
    snapshot = tables.snapshot(table)
    if snapshot.recorded(_IMPORTED) is not None:
        return 0
    if snapshot.files:
        raise TablesError(f"{snapshot.url} has rows already: tables are imported to an empty place only")
    views = [name for name, view in VIEWS.items() if view.table == table]
    frames = [frame for view in views if (frame := _rows(old, view)) is not None]
    with tables.change(table, snapshot) as change:
        change.record(_IMPORTED, 1)
        if not frames:
            return 0
        written = change.write_widths(views, reduce(lambda one, other: one.unionByName(other), frames))
        for one in written:
            change.append(one)
        return sum(one.rows for one in written)


def _has_files(old: Tables, path: str, suffix: str) -> bool:
    """Return True if there are files with this suffix below a path of the root."""
    found = old.filesystem().get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    return any(entry.path.endswith(suffix) for entry in found)


def _rows(old: Tables, view: str) -> DataFrame | None:
    """Return the rows of a table of format 1, with the columns that it has today; None if there are none."""
    if not _has_files(old, view, ".parquet"):
        return None
    rows = old.spark.read.option("mergeSchema", value=True).parquet(f"{old.location.spark_url}/{view}")
    if view == "samples":
        rows = _with_counter_ids(rows, _rows(old, "series"))
    rest = {
        name: F.coalesce(F.col(f"{name}_lo"), F.lit(0.0))
        for name in ("sum", "increase")
        if f"{name}_lo" in rows.columns
    }
    known = {name: F.col(name) + part for name, part in rest.items()}  # format 1 kept the last digits beside a sum
    known |= dict.fromkeys(("replica", "last_replica"), F.lit(0)) | {"entry_ts": F.lit(None)} | partition_columns(view)
    names = SCHEMAS[VIEWS[view].table].fieldNames()
    return rows.select(*(known.get(name, F.col(name)).alias(name) for name in names))


def _with_counter_ids(samples: DataFrame, series: DataFrame | None) -> DataFrame:
    """Return the samples with the counter whose start they tell, if they are of a gauge `…_created`."""
    created = series.where(F.col("metric").endswith("_created")).collect() if series is not None else []
    found = [(row.series_id, counter_id([(METRIC_NAME, row.metric), *row.labels.items()])) for row in created]
    counters = samples.sparkSession.createDataFrame(found, "series_id bigint, counter_id bigint")
    return samples.join(F.broadcast(counters), "series_id", "left")
