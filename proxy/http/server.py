"""A client's connection: one request after the other, each phase with its bound, each refusal with a response."""

import contextlib
import math
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

import h11
import msgspec
import trio

from proto.http_rules import (
    Headers,
    RequestHead,
    RequestRefused,
    connection_options,
    downstream_headers,
    is_repeatable,
    read_repeated,
    read_request,
)
from proxy.common.eager import enter_task
from proxy.common.errors import ProxyError
from proxy.config.upstreams import WEBSOCKET
from proxy.http.client import HttpClient, RequestRecord
from proxy.http.exchange import COMPOSED_MAX, ClientLeft, Composed, Exchange, HttpServices, RequestBody
from proxy.http.messages import (
    LAST_CHUNK,
    Body,
    ChunkedBody,
    HttpStream,
    MessageCut,
    MessageMalformed,
    MessageStream,
    SizedBody,
    chunk_of,
    compose_head,
    parse_head,
    without,
)
from proxy.http.taskless import taskless_serving
from proxy.http.upstream import Response
from proxy.http.websocket import ForwarderLost, RequestLeftBehind, WebSocketExchange
from proxy.runtime.fairness.byte_budget import ByteReservation
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import seconds

LINGER_S: Final = 1.0
LINGER_BYTES_MAX: Final = 256 * 1024
UPLOAD_LINGER_S: Final = 10.0
UPLOAD_LINGER_BYTES_MAX: Final = 64 * 2**20
"""The same where a request's body is still to come: many clients send all of it before they look for a response."""

STATUS_PATH: Final = "/status.html"
CLIENT_LEFT: Final = 499
"""nginx's status of a request whose client has left before its response."""

_REQUEST_LINE: Final = re.compile(rb"([^ \r\n]+) ([^ \r\n]+) HTTP/1\.1")
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_NO_BODY: Final = frozenset({204, 304})
_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}

_TLS_HANDSHAKE = b"\x16\x03"
"""How a TLS record with a ClientHello begins."""


class ResponseCut(ProxyError):
    """A response cannot be ended properly after its head was sent; the text names the cause."""


@dataclass(slots=True)
class _KnownHeaders:
    """The headers of a request, which the next ones of its connection mostly have again; ``block``: as received."""

    block: bytes = b""
    head: RequestHead | None = None
    composed: Composed = field(default_factory=dict, repr=False)


class HttpConnection:
    """One client's connection. ``serve`` it once; ``scope`` ends it at once."""

    def __init__(self, stream: HttpStream, client: HttpClient, services: HttpServices, received: bytes = b"") -> None:
        self.client = client
        self.scope = trio.CancelScope()
        self.is_idle = True
        """Whether it is between requests, so that it may be closed without harm."""

        self._drains = False
        self._services = services
        self._wire = MessageStream(stream, head_bytes_max=services.settings.max_head_bytes)
        self._wire.unread = received
        self._is_given_away = False
        self._must_shut_down = False
        self._served = 0
        self._known = _KnownHeaders()
        # of the request under way
        self._http_1_0 = False
        self._to_head = False
        self._keeps_alive = False
        self._head_sent = False
        self._body = Body()
        self._record = RequestRecord(client, 0.0)

    def drain(self) -> None:
        """Serve no further request but one that is on its way already, then close the connection.

        A client may repeat a request on a connection that was closed while idle; the first one of a connection fails.
        """
        self._drains = True
        if self.is_idle and self._served and self._wire.is_silent:
            self.scope.cancel()

    async def serve(self) -> None:
        """Serve requests until the connection ends, and close it. Raises nothing but Cancelled, and defects."""
        try:
            with self.scope:
                while await self._serve_next() and not (self._drains and self._wire.is_silent):
                    pass
                if not self._is_given_away:
                    await self._linger()
        except (MessageCut, ClientLeft, ForwarderLost, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone
        except ResponseCut:
            self._reset_at_close()
        finally:
            self.is_idle = False
            if self._must_shut_down:
                self._shut_down()
            self._wire.close()

    async def _serve_next(self) -> bool:
        """Serve a request, or several; return False where the connection is to be closed."""
        wire, settings = self._wire, self._services.settings
        wire.skip_empty_line()
        if wire.unread:
            self.is_idle = False
            # Thousands of pipelined requests may be there: others have their turns, too.
            await trio.lowlevel.checkpoint()
            return await self.serve_received()
        self.is_idle = True
        if self.may_be_as_before and (taskless := taskless_serving(self, wire)):
            return await taskless.run()
        self.scope.deadline = trio.current_time() + self.idle_timeout_s  # cheaper than a scope for each request
        more = await wire.fill(settings.max_head_bytes)
        self.scope.deadline = math.inf
        if not more:
            return False
        self.is_idle = False
        wire.skip_empty_line()
        return await self.serve_received()

    @property
    def idle_timeout_s(self) -> float:
        """How long it may be without a request."""
        settings = self._services.settings
        return seconds(settings.idle_timeout_ms if self._served else settings.head_timeout_ms)

    @property
    def head_bytes_max(self) -> int:
        """Bound of a request's head."""
        return self._services.settings.max_head_bytes

    @property
    def may_be_as_before(self) -> bool:
        """Whether ``is_as_before`` may be true of what comes next."""
        return self._known.head is not None

    def is_as_before(self, received: bytes) -> bool:
        """Return whether what was received is one request, whole, without a body, with the headers of the last one."""
        known = self._known
        return (
            known.head is not None
            and received.endswith(known.block)
            and _REQUEST_LINE.fullmatch(received, 0, len(received) - len(known.block) - 2) is not None
            and received.startswith(b"\r\n", len(received) - len(known.block) - 2)
        )

    async def serve_received(self) -> bool:
        """Serve a request of which the first bytes are there; return False where the connection is to be closed.

        It is eager: see proxy.common.eager.
        """
        received = False
        self._record = record = RequestRecord(self.client, trio.current_time())
        self._http_1_0 = self._to_head = self._head_sent = self._keeps_alive = False
        self._body = Body()
        try:
            try:
                raw = await self._receive_head()
                received = True
                head = self._read_head(raw)
                record.method, record.path = head.method.decode("ascii"), head.path
                await self._answer(head)
            except MessageMalformed as error:
                raise RequestRefused(error.status, str(error), "malformed") from None
        except RequestRefused as refusal:
            record.cause = refusal.reason or "refused"
            if isinstance(refusal, RequestLeftBehind):
                self._keeps_alive, self._must_shut_down = False, True
            if self._head_sent:
                raise ResponseCut(record.cause) from None
            await self._send_refusal(refusal)
        except ClientLeft:
            record.status, record.cause = record.status or CLIENT_LEFT, "client_left"
            raise
        except (ResponseCut, ForwarderLost) as cut:
            record.cause = str(cut)
            raise
        except BaseException:
            record.cause = record.cause or "ended"
            raise
        finally:
            if received or record.status:
                record.request_bytes = self._body.size_bytes
                self._services.requests.end(record)
        self._served += 1
        return self._keeps_alive and not self._is_given_away

    async def _receive_head(self) -> bytes:
        """Receive a request's head, of which a part is there."""
        wire, settings = self._wire, self._services.settings
        if wire.unread.startswith(_TLS_HANDSHAKE):  # which would end in no line, and wait
            raise RequestRefused(400, "This is TLS, where plain HTTP is spoken", "tls")
        if (head := wire.take_head()) is not None:
            return head
        await enter_task()
        with trio.move_on_after(seconds(settings.head_timeout_ms)):
            return await wire.receive_head()
        raise RequestRefused(408, "the request's head does not come", "head_timeout")

    def _read_head(self, raw: bytes) -> RequestHead:
        line, _, block = raw.partition(b"\r\n")
        known = self._known
        if known.head is not None and block == known.block and (parts := _REQUEST_LINE.fullmatch(line)):
            self._to_head = parts[1] == b"HEAD"
            head = read_repeated(known.head, parts[1], parts[2])
            self._keeps_alive = True  # or there would be no further request
            return head
        head = self._parse_head(raw)
        repeatable = is_repeatable(head)
        self._known = _KnownHeaders(block, head) if repeatable else _KnownHeaders()
        return head

    def _parse_head(self, raw: bytes) -> RequestHead:
        http = h11.Connection(h11.SERVER)
        event = parse_head(http, raw)
        if not isinstance(event, h11.Request):
            raise MessageMalformed("this is no request")
        self._to_head = event.method == b"HEAD"
        self._http_1_0 = event.http_version != b"1.1"
        headers = list(event.headers)
        head = read_request(event.method, event.target, headers, event.http_version)
        if not head.has_body:
            self._body = Body()
        elif head.content_length is None:
            self._body = ChunkedBody(self._wire, http)
        else:
            self._body = SizedBody(self._wire, head.content_length)
        self._keeps_alive = not self._http_1_0 and b"close" not in connection_options(headers)
        return head

    async def _answer(self, head: RequestHead) -> None:
        services, record = self._services, self._record
        if head.path == STATUS_PATH:
            await self._send_own(200, b"OK", b"text/plain; charset=utf-8")
            return
        route = services.routes.find(head.path)
        if route is None:
            raise RequestRefused(404, "this path is not served here", "no_route")
        record.route = route
        if (replacement := services.replacements.get(route)) is not None:
            head = replace(head, target=replacement.apply(head.target))
        if head.upgrade and (route != WEBSOCKET or services.passer is None):
            raise RequestRefused(501, "WebSocket is not served here", "no_websocket")
        services.requests.begin(record)
        record.counted = True
        identity = await services.authenticator.authenticate(head, route, self.client)
        record.principal = identity.principal.name
        if head.upgrade:
            exchange = WebSocketExchange(services, self._wire, self.client, head, identity, record, self._forward)
            self._is_given_away = await exchange.run()
            return
        settings = services.settings
        # Without a body it keeps nothing.
        owner = owner_of(record.principal, self.client.address) if head.has_body else ""
        body = RequestBody(
            self._wire,
            self._body,
            reservation=ByteReservation(services.replay, owner),
            keep_max=settings.max_replay_bytes,
            expects_continue=head.expects_continue and not self._http_1_0,
        )
        try:
            await Exchange(
                services,
                self._wire,
                self.client,
                head=head,
                body=body,
                identity=identity,
                record=record,
                forward=self._forward,
                composed=self._known.composed,
            ).run()
        finally:
            body.stop_keeping()

    async def _forward(self, response: Response) -> None:
        """Send an upstream's response to the client. Raises RequestRefused, ClientLeft, ResponseCut."""
        body = response.body
        head, is_chunked = self._head_of(response)

        def frame(portion: bytes) -> bytes:
            if not is_chunked:
                return portion
            return (chunk_of(portion) if portion else b"") + (LAST_CHUNK if body.ended else b"")

        try:
            data = head + frame(body.take_received())
        except MessageMalformed as error:
            raise RequestRefused(502, "the broker's response is malformed", "malformed_response") from error
        self._record.status = response.status
        self._head_sent = True
        try:
            unsent = [self._send_now(data)]
            del data  # as long as a client takes its time for what follows, this would be held, too
            if unsent[0] or not body.ended:
                await self._send_body(body, unsent, frame)
        except (MessageCut, MessageMalformed):
            raise ResponseCut("upstream_cut") from None
        finally:
            self._record.response_bytes = body.size_bytes

    def _head_of(self, response: Response) -> tuple[bytes, bool]:
        """Return the head of a response as the client gets it, and whether its body goes in chunks."""
        length, is_chunked = response.body.length, False
        key = self._to_head, self._keeps_on, tuple(self._services.response_headers)
        if length is not None and (known := response.composed.get(key)) is not None:
            self._keeps_alive = self._keeps_on
            return known, False
        headers = downstream_headers(response.headers, self._services.response_headers)
        if not self._to_head:
            headers = without(headers, _FRAMING)
            if response.status in _NO_BODY:
                pass
            elif length is not None:
                headers.append((b"content-length", b"%d" % length))
            elif self._http_1_0:
                self._keeps_alive = False
            else:
                headers.append((b"transfer-encoding", b"chunked"))
                is_chunked = True
        head = self._compose(response.status, response.reason, headers)
        if length is not None and len(response.composed) < COMPOSED_MAX:
            response.composed[key] = head
        return head, is_chunked

    async def _send_body(self, body: Body, unsent: list[bytes], frame: Callable[[bytes], bytes]) -> None:
        """Send what is unsent, which is taken from the list, and the rest of a response's body."""
        await enter_task()
        rest = unsent.pop()
        timeout_s = seconds(self._services.settings.body_timeout_ms)
        with trio.CancelScope() as scope:
            while rest or not body.ended:
                scope.deadline = trio.current_time() + timeout_s
                if rest:
                    await self._send(rest)
                    rest = b""
                else:
                    rest = self._send_now(frame(await body.receive()))
            return
        raise ResponseCut("client_slow" if rest else "upstream_slow")

    def _send_now(self, data: bytes) -> bytes:
        try:
            return self._wire.send_now(data)
        except MessageCut:
            raise ClientLeft from None

    async def _send(self, data: bytes) -> None:
        try:
            await self._wire.send(data)
        except MessageCut:
            raise ClientLeft from None

    @property
    def _keeps_on(self) -> bool:
        """Whether the connection goes on after the response."""
        return self._keeps_alive and self._body.ended and not self._drains

    def _compose(self, status: int, reason: bytes, headers: Headers) -> bytes:
        """Return a response's head. What is left of the request's body leaves no room for a further request."""
        self._keeps_alive = self._keeps_on
        if not self._keeps_alive:
            headers.append((b"connection", b"close"))
        return compose_head(b"HTTP/1.1 %d %b" % (status, reason), headers)

    async def _send_refusal(self, refusal: RequestRefused) -> None:
        if isinstance(self._body, SizedBody):
            self._body.take_received()  # where that is all of it, the connection can go on
        headers = []
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b'Bearer realm="pulsar"'))
        body = msgspec.json.encode({"reason": refusal.text})
        await self._send_own(refusal.status, body, b"application/json", headers)

    async def _send_own(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
        own = downstream_headers(own, self._services.response_headers)
        head = self._compose(status, _PHRASES.get(status, b""), own)
        self._record.status = status
        self._head_sent = True
        rest = self._send_now(head if self._to_head else head + body)
        if not rest:
            return
        await enter_task()
        with trio.move_on_after(seconds(self._services.settings.body_timeout_ms)) as scope:
            await self._send(rest)
        if scope.cancelled_caught:
            raise ResponseCut("client_slow")

    async def _linger(self) -> None:
        """Read on for a while: to close with bytes unread would reset the connection, and lose the response."""
        wait_s, left = LINGER_S, LINGER_BYTES_MAX
        if not self._body.ended:
            wait_s, left = UPLOAD_LINGER_S, UPLOAD_LINGER_BYTES_MAX
        with trio.move_on_after(wait_s):
            await self._wire.stream.send_eof()
            while left > 0 and (data := await self._wire.receive(left)):
                left -= len(data)

    def _shut_down(self) -> None:
        """End the connection for the copy of it, too, that waits for a forwarder."""
        with contextlib.suppress(OSError):  # it has gone
            self._wire.transport.socket.shutdown(socket.SHUT_RDWR)

    def _reset_at_close(self) -> None:
        """Have the close reset the connection, so that the client takes no cut body for a whole one."""
        self._wire.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
