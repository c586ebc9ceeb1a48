"""How many bytes of requests that are not answered yet are held, of all senders and of each one."""

import ipaddress
from collections import Counter


class Bodies:
    """Bounds the bytes held at a time. One address gets half of them at most, so that the others go on."""

    def __init__(self, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bytes_max = bytes_max
        self._by_sender: Counter[str] = Counter()

    def hold(self, address: str, size_bytes: int) -> bool:
        """Count bytes that have come; False if there is no room for them, and then they are not counted."""
        sender = sender_of(address)
        if (
            self.held_bytes + size_bytes > self._bytes_max
            or self._by_sender[sender] + size_bytes > self._bytes_max // 2
        ):
            return False
        self.held_bytes += size_bytes
        self._by_sender[sender] += size_bytes
        return True

    def release(self, address: str, size_bytes: int) -> None:
        """Give room back, as much as was held."""
        sender = sender_of(address)
        self.held_bytes -= size_bytes
        self._by_sender[sender] -= size_bytes
        if self._by_sender[sender] <= 0:
            del self._by_sender[sender]


def sender_of(address: str) -> str:
    """Whom an address belongs to: an IPv4 address, or an IPv6 network of 64 bits, all of which one host may have."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
