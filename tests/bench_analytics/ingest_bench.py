"""How fast the ingest job is, against the sketch that the design was measured with, in one run on one machine.

    python -m tests.bench_analytics.ingest_bench --sketch DIRECTORY_OF_promspool_lean.py

The sketch writes samples alone to Parquet, with no series table, no duplicates left out and no crash survived; both
read the same requests. The runs alternate, for a machine is rarely as quiet in one minute as in the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
SKETCH_HEADER = struct.Struct("<IIQBBHI")


@dataclass
class Figures:
    """Samples per second, of each run in order."""

    samples: int
    ingest: list[float] = field(default_factory=list)
    sketch: list[float] = field(default_factory=list)
    spool_bytes_per_sample: float = 0.0


def bodies(samples: int) -> Iterator[bytes]:
    """Requests as Prometheus sends them (2.0): each series once, 15 s apart."""
    request = RequestV2(symbols=["", *(text for pair in LABELS.items() for text in pair), "principal", "worker"])
    base = list(range(1, 2 * len(LABELS) + 1))
    principal, worker = len(base) + 1, len(base) + 2
    for number in range(SERIES):
        request.symbols.append(f"tenant-{number // 4}" if number % 4 == 0 else f"unused-{number}")
    first = worker + 1
    workers = len(request.symbols)
    request.symbols.extend(map(str, range(4)))
    for number in range(SERIES):
        series = request.timeseries.add()
        series.labels_refs.extend([*base, principal, first + number // 4 * 4, worker, workers + number % 4])
        series.samples.add(start_timestamp=T0_MS - 1000)
    for scrape in range(samples // SERIES):
        for number, series in enumerate(request.timeseries):
            series.samples[0].timestamp = T0_MS + scrape * SCRAPE_MS + number % 50
            series.samples[0].value = float(scrape * (number * 37 % 1000 + 1) + scrape * number % 7)
        yield compress(request.SerializeToString())


def make_inputs(directory: Path, samples: int) -> float:
    """The same requests as our spool and as the sketch's; bytes per sample of ours."""
    spool = SpoolFiles(directory / "spool")
    (directory / "sketch").mkdir()
    size = 0
    with (directory / "sketch" / f"seg-{0:012}.rws").open("wb") as sketch:
        for body in bodies(samples):
            spool.add(body, 2)
            sketch.write(SKETCH_HEADER.pack(len(body), zlib.crc32(body), 0, 2, 0, 0, SERIES) + body)
            size += len(body)
    spool.close()
    return size / samples


def run_ingest(spark: SparkSession, directory: Path) -> None:
    """The job into new tables."""
    from analytics.jobs import ingest

    tables = directory / "tables"
    shutil.rmtree(tables, ignore_errors=True)
    (directory / "spool" / "id").unlink(missing_ok=True)
    ingest.run(spark, str(tables), str(directory / "spool"))


def run_sketch(spark: SparkSession, directory: Path) -> None:
    """Decode with the sketch and write Parquet."""
    rows = spark.read.format("prom_spool_samples").option("path", str(directory / "sketch"))
    rows.option("splitbytes", str(4 << 20)).load().write.mode("overwrite").parquet(str(directory / "sketch_out"))


def _make_importable(sketch: Path, work: Path) -> None:
    """Copy the sketch and make its protobuf classes, where this process and Spark's workers look for modules."""
    from grpc_tools import protoc

    for name in ("promspool.py", "promspool_lean.py", "remote.proto"):
        shutil.copy(sketch / name, work / name)
    protoc.main(["protoc", f"-I{work}", f"--python_out={work}", str(work / "remote.proto")])
    sys.path.insert(0, str(work))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(work), os.environ.get("PYTHONPATH")]))


def measure(samples: int, rounds: int, sketch: Path | None) -> Figures:
    """All runs; the first of each, in which Spark compiles its code, is not counted."""
    with tempfile.TemporaryDirectory(prefix="ingest-bench-") as name:
        work = Path(name)
        figures = Figures(samples, spool_bytes_per_sample=make_inputs(work, samples))
        contenders: dict[str, Any] = {"ingest": run_ingest}
        if sketch is not None:
            contenders["sketch"] = run_sketch
            _make_importable(sketch, work)
        spark = spark_session("ingest_bench")
        spark.sparkContext.setLogLevel("ERROR")
        if sketch is not None:
            import promspool_lean

            spark.dataSource.register(promspool_lean.Lean)
        for round_number in range(rounds + 1):
            for contender, run in contenders.items():
                began = time.perf_counter()
                run(spark, work)
                rate = samples / (time.perf_counter() - began)
                if round_number:
                    getattr(figures, contender).append(rate)
                print(f"round {round_number} {contender}: {rate:,.0f} samples/s", file=sys.stderr, flush=True)
        spark.stop()
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sketch", type=Path, help="directory of promspool_lean.py")
    arguments = parser.parse_args()
    figures = measure(arguments.samples, arguments.rounds, arguments.sketch)
    best = {name: max(getattr(figures, name), default=None) for name in ("ingest", "sketch")}
    ratio = best["ingest"] / best["sketch"] if best["ingest"] and best["sketch"] else None
    print(json.dumps(asdict(figures) | {"best": best, "ingest_to_sketch": ratio}, indent=1))


if __name__ == "__main__":
    main()
