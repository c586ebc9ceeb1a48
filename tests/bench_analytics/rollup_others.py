"""The same rollup in DuckDB and in Polars, on two cores of one machine: for honesty."""

import os
import time
from pathlib import Path

CORES = 2
SQL = """
copy (
with d as (select distinct series_id, ts, value from read_parquet('{samples}') where not isnan(value)),
l as (select series_id, ts, value, lag(value) over (partition by series_id order by ts) as pv from d)
select series_id, time_bucket(interval 1 minute, ts) as "window", count(*) as n, sum(value) as sum, min(value) as min,
  max(value) as max, arg_min(value, ts) as first_v, arg_max(value, ts) as last_v, min(ts) as first_ts,
  max(ts) as last_ts, sum(case when pv is null then 0.0 when value >= pv then value - pv else value end) as increase,
  sum(case when value < pv then 1 else 0 end) as resets
from l group by 1, 2) to '{out}' (format parquet, compression zstd)
"""
HOURS = """
copy (select series_id, time_bucket(interval 1 hour, "window") as "window", sum(n) as n, sum(increase) as increase,
  sum(resets) as resets, min(min) as min, max(max) as max from read_parquet('{minutes}') group by 1, 2)
to '{out}' (format parquet, compression zstd)
"""


def duckdb_rollup(root: Path, out: Path) -> tuple[float, float]:
    """Seconds to windows of a minute, and on to hours."""
    import duckdb

    (out / "1m").mkdir()
    minutes, hours = out / "1m/part.parquet", out / "1h.parquet"
    begun = time.perf_counter()
    with duckdb.connect() as connection:
        connection.execute(f"set threads = {CORES}")
        connection.execute(SQL.format(samples=f"{root}/samples/*/*/*.parquet", out=minutes))
        minutes_done = time.perf_counter()
        connection.execute(HOURS.format(minutes=minutes, out=hours))
    return minutes_done - begun, time.perf_counter() - minutes_done


def polars_rollup(root: Path, out: Path) -> tuple[float, float]:
    """Seconds to windows of a minute, and on to hours."""
    os.environ["POLARS_MAX_THREADS"] = str(CORES)
    import polars as pl

    (out / "1m").mkdir()
    begun = time.perf_counter()
    value, previous = pl.col("value"), pl.col("pv")
    growth = pl.when(previous.is_null()).then(0.0).when(value >= previous).then(value - previous).otherwise(value)
    samples = pl.scan_parquet(f"{root}/samples/*/*/*.parquet", hive_partitioning=False).select(
        "series_id", "ts", "value"
    )
    steps = (
        samples.filter(value.is_not_nan())
        .unique(["series_id", "ts"])
        .sort("series_id", "ts")
        .with_columns(pv=value.shift(1).over("series_id"))
        .with_columns(growth=growth, reset=(value < previous).fill_null(value=False))
    )
    minutes = steps.group_by("series_id", pl.col("ts").dt.truncate("1m").alias("window")).agg(
        n=pl.len(),
        sum=value.sum(),
        min=value.min(),
        max=value.max(),
        first_v=value.sort_by("ts").first(),
        last_v=value.sort_by("ts").last(),
        first_ts=pl.col("ts").min(),
        last_ts=pl.col("ts").max(),
        increase=pl.col("growth").sum(),
        resets=pl.col("reset").sum(),
    )
    minutes.collect(engine="streaming").write_parquet(out / "1m/part.parquet")
    minutes_done = time.perf_counter()
    wide = pl.scan_parquet(out / "1m/part.parquet").group_by("series_id", pl.col("window").dt.truncate("1h"))
    totals = wide.agg(
        *(pl.col(name).sum() for name in ("n", "increase", "resets")), pl.col("min").min(), pl.col("max").max()
    )
    totals.collect(engine="streaming").write_parquet(out / "1h.parquet")
    return minutes_done - begun, time.perf_counter() - minutes_done
