"""The job `rollup` (minutes, hours, days, checks and the commit) beside DuckDB, over several layouts of samples.

Both read the same files in turns; the figure is the best of the rounds. Here DuckDB computes less: no lookback, no
starts, no commit. Then, unmeasured, it computes the whole definition (`tests.analytics.recomputed`), and all widths are
compared row by row.

    python -m tests.bench_analytics.rollup_bench --samples 1000000
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from analytics.jobs import rollup
from analytics.jobs.defaults import LOOKBACK_DAYS
from analytics.jobs.session import spark_session
from analytics.tables.change import Written, add_action
from analytics.tables.store import Tables
from tests.analytics import recomputed

FIRST = datetime(2026, 10, 1, tzinfo=UTC)
STEP_MS = 15_000
WIDTHS = {"1m": "minute", "1h": "hour", "1d": "day"}


@dataclass(frozen=True)
class Layout:
    """How many series, in files of how many scrapes, from how many replicas."""

    series: int
    scrapes_per_file: int
    replicas: int = 1

    def __str__(self) -> str:
        span = {4: "a minute", 240: "an hour"}[self.scrapes_per_file]
        return f"{self.series:,} series, a file {span}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")


LAYOUTS = (Layout(1736, 240), Layout(1736, 4), Layout(20_000, 4), Layout(200_000, 4), Layout(1736, 4, replicas=2))
FILES_SQL = "create view f as from read_parquet('{files}', hive_partitioning = false)"
SAMPLES_SQL = """
create table s as select distinct on (series_id, ts) series_id, ts, value from f
"""
REPLICAS_SQL = """
create table counted as
select series_id, date_trunc('minute', ts) as span, replica, count(*) as n from f group by all;
create table chosen as select series_id, span, case when 2 * arg_min(n, replica) >= max(n) then min(replica)
  else arg_min(replica, {'n': -n, 'replica': replica}) end as replica from counted group by all;
create table s as select distinct on (f.series_id, ts) f.series_id, ts, value from f join chosen
on f.series_id = chosen.series_id and f.replica = chosen.replica and date_trunc('minute', ts) = span
"""
MINUTES_SQL = """
create table "1m" as with
g as (select *, lag(value) over (partition by series_id order by ts) as p from s),
h as (select *, case when p is null then 0.0 when value < p then value else value - p end as gained from g)
select series_id, date_trunc('minute', ts) as w, count(*) as n, sum(value) as sum, min(value) as min, max(value) as max,
  min_by(value, ts) as first_v, max_by(value, ts) as last_v, min(ts) as first_ts, max(ts) as last_ts,
  sum(gained) as increase, count(*) filter (where value < p) as resets
from h group by all
"""
WIDER_SQL = """
create table "{name}" as select series_id, date_trunc('{unit}', w) as w, sum(n) as n, sum(sum) as sum, min(min) as min,
  max(max) as max, min_by(first_v, w) as first_v, max_by(last_v, w) as last_v, min(first_ts) as first_ts,
  max(last_ts) as last_ts, sum(increase) as increase, sum(resets) as resets from "{finer}" group by all
"""


def make_samples(tables: Tables, layout: Layout, samples: int) -> None:
    """Scrapes of counters every 15 s, with resets, as `ingest` leaves them."""
    chance = np.random.default_rng(7)
    series_id = chance.integers(-(2**63), 2**63 - 1, layout.series, dtype=np.int64)
    value, root = np.zeros(layout.series), Path(tables.location.delta_url) / "samples"
    scrapes = max(layout.scrapes_per_file, samples // layout.series // layout.replicas)
    actions = []
    for begin in range(0, scrapes, layout.scrapes_per_file):
        rows = []
        for scrape in range(begin, begin + layout.scrapes_per_file):
            value = np.where(chance.random(layout.series) < 1 / 3800, 0.0, value) + chance.poisson(1000, layout.series)
            ts = int(FIRST.timestamp() * 1000) + scrape * STEP_MS + series_id % 50
            rows += [(replica, ts + 100 * replica, value - 10 * replica) for replica in range(layout.replicas)]
        hour = FIRST + timedelta(milliseconds=begin * STEP_MS)
        path = f"bench/date={hour:%Y-%m-%d}/hour={hour.hour}/{begin:08}.parquet"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        count = len(rows) * layout.series
        times = pa.array(np.concatenate([one[1] for one in rows]) * 1000).view(pa.timestamp("us", tz="UTC"))
        columns = {
            "series_id": np.tile(series_id, len(rows)),
            "replica": np.repeat([one[0] for one in rows], layout.series),
            "ts": times,
            "start_ts": pa.nulls(count, times.type),
            "value": np.concatenate([one[2] for one in rows]),
            "counter_id": pa.nulls(count, pa.int64()),
        }
        pq.write_table(pa.table(columns), root / path, compression="zstd")
        actions.append(add_action(path, (root / path).stat().st_size, pq.read_metadata(root / path)))
    with tables.change("samples") as change:
        change.append(Written("samples", tuple(actions), change.snapshot.read("samples"), 0))


def in_duckdb(root: Path, database: Path, replicas: int) -> float:
    """Seconds to minutes, hours and days."""
    database.unlink(missing_ok=True)
    begun = time.perf_counter()
    with duckdb.connect(str(database)) as connection:
        connection.execute("set threads = 2; set TimeZone = 'UTC'")
        connection.execute(FILES_SQL.format(files=f"{root}/samples/bench/*/*/*.parquet"))
        connection.execute(REPLICAS_SQL if replicas > 1 else SAMPLES_SQL)
        connection.execute(MINUTES_SQL)
        for name, finer in (("1h", "1m"), ("1d", "1h")):
            connection.execute(WIDER_SQL.format(name=name, finer=finer, unit=WIDTHS[name]))
    return time.perf_counter() - begun


def by_the_job(spark: SparkSession, root: Path) -> float:
    """Seconds of the job on new tables."""
    shutil.rmtree(root / "rollup", ignore_errors=True)
    begun = time.perf_counter()
    rollup.run(spark, str(root))
    return time.perf_counter() - begun


def differing(root: Path, database: Path) -> list[Any]:
    """The first rows in which the rollups differ from the whole definition in SQL, with starts and chosen replicas."""
    database.unlink(missing_ok=True)
    with duckdb.connect(str(database)) as connection:
        connection.execute(f"""
            create view samples as select series_id, replica, epoch_ms(ts) as ts, epoch_ms(start_ts) as start, value,
            counter_id from read_parquet('{root}/samples/bench/*/*/*.parquet', hive_partitioning = false)""")
        recomputed.register(connection, root, "rollup")
        rollups = recomputed.rollups(connection, LOOKBACK_DAYS)
        return recomputed.differing(connection, recomputed.OURS_SQL, rollups)


def measure(spark: SparkSession, work: Path, layout: Layout, samples: int, rounds: int) -> dict[str, float]:
    """Best seconds of both."""
    root = work / "tables"
    shutil.rmtree(root, ignore_errors=True)
    make_samples(Tables.open(spark, str(root)), layout, samples)
    best = {"rollup": float("inf"), "DuckDB": float("inf")}
    for _ in range(rounds):
        best["DuckDB"] = min(best["DuckDB"], in_duckdb(root, work / "duck.db", layout.replicas))
        best["rollup"] = min(best["rollup"], by_the_job(spark, root))
    if rows := differing(root, work / "duck.db"):
        raise AssertionError(f"{layout}: rows differ: {rows}")
    print(f"{layout}: {best['rollup']:.1f} s, DuckDB {best['DuckDB']:.1f} s", flush=True)
    return best


def main() -> None:
    """Measure and print; --json for a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        spark = spark_session("rollup_bench")
        spark.sparkContext.setLogLevel("ERROR")
        measure(
            spark, Path(name), LAYOUTS[0], 1_000_000, 1
        )  # Spark's first jobs take seconds longer than any later one
        results = {
            str(layout): measure(spark, Path(name), layout, options.samples, options.rounds) for layout in LAYOUTS
        }
        spark.stop()
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
