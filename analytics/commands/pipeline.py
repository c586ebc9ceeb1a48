"""The command `pipeline`: ingest, rollup, usage, report and upkeep in one Spark session, once or for ever.

The other jobs stay for large clusters, where each has a machine and a schedule of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click

from analytics.commands.command_line import (
    check_output,
    ending_at_interrupt,
    errors_as_messages,
    jobs_option,
    keep_spool_option,
    lateness_option,
    number_option,
    prices_option,
    replica_option,
    silent_option,
    spool_option,
    tables_option,
)
from analytics.commands.upkeep import parse_retention
from analytics.jobs.defaults import KEEP_SPOOL_HOURS, LATENESS_HOURS, PARTITIONS_MAX, SILENT_HOURS
from analytics.jobs.progress import CONSOLE, Progress, Step, bar, heartbeats, starting
from analytics.jobs.quiet import verbose_option
from analytics.report.prices import Prices

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UPKEEP_EVERY_S: Final = 3600.0
REPORT_LAST: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Options of a run. `report`: the page's file; None: no page."""

    spool: str
    root: str
    keep: dict[str, int]
    replica_labels: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    lateness: timedelta = timedelta(hours=LATENESS_HOURS)
    silent: timedelta = timedelta(hours=SILENT_HOURS)
    keep_spool_hours: int = KEEP_SPOOL_HOURS
    compact_limit: int = PARTITIONS_MAX
    report: str | None = None
    prices: Prices | None = None

    def steps(self, *, with_upkeep: bool) -> dict[str, Callable[[SparkSession], object]]:
        """Return the steps of one turn by their names, in order: bills come before upkeep."""
        steps: dict[str, Callable[[SparkSession], object]] = {
            "ingest": self._ingest,
            "rollup": self._rollup,
            "usage": self._usage,
        }
        if self.report is not None:
            steps["report"] = self._report
        if with_upkeep:
            steps |= {"compact": self._compact, "expire": self._expire}
        return steps

    def _ingest(self, spark: SparkSession) -> None:
        from analytics.jobs import ingest

        ingest.run(spark, self.root, self.spool, replica_labels=self.replica_labels, keep_hours=self.keep_spool_hours)

    def _rollup(self, spark: SparkSession) -> None:
        from analytics.jobs import rollup

        rollup.run(spark, self.root)

    def _usage(self, spark: SparkSession) -> None:
        from analytics.jobs import usage

        options = usage.UsageOptions(datetime.now(UTC), self.lateness, self.silent, jobs=self.jobs)
        usage.run(spark, self.root, options)

    def _report(self, spark: SparkSession) -> None:
        from analytics.jobs import report
        from analytics.report.page import render_page
        from analytics.report.span import candidates

        assert self.report is not None
        now = datetime.now(UTC)
        spans = candidates(now - REPORT_LAST, now, now)
        made = report.run(spark, self.root, spans, (), made_at=now, jobs=self.jobs, prices=self.prices)
        report.write_file(spark, self.report, render_page(made).encode())

    def _compact(self, spark: SparkSession) -> None:
        from analytics.jobs import compact

        compact.run(spark, self.root, now=datetime.now(UTC), limit=self.compact_limit)

    def _expire(self, spark: SparkSession) -> None:
        from analytics.jobs import expire

        expire.run(spark, self.root, self.keep, now=datetime.now(UTC))


class Steps:
    """The step under way, for the console."""

    def __init__(self) -> None:
        self.current = Step()

    def run_all(self, spark: SparkSession, steps: dict[str, Callable[[SparkSession], object]]) -> None:
        """Run a turn's steps. Raises click.ClickException, with the name of the step that failed."""
        for number, (name, run) in enumerate(steps.items(), start=1):
            self.current = Step(name, number, len(steps))
            CONSOLE.print_line(f"{self.current.text}:")
            with _named(name):
                run(spark)


@contextmanager
def _named(step: str) -> Iterator[None]:
    try:
        with errors_as_messages():
            yield
    except click.ClickException as error:
        raise click.ClickException(f"{step}: {error.message}") from error


def run(pipeline: Pipeline, follow_s: float | None, *, turns: int | None = None) -> None:
    """Run the steps once, or with `follow_s` seconds between turns for ever (`turns`: as often).

    Raises click.ClickException for a step that fails; with `follow_s` that is printed, and the next turn tries again.
    """
    steps, progress = Steps(), Progress()
    start = Step("Spark starts", 0, len(pipeline.steps(with_upkeep=True)))
    with starting(f"{bar(0)} {start.text}"):
        from analytics.jobs.session import spark_session

        with errors_as_messages():
            spark = spark_session("pulsar-proxy-analytics pipeline")
    upkeep_at_s = time.monotonic()
    with ending_at_interrupt(), heartbeats(spark, step=lambda: steps.current):
        while True:
            is_due = time.monotonic() >= upkeep_at_s
            try:
                steps.run_all(spark, pipeline.steps(with_upkeep=is_due))
            except click.ClickException as error:
                if follow_s is None:
                    raise
                CONSOLE.print_line(f"FAILED: {error.message}; tried again in {follow_s:g} s")
            else:
                if is_due:
                    upkeep_at_s = time.monotonic() + UPKEEP_EVERY_S
            turns = None if turns is None else turns - 1
            if follow_s is None or turns == 0:
                progress.print_summary("the pipeline is done")
                return
            steps.current = Step()
            time.sleep(follow_s)


@click.command("pipeline")
@spool_option
@tables_option
@click.option(
    "--follow",
    "follow_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Run forever, with this pause between turns. A step that fails is tried again at the next turn.",
)
@click.option("--once", is_flag=True, help="Run all steps once, as without --follow.")
@click.option("--report", metavar="FILE", help="Also write the page about the last 24 hours.")
@prices_option
@click.option("--keep", multiple=True, metavar="TABLE=DAYS", help="Retention of a table, as expire takes it.")
@keep_spool_option
@number_option("--compact-limit", click.IntRange(min=1), PARTITIONS_MAX, "Partitions that one turn compacts, at most.")
@lateness_option
@silent_option
@jobs_option
@replica_option
@verbose_option
def pipeline(  # noqa: PLR0917 -- click's manner
    spool: str,
    root: str,
    follow_s: float | None,
    once: bool,  # noqa: FBT001
    report: str | None,
    prices: Prices | None,
    keep: tuple[str, ...],
    keep_spool_hours: int,
    compact_limit: int,
    lateness_hours: float,
    silent_hours: float,
    jobs: tuple[str, ...],
    replica_labels: tuple[str, ...],
) -> None:
    """From the spool to bills: ingest, rollup, usage, report, upkeep."""
    if once and follow_s is not None:
        raise click.UsageError("--once and --follow: give one of them")
    if report is not None:
        check_output("--report", report)
    run(
        Pipeline(
            spool,
            root,
            parse_retention(keep),
            replica_labels,
            jobs,
            timedelta(hours=lateness_hours),
            timedelta(hours=silent_hours),
            keep_spool_hours,
            compact_limit,
            report,
            prices,
        ),
        follow_s,
    )
