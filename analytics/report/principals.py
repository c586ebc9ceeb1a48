"""The top principals by use in exactly the report's span, and a comparison with the usage tables.

The report counts from the rollups, so that its table covers the plots' span and not just whole hours. `Billed` compares
that with the usage tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.outages import growth_over_outages, spread_growth
from analytics.report.points import Line
from analytics.transforms import usage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from analytics.report.span import Span
    from analytics.tables.store import Tables

TOP: Final = 20
PLOTTED: Final = 7
COLUMNS: Final = ("bytes_in", "bytes_out", "messages_in", "messages_out", "sessions")
MESSAGES: Final = COLUMNS[2:4]
OTHER: Final = "other"
"""The proxy's label for all principals beyond those that it counts by name."""
Figures = tuple[int, ...]
"""In the order of COLUMNS."""
NOT_COUNTED: Final = "not counted"
NOTHING: Final[Figures] = (0,) * len(COLUMNS)


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums of one principal."""

    name: str
    figures: Figures

    @property
    def bytes(self) -> int:
        """Bytes in and out."""
        return self.figures[0] + self.figures[1]


@dataclass(frozen=True, slots=True)
class Billed:
    """Sums over the whole hours (of a report by day: days) inside the report's span, from two sources.

    `counted`: from the rollups; `billed`: from the usage tables. `open_windows` are not closed, so may still grow;
    `missing_windows` are rolled up and not in the usage tables yet; `late_samples` are of closed hours and only in the
    rollups.
    """

    start: datetime
    end: datetime
    noun: str
    counted: Figures
    billed: Figures
    open_windows: int = 0
    missing_windows: int = 0
    late_samples: int = 0


@dataclass(frozen=True, slots=True)
class Principals:
    """A cluster's principals: `top` by bytes, `other` the proxy's rest, `further` named ones below the top, `total`.

    `lines`: bytes by window, of the first PLOTTED. `billed` is None if the report's span has no whole hour.
    `without_start`: counters that began within the span at an unknown time: their first sample counts nothing.
    `counts_messages` is false if there are bytes and all counters of messages are zero: so the proxy exports them
    without `metrics.count_messages`.
    """

    top: list[Usage]
    other: Usage | None
    further: Usage | None
    total: Figures
    lines: dict[str, Line]
    billed: Billed | None
    without_start: int = 0
    counts_messages: bool = True


def collect_principals(tables: Tables, series: DataFrame, rows: DataFrame, cluster: str, span: Span) -> Principals:
    """Count the cluster's principals. `rows`: the rollup's rows of the span; `series`: the table of that name."""
    mine = usage.usage_series(series)
    mine = mine.where(F.col("cluster") == cluster).join(series.select("series_id", "first_seen"), "series_id").cache()
    try:
        counted = _counted(rows, mine).cache()
        try:
            billed = _billed(tables, mine, counted, cluster, span)
            return _principals(counted, span, billed, _without_start(rows, mine, span))
        finally:
            counted.unpersist()
    finally:
        mine.unpersist()


def _counted(rows: DataFrame, mine: DataFrame) -> DataFrame:
    """Return the growth of the counters in the span."""
    found = rows.join(F.broadcast(mine.drop("first_seen")), "series_id").where(usage.no_count().isNull())
    return found.withColumn("increase", F.round("increase").cast("long"))


def _principals(counted: DataFrame, span: Span, billed: Billed | None, without_start: int) -> Principals:
    sums, total = counted.groupBy("principal").agg(*_totals()), _figures(counted.agg(*_totals()).collect()[0])
    named = sums.where(F.col("principal") != OTHER)
    top = [_usage(row) for row in _by_bytes(named).limit(TOP).collect()]
    others = [_usage(row) for row in sums.where(F.col("principal") == OTHER).collect()]
    return Principals(
        top,
        others[0] if others else None,
        _further(named, top),
        total,
        _lines(counted, span, [one.name for one in top[:PLOTTED]]),
        billed,
        without_start,
        counts_messages=not any(total[:2])
        or not counted.where(F.col("what").isin(*MESSAGES) & (F.col("last_v") > 0)).isEmpty(),
    )


def _totals() -> list[Column]:
    """Return a sum for each of COLUMNS, which are the ledger's values of `what`."""
    return [
        F.coalesce(F.sum(F.when(F.col("what") == name, F.col("increase"))), F.lit(0)).alias(name) for name in COLUMNS
    ]


def _figures(row: Row) -> Figures:
    return tuple(int(row[name] or 0) for name in COLUMNS)


def _by_bytes(sums: DataFrame) -> DataFrame:
    return sums.orderBy(F.desc(F.col("bytes_in") + F.col("bytes_out")), "principal")


def _usage(row: Row) -> Usage:
    return Usage(row["principal"], _figures(row))


def _further(named: DataFrame, top: list[Usage]) -> Usage | None:
    """Return the sum of the named principals below the top; None without any."""
    if len(top) < TOP:
        return None
    rest = named.where(~F.col("principal").isin(*(one.name for one in top)))
    row = rest.agg(F.count("*").alias("n"), *(F.sum(name).alias(name) for name in COLUMNS)).collect()[0]
    return Usage(f"{row['n']:,} further principals", _figures(row)) if row["n"] else None


def _lines(counted: DataFrame, span: Span, names: list[str]) -> dict[str, Line]:
    """Return bytes by window; growth over an outage is in all of its windows."""
    lines: dict[str, Line] = {name: {} for name in names}
    if not names:
        return lines
    is_bytes = F.col("what").isin(*COLUMNS[:2])
    mine = counted.where(F.col("principal").isin(*names) & is_bytes)
    summed = mine.groupBy("principal", F.unix_millis("window").alias("window_ms")).agg(F.sum("increase").alias("bytes"))
    for row in summed.collect():
        lines[row["principal"]][row["window_ms"]] = float(row["bytes"])
    for name, *growth in growth_over_outages(mine, span, "principal").collect():
        spread_growth(lines[name], span, *growth)
    return lines


def _without_start(rows: DataFrame, mine: DataFrame, span: Span) -> int:
    began = mine.where(F.col("first_seen") >= F.lit(span.start))
    unknown = rows.where(F.col("first_start_ts").isNull()).select("series_id").distinct()
    return unknown.join(F.broadcast(began.select("series_id")), "series_id").count()


# ---- comparison with the usage tables


def _billed(tables: Tables, mine: DataFrame, counted: DataFrame, cluster: str, span: Span) -> Billed | None:
    by_day = span.resolution.suffix == "1d"
    table, noun, width_s = ("usage_daily", "day", 86_400) if by_day else ("usage_hourly", "hour", 3600)
    start, end = _inward(span, width_s)
    if start >= end:
        return None
    within = (F.col("window") >= F.lit(start)) & (F.col("window") < F.lit(end))
    billed = tables.read(table, tables.hours(table, start, end)).where(within & (F.col("cluster") == cluster)).cache()
    try:
        sums = _figures(billed.agg(*(F.sum(name).alias(name) for name in COLUMNS)).collect()[0])
        windows = {row[0]: row[1] for row in billed.groupBy(F.unix_millis("window")).agg(F.min("closed")).collect()}
    finally:
        billed.unpersist()
    same = counted.where(within)
    rolled = {row[0] for row in same.select(F.unix_millis(F.date_trunc(noun, "window"))).distinct().collect()}
    figures = _figures(same.agg(*_totals()).collect()[0])
    return Billed(
        start,
        end,
        noun,
        figures,
        sums,
        open_windows=sum(not closed for closed in windows.values()),
        missing_windows=len(rolled - set(windows)),
        late_samples=_late(tables, mine, start, end) if figures != sums else 0,
    )


def _late(tables: Tables, mine: DataFrame, start: datetime, end: datetime) -> int:
    """Return how many samples of this period's closed hours are in rollup_1h and not in the ledger."""
    within = (F.col("window") >= F.lit(start)) & (F.col("window") < F.lit(end))
    hours = tables.read("rollup_1h", tables.hours("rollup_1h", start, end)).where(within)
    ledger = tables.read("usage_ledger", tables.hours("usage_ledger", start, end)).where(within)
    known = ledger.select("window").distinct()
    closed = tables.read("usage_hourly", tables.hours("usage_hourly", start, end)).where("closed")
    closed = closed.select("window").distinct().join(known, "window", "left_semi")
    found = usage.count_late_samples(
        hours.join(F.broadcast(closed), "window", "left_semi"),
        mine.select("series_id"),
        ledger.join(F.broadcast(mine.select("series_id")), "series_id", "left_semi"),
    )
    return int(found.agg(F.sum("samples")).collect()[0][0] or 0)


def _inward(span: Span, width_s: int) -> tuple[datetime, datetime]:
    """Return start and end of the whole hours or days inside the span."""
    start, end = -(-int(span.start.timestamp()) // width_s) * width_s, int(span.end.timestamp()) // width_s * width_s
    first = datetime.fromtimestamp(start, UTC)
    return first, first + timedelta(seconds=end - start)
