"""proxy.http.service: clients over loopback, from accept to the response of an upstream, through reload and drain."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing
import trustme
from http_fakes import Client, FakeUpstream, Held, Parts, Received, UpstreamConnection
from prometheus_client import CollectorRegistry

from proto.roles import Role
from proto.rpc_pb2 import Principal
from proxy.common.errors import ConfigError
from proxy.config.types import Config
from proxy.http.client import HttpIdentity
from proxy.http.routes import http_replacements, http_routes
from proxy.http.service import HttpService
from proxy.http.taskless import waiting_without_task
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.listener_channel import pass_listeners, wait_for_request
from proxy.runtime.process.worker import WorkerContext

GET = b"GET /admin/v2/clusters HTTP/1.1\r\nHost: x\r\n\r\n"


def config_of(**tables: Any) -> Config:
    own = {
        "brokers": {"web_service_url": "http://broker-1:8080"},
        "http_listener": [{"bind": "127.0.0.1:1"}],
        "http": {"access_log": False},
    }
    return msgspec.convert(own | tables, Config)


class Served:
    """A service with its listeners, which the test's own end of the channel passes."""

    def __init__(self, nursery: trio.Nursery, tables: dict[str, Any], numbers: list[int] | None = None) -> None:
        self.nursery = nursery
        self.tables = tables
        config = config_of(**tables)
        indexes = range(len(config.http_listener)) if numbers is None else numbers
        self.listeners = {index: socket.create_server(("127.0.0.1", 0)) for index in indexes}
        self.registry = CollectorRegistry()
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        descriptors = Descriptors(channel=-1, liveness=-1, questions=theirs.detach())
        context = WorkerContext(Role.HTTP, 0, config, b"", descriptors, self.registry, nursery, Reactor())
        self.service = HttpService(context)
        self.upstream = FakeUpstream(nursery)
        self.parts = Parts({name: [self.upstream] for name in ("brokers", "functions", "websocket", "route-0")})
        self.use_parts()
        self._clients: list[Client] = []

    def use_parts(self) -> None:
        """Put the test's parts in the place of those that ask other workers."""
        services = self.service._services
        services.authenticator = services.locator = self.parts
        services.pool.set_dial(self.parts.dial)

    async def start(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass)
            await self.service.start()

    async def _pass(self) -> None:
        assert await wait_for_request(self.ours)
        await pass_listeners(self.ours, {index: sock.fileno() for index, sock in self.listeners.items()})

    async def connect(self, index: int = 0) -> Client:
        sock = socket.create_connection(self.listeners[index].getsockname())
        sock.setblocking(False)
        self._clients.append(Client(TcpStream(sock)))
        return self._clients[-1]

    async def status(self, request: bytes = GET, index: int = 0) -> int:
        client = await self.connect(index)
        await client.send(request)
        return (await client.answer()).status

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pulsar_proxy_http_{name}", labels)

    def close(self) -> None:
        self.service._services.pool.close_idle()
        for client in self._clients:
            client.close()
        for listener in self.listeners.values():
            listener.close()
        self.ours.close()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(nursery: trio.Nursery) -> AsyncIterator[Serve]:
    all_served: list[Served] = []

    async def start(numbers: list[int] | None = None, **tables: Any) -> Served:
        served = Served(nursery, tables, numbers)
        all_served.append(served)
        await served.start()
        return served

    yield start
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()
    for served in all_served:
        served.close()


async def ended(client: Client) -> bool:
    """Whether the proxy has closed a connection, gently or by a reset."""
    with contextlib.suppress(trio.BrokenResourceError):
        assert await client.rest() == b""
    return True


async def test_a_request(serve: Serve) -> None:
    served = await serve()
    assert await served.status() == 200
    await trio.testing.wait_all_tasks_blocked()  # the client has its response before the request's end is counted
    assert served.service.status() == {"connections": 1, "requests_under_way": 0, "displaced_connections": 0}
    assert served.value("requests_total", route="brokers", method="GET", status="2xx") == 1
    assert served.service.handlers() == {}


async def test_without_listeners_it_does_not_start(nursery: trio.Nursery) -> None:
    served = Served(nursery, {})
    served.ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ConfigError, match="http_listener"):
        await served.service.start()
    served.close()


async def test_a_listener_that_is_missing_moves_no_other(serve: Serve) -> None:
    """Security: after an exec one may be missing; each keeps its own networks and TLS."""
    served = await serve(
        [1], http_listener=[{"bind": "127.0.0.1:1"}, {"bind": "127.0.0.1:2", "denied_networks": ["127.0.0.0/8"]}]
    )
    assert await ended(await served.connect(1))


async def test_networks(serve: Serve) -> None:
    """Security."""
    served = await serve(http_listener=[{"bind": "127.0.0.1:1", "allowed_networks": ["10.0.0.0/8"]}])
    assert await ended(await served.connect())
    assert served.value("closed_connections_total", reason="network") == 1
    assert len(served.service._connections) == 0


async def test_an_idle_connection_gives_way(serve: Serve) -> None:
    served = await serve(http={"max_connections": 1, "access_log": False})
    idle = await served.connect()
    await idle.send(GET)
    assert (await idle.answer()).status == 200
    await trio.testing.wait_all_tasks_blocked()
    assert await served.status() == 200
    assert await ended(idle)
    assert served.service.status()["displaced_connections"] == 1


async def test_a_reload_is_for_the_next_request(serve: Serve) -> None:
    served = await serve()
    client = await served.connect()
    await client.send(GET)
    assert (await client.answer()).status == 200
    tables = {"http": {"response_headers": {"X-Frame-Options": "DENY"}, "access_log": False, "max_redirects": 1}}
    await served.service.configure(config_of(**tables))
    served.use_parts()
    await client.send(GET)
    assert (await client.answer()).headers[b"x-frame-options"] == b"DENY"
    denied = config_of(http_listener=[{"bind": "127.0.0.1:1", "denied_networks": ["127.0.0.1"]}])
    await served.service.configure(denied)
    assert await ended(await served.connect())


async def test_a_reload_that_cannot_be_used_changes_nothing(serve: Serve) -> None:
    served = await serve()
    tls = {"certificate": "/nowhere", "key": "/nowhere"}
    with pytest.raises(ConfigError, match=r"http_listener\[0\].tls"):
        await served.service.configure(config_of(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}]))
    assert await served.status() == 200


async def test_a_drain_waits_for_what_is_under_way_and_closes_the_idle(serve: Serve) -> None:
    served = await serve()
    going_on, asked = trio.Event(), trio.Event()

    async def slow(connection: UpstreamConnection, _request: Received) -> None:
        asked.set()
        await going_on.wait()
        await connection.answer(200, [], b"late")

    idle = await served.connect()
    await idle.send(GET)
    assert (await idle.answer()).status == 200
    served.upstream.behave = slow
    busy = await served.connect()
    await busy.send(GET)
    await asked.wait()
    drained = trio.Event()

    async def drain() -> None:
        await served.service.drain(60, hand_over=False)
        drained.set()

    served.nursery.start_soon(drain)
    assert await ended(idle)
    assert not drained.is_set()
    going_on.set()
    answer = await busy.answer()
    assert (answer.body, answer.headers[b"connection"]) == (b"late", b"close")
    busy.close()
    await drained.wait()


async def test_the_reactor_lingers_as_long_as_no_request_is_in_a_task(nursery: trio.Nursery, serve: Serve) -> None:
    reactor = Reactor()
    nursery.start_soon(reactor.run)
    while current_reactor() is None:
        await trio.lowlevel.checkpoint()
    served = await serve()
    client = await served.connect()
    for is_first in (True, False):
        held = Held()
        served.upstream.behave = held
        await client.send(GET)
        await held.asked.wait()
        assert reactor.may_linger() is not is_first
        assert waiting_without_task() == (not is_first)
        held.goes_on.set()
        assert (await client.answer()).status == 200
        await trio.testing.wait_all_tasks_blocked()
        assert reactor.may_linger()
    client.close()


async def test_a_drain_ends_what_takes_too_long(serve: Serve) -> None:
    served = await serve()
    asked = trio.Event()

    async def hang(_connection: UpstreamConnection, _request: Received) -> None:
        asked.set()
        await trio.sleep_forever()

    served.upstream.behave = hang
    client = await served.connect()
    await client.send(GET)
    await asked.wait()
    with structlog.testing.capture_logs() as logs:
        await served.service.drain(0, hand_over=False)
    assert await ended(client)
    assert [entry["event"] for entry in logs] == ["the drain's time is over; closing what is left"]


@pytest.fixture
def bound_alike() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets at one address, of a network in which nobody else has any.

    Both are bound before either connects. At a port that the kernel has chosen for a connection, another socket can
    often not be bound: connections of other tests, which are over, may have had it, too.
    """
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.83.21.9", 0))
        second.bind(first.getsockname())
        yield first, second


async def test_a_clients_next_connection_at_the_same_address(
    serve: Serve, bound_alike: tuple[socket.socket, socket.socket]
) -> None:
    """A client resets its connection while the worker looks elsewhere, and has the next one at the same address."""
    served = await serve()
    first, second = bound_alike
    asked, goes_on = trio.Event(), trio.Event()

    async def authenticate(_head: Any, _route: str, _client: Any) -> HttpIdentity:
        asked.set()
        await goes_on.wait()
        return HttpIdentity(Principal())

    served.parts.authenticate = authenticate  # type: ignore[method-assign]
    first.connect(served.listeners[0].getsockname())
    first.send(GET)
    await asked.wait()
    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    first.close()  # resets it
    second.connect(served.listeners[0].getsockname())
    connections = served.service._connections
    while len(connections) < 2:  # both count, as long as the worker holds both
        await trio.lowlevel.checkpoint()
    addresses = [one.client.address for one in connections._open.values()]
    assert addresses == ["{}:{}".format(*second.getsockname())] * 2
    goes_on.set()
    while [one.requests for one in connections._open.values()] != [0]:  # the second one is idle, and can be displaced
        await trio.lowlevel.checkpoint()
    second.close()
    while len(connections):
        await trio.lowlevel.checkpoint()
    assert not connections._by_network


async def test_a_defect_is_of_one_connection(serve: Serve) -> None:
    served = await serve()
    authenticate = served.parts.authenticate

    async def fail(_head: Any, _route: str, _client: Any) -> HttpIdentity:
        raise RuntimeError("a defect")

    served.parts.authenticate = fail  # type: ignore[method-assign]
    client = await served.connect()
    with structlog.testing.capture_logs() as logs:
        await client.send(GET)
        assert await ended(client)
        await trio.testing.wait_all_tasks_blocked()
    assert [entry["event"] for entry in logs] == ["an HTTP connection met a defect"]
    assert len(served.service._connections) == 0
    served.parts.authenticate = authenticate  # type: ignore[method-assign]
    assert await served.status() == 200


async def test_a_reload_closes_connections_from_networks_that_may_come_no_longer(serve: Serve) -> None:
    """Security."""
    served = await serve()
    idle = await served.connect()
    await idle.send(GET)
    assert (await idle.answer()).status == 200
    await served.service.configure(config_of(**served.tables))
    served.use_parts()
    await idle.send(GET)
    assert (await idle.answer()).status == 200, "it may stay"
    denied = [{"bind": "127.0.0.1:1", "denied_networks": ["127.0.0.0/8"]}]
    await served.service.configure(config_of(http_listener=denied))
    assert await ended(idle)


# ---- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    names = {"certificate": "certificate.pem", "key": "key.pem", "client_ca": "ca.pem"}
    return {key: str(tmp_path / name) for key, name in names.items()}


async def test_tls_with_a_clients_certificate(serve: Serve, authority: trustme.CA, tls: dict[str, Any]) -> None:
    served = await serve(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    certificate = authority.issue_cert("client.example")
    certificate.configure_cert(context)
    seen: list[bytes] = []
    authenticate = served.parts.authenticate

    async def see(head: Any, route: str, client: Any) -> Any:
        seen.append(client.certificate)
        assert client.scheme == "https"
        return await authenticate(head, route, client)

    served.parts.authenticate = see  # type: ignore[method-assign]
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", served.listeners[0].getsockname()[1]),
        context,
        server_hostname="localhost",
    )
    await stream.send_all(GET)
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
    await served.service.configure(config_of(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}]))
    with pytest.raises(trio.BrokenResourceError):  # closed: its authority may be trusted no longer
        await stream.receive_some()
    await trio.aclose_forcefully(stream)
    assert seen == [ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())]
    assert served.value("tls_handshakes_total", listener="0", result="success", reason="") == 1


async def test_a_reload_during_a_handshake_with_a_clients_certificate(
    serve: Serve, authority: trustme.CA, tls: dict[str, Any]
) -> None:
    """Security: a client that holds its handshake up keeps no authority that a reload has removed."""
    listener = [{"bind": "127.0.0.1:1", "tls": tls}]
    served = await serve(http_listener=listener)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("client.example").configure_cert(context)
    client = await served.connect()
    sent = 0

    class Late(trio.abc.SendStream):
        """Sends the client's certificate after a reload."""

        async def send_all(self, data: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == 2:
                await served.service.configure(config_of(http_listener=listener))
                served.use_parts()
            await client.stream.send_all(data)

        async def wait_send_all_might_not_block(self) -> None:
            await client.stream.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await client.stream.aclose()

    stream = trio.SSLStream(trio.StapledStream(Late(), client.stream), context, server_hostname="localhost")
    await stream.do_handshake()
    with pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    assert sent > 1
    assert served.parts.begun == 0


async def test_a_drain_serves_who_is_in_the_tls_handshake(
    serve: Serve, authority: trustme.CA, tls: dict[str, Any]
) -> None:
    """The first request of a new connection is none that a client would repeat."""
    served = await serve(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    transport = await trio.open_tcp_stream("127.0.0.1", served.listeners[0].getsockname()[1])
    while served.value("active_connections") != 1:
        await trio.lowlevel.checkpoint()
    served.nursery.start_soon(partial(served.service.drain, 60, hand_over=False))
    await trio.testing.wait_all_tasks_blocked()
    stream = trio.SSLStream(transport, context, server_hostname="localhost")
    await stream.send_all(GET)
    answer = await stream.receive_some()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    await trio.aclose_forcefully(stream)


async def test_no_tls_is_no_request(serve: Serve, tls: dict[str, Any]) -> None:
    """Security: no request is served in the clear where the listener has TLS."""
    served = await serve(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}])
    client = await served.connect()
    with structlog.testing.capture_logs():
        await client.send(GET)
        assert b"HTTP" not in await client.rest()
    assert served.parts.dials == []
    assert served.value("tls_handshakes_total", listener="0", result="failure", reason="not_tls") == 1


async def test_a_tls_handshake_has_its_time(
    serve: Serve, tls: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """Security."""
    served = await serve(http_listener=[{"bind": "127.0.0.1:1", "tls": tls}])
    client = await served.connect()
    while served.value("active_connections") != 1:  # the clock stands still
        await trio.lowlevel.checkpoint()
    with structlog.testing.capture_logs():
        assert await ended(client)
    assert served.value("tls_handshakes_total", listener="0", result="failure", reason="timeout") == 1


# ---- routes


@pytest.mark.parametrize(
    ("path", "upstream"),
    [
        ("/admin/v2/clusters", "brokers"),
        ("/lookup/v2/topic/persistent/public/default/t", "brokers"),
        ("/admin/v3/functions/public/default/f", "functions"),
        ("/admin/v3/function/x", "functions"),
        ("/admin/functions/x", "functions"),
        ("/admin/v3/sources", "functions"),
        ("/admin/v3/sink/x", "functions"),
        ("/admin/v2/worker/cluster", "functions"),
        ("/admin/v2/worker-stats/metrics", "functions"),
        ("/admin/v2/persistent/public/functions/x", "brokers"),
        ("/ws/v2/producer/x", "websocket"),
        ("/admin/v2/own/x", "route-1"),
        ("/tools", "route-0"),
        ("/toolsmith", None),
        ("/metrics", None),
        ("/", None),
    ],
)
def test_routes(path: str, upstream: str | None) -> None:
    routes = [{"path": "/tools/", "url": "http://a"}, {"path": "/admin/v2/own", "url": "http://b"}]
    assert http_routes(config_of(http={"routes": routes})).find(path) == upstream


@pytest.mark.parametrize(
    ("path", "url", "target", "passed_on"),
    [
        ("/ui", "http://a/", b"/ui/x/y?z=/ui", b"/x/y?z=/ui"),
        ("/ui/", "http://a/", b"/ui", b"/"),
        ("/ui", "http://a/", b"/ui?x", b"/?x"),
        ("/ui", "http://a/", b"/ui/", b"/"),
        ("/ui", "http://a/base", b"/ui", b"/base"),
        ("/ui", "http://a:1,b:2/base/", b"/ui/", b"/base/"),
        ("/ui", "http://a/base", b"/u%69/a%2Fb%3F", b"/base/a%2Fb%3F"),
        ("/a/b", "http://a/c/d/e", b"/a/b/f//g", b"/c/d/e/f//g"),
        ("/", "http://a/c", b"/x", b"/c/x"),
    ],
)
def test_a_path_takes_the_place_of_the_routes_own(path: str, url: str, target: bytes, passed_on: bytes) -> None:
    found = http_replacements(config_of(http={"routes": [{"path": path, "url": url}]}))
    assert found["route-0"].apply(target) == passed_on
    assert not http_replacements(config_of(http={"routes": [{"path": path, "url": "http://a"}]}))


async def test_a_route_with_a_path_passes_on_another_one(serve: Serve) -> None:
    served = await serve(http={"routes": [{"path": "/ui", "url": "http://a/"}]})
    request = b"GET /ui%s HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await served.status(request % b"/x?y") == 200
    assert [one.target for one in served.upstream.requests] == [b"/x?y"]
    await served.service.configure(config_of(http={"routes": [{"path": "/ui", "url": "http://a/base"}]}))
    served.use_parts()
    assert await served.status(request % b"/x") == 200
    assert [one.target for one in served.upstream.requests][1:] == [b"/base/x"]


async def test_what_is_passed_on_names_no_host(serve: Serve) -> None:
    """Security: after two slashes a server may read a host."""
    served = await serve(http={"routes": [{"path": "/ui", "url": "http://a/"}]})
    assert await served.status(b"GET /ui//evil.example/x HTTP/1.1\r\nHost: x\r\n\r\n") == 400
    assert served.upstream.requests == []
