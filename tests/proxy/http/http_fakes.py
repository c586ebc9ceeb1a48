"""The ends of the HTTP worker's connections on loopback: clients, and an upstream as strict as a real server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
import trio
import trio.testing

from proto.addresses import HostPort
from proto.http_rules import Redirect, RequestHead, RequestRefused, Routes
from proto.rpc_pb2 import Principal
from proxy.config.types import Http
from proxy.http.client import HttpClient, HttpIdentity, RequestRecord, Upstream
from proxy.http.exchange import HttpServices
from proxy.http.messages import HttpStream
from proxy.http.server import HttpConnection
from proxy.http.upstream import UpstreamPool
from proxy.runtime.fairness.byte_budget import ByteBudget
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import DialFailed

ROUTES = [("/admin", "brokers"), ("/lookup", "brokers"), ("/admin/v3/functions", "functions")]


def pair() -> tuple[TcpStream, TcpStream]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TcpStream(one), TcpStream(other)


@dataclass
class Received:
    """A request as an upstream has read it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    connection: int = 0

    def header(self, name: bytes) -> bytes | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, values
        return values[0] if values else None


class UpstreamConnection:
    """One connection of a fake upstream, read by h11, which refuses what a real server refuses."""

    def __init__(self, stream: TcpStream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.http = h11.Connection(h11.SERVER)
        self.has_ended = False

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            data = await self.stream.receive_some(65536)
            self.has_ended = not data
            self.http.receive_data(data)
        return event

    async def head(self) -> Received | None:
        event = await self.event()
        if not isinstance(event, h11.Request):
            return None
        return Received(event.method, event.target, list(event.headers), connection=self.number)

    async def body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), event
        return bytes(body)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def answer(self, status: int, headers: list[tuple[str, str]], body: bytes = b"") -> None:
        """Answer properly, and be ready for the next request."""
        head = self.http.send(h11.Response(status_code=status, headers=headers, reason=b"Said"))
        data = self.http.send(h11.Data(body)) if body else b""
        end = self.http.send(h11.EndOfMessage())
        await self.send((head or b"") + (data or b"") + (end or b""))
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()


Behaviour = Callable[[UpstreamConnection, Received], Awaitable[None]]


async def echo(connection: UpstreamConnection, request: Received) -> None:
    """Answer with the request's method, target and body."""
    request.body = await connection.body()
    body = b"%b %b %b" % (request.method, request.target, request.body)
    await connection.answer(200, [("Content-Length", str(len(body))), ("Content-Type", "text/plain")], body)


class Held:
    """Behaves as ``echo`` does, but only once it may go on."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.goes_on = trio.Event()

    async def __call__(self, connection: UpstreamConnection, request: Received) -> None:
        self.asked.set()
        await self.goes_on.wait()
        await echo(connection, request)


class FakeUpstream:
    """A server in this process; ``behave`` serves a request of which the head was read."""

    def __init__(self, nursery: trio.Nursery, host: str = "broker-1", behave: Behaviour = echo) -> None:
        self._nursery = nursery
        self.broker = HostPort(host, 8080)
        self.behave = behave
        self.requests: list[Received] = []
        self.connections: list[UpstreamConnection] = []
        self.closed = 0
        self.refuses = False

    @property
    def upstream(self) -> Upstream:
        return Upstream(self.broker, ("127.0.0.1",), tls=False)

    def connect(self) -> TcpStream:
        if self.refuses:
            raise DialFailed("unreachable", "refused")
        ours, theirs = pair()
        connection = UpstreamConnection(theirs, len(self.connections))
        self.connections.append(connection)
        self._nursery.start_soon(self._serve, connection)
        return ours

    async def _serve(self, connection: UpstreamConnection) -> None:
        try:
            while (request := await connection.head()) is not None:
                self.requests.append(request)
                await self.behave(connection, request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except h11.RemoteProtocolError:
            if not connection.has_ended:  # an end within a request is what a client that left looks like
                raise
        finally:
            self.closed += 1
            connection.stream.close_now()


@dataclass
class Parts:
    """What stands around the code: who is who, what is where."""

    upstreams: dict[str, list[FakeUpstream]]
    role: str = ""
    authorization: bytes = b""
    refusal: RequestRefused | None = None
    records: list[RequestRecord] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)
    begun: int = 0
    authenticated_for: list[str] = field(default_factory=list)
    dials: list[str] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)

    async def authenticate(self, head: RequestHead, route: str, client: HttpClient) -> HttpIdentity:
        self.authenticated_for.append(route)
        if self.refusal is not None:
            raise self.refusal
        return HttpIdentity(Principal(name=self.role), authorization=self.authorization)

    async def locate(self, name: str, identity: HttpIdentity, client: HttpClient) -> Sequence[Upstream]:
        return [one.upstream for one in self.upstreams[name]]

    async def locate_redirect(
        self, name: str, redirect: Redirect, identity: HttpIdentity, client: HttpClient
    ) -> Upstream:
        self.redirects.append(redirect)
        for one in self._all():
            if one.broker == HostPort(redirect.host, redirect.port):
                return one.upstream
        raise RequestRefused(502, "this is no broker", "redirect_refused")

    def begin(self, record: RequestRecord) -> None:
        self.begun += 1

    def end(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.ended.set()
        self.ended = trio.Event()

    async def dial(self, upstream: Upstream) -> HttpStream:
        self.dials.append(upstream.broker.host)
        return next(one for one in self._all() if one.broker == upstream.broker).connect()

    def _all(self) -> list[FakeUpstream]:
        return [one for many in self.upstreams.values() for one in many]


class Setup:
    """A worker's services with one upstream or more, and clients."""

    def __init__(
        self, nursery: trio.Nursery, *, hosts: Sequence[str] = ("broker-1",), http: Http | None = None
    ) -> None:
        self.nursery = nursery
        self.upstreams = [FakeUpstream(nursery, host) for host in hosts]
        self.functions = FakeUpstream(nursery, "functions-1")
        self.parts = Parts({"brokers": self.upstreams, "functions": [self.functions]})
        self.pool = UpstreamPool(self.parts.dial)
        self.services = HttpServices(
            settings=http or Http(),
            routes=Routes(ROUTES),
            authenticator=self.parts,
            locator=self.parts,
            requests=self.parts,
            pool=self.pool,
            replay=ByteBudget(64 * 2**20),
        )
        self.connections: list[HttpConnection] = []
        self._clients: list[Client] = []

    def close(self) -> None:
        """Close what a test has left open."""
        self.pool.close_idle()
        for client in self._clients:
            client.close()

    @property
    def upstream(self) -> FakeUpstream:
        return self.upstreams[0]

    async def close_idle_upstreams(self) -> None:
        """Have all upstreams close their connections, at rest."""
        await trio.testing.wait_all_tasks_blocked()
        for one in self.upstreams:
            for connection in one.connections:
                connection.stream.close_now()

    async def records(self, count: int = 1) -> list[RequestRecord]:
        """The records of requests, once there are as many, and everything is at rest."""
        while len(self.parts.records) < count:
            await self.parts.ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert len(self.parts.records) == count
        return self.parts.records

    def connect(self) -> Client:
        ours, theirs = pair()
        connection = HttpConnection(theirs, HttpClient("203.0.113.7:51234", "203.0.113.7", "http"), self.services)
        self.connections.append(connection)
        self.nursery.start_soon(connection.serve)
        self._clients.append(Client(ours))
        return self._clients[-1]

    async def ask(self, data: bytes, *, method: str = "GET") -> Answer:
        """Send one request over a connection of its own; return the response."""
        client = self.connect()
        await client.send(data)
        answer = await client.answer(method)
        client.close()
        return answer


@contextlib.asynccontextmanager
async def opened(*, reactor: bool = True, **how: Any) -> AsyncIterator[Setup]:
    """A worker's services for one test, with all that runs for them.

    ``reactor``: with it, as in a worker, requests may be served without a task. ``how``: see Setup.
    """
    with contextlib.ExitStack() as at_end:
        async with trio.open_nursery() as nursery:
            if reactor:
                nursery.start_soon(Reactor().run)
                while current_reactor() is None:
                    await trio.lowlevel.checkpoint()
            setup = Setup(nursery, **how)
            at_end.callback(setup.close)
            yield setup
            nursery.cancel_scope.cancel()


@dataclass
class Answer:
    """A response as a client has read it, strictly."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Client:
    """A client's end. ``answer`` reads a response with h11, as a real client would."""

    def __init__(self, stream: TcpStream) -> None:
        self.stream = stream
        self._unread = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def answer(self, method: str = "GET") -> Answer:
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        http.send(h11.EndOfMessage())
        if self._unread:
            http.receive_data(self._unread)
        body = bytearray()
        response: h11.Response | None = None
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await self.stream.receive_some(65536))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
        self._unread = http.trailing_data[0]
        assert response is not None
        headers = list(response.headers)
        assert len({name for name, _ in headers}) == len(headers), headers
        return Answer(response.status_code, dict(headers), bytes(body))

    async def raw(self, size_bytes: int = 65536) -> bytes:
        return await self.stream.receive_some(size_bytes)

    async def rest(self) -> bytes:
        """Everything up to the connection's end."""
        data, self._unread = bytearray(self._unread), b""
        while more := await self.stream.receive_some(65536):
            data += more
        return bytes(data)

    def close(self) -> None:
        self.stream.close_now()
