"""Quotas of connections (`[[quota]]`) as one forwarder enforces them: its part of each.

Of each quota only those owners are counted that have connections, so memory is bounded by ``limits.max_connections``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import trio

from proxy.config.types import Quota
from proxy.runtime.fairness.quotas import AppliedQuota, OnExceeded, QuotaRules, RateQuotas

_MAX_CONNECTIONS: Final = "max_connections"
_RATE: Final = "new_connections_per_second"


class ConnectionQuotas:
    """Which owners may have one more connection, and which addresses may come again.

    ``forwarders``: how many there are; ``part_of``: this one's part of a number.
    """

    def __init__(self, forwarders: int, part_of: Callable[[int], int], on_exceeded: OnExceeded) -> None:
        self._forwarders = forwarders
        self._part_of = part_of
        self._on_exceeded = on_exceeded
        self._held: Counter[tuple[int, str]] = Counter()
        self._counts = QuotaRules((), _MAX_CONNECTIONS)
        self._rates = RateQuotas((), _RATE, 1, on_exceeded)

    def configure(self, quotas: Iterable[Quota], held: Mapping[str, int]) -> None:
        """Enforce these from now on. ``held``: connections by owner.

        Rates that have not changed go on: a reload fills no bucket.
        """
        quotas = tuple(quotas)
        if quotas == self._counts.quotas:
            return
        self._counts = QuotaRules(quotas, _MAX_CONNECTIONS)
        self._rates = RateQuotas(quotas, _RATE, self._forwarders, self._on_exceeded)
        self._held.clear()
        for owner, count in held.items():
            self.count(owner, count)

    def count(self, owner: str, change: int) -> None:
        """Count connections of an owner that have come, or have gone."""
        for applied in self._counts.for_owner(owner):
            key = applied.index, applied.subject
            self._held[key] += change
            if not self._held[key]:
                del self._held[key]

    def check_owner(self, owner: str) -> str | None:
        """Count a new connection of an owner for its rates; return the key of the limit that refuses it, or None."""
        for applied in self._counts.for_owner(owner):
            if self._held[applied.index, applied.subject] >= max(1, self._part_of(applied.quota.max_connections)):
                self._on_exceeded(applied, _MAX_CONNECTIONS, owner)
                if not applied.quota.dry_run:
                    return applied.key(_MAX_CONNECTIONS)
        return self._take(self._rates.rules.for_owner(owner), owner)

    def check_address(self, network: str) -> str | None:
        """Count a new connection from an address; return the key of the limit that refuses it, or None."""
        return self._take(self._rates.rules.for_address(network), f"address {network}")

    def _take(self, applied: tuple[AppliedQuota, ...], owner: str) -> str | None:
        return self._rates.take(applied, trio.current_time(), owner) if applied else None
