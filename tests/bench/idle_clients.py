"""The CPUs that idle clients need: relays of which nothing passes but keep-alives.

Pulsar's client and broker each send a PING every 30 s, so 10,000 clients exchange 667 a second. A fifth of the relays
with five times as many small messages each wakes the proxy as often, and needs no more descriptors than most machines
allow. What the proxy uses at rest is subtracted.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from local.console import print_status

from tests.bench import generator
from tests.bench.contenders import Java
from tests.bench.figures import figure, ratio, text
from tests.bench.flood import RELAYS, start_java, start_ours
from tests.bench.processes import cpu_seconds
from tests.e2e.lab.certificates import Authority

CLIENTS = 10_000
RELAYED = 2_000
KEEP_ALIVE_S = 30.0
EXCHANGES_EACH = 2
"""In that time on each connection: a PING of each side, with its PONG."""
INTERVAL_S = KEEP_ALIVE_S / EXCHANGES_EACH * RELAYED / CLIENTS
_WINDOW_S = 4 * INTERVAL_S
_REST_S = 6.0

Cores = dict[tuple[str, str], list[float]]
"""By kind of relay and proxy."""


def _cpus(pid: int, since: tuple[float, float]) -> float:
    return (cpu_seconds(pid) - since[1]) / (time.monotonic() - since[0])


def measure(rounds: int) -> Cores:
    """Return the CPUs that CLIENTS need, beyond those at rest."""
    cores: Cores = {}
    program = generator.build()
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        directory = Path(name)
        pair = Authority(directory, "idle").server("proxy")
        broker = stack.enter_context(generator.broker(program, directory / "broker.log"))
        targets = [start_ours(stack, broker, pair), start_java(stack, program, broker, pair, directory)]
        for turn in range(rounds):
            for relay, tls in RELAYS.items():
                for target in targets:
                    print_status(f"Round {turn + 1} of {rounds}: {target.label}, {relay}")
                    before = time.monotonic(), cpu_seconds(target.pid)
                    time.sleep(_REST_S)
                    rest = _cpus(target.pid, before)
                    options = {"port": target.ports[relay], "target": broker.address, "tls": tls, "warm_up": "0s"}
                    options |= {"connections": RELAYED, "interval": f"{INTERVAL_S}s", "window": f"{_WINDOW_S}s"}
                    with generator.load(program, "echo", **options) as load:
                        time.sleep(_REST_S)  # what opening them has left behind
                        before = time.monotonic(), cpu_seconds(target.pid)
                        load.measure()
                        used = _cpus(target.pid, before) - rest
                    cores.setdefault((relay, target.label), []).append(used)
                    print_status.line(f"{target.label}, {relay}: {used:.3f} CPUs (at rest {rest:.3f})")
    return cores


def table(cores: Cores) -> str:
    """The results as Markdown."""
    ours, java = (next(label for _, label in cores if (label == Java.label) is is_java) for is_java in (False, True))
    lines = [f"| CPUs for {CLIENTS:,} idle clients | {ours} | {java} | ours / Java |", "|---|---|---|---|"]
    for relay in RELAYS:
        of_ours, of_java = cores[relay, ours], cores[relay, java]
        cells = (figure(of_ours), figure(of_java), ratio(of_ours, of_java))
        lines.append(f"| {'plain' if relay == 'plain' else 'TLS to clients'} | {' | '.join(map(text, cells))} |")
    return "\n".join(lines)
