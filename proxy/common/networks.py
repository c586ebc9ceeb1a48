"""IP addresses of peers, and the network that one is counted under, where clients or senders have equal shares."""

import ipaddress
import socket
from collections.abc import Iterable

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


class NetworkRules:
    """The networks from which a listener takes clients: all if none is allowed by name; what is denied stays denied.

    IPv4-mapped IPv6 addresses and networks count as IPv4. Raises ValueError for what is no network.
    """

    def __init__(self, allowed: Iterable[str], denied: Iterable[str]) -> None:
        self._allowed = tuple(map(parse_network, allowed))
        self._denied = tuple(map(parse_network, denied))
        self._allows_all = not (self._allowed or self._denied)

    def allows(self, address: str) -> bool:
        """Return whether a client may come from an IP address; what is no address may not, where there are rules."""
        if self._allows_all:
            return True
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        if any(parsed in network for network in self._denied):
            return False
        return not self._allowed or any(parsed in network for network in self._allowed)


def parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return a network from its CIDR notation; an IPv4-mapped one as IPv4. Raises ValueError."""
    network = ipaddress.ip_network(text)
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is None or network.prefixlen < 96:  # noqa: PLR2004 -- the prefix of IPv4-mapped addresses
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - 96))


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a host, an IP address or ``localhost``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def peer_address(stream: trio.SocketStream) -> str:
    """Return the peer's IP address; empty if it has disconnected."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""
