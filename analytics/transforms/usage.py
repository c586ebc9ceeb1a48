"""Who used how much: the proxy's counters by principal, summed over workers and roles, by hour and by day.

    rollup_1h + series ──ledger──▶ usage_ledger (a row for each counter and hour) ──hourly──▶ usage_hourly ──daily──▶ …

The ledger is a chain for each counter: an hour's growth begins at the last sample of the last hour *in the ledger*. A
sample that comes for an hour that is closed already is no link of it, so the later hours count as if it had never come,
and the sum over all hours is the counter's growth whatever came late.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 -- as everybody calls it

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


def usage_series(series: DataFrame) -> DataFrame:
    """Of the table `series`, the counters of usage: (series_id, cluster, principal, what)."""
    direction = F.coalesce(F.col("labels")["direction"], F.lit(""))
    what = F.coalesce(
        *(F.when((F.col("metric") == metric) & (direction == way), F.lit(name)) for (metric, way), name in WHAT.items())
    )
    labels = (F.coalesce(F.col("labels")[name], F.lit("")).alias(name) for name in ("cluster", "principal"))
    return series.select("series_id", *labels, what.alias("what")).where(F.col("what").isNotNull())


def tails_of(ledger: DataFrame) -> DataFrame:
    """The last sample of each counter in these rows of the ledger."""
    names = ("last_ts", "last_v", "last_start_ts")
    return ledger.groupBy("series_id").agg(*(F.max_by(name, "last_ts").alias(f"tail_{name}") for name in names))


def ledger(hours: DataFrame, series: DataFrame, tails: DataFrame | None, lookback_days: int) -> DataFrame:
    """Rows of usage_ledger of rows of rollup_1h and `usage_series`.

    Each counter's first hour gets its growth since its tail; where there is none, since its start, as in the rollup.
    `tails` is None where nothing was closed before: then the rollup's own growth is right.
    """
    rows = hours.join(F.broadcast(series), "series_id")
    increase = F.col("increase")
    if tails is not None:
        rows = rows.join(tails, "series_id", "left")
        is_first = F.row_number().over(Window.partitionBy("series_id").orderBy("window")) == 1
        rows = rows.withColumn("is_first", is_first)
        increase = F.when(F.col("is_first"), increase - F.col("entry") + _since_tail(lookback_days)).otherwise(increase)
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


def hourly(rows: DataFrame, closed_until: datetime) -> DataFrame:
    """Rows of usage_hourly of rows of the ledger; closed are the hours before `closed_until`."""
    totals = (F.coalesce(F.sum(F.when(F.col("what") == name, F.col("increase"))), F.lit(0)) for name in WHAT.values())
    named = (total.cast("long").alias(name) for total, name in zip(totals, WHAT.values(), strict=True))
    summed = rows.groupBy("cluster", "principal", "window").agg(*named)
    return summed.withColumns({"closed": F.col("window") < F.lit(closed_until), "date": F.to_date("window")})


def daily(hours: DataFrame, closed_until: datetime) -> DataFrame:
    """Rows of usage_daily of all rows of usage_hourly of these days; closed are days that ended by `closed_until`."""
    day = F.date_trunc("day", "window").alias("window")
    summed = hours.groupBy("cluster", "principal", day).agg(*(F.sum(name).alias(name) for name in WHAT.values()))
    ended = F.expr("window + interval 1 day") <= F.lit(closed_until)
    return summed.withColumns({"closed": ended, "date": F.to_date("window")})


def late(hours: DataFrame, series: DataFrame, rows: DataFrame) -> DataFrame:
    """(window, samples): samples that closed hours have in rollup_1h (`hours`) and not in the ledger (`rows`)."""
    now = hours.join(F.broadcast(series), "series_id").select("window", "n")
    known = rows.select("window", (-F.col("n")).alias("n"))
    return now.unionAll(known).groupBy("window").agg(F.sum("n").alias("samples")).where("samples > 0")


def _since_tail(lookback_days: int) -> Column:
    """`counter_state.growth` from the tail to the hour's first sample, or `growth_at_first`."""
    value, start, tail_v = F.col("first_v"), F.col("first_start_ts"), F.col("tail_last_v")
    tail_start = F.col("tail_last_start_ts")
    changed = start.isNotNull() & ~start.eqNullSafe(tail_start) & (start >= F.col("tail_last_ts"))
    fell = (value < tail_v) & (start.isNull() | ~start.eqNullSafe(tail_start))
    horizon = F.expr(f"date_trunc('day', first_ts) - interval {lookback_days} days")
    at_first = F.when((start >= horizon) & (start < F.col("first_ts")), value).otherwise(0.0)
    since = F.when(changed | fell, value).otherwise(value - tail_v)
    return F.when(F.col("tail_last_ts") >= horizon, since).otherwise(at_first)
