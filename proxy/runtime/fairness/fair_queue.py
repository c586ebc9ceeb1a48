"""Whose turn is next among those who wait for a slot: each owner in turn, so that nobody's many delay another's few.

An *owner* is what has a share of its own: a principal, a client's address. State alone: no IO, no clock, no task.

* Owners of a lower rank go first; those of a higher one are passed over a few times at most, never for ever.
* Where no more may wait, the newest of the owner with the most waiting is dropped. So who has few waiting is let in
  however many another has, and who is in line stays there unless its owner has the most.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

PASSED_OVER_MAX = 3
"""How often in a row those of a higher rank are passed over."""

OwnerT = TypeVar("OwnerT", bound=Hashable)
ItemT = TypeVar("ItemT")


class FairQueue(Generic[OwnerT, ItemT]):
    """``slots`` items are started at a time, ``waiting_max`` wait, of one owner ``waiting_per_owner_max``.

    ``may_hold``: whether an owner that holds so many slots may have one more while so many are free. ``rank``: of an
    owner, at the moment when it is asked for; the lowest goes first.
    """

    def __init__(
        self,
        *,
        slots: int,
        waiting_max: int,
        waiting_per_owner_max: int | None = None,
        may_hold: Callable[[OwnerT, int, int], bool] = lambda _owner, _held, _free: True,
        rank: Callable[[OwnerT], int] = lambda _owner: 0,
    ) -> None:
        self._free = slots
        self._waiting_max = waiting_max
        self._waiting_per_owner_max = waiting_per_owner_max or waiting_max
        self._may_hold = may_hold
        self._rank = rank
        self._held: Counter[OwnerT] = Counter()
        self._waiting: OrderedDict[OwnerT, deque[ItemT]] = OrderedDict()
        self._passed_over: dict[int, int] = {}
        self._owners_by_size: Counter[int] = Counter()
        """How many owners have so many waiting: in a flood most newcomers can be refused by this alone."""
        self.waiting_count = 0
        """Items that wait."""

    def count_waiting(self, owner: OwnerT) -> int:
        """How many items of an owner wait."""
        return len(self._waiting.get(owner, ()))

    def enqueue(self, owner: OwnerT, item: ItemT) -> tuple[OwnerT, ItemT] | None:
        """Let an item wait. Returns what was dropped instead, with its owner: perhaps this very item."""
        dropped = None
        if self.count_waiting(owner) >= self._waiting_per_owner_max:
            return owner, item
        if self.waiting_count >= self._waiting_max:
            most = self._owner_with_most_waiting(owner)
            if most == owner:
                return owner, item
            dropped = most, self._waiting[most].pop()
            self._shrunk(most)
        items = self._waiting.setdefault(owner, deque())
        items.append(item)
        self._count_owner(len(items), before=len(items) - 1)
        self.waiting_count += 1
        return dropped

    def _owner_with_most_waiting(self, newcomer: OwnerT) -> OwnerT:
        """Whose newest item has to go, the newcomer's counted; where several are equal: the newcomer."""
        most, most_items = newcomer, self.count_waiting(newcomer) + 1
        if most_items > max(self._owners_by_size, default=0):
            return newcomer
        most_key = most_items, self._rank(newcomer)
        for owner, items in self._waiting.items():
            # Without the rank of most of them: there may be many, and this happens at each arrival in a flood.
            if owner != newcomer and len(items) >= most_key[0] and (key := (len(items), self._rank(owner))) > most_key:
                most, most_key = owner, key
        return most

    def start_next(self) -> tuple[OwnerT, ItemT] | None:
        """Start the next item, which holds a slot until ``release``; None where no slot is free for those who wait."""
        if not self._free:
            return None
        first: dict[int, OwnerT] = {}
        for owner in self._waiting:
            if self._may_hold(owner, self._held[owner], self._free):
                first.setdefault(self._rank(owner), owner)
        if not first:
            return None
        owner = first[self._next_rank(first)]
        item = self._waiting[owner].popleft()
        self._waiting.move_to_end(owner)
        self._shrunk(owner)
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
        """Give back a slot that ``take`` gave."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def remove_waiting(self, owner: OwnerT, item: ItemT) -> None:
        """Let an item wait no more, if it does."""
        items = self._waiting.get(owner)
        if items is not None and item in items:
            items.remove(item)
            self._shrunk(owner)

    def _shrunk(self, owner: OwnerT) -> None:
        """One item of an owner waits no more."""
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
