"""A job's change of several tables, made visible atomically (the protocol is in `analytics.tables.commits`)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.tables import commits
from analytics.tables.filesystem import FilesystemError
from analytics.tables.partitions import hour_of_partition, hour_text, partitions_of
from analytics.tables.schemas import PARTITIONS, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from analytics.tables.dirty_hours import DirtyHours
    from analytics.tables.store import Tables

_VALUES = ("value", "sum", "min", "max", "first_v", "last_v", "entry", "increase")
PARQUET_OPTIONS: Final = {
    # Values rarely repeat: a dictionary of them costs time, and makes the files no smaller.
    **{f"parquet.enable.dictionary#{name}": "false" for name in _VALUES},
    # Level 3, the default, makes them no smaller either.
    "parquet.compression.codec.zstd.level": "1",
}
"""Options of Parquet's writer, independent of the session's settings."""


class Transaction:
    """Change in progress, made by `Tables.transaction`. Each write is a Spark job; the commit is one small file and a
    rename per file.
    """

    def __init__(self, tables: Tables, identity: str) -> None:
        self.identity = identity
        self._tables = tables
        self._files = tables.files
        for name in self._files.names(commits.STAGING):
            if name.startswith(f"{identity}."):  # left by an attempt of the same name
                self._files.delete(f"{commits.STAGING}/{name}")
        # Not the same directory: the killed attempt may have a Spark job that still writes.
        self._staging = f"{commits.STAGING}/{commits.new_id(f'{identity}.')}"
        self._record = commits.ChangeRecord(staging=self._staging)

    def stage_rows(self, table: str, frame: DataFrame) -> DataFrame:
        """Write rows to the staging directory, and return them as written. Replaces rows staged for the table before.

        Raises ValueError if those were already added to the table: their files would be gone at the commit.
        """
        path = f"{self._staging}/{table}"
        if any(staged.startswith(f"{path}/") for staged in self._record.adds):
            raise ValueError(f"{table}: rows were added in this change before; stage all of them at once")
        columns = [frame[field.name].cast(field.dataType) for field in SCHEMAS[table]]
        writer = frame.select(*columns).write.mode("overwrite").options(**PARQUET_OPTIONS)
        writer.partitionBy(*PARTITIONS[table]).parquet(self._files.url(path))
        return self.read_staged(table)

    def read_staged(self, table: str) -> DataFrame:
        """Return the rows staged for a table."""
        return self._tables.spark.read.schema(SCHEMAS[table]).parquet(self._files.url(f"{self._staging}/{table}"))

    def append_rows(self, table: str, frame: DataFrame) -> None:
        """Add rows to a table."""
        self.stage_rows(table, frame)
        self.add_staged(table)

    def overwrite_partitions(self, table: str, frame: DataFrame, *, hours: Iterable[datetime]) -> None:
        """Replace the partitions that hold `hours` by rows of `frame`; all rows must lie in these partitions.

        A partition that has no rows in `frame` becomes empty. Raises ValueError for rows of other partitions.
        """
        partitions = partitions_of(table, hours)
        self.stage_rows(table, frame)
        others = sorted({_partition(name) for name in self._staged_files(table)} - set(partitions))
        if others:
            raise ValueError(f"{table}: rows outside of the partitions to overwrite: {', '.join(others[:5])}")
        for partition in partitions:
            self.remove_files(table, partition, [entry.name for entry in self._tables.visible_files(table, partition)])
        self.add_staged(table)

    def add_staged(self, table: str) -> None:
        """Add the rows staged for a table to it."""
        for number, name in enumerate(self._staged_files(table)):
            final = f"{table}/{_partition(name)}".rstrip("/") + f"/{self.identity}-{number:05}.parquet"
            self._record.adds[f"{self._staging}/{table}/{name}"] = final

    def staged_hours(self, table: str) -> list[datetime]:
        """Return the first hours of the partitions with staged rows."""
        return sorted({hour_of_partition(_partition(name)) for name in self._staged_files(table)})

    def remove_files(self, table: str, partition: str, names: Iterable[str]) -> None:
        """Delete these files of a partition with the commit."""
        self._record.removes.extend(f"{table}/{partition}".rstrip("/") + f"/{name}" for name in names)

    def mark_dirty(self, queue: str, hours: Iterable[datetime]) -> None:
        """Mark hours for a queue's job to recompute. Calls accumulate."""
        marked = set(self._record.dirty.get(queue, ())) | {hour_text(hour) for hour in hours}
        if marked:
            self._record.dirty[queue] = sorted(marked)

    def clear_marks(self, dirty: DirtyHours) -> None:
        """Delete these marks with the commit: this change resolves them."""
        self._record.clears.extend(dirty.marks)

    def commit_change(self) -> None:
        """Commit and apply the change; called at the end of `Tables.transaction`."""
        commits.commit_change(self._files, self.identity, self._record)

    def discard_staged(self) -> None:
        """Delete the staged files; if the filesystem fails, they stay until `expire` deletes them."""
        with suppress(FilesystemError):
            self._files.delete(self._staging)

    def _staged_files(self, table: str) -> list[str]:
        return [name for name in self._files.files_below(f"{self._staging}/{table}") if name.endswith(".parquet")]


def _partition(path: str) -> str:
    return path.rpartition("/")[0]


def empty_frame(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame that Spark's optimizer knows to be empty, so that computations on it need no job."""
    columns = (F.lit(None).cast(field.dataType).alias(field.name) for field in schema)
    return spark.range(0).select(*columns).where(F.lit(False))
