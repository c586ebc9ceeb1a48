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
    connections: shared memory with one counter a forwarder (proxy.runtime.shared.connection_count); forwarders only
    store: the line to the supervisor's fd store (proxy.runtime.shared.fd_store_channel), over which the clients'
        listeners come, too; forwarders only
    questions: the line over which the admin worker asks the supervisor, and over which the operators' listener comes
    """

    channel: int
    liveness: int
    service: int = -1
    connections: int = -1
    store: int = -1
    questions: int = -1

    def encode(self) -> str:
        """The form in which a worker gets it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Descriptors":
        """The inverse of encode."""
        return msgspec.json.decode(text, type=cls)

    def inheritable(self) -> tuple[int, ...]:
        """Every descriptor, for the process to be started with."""
        single = (self.channel, self.liveness, self.service, self.connections, self.store, self.questions)
        return tuple(fd for fd in single if fd >= 0)


def adopt_stream(descriptor: int) -> trio.SocketStream:
    """Make an inherited connected socket ours."""
    return trio.SocketStream(trio.socket.from_stdlib_socket(adopt_socket(descriptor)))


def adopt_listener(descriptor: int) -> trio.SocketListener:
    """Make an inherited listening socket ours."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(adopt_socket(descriptor)))


def adopt_socket(descriptor: int) -> socket.socket:
    """Make an inherited socket ours, without Trio's wrapping."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock
