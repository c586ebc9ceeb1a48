"""The job `backfill`: copies samples from a Prometheus server to the tables.

For periods without a running receiver. It may be repeated and may overlap with ingested samples: samples that the
tables have are skipped. It runs in batches of some hours, each one change, so a kill loses at most the current batch.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from analytics.jobs.batches import KnownSeries, write_batch
from analytics.jobs.progress import Progress
from analytics.sources.prometheus import Prometheus
from analytics.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession, root: str, options: dict[str, str], *, start: datetime, end: datetime, batch_hours: int
) -> int:
    """Add the missing samples between start and end; return their number. `options` are the source's."""
    spark.dataSource.register(Prometheus)
    tables = Tables.open(spark, root)
    known, progress = KnownSeries(tables), Progress()
    total, begin = 0, start
    while start < end:
        until = min(start + timedelta(hours=batch_hours), end)
        span = {"start": start.isoformat(), "end": until.isoformat()}
        rows = spark.read.format("prometheus").options(**options, **span, api="query", table="all").load()
        figures = write_batch(tables, known, rows)
        total += figures.samples
        progress.print_line(
            f"{start:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}: {figures.samples:,} samples, {figures.new_series:,} "
            f"new series, {figures.duplicates:,} were there",
            samples=figures.samples,
            left=progress.remaining_text(
                (until - begin).total_seconds(),
                (end - begin).total_seconds(),
                f"{(end - until).total_seconds() / 3600:.4g} hours left",
            ),
        )
        start = until
    progress.print_summary(f"{total:,} samples added")
    return total
