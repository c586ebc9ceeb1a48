"""A bound in bytes on what is kept for clients by a process, shared fairly, and refused rather than waited for."""

from functools import lru_cache

from proxy.runtime.fairness.fair_capacity import owner_of

REQUEST_OVERHEAD_BYTES = 512
"""What a request under way needs beside its own bytes."""

owner_by_address = lru_cache(4096)(owner_of)
"""Name who shares the budget as one, for requests of which there are very many."""


class ByteBudget:
    """``total_bytes``, of which the first half is whoever's comes; of the rest no owner gets more than an equal share,
    of which one is kept for a newcomer.
    """

    def __init__(self, total_bytes: int) -> None:
        self.used_bytes = 0
        self._by_owner: dict[str, int] = {}
        self.resize(total_bytes)

    def resize(self, total_bytes: int) -> None:
        """Change the bound; what is taken stays taken."""
        self._total_bytes = total_bytes
        self._free_for_all_bytes = total_bytes // 2

    @property
    def shares_enforced(self) -> bool:
        """Whether so much is taken that owners are limited to their shares."""
        return self.used_bytes > self._free_for_all_bytes

    def reserve_bytes(self, owner: str, size_bytes: int) -> bool:
        """Take so much for an owner, if it may have it; whether it has got it."""
        used_bytes = self.used_bytes + size_bytes
        mine_bytes = self._by_owner.get(owner, 0)
        if used_bytes > self._free_for_all_bytes:
            others = len(self._by_owner) - (owner in self._by_owner)
            newcomer = 1
            share_bytes = self._total_bytes // (1 + others + newcomer)
            if used_bytes > self._total_bytes or mine_bytes + size_bytes > share_bytes:
                return False
        self.used_bytes = used_bytes
        self._by_owner[owner] = mine_bytes + size_bytes
        return True

    def release_bytes(self, owner: str, size_bytes: int) -> None:
        """Give back what was taken for an owner."""
        if not size_bytes:
            return
        self.used_bytes -= size_bytes
        left_bytes = self._by_owner[owner] - size_bytes
        if left_bytes:
            self._by_owner[owner] = left_bytes
        else:
            del self._by_owner[owner]

    def transfer_bytes(self, owner: str, other: str, size_bytes: int) -> None:
        """Count what was taken for one owner as another one's from now on."""
        if size_bytes:
            self.release_bytes(owner, size_bytes)
            self.used_bytes += size_bytes
            self._by_owner[other] = self._by_owner.get(other, 0) + size_bytes


class ByteReservation:
    """What one connection holds of a budget, as a level that goes up and down."""

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> bool:
        """Hold so much; False, and all stays as it is, where that is more than before and may not be had."""
        more_bytes = size_bytes - self.size_bytes
        if more_bytes > 0:
            if not self._budget.reserve_bytes(self._owner, more_bytes):
                return False
        else:
            self._budget.release_bytes(self._owner, -more_bytes)
        self.size_bytes = size_bytes
        return True

    def transfer_to(self, owner: str) -> None:
        """Count it as another owner's from now on."""
        self._budget.transfer_bytes(self._owner, owner, self.size_bytes)
        self._owner = owner
