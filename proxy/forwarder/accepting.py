"""Accepting clients, in fair shares: all forwarders wait on the same listeners."""

import errno
import socket
from collections.abc import Callable

import trio

from proxy.forwarder.admission import Admission
from proxy.runtime.logs import get_logger

GIVE_WAY_S = 0.002
"""How long a forwarder that has more than its share leaves a new client to the others."""

NO_DESCRIPTORS_PAUSE_S = 0.1
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_clients(
    listener: socket.socket,
    admission: Admission,
    take_in: Callable[[trio.SocketStream, tuple[str, int]], None],
) -> None:
    """Accept until cancelled: ``take_in`` gets each client's connection, and its IP address and port."""
    with listener:  # to accept no more means to keep no client waiting in the queue, either
        while True:
            await trio.lowlevel.wait_readable(listener)
            if admission.has_more_than_its_share():
                # If nobody else takes it, since the others are gone or hang, it is still there afterwards.
                await trio.sleep(GIVE_WAY_S)
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                continue  # another forwarder was faster
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    get_logger().error("cannot accept clients; raise ulimit -n", reason=error.strerror)
                    await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
                continue  # anything else is the one client's, who has gone again
            sock.setblocking(False)
            take_in(trio.SocketStream(trio.socket.from_stdlib_socket(sock)), address[:2])
