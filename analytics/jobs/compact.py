"""The job `compact`: rewrites the many small files of a closed hour as few large ones, with the same rows.

Each batch of `ingest` adds one or more files to every hour that it touches, and so does each rollup. When no more
batches are expected for an hour, its files are read, sorted by series and time, and written again. Adding the new files
and removing the old ones is one change: readers see either set, and a kill in between changes nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from analytics.jobs.command_line import job_session, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.tables.store import Tables

FILE_BYTES_TARGET = 128 << 20
CLOSED_AFTER_HOURS = 2
FILES_MIN = 2


def run(
    spark: SparkSession, root: str, *, now: datetime, closed_after_hours: int = CLOSED_AFTER_HOURS, limit: int = 10_000
) -> int:
    """Compact up to `limit` partitions that ended `closed_after_hours` or longer before `now`; return their number."""
    from analytics.tables.schemas import SCHEMAS
    from analytics.tables.store import Tables

    tables = Tables.open(spark, root, create=False)
    progress = Progress()
    closed_before = now - timedelta(hours=closed_after_hours)
    todo = [
        (table, partition)
        for table in SCHEMAS
        for partition in tables.partitions(table)
        if _partition_end(partition, closed_before) <= closed_before
        and len(tables.visible_files(table, partition)) >= FILES_MIN
    ]
    done, chosen = 0, todo[:limit]
    for number, (table, partition) in enumerate(chosen, start=1):
        before, after = compact_partition(tables, table, partition)
        done += before > after
        if before > after:
            left = progress.remaining_text(number, len(chosen), f"{len(chosen) - number} partitions left")
            progress.print_line(f"{f'{table} {partition}'.rstrip()}: {before} files became {after}", left=left)
    progress.print_summary(f"{done} of {len(todo)} partitions with several files compacted")
    return done


def _partition_end(partition: str, always: datetime) -> datetime:
    """Return the end of a partition's time; `always` for a table without partitions."""
    from analytics.tables.partitions import hour_of_partition

    if not partition:
        return always
    return hour_of_partition(partition) + timedelta(hours=1 if "hour=" in partition else 24)


def compact_partition(tables: Tables, table: str, partition: str) -> tuple[int, int]:
    """Rewrite one partition's files, if that reduces their number; return the numbers before and after.

    Files that other jobs add meanwhile stay as they are: only files that were read are replaced.
    """
    entries = tables.visible_files(table, partition)
    wanted = max(1, -(-sum(entry.size_bytes for entry in entries) // FILE_BYTES_TARGET))
    if len(entries) <= wanted:
        return len(entries), len(entries)
    names = [entry.name for entry in entries]
    rows = tables.read_files(table, partition, names)
    order = [name for name in ("series_id", "ts", "window") if name in rows.columns]
    with tables.transaction("compact") as change:
        parts = rows.repartition(wanted, *order[:1]) if wanted > 1 else rows.coalesce(1)
        staged = change.stage_rows(table, parts.sortWithinPartitions(*order) if order else parts)
        if staged.count() != rows.count():
            raise RuntimeError(f"{table} {partition}: the rows changed while they were compacted; nothing was replaced")
        change.add_staged(table)
        change.remove_files(table, partition, names)
    return len(entries), len(tables.visible_files(table, partition))


@click.command("compact")
@tables_option
@click.option(
    "--closed-after-hours",
    type=click.IntRange(min=0),
    default=CLOSED_AFTER_HOURS,
    show_default=True,
    help="Leave a partition alone until it ended this long ago: late samples would only make small files again.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=10_000, show_default=True, help="Partitions in one run, at most."
)
@verbose_option
def command(root: str, closed_after_hours: int, limit: int) -> None:
    """Make few large files of many small ones."""
    with job_session("compact") as session:
        run(session, root, now=datetime.now(UTC), closed_after_hours=closed_after_hours, limit=limit)


if __name__ == "__main__":
    command()
