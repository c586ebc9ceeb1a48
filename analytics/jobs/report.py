"""The job `report`: one HTML page with the bill of clusters over a period, from the usage tables and the rollups.

It reads the tables of `rollup` and `usage`, changes nothing, and may run concurrently with all other jobs.
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from analytics.jobs.command_line import job_session, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option
from analytics.jobs.usage import jobs_option
from analytics.report.span import BadSpan, Span, candidates, parse_last

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLUSTERS_MAX: Final = 10
LAST: Final = "24h"


def run(
    spark: SparkSession,
    root: str,
    spans: list[Span],
    names: tuple[str, ...],
    *,
    made_at: datetime,
    as_of: datetime | None = None,
    jobs: tuple[str, ...] = (),
) -> str:
    """Render the page of the clusters `names` (empty: all), for the first of `spans` for which the rollups have rows.

    `as_of`: from the tables as they were at this time. `jobs` empty: the proxy's usual names. Raises TablesError.
    """
    from analytics.report.bill import collect_bill
    from analytics.report.figures import collect_figures, has_rows, list_clusters
    from analytics.report.page import Report, render_page
    from analytics.report.summary import Cluster
    from analytics.tables.store import Tables
    from analytics.transforms.usage import JOBS

    tables, progress = Tables.open(spark, root, create=False, as_of=as_of), Progress()
    span = next((span for span in spans if has_rows(tables, span)), spans[0])
    series = tables.read("series").cache()
    try:
        known = list_clusters(series)
        chosen = list(dict.fromkeys(names)) or known
        notices = _notices(known, chosen, span, spans[0])
        found = []
        for name in chosen[:CLUSTERS_MAX]:
            bill = collect_bill(tables, series, name, span, jobs or JOBS)
            found.append(Cluster(name, collect_figures(tables, series, name, span), bill))
            progress.print_line(f"cluster {name or '(none)'}: {len(bill.principals)} principals")
    finally:
        series.unpersist()
    text = render_page(Report(span, made_at, found, notices, as_of))
    progress.print_summary(f"{span.start:%Y-%m-%d %H:%M} to {span.end:%Y-%m-%d %H:%M} by {span.resolution.noun}")
    return text


def _notices(known: list[str], chosen: list[str], span: Span, finest: Span) -> list[str]:
    from analytics.report.text import display_name

    notices = []
    if not known:
        notices.append("The tables have no series of the proxy: does Prometheus scrape it and write to the receiver?")
    if span.resolution != finest.resolution:
        notices.append("There is nothing by hour of this time (expired, or not rolled up yet), so it is by day.")
    there = f"there are: {', '.join(map(display_name, known[:CLUSTERS_MAX]))}" if known else "there are none"
    notices += [f"There is no cluster named {display_name(name)!r}; {there}." for name in chosen if name not in known]
    if len(chosen) > CLUSTERS_MAX:
        notices.append(f"Of {len(chosen)} clusters {CLUSTERS_MAX} are shown; choose others with --cluster.")
    return notices


def write_page(spark: SparkSession, output: str, text: str) -> None:
    """Write the page to a local file, or, if the path has a scheme, to a Hadoop filesystem, replacing an existing one.

    Raises OSError, TablesError.
    """
    from analytics.tables.locations import write_text

    if ":/" in output:
        write_text(spark, output, text)
        return
    target = Path(output)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_output(option: str, output: str) -> None:
    """Raise click.UsageError if a local page's directory is not there."""
    if ":/" not in output and not (directory := Path(output).absolute().parent).is_dir():
        raise click.UsageError(f"{option}: there is no directory {directory}")


def _spans(last: str | None, start: datetime | None, end: datetime | None, now: datetime) -> list[Span]:
    """Return the report's candidate spans from the options. Raises click.UsageError."""
    if last is not None and (start is not None or end is not None):
        raise click.UsageError("--last is up to now: give it, or --start and --end")
    if end is not None and start is None:
        raise click.UsageError("--end needs --start")
    until = end.replace(tzinfo=UTC) if end else now
    try:
        length = parse_last(last or LAST)
        return candidates(start.replace(tzinfo=UTC) if start else until - length, until, now)
    except BadSpan as error:
        raise click.UsageError(str(error)) from None


@click.command("report")
@tables_option
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    help="The page: a local file, or any Hadoop path with a scheme (s3a://…); replaced if it is there.",
)
@click.option("--cluster", "names", multiple=True, metavar="NAME", help="May be repeated. Default: all.")
@click.option("--last", metavar="TIME", help=f"Up to now, or to --as-of: 24h, 30d. Default: {LAST}.")
@click.option("--start", type=click.DateTime(), help="UTC, included.")
@click.option("--end", type=click.DateTime(), help="UTC, not included. Default: now.")
@click.option("--as-of", type=click.DateTime(), help="Read the tables as they were at this time (UTC).")
@jobs_option
@verbose_option
def command(  # noqa: PLR0917 -- click's manner
    root: str,
    output: str,
    names: tuple[str, ...],
    last: str | None,
    start: datetime | None,
    end: datetime | None,
    as_of: datetime | None,
    jobs: tuple[str, ...],
) -> None:
    """Write a page with the bill of a period."""
    made_at = datetime.now(UTC)
    as_of = as_of.replace(tzinfo=UTC) if as_of else None
    spans = _spans(last, start, end, as_of or made_at)
    check_output("--output", output)
    with job_session("report") as session:
        text = run(session, root, spans, names, made_at=made_at, as_of=as_of, jobs=jobs)
        try:
            write_page(session, output, text)
        except OSError as error:
            raise click.ClickException(f"cannot write {output}: {error}") from error
    click.echo(f"{output}: {len(text) / 1e3:.0f} kB", err=True)


if __name__ == "__main__":
    command()
