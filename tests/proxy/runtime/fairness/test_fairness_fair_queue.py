"""Turns among owners: one owner's many delay no other's few, none is passed over for ever, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.runtime.fairness.fair_queue import PASSED_OVER_MAX, FairQueue

Queue = FairQueue[str, int]


def filled(queue: Queue, owners: str) -> Queue:
    """Items 0, 1, … of these owners, in this order."""
    for number, owner in enumerate(owners):
        assert queue.enqueue(owner, number) is None
    return queue


def served(queue: Queue, count: int) -> str:
    """The owners of the next items, each of which ends at once."""
    found = ""
    for _ in range(count):
        taken = queue.start_next()
        if taken is None:
            break
        found += taken[0]
        queue.release_slot(taken[0])
    return found


def test_owners_in_turn_and_each_owners_items_in_order() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=10), "aaabcb")
    taken = []
    while (one := queue.start_next()) is not None:
        taken.append(one)
        queue.release_slot(one[0])
    assert taken == [("a", 0), ("b", 3), ("c", 4), ("a", 1), ("b", 5), ("a", 2)]
    assert queue.waiting_count == 0


def test_no_more_than_the_slots_are_taken() -> None:
    queue = filled(FairQueue(slots=2, waiting_max=10), "abc")
    assert queue.start_next() == ("a", 0)
    assert queue.start_next() == ("b", 1)
    assert queue.start_next() is None
    queue.release_slot("a")
    assert queue.start_next() == ("c", 2)


def test_an_owner_that_may_hold_no_more_is_passed_by() -> None:
    queue: Queue = FairQueue(slots=4, waiting_max=10, may_hold=lambda _owner, held, free: held < free)
    filled(queue, "aaaaab")
    assert [queue.start_next() for _ in range(4)] == [
        ("a", 0),
        ("b", 5),
        ("a", 1),
        None,
    ]
    queue.enqueue("c", 9)
    assert queue.start_next() == ("c", 9), "the last slot is another's"


# ---- where there is no room


def test_the_newest_of_the_owner_with_most_waiting_is_dropped() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=5), "aaabb")
    assert queue.enqueue("c", 9) == ("a", 2)
    assert queue.enqueue("b", 10) == ("b", 10), "it would have the most"
    assert served(queue, 9) == "abcab"


def test_a_newcomer_from_a_quiet_owner_is_let_in_however_full_it_is() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=100), "a" * 100)
    for number in range(49):
        assert queue.enqueue("b", 100 + number) == ("a", 99 - number)
    assert queue.enqueue("a", 999) == ("a", 999)
    assert queue.enqueue("c", 1000) == ("a", 50)


def test_a_queued_item_is_not_dropped_for_an_equal() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=3), "abc")
    assert queue.enqueue("d", 9) == ("d", 9)
    assert queue.enqueue("a", 9) == ("a", 9)
    assert served(queue, 9) == "abc"


def test_among_equals_the_one_of_higher_rank_is_dropped() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=3, rank=str.isupper, rank_max=1), "aBc")
    assert queue.enqueue("d", 9) == ("B", 1)
    assert queue.enqueue("E", 10) == ("E", 10)


def test_an_item_of_a_higher_rank_counts_as_four() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=8, rank=str.isupper, rank_max=1), "ABCDEFGH")
    assert [queue.enqueue("a", number) for number in range(4)] == [("A", 0), ("B", 1), ("C", 2), ("D", 3)]
    assert queue.enqueue("a", 4) == ("a", 4)
    assert queue.enqueue("E", 9) == ("E", 9)
    assert queue.enqueue("b", 10) == ("E", 4)


def test_the_limit_per_owner_rejects_that_owner_only() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=10, waiting_per_owner_max=2), "aa")
    assert queue.enqueue("a", 9) == ("a", 9)
    assert queue.enqueue("b", 10) is None


def test_removing_a_waiting_entry_frees_its_place() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=2), "ab")
    queue.remove_waiting("a", 0)
    queue.remove_waiting("a", 0)
    queue.remove_waiting("nobody", 0)
    assert queue.waiting_count == 1
    assert queue.enqueue("c", 2) is None
    assert served(queue, 9) == "bc"


# ---- ranks


def test_a_lower_rank_goes_first_and_a_higher_one_is_not_passed_over_for_ever() -> None:
    queue = filled(
        FairQueue(slots=1, waiting_max=100, rank=lambda owner: owner.isupper(), rank_max=1), "A" * 3 + "b" * 20
    )
    assert PASSED_OVER_MAX == 3
    assert served(queue, 13) == "bbbA" * 3 + "b"


def test_each_of_three_ranks_gets_its_turns() -> None:
    queue = filled(FairQueue(slots=1, waiting_max=100, rank=int, rank_max=2), "0" * 30 + "1" * 30 + "2" * 30)
    counted = Counter(served(queue, 40))
    assert counted["0"] >= 15
    assert min(counted["1"], counted["2"]) >= 8


def test_a_rank_is_what_it_is_when_the_turn_comes() -> None:
    failed: set[str] = set()
    queue = filled(FairQueue(slots=1, waiting_max=10, rank=failed.__contains__, rank_max=1), "aab")
    assert served(queue, 1) == "a"
    failed.add("b")
    assert served(queue, 2) == "ab"


def test_the_next_of_many_owners_is_found_at_once() -> None:
    """Security: with a look at each of 10,000 addresses, their turns would take longer than what is done in them."""
    asked: list[int] = []

    def rank(owner: int) -> int:
        asked.append(owner)
        return owner % 2

    queue: FairQueue[int, int] = FairQueue(slots=1, waiting_max=10**6, rank=rank, rank_max=1)
    for owner in range(1_000):
        queue.enqueue(owner, owner)
    asked.clear()
    assert queue.start_next() == (0, 0)
    assert len(asked) == 2


# ---- nothing is lost


WAITING_MAX = 6
SLOTS = 3
OWNERS = st.sampled_from("abcD")


class Model(RuleBasedStateMachine):
    """A queue and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue = FairQueue(
            slots=SLOTS, waiting_max=WAITING_MAX, may_hold=self._may_hold, rank=str.isupper, rank_max=1
        )
        self.waiting: dict[str, list[int]] = {owner: [] for owner in "abcD"}
        self.held: Counter[str] = Counter()
        self.since_turn: Counter[str] = Counter()
        self.number = 0

    @staticmethod
    def _may_hold(owner: str, held: int, _free: int) -> bool:
        return held < 2 or owner == "a"

    @rule(owner=OWNERS)
    def put(self, owner: str) -> None:
        self.number += 1
        weights = {one: len(items) * (4 if one == "D" else 1) for one, items in self.waiting.items()}
        weights[owner] += 4 if owner == "D" else 1
        dropped = self.queue.enqueue(owner, self.number)
        self.waiting[owner].append(self.number)
        if dropped is not None:
            assert sum(map(len, self.waiting.values())) == WAITING_MAX + 1
            loser, item = dropped
            assert self.waiting[loser].pop() == item, "the newest of its owner"
            assert weights[loser] == max(weights.values()), "of the owner with most, by weight"
            assert loser == owner or weights[loser] > weights[owner] or loser == "D", "not for an equal"

    @rule()
    def take(self) -> None:
        may = [one for one, items in self.waiting.items() if items and self._may_hold(one, self.held[one], 1)]
        taken = self.queue.start_next()
        if taken is None:
            assert not may or self.held.total() == SLOTS
            return
        owner, item = taken
        assert self.waiting[owner].pop(0) == item, "the oldest of its owner"
        assert owner in may
        self.held[owner] += 1
        for one in self.waiting:
            self.since_turn[one] = self.since_turn[one] + 1 if one in may and one != owner else 0
            assert self.since_turn[one] <= (PASSED_OVER_MAX + 1) * len(self.waiting), "each owner has a turn"

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        if self.held[owner]:
            self.held[owner] -= 1
            self.queue.release_slot(owner)

    @rule(owner=OWNERS, pick=st.randoms(use_true_random=False))
    def leave(self, owner: str, pick: object) -> None:
        if self.waiting[owner]:
            choose: Callable[[list[int]], int] = pick.choice  # type: ignore[attr-defined]
            item = choose(self.waiting[owner])
            self.waiting[owner].remove(item)
            self.queue.remove_waiting(owner, item)

    @invariant()
    def counts(self) -> None:
        assert self.queue.waiting_count == sum(map(len, self.waiting.values())) <= WAITING_MAX
        assert self.held.total() <= SLOTS
        for owner, items in self.waiting.items():
            assert self.queue.count_waiting(owner) == len(items)
        sizes = Counter(len(items) for items in self.waiting.values() if items)
        assert self.queue._owners_by_size == sizes


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_model = Model.TestCase
