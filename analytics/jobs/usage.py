"""The job `usage`: bytes, messages and sessions of each principal, by hour and by day; closed when they are final.

An hour closes when it ended `lateness` ago and no hour up to it is waiting to be rolled up; a day, with its last hour.
Hours close in order. A closed row does not change: later samples are counted, reported and left out. All tables change
in one change, and the job may run at any time, any number of times.

Closed hours are recomputed only on request (`--reopen-from`, after a backfill): all from one hour on, since each
counter's growth continues from hour to hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job_session, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option
from analytics.jobs.rollup import LOOKBACK_DAYS, QUEUE, USAGE_QUEUE, midnight

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from analytics.tables.store import Tables

LATENESS_HOURS: Final = 2.0
_EVER: Final = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC))
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Result of a run. `late_samples`: left out, by hour; `reopened`: hours that were closed before."""

    closed_until: datetime
    hours: int
    late_samples: dict[datetime, int]
    reopened: tuple[datetime, ...] = ()


class CannotReopen(Exception):
    """Hours to reopen have no rollup any more: recomputing them would lose their usage."""


def run(
    spark: SparkSession,
    root: str,
    *,
    now: datetime,
    lateness: timedelta = timedelta(hours=LATENESS_HOURS),
    lookback_days: int = LOOKBACK_DAYS,
    reopen_from: datetime | None = None,
) -> UsageReport:
    """Update the usage tables; hours from `reopen_from` on are recomputed, closed or not.

    Raises FilesystemError, NoTables, NoSnapshot, CannotReopen.
    """
    from analytics.tables.store import Tables
    from analytics.transforms import usage

    tables, progress = Tables.open(spark, root, create=False), Progress()
    dirty = tables.dirty_hours(USAGE_QUEUE)
    before, reopened = _reopened_hours(tables, closed_until(tables), reopen_from)
    until = _close_until(tables, before, now - lateness)
    series = usage.usage_series(tables.read("series")).cache()
    late = _late_samples(tables, series, [hour for hour in dirty.hours if before and hour < before])
    hours = _open_hours(tables, before)
    with tables.transaction(USAGE_QUEUE) as change:
        tails = _tails(tables, before or _EVER[0], lookback_days)
        rows = usage.ledger(_rows(tables, "rollup_1h", hours), series, tails, lookback_days)
        change.overwrite_partitions("usage_ledger", rows, hours=hours)
        days = sorted({midnight(hour) for hour in [*hours, *([before] if before else [])]})
        hourly = usage.hourly(change.read_staged("usage_ledger"), until)
        if before:
            published = tables.read("usage_hourly", days)
            hourly = hourly.unionByName(published.where(published["window"] < before))
        change.overwrite_partitions("usage_hourly", hourly, hours=days)
        change.overwrite_partitions("usage_daily", usage.daily(change.read_staged("usage_hourly"), until), hours=days)
        change.clear_marks(dirty)
    series.unpersist()
    report = UsageReport(until, len(hours), late, reopened)
    _print_report(progress, report)
    return report


def closed_until(tables: Tables) -> datetime | None:
    """Return the moment before which all usage is closed; None if nothing is closed."""
    ends = []
    for table, width in (("usage_hourly", _HOUR), ("usage_daily", _DAY)):
        last = tables.read(table).where("closed").selectExpr("max(unix_millis(window))").collect()[0][0]
        if last is not None:
            ends.append(datetime.fromtimestamp(last / 1000, UTC) + width)
    return max(ends, default=None)


def _reopened_hours(
    tables: Tables, before: datetime | None, reopen_from: datetime | None
) -> tuple[datetime | None, tuple[datetime, ...]]:
    """Return the closed end after `reopen_from`, and the hours that are open again. Raises CannotReopen."""
    from analytics.tables.partitions import hour_of

    if before is None or reopen_from is None or (first := hour_of(reopen_from)) >= before:
        return before, ()
    hours = tables.hours("usage_ledger", first, before - _HOUR)
    if gone := sorted(set(hours) - _rolled_hours(tables, first)):
        raise CannotReopen(
            f"{len(gone)} hours from {gone[0]:%Y-%m-%d %H:00} to {gone[-1]:%Y-%m-%d %H:00} have usage but no rollup_1h "
            "any more: reopen from a later hour"
        )
    return first, tuple(hours)


def _close_until(tables: Tables, before: datetime | None, latest: datetime) -> datetime:
    """Return the new closed end: never earlier than `before`, and not past an hour that waits to be rolled up."""
    from analytics.tables.partitions import hour_of

    waiting = [hour for hour in tables.dirty_hours(QUEUE).hours if before is None or hour >= before]
    until = min([hour_of(latest), *waiting])
    return until if before is None else max(before, until)


def _open_hours(tables: Tables, before: datetime | None) -> list[datetime]:
    """Return the open hours that have rows in the rollup or in the ledger."""
    first = before or _EVER[0]
    known = _rolled_hours(tables, first) | set(tables.hours("usage_ledger", first, _EVER[1]))
    return sorted(hour for hour in known if hour >= first)


def _rolled_hours(tables: Tables, first: datetime) -> set[datetime]:
    """Return the hours in rollup_1h, from the day of `first` on."""
    days = tables.hours("rollup_1h", midnight(first), _EVER[1])
    rolled = tables.read("rollup_1h", days).selectExpr("unix_millis(window)").distinct().collect()
    return {datetime.fromtimestamp(row[0] / 1000, UTC) for row in rolled}


def _rows(tables: Tables, table: str, hours: list[datetime]) -> DataFrame:
    frame = tables.read(table, hours)
    return frame.where(frame["window"].isin(*hours)) if hours else frame.limit(0)


def _tails(tables: Tables, before: datetime, lookback_days: int) -> DataFrame:
    from analytics.transforms import usage

    first = midnight(before) - (lookback_days + 1) * _DAY
    return usage.ledger_tails(tables.read("usage_ledger", tables.hours("usage_ledger", first, before - _HOUR)))


def _late_samples(tables: Tables, series: DataFrame, hours: list[datetime]) -> dict[datetime, int]:
    from analytics.transforms import usage

    if not hours:
        return {}
    found = usage.count_late_samples(_rows(tables, "rollup_1h", hours), series, tables.read("usage_ledger", hours))
    rows = found.selectExpr("unix_millis(window)", "samples").collect()
    return {datetime.fromtimestamp(row[0] / 1000, UTC): row[1] for row in rows}


def _print_report(progress: Progress, report: UsageReport) -> None:
    late, reopened = report.late_samples, report.reopened
    if reopened:
        progress.print_line(
            f"REOPENED: {len(reopened)} closed hours were recomputed, from {reopened[0]:%Y-%m-%d %H:00} to "
            f"{reopened[-1]:%Y-%m-%d %H:00}; bills made of them may differ now"
        )
    if late:
        progress.print_line(
            f"KEPT OUT: {sum(late.values())} samples for {len(late)} closed hours, from {min(late):%Y-%m-%d %H:00} to "
            f"{max(late):%Y-%m-%d %H:00}; rollup_1h has them. If that is usual, close hours later (--lateness-hours)"
        )
    progress.print_summary(f"{report.hours} hours summed, closed until {report.closed_until:%Y-%m-%d %H:00}")


@click.command("usage")
@tables_option
@click.option(
    "--lateness-hours",
    type=click.FloatRange(min=0),
    default=LATENESS_HOURS,
    show_default=True,
    help="An hour closes this long after its end. Later samples are left out.",
)
@click.option(
    "--lookback-days",
    type=click.IntRange(min=1, max=90),
    default=LOOKBACK_DAYS,
    show_default=True,
    help="As given to rollup.",
)
@click.option(
    "--reopen-from",
    type=click.DateTime(["%Y-%m-%dT%H"]),
    metavar="YYYY-MM-DDTHH",
    help="Recompute closed hours from this one (UTC) on, after a backfill. Bills made of them may differ then.",
)
@verbose_option
def command(root: str, lateness_hours: float, lookback_days: int, reopen_from: datetime | None) -> None:
    """Bytes, messages and sessions of each principal, by hour and day."""
    with job_session("usage") as session:
        lateness = timedelta(hours=lateness_hours)
        reopen = reopen_from.replace(tzinfo=UTC) if reopen_from else None
        now = datetime.now(UTC)
        try:
            run(session, root, now=now, lateness=lateness, lookback_days=lookback_days, reopen_from=reopen)
        except CannotReopen as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    command()
