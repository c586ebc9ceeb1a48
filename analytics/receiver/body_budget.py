"""A bound on the bytes of request bodies in memory, for all senders together and for each one."""

import ipaddress
from collections import Counter


class BodyBudget:
    """Budget of body bytes in memory. One sender gets at most half of it, so that it cannot block the others."""

    def __init__(self, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bytes_max = bytes_max
        self._by_sender: Counter[str] = Counter()

    def reserve_bytes(self, address: str, size_bytes: int) -> bool:
        """Reserve `size_bytes` for a sender's address; return False, and reserve nothing, beyond the budget."""
        sender = sender_key(address)
        if (
            self.held_bytes + size_bytes > self._bytes_max
            or self._by_sender[sender] + size_bytes > self._bytes_max // 2
        ):
            return False
        self.held_bytes += size_bytes
        self._by_sender[sender] += size_bytes
        return True

    def release_bytes(self, address: str, size_bytes: int) -> None:
        """Release `size_bytes` that were reserved for the address."""
        sender = sender_key(address)
        self.held_bytes -= size_bytes
        self._by_sender[sender] -= size_bytes
        if self._by_sender[sender] <= 0:
            del self._by_sender[sender]


def sender_key(address: str) -> str:
    """Return the key that limits are counted by: an IPv4 address, or an IPv6 /64 network, all of which one host may
    have.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
