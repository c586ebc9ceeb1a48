"""The job `usage`: bytes, messages and sessions of each principal, by hour and by day; closed when they are final.

Hours close for each cluster in order, by the time of its samples and not by the clock: an hour closes when every
instance of the cluster has samples from `lateness` after its end, and no hour up to it waits to be rolled up; a day,
with its last hour. So a worker whose samples are late is never left out. A closed row does not change: later samples
are counted, reported and left out. The ledger changes first, then the sums; after a kill between them the next run
computes both again. A run that would sum what the last one did, by the same options, does nothing: both tables record
what they were made from.

Closed hours are recomputed only on request (`--reopen-from`, after a backfill): all from one hour on, since each
counter's growth continues from hour to hour.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from zlib import crc32

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.errors import AnalyticsError
from analytics.jobs.defaults import LATENESS_HOURS, LOOKBACK_DAYS, SILENT_HOURS
from analytics.jobs.progress import Progress
from analytics.jobs.rollup import midnight, waiting_hours
from analytics.tables.partitions import hour_of, moment_of
from analytics.tables.store import Tables, attempt
from analytics.transforms import usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame, SparkSession


_EVER: Final = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC))
_MILLISECOND: Final = timedelta(milliseconds=1)
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_ROLLUP: Final = "rollup"
"""The name under which the ledger records the version of the rollup that it was made from."""
_LEDGER, _SERIES, _OPTIONS = "usage_ledger", "series", "options"
"""What the sums record: the versions that they were made from, and `UsageOptions.fingerprint`."""


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Options of a run. `now` only tells which samples are of the future; `jobs` empty: the proxy's usual names."""

    now: datetime
    lateness: timedelta = timedelta(hours=LATENESS_HOURS)
    silent: timedelta = timedelta(hours=SILENT_HOURS)
    lookback_days: int = LOOKBACK_DAYS
    reopen_from: datetime | None = None
    jobs: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> int:
        """A number of the options that bills depend on; another one for others."""
        return crc32(repr((self.lateness, self.silent, self.lookback_days, sorted(self.jobs or usage.JOBS))).encode())


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Result of a run. `closed_until`: by cluster. `late_samples`: left out, by hour; `reopened`: hours that were
    closed before; `no_counts`: rows of a series in an hour that were set aside, by reason.
    """

    closed_until: dict[str, datetime]
    hours: int
    late_samples: dict[datetime, int] = field(default_factory=dict)
    reopened: tuple[datetime, ...] = ()
    no_counts: dict[str, int] = field(default_factory=dict)


class CannotReopen(AnalyticsError):
    """Hours to reopen have no rollup any more: recomputing them would lose their usage."""


def run(spark: SparkSession, root: str, options: UsageOptions) -> UsageReport:
    """Update the usage tables. Raises TablesError, CannotReopen."""
    tables, progress = Tables.open(spark, root, create=False), Progress()
    report = attempt(lambda: _update(tables, options))
    if report is None:
        progress.print_summary("nothing is new since the last run")
        return UsageReport({}, 0)
    _print_report(progress, report)
    return report


def _update(tables: Tables, options: UsageOptions) -> UsageReport | None:
    """Change the ledger and the sums; return None if the last run has done it."""
    ledger, rolled, known_series = map(tables.snapshot, ("usage_ledger", "rollup", "series"))
    made_from = {_LEDGER: ledger.version, _SERIES: known_series.version, _OPTIONS: options.fingerprint}
    if options.reopen_from is None and ledger.recorded(_ROLLUP) == rolled.version:
        sums = tables.snapshot("usage")
        if all(sums.recorded(name) == number for name, number in made_from.items()):
            return None
    series = usage.usage_series(known_series.series(), options.jobs or usage.JOBS).cache()
    try:
        closed = closed_ends(tables)
        before, reopened = _reopened(tables, closed, options.reopen_from)
        since = _open_since(series, before)
        waiting = waiting_hours(tables)  # before the rows are chosen: a rollup may commit at any moment
        rows = _open_rows(tables, series, before, since).cache()
        until = _new_ends(waiting, rows, series, before, options)
        late = _late_samples(tables, series, closed, tables.changed_hours(rolled, ledger.recorded(_ROLLUP)))
        known = tables.read_between("usage_ledger", since, _EVER[1])
        hours, no_counts, newest = _hours_of(rows, known.where(~_is_closed(before)))
        with tables.change("usage_ledger", ledger) as change:
            tails = _tails(tables, series, before, min(hours, default=options.now), options.lookback_days)
            kept = ledger.read("usage_ledger", hours)
            own = usage.ledger(rows, series, *tails, options.lookback_days)
            written = change.write("usage_ledger", own.unionByName(kept.where(_is_closed(before))))
            change.replace(written, hours=hours)
            change.record(_ROLLUP, rolled.version)
        # Samples of the future count in a later run, although nothing else changes.
        made_from = made_from | {_LEDGER: ledger.version + 1} if newest <= options.now else {}
        _replace_sums(tables, written.frame, hours, before, until, made_from)
        rows.unpersist()
        return UsageReport(until, len(hours), late, reopened, no_counts)
    finally:
        series.unpersist()


def _replace_sums(  # noqa: PLR0917 -- all of a run
    tables: Tables,
    ledger: DataFrame,
    hours: set[datetime],
    before: dict[str, datetime],
    until: dict[str, datetime],
    made_from: dict[str, int],
) -> None:
    """Replace the sums of the days that have open hours, or hours or days that close now."""
    first, last = min(before.values(), default=_EVER[0]), max(until.values(), default=_EVER[0])
    with tables.change("usage") as change:
        known = change.snapshot.hours("usage_hourly", midnight(first) - _DAY, last) if before else []
        days = sorted({*map(midnight, hours), *known})
        published = change.snapshot.read("usage_hourly", days).where(_is_closed(before))
        fresh = usage.hourly(ledger.where(~_is_closed(before)), until)
        hourly = change.write("usage_hourly", published.unionByName(fresh))
        change.replace(hourly, hours=days)
        change.replace(change.write("usage_daily", usage.daily(hourly.frame, until)), hours=days)
        for name, number in made_from.items():
            change.record(name, number)


def _is_closed(ends: dict[str, datetime]) -> Column:
    return F.col("window") < usage.end_of(ends)


def closed_ends(tables: Tables) -> dict[str, datetime]:
    """Return the moment before which all usage of each cluster is closed; nothing for one without closed usage."""
    hours, days = (
        tables.read(view).where("closed").selectExpr("cluster", f"unix_millis(window) + {width // _MILLISECOND} as end")
        for view, width in (("usage_hourly", _HOUR), ("usage_daily", _DAY))
    )
    found = hours.unionAll(days).groupBy("cluster").agg(F.max("end")).collect()
    return {cluster: moment_of(end_ms) for cluster, end_ms in found}


def _reopened(
    tables: Tables, closed: dict[str, datetime], reopen_from: datetime | None
) -> tuple[dict[str, datetime], tuple[datetime, ...]]:
    """Return the closed ends after `reopen_from`, and the hours that are open again. Raises CannotReopen."""
    last = max(closed.values(), default=_EVER[0])
    if reopen_from is None or (first := hour_of(reopen_from)) >= last:
        return closed, ()
    hours = tables.hours("usage_ledger", first, last - _HOUR)
    rolled = tables.read_between("rollup_1h", midnight(first), _EVER[1]).selectExpr("unix_millis(window)").distinct()
    if gone := sorted(set(hours) - {moment_of(row[0]) for row in rolled.collect()}):
        raise CannotReopen(
            f"{len(gone)} hours from {gone[0]:%Y-%m-%d %H:00} to {gone[-1]:%Y-%m-%d %H:00} have usage but no rollup_1h "
            "any more: reopen from a later hour"
        )
    return {cluster: min(end, first) for cluster, end in closed.items()}, tuple(hours)


def _open_since(series: DataFrame, before: dict[str, datetime]) -> datetime:
    """Return the day of the earliest closed end; a time before all samples, if a cluster has no closed hour yet."""
    clusters = {row["cluster"] for row in series.select("cluster").distinct().collect()}
    return midnight(min(before.values(), default=_EVER[0])) if clusters <= set(before) else _EVER[0]


def _open_rows(tables: Tables, series: DataFrame, before: dict[str, datetime], since: datetime) -> DataFrame:
    """Return the rows of rollup_1h of usage counters in hours that are open for their cluster."""
    rows = tables.read_between("rollup_1h", since, _EVER[1])
    clusters = series.select("series_id", "cluster")
    return rows.join(clusters, "series_id").where(~_is_closed(before)).drop("cluster")


def _new_ends(
    waiting: Iterable[datetime],
    rows: DataFrame,
    series: DataFrame,
    before: dict[str, datetime],
    options: UsageOptions,
) -> dict[str, datetime]:
    """Return the new closed ends: never earlier than before, and not past an hour that waits to be rolled up.

    A cluster without any sample since is gone, and closes with the others.
    """
    marks = usage.watermarks(rows, series, options.now, options.silent)
    found = marks.selectExpr("cluster", "unix_millis(until)").collect()
    ends = {cluster: hour_of(moment_of(mark) - options.lateness) for cluster, mark in found}
    if ends:
        ends = dict.fromkeys(before, max(ends.values())) | ends
    for cluster, end in ends.items():
        open_since = before.get(cluster, _EVER[0])
        ends[cluster] = max(open_since, min([end, *(hour for hour in waiting if hour >= open_since)]))
    return before | ends


def _tails(
    tables: Tables, series: DataFrame, before: dict[str, datetime], first: datetime, lookback_days: int
) -> tuple[DataFrame, DataFrame]:
    """Return the counters' last samples in closed hours: those in the ledger, and those in the rollup."""
    since, last = midnight(first) - (lookback_days + 1) * _DAY, max(before.values(), default=_EVER[0])
    ledger = tables.read_between("usage_ledger", since, last).where(_is_closed(before))
    rolled = tables.read_between("rollup_1h", since, last)
    rolled = rolled.join(series.select("series_id", "cluster"), "series_id").where(_is_closed(before))
    return usage.ledger_tails(ledger), usage.rolled_tails(rolled)


def _late_samples(
    tables: Tables, series: DataFrame, closed: dict[str, datetime], changed: list[datetime]
) -> dict[datetime, int]:
    """Return the number of samples that changed hours have, and the ledger has not, since they were closed."""
    hours = [hour for hour in changed if hour < max(closed.values(), default=_EVER[0])]
    if not hours:
        return {}
    rows = tables.read("rollup_1h", hours)
    rows = rows.join(series.select("series_id", "cluster"), "series_id")
    rows = rows.where(_is_closed(closed) & rows["window"].isin(*hours)).drop("cluster")
    known = tables.read("usage_ledger", hours).where(_is_closed(closed))
    found = usage.count_late_samples(rows, series, known).selectExpr("unix_millis(window)", "samples").collect()
    return {moment_of(row[0]): row[1] for row in found}


def _hours_of(rows: DataFrame, known: DataFrame) -> tuple[set[datetime], dict[str, int], datetime]:
    """Return the hours of both, the number of rows of the rollup (`rows`) that are no counts, by reason, and the time
    of the newest sample.
    """
    every = rows.select("window", "last_ts", usage.no_count().alias("why"))
    every = every.unionAll(known.selectExpr("window", "null as last_ts", "null as why"))
    groups = every.groupBy("window", "why").agg(F.count("*").alias("rows"), F.max("last_ts").alias("last"))
    found = groups.selectExpr("unix_millis(window)", "why", "rows", "unix_millis(last)").collect()
    no_counts = Counter[str]()
    for _, why, count, _ in found:
        if why is not None:
            no_counts[why] += count
    newest = max((last_ms for *_, last_ms in found if last_ms is not None), default=0)
    return {moment_of(row[0]) for row in found}, dict(no_counts), moment_of(newest)


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
    for why, count in sorted(report.no_counts.items()):
        progress.print_line(
            f"SET ASIDE: {count} hours of a counter have a sample that is no count ({why}), and are in no bill; "
            "rollup_1h has them. Who sends them to the receiver?"
        )
    ends = ", ".join(
        f"{cluster or '(none)'} until {end:%Y-%m-%d %H:00}" for cluster, end in sorted(report.closed_until.items())[:5]
    )
    progress.print_summary(f"{report.hours} hours summed, closed: {ends or 'nothing yet'}")
