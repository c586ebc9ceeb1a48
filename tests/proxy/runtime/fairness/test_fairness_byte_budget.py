"""proxy.runtime.fairness.byte_budget: bounded in all, shared fairly, and counted back to nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.fairness.byte_budget import ByteBudget, ByteReservation


def test_the_first_half_is_whoever_comes() -> None:
    budget = ByteBudget(1000)
    assert budget.reserve_bytes("a", 500)
    assert not budget.shares_enforced
    assert not budget.reserve_bytes("a", 1), "alone it has its half already, and a newcomer's is kept"
    assert budget.reserve_bytes("b", 100)
    assert budget.shares_enforced


def test_of_the_rest_each_owner_gets_at_most_an_equal_share() -> None:
    budget = ByteBudget(1200)
    assert budget.reserve_bytes("a", 400)
    assert budget.reserve_bytes("b", 200)
    assert budget.reserve_bytes("b", 200), "400 is a third: of a, b and a newcomer"
    assert not budget.reserve_bytes("b", 1)
    assert not budget.reserve_bytes("a", 1)
    assert budget.reserve_bytes("newcomer", 300)


def test_the_whole_is_never_exceeded() -> None:
    budget = ByteBudget(100)
    owners = [f"o{number}" for number in range(200)]
    taken = sum(budget.reserve_bytes(owner, 1) for owner in owners)
    assert 50 < taken == budget.used_bytes <= 100


def test_released_bytes_can_be_reserved_again() -> None:
    budget = ByteBudget(100)
    assert budget.reserve_bytes("a", 50)
    assert not budget.reserve_bytes("a", 20)
    budget.release_bytes("a", 50)
    budget.release_bytes("a", 0)
    assert (budget.used_bytes, budget._by_owner) == (0, {})
    assert budget.reserve_bytes("a", 50)


def test_a_smaller_budget_is_in_force_at_once() -> None:
    budget = ByteBudget(1000)
    assert budget.reserve_bytes("a", 400)
    budget.resize(500)
    assert budget.shares_enforced
    assert not budget.reserve_bytes("b", 200)
    assert budget.reserve_bytes("b", 100)


def test_a_holding_goes_up_and_down_and_changes_its_owner() -> None:
    budget = ByteBudget(100)
    one, other = ByteReservation(budget, "a"), ByteReservation(budget, "a")
    assert one.resize(30)
    assert other.resize(20)
    assert not other.resize(40)
    assert other.size_bytes == 20, "refused, all stays as it is"
    assert one.resize(10)
    assert budget._by_owner == {"a": 30}
    one.transfer_to("b")
    assert budget._by_owner == {"a": 20, "b": 10}
    assert one.resize(0)
    assert other.resize(0)
    other.transfer_to("b")
    assert (budget.used_bytes, budget._by_owner) == (0, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), max_size=60))
def test_levels_in_any_order(steps: list[tuple[str, int]]) -> None:
    budget = ByteBudget(1000)
    holdings = {owner: ByteReservation(budget, owner) for owner in "abc"}
    for owner, size in steps:
        before = holdings[owner].size_bytes
        if not holdings[owner].resize(size):
            assert holdings[owner].size_bytes == before < size
        assert budget.used_bytes == sum(one.size_bytes for one in holdings.values()) <= 1000
    for one in holdings.values():
        assert one.resize(0)
    assert (budget.used_bytes, budget._by_owner) == (0, {})
