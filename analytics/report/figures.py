"""A cluster's figures over a span, from the rollups: sums over workers, roles, instances and windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.span import Span
from analytics.transforms import usage
from analytics.transforms.histograms import CUSTOM_BOUNDS, Histogram, quantile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from analytics.tables.store import Tables

BYTES: Final = "pulsar_proxy_binary_bytes_total"
OPENED: Final = "pulsar_proxy_new_connections_total"
REJECTED: Final = "pulsar_proxy_rejected_connections_total"
ENDED: Final = "pulsar_proxy_ended_connections_total"
BROKER_FAILURES: Final = "pulsar_proxy_broker_connection_failures_total"
ANSWERS: Final = "pulsar_proxy_lookup_answers_total"
AUTH_SUCCESS: Final = "pulsar_authentication_success_total"
AUTH_FAILURES: Final = "pulsar_authentication_failures_total"
REAUTH_FAILURE: Final = "pulsar_proxy_reauthentication_failure_total"
EXPIRED_KILLED: Final = "pulsar_proxy_expired_connections_killed_total"
RESTARTS: Final = "pulsar_proxy_worker_restarts_total"
COUNTERS: Final = (
    *(BYTES, OPENED, REJECTED, ENDED, BROKER_FAILURES, ANSWERS),
    *(AUTH_SUCCESS, AUTH_FAILURES, REAUTH_FAILURE, EXPIRED_KILLED, RESTARTS),
)
ACTIVE: Final = "pulsar_proxy_active_connections"
BROKER_UP: Final = "pulsar_proxy_broker_up"
REQUEST: Final = "pulsar_proxy_lookup_seconds"
REQUEST_BUCKET: Final = f"{REQUEST}_bucket"
_METRICS: Final = (*COUNTERS, ACTIVE, BROKER_UP, REQUEST_BUCKET, REQUEST)
_PARTS: Final = (
    (BYTES, "direction", "to_broker"),
    (BYTES, "direction", "to_client"),
    (ENDED, "cause", "defect"),
    (ANSWERS, "error", "none"),
)
"""Values of labels that are counted apart; all others of a metric are one sum, under ""."""
_NAMED: Final = {BROKER_UP: "broker", REQUEST_BUCKET: "le"}
BROKERS_LISTED_MAX: Final = 10
BOUNDS_MAX: Final = 256
"""Limit of a histogram's bounds, which any client with write access to the receiver could send."""


@dataclass(frozen=True, slots=True)
class Figures:
    """`growth`: by metric and part; `windows` have samples, `newest` is the last of them.

    `buckets`: upper bound → requests (not cumulative); `brokers_up`: the share of time, and of those below 1 the worst.
    """

    growth: Mapping[tuple[str, str], float] = field(default_factory=dict)
    windows: int = 0
    newest: datetime | None = None
    open_average: float | None = None
    open_busiest: float | None = None
    buckets: Mapping[float, float] = field(default_factory=dict)
    brokers_up: float | None = None
    worst_brokers: list[tuple[str, float]] = field(default_factory=list)

    def total(self, metric: str, part: str | None = None, *, beside: str = "") -> float | None:
        """Return a counter's growth; None if it is not in the tables.

        A labelled counter exists only after its first increment: an absent one is zero where `beside` exists.
        """
        known = {name for name, _ in self.growth}
        if metric not in known and beside not in known:
            return None
        return sum(value for (name, own), value in self.growth.items() if name == metric and part in {None, own})

    def request_seconds(self, q: float) -> float | None:
        """Return the q-quantile of the time of requests, as PromQL's histogram_quantile; None without any."""
        bounds = tuple(sorted(bound for bound in self.buckets if bound < math.inf))
        counts = {place: self.buckets[bound] for place, bound in enumerate(bounds)}
        counts[len(bounds)] = self.buckets.get(math.inf, 0.0)
        if not bounds or not sum(counts.values()):
            return None
        return quantile(Histogram(CUSTOM_BOUNDS, positive=counts, custom_bounds=bounds), q)


def list_clusters(series: DataFrame) -> list[str]:
    """Return the names of the clusters that have series of the proxy, sorted."""
    known = series.where(F.col("metric").isin(*_METRICS, *(metric for metric, _ in usage.WHAT)))
    return sorted(row["cluster"] for row in known.select(_label("cluster").alias("cluster")).distinct().collect())


def has_rows(tables: Tables, span: Span) -> bool:
    """Return True if the rollup of the span's resolution has rows in the span."""
    return not read_windows(tables, span.resolution.rollup, span).isEmpty()


def collect_figures(tables: Tables, series: DataFrame, cluster: str, span: Span) -> Figures:
    """Collect a cluster's figures."""
    mine = series.where(F.col("metric").isin(*_METRICS) & (_label("cluster") == cluster))
    mine = mine.select("series_id", "metric", _key().alias("key"))
    rows = read_windows(tables, span.resolution.rollup, span).join(F.broadcast(mine), "series_id")
    rows = rows.where(_are_counts()).cache()
    try:
        summed = rows.where(F.col("metric").isin(*COUNTERS)).groupBy("metric", "key").agg(F.sum("increase").alias("by"))
        growth = {(row["metric"], row["key"]): row["by"] for row in summed.collect()}
        seen = rows.agg(F.countDistinct("window").alias("n"), F.max(F.unix_seconds("window")).alias("last")).collect()[
            0
        ]
        newest = None if seen["last"] is None else datetime.fromtimestamp(seen["last"], span.end.tzinfo)
        connections = _open(rows.where(F.col("metric") == ACTIVE)).collect()[0]
        classic = _classic_buckets(rows.where(F.col("metric") == REQUEST_BUCKET))
        up, worst = _brokers(rows.where(F.col("metric") == BROKER_UP))
    finally:
        rows.unpersist()
    native = _native_buckets(
        read_windows(tables, span.resolution.histograms, span).join(F.broadcast(mine), "series_id")
    )
    buckets = max(classic, native, key=lambda found: sum(found.values()))  # the same requests, if there are both
    return Figures(growth, seen["n"], newest, connections["average"], connections["most"], buckets, up, worst)


def read_windows(tables: Tables, view: str, span: Span) -> DataFrame:
    """Return the view's rows of the span."""
    return tables.read_between(view, span.start, span.end).where(is_within(span))


def is_within(span: Span) -> Column:
    """Return a column: the row's window is in the span."""
    return (F.col("window") >= F.lit(span.start)) & (F.col("window") < F.lit(span.end))


def _label(name: str) -> Column:
    return F.coalesce(F.col("labels")[name], F.lit(""))


def _are_counts() -> Column:
    """Return a column: a row's values are possible counts. Sums of others may be infinite, and are no figures."""
    of_gauge = F.when(F.col("metric").isin(ACTIVE, BROKER_UP), F.abs("sum")).otherwise(0.0)
    return (F.abs("increase") < usage.COUNT_MAX) & (of_gauge < usage.COUNT_MAX)  # Spark orders NaN above all


def _key() -> Column:
    """Return the value of the label that is counted apart; an empty one for all others."""
    parts = (
        F.when((F.col("metric") == metric) & (_label(label) == value), F.lit(value)) for metric, label, value in _PARTS
    )
    named = (F.when(F.col("metric") == metric, _label(label)) for metric, label in _NAMED.items())
    return F.coalesce(*parts, *named, F.lit(""))


def _open(rows: DataFrame) -> DataFrame:
    """Return the connections open, on average and in the busiest window, as one row.

    A window's are the sum of all values divided by the number of scrapes, not the sum of the series' averages: a
    process replaced within it (another instance, so another series) does not count twice. The number of scrapes is the
    time from the first sample of any of the series to the last one, divided by the shortest distance between samples.
    """
    first_ms, last_ms = F.unix_millis("first_ts"), F.unix_millis("last_ts")
    summed = rows.groupBy("window").agg(
        F.sum("sum").alias("sum"),
        F.max("n").alias("n"),
        F.min(F.when(F.col("n") > 1, (last_ms - first_ms) / (F.col("n") - 1))).alias("step_ms"),
        (F.max(last_ms) - F.min(first_ms)).alias("span_ms"),
    )
    scrapes = F.when(F.col("step_ms") > 0, F.round(F.col("span_ms") / F.col("step_ms")) + 1)
    level = F.when(F.col("n") > 0, F.col("sum") / F.greatest(scrapes, F.col("n").cast("double")))
    return summed.select(level.alias("level")).agg(F.avg("level").alias("average"), F.max("level").alias("most"))


def _classic_buckets(rows: DataFrame) -> dict[float, float]:
    """Return the requests in each bucket. `le` is cumulative.

    Sums over instances with different bounds fall where some have no bucket: they are made monotonic, as PromQL's
    histogram_quantile does, so a bound that not all have counts no observation twice.
    """
    bound = F.when(F.col("key") == "+Inf", F.lit(math.inf)).otherwise(F.col("key").try_cast("double"))
    summed = rows.groupBy(bound.alias("bound")).agg(F.sum("increase").alias("count")).where("bound is not null")
    buckets, below = dict[float, float](), 0.0
    for row in sorted(summed.limit(BOUNDS_MAX).collect()):
        buckets[row["bound"]] = max(0.0, row["count"] - below)
        below += buckets[row["bound"]]
    return buckets


def _native_buckets(rows: DataFrame) -> dict[float, float]:
    """Return the same of native histograms with custom bounds; the proxy has no exponential ones."""
    spread = rows.where(F.col("increase.schema") == CUSTOM_BOUNDS).select(
        F.col("increase.custom_bounds").alias("bounds"),
        F.explode(F.arrays_zip("increase.positive_offsets", "increase.positive_counts")).alias("bucket"),
    )
    bound = F.coalesce(F.get("bounds", F.col("bucket.positive_offsets")), F.lit(math.inf))
    spread = spread.where(F.abs("bucket.positive_counts") < usage.COUNT_MAX)
    summed = spread.groupBy(bound.alias("bound")).agg(F.sum("bucket.positive_counts").alias("count"))
    return {row["bound"]: max(0.0, row["count"]) for row in summed.limit(BOUNDS_MAX).collect()}


def _brokers(rows: DataFrame) -> tuple[float | None, list[tuple[str, float]]]:
    """Return the share of time that brokers were up, as the lookup workers measured it, and the worst brokers'."""
    share = (F.sum("sum") / F.sum("n")).alias("share")
    worst = rows.groupBy("key").agg(share).where("share < 1").orderBy("share", "key").limit(BROKERS_LISTED_MAX)
    return rows.agg(share).collect()[0]["share"], [(row["key"], row["share"]) for row in worst.collect()]
