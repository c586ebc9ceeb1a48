"""What failed in a cluster over a span, beside the span before, by cause and by broker; and its open connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.report.span import Span
from analytics.transforms import usage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from analytics.tables.store import Tables

BYTES: Final = "pulsar_proxy_binary_bytes_total"
ACTIVE: Final = "pulsar_proxy_active_connections"
BROKER_UP: Final = "pulsar_proxy_broker_up"
ENDED: Final = "pulsar_proxy_ended_connections_total"
ANSWERS: Final = "pulsar_proxy_lookup_answers_total"
COUNTERS: Final = {
    "pulsar_proxy_rejected_connections_total": ("reason", "connections rejected"),
    ENDED: ("cause", "connections ended by a defect of the proxy"),
    "pulsar_proxy_broker_connection_failures_total": ("reason", "relays not opened"),
    ANSWERS: ("error", "requests answered with an error"),
    "pulsar_authentication_failures_total": ("reason", "authentications failed"),
    "pulsar_proxy_reauthentication_failure_total": ("method", "re-authentications failed"),
    "pulsar_proxy_worker_restarts_total": ("of", "workers restarted"),
}
"""Metric → the label that says why, and what it counts."""
_METRICS: Final = (*COUNTERS, ACTIVE, BROKER_UP)
FAILURES_LISTED_MAX: Final = 50
BROKERS_LISTED_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class Failures:
    """`counts`: (what, why, now, before), most first; `brokers`: (broker, share of the time up, the same before)."""

    counts: list[tuple[str, str, int, int]] = field(default_factory=list)
    brokers: list[tuple[str, float | None, float | None]] = field(default_factory=list)


def list_clusters(series: DataFrame) -> list[str]:
    """Return the names of the clusters that have series of the proxy, sorted."""
    known = series.where(F.col("metric").isin(BYTES, *_METRICS, *(metric for metric, _ in usage.WHAT)))
    return sorted(row["cluster"] for row in known.select(_label("cluster").alias("cluster")).distinct().collect())


def has_rows(tables: Tables, span: Span) -> bool:
    """Return True if the rollup of the span's resolution has rows in the span."""
    return not read_windows(tables, span.resolution.rollup, span).isEmpty()


def collect_failures(tables: Tables, series: DataFrame, cluster: str, span: Span) -> Failures:
    """Collect a cluster's failures: values that are no counts, which any client could send, are left out."""
    rows = _rows(tables, series, cluster, span.with_before).where(F.abs("increase") < usage.COUNT_MAX)
    parts = (is_within(span), is_within(span.before))
    own = rows.where(F.col("metric").isin(*COUNTERS))
    own = own.where((F.col("metric") != ENDED) | (F.col("key") == "defect"))
    own = own.where((F.col("metric") != ANSWERS) | (F.col("key") != "none"))
    now, before = (F.round(F.coalesce(F.sum(F.when(part, F.col("increase"))), F.lit(0))).cast("long") for part in parts)
    counts = own.groupBy("metric", "key").agg(now.alias("now"), before.alias("before")).where("now > 0 or before > 0")
    listed = counts.orderBy(F.desc("now"), "metric", "key").limit(FAILURES_LISTED_MAX).collect()
    shares = (F.sum(F.when(part, F.col("sum"))) / F.sum(F.when(part, F.col("n"))) for part in parts)
    up, up_before = shares
    brokers = rows.where((F.col("metric") == BROKER_UP) & (F.col("min") >= 0) & (F.col("max") <= 1)).groupBy("key")
    brokers_up = brokers.agg(up.alias("now"), up_before.alias("before")).orderBy("now", "key").limit(BROKERS_LISTED_MAX)
    return Failures(
        [(COUNTERS[row["metric"]][1], row["key"], row["now"], row["before"]) for row in listed],
        [(row["key"], row["now"], row["before"]) for row in brokers_up.collect()],
    )


def collect_connections(tables: Tables, series: DataFrame, cluster: str, span: Span) -> dict[datetime, int]:
    """Return the connection-seconds of each window that has samples.

    Each sample stands for the time up to the next one, which is the shortest distance between two samples: so time
    without samples has no connections, and a process replaced within a window does not count twice.
    """
    rows = _rows(tables, series, cluster, span)
    rows = rows.where((F.col("metric") == ACTIVE) & (F.col("min") >= 0) & (F.col("max") < usage.COUNT_MAX))
    distance_ms = (F.unix_millis("last_ts") - F.unix_millis("first_ts")) / (F.col("n") - 1)
    step_ms = F.min(F.when(F.col("n") > 1, distance_ms))
    width_ms = span.resolution.width // timedelta(milliseconds=1)
    seconds = F.sum("sum") * F.least(F.coalesce(step_ms, F.lit(width_ms)), F.lit(width_ms)) / 1000
    found = rows.groupBy("window").agg(F.least(F.round(seconds), F.lit(usage.COUNT_MAX)).cast("long").alias("seconds"))
    selected = found.select(F.unix_seconds("window").alias("at"), "seconds").collect()
    return {datetime.fromtimestamp(row["at"], span.end.tzinfo): row["seconds"] for row in selected}


def read_windows(tables: Tables, view: str, span: Span) -> DataFrame:
    """Return the view's rows of the span."""
    return tables.read_between(view, span.start, span.end).where(is_within(span))


def is_within(span: Span) -> Column:
    """Return a column: the row's window is in the span."""
    return (F.col("window") >= F.lit(span.start)) & (F.col("window") < F.lit(span.end))


def _rows(tables: Tables, series: DataFrame, cluster: str, span: Span) -> DataFrame:
    """Return the cluster's rows of the rollup with `metric` and `key`: the label that says why, or the broker."""
    labels = {metric: label for metric, (label, _) in COUNTERS.items()} | {BROKER_UP: "broker"}
    keys = (F.when(F.col("metric") == metric, _label(label)) for metric, label in labels.items())
    mine = series.where(F.col("metric").isin(*_METRICS) & (_label("cluster") == cluster))
    mine = mine.select("series_id", "metric", F.coalesce(*keys, F.lit("")).alias("key"))
    return read_windows(tables, span.resolution.rollup, span).join(F.broadcast(mine), "series_id")


def _label(name: str) -> Column:
    return F.coalesce(F.col("labels")[name], F.lit(""))
