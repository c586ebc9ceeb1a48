"""Connections to brokers: TCP, TLS where ``brokers.service_url`` asks for it, and the PROXY header if it is sent."""

import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import trio

from proto.addresses import HostPort, parse_host_port, speaks_tls
from proto.proxy_protocol import LOCAL_HEADER
from proxy.common.errors import ProxyError
from proxy.config.binds import is_own_listener
from proxy.config.types import Brokers, Relay
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.congestion import set_congestion_control
from proxy.runtime.network.tls import TlsFailed, TlsStream, broker_context

ATTEMPT_DELAY_S = 0.25
"""RFC 8305, 5: "Connection Attempt Delay"."""


HEADER_HINT = (
    "; does it take the PROXY header that brokers.proxy_protocol sends? A Pulsar broker needs "
    'haProxyProtocolEnabled=true, and "within_tls"'
)


class DialFailed(ProxyError):
    """No connection. ``reason``: a short stable name for metrics; the text is for the log."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Dialer:
    """Opens TCP and TLS connections to brokers, but none to one of ``own_binds``, the proxy's own listeners.

    ``passes_tls``: TLS is the client's own, so it opens TCP alone. Raises ConfigError where certificates cannot be
    used.
    """

    def __init__(self, config: Brokers, own_binds: Sequence[str] = (), *, passes_tls: bool = False) -> None:
        self.config = config
        self._own_binds = own_binds
        self._own_ports = frozenset(parse_host_port(bind).port for bind in own_binds)
        speaks = speaks_tls(config.service_url) and not passes_tls
        self._tls = broker_context(config.tls) if speaks else None
        self._header_is_within = config.proxy_protocol == "within_tls" and speaks
        self._header_is_first = config.proxy_protocol == "before_tls" or (
            config.proxy_protocol == "within_tls" and not (speaks or passes_tls)
        )
        has_header = self._header_is_within or self._header_is_first
        self.header_hint = HEADER_HINT if has_header else ""
        """What to add to the failure of a connection that a broker has broken off."""

    def may_lead_back(self, port: int) -> bool:
        """Return whether one of the proxy's own listeners has this port."""
        return port in self._own_ports

    def start_connection(self, address: str, port: int) -> socket.socket:
        """Start to connect to an IP address, and return the socket, which does not block. Raises OSError."""
        return _start_connection(address, port, self.config.congestion_control)

    def new_tls_stream(self, transport: TcpStream, host: str) -> TlsStream | None:
        """Return a stream for the TLS handshake with the broker of this name; None where brokers are on plain TCP.

        Raises TlsFailed for a name that no certificate can have.
        """
        if self._tls is None:
            return None
        try:
            return TlsStream(transport, self._tls.value, server_side=False, host=host)
        except ValueError as error:
            raise TlsFailed(f"{host!r} is no name for a certificate: {error}") from None

    def headers(self, announcement: bytes = b"") -> tuple[bytes, bytes]:
        """Return what is sent before TLS (on plain TCP: first), and what is sent within TLS, of a PROXY header.

        ``announcement``: the header of a client; empty: the connection is the proxy's own, or shared.
        """
        header = announcement or LOCAL_HEADER
        return header if self._header_is_first else b"", header if self._header_is_within else b""

    def explain(self, error: TlsFailed) -> str:
        """Return the text for a failed TLS handshake, which may be due to the header before it."""
        may_be_due = self._header_is_first and error.kind in {"broke_off", "not_tls"}
        return f"{error}{self.header_hint if may_be_due else ''}"

    async def dial_any(
        self, broker: HostPort, addresses: Sequence[str], announcement: bytes = b""
    ) -> trio.abc.HalfCloseableStream:
        """Connect to a broker at the first of its IP addresses that answers (RFC 8305, 5). Raises DialFailed.

        ``announcement``: the PROXY header of the client for which it is dialled alone; empty: for none.

        The next address is tried, too, after ATTEMPT_DELAY_S or once an attempt has failed; families alternate. Exactly
        these addresses are dialled, without another resolution, since the caller has checked them.
        """
        race = _Race()
        try:
            async with trio.open_nursery() as nursery:
                for address in interleave_families(addresses):
                    failed = trio.Event()
                    dial = partial(self._dial, broker, address, announcement)
                    nursery.start_soon(self._attempt, address, dial, race, failed, nursery)
                    with trio.move_on_after(ATTEMPT_DELAY_S):
                        await failed.wait()
        except BaseException:
            if race.winner is not None:
                await trio.aclose_forcefully(race.winner)
            raise
        if race.winner is None:
            raise DialFailed(race.reason, "; ".join(race.failures) or "no address")
        return race.winner

    async def _attempt(
        self,
        address: str,
        dial: Callable[[], Awaitable[trio.abc.HalfCloseableStream]],
        race: "_Race",
        failed: trio.Event,
        nursery: trio.Nursery,
    ) -> None:
        try:
            with trio.fail_after(seconds(self.config.connect_timeout_ms)):
                stream = await dial()
        except trio.TooSlowError:
            race.failures.append(f"{address}: no answer within {self.config.connect_timeout_ms} ms")
        except TlsFailed as error:
            race.reason = "tls"
            race.failures.append(f"{address}: {self.explain(error)}")
        except OSError as error:
            race.failures.append(f"{address}: {error.strerror or error}")
        else:
            if race.winner is None:
                race.winner = stream
                nursery.cancel_scope.cancel()
            else:  # another attempt was faster by less than a tick of the event loop
                await trio.aclose_forcefully(stream)
        failed.set()

    async def _dial(self, broker: HostPort, address: str, announcement: bytes) -> trio.abc.HalfCloseableStream:
        transport = await _connect(address, broker.port, self.config.congestion_control)
        if self.may_lead_back(broker.port) and _leads_back(transport, self._own_binds):
            await trio.aclose_forcefully(transport)
            raise OSError(errno.ELOOP, "is this proxy itself; does brokers.service_url name the brokers?")
        before_tls, within_tls = self.headers(announcement)
        shaken = False
        try:
            if before_tls:
                await transport.send_all(before_tls)
            stream = self.new_tls_stream(transport, broker.host)
            if stream is not None:
                await stream.handshake()
                if within_tls:
                    await stream.send_all(within_tls)
            shaken = True
        except trio.BrokenResourceError as error:
            raise OSError(errno.ECONNRESET, f"broke off: {error.__cause__ or error}{self.header_hint}") from None
        finally:
            if not shaken:
                await trio.aclose_forcefully(transport)
        return stream or transport


@dataclass(slots=True)
class _Race:
    """Outcome of the attempts so far."""

    winner: trio.abc.HalfCloseableStream | None = None
    reason: str = "unreachable"
    failures: list[str] = field(default_factory=list)


def interleave_families(addresses: Sequence[str]) -> list[str]:
    """Return the addresses with their families alternating, else in their order (RFC 8305, 4)."""
    first = [address for address in addresses if _is_ipv6(address) is _is_ipv6(addresses[0])]
    second = [address for address in addresses if _is_ipv6(address) is not _is_ipv6(addresses[0])]
    pairs = zip_longest(first, second)
    return [address for pair in pairs for address in pair if address is not None]


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET


def _start_connection(address: str, port: int, congestion_control: str) -> socket.socket:
    sock = socket.socket(_family_of(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        tune_socket(sock)
        set_congestion_control(sock, congestion_control)
        with contextlib.suppress(BlockingIOError):
            sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect(address: str, port: int, congestion_control: str) -> TcpStream:
    sock = _start_connection(address, port, congestion_control)
    error = errno.ECONNABORTED
    try:
        await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    finally:
        if error:
            sock.close()
    if error:
        raise OSError(error, os.strerror(error))
    return TcpStream(sock)


def _leads_back(stream: trio.abc.Stream, own_binds: Sequence[str]) -> bool:
    """Return whether a connection is to one of the proxy's own listeners, in this process's network."""
    if not isinstance(stream, TcpStream):
        return False
    own_host, peer = stream.socket.getsockname()[0], HostPort(*stream.socket.getpeername()[:2])
    return is_own_listener(own_binds, peer, own_host)


def tune_socket(sock: socket.socket) -> None:
    """Set TCP_NODELAY, for small frames, and SO_KEEPALIVE, so that the kernel finds a peer that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def set_timeouts(sock: socket.socket, config: Relay) -> None:
    """Set after which time the kernel gives a relay's silent peer up; clients' sockets inherit it from their listener.

    Raises OSError.
    """
    for option, value in (
        (socket.TCP_KEEPIDLE, config.keep_alive_idle_ms // 1000),
        (socket.TCP_KEEPINTVL, config.keep_alive_probe_interval_ms // 1000),
        (socket.TCP_KEEPCNT, config.keep_alive_probes),
        # A peer that reads nothing also keeps the other's end from being seen: it is queued behind the bytes.
        (socket.TCP_USER_TIMEOUT, config.user_timeout_ms),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
