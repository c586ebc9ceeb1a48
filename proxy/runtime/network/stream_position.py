"""How much of a TCP connection's stream was ever taken out of its socket, as the kernel knows it.

Whoever follows a stream's frames and dies leaves this behind: no note of it has to be made after the fact.
"""

import fcntl
import socket
import struct
import termios

_TCP_CLOSE = 7
_FIN_RECEIVED = frozenset({6, 8, 9, 11})  # TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING
_NO_END_BEFORE = frozenset({104, 110, 113})  # ECONNRESET, ETIMEDOUT, EHOSTUNREACH
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received of struct tcp_info (linux/tcp.h), since Linux 4.1
_TCP_INFO_BYTES = 136
_LOOKS_MAX = 1000


def consumed_bytes(descriptor: int) -> int:
    """How many bytes of its stream were taken out of a TCP socket that nobody reads meanwhile.

    Raises OSError where the kernel does not tell.

    The kernel counts an end of the stream as one byte more. A connection that is closed on both sides does not say
    whether there was one: if it broke, then most likely not.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        received, state = _received(sock)
        for _ in range(_LOOKS_MAX):  # more may come between the two looks, until the window is full
            waiting = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0]
            before, (received, state) = received, _received(sock)
            if received == before:
                break
        if state == _TCP_CLOSE:
            ended = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _NO_END_BEFORE
        else:
            ended = state in _FIN_RECEIVED
        return received - int(waiting) - ended
    finally:
        sock.detach()


def _received(sock: socket.socket) -> tuple[int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        raise OSError("this kernel does not count a connection's bytes")
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]), info[0]
