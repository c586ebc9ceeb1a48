"""A bound on the bytes of request bodies in memory, for all senders together and for each one."""

from collections import Counter

from proxy.common.networks import network_of


class BodyBudget:
    """Budget of body bytes in memory. One sender gets at most half of it, so that it cannot block the others."""

    def __init__(self, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bytes_max = bytes_max
        self._by_sender: Counter[str] = Counter()

    def reserve_bytes(self, address: str, size_bytes: int) -> bool:
        """Reserve `size_bytes` for a sender's address; return False, and reserve nothing, beyond the budget."""
        sender = network_of(address)
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
        sender = network_of(address)
        self.held_bytes -= size_bytes
        self._by_sender[sender] -= size_bytes
        if self._by_sender[sender] <= 0:
            del self._by_sender[sender]
