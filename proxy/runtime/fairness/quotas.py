"""Quotas (`[[quota]]`): which of them apply to whom, and the rates among them.

A process enforces its part of each limit. For each owner (proxy.runtime.fairness.owners) or tenant the first quota that
matches applies; those with ``dry_run`` before it are only counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from proxy.config.issuer_roles import fits_entry
from proxy.config.types import Quota
from proxy.runtime.fairness.owners import name_of_principal
from proxy.runtime.fairness.token_buckets import NAME_CHARACTERS_MAX, TokenBucket, TokenBuckets

OWNERS_MAX = 4096
"""Owners, and tenants, of which it is remembered which quotas apply to them."""

EACH_TENANT = "*"

Limit = Literal["max_connections", "new_connections_per_second", "lookups_per_second"]


@dataclass(frozen=True, slots=True)
class AppliedQuota:
    """A quota that applies to ``subject``: an owner, a tenant or an address, by a name that no other kind has."""

    index: int
    quota: Quota
    subject: str

    def key(self, limit: Limit) -> str:
        """Return the name of one of its limits in the configuration."""
        return f"quota[{self.index}].{limit}"


OnExceeded = Callable[[AppliedQuota, Limit, str], None]
"""Called with a quota that refuses something, or would (``dry_run``), with its limit and who is refused."""


class QuotaRules:
    """Which quotas apply to an owner, of those that set one limit."""

    def __init__(self, quotas: Iterable[Quota], limit: Limit) -> None:
        self.quotas = tuple(quotas)
        self._has_members = limit != "lookups_per_second"  # these are a tenant's by their topic, of all clients
        numbered = [(index, one) for index, one in enumerate(self.quotas) if getattr(one, limit)]
        self._by_kind = {
            kind: [one for one in numbered if one[1].by == kind] for kind in ("principal", "tenant", "address")
        }
        self.are_empty = not numbered
        self.know_tenants = bool(self._by_kind["tenant"])
        self._cached_for_owner = lru_cache(OWNERS_MAX)(self._for_owner)
        self._cached_for_tenant = lru_cache(OWNERS_MAX)(self._for_tenant)

    def for_owner(self, owner: str) -> tuple[AppliedQuota, ...]:
        """Return the quotas by principal that apply to an owner, and for connections those by tenant that it is of."""
        if self.are_empty:
            return ()
        return self._cached_for_owner(owner) if len(owner) <= NAME_CHARACTERS_MAX else self._for_owner(owner)

    def _for_owner(self, owner: str) -> tuple[AppliedQuota, ...]:
        name = name_of_principal(owner)
        own = (one for one in self._by_kind["principal"] if _matches(one[1].principals, name))
        tenants = self._by_kind["tenant"] if self._has_members else ()
        shared = (one for one in tenants if one[1].principals and _matches(one[1].principals, name))
        return (
            *_up_to_enforced(own, lambda _: owner),
            *_up_to_enforced(shared, lambda quota: f"tenant {quota.tenant}"),
        )

    def for_tenant(self, tenant: str) -> tuple[AppliedQuota, ...]:
        """Return the quotas by tenant that apply to a topic's tenant, a name that its client chooses."""
        return self._cached_for_tenant(tenant) if len(tenant) <= NAME_CHARACTERS_MAX else self._for_tenant(tenant)

    def _for_tenant(self, tenant: str) -> tuple[AppliedQuota, ...]:
        found = ((index, one) for index, one in self._by_kind["tenant"] if one.tenant in {tenant, EACH_TENANT})
        return tuple(_up_to_enforced(found, lambda _: f"tenant {tenant}"))

    def for_address(self, network: str) -> tuple[AppliedQuota, ...]:
        """Return the quotas by address that apply to a client's network."""
        return tuple(_up_to_enforced(self._by_kind["address"], lambda _: f"address {network}"))


def _matches(patterns: Sequence[str], name: str | None) -> bool:
    """Return whether a role matches; None: there is none, so that only quotas for all apply."""
    return not patterns or (name is not None and fits_entry(name, patterns))


def _up_to_enforced(found: Iterable[tuple[int, Quota]], subject_of: Callable[[Quota], str]) -> Iterator[AppliedQuota]:
    for index, quota in found:
        yield AppliedQuota(index, quota, subject_of(quota))
        if not quota.dry_run:
            return


class RateQuotas:
    """The rates of one kind, ``limit``, of which this process enforces one of ``parts`` equal parts."""

    def __init__(self, quotas: Iterable[Quota], limit: Limit, parts: int, on_exceeded: OnExceeded) -> None:
        self.rules = QuotaRules(quotas, limit)
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._buckets: dict[int, TokenBuckets] = {}
        for index, quota in enumerate(self.rules.quotas):
            if rate := getattr(quota, limit):
                self._buckets[index] = TokenBuckets(rate / parts, rate * quota.burst_ms / 1000 / parts)

    def take(self, applied: Iterable[AppliedQuota], now: float, client: str) -> str | None:
        """Count one event for all quotas that apply; return the key of the limit that refuses it, or None.

        What is refused counts for none of those that are enforced.
        """
        taken: list[TokenBucket] = []
        refused: AppliedQuota | None = None
        for one in applied:
            bucket = self._buckets[one.index].bucket_of(one.subject, now)
            if bucket.tokens >= 1:
                taken.append(bucket)
                continue
            self._on_exceeded(one, self._limit, client)
            if not one.quota.dry_run:
                refused = one
                break
        if refused is not None:
            return refused.key(self._limit)
        for bucket in taken:
            bucket.tokens -= 1
        return None
