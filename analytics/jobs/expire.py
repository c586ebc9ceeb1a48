"""The job `expire`: takes rows older than their table's retention out, and deletes files that no version needs.

Whole days go: a day expires when its last instant is older than the retention. Its files stay for `--history-days`,
for versions of the past (`Tables.snapshot`) and for queries that read them now. Series stay: they are few, and rollups
that outlive the samples need their labels.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from analytics.jobs.defaults import HISTORY_DAYS, HISTORY_DAYS_MIN, KEEP_FOREVER
from analytics.jobs.progress import Progress
from analytics.tables.errors import change_errors
from analytics.tables.schemas import SCHEMAS, VIEWS
from analytics.tables.store import Tables, attempt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession, root: str, days: dict[str, int], *, now: datetime, history_days: int = HISTORY_DAYS
) -> list[str]:
    """Expire days of each view in `days` (0: keep forever); return `view day` of those that expired."""
    tables, progress = Tables.open(spark, root, create=False), Progress()
    by_table: dict[str, dict[str, int]] = defaultdict(dict)
    for view, kept in days.items():
        if kept != KEEP_FOREVER:
            by_table[VIEWS[view].table][view] = kept
    expired = [
        line
        for table, own in sorted(by_table.items())
        for line in attempt(lambda: _expire(tables, table, own, now))  # noqa: B023 -- called at once
    ]
    for line in expired:
        progress.print_line(f"expired: {line}")
    deleted = sum(_vacuum(tables, table, history_days) for table in SCHEMAS)
    progress.print_summary(f"{len(expired)} days expired, {deleted} files deleted")
    return expired


def _expire(tables: Tables, table: str, days: dict[str, int], now: datetime) -> list[str]:
    """Take the expired days of a table's views out, as one change."""
    expired = set()
    with tables.change(table) as change:
        for view, kept in days.items():
            oldest = (now - timedelta(days=kept)).date()
            for file in change.snapshot.files_of(view):
                if file.partition.date is not None and file.partition.date < oldest:
                    change.remove([file])
                    expired.add(f"{view} {file.partition.date}")
    return sorted(expired)


def _vacuum(tables: Tables, table: str, history_days: int) -> int:
    """Delete the files of a table that no version of the last `history_days` names, and old versions' logs."""
    delta = tables.snapshot(table).delta
    hours = max(history_days, HISTORY_DAYS_MIN) * 24
    with change_errors(table):
        deleted = delta.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True)
        tables.snapshot(table).delta.create_checkpoint()
        tables.snapshot(table).delta.cleanup_metadata()
    if tables.location.spark_url.startswith("file:"):
        _delete_empty_directories(Path(tables.location.delta_url) / table, time.time() - hours * 3600)
    return len(deleted)


def _delete_empty_directories(table: Path, before_s: float) -> None:
    """Delete the directories that changes have left on a local disk; object stores have none."""
    for directory, _, _ in os.walk(table, topdown=False):
        path = Path(directory)
        if path != table and "_delta_log" not in path.parts and path.stat().st_mtime < before_s:
            try:
                path.rmdir()
            except OSError:
                continue  # not empty
