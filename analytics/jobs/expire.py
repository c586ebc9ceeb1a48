"""The job `expire`: deletes rows older than their table's retention, and leftovers of killed jobs.

Whole days are deleted: a day expires when its last instant is older than the retention. A query that reads such a day
at that moment fails with a missing file; its next run does not read the day. Series stay: they are few, and rollups
that outlive the samples need their labels.
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

    from analytics.tables.filesystem import Filesystem

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

LEFTOVERS_AFTER = timedelta(days=2)
"""Age at which staged files are leftovers of a killed job: no job runs longer."""


def run(spark: SparkSession, root: str, days: dict[str, int], *, now: datetime) -> list[str]:
    """Delete expired days of each table in `days` (0: keep forever); return the deleted paths."""
    from analytics.tables.partitions import day_of
    from analytics.tables.store import Tables

    tables = Tables.open(spark, root, create=False)
    progress = Progress()
    deleted = []
    for table, kept in sorted(days.items()):
        if kept == FOREVER:
            continue
        oldest = (now - timedelta(days=kept)).date()
        for name in tables.files.names(table):
            if (day := day_of(name)) is not None and day < oldest:
                tables.files.delete(f"{table}/{name}")
                deleted.append(f"{table}/{name}")
                progress.print_line(f"deleted {table}/{name}, older than {kept} days")
    deleted += _delete_leftovers(tables.files, now)
    progress.print_summary(f"{len(deleted)} directories and files deleted")
    return deleted


def _delete_leftovers(files: Filesystem, now: datetime) -> list[str]:
    """Delete staged files of killed jobs, and old records of done changes (of a stream's batches, not the last)."""
    from analytics.tables import commits

    before_ms = int((now - LEFTOVERS_AFTER).timestamp() * 1000)
    old = [
        f"{directory}/{entry.name}"
        for directory in (commits.STAGING, commits.DONE)
        for entry in files.entries(directory)
        if entry.modified_ms < before_ms and not commits.is_batch_id(entry.name)
    ]
    for path in old:
        files.delete(path)
    return old


def _parse_retention(texts: tuple[str, ...]) -> dict[str, int]:
    """Parse options as `samples=7` over the defaults. Raises click.BadParameter."""
    from analytics.tables.schemas import PARTITIONS

    days = dict(DEFAULT_DAYS)
    for text in texts:
        table, _, number = text.partition("=")
        if not PARTITIONS.get(table):
            known = ", ".join(name for name, columns in PARTITIONS.items() if columns)
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
@verbose_option
def command(root: str, keep: tuple[str, ...]) -> None:
    """Delete what is older than its retention."""
    days = _parse_retention(keep)
    with job_session("expire") as session:
        run(session, root, days, now=datetime.now(UTC))


if __name__ == "__main__":
    command()
