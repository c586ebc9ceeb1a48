"""The PROXY header at the start of a connection: read by callback, or by the connection's task; and the one that
announces a client to a broker.

Only what belongs to the header leaves the socket: what follows is TLS's or Pulsar's.
"""

import select
import socket
from collections.abc import Callable

import trio

from proto.addresses import HostPort
from proto.proxy_protocol import (
    HEADER_BYTES_MAX,
    NoProxyHeader,
    ProxyHeader,
    ProxyHeaderInvalid,
    ProxyHeaderParser,
    encode_header,
)
from proxy.common.networks import NetworkRules
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream

MISSING = "no PROXY header, which proxy_protocol requires"
ENDED = "the connection's end, before that of a PROXY header"


class ProxyRules:
    """Who may announce clients at a listener, and who has to. ``mode``: that of its ``proxy_protocol``."""

    def __init__(self, mode: str, sources: tuple[str, ...]) -> None:
        self._is_on = mode != "off"
        self.required = mode == "required"
        self._sources = NetworkRules(sources, ())

    def refuses(self, ip: str) -> bool:
        """Return whether a connection from an IP address is closed at once: it is none of the senders."""
        return self.required and not self._sources.allows(ip)

    def expects_header(self, ip: str) -> bool:
        """Return whether a connection from an IP address may begin with a header. Without, it is a client's own."""
        return self._is_on and self._sources.allows(ip)


def announcement_of(client: HostPort, sock: socket.socket, received: ProxyHeader | None) -> bytes:
    """Return the header that announces a client to a broker.

    ``sock``: the client's connection. ``received``: what a trusted sender has announced there, if it was the client's
    header: its destination and TLVs are passed on.
    """
    if received is not None and received.destination is not None:
        return encode_header(client, received.destination, received.tlvs)
    return encode_header(client, HostPort(*sock.getsockname()[:2]))


def read_header_now(sock: socket.socket, parser: ProxyHeaderParser) -> bool:
    """Take what is there of the header; return False at the end of the stream.

    With NoProxyHeader, ``parser.taken`` is what is no longer in the socket: nothing, unless it began as a header does.
    Raises BlockingIOError where nothing is there, OSError, and ProxyHeaderInvalid.
    """
    data = sock.recv(HEADER_BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    if not data:
        return False
    is_first = not parser.taken
    size = parser.receive_data(data)
    if is_first and parser.outcome is NoProxyHeader.FOUND:
        parser.taken.clear()
    else:
        sock.recv(size, socket.MSG_DONTWAIT)
    return True


async def read_header(stream: TcpStream, *, required: bool) -> tuple[ProxyHeader | None, bytes] | None:
    """Return the header, None where the stream begins otherwise, and what was taken of the stream then; None if the
    stream ends before its first byte.

    Raises ProxyHeaderInvalid, also at the end within a header, and where ``required`` and there is none; OSError.
    """
    parser = ProxyHeaderParser()
    while parser.outcome is None:
        try:
            if not read_header_now(stream.socket, parser):
                if not parser.taken:
                    return None
                raise ProxyHeaderInvalid(ENDED)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(stream.socket)
    if isinstance(parser.outcome, ProxyHeader):
        return parser.outcome, b""
    if required:
        raise ProxyHeaderInvalid(MISSING)
    return None, bytes(parser.taken)


Outcome = ProxyHeader | NoProxyHeader | Exception | None
"""None: the sender has ended the connection, and sent nothing."""


class ProxyHeaderReading:
    """The reading of one connection's header by callback. ``on_done``, which is called once, has the stream then.

    With NoProxyHeader, none of the stream's bytes has been taken. What only begins as a header is refused: neither TLS
    nor a frame of Pulsar's has the first byte of one.
    """

    def __init__(
        self,
        reactor: Reactor,
        deadlines: Deadlines,
        stream: TcpStream,
        *,
        required: bool,
        on_done: Callable[["ProxyHeaderReading", Outcome], None],
    ) -> None:
        self._reactor = reactor
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._socket = stream.socket
        self._required = required
        self._on_done = on_done
        self._parser = ProxyHeaderParser()
        self._is_over = False

    def start(self, deadline: float) -> None:
        """Start to read; what is there already is read now. ``deadline``: in Trio's time."""
        self._deadline.set(deadline)
        self._on_ready()
        if not self._is_over:
            try:
                self._reactor.watch(self._socket.fileno(), select.EPOLLIN, self._on_ready)
            except OSError as error:  # no memory for it; other clients are accepted
                self._finish(error)

    def cancel(self) -> None:
        """Stop, without a call of ``on_done``; may be repeated."""
        if not self._is_over:
            self._is_over = True
            self._deadline.close()
            self._reactor.forget(self._socket.fileno())

    def _on_deadline(self) -> None:
        self._finish(TimeoutError("no whole PROXY header in time"))

    def _on_ready(self) -> None:
        try:
            if not read_header_now(self._socket, self._parser):
                self._finish(ProxyHeaderInvalid(ENDED) if self._parser.taken else None)
                return
        except BlockingIOError:
            return
        except (OSError, ProxyHeaderInvalid) as error:
            self._finish(error)
            return
        outcome = self._parser.outcome
        if outcome is NoProxyHeader.FOUND and (self._required or self._parser.taken):
            self._finish(ProxyHeaderInvalid(MISSING))
        elif outcome is not None:
            self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        if not self._is_over:
            self.cancel()
            self._on_done(self, outcome)
