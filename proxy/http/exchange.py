"""One request's exchange with upstreams: connect or reuse, send, follow redirects, and have the response forwarded.

A task receives the request's body and sends it on while the response is awaited and forwarded; at the body's end it
watches the client, so that one that leaves ends the exchange. There is no such task where the request is complete and
its response comes at once.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from proto.http_rules import (
    Headers,
    Origin,
    Redirect,
    RequestHead,
    RequestRefused,
    Routes,
    is_repeatable,
    redirect_of,
    upstream_headers,
)
from proxy.common.eager import enter_task, readable_soon
from proxy.common.errors import ProxyError
from proxy.config.types import Http, Relay
from proxy.http.client import (
    Authenticator,
    ConnectionPasser,
    HttpClient,
    HttpIdentity,
    Locator,
    RequestRecord,
    Requests,
    Upstream,
)
from proxy.http.messages import (
    LAST_CHUNK,
    Body,
    MessageCut,
    MessageMalformed,
    MessageStream,
    chunk_of,
    compose_headers,
    join_head,
    request_line,
)
from proxy.http.routes import PathReplacement
from proxy.http.upstream import Response, UpstreamLink, UpstreamPool
from proxy.runtime.fairness.byte_budget import ByteBudget, ByteReservation
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.dialing import DialFailed

WATCH_AFTER_S: Final = 0.05
"""A client of which the request is complete is watched once its response takes longer than that."""

ATTEMPTS_MAX: Final = 3
"""Upstreams that are tried for a request where they cannot be connected, each for ``brokers.connect_timeout_ms``."""

CONTINUE_S: Final = 1.0
"""How long a body that cannot be sent twice waits for the upstream's 100 (Continue)."""

UNREAD_BYTES_MAX: Final = 16_384
"""Most bytes that are held of what a client sends while its request is answered: pipelined ones, early WebSocket."""

KEPT_PORTION_BYTES_MIN: Final = 4_096
"""Less of a kept body is joined with what follows: objects of a few bytes each would take many times their size."""

COMPOSED_MAX: Final = 8
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_SAFE: Final = frozenset({b"GET", b"HEAD"})
_IDEMPOTENT: Final = _SAFE | {b"PUT", b"DELETE", b"OPTIONS"}  # RFC 9110, 9.2.2


class ClientLeft(ProxyError):
    """The client has closed its connection."""


@dataclass(slots=True)
class HttpServices:
    """What a connection needs of its worker; a reload may replace each of them. ``replay``: bound of kept bodies.

    ``passer``: passes connections to forwarders; None where there is no channel to them. ``relay``: options of sockets.
    """

    settings: Http
    routes: Routes
    authenticator: Authenticator
    locator: Locator
    requests: Requests
    pool: UpstreamPool
    replay: ByteBudget
    response_headers: Headers = field(default_factory=list)
    replacements: Mapping[str, PathReplacement] = field(default_factory=dict)
    passer: ConnectionPasser | None = None
    relay: Relay = field(default_factory=Relay)


class RequestBody:
    """A request's body, and what of it may have to be sent once more. Call ``stop_keeping`` at the end."""

    def __init__(
        self, wire: MessageStream, body: Body, *, reservation: ByteReservation, keep_max: int, expects_continue: bool
    ) -> None:
        self._wire = wire
        self._body = body
        self._reservation = reservation
        self._keep_max = keep_max
        self._expects_continue = expects_continue
        self._keeps = True
        self.kept: list[bytes] = []
        """What was received, in order, while ``can_replay``."""

    @property
    def ended(self) -> bool:
        """Whether all of it was received."""
        return self._body.ended

    @property
    def length(self) -> int | None:
        """Its length; None where it is chunked."""
        return self._body.length

    @property
    def size_bytes(self) -> int:
        """How much of it was received."""
        return self._body.size_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it may be kept, as far as its length says."""
        length = self._body.length
        return length is not None and length <= self._keep_max

    @property
    def can_replay(self) -> bool:
        """Whether what was received can be sent once more."""
        return self._keeps

    def take_received(self) -> bytes:
        """Return what has come with the request's head, without waiting. Raises RequestRefused."""
        try:
            data = self._body.take_received()
        except MessageMalformed as error:
            raise RequestRefused(error.status, str(error), "malformed_body") from None
        self._keep(data)
        return data

    async def receive(self) -> bytes:
        """Receive a portion; empty at the end. Raises ClientLeft, RequestRefused."""
        if self._body.ended:
            return b""
        try:
            if self._expects_continue and not self._body.size_bytes and not self._wire.unread:
                self._expects_continue = False
                await self._wire.send(CONTINUE)
            data = await self._body.receive()
        except MessageMalformed as error:
            raise RequestRefused(error.status, str(error), "malformed_body") from None
        except MessageCut:
            raise ClientLeft from None
        self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        if not self._keeps or not data:
            return
        size_bytes = self._reservation.size_bytes + len(data)
        length = self._body.length
        if (length or size_bytes) <= self._keep_max >= size_bytes and self._reservation.resize(size_bytes):
            if self.kept and len(self.kept[-1]) < KEPT_PORTION_BYTES_MIN:
                self.kept[-1] += data
            else:
                self.kept.append(data)
        else:
            self.stop_keeping()

    def stop_keeping(self) -> None:
        """Drop what is kept, and ask the client for nothing more: a response is on its way, or the request is over."""
        self._keeps = False
        self._expects_continue = False
        self.kept.clear()
        self._reservation.resize(0)


Composed = dict[tuple[str, str, bytes], bytes]
"""Headers as they go upstream, by the upstream, the client's role and the proxy's own credentials: those of requests of
one connection that came with the same ones.
"""

Forward = Callable[[Response], Awaitable[None]]


class Exchange:
    """The exchange of one request. ``forward`` sends a response to the client."""

    def __init__(
        self,
        services: HttpServices,
        wire: MessageStream,
        client: HttpClient,
        *,
        head: RequestHead,
        body: RequestBody,
        identity: HttpIdentity,
        record: RequestRecord,
        forward: Forward,
        composed: Composed,
    ) -> None:
        self._services = services
        self._settings = services.settings
        self._wire = wire
        self._client = client
        self._head = head
        self._body = body
        self._identity = identity
        self._record = record
        self._forward = forward
        self._composed = composed
        self._to_head = head.method == b"HEAD"
        self._origin = Origin(client.ip, client.scheme, identity.principal.name, identity.authorization)
        self._to_resend: list[bytes] = []
        self._uploaded = False
        self._reusable = False
        self._client_failure: Exception | None = None
        self._head_scope: trio.CancelScope

    async def run(self) -> None:
        """Exchange the request. Raises RequestRefused, ClientLeft, and what ``forward`` raises."""
        name, locator = self._record.route, self._services.locator
        upstreams = await locator.locate(name, self._identity, self._client)
        target = self._head.target
        for _ in range(self._settings.max_redirects + 1):
            redirect = await self._attempt(upstreams, target)
            if redirect is None:
                return
            await enter_task()
            upstreams = [await locator.locate_redirect(name, redirect, self._identity, self._client)]
            target = redirect.target
        raise RequestRefused(502, "the brokers redirect this request too often", "redirects")

    async def _attempt(self, upstreams: Sequence[Upstream], target: bytes) -> Redirect | None:
        pool = self._services.pool
        ordered = pool.order(upstreams) if len(upstreams) > 1 else upstreams
        for upstream in ordered[:ATTEMPTS_MAX]:
            link = pool.take_idle(upstream)
            if link is not None:
                try:
                    return await self._request(link, upstream, target)
                except _LinkStale:
                    pass
            await enter_task()
            try:
                link = await pool.connect(upstream)
            except DialFailed:
                continue
            return await self._request(link, upstream, target)
        raise RequestRefused(502, "no broker can be reached", "unreachable")

    async def _request(self, link: UpstreamLink, upstream: Upstream, target: bytes) -> Redirect | None:
        """Exchange the request with one upstream; return the redirect that it answered, if that is to be followed."""
        self._record.upstream = authority = str(upstream.broker)
        self._reusable = False
        self._client_failure = None
        try:
            response = await self._begin(link, authority, target)
            if response is not None and self._uploaded and response.body.is_received:
                return await self._settle(response, upstream)  # no wait for the upstream is left
            return await self._continue_watched(link, upstream, response)
        finally:
            if self._reusable:
                self._services.pool.keep(link)
            else:
                link.wire.close()

    async def _begin(self, link: UpstreamLink, authority: str, target: bytes) -> Response | None:
        """Send the head, and what of the body has been received; return the response if it comes soon."""
        body = self._body
        waits_for_continue = not body.ended and not body.fits and not body.size_bytes
        self._to_resend = body.kept.copy()
        line = request_line(self._head.method, target)
        data = join_head(line, self._upstream_headers(authority, waits_for_continue=waits_for_continue))
        if body.fits and not body.size_bytes:
            data += body.take_received()
        self._uploaded = body.ended and not self._to_resend and body.length is not None
        try:
            if rest := link.wire.send_now(data):
                await self._bounded_send(link, rest)
        except MessageCut:
            raise self._no_response(link, sent=False) from None
        if waits_for_continue:
            return await self._soon(link, CONTINUE_S, until_continue=True)
        return await self._soon(link, WATCH_AFTER_S) if self._uploaded else None

    def _upstream_headers(self, authority: str, *, waits_for_continue: bool) -> bytes:
        """Return the lines of the request's headers for an upstream."""
        key = authority, self._origin.principal, self._origin.authorization
        if (known := self._composed.get(key)) is not None:
            return known
        headers = upstream_headers(self._head, self._origin, authority.encode())
        if waits_for_continue:
            headers.append((b"expect", b"100-continue"))
        block = compose_headers(headers)
        if len(self._composed) < COMPOSED_MAX and is_repeatable(self._head):
            self._composed[key] = block
        return block

    async def _bounded_send(self, link: UpstreamLink, data: bytes) -> None:
        await enter_task()
        with trio.move_on_after(seconds(self._settings.body_timeout_ms)) as scope:
            await link.wire.send(data)
        if scope.cancelled_caught:
            raise RequestRefused(504, "the broker does not receive the request", "upstream_slow")

    async def _soon(self, link: UpstreamLink, wait_s: float, *, until_continue: bool = False) -> Response | None:
        wire = link.wire
        if wire.is_plain and not until_continue:
            readable = await readable_soon(wire)
            if readable and wire.receive_final_head_now():
                return await self._receive_response(link)  # which has nothing to wait for
            if readable is False:
                return None
        await enter_task()
        with trio.move_on_after(wait_s):
            return await self._receive_response(link, until_continue=until_continue)
        return None

    async def _receive_response(self, link: UpstreamLink, *, until_continue: bool = False) -> Response | None:
        try:
            return await link.receive_response(to_head=self._to_head, until_continue=until_continue)
        except MessageCut:
            raise self._no_response(link, sent=True) from None
        except MessageMalformed as error:
            raise RequestRefused(502, "the broker's response is malformed", "malformed_response") from error

    def _no_response(self, link: UpstreamLink, *, sent: bool) -> Exception:
        """Return the error of a connection that ended before a response: it may only have been kept for too long."""
        may_repeat = not sent or self._head.method in _IDEMPOTENT
        if link.reused and not link.wire.unread and may_repeat and self._body.can_replay:
            return _LinkStale()
        return RequestRefused(502, "the broker closed the connection without a response", "no_response")

    async def _continue_watched(
        self, link: UpstreamLink, upstream: Upstream, response: Response | None
    ) -> Redirect | None:
        """Receive the response, if there is none yet, and settle it, while a task has an eye on the client."""
        await enter_task()
        failure: Exception | None = None
        redirect: Redirect | None = None
        is_settled = False
        self._head_scope = trio.CancelScope()
        if self._uploaded:
            self._start_response_clock()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attend_client, None if response else link, nursery.cancel_scope)
            try:
                redirect = await self._settle(response or await self._awaited_response(link), upstream)
                is_settled = True
            except Exception as error:  # noqa: BLE001 -- raised below: a nursery would wrap it
                failure = error
            nursery.cancel_scope.cancel()
        if self._client_failure is not None and (redirect is not None or not is_settled):
            raise self._client_failure
        if failure is not None:
            raise failure
        return redirect

    async def _awaited_response(self, link: UpstreamLink) -> Response:
        with self._head_scope:
            response = await self._receive_response(link)
            assert response is not None
            return response
        raise RequestRefused(504, "the broker does not answer in time", "response_timeout")

    def _start_response_clock(self) -> None:
        self._head_scope.deadline = trio.current_time() + seconds(self._settings.response_timeout_ms)

    async def _settle(self, response: Response, upstream: Upstream) -> Redirect | None:
        redirect = self._redirect_to_follow(response, upstream)
        if redirect is None:
            self._body.stop_keeping()
            await self._forward(response)
        elif response.body.length is not None:
            response.body.take_received()
        self._reusable = response.keeps_alive and response.body.ended and self._uploaded
        return redirect

    def _redirect_to_follow(self, response: Response, upstream: Upstream) -> Redirect | None:
        broker = upstream.broker
        redirect = redirect_of(
            response.status, response.headers, ("https" if upstream.tls else "http", broker.host, broker.port)
        )
        if redirect is None or not (redirect.keeps_method or self._head.method in _SAFE):
            return None
        if not self._body.can_replay:
            text = "the request's body is too large to be sent once more to the broker to which this one redirects"
            raise RequestRefused(502, text, "body_not_kept")
        return redirect

    async def _attend_client(self, link: UpstreamLink | None, scope: trio.CancelScope) -> None:
        """Send the body on, where a link still wants it, then watch the client, which ends the exchange by leaving."""
        try:
            if link is not None and not self._uploaded:
                await self._upload(link)
            await watch_client(self._wire)
        except Exception as error:  # noqa: BLE001 -- raised by `_continue_watched`
            self._client_failure = error
        scope.cancel()

    async def _upload(self, link: UpstreamLink) -> None:
        """Send the body on: what is to be sent once more, then what comes. Raises ClientLeft, RequestRefused."""
        body, timeout_s = self._body, seconds(self._settings.body_timeout_ms)
        receives = False
        with trio.CancelScope() as scope:
            try:
                while not self._uploaded:
                    scope.deadline = trio.current_time() + timeout_s
                    receives = not self._to_resend
                    portion = await body.receive() if receives else self._to_resend.pop(0)
                    receives = False
                    is_last = body.ended and not self._to_resend
                    if rest := link.wire.send_now(self._framed(portion, is_last=is_last)):
                        scope.deadline = trio.current_time() + timeout_s
                        await link.wire.send(rest)
                    self._uploaded = is_last
            except MessageCut:
                pass  # the upstream wants no more of it; its response may be there all the same
            self._start_response_clock()
            return
        if receives:
            raise RequestRefused(408, "the request's body does not come", "client_slow")
        raise RequestRefused(504, "the broker does not receive the request", "upstream_slow")

    def _framed(self, portion: bytes, *, is_last: bool) -> bytes:
        if self._body.length is not None:
            return portion
        return (chunk_of(portion) if portion else b"") + (LAST_CHUNK if is_last else b"")


async def watch_client(wire: MessageStream) -> None:
    """Hold what a client sends after its request, up to a bound. Raises ClientLeft once it has left."""
    while len(wire.unread) < UNREAD_BYTES_MAX:
        try:
            if not await wire.fill(UNREAD_BYTES_MAX - len(wire.unread)):
                raise ClientLeft
        except MessageCut:
            raise ClientLeft from None
    await trio.sleep_forever()


class _LinkStale(ProxyError):
    """A connection that was kept alive has been closed: nothing of the request was served."""
