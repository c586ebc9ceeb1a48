"""Relays over real sockets and pipes: lanes between two far ends, and forwarders that follow one another."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio
import trio.testing
from prometheus_client import CollectorRegistry

from proto.rpc_pb2 import RelayLeftBehind, StoredRelay
from proxy.common.deny_list import DenyList
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime.broker_reauthentication import (
    BeginExchange,
    BrokerReauthenticationFactory,
    BrokerReauthenticationMetrics,
)
from proxy.forwarder.lifetime.metrics import ReauthenticationMetrics
from proxy.forwarder.lifetime.session_factory import SessionOptions
from proxy.forwarder.lifetime.terms import (
    ReauthenticatorFactory,
    SessionTerms,
    reauthentication_unavailable,
)
from proxy.forwarder.relay import sockets as relay_sockets
from proxy.forwarder.relay.copy_pump import CopiedRelay
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.fd_store_client import FdStoreClient, InheritedRelay, RelayHandover
from proxy.forwarder.relay.manager import RelayCallbacks, RelayManager, RelayOptions
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import Relay, RelayStart, SplicedRelay
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.credentials import NoCredentials
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.runtime.shared.relay_table import PIPE, TO_BROKER, TO_CLIENT, RelayTable, row
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot

DEFAULTS = RelayConfig()
PATIENCE_S = 60
SMALL_BUFFER = 16 * 1024


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def tcp_pair(*, buffer_bytes: int = 0) -> tuple[TcpStream, TcpStream]:
    """Two ends of a connection; with small buffers, a receiver that does not read is felt soon."""
    with socket.socket() as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one = socket.socket()
        if buffer_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        one.connect(listener.getsockname())
        other, _ = listener.accept()
    streams = []
    for sock in (one, other):
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, relay_sockets._TCP_NOTSENT_LOWAT, 16384)  # a peer that sends bit by bit
        sock.setblocking(False)
        streams.append(TcpStream(sock))
    return streams[0], streams[1]


def unblocked_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that is none of TCP."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    return pair


@dataclass
class Lane:
    """The far ends, and the two sockets that the proxy holds until a relay has them."""

    client: TcpStream
    broker: TcpStream
    our_client: TcpStream
    our_broker: TcpStream

    @classmethod
    def new(cls, *, buffer_bytes: int = 0) -> Lane:
        client, our_client = tcp_pair(buffer_bytes=buffer_bytes)
        our_broker, broker = tcp_pair(buffer_bytes=buffer_bytes)
        return cls(client, broker, our_client, our_broker)

    async def close(self) -> None:
        for stream in (self.client, self.broker, self.our_client, self.our_broker):
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def open_lane(*, buffer_bytes: int = 0) -> AsyncIterator[Lane]:
    """A lane, and its end."""
    lane = Lane.new(buffer_bytes=buffer_bytes)
    try:
        yield lane
    finally:
        await lane.close()


async def read(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    """So many bytes."""
    found = bytearray()
    with trio.fail_after(PATIENCE_S):
        while len(found) < size:
            data = await stream.receive_some(size - len(found))
            assert data, f"an early end, after {len(found)} bytes"
            found += data
    return bytes(found)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    """Everything up to the end."""
    found = bytearray()
    with trio.fail_after(PATIENCE_S):
        async for data in stream:
            found += data
    return bytes(found)


async def expect(stream: trio.abc.ReceiveStream, expected: bytes) -> None:
    """Read as many bytes as are expected; they must be these."""
    assert await read(stream, len(expected)) == expected


async def fill(stream: TcpStream, *, give_up_s: float = 0.1) -> int:
    """Send zeros until no more are taken; how many were."""
    sent = 0
    while True:
        with trio.move_on_after(give_up_s) as scope:
            await trio.lowlevel.wait_writable(stream.socket)
        if scope.cancelled_caught:
            return sent
        with contextlib.suppress(BlockingIOError):
            sent += stream.socket.send(bytes(65536))


async def send_random(stream: trio.abc.SendStream, size: int, portion_max: int, digest: hashlib._Hash) -> None:
    """Send so many random bytes in portions of all sizes, then the end."""
    left = size
    while left:
        data = os.urandom(min(left, random.choice([1, 100, 3000, 65536, portion_max])))
        left -= len(data)
        digest.update(data)
        await stream.send_all(data)
    assert isinstance(stream, trio.abc.HalfCloseableStream)
    await stream.send_eof()


async def digest_all(stream: trio.abc.ReceiveStream, portions: list[int], digest: hashlib._Hash) -> None:
    """Receive everything up to the end, in portions of these sizes."""
    while data := await stream.receive_some(random.choice(portions)):
        digest.update(data)


async def end_all(nursery: trio.Nursery) -> None:
    """End all tasks, so that what they used can be closed."""
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what the kernel or another task brings about."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 -- it may be the kernel's
            await trio.sleep(0.002)


def reset(stream: TcpStream) -> None:
    """Close with a reset instead of an end."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


def about_relay(**fields: Any) -> StoredRelay:
    """What the store knows of a relay."""
    known = {
        "client_address": "192.0.2.7:4000",
        "principal": "alice",
        "target": "b0:6650",
        "started_at_unix_ms": int(time.time() * 1000),
    }
    return StoredRelay(**(known | fields))


def disabled_fd_store() -> FdStoreClient:
    """A client as ``relay.crash_safe = false`` makes it."""
    with socket.socket() as unused:
        return FdStoreClient(unused, crash_safe=False)


def new_relays(
    nursery: trio.Nursery, on_end: Callable[[StoredRelay], None] = lambda _about: None, **options: Any
) -> RelayManager:
    """Relays that no store keeps."""
    return RelayManager(
        nursery,
        disabled_fd_store(),
        RelayHandover(),
        RelayCallbacks(lambda about, _why, *_bytes: on_end(about)),
        RelayOptions(**options),
    )


class CopiedRelays:
    """Starts relays that are not spliced, over real sockets; their far ends are closed with this."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._far_ends: list[TcpStream] = []

    def new(self, on_end: Callable[[StoredRelay], None] = lambda _about: None, **options: Any) -> RelayManager:
        """Relays that no store keeps, and that are moved from now on."""
        relays = new_relays(self._nursery, on_end, **options)
        relays._splices = False
        self._nursery.start_soon(relays._engine.run)
        return relays

    async def begin(
        self, relays: RelayManager, about: StoredRelay | None = None, *, buffer_bytes: int = 0, **start: Any
    ) -> tuple[TcpStream, TcpStream]:
        """Start a relay; its two far ends."""
        (client, our_client), (our_broker, broker) = (tcp_pair(buffer_bytes=buffer_bytes) for _ in range(2))
        self._far_ends += client, broker
        await relays.start_relay(
            RelayStart(our_client, our_broker, about or about_relay(), **({"config": DEFAULTS} | start))
        )
        return client, broker

    def close(self) -> None:
        self._nursery.cancel_scope.cancel()
        for stream in self._far_ends:
            stream.close_now()


def value(registry: CollectorRegistry, name: str, direction: str) -> float:
    """A relay metric's value."""
    found = registry.get_sample_value(name, {"direction": direction})
    assert found is not None
    return found


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@dataclass
class TlsLane:
    """A lane of which one side or both speak TLS: what the far ends and we say, and the TCP below."""

    lane: Lane
    client: TcpStream | TlsStream
    broker: TcpStream | TlsStream
    our_client: TcpStream | TlsStream
    our_broker: TcpStream | TlsStream

    async def begin(
        self,
        it: Forwarder,
        *,
        to_broker: bytes = b"",
        to_client: bytes = b"",
        session: SessionTerms | None = None,
    ) -> StoredRelay:
        about = about_relay()
        start = RelayStart(self.our_client, self.our_broker, about, it.config, to_broker, to_client, session)
        await it.relays.start_relay(start)
        return about


async def open_tls(lane: Lane, contexts: Contexts, sides: str) -> TlsLane:
    """Lead the handshakes of these sides: client, broker, both or plain; with TLS 1.2 as "both 1.2"."""
    sides, _, version = sides.partition(" ")
    server, client = contexts
    client.maximum_version = ssl.TLSVersion.TLSv1_2 if version else ssl.TLSVersion.MAXIMUM_SUPPORTED
    ends: dict[str, TcpStream | TlsStream] = {
        name: getattr(lane, name) for name in ("client", "our_client", "our_broker", "broker")
    }
    async with trio.open_nursery() as nursery:
        for side, dialling, accepting in (("client", "client", "our_client"), ("broker", "our_broker", "broker")):
            if sides in {side, "both"}:
                one = TlsStream(getattr(lane, accepting), server, server_side=True)
                other = TlsStream(getattr(lane, dialling), client, server_side=False, host="localhost")
                ends[accepting], ends[dialling] = one, other
                nursery.start_soon(one.handshake)
                nursery.start_soon(other.handshake)
    return TlsLane(lane, **ends)


class Engine:
    """An engine under test, which counts relays and knows their ends."""

    def __init__(self) -> None:
        self.table = RelayTable()
        self.pool = PipePool(lambda _made: None, lambda _closed: None, forwarders=1)
        self.real = RelayEngine(self.table, self.pool, self._over, lambda: True, lambda record: record.principal)
        self._ends: dict[int, trio.Event] = {}

    def _over(self, relay: Relay) -> None:
        assert not self.is_over(relay), "a relay ends once"
        self._ends[relay.record.id].set()

    def open(
        self,
        lane: Lane,
        *,
        to_broker: bytes = b"",
        to_client: bytes = b"",
        half_close_s: float = 60,
        principal: str = "alice",
    ) -> Relay:
        sockets = lane.our_client.socket.fileno(), lane.our_broker.socket.fileno()
        record = about_relay(id=self.table.allocate_relay_id(), principal=principal)
        relay = SplicedRelay(record, *sockets, half_close_s)
        self._ends[relay.record.id] = trio.Event()
        self.real.set_owner(relay)
        for direction, first in ((relay.to_broker, to_broker), (relay.to_client, to_client)):
            if first:
                assert self.real.reserve_pipe(direction) >= len(first)
                self.real.preload_pipe(direction, first)
        self.real.start_relay(relay)
        return relay

    def copy(
        self, tls: TlsLane, *, to_broker: bytes = b"", to_client: bytes = b"", half_close_s: float = 60
    ) -> CopiedRelay:
        """Start a relay through this process's memory."""
        record = about_relay(id=self.table.allocate_relay_id())
        relay = CopiedRelay(
            record,
            tls.our_client,
            tls.our_broker,
            half_close_s,
            first_to_broker=to_broker,
            first_to_client=to_client,
        )
        self._ends[record.id] = trio.Event()
        self.real.set_owner(relay)
        self.real.start_relay(relay)
        return relay

    def is_over(self, relay: Relay) -> bool:
        return self._ends[relay.record.id].is_set()

    async def over(self, relay: Relay) -> None:
        with trio.fail_after(60):
            await self._ends[relay.record.id].wait()

    def moved(self, relay: Relay) -> tuple[int, int]:
        return self.real.bytes_moved(relay)

    def cells(self, relay: Relay, cell: int) -> tuple[int, int]:
        rows = [row(relay.record.id, way) for way in (TO_BROKER, TO_CLIENT)]
        return self.table.cells[rows[0] + cell], self.table.cells[rows[1] + cell]


class Killed(BaseException):
    """Where a process would be gone."""


class WatchedFdStoreClient(FdStoreClient):
    """Writes down, in order, what is said to the store; knows what its forwarder has open.

    Forwarder and store are one process here: what the store gets is another descriptor of the same socket or pipe, and
    may have the very number that the forwarder has just closed.
    """

    def __init__(self, sock: socket.socket, slot: FdStoreSlot, *, crash_safe: bool = True) -> None:
        super().__init__(sock, crash_safe=crash_safe)
        self.sock = sock
        self._slot = slot
        self.said: list[tuple[str, int]] = []
        self.open: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def note(self, what: str, number: int, *ends: int) -> None:
        self.open[what, number] = [(end, os.fstat(end).st_ino) for end in ends]

    async def store_relay(self, relay: StoredRelay, client: int, broker: int) -> None:
        self.note("relay", relay.id, client, broker)
        try:
            await super().store_relay(relay, client, broker)
        except BaseException:
            del self.open["relay", relay.id]
            raise
        self.said.append(("put", relay.id))

    def store_pipes(self, pipes: Sequence[Pipe]) -> None:
        super().store_pipes(pipes)
        for pipe in pipes:
            self.note("pipe", pipe.id, pipe.read_end, pipe.write_end)

    def drop_relay(self, relay_id: int) -> None:
        self.said.append(("drop", relay_id))
        self.open.pop(("relay", relay_id), None)
        super().drop_relay(relay_id)

    def drop_pipe(self, pipe: Pipe) -> None:
        self.said.append(("drop pipe", pipe.id))
        self.open.pop(("pipe", pipe.id), None)
        super().drop_pipe(pipe)

    async def close(self, left_behind: Sequence[RelayLeftBehind] = ()) -> None:
        await super().close(left_behind)
        self.open.clear()  # all of it is closed next

    def close_all(self) -> None:
        """As the kernel does for a process that is gone."""
        self.sock.close()
        open_ends, self.open = [*itertools.chain.from_iterable(self.open.values())], {}
        kept = (*self._slot.relays.values(), *self._slot.pipes.values())
        the_stores = {end for one in kept for end in (one.first, one.second)}
        for end, inode in open_ends:
            try:
                is_ours = os.fstat(end).st_ino == inode and end not in the_stores
            except OSError:
                continue
            if is_ours:
                os.close(end)


@asynccontextmanager
async def busy_channel(fd_store: FdStoreClient) -> AsyncIterator[Callable[[], None]]:
    """A line on which another is sending, until what this gives is called."""
    over = trio.Event()

    async def send(task_status: trio.TaskStatus[None]) -> None:
        async with fd_store._sending:
            task_status.started()
            await over.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(send)
        try:
            yield over.set
        finally:
            over.set()


class Forwarder:
    """The relays of one process, from inheritance to whatever its end is."""

    def __init__(  # noqa: PLR0917 -- called once
        self,
        sock: socket.socket,
        slot: FdStoreSlot,
        config: RelayConfig,
        recall: ReauthenticatorFactory,
        now: Callable[[], float],
        broker_credentials: BeginExchange,
        *,
        crash_safe: bool = True,
        denied: DenyList = DenyList(),  # noqa: B008 -- it never changes
    ) -> None:
        self.denied = denied
        self.fd_store = WatchedFdStoreClient(sock, slot, crash_safe=crash_safe)
        self.far_ends: list[TcpStream] = []
        self.config = config
        self.recall = recall
        self.now = now
        self.metrics = ReauthenticationMetrics(None)
        self.broker_credentials = broker_credentials
        self.broker_metrics = BrokerReauthenticationMetrics(None)
        self.ended: list[StoredRelay] = []
        self.adopted: list[StoredRelay] = []
        self.moved_away: list[StoredRelay] = []
        self.gone_behind: list[str] = []
        self.left: RelayHandover
        self.relays: RelayManager
        self.registry = CollectorRegistry()
        self.gone = trio.Event()
        self.has_begun = False
        self.was_killed = False
        self._scope = trio.CancelScope()

    async def live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.left = await self.fd_store.receive_handover()
                    for kept in self.left.relays:
                        self.fd_store.note("relay", kept.record.id, kept.client, kept.broker)
                    for pipe in self.left.pipes:
                        self.fd_store.note("pipe", pipe.id, pipe.read_end, pipe.write_end)
                    sessions = SessionOptions(
                        reauthenticator_factory=self.recall,
                        broker_factory=BrokerReauthenticationFactory(
                            nursery, self.broker_metrics, self.broker_credentials
                        ),
                        metrics=self.metrics,
                    )
                    self.relays = RelayManager(
                        nursery,
                        self.fd_store,
                        self.left,
                        RelayCallbacks(
                            lambda about, _why, *_bytes: self.ended.append(about),
                            self.moved_away.append,
                            self.gone_behind.append,
                        ),
                        RelayOptions(now=self.now, sessions=sessions, denied=self.denied),
                    )
                    self.relays.reauthentication.fraction = lambda: 0.0
                    self.registry.register(self.relays)
                    self.adopted = [kept.record for kept in self.left.relays]
                    self.relays.adopt_relays(self.left, self.config)
                    nursery.start_soon(self.fd_store.run_sender)
                    nursery.start_soon(
                        self.fd_store.run_receiver,
                        lambda _place, _table: None,
                        self.relays.left_behind.on_process_ended,
                    )
                    nursery.start_soon(self.relays.run)
                    self.has_begun = True
                    task_status.started()
                    await trio.sleep_forever()
        except* Killed:
            self._die()
        finally:
            if self.has_begun:  # its numbers of descriptors are no relay's any more
                self._detach_sockets()
            if self.was_killed:
                self.fd_store.close_all()
            for stream in self.far_ends:
                stream.close_now()
            self.gone.set()

    def _die(self) -> None:
        self.was_killed = True
        self.relays._engine.frozen = True  # nothing that runs on the way out may touch what a killed one leaves
        self.relays._engine._loop.stop()
        self._detach_sockets()
        self.relays._ledger.table = RelayTable()

    def _detach_sockets(self) -> None:
        live = self.relays._engine._by_source
        for direction in live.values():
            direction.detach_source()
        if self.was_killed:
            for relay in self.relays._engine.relays:
                if not relay.is_spliced:
                    relay.close_sockets()
            live.clear()

    def blow(self) -> None:
        """End as by SIGKILL, in the middle of whatever is being done."""
        self._die()
        raise Killed

    async def kill(self) -> None:
        """End as by SIGKILL, between two turns."""
        self._die()
        self._scope.cancel()
        await self.gone.wait()

    async def leave(self) -> None:
        """End as by the supervisor's word."""
        self._scope.cancel()
        await self.gone.wait()

    async def begin_copied(
        self, about: StoredRelay, *, to_broker: bytes = b"", to_client: bytes = b""
    ) -> tuple[TcpStream, TcpStream]:
        """Start a relay that is not spliced; its two far ends."""
        (client, our_client), (our_broker, broker) = tcp_pair(), tcp_pair()
        self.far_ends += client, broker
        relays = self.relays
        splices, relays._splices = relays._splices, False
        start = RelayStart(our_client, our_broker, about, self.config, to_broker, to_client)
        await relays.start_relay(start)
        relays._splices = splices
        return client, broker

    async def begin(
        self,
        lane: Lane,
        *,
        to_broker: bytes = b"",
        to_client: bytes = b"",
        about: StoredRelay | None = None,
        session: SessionTerms | None = None,
    ) -> StoredRelay:
        start = self.start(lane, about or about_relay(), to_broker, to_client, session)
        await self.relays.start_relay(start)
        return start.stored

    def start(
        self,
        lane: Lane,
        about: StoredRelay,
        to_broker: bytes = b"",
        to_client: bytes = b"",
        session: SessionTerms | None = None,
    ) -> RelayStart:
        return RelayStart(
            lane.our_client,
            lane.our_broker,
            about,
            first_to_broker=to_broker,
            first_to_client=to_client,
            config=self.config,
            session=session,
        )

    def moved(self, direction: str) -> int:
        """The metric of bytes."""
        return int(value(self.registry, "pulsar_proxy_binary_bytes_total", direction))

    def operations(self, direction: str) -> int:
        """The metric of portions."""
        return int(value(self.registry, "pulsar_proxy_binary_ops_total", direction))

    def messages(self, principal: str, direction: str) -> int:
        """The metric of messages."""
        labels = {"principal": principal, "direction": direction}
        return int(self.registry.get_sample_value("pulsar_proxy_principal_messages_total", labels) or 0)

    @property
    def is_alive(self) -> bool:
        """Whether it has begun, and was not killed."""
        return self.has_begun and not self.was_killed

    def pipe_of(self, relay_id: int, way: int) -> int:
        """Which pipe the table says is bound."""
        return self.relays._ledger.table.cells[row(relay_id, way) + PIPE]


class Place:
    """A forwarder's place in the cluster: a real slot of the fd store, and one forwarder after another."""

    def __init__(self, nursery: trio.Nursery, config: RelayConfig = DEFAULTS, *, crash_safe: bool = True) -> None:
        self._nursery = nursery
        self._crash_safe = crash_safe
        self._config = config
        self.recall: ReauthenticatorFactory = reauthentication_unavailable
        self.broker_credentials: BeginExchange = lambda _host: NoCredentials()
        self.now: Callable[[], float] = time.monotonic
        self.denied = DenyList()
        self.slot = FdStoreSlot()
        self.forwarders: list[Forwarder] = []

    async def forwarder(self, config: RelayConfig | None = None) -> Forwarder:
        """The next one, whose process id is its number; it waits for its predecessor's last word."""
        ours, theirs = create_store_sockets()
        self._nursery.start_soon(self._serve, StoreChannel(ours), len(self.forwarders) + 1)
        forwarder = Forwarder(
            theirs,
            self.slot,
            config or self._config,
            self.recall,
            self.now,
            self.broker_credentials,
            crash_safe=self._crash_safe,
            denied=self.denied,
        )
        self.forwarders.append(forwarder)
        with trio.fail_after(PATIENCE_S):
            await self._nursery.start(forwarder.live)
        return forwarder

    async def _serve(self, channel: StoreChannel, pid: int) -> None:
        await self.slot.serve_forwarder(
            channel,
            list,
            pid=pid,
            is_new=True,
            tables=AddressTableExchange().open_channel(0),
            stores_relays=self._crash_safe,
        )

    async def settle(self) -> None:
        """Wait until the store has read what was said."""
        await trio.testing.wait_all_tasks_blocked(0.005)

    async def close(self) -> None:
        for forwarder in self.forwarders:
            await forwarder.leave()
            forwarder.fd_store.close_all()
        await self.settle()
        self.slot.close_stored()
        os.close(self.slot.table_fd)


@asynccontextmanager
async def open_place(config: RelayConfig = DEFAULTS, *, crash_safe: bool = True) -> AsyncIterator[Place]:
    """A place, and its end."""
    async with trio.open_nursery() as nursery:
        place = Place(nursery, config, crash_safe=crash_safe)
        try:
            yield place
        finally:
            with trio.CancelScope(shield=True):
                await place.close()
            nursery.cancel_scope.cancel()


def kept_relay(lane: Lane, relay_id: int) -> InheritedRelay:
    """A relay as a store hands it over, with descriptors of its own."""
    return InheritedRelay(
        about_relay(id=relay_id), os.dup(lane.our_client.socket.fileno()), os.dup(lane.our_broker.socket.fileno())
    )
