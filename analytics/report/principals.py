"""Who used the proxy how much, from the usage tables: the top principals by bytes, and the rest as one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- as everybody calls it

from analytics.report.points import Line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from analytics.report.span import Span
    from analytics.tables.store import Tables

TOP: Final = 20
PLOTTED: Final = 7
COLUMNS: Final = ("bytes_in", "bytes_out", "messages_in", "messages_out", "sessions")
OTHER: Final = "other"
"""What the proxy calls all principals beyond those that it counts by name."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One principal's sums, in the order of COLUMNS."""

    name: str
    figures: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """In and out."""
        return self.figures[0] + self.figures[1]


@dataclass(frozen=True, slots=True)
class Principals:
    """`top` by bytes, `other` the proxy's own rest, `further` the named ones below the top.

    `lines`: bytes by window, of the first PLOTTED. `open_windows`: those that are not closed, so may still grow.
    """

    start: datetime
    end: datetime
    width_s: int
    top: list[Usage]
    other: Usage | None
    further: Usage | None
    further_count: int
    lines: dict[str, Line]
    open_windows: int


def principals(tables: Tables, cluster: str, span: Span) -> Principals:
    """Of the whole hours (or, where the report is by day, days) that the span touches."""
    daily = span.resolution.suffix == "1d"
    table, width_s = ("usage_daily", 86_400) if daily else ("usage_hourly", 3600)
    start, end = _outward(span, width_s)
    rows = tables.read(table, tables.hours(table, start, end)).where(
        (F.col("cluster") == cluster) & (F.col("window") >= F.lit(start)) & (F.col("window") < F.lit(end))
    )
    rows = rows.cache()
    try:
        sums = rows.groupBy("principal").agg(*(F.sum(name).alias(name) for name in COLUMNS))
        named = sums.where(F.col("principal") != OTHER)
        top = [_usage(row) for row in _by_bytes(named).limit(TOP).collect()]
        others = [_usage(row) for row in sums.where(F.col("principal") == OTHER).collect()]
        count, further = _further(named, top)
        open_windows = rows.where(~F.col("closed")).select("window").distinct().count()
        lines = _lines(rows, [usage.name for usage in top[:PLOTTED]])
    finally:
        rows.unpersist()
    other = others[0] if others else None
    return Principals(start, end, width_s, top, other, further, count, lines, open_windows)


def _outward(span: Span, width_s: int) -> tuple[datetime, datetime]:
    start, end = int(span.start.timestamp()) // width_s * width_s, -(-int(span.end.timestamp()) // width_s) * width_s
    first = datetime.fromtimestamp(start, UTC)
    return first, first + timedelta(seconds=end - start)


def _by_bytes(sums: DataFrame) -> DataFrame:
    return sums.orderBy(F.desc(F.col("bytes_in") + F.col("bytes_out")), "principal")


def _usage(row: Row) -> Usage:
    return Usage(row["principal"], tuple(int(row[name]) for name in COLUMNS))


def _further(named: DataFrame, top: list[Usage]) -> tuple[int, Usage | None]:
    """How many principals lie below the top, and their sum."""
    if len(top) < TOP:
        return 0, None
    rest = named.where(~F.col("principal").isin(*(usage.name for usage in top)))
    row = rest.agg(F.count("*").alias("n"), *(F.sum(name).alias(name) for name in COLUMNS)).collect()[0]
    if not row.n:
        return 0, None
    return row.n, Usage(f"{row.n} further principals", tuple(int(row[name]) for name in COLUMNS))


def _lines(rows: DataFrame, names: list[str]) -> dict[str, Line]:
    lines: dict[str, Line] = {name: {} for name in names}
    if names:
        mine = rows.where(F.col("principal").isin(*names))
        total = (F.col("bytes_in") + F.col("bytes_out")).alias("bytes")
        for row in mine.select("principal", F.unix_millis("window").alias("window_ms"), total).collect():
            lines[row.principal][row.window_ms] = float(row.bytes)
    return lines
