"""The job `rollup`: aggregates dirty hours of samples and histograms to windows of a minute, an hour and a day.

Recomputed are the dirty hours, and of each series the first hour after a dirty one, since its growth starts at the last
sample before it. The partitions of rollup_1m are hours and only the affected ones are replaced; of rollup_1h and
rollup_1d whole days are, since 24 small partitions a day would cost more than they save. A block of hours is one change
of all tables: killed before the commit, nothing has changed and the marks of the dirty hours stay; after it, everything
has.

Two conditions are detected after the windows were computed and before they become visible: hours with mixed windows
(`analytics.transforms.rollup`), which are then computed from single samples, and hours with fewer samples than in the
last rollup: their samples have expired, so their rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job_session, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import Column, DataFrame, SparkSession

    from analytics.jobs.minutes import RollupChange
    from analytics.tables.dirty_hours import DirtyHours
    from analytics.tables.store import Tables

QUEUE: Final = "rollup"
USAGE_QUEUE: Final = "usage"
LOOKBACK_DAYS: Final = 7
HOURS_PER_CHANGE: Final = 168
CHANGES_MAX: Final = 1000
"""Limit of changes in a run: hours that `ingest` adds meanwhile are rolled up as well, so a run might never end."""
FILE_BYTES_MAX: Final = 32 << 20
"""Files up to this size are read into memory whole, one for each core."""
_DAY: Final = timedelta(days=1)
SETTINGS: Final = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "131072",
    # Files of many hours are written concurrently: sorting all rows by hour first costs more than the buffers.
    "spark.sql.maxConcurrentOutputFileWriters": "200",
}
Tails = Callable[["DataFrame", Sequence[datetime]], "DataFrame"]


@dataclass(frozen=True, slots=True)
class TableFamily:
    """Tables of one kind of sample, and the functions that compute the coarser ones from the finer."""

    raw: str
    minutes: str
    hours: str
    days: str
    coarser: Callable[[DataFrame, str], DataFrame]
    stage_minutes: Callable[[Block, list[datetime], DataFrame], DataFrame]
    """Stage the minutes of hours with their tails; returns rows that sum up to the hours."""
    tails: Tails


@dataclass(slots=True)
class RollupReport:
    """Result of a run. Times are hours of samples."""

    hours: int = 0
    samples: int = 0
    mixed_hours: set[datetime] = field(default_factory=set)
    """Computed from single samples, since states of different files overlapped: exact, and slower."""
    expired_hours: set[datetime] = field(default_factory=set)
    """Left unchanged: late samples were added to them, but their other samples have expired."""
    refused_histograms: int = 0
    """Without bucket bounds in common with their neighbours: they are missing in `increase`."""
    unknown_histograms: int = 0
    """With an unknown schema or too many buckets: they are in no rollup."""
    hours_left: int = 0
    """Still to be rolled up, since a run ends after CHANGES_MAX changes."""


class _SamplesExpired(Exception):
    """These hours have fewer samples than in their last rollup."""

    def __init__(self, hours: set[datetime]) -> None:
        super().__init__(f"{len(hours)} hours")
        self.hours = hours


@dataclass(frozen=True, slots=True)
class RollupRun:
    """Context of a run: tables, families, lookback, and the report so far."""

    tables: Tables
    families: Sequence[TableFamily]
    lookback_days: int
    report: RollupReport


@dataclass(frozen=True, slots=True)
class Block:
    """Block of hours that one change rolls up."""

    run: RollupRun
    change: RollupChange

    @property
    def tables(self) -> Tables:
        """The tables of the run."""
        return self.run.tables


def run(
    spark: SparkSession,
    root: str,
    *,
    lookback_days: int = LOOKBACK_DAYS,
    hours_per_change: int = HOURS_PER_CHANGE,
) -> RollupReport:
    """Roll up all dirty hours of the tables at `root`. Raises FilesystemError, NoTables, NoSnapshot."""
    from analytics.tables.store import Tables

    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    progress = Progress()
    job = RollupRun(Tables.open(spark, root, create=False), FAMILIES, lookback_days, RollupReport())
    for _ in range(CHANGES_MAX):
        if not (dirty := job.tables.dirty_hours(QUEUE)).marks:
            break
        affected = {family.raw: _affected_hours(job, family, dirty.hours) for family in job.families}
        hours = sorted(set().union(*affected.values()))
        block, rest = hours[:hours_per_change], hours[hours_per_change:]
        _roll_block(job, affected, block, dirty, rest)
        if block:
            done = job.report.hours
            left = progress.remaining_text(done, done + len(rest), f"{len(rest)} hours left")
            progress.print_line(f"{len(block)} hours up to {block[-1]:%Y-%m-%d %H:00} rolled up", left=left)
    job.report.hours_left = len(job.tables.dirty_hours(QUEUE).hours)
    _print_report(progress, job.report)
    return job.report


def _affected_hours(job: RollupRun, family: TableFamily, dirty: Sequence[datetime]) -> set[datetime]:
    """Return the dirty hours that have samples, and the first hours after them."""
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
    job: RollupRun,
    affected: dict[str, set[datetime]],
    hours: list[datetime],
    dirty: DirtyHours,
    remaining: list[datetime],
) -> None:
    """Roll up these hours in all tables as one change, which clears the marks and adds new ones for `remaining`."""
    from analytics.jobs.minutes import rollup_change

    while True:
        try:
            with rollup_change(job.tables, QUEUE) as change:
                block = Block(job, change)
                samples = [
                    _roll_family(block, family, sorted(affected[family.raw] & set(hours))) for family in job.families
                ]
                change.mark_dirty(USAGE_QUEUE, hours)
                change.mark_dirty(QUEUE, remaining)
                change.clear_marks(dirty)
        except _SamplesExpired as fewer:
            job.report.expired_hours |= fewer.hours
            affected = {raw: kept - fewer.hours for raw, kept in affected.items()}
            hours = [hour for hour in hours if hour not in fewer.hours]
        else:
            job.report.hours += len(hours)
            job.report.samples += sum(samples)
            return


def _roll_family(block: Block, family: TableFamily, hours: list[datetime]) -> int:
    """Stage the rows of these hours in the three tables; return the number of samples."""
    if not hours:
        return 0
    tables, change = block.tables, block.change
    before = _rows_before(tables, family, hours, block.run.lookback_days)
    minutes = family.stage_minutes(block, hours, family.tails(before, hours))
    days = sorted({midnight(hour) for hour in hours})
    published = tables.read(family.hours, days)
    wide = family.coarser(minutes, "hour")
    staged = change.stage_rows(family.hours, wide.unionByName(published.where(~_is_one_of(published, hours))))
    samples = _check_samples_present(published, staged, hours)
    _replace_partitions(block, family.minutes, hours)
    if family is COUNTERS:
        change.add_minutes()
    _replace_partitions(block, family.hours, days)
    change.overwrite_partitions(family.days, family.coarser(staged, "day"), hours=days)
    return samples


def _rows_before(tables: Tables, family: TableFamily, hours: list[datetime], lookback_days: int) -> DataFrame:
    """Return rows with the last samples before each of `hours`: of whole days before, and of hours between them."""
    first = midnight(hours[0])
    days = tables.read(family.days, tables.hours(family.days, first - lookback_days * _DAY, first - _DAY))
    between = tables.read(family.hours, tables.hours(family.hours, first, hours[-1]))
    return days.unionByName(between.where(~_is_one_of(between, hours)))


def _check_samples_present(published: DataFrame, staged: DataFrame, hours: list[datetime]) -> int:
    """Return the number of samples in these hours. Raises _SamplesExpired for hours that have lost samples."""
    before, after = (
        {
            _moment(row["window"]): row["samples"]
            for row in _count_samples(frame.where(_is_one_of(frame, hours))).collect()
        }
        for frame in (published, staged)
    )
    if fewer := {hour for hour, samples in before.items() if after.get(hour, 0) < samples}:
        raise _SamplesExpired(fewer)
    return sum(after.values())


def _count_samples(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 -- the usual name

    return rows.groupBy(F.unix_millis("window").alias("window")).agg(F.sum("n").alias("samples"))


def _replace_partitions(block: Block, table: str, hours: Iterable[datetime]) -> None:
    """Replace the partitions that hold these hours by the rows staged for the table."""
    from analytics.tables.partitions import partitions_of

    for partition in partitions_of(table, hours):
        names = [entry.name for entry in block.tables.visible_files(table, partition)]
        block.change.remove_files(table, partition, names)
    block.change.add_staged(table)


def _stage_counters(block: Block, hours: list[datetime], tails: DataFrame) -> DataFrame:
    from analytics.transforms import rollup

    none: frozenset[int] = frozenset()
    mixed = block.tables.spark.sparkContext.accumulator(none, rollup.HourSet())
    added_up, merged = _stage_minutes(block, hours, tails, mixed)
    if mixed.value:
        again = {_moment(unix_ms) for unix_ms in mixed.value}
        block.run.report.mixed_hours |= again
        tails = tails.unionByName(rollup.single_states(block.tables.read("samples", again)))
        clean = [hour for hour in hours if hour not in again]
        added_up, merged = _stage_minutes(block, clean, tails)
    return added_up.unionByName(merged)


def _stage_minutes(
    block: Block, hours: list[datetime], others: DataFrame, mixed: Accumulator[frozenset[int]] | None = None
) -> tuple[DataFrame, DataFrame]:
    """Stage minutes; return the sums of whole rows, and rows merged from open states, `others` and tails.

    Rows of hours that are added to `mixed` are void.
    """
    from analytics.transforms import rollup

    files, rows = block.tables.read_file_contents("samples", hours, bytes_max=FILE_BYTES_MAX)
    minutes = rollup.minutes_of_files(files).unionByName(rollup.minutes(rows))
    added_up, opened = block.change.stage_minutes(minutes)
    states = rollup.open_states(opened).unionByName(others)
    return added_up, block.change.stage_rows("rollup_1m", rollup.minute_windows(states, block.run.lookback_days, mixed))


def _stage_histograms(block: Block, hours: list[datetime], tails: DataFrame) -> DataFrame:
    from analytics.transforms import histogram_rollup

    histograms = block.tables.read("histograms", hours)
    unknown = histograms.where(~histogram_rollup.is_usable(histograms)).count()
    block.run.report.unknown_histograms += unknown
    rows = histogram_rollup.single_histograms(histograms).unionByName(tails)
    staged = block.change.stage_rows("histograms_1m", histogram_rollup.histogram_windows(rows, block.run.lookback_days))
    block.run.report.refused_histograms += staged.agg({"refused": "sum"}).collect()[0][0] or 0
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
COUNTERS: Final = TableFamily("samples", "rollup_1m", "rollup_1h", "rollup_1d", _coarser, _stage_counters, _tails)
HISTOGRAMS: Final = TableFamily(
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
    """Return the first instant of the moment's day, UTC."""
    return datetime.combine(moment.astimezone(UTC).date(), time(), UTC)


def _is_one_of(frame: DataFrame, hours: Sequence[datetime]) -> Column:
    return frame["window"].isin(*hours)


def _moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def _print_report(progress: Progress, report: RollupReport) -> None:
    if report.mixed_hours:
        progress.print_line(f"{len(report.mixed_hours)} hours had overlapping files and were computed sample by sample")
    if report.expired_hours:
        progress.print_line(
            f"LEFT AS THEY WERE: {len(report.expired_hours)} hours from {min(report.expired_hours):%Y-%m-%d %H:00} on "
            "got late samples after their samples had expired; keep samples longer (expire --keep samples=DAYS)"
        )
    if report.refused_histograms:
        progress.print_line(
            f"REFUSED: {report.refused_histograms} histograms without bounds in common with those before them; the "
            "column `refused` of histograms_1m says where"
        )
    if report.unknown_histograms:
        progress.print_line(
            f"LEFT OUT: {report.unknown_histograms} histograms of an unknown schema or of too many buckets; the table "
            "`histograms` has them"
        )
    if report.hours_left:
        progress.print_line(f"NOT ALL: {report.hours_left} hours are still to be rolled up; run it again")
    progress.print_summary(f"{report.hours} hours, {report.samples:,} samples rolled up")


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
    with job_session("rollup") as session:
        run(session, root, lookback_days=lookback_days, hours_per_change=hours_per_change)


if __name__ == "__main__":
    command()
