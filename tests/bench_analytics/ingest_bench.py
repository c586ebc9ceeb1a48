"""How fast the ingest job is: a cold spool into new tables, and some samples more into these, in a running session.

python -m tests.bench_analytics.ingest_bench --samples 4000000
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from analytics.jobs.session import spark_session
from analytics.remote_write.remote_pb2 import RequestV2
from analytics.remote_write.snappy import compress
from tests.analytics.spool_files import T0_MS, SpoolFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERIES = 2000
SCRAPE_MS = 15_000
LABELS = {
    "__name__": "pulsar_proxy_principal_bytes_total",
    "cluster": "c1",
    "direction": "to_broker",
    "instance": "10.0.0.1:8080",
    "job": "pulsar-proxy",
    "namespace": "default",
    "pod": "proxy-0",
}
FEW = 10_000
FEW_ROUNDS = 5


@dataclass
class Figures:
    """Of each run in order: samples per second of the cold spool; seconds for FEW samples more."""

    samples: int
    ingest: list[float] = field(default_factory=list)
    few_s: list[float] = field(default_factory=list)
    spool_bytes_per_sample: float = 0.0


def bodies(first: int, last: int) -> Iterator[bytes]:
    """Requests as Prometheus sends them (2.0), from scrape to scrape: each series once, 15 s apart."""
    request = RequestV2(symbols=["", *(text for pair in LABELS.items() for text in pair), "principal", "worker"])
    base = list(range(1, 2 * len(LABELS) + 1))
    principal, worker = len(base) + 1, len(base) + 2
    for number in range(SERIES):
        request.symbols.append(f"tenant-{number // 4}" if number % 4 == 0 else f"unused-{number}")
    tenants = worker + 1
    workers = len(request.symbols)
    request.symbols.extend(map(str, range(4)))
    for number in range(SERIES):
        series = request.timeseries.add()
        series.labels_refs.extend([*base, principal, tenants + number // 4 * 4, worker, workers + number % 4])
        series.samples.add(start_timestamp=T0_MS - 1000)
    for scrape in range(first, last):
        for number, series in enumerate(request.timeseries):
            series.samples[0].timestamp = T0_MS + scrape * SCRAPE_MS + number % 50
            series.samples[0].value = float(scrape * (number * 37 % 1000 + 1) + scrape * number % 7)
        yield compress(request.SerializeToString())


def run_ingest(spark: SparkSession, work: Path) -> float:
    """Run the job, and return its seconds."""
    from analytics.jobs import ingest

    began = time.perf_counter()
    ingest.run(spark, str(work / "tables"), str(work / "spool"))
    return time.perf_counter() - began


def measure(samples: int, rounds: int) -> Figures:
    """All runs; the first, in which Spark compiles its code, is not counted."""
    with tempfile.TemporaryDirectory(prefix="ingest-bench-") as name:
        work, figures, scrapes = Path(name), Figures(samples), samples // SERIES
        spool = SpoolFiles(work / "spool")
        for body in bodies(0, scrapes):
            spool.add(body, 2)
        spark = spark_session("ingest_bench")
        spark.sparkContext.setLogLevel("ERROR")
        for round_number in range(rounds + 1):
            shutil.rmtree(work / "tables", ignore_errors=True)
            (work / "spool/id").unlink(missing_ok=True)
            rate = samples / run_ingest(spark, work)
            if round_number:
                figures.ingest.append(rate)
            print(f"round {round_number}: {rate:,.0f} samples/s", file=sys.stderr, flush=True)
        for _ in range(FEW_ROUNDS):
            for body in bodies(scrapes, scrapes + FEW // SERIES):
                spool.add(body, 2)
            scrapes += FEW // SERIES
            figures.few_s.append(run_ingest(spark, work))
        spool.close()
        spark.stop()
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.samples, arguments.rounds)), indent=1))


if __name__ == "__main__":
    main()
