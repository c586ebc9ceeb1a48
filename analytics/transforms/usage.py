"""Usage accounting: the proxy's counters by principal, summed over workers and roles, by hour and by day.

    rollup_1h + series ──ledger──▶ usage_ledger (a row for each counter and hour) ──hourly──▶ usage_hourly ──daily──▶ …

The ledger is a chain for each counter: an hour's growth begins at the last sample of the last hour *in the ledger*. A
late sample of a closed hour is not in the chain, so the later hours count as if it did not exist, and the sum over all
hours is the counter's growth in spite of late samples.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WHAT: Final = {
    ("pulsar_proxy_principal_bytes_total", "to_broker"): "bytes_in",
    ("pulsar_proxy_principal_bytes_total", "to_client"): "bytes_out",
    ("pulsar_proxy_principal_messages_total", "to_broker"): "messages_in",
    ("pulsar_proxy_principal_messages_total", "to_client"): "messages_out",
    ("pulsar_proxy_principal_sessions_total", ""): "sessions",
}
"""The proxy's metric and its label `direction` → a column of the usage tables."""

_CREATED: Final = {metric.removesuffix("_total") + "_created": metric for metric, _ in WHAT}
"""Gauge with the creation time of a counter, in seconds since 1970 → the counter's metric."""

_TAIL: Final = ("last_ts", "last_v", "last_start_ts")


def usage_series(series: DataFrame) -> DataFrame:
    """Select the usage counters from the table `series`: (series_id, cluster, principal, what, created_id).

    `created_id` is the series with the counter's creation time; null if there is none.
    """
    direction = F.coalesce(F.col("labels")["direction"], F.lit(""))
    what = F.coalesce(
        *(F.when((F.col("metric") == metric) & (direction == way), F.lit(name)) for (metric, way), name in WHAT.items())
    )
    labels = (F.coalesce(F.col("labels")[name], F.lit("")).alias(name) for name in ("cluster", "principal"))
    all_labels = F.array_sort(F.map_entries("labels")).alias("all_labels")
    counters = series.select("series_id", "metric", all_labels, *labels, what.alias("what")).where("what is not null")
    counted = F.coalesce(*(F.when(F.col("metric") == name, F.lit(metric)) for name, metric in _CREATED.items()))
    created = series.select(F.col("series_id").alias("created_id"), counted.alias("metric"), all_labels)
    known = counters.join(created.where("metric is not null"), ["metric", "all_labels"], "left")
    return known.select("series_id", "cluster", "principal", "what", "created_id")


def ledger_tails(ledger: DataFrame) -> DataFrame:
    """Return the last sample of each counter in these rows of the ledger."""
    return ledger.groupBy("series_id").agg(*(F.max_by(name, "last_ts").alias(f"tail_{name}") for name in _TAIL))


def ledger(hours: DataFrame, series: DataFrame, tails: DataFrame, lookback_days: int) -> DataFrame:
    """Compute rows of usage_ledger from rows of rollup_1h and `usage_series`.

    The growth up to each hour's first sample is counted from the previous hour, or from the tail; without one, from the
    counter's start. That is as in the rollup, but more starts are known.
    """
    rows = _with_starts(hours, series).join(tails, "series_id", "left")
    in_order = Window.partitionBy("series_id").orderBy("window")
    is_first = F.row_number().over(in_order) == 1
    before = {
        f"tail_{name}": F.when(is_first, F.col(f"tail_{name}")).otherwise(F.lag(name).over(in_order)) for name in _TAIL
    }
    rows = rows.withColumns(before)
    increase = F.col("increase") - F.col("entry") + _since_tail(lookback_days)
    return rows.select(
        "series_id",
        "cluster",
        "principal",
        "what",
        "window",
        "n",
        F.round(increase).cast("long").alias("increase"),
        "last_ts",
        "last_v",
        "last_start_ts",
        F.to_date("window").alias("date"),
        F.hour("window").alias("hour"),
    )


def _with_starts(hours: DataFrame, series: DataFrame) -> DataFrame:
    """Return the counters' rows, with starts from the `_created` series if the samples have none."""
    created = hours.select(
        F.col("series_id").alias("created_id"), "window", *(_moment(f"{end}_v").alias(end) for end in ("first", "last"))
    )
    rows = hours.join(F.broadcast(series), "series_id").join(created, ["created_id", "window"], "left")
    # The proxy's clock may be ahead of Prometheus'; the counter certainly began before its first sample.
    first = F.least(F.col("first"), F.col("first_ts") - F.expr("interval 1 millisecond"))
    return rows.withColumns(
        {
            "first_start_ts": F.coalesce("first_start_ts", F.when(F.col("first").isNotNull(), first)),
            "last_start_ts": F.coalesce("last_start_ts", "last"),
        }
    )


def _moment(seconds: str) -> Column:
    return F.timestamp_millis(F.round(F.col(seconds) * 1000).cast("long"))


def hourly(rows: DataFrame, closed_until: datetime) -> DataFrame:
    """Sum rows of the ledger to rows of usage_hourly; hours before `closed_until` are closed."""
    totals = (F.coalesce(F.sum(F.when(F.col("what") == name, F.col("increase"))), F.lit(0)) for name in WHAT.values())
    named = (total.cast("long").alias(name) for total, name in zip(totals, WHAT.values(), strict=True))
    summed = rows.groupBy("cluster", "principal", "window").agg(*named)
    return summed.withColumns({"closed": F.col("window") < F.lit(closed_until), "date": F.to_date("window")})


def daily(hours: DataFrame, closed_until: datetime) -> DataFrame:
    """Sum all of these days' rows of usage_hourly to usage_daily; days that ended by `closed_until` are closed."""
    day = F.date_trunc("day", "window").alias("window")
    summed = hours.groupBy("cluster", "principal", day).agg(*(F.sum(name).alias(name) for name in WHAT.values()))
    ended = F.expr("window + interval 1 day") <= F.lit(closed_until)
    return summed.withColumns({"closed": ended, "date": F.to_date("window")})


def count_late_samples(hours: DataFrame, series: DataFrame, rows: DataFrame) -> DataFrame:
    """Return (window, samples): samples of closed hours in rollup_1h (`hours`) and not in the ledger (`rows`)."""
    now = hours.join(F.broadcast(series), "series_id").select("window", "n")
    known = rows.select("window", (-F.col("n")).alias("n"))
    return now.unionAll(known).groupBy("window").agg(F.sum("n").alias("samples")).where("samples > 0")


def _since_tail(lookback_days: int) -> Column:
    """Return the column of `counter_state.growth` from the tail to the hour's first sample, or `growth_at_first`."""
    value, start, tail_v = F.col("first_v"), F.col("first_start_ts"), F.col("tail_last_v")
    tail_start = F.col("tail_last_start_ts")
    changed = start.isNotNull() & ~start.eqNullSafe(tail_start) & (start >= F.col("tail_last_ts"))
    fell = (value < tail_v) & (start.isNull() | ~start.eqNullSafe(tail_start))
    horizon = F.expr(f"date_trunc('day', first_ts) - interval {lookback_days} days")
    at_first = F.when((start >= horizon) & (start < F.col("first_ts")), value).otherwise(0.0)
    since = F.when(changed | fell, value).otherwise(value - tail_v)
    return F.when(F.col("tail_last_ts") >= horizon, since).otherwise(at_first)
