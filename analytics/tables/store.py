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

from analytics.tables import commits, dirty_hours, manifest
from analytics.tables.filesystem import Entry, Filesystem
from analytics.tables.partitions import day_of, hour_of_partition, partitions_of
from analytics.tables.schemas import CONTENT, PARTITIONS, SCHEMAS
from analytics.tables.transaction import Transaction, empty_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

SNAPSHOT_ATTEMPTS_MAX = 60
SNAPSHOT_PAUSE_S = 0.5


class NoSnapshot(Exception):
    """Other jobs changed the tables during every attempt to list them."""


class NoTables(Exception):
    """There are no tables at this root."""


class Tables:
    """The tables below a root on a Hadoop filesystem. Raises FilesystemError, NewerTables, BrokenCommit, NoSnapshot."""

    def __init__(self, spark: SparkSession, files: Filesystem) -> None:
        self.spark = spark
        self.files = files

    @classmethod
    def open(cls, spark: SparkSession, root: str, *, create: bool = True) -> Tables:
        """Check the manifest and apply pending changes. Raises NoTables if there are none and `create` is false."""
        files = Filesystem(spark, root)
        if not create and manifest.read_version(files) is None:
            raise NoTables(f"there are no tables at {files.root}: has `ingest` run, and with the same --tables?")
        manifest.ensure_manifest(files)
        commits.apply_pending(files)
        return cls(spark, files)

    def read(self, table: str, hours: Iterable[datetime] | None = None) -> DataFrame:
        """Return a snapshot of a table, with whole changes only. `hours`: only the partitions that hold these hours."""
        partitions = None if hours is None else partitions_of(table, hours)
        for _ in range(SNAPSHOT_ATTEMPTS_MAX):
            before = commits.read_state(self.files)
            if not before[0]:
                frame = self._read_partitions(
                    table, partitions
                )  # Spark lists the files here, not when the rows are read
                if commits.read_state(self.files) == before:
                    return frame
            else:
                time.sleep(SNAPSHOT_PAUSE_S)
                commits.apply_pending(self.files)
        raise NoSnapshot(f"{self.files.url(table)} was changed {SNAPSHOT_ATTEMPTS_MAX} times while it was being listed")

    def _read_partitions(self, table: str, partitions: list[str] | None) -> DataFrame:
        paths = [table] if partitions is None else [f"{table}/{name}" for name in partitions]
        present = [self.files.url(path) for path in paths if self.files.exists(path)]
        if not present:
            return empty_frame(self.spark, SCHEMAS[table])
        return self._reader(table).parquet(*present)

    def _reader(self, table: str) -> DataFrameReader:
        return self.spark.read.schema(SCHEMAS[table]).option("basePath", self.files.url(table))

    def partitions(self, table: str) -> list[str]:
        """Return a table's partitions (`date=…/hour=…`), sorted; [""] for a table without partitions."""
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
        """Return the table's hours (of a table by day, the days' first hours) from `first` to `last`, sorted."""
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
        """Return the data files of one partition."""
        entries = self.files.entries(f"{table}/{partition}".rstrip("/"))
        return [entry for entry in entries if not entry.is_directory and entry.name[0] not in "._"]

    def read_files(self, table: str, partition: str, names: Iterable[str]) -> DataFrame:
        """Return the rows of these files of a partition."""
        urls = [self.files.url(f"{table}/{partition}".rstrip("/") + f"/{name}") for name in names]
        return self._reader(table).parquet(*urls)

    def read_file_contents(
        self, table: str, hours: Iterable[datetime], *, bytes_max: int
    ) -> tuple[DataFrame, DataFrame]:
        """Return a snapshot in two parts: files up to `bytes_max` as binary (a row each, column `content`), and the
        rows of all others. A Python worker reads Parquet several times as fast as Spark passes rows to it.
        """
        files = [unquote(url) for url in self.read(table, hours).inputFiles()]
        if not files:
            return empty_frame(self.spark, CONTENT), empty_frame(self.spark, SCHEMAS[table])
        found = self.spark.read.format("binaryFile").load(files)
        large = [row["path"] for row in found.where(found["length"] > bytes_max).select("path").collect()]
        rows = self._reader(table).parquet(*large) if large else empty_frame(self.spark, SCHEMAS[table])
        return found.where(found["length"] <= bytes_max).select("content"), rows

    def is_done(self, identity: str) -> bool:
        """Return True if the change of this name was applied, after applying what is pending."""
        commits.apply_pending(self.files)
        return commits.is_done(self.files, identity)

    def dirty_hours(self, queue: str) -> dirty_hours.DirtyHours:
        """Return the hours that the queue's job has to recompute. Call this before reading the tables."""
        commits.apply_pending(self.files)
        return dirty_hours.read_dirty_hours(self.files, queue)

    @contextmanager
    def transaction(self, what: str, *, identity: str | None = None) -> Iterator[Transaction]:
        """Run the block as one change: its writes become visible at the end, or not at all after an exception.

        Pass an `identity` if the same change may recur, and check `is_done` for it first.
        """
        change = Transaction(self, identity or commits.new_id(what))
        try:
            yield change
        except BaseException:
            change.discard_staged()
            raise
        change.commit_change()
