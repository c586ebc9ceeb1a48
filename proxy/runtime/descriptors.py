"""The file descriptors that a worker inherits from the supervisor, told to it in one argument.

The supervisor binds everything once and passes it on, so a worker that dies takes no listener with it: callers and
clients queue in the kernel until its successor is there.
"""

import socket

import msgspec
import trio


class Descriptors(msgspec.Struct, frozen=True):
    """Descriptor numbers in the worker's process.

    channel: the supervisor's RPC connection, a Unix stream socket
    liveness: the reading end of a pipe whose writing end only the supervisor holds
    service: the worker's own RPC listener; -1 for forwarders
    listeners: the clients' listeners; forwarders only
    connections: shared memory with one counter a forwarder (proxy.runtime.connection_count); forwarders only
    """

    channel: int
    liveness: int
    service: int = -1
    listeners: tuple[int, ...] = ()
    connections: int = -1

    def encode(self) -> str:
        """The form in which a worker gets it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Descriptors":
        """The inverse of encode."""
        return msgspec.json.decode(text, type=cls)

    def all(self) -> tuple[int, ...]:
        """Every descriptor, for the process to be started with."""
        single = (self.channel, self.liveness, self.service, self.connections)
        return (*(fd for fd in single if fd >= 0), *self.listeners)


def adopt_stream(descriptor: int) -> trio.SocketStream:
    """Make an inherited connected socket ours."""
    return trio.SocketStream(trio.socket.from_stdlib_socket(_adopt(descriptor)))


def adopt_listener(descriptor: int) -> trio.SocketListener:
    """Make an inherited listening socket ours."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(_adopt(descriptor)))


def _adopt(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock
