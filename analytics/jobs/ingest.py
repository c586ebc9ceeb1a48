"""The job `ingest`: from the receiver's spool to the tables series, samples and histograms, exactly once.

The tables record up to which byte of the spool they have everything, in the same commit as the rows (`batches`). So a
batch that was killed is read again, and what it had added is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analytics.jobs import batches
from analytics.jobs.batches import KnownSeries
from analytics.jobs.defaults import KEEP_SPOOL_FOREVER, KEEP_SPOOL_HOURS, MAX_BYTES_PER_BATCH
from analytics.jobs.progress import Progress
from analytics.sources.prometheus import Prometheus
from analytics.sources.spool import batch_end, check_segments_present
from analytics.spool import reader
from analytics.spool.positions import Position, spool_id
from analytics.spool.retention import remove_consumed
from analytics.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS: Final = {
    # A task's samples are of few hours: concurrent writers for their files avoid sorting all rows by hour first.
    "spark.sql.maxConcurrentOutputFileWriters": "100",
}


@dataclass(slots=True)
class IngestReport:
    """Result of a run."""

    batches: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Ingest:
    """A spool and the tables that it is brought into. `keep_hours`: how long consumed segments stay, or
    KEEP_SPOOL_FOREVER.
    """

    tables: Tables
    spool: str
    replica_labels: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES_PER_BATCH
    keep_hours: int = KEEP_SPOOL_HOURS

    def run(self, known: KnownSeries, progress: Progress) -> IngestReport:
        """Ingest all that is in the spool now. Raises TablesError, SpoolError, LostSegments, TooManyHours."""
        report, target = IngestReport(), reader.committed_end(self.spool)
        begin, app = self.position(), self.app
        if target in {begin, reader.BEGIN}:
            return report
        check_segments_present(self.spool, begin)
        whole = reader.count_bytes_after(self.spool, begin)
        while begin < target:
            end = batch_end(self.spool, begin, target, self.max_bytes)
            counts = batches.write_batch(self.tables, known, self._read(begin, end), batches.Position(app, end.number))
            self._remove_consumed(end)
            begin = end
            report.batches += 1
            report.samples += counts.samples
            left = reader.count_bytes_after(self.spool, end) if end < target else 0
            progress.print_line(
                f"up to {end.segment}:{end.offset}: {counts.samples:,} samples, {counts.histograms:,} histograms, "
                f"{counts.hours} hours, {counts.new_series:,} new series, {counts.duplicates:,} duplicates left out",
                samples=counts.samples,
                left=progress.remaining_text(whole - left, whole, f"{left / 1e6:,.1f} MB of the spool left"),
            )
        return report

    @property
    def app(self) -> str:
        """The name under which the tables record the position in this spool."""
        return f"ingest/{spool_id(self.spool)}"

    def position(self) -> Position:
        """Return up to where the tables have everything; at the beginning the oldest segment's start."""
        number = self.tables.snapshot("samples").recorded(self.app)
        if number is not None:
            return Position.from_number(number)
        segments = reader.list_segments(self.spool)
        return Position(segments[0].number, 0) if segments else reader.BEGIN

    def _read(self, begin: Position, end: Position) -> DataFrame:
        spark = self.tables.spark
        spark.dataSource.register(Prometheus)
        options = {"path": self.spool, "table": "all", "fromPosition": str(begin.number), "toPosition": str(end.number)}
        if self.replica_labels:
            options["replicaLabels"] = ",".join(self.replica_labels)
        return spark.read.format("prometheus").options(**options).load()

    def _remove_consumed(self, end: Position) -> None:
        """Remove segments before `end`, which are in the tables, if they are old enough."""
        if self.keep_hours == KEEP_SPOOL_FOREVER:
            return
        youngest = time.time() - self.keep_hours * 3600
        for segment in reader.list_segments(self.spool):
            if segment.number < end.segment and Path(segment.path).stat().st_mtime > youngest:
                end = Position(segment.number, 0)
                break
        remove_consumed(self.spool, end)


def run(
    spark: SparkSession,
    root: str,
    spool: str,
    *,
    replica_labels: tuple[str, ...] = (),
    max_bytes: int = MAX_BYTES_PER_BATCH,
    keep_hours: int = KEEP_SPOOL_HOURS,
    follow_s: float | None = None,
) -> IngestReport:
    """Run the job; with `follow_s` seconds between polls it never returns. Raises as `Ingest.run`."""
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    progress = Progress()
    tables = Tables.open(spark, root)
    ingest, known = Ingest(tables, spool, replica_labels, max_bytes, keep_hours), KnownSeries(tables)
    report = ingest.run(known, progress)
    while follow_s is not None:
        time.sleep(follow_s)
        ingest.run(known, progress)
    progress.print_summary(f"{report.batches} batches, {report.samples:,} samples added")
    return report
