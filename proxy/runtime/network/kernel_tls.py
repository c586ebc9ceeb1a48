"""Kernel TLS: OpenSSL performs the handshake, then the kernel has the keys, and the socket is one of plain bytes.

``attach_tls`` when the connection is accepted or made; a ``KernelTlsSession`` for the handshake, to which no more than
``wanted_bytes`` are given, so that what follows the handshake is still in the socket; once everything that it returned
is sent, ``give_keys``. Then ``recv``, ``send`` and ``os.splice`` move plaintext. ``examine`` tells what else came, and
``send_close_notify`` ends our direction. Where the kernel does not take the keys the same session goes on in user
space.

A process that opens no files can do all that, too: OpenSSL writes the secrets into memory (``KeyLog``).
"""

import contextlib
import errno
import hmac
import os
import socket
import ssl
import struct
from enum import Enum, auto
from typing import NamedTuple

from proxy.common.errors import ProxyError
from proxy.runtime.network.tls_session import TlsSession

ALERT, HANDSHAKE, APPLICATION_DATA = 21, 22, 23
CLOSE_NOTIFY = b"\x01\x00"

# linux/tcp.h, linux/socket.h, linux/tls.h
_TCP_ULP, _SOL_TLS = 31, 282
_TLS_TX, _TLS_RX = 1, 2
_TLS_SET_RECORD_TYPE, _TLS_GET_RECORD_TYPE = 1, 2
_VERSIONS = {"TLSv1.2": 0x0303, "TLSv1.3": 0x0304}

_HEADER_BYTES = 5
_MESSAGE_HEADER_BYTES = 4
_CHANGE_CIPHER_SPEC = 20
_NEW_SESSION_TICKET = 4
_NONCE_BYTES = 12
_EXPLICIT_NONCE_BYTES = 8
_RANDOM = slice(_MESSAGE_HEADER_BYTES + 2, _MESSAGE_HEADER_BYTES + 2 + 32)
"""Where a hello has its random: behind the message's header and the version."""

_RECORD_TYPE_SPACE = socket.CMSG_SPACE(1)
_KEY_LOG_BYTES_MAX = 65_536


class KernelTlsNotPossible(ProxyError):
    """The kernel, or what was negotiated, does not allow kernel TLS: the session goes on in user space."""


class KernelTlsBroken(ProxyError):
    """What the peer sends cannot be decrypted any further: the connection is to be closed."""


class Following(Enum):
    """What follows in the socket."""

    DATA = auto()
    NOTHING_YET = auto()
    CLOSE_NOTIFY = auto()
    """It is left in the socket, where a successor finds it, too."""
    FIN = auto()
    """TCP's end, without close_notify."""


class Cipher(NamedTuple):
    """A cipher as linux/tls.h has it. ``salt_bytes``: how much of the 12-byte IV it calls salt."""

    number: int
    key_bytes: int
    salt_bytes: int


_CIPHERS = {"AES128GCM": Cipher(51, 16, 4), "AES256GCM": Cipher(52, 32, 4), "CHACHA20POLY1305": Cipher(54, 32, 0)}


class Keys(NamedTuple):
    """What the kernel needs for one direction. ``iv``: 12 bytes; ``sequence_number``: of the next record."""

    version: int
    cipher: Cipher
    key: bytes
    iv: bytes
    sequence_number: int

    def to_crypto_info(self) -> bytes:
        """Return them as struct tls12_crypto_info_*, which TLS 1.3 has, too."""
        salt, iv = self.iv[: self.cipher.salt_bytes], self.iv[self.cipher.salt_bytes :]
        head = struct.pack("=HH", self.version, self.cipher.number)
        return head + iv + self.key + salt + self.sequence_number.to_bytes(8)


class KeyPair(NamedTuple):
    """The keys of both directions."""

    sending: Keys
    receiving: Keys


# ---- the secrets of OpenSSL's handshakes


class KeyLog:
    """The secrets of handshakes, which OpenSSL writes into memory of this process. For use in one thread.

    All sessions of the contexts that it follows are to be KernelTlsSessions: others would leave their secrets here.

    The memory is a memfd: it belongs to no directory, so Landlock does not refuse to open it by its path in /proc.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("tls secrets", os.MFD_CLOEXEC)

    def follow(self, context: ssl.SSLContext) -> None:
        """Have a context's handshakes write their secrets here, as long as it lives. Raises OSError.

        Of a listener that is the loaded context, to which a front context switches before there is any secret.
        """
        context.keylog_filename = f"/proc/self/fd/{self._memory}"

    def clear(self) -> None:
        """Forget what was written."""
        os.ftruncate(self._memory, 0)

    def read(self) -> dict[str, tuple[bytes, bytes]]:
        """Return what was written: by label the client's random, and the secret."""
        lines = os.pread(self._memory, _KEY_LOG_BYTES_MAX, 0).decode("ascii").splitlines()
        words = (line.split() for line in lines if not line.startswith("#"))
        return {label: (bytes.fromhex(random), bytes.fromhex(secret)) for label, random, secret in words}

    def close(self) -> None:
        """Close the memory; contexts that write here have their own descriptor."""
        os.close(self._memory)


# ---- keys from secrets


def keys_from_traffic_secret(secret: bytes, cipher: Cipher, digest: str, sequence_number: int = 0) -> Keys:
    """Return the keys of one direction of TLS 1.3 (RFC 8446, 7.3)."""
    key = _expand_label(secret, "key", cipher.key_bytes, digest)
    return Keys(_VERSIONS["TLSv1.3"], cipher, key, _expand_label(secret, "iv", _NONCE_BYTES, digest), sequence_number)


def _expand_label(secret: bytes, label: str, size: int, digest: str) -> bytes:
    """HKDF-Expand-Label without a context (RFC 8446, 7.1), of at most one block: no key is longer."""
    name = b"tls13 " + label.encode()
    info = struct.pack("!HB", size, len(name)) + name + b"\x00"
    return hmac.digest(secret, info + b"\x01", digest)[:size]


def _key_block(master: bytes, randoms: bytes, size: int, digest: str) -> bytes:
    """Expand TLS 1.2's master secret into keys (RFC 5246, 5 and 6.3). ``randoms``: the server's, then the client's."""
    seed = b"key expansion" + randoms
    chained, block = seed, b""
    while len(block) < size:
        chained = hmac.digest(master, chained, digest)
        block += hmac.digest(master, chained + seed, digest)
    return block[:size]


# ---- the handshake


class _Direction:
    """What the keys need to know of the records of one direction of the handshake.

    ``protected_records``: those after TLS 1.2's ChangeCipherSpec; ``last_nonce``: the explicit one of the last of them.
    ``hello``: how the first message begins, up to its random.
    """

    __slots__ = ("_is_protected", "hello", "last_nonce", "protected_records")

    def __init__(self) -> None:
        self._is_protected = False
        self.hello = b""
        self.last_nonce = 0
        self.protected_records = 0

    def note(self, records: bytes) -> int:
        """Note whole records; return how many they are."""
        at = count = 0
        while at < len(records):
            body = at + _HEADER_BYTES
            end = body + int.from_bytes(records[at + 3 : body])
            if self._is_protected:
                self.protected_records += 1
                self.last_nonce = int.from_bytes(records[body : body + _EXPLICIT_NONCE_BYTES])
            elif records[at] == _CHANGE_CIPHER_SPEC:
                self._is_protected = True
            elif records[at] == HANDSHAKE and len(self.hello) < _RANDOM.stop:
                self.hello = (self.hello + records[body:end])[: _RANDOM.stop]
            at, count = end, count + 1
        return count


_without_key_log = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of sessions after the handshake: OpenSSL would log the secrets of KeyUpdates of those that stay in user space."""


class KernelTlsSession(TlsSession):
    """A session whose keys can be given to the kernel after the handshake.

    Give ``continue_handshake`` no more than ``wanted_bytes`` at a time. ``key_log`` follows the context, of a front
    context the loaded one.
    """

    __slots__ = ("_key_log", "_last_flight_records", "_received", "_secrets", "_sent", "_unsent")

    def __init__(self, context: ssl.SSLContext, key_log: KeyLog, *, server_side: bool, host: str | None = None) -> None:
        super().__init__(context, server_side=server_side, host=host)
        self._key_log = key_log
        self._secrets: dict[str, tuple[bytes, bytes]] = {}
        self._sent, self._received = _Direction(), _Direction()
        self._last_flight_records = 0
        self._unsent = b""

    @property
    def wanted_bytes(self) -> int:
        """How many bytes may be read from the socket next: to the end of a record's header, or of the record."""
        ahead = self.unread
        if len(ahead) < _HEADER_BYTES:
            return _HEADER_BYTES - len(ahead)
        return _HEADER_BYTES + int.from_bytes(ahead[3:5]) - len(ahead)  # what is no record was refused by its header

    def continue_handshake(self, ciphertext: bytes = b"") -> bool:
        """Continue as TlsSession does. Raises ssl.SSLError."""
        self._key_log.clear()  # of what sessions in user space have written
        try:
            is_done = super().continue_handshake(ciphertext)
            self._secrets |= self._key_log.read()
            if is_done:
                self._tls.context = _without_key_log
        except BaseException:
            self._secrets.clear()
            raise
        finally:
            self._key_log.clear()
            outgoing = super().take_outgoing()
            self._last_flight_records = self._sent.note(outgoing)
            self._unsent += outgoing
        return is_done

    def take_outgoing(self) -> bytes:
        """Return what is to be sent beside what ``encrypt`` returns."""
        outgoing, self._unsent = self._unsent + super().take_outgoing(), b""
        return outgoing

    def _check_handshake_record(self, record: bytes) -> None:
        super()._check_handshake_record(record)
        self._received.note(record)

    def take_keys(self) -> KeyPair:
        """Return the keys for the records after the handshake, once: the secrets are forgotten.

        Raises KernelTlsNotPossible.
        """
        secrets, self._secrets = self._secrets, {}
        if self.unread:
            raise KernelTlsNotPossible("more was read from the socket than the handshake")
        name = (self._tls.cipher() or ("", "", 0))[0]
        digest = "sha384" if name.endswith("SHA384") else "sha256"
        plain_name = name.replace("-", "").replace("_", "")
        cipher = next((cipher for key, cipher in _CIPHERS.items() if key in plain_name), None)
        if cipher is None:
            raise KernelTlsNotPossible(f"the kernel has no cipher for {name}")
        try:
            if self.version == "TLSv1.3":
                return self._keys_1_3(secrets, cipher, digest)
            return self._keys_1_2(secrets, cipher, digest)
        except KeyError as error:
            raise KernelTlsNotPossible(f"the context does not log its secrets: no {error}") from None

    def _keys_1_3(self, secrets: dict[str, tuple[bytes, bytes]], cipher: Cipher, digest: str) -> KeyPair:
        is_server = self._tls.server_side
        ours, theirs = ("SERVER", "CLIENT") if is_server else ("CLIENT", "SERVER")
        (_, sending), (_, receiving) = (secrets[f"{side}_TRAFFIC_SECRET_0"] for side in (ours, theirs))
        # What a server sends behind the client's Finished, tickets, has the new keys already.
        sent = self._last_flight_records if is_server else 0
        return KeyPair(
            keys_from_traffic_secret(sending, cipher, digest, sent), keys_from_traffic_secret(receiving, cipher, digest)
        )

    def _keys_1_2(self, secrets: dict[str, tuple[bytes, bytes]], cipher: Cipher, digest: str) -> KeyPair:
        client_random, master = secrets["CLIENT_RANDOM"]
        ours, theirs = self._sent, self._received
        server_random = (ours if self._tls.server_side else theirs).hello[_RANDOM]
        key_bytes, iv_bytes = cipher.key_bytes, cipher.salt_bytes or _NONCE_BYTES
        block = _key_block(master, server_random + client_random, 2 * (key_bytes + iv_bytes), digest)
        keys = block[:key_bytes], block[key_bytes : 2 * key_bytes]
        ivs = block[2 * key_bytes : -iv_bytes], block[-iv_bytes:]
        client, server = (
            _keys_of_direction(cipher, key, iv, direction)
            for key, iv, direction in zip(
                keys, ivs, (theirs, ours) if self._tls.server_side else (ours, theirs), strict=True
            )
        )
        return KeyPair(server, client) if self._tls.server_side else KeyPair(client, server)


def _keys_of_direction(cipher: Cipher, key: bytes, iv: bytes, direction: _Direction) -> Keys:
    # 8 bytes of a GCM nonce are the sender's choice: the kernel goes on where OpenSSL ended, so that none comes twice.
    following = (direction.last_nonce + 1) % (1 << 8 * _EXPLICIT_NONCE_BYTES)
    nonce = (iv + following.to_bytes(_EXPLICIT_NONCE_BYTES))[:_NONCE_BYTES]
    return Keys(_VERSIONS["TLSv1.2"], cipher, key, nonce, direction.protected_records)


# ---- the socket


def attach_tls(connection: socket.socket) -> bool:
    """Prepare a TCP connection for keys; return False where the kernel has no TLS. Until then it stays as it was.

    Call it at once: after the peer's FIN it is refused.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
        return True
    return False


def give_keys(connection: socket.socket, keys: KeyPair) -> None:
    """Give the kernel the keys of a connection that has sent everything that the handshake returned.

    Raises KernelTlsNotPossible if it has taken none, OSError if only those for sending: the connection is to be closed.
    """
    try:
        connection.setsockopt(_SOL_TLS, _TLS_TX, keys.sending.to_crypto_info())
    except OSError as error:
        raise KernelTlsNotPossible(f"the kernel does not take the keys: {error}") from None
    connection.setsockopt(_SOL_TLS, _TLS_RX, keys.receiving.to_crypto_info())


def receive_record(connection: socket.socket, flags: int = 0) -> tuple[int, bytes]:
    """Receive from the next record, of whichever type; return its type, and its content. Raises OSError.

    At the end of the connection that is APPLICATION_DATA and nothing. ``flags``: as MSG_PEEK.
    """
    data, ancillary, _, _ = connection.recvmsg(1 << 14, _RECORD_TYPE_SPACE, flags)
    types = (value[0] for level, kind, value in ancillary if (level, kind) == (_SOL_TLS, _TLS_GET_RECORD_TYPE))
    return next(types, APPLICATION_DATA), data


def send_record(connection: socket.socket, record_type: int, data: bytes) -> None:
    """Send a record of another type than APPLICATION_DATA. Raises OSError."""
    connection.sendmsg([data], [(_SOL_TLS, _TLS_SET_RECORD_TYPE, bytes([record_type]))])


def send_close_notify(connection: socket.socket) -> bool:
    """Send close_notify; return False while the kernel has no room: call it again at EPOLLOUT. Raises OSError.

    Only once it is accepted everything before it is on its way: ``shutdown`` or ``close`` alone lose up to a record.
    """
    try:
        send_record(connection, ALERT, CLOSE_NOTIFY)
    except BlockingIOError:
        return False
    return True


def examine(connection: socket.socket, *, was_refused: bool) -> Following:
    """Find out what follows in a socket that does not block. Raises KernelTlsBroken.

    ``was_refused``: ``os.splice`` failed with EINVAL, or ``recv`` with EIO: a record that is not data follows.
    Otherwise they returned nothing: an empty record, or the end. Tickets for session resumption, which nobody uses, are
    dropped. An error breaks the stream, and so does a record that this proxy has no use for: another alert, or a
    KeyUpdate.
    """
    while True:
        try:
            record_type, data = receive_record(connection, socket.MSG_PEEK)
            if record_type == HANDSHAKE and data[:1] == bytes([_NEW_SESSION_TICKET]):
                receive_record(connection)
                was_refused = False
                continue
        except BlockingIOError:
            if was_refused:  # what follows is no record at all
                raise KernelTlsBroken("kernel TLS: the peer does not speak TLS any more") from None
            return Following.NOTHING_YET
        except OSError as error:
            raise KernelTlsBroken(f"kernel TLS: {errno.errorcode.get(error.errno or 0, error)}") from None
        if record_type == APPLICATION_DATA:
            return Following.DATA if data else Following.FIN
        if (record_type, data) == (ALERT, CLOSE_NOTIFY):
            return Following.CLOSE_NOTIFY
        raise KernelTlsBroken(f"kernel TLS: a record of type {record_type} that begins with {data[:2].hex()}")
