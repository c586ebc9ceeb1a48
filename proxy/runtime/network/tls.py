"""TLS: contexts from the configuration, and a stream whose directions end separately.

Not Trio's stream: a relay forwards the end of one direction while the other goes on, for which ``trio.SSLStream`` has
no method.
"""

import contextlib
import itertools
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import trio
from cryptography.x509 import load_pem_x509_crl

from proxy.common.errors import ConfigError, ProxyError
from proxy.common.files import SYSTEM_AUTHORITIES, path_of_copy
from proxy.common.logs import get_logger
from proxy.common.reloading_file import HeldFile, ReloadingFile
from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.certificate_ends import CRL_PATTERN, crl_warning, read_ends
from proxy.runtime.network.kernel_tls import follow_secrets
from proxy.runtime.network.session_tickets import TicketFront
from proxy.runtime.network.tls_certificates import NamedContexts, certificates_by_name, config_errors, load_certificate
from proxy.runtime.network.tls_options import set_groups, set_options
from proxy.runtime.network.tls_session import TlsSession

RECEIVE_BYTES = 65536
PENDING_RECORDS_BYTES_MAX = 16384
FLUSH_TIMEOUT_S = 10.0

_NEVER_RESUMED = "TLSv1.3"  # by an id: only by tickets, where they are on
_generations = itertools.count(1)
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"})

_KINDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "UNSUPPORTED_PROTOCOL": "no_shared_version",
    "NO_SHARED_CIPHER": "no_shared_cipher",
    "NO_SUITABLE_KEY_SHARE": "no_shared_group",
    "NO_SUITABLE_GROUPS": "no_shared_group",
}
_VERIFY_KINDS = {  # X509_V_ERR_*: openssl-verification-options(1)
    2: "unknown_ca",
    3: "no_valid_crl",
    10: "certificate_expired",
    12: "no_valid_crl",
    18: "unknown_ca",
    19: "unknown_ca",
    20: "unknown_ca",
    21: "unknown_ca",
    23: "certificate_revoked",
}


class TlsFailed(ProxyError):
    """The TLS handshake failed; the text gives the reason, for a log, and ``kind`` one of few, for a metric."""

    def __init__(self, text: str, kind: str = "other") -> None:
        super().__init__(text)
        self.kind = kind


def broke_off_in_handshake(error: BaseException) -> TlsFailed:
    """Return the failure of a handshake that an error of its connection has ended."""
    return TlsFailed(f"the connection broke off during the TLS handshake: {error}", "broke_off")


class TlsStream(trio.abc.HalfCloseableStream):
    """TLS over a TCP connection. Call ``handshake`` first. One task may receive while others send.

    ``was_cut``: what the peer sends has ended with TCP's FIN alone, which anybody on the way can send.
    """

    def __init__(
        self, transport: TcpStream, context: ssl.SSLContext, *, server_side: bool, host: str | None = None
    ) -> None:
        self.transport = transport
        self.session = TlsSession(context, server_side=server_side, host=host)
        self._sending = trio.StrictFIFOLock()
        self._read_ahead = bytearray()  # at most what one portion from the transport becomes
        self._eof_sent = False
        self.was_cut = False

    async def handshake(self) -> None:
        """Perform the TLS handshake, which checks certificates. Raises TlsFailed."""
        session = self.session
        try:
            is_done = continue_handshake(session)
            while not is_done:
                await self._flush()
                data = await self.transport.receive_some(RECEIVE_BYTES)
                is_done = continue_handshake(session, data, is_end=not data)
            await self._flush()
        except TlsFailed:
            with contextlib.suppress(trio.BrokenResourceError):
                await self._flush()  # the alert, which gives the peer the reason
            raise
        except trio.BrokenResourceError as error:
            raise broke_off_in_handshake(error.__cause__ or error) from None

    @property
    def version(self) -> str:
        """The negotiated version of TLS, in the words of ssl.SSLObject.version; empty before the handshake."""
        return self.session.version

    def peer_certificate(self) -> bytes:
        """Return the peer's verified certificate as DER; empty if it sent none."""
        return self.session.peer_certificate()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive decrypted bytes; empty at the stream's end, with close_notify or only TCP's FIN."""
        limit, session = max_bytes or RECEIVE_BYTES, self.session
        waited = False
        if not self._read_ahead:
            self._decrypt()  # what came with the handshake
        while not self._read_ahead and not session.has_ended:
            await self._send_pending_records()
            data = await self.transport.receive_some(RECEIVE_BYTES)
            waited = True
            if data:
                self._decrypt(data)
            else:
                session.has_ended = self.was_cut = True
        if not waited:
            await trio.lowlevel.checkpoint()
        if not self._read_ahead and (error := self.end_error) is not None:
            raise error
        data = bytes(self._read_ahead[:limit])
        del self._read_ahead[:limit]
        return data

    @property
    def can_move_to_kernel(self) -> bool:
        """Whether the kernel can go on with this session from here."""
        return not self._read_ahead and self.session.can_move_to_kernel

    def take_read_ahead(self, ciphertext: bytes | bytearray = b"") -> bytes:
        """Return what has arrived and was not received; only the beginning of a record may be left in the session.

        ``ciphertext``: what an owner that reads the transport itself has read from it.
        """
        self._decrypt(ciphertext)
        data = bytes(self._read_ahead)
        self._read_ahead.clear()
        return data

    @property
    def end_error(self) -> trio.BrokenResourceError | None:
        """The error by which what the peer sends has ended; None: it goes on, or has ended properly."""
        if (cause := self.session.error) is None:
            return None
        error = trio.BrokenResourceError(reason_of(cause))
        error.__cause__ = cause
        return error

    def _decrypt(self, ciphertext: bytes | bytearray = b"") -> None:
        session = self.session
        if (ciphertext or session.unread) and not session.has_ended:
            ciphertext = session.unread + ciphertext
            plaintext = bytearray(len(ciphertext))
            size = session.decrypt(memoryview(ciphertext), memoryview(plaintext))
            self._read_ahead += memoryview(plaintext)[:size]

    async def _send_pending_records(self) -> None:
        """Send records of TLS itself. A concurrent sender sends them along, unless they are many: then wait for it."""
        if self.session.waiting_record_bytes > (PENDING_RECORDS_BYTES_MAX if self._sending.locked() else 0):
            await self._flush()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send all bytes. Raises trio.BrokenResourceError, trio.ClosedResourceError."""
        async with self._send_lock_held():
            with memoryview(data) as rest:
                for start in range(0, len(rest), RECEIVE_BYTES):
                    await self.transport.send_all(self.encrypt(rest[start : start + RECEIVE_BYTES]))

    def encrypt(self, data: memoryview) -> bytes:
        """Return the records to be sent for ``data``, behind those of TLS itself. Raises trio.BrokenResourceError."""
        if not data:
            return self.session.take_outgoing()
        try:
            return self.session.encrypt(data)
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(reason_of(error)) from error

    async def _flush(self) -> None:
        async with self._send_lock_held():
            data = self.session.take_outgoing()
            if self._eof_sent:
                return
            # A record cut off in the middle would corrupt all that follows it.
            with trio.move_on_after(FLUSH_TIMEOUT_S, shield=True) as scope:
                await self.transport.send_all(data)
            if scope.cancelled_caught:
                raise trio.BrokenResourceError("the peer does not read")

    @contextlib.asynccontextmanager
    async def _send_lock_held(self) -> AsyncIterator[None]:
        """Hold the send lock. Without contention no checkpoint is run: it would cost a round of the scheduler."""
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            yield
        finally:
            self._sending.release()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait as trio.abc.SendStream specifies."""
        await self.transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End our direction with close_notify and TCP's FIN. What the peer still sends can be received."""
        async with self._send_lock_held():
            if self._eof_sent:
                return
            self._eof_sent = True
            await self.transport.send_all(self.session.close())
            await self.transport.send_eof()

    async def aclose(self) -> None:
        """Close the TCP connection at once, without close_notify."""
        await self.transport.aclose()


def continue_handshake(session: TlsSession, data: bytes | bytearray = b"", *, is_end: bool = False) -> bool:
    """Continue a handshake with what the peer has sent, or its end; return True once it is done.

    Send what ``session.take_outgoing`` returns then, also after TlsFailed: the alert.
    """
    if is_end:
        session.end_input()
    try:
        is_done = session.continue_handshake(bytes(data))
    except ssl.SSLError as error:
        raise TlsFailed(reason_of(error), _kind(error)) from None
    if is_done and session.was_resumed_by_client and not session.gives_tickets:
        session.take_outgoing()
        raise TlsFailed("the client resumed a session, and its certificate was not checked again")
    return is_done


def _kind(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY_KINDS.get(error.verify_code, "other")
    if isinstance(error, ssl.SSLEOFError):
        return "broke_off"
    return "not_tls" if error.reason in _NOT_TLS else _KINDS.get(error.reason or "", "other")


def reason_of(error: ssl.SSLError) -> str:
    """Return why TLS has failed, for a log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "the peer does not speak TLS"
    if error.reason == "CALLBACK_FAILED":  # ssl's, which decodes the name; ours raises nothing
        return "the name that the client asks for (SNI) is not ASCII"
    return str(error.reason or error).lower().replace("_", " ")


# ---- contexts


def listener_contexts(key: str, config: ListenerTls) -> ReloadingFile[NamedContexts]:
    """Return the contexts of a listener, reloaded together when a file changes. Raises ConfigError."""
    further = (file for one in config.certificates for file in (one.certificate, one.key))
    files = (config.certificate, config.key, config.client_ca, config.client_crl, *further)
    ends = listener_certificates(key, config)
    return ReloadingFile(key, files, lambda: _new_listener_contexts(key, config), lambda: read_ends(ends))


def listener_certificates(key: str, config: ListenerTls) -> list[tuple[str, str]]:
    """Return the files of a listener that end, certificates and CRLs, each after its configuration key."""
    own = [(f"{key}.{name}", getattr(config, name)) for name in ("certificate", "client_ca", "client_crl")]
    further = [(f"{key}.certificates[{at}].certificate", one.certificate) for at, one in enumerate(config.certificates)]
    return own + further


def _new_listener_contexts(key: str, config: ListenerTls) -> NamedContexts:
    context = _new_listener_context(key, config, warns=True)
    if not config.certificates:
        load_certificate(context, key, config.certificate, config.key)
        return NamedContexts(context, {}, config.groups)
    default, by_name = certificates_by_name(key, config)
    contexts = {default: context}
    for certificates in by_name.values():
        if certificates not in contexts:
            contexts[certificates] = _new_listener_context(key, config)
    for certificates, context in contexts.items():
        for one in certificates:
            load_certificate(context, one.table, one.certificate, one.key)
    return NamedContexts(contexts[default], {name: contexts[found] for name, found in by_name.items()}, config.groups)


def _new_listener_context(key: str, config: ListenerTls, *, warns: bool = False) -> ssl.SSLContext:
    """Return a context without a certificate of its own; all of a listener treat clients alike."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    set_options(context, key, config)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = int(config.session_tickets)
    if not config.session_tickets:
        # No session is resumed (see ListenerContexts). And a ticket that a client has not read when it closes becomes
        # a reset behind the last bytes.
        context.options |= ssl.OP_NO_TICKET
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # every certificate in the file is trusted, intermediate ones too
    if config.client_ca:
        with config_errors(f"{key}.client_ca", config.client_ca), path_of_copy(config.client_ca) as path:
            context.load_verify_locations(cafile=path)
        context.verify_mode = ssl.CERT_REQUIRED if config.require_client_certificate else ssl.CERT_OPTIONAL
    if config.client_crl:
        _load_crls(context, f"{key}.client_crl", config.client_crl, warns=warns)
    follow_secrets(context)
    return context


def _load_crls(context: ssl.SSLContext, key: str, file: str, *, warns: bool) -> None:
    """Have a context refuse the certificates that a file's CRLs revoke. Raises ConfigError.

    OpenSSL refuses all certificates of an issuer that has no CRL here, or an expired one: whether they are revoked is
    not known. That is logged (``warns``), and a week before (later: proxy.runtime.process.file_watch).
    """
    with config_errors(key, file), path_of_copy(file) as path:
        content = Path(path).read_bytes()
        found = CRL_PATTERN.findall(content)
        if not found or content.count(b"-----BEGIN ") != len(found):  # OpenSSL would trust a certificate in it
            raise ConfigError(f"{key}: {file} must hold CRLs in PEM form, and nothing else")
        try:
            ends = [load_pem_x509_crl(pem).next_update_utc for pem in found]
        except ValueError:
            raise ConfigError(f"{key}: {file} holds a broken CRL") from None
        context.load_verify_locations(cafile=path)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    end = min((end for end in ends if end is not None), default=None)
    if warns and end is not None and (event := crl_warning(end.timestamp(), time.time())):
        get_logger().warning(event, key=key, file=file, next_update=end.isoformat())


class ListenerContexts:
    """Contexts for a listener's connections. Raises ConfigError.

    Usually no session is resumed, since a resumed session's certificate is not checked again, although `client_ca` may
    have changed. Tickets are off. TLS 1.2 also resumes by an id, from a cache that OpenSSL keeps in a context, and that
    Python's ssl has no way to turn off. So a context serves no other connection once TLS 1.2 was negotiated on it:
    later connections get a new cache. A connection that began at the same time could still resume the session; its
    handshake fails (continue_handshake), and succeeds when the client retries.

    To load a certificate takes milliseconds, so only a front context is new each time: an empty one, which is switched
    to a loaded context once the ClientHello has arrived: the one of the name for which it asks (SNI).

    With `session_tickets`, which needs TLS 1.3 and no `client_ca`, the front is ``ticket_front``, which stays. It is
    set up at its first use: a configuration that is refused in the end does not touch it. Keep a reference to this
    object until the ClientHello: the front has none.
    """

    def __init__(self, key: str, config: ListenerTls, ticket_front: TicketFront | None = None) -> None:
        self._loaded_contexts = listener_contexts(key, config)
        self._loaded = self._loaded_contexts.value
        self._tickets = (ticket_front or TicketFront()) if config.session_tickets else None
        self._generation = next(_generations)
        self._front: ssl.SSLContext | None = None

    @property
    def must_check_files(self) -> bool:
        """Whether the files have not been looked at for a second: call ``check_files`` before the next handshake."""
        return self._loaded_contexts.is_check_due

    async def check_files(self) -> None:
        """Load the files again if they have changed."""
        loaded = await self._loaded_contexts.current_value()
        if loaded is not self._loaded:
            self._loaded, self._front = loaded, None

    @property
    def front_context(self) -> ssl.SSLContext:
        """The context for a new connection; call ``on_handshake_done`` with it after the handshake."""
        if self._front is None:
            self._front = _front(self._loaded) if self._tickets is None else self._front_with_tickets(self._tickets)
        return self._front

    def _front_with_tickets(self, tickets: TicketFront) -> ssl.SSLContext:
        front, must_set_up = tickets.context_for(self._generation, self._loaded.groups)
        if must_set_up:
            held = weakref.ref(self._loaded_contexts)  # the front stays: it must not keep what is not used any more
            _front(self._loaded, front, lambda: file.value if (file := held()) is not None else None)
        return front

    def on_handshake_done(self, context: ssl.SSLContext, version: str) -> None:
        """Replace the front context if a handshake in a version with session ids has used it."""
        if version != _NEVER_RESUMED and context is self._front:
            self._front = None


def _front(
    contexts: NamedContexts,
    front: ssl.SSLContext | None = None,
    current: Callable[[], NamedContexts | None] | None = None,
) -> ssl.SSLContext:
    """Return an empty context that switches to one of ``contexts`` at the ClientHello: a new one, or ``front``.

    What is set here is what OpenSSL copies into a connection at its start; ciphers and certificates are those of the
    context that it is switched to. Keep a reference to it as long as a connection uses it: OpenSSL calls its callback
    by address. ``current``: where to find the contexts then, in place of a reference to them; None: the handshake
    fails.
    """
    front, loaded = front or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), contexts.default
    front.minimum_version = loaded.minimum_version
    front.options = loaded.options
    front.num_tickets = loaded.num_tickets
    front.verify_flags = loaded.verify_flags
    front.verify_mode = loaded.verify_mode
    set_groups(front, contexts.groups)

    find = current or (lambda: contexts)

    def switch_context(tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, _front: ssl.SSLContext) -> None:
        if (found := find()) is not None:
            tls.context = found.for_name(name)

    front.sni_callback = switch_context
    return front


def new_client_context(trust: str) -> ssl.SSLContext:
    """Return a context for connections to servers. ``trust``: PEM file of authorities; empty: the system's.

    Raises OSError and ssl.SSLError for a file that cannot be used.
    """
    try:
        with path_of_copy(trust or SYSTEM_AUTHORITIES) as path:
            return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError):  # ssl.SSLError is an OSError
        if trust:
            raise
    return ssl.create_default_context()  # of a system without authorities: no certificate is valid


def broker_context(config: BrokerTls) -> HeldFile[ssl.SSLContext]:
    """Return the context for connections to brokers, which changes once a broker accepts it. Raises ConfigError."""
    files = (config.trust, config.certificate, config.key)
    ends = broker_certificates(config)
    return HeldFile("brokers.tls", files, lambda: _new_broker_context(config), lambda: read_ends(ends))


def broker_certificates(config: BrokerTls) -> list[tuple[str, str]]:
    """Return the files of ``brokers.tls`` that end, each after its configuration key."""
    return [("brokers.tls.trust", config.trust), ("brokers.tls.certificate", config.certificate)]


def _new_broker_context(config: BrokerTls) -> ssl.SSLContext:
    with config_errors("brokers.tls.trust", config.trust or "the system's authorities"):
        context = new_client_context(config.trust)
    set_options(context, "brokers.tls", config)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = config.verify_hostname
    if config.certificate:
        load_certificate(context, "brokers.tls", config.certificate, config.key)
    follow_secrets(context)
    return context
