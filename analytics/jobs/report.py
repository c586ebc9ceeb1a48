"""The job `report`: the statement of a period, as an HTML page and as files, from the usage tables and the rollups.

It reads the tables of `rollup` and `usage`, changes nothing, and may run concurrently with all other jobs. Of the same
tables the files have the same bytes each time.
"""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analytics.jobs.progress import Progress
from analytics.report.bill import collect_bill, collect_days, collect_use, missing_windows
from analytics.report.costs import SHARED, Use, budget_states, charge_periods, cost_lines, month_of
from analytics.report.failures import collect_connections, collect_failures, has_rows, list_clusters
from analytics.report.page import Cluster, Statement
from analytics.report.prices import Prices
from analytics.report.span import Span
from analytics.report.text import display_name
from analytics.report.unusual import find_unusual
from analytics.tables.locations import write_text
from analytics.tables.store import Tables
from analytics.transforms.usage import JOBS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CLUSTERS_MAX: Final = 10


def run(
    spark: SparkSession,
    root: str,
    spans: list[Span],
    names: tuple[str, ...],
    *,
    made_at: datetime,
    as_of: datetime | None = None,
    jobs: tuple[str, ...] = (),
    prices: Prices | None = None,
) -> Statement:
    """Make the statement of the clusters `names` (empty: all), for the first of `spans` for which rollups have rows.

    `as_of`: from the tables as they were at this time. `jobs` empty: the proxy's usual names. Raises TablesError.
    """
    tables, progress = Tables.open(spark, root, create=False, as_of=as_of), Progress()
    span = next((span for span in spans if has_rows(tables, span)), spans[0])
    series = tables.read("series").cache()
    try:
        known = list_clusters(series)
        chosen = list(dict.fromkeys(names)) or known
        notices = _notices(known, chosen, span, spans[0])
        found, shown = [], chosen[:CLUSTERS_MAX]
        for name in shown:
            found.append(_collect(tables, series, name, span, as_of or made_at, jobs))
            progress.print_line(f"cluster {name or '(none)'}: {len(found[-1].bill.principals)} principals")
        made = Statement(span, made_at, found, notices, as_of, prices)
        if prices:
            made.lines.extend(cost_lines(_use(tables, series, shown, span, prices), prices))
            if prices.budgets:
                last = month_of(span.end - span.resolution.width)
                month = Span(last, span.end, span.resolution)
                lines = cost_lines(_use(tables, series, shown, month, prices), prices)
                made.budgets.extend(budget_states(lines, prices, last, min(span.end, as_of or made_at)))
    finally:
        series.unpersist()
    progress.print_summary(f"{span.start:%Y-%m-%d %H:%M} to {span.end:%Y-%m-%d %H:%M} by {span.resolution.noun}")
    return made


def _collect(  # noqa: PLR0917 -- all of a cluster
    tables: Tables, series: DataFrame, name: str, span: Span, now: datetime, jobs: tuple[str, ...]
) -> Cluster:
    bill = collect_bill(tables, series, name, span, jobs or JOBS)
    sampled = bill.windows | collect_connections(tables, series, name, span).keys()
    days, daily = collect_days(tables, name, span)
    return Cluster(
        name,
        bill,
        collect_failures(tables, series, name, span),
        missing_windows(sampled, span, now),
        days,
        daily,
        find_unusual(days, daily, span.start.date()),
    )


def _use(tables: Tables, series: DataFrame, names: list[str], span: Span, prices: Prices) -> list[Use]:
    """Return the use of all principals by charge period, and each cluster's open connections."""
    periods = charge_periods(span, prices)
    use = []
    for name in names:
        use += collect_use(tables, name, periods, span)
        by_window = collect_connections(tables, series, name, span)
        for start, end in periods:
            seconds = sum(value for window, value in by_window.items() if start <= window < end)
            use.append(Use(name, SHARED, start, end, {"connection_hour": seconds}))
    return use


def _notices(known: list[str], chosen: list[str], span: Span, finest: Span) -> list[str]:
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


def write_file(spark: SparkSession, output: str, content: bytes) -> None:
    """Write a file to a local path, or, if the path has a scheme, to a Hadoop filesystem, replacing an existing one.

    Raises OSError, TablesError.
    """
    if ":/" in output:
        write_text(spark, output, content)
        return
    target = Path(output)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
