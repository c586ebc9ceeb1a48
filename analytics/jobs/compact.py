"""The job `compact`: many small files of a closed partition become few large ones, with the same rows.

Each batch of `ingest` adds one or more files to every hour that it touches, and so does each rollup. When no more
batches are expected for an hour, its files are rewritten. A job that changes the table meanwhile refuses this commit,
and it is done again: a compaction never brings back what another job replaced. (delta-rs' own `optimize.compact` does
not refuse one from an old version: of two at the same time, version 1.6.6 adds the rows of both.)
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from analytics.jobs.defaults import CLOSED_AFTER_HOURS, PARTITIONS_MAX
from analytics.jobs.progress import Progress
from analytics.tables.schemas import SCHEMAS, VIEWS
from analytics.tables.store import Tables, attempt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.tables.partitions import Partition

FILE_BYTES_TARGET: Final = 128 << 20
FILES_MIN: Final = 2
_SERIES_FILES_MIN: Final = 20
"""Files of `series`, which has no partitions, at which they are rewritten."""


def run(
    spark: SparkSession,
    root: str,
    *,
    now: datetime,
    closed_after_hours: int = CLOSED_AFTER_HOURS,
    limit: int = PARTITIONS_MAX,
) -> int:
    """Compact up to `limit` partitions that ended `closed_after_hours` or longer before `now`; return their number."""
    tables, progress = Tables.open(spark, root, create=False), Progress()
    closed_before = now - timedelta(hours=closed_after_hours)
    todo = [(table, partition) for table in SCHEMAS for partition in _partitions(tables, table, closed_before)]
    done, chosen = 0, todo[:limit]
    for number, (table, partition) in enumerate(chosen, start=1):
        if table == "series":
            before, after = attempt(lambda: _rewrite_series(tables))
        else:
            before, after = attempt(lambda: _compact(tables, table, partition))  # noqa: B023 -- called at once
        done += before > after
        if before > after:
            left = progress.remaining_text(number, len(chosen), f"{len(chosen) - number} partitions left")
            where = " ".join(str(value) for value in partition if value is not None)
            progress.print_line(f"{f'{table} {where}'.rstrip()}: {before} files became {after}", left=left)
    progress.print_summary(f"{done} of {len(todo)} partitions with several files compacted")
    return done


def _partitions(tables: Tables, table: str, closed_before: datetime) -> list[Partition]:
    """Return the closed partitions of a table that have several files."""
    files = Counter(file.partition for file in tables.snapshot(table).files)
    if table == "series":
        return [partition for partition, count in files.items() if count >= _SERIES_FILES_MIN]
    return sorted(
        (partition for partition, count in files.items() if count >= FILES_MIN and _end(partition) <= closed_before),
        key=str,
    )


def _end(partition: Partition) -> datetime:
    return partition.first_hour + timedelta(hours=24 if partition.hour is None else 1)


def _compact(tables: Tables, table: str, partition: Partition) -> tuple[int, int]:
    """Rewrite one partition's files; return the numbers of files before and after."""
    with tables.change(table) as change:
        files = [file for file in change.snapshot.files if file.partition == partition]
        view = next(name for name, one in VIEWS.items() if (one.table, one.width) == (table, partition.width))
        rows = change.snapshot.read_paths(view, [file.path for file in files])
        parts = max(1, round(sum(file.size_bytes for file in files) / FILE_BYTES_TARGET))
        written = change.write(view, rows.coalesce(parts))
        change.rearrange(files, written)
    return len(files), len(written.actions)


def _rewrite_series(tables: Tables) -> tuple[int, int]:
    """Rewrite the series, each once."""
    with tables.change("series") as change:
        files = change.snapshot.files
        change.remove(files)
        written = change.write("series", change.snapshot.series().coalesce(1))
        change.append(written)
    return len(files), len(written.actions)
