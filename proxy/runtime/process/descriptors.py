"""The file descriptors that a worker gets from the supervisor when it is forked.

The supervisor binds all sockets once and passes them on, so a worker that exits takes no listener with it: callers and
clients queue in the kernel until its successor runs.
"""

import socket
from dataclasses import dataclass

import trio


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Descriptor numbers in the worker's process.

    channel: the supervisor's RPC connection, a Unix stream socket
    liveness: the reading end of a pipe; only the supervisor holds the writing end
    files: the socket for requests to open files (proxy.runtime.process.file_requests)
    service: the worker's own RPC listener; -1 for forwarders
    connections: shared memory with one counter a forwarder (proxy.runtime.shared.connection_count); forwarders only
    store: the channel to the supervisor's fd store (proxy.runtime.shared.fd_store_channel), which also carries the
        clients' listeners; forwarders only
    questions: the channel by which an admin or HTTP worker gets its listeners (proxy.runtime.process.listener_channel);
        the admin worker's RPC channel to the supervisor afterwards
    relay_requests: the end of the channel by which HTTP workers pass connections to forwarders that is this role's
        (proxy.runtime.shared.relay_request_channel); forwarders and HTTP workers only
    audit: the writing end of the pipe for audit events (proxy.runtime.observability.audit); forwarders and HTTP workers
        only
    """

    channel: int
    liveness: int
    files: int = -1
    service: int = -1
    connections: int = -1
    store: int = -1
    questions: int = -1
    relay_requests: int = -1
    audit: int = -1


def adopt_stream(descriptor: int) -> trio.SocketStream:
    """Take over an inherited connected socket as a Trio stream."""
    return trio.SocketStream(trio.socket.from_stdlib_socket(adopt_socket(descriptor)))


def adopt_listener(descriptor: int) -> trio.SocketListener:
    """Take over an inherited listening socket as a Trio listener."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(adopt_socket(descriptor)))


def adopt_socket(descriptor: int) -> socket.socket:
    """Take over an inherited socket: non-blocking, and not inherited further."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock
