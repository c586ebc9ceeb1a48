"""TLS: the contexts that the configuration asks for, and a stream that can end one direction before the other.

A stream of our own rather than Trio's: a relay passes the end of one direction on while the other goes on, which
``trio.SSLStream`` has no way to say.
"""

import contextlib
import ssl
from collections.abc import Callable

import trio

from proxy.config.errors import ConfigError
from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.watched import Watched

RECEIVE_BYTES = 65536

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"})


class TlsFailed(Exception):
    """No TLS with this peer; says why, fit for a log."""


class TlsStream(trio.abc.HalfCloseableStream):
    """TLS over a TCP connection; ``handshake`` first. One task may receive while others send."""

    def __init__(
        self, transport: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool, host: str | None = None
    ) -> None:
        self.transport = transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=host)
        self._sending = trio.StrictFIFOLock()
        self._ended = False

    async def handshake(self) -> None:
        """Agree on keys, and check certificates. Raises TlsFailed."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                else:
                    await self._flush()
                    return
        except ssl.SSLError as error:
            with contextlib.suppress(trio.BrokenResourceError):
                await self._flush()  # the alert, which tells the peer
            raise TlsFailed(_reason(error)) from None
        except trio.BrokenResourceError as error:
            raise TlsFailed(f"the connection broke off during the TLS handshake: {error.__cause__ or error}") from None

    def peer_certificate(self) -> bytes:
        """The peer's certificate, checked, as DER; empty: it has none."""
        return self._tls.getpeercert(binary_form=True) or b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What the peer sent; none at all at its end, be that a proper one or only that of TCP."""
        limit = max_bytes or RECEIVE_BYTES
        await trio.lowlevel.checkpoint()
        while True:
            try:
                data = self._tls.read(limit)
            except ssl.SSLWantReadError:
                if self._outgoing.pending and not self._sending.locked():
                    await self._flush()  # an answer of TLS itself
                if self._ended:
                    return b""
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise trio.BrokenResourceError(_reason(error)) from error
            else:
                return self._and_more(data, limit)

    def _and_more(self, data: bytes, limit: int) -> bytes:
        """What stands behind a record, if it is here already: a record has 16 KiB at most."""
        if not data or not self._incoming.pending:
            return data
        found = bytearray(data)
        with contextlib.suppress(ssl.SSLError):  # none more, or an end that will be seen again
            while len(found) < limit and (data := self._tls.read(limit - len(found))):
                found += data
        return bytes(found)

    async def _fill(self) -> None:
        data = await self.transport.receive_some(RECEIVE_BYTES)
        if data:
            self._incoming.write(data)
        else:
            self._ended = True
            self._incoming.write_eof()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it. Raises trio.BrokenResourceError, trio.ClosedResourceError."""
        async with self._sending:
            with memoryview(data) as rest:
                sent = 0
                while sent < len(rest):
                    try:
                        sent += self._tls.write(rest[sent : sent + RECEIVE_BYTES])
                    except ssl.SSLError as error:
                        raise trio.BrokenResourceError(_reason(error)) from error
                    if self._outgoing.pending >= RECEIVE_BYTES:
                        await self.transport.send_all(self._outgoing.read())
            await self.transport.send_all(self._outgoing.read())

    async def _flush(self) -> None:
        async with self._sending:
            await self.transport.send_all(self._outgoing.read())

    async def wait_send_all_might_not_block(self) -> None:
        """See Trio."""
        await self.transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End our direction: close_notify, and the end of TCP's. What the peer still sends can be received."""
        async with self._sending:
            with contextlib.suppress(ssl.SSLError):  # always one: the peer's own close_notify is not there
                self._tls.unwrap()
            await self.transport.send_all(self._outgoing.read())
            await self.transport.send_eof()

    async def aclose(self) -> None:
        """Close at once."""
        await self.transport.aclose()


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "the peer does not speak TLS"
    return str(error.reason or error).lower().replace("_", " ")


# ---- contexts


def listener_context(key: str, config: ListenerTls) -> Watched[ssl.SSLContext]:
    """The context of a listener; raises ConfigError."""
    files = (config.certificate, config.key, config.client_ca)
    return Watched(key, files, _checked(key, lambda: _new_listener_context(config)))


def _new_listener_context(config: ListenerTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.minimum_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.load_cert_chain(config.certificate, config.key, password=_no_password)
    if config.client_ca:
        context.load_verify_locations(cafile=config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if config.require_client_certificate else ssl.CERT_OPTIONAL
    return context


def broker_context(config: BrokerTls) -> Watched[ssl.SSLContext]:
    """The context for connections to brokers; raises ConfigError."""
    files = (config.trust, config.certificate, config.key)
    return Watched("brokers.tls", files, _checked("brokers.tls", lambda: _new_broker_context(config)))


def _new_broker_context(config: BrokerTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.trust or None)
    context.minimum_version = _VERSIONS[config.minimum_version]
    context.check_hostname = config.verify_hostname
    if config.certificate:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    return context


def _no_password() -> str:
    """Asked for by OpenSSL, which would otherwise ask at the terminal."""
    raise ConfigError("the private key has a passphrase, which nobody can enter here")


def _checked(key: str, build: Callable[[], ssl.SSLContext]) -> Callable[[], ssl.SSLContext]:
    def checked() -> ssl.SSLContext:
        try:
            return build()
        except ssl.SSLError as error:
            reason = str(error.reason or error).lower().replace("_", " ")
            raise ConfigError(f"{key}: certificate, key or authorities cannot be used: {reason}") from None

    return checked
