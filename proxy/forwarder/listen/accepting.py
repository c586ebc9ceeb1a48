"""Accepting clients, in fair shares: all forwarders wait on the same listeners."""

import errno
import socket
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger
from proxy.forwarder.listen.admission import Admission

GIVE_WAY_S = 0.002
"""How long a forwarder that has more than its share leaves a new client to the others."""

FULL_LOOK_S = 0.005
FULL_MAX_S = 1.0
"""How long one that has no room leaves clients in the queue: for others that have, or until it has some itself."""

NO_DESCRIPTORS_PAUSE_S = 0.1
FULL_TOLD_S = 1.0
"""How long, after it has waited in vain, it turns clients away at once."""

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_clients(
    listener: socket.socket,
    admission: Admission,
    take_in: Callable[[trio.SocketStream, tuple[str, int]], None],
) -> None:
    """Accept until cancelled: ``take_in`` gets each client's connection, and its IP address and port."""
    told_until = float("-inf")
    with listener:  # to accept no more means to keep no client waiting in the queue, either
        while True:
            await trio.lowlevel.wait_readable(listener)
            # If nobody else takes it, since the others are gone or hang, it is still there afterwards.
            if _should_wait(admission):
                if trio.current_time() >= told_until and not await _wait_for_room(admission):
                    told_until = trio.current_time() + FULL_TOLD_S
            elif admission.has_more_than_its_share():
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


def _should_wait(admission: Admission) -> bool:
    return admission.is_busy() or (admission.is_full() and admission.others_have_room())


async def _wait_for_room(admission: Admission) -> bool:
    """Wait for a bounded time; whether there is room. Otherwise all who are in the queue are told so, at once."""
    with trio.move_on_after(FULL_MAX_S):
        while _should_wait(admission):  # noqa: ASYNC110 -- others' counters can only be looked at
            await trio.sleep(FULL_LOOK_S)
        return True
    return False
