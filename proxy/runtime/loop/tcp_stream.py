"""A TCP connection as a Trio stream, around Python's own socket object.

Trio's SocketStream has a socket object of Trio's around that, and sets options: 17 µs a connection, and 2 µs for each
option that is set later. A proxy that opens two connections for each of its clients notices that.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import trio

RECEIVE_BYTES = 65_536

_CLOSED = "this socket was closed already"


class TcpStream(trio.abc.HalfCloseableStream):
    """A connected, non-blocking socket. One task may send while another receives.

    It never blocks, whatever another process that has the same connection makes of it. Errors of the connection are
    trio.BrokenResourceError; a closed socket is trio.ClosedResourceError.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``, waiting for room where there is none."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        with _translated_errors(), memoryview(data) as view:
            sent = 0
            while sent < len(view):
                try:
                    sent += self.socket.send(view[sent:], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    waited = True
                    await trio.lowlevel.wait_writable(self.socket)
        if not waited:
            await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room for something to be sent."""
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError(_CLOSED)
        await trio.lowlevel.wait_writable(self.socket)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what is there, at least one byte; empty at the end of the stream."""
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        with _translated_errors():
            while True:
                try:
                    data = self.socket.recv(max_bytes or RECEIVE_BYTES, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:
                    waited = True
                    await trio.lowlevel.wait_readable(self.socket)
        if not waited:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def send_eof(self) -> None:
        """End our own direction; may be repeated."""
        await trio.lowlevel.checkpoint()
        with _translated_errors():
            self.socket.shutdown(socket.SHUT_WR)

    def close_now(self) -> None:
        """Close the socket; tasks that wait for it get trio.ClosedResourceError. May be repeated."""
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    async def aclose(self) -> None:
        """Do the same, as Trio wants it."""
        self.close_now()
        await trio.lowlevel.checkpoint()


def plain_socket(stream: object) -> socket.socket | trio.socket.SocketType | None:
    """Return the socket of a stream that is a plain connection, of TCP or Unix; None for any other, as TLS is."""
    return stream.socket if isinstance(stream, TcpStream | trio.SocketStream) else None


@contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for the descriptor of a TCP connection that stays open."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBADF:
            raise trio.ClosedResourceError(_CLOSED) from None
        raise trio.BrokenResourceError(f"socket connection broken: {error}") from error
