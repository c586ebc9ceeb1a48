"""proxy.http.websocket: upgrades that are passed to a forwarder, and TLS that is pumped beside it."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing
from e2e.lab.certificates import Authority
from http_fakes import FakeUpstream, Received, Setup, UpstreamConnection, pair

from proto.http_rules import Routes
from proto.rpc_pb2 import RelayRequest
from proxy.http import server, websocket
from proxy.http.client import HttpClient
from proxy.http.server import HttpConnection
from proxy.http.websocket import TlsPump
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.shared.fd_store_channel import close_descriptors
from proxy.runtime.shared.relay_request_channel import (
    ACCEPTED,
    REFUSED,
    PassedConnectionInvalid,
    RelayRequestChannel,
    create_relay_request_sockets,
    passed_sockets,
)

KEY, ACCEPT = "dGhlIHNhbXBsZSBub25jZQ==", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3
ASK = (
    "GET /ws/v2/producer/persistent/public/default/t?token=secret HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    f"Upgrade: websocket\r\nSec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()
SWITCH = (
    f"HTTP/1.1 101 Go\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Accept: {ACCEPT}\r\n\r\n"
).encode()


class FakeForwarder:
    """Takes requests as a forwarder does, and keeps what came with them."""

    def __init__(self) -> None:
        theirs, ours = create_relay_request_sockets()
        self.channel = RelayRequestChannel(ours)
        self._received = RelayRequestChannel(theirs)
        self.request = RelayRequest()
        self.client: TcpStream
        self.broker: TcpStream

    async def receive(self) -> tuple[RelayRequest, list[int]] | None:
        return await self._received.receive()

    async def take(self, answer: bytes) -> None:
        received = await self.receive()
        assert received is not None
        self.request, descriptors = received
        try:
            client, broker, asked = passed_sockets(descriptors)
        except PassedConnectionInvalid:
            close_descriptors(descriptors)
            raise
        self.client, self.broker = TcpStream(client), TcpStream(broker)
        with asked:
            if answer:
                asked.send(answer)

    def close(self) -> None:
        for name in ("client", "broker"):
            if hasattr(self, name):
                getattr(self, name).close_now()
        self.channel.close()
        self._received.close()


class Scene(Setup):
    """An HTTP worker's parts with a route to WebSocket."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery)
        self.ws = FakeUpstream(nursery, "ws-1", switch)
        self.parts.upstreams["websocket"] = [self.ws]
        self.parts.role = "alice"
        self.forwarder = FakeForwarder()
        self.services.routes = Routes([("/ws", "websocket"), ("/admin", "brokers")])
        self.services.passer = self.forwarder.channel

    def close(self) -> None:
        self.forwarder.close()
        super().close()


async def switch(connection: UpstreamConnection, _request: Received) -> None:
    await connection.send(SWITCH + b"first")
    await trio.sleep_forever()


@pytest.fixture
async def scene(nursery: trio.Nursery) -> AsyncIterator[Scene]:
    made = Scene(nursery)
    yield made
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()
    made.close()


async def test_an_upgrade_becomes_a_relay_of_a_forwarder(scene: Scene) -> None:
    """The worker sends the client nothing, and closes neither connection for the forwarder."""
    client = scene.connect()
    await client.send(ASK)
    await scene.forwarder.take(ACCEPTED)
    [record] = await scene.records()
    assert (record.status, record.route, record.cause) == (101, "websocket", "")
    request = scene.forwarder.request
    assert (request.client_address, request.principal, request.target) == (
        "203.0.113.7:51234",
        "alice",
        "ws-1:8080",
    )
    head, _, rest = request.first_to_client.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert {b"upgrade: websocket", b"connection: upgrade"} <= set(head.lower().split(b"\r\n"))
    assert (rest, request.first_to_broker) == (b"first", b"")
    await scene.forwarder.client.send_all(b"from the relay")
    assert await client.raw() == b"from the relay", "not a byte of the worker's before"
    await scene.forwarder.broker.send_all(b"to the broker")
    assert await scene.ws.connections[0].stream.receive_some() == b"to the broker"


async def test_what_the_upstream_is_asked(scene: Scene) -> None:
    client = scene.connect()
    await client.send(ASK)
    await scene.forwarder.take(ACCEPTED)
    [asked] = scene.ws.requests
    assert asked.target.endswith(b"?token=secret")
    assert asked.header(b"upgrade") == b"websocket"
    assert asked.header(b"connection") == b"upgrade"
    assert asked.header(b"sec-websocket-key") == KEY.encode()


@pytest.mark.parametrize(
    "answer",
    [
        SWITCH.replace(ACCEPT.encode(), b"AAAA"),
        SWITCH.replace(b"Upgrade: WebSocket", b"Upgrade: h2c"),
        b"HTTP/1.1 101 Go\r\n\r\n",
    ],
)
async def test_a_101_that_is_no_answer_to_the_key_is_none(scene: Scene, answer: bytes) -> None:
    """Security: a server that has not agreed must not be sent what a client takes for WebSocket."""

    async def behave(connection: UpstreamConnection, _request: Received) -> None:
        await connection.send(answer)
        await trio.sleep_forever()

    scene.ws.behave = behave
    assert (await scene.ask(ASK)).status == 502


async def test_any_other_response_is_the_clients(scene: Scene) -> None:
    async def behave(connection: UpstreamConnection, _request: Received) -> None:
        await connection.answer(401, [("Content-Length", "2")], b"no")

    scene.ws.behave = behave
    answer = await scene.ask(ASK)
    assert (answer.status, answer.body) == (401, b"no")


async def test_upgrades_elsewhere_are_refused(scene: Scene) -> None:
    assert (await scene.ask(ASK.replace(b"/ws/", b"/admin/"))).status == 501
    scene.services.passer = None
    assert (await scene.ask(ASK)).status == 501
    assert not scene.ws.requests


async def test_a_forwarder_that_refuses(scene: Scene) -> None:
    client = scene.connect()
    await client.send(ASK)
    await scene.forwarder.take(REFUSED)
    assert (await client.answer()).status == 503


async def test_a_forwarder_that_dies_with_a_request(scene: Scene) -> None:
    """Its relay may live already: the worker sends the client nothing, and shuts nothing down."""
    client = scene.connect()
    await client.send(ASK)
    await scene.forwarder.take(b"")
    [record] = await scene.records()
    assert record.cause == "forwarder_lost"
    await scene.forwarder.client.send_all(b"HTTP/1.1 101")
    assert await client.raw() == b"HTTP/1.1 101"


async def test_no_forwarder(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets 503 in a bounded time; a forwarder that comes later finds connections that have ended."""
    monkeypatch.setattr(websocket, "PASS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(server, "LINGER_S", 0.05)
    client = scene.connect()
    await client.send(ASK)
    assert (await client.answer()).status == 503
    received = await scene.forwarder.receive()
    assert received is not None
    with trio.fail_after(5):
        for descriptor in received[1][:2]:
            poll = select.poll()
            poll.register(descriptor, 0)
            while poll.poll(0) != [(descriptor, select.POLLHUP)]:  # noqa: ASYNC110 -- no event tells of it
                await trio.sleep(0.01)
    close_descriptors(received[1])


async def test_a_full_channel(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PASS_TIMEOUT_S", 0.05)
    with contextlib.suppress(BlockingIOError):
        while True:
            scene.forwarder.channel.send_now(RelayRequest(principal="x" * 10_000))
    assert (await scene.ask(ASK)).status == 503


async def test_a_client_that_leaves_ends_the_upstreams_request(scene: Scene) -> None:
    async def behave(_connection: UpstreamConnection, _request: Received) -> None:
        await trio.sleep_forever()

    scene.ws.behave = behave
    client = scene.connect()
    await client.send(ASK)
    while not scene.ws.requests:
        await trio.testing.wait_all_tasks_blocked(0.01)
    client.close()
    [record] = await scene.records()
    assert record.cause == "client_left"


async def tls_pair(tmp_path: Path) -> tuple[TlsStream, TlsStream]:
    """A server's and a client's end of TLS over loopback."""
    authority = Authority(tmp_path, "ours")
    own = authority.server("proxy")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    ours, theirs = pair()
    inside = TlsStream(theirs, context, server_side=True)
    outside = TlsStream(ours, ssl.create_default_context(cafile=authority.file), server_side=False, host="localhost")
    async with trio.open_nursery() as handshakes:
        handshakes.start_soon(inside.handshake)
        handshakes.start_soon(outside.handshake)
    return inside, outside


async def test_tls_of_a_client_is_pumped(scene: Scene, nursery: trio.Nursery, tmp_path: Path) -> None:
    """The forwarder has a socket in its place: bytes and half-closes pass both ways, during a drain, too."""
    inside, outside = await tls_pair(tmp_path)
    client = HttpClient("203.0.113.7:51234", "203.0.113.7", "https")
    connection = HttpConnection(inside, client, scene.services)
    nursery.start_soon(connection.serve)
    await outside.send_all(ASK)
    await scene.forwarder.take(ACCEPTED)
    relay = scene.forwarder.client
    assert relay.socket.family == socket.AF_UNIX
    await outside.send_all(b"up")
    assert await relay.receive_some() == b"up"
    connection.drain()
    await relay.send_all(b"down")
    assert await outside.receive_some() == b"down"
    await outside.send_eof()
    assert await relay.receive_some() == b"", "a half-close"
    await relay.send_all(b"last")
    relay.close_now()
    assert await outside.receive_some() == b"last"
    assert await outside.receive_some() == b""
    [record] = await scene.records()
    assert record.status == 101
    outside.transport.close_now()


async def test_tls_of_an_upstream_is_pumped(scene: Scene, nursery: trio.Nursery, tmp_path: Path) -> None:
    """What came with its head goes first."""
    server_end, client_end = await tls_pair(tmp_path)

    async def dial(_upstream: object) -> TlsStream:
        return client_end

    async def serve() -> None:
        await server_end.receive_some()
        await server_end.send_all(SWITCH + b"first")
        await server_end.send_all(await server_end.receive_some())

    scene.pool.set_dial(dial)
    nursery.start_soon(serve)
    client = scene.connect()
    await client.send(ASK)
    await scene.forwarder.take(ACCEPTED)
    assert scene.forwarder.request.first_to_client.endswith(b"\r\n\r\n")
    relay = scene.forwarder.broker
    assert relay.socket.family == socket.AF_UNIX
    assert await relay.receive_some() == b"first"
    await relay.send_all(b"echo")
    assert await relay.receive_some() == b"echo"
    server_end.transport.close_now()
    assert await relay.receive_some() == b""


async def test_a_relay_that_ends_ends_the_pump_of_a_client_that_stays(nursery: trio.Nursery) -> None:
    client, tls = pair()
    ours, theirs = (TcpStream(sock) for sock in socket.socketpair())
    for stream in (ours, theirs):
        stream.socket.setblocking(False)
    over = trio.Event()

    async def run() -> None:
        await TlsPump(tls, b"first", ours).run()
        over.set()

    nursery.start_soon(run)
    assert await theirs.receive_some() == b"first"
    theirs.close_now()
    with trio.fail_after(5):
        await over.wait()
    assert await client.receive_some() == b""
    client.close_now()
