"""Rollup of samples to windows of a minute and an hour, and of hours to days, on DataFrames.

    samples, tails ──windows──▶ rollup_1m, rollup_1h ──days──▶ rollup_1d ──tails──▶ …

One shuffle of bare samples by counter, Spark's sort, and one pass (`counters`): one way for every layout of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.types import StructField, StructType

from analytics.tables.schemas import ROLLUP
from analytics.transforms import counters

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_WINDOWS = StructType([StructField(field.name, field.dataType) for field in ROLLUP])


def windows(samples: DataFrame, tails: DataFrame, lookback_days: int) -> DataFrame:
    """Compute rows of rollup_1m and rollup_1h.

    `tails` has the last sample of a series before each run of consecutive hours of `samples`.
    """
    key = F.coalesce("counter_id", "series_id").alias("key")
    rows = samples.select(key, "series_id", "replica", _millis("ts"), _millis("start_ts"), "value")
    last = tails.select(
        F.col("series_id").alias("key"),
        "series_id",
        F.col("last_replica").alias("replica"),
        _millis("last_ts"),
        (-1 - _millis("last_start_ts")).alias("start"),
        F.col("last_v").alias("value"),
    )
    ordered = rows.union(last).toDF(*counters.Rows._fields).repartition("key").sortWithinPartitions(_sort_number())
    return ordered.mapInArrow(partial(_windows, lookback_days=lookback_days), _WINDOWS)


def days(hours: DataFrame) -> DataFrame:
    """Compute rows of rollup_1d from all rows of rollup_1h of these days."""
    window = F.date_trunc("day", "window").alias("window")
    first, last = ("first_v", "first_start_ts", "entry", "entry_ts"), ("last_v", "last_start_ts", "last_replica")
    summed = hours.groupBy("series_id", window).agg(
        *(F.sum(name).alias(name) for name in ("n", "sum", "increase", "resets", "overlaps")),
        F.min("min").alias("min"),
        F.max("max").alias("max"),
        *(F.min_by(name, "first_ts").alias(name) for name in first),
        *(F.max_by(name, "last_ts").alias(name) for name in last),
        F.min("first_ts").alias("first_ts"),
        F.max("last_ts").alias("last_ts"),
    )
    return summed.withColumns({"width": F.lit("1d"), "date": F.to_date("window"), "hour": F.lit(None).cast("int")})


def tails(rows: DataFrame, hours: Sequence[datetime], columns: Sequence[str]) -> DataFrame:
    """Return the columns of each series' last sample before each run of consecutive `hours`.

    `rows` are hours, days or both, of any time, without rows of `hours`.
    """
    before = rows.where(F.col("window") < F.lit(max(hours))).groupBy("series_id", _run_of(hours).alias("run"))
    others = [name for name in columns if name != "series_id"]
    last = before.agg(F.max_by(F.struct(*others), "last_ts").alias("last_row"))
    return last.select("series_id", *(F.col(f"last_row.{name}").alias(name) for name in others)).select(*columns)


def hours_after(changed: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the column `window` of the hours whose growth up to their first sample depends on changed hours.

    That is the first hour of each series after a changed one. `changed` has (series_id, window) of recomputed hours,
    `rows` is rollup_1h without them.
    """
    from pyspark.sql import Window

    marked = changed.select("series_id", "window", F.lit(True).alias("is_changed"))
    others = rows.select("series_id", "window", F.lit(False).alias("is_changed"))
    before = F.lag("is_changed").over(Window.partitionBy("series_id").orderBy("window"))
    follows = marked.unionAll(others).withColumn("before", before).where(~F.col("is_changed") & F.col("before"))
    return follows.select("window").distinct()


def _run_of(hours: Sequence[datetime]) -> Column:
    """Return a column: how many runs of consecutive hours begin at or before the column `window`."""
    known = set(hours)
    begins = [hour for hour in hours if hour - timedelta(hours=1) not in known]
    return F.size(F.filter(F.array(*map(F.lit, begins)), lambda begin: begin <= F.col("window")))


def _sort_number() -> Column:
    """Return one number whose order is nearly that of the columns of Rows: key, counter before its gauge, time.

    Spark sorts one number by its bits, several columns by comparisons, in three times the time.
    """
    prefix = F.shiftleft(F.shiftright("key", counters.SORTED_BITS), counters.SORTED_BITS)
    is_gauge = F.shiftleft((F.col("series_id") != F.col("key")).cast("long"), counters.TIME_BITS)
    return prefix.bitwiseOR(is_gauge).bitwiseOR(F.least("ts", F.lit(counters.TIME_MAX)))


def _millis(column: str) -> Column:
    """Return milliseconds since 1970; NO_START for null and for a sender's negative start."""
    return F.greatest(F.coalesce(F.unix_millis(column), F.lit(0)), F.lit(counters.NO_START)).cast("long")


def _windows(batches: Iterable[pa.RecordBatch], lookback_days: int) -> Iterator[pa.RecordBatch]:
    return counters.windows(batches, lookback_days)
