"""The job `rollup`: dirty hours of samples and histograms to windows of a minute, an hour and a day.

What is computed anew: the dirty hours, and of each series the first hour after a dirty one, for its growth begins at
the last sample before it. The partitions of rollup_1m are hours and only these are replaced; of rollup_1h and rollup_1d
whole days are, since 24 small partitions a day would cost more than they spare. All that a block of hours changes, in
all tables, is one change: killed before, nothing has happened and the marks of the dirty hours stay; after, all has.

Two things are found out only after the windows were computed, and before anybody sees them: hours with mixed windows
(`analytics.transforms.rollup`), which are then computed from single samples, and hours that have fewer samples than
they had: their samples are expired, so the rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import Column, DataFrame, SparkSession

    from analytics.jobs.minutes import RollupChange
    from analytics.tables.dirty import Dirty
    from analytics.tables.store import Tables

QUEUE: Final = "rollup"
USAGE_QUEUE: Final = "usage"
LOOKBACK_DAYS: Final = 7
HOURS_PER_CHANGE: Final = 168
CHANGES_MAX: Final = 1000
"""In a run: what `ingest` adds meanwhile is rolled up as well, so that it might never end."""
FILE_BYTES_MAX: Final = 32 << 20
"""Files up to this size are held in memory as they are, one for each core."""
_DAY: Final = timedelta(days=1)
SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "131072",
    # Files of many hours are written side by side: sorting all rows by hour first costs more than the buffers.
    "spark.sql.maxConcurrentOutputFileWriters": "200",
}
Tails = Callable[["DataFrame", Sequence[datetime]], "DataFrame"]


@dataclass(frozen=True, slots=True)
class Family:
    """Tables of one kind of sample, and how the coarser are made of the finer."""

    raw: str
    minutes: str
    hours: str
    days: str
    coarser: Callable[[DataFrame, str], DataFrame]
    stage_minutes: Callable[[Block, list[datetime], DataFrame], DataFrame]
    """Of hours and of tails; gives rows that add up to the hours."""
    tails: Tails


@dataclass(slots=True)
class Report:
    """What a run did. Times are hours of samples."""

    hours: int = 0
    samples: int = 0
    mixed_hours: set[datetime] = field(default_factory=set)
    """Computed from single samples, for states of different files overlapped: right, and slower."""
    expired_hours: set[datetime] = field(default_factory=set)
    """Left as they were: late samples came for them, but the others are no longer there."""
    refused_histograms: int = 0
    """Their buckets have no bounds in common with their neighbours': they are missing in `increase`."""
    unknown_histograms: int = 0
    """Of a schema that nobody knows, or of too many buckets: they are in no rollup."""
    hours_left: int = 0
    """Still to be rolled up, for a run ends after CHANGES_MAX changes."""


class _Fewer(Exception):
    """These hours have fewer samples than when they were rolled up."""

    def __init__(self, hours: set[datetime]) -> None:
        super().__init__(f"{len(hours)} hours")
        self.hours = hours


@dataclass(frozen=True, slots=True)
class Job:
    """What a run works on."""

    tables: Tables
    families: Sequence[Family]
    lookback_days: int
    report: Report


@dataclass(frozen=True, slots=True)
class Block:
    """One change in the making."""

    job: Job
    change: RollupChange

    @property
    def tables(self) -> Tables:
        """Where it is read from."""
        return self.job.tables


def run(
    spark: SparkSession,
    root: str,
    *,
    lookback_days: int = LOOKBACK_DAYS,
    hours_per_change: int = HOURS_PER_CHANGE,
) -> Report:
    """Roll up all dirty hours of the tables at `root`. Raises FilesystemError, NoTables, NoSnapshot."""
    from analytics.tables.store import Tables

    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    progress = Progress()
    job = Job(Tables.open(spark, root, create=False), FAMILIES, lookback_days, Report())
    for _ in range(CHANGES_MAX):
        if not (dirty := job.tables.dirty(QUEUE)).marks:
            break
        affected = {family.raw: _affected(job, family, dirty.hours) for family in job.families}
        hours = sorted(set().union(*affected.values()))
        block, rest = hours[:hours_per_change], hours[hours_per_change:]
        _roll_block(job, affected, block, dirty, rest)
        if block:
            done = job.report.hours
            left = progress.left(done, done + len(rest), f"{len(rest)} hours left")
            progress.tell(f"{len(block)} hours up to {block[-1]:%Y-%m-%d %H:00} rolled up", left=left)
    job.report.hours_left = len(job.tables.dirty(QUEUE).hours)
    _tell(progress, job.report)
    return job.report


def _affected(job: Job, family: Family, dirty: Sequence[datetime]) -> set[datetime]:
    """The dirty hours that have samples, and the first hours after them."""
    from analytics.transforms.rollup import hours_after

    if not dirty:
        return set()
    tables = job.tables
    present = set(tables.hours(family.raw, dirty[0], dirty[-1] + (job.lookback_days + 1) * _DAY))
    hours = sorted(present & set(dirty))
    if not hours or all(hour in hours for hour in present if hour > hours[0]):
        return set(hours)
    later = tables.read(family.hours, tables.hours(family.hours, midnight(hours[0]), max(present)))
    later = later.where((later["window"] > hours[0]) & ~_is_one_of(later, hours))
    if later.isEmpty():
        return set(hours)
    changed = tables.read(family.raw, hours).selectExpr("series_id", "date_trunc('hour', ts) as window").distinct()
    after = hours_after(changed, later).selectExpr("unix_millis(window)").collect()
    return {*hours, *(_moment(row[0]) for row in after)} & present


def _roll_block(
    job: Job, affected: dict[str, set[datetime]], hours: list[datetime], dirty: Dirty, remaining: list[datetime]
) -> None:
    """One change: these hours, in all tables; the marks go, and new ones come for the hours that remain."""
    from analytics.jobs.minutes import rollup_change

    while True:
        try:
            with rollup_change(job.tables, QUEUE) as change:
                block = Block(job, change)
                samples = [_roll(block, family, sorted(affected[family.raw] & set(hours))) for family in job.families]
                change.mark_dirty(USAGE_QUEUE, hours)
                change.mark_dirty(QUEUE, remaining)
                change.clear(dirty)
        except _Fewer as fewer:
            job.report.expired_hours |= fewer.hours
            affected = {raw: kept - fewer.hours for raw, kept in affected.items()}
            hours = [hour for hour in hours if hour not in fewer.hours]
        else:
            job.report.hours += len(hours)
            job.report.samples += sum(samples)
            return


def _roll(block: Block, family: Family, hours: list[datetime]) -> int:
    """Stage the rows of these hours in the three tables; how many samples they have."""
    if not hours:
        return 0
    tables, change = block.tables, block.change
    before = _rows_before(tables, family, hours, block.job.lookback_days)
    minutes = family.stage_minutes(block, hours, family.tails(before, hours))
    days = sorted({midnight(hour) for hour in hours})
    published = tables.read(family.hours, days)
    wide = family.coarser(minutes, "hour")
    staged = change.stage(family.hours, wide.unionByName(published.where(~_is_one_of(published, hours))))
    samples = _check_not_fewer(published, staged, hours)
    _replace(block, family.minutes, hours)
    if family is COUNTERS:
        change.add_minutes()
    _replace(block, family.hours, days)
    change.overwrite(family.days, family.coarser(staged, "day"), hours=days)
    return samples


def _rows_before(tables: Tables, family: Family, hours: list[datetime], lookback_days: int) -> DataFrame:
    """Rows with the last samples before each of `hours`: of whole days before them, and of hours between them."""
    first = midnight(hours[0])
    days = tables.read(family.days, tables.hours(family.days, first - lookback_days * _DAY, first - _DAY))
    between = tables.read(family.hours, tables.hours(family.hours, first, hours[-1]))
    return days.unionByName(between.where(~_is_one_of(between, hours)))


def _check_not_fewer(published: DataFrame, staged: DataFrame, hours: list[datetime]) -> int:
    """Raises _Fewer for hours whose samples are (partly) gone; the number of samples in these hours."""
    before, after = (
        {_moment(row["window"]): row["samples"] for row in _count(frame.where(_is_one_of(frame, hours))).collect()}
        for frame in (published, staged)
    )
    if fewer := {hour for hour, samples in before.items() if after.get(hour, 0) < samples}:
        raise _Fewer(fewer)
    return sum(after.values())


def _count(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 -- as everybody calls it

    return rows.groupBy(F.unix_millis("window").alias("window")).agg(F.sum("n").alias("samples"))


def _replace(block: Block, table: str, hours: Iterable[datetime]) -> None:
    """What is staged for the table takes the place of the partitions that hold these hours."""
    from analytics.tables.partitions import partitions_of

    for partition in partitions_of(table, hours):
        names = [entry.name for entry in block.tables.visible_files(table, partition)]
        block.change.remove(table, partition, names)
    block.change.add_staged(table)


def _stage_counters(block: Block, hours: list[datetime], tails: DataFrame) -> DataFrame:
    from analytics.transforms import rollup

    none: frozenset[int] = frozenset()
    mixed = block.tables.spark.sparkContext.accumulator(none, rollup.HourSet())
    added_up, merged = _stage_minutes(block, hours, tails, mixed)
    if mixed.value:
        again = {_moment(unix_ms) for unix_ms in mixed.value}
        block.job.report.mixed_hours |= again
        tails = tails.unionByName(rollup.single_states(block.tables.read("samples", again)))
        clean = [hour for hour in hours if hour not in again]
        added_up, merged = _stage_minutes(block, clean, tails)
    return added_up.unionByName(merged)


def _stage_minutes(
    block: Block, hours: list[datetime], others: DataFrame, mixed: Accumulator[frozenset[int]] | None = None
) -> tuple[DataFrame, DataFrame]:
    """What whole rows add up to, and rows merged of open ones, other states and tails. Those of `mixed` are void."""
    from analytics.transforms import rollup

    files, rows = block.tables.contents("samples", hours, bytes_max=FILE_BYTES_MAX)
    minutes = rollup.minutes_of_files(files).unionByName(rollup.minutes(rows))
    added_up, opened = block.change.stage_minutes(minutes)
    states = rollup.open_states(opened).unionByName(others)
    return added_up, block.change.stage("rollup_1m", rollup.minute_windows(states, block.job.lookback_days, mixed))


def _stage_histograms(block: Block, hours: list[datetime], tails: DataFrame) -> DataFrame:
    from analytics.transforms import histogram_rollup

    histograms = block.tables.read("histograms", hours)
    unknown = histograms.where(~histogram_rollup.usable(histograms)).count()
    block.job.report.unknown_histograms += unknown
    rows = histogram_rollup.single_histograms(histograms).unionByName(tails)
    staged = block.change.stage("histograms_1m", histogram_rollup.histogram_windows(rows, block.job.lookback_days))
    block.job.report.refused_histograms += staged.agg({"refused": "sum"}).collect()[0][0] or 0
    return staged


def _coarser(rows: DataFrame, unit: str) -> DataFrame:
    from analytics.transforms.rollup import coarser

    return coarser(rows, unit)


def _coarser_histograms(rows: DataFrame, unit: str) -> DataFrame:
    from analytics.transforms.histogram_rollup import coarser_histograms

    return coarser_histograms(rows, unit)


def _tails(rows: DataFrame, hours: Sequence[datetime]) -> DataFrame:
    from analytics.transforms.rollup import tails

    return tails(rows, hours)


def _histogram_tails(rows: DataFrame, hours: Sequence[datetime]) -> DataFrame:
    from analytics.transforms.histogram_rollup import histogram_tails

    return histogram_tails(rows, hours)


# The functions import pyspark when they are called: `--help` needs no Spark.
COUNTERS: Final = Family("samples", "rollup_1m", "rollup_1h", "rollup_1d", _coarser, _stage_counters, _tails)
HISTOGRAMS: Final = Family(
    "histograms",
    "histograms_1m",
    "histograms_1h",
    "histograms_1d",
    _coarser_histograms,
    _stage_histograms,
    _histogram_tails,
)
FAMILIES: Final = (COUNTERS, HISTOGRAMS)


def midnight(moment: datetime) -> datetime:
    """The first instant of the moment's day, UTC."""
    return datetime.combine(moment.astimezone(UTC).date(), time(), UTC)


def _is_one_of(frame: DataFrame, hours: Sequence[datetime]) -> Column:
    return frame["window"].isin(*hours)


def _moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def _tell(progress: Progress, report: Report) -> None:
    if report.mixed_hours:
        progress.tell(f"{len(report.mixed_hours)} hours had overlapping files and were computed sample by sample")
    if report.expired_hours:
        progress.tell(
            f"LEFT AS THEY WERE: {len(report.expired_hours)} hours from {min(report.expired_hours):%Y-%m-%d %H:00} on "
            "got late samples after their samples had expired; keep samples longer (expire --keep samples=DAYS)"
        )
    if report.refused_histograms:
        progress.tell(
            f"REFUSED: {report.refused_histograms} histograms without bounds in common with those before them; the "
            "column `refused` of histograms_1m says where"
        )
    if report.unknown_histograms:
        progress.tell(
            f"LEFT OUT: {report.unknown_histograms} histograms of an unknown schema or of too many buckets; the table "
            "`histograms` has them"
        )
    if report.hours_left:
        progress.tell(f"NOT ALL: {report.hours_left} hours are still to be rolled up; run it again")
    progress.end(f"{report.hours} hours, {report.samples:,} samples rolled up")


@click.command("rollup")
@tables_option
@click.option(
    "--lookback-days",
    type=click.IntRange(min=1, max=90),
    default=LOOKBACK_DAYS,
    show_default=True,
    help="A counter's growth over a gap is counted if the gap is shorter. Always give the same.",
)
@click.option(
    "--hours-per-change",
    type=click.IntRange(min=1),
    default=HOURS_PER_CHANGE,
    show_default=True,
    help="Hours that become visible together, and that a kill costs at most.",
)
@verbose_option
def command(root: str, lookback_days: int, hours_per_change: int) -> None:
    """Sum samples up to minutes, hours and days."""
    with job("rollup") as session:
        run(session, root, lookback_days=lookback_days, hours_per_change=hours_per_change)


if __name__ == "__main__":
    command()
