"""Commands that make sums and bills: `rollup`, `usage`, `report`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from analytics.commands.command_line import (
    check_output,
    job_session,
    jobs_option,
    lateness_option,
    number_option,
    prices_option,
    silent_option,
    tables_option,
)
from analytics.jobs.defaults import HOURS_PER_CHANGE, LOOKBACK_DAYS, REPORT_LAST
from analytics.jobs.quiet import verbose_option
from analytics.report.prices import Prices
from analytics.report.span import BadSpan, Span, candidates, parse_last


@click.command("rollup")
@tables_option
@number_option(
    "--lookback-days",
    click.IntRange(min=1, max=90),
    LOOKBACK_DAYS,
    "A counter's growth over a gap is counted if the gap is shorter. Always give the same.",
)
@number_option(
    "--hours-per-change",
    click.IntRange(min=1),
    HOURS_PER_CHANGE,
    "Hours that become visible together, and that a kill costs at most.",
)
@verbose_option
def rollup(**options: Any) -> None:
    """Sum samples up to minutes, hours and days."""
    from analytics.jobs import rollup

    with job_session("rollup") as session:
        rollup.run(session, **options)


@click.command("usage")
@tables_option
@lateness_option
@silent_option
@jobs_option
@number_option("--lookback-days", click.IntRange(min=1, max=90), LOOKBACK_DAYS, "As given to rollup.")
@click.option(
    "--reopen-from",
    type=click.DateTime(["%Y-%m-%dT%H"]),
    metavar="YYYY-MM-DDTHH",
    help="Recompute closed hours from this one (UTC) on, after a backfill. Bills made of them may differ then.",
)
@verbose_option
def usage(root: str, lateness_hours: float, silent_hours: float, reopen_from: datetime | None, **options: Any) -> None:
    """Bytes, messages and sessions of each principal, by hour and day."""
    from analytics.jobs import usage

    options |= {"lateness": timedelta(hours=lateness_hours), "silent": timedelta(hours=silent_hours)}
    reopen_from = reopen_from.replace(tzinfo=UTC) if reopen_from else None
    with job_session("usage") as session:
        usage.run(session, root, usage.UsageOptions(datetime.now(UTC), reopen_from=reopen_from, **options))


@click.command("report")
@tables_option
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    help="The page: a local file, or any Hadoop path with a scheme (s3a://…); replaced if it is there.",
)
@click.option("--cluster", "names", multiple=True, metavar="NAME", help="May be repeated. Default: all.")
@click.option("--last", metavar="TIME", help=f"Up to now, or to --as-of: 24h, 30d. Default: {REPORT_LAST}.")
@click.option("--start", type=click.DateTime(), help="UTC, included.")
@click.option("--end", type=click.DateTime(), help="UTC, not included. Default: now.")
@click.option("--as-of", type=click.DateTime(), help="Read the tables as they were at this time (UTC).")
@prices_option
@click.option(
    "--lines", "lines", metavar="FILE", help="Also write the lines of the bill, as .csv or .parquet. Needs --prices."
)
@click.option("--focus", metavar="FILE", help="The same lines in FOCUS 1.3's columns, as .csv or .parquet.")
@jobs_option
@verbose_option
def report(  # noqa: PLR0917 -- click's manner
    root: str,
    output: str,
    names: tuple[str, ...],
    last: str | None,
    start: datetime | None,
    end: datetime | None,
    as_of: datetime | None,
    prices: Prices | None,
    lines: str | None,
    focus: str | None,
    jobs: tuple[str, ...],
) -> None:
    """Write the statement of a period: use, costs, what is unusual."""
    made_at = datetime.now(UTC)
    as_of = as_of.replace(tzinfo=UTC) if as_of else None
    spans = _spans(last, start, end, as_of or made_at)
    check_output("--output", output)
    for option, path in (("--lines", lines), ("--focus", focus)):
        if path is not None:
            if prices is None or not path.endswith((".csv", ".parquet")):
                raise click.UsageError(f"{option}: a file that ends in .csv or .parquet, with --prices")
            check_output(option, path)
    from analytics.jobs import report
    from analytics.report import exports
    from analytics.report.page import render_page

    with job_session("report") as session:
        made = report.run(session, root, spans, names, made_at=made_at, as_of=as_of, jobs=jobs, prices=prices)
        written = {output: render_page(made).encode()}
        for path, columns in ((lines, exports.LINES), (focus, exports.FOCUS)):
            if path is not None and prices is not None:
                written[path] = exports.export(made.lines, prices, columns, parquet=path.endswith(".parquet"))
        for path, content in written.items():
            try:
                report.write_file(session, path, content)
            except OSError as error:
                raise click.ClickException(f"cannot write {path}: {error}") from error
    for path, content in written.items():
        click.echo(f"{path}: {len(content) / 1e3:.0f} kB", err=True)


def _spans(last: str | None, start: datetime | None, end: datetime | None, now: datetime) -> list[Span]:
    """Return the report's candidate spans from the options. Raises click.UsageError."""
    if last is not None and (start is not None or end is not None):
        raise click.UsageError("--last is up to now: give it, or --start and --end")
    if end is not None and start is None:
        raise click.UsageError("--end needs --start")
    until = end.replace(tzinfo=UTC) if end else now
    try:
        length = parse_last(last or REPORT_LAST)
        return candidates(start.replace(tzinfo=UTC) if start else until - length, until, now)
    except BadSpan as error:
        raise click.UsageError(str(error)) from None
