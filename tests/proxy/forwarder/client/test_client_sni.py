"""proxy.forwarder.client.sni: a client whose TLS is passed through, or who is refused."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import CLIENT, make_config
from prometheus_client import CollectorRegistry
from relay_fakes import until

from proto.addresses import HostPort
from proto.client_machine import State
from proto.rpc_pb2 import ResolveTargetResponse
from proxy.forwarder.client import sni
from proxy.forwarder.client.seen_hellos import SeenHellos
from proxy.forwarder.client.sni import SniConnection
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.eviction import PreAuthConnection
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.workers.authentication import ClientEndpoint
from proxy.forwarder.workers.broker_links import NamedLink, NamedRequest, TargetRefused
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import Dialer

EXTENSION = bytes.fromhex("0000000e000c000009") + b"a.example"
BODY = b"\x03\x03" + bytes(32) + bytes.fromhex("000002130101000012") + EXTENSION
HELLO = b"\x16\x03\x01" + (len(BODY) + 4).to_bytes(2) + b"\x01" + len(BODY).to_bytes(3) + BODY
UNKNOWN, INTERNAL, MALFORMED = (bytes((21, 3, 3, 0, 2, 2, alert)) for alert in (112, 80, 50))

HEADER = b"the client's PROXY header"


class Scene:
    """One connection, with a lookup worker and relays to play with."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sni, "current_reactor", lambda: self)
        self.ours, self.peer = ours, _ = socket.socketpair()
        ours.setblocking(False)
        self.broker, self.broker_peer = socket.socketpair()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.known: ResolveTargetResponse | None = None
        self.config = make_config()
        self.dialer = self.passing_dialer = Dialer(self.config.brokers)
        self.forgotten: list[NamedRequest] = []
        self.queued: list[socket.socket] = []
        self.gate = trio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.relay_failure: Exception | None = None
        self.relay_gate: trio.Event | None = None
        self.asked: list[NamedRequest] = []
        self.started: list[RelayStart] = []
        self.ended: list[SniConnection] = []
        self.reactor = Reactor()
        self.watch, self.forget = self.reactor.watch, self.reactor.forget
        nursery.start_soon(self.reactor.run)
        self.deadlines = Deadlines()
        nursery.start_soon(self.deadlines.run)
        self.registry = CollectorRegistry()
        self.handshakes = InFlightCounter()
        self.admitted = PreAuthConnection()
        services: Any = SimpleNamespace(
            workers=SimpleNamespace(config=self.config, broker_links=self),
            relays=self,
            metrics=ForwarderMetrics(self.registry),
            handshakes=self.handshakes,
            nursery=nursery,
            deadlines=self.deadlines,
            seen_hellos=SeenHellos(),
        )
        endpoint = ClientEndpoint(CLIENT, trio.current_time(), b"", 0, HEADER)
        admitted: Any = self.admitted
        self.services = services
        self.connection = SniConnection(TcpStream(ours), endpoint, services, admitted, self._on_end)
        self.receive: Callable[[bytes], None]

    def _on_end(self, _admitted: object, connection: SniConnection) -> None:
        self.ended.append(connection)

    def start_reading(self, _descriptor: int, on_data: Any, on_end: Any) -> Any:
        self.receive, self.on_client_end = on_data, on_end
        return SimpleNamespace(pause=lambda: None)

    def know_broker(self, *addresses: str) -> int:
        """Have the broker dialled by callback, at the port that is returned, where it listens at 127.0.0.1."""
        port = self.listener.getsockname()[1]
        self.known = ResolveTargetResponse(host="a.example", port=port, addresses=addresses or ["127.0.0.1"])
        return int(port)

    def known_target(self, _asked: NamedRequest) -> ResolveTargetResponse | None:
        return self.known

    def forget_target(self, asked: NamedRequest) -> None:
        self.forgotten.append(asked)

    @property
    def dialled(self) -> int:
        """How many connections the broker has got."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listener.accept()[0].close()
                count += 1
        return count

    async def open_named(self, asked: NamedRequest) -> NamedLink:
        self.asked.append(asked)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return NamedLink(HostPort(asked.name, 6651), TcpStream(self.broker))

    def now(self) -> float:
        return 0.0

    def start_relay_now(self, start: RelayStart) -> bool:
        if self.relay_failure is not None:
            raise self.relay_failure
        if self.relay_gate is None:
            self.started.append(start)
        return self.relay_gate is None

    async def start_relay(self, start: RelayStart) -> None:
        if self.relay_gate is not None:
            await self.relay_gate.wait()
        if self.relay_failure is not None:
            raise self.relay_failure
        self.started.append(start)

    def refused(self, reason: str) -> float | None:
        return self.registry.get_sample_value("pulsar_proxy_sni_refused_total", {"reason": reason})

    async def alert(self) -> bytes:
        """What the client got, up to the end."""
        await trio.testing.wait_all_tasks_blocked()
        data = self.peer.recv(100)
        self.peer.close()
        await self.end()
        return data

    async def end(self) -> DisconnectCause:
        """Why it ended, once it has."""
        await until(lambda: self.ended)
        return self.connection.cause


def start_dialling(it: Scene, *, by_callback: bool) -> None:
    """Have a hello come whose broker does not answer."""
    it.gate = trio.Event()
    if by_callback:
        port = it.know_broker()
        it.listener.listen(0)
        for _ in range(4):  # its queue is full, so the kernel drops what asks for a connection
            queued = socket.socket()
            it.queued.append(queued)
            queued.setblocking(False)
            queued.connect_ex(("127.0.0.1", port))
    it.receive(HELLO)
    assert it.connection.state is State.CONNECTING_TO_BROKER
    assert (it.connection._opening is not None) is by_callback


@pytest.fixture
async def it(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    scene = Scene(nursery, monkeypatch)
    await until(lambda: current_reactor() is scene.reactor)
    scene.connection.start_serving()
    yield scene
    for one in (scene.ours, scene.peer, scene.broker, scene.broker_peer, scene.listener, *scene.queued):
        one.close()
    for start in scene.started:
        cast("TcpStream", start.broker).close_now()


async def test_the_hello_goes_first_exactly_as_it_came(it: Scene) -> None:
    it.receive(HELLO[:20])
    it.receive(HELLO[20:] + b"early data")
    await trio.testing.wait_all_tasks_blocked()
    [start] = it.started
    assert start.first_to_broker == HELLO + b"early data"
    assert (start.session, start.stored.principal, start.stored.target) == (None, "", "a.example:6651")
    assert it.asked == [NamedRequest("a.example", CLIENT, HEADER)]
    assert it.ended == [it.connection]
    assert it.connection.is_relayed
    assert it.handshakes.count == 0


@pytest.mark.parametrize(
    ("failure", "alert", "reason"),
    [
        (TargetRefused("host", "no broker"), UNKNOWN, "host"),
    ],
)
async def test_a_denied_target(it: Scene, failure: Exception, alert: bytes, reason: str) -> None:
    it.failure = failure
    it.receive(HELLO)
    assert await it.alert() == alert
    assert it.refused(reason) == 1
    assert it.connection.cause is DisconnectCause.TARGET_DENIED
    assert not it.started


async def test_a_relay_that_does_not_start(it: Scene) -> None:
    it.relay_failure = RelayStartFailed("no pipe")
    it.receive(HELLO)
    assert await it.alert() == INTERNAL
    assert it.refused("relay_not_begun") == 1
    assert not it.connection.is_relayed


async def test_what_is_no_hello(it: Scene) -> None:
    with structlog.testing.capture_logs() as logs:
        it.receive(b"GET / HTTP/1.1\r\n")
        assert await it.alert() == MALFORMED
    assert it.refused("malformed") == 1
    assert [entry["client"] for entry in logs] == [CLIENT]


async def test_a_hello_that_comes_back(it: Scene) -> None:
    """Security: however it is split, and whatever comes behind it."""
    it.know_broker()
    it.services.seen_hellos.add(HELLO[5:])
    it.receive(HELLO[:50])
    it.receive(HELLO[50:] + b"early data")
    assert await it.alert() == INTERNAL
    assert it.refused("circle") == 1
    assert not it.asked
    assert not it.dialled


async def test_a_client_without_a_place(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreAuthConnection, "take_place", lambda *_: "max_connections")
    it.know_broker()
    it.receive(HELLO)
    assert await it.alert() == INTERNAL
    assert it.connection.cause is DisconnectCause.MAX_CONNECTIONS
    assert not it.asked
    assert not it.dialled


async def test_a_client_above_its_quota(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreAuthConnection, "take_place", lambda *_: "quota[0].max_connections")
    it.know_broker()
    it.receive(HELLO)
    assert await it.alert() == INTERNAL
    assert it.connection.cause is DisconnectCause.QUOTA
    assert it.refused("quota") == 1
    assert not it.asked


async def test_a_hello_that_does_not_come_in_time(it: Scene, autojump_clock: object) -> None:
    it.receive(HELLO[:-1])
    await trio.sleep(make_config().limits.handshake_timeout_ms / 1000 + 1)
    assert it.connection.cause is DisconnectCause.HANDSHAKE_TIMEOUT
    assert it.refused("timeout") == 1
    assert it.peer.recv(10) == b""
    assert it.ended == [it.connection]


@pytest.mark.parametrize("by_callback", [False, True])
async def test_ends_from_outside(it: Scene, by_callback: bool) -> None:
    start_dialling(it, by_callback=by_callback)
    await trio.testing.wait_all_tasks_blocked()
    it.connection.drain()  # a broker is being dialled
    assert not it.ended
    it.admitted.evict()
    it.connection.shut_down()
    assert it.ended == [it.connection]
    assert it.connection.cause is DisconnectCause.GAVE_WAY
    assert not it.reactor._watched, "the dial has ended, too"
    assert not it.deadlines._by_grain


async def test_a_drain_ends_a_client_that_has_named_nothing(it: Scene) -> None:
    it.connection.drain()
    assert (it.ended, it.connection.cause) == ([it.connection], DisconnectCause.SHUT_DOWN)


async def test_a_client_that_goes(it: Scene) -> None:
    it.on_client_end(None)
    assert (it.ended, it.connection.cause) == ([it.connection], DisconnectCause.CLIENT_CLOSED)


async def test_a_socket_that_cannot_be_watched(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever accepts clients goes on to the others."""
    scene = Scene(nursery, monkeypatch)

    def refuse(*_: object) -> None:
        raise OSError(28, "max_user_watches")

    monkeypatch.setattr(scene, "start_reading", refuse)
    scene.connection.start_serving()
    assert (scene.ended, scene.connection.cause) == ([scene.connection], DisconnectCause.DEFECT)
    for one in (scene.peer, scene.broker, scene.broker_peer, scene.listener):
        one.close()


async def test_an_end_in_the_round_in_which_the_broker_fails(it: Scene) -> None:
    """The failure is neither counted nor told."""
    it.gate = trio.Event()
    it.failure = TargetRefused("host", "no broker")
    it.receive(HELLO)
    await trio.testing.wait_all_tasks_blocked()
    it.gate.set()
    it.connection.shut_down()
    await trio.testing.wait_all_tasks_blocked()
    assert (it.ended, it.connection.cause) == ([it.connection], DisconnectCause.SHUT_DOWN)
    assert not it.refused("host")
    assert it.handshakes.count == 0


@pytest.mark.parametrize("leave", [socket.socket.close, lambda peer: peer.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("unread", [b"", b"early data"])
@pytest.mark.parametrize("by_callback", [False, True])
async def test_a_client_that_leaves_while_its_broker_is_dialled(
    it: Scene, leave: Callable[[socket.socket], None], unread: bytes, by_callback: bool
) -> None:
    """The dial ends at once, and its place is another's: else who comes and goes would hold one for each dial."""
    start_dialling(it, by_callback=by_callback)
    it.peer.send(unread)
    await trio.testing.wait_all_tasks_blocked()
    leave(it.peer)
    assert await it.end() is DisconnectCause.CLIENT_CLOSED
    it.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (it.started, it.handshakes.count, it.reactor._watched) == ([], 0, {})
    assert not it.deadlines._by_grain


async def test_what_a_client_sends_while_its_broker_is_dialled_is_the_relays(it: Scene) -> None:
    it.gate = trio.Event()
    it.receive(HELLO)
    it.peer.send(b"early data")
    await trio.testing.wait_all_tasks_blocked()
    assert it.reactor._watched
    it.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [start.first_to_broker for start in it.started] == [HELLO]
    assert it.ours.recv(100) == b"early data"
    assert not it.reactor._watched, "the relay's alone"


async def test_a_client_that_is_refused_and_leaves(it: Scene) -> None:
    """Why it was refused is told, and not that it has left."""
    it.failure = TargetRefused("host", "no broker")
    it.receive(HELLO)
    await trio.testing.wait_all_tasks_blocked()
    assert not it.reactor._watched
    it.peer.close()
    assert await it.end() is DisconnectCause.TARGET_DENIED


# ---- a broker that is dialled by callback


async def test_a_known_broker_is_dialled_and_its_relay_started_in_the_call_that_brings_the_hello(it: Scene) -> None:
    """No task belongs to it: to a broker at this machine it is connected at once."""
    port = it.know_broker()
    it.receive(HELLO + b"early data")
    [start] = it.started
    assert (start.first_to_broker, start.stored.target) == (HELLO + b"early data", f"a.example:{port}")
    assert cast("TcpStream", start.broker).socket.getpeername() == ("127.0.0.1", port)
    assert it.ended == [it.connection]
    assert (it.connection.is_relayed, it.handshakes.count, it.dialled, it.asked) == (True, 0, 1, [])
    assert (it.reactor._watched, it.deadlines._by_grain) == ({}, {})


async def test_a_known_broker_that_refuses(it: Scene) -> None:
    it.know_broker()
    it.listener.close()
    it.receive(HELLO)
    assert await it.alert() == INTERNAL
    assert it.refused("unreachable") == 1
    assert it.connection.cause is DisconnectCause.BROKER_FAILED
    assert not it.started


async def test_a_task_tries_the_other_addresses_of_a_known_broker(it: Scene) -> None:
    """127.0.0.2 refuses: the broker does not listen there."""
    it.know_broker("127.0.0.2", "127.0.0.1")
    it.receive(HELLO)
    await until(lambda: it.started)
    assert it.asked == it.forgotten == [NamedRequest("a.example", CLIENT, HEADER)]


# ---- a relay's start


async def test_a_relay_that_must_wait_to_start_is_not_ended_from_outside(it: Scene) -> None:
    it.relay_gate = trio.Event()
    it.know_broker()
    it.receive(HELLO)
    await trio.testing.wait_all_tasks_blocked()
    it.connection.drain()
    it.connection.evict()
    it.connection.shut_down()
    assert not it.ended
    it.relay_gate.set()
    await until(lambda: it.started)
    assert (it.ended, it.connection.is_relayed) == ([it.connection], True)


async def test_a_relay_whose_start_meets_a_defect_ends_its_client(it: Scene) -> None:
    it.relay_failure = RuntimeError("a defect")
    it.receive(HELLO)
    assert await it.end() is DisconnectCause.DEFECT
    assert it.broker.fileno() < 0
    assert it.ours.fileno() < 0


async def test_an_end_in_the_round_in_which_the_broker_answers(it: Scene) -> None:
    """No relay starts with a client that is closed, and the broker's connection is closed, too."""
    it.gate = trio.Event()
    it.receive(HELLO)
    await trio.testing.wait_all_tasks_blocked()
    it.connection.shut_down()
    it.connection._on_opened(NamedLink(HostPort("a.example", 6651), TcpStream(it.broker)))
    assert (it.ended, it.started, it.connection.cause) == ([it.connection], [], DisconnectCause.SHUT_DOWN)
    assert it.broker.fileno() < 0
