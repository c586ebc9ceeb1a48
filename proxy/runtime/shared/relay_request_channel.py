"""The channel by which HTTP workers pass connections to forwarders, which relay them.

One pair of sockets for the cluster: all HTTP workers have the sending end, all forwarders the receiving one, and one of
those that are awake takes a message. It holds three descriptors: the client's connection, the broker's, and a socket on
which the forwarder says ACCEPTED once the relay is safe, or REFUSED: the sender has both connections still, then. Where
it says nothing and has gone, the relay may live in the fd store.
"""

import contextlib
import os
import select
import socket
import stat
from collections.abc import Sequence

import trio

from proto.rpc_pb2 import RelayRequest
from proxy.common.errors import ProxyError
from proxy.runtime.shared.fd_store_channel import DescriptorChannel, create_store_sockets

ACCEPTED, REFUSED = b"\1", b"\0"
DESCRIPTORS = 3


def create_relay_request_sockets() -> tuple[socket.socket, socket.socket]:
    """Create the forwarders' end and that of the HTTP workers."""
    return create_store_sockets()


def working_relay_request_sockets(
    sockets: tuple[socket.socket, socket.socket] | None,
) -> tuple[socket.socket, socket.socket]:
    """Return the sockets of the program before; new ones where it had none, or a worker has shut them down."""
    if sockets is not None:
        poll = select.poll()
        for sock in sockets:
            poll.register(sock, select.POLLRDHUP)
        if not poll.poll(0):
            return sockets
        for sock in sockets:
            sock.close()
    return create_relay_request_sockets()


class PassedConnectionInvalid(ProxyError):
    """What came with a request is not what it should be."""


class PassedConnectionGone(PassedConnectionInvalid):
    """One of the two connections has ended meanwhile."""


class RelayRequestChannel(DescriptorChannel[RelayRequest]):
    """One end of the channel."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, RelayRequest)
        self._turn = trio.StrictFIFOLock()

    async def request(
        self, request: RelayRequest, client: socket.socket, broker: socket.socket, timeout_s: float
    ) -> bytes:
        """Pass two connections to a forwarder; return ACCEPTED or REFUSED, empty where the forwarder has gone.

        Raises trio.TooSlowError, OSError, MessageTooLong, StoreLost. Several tasks may call it at a time.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setblocking(False)
            with trio.fail_after(timeout_s):
                async with self._turn:
                    await self.send(request, [client.fileno(), broker.fileno(), theirs.fileno()])
                theirs.close()
                await trio.lowlevel.wait_readable(ours)
                try:
                    return ours.recv(1)
                except ConnectionError:
                    return b""


def answer_request(answer: socket.socket, text: bytes) -> None:
    """Tell the sender what has become of its request, if it still listens, without ever waiting."""
    with contextlib.suppress(OSError):
        answer.send(text, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def passed_sockets(descriptors: Sequence[int]) -> list[socket.socket]:
    """Return sockets of what came with a request: two connected streams of TCP or Unix, then the one to answer on.

    Raises PassedConnectionInvalid; the descriptors are the caller's then.
    """
    if len(descriptors) != DESCRIPTORS or not all(stat.S_ISSOCK(os.fstat(one).st_mode) for one in descriptors):
        raise PassedConnectionInvalid("not three sockets")
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    try:
        for sock in sockets[: DESCRIPTORS - 1]:
            sock.setblocking(False)
            _check_connection(sock)
    except (OSError, PassedConnectionInvalid) as error:
        for sock in sockets:
            sock.detach()
        raise PassedConnectionGone(str(error)) if isinstance(error, OSError) else error from None
    return sockets


def _check_connection(sock: socket.socket) -> None:
    is_tcp = sock.family in {socket.AF_INET, socket.AF_INET6} and sock.proto == socket.IPPROTO_TCP
    if not (is_tcp or sock.family == socket.AF_UNIX) or sock.type != socket.SOCK_STREAM:
        raise PassedConnectionInvalid("neither a connection of TCP nor one of Unix")
    sock.getpeername()  # raises where it is not connected, as a listener
