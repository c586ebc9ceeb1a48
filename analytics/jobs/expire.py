"""The job `expire`: takes rows older than their table's retention out, and deletes files that no version needs.

Whole days go: a day expires when its last instant is older than the retention. Its files stay for `--history-days`,
for versions of the past (`Tables.snapshot`) and for queries that read them now. Series stay: they are few, and rollups
that outlive the samples need their labels.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job_session, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from analytics.tables.store import Tables

FOREVER = 0
DEFAULT_DAYS = {
    "samples": 30,
    "histograms": 30,
    "rollup_1m": 90,
    "histograms_1m": 90,
    "rollup_1h": 730,
    "histograms_1h": 730,
    "usage_ledger": 90,
}
"""Retention by table, in days; other tables are kept forever."""

HISTORY_DAYS: Final = 7
HISTORY_DAYS_MIN: Final = 2
"""Files that no version names yet are a running job's, unless they are older: no job runs longer."""


def run(
    spark: SparkSession, root: str, days: dict[str, int], *, now: datetime, history_days: int = HISTORY_DAYS
) -> list[str]:
    """Expire days of each view in `days` (0: keep forever); return `view day` of those that expired."""
    from analytics.tables.schemas import SCHEMAS, VIEWS
    from analytics.tables.store import Tables, attempt

    tables, progress = Tables.open(spark, root, create=False), Progress()
    by_table: dict[str, dict[str, int]] = defaultdict(dict)
    for view, kept in days.items():
        if kept != FOREVER:
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
    from analytics.tables.errors import change_errors

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


def parse_retention(texts: tuple[str, ...]) -> dict[str, int]:
    """Parse options as `samples=7` over the defaults. Raises click.BadParameter."""
    from analytics.tables.schemas import VIEWS

    days = dict(DEFAULT_DAYS)
    for text in texts:
        table, _, number = text.partition("=")
        if table not in VIEWS or not VIEWS[table].by:
            known = ", ".join(name for name, view in VIEWS.items() if view.by)
            raise click.BadParameter(f"{table!r} is no table that can expire; there are {known}")
        if not number.isdecimal():
            raise click.BadParameter(f"{text!r} is not TABLE=DAYS")
        days[table] = int(number)
    return days


@click.command("expire")
@tables_option
@click.option(
    "--keep",
    "keep",
    multiple=True,
    metavar="TABLE=DAYS",
    help="Retention of a table; 0: forever. May be repeated. Default: "
    + ", ".join(f"{table}={days}" for table, days in DEFAULT_DAYS.items())
    + ", all others forever.",
)
@click.option(
    "--history-days",
    type=click.IntRange(min=HISTORY_DAYS_MIN),
    default=HISTORY_DAYS,
    show_default=True,
    help="How long replaced, compacted and expired files stay on disk, for versions of the past.",
)
@verbose_option
def command(root: str, keep: tuple[str, ...], history_days: int) -> None:
    """Delete what is older than its retention."""
    days = parse_retention(keep)
    with job_session("expire") as session:
        run(session, root, days, now=datetime.now(UTC), history_days=history_days)


if __name__ == "__main__":
    command()
