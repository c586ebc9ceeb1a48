"""proxy.http with TLS at both sides: real handshakes over loopback, and what a kept-alive connection has unread."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from e2e.lab.certificates import OTHER_HOST, Authority
from http_fakes import Client, Setup, pair

from proto.addresses import HostPort
from proxy.config.types import Brokers, BrokerTls, ListenerTls
from proxy.http.client import HttpClient, Upstream
from proxy.http.messages import MessageCut
from proxy.http.server import HttpConnection
from proxy.http.upstream import UpstreamLink, UpstreamPool, dial_brokers
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import DialFailed
from proxy.runtime.network.tls import ListenerContexts, TlsFailed, TlsStream, broker_context

GET = b"GET /admin/v2/tenants HTTP/1.1\r\nHost: x\r\n\r\n"


class Tls:
    """An authority, a server's contexts, and brokers' settings that trust it."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory, "ours")
        pair_ = self.authority.server("server")
        self.files = ListenerTls(certificate=pair_.certificate, key=pair_.key)
        self.trust = BrokerTls(trust=self.authority.file)
        self.brokers = Brokers(service_url="pulsar://x:1", tls=self.trust)

    def server_end(self, transport: TcpStream) -> TlsStream:
        context = ListenerContexts("http_listener[0].tls", self.files).front_context
        return TlsStream(transport, context, server_side=True)

    def client_end(self, transport: TcpStream) -> TlsStream:
        return TlsStream(transport, broker_context(self.trust).value, server_side=False, host="localhost")


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(tmp_path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def shaken(tls: Tls) -> tuple[TlsStream, TlsStream]:
    """Both ends of a connection, the server's first."""
    one, other = pair()
    server, client = tls.server_end(one), tls.client_end(other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.handshake)
        nursery.start_soon(client.handshake)
    return server, client


async def test_a_client_with_tls(tls: Tls, setup: Setup) -> None:
    server, stream = await shaken(tls)
    connection = HttpConnection(server, HttpClient("203.0.113.7:1", "203.0.113.7", "https"), setup.services)
    setup.nursery.start_soon(connection.serve)
    client = Client(stream)
    body = bytes(1_000_000)
    for _ in range(2):
        await client.send(GET)
        assert (await client.answer()).body == b"GET /admin/v2/tenants "
        request = b"PUT /admin/v2/x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, request + body)
            assert (await client.answer()).body == b"PUT /admin/v2/x " + body
    assert setup.upstream.requests[0].header(b"x-forwarded-proto") == b"https"
    stream.transport.close_now()


async def serve(listener: socket.socket, tls: Tls | None, response: bytes) -> None:
    """Answer each request on one connection so."""
    listener.setblocking(False)
    await trio.lowlevel.wait_readable(listener)
    sock, _ = listener.accept()
    sock.setblocking(False)
    stream = tls.server_end(TcpStream(sock)) if tls is not None else TcpStream(sock)
    with sock:
        if isinstance(stream, TlsStream):
            try:
                await stream.handshake()
            except TlsFailed:
                return
        while await stream.receive_some(65536):
            await stream.send_all(response)


def upstream_at(listener: socket.socket, *, tls: bool, host: str = "localhost") -> Upstream:
    return Upstream(HostPort(host, listener.getsockname()[1]), ("127.0.0.1",), tls=tls)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize("speaks_tls", [False, True])
@pytest.mark.parametrize(("response", "is_kept"), [(OK, True), (OK + b"HTTP/1.1 200 OK\r\n\r\n", False)])
async def test_a_connection_of_the_pool(
    tls: Tls, listener: socket.socket, speaks_tls: bool, response: bytes, is_kept: bool
) -> None:
    pool = UpstreamPool(dial_brokers(tls.brokers))
    upstream = upstream_at(listener, tls=speaks_tls)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, tls if speaks_tls else None, response)
        link = await pool.connect(upstream)
        assert isinstance(link.wire.stream, TlsStream) is speaks_tls
        await link.wire.send(GET)
        answer = await link.receive_response(to_head=False)
        assert answer is not None
        assert await answer.body.receive() == b"ok"
        pool.keep(link)
        again = pool.take_idle(upstream)
        assert (again is link) is is_kept
        link.wire.close()
        nursery.cancel_scope.cancel()


async def test_a_certificate_of_another_host(tls: Tls, listener: socket.socket) -> None:
    pool = UpstreamPool(dial_brokers(tls.brokers))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, tls, OK)
        with pytest.raises(DialFailed) as failed:
            await pool.connect(upstream_at(listener, tls=True, host=OTHER_HOST))
        assert failed.value.reason == "tls"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("surplus_bytes", [0, 10, None])
@pytest.mark.parametrize("late", [False, True])
async def test_surplus_records_are_no_response(tls: Tls, surplus_bytes: int | None, late: bool) -> None:
    """Whole records, or the beginning of one, behind the response: the connection is not used again."""
    server, client = await shaken(tls)
    link = UpstreamLink(client, (HostPort("localhost", 1), True))
    response, surplus = server.encrypt(memoryview(OK)), server.encrypt(memoryview(b"poison"))[:surplus_bytes]
    await server.transport.send_all(response if late else response + surplus)
    answer = await link.receive_response(to_head=False)
    assert answer is not None
    assert await answer.body.receive() == b"ok"
    if late:
        assert link.wire.is_silent
        await server.transport.send_all(surplus)
    assert link.wire.is_silent is (surplus_bytes == 0)
    link.wire.close()
    server.transport.close_now()


async def test_a_surplus_in_the_record_of_a_body_is_no_response(tls: Tls) -> None:
    server, client = await shaken(tls)
    link = UpstreamLink(client, (HostPort("localhost", 1), True))
    await server.send_all(OK[:-2])
    answer = await link.receive_response(to_head=False)
    assert answer is not None
    await server.send_all(b"okpoison")
    assert await answer.body.receive() == b"ok"
    assert not link.wire.is_silent
    link.wire.close()
    server.transport.close_now()


@pytest.mark.parametrize("has_end", [True, False])
async def test_a_body_until_the_end_needs_that_of_tls(tls: Tls, has_end: bool) -> None:
    """Security: anybody on the way can end TCP, and a part of the body would be taken for all."""
    server, client = await shaken(tls)
    link = UpstreamLink(client, (HostPort("localhost", 1), True))
    await server.send_all(b"HTTP/1.1 200 OK\r\n\r\npart")
    response = await link.receive_response(to_head=False)
    assert response is not None
    assert await response.body.receive() == b"part"
    await (server if has_end else server.transport).send_eof()
    if has_end:
        assert await response.body.receive() == b""
    else:
        with pytest.raises(MessageCut):
            await response.body.receive()
    assert response.body.ended is has_end
    link.wire.close()
    server.transport.close_now()


async def test_a_connection_to_an_address_that_is_no_longer_the_upstreams(tls: Tls, listener: socket.socket) -> None:
    pool = UpstreamPool(dial_brokers(tls.brokers))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, None, OK)
        upstream = upstream_at(listener, tls=False)
        pool.keep(await pool.connect(upstream))
        assert pool.take_idle(Upstream(upstream.broker, ("127.0.0.2",), tls=False)) is None
        assert pool.idle_count == 0
        nursery.cancel_scope.cancel()
