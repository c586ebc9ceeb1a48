"""proxy.runtime.fairness.quotas: which quotas apply to whom, and rates."""

from __future__ import annotations

import pytest

from proxy.config.types import Quota
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.fairness.quotas import OWNERS_MAX, AppliedQuota, Limit, QuotaRules, RateQuotas

LIMIT: Limit = "new_connections_per_second"
ALICE, ADDRESS = owner_of("alice", "192.0.2.1:5"), owner_of("", "192.0.2.1:5")


def rate(number: int = 1, **keys: object) -> Quota:
    return Quota(new_connections_per_second=number, burst_ms=1000, **keys)  # type: ignore[arg-type]


def found(quotas: list[Quota], owner: str, limit: Limit = LIMIT) -> list[tuple[int, str]]:
    return [(one.index, one.subject) for one in QuotaRules(quotas, limit).for_owner(owner)]


@pytest.mark.parametrize(
    ("role", "index"),
    [("alice", 0), ("team-", 1), ("team-a", 1), ("team", 2), ("alice2", 2), ("Alice", 2), ("", 2), ("address 1", 2)],
)
def test_the_first_that_matches(role: str, index: int) -> None:
    quotas = [rate(principals=("alice",)), rate(principals=("bob", "team-*")), rate()]
    owner = owner_of(role, "192.0.2.1:5")
    assert found(quotas, owner) == [(index, owner)]


def test_an_address_is_no_principal_of_that_name() -> None:
    """Security: neither is a role that is named like an address, nor the reverse."""
    assert not found([rate(principals=("address 192.0.2.1", "192.0.2.1", "a*"))], ADDRESS)
    named = owner_of("address 192.0.2.1", "192.0.2.9:5")
    assert found([rate()], named) != found([rate()], ADDRESS)


def test_a_star_alone_is_all_principals_and_no_address() -> None:
    assert found([rate(principals=("*",))], ALICE)
    assert not found([rate(principals=("*",))], ADDRESS)


def test_one_that_only_counts_hides_none_behind_it() -> None:
    """Security: a dry run takes no limit away."""
    quotas = [rate(dry_run=True), rate(principals=("alice",)), rate(dry_run=True), rate()]
    assert found(quotas, ALICE) == [(0, ALICE), (1, ALICE)]
    assert found(quotas, ADDRESS) == [(0, ADDRESS), (2, ADDRESS), (3, ADDRESS)]


def test_one_without_this_limit_hides_none() -> None:
    assert found([Quota(max_connections=1), rate()], ALICE) == [(1, ALICE)]


def test_roles_count_together_as_their_tenant_and_by_themselves() -> None:
    quotas = [rate(), rate(by="tenant", tenant="acme", principals=("acme-*",)), rate(by="tenant", tenant="x")]
    member = owner_of("acme-1", "192.0.2.1:5")
    assert found(quotas, member) == [(0, member), (1, "tenant acme")]
    assert found(quotas, ALICE) == [(0, ALICE)]


def test_a_tenants_lookups_count_by_topic_alone() -> None:
    quota = Quota(
        by="tenant", tenant="acme", principals=("acme-*",), lookups_per_second=1, new_connections_per_second=1
    )
    rules = QuotaRules([quota], "lookups_per_second")
    assert not rules.for_owner(owner_of("acme-1", ""))
    assert [one.subject for one in rules.for_tenant("acme")] == ["tenant acme"]
    assert not rules.for_tenant("acme2")


def test_each_tenant_by_itself() -> None:
    quotas = [Quota(by="tenant", tenant=name, lookups_per_second=1) for name in ("acme", "*")]
    rules = QuotaRules(quotas, "lookups_per_second")
    assert [(one.index, one.subject) for one in rules.for_tenant("acme")] == [(0, "tenant acme")]
    assert [(one.index, one.subject) for one in rules.for_tenant("b")] == [(1, "tenant b")]


def test_what_is_remembered_is_bounded() -> None:
    """Security: of owners with short names so many, of others none."""
    rules = QuotaRules([rate(), rate(by="tenant", tenant="*")], LIMIT)
    for number in range(OWNERS_MAX + 100):
        rules.for_owner(f"principal {number}")
        rules.for_tenant(f"{number}")
    assert len(rules.for_owner("principal " + "x" * 10**6)) == len(rules.for_tenant("x" * 10**6)) == 1
    for cached in (rules._cached_for_owner, rules._cached_for_tenant):
        assert cached.cache_info().currsize == OWNERS_MAX
        assert cached.cache_info().misses == OWNERS_MAX + 100


class Refused(list[tuple[int, str, str]]):
    def __call__(self, applied: AppliedQuota, limit: Limit, owner: str) -> None:
        self.append((applied.index, applied.key(limit), owner))


def test_a_process_has_its_part_of_a_rate() -> None:
    refused = Refused()
    rates = RateQuotas([rate(20)], LIMIT, 2, refused)
    results = [rates.take(rates.rules.for_owner(ALICE), 0.0, ALICE) for _ in range(11)]
    assert results == [None] * 10 + ["quota[0].new_connections_per_second"]
    assert refused == [(0, "quota[0].new_connections_per_second", ALICE)]


def test_a_dry_run_counts_and_refuses_nothing() -> None:
    refused = Refused()
    rates = RateQuotas([rate(dry_run=True)], LIMIT, 1, refused)
    assert [rates.take(rates.rules.for_owner(ALICE), 0.0, ALICE) for _ in range(3)] == [None] * 3
    assert len(refused) == 2


def test_what_one_quota_refuses_counts_for_no_other() -> None:
    """Security: a principal cannot use up its tenant's rate by what its own refuses, nor the reverse."""
    quotas = [rate(), rate(3, by="tenant", tenant="acme", principals=("a*",))]
    rates = RateQuotas(quotas, LIMIT, 1, Refused())
    for _ in range(9):
        rates.take(rates.rules.for_owner(ALICE), 0.0, ALICE)
    others = [owner_of(f"a{number}", "") for number in range(3)]
    assert [rates.take(rates.rules.for_owner(one), 0.0, one) for one in others] == [
        None,
        None,
        "quota[1].new_connections_per_second",
    ]
    assert rates.take(rates.rules.for_owner(others[2]), 0.34, others[2]) is None, "its own is not used up"
