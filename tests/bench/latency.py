"""How long a producer waits for its acknowledgement, at half of the rate that saturates: a real broker, Pulsar's tool.

`pulsar-perf` sends messages of 1 KiB, each in a frame of its own, on one connection. What saturates is measured without
a proxy. Latencies are those of its histogram, over the whole of a window.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.console import print_status
from local.distribution import pulsar_home
from local.standalone import BrokerOptions, Standalone

from tests.bench.contenders import Contender, Java, Ours, Straight
from tests.bench.figures import figure, text
from tests.bench.generator import BenchError, Broker

MESSAGE_BYTES = 1024
WARM_UP_S = 10
WINDOW_S = 20
SATURATING_RATE = 1_000_000
PERCENTILES = ("med", "99pct", "99.9pct")
_CONTENDERS: Sequence[type[Contender]] = (Straight, Ours, Java)
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Produced:
    """What a producer saw in one window: messages a second, as the tool reports them, and waits by PERCENTILES."""

    rate: float
    waits_ms: tuple[float, ...]


def parse_produced(output: str) -> Produced:
    """Read the last lines that `pulsar-perf produce` prints. Raises BenchError."""
    rate = re.search(r"Aggregated throughput stats --- .*? --- ([\d.]+) msg/s", output)
    stats = r"Aggregated latency stats --- .*?"
    waits = [re.search(rf"{stats}\b{re.escape(one)}: +([\d.]+)", output) for one in PERCENTILES]
    found = [wait for wait in waits if wait is not None]
    if rate is None or len(found) < len(PERCENTILES):
        raise BenchError(f"pulsar-perf printed no figures:\n{output[-2000:]}")
    return Produced(float(rate[1]), tuple(float(wait[1]) for wait in found))


def _produce(port: int, rate: int, directory: Path) -> Produced:
    """Let the tool send for WARM_UP_S and WINDOW_S."""
    command = [
        *(str(pulsar_home() / "bin" / "pulsar-perf"), "produce", "latency"),
        *("--service-url", f"pulsar://127.0.0.1:{port}", "--rate", str(rate), "--size", str(MESSAGE_BYTES)),
        *("--disable-batching", "--max-outstanding", "1000", "--stats-interval-seconds", "1000"),
        *("--warmup-time", str(WARM_UP_S), "--test-duration", str(WARM_UP_S + WINDOW_S)),
    ]
    environment = {"PULSAR_LOG_DIR": str(directory), "PULSAR_MEM": "-Xms256m -Xmx256m", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return parse_produced(result.stdout + result.stderr)


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
            rate = int(_produce(broker.port, SATURATING_RATE, directory).rate / 2)
            print_status.line(f"half of what saturates: {rate:,} messages a second")
            for number in range(rounds):
                turn = number % len(_CONTENDERS)
                for kind in (*_CONTENDERS[turn:], *_CONTENDERS[:turn]):
                    with _started(kind, broker, directory) as contender:
                        produced = _produce(contender.port, rate, directory)
                    found[kind.label].append(produced)
                    print_status.line(f"{kind.label}: {produced}")
    return rate, found


def table(rate: int, found: dict[str, list[Produced]]) -> str:
    """The results as Markdown: the median over the rounds, and their range in brackets."""
    lines = [
        f"{rate:,} messages a second were asked for, half of what the tool reports without limit and proxy:",
        "",
        "| | p50, ms | p99, ms | p99.9, ms |",
        "|---|---|---|---|",
    ]
    for label, several in found.items():
        waits = (figure([one.waits_ms[place] for one in several]) for place in range(len(PERCENTILES)))
        lines.append("| " + " | ".join([label, *map(text, waits)]) + " |")
    return "\n".join(lines)
