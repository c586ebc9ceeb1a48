"""Connections to upstreams: opened, kept alive, and never used again after anything that was not asked for."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import CONTINUE
from typing import Final

import h11
import msgspec
import trio

from proto.addresses import HostPort
from proto.http_rules import Headers, connection_options
from proxy.common.logs import get_logger
from proxy.config.types import Brokers
from proxy.http.client import Upstream
from proxy.http.messages import (
    Body,
    BodyUntilClose,
    ChunkedBody,
    HttpStream,
    MessageCut,
    MessageMalformed,
    MessageStream,
    SizedBody,
    parse_head,
)
from proxy.runtime.loop.tasks import run_every
from proxy.runtime.network.dialing import Dialer, DialFailed

RESPONSE_HEAD_BYTES_MAX: Final = 65_536
SWITCHING_PROTOCOLS: Final = 101
KNOWN_HEADS_MAX: Final = 128
KNOWN_HEAD_BYTES_MAX: Final = 1024
INFORMATIONAL_MAX: Final = 16
"""Responses of status 1xx before the one that counts."""

IDLE_S: Final = 20.0
"""Brokers close an idle connection after 30 s."""

IDLE_MAX: Final = 256
IDLE_PER_UPSTREAM_MAX: Final = 64
FAILING_S: Final = 5.0
"""How long an upstream that could not be connected is tried last."""

FAILING_MAX: Final = 1024

Dial = Callable[[Upstream], Awaitable[HttpStream]]
_Key = tuple[HostPort, bool, bool]

_HOST = ("Host", "x")
_REQUESTS: Final = {
    "get": h11.Request(method="GET", target="/", headers=[_HOST]),
    "head": h11.Request(method="HEAD", target="/", headers=[_HOST]),
    "upgrade": h11.Request(
        method="GET", target="/", headers=[_HOST, ("Connection", "upgrade"), ("Upgrade", "websocket")]
    ),
}
"""Requests that stand for those to which a response is parsed."""


def dial_brokers(brokers: Brokers, own_binds: Sequence[str] = (), *, uses_tls: bool = True) -> Dial:
    """Return a function that connects to upstreams, with ``brokers.tls`` where TLS is spoken. Raises ConfigError.

    The proxy's certificate is for those upstreams alone that know of proxies. ``uses_tls``: False where no upstream has
    TLS: ``brokers.tls`` is then for other workers, and an HTTP worker may not read its files.
    """
    brokers = msgspec.structs.replace(brokers, proxy_protocol="off")  # many clients share these
    plain = Dialer(msgspec.structs.replace(brokers, service_url="pulsar://upstream"), own_binds)
    nameless = msgspec.structs.replace(brokers.tls, certificate="", key="")
    settings = ((True, brokers.tls), (False, nameless)) if uses_tls else ()
    tls = {
        knows_proxies: Dialer(msgspec.structs.replace(brokers, service_url="pulsar+ssl://upstream", tls=own), own_binds)
        for knows_proxies, own in settings
    }

    async def dial(upstream: Upstream) -> HttpStream:
        dialer = tls[upstream.knows_proxies] if upstream.tls else plain
        stream = await dialer.dial_any(upstream.broker, upstream.addresses)
        assert isinstance(stream, HttpStream)
        return stream

    return dial


@dataclass(slots=True)
class Response:
    """A response's head, and its body, which is still to be received."""

    status: int
    reason: bytes
    headers: Headers
    body: Body
    keeps_alive: bool
    composed: dict[object, bytes] = field(default_factory=dict)
    """This head as it has gone to clients, by what else it depends on; shared by all responses that have it."""


@dataclass(slots=True)
class _ResponseHead:
    """A response's head. ``http``: the connection that has parsed it; ``composed``: see Response."""

    status: int
    reason: bytes
    headers: Headers
    http: h11.Connection
    is_final: bool
    is_modern: bool
    closes: bool
    is_chunked: bool
    length: int | None
    composed: dict[object, bytes] = field(default_factory=dict)


def _parsed_head(head: bytes, request: str) -> _ResponseHead:
    """Parse a response's head. Raises MessageMalformed."""
    http = h11.Connection(h11.CLIENT)
    http.send(_REQUESTS[request])
    event = parse_head(http, head)
    if not isinstance(event, h11.Response | h11.InformationalResponse):  # h11 takes no 101 that was not asked for
        raise MessageMalformed("an answer to no question of ours")
    headers = list(event.headers)
    by_name, is_modern = dict(headers), event.http_version == b"1.1"
    is_chunked, length = b"transfer-encoding" in by_name, by_name.get(b"content-length")
    is_final = isinstance(event, h11.Response)
    if is_final and is_chunked and (length is not None or not is_modern):
        raise MessageMalformed("two framings of one body")
    return _ResponseHead(
        status=event.status_code,
        reason=bytes(event.reason),
        headers=headers,
        http=http,
        is_final=is_final,
        is_modern=is_modern,
        closes=b"close" in connection_options(headers),
        is_chunked=is_chunked,
        length=None if length is None else int(length),
    )


_known_head = lru_cache(KNOWN_HEADS_MAX)(_parsed_head)
"""The same for a head that a server may send again and again: many responses of one second differ in bodies alone."""


class UpstreamLink:
    """A connection to an upstream. ``reused``: it has served a request before. ``dial``: what has opened it."""

    def __init__(self, stream: HttpStream, key: _Key, dial: Dial | None = None) -> None:
        self.dial = dial
        self.wire = MessageStream(stream, head_bytes_max=RESPONSE_HEAD_BYTES_MAX)
        self.key = key
        self.reused = False
        self.idle_since = 0.0
        try:
            self.address = str(self.wire.transport.socket.getpeername()[0])
        except OSError:  # it has gone already
            self.address = ""

    async def receive_response(
        self, *, to_head: bool, until_continue: bool = False, to_upgrade: bool = False
    ) -> Response | None:
        """Receive a response's head; None at a 100 (Continue) that was waited for. Others of 1xx are dropped.

        ``to_head``: the request was HEAD. ``to_upgrade``: it asked for WebSocket, so 101 is a response. Raises
        MessageMalformed, MessageCut. May be cancelled and called again.
        """
        for _ in range(INFORMATIONAL_MAX):
            head = await self.wire.receive_head()
            if not head:
                raise MessageCut("closed before a response")
            repeats = len(head) <= KNOWN_HEAD_BYTES_MAX and b"transfer-encoding" not in head.lower()
            request = "upgrade" if to_upgrade else "head" if to_head else "get"
            found = (_known_head if repeats else _parsed_head)(head, request)
            if found.is_final:
                return self._response(found, to_head=to_head)
            if found.status == SWITCHING_PROTOCOLS:
                return Response(SWITCHING_PROTOCOLS, found.reason, found.headers, Body(), False)
            if until_continue and found.status == CONTINUE:
                return None
        raise MessageMalformed("too many responses of status 1xx")

    def _response(self, found: _ResponseHead, *, to_head: bool) -> Response:
        body: Body
        if to_head or found.status in (204, 304):
            body = Body()
        elif found.is_chunked:
            body = ChunkedBody(self.wire, found.http)
        else:
            body = BodyUntilClose(self.wire) if found.length is None else SizedBody(self.wire, found.length)
        keeps_alive = found.is_modern and not found.closes and not isinstance(body, BodyUntilClose)
        return Response(found.status, found.reason, found.headers, body, keeps_alive, found.composed)


def _key_of(upstream: Upstream) -> _Key:
    return upstream.broker, upstream.tls, upstream.knows_proxies


class UpstreamPool:
    """Kept-alive connections by upstream, bounded in number and idle time. ``run`` closes the idle ones."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._idle: dict[_Key, list[UpstreamLink]] = {}
        self.idle_count = 0
        self._failing: dict[_Key, float] = {}

    def set_dial(self, dial: Dial) -> None:
        """Open connections by this function from now on; close those that are idle, and others after their request:
        what they were opened with, such as the trust in an authority, may hold no longer.
        """
        self._dial = dial
        self.close_idle()

    def order(self, upstreams: Sequence[Upstream]) -> list[Upstream]:
        """Return the upstreams with those last that could not be connected lately."""
        now = trio.current_time()
        return sorted(upstreams, key=lambda one: self._failing.get(_key_of(one), 0.0) > now)

    def take_idle(self, upstream: Upstream) -> UpstreamLink | None:
        """Return a connection that is kept alive and leads to one of the upstream's addresses, or None."""
        key = _key_of(upstream)
        links = self._idle.get(key)
        oldest = trio.current_time() - IDLE_S
        while links:
            link = self._remove(key)
            if link.idle_since > oldest and link.address in upstream.addresses and link.wire.is_silent:
                link.reused = True
                return link
            link.wire.close()
        return None

    def _remove(self, key: _Key, index: int = -1) -> UpstreamLink:
        links = self._idle[key]
        link = links.pop(index)
        if not links:
            del self._idle[key]
        self.idle_count -= 1
        return link

    async def connect(self, upstream: Upstream) -> UpstreamLink:
        """Open a connection. Raises DialFailed."""
        key, dial = _key_of(upstream), self._dial
        try:
            stream = await dial(upstream)
        except DialFailed as error:
            if self._failing.pop(key, 0.0) < trio.current_time():
                name = str(upstream.broker)
                get_logger().warning(
                    "a server cannot be connected", upstream=name, reason=error.reason, detail=str(error)
                )
            if len(self._failing) >= FAILING_MAX:
                del self._failing[next(iter(self._failing))]
            self._failing[key] = trio.current_time() + FAILING_S
            raise
        self._failing.pop(key, None)
        return UpstreamLink(stream, key, dial)

    def keep(self, link: UpstreamLink) -> None:
        """Keep a connection of which the response has ended; ``take_idle`` looks whether the upstream has sent more."""
        is_full = self.idle_count >= IDLE_MAX or len(self._idle.get(link.key, ())) >= IDLE_PER_UPSTREAM_MAX
        if is_full or link.dial is not self._dial:
            link.wire.close()
            return
        link.idle_since = trio.current_time()
        self._idle.setdefault(link.key, []).append(link)
        self.idle_count += 1

    def close_idle(self, *, since: float | None = None) -> None:
        """Close the idle connections; with ``since`` those that were idle at that time."""
        for key in list(self._idle):
            while key in self._idle and (since is None or self._idle[key][0].idle_since <= since):
                self._remove(key, 0).wire.close()

    async def run(self) -> None:
        """Close connections that have been idle for IDLE_S, until cancelled."""

        async def close_expired() -> None:
            self.close_idle(since=trio.current_time() - IDLE_S)

        await run_every(IDLE_S / 2, close_expired)
