"""The job `rollup`: samples are summed up to minutes, hours and days, for the hours to which samples were added.

Each change records the version of the samples from which it was computed, so the next run finds the hours that later
versions added to. A long backlog is done in blocks of hours; each is a change of its own, which records how far the run
came. Hours that were added to meanwhile follow with the last block.

Samples expire earlier than sums. What is gone is never recomputed: where a series has fewer samples in an hour than its
row was made of, its rows of that hour stay, and the growth of its next hour begins at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.jobs.defaults import HOURS_PER_CHANGE, LOOKBACK_DAYS
from analytics.jobs.progress import Progress
from analytics.tables.partitions import moment_of
from analytics.tables.store import Tables, attempt
from analytics.transforms import histogram_rollup, rollup

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from analytics.tables.change import TableChange, Written
    from analytics.tables.store import Snapshot

CHANGES_MAX: Final = 1000
"""Limit of changes in a run: hours that `ingest` adds meanwhile are rolled up as well, so a run might never end."""
_DAY: Final = timedelta(days=1)
_BACKLOG_HOUR, _BACKLOG_VERSION = "backlog hour", "backlog version"
"""What the blocks of a backlog record: the last hour, and the samples' version of the first block."""
SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "262144",
    # Files of many hours are written concurrently: sorting all rows by hour first costs more than the buffers.
    "spark.sql.maxConcurrentOutputFileWriters": "200",
}


@dataclass(frozen=True, slots=True)
class TableFamily:
    """Table of samples, table of their windows with its views, and the functions that compute these."""

    raw: str
    rolled: str
    minutes: str
    hours: str
    days: str
    tail_columns: tuple[str, ...]
    windows_of: Callable[[DataFrame, DataFrame, int], DataFrame]
    """Compute minutes and hours from samples, tails and the lookback in days."""
    days_of: Callable[[DataFrame], DataFrame]


@dataclass(slots=True)
class RollupReport:
    """Result of a run."""

    hours: int = 0
    samples: int = 0
    kept_rows: int = 0
    """Rows of a series in an hour that stayed as they were, since their samples have expired."""
    refused_histograms: int = 0
    """Without bucket bounds in common with their neighbours: their buckets are missing in `increase`."""
    unknown_histograms: int = 0
    """With an unknown schema or too many buckets: they are in no rollup."""
    hours_left: int = 0
    """Still to be rolled up, since a run ends after CHANGES_MAX changes."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Hours to be rolled up: since the version that the rollup has consumed, without those of earlier blocks; `again`:
    changed after `first_version`, the samples' version of the first block.
    """

    hours: list[datetime]
    again: list[datetime]
    first_version: int


def run(
    spark: SparkSession, root: str, *, lookback_days: int = LOOKBACK_DAYS, hours_per_change: int = HOURS_PER_CHANGE
) -> RollupReport:
    """Roll up all hours of the tables at `root` to which samples were added. Raises TablesError."""
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    progress, report = Progress(), RollupReport()
    tables = Tables.open(spark, root, create=False)
    for family in FAMILIES:
        for _ in range(CHANGES_MAX):
            block = attempt(lambda: _roll_block(tables, family, lookback_days, hours_per_change))  # noqa: B023 -- called at once
            if block is None:
                break
            _add_up(report, block)
            left = progress.remaining_text(
                report.hours, report.hours + block.hours_left, f"{block.hours_left} hours left"
            )
            if block.hours:
                progress.print_line(f"{block.hours} hours of {family.raw} rolled up", left=left)
        report.hours_left += len(waiting_hours(tables, family))
    _print_report(progress, report)
    return report


def waiting_hours(tables: Tables, family: TableFamily | None = None) -> list[datetime]:
    """Return the hours to which samples (default: of counters) were added since the last rollup."""
    family = family or COUNTERS
    backlog = _backlog(tables, tables.snapshot(family.raw), tables.snapshot(family.rolled))
    return sorted({*backlog.hours, *backlog.again})


def _backlog(tables: Tables, raw: Snapshot, rolled: Snapshot) -> Backlog:
    consumed = rolled.recorded(raw.table)
    hours = tables.changed_hours(raw, consumed)
    until, version = rolled.recorded(_BACKLOG_HOUR), rolled.recorded(_BACKLOG_VERSION)
    if until is None or version is None or (consumed is not None and version <= consumed):
        return Backlog(hours, [], raw.version)
    return Backlog([one for one in hours if one.timestamp() > until], tables.changed_hours(raw, version), version)


def _roll_block(tables: Tables, family: TableFamily, lookback_days: int, hours_per_change: int) -> RollupReport | None:
    """Roll up the first hours of the backlog as one change; return None if there are none."""
    raw, rolled = tables.snapshot(family.raw), tables.snapshot(family.rolled)
    if rolled.recorded(raw.table) == raw.version:
        return None
    backlog = _backlog(tables, raw, rolled)
    chosen, left = backlog.hours[:hours_per_change], backlog.hours[hours_per_change:]
    with tables.change(family.rolled, rolled) as change:
        block = _Block(family, raw, change, lookback_days)
        report = block.roll(chosen if left else sorted({*chosen, *backlog.again}))
        report.hours_left = len(left)
        if left:
            change.record(_BACKLOG_HOUR, int(chosen[-1].timestamp()))
            change.record(_BACKLOG_VERSION, backlog.first_version)
        else:
            change.record(raw.table, raw.version)
    return report


@dataclass(frozen=True, slots=True)
class _Block:
    """Change that rolls up a block of hours of one family, from one version of its samples."""

    family: TableFamily
    raw: Snapshot
    change: TableChange
    lookback_days: int

    def roll(self, changed: list[datetime]) -> RollupReport:
        """Replace the rows of these hours, and of each series' first hour after them."""
        family = self.family
        hours = self._affected_hours(changed)
        if not hours:
            return RollupReport()
        samples, tails = self.raw.read(family.raw, hours), self._tails(hours)
        minutes, wide = self._write_windows(samples, tails)
        days = sorted({midnight(hour) for hour in hours})
        published = self._published(family.hours, days)
        gone = _rows_with_more_samples(published.where(_is_one_of(published, hours)), wide.frame)
        gone = gone.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            if kept := gone.count():
                there = samples.join(_hours_of(gone), _keys_of(samples, "ts"), "left_anti")
                minutes, wide = self._write_windows(there, tails.unionByName(gone.select(*family.tail_columns)))
                old = self._published(family.minutes, hours)
                old = old.join(_hours_of(gone), _keys_of(old, "window"), "left_semi")
                minutes = self.change.write(family.minutes, minutes.frame.unionByName(old))
            others = published.where(~_is_one_of(published, hours)).unionByName(gone)
            if kept or not others.isEmpty():
                wide = self.change.write(family.hours, wide.frame.unionByName(others))
        finally:
            gone.unpersist()
        self.change.replace(minutes, hours=hours)
        self.change.replace(wide, hours=days)
        self._replace_days(wide.frame, days)
        return self._report(wide.frame, hours, kept)

    def _affected_hours(self, changed: list[datetime]) -> list[datetime]:
        """Return the changed hours that have samples, and each series' first hour after them."""
        family = self.family
        if not changed:
            return []
        present = self.raw.hours(family.raw, changed[0], changed[-1] + (self.lookback_days + 1) * _DAY)
        hours = sorted(set(present) & set(changed))
        if not hours or all(hour in hours for hour in present if hour > hours[0]):
            return hours
        later = self._published(family.hours, _days_between(hours[0], present[-1]))
        later = later.where((later["window"] > hours[0]) & ~_is_one_of(later, hours))
        if later.isEmpty():
            return hours
        rows = self.raw.read(family.raw, hours).selectExpr("series_id", "date_trunc('hour', ts) as window").distinct()
        found = rollup.hours_after(rows, later).selectExpr("unix_millis(window)").collect()
        after = {moment_of(row[0]) for row in found}
        return sorted({*hours, *(after & set(present))})

    def _tails(self, hours: list[datetime]) -> DataFrame:
        """Return each series' last sample before each run of consecutive hours."""
        first = midnight(hours[0])
        days = self._published(self.family.days, _days_between(first - self.lookback_days * _DAY, first - _DAY))
        between = self._published(self.family.hours, _days_between(first, hours[-1]))
        before = days.unionByName(between.where(~_is_one_of(between, hours)))
        return rollup.tails(before, hours, self.family.tail_columns)

    def _published(self, view: str, hours: Iterable[datetime]) -> DataFrame:
        return self.change.snapshot.read(view, hours)

    def _write_windows(self, samples: DataFrame, tails: DataFrame) -> tuple[Written, Written]:
        views = [self.family.minutes, self.family.hours]
        minutes, wide = self.change.write_widths(views, self.family.windows_of(samples, tails, self.lookback_days))
        return minutes, wide

    def _replace_days(self, hours: DataFrame, days: list[datetime]) -> None:
        """Replace the rows of these days by the sums of their hours; rows whose hours have expired stay."""
        new, old = self.family.days_of(hours), self._published(self.family.days, days)
        gone = _rows_with_more_samples(old, new)
        if not gone.isEmpty():
            new = new.join(gone, ["series_id", "window"], "left_anti").unionByName(gone)
        self.change.replace(self.change.write(self.family.days, new), hours=days)

    def _report(self, rows: DataFrame, hours: list[datetime], kept: int) -> RollupReport:
        of_hours = rows.where(_is_one_of(rows, hours))
        report = RollupReport(hours=len(hours), kept_rows=kept)
        if self.family is COUNTERS:
            report.samples = of_hours.agg({"n": "sum"}).collect()[0][0] or 0
            return report
        found = of_hours.selectExpr("sum(n)", "sum(refused)").collect()[0]
        report.samples, report.refused_histograms = found[0] or 0, found[1] or 0
        histograms = self.raw.read(self.family.raw, hours)
        report.unknown_histograms = histograms.where(~histogram_rollup.is_usable(histograms)).count()
        return report


def _rows_with_more_samples(published: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the published rows that were made of more samples than the new row of their series and window."""
    now = rows.select("series_id", "window", rows["n"].alias("n_now"))
    both = published.join(now, ["series_id", "window"], "left").where("n_now is null or n_now < n")
    return both.select(*published.columns)


def _hours_of(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("series_id as gone_series", "window as gone_hour")


def _keys_of(frame: DataFrame, moment: str) -> Column:
    return (frame["series_id"] == F.col("gone_series")) & (F.date_trunc("hour", frame[moment]) == F.col("gone_hour"))


COUNTERS: Final = TableFamily(
    "samples",
    "rollup",
    "rollup_1m",
    "rollup_1h",
    "rollup_1d",
    ("series_id", "last_ts", "last_v", "last_start_ts", "last_replica"),
    rollup.windows,
    rollup.days,
)
HISTOGRAMS: Final = TableFamily(
    "histograms",
    "histogram_rollup",
    "histograms_1m",
    "histograms_1h",
    "histograms_1d",
    ("series_id", "last_ts", "last", "last_start_ts"),
    histogram_rollup.histogram_windows,
    histogram_rollup.histogram_days,
)
FAMILIES: Final = (COUNTERS, HISTOGRAMS)


def midnight(moment: datetime) -> datetime:
    """Return the first instant of the moment's day, UTC."""
    return datetime.combine(moment.astimezone(UTC).date(), time(), UTC)


def _days_between(first: datetime, last: datetime) -> list[datetime]:
    """Return the first instants of the days from that of `first` to that of `last`."""
    begin = midnight(first)
    return [begin + number * _DAY for number in range((midnight(last) - begin).days + 1)]


def _is_one_of(frame: DataFrame, hours: Sequence[datetime]) -> Column:
    return frame["window"].isin(*hours)


def _add_up(report: RollupReport, block: RollupReport) -> None:
    for name in ("hours", "samples", "kept_rows", "refused_histograms", "unknown_histograms"):
        setattr(report, name, getattr(report, name) + getattr(block, name))


def _print_report(progress: Progress, report: RollupReport) -> None:
    if report.kept_rows:
        progress.print_line(
            f"LEFT AS THEY WERE: {report.kept_rows:,} rows of a series in an hour, whose samples have expired; late "
            "samples of these hours are not in them: keep samples longer (expire --keep samples=DAYS)"
        )
    if report.refused_histograms:
        progress.print_line(
            f"WITHOUT BUCKETS: {report.refused_histograms:,} histograms had no bounds in common with those before "
            "them; the column `refused` of histograms_1m says where"
        )
    if report.unknown_histograms:
        progress.print_line(
            f"LEFT OUT: {report.unknown_histograms:,} histograms of an unknown schema or of too many buckets; the "
            "table `histograms` has them"
        )
    if report.hours_left:
        progress.print_line(f"NOT ALL: {report.hours_left} hours are still to be rolled up; run it again")
    progress.print_summary(f"{report.hours} hours, {report.samples:,} samples rolled up")
