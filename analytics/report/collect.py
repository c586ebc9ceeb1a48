"""Queries of the tables for `Points`: Spark sums over workers, roles, instances and principals; results are small.

At most KEYS_MAX combinations of labels are collected of each metric (those with most growth): the proxy's labels have
fewer values, but any client with write access to the receiver could send others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.metrics import BROKER_EJECTED, BROKER_UP, BROKERS, HISTOGRAMS, RATES, ROWS
from analytics.report.outages import growth_over_outages, spread_growth
from analytics.report.points import Distribution, Key, Points
from analytics.tables.partitions import hour_of
from analytics.transforms.histograms import CUSTOM_BOUNDS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from analytics.report.span import Span
    from analytics.tables.store import Tables

KEYS_MAX: Final = 256
BROKERS_LISTED_MAX: Final = 10
NEWEST_LOOKBACK: Final = timedelta(days=7)
"""Period before a report's end in which the newest window is searched."""


@dataclass(frozen=True, slots=True)
class BrokerAvailability:
    """Average number of brokers configured, up and ejected, by window; `worst`: each broker's share of time up.

    Only brokers that were not up all the time are in `worst`, the worst first.
    """

    configured: dict[int, float]
    up: dict[int, float]
    ejected: dict[int, float]
    worst: list[tuple[str, float]]


def list_clusters(series: DataFrame) -> list[str]:
    """Return the names of the clusters that have series of the proxy, sorted."""
    known = series.where(F.col("metric").isin(*ROWS, *HISTOGRAMS))
    rows = known.select(F.coalesce(F.col("labels")["cluster"], F.lit("")).alias("cluster")).distinct().collect()
    return sorted(row.cluster for row in rows)


def read_windows(tables: Tables, kind: str, span: Span) -> DataFrame:
    """Return the span's rows of `rollup_…` or `histograms_…` in its resolution."""
    name = f"{kind}_{span.resolution.suffix}"
    frame = tables.read(name, _hours(tables, name, span))
    return frame.where((F.col("window") >= F.lit(span.start)) & (F.col("window") < F.lit(span.end)))


def _hours(tables: Tables, name: str, span: Span) -> list[datetime]:
    return tables.hours(name, hour_of(span.start), span.end)


def has_rows(tables: Tables, span: Span) -> bool:
    """Return True if the rollup of the span's resolution has rows in the span."""
    return not read_windows(tables, "rollup", span).isEmpty()


def newest_ms(tables: Tables, span: Span) -> int | None:
    """Return the start of the newest window (Unix ms) in NEWEST_LOOKBACK before the span's end; None without any."""
    name = f"rollup_{span.resolution.suffix}"
    hours = tables.hours(name, span.end - NEWEST_LOOKBACK, span.end)
    day = [hour for hour in hours if hour.date() == hours[-1].date()]
    frame = tables.read(name, day).where(F.col("window") < F.lit(span.end))
    newest: int | None = frame.agg(F.max(F.unix_millis("window"))).collect()[0][0]
    return newest


def collect_points(tables: Tables, series: DataFrame, cluster: str, span: Span) -> Points:
    """Collect everything but brokers and usage of one cluster."""
    found = Points()
    rows = read_windows(tables, "rollup", span).join(F.broadcast(_series(series, cluster, ROWS)), "series_id")
    _add_rows(found, rows)
    for row in _limited(growth_over_outages(rows.where(F.col("metric").isin(*RATES)), span, "metric", "key"), set()):
        at = row["metric"], tuple(row["key"])
        if (line := found.increase.get(at)) is not None:
            spread = found.spread.setdefault(at, dict(line))
            spread_growth(spread, span, row["window_ms"], row["since_ms"], row["increase"])
    own = _series(series, cluster, HISTOGRAMS)
    _add_native(found, read_windows(tables, "histograms", span).join(F.broadcast(own), "series_id"))
    return found


def collect_brokers(tables: Tables, series: DataFrame, cluster: str, span: Span) -> BrokerAvailability:
    """Collect the brokers' availability as measured by the lookup workers."""
    rows = read_windows(tables, "rollup", span).join(F.broadcast(_series(series, cluster, BROKERS)), "series_id")
    each = rows.groupBy("metric", "key", "window").agg((F.sum("sum") / F.sum("n")).alias("share"))
    each = each.where("share is not null").cache()
    try:
        sums = each.groupBy("metric", "window").agg(F.sum("share").alias("share"), F.count("*").alias("n"))
        by_window = sums.select("metric", _window_ms(), "share", "n").collect()
        worst = each.where(F.col("metric") == BROKER_UP).groupBy("key").agg(F.avg("share").alias("share"))
        listed = worst.where("share < 1").orderBy("share", "key").limit(BROKERS_LISTED_MAX).collect()
    finally:
        each.unpersist()
    lines: dict[str, dict[int, float]] = {BROKER_UP: {}, BROKER_EJECTED: {}}
    configured = {}
    for row in by_window:
        lines[row.metric][row.window_ms] = row.share
        if row.metric == BROKER_UP:
            configured[row.window_ms] = float(row.n)
    return BrokerAvailability(
        configured, lines[BROKER_UP], lines[BROKER_EJECTED], [(row["key"][0], row.share) for row in listed]
    )


def _series(series: DataFrame, cluster: str, wanted: Mapping[str, Sequence[str]]) -> DataFrame:
    """Return (series_id, metric, key) of a cluster's series; `key`: the values of the labels that `wanted` names."""
    labels = F.col("labels")
    mine = series.where(F.col("metric").isin(*wanted) & (F.coalesce(labels["cluster"], F.lit("")) == cluster))
    key = F.array().cast("array<string>")
    for names in sorted({tuple(names) for names in wanted.values()}):
        metrics = [metric for metric, own in wanted.items() if tuple(own) == names]
        values = F.array(*(F.coalesce(labels[name], F.lit("")) for name in names)).cast("array<string>")
        key = F.when(F.col("metric").isin(*metrics), values).otherwise(key)
    return mine.select("series_id", "metric", key.alias("key"))


def _add_rows(found: Points, rows: DataFrame) -> None:
    for row in _limited(_summed(rows), found.cut):
        at = row["metric"], tuple(row["key"])
        found.increase.setdefault(at, {})[row["window_ms"]] = row["increase"]
        if row["level"] is not None:
            found.level.setdefault(at, {})[row["window_ms"]] = row["level"]


def _summed(rows: DataFrame) -> DataFrame:
    """Return (metric, key, window_ms, increase, level): growth summed over series; a gauge's sum, averaged over time.

    `level` is the sum of all values divided by the number of scrapes, not the sum of the series' averages: a process
    replaced within the window (another instance, so another series) does not count twice. The number of scrapes is the
    time from the first sample of any of the series to the last one, divided by the shortest distance between samples.
    """
    span_ms = F.unix_millis("last_ts") - F.unix_millis("first_ts")
    summed = rows.groupBy("metric", "key", "window").agg(
        F.sum("increase").alias("increase"),
        F.sum("sum").alias("sum"),
        F.max("n").alias("n"),
        F.min(F.when(F.col("n") > 1, span_ms / (F.col("n") - 1))).alias("step_ms"),
        (F.max(F.unix_millis("last_ts")) - F.min(F.unix_millis("first_ts"))).alias("span_ms"),
    )
    counted = F.when(F.col("step_ms") > 0, F.round(F.col("span_ms") / F.col("step_ms")) + 1)
    scrapes = F.greatest(F.coalesce(counted, F.col("n").cast("double")), F.col("n").cast("double"))
    level = F.when(F.col("n") > 0, F.col("sum") / scrapes)
    return summed.select("metric", "key", _window_ms(), "increase", level.alias("level"))


def _add_native(found: Points, rows: DataFrame) -> None:
    """Add native histograms with custom bounds; exponential ones, which the proxy does not have, are only counted."""
    if rows.isEmpty():  # the usual case: the proxy's own are classic ones
        return
    custom = F.col("increase.schema") == CUSTOM_BOUNDS
    found.exponential = rows.where(~custom).count()
    rows = rows.where(custom)
    totals = rows.groupBy("metric", "key", "window").agg(
        F.sum("increase.count").alias("increase"), F.sum("increase.sum").alias("sum")
    )
    totals = totals.select("metric", "key", _window_ms(), "increase", "sum")
    for row in _limited(totals, found.cut):
        lines = found.native.setdefault((row["metric"], tuple(row["key"])), {})
        lines[row["window_ms"]] = Distribution(sum=row["sum"], count=row["increase"])
    bucket = F.explode(F.arrays_zip("increase.positive_offsets", "increase.positive_counts")).alias("bucket")
    spread = rows.select("metric", "key", "window", F.col("increase.custom_bounds").alias("bounds"), bucket)
    bound = F.coalesce(F.get("bounds", F.col("bucket.positive_offsets")), F.lit(float("inf")))
    counts = spread.groupBy("metric", "key", "window", bound.alias("bound")).agg(
        F.sum("bucket.positive_counts").alias("count")
    )
    for row in _rows(counts.select("metric", "key", _window_ms(), "bound", "count")):
        key: tuple[str, Key] = row["metric"], tuple(row["key"])
        if (one := found.native.get(key, {}).get(row["window_ms"])) is not None:
            one.buckets[row["bound"]] = row["count"]


def _limited(rows: DataFrame, cut: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of each metric's KEYS_MAX keys with most growth; metrics that have more are added to `cut`."""
    total = F.sum("increase").over(Window.partitionBy("metric", "key"))
    place = F.dense_rank().over(Window.partitionBy("metric").orderBy(F.desc("total"), "key"))
    numbered = rows.withColumn("total", total).withColumn("place", place)
    for row in _rows(numbered.where(F.col("place") <= KEYS_MAX + 1)):
        if row["place"] > KEYS_MAX:
            cut.add(row["metric"])
        else:
            yield row


def _window_ms() -> Column:
    return F.unix_millis("window").alias("window_ms")


def _rows(frame: DataFrame) -> Iterator[dict[str, Any]]:
    for batch in frame.toArrow().to_batches():
        yield from batch.to_pylist()
