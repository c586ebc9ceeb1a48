"""HTTP/1.1 for one connection: h11 decides from bytes, this does the IO, with a bound on every wait and every size.

An endpoint says from a request's head whether it wants the body at all, then answers it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import h11
import trio

from analytics.receiver.bodies import Bodies
from analytics.receiver.config import Limits

HEADER_BYTES_MAX = 16 * 1024
READ_BYTES = 256 * 1024
LINGER_S = 2.0
LINGER_BYTES_MAX = 64 * 1024 * 1024

Headers = list[tuple[str, str]]


@dataclass(frozen=True)
class Head:
    """A request without its body; `headers` by name in lower case, `address` its sender's."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    address: str = ""

    def text(self, name: str) -> str:
        """A header's value; empty if it is not there."""
        return self.headers.get(name.encode(), b"").decode("latin-1")


@dataclass(frozen=True)
class Response:
    """An answer; `text` is for people, `reason` a metric's label where the status does not say enough."""

    status: int
    text: str | bytes = ""
    headers: Headers = field(default_factory=list)
    reason: str = ""


class Endpoint(Protocol):
    """What stands behind a listener."""

    body_bytes_max: int

    async def admit(self, head: Head) -> Response | None:
        """The answer that needs no body (and after which the connection ends); None: let the body come."""

    async def answer(self, head: Head, body: bytes) -> Response:
        """The answer to a whole request."""

    def refuse(self, head: Head | None, response: Response) -> Response:
        """Called for what this module answers by itself; returns what is sent."""


class Door:
    """The connections of one listener, and whether they shall end."""

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.draining = False
        self.bodies = Bodies(limits.max_held_bytes)
        self._idle: set[trio.CancelScope] = set()

    def drain(self) -> None:
        """Let no connection begin another request; those that wait for one end now."""
        self.draining = True
        for scope in self._idle:
            scope.cancel()

    async def serve(
        self, stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.SocketStream], address: str = ""
    ) -> None:
        """Serve a connection from an address until it ends; raises nothing that its peer can bring about."""
        try:
            await _Connection(self, stream, address).run()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass  # the peer is gone, or was told what is wrong
        finally:
            with trio.move_on_after(self.limits.write_timeout_ms / 1000):
                await stream.aclose()

    async def idle(self, wait: Callable[[], Awaitable[bytes]], timeout_s: float) -> bytes:
        """Wait for a connection's next bytes; nothing if they do not come in time or the door is draining."""
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
        self, door: Door, stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.SocketStream], address: str
    ) -> None:
        self._door = door
        self._address = address
        self._held_bytes = 0
        self._limits = door.limits
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)

    async def run(self) -> None:
        first = True
        while True:
            timeout_ms = self._limits.header_timeout_ms if first else self._limits.idle_timeout_ms
            first = False
            if not self._http.trailing_data[0]:
                data = await self._door.idle(self._receive, timeout_ms / 1000)
                if not data:
                    return
                self._http.receive_data(data)
            if not await self._exchange():
                return
            self._http.start_next_cycle()

    async def _exchange(self) -> bool:
        """One request and its answer; returns whether the connection may have another."""
        whole = False
        try:
            head = await self._head()
            if head is None:
                return False
            response = await self._door.endpoint.admit(head)
            if response is None:
                response, whole = await self._body_answer(head)
        except h11.RemoteProtocolError as error:
            return await self._refuse(None, Response(error.error_status_hint, "this is no HTTP request"))
        if whole:
            await self._send(response, close=self._door.draining)
            return self._http.our_state is h11.DONE
        return await self._refuse(head, response)

    async def _body_answer(self, head: Head) -> tuple[Response, bool]:
        """Take the body and answer it; the second says whether it came to its end. Nothing of it is held afterwards."""
        try:
            body = await self._body(head)
            if isinstance(body, Response):
                return body, False
            return await self._door.endpoint.answer(head, body), True
        finally:
            self._door.bodies.release(self._address, self._held_bytes)
            self._held_bytes = 0

    async def _refuse(self, head: Head | None, response: Response) -> bool:
        """Answer before the request was read to its end: after that nothing can follow on the connection."""
        if self._http.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send(self._door.endpoint.refuse(head, response), close=True)
            await self._linger()
        return False

    async def _head(self) -> Head | None:
        with trio.move_on_after(self._limits.header_timeout_ms / 1000):
            event = await self._event()
            if isinstance(event, h11.Request):
                path = event.target.partition(b"?")[0].decode("latin-1")
                return Head(event.method.decode("latin-1"), path, dict(event.headers), self._address)
        return None

    async def _body(self, head: Head) -> bytes | Response:
        """The body, or what to answer if it does not come in time or is too large."""
        parts: list[bytes] = []
        size = 0
        with trio.move_on_after(self._limits.body_timeout_ms / 1000):
            if self._http.they_are_waiting_for_100_continue:
                await self._stream.send_all(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
            while True:
                event = await self._event()
                if isinstance(event, h11.EndOfMessage):
                    return b"".join(parts)
                if not isinstance(event, h11.Data):
                    raise trio.BrokenResourceError(f"{head.method} {head.path}: its sender went away")
                size += len(event.data)
                if size > self._door.endpoint.body_bytes_max:
                    return Response(413, f"the body is larger than {self._door.endpoint.body_bytes_max} bytes")
                if not self._door.bodies.hold(self._address, len(event.data)):
                    text = "too many bytes of requests are held; send it again later (limits.max_held_bytes)"
                    return Response(503, text, [("Retry-After", "5")], "held_bytes")
                self._held_bytes += len(event.data)
                parts.append(bytes(event.data))
        # A sender does not repeat what got a 4xx. This it shall.
        return Response(503, "the body did not come in time", [("Retry-After", "1")])

    async def _event(self) -> h11.Event | type[h11.PAUSED] | type[h11.NEED_DATA]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._receive())
        return event

    async def _receive(self) -> bytes:
        # h11 bounds a head only until it is complete: so much at a time may be one
        size = READ_BYTES if self._http.their_state is h11.SEND_BODY else HEADER_BYTES_MAX
        return bytes(await self._stream.receive_some(size))

    async def _send(self, response: Response, *, close: bool) -> None:
        text = response.text.encode() if isinstance(response.text, str) else response.text
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

    async def _linger(self) -> None:
        """Closing with bytes unread would reset the connection, and the sender might never see the answer."""
        if not isinstance(self._stream, trio.SSLStream):
            await self._stream.send_eof()
        size = 0
        with trio.move_on_after(LINGER_S):
            while size < LINGER_BYTES_MAX:
                data = await self._receive()
                if not data:
                    return
                size += len(data)
