"""proxy.forwarder.service: clients of a listener with TLS."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog.testing
import trio
import trio.testing
from e2e.lab.certificates import Authority
from forwarder_fakes import Peer, connect
from relay_fakes import tcp_pair, unblocked_pair
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture

from proto.addresses import HostPort
from proto.broker_handshake import Connected
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.network.tls import TlsStream

OPEN: list[TcpStream] = []


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def tables(authority: Authority) -> dict[str, object]:
    pair = authority.server("server")
    return {"listener": [{"tls": {"certificate": pair.certificate, "key": pair.key}}]}


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


async def come(served: Served) -> TcpStream:
    """A client, before its first byte."""
    ours, theirs = (TcpStream(end) for end in unblocked_pair())
    OPEN.extend((ours, theirs))
    await served.service._transports[0].check_files()  # in a thread, which nothing waits for here
    served.listener._send.send_nowait((ours, ("192.0.2.1", 4000)))  # type: ignore[arg-type]
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    return theirs


def client_of(stream: TcpStream, authority: Authority) -> TlsStream:
    context = ssl.create_default_context(cafile=authority.file)
    return TlsStream(stream, context, server_side=False, host="localhost")


async def test_a_client_in_lookup_mode_costs_no_task(
    serve: Serve,  # noqa: F811
    authority: Authority,
    tables: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.is_profile_fresh", property(lambda _: True))
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.profile", None, raising=False)
    served = await serve(**tables)
    before = len(served.service._clients.child_tasks)
    stream = client_of(await come(served), authority)
    await stream.handshake()
    peer = Peer(stream)
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    labels = {"listener": "0", "result": "success", "reason": ""}
    assert served.value("pulsar_proxy_tls_handshakes_total", **labels) == 1
    assert len(served.service._clients.child_tasks) == before


async def test_no_tls_with_a_client(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    with structlog.testing.capture_logs() as logs:
        await client.send_all(b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x02\x12\x06hello")
        assert await client.receive_some() == b""
        await client.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert served.value("pulsar_proxy_ended_connections_total", cause="tls_failed") == 1
    labels = {"listener": "0", "result": "failure", "reason": "not_tls"}
    assert served.value("pulsar_proxy_tls_handshakes_total", **labels) == 1
    assert served.value("pulsar_proxy_active_connections") == 0
    assert [(entry["client"], entry["reason"]) for entry in logs] == [("192.0.2.1:4000", "the peer does not speak TLS")]


async def test_a_drain_ends_a_tls_handshake_under_way(
    serve: Serve,  # noqa: F811
    authority: Authority,
    tables: dict[str, object],
) -> None:
    """It has no session yet that could be told."""
    served = await serve(**tables)
    stream = client_of(await come(served), authority)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: served.service.drain(10.0, hand_over=False))
        await trio.testing.wait_all_tasks_blocked()
        await stream.handshake()
        assert await stream.receive_some() == b""
    assert served.value("pulsar_proxy_active_connections") == 0
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


async def test_a_hello_that_is_too_large_is_no_defect(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    with structlog.testing.capture_logs() as logs:
        await client.send_all(b"\x16\x03\x01\x00\x04\x01\x02\x00\x00")
        assert await client.receive_some() == b""
        await client.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert served.value("pulsar_proxy_ended_connections_total", cause="tls_failed") == 1
    assert [entry["reason"] for entry in logs] == ["a hello of more than 16384 bytes"]


async def test_a_shut_down_ends_a_tls_handshake_under_way(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    await served.service.drain(0, hand_over=False)
    assert await client.receive_some() == b""
    assert served.value("pulsar_proxy_active_connections") == 0


async def test_a_silent_handshake_gives_way_to_the_next(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables, limits={"max_unauthenticated_connections": 2})
    first = await come(served)
    with structlog.testing.capture_logs() as logs:
        await come(served)
    assert await first.receive_some() == b""
    assert served.value("pulsar_proxy_ended_connections_total", cause="gave_way") == 1
    assert ["limits.max_unauthenticated_connections" in entry["event"] for entry in logs] == [True]


class SpawnedTasks(trio.abc.Instrument):
    """Counts the tasks that are spawned, by name."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.names[task.name] += 1


async def test_a_relay_costs_no_task_beyond_those_of_a_plain_client(
    serve: Serve,  # noqa: F811
    authority: Authority,
    tables: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the first bytes that it has forwarded; the test's broker is dialled in a task, for both."""
    brokers: list[TcpStream] = []

    async def open_link(*_: object) -> BrokerLink:
        ours, broker = tcp_pair()
        brokers.append(broker)
        OPEN.append(broker)
        greeting = CommandConnected(server_version="the broker", protocol_version=21)
        frame = Frame(BaseCommand(type=BaseCommand.CONNECTED, connected=greeting).SerializeToString())
        return BrokerLink(HostPort("b0", 6650), ours, Connected(frame, greeting, b""))

    monkeypatch.setattr("proxy.forwarder.workers.broker_links.BrokerLinks.open_link", open_link)
    served = await serve(**tables)
    spawned: list[Counter[str]] = []
    for uses_tls in (False, True):
        transport = served.service._transports[0]
        monkeypatch.setattr(transport, "uses_tls", uses_tls)
        ours, theirs = tcp_pair()
        OPEN.extend((ours, theirs))
        await transport.check_files()
        tasks = SpawnedTasks()
        trio.lowlevel.add_instrument(tasks)
        served.listener._send.send_nowait((ours, ("192.0.2.1", 4000)))
        client = client_of(theirs, authority) if uses_tls else theirs
        if isinstance(client, TlsStream):
            await client.handshake()
        peer = Peer(client)
        await peer.send(connect("b0:6650"))
        await peer.expect_command(BaseCommand.CONNECTED)
        await client.send_all(b"to the broker")
        assert await brokers[-1].receive_some() == b"to the broker"
        trio.lowlevel.remove_instrument(tasks)
        spawned.append(tasks.names)
    plain, tls = spawned
    assert not tls - plain


async def test_a_drain_ends_a_refused_handshake_that_is_being_closed(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    await client.send_all(b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00")
    assert (await client.receive_some())[:1] == b"\x15", "an alert"
    assert served.value("pulsar_proxy_active_connections") == 1
    await served.service.drain(0, hand_over=False)
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 0
    causes = ("tls_failed", "shut_down")  # which one depends on the order in which Trio ends its tasks
    ended = [served.value("pulsar_proxy_ended_connections_total", cause=cause) for cause in causes]
    assert sorted(ended) == [0, 1]  # type: ignore[type-var]
