"""How much the receiver takes, as a process of its own with fdatasync: samples for each second of its CPU, latency.

    python -m tests.bench_analytics.receiver_bench

Senders are threads of this process with one connection each, which send the next request when the last one is answered;
the requests are made before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from analytics.remote_write.remote_pb2 import RequestV2, WriteRequest
from analytics.remote_write.snappy import compress
from tests.analytics.receiver_process import ReceiverProcess

SERIES = 2000
BATCHES = 8
CONNECTIONS = 4
T0_MS = 1_760_000_000_000
CONTENT_TYPES = {1: "application/x-protobuf", 2: "application/x-protobuf;proto=io.prometheus.write.v2.Request"}
LABELS = {
    "__name__": "pulsar_proxy_principal_bytes_total",
    "cluster": "c1",
    "direction": "to_broker",
    "instance": "10.0.0.1:8080",
    "job": "pulsar-proxy",
    "namespace": "default",
    "pod": "proxy-0",
}
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Figures:
    """One run. `per_core`: samples a second of the receiver's CPU time; latencies from the first byte to the answer."""

    version: int
    samples: int
    per_second: float
    per_core: float
    p50_ms: float
    p99_ms: float


def labels(batch: int, number: int) -> list[tuple[str, str]]:
    """What a series of the proxy's carries: nine labels, of which two tell the series apart."""
    return [*LABELS.items(), ("principal", f"tenant-{batch}-{number // 4}"), ("worker", str(number % 4))]


def request_v1(batch: int) -> bytes:
    """A 1.0 request as Prometheus sends it: one sample for each of SERIES series."""
    request = WriteRequest()
    for number in range(SERIES):
        one = request.timeseries.add()
        for name, value in labels(batch, number):
            one.labels.add(name=name, value=value)
        one.samples.add(value=number * 1000.0 + batch, timestamp=T0_MS + batch)
    return compress(request.SerializeToString())


def request_v2(batch: int) -> bytes:
    """The same in 2.0, with metadata and start timestamps."""
    request = RequestV2(symbols=[""])
    known = {"": 0}
    for number in range(SERIES):
        one = request.timeseries.add()
        for text in (text for pair in labels(batch, number) for text in pair):
            if text not in known:
                known[text] = len(known)
                request.symbols.append(text)
            one.labels_refs.append(known[text])
        one.samples.add(value=number * 1000.0 + batch, timestamp=T0_MS + batch, start_timestamp=T0_MS - 10**6)
        one.metadata.type = 1
    return compress(request.SerializeToString())


def http_requests(version: int) -> list[bytes]:
    """Whole HTTP requests, with other series in each."""
    bodies = map(request_v1 if version == 1 else request_v2, range(BATCHES))
    head = (
        "POST /api/v1/write HTTP/1.1\r\nHost: x\r\nContent-Encoding: snappy\r\n"
        "Content-Type: {}\r\nContent-Length: {}\r\n\r\n"
    )
    return [head.format(CONTENT_TYPES[version], len(body)).encode() + body for body in bodies]


class Load:
    """Threads that send for some seconds."""

    def __init__(self, address: tuple[str, int], requests: list[bytes]) -> None:
        self._address = address
        self._requests = requests
        self.latencies_s: list[float] = []
        self._until = 0.0

    def run(self, seconds: float) -> float:
        """Returns how long it took, in seconds."""
        began_at = time.perf_counter()
        self._until = began_at + seconds
        threads = [threading.Thread(target=self._send, args=(number,)) for number in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began_at

    def _send(self, turn: int) -> None:
        with socket.create_connection(self._address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (began_at := time.perf_counter()) < self._until:
                turn += 1
                connection.sendall(self._requests[turn % BATCHES])
                answer = connection.recv(4096)
                if not answer.startswith(b"HTTP/1.1 204"):
                    raise RuntimeError(f"not accepted: {answer[:200]!r}")
                self.latencies_s.append(time.perf_counter() - began_at)


def cpu_s(process_id: int) -> float:
    """The CPU time of a process, in seconds."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def measured(version: int, address: tuple[str, int], process_id: int, seconds: float) -> Figures:
    """A second to get warm, then the run."""
    requests = http_requests(version)
    Load(address, requests).run(1.0)
    load = Load(address, requests)
    cpu_before = cpu_s(process_id)
    took_s = load.run(seconds)
    cpu = cpu_s(process_id) - cpu_before
    latencies = sorted(load.latencies_s)
    samples = len(latencies) * SERIES
    return Figures(
        version=version,
        samples=samples,
        per_second=samples / took_s,
        per_core=samples / cpu,
        p50_ms=latencies[len(latencies) // 2] * 1000,
        p99_ms=latencies[len(latencies) * 99 // 100] * 1000,
    )


@contextlib.contextmanager
def receiver(directory: Path) -> Iterator[tuple[tuple[str, int], int]]:
    """The receiver as an operator starts it, but for its ports and its directory."""
    config = directory / "receiver.toml"
    config.write_text(
        f'[listen]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[spool]\ndirectory = "{directory / "spool"}"\n'
    )
    process = ReceiverProcess(config)
    try:
        host, _, port = process.write.rpartition(":")
        yield (host, int(port)), process.process.pid
    finally:
        process.stop()


def run(seconds: float, rounds: int, tell: Callable[[Figures], None]) -> list[Figures]:
    """All runs; each in a new directory."""
    found = []
    for _ in range(rounds):
        for version in (1, 2):
            with tempfile.TemporaryDirectory() as directory, receiver(Path(directory)) as (address, process_id):
                found.append(measured(version, address, process_id, seconds))
            tell(found[-1])
    return found


def print_figures(one: Figures) -> None:
    """A line for people."""
    print(
        f"receiver {one.version}.0  {one.per_core:11,.0f} samples/s per core  {one.per_second:11,.0f} samples/s"
        f"  p50 {one.p50_ms:6.1f} ms  p99 {one.p99_ms:6.1f} ms",
        flush=True,
    )


def main() -> None:
    """Measure and print; --json for a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    found = run(options.seconds, options.rounds, print_figures)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
