"""Usage accounting: the proxy's counters by principal, summed over workers and roles, by hour and by day.

    rollup_1h + series ──ledger──▶ usage_ledger (a row for each counter and hour) ──hourly──▶ usage_hourly ──daily──▶ …

The ledger is a chain for each counter: an hour's growth begins at the last sample of the last hour *in the ledger*. A
late sample of a closed hour is not in the chain, so the later hours count as if it did not exist, and the sum over all
hours is the counter's growth in spite of late samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
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

JOBS: Final = ("proxy", "pulsar-proxy", "pulsar-trio-proxy")
"""The label `job` of the proxy's own series, as the chart and the documented configuration of Prometheus give it."""

COUNT_MAX: Final = float(1 << 53)
"""Beyond, doubles are no whole numbers."""

TOTAL_MAX: Final = 1 << 60
"""Two of them can be added in a long."""

_TAIL: Final = ("last_ts", "last_v", "last_start_ts")


def usage_series(series: DataFrame, jobs: Collection[str] = JOBS) -> DataFrame:
    """Select the usage counters of these scrape jobs: (series_id, cluster, instance, principal, what).

    Whoever may write to the receiver may send any series; the label `job` is Prometheus' own.
    """
    direction = F.coalesce(F.col("labels")["direction"], F.lit(""))
    what = F.coalesce(
        *(F.when((F.col("metric") == metric) & (direction == way), F.lit(name)) for (metric, way), name in WHAT.items())
    )
    names = ("cluster", "instance", "principal")
    labels = (F.coalesce(F.col("labels")[name], F.lit("")).alias(name) for name in names)
    own = series.where(F.coalesce(F.col("labels")["job"], F.lit("")).isin(*jobs))
    return own.select("series_id", *labels, what.alias("what")).where("what is not null")


def no_count() -> Column:
    """Return a column: why a row of the rollup is no sum of counts; null if it is one."""
    whole = [F.col(name) == F.rint(name) for name in ("min", "max", "first_v", "last_v", "sum")]
    is_whole = whole[0] & whole[1] & whole[2] & whole[3] & whole[4]
    return (
        F.when(F.col("min") < 0, F.lit("negative"))
        .when((F.col("max") >= COUNT_MAX) | (F.abs("increase") >= COUNT_MAX), F.lit("too large"))
        .when(~is_whole, F.lit("a fraction"))
    )


def total(counts: Column) -> Column:
    """Sum whole numbers, to -TOTAL_MAX up to TOTAL_MAX; 0 without any.

    A thousand counters near COUNT_MAX exceed a long: Spark's own sum would then stop the job.
    """
    summed = F.coalesce(F.sum(counts.cast("decimal(19,0)")), F.lit(0))
    return F.greatest(F.least(summed, F.lit(TOTAL_MAX)), F.lit(-TOTAL_MAX)).cast("long")


def watermarks(hours: DataFrame, series: DataFrame, now: datetime, silent: timedelta) -> DataFrame:
    """Return (cluster, until): the time up to which every instance of a cluster has sent its samples.

    An instance counts as gone if it is silent for longer than `silent` before its cluster's newest sample, and so does
    a cluster before the newest of all. `hours` are rows of rollup_1h. Samples of the future are a wrong clock's.
    """
    mine = hours.join(F.broadcast(series), "series_id").where(F.col("last_ts") <= F.lit(now))
    instances = mine.groupBy("cluster", "instance").agg(F.max("last_ts").alias("last"))
    everything = Window.partitionBy(F.lit(0))
    known = instances.withColumns(
        {"newest": F.max("last").over(Window.partitionBy("cluster")), "newest_of_all": F.max("last").over(everything)}
    )
    is_live = F.col("last") >= F.col("newest") - F.lit(silent)
    until = F.min(F.when(is_live, F.col("last")))
    is_gone = F.max("newest") < F.max("newest_of_all") - F.lit(silent)
    return known.groupBy("cluster").agg(F.when(is_gone, F.max("newest_of_all")).otherwise(until).alias("until"))


def ledger_tails(ledger: DataFrame) -> DataFrame:
    """Return the last sample of each counter in these rows of the ledger."""
    return ledger.groupBy("series_id").agg(*(F.max_by(name, "last_ts").alias(f"tail_{name}") for name in _TAIL))


def rolled_tails(hours: DataFrame) -> DataFrame:
    """Return the time of each series' last sample in these rows of the rollup, which the ledger may not have."""
    return hours.groupBy("series_id").agg(F.max("last_ts").alias("rolled_ts"))


def ledger(hours: DataFrame, series: DataFrame, tails: DataFrame, rolled: DataFrame, lookback_days: int) -> DataFrame:
    """Compute rows of usage_ledger from rows of rollup_1h and `usage_series`, without rows that are no counts.

    An hour's growth is the rollup's, unless the sample before it is not in the ledger: then it is counted from the
    ledger's last one, and if there is none, from the counter's start.
    """
    rows = (
        hours.join(F.broadcast(series), "series_id").join(tails, "series_id", "left").join(rolled, "series_id", "left")
    )
    in_order = Window.partitionBy("series_id").orderBy("window")
    counts = F.col("reason").isNull()
    rows = rows.withColumn("reason", no_count())
    earlier = in_order.rowsBetween(Window.unboundedPreceding, -1)
    last = F.last(F.when(counts, F.struct(*_TAIL)), ignorenulls=True).over(earlier)  # a struct: its start may be null
    rows = rows.withColumns(
        {f"tail_{name}": F.coalesce(last[name], F.col(f"tail_{name}")) for name in _TAIL}
        | {"rolled_ts": F.coalesce(F.lag("last_ts").over(in_order), F.col("rolled_ts"))}
    )
    entry = F.when(F.col("tail_last_ts").eqNullSafe(F.col("rolled_ts")), F.col("entry")).otherwise(
        _since_tail(lookback_days)
    )
    return rows.where(counts).select(
        "series_id",
        "cluster",
        "principal",
        "what",
        "window",
        "n",
        F.round(F.col("increase") - F.col("entry") + entry).cast("long").alias("increase"),
        "last_ts",
        "last_v",
        "last_start_ts",
        F.to_date("window").alias("date"),
        F.hour("window").alias("hour"),
    )


def _since_tail(lookback_days: int) -> Column:
    """Return the growth from the ledger's last sample to the hour's first one, by the model of `counters`."""
    value, start, tail_v = F.col("first_v"), F.col("first_start_ts"), F.col("tail_last_v")
    tail_start, tail_ts = F.col("tail_last_start_ts"), F.col("tail_last_ts")
    horizon = F.expr(f"date_trunc('day', first_ts) - interval {lookback_days} days")
    told = F.when(tail_start.isNotNull(), start > tail_start).otherwise((start >= tail_ts) | (value < tail_v))
    is_reset = F.when(start.isNotNull(), told).otherwise(value < tail_v)
    at_first = F.when((start >= horizon) & (start < F.col("first_ts")), value).otherwise(0.0)
    since = F.when(is_reset, value).otherwise(value - tail_v)
    return F.when(tail_ts >= horizon, since).otherwise(at_first)


def hourly(rows: DataFrame, ends: Mapping[str, datetime]) -> DataFrame:
    """Sum rows of the ledger to rows of usage_hourly; hours before their cluster's end are closed."""
    totals = (total(F.when(F.col("what") == name, F.col("increase"))).alias(name) for name in WHAT.values())
    summed = rows.groupBy("cluster", "principal", "window").agg(*totals)
    closed = F.col("window") < end_of(ends)
    return summed.withColumns({"closed": closed, "width": F.lit("1h"), "date": F.to_date("window")})


def daily(hours: DataFrame, ends: Mapping[str, datetime]) -> DataFrame:
    """Sum all of these days' rows of usage_hourly to usage_daily; days that ended by their cluster's end are closed."""
    day = F.date_trunc("day", "window").alias("window")
    summed = hours.groupBy("cluster", "principal", day).agg(*(total(F.col(name)).alias(name) for name in WHAT.values()))
    ended = F.expr("window + interval 1 day") <= end_of(ends)
    return summed.withColumns({"closed": ended, "width": F.lit("1d"), "date": F.to_date("window")})


def end_of(ends: Mapping[str, datetime]) -> Column:
    """Return a column: the end of the closed hours of a row's `cluster`; 1970 for others."""
    pairs = [F.lit(part) for pair in sorted(ends.items()) for part in pair]
    never = F.lit(datetime.fromtimestamp(0).astimezone())
    return F.coalesce(F.create_map(*pairs)[F.col("cluster")], never) if pairs else never


def count_late_samples(hours: DataFrame, series: DataFrame, rows: DataFrame) -> DataFrame:
    """Return (window, samples): samples of closed hours in rollup_1h (`hours`) and not in the ledger (`rows`)."""
    now = (
        hours.where(no_count().isNull())
        .join(F.broadcast(series.select("series_id")), "series_id")
        .select("window", "n")
    )
    known = rows.select("window", (-F.col("n")).alias("n"))
    return now.unionAll(known).groupBy("window").agg(F.sum("n").alias("samples")).where("samples > 0")
