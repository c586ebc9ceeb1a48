"""What the proxy costs on the way to a real broker: the same load straight and through the cluster, interleaved.

Figures are medians of the rounds with their range; read the ratios, not the figures: the load comes from one Python
process on the same machine and is part of what is measured.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from local.cluster import Cluster
from local.distribution import pulsar_home
from local.ports import free_port
from local.standalone import Standalone

from tests.bench.load import Endpoint, connects, lookups, pings

ROUNDS = 5
_TICKS = os.sysconf("SC_CLK_TCK")

Load = Callable[[Endpoint], float]


def _run(load: Callable[..., object], **settings: int) -> Load:
    return lambda endpoint: float(trio.run(partial(load, endpoint, **settings)))  # type: ignore[arg-type]


# Name, load, how many operations, and whether it goes through a relay or stays in lookup mode.
MEASUREMENTS: tuple[tuple[str, Load, int, bool], ...] = (
    ("PING round trip, 1 relay", _run(pings, connections=1, count=3000), 3000, True),
    ("PING round trip, 32 relays", _run(pings, connections=32, count=6400), 6400, True),
    ("connect, relay, 16 at once", _run(connects, at_once=16, count=800), 800, True),
    ("connect, lookup mode, 16 at once", _run(connects, at_once=16, count=800), 800, False),
    ("lookup, 64 under way", _run(lookups, window=64, count=4000), 4000, False),
)


def cpu_seconds(root: int) -> float:
    """CPU time of a process and all its descendants that still live."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += used.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total


def _supervisor(runtime_dir: Path) -> int:
    """The supervisor's process: the one that holds the runtime directory's lock."""
    inode = (runtime_dir / "supervisor.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[5].endswith(f":{inode}"):
            return int(fields[4])
    raise RuntimeError("no supervisor holds the lock")


def measure(broker: Standalone, cluster: Cluster, supervisor: int) -> None:
    """Measure everything, print a line each."""
    host = "127.0.0.1"
    target = broker.service_url.removeprefix("pulsar://")
    proxy_port = int(cluster.service_url.rpartition(":")[2])
    print(f"{'':34} {'straight/s':>12} {'proxy/s':>12} {'ratio (range)':>20} {'proxy CPU µs each':>18}")
    for name, load, count, relayed in MEASUREMENTS:
        straight, through, cpu = [], [], []
        for _ in range(ROUNDS):
            straight.append(load(Endpoint(host, broker.broker_port)))
            before = cpu_seconds(supervisor)
            through.append(load(Endpoint(host, proxy_port, target if relayed else "")))
            cpu.append((cpu_seconds(supervisor) - before) / count * 1e6)
        ratios = sorted(proxy / direct for proxy, direct in zip(through, straight, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        rates = f"{statistics.median(straight):12.0f} {statistics.median(through):12.0f}"
        print(f"{name:34} {rates} {spread:>20} {statistics.median(cpu):18.0f}", flush=True)


def main() -> int:
    """Start a broker and a cluster, measure, end both."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        work = Path(directory)
        (work / "cluster").mkdir()
        with Standalone(pulsar_home(), work / "broker") as broker:
            command = Path(sys.executable).with_name("pulsar-trio-proxy")
            ports = {"port": free_port(), "admin_port": free_port()}
            cluster = Cluster(command, work / "cluster", broker.service_url, **ports)
            cluster.start()
            try:
                measure(broker, cluster, _supervisor(work / "cluster" / "run"))
            finally:
                cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
