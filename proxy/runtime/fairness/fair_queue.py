"""A fair queue for a limited number of slots: round robin between owners, so that many items of one owner do not delay
the few of another.

An *owner* has a share of its own: a principal, a client's address. The queue is state alone: no IO, clock or task.

* Owners of a lower rank go first; those of a higher rank are passed over PASSED_OVER_MAX times at most.
* When the queue is full, the newest item of the owner with the most items is dropped. So an owner with few items gets
  in however many another has, and a queued item stays unless its owner has the most. There, an item counts 4 times as
  much as one of the rank below: many owners of a high rank do not keep out several items of one of a low rank.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

PASSED_OVER_MAX = 3
"""How often in a row owners of a higher rank are passed over."""

RANK_BITS = 2
"""Logarithm of how much more an item of the next higher rank counts in a full queue."""

OwnerT = TypeVar("OwnerT", bound=Hashable)
ItemT = TypeVar("ItemT")


class FairQueue(Generic[OwnerT, ItemT]):
    """A fair queue of items for ``slots`` slots: ``waiting_max`` may wait, ``waiting_per_owner_max`` of one owner.

    ``may_hold(owner, held, free)``: returns True if an owner that holds ``held`` slots may get one more of ``free``.
    ``rank(owner)``: the owner's present rank, from 0 to ``rank_max``; the lowest goes first.
    """

    def __init__(
        self,
        *,
        slots: int,
        waiting_max: int,
        waiting_per_owner_max: int | None = None,
        may_hold: Callable[[OwnerT, int, int], bool] = lambda _owner, _held, _free: True,
        rank: Callable[[OwnerT], int] = lambda _owner: 0,
        rank_max: int = 0,
    ) -> None:
        self._free = slots
        self._waiting_max = waiting_max
        self._waiting_per_owner_max = waiting_per_owner_max or waiting_max
        self._may_hold = may_hold
        self._rank = rank
        self._rank_max = rank_max
        self._held: Counter[OwnerT] = Counter()
        self._waiting: OrderedDict[OwnerT, deque[ItemT]] = OrderedDict()
        self._passed_over: dict[int, int] = {}
        self._owners_by_size: Counter[int] = Counter()
        """Number of waiting items → number of owners with it. In a flood this alone refuses most newcomers."""
        self.waiting_count = 0
        """Number of items that wait, of all owners."""

    def count_waiting(self, owner: OwnerT) -> int:
        """Return how many items of an owner wait."""
        return len(self._waiting.get(owner, ()))

    def enqueue(self, owner: OwnerT, item: ItemT) -> tuple[OwnerT, ItemT] | None:
        """Queue an item. Return the item that was dropped for it (possibly itself) with its owner, or None."""
        dropped = None
        if self.count_waiting(owner) >= self._waiting_per_owner_max:
            return owner, item
        if self.waiting_count >= self._waiting_max:
            most = self._owner_with_most_waiting(owner)
            if most == owner:
                return owner, item
            dropped = most, self._waiting[most].pop()
            self._count_removed(most)
        items = self._waiting.setdefault(owner, deque())
        items.append(item)
        self._count_owner(len(items), before=len(items) - 1)
        self.waiting_count += 1
        return dropped

    def _owner_with_most_waiting(self, newcomer: OwnerT) -> OwnerT:
        """Return the owner with the most items, weighted by rank, the new one counted; the newcomer where several have
        as many.
        """
        rank = self._rank(newcomer)
        weight = (self.count_waiting(newcomer) + 1) << RANK_BITS * rank
        if weight > max(self._owners_by_size, default=0) << RANK_BITS * self._rank_max:
            return newcomer
        most, most_key = newcomer, (weight, rank)
        for owner, items in self._waiting.items():
            # Skip the rank of most owners: there may be many, and in a flood this runs at each arrival.
            if owner == newcomer or len(items) << RANK_BITS * self._rank_max < most_key[0]:
                continue
            rank = self._rank(owner)
            if (key := (len(items) << RANK_BITS * rank, rank)) > most_key:
                most, most_key = owner, key
        return most

    def start_next(self) -> tuple[OwnerT, ItemT] | None:
        """Take the next item, which holds a slot until ``release_slot``; None if no waiting owner may have a slot."""
        if not self._free:
            return None
        first: dict[int, OwnerT] = {}
        for owner in self._waiting:
            if self._may_hold(owner, self._held[owner], self._free):
                first.setdefault(self._rank(owner), owner)
                if len(first) > self._rank_max:  # one of each rank: there may be many more owners
                    break
        if not first:
            return None
        owner = first[self._next_rank(first)]
        item = self._waiting[owner].popleft()
        self._waiting.move_to_end(owner)
        self._count_removed(owner)
        self._free -= 1
        self._held[owner] += 1
        return owner, item

    def _next_rank(self, ranks: dict[int, OwnerT]) -> int:
        passed_over = {rank: self._passed_over.get(rank, 0) for rank in ranks}
        overdue = [rank for rank, times in passed_over.items() if times >= PASSED_OVER_MAX]
        chosen = max(overdue, key=passed_over.__getitem__) if overdue else min(ranks)
        self._passed_over = {rank: 0 if rank == chosen else times + 1 for rank, times in passed_over.items()}
        return chosen

    def release_slot(self, owner: OwnerT) -> None:
        """Release a slot that an item of ``owner`` got from ``start_next``."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def remove_waiting(self, owner: OwnerT, item: ItemT) -> None:
        """Remove an item if it still waits."""
        items = self._waiting.get(owner)
        if items is not None and item in items:
            items.remove(item)
            self._count_removed(owner)

    def _count_removed(self, owner: OwnerT) -> None:
        """Update the counts after an item of an owner was removed."""
        self.waiting_count -= 1
        items = self._waiting[owner]
        self._count_owner(len(items), before=len(items) + 1)
        if not items:
            del self._waiting[owner]

    def _count_owner(self, size: int, *, before: int) -> None:
        if size:
            self._owners_by_size[size] += 1
        if before:
            self._owners_by_size[before] -= 1
            if not self._owners_by_size[before]:
                del self._owners_by_size[before]
