"""A cluster's use: what the usage tables have of each principal in a span, beside the span before, and by day.

What is not in it is counted, too: hours that are open or not summed yet, late samples, counters of unknown start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.costs import Use
from analytics.report.failures import is_within, read_windows
from analytics.report.span import Span
from analytics.report.unusual import HISTORY_DAYS
from analytics.tables.errors import TablesError
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
_USES_MAX: Final = 200_000
"""Limit of principals times charge periods: the proxy counts some thousand principals by name."""
_HOURS_OF_A_DAY_MIN: Final = 20


class BilledTwice(TablesError):
    """The usage tables have an hour of a principal more than once: no statement is made of them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums of one principal; `before`: its bytes in the span before; `is_rest`: the sums of all that are not listed."""

    name: str
    figures: Figures
    before: int
    is_rest: bool = False

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
    that began in the span at an unknown time, whose first sample counts nothing; `windows`: those with usage.
    """

    principals: list[Usage]
    total: Usage
    before_windows: int = 0
    open_windows: int = 0
    missing_windows: int = 0
    late_samples: int = 0
    without_start: int = 0
    windows: frozenset[datetime] = frozenset()


def collect_bill(
    tables: Tables, series: DataFrame, cluster: str, span: Span, jobs: Collection[str] = usage.JOBS
) -> Bill:
    """Collect the cluster's bill. `jobs`: the scrape jobs that are billed, as given to `usage`."""
    billed = read_windows(tables, span.resolution.usage, span.with_before).where(F.col("cluster") == cluster).cache()
    mine = usage.usage_series(series, jobs).where(F.col("cluster") == cluster).select("series_id")
    mine = mine.join(series.select("series_id", "first_seen"), "series_id").cache()
    try:
        windows = billed.groupBy("window").agg(
            F.min("closed").alias("closed"), F.first(is_within(span)).alias("is_now")
        )
        found = windows.select("closed", "is_now", F.unix_seconds("window").alias("at")).collect()
        rolled = read_windows(tables, span.resolution.rollup, span).join(F.broadcast(mine), "series_id")
        rolled = rolled.where(usage.no_count().isNull())
        missing = rolled.select("window").distinct().join(windows.select("window"), "window", "left_anti")
        began = rolled.where(F.col("first_start_ts").isNull() & (F.col("first_seen") >= F.lit(span.start)))
        return Bill(
            *_principals(billed, span),
            before_windows=sum(not row["is_now"] for row in found),
            open_windows=sum(row["is_now"] and not row["closed"] for row in found),
            missing_windows=missing.count(),
            late_samples=_late(tables, mine, cluster, span),
            without_start=began.select("series_id").distinct().count(),
            windows=frozenset(datetime.fromtimestamp(row["at"], UTC) for row in found),
        )
    finally:
        billed.unpersist()
        mine.unpersist()


def collect_use(tables: Tables, cluster: str, periods: list[tuple[datetime, datetime]], span: Span) -> list[Use]:
    """Collect what the cluster's principals used in each charge period. Raises BilledTwice, TablesError."""
    within = Span(periods[0][0], periods[-1][1], span.resolution)
    rows = read_windows(tables, span.resolution.usage, within).where(F.col("cluster") == cluster)
    place = F.coalesce(*(F.when(F.col("window") < F.lit(end), F.lit(n)) for n, (_, end) in enumerate(periods)))
    sums = (usage.total(F.col(name)).alias(name) for name in COLUMNS)
    windows = (F.count("*") - F.countDistinct("window")).alias("twice")
    found = rows.groupBy("principal", place.alias("place")).agg(*sums, windows).limit(_USES_MAX + 1).collect()
    if len(found) > _USES_MAX:
        raise TablesError(f"more than {_USES_MAX:,} principals and charge periods: choose a shorter time")
    if twice := sum(row["twice"] for row in found):
        raise BilledTwice(f"usage has {twice} rows twice in cluster {cluster!r}: run `usage --reopen-from`")
    return [_use(cluster, row, periods[row["place"]]) for row in found]


def _use(cluster: str, row: Row, period: tuple[datetime, datetime]) -> Use:
    messages = row["messages_in"] + row["messages_out"]
    quantities = {"gib_in": row["bytes_in"], "gib_out": row["bytes_out"], "million_messages": messages}
    return Use(cluster, row["principal"], period[0], period[1], quantities)


def collect_days(tables: Tables, cluster: str, span: Span) -> tuple[list[date], dict[str, dict[date, int]]]:
    """Collect the days of the span, and of the history before it, that have nearly all hours; and bytes by principal.

    Of the PRINCIPALS_MAX principals with the most bytes. A day whose hours have expired counts as whole.
    """
    start = span.start - timedelta(days=HISTORY_DAYS)
    both = Span(start.replace(hour=0, minute=0), span.end, span.resolution)
    daily = read_windows(tables, "usage_daily", both).where(F.col("cluster") == cluster).cache()
    try:
        hours = read_windows(tables, "usage_hourly", both).where(F.col("cluster") == cluster)
        counts = hours.groupBy("date").agg(F.countDistinct("window").alias("n")).collect()
        partial = {row["date"] for row in counts if row["n"] < _HOURS_OF_A_DAY_MIN}
        used = (F.col("bytes_in") + F.col("bytes_out")).alias("bytes")
        most = daily.groupBy("principal").agg(usage.total(used).alias("all")).orderBy(F.desc("all"), "principal")
        own = daily.join(F.broadcast(most.limit(PRINCIPALS_MAX)), "principal").select("principal", "date", used)
        use: dict[str, dict[date, int]] = {}
        for name, day, amount in own.collect():
            use.setdefault(name, {})[day] = amount
        days = {row["date"] for row in daily.select("date").distinct().collect()} - partial
        return sorted(days), use
    finally:
        daily.unpersist()


def missing_windows(known: Collection[datetime], span: Span, now: datetime) -> list[tuple[datetime, datetime]]:
    """Return the windows of the span, ended by `now`, that are not in `known`, as ranges."""
    ranges: list[tuple[datetime, datetime]] = []
    for place in range(span.windows):
        start = span.start + place * span.resolution.width
        end = start + span.resolution.width
        if start in known or end > now:
            continue
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return ranges


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
        rest_before = total.before - sum(one.before for one in listed)
        named.append(Usage(f"{further:,} further principals", rest, rest_before, is_rest=True))
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
