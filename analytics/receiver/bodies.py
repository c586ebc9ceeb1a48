"""How many bytes of requests that are not answered yet are held, of all senders and of each one."""

from collections import Counter

from proxy.common.networks import network_of


class Bodies:
    """Bounds the bytes held at a time. One address gets half of them at most, so that the others go on."""

    def __init__(self, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bytes_max = bytes_max
        self._by_sender: Counter[str] = Counter()

    def hold(self, address: str, size_bytes: int) -> bool:
        """Count bytes that have come; False if there is no room for them, and then they are not counted."""
        sender = network_of(address)
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
        sender = network_of(address)
        self.held_bytes -= size_bytes
        self._by_sender[sender] -= size_bytes
        if self._by_sender[sender] <= 0:
            del self._by_sender[sender]
