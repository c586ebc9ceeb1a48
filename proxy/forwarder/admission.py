"""Whether one more client may come in: limits on connections, checked before anything is read."""

from collections import Counter

from proxy.config.types import Limits
from proxy.runtime.connection_count import ConnectionCounters


class Admission:
    """Counts this forwarder's clients, in total and by address."""

    def __init__(self, limits: Limits, counters: ConnectionCounters, forwarder: int) -> None:
        self.limits = limits
        self.connections = 0
        self._by_address: Counter[str] = Counter()
        self._counters = counters
        self._forwarder = forwarder
        self._retired = False
        counters.set(forwarder, 0)

    def retire(self) -> None:
        """Leave this forwarder's place among the counters to its successor."""
        self._retired = True

    def has_more_than_its_share(self) -> bool:
        """Whether another forwarder should take the next client."""
        return self._counters.is_above_mean(self._forwarder)

    def _tell_others(self) -> None:
        if not self._retired:
            self._counters.set(self._forwarder, self.connections)

    def refusal(self, address: str) -> str | None:
        """Why a client at an IP address may not come in (a short stable name), or None."""
        if self._counters.total() >= self.limits.max_connections:
            return "max_connections"
        per_address = self.limits.max_connections_per_address
        if per_address and self._by_address[address] >= per_address:
            return "max_connections_per_address"
        return None

    def enter(self, address: str) -> None:
        """Count a client in."""
        self.connections += 1
        self._by_address[address] += 1
        self._tell_others()

    def leave(self, address: str) -> None:
        """Count a client out."""
        self.connections -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self._tell_others()
