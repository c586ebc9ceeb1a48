"""The tables below one root: snapshots to read, transactions to write.

tables = Tables.open(spark, "s3a://bucket/metrics")
dirty = tables.dirty("rollup")
frame = tables.read("samples", dirty.hours)
with tables.transaction("rollup") as change:
    change.overwrite("rollup_1m", rolled, hours=dirty.hours)
    change.mark_dirty("usage", dirty.hours)
    change.clear(dirty)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote

from analytics.tables import commits, dirty, manifest
from analytics.tables.filesystem import Entry, Filesystem
from analytics.tables.partitions import day_of, hour_of_partition, partitions_of
from analytics.tables.schemas import CONTENT, PARTITIONS, SCHEMAS
from analytics.tables.transaction import Transaction, empty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

SNAPSHOT_TRIES_MAX = 60
SNAPSHOT_PAUSE_S = 0.5


class NoSnapshot(Exception):
    """Other jobs changed the tables all the time while this one wanted to read them."""


class NoTables(Exception):
    """There are no tables at this root."""


class Tables:
    """One root on any Hadoop filesystem. Raises FilesystemError, NewerTables, BrokenCommit and NoSnapshot."""

    def __init__(self, spark: SparkSession, files: Filesystem) -> None:
        self.spark = spark
        self.files = files

    @classmethod
    def open(cls, spark: SparkSession, root: str, *, create: bool = True) -> Tables:
        """Check the manifest, and finish what a killed job left. Raises NoTables where `create` is false."""
        files = Filesystem(spark, root)
        if not create and manifest.version(files) is None:
            raise NoTables(f"there are no tables at {files.root}: has `ingest` run, and with the same --tables?")
        manifest.ensure(files)
        commits.recover(files)
        return cls(spark, files)

    def read(self, table: str, hours: Iterable[datetime] | None = None) -> DataFrame:
        """A snapshot of a table: rows of whole changes only. `hours`: only the partitions that hold these hours."""
        partitions = None if hours is None else partitions_of(table, hours)
        for _ in range(SNAPSHOT_TRIES_MAX):
            before = commits.state(self.files)
            if not before[0]:
                frame = self._frame(table, partitions)  # Spark lists the files here, not when the rows are read
                if commits.state(self.files) == before:
                    return frame
            else:
                time.sleep(SNAPSHOT_PAUSE_S)
                commits.recover(self.files)
        raise NoSnapshot(f"{self.files.url(table)} was changed {SNAPSHOT_TRIES_MAX} times while it was being listed")

    def _frame(self, table: str, partitions: list[str] | None) -> DataFrame:
        paths = [table] if partitions is None else [f"{table}/{name}" for name in partitions]
        present = [self.files.url(path) for path in paths if self.files.exists(path)]
        if not present:
            return empty(self.spark, SCHEMAS[table])
        return self._reader(table).parquet(*present)

    def _reader(self, table: str) -> DataFrameReader:
        return self.spark.read.schema(SCHEMAS[table]).option("basePath", self.files.url(table))

    def partitions(self, table: str) -> list[str]:
        """The partitions that a table has (`date=…/hour=…`), sorted; [""] for a table without partitions."""
        found = [""]
        for column in PARTITIONS[table]:
            found = [
                f"{parent}/{name}".lstrip("/")
                for parent in found
                for name in self.files.names(f"{table}/{parent}".rstrip("/"))
                if name.startswith(f"{column}=")
            ]
        return sorted(found)

    def hours(self, table: str, first: datetime, last: datetime) -> list[datetime]:
        """The hours (of a table by day, the days' first hours) from `first` to `last` that the table has, sorted."""
        days = [
            name
            for name in self.files.names(table)
            if (day := day_of(name)) is not None and first.date() <= day <= last.date()
        ]
        if "hour" not in PARTITIONS[table]:
            return [hour_of_partition(day) for day in days]
        found = [
            hour_of_partition(f"{day}/{name}")
            for day in days
            for name in self.files.names(f"{table}/{day}")
            if name.startswith("hour=")
        ]
        return sorted(hour for hour in found if first <= hour <= last)

    def visible_files(self, table: str, partition: str) -> list[Entry]:
        """The files of one partition that have rows."""
        entries = self.files.entries(f"{table}/{partition}".rstrip("/"))
        return [entry for entry in entries if not entry.is_directory and entry.name[0] not in "._"]

    def read_files(self, table: str, partition: str, names: Iterable[str]) -> DataFrame:
        """The rows of these files of a partition."""
        urls = [self.files.url(f"{table}/{partition}".rstrip("/") + f"/{name}") for name in names]
        return self._reader(table).parquet(*urls)

    def contents(self, table: str, hours: Iterable[datetime], *, bytes_max: int) -> tuple[DataFrame, DataFrame]:
        """A snapshot as `read` gives it, but the files up to this size as they are (a row each, column `content`) and
        the rows of all others: a Python worker reads Parquet several times as fast as Spark hands it rows.
        """
        files = [unquote(url) for url in self.read(table, hours).inputFiles()]
        if not files:
            return empty(self.spark, CONTENT), empty(self.spark, SCHEMAS[table])
        found = self.spark.read.format("binaryFile").load(files)
        large = [row["path"] for row in found.where(found["length"] > bytes_max).select("path").collect()]
        rows = self._reader(table).parquet(*large) if large else empty(self.spark, SCHEMAS[table])
        return found.where(found["length"] <= bytes_max).select("content"), rows

    def is_done(self, identity: str) -> bool:
        """Was the change of this name made, before now or by applying what a killed process had committed."""
        commits.recover(self.files)
        return commits.is_done(self.files, identity)

    def dirty(self, queue: str) -> dirty.Dirty:
        """What the queue's job has to recompute. Take it before reading."""
        commits.recover(self.files)
        return dirty.take(self.files, queue)

    @contextmanager
    def transaction(self, what: str, *, identity: str | None = None) -> Iterator[Transaction]:
        """All that is written inside becomes visible at the end, or nothing after an exception.

        Give an `identity` where the same change may come again, and ask `is_done` for it before.
        """
        change = Transaction(self, identity or commits.new_id(what))
        try:
            yield change
        except BaseException:
            change.abandon()
            raise
        change.commit()
