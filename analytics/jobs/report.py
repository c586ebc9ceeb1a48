"""The job `report`: one HTML page with the bill of clusters over a period, from the usage tables and the rollups.

It reads the tables of `rollup` and `usage`, changes nothing, and may run concurrently with all other jobs.
"""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analytics.jobs.progress import Progress
from analytics.report.bill import collect_bill
from analytics.report.figures import collect_figures, has_rows, list_clusters
from analytics.report.page import Report, render_page
from analytics.report.span import Span
from analytics.report.summary import Cluster
from analytics.report.text import display_name
from analytics.tables.locations import write_text
from analytics.tables.store import Tables
from analytics.transforms.usage import JOBS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
) -> str:
    """Render the page of the clusters `names` (empty: all), for the first of `spans` for which the rollups have rows.

    `as_of`: from the tables as they were at this time. `jobs` empty: the proxy's usual names. Raises TablesError.
    """
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
