"""The job `ingest`: from the receiver's spool to the tables series, samples and histograms, exactly once.

Spark's checkpoint records which bytes of the spool belong to which batch. A batch is one change of the tables, named
after the checkpoint and its number: a batch repeated after a crash is skipped if it is done, else run again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job_session, replica_option, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option
from analytics.spool.reader import Position, count_bytes_after

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from analytics.tables.store import Tables

SETTINGS: Final = {
    # A task's samples are of few hours: concurrent writers for their files avoid sorting all rows by hour first.
    "spark.sql.maxConcurrentOutputFileWriters": "100",
}
NEVER = -1
SECONDS_PER_HOUR = 3600


class BatchIngester:
    """Callback that writes a stream's batches to the tables. `total_samples` counts what this process added."""

    def __init__(self, tables: Tables, checkpoint: str, spool: str, progress: Progress) -> None:
        from analytics.tables.filesystem import Filesystem

        self.total_samples = 0
        self.batches = 0
        self.error: Exception | None = None
        self._tables = tables
        self._progress = progress
        self._checkpoint = Filesystem(tables.spark, checkpoint)
        self._spool = spool
        self._whole_bytes: int | None = None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write a batch; called by Spark. Stores an exception in `error`, since Spark passes on only its text."""
        try:
            self._ingest_batch(rows, batch_id)
        except Exception as error:
            self.error = error
            raise

    def _ingest_batch(self, rows: DataFrame, batch_id: int) -> None:
        from analytics.jobs.batches import write_batch
        from analytics.tables import commits

        identity = commits.batch_id(self._stream_id(), batch_id)
        figures = write_batch(self._tables, identity, rows, batch_id)
        commits.delete_earlier_batches(self._tables.files, identity)
        self.batches += 1
        if figures is None:
            self._progress.print_line(f"batch {batch_id}: was added before a crash, goes on")
            return
        self.total_samples += figures.samples
        self._progress.print_line(
            f"batch {batch_id}: {figures.samples:,} samples, {figures.histograms:,} histograms, {figures.hours} hours, "
            f"{figures.new_series:,} new series, {figures.duplicates:,} duplicates left out",
            samples=figures.samples,
            left=self._remaining_text(batch_id),
        )

    def _remaining_text(self, batch_id: int) -> str:
        """Describe how much of the spool follows this batch, and about how long that takes."""
        if self._whole_bytes is None:
            self._whole_bytes = self._bytes_after(batch_id - 1)
        left, whole = self._bytes_after(batch_id), self._whole_bytes
        return self._progress.remaining_text(whole - left, whole, f"{left / 1e6:,.1f} MB of the spool left")

    def _bytes_after(self, batch_id: int) -> int:
        """Return the bytes of the spool after this batch."""
        lines = (self._checkpoint.read_text(f"offsets/{batch_id}") or "").splitlines()
        end = json.loads(lines[-1]) if lines else {"segment": 0, "offset": 0}
        return count_bytes_after(self._spool, Position(end["segment"], end["offset"]))

    def _stream_id(self) -> str:
        """Return the checkpoint's id: another checkpoint's batch of the same number is another batch."""
        text = self._checkpoint.read_text("metadata")
        if text is None:
            raise RuntimeError(f"Spark has written no metadata to the checkpoint {self._checkpoint.root}")
        return str(json.loads(text)["id"]).replace("-", "")


def start_stream(
    spark: SparkSession,
    ingest: BatchIngester,
    checkpoint: str,
    options: dict[str, str],
    follow_s: float | None,
) -> StreamingQuery:
    """Start the stream: up to the current end of the spool, or forever with `follow_s` seconds between polls."""
    from analytics.sources.spool import PrometheusSpool

    spark.dataSource.register(PrometheusSpool)
    rows = spark.readStream.format("prometheus_spool").options(**options, table="all").load()
    writer = rows.writeStream.foreachBatch(ingest).option("checkpointLocation", checkpoint)
    if follow_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{follow_s} seconds").start()


def run(
    spark: SparkSession,
    root: str,
    options: dict[str, str],
    checkpoint: str | None = None,
    follow_s: float | None = None,
) -> BatchIngester:
    """Run the job. `options` are the source's. Raises a batch's exception, and StreamingQueryException."""
    from pyspark.errors import StreamingQueryException

    from analytics.tables.store import Tables

    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    progress = Progress()
    tables = Tables.open(spark, root)
    checkpoint = checkpoint or tables.files.url("_checkpoints/ingest")
    ingest = BatchIngester(tables, checkpoint, options["path"], progress)
    query = start_stream(spark, ingest, checkpoint, options, follow_s)
    try:
        query.awaitTermination()
    except StreamingQueryException:
        if ingest.error is not None:
            raise ingest.error from None
        raise
    finally:
        query.stop()
    progress.print_summary(f"{ingest.batches} batches, {ingest.total_samples:,} samples added")
    return ingest


@click.command("ingest")
@click.option(
    "--spool", required=True, type=click.Path(exists=True, file_okay=False), help="The receiver's spool directory."
)
@tables_option
@click.option(
    "--checkpoint",
    metavar="PATH",
    help="Spark's checkpoint directory, one for each spool. Default: _checkpoints/ingest below the tables.",
)
@click.option(
    "--follow",
    "follow_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Run forever, polling for new samples this often. Default: ingest what there is, and exit.",
)
@click.option(
    "--max-bytes-per-batch",
    type=click.IntRange(min=1),
    default=64 << 20,
    show_default=True,
    help="Of the spool; it becomes about ten times as much in memory.",
)
@click.option(
    "--keep-spool-hours",
    type=click.IntRange(min=NEVER),
    default=24,
    show_default=True,
    help="Remove spool segments that are in the tables after this time; -1: never.",
)
@replica_option
@verbose_option
def command(  # noqa: PLR0917 -- click's manner
    spool: str,
    root: str,
    checkpoint: str | None,
    follow_s: float | None,
    max_bytes_per_batch: int,
    keep_spool_hours: int,
    replica_labels: tuple[str, ...],
) -> None:
    """Copy what the receiver stored to the tables."""
    keep_s = NEVER if keep_spool_hours == NEVER else keep_spool_hours * SECONDS_PER_HOUR
    options = {
        "path": spool,
        "maxBytesPerBatch": str(max_bytes_per_batch),
        "removeConsumedAfterSeconds": str(keep_s),
    }
    if replica_labels:
        options["replicaLabels"] = ",".join(replica_labels)
    with job_session("ingest") as session:
        run(session, root, options, checkpoint, follow_s)


if __name__ == "__main__":
    command()
