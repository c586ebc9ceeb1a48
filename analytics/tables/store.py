"""The tables below one root, as Delta tables: Spark writes and reads Parquet, delta-rs keeps the log.

tables = Tables.open(spark, "s3a://bucket/metrics")
samples = tables.snapshot("samples")
with tables.change("rollup") as change:
    written = change.write("rollup_1m", rolled(samples.read("samples", hours)))
    change.replace(written, hours=hours)
    change.record("samples", samples.version)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import create_table_with_add_actions
from pyarrow import fs as arrow_fs
from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from analytics.tables import manifest
from analytics.tables.change import TableChange
from analytics.tables.errors import ChangedMeanwhile, NoTables, TablesError
from analytics.tables.locations import Location, locate
from analytics.tables.partitions import Partition, partition_from, partitions_of
from analytics.tables.schemas import PARTITIONS, SCHEMAS, VIEWS, View

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

ATTEMPTS_MAX: Final = 20
HISTORY_DAYS: Final = 7
_SETTINGS: Final = {"delta.logRetentionDuration": f"interval {HISTORY_DAYS} days", "delta.checkpointInterval": "100"}
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a table: path relative to the table, and what Delta's log says of it."""

    path: str
    size_bytes: int
    partition: Partition


class Snapshot:
    """One version of a table."""

    def __init__(self, spark: SparkSession, location: Location, table: str, delta: DeltaTable) -> None:
        self.table = table
        self.version = delta.version()
        self._spark = spark
        self.url = f"{location.spark_url}/{table}"
        self.delta = delta

    @cached_property
    def files(self) -> list[DataFile]:
        """The files of this version."""
        found: dict[str, Any] = pa.table(self.delta.get_add_actions(flatten=True)).to_pydict()
        rows = len(found["path"])
        columns = [found.get(f"partition.{column}", [None] * rows) for column in Partition._fields]
        partitions = (Partition(*values) for values in zip(*columns, strict=True))
        return [
            DataFile(path, size, partition)
            for path, size, partition in zip(found["path"], found["size_bytes"], partitions, strict=True)
        ]

    def files_of(self, view: str, hours: Iterable[datetime] | None = None) -> list[DataFile]:
        """Return a view's files; `hours`: only those of the partitions that hold these hours."""
        chosen = self._view(view)
        files = [file for file in self.files if chosen.width is None or file.partition.width == chosen.width]
        if hours is None:
            return files
        wanted = partitions_of(chosen, hours)
        return [file for file in files if file.partition in wanted]

    def read(self, view: str, hours: Iterable[datetime] | None = None) -> DataFrame:
        """Return a view's rows; `hours`: only the partitions that hold these hours."""
        return self.read_paths(view, [file.path for file in self.files_of(view, hours)])

    def read_paths(self, view: str, paths: Iterable[str]) -> DataFrame:
        """Return the rows of these files of a view, with the columns of its partitions."""
        schema, partitions = SCHEMAS[self.table], PARTITIONS[self.table]
        urls = [f"{self.url}/{path}" for path in paths]
        if not urls:
            empty = (F.lit(None).cast(field.dataType).alias(field.name) for field in schema)
            return self._spark.range(0).select(*empty).where(F.lit(False))  # Spark's optimizer knows that it is empty
        stored = StructType([field for field in schema if field.name not in partitions])
        return self._spark.read.schema(stored).parquet(*urls).withColumns(partition_columns(view))

    def hours(self, view: str, first: datetime, last: datetime) -> list[datetime]:
        """Return the hours of the view's partitions (of one by day, the days' first hours) from `first` to `last`."""
        by_day = self._view(view).by == "day"
        found = {file.partition.first_hour for file in self.files_of(view)}
        return sorted(
            hour for hour in found if (first.date() <= hour.date() <= last.date() if by_day else first <= hour <= last)
        )

    def series(self) -> DataFrame:
        """Return the rows of `series`, each once, however many batches met it."""
        return (
            self.read("series")
            .groupBy("series_id")
            .agg(
                F.first("metric").alias("metric"),
                F.first("labels").alias("labels"),
                F.max("kind").alias("kind"),
                F.min("first_seen").alias("first_seen"),
            )
        )

    def recorded(self, app: str) -> int | None:
        """Return the number that a change recorded under this name; None without any."""
        return self.delta.transaction_version(app)

    def _view(self, view: str) -> View:
        if VIEWS[view].table != self.table:
            raise ValueError(f"{view} is no view of {self.table}")
        return VIEWS[view]


class Tables:
    """The tables below a root; `as_of`: as they were at this time. Methods raise TablesError."""

    def __init__(self, spark: SparkSession, location: Location, as_of: datetime | None = None) -> None:
        self.spark = spark
        self.location = location
        self.as_of = as_of

    @classmethod
    def open(cls, spark: SparkSession, root: str, *, create: bool = True, as_of: datetime | None = None) -> Tables:
        """Check the manifest and make missing tables. Raises NoTables if there are none and `create` is false."""
        location = locate(spark, root)
        tables = cls(spark, location, as_of)
        _prepare_writes(spark)
        absent = f"there are no tables at {location.spark_url}: has `ingest` run, with the same --tables?"
        if create and location.spark_url.startswith("file:"):
            Path(location.delta_url).mkdir(parents=True, exist_ok=True)
        with storage_errors(location.spark_url, absent):
            files = tables.filesystem()
            if manifest.read_version(files, location.spark_url) is None:
                if not create:
                    raise NoTables(absent)
                manifest.write_manifest(spark, location.spark_url)
            for table, schema in SCHEMAS.items():
                create_table_with_add_actions(
                    f"{location.delta_url}/{table}",
                    Schema.from_arrow(to_arrow_schema(_nullable(schema), timezone="UTC")),
                    [],
                    mode="ignore",
                    partition_by=list(PARTITIONS[table]),
                    configuration=_SETTINGS,
                    storage_options=location.options,
                )
        return tables

    def filesystem(self, path: str = "") -> arrow_fs.FileSystem:
        """Return the files below the root, or below a path in it."""
        url = f"{self.location.delta_url}/{path}".rstrip("/")
        return arrow_fs.PyFileSystem(DeltaStorageHandler(url, self.location.options))

    def snapshot(self, table: str, version: int | datetime | None = None) -> Snapshot:
        """Return a version of a table: the newest (as of `as_of`), that of a number, or the newest of a moment."""
        url = f"{self.location.delta_url}/{table}"
        with storage_errors(f"{self.location.spark_url}/{table}"):
            delta = DeltaTable(url, storage_options=self.location.options)
            if (chosen := self.as_of if version is None else version) is not None:
                delta.load_as_version(chosen)
            if isinstance(chosen, datetime):
                self._check_age(delta.version(), table, chosen)
            return Snapshot(self.spark, self.location, table, delta)

    def _check_age(self, version: int, table: str, moment: datetime) -> None:
        """Refuse a version after `moment`: delta-rs loads the oldest one for a time before the table's history."""
        made = self.filesystem(table).get_file_info(f"_delta_log/{version:020}.json").mtime
        if made is None or made > moment:
            raise TablesError(f"the history of {table} does not go back to {moment:%Y-%m-%d %H:%M:%S} UTC")

    def read(self, view: str, hours: Iterable[datetime] | None = None) -> DataFrame:
        """Return the newest rows of a view; `hours`: only the partitions that hold these hours.

        Series are there once, however many batches met them.
        """
        snapshot = self.snapshot(VIEWS[view].table)
        return snapshot.series() if view == "series" else snapshot.read(view, hours)

    def read_between(self, view: str, first: datetime, last: datetime) -> DataFrame:
        """Return the newest rows of a view's partitions from that of `first` to that of `last`."""
        snapshot = self.snapshot(VIEWS[view].table)
        return snapshot.read(view, snapshot.hours(view, first, last))

    def hours(self, view: str, first: datetime, last: datetime) -> list[datetime]:
        """Return the hours of the view's partitions, as `Snapshot.hours`."""
        return self.snapshot(VIEWS[view].table).hours(view, first, last)

    def changed_hours(self, snapshot: Snapshot, since: int | None) -> list[datetime]:
        """Return the hours to which versions after `since` added rows; all hours if that cannot be known any more.

        Expired and compacted files are no change. The log's files are read, since delta-rs does not say which changes
        only rearranged rows.
        """
        if since is None or since > snapshot.version:
            return sorted({file.partition.first_hour for file in snapshot.files})
        files, found = self.filesystem(snapshot.table), set[datetime]()
        for version in range(since + 1, snapshot.version + 1):
            try:
                with storage_errors(snapshot.table):
                    text = files.open_input_file(f"_delta_log/{version:020}.json").readall().decode()
            except FileNotFoundError:
                return self.changed_hours(snapshot, None)
            actions = (json.loads(line).get("add") for line in text.splitlines())
            found |= {partition_from(add["partitionValues"]).first_hour for add in actions if add and add["dataChange"]}
        return sorted(found)

    @contextmanager
    def change(self, table: str, snapshot: Snapshot | None = None) -> Iterator[TableChange]:
        """Run the block as one change of a table; after an exception nothing is changed.

        The change is computed from `snapshot` (default: the newest) and commits only at that version. Raises
        ChangedMeanwhile: compute it again, as `attempt` does.
        """
        change = TableChange(self, snapshot or self.snapshot(table))
        try:
            yield change
        except BaseException:
            change.discard()
            raise
        change.commit()


def attempt(compute: Callable[[], Result]) -> Result:
    """Compute and commit a change, again if another process changed the table meanwhile. Raises ChangedMeanwhile."""
    for left in range(ATTEMPTS_MAX - 1, -1, -1):
        try:
            return compute()
        except ChangedMeanwhile:
            if not left:
                raise
    raise AssertionError


def partition_columns(view: str) -> dict[str, Column]:
    """Return the columns of the partitions, computed from the rows: all rows of a file have the same."""
    table, width, by = VIEWS[view]
    moment = "ts" if "ts" in SCHEMAS[table].fieldNames() else "window"
    hour = F.hour(moment) if by == "hour" else F.lit(None).cast("int")
    known = {"width": F.lit(width), "date": F.to_date(moment), "hour": hour}
    return {column: known[column] for column in PARTITIONS[table]}


def _nullable(schema: StructType) -> StructType:
    """Return the schema with nullable columns: Delta's writers have to check others, row by row."""
    return StructType([type(field)(field.name, field.dataType) for field in schema])


def _prepare_writes(spark: SparkSession) -> None:
    """Make Spark write what other readers of Delta tables read, and skip files by: 64-bit timestamps, not INT96.

    On local disks, Hadoop writes no .crc files then: Parquet's pages have checksums of their own.
    """
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    session: Any = spark
    local = session._jvm.org.apache.hadoop.fs.FileSystem.getLocal(session._jsc.hadoopConfiguration())  # noqa: SLF001
    local.setWriteChecksum(False)


@contextmanager
def storage_errors(what: str, absent: str = "") -> Iterator[None]:
    """Turn delta-rs' errors into TablesError, which names the table; `absent`: the text if there is none."""
    try:
        yield
    except TableNotFoundError as error:
        raise NoTables(absent or f"there is no table at {what}: {error}") from error
    except DeltaError as error:
        raise TablesError(f"{what}: {error}") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TablesError(f"{what}: {error}") from error
