"""HTTP/1.1 server connections: h11 parses and serializes, this module does the IO, with every wait and size bounded.

The endpoint checks a request's head first and may reject the request without reading its body.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11
import trio

from analytics.receiver.config import Limits
from proxy.common.networks import network_of

if TYPE_CHECKING:
    from analytics.receiver.write_endpoint import WriteEndpoint

HEADER_BYTES_MAX = 16 * 1024
READ_BYTES = 256 * 1024
CHUNK_BYTES_MIN = 512
CHUNKS_SMALL_MAX = 256
"""A body has at most so many chunks, and another one for each CHUNK_BYTES_MIN: to parse one costs as much as to receive
thousands of bytes. Prometheus sends no chunks; HTTP proxies make larger ones of what they receive.
"""
CHUNKS_AT_ONCE = 64
"""Chunks that are parsed before other tasks have a turn; one read may hold tens of thousands."""
LINGER_S = 2.0
LINGER_BYTES_MAX = 64 * 1024 * 1024

Headers = list[tuple[str, str]]


@dataclass(frozen=True)
class RequestHead:
    """A request's method, path and headers (names in lower case), and the peer's address."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    address: str = ""

    def header(self, name: str) -> str:
        """Return a header's value; empty if the header is absent."""
        return self.headers.get(name.encode(), b"").decode("latin-1")


@dataclass(frozen=True)
class Response:
    """An HTTP response. `reason` is a metric's label where the status alone is ambiguous."""

    status: int
    body: str | bytes = ""
    headers: Headers = field(default_factory=list)
    reason: str = ""


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of a connection. `authenticated`: it has presented a valid token or client certificate;
    `answering`: a whole request of it is being answered.
    """

    address: str = ""
    authenticated: bool = False
    answering: bool = False


class BodyBudget:
    """Budget of body bytes in memory. One sender gets at most half of it, so that it cannot block the others."""

    def __init__(self, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bytes_max = bytes_max
        self._by_sender: Counter[str] = Counter()

    def reserve_bytes(self, address: str, size_bytes: int) -> bool:
        """Reserve `size_bytes` for a sender's address; return False, and reserve nothing, beyond the budget."""
        sender = network_of(address)
        if (
            self.held_bytes + size_bytes > self._bytes_max
            or self._by_sender[sender] + size_bytes > self._bytes_max // 2
        ):
            return False
        self.held_bytes += size_bytes
        self._by_sender[sender] += size_bytes
        return True

    def release_bytes(self, address: str, size_bytes: int) -> None:
        """Release `size_bytes` that were reserved for the address."""
        sender = network_of(address)
        self.held_bytes -= size_bytes
        self._by_sender[sender] -= size_bytes
        if self._by_sender[sender] <= 0:
            del self._by_sender[sender]


class HttpServer:
    """HTTP server for the connections of one listener, with a shared body budget and a draining state."""

    def __init__(self, endpoint: "WriteEndpoint", limits: Limits) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.draining = False
        self.body_budget = BodyBudget(limits.max_held_bytes)
        self._idle: set[trio.CancelScope] = set()

    def start_drain(self) -> None:
        """Stop accepting requests: idle connections close now, busy ones after their current response."""
        self.draining = True
        for scope in self._idle:
            scope.cancel()

    async def serve_connection(
        self, stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.SocketStream], peer: Peer | None = None
    ) -> None:
        """Serve a connection until it closes, and keep `peer` up to date. Errors that the peer can cause are not
        raised.
        """
        try:
            await _Connection(self, stream, peer or Peer()).run()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass  # the peer has disconnected, or got an error response
        finally:
            with trio.move_on_after(self.limits.write_timeout_ms / 1000):
                await stream.aclose()

    async def wait_for_bytes(self, wait: Callable[[], Awaitable[bytes]], timeout_s: float) -> bytes:
        """Wait for an idle connection's next bytes; return b"" after the timeout or when the server drains."""
        with trio.move_on_after(timeout_s) as scope:
            self._idle.add(scope)
            try:
                if not self.draining:
                    return await wait()
            finally:
                self._idle.discard(scope)
        return b""


class _Connection:
    def __init__(
        self, server: HttpServer, stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.SocketStream], peer: Peer
    ) -> None:
        self._server = server
        self._peer = peer
        self._address = peer.address
        self._reserved_bytes = 0
        self._limits = server.limits
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)

    async def run(self) -> None:
        first = True
        while True:
            timeout_ms = self._limits.header_timeout_ms if first else self._limits.idle_timeout_ms
            first = False
            if not self._http.trailing_data[0]:
                data = await self._server.wait_for_bytes(self._receive, timeout_ms / 1000)
                if not data:
                    return
                self._http.receive_data(data)
            if not await self._serve_request():
                return
            self._http.start_next_cycle()

    async def _serve_request(self) -> bool:
        """Serve one request; return True if the connection may carry another."""
        whole = False
        try:
            head = await self._read_head()
            if head is None:
                return False
            response = await self._server.endpoint.check_head(head)
            if response is None:
                self._peer.authenticated |= self._server.endpoint.authenticates
                response, whole = await self._read_body_and_respond(head)
        except h11.RemoteProtocolError as error:
            return await self._send_refusal(None, Response(error.error_status_hint, "this is no HTTP request"))
        if whole:
            await self._send(response, close=self._server.draining)
            return self._http.our_state is h11.DONE
        return await self._send_refusal(head, response)

    async def _read_body_and_respond(self, head: RequestHead) -> tuple[Response, bool]:
        """Read the body and return the response, and True if the whole body was read. Releases the body's budget."""
        try:
            body = await self._read_body(head)
            if isinstance(body, Response):
                return body, False
            self._peer.answering = True
            return await self._server.endpoint.respond(head, body), True
        finally:
            self._peer.answering = False
            self._server.body_budget.release_bytes(self._address, self._reserved_bytes)
            self._reserved_bytes = 0

    async def _send_refusal(self, head: RequestHead | None, response: Response) -> bool:
        """Respond before the whole request was read, and return False: the connection cannot be reused."""
        if self._http.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send(self._server.endpoint.on_refusal(head, response), close=True)
            await self._discard_until_eof()
        return False

    async def _read_head(self) -> RequestHead | None:
        with trio.move_on_after(self._limits.header_timeout_ms / 1000):
            event = await self._next_event()
            if isinstance(event, h11.Request):
                path = event.target.partition(b"?")[0].decode("latin-1")
                return RequestHead(event.method.decode("latin-1"), path, dict(event.headers), self._address)
        return None

    async def _read_body(self, head: RequestHead) -> bytes | Response:
        """Read the body; return an error response if it is late, too large, or in too many chunks."""
        parts: list[bytes] = []
        size = chunks = 0
        with trio.move_on_after(self._limits.body_timeout_ms / 1000):
            if self._http.they_are_waiting_for_100_continue:
                await self._stream.send_all(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
            while True:
                event = await self._next_event()
                if isinstance(event, h11.EndOfMessage):
                    return b"".join(parts)
                if not isinstance(event, h11.Data):
                    raise trio.BrokenResourceError(f"{head.method} {head.path}: its sender went away")
                size += len(event.data)
                chunks += event.chunk_start
                if chunks > CHUNKS_SMALL_MAX + size // CHUNK_BYTES_MIN:
                    text = f"the body has too many chunks: {chunks} in {size} bytes"
                    return Response(400, text, reason="malformed")
                if event.chunk_start and chunks % CHUNKS_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                if size > self._server.endpoint.body_bytes_max:
                    return Response(413, f"the body is larger than {self._server.endpoint.body_bytes_max} bytes")
                if not self._server.body_budget.reserve_bytes(self._address, len(event.data)):
                    text = "too many bytes of requests are held; send it again later (limits.max_held_bytes)"
                    return Response(503, text, [("Retry-After", "5")], "held_bytes")
                self._reserved_bytes += len(event.data)
                parts.append(bytes(event.data))
        # 503, not a 4xx: senders retry only the former.
        return Response(503, "the body did not come in time", [("Retry-After", "1")])

    async def _next_event(self) -> h11.Event | type[h11.PAUSED] | type[h11.NEED_DATA]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._receive())
        return event

    async def _receive(self) -> bytes:
        # h11 bounds only incomplete heads, so one read must not hold more than the largest head allowed.
        size = READ_BYTES if self._http.their_state is h11.SEND_BODY else HEADER_BYTES_MAX
        return bytes(await self._stream.receive_some(size))

    async def _send(self, response: Response, *, close: bool) -> None:
        text = response.body.encode() if isinstance(response.body, str) else response.body
        headers = [*response.headers]
        if response.status not in {204, 304}:
            headers.append(("Content-Length", str(len(text))))
            headers.append(("Content-Type", "text/plain; charset=utf-8"))
        if close:
            headers.append(("Connection", "close"))
        reason = HTTPStatus(response.status).phrase.encode()
        data = self._http.send(h11.Response(status_code=response.status, headers=headers, reason=reason)) or b""
        if text:
            data += self._http.send(h11.Data(data=text)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        with trio.move_on_after(self._limits.write_timeout_ms / 1000) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the sender does not take its answer")

    async def _discard_until_eof(self) -> None:
        """Read and drop what the peer still sends: closing with unread bytes would reset the connection, and the peer
        might never see the response.
        """
        if not isinstance(self._stream, trio.SSLStream):
            await self._stream.send_eof()
        size = 0
        with trio.move_on_after(LINGER_S):
            while size < LINGER_BYTES_MAX:
                data = await self._receive()
                if not data:
                    return
                size += len(data)
