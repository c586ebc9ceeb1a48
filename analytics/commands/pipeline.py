"""The command `pipeline`: ingest, rollup, usage, report and upkeep in one Spark session, once or for ever.

The other jobs stay for large clusters, where each has a machine and a schedule of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

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
STEPS: Final = 5
"""Of a turn with upkeep, without the report."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Options of a run. `report`: the page's file; None: no page."""

    spool: str
    root: str
    keep: dict[str, int]
    replica_labels: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    lateness_hours: float = LATENESS_HOURS
    silent_hours: float = SILENT_HOURS
    keep_hours: int = KEEP_SPOOL_HOURS
    compact_limit: int = PARTITIONS_MAX
    report: str | None = None
    prices: Prices | None = None

    def steps(self, *, with_upkeep: bool) -> dict[str, Callable[[SparkSession], object]]:
        """Return the steps of one turn by their names, in order: bills come before upkeep."""
        from analytics.jobs import compact, expire, ingest, rollup, usage

        root, now = self.root, datetime.now(UTC)
        lateness, silent = timedelta(hours=self.lateness_hours), timedelta(hours=self.silent_hours)
        steps: dict[str, Callable[[SparkSession], object]] = {
            "ingest": lambda spark: ingest.run(
                spark, root, self.spool, replica_labels=self.replica_labels, keep_hours=self.keep_hours
            ),
            "rollup": lambda spark: rollup.run(spark, root),
            "usage": lambda spark: usage.run(
                spark, root, usage.UsageOptions(datetime.now(UTC), lateness, silent, jobs=self.jobs)
            ),
        }
        if self.report is not None:
            steps["report"] = self._report
        if with_upkeep:
            steps["compact"] = lambda spark: compact.run(spark, root, now=now, limit=self.compact_limit)
            steps["expire"] = lambda spark: expire.run(spark, root, self.keep, now=now)
        return steps

    def _report(self, spark: SparkSession) -> None:
        from analytics.jobs import report
        from analytics.report.page import render_page
        from analytics.report.span import candidates

        assert self.report is not None
        now = datetime.now(UTC)
        spans = candidates(now - REPORT_LAST, now, now)
        made = report.run(spark, self.root, spans, (), made_at=now, jobs=self.jobs, prices=self.prices)
        report.write_file(spark, self.report, render_page(made).encode())


def run(pipeline: Pipeline, follow_s: float | None, *, turns: int | None = None) -> None:
    """Run the steps once, or with `follow_s` seconds between turns for ever (`turns`: as often).

    Raises click.ClickException for a step that fails, with its name; with `follow_s` that is printed, and the next turn
    tries again.
    """
    progress, current = Progress(), Step()
    with starting(f"{bar(0)} {Step('Spark starts', 0, STEPS + (pipeline.report is not None)).text}"):
        from analytics.jobs.session import spark_session

        with errors_as_messages():
            spark = spark_session("pulsar-proxy-analytics pipeline")
    upkeep_at_s = time.monotonic()
    with ending_at_interrupt(), heartbeats(spark, step=lambda: current):
        while True:
            is_due = time.monotonic() >= upkeep_at_s
            steps = pipeline.steps(with_upkeep=is_due)
            try:
                for number, (name, step) in enumerate(steps.items(), start=1):
                    current = Step(name, number, len(steps))
                    CONSOLE.print_line(f"{current.text}:")
                    with errors_as_messages(f"{name}: "):
                        step(spark)
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
            current = Step()
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
def pipeline(follow_s: float | None, once: bool, keep: tuple[str, ...], **options: Any) -> None:  # noqa: FBT001
    """From the spool to bills: ingest, rollup, usage, report, upkeep."""
    if once and follow_s is not None:
        raise click.UsageError("--once and --follow: give one of them")
    if options["report"] is not None:
        check_output("--report", options["report"])
    run(Pipeline(keep=parse_retention(keep), **options), follow_s)
