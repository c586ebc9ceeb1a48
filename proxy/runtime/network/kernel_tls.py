"""Kernel TLS: OpenSSL performs the handshake, later the kernel gets the keys, and the socket is one of plain bytes.

A session of TLS 1.3 keeps its secrets (proxy.runtime.network.tls_session) where ``use_kernel_tls`` says so. When its
connection becomes a relay's, ``attach_tls`` and ``give_keys`` move it into the kernel. From then on ``recv``, ``send``
and ``os.splice`` move plaintext; ``examine`` tells what else came, and ``send_close_notify`` ends our direction. What
is on its way is in the kernel alone, so it outlives this process.

TLS 1.2 stays in user space: its keys and nonces depend on more of the handshake, and every client has TLS 1.3.
"""

import contextlib
import errno
import functools
import hmac
import os
import socket
import ssl
import struct
from enum import Enum, auto
from typing import NamedTuple

from proxy.common.errors import ConfigError, ProxyError
from proxy.common.logs import get_logger

ALERT, HANDSHAKE, APPLICATION_DATA = 21, 22, 23
CLOSE_NOTIFY = b"\x01\x00"

# linux/tcp.h, linux/socket.h, linux/tls.h
_TCP_ULP, _SOL_TLS = 31, 282
_TLS_TX, _TLS_RX = 1, 2
_TLS_SET_RECORD_TYPE, _TLS_GET_RECORD_TYPE = 1, 2
_TLS_1_3 = 0x0304
_NEW_SESSION_TICKET = 4
_NONCE_BYTES = 12
_CRYPTO_INFO_HEAD_BYTES = 4
_DISCARDED_RECORDS_MAX = 64
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


CIPHERS = {
    "TLS_AES_128_GCM_SHA256": Cipher(51, 16, 4),
    "TLS_AES_256_GCM_SHA384": Cipher(52, 32, 4),
    "TLS_CHACHA20_POLY1305_SHA256": Cipher(54, 32, 0),
}
"""Of TLS 1.3, by OpenSSL's names."""


class Keys(NamedTuple):
    """What the kernel needs for one direction. ``iv``: 12 bytes; ``sequence_number``: of the next record."""

    cipher: Cipher
    key: bytes
    iv: bytes
    sequence_number: int

    def to_crypto_info(self) -> bytes:
        """Return them as struct tls12_crypto_info_*, which TLS 1.3 has, too."""
        salt, iv = self.iv[: self.cipher.salt_bytes], self.iv[self.cipher.salt_bytes :]
        head = struct.pack("=HH", _TLS_1_3, self.cipher.number)
        return head + iv + self.key + salt + self.sequence_number.to_bytes(8)


class KeyPair(NamedTuple):
    """The keys of both directions."""

    sending: Keys
    receiving: Keys


# ---- the secrets of OpenSSL's handshakes


class KeyLog:
    """The secrets of handshakes, which OpenSSL writes into memory of this process. For use in one thread.

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

    def take_secrets(self) -> dict[str, bytes]:
        """Return the first traffic secrets of the session that has written since the last call, by "CLIENT" and
        "SERVER".
        """
        lines = os.pread(self._memory, _KEY_LOG_BYTES_MAX, 0).decode("ascii").splitlines()
        self.clear()
        found = (line.split() for line in lines)
        return {
            words[0].partition("_")[0]: bytes.fromhex(words[2])
            for words in found
            if len(words) == 3 and words[0].endswith("_TRAFFIC_SECRET_0")  # noqa: PLR2004 -- label, random, secret
        }

    def close(self) -> None:
        """Close the memory; contexts that write here have their own descriptor."""
        os.close(self._memory)


# ---- keys from secrets


def keys_from_traffic_secret(secret: bytes, cipher_name: str, sequence_number: int = 0) -> Keys:
    """Return the keys of one direction of TLS 1.3 (RFC 8446, 7.3). ``cipher_name``: one of CIPHERS."""
    cipher, digest = CIPHERS[cipher_name], cipher_name.rpartition("_")[2].lower()
    key = _expand_label(secret, "key", cipher.key_bytes, digest)
    return Keys(cipher, key, _expand_label(secret, "iv", _NONCE_BYTES, digest), sequence_number)


def _expand_label(secret: bytes, label: str, size: int, digest: str) -> bytes:
    """HKDF-Expand-Label without a context (RFC 8446, 7.1), of at most one block: no key is longer."""
    name = b"tls13 " + label.encode()
    info = struct.pack("!HB", size, len(name)) + name + b"\x00"
    return hmac.digest(secret, info + b"\x01", digest)[:size]


# ---- the socket


def attach_tls(connection: socket.socket) -> bool:
    """Prepare a TCP connection for keys, until which it stays as it was. May be repeated.

    Return False where the kernel has no TLS, or the peer has ended its direction.
    """
    try:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
    except OSError as error:
        return error.errno == errno.EEXIST
    return True


def give_keys(connection: socket.socket, keys: KeyPair) -> None:
    """Give the kernel the keys of a connection that has sent everything that the handshake returned.

    Raises KernelTlsNotPossible if it has taken none, OSError if only those for sending: the connection is to be closed.
    """
    try:
        connection.setsockopt(_SOL_TLS, _TLS_TX, keys.sending.to_crypto_info())
    except OSError as error:
        raise KernelTlsNotPossible(f"the kernel does not take the keys: {error}") from None
    connection.setsockopt(_SOL_TLS, _TLS_RX, keys.receiving.to_crypto_info())


def has_keys(connection: socket.socket) -> bool:
    """Return whether the kernel encrypts and decrypts this connection."""
    try:
        for direction in (_TLS_TX, _TLS_RX):
            connection.getsockopt(_SOL_TLS, direction, _CRYPTO_INFO_HEAD_BYTES)
    except OSError:
        return False
    return True


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


def push_records(connection: socket.socket) -> None:
    """Have what the kernel has accepted sent, when it has accepted no more.

    Before Linux 6.5 a splice of several pages leaves a whole record queued, and waits for room that only that record's
    acknowledgement would make: where the send buffer is small, as while the machine's memory for TCP is short.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # tcp(7): it flushes the output


def discard_input(connection: socket.socket) -> None:
    """Discard what has come: to close a socket of which something was not read resets the connection."""
    with contextlib.suppress(OSError):
        for _ in range(_DISCARDED_RECORDS_MAX):
            if not receive_record(connection, socket.MSG_DONTWAIT)[1]:
                return


def examine(connection: socket.socket, *, was_refused: bool) -> Following:
    """Find out, without waiting, what follows. Raises KernelTlsBroken.

    ``was_refused``: ``os.splice`` failed with EINVAL, or ``recv`` with EIO: a record that is not data follows.
    Otherwise they returned nothing: an empty record, or the end. Tickets for session resumption, which nobody uses, are
    dropped. An error breaks the stream, and so does a record that this proxy has no use for: another alert, or a
    KeyUpdate.
    """
    flags = socket.MSG_DONTWAIT
    while True:
        try:
            record_type, data = receive_record(connection, flags | socket.MSG_PEEK)
            if record_type == HANDSHAKE and data[:1] == bytes([_NEW_SESSION_TICKET]):
                receive_record(connection, flags)
                was_refused = False
                continue
        except BlockingIOError:
            if was_refused:  # the kernel says so once, and then as if nothing had come
                raise KernelTlsBroken("kernel TLS: the peer does not speak TLS any more") from None
            return Following.NOTHING_YET
        except OSError as error:
            raise KernelTlsBroken(f"kernel TLS: {errno.errorcode.get(error.errno or 0, error)}") from None
        if record_type == APPLICATION_DATA:
            return Following.DATA if data else Following.FIN
        if (record_type, data) == (ALERT, CLOSE_NOTIFY):
            return Following.CLOSE_NOTIFY
        raise KernelTlsBroken(f"kernel TLS: a record of type {record_type} that begins with {data[:2].hex()}")


# ---- whether this process moves sessions into the kernel

_key_log: KeyLog | None = None
_is_used = False


def current_key_log() -> KeyLog | None:
    """Return where this process's sessions find their secrets; None: no context has written any."""
    return _key_log


def follow_secrets(context: ssl.SSLContext) -> None:
    """Have a context's sessions keep their secrets, if this process moves sessions into the kernel."""
    if _is_used and _key_log is not None:
        _key_log.follow(context)


def use_kernel_tls(setting: str) -> None:
    """Apply `relay.kernel_tls` to this process; its secrets are kept of contexts that are made from now on.

    Raises ConfigError if it is `required` and the kernel has none.
    """
    # Properties of the process, as what its kernel can do is. The key log stays: contexts may go on writing to it, and
    # sessions have to empty it.
    global _key_log, _is_used  # noqa: PLW0603
    was_used, _is_used = _is_used, False
    if setting == "off":
        return
    if reason := kernel_tls_obstacle(setting):
        get_logger().warning("relays with TLS stay in user space, and end with their forwarder", reason=reason)
        return
    _is_used = True
    if not was_used:
        ciphers = ", ".join(sorted(kernel_ciphers()))
        get_logger().info("relays with TLS 1.3 are moved into the kernel", ciphers=ciphers)
        _key_log = _key_log or KeyLog()


def kernel_tls_obstacle(setting: str) -> str:
    """Return why relays with TLS stay in user space though `relay.kernel_tls` asks for the kernel; empty: they do not.

    Raises ConfigError if it is `required`.
    """
    if setting == "off" or kernel_ciphers():
        return ""
    reason = "the kernel gives this process no TLS; the machine's administrator may load it: modprobe tls"
    if setting == "required":
        raise ConfigError(f"relay.kernel_tls: {reason}")
    return reason


def usable_ciphers() -> frozenset[str]:
    """Return the names of CIPHERS with which sessions are moved into the kernel."""
    return kernel_ciphers() if _is_used else frozenset()


@functools.cache
def kernel_ciphers() -> frozenset[str]:
    """Return the names of CIPHERS that this kernel takes, by trying: its version does not tell."""
    return frozenset(name for name in CIPHERS if _kernel_takes(name))


def _kernel_takes(cipher_name: str) -> bool:
    keys = keys_from_traffic_secret(bytes(48), cipher_name)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=1) as connection,
        ):
            if attach_tls(connection):
                give_keys(connection, KeyPair(keys, keys))
                return True
    except (OSError, KernelTlsNotPossible):
        pass
    return False
