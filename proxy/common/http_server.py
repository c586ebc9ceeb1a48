"""HTTP/1.1 server for untrusted clients: h11 parses, this does the IO, with a bound on every wait, size and number.

One request a connection: a client that asks every few seconds loses nothing by that, and no connection is ever idle.
A response may be a stream, whose parts are each received in time.
Where `connections_max` are open, the next one displaces the oldest from the address that has the most, so that a client
that holds connections open does not keep others from being served.
"""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import h11
import trio

from proxy.common.logs import get_logger
from proxy.common.networks import peer_address

CONNECTIONS_MAX = 256
HEAD_BYTES_MAX = 8 * 1024
HEAD_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
"""Time to produce a response and to have it received."""
PART_TIMEOUT_S = 5.0
"""Time to have a part of a stream received."""
LINGER_S = 0.5
LINGER_BYTES_MAX = 64 * 1024
ACCEPT_PAUSE_S = 0.1

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request's head; `path` without the `query`; `host`: the header `Host`, empty where there is none."""

    method: str
    path: str
    authorization: list[bytes]
    client: str
    query: str = ""
    host: bytes = b""
    fetch_site: bytes = b""
    """The header `Sec-Fetch-Site`, by which a browser tells whether another site's page asks; empty: there is none."""


Send = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response; the connection is closed after it. ``stream``: sends its body in parts, instead of ``body``."""

    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    stream: Callable[[Send], Awaitable[None]] | None = None


RequestHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass(eq=False, slots=True)
class _Connection:
    stream: trio.abc.HalfCloseableStream
    address: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    closed: trio.Event = field(default_factory=trio.Event)


class HttpServer:
    """Server of the operators' port. ``displaced``: connections closed in favour of newer ones."""

    def __init__(self, handle_request: RequestHandler, connections_max: int = CONNECTIONS_MAX) -> None:
        self._handle_request = handle_request
        self._connections_max = connections_max
        self._accepting = trio.CancelScope()
        self._streams: set[trio.CancelScope] = set()
        self._connections: dict[_Connection, None] = {}  # in the order in which they came
        self.displaced = 0

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def stop_accepting(self) -> None:
        """Serve the open connections to their end, and leave new ones to the successor at the same port. Streams, which
        have no end, end now.
        """
        self._accepting.cancel()
        for scope in self._streams:
            scope.cancel()

    async def serve(self, listener: trio.abc.Listener[trio.SocketStream]) -> None:
        """Serve until `stop_accepting`, and then until the last connection has ended."""
        async with trio.open_nursery() as nursery:
            with self._accepting:
                while True:
                    try:
                        stream = await listener.accept()
                    except OSError as error:  # no descriptors, no memory to be had
                        get_logger().error("the admin port cannot accept a connection", reason=str(error))
                        await trio.sleep(ACCEPT_PAUSE_S)
                        continue
                    await self.admit_connection(stream, peer_address(stream), nursery)

    async def admit_connection(self, stream: trio.abc.HalfCloseableStream, address: str, nursery: trio.Nursery) -> None:
        """Serve a connection in a task of its own; displace another one where there are too many."""
        with trio.CancelScope(shield=True):  # it only waits for tasks that are cancelled
            while len(self._connections) >= self._connections_max:
                one = self._connection_to_displace()
                self.displaced += 1
                one.scope.cancel()
                await one.closed.wait()
        connection = _Connection(stream, address)
        self._connections[connection] = None
        nursery.start_soon(self._serve_one, connection)

    def _connection_to_displace(self) -> _Connection:
        counts = Counter(one.address for one in self._connections)
        most = max(counts.values())
        return next(one for one in self._connections if counts[one.address] == most)

    async def _serve_one(self, connection: _Connection) -> None:
        try:
            with connection.scope:
                await self._exchange(connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
            pass  # the peer has gone, or got a response that names the error
        except Exception as error:  # noqa: BLE001 -- a barrier around each connection
            get_logger().error("the admin port met a defect", exc_info=error)
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(connection.stream)
            del self._connections[connection]
            connection.closed.set()

    async def _exchange(self, connection: _Connection) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        stream = connection.stream
        request: HttpRequest | None = None
        try:
            with trio.move_on_after(HEAD_TIMEOUT_S):
                request = await _read_head(http, connection)
            if request is None:
                return
        except h11.RemoteProtocolError as error:
            response = HttpResponse(error.error_status_hint, b"this is no HTTP request\n")
        else:
            response = HttpResponse(503, b"no answer in time\n")
        with trio.move_on_after(ANSWER_TIMEOUT_S) as answering:
            if request is not None:
                response = await self._handle_request(request)
            with_body = request is None or request.method != "HEAD"
            await _send(http, stream, response, with_body=with_body)
            if response.stream is None or not with_body:
                await _linger(stream)
                return
        if response.stream is not None and not (answering.cancelled_caught or self._accepting.cancel_called):
            await self._send_stream(http, stream, response.stream)

    async def _send_stream(
        self, http: h11.Connection, stream: trio.abc.SendStream, produce: Callable[[Send], Awaitable[None]]
    ) -> None:
        async def send(part: bytes) -> None:
            with trio.fail_after(PART_TIMEOUT_S):
                await stream.send_all(http.send(h11.Data(data=part)) or b"")

        with contextlib.suppress(trio.TooSlowError), trio.CancelScope() as scope:
            self._streams.add(scope)
            try:
                await produce(send)
                with trio.fail_after(PART_TIMEOUT_S):
                    await stream.send_all(http.send(h11.EndOfMessage()) or b"")
            finally:
                self._streams.discard(scope)


async def _read_head(http: h11.Connection, connection: _Connection) -> HttpRequest | None:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(bytes(await connection.stream.receive_some(HEAD_BYTES_MAX)))
    if not isinstance(event, h11.Request):
        return None
    path, _, query = event.target.decode("latin-1").partition("?")
    authorization = [value for name, value in event.headers if name == b"authorization"]
    host = next((value for name, value in event.headers if name == b"host"), b"")  # h11 takes no second one
    site = next((value for name, value in event.headers if name == b"sec-fetch-site"), b"")
    return HttpRequest(event.method.decode("latin-1"), path, authorization, connection.address, query, host, site)


async def _send(http: h11.Connection, stream: trio.abc.SendStream, response: HttpResponse, *, with_body: bool) -> None:
    headers = [
        ("Content-Type", response.content_type),
        *([("Content-Length", str(len(response.body)))] if response.stream is None else ()),
        ("Connection", "close"),
        *response.headers,
    ]
    reason = HTTPStatus(response.status).phrase.encode()
    head = http.send(h11.Response(status_code=response.status, headers=headers, reason=reason)) or b""
    await stream.send_all(head)
    if with_body and response.body:
        await stream.send_all(response.body)


async def _linger(stream: trio.abc.HalfCloseableStream) -> None:
    """Read on for LINGER_S: to close with bytes unread would reset the connection, and the response might be lost."""
    await stream.send_eof()
    left = LINGER_BYTES_MAX
    with trio.move_on_after(LINGER_S):
        while left > 0 and (data := await stream.receive_some(left)):
            left -= len(data)
