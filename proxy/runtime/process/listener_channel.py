"""Both ends of the channel by which a worker gets its listeners from the supervisor, once it asks for them.

It asks when it is started, not before: a process that has not got that far would keep the ports if the supervisor were
killed. What follows on the channel is its owner's (of an admin worker: its calls).
"""

import socket
from collections.abc import Mapping

import trio

from proxy.runtime.process.descriptors import adopt_socket

LISTENER_REQUEST = b"L"
"""The first byte on the channel: the supervisor answers it with the listeners, before anything else."""

LISTENERS_MAX = 32
"""As many as one message carries (proxy.config.types.HTTP_LISTENERS_MAX)."""


async def pass_listeners(channel: socket.socket, listeners: Mapping[int, int]) -> None:
    """Send a worker that asks its listeners' descriptors, each with its number. Raises OSError."""
    await trio.lowlevel.checkpoint()
    socket.send_fds(channel, [bytes([len(listeners), *listeners])], list(listeners.values()))


async def wait_for_request(channel: socket.socket) -> bool:
    """Wait until a worker asks for its listeners; return False where it has closed the channel. Raises OSError."""
    await trio.lowlevel.wait_readable(channel)
    return bool(channel.recv(1))


async def request_listeners(channel: socket.socket) -> dict[int, socket.socket]:
    """Request and return this worker's listeners by number. Raises ConnectionError where the supervisor sends none."""
    channel.send(LISTENER_REQUEST)  # the socket's buffer is empty: this does not block
    await trio.lowlevel.wait_readable(channel)
    data, descriptors, _flags, _address = socket.recv_fds(channel, 1 + LISTENERS_MAX, LISTENERS_MAX)
    sockets = [adopt_socket(descriptor) for descriptor in descriptors]
    if not data or len(sockets) != data[0] or len(data) != 1 + data[0]:
        for sock in sockets:
            sock.close()
        raise ConnectionAbortedError("the supervisor gave no listener")
    return dict(zip(data[1:], sockets, strict=True))
