"""Members by owner, such as connections by address: finds the owner with most without a look at all of them."""

from typing import Generic, TypeVar

MemberT = TypeVar("MemberT")


class MembersByOwner(Generic[MemberT]):
    """Members by owner, in the order in which they were added, and the owners with most of them."""

    def __init__(self) -> None:
        self._members: dict[str, dict[MemberT, None]] = {}
        self._owners_with: dict[int, dict[str, None]] = {}
        self.count = 0
        self.most = 0
        """The number of members of the owner with most."""

    def add(self, owner: str, member: MemberT) -> None:
        """Add a member."""
        members = self._members.setdefault(owner, {})
        members[member] = None
        self.count += 1
        self._sort_owner(owner, len(members) - 1, len(members))

    def remove(self, owner: str, member: MemberT) -> None:
        """Remove a member, which must be there."""
        members = self._members[owner]
        del members[member]
        if not members:
            del self._members[owner]
        self.count -= 1
        self._sort_owner(owner, len(members) + 1, len(members))

    def count_of(self, owner: str) -> int:
        """Return how many members an owner has."""
        return len(self._members.get(owner, ()))

    def counts(self) -> dict[str, int]:
        """Return how many members each owner has."""
        return {owner: len(members) for owner, members in self._members.items()}

    def owner_with_most(self) -> str:
        """Return the owner with most members; "" if there are none."""
        return next(iter(self._owners_with[self.most])) if self.most else ""

    def oldest(self, owner: str) -> MemberT | None:
        """Return the member of an owner that was added first, or None."""
        return next(iter(self._members.get(owner, ())), None)

    def newest(self, owner: str) -> MemberT | None:
        """Return the member of an owner that was added last, or None."""
        return next(reversed(self._members.get(owner, {})), None)

    def _sort_owner(self, owner: str, old: int, new: int) -> None:
        """Sort an owner by its number of members; owners that came first stay first."""
        if old:
            owners = self._owners_with[old]
            del owners[owner]
            if not owners:
                del self._owners_with[old]
        if new:
            self._owners_with.setdefault(new, {})[owner] = None
        if new > self.most or self.most not in self._owners_with:
            self.most = new
