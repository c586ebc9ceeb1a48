"""Samples to windows of a minute and of an hour: this rollup, the sketch it must not fall behind, DuckDB and Polars.

All read the same files in one run, one after the other in turns; the figure is the best of the rounds. The sketch is
`rollup_sketch.py`. It, DuckDB and Polars compute less: no start timestamps, no exact sums, no last sample of the hour
before, one directory. "whole job" is `pulsar-proxy-analytics rollup`: minutes, hours, days, checks and the commit.

    python -m tests.bench_analytics.rollup_bench --samples 1000000
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from analytics.jobs import rollup as job
from analytics.jobs.minutes import rollup_change
from analytics.tables.store import Tables
from analytics.transforms import rollup
from tests.bench_analytics import rollup_others, rollup_sketch

FIRST = datetime(2026, 10, 1, tzinfo=UTC)
SERIES, STEP_MS, RESET_EVERY, DUPLICATES = 1736, 15_000, 3800, 0.01
CURVE_MILLIONS = (1, 3, 10, 30, 100)
SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.files.maxPartitionBytes": str(8 << 20),
    "spark.sql.shuffle.partitions": "4",
}
Row = dict[str, float]


def make_samples(root: Path, millions: float) -> tuple[list[datetime], float]:
    """Scrapes of 1,736 counters every 15 s with resets and duplicates, a file an hour."""
    chance = np.random.default_rng(7)
    series_id = chance.integers(-(2**63), 2**63 - 1, SERIES, dtype=np.int64)
    rate, jitter = np.minimum(chance.lognormal(3, 2, SERIES), 1e6) * 15, chance.integers(0, 50, SERIES)
    value, growth, hours = np.zeros(SERIES), 0.0, []
    scrapes = round(millions * 1e6 / SERIES)
    for begin in range(0, scrapes, 240):
        count = min(240, scrapes - begin)
        steps = chance.poisson(rate, (count, SERIES)).astype(float)
        values = np.empty_like(steps)
        for index in range(count):
            before, value = value, np.where(chance.random(SERIES) < 1 / RESET_EVERY, 0.0, value) + steps[index]
            values[index] = value
            if begin or index:  # a reset after which a counter is no smaller than before is seen by nobody
                growth += np.where(value < before, value, value - before).sum()
        hour = FIRST + timedelta(hours=len(hours))
        ts = int(hour.timestamp() * 1000) + np.arange(count)[:, None] * STEP_MS + jitter
        rows = [np.broadcast_to(series_id, values.shape).ravel(), ts.ravel(), values.ravel()]
        twice = chance.random(rows[0].size) < DUPLICATES
        _write(root / f"samples/date={hour:%Y-%m-%d}/hour={hour.hour}", *(np.concatenate([r, r[twice]]) for r in rows))
        hours.append(hour)
    return hours, growth


def _write(directory: Path, series_id: np.ndarray, ts: np.ndarray, value: np.ndarray) -> None:
    directory.mkdir(parents=True)
    stamps = pa.array(ts, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC"))
    columns = {
        "series_id": series_id,
        "ts": stamps,
        "start_ts": pa.nulls(len(ts), stamps.type),
        "value": value,
        "batch_id": np.ones(len(ts), np.int64),
    }
    pq.write_table(pa.table(columns), directory / "part-0.parquet", compression="zstd", row_group_size=1 << 17)


def session(memory: str) -> SparkSession:
    """Two cores, for both Spark programs."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", memory)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


class _Measured(Exception):
    """Ends the change before anything of it becomes visible."""


def ours(spark: SparkSession, root: Path, hours: list[datetime], growth: float) -> tuple[float, float]:
    """What the job computes and writes for minutes and for hours, without what is around it."""
    for name, value in job.SETTINGS.items():
        spark.conf.set(name, value)
    tables = Tables.open(spark, str(root))
    seconds = (0.0, 0.0)
    with suppress(_Measured), rollup_change(tables, "bench") as change:
        block = job.Block(job.RollupRun(tables, (job.COUNTERS,), job.LOOKBACK_DAYS, job.RollupReport()), change)
        begun = time.perf_counter()
        tails = rollup.tails(tables.read("rollup_1h", []), hours)
        minutes = job.COUNTERS.stage_minutes(block, hours, tails)
        minutes_done = time.perf_counter()
        wide = change.stage_rows("rollup_1h", job.COUNTERS.coarser(minutes, "hour"))
        seconds = (minutes_done - begun, time.perf_counter() - minutes_done)
        assert not block.run.report.mixed_hours
        _compare(wide.agg({"increase": "sum"}).collect()[0][0], growth, "this rollup")
        whole, merged = (
            next(root.glob(f"_staging/*/{name}")) for name in (f"minutes/{rollup.PART}={rollup.WHOLE}", "rollup_1m")
        )
        _check([*whole.rglob("*.parquet"), *merged.rglob("*.parquet")], growth, "this rollup")
        raise _Measured
    return seconds


def whole_job(spark: SparkSession, root: Path, hours: list[datetime]) -> float:
    """The job on its tables; they are removed before."""
    for name in ("rollup_1m", "rollup_1h", "rollup_1d", "_commits", "_dirty"):
        shutil.rmtree(root / name, ignore_errors=True)
    tables = Tables.open(spark, str(root))
    with tables.transaction("bench") as change:
        change.mark_dirty(job.QUEUE, hours)
    begun = time.perf_counter()
    job.run(spark, str(root))
    return time.perf_counter() - begun


def measure(spark: SparkSession, work: Path, millions: float, rounds: int, only: frozenset[str]) -> dict[str, Row]:
    """Seconds of each contender, the best of the rounds; each result is checked against the true growth."""
    root, out = work / "tables", work / "out"
    shutil.rmtree(root, ignore_errors=True)
    hours, growth = make_samples(root, millions)
    contenders: dict[str, Callable[[], tuple[float, float]]] = {
        "sketch": lambda: rollup_sketch.run(spark, root, out),
        "this rollup": lambda: ours(spark, root, hours, growth),
        "whole job": lambda: (whole_job(spark, root, hours), 0.0),
        "DuckDB": lambda: rollup_others.duckdb_rollup(root, out),
        "Polars": lambda: rollup_others.polars_rollup(root, out),
    }
    results: dict[str, Row] = {}
    for _ in range(rounds):
        for name, contender in contenders.items():
            if only and name not in only:
                continue
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            minutes_s, hours_s = contender()
            if name != "this rollup":
                written = root / "rollup_1m" if name == "whole job" else out / "1m"
                _check(written.rglob("*.parquet"), growth, name)
            best = results.setdefault(name, {"1m_s": minutes_s, "1h_s": hours_s})
            best["1m_s"], best["1h_s"] = min(best["1m_s"], minutes_s), min(best["1h_s"], hours_s)
            print(f"{millions:g} M {name}: {minutes_s:.2f} s + {hours_s:.2f} s", flush=True)
    return results


def _check(files: Iterable[Path], growth: float, name: str) -> None:
    tables = [pq.read_table(file, columns=["increase"], partitioning=None) for file in files]
    _compare(sum(table["increase"].to_numpy().sum() for table in tables), growth, name)


def _compare(found: float, growth: float, name: str) -> None:
    if abs(found - growth) > (1e-9 * growth if name in {"DuckDB", "Polars"} else 0):
        raise AssertionError(f"{name}: the growth is {found:.0f}, not {growth:.0f}")


def main() -> None:
    """Measure and print; --json for a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", action="append", default=[], help="a contender; may be repeated; default: all")
    parser.add_argument("--curve", action="store_true", help=f"also {CURVE_MILLIONS} million samples, one round each")
    parser.add_argument("--memory", default="4g", help="of Spark's driver; default: %(default)s")
    parser.add_argument("--directory", type=Path, help="for the files, up to 2 GB; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    curve: dict[float, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
        spark, work, only = session(options.memory), Path(name), frozenset(options.only)
        measure(spark, work, 1, 2, only)  # Spark's first jobs take seconds longer than any later one
        results = measure(spark, work, options.samples / 1e6, options.rounds, only)
        if options.curve:
            curve = {size: measure(spark, work, size, 1, only) for size in CURVE_MILLIONS}
        spark.stop()
    if options.json:
        options.json.write_text(json.dumps({"series": SERIES, "results": results, "curve": curve}))


if __name__ == "__main__":
    sys.exit(main())
