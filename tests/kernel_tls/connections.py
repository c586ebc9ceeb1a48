"""Connections over the loopback interface with kernel TLS at one end, and at the other OpenSSL or records by hand."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from typing import Self

from tls_ends import Records, Scene, decrypted, encrypted

from proxy.runtime.network.kernel_tls import attach_tls, give_keys
from proxy.runtime.network.tls_session import TlsSession

PORTION_BYTES = 1 << 20
SPLICE_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_TCP_INFO_BYTES_RECEIVED = 128
_F_SETPIPE_SZ = 1031


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection: the one that has connected, and the one that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), timeout=30)
        other, _ = listener.accept()
    other.settimeout(30)
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


class Peer:
    """The end that has OpenSSL in user space, and may send records by hand instead."""

    def __init__(self, connection: socket.socket, session: TlsSession) -> None:
        self.socket = connection
        self.session = session

    def send(self, data: bytes) -> None:
        self.socket.sendall(encrypted(self.session, data))

    def end(self) -> None:
        """Send close_notify and TCP's FIN."""
        self.socket.sendall(self.session.close())
        self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> bytes:
        """Receive some data, at the end none. Whether close_notify has ended it: ``has_close_notify``."""
        session = self.session
        while not session.has_ended:
            ciphertext = self.socket.recv(65536)
            if not ciphertext:
                return b""
            if data := decrypted(session, ciphertext):
                return data
        return b""

    def receive_all(self) -> bytes:
        """Receive to the end."""
        found = bytearray()
        while data := self.receive():
            found += data
        return bytes(found)

    @property
    def has_close_notify(self) -> bool:
        return self.session.has_ended and self.session.error is None


class Connection:
    """``kernel``: the socket whose TLS is the kernel's. ``by_hand``: what makes the records that its peer sends."""

    def __init__(self, scene: Scene, *, is_server: bool = True, send_buffer: int = 0, peer_buffer: int = 0) -> None:
        connecting, accepted = tcp_pair()
        self.kernel, other = (accepted, connecting) if is_server else (connecting, accepted)
        if send_buffer:
            self.kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        if peer_buffer:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, peer_buffer)
        assert attach_tls(self.kernel)
        session, peer_session = scene.ends("server" if is_server else "client")
        self.peer = Peer(other, peer_session)
        self.keys = session.take_kernel_keys()
        give_keys(self.kernel, self.keys)
        self.kernel.setblocking(False)
        self.by_hand = Records(self.keys.receiving)
        self.pipe = Pipe()

    def splice(self, size: int = PORTION_BYTES) -> int | str:
        """Splice from the socket into a pipe, without waiting; return how much, or the error's name."""
        return self.pipe.splice_from(self.kernel, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kernel.close()
        self.peer.socket.close()
        self.pipe.close()


class Pipe:
    """A large one."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self.writing, _F_SETPIPE_SZ, PORTION_BYTES)

    def splice_from(self, source: socket.socket, size: int = PORTION_BYTES) -> int | str:
        return outcome(lambda: os.splice(source.fileno(), self.writing, size, flags=SPLICE_FLAGS))

    def splice_to(self, sink: socket.socket, size: int) -> int | str:
        return outcome(lambda: os.splice(self.reading, sink.fileno(), size, flags=SPLICE_FLAGS))

    def read(self) -> bytes:
        try:
            return os.read(self.reading, PORTION_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


def outcome(call: Callable[[], int]) -> int | str:
    """Return what a system call returns, or its error's name."""
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def bytes_received(connection: socket.socket) -> int:
    """TCP's tcpi_bytes_received."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (count,) = struct.unpack_from("Q", info, _TCP_INFO_BYTES_RECEIVED)
    return int(count)


def readable_bytes(connection: socket.socket) -> int:
    """FIONREAD."""
    found = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, found)
    return found[0]
