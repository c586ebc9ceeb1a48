"""Accepting clients in fair shares: all forwarders wait on the same listeners."""

import errno
import socket
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger
from proxy.forwarder.listen.admission import Admission
from proxy.runtime.loop.tcp_stream import TcpStream

GIVE_WAY_S = 0.002
"""How long a forwarder with more than its share of the clients leaves a new one to the others."""

FULL_LOOK_S = 0.005
FULL_MAX_S = 1.0
"""How long a forwarder without room leaves clients in the queue: for others, or until it has room itself."""

NO_DESCRIPTORS_PAUSE_S = 0.1
TURN_AWAY_S = 1.0
"""How long a forwarder turns clients away at once, after it has waited for room in vain."""

ACCEPTED_PER_WAKE_UP_MAX = 16
"""Clients that are accepted one after the other, before what they send is looked at."""

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_clients(
    listener: socket.socket,
    admission: Admission,
    on_client: Callable[[TcpStream, tuple[str, int]], None],
) -> None:
    """Accept until cancelled. ``on_client`` is called with each connection, and its IP address and port."""
    turning_away_until = float("-inf")
    with listener:  # closed at the end, so that no client waits in its queue for nothing
        while True:
            await trio.lowlevel.wait_readable(listener)
            # If no other forwarder takes it, since they are gone or hang, it is still there afterwards.
            if _should_wait(admission):
                if trio.current_time() >= turning_away_until and not await _wait_for_room(admission):
                    turning_away_until = trio.current_time() + TURN_AWAY_S
            elif admission.has_more_than_its_share():
                await trio.sleep(GIVE_WAY_S)
            for _ in range(ACCEPTED_PER_WAKE_UP_MAX):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    break  # there is no other, or another forwarder was faster
                except OSError as error:
                    if error.errno in _NO_DESCRIPTORS:
                        get_logger().error("cannot accept clients; raise ulimit -n", reason=error.strerror)
                        await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
                    break  # any other error is of this one client, which has gone again
                sock.setblocking(False)
                on_client(TcpStream(sock), address[:2])
                if _should_wait(admission) or admission.has_more_than_its_share():
                    break


def _should_wait(admission: Admission) -> bool:
    return admission.is_busy() or (admission.is_full() and admission.others_have_room())


async def _wait_for_room(admission: Admission) -> bool:
    """Wait for room for up to FULL_MAX_S. Return False if there is none: all in the queue are turned away then."""
    with trio.move_on_after(FULL_MAX_S):
        while _should_wait(admission):  # noqa: ASYNC110 -- others' counters can only be looked at
            await trio.sleep(FULL_LOOK_S)
        return True
    return False
