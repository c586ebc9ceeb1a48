"""How much memory and CPU time the cluster needs: at rest, for each process, and for 1,000 connections of each kind.

Two figures for each: what the processes' pages are (PSS), and, where the memory controller of cgroups v1 is mounted and
writable, what a cgroup is charged, which has the kernel's part in it (sockets, pipes, descriptors). The second decides
when a container is ended. CPU time is that of all processes of the cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from local.console import print_status

from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandLookupTopicResponse
from tests.bench.processes import cpu_seconds, pss_bytes
from tests.e2e.lab.certificates import Authority
from tests.e2e.lab.cluster import HOST, ProxyCluster, Tables
from tests.e2e.lab.fakes import LookupBroker
from tests.e2e.lab.processes import children, memory_kib
from tests.e2e.lab.schema import Command
from tests.e2e.lab.wire import WireClient, frame

MIB = 1 << 20
CONNECTIONS = 1_000
SETTLE_S = 3.0
PINGS = 100
"""What goes to and fro in each relay, so that what a relay needs for bytes was needed once."""

KEEP_ALIVE_S = 30.0
"""How often Pulsar's clients ask on each connection whether the other side is there (keepAliveInterval)."""

ANSWERED = frozenset({BaseCommand.PING, BaseCommand.CONNECT, BaseCommand.LOOKUP})
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
DESCRIPTORS = 16_384


class EpollBroker(threading.Thread):
    """Serves thousands of connections from one epoll: LookupBroker's answers to ANSWERED, none to other commands."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._behaviour = LookupBroker(
            {
                "response": CommandLookupTopicResponse.Connect,
                "broker_service_url": f"pulsar://{HOST}:{self.port}",
                "authoritative": True,
            }
        )
        self._poll = select.epoll()
        self._connections: dict[int, tuple[socket.socket, FrameDecoder]] = {}

    def run(self) -> None:
        self._poll.register(self._listener, select.EPOLLIN)
        while True:
            for number, _events in self._poll.poll():
                if number == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    self._connections[connection.fileno()] = connection, FrameDecoder(max_frame_bytes=1 << 20)
                    self._poll.register(connection, select.EPOLLIN)
                else:
                    self._read(number)

    def _read(self, number: int) -> None:
        connection, decoder = self._connections[number]
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(number)
            del self._connections[number]
            connection.close()
            return
        decoder.receive_data(data)
        while (received := decoder.next_frame()) is not None:
            command = Command.FromString(received.command)
            if command.type in ANSWERED:
                self._behaviour.reply_to(connection, command)


@dataclass(frozen=True)
class Memory:
    """The cluster's memory, in bytes; ``charged`` is 0 without a cgroup."""

    pages: int
    charged: int

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.pages - other.pages, self.charged - other.charged)

    def __str__(self) -> str:
        charged = f", {self.charged / MIB:6.1f} MiB charged" if self.charged else ""
        return f"{self.pages / MIB:6.1f} MiB of pages{charged}"


@contextlib.contextmanager
def cgroup() -> Iterator[Path | None]:
    """Make a cgroup for the cluster, with TCP's buffers counted; None if that is not possible."""
    path = CGROUP_V1 / f"pulsar-trio-proxy-sizing-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.kmem.tcp.limit_in_bytes").write_text(str(1 << 40))  # counted only with a limit
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


class Measured:
    """Meter of a cluster's memory."""

    def __init__(self, cluster: ProxyCluster, path: Path | None) -> None:
        self._cluster = cluster
        self._path = path

    def now(self) -> Memory:
        time.sleep(SETTLE_S)
        return Memory(pss_bytes(self._cluster.pid), self._charged())

    def _charged(self) -> int:
        if self._path is None:
            return 0
        # The kernel reclaims the page cache before it kills a process.
        stat = dict(line.split() for line in (self._path / "memory.stat").read_text().splitlines())
        files = int(stat["total_inactive_file"]) + int(stat["total_active_file"])
        counted = ("memory.usage_in_bytes", "memory.kmem.tcp.usage_in_bytes")
        return sum(int((self._path / name).read_text()) for name in counted) - files


@contextlib.contextmanager
def measured(tables: Tables) -> Iterator[tuple[ProxyCluster, Measured]]:
    with cgroup() as path:
        enter = f"echo $$ > {path}/cgroup.procs; " if path else ""
        cluster = ProxyCluster(tables, prefix=["sh", "-c", f'{enter}exec "$@"', "sh"], ready_timeout_s=90)
        with cluster:
            yield cluster, Measured(cluster, path)


def _tables(broker: EpollBroker, **cluster: object) -> Tables:
    return {
        "cluster": cluster,
        "brokers": {"service_url": f"pulsar://{HOST}:{broker.port}"},
        "limits": {"keep_alive_interval_ms": 600_000, "handshake_timeout_ms": 60_000, "drain_timeout_ms": 0},
    }


def _connections(open_one: Callable[[], WireClient], memory: Measured) -> Memory:
    """Measure what CONNECTIONS more need, after as many before: the first ones also fill permanent caches."""
    clients = []
    figures = []
    for _ in range(2):
        clients += [open_one() for _ in range(CONNECTIONS)]
        figures.append(memory.now())
    for client in clients:
        client.close()
    return figures[1] - figures[0]


def _relay(cluster: ProxyCluster, broker: EpollBroker, context: ssl.SSLContext | None) -> WireClient:
    client = _client(cluster, context)
    client.connect(proxy_to_broker_url=f"{HOST}:{broker.port}")
    client.send_bytes(frame(BaseCommand.PING, ping={}) * PINGS)
    for _ in range(PINGS):
        client.receive()
    return client


def _lookups(cluster: ProxyCluster, numbers: Iterator[int], context: ssl.SSLContext | None) -> WireClient:
    client = _client(cluster, context)
    client.connect()
    client.lookup(f"persistent://public/default/t{next(numbers)}")
    return client


def _client(cluster: ProxyCluster, context: ssl.SSLContext | None) -> WireClient:
    client = WireClient(cluster.port, timeout_s=60)
    if context is not None:
        client._socket = context.wrap_socket(client._socket, server_hostname="localhost")
    return client


def _at_rest(broker: EpollBroker) -> None:
    totals = {}
    for forwarders in (1, 2, 4):
        with measured(_tables(broker, forwarders=forwarders)) as (cluster, memory):
            totals[forwarders] = memory.now()
            print_status.line(f"at rest, {forwarders} forwarders:     {totals[forwarders]}")
            if forwarders == 1:
                for pid in (cluster.pid, *children(cluster.pid)):
                    name = (Path("/proc") / str(pid) / "comm").read_text().strip()
                    print_status.line(f"  {name:16} {memory_kib(pid) / 1024:.1f} MiB of its own")
    one = totals[4] - totals[2]
    print_status.line(f"a further forwarder:       {Memory(one.pages // 2, one.charged // 2)}")
    for workers in ("lookup_workers", "auth_workers"):
        with measured(_tables(broker, **{"forwarders": 1, workers: 3})) as (_, memory):
            one = memory.now() - totals[1]
            print_status.line(f"a further {workers[:-8]} worker:   {Memory(one.pages // 2, one.charged // 2)}")


def _by_connections(broker: EpollBroker, directory: Path) -> None:
    plain = _tables(broker, forwarders=1)
    authority = Authority(directory, "sizing")
    pair = authority.server("server")
    with_tls: Tables = {**plain, "listener": {"tls": {"certificate": pair.certificate, "key": pair.key}}}
    context = ssl.create_default_context(cafile=authority.file)
    numbers = itertools.count()
    kinds = (
        ("plain relays", plain, lambda: _relay(cluster, broker, None)),
        ("relays with TLS to clients", with_tls, lambda: _relay(cluster, broker, context)),
        ("lookup connections", plain, lambda: _lookups(cluster, numbers, None)),
        ("lookup connections with TLS", with_tls, lambda: _lookups(cluster, numbers, context)),
    )
    for name, tables, open_one in kinds:
        with measured(tables) as (cluster, memory):
            print_status.line(f"1,000 {name}: {_connections(open_one, memory)}")


def _keep_alive(clients: list[WireClient]) -> None:
    """Exchange one PING on each connection, evenly spread over a real client's interval."""
    begun_at = time.monotonic()
    for index, client in enumerate(clients):
        time.sleep(max(0.0, begun_at + KEEP_ALIVE_S * index / len(clients) - time.monotonic()))
        client.ping()
    time.sleep(max(0.0, begun_at + KEEP_ALIVE_S - time.monotonic()))


def _cpu_by_connections(broker: EpollBroker, directory: Path) -> None:
    """Measure the CPU time for opening CONNECTIONS and for keeping them open, beyond the cluster's at rest."""
    plain = _tables(broker, forwarders=1)
    authority = Authority(directory, "cpu")
    pair = authority.server("server")
    with_tls: Tables = {**plain, "listener": {"tls": {"certificate": pair.certificate, "key": pair.key}}}
    context = ssl.create_default_context(cafile=authority.file)
    numbers = itertools.count()

    def relay(tls: ssl.SSLContext | None) -> WireClient:
        client = _client(cluster, tls)
        client.connect(proxy_to_broker_url=f"{HOST}:{broker.port}")
        return client

    kinds: tuple[tuple[str, Tables, Callable[[], WireClient]], ...] = (
        ("plain relays", plain, lambda: relay(None)),
        ("relays with TLS to clients", with_tls, lambda: relay(context)),
        ("lookup connections", plain, lambda: _lookups(cluster, numbers, None)),
    )
    for name, tables, open_one in kinds:
        cluster = ProxyCluster(tables, ready_timeout_s=90)
        with cluster:
            time.sleep(SETTLE_S)
            clocks = [cpu_seconds(cluster.pid)]
            time.sleep(KEEP_ALIVE_S)
            clocks.append(cpu_seconds(cluster.pid))
            clients = [open_one() for _ in range(CONNECTIONS)]
            clocks.append(cpu_seconds(cluster.pid))
            _keep_alive(clients)
            clocks.append(cpu_seconds(cluster.pid))
            for client in clients:
                client.close()
        rest, opening, keeping = (after - before for before, after in itertools.pairwise(clocks))
        print_status.line(
            f"1,000 {name}: {opening:.2f} s of CPU time to open, "
            f"{100 * (keeping - rest) / KEEP_ALIVE_S:.2f} % of a CPU to keep with a PING every {KEEP_ALIVE_S:.0f} s "
            f"(at rest {100 * rest / KEEP_ALIVE_S:.2f} %)"
        )


def run() -> None:
    """Measure, and print."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    broker = EpollBroker()
    broker.start()
    with tempfile.TemporaryDirectory(prefix="sizing-") as name:
        _at_rest(broker)
        _by_connections(broker, Path(name))
        _cpu_by_connections(broker, Path(name))
