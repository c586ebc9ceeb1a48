"""A cluster's bill: what the usage tables have of each principal in a span, beside the span before.

What is not in it is counted, too: hours that are open or not summed yet, late samples, counters of unknown start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.figures import is_within, read_windows
from analytics.report.span import Span
from analytics.transforms import usage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from analytics.tables.store import Tables

COLUMNS: Final = tuple(usage.WHAT.values())
OTHER: Final = "other"
"""The proxy's label for all principals beyond those that it counts by name."""
PRINCIPALS_MAX: Final = 1000
Figures = tuple[int, ...]
"""In the order of COLUMNS."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums of one principal; `before`: its bytes in and out in the span before."""

    name: str
    figures: Figures
    before: int

    @property
    def bytes(self) -> int:
        """Bytes in and out."""
        return self.figures[0] + self.figures[1]

    @property
    def messages(self) -> int:
        """Messages in and out; 0 also where the proxy does not count them."""
        return self.figures[2] + self.figures[3]


@dataclass(frozen=True, slots=True)
class Bill:
    """`principals`: by bytes, those beyond PRINCIPALS_MAX as one, the proxy's rest last; `total`: the sum of all.

    `before_windows`: windows of the span before with usage; `open_windows` may still grow; `missing_windows` are rolled
    up and not in the usage tables yet; `late_samples` are of closed hours, so not in them; `without_start`: counters
    that began in the span at an unknown time, whose first sample counts nothing.
    """

    principals: list[Usage]
    total: Usage
    before_windows: int = 0
    open_windows: int = 0
    missing_windows: int = 0
    late_samples: int = 0
    without_start: int = 0


def collect_bill(
    tables: Tables, series: DataFrame, cluster: str, span: Span, jobs: Collection[str] = usage.JOBS
) -> Bill:
    """Collect the cluster's bill. `jobs`: the scrape jobs that are billed, as given to `usage`."""
    both = Span(span.before.start, span.end, span.resolution)
    billed = read_windows(tables, span.resolution.usage, both).where(F.col("cluster") == cluster).cache()
    mine = usage.usage_series(series, jobs).where(F.col("cluster") == cluster).select("series_id")
    mine = mine.join(series.select("series_id", "first_seen"), "series_id").cache()
    try:
        windows = billed.groupBy("window").agg(
            F.min("closed").alias("closed"), F.first(is_within(span)).alias("is_now")
        )
        states = [(row["closed"], row["is_now"]) for row in windows.collect()]
        rolled = read_windows(tables, span.resolution.rollup, span).join(F.broadcast(mine), "series_id")
        rolled = rolled.where(usage.no_count().isNull())
        missing = rolled.select("window").distinct().join(windows.select("window"), "window", "left_anti")
        began = rolled.where(F.col("first_start_ts").isNull() & (F.col("first_seen") >= F.lit(span.start)))
        return Bill(
            *_principals(billed, span),
            before_windows=sum(not is_now for _, is_now in states),
            open_windows=sum(is_now and not closed for closed, is_now in states),
            missing_windows=missing.count(),
            late_samples=_late(tables, mine, cluster, span),
            without_start=began.select("series_id").distinct().count(),
        )
    finally:
        billed.unpersist()
        mine.unpersist()


def _principals(billed: DataFrame, span: Span) -> tuple[list[Usage], Usage]:
    now = (usage.total(F.when(is_within(span), F.col(name))).alias(name) for name in COLUMNS)
    before = usage.total(F.when(is_within(span.before), F.col("bytes_in") + F.col("bytes_out"))).alias("before")
    sums = billed.groupBy("principal").agg(*now, before)
    names = (*COLUMNS, "before")
    whole = sums.agg(F.count("*").alias("n"), *(usage.total(F.col(name)).alias(name) for name in names)).collect()[0]
    total = _usage("all principals", whole)
    by_bytes = (F.desc(F.col("bytes_in") + F.col("bytes_out")), "principal")
    rows = sums.orderBy(F.col("principal") != OTHER, *by_bytes).limit(PRINCIPALS_MAX).collect()
    listed = [_usage(row["principal"], row) for row in rows]
    others = [one for one in listed if one.name == OTHER]
    named = [one for one in listed if one.name != OTHER]
    if further := whole["n"] - len(listed):
        rest = tuple(mine - sum(one.figures[place] for one in listed) for place, mine in enumerate(total.figures))
        named.append(Usage(f"{further:,} further principals", rest, total.before - sum(one.before for one in listed)))
    return [*named, *others], total


def _usage(name: str, row: Row) -> Usage:
    return Usage(name, tuple(row[column] for column in COLUMNS), row["before"])


def _late(tables: Tables, mine: DataFrame, cluster: str, span: Span) -> int:
    """Return how many samples of the span's closed hours are in rollup_1h and not in the ledger."""
    ledger = read_windows(tables, "usage_ledger", span).where(F.col("cluster") == cluster)
    closed = read_windows(tables, "usage_hourly", span).where(F.col("closed") & (F.col("cluster") == cluster))
    hours = closed.select("window").distinct().join(ledger.select("window").distinct(), "window", "left_semi")
    rolled = read_windows(tables, "rollup_1h", span).join(F.broadcast(hours), "window", "left_semi")
    closed_ledger = ledger.join(F.broadcast(hours), "window", "left_semi")
    found = usage.count_late_samples(rolled, mine, closed_ledger)
    return int(found.agg(F.sum("samples")).collect()[0][0] or 0)
