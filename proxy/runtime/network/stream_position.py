"""How many bytes of a TCP stream were ever read from its socket, as the kernel counts them.

This survives a process that tracked the stream's frames and crashed: it needs no record of its own.
"""

import fcntl
import socket
import struct
import termios

from proxy.runtime.loop.tcp_stream import borrowed_socket

_TCP_CLOSE = 7
_FIN_RECEIVED = frozenset({6, 8, 9, 11})  # TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING
_NO_END_BEFORE = frozenset({104, 110, 113})  # ECONNRESET, ETIMEDOUT, EHOSTUNREACH
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received of struct tcp_info (linux/tcp.h), since Linux 4.1
_TCP_INFO_BYTES = 136
_READS_MAX = 1000


def consumed_bytes(descriptor: int) -> int:
    """Return how many bytes of its stream were read from a TCP socket, which no process may read meanwhile.

    Raises OSError where the kernel does not tell.

    The kernel counts the end of the stream as one byte more. A connection that is closed on both sides does not say
    whether there was an end: if it broke, most likely not.
    """
    with borrowed_socket(descriptor) as sock:
        received, state = _received(sock)
        for _ in range(_READS_MAX):  # more may arrive between the two reads, until the window is full
            waiting = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0]
            before, (received, state) = received, _received(sock)
            if received == before:
                break
        if state == _TCP_CLOSE:
            ended = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _NO_END_BEFORE
        else:
            ended = state in _FIN_RECEIVED
        return received - int(waiting) - ended


def _received(sock: socket.socket) -> tuple[int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        raise OSError("this kernel does not count a connection's bytes")
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]), info[0]
