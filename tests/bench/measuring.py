"""Rounds of measurements. In each round every row is measured with every contender, one right after the other.

What disturbs the machine for a while disturbs all of them, so ratios within a round say more than figures do.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from local.console import print_status
from trustme import KeyType

from tests.bench import generator
from tests.bench.contenders import Contender
from tests.bench.generator import BenchError, Broker
from tests.bench.http_contenders import http_contenders
from tests.bench.processes import cpu_seconds, established, pss_bytes
from tests.bench.rows import (
    GIB,
    HTTP_WARM_UP_BYTES,
    IDLE_RELAYS,
    MICRO,
    SHARED_CLIENTS,
    TLS_WARM_UPS,
    TLS_WINDOW_MAX_S,
    Row,
)
from tests.e2e.lab.certificates import Authority, Pair

_SETTLE_S = 0.1  # what a proxy still does when a load has ended is part of the cost, say the ends of connections
_MEMORY_SETTLE_S = 1.0
_LEAVE_TIMEOUT_S = 30.0
_POLL_S = 0.2
_WARM_UP_CONNECTIONS = {"echo": 32, "bulk": 4, "bulk-down": 4, "connect": 16, "reconnect": 1000}
_WARM_UP_CONNECTIONS |= {"lookup": 16, "fresh": 16, "http-get": 32, "http-down": 2, "http-up": 2}
_WARM_UP_UNDER_WAY = 64
_LOOKUPS = frozenset({"lookup", "fresh"})


@dataclass(frozen=True)
class Sample:
    """One measurement; `per operation` means per GiB for bulk."""

    rate: float
    cost: float
    """CPU of the whole proxy per operation: µs; seconds for bulk."""
    generator_cost: float
    """The same of load and broker."""
    load_busy: float
    """Share of one CPU that the load itself used."""
    p50_us: float
    p99_us: float
    seconds: float = 0.0
    retries: int = 0
    """Connections that failed and were tried again."""
    grown_bytes: int = 0
    """By how much the proxy's memory has grown: its connections and what else the load left."""
    resumed: float = 0.0
    """Share of the connections whose tickets were taken."""
    cipher: str = ""


@dataclass(frozen=True)
class Memory:
    """What idle relays take."""

    process_bytes: int
    bytes_per_relay: float


@dataclass
class Results:
    """Samples by row and contender, one for each round."""

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    memory: dict[str, list[Memory]] = field(default_factory=dict)
    broker_connections: dict[str, int] = field(default_factory=dict)
    """While SHARED_CLIENTS clients are in lookup mode."""


@dataclass(frozen=True)
class Bench:
    """Where measurements are made."""

    program: Path
    broker: Broker
    directory: Path
    window_s: float
    warm_ups: Mapping[str, float] = field(default_factory=dict)
    """By programs: for how many times a contender's usual time they run before anything counts."""
    certificate: Pair | None = None
    """With which proxies take connections, in TLS then."""

    def measure(self, row: Row, contender: Contender) -> Sample:
        """One sample."""
        options = {
            "port": contender.port,
            "target": self.broker.address,
            "connections": row.connections,
            "under_way": row.under_way,
            "frame": row.frame_bytes,
            "token": contender.token,
            "tls": row.handshake,
        }
        # Without a proxy it only shows what the generator can do, which is no close call.
        options["window"] = f"{self.window_s if contender.pid is not None else self.window_s / 2}s"
        if row.is_single:
            options |= {"warm_up": "0s", "window": "0s"}
        memory_before, connections_before = self._proxy_memory(row, contender), established(self.broker.port)
        with self._explained(contender), generator.load(self.program, row.program, **options) as load:
            proxy_before, broker_before = self._proxy_cpu(contender), cpu_seconds(self.broker.pid)
            window = load.measure()
            time.sleep(_SETTLE_S)
            proxy_s = self._proxy_cpu(contender) - proxy_before
            generator_s = cpu_seconds(self.broker.pid) - broker_before + window.load_cpu_s
            grown_bytes = self._proxy_memory(row, contender) - memory_before
        if row.is_single:
            self._await_leaving(connections_before)
        count = window.bytes / GIB if row.in_bytes else window.operations
        unit = 1 if row.in_bytes else MICRO
        return Sample(
            rate=count / window.seconds,
            cost=proxy_s / count * unit,
            generator_cost=generator_s / count * unit,
            load_busy=window.load_cpu_s / window.seconds,
            p50_us=window.p50_us,
            p99_us=window.p99_us,
            seconds=window.seconds,
            retries=window.retries,
            grown_bytes=grown_bytes,
            resumed=window.resumed / window.operations,
            cipher=window.cipher,
        )

    def warm_up(self, contender: Contender, programs: set[str]) -> None:
        """Run each kind of load for a while, so that compilers and caches are done with it."""
        for program in programs:
            if program in _LOOKUPS and not contender.answers_lookups:
                continue
            print_status(f"Warming up: {contender.label}, {program}")
            options = {"port": contender.port, "target": self.broker.address, "window": "0s"}
            options |= {"connections": _WARM_UP_CONNECTIONS[program], "under_way": _WARM_UP_UNDER_WAY}
            options |= {"warm_up": f"{contender.warm_up_s * self.warm_ups.get(program, 1)}s", "token": contender.token}
            options |= {"tls": "full" if self.certificate else ""}
            if program in HTTP_WARM_UP_BYTES:
                options["frame"] = HTTP_WARM_UP_BYTES[program]
            with self._explained(contender), generator.load(self.program, program, **options) as load:
                load.measure()

    def memory(self, kind: type[Contender]) -> Memory:
        """What idle relays take in a contender of their own: one that has served more before has room to spare."""
        with self.running((kind,)) as (contender,):
            assert contender.pid is not None
            options = {"port": contender.port, "target": self.broker.address}
            with self._explained(contender):
                with generator.load(self.program, "connect", connections=16, warm_up="0.3s", window="0s", **options):
                    time.sleep(_MEMORY_SETTLE_S)
                before = pss_bytes(contender.pid)
                with generator.load(self.program, "idle", connections=IDLE_RELAYS, **options) as load:
                    load.run_next_step()
                    time.sleep(_MEMORY_SETTLE_S)
                    grown = pss_bytes(contender.pid) - before
        return Memory(before, grown / IDLE_RELAYS)

    def broker_connections(self, kind: type[Contender]) -> int:
        """How many connections to the broker many clients use that have each done a lookup and are still there."""
        with self.running((kind,)) as (contender,), self._explained(contender):
            options = {"port": contender.port, "connections": SHARED_CLIENTS, "warm_up": "1ms"}
            with generator.load(self.program, "lookup", **options):
                return established(self.broker.port)

    @contextmanager
    def running(self, kinds: Sequence[type[Contender]]) -> Iterator[list[Contender]]:
        """Start contenders; they end when the block is left."""
        with ExitStack() as stack:
            contenders = [kind(self.broker, self.directory, self.certificate) for kind in kinds]
            for contender in contenders:
                stack.callback(contender.stop)
                print_status(f"Starting {contender.label}")
                contender.start()
            yield contenders

    @staticmethod
    def _proxy_cpu(contender: Contender) -> float:
        return cpu_seconds(contender.pid) if contender.pid is not None else 0.0

    @staticmethod
    def _proxy_memory(row: Row, contender: Contender) -> int:
        return pss_bytes(contender.pid) if row.is_single and contender.pid is not None else 0

    def _await_leaving(self, connections: int) -> None:
        """Return when the broker has no more connections than these: thousands that end would burden what follows."""
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        while established(self.broker.port) > connections and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @staticmethod
    @contextmanager
    def _explained(contender: Contender) -> Iterator[None]:
        try:
            yield
        except BenchError as error:
            raise BenchError(f"{contender.label}: {error}\n{contender.log_tail()}") from None


def run_rounds(
    bench: Bench, kinds: Sequence[type[Contender]], rows: Sequence[Row], rounds: int, results: Results
) -> None:
    """Measure all rows; who comes first changes from row to row and from round to round."""
    programs = {row.program for row in rows}
    with bench.running(kinds) as contenders:
        for contender in contenders:
            if contender.pid is not None:
                print_status.line(f"{contender.label}: process {contender.pid}")
                bench.warm_up(contender, programs)
        for turn in range(rounds):
            for number, row in enumerate(rows):
                first = (turn + number) % len(contenders)
                for contender in contenders[first:] + contenders[:first]:
                    if row.program in _LOOKUPS and not contender.answers_lookups:
                        continue
                    print_status(f"Round {turn + 1} of {rounds}: {row.title}, {contender.label}")
                    sample = bench.measure(row, contender)
                    results.samples.setdefault((row.name, contender.name), []).append(sample)


def run_tls(bench: Bench, kinds: Sequence[type[Contender]], rows: Sequence[Row], rounds: int, results: Results) -> None:
    """Measure rows with TLS, each set of sides with proxies of its own."""
    authority = Authority(bench.directory, "tls")
    pairs = {kind.name: authority.server(kind.name, key_type=kind) for kind in KeyType}
    log = bench.directory / "broker-tls.log"
    with generator.broker(bench.program, log, pairs[KeyType.ECDSA.name], authority.file) as broker:
        bench = replace(bench, window_s=min(bench.window_s, TLS_WINDOW_MAX_S), warm_ups=TLS_WARM_UPS)
        for tls, group in itertools.groupby(rows, key=lambda row: row.tls):
            certificate = pairs[tls.client] if tls.client else None
            sides = replace(bench, broker=broker if tls.broker else bench.broker, certificate=certificate)
            run_rounds(sides, kinds, list(group), rounds, results)


def run_http(bench: Bench, names: Sequence[str], rows: Sequence[Row], rounds: int, results: Results) -> None:
    """Measure rows of HTTP, those with a token with proxies of their own."""
    log = bench.directory / "http-server.log"
    with generator.broker(bench.program, log, what="http-server") as web:
        bench = replace(bench, broker=replace(bench.broker, pid=web.pid, web_address=web.address))
        for token, group in itertools.groupby(rows, key=lambda row: row.token):
            run_rounds(bench, http_contenders(names, token=token), list(group), rounds, results)


def run_shared(bench: Bench, kinds: Sequence[type[Contender]], results: Results) -> None:
    """Count the connections to the broker that many clients share."""
    for kind in kinds:
        if kind.answers_lookups:
            print_status(f"{SHARED_CLIENTS} clients in lookup mode: {kind.label}")
            results.broker_connections[kind.name] = bench.broker_connections(kind)


def run_memory(bench: Bench, kinds: Sequence[type[Contender]], rounds: int, results: Results) -> None:
    """Measure what idle relays take."""
    for turn in range(rounds):
        for kind in kinds:
            print_status(f"Memory, {turn + 1} of {rounds}: {kind.label}")
            results.memory.setdefault(kind.name, []).append(bench.memory(kind))
