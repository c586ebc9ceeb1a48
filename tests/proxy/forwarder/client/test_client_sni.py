"""proxy.forwarder.client.sni: a client whose TLS is passed through, or who is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import CLIENT, make_config
from prometheus_client import CollectorRegistry
from relay_fakes import until

from proto.addresses import HostPort
from proxy.forwarder.client import sni
from proxy.forwarder.client.seen_hellos import SeenHellos
from proxy.forwarder.client.sni import SniConnection
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.eviction import PreAuthConnection
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.workers.authentication import ClientEndpoint
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.loop.tcp_stream import TcpStream

EXTENSION = bytes.fromhex("0000000e000c000009") + b"a.example"
BODY = b"\x03\x03" + bytes(32) + bytes.fromhex("000002130101000012") + EXTENSION
HELLO = b"\x16\x03\x01" + (len(BODY) + 4).to_bytes(2) + b"\x01" + len(BODY).to_bytes(3) + BODY
UNKNOWN, INTERNAL, MALFORMED = (bytes((21, 3, 3, 0, 2, 2, alert)) for alert in (112, 80, 50))


class Scene:
    """One connection, with a lookup worker and relays to play with."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sni, "current_reactor", lambda: self)
        self.ours, self.peer = ours, _ = socket.socketpair()
        ours.setblocking(False)
        self.broker, self.broker_peer = socket.socketpair()
        self.gate = trio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.relay_failure: Exception | None = None
        self.asked: list[tuple[str, str]] = []
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
            workers=SimpleNamespace(config=make_config(), broker_links=self),
            relays=self,
            metrics=ForwarderMetrics(self.registry),
            handshakes=self.handshakes,
            nursery=nursery,
            deadlines=self.deadlines,
            seen_hellos=SeenHellos(),
        )
        endpoint = ClientEndpoint(CLIENT, trio.current_time(), b"", 0)
        admitted: Any = self.admitted
        self.services = services
        self.connection = SniConnection(TcpStream(ours), endpoint, services, admitted, self._on_end)
        self.receive: Callable[[bytes], None]

    def _on_end(self, _admitted: object, connection: SniConnection) -> None:
        self.ended.append(connection)

    def start_reading(self, _descriptor: int, on_data: Any, on_end: Any) -> Any:
        self.receive, self.on_client_end = on_data, on_end
        return SimpleNamespace(pause=lambda: None)

    async def open_named(self, name: str, client: str) -> tuple[HostPort, TcpStream]:
        self.asked.append((name, client))
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return HostPort(name, 6651), TcpStream(self.broker)

    def now(self) -> float:
        return 0.0

    def start_relay_now(self, start: RelayStart) -> bool:
        if self.relay_failure is not None:
            raise self.relay_failure
        self.started.append(start)
        return True

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


@pytest.fixture
def it(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(nursery, monkeypatch)
    scene.connection.start_serving()
    yield scene
    for one in (scene.ours, scene.peer, scene.broker, scene.broker_peer):
        one.close()


async def test_the_hello_goes_first_exactly_as_it_came(it: Scene) -> None:
    it.receive(HELLO[:20])
    it.receive(HELLO[20:] + b"early data")
    await trio.testing.wait_all_tasks_blocked()
    [start] = it.started
    assert start.first_to_broker == HELLO + b"early data"
    assert (start.session, start.stored.principal, start.stored.target) == (None, "", "a.example:6651")
    assert it.asked == [("a.example", CLIENT)]
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
    it.services.seen_hellos.add(HELLO[5:])
    it.receive(HELLO[:50])
    it.receive(HELLO[50:] + b"early data")
    assert await it.alert() == INTERNAL
    assert it.refused("circle") == 1
    assert not it.asked


async def test_a_client_without_a_place(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreAuthConnection, "take_place", lambda *_: False)
    it.receive(HELLO)
    assert await it.alert() == INTERNAL
    assert it.connection.cause is DisconnectCause.MAX_CONNECTIONS
    assert not it.asked


async def test_a_hello_that_does_not_come_in_time(it: Scene, autojump_clock: object) -> None:
    it.receive(HELLO[:-1])
    await trio.sleep(make_config().limits.handshake_timeout_ms / 1000 + 1)
    assert it.connection.cause is DisconnectCause.HANDSHAKE_TIMEOUT
    assert it.refused("timeout") == 1
    assert it.peer.recv(10) == b""
    assert it.ended == [it.connection]


async def test_ends_from_outside(it: Scene) -> None:
    it.gate = trio.Event()
    it.receive(HELLO)
    await trio.testing.wait_all_tasks_blocked()
    it.connection.drain()  # a broker is being dialled
    assert not it.ended
    it.admitted.evict()
    it.connection.shut_down()
    assert it.ended == [it.connection]
    assert it.connection.cause is DisconnectCause.GAVE_WAY


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
    for one in (scene.peer, scene.broker, scene.broker_peer):
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
async def test_a_client_that_leaves_while_its_broker_is_dialled(
    it: Scene, leave: Callable[[socket.socket], None], unread: bytes
) -> None:
    """The dial ends at once, and its place is another's: else who comes and goes would hold one for each dial."""
    it.gate = trio.Event()
    it.receive(HELLO)
    it.peer.send(unread)
    await trio.testing.wait_all_tasks_blocked()
    leave(it.peer)
    assert await it.end() is DisconnectCause.CLIENT_CLOSED
    it.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (it.started, it.handshakes.count, it.reactor._watched) == ([], 0, {})


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
