"""A TLS session between buffers: ciphertext in, plaintext out, and back. It has no socket and never waits.

OpenSSL is fed one whole record at a time, and each is read at once, in the handshake, too. So no plaintext is ever left
inside of it, which no event of a socket would announce, and its buffers never grow beyond one record. Where records
begin is followed outside of it.
"""

import contextlib
import ssl
from collections.abc import Callable
from typing import cast

from proto.client_hello import limits_record_size
from proxy.runtime.network.kernel_tls import KeyPair, current_key_log, keys_from_traffic_secret, usable_ciphers

RECORD_BYTES = 16_384
"""Of plaintext in one record."""

RECORD_BYTES_MAX = 5 + RECORD_BYTES + 2_048
"""Of one record: its header, and the most that TLS 1.2 may add to the plaintext."""

RECORDS_WITHOUT_DATA_MAX = 32
"""Of those that are decrypted at once. New keys cost much more than a record's bytes, and no peer needs them often."""

HELLO_BYTES_MAX = 16_384
"""Of a ClientHello. OpenSSL takes eight times as much, and has the memory for it as soon as the size is announced."""

HANDSHAKE_RECORDS_MAX = 256
"""Of the peer's in one handshake. A record costs much more than its bytes, and may have a single one."""

_HEADER_BYTES = 5
_HANDSHAKE_RECORD = 22
_MESSAGE_HEADER_BYTES = 4
_TICKET_RECORD_BYTES_MIN = 64
"""What is shorter is no ticket, but may be new keys."""
_RECORD_TYPES = range(20, 25)
_SIDES = ("SERVER", "CLIENT")
"""As the key log calls them."""

_without_key_log = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of sessions after the handshake: OpenSSL 3.0 logs the secrets of KeyUpdates, too, and a peer may send any number."""


class TlsSession:
    """One end of a TLS connection.

    ``unread``: ciphertext that has not been decrypted: the beginning of a record, after the handshake whole ones, too.
    ``has_ended``: nothing more can be decrypted, after the peer's close_notify or by ``error``.
    """

    __slots__ = (
        "_context",
        "_feed",
        "_handshake_records",
        "_hello",
        "_incoming",
        "_key_log",
        "_must_stay",
        "_outgoing",
        "_read",
        "_received_records",
        "_secrets",
        "_sent_records",
        "_tls",
        "_write",
        "error",
        "has_ended",
        "unread",
    )

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, host: str | None = None) -> None:
        self._context = context  # OpenSSL calls back into it, and would find nothing there (see tls._front)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=host)
        # Bound once, for the calls that each record needs.
        self._feed, self._write = self._incoming.write, self._tls.write
        self._read = cast("Callable[[int, memoryview], int]", self._tls.read)
        self._handshake_records = 0
        self._hello = b""
        self._key_log = current_key_log()
        self._secrets: dict[str, bytes] = {}
        self._must_stay = False
        self._sent_records = self._received_records = 0  # since the handshake
        self.unread = b""
        self.has_ended = False
        self.error: ssl.SSLError | None = None

    @property
    def version(self) -> str:
        """The negotiated version of TLS, in the words of ssl.SSLObject.version; empty before the handshake."""
        return self._tls.version() or ""

    @property
    def was_resumed_by_client(self) -> bool:
        """Whether a client has resumed an earlier session instead of a full handshake."""
        return self._tls.server_side and bool(self._tls.session_reused)

    @property
    def gives_tickets(self) -> bool:
        """Whether clients get tickets, by which they may resume the session (`tls.session_tickets`)."""
        return self._context.num_tickets > 0

    def peer_certificate(self) -> bytes:
        """Return the peer's verified certificate as DER; empty if it sent none."""
        return self._tls.getpeercert(binary_form=True) or b""

    # ---- the handshake

    def continue_handshake(self, ciphertext: bytes = b"") -> bool:
        """Continue the handshake with what the peer has sent; return True once it is done.

        Send what ``take_outgoing`` returns then, also after an error. Raises ssl.SSLError.
        """
        self.unread += ciphertext
        if self._key_log is not None:
            self._key_log.clear()  # of what is no session's of ours
        try:
            while True:
                pending_bytes = self._outgoing.pending
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    if not self._feed_record():
                        return False
                else:
                    self._hello = b""
                    if self._tls.server_side and self.gives_tickets:
                        self._count_tickets(pending_bytes)
                    if self._key_log is not None:
                        self._tls.context = _without_key_log
                    return True
        finally:
            if self._key_log is not None:
                self._secrets |= self._key_log.take_secrets()

    def _count_tickets(self, earlier_bytes: int) -> None:
        """Count the records that the handshake's end has put behind ``earlier_bytes``: they have the keys of data."""
        outgoing = self._outgoing.read()
        self._outgoing.write(outgoing)
        at = earlier_bytes
        while at < len(outgoing):
            self._sent_records += 1
            at += _HEADER_BYTES + int.from_bytes(outgoing[at + 3 : at + _HEADER_BYTES])

    def end_input(self) -> None:
        """Have the handshake fail for the end of the connection."""
        self._incoming.write_eof()

    def _feed_record(self) -> bool:
        """Feed OpenSSL the first record of ``unread``; return False where it is incomplete. Raises ssl.SSLError."""
        ahead = self.unread
        if len(ahead) < _HEADER_BYTES:
            return False
        size = _HEADER_BYTES + (ahead[3] << 8 | ahead[4])
        if ahead[0] not in _RECORD_TYPES or size > RECORD_BYTES_MAX:
            size = _HEADER_BYTES  # which is no TLS: OpenSSL refuses it by its beginning
        if len(ahead) < size:
            return False
        self._check_handshake_record(ahead[:size])
        self._feed(ahead[:size])
        self.unread = ahead[size:]
        return True

    def _check_handshake_record(self, record: bytes) -> None:
        self._handshake_records += 1
        if self._handshake_records > HANDSHAKE_RECORDS_MAX:
            raise _violation("too many records in the handshake")
        if self._tls.server_side and record[0] == _HANDSHAKE_RECORD:
            self._check_hello(record[_HEADER_BYTES:])

    def _check_hello(self, part: bytes) -> None:
        """Refuse a hello that is too large, and note where it wants smaller records than the kernel makes.

        Only for the latter all of it is kept. A hello after that (RFC 8446, 4.1.4) asks for the same.
        """
        is_whole = self._key_log is not None
        hello = self._hello
        size = int.from_bytes(hello[1:_MESSAGE_HEADER_BYTES]) if is_whole else 0
        if len(hello) >= _MESSAGE_HEADER_BYTES + size:
            return
        self._hello = hello = hello + (part if is_whole else part[:_MESSAGE_HEADER_BYTES])
        size = int.from_bytes(hello[1:_MESSAGE_HEADER_BYTES])
        if len(hello) >= _MESSAGE_HEADER_BYTES and size > HELLO_BYTES_MAX:
            raise _violation(f"a hello of more than {HELLO_BYTES_MAX} bytes")
        self._must_stay |= is_whole and limits_record_size(hello)

    # ---- data

    def decrypt(self, ciphertext: memoryview, plaintext: memoryview) -> int:
        """Decrypt whole records into ``plaintext``; return how many bytes that are.

        ``ciphertext``: what ``unread`` held, and behind it what has come since. ``plaintext`` has room for as much.
        Afterwards ``waiting_record_bytes`` may tell that TLS itself has something to send.
        """
        size, at, got, records, without_data = len(ciphertext), 0, 0, 0, 0
        read, feed = self._read, self._feed
        while size - at >= _HEADER_BYTES:
            following = at + _HEADER_BYTES + (ciphertext[at + 3] << 8 | ciphertext[at + 4])
            if following > size and following - at <= RECORD_BYTES_MAX and ciphertext[at] in _RECORD_TYPES:
                break
            feed(ciphertext[at:following])  # what is too long, or no record, is OpenSSL's to refuse
            records += 1
            record_bytes, at = following - at, following
            try:
                part = read(RECORD_BYTES, plaintext[got:])
            except ssl.SSLWantReadError:  # a record without data, as of a KeyUpdate
                without_data += 1
                self._on_record_without_data(record_bytes)
                if without_data <= RECORDS_WITHOUT_DATA_MAX:
                    continue
                self.error = _violation("too many records without data")
                part = 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                part = 0
            except ssl.SSLError as error:  # a damaged record, or an alert; what came before it is good
                self.error = error.with_traceback(None)  # which leads back here
                part = 0
            if not part:
                self.has_ended, at = True, size
                break
            got += part
        self._received_records += records
        if at < size or self.unread:
            self.unread = bytes(ciphertext[at:size])
        return got

    def _on_record_without_data(self, size_bytes: int) -> None:
        self._must_stay |= self._tls.server_side or size_bytes < _TICKET_RECORD_BYTES_MIN

    def encrypt(self, plaintext: memoryview) -> bytes:
        """Encrypt into records. Raises ssl.SSLError."""
        size, write, take = len(plaintext), self._write, self._outgoing.read
        if size <= RECORD_BYTES:
            self._sent_records += 1
            write(plaintext)
            return take()
        records = []
        for start in range(0, size, RECORD_BYTES):
            self._sent_records += 1
            write(plaintext[start : start + RECORD_BYTES])
            records.append(take())
        return b"".join(records)

    @property
    def waiting_record_bytes(self) -> int:
        """How much TLS itself has to send: answers to KeyUpdates, and alerts."""
        return self._outgoing.pending

    # ---- into the kernel

    @property
    def can_move_to_kernel(self) -> bool:
        """Whether ``take_kernel_keys`` may be called: all that has come was decrypted, and nothing waits to be sent."""
        if len(self._secrets) < len(_SIDES) or self._must_stay or self.unread or self.has_ended:
            return False
        return not self._outgoing.pending and self._cipher_name in usable_ciphers()

    def take_kernel_keys(self) -> KeyPair:
        """Return the keys by which the kernel goes on with this session, of which no more may be used then."""
        ours, theirs = _SIDES if self._tls.server_side else reversed(_SIDES)
        secrets, self._secrets = self._secrets, {}
        return KeyPair(
            sending=keys_from_traffic_secret(secrets[ours], self._cipher_name, self._sent_records),
            receiving=keys_from_traffic_secret(secrets[theirs], self._cipher_name, self._received_records),
        )

    @property
    def _cipher_name(self) -> str:
        return (self._tls.cipher() or ("",))[0]

    @property
    def context(self) -> ssl.SSLContext:
        """The context that it was made with."""
        return self._context

    def take_outgoing(self) -> bytes:
        """Return what is to be sent beside what ``encrypt`` returns."""
        return self._outgoing.read()

    def close(self) -> bytes:
        """End our direction; return what is to be sent last, close_notify included. The peer may still send."""
        # Always raised: the peer's close_notify is not there. (An unread record would be taken for it; there is none.)
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()


def _violation(text: str) -> ssl.SSLError:
    """Return an error with a text of ours, as OpenSSL's have theirs; only those have a reason by themselves."""
    error = ssl.SSLError(ssl.SSL_ERROR_SSL, text)
    error.reason = text
    return error
