"""The sketch that set the measure for the rollup: partial states by mapInArrow, merged in SQL. Not product code."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

MINUTE_MS = 60_000
SCHEMA = (
    "series_id long, w long, n long, sum double, mn double, mx double, first_ts long, first_v double, "
    "last_ts long, last_v double, inc double, resets long"
)
MERGE = """
select series_id, w, sum(n) n, sum(sum) sum, min(mn) mn, max(mx) mx, min(first_ts) first_ts,
  min_by(first_v, first_ts) first_v, max(last_ts) last_ts, max_by(last_v, last_ts) last_v,
  sum(inc + case when pv is null then 0 when first_v >= pv then first_v - pv else first_v end) as increase,
  sum(resets + case when first_v < pv then 1 else 0 end) resets,
  sum(case when first_ts <= plt then 1 else 0 end) overlaps
from (select *, lag(last_v) over x pv, lag(last_ts) over x plt
      from p window x as (partition by series_id order by first_ts)) group by 1, 2
"""


def run(spark: SparkSession, root: Path, out: Path) -> tuple[float, float]:
    """Seconds to windows of a minute, and on to hours."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "262144")
    begun = time.perf_counter()
    samples = spark.read.parquet(f"{root}/samples").select("series_id", "ts", "value")
    samples.mapInArrow(_partials, SCHEMA).createOrReplaceTempView("p")
    spark.sql(MERGE).write.option("compression", "snappy").parquet(f"{out}/1m")
    minutes_done = time.perf_counter()
    hours = spark.read.parquet(f"{out}/1m").groupBy("series_id", (F.col("w") / 60).cast("long").alias("h"))
    sums = [F.sum(name).alias(name) for name in ("n", "increase", "resets")]
    hours.agg(*sums, F.min("mn").alias("mn"), F.max("mx").alias("mx")).write.parquet(f"{out}/1h")
    return minutes_done - begun, time.perf_counter() - minutes_done


def _partials(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    columns = [[column.to_numpy() for column in _plain(batch)] for batch in batches]
    if not columns:
        return
    sid, ts, v = (np.concatenate(pieces) for pieces in zip(*columns, strict=True))
    keep = ~np.isnan(v)
    sid, ts, v = sid[keep], ts[keep], v[keep]
    order = np.lexsort((ts, sid))
    sid, ts, v = sid[order], ts[order], v[order]
    keep = np.ones(len(ts), bool)
    keep[1:] = (ts[1:] != ts[:-1]) | (sid[1:] != sid[:-1])
    sid, ts, v = sid[keep], ts[keep], v[keep]
    w = ts // MINUTE_MS
    new = np.ones(len(ts), bool)
    new[1:] = (w[1:] != w[:-1]) | (sid[1:] != sid[:-1])
    st = np.flatnonzero(new)
    en = np.append(st[1:], len(ts)) - 1
    d = np.empty_like(v)
    d[0] = 0
    d[1:] = v[1:] - v[:-1]
    neg = d < 0
    inc = np.where(neg, v, d)
    inc[st] = 0
    neg[st] = False
    found = (
        *(sid[st], w[st], en - st + 1, np.add.reduceat(v, st), np.minimum.reduceat(v, st), np.maximum.reduceat(v, st)),
        *(ts[st], v[st], ts[en], v[en], np.add.reduceat(inc, st), np.add.reduceat(neg.astype(np.int64), st)),
    )
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    yield pa.RecordBatch.from_arrays([pa.array(column) for column in found], names=names)


def _plain(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array, pa.Array]:
    return batch.column(0), pa.compute.divide(batch.column(1).cast(pa.int64()), 1000), batch.column(2)
