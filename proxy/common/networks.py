"""IP addresses of peers, and the network that one is counted under, where clients or senders have equal shares."""

import socket

import trio


def network_of(address: str) -> str:
    """Return what an address counts as: itself for IPv4, its /64 network for IPv6, all of which one host may use (RFC
    6177). An IPv4-mapped address counts as its IPv4 address; what is no IPv6 address is returned as it is.

    ``address``: without a port; a scope ("%eth0") is dropped.
    """
    if ":" not in address:
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:  # it is a network already
        return address
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + b"\0" * 8) + "/64"


def peer_address(stream: trio.SocketStream) -> str:
    """Return the peer's IP address; empty if it has disconnected."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""
