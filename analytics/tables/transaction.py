"""What one job changes, over all tables, made visible at once (`analytics.tables.commits` says how)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- as everybody calls it

from analytics.tables import commits
from analytics.tables.filesystem import FilesystemError
from analytics.tables.partitions import hour_of_partition, hour_text, partitions_of
from analytics.tables.schemas import PARTITIONS, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from analytics.tables.dirty import Dirty
    from analytics.tables.store import Tables

_VALUES = ("value", "sum", "min", "max", "first_v", "last_v", "entry", "increase")
WRITING: Final = {
    # Values are hardly ever the same: a dictionary of them costs time, and makes the files no smaller.
    **{f"parquet.enable.dictionary#{name}": "false" for name in _VALUES},
    # Level 3, the default, makes them no smaller either.
    "parquet.compression.codec.zstd.level": "1",
}
"""How Parquet files are written, whatever the session's settings."""


class Transaction:
    """Made by `Tables.transaction`. Writing costs a Spark job; committing, one small file and a rename per file."""

    def __init__(self, tables: Tables, identity: str) -> None:
        self.identity = identity
        self._tables = tables
        self._files = tables.files
        for name in self._files.names(commits.STAGING):
            if name.startswith(f"{identity}."):  # what an attempt of the same name left
                self._files.delete(f"{commits.STAGING}/{name}")
        # Not the same directory: what was killed may have a Spark job that still writes.
        self._staging = f"{commits.STAGING}/{commits.new_id(f'{identity}.')}"
        self._record = commits.Record(staging=self._staging)

    def stage(self, table: str, frame: DataFrame) -> DataFrame:
        """Write rows where nobody reads them, and give them back as they were written. Drops what was staged before.

        Raises ValueError where that was added to the table already: it would be gone, and the change could not be made.
        """
        path = f"{self._staging}/{table}"
        if any(staged.startswith(f"{path}/") for staged in self._record.adds):
            raise ValueError(f"{table}: rows were added in this change before; stage all of them at once")
        columns = [frame[field.name].cast(field.dataType) for field in SCHEMAS[table]]
        writer = frame.select(*columns).write.mode("overwrite").options(**WRITING)
        writer.partitionBy(*PARTITIONS[table]).parquet(self._files.url(path))
        return self.staged(table)

    def staged(self, table: str) -> DataFrame:
        """What is staged for a table."""
        return self._tables.spark.read.schema(SCHEMAS[table]).parquet(self._files.url(f"{self._staging}/{table}"))

    def append(self, table: str, frame: DataFrame) -> None:
        """Add rows."""
        self.stage(table, frame)
        self.add_staged(table)

    def overwrite(self, table: str, frame: DataFrame, *, hours: Iterable[datetime]) -> None:
        """Replace the partitions that hold `hours` by rows of `frame`; all rows must lie in these partitions.

        A partition that has no rows in `frame` becomes empty. Raises ValueError for rows of other partitions.
        """
        partitions = partitions_of(table, hours)
        self.stage(table, frame)
        others = sorted({_partition(name) for name in self._staged_files(table)} - set(partitions))
        if others:
            raise ValueError(f"{table}: rows outside of the partitions to overwrite: {', '.join(others[:5])}")
        for partition in partitions:
            self.remove(table, partition, [entry.name for entry in self._tables.visible_files(table, partition)])
        self.add_staged(table)

    def add_staged(self, table: str) -> None:
        """What was staged for the table becomes part of it."""
        for number, name in enumerate(self._staged_files(table)):
            final = f"{table}/{_partition(name)}".rstrip("/") + f"/{self.identity}-{number:05}.parquet"
            self._record.adds[f"{self._staging}/{table}/{name}"] = final

    def staged_hours(self, table: str) -> list[datetime]:
        """The first hours of the partitions that have staged rows."""
        return sorted({hour_of_partition(_partition(name)) for name in self._staged_files(table)})

    def remove(self, table: str, partition: str, names: Iterable[str]) -> None:
        """Take files out of a partition."""
        self._record.removes.extend(f"{table}/{partition}".rstrip("/") + f"/{name}" for name in names)

    def mark_dirty(self, queue: str, hours: Iterable[datetime]) -> None:
        """Tell a queue's job to recompute these hours. Calls add up."""
        marked = set(self._record.dirty.get(queue, ())) | {hour_text(hour) for hour in hours}
        if marked:
            self._record.dirty[queue] = sorted(marked)

    def clear(self, dirty: Dirty) -> None:
        """This change deals with these marks."""
        self._record.clears.extend(dirty.marks)

    def commit(self) -> None:
        """Make all of it visible; called at the end of `Tables.transaction`."""
        commits.commit(self._files, self.identity, self._record)

    def abandon(self) -> None:
        """Drop what was staged; a filesystem that refuses even that leaves rubbish, which `expire` removes."""
        with suppress(FilesystemError):
            self._files.delete(self._staging)

    def _staged_files(self, table: str) -> list[str]:
        return [name for name in self._files.files_below(f"{self._staging}/{table}") if name.endswith(".parquet")]


def _partition(path: str) -> str:
    return path.rpartition("/")[0]


def empty(spark: SparkSession, schema: StructType) -> DataFrame:
    """No rows, and Spark knows it: what is computed of them alone costs no job."""
    columns = (F.lit(None).cast(field.dataType).alias(field.name) for field in schema)
    return spark.range(0).select(*columns).where(F.lit(False))
