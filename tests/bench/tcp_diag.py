"""Bytes that a server's connections have received, by the kernel's own count (INET_DIAG, sock_diag(7)), as of `ss -i`.

It is the same for each proxy in front of the server, and costs none of them anything.
"""

import socket
import struct
from collections.abc import Iterator

_SOCK_DIAG = 4  # linux/netlink.h: NETLINK_SOCK_DIAG
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence number, port id
_QUERY = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2: family, protocol, extensions, states, no socket's id
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2  # linux/inet_diag.h: INET_DIAG_INFO
_ESTABLISHED = 1 << 1
_MESSAGE_BYTES = 72  # struct inet_diag_msg
_SOURCE_PORT_AT = 4
_BYTES_RECEIVED_AT = 128  # of struct tcp_info
_BUFFER_BYTES = 1 << 18


def received_bytes(port: int) -> int:
    """Sum what the connections of a server at this port have received until now; those that have ended do not count."""
    return sum(_received(message) for message in _connections() if _port_of(message) == port)


def _connections() -> Iterator[memoryview]:
    """Each connection of this machine: its inet_diag_msg and the attributes behind it."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            query = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
            kernel.send(_HEAD.pack(_HEAD.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 0, 0) + query)
            is_done = False
            while not is_done:
                rest = memoryview(kernel.recv(_BUFFER_BYTES))
                while rest and not is_done:
                    size, kind, *_ = _HEAD.unpack_from(rest)
                    if kind == _ERROR:
                        raise OSError("the kernel does not tell of its connections (INET_DIAG)")
                    is_done = kind == _DONE
                    if not is_done:
                        yield rest[_HEAD.size : size]
                    rest = rest[_aligned(size) :]


def _port_of(message: memoryview) -> int:
    return int.from_bytes(message[_SOURCE_PORT_AT : _SOURCE_PORT_AT + 2])


def _received(message: memoryview) -> int:
    rest = message[_MESSAGE_BYTES:]
    while rest:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INFO:
            (received,) = struct.unpack_from("=Q", rest, _ATTRIBUTE.size + _BYTES_RECEIVED_AT)
            return int(received)
        rest = rest[_aligned(size) :]
    return 0


def _aligned(size: int) -> int:
    return (size + 3) & ~3
