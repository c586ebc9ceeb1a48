"""Clients that wait at a listening socket: accepted within a bound, whatever happens to one of them."""

import errno
import socket
from collections.abc import Callable
from typing import Final

import trio

from proxy.common.logs import get_logger
from proxy.runtime.loop.tcp_stream import TcpStream

ACCEPTED_PER_WAKE_UP_MAX: Final = 16
"""Clients that are accepted one after the other, before what they send is looked at."""

NO_DESCRIPTORS_PAUSE_S: Final = 0.1

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_waiting(
    listener: socket.socket, on_client: Callable[[TcpStream, tuple[str, int]], bool | None], clients: str
) -> None:
    """Accept clients that wait, and wait for none. ``clients``: what they are called in the log.

    ``on_client`` is called with each connection, and its IP address and port; where it returns True, the others are
    left waiting.
    """
    for _ in range(ACCEPTED_PER_WAKE_UP_MAX):
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            break  # there is no other, or another process was faster
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                get_logger().error(f"cannot accept {clients}; raise ulimit -n", reason=error.strerror)
                await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
            break  # any other error is of this one client, which has gone again
        sock.setblocking(False)
        if on_client(TcpStream(sock), address[:2]):
            break
