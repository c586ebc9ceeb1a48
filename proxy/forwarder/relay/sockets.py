"""The two sockets of a relay: their options, and whether the kernel can splice them."""

import os
import socket

from proto.rpc_pb2 import StoredRelay
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.relay.splice_pump import SPLICE_FLAGS
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import set_timeouts, tune_socket

_TCP_NOTSENT_LOWAT = 25  # tcp(7); the socket module has no name for it
NOT_SENT_BYTES_MAX = 256 * 1024
"""What the kernel keeps for a peer beside what the peer's window takes. Its own bound grows with the connection, to 4
MiB: relays that are not read would fill the memory for TCP of the whole machine (net.ipv4.tcp_mem).
"""

NOT_SENT_BYTES_IN_LOOKUP_MODE_MAX = 16 * 1024
"""The same for a client that is no relay's yet: less, since answers to lookups are no bulk."""


def ip_of(about: StoredRelay) -> str:
    """Return the IP address of a relay's client, without the port."""
    return about.client_address.rpartition(":")[0].strip("[]")


def tune_listener(sock: socket.socket, config: RelayConfig) -> None:
    """Set the options of a listener that the connections which it accepts inherit. Raises OSError."""
    tune_socket(sock)
    set_timeouts(sock, config)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOT_SENT_BYTES_IN_LOOKUP_MODE_MAX)


def tune_for_relay(client: TcpStream, broker: TcpStream, config: RelayConfig) -> None:
    """Set the options of a relay's two sockets that they did not have before. Raises OSError.

    A Unix socket has none of them: behind it, an HTTP worker has the connection, as it needs TLS.
    """
    if broker.socket.family != socket.AF_UNIX:
        set_timeouts(broker.socket, config)
    for stream in (client, broker):
        if stream.socket.family != socket.AF_UNIX:
            stream.socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOT_SENT_BYTES_MAX)


def splice_works() -> bool:
    """Return whether this kernel splices between a socket and a pipe (some sandboxes refuse)."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        theirs.send(b"x")
        return os.splice(ours.fileno(), writing, 1, flags=SPLICE_FLAGS) == 1
    except OSError:
        return False
    finally:
        ours.close()
        theirs.close()
        os.close(reading)
        os.close(writing)
