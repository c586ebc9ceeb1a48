"""A bound in bytes on what a process keeps for clients: shared fairly; reservations fail instead of waiting."""

REQUEST_OVERHEAD_BYTES = 512
"""Memory that a request in flight needs beside its own bytes."""


class ByteBudget:
    """A budget of ``total_bytes``. Half of it is first come, first served; beyond that each owner gets an equal share,
    with one share kept for a newcomer.
    """

    def __init__(self, total_bytes: int) -> None:
        self.used_bytes = 0
        self._by_owner: dict[str, int] = {}
        self.resize(total_bytes)

    def resize(self, total_bytes: int) -> None:
        """Change the bound; reservations stay."""
        self._total_bytes = total_bytes
        self._first_come_bytes = total_bytes // 2

    @property
    def shares_enforced(self) -> bool:
        """True while more than half is reserved, so that owners are limited to their shares."""
        return self.used_bytes > self._first_come_bytes

    def reserve_bytes(self, owner: str, size_bytes: int) -> bool:
        """Reserve bytes for an owner; return False, and reserve nothing, if it may not have them."""
        used_bytes = self.used_bytes + size_bytes
        own_bytes = self._by_owner.get(owner, 0)
        if used_bytes > self._first_come_bytes:
            others = len(self._by_owner) - (owner in self._by_owner)
            newcomer = 1
            share_bytes = self._total_bytes // (1 + others + newcomer)
            if used_bytes > self._total_bytes or own_bytes + size_bytes > share_bytes:
                return False
        self.used_bytes = used_bytes
        self._by_owner[owner] = own_bytes + size_bytes
        return True

    def release_bytes(self, owner: str, size_bytes: int) -> None:
        """Release bytes that were reserved for an owner."""
        if not size_bytes:
            return
        self.used_bytes -= size_bytes
        left_bytes = self._by_owner[owner] - size_bytes
        if left_bytes:
            self._by_owner[owner] = left_bytes
        else:
            del self._by_owner[owner]

    def transfer_bytes(self, owner: str, other: str, size_bytes: int) -> None:
        """Transfer reserved bytes from one owner to another, without a check of the other's share."""
        if size_bytes:
            self.release_bytes(owner, size_bytes)
            self.used_bytes += size_bytes
            self._by_owner[other] = self._by_owner.get(other, 0) + size_bytes


class ByteReservation:
    """The bytes of a budget that one connection has reserved, as a level that goes up and down."""

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> bool:
        """Change the reservation's size; return False, and change nothing, if it grows and the budget refuses that."""
        more_bytes = size_bytes - self.size_bytes
        if more_bytes > 0:
            if not self._budget.reserve_bytes(self._owner, more_bytes):
                return False
        else:
            self._budget.release_bytes(self._owner, -more_bytes)
        self.size_bytes = size_bytes
        return True

    def transfer_to(self, owner: str) -> None:
        """Transfer the reservation to another owner."""
        self._budget.transfer_bytes(self._owner, owner, self.size_bytes)
        self._owner = owner


def utf8_bytes(text: str) -> int:
    """Return the number of bytes that a text takes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
