"""Commands for upkeep: `compact`, `expire`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from analytics.commands.command_line import job_session, number_option, tables_option
from analytics.jobs.defaults import CLOSED_AFTER_HOURS, HISTORY_DAYS, HISTORY_DAYS_MIN, KEEP_DAYS, PARTITIONS_MAX
from analytics.jobs.quiet import verbose_option


@click.command("compact")
@tables_option
@number_option(
    "--closed-after-hours",
    click.IntRange(min=0),
    CLOSED_AFTER_HOURS,
    "Leave a partition alone until it ended this long ago: late samples would only make small files again.",
)
@number_option("--limit", click.IntRange(min=1), PARTITIONS_MAX, "Partitions in one run, at most.")
@verbose_option
def compact(**options: Any) -> None:
    """Make few large files of many small ones."""
    from analytics.jobs import compact

    with job_session("compact") as session:
        compact.run(session, now=datetime.now(UTC), **options)


@click.command("expire")
@tables_option
@click.option(
    "--keep",
    "keep",
    multiple=True,
    metavar="TABLE=DAYS",
    help="Retention of a table; 0: forever. May be repeated. Default: "
    + ", ".join(f"{table}={days}" for table, days in KEEP_DAYS.items())
    + ", all others forever.",
)
@number_option(
    "--history-days",
    click.IntRange(min=HISTORY_DAYS_MIN),
    HISTORY_DAYS,
    "How long replaced, compacted and expired files stay on disk, for versions of the past.",
)
@verbose_option
def expire(root: str, keep: tuple[str, ...], history_days: int) -> None:
    """Delete what is older than its retention."""
    days = parse_retention(keep)
    from analytics.jobs import expire

    with job_session("expire") as session:
        expire.run(session, root, days, now=datetime.now(UTC), history_days=history_days)


def parse_retention(texts: tuple[str, ...]) -> dict[str, int]:
    """Parse options as `samples=7` over the defaults. Raises click.BadParameter."""
    from analytics.tables.schemas import VIEWS

    days = dict(KEEP_DAYS)
    for text in texts:
        table, _, number = text.partition("=")
        if table not in VIEWS or not VIEWS[table].by:
            known = ", ".join(name for name, view in VIEWS.items() if view.by)
            raise click.BadParameter(f"{table!r} is no table that can expire; there are {known}")
        if not number.isdecimal():
            raise click.BadParameter(f"{text!r} is not TABLE=DAYS")
        days[table] = int(number)
    return days
