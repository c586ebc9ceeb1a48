"""How long a producer waits for its acknowledgement, at half of the rate that saturates: a real broker, Pulsar's tool.

`pulsar-perf` sends messages of 1 KiB, each in a frame of its own, on one connection. What saturates is measured without
a proxy. Latencies are those of its histogram, over the whole of a window.

What the tool reports as its rate includes its warm-up. So the proxy's CPU time is measured between two points of the
window, and divided by the bytes that the broker has received between them.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from local.console import print_status
from local.distribution import pulsar_home
from local.process import OwnedProcess
from local.standalone import BrokerOptions, Standalone

from tests.bench.contenders import Contender, Java, Ours, Straight
from tests.bench.figures import figure, text
from tests.bench.generator import BenchError, Broker
from tests.bench.processes import cpu_seconds
from tests.bench.tcp_diag import received_bytes

MESSAGE_BYTES = 1024
WARM_UP_S = 10
WINDOW_S = 20
SATURATING_RATE = 1_000_000
PERCENTILES = ("med", "99pct", "99.9pct")
_CONTENDERS: Sequence[type[Contender]] = (Straight, Ours, Java)
_TIMEOUT_S = 120.0
_STARTED_BYTES = 1_000_000
"""What the broker receives before the first point is set: more than of lookups and handshakes."""
_MARGIN_S = 1.0
"""How far the two points are within the tool's window, of which this process knows the beginning by those bytes."""
_POLL_S = 0.05
UNIT_BYTES = 100_000_000


@dataclass(frozen=True)
class Moved:
    """What the broker received between two points of a window, and the proxy's CPU time meanwhile; None: no proxy."""

    time_s: float
    received_bytes: int
    cpu_s: float | None

    @property
    def cpus(self) -> float | None:
        """The CPUs for UNIT_BYTES a second."""
        return None if self.cpu_s is None else self.cpu_s / self.received_bytes * UNIT_BYTES


@dataclass(frozen=True)
class Produced:
    """What a producer saw in one window: messages a second, as the tool reports them, and waits by PERCENTILES.

    ``cpus``: the proxy's for UNIT_BYTES a second; None: no proxy.
    """

    rate: float
    waits_ms: tuple[float, ...]
    cpus: float | None = None


def parse_produced(output: str) -> Produced:
    """Read the last lines that `pulsar-perf produce` prints. Raises BenchError."""
    rate = re.search(r"Aggregated throughput stats --- .*? --- ([\d.]+) msg/s", output)
    stats = r"Aggregated latency stats --- .*?"
    waits = [re.search(rf"{stats}\b{re.escape(one)}: +([\d.]+)", output) for one in PERCENTILES]
    found = [wait for wait in waits if wait is not None]
    if rate is None or len(found) < len(PERCENTILES):
        raise BenchError(f"pulsar-perf printed no figures:\n{output[-2000:]}")
    return Produced(float(rate[1]), tuple(float(wait[1]) for wait in found))


def _produce(contender: Contender, rate: int, directory: Path) -> Produced:
    """Let the tool send for WARM_UP_S and WINDOW_S."""
    command = [
        *(str(pulsar_home() / "bin" / "pulsar-perf"), "produce", "latency"),
        *("--service-url", f"pulsar://127.0.0.1:{contender.port}", "--rate", str(rate), "--size", str(MESSAGE_BYTES)),
        *("--disable-batching", "--max-outstanding", "1000", "--stats-interval-seconds", "1000"),
        *("--warmup-time", str(WARM_UP_S), "--test-duration", str(WARM_UP_S + WINDOW_S)),
    ]
    environment = {"PULSAR_LOG_DIR": str(directory), "PULSAR_MEM": "-Xms256m -Xmx256m", "PATH": "/usr/bin:/bin"}
    log = directory / f"perf-{time.monotonic_ns()}.log"
    tool = OwnedProcess(command, log=log, env=environment)
    try:
        moved = _measure_moved(tool, contender)
        tool.wait(_TIMEOUT_S)
    finally:
        tool.kill()
    produced = parse_produced(log.read_text(errors="replace"))
    print_status.line(f"{contender.label}: {moved.received_bytes / moved.time_s / 1e6:.1f} MB/s reached the broker")
    return replace(produced, cpus=moved.cpus)


def _measure_moved(tool: OwnedProcess, contender: Contender) -> Moved:
    """Measure between two points of the tool's window. Raises BenchError if it ends before the second one."""
    port, pid = contender.broker.port, contender.pid

    def point() -> tuple[float, int, float]:
        return time.monotonic(), received_bytes(port), 0.0 if pid is None else cpu_seconds(pid)

    def wait(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not until():
            if tool.exit_code() is not None or time.monotonic() > deadline:
                raise BenchError(f"pulsar-perf did not send as long as it should:\n{tool.log_tail()}")
            time.sleep(_POLL_S)

    at_first = received_bytes(port)
    wait(lambda: received_bytes(port) >= at_first + _STARTED_BYTES)
    started_at = time.monotonic()
    wait(lambda: time.monotonic() >= started_at + WARM_UP_S + _MARGIN_S)
    begin = point()
    wait(lambda: time.monotonic() >= started_at + WARM_UP_S + WINDOW_S - _MARGIN_S)
    end = point()
    time_s, received, cpu_s = (after - before for before, after in zip(begin, end, strict=True))
    return Moved(time_s, int(received), None if pid is None else cpu_s)


@contextmanager
def _broker(directory: Path) -> Iterator[Broker]:
    options = BrokerOptions(jvm_options=("-XX:TieredStopAtLevel=4",), memory="-Xms1g -Xmx1g -XX:MaxDirectMemorySize=1g")
    with Standalone(pulsar_home(), directory / "broker", options=options) as standalone:
        assert standalone.pid is not None
        yield Broker(standalone.broker_port, standalone.pid)


@contextmanager
def _started(kind: type[Contender], broker: Broker, directory: Path) -> Iterator[Contender]:
    contender = kind(broker, directory)
    contender.start()
    try:
        yield contender
    finally:
        contender.stop()


def measure(rounds: int) -> tuple[int, dict[str, list[Produced]]]:
    """Return the rate, in messages a second, and what was produced through each contender, by its label."""
    found: dict[str, list[Produced]] = {kind.label: [] for kind in _CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        with _broker(directory) as broker:
            straight = Straight(broker, directory)
            rate = int(_produce(straight, SATURATING_RATE, directory).rate / 2)
            print_status.line(f"half of what saturates: {rate:,} messages a second")
            for number in range(rounds):
                turn = number % len(_CONTENDERS)
                for kind in (*_CONTENDERS[turn:], *_CONTENDERS[:turn]):
                    with _started(kind, broker, directory) as contender:
                        produced = _produce(contender, rate, directory)
                    found[kind.label].append(produced)
                    print_status.line(f"{kind.label}: {produced}")
    return rate, found


def table(rate: int, found: dict[str, list[Produced]]) -> str:
    """The results as Markdown: the median over the rounds, and their range in brackets."""
    lines = [
        f"{rate:,} messages a second were asked for, half of what the tool reports without limit and proxy:",
        "",
        f"| | p50, ms | p99, ms | p99.9, ms | CPUs for {UNIT_BYTES / 1e6:.0f} MB/s |",
        "|---|---|---|---|---|",
    ]
    for label, several in found.items():
        waits = (figure([one.waits_ms[place] for one in several]) for place in range(len(PERCENTILES)))
        cpus = figure([one.cpus for one in several if one.cpus is not None])
        lines.append("| " + " | ".join([label, *map(text, (*waits, cpus))]) + " |")
    return "\n".join(lines)
