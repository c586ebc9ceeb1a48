"""What a flood of TLS handshakes does to relays: how long their echoes take under it, and without.

The flood opens connections at a steady rate, makes a full handshake (TLS 1.3, ECDSA) on each and resets it. Meanwhile a
few connections, relayed before it began, send small messages with pauses. One forwarder has all of both. `no proxy`:
the echoes pass this proxy by while it is flooded; what grows then is what load and proxy take from each other's CPUs.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.console import print_status
from local.ports import free_port

from tests.bench import generator
from tests.bench.contenders import Java, Straight
from tests.bench.figures import figure, ratio, text
from tests.bench.generator import Broker, Load
from tests.bench.processes import cpu_seconds
from tests.e2e.lab.certificates import Authority, Pair
from tests.e2e.lab.listeners import ManyListenersCluster

RATE = 1000
CONNECTIONS = 8
INTERVAL_MS = 20
WINDOW_S = 5.0
FLOODS: Mapping[str, int] = {"none": 0, "from 16 addresses": 16, "from 1 address": 1}
"""From how many addresses each comes."""
RELAYS: Mapping[str, str] = {"plain": "", "TLS": "full"}
_OURS = "pulsar-trio-proxy, 1 forwarder"
_WARM_UP_S = 1.0
_SETTLE_S = 0.5
_JAVA_WARM_UP_S = 15.0


@dataclass(frozen=True)
class Target:
    """Where echoes and the flood connect to."""

    label: str
    ports: Mapping[str, int]
    """Of each kind of relay."""
    flooded_port: int
    pid: int


@dataclass(frozen=True)
class Sample:
    """Waits of echoes in a window, handshakes of the flood a second, and the share of one CPU that the proxy used."""

    p50_us: float
    p99_us: float
    handshakes: float = 0.0
    failed: float = 0.0
    cpu: float = 0.0


Samples = dict[tuple[str, str, str], list[Sample]]
"""By target, kind of relay, flood."""


@contextmanager
def _flooding(program: Path, port: int, addresses: int) -> Iterator[Load | None]:
    if not addresses:
        yield None
        return
    with generator.load(program, "flood", port=port, tls="full", addresses=addresses, rate=RATE) as flood:
        yield flood


def _sample(program: Path, broker: Broker, target: Target, relay: str, addresses: int) -> Sample:
    port = target.ports[relay]
    options = {"port": port, "target": broker.address, "tls": RELAYS[relay], "connections": CONNECTIONS}
    options |= {"interval": f"{INTERVAL_MS}ms", "warm_up": f"{_WARM_UP_S}s", "window": f"{WINDOW_S}s"}
    with (
        generator.load(program, "echo", **options) as echo,
        _flooding(program, target.flooded_port, addresses) as flood,
    ):
        if flood is not None:
            time.sleep(_SETTLE_S)
            flood.run_next_step()
        before = cpu_seconds(target.pid)
        window = echo.measure()
        cpu = (cpu_seconds(target.pid) - before) / window.seconds
        report = flood.take_report() if flood is not None else {}
    return Sample(window.p50_us, window.p99_us, report.get("done", 0.0), report.get("failed", 0.0), cpu)


def start_ours(stack: ExitStack, broker: Broker, pair: Pair) -> Target:
    """Start this proxy with one forwarder and two listeners, one of them with TLS."""
    cluster = ManyListenersCluster(
        {"cluster": {"forwarders": 1}, "brokers": {"service_url": broker.url}},
        {"tls": {"certificate": pair.certificate, "key": pair.key}},
    )
    stack.enter_context(cluster)
    ports = {"plain": cluster.port, "TLS": cluster.ports[0]}
    return Target(_OURS, ports, cluster.ports[0], cluster.pid)


def start_java(stack: ExitStack, program: Path, broker: Broker, pair: Pair, directory: Path) -> Target:
    """Start the Java proxy with a plain port and one with TLS, and warm it up."""
    java = Java(broker, directory, pair)
    plain_port = free_port(avoid=(java.port,))
    java.more_settings = {"servicePort": str(plain_port)}
    stack.callback(java.stop)
    print_status(f"Starting {java.label}")
    java.start()
    assert java.pid is not None
    target = Target(java.label, {"plain": plain_port, "TLS": java.port}, java.port, java.pid)
    for program_name, relay in (("echo", "plain"), ("echo", "TLS"), ("connect", "TLS")):
        options = {"port": target.ports[relay], "target": broker.address, "tls": RELAYS[relay], "connections": 16}
        print_status(f"Warming up: {java.label}, {program_name}, {relay}")
        with generator.load(program, program_name, warm_up=f"{_JAVA_WARM_UP_S}s", window="0s", **options) as load:
            load.measure()
    return target


def measure(rounds: int, *, with_java: bool) -> Samples:
    """Return what each target's relays waited, by the flood."""
    samples: Samples = {}
    program = generator.build()
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        directory = Path(name)
        pair = Authority(directory, "flood").server("flooded")
        broker = stack.enter_context(generator.broker(program, directory / "broker.log"))
        ours = start_ours(stack, broker, pair)
        straight = Target(Straight.label, {"plain": broker.port}, ours.flooded_port, ours.pid)
        targets = [ours, straight]
        if with_java:
            targets.append(start_java(stack, program, broker, pair, directory))
        for turn in range(rounds):
            for target in targets:
                for relay in target.ports:
                    for flood, addresses in FLOODS.items():
                        print_status(f"Round {turn + 1} of {rounds}: {target.label}, {relay}, flood {flood}")
                        sample = _sample(program, broker, target, relay, addresses)
                        samples.setdefault((target.label, relay, flood), []).append(sample)
                        print_status.line(f"{target.label}, {relay}, flood {flood}: {sample}")
    return samples


def table(samples: Samples) -> str:
    """The results as Markdown: medians over the rounds, in brackets their range; factors are of equal rounds."""
    lines = [
        "| relays of | relay | flood | handshakes a second | CPUs of the proxy | p50, µs | p99, µs | p99 / without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (label, relay, flood), several in samples.items():
        without = [one.p99_us for one in samples[label, relay, next(iter(FLOODS))]]
        p99 = [one.p99_us for one in several]
        factor = ratio(p99, without) if FLOODS[flood] else None
        columns: Sequence[Sequence[float]] = (
            [one.handshakes for one in several] if FLOODS[flood] else [],
            [one.cpu for one in several],
            [one.p50_us for one in several],
            p99,
        )
        cells = [label, relay, flood, *(text(figure(column)) for column in columns), text(factor)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
