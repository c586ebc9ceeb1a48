"""Growth over outages, for lines that are rates: it is drawn over the time in which it happened.

A counter's growth belongs to the window of the later of two samples. After an outage of two hours one minute has the
growth of two hours, which is no rate of that minute. Sums go on with the windows as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.report.points import Line
    from analytics.report.span import Span


def growth_over_outages(rows: DataFrame, span: Span, *names: str) -> DataFrame:
    """Sum by `names` what grew since an earlier window than the one before: (…, window_ms, since_ms, increase).

    `rows` are of a rollup; `since_ms` is the window of the last sample before the outage.
    """
    width_ms = span.resolution.width_s * 1000
    since_ms = F.expr(f"unix_millis(entry_ts) div {width_ms} * {width_ms}").alias("since_ms")
    found = rows.select(*names, F.unix_millis("window").alias("window_ms"), since_ms, "entry")
    found = found.where((F.col("window_ms") - F.col("since_ms") > width_ms) & (F.col("entry") != 0))
    return found.groupBy(*names, "window_ms", "since_ms").agg(F.sum("entry").alias("increase"))


def spread_growth(line: Line, span: Span, window_ms: int, since_ms: int, increase: float) -> None:
    """Move this growth from its window to all since the last sample, evenly; what is before the span is not drawn."""
    windows = range(since_ms, window_ms, span.windows_ms.step)
    line[window_ms] -= increase
    for before in windows:
        if (at := before + windows.step) in span.windows_ms:
            line[at] = line.get(at, 0.0) + increase / len(windows)
