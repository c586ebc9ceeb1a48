"""WebSocket: an upgrade that an upstream accepts, after which both connections are passed to a forwarder.

It relays them blindly, holds them in the fd store, and sends the client the response's head once they are safe there.
What uses TLS cannot leave this process: in its place the forwarder gets one end of a pair of sockets, and the other is
connected to TLS here, until either side has ended (``TlsPump``).
"""

import base64
import hashlib
import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import trio

from proto.http_rules import Origin, RequestHead, RequestRefused, downstream_headers, header, upstream_headers
from proto.rpc_pb2 import RelayRequest
from proxy.common.errors import ProxyError
from proxy.http.client import ConnectionPasser, HttpClient, HttpIdentity, RequestRecord
from proxy.http.exchange import ClientLeft, HttpServices, watch_client
from proxy.http.messages import (
    PORTION_BYTES,
    HttpStream,
    MessageCut,
    MessageMalformed,
    MessageStream,
    compose_head,
    request_line,
    without,
)
from proxy.http.upstream import SWITCHING_PROTOCOLS, Response, UpstreamLink
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import DialFailed, set_timeouts, tune_socket
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.shared.relay_request_channel import ACCEPTED, REFUSED

PASS_TIMEOUT_S: Final = 5.0
"""How long a forwarder may take to take a connection: longer than the pause in which a killed one is replaced."""

RESPONSE_HEAD_BYTES_MAX: Final = 3584
"""Most bytes that are read of an upstream here: with what is added they must fit a forwarder's smallest pipe."""

LINGER_S: Final = 5.0
"""How long a peer behind TLS may take to read what it was sent before its relay ended."""

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_REPLACED: Final = frozenset({b"connection", b"content-length", b"transfer-encoding", b"upgrade"})

Forward = Callable[[Response], Awaitable[None]]


class ForwarderLost(ProxyError):
    """A forwarder ended with a request: its relay may live in the fd store, so nothing more may be sent."""


class RequestLeftBehind(RequestRefused):
    """No forwarder has taken a request, which still waits for one: its connections must be shut down."""


@dataclass(slots=True)
class WebSocketExchange:
    """The exchange of one request for an upgrade. ``forward`` sends any response but 101 to the client."""

    services: HttpServices
    wire: MessageStream
    client: HttpClient
    head: RequestHead
    identity: HttpIdentity
    record: RequestRecord
    forward: Forward

    async def run(self) -> bool:
        """Exchange the request; return True where the connections are a relay's, or were one's which has ended.

        Raises RequestRefused, ClientLeft, ForwarderLost, and what ``forward`` raises.
        """
        link = await self._connect()
        try:
            response = await self._response(link)
            if response.status != SWITCHING_PROTOCOLS:
                await self.forward(response)
                return False
            if (
                header(response.headers, b"sec-websocket-accept") != self._expected_accept()
                or (header(response.headers, b"upgrade") or b"").lower() != self.head.upgrade
            ):
                raise RequestRefused(502, "the broker's response is malformed", "malformed_response")
            await self._relay(link, response)
        finally:
            link.wire.close()
        return True

    async def _connect(self) -> UpstreamLink:
        services, record = self.services, self.record
        upstreams = await services.locator.locate(record.route, self.identity, self.client)
        for upstream in services.pool.order(upstreams):
            try:
                link = await services.pool.connect(upstream)
            except DialFailed:
                continue
            record.upstream = str(upstream.broker)
            link.wire.head_bytes_max = RESPONSE_HEAD_BYTES_MAX
            return link
        raise RequestRefused(502, "no broker can be reached", "unreachable")

    async def _response(self, link: UpstreamLink) -> Response:
        """Send the request, and return its response, while an eye is on the client."""
        identity, client = self.identity, self.client
        origin = Origin(client.ip, client.scheme, identity.principal.name, identity.authorization)
        headers = upstream_headers(self.head, origin, self.record.upstream.encode(), upgrade=True)
        request = compose_head(request_line(self.head.method, self.head.target), headers)
        failure: Exception | None = None
        response: Response | None = None

        async def attend_client() -> None:
            nonlocal failure
            try:
                await watch_client(self.wire)
            except ClientLeft as error:
                failure = error
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attend_client)
            try:
                with trio.fail_after(seconds(self.services.settings.response_timeout_ms)):
                    await link.wire.send(request)
                    response = await link.receive_response(to_head=False, to_upgrade=True)
            except trio.TooSlowError:
                failure = RequestRefused(504, "the broker does not answer in time", "response_timeout")
            except MessageCut:
                text = "the broker closed the connection without a response"
                failure = RequestRefused(502, text, "no_response")
            except MessageMalformed:
                failure = RequestRefused(502, "the broker's response is malformed", "malformed_response")
            nursery.cancel_scope.cancel()
        if response is None:
            assert failure is not None  # there is one or the other
            raise failure
        return response

    def _expected_accept(self) -> bytes:
        """Return what proves that the upstream has read the client's key (RFC 6455, 4.2.2)."""
        key = header(self.head.headers, b"sec-websocket-key") or b""
        return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())

    async def _relay(self, link: UpstreamLink, response: Response) -> None:
        """Pass both connections to a forwarder, and pump for those with TLS until they have ended."""
        principal = self.identity.principal
        headers = without(downstream_headers(response.headers, []), _REPLACED)
        headers += [(b"connection", b"upgrade"), (b"upgrade", self.head.upgrade)]
        head = compose_head(b"HTTP/1.1 101 Switching Protocols", headers)
        request = RelayRequest(
            client_address=self.client.address,
            principal=principal.name,
            proxy=principal.proxy,
            credentials=self.identity.credentials,
            target=self.record.upstream,
            first_to_client=head,
        )
        if principal.HasField("expires_at_unix_ms"):
            request.expires_at_unix_ms = principal.expires_at_unix_ms
        passer = self.services.passer
        assert passer is not None  # looked at before
        pumps: list[TlsPump] = []
        with ExitStack() as undo:
            sides: list[socket.socket] = []
            for wire in (self.wire, link.wire):
                if isinstance(wire.stream, TlsStream):
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                    undo.callback(theirs.close)
                    ours.setblocking(False)
                    inner = TcpStream(ours)
                    undo.callback(inner.close_now)
                    self._keep_alive(wire.transport)
                    pumps.append(TlsPump(wire.stream, wire.unread, inner))
                    wire.unread = b""
                    sides.append(theirs)
                else:
                    sides.append(wire.transport.socket)
            request.first_to_broker, self.wire.unread = self.wire.unread, b""
            request.first_to_client += link.wire.unread
            await self._pass(passer, request, *sides)
            self.record.status = SWITCHING_PROTOCOLS
            if not pumps:
                return
            for side in sides:
                if side not in {self.wire.transport.socket, link.wire.transport.socket}:
                    side.close()  # the forwarder has it now, and its close is the end here
            async with trio.open_nursery() as nursery:
                for pump in pumps:
                    nursery.start_soon(pump.run)

    def _keep_alive(self, transport: TcpStream) -> None:
        """Have the kernel find a peer behind TLS that has vanished: the relay's own sockets cannot."""
        with suppress(OSError):  # it has gone
            tune_socket(transport.socket)
            set_timeouts(transport.socket, self.services.relay)

    async def _pass(
        self, passer: ConnectionPasser, request: RelayRequest, client: socket.socket, broker: socket.socket
    ) -> None:
        text = "the proxy cannot relay this connection at the moment"
        try:
            answer = await passer.request(request, client, broker, PASS_TIMEOUT_S)
        except trio.TooSlowError:
            with suppress(OSError):  # it has gone
                broker.shutdown(socket.SHUT_RDWR)
            raise RequestLeftBehind(503, text, "no_forwarder") from None
        except (OSError, ProxyError) as error:
            raise RequestRefused(503, text, "no_forwarder") from error
        if answer == REFUSED:
            raise RequestRefused(503, text, "relay_refused")
        if answer != ACCEPTED:
            raise ForwarderLost("forwarder_lost")


class TlsPump:
    """Moves bytes between TLS and the socket that stands for it in a relay, both ways, with half-closes.

    ``first``: what was received of TLS before.
    """

    def __init__(self, tls: HttpStream, first: bytes, inner: TcpStream) -> None:
        self._tls = tls
        self._first = first
        self._inner = inner
        self._inward = trio.CancelScope()
        self._inward_over = trio.Event()

    async def run(self) -> None:
        """Move bytes until both directions have ended, or either side has gone; then close both."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_relay, nursery.cancel_scope)
                nursery.start_soon(self._pump_inward, nursery.cancel_scope)
                if await self._pump(self._inner, self._tls):
                    await self._inward_over.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._inner.close_now()
            (self._tls.transport if isinstance(self._tls, TlsStream) else self._tls).close_now()

    async def _pump_inward(self, scope: trio.CancelScope) -> None:
        is_proper = True
        with self._inward:
            is_proper = await self._pump(self._tls, self._inner, self._first)
        self._inward_over.set()
        if not is_proper:
            scope.cancel()

    @staticmethod
    async def _pump(source: HttpStream, sink: HttpStream, first: bytes = b"") -> bool:
        """Move bytes until the source's end, and pass that on; return False where either side has gone."""
        try:
            data = first or await source.receive_some(PORTION_BYTES)
            while data:
                await sink.send_all(data)
                data = await source.receive_some(PORTION_BYTES)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _watch_relay(self, scope: trio.CancelScope) -> None:
        """Once the relay has closed its end, read nothing more of TLS, and bound the time for what is left to send."""
        with select.epoll() as hang_up:
            hang_up.register(self._inner.socket, 0)  # which is told of a hang-up alone
            await trio.lowlevel.wait_readable(hang_up)
            self._inward.cancel()
            await trio.sleep(LINGER_S)
            scope.cancel()
