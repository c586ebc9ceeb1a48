"""Room in bytes for answers whose size nobody knows before they come: lent before one is asked for, until it has left.

Each is lent room for the largest that may come, and gives back what it does not need once it is there. Whose turn is
next goes round among the owners who wait, each as one.
"""

from collections import Counter, OrderedDict, deque

import trio

from proto.addresses import client_network


def owner_of(principal: str, client_address: str) -> str:
    """Name who shares the room as one: a principal, or, where there is none, all that comes from one IP address (of
    IPv6: one /64 network).

    ``client_address``: with its port.
    """
    return principal or client_network(client_address)


class Reservation:
    """Room that was lent to an owner, for one answer."""

    __slots__ = ("_capacity", "owner", "size_bytes")

    def __init__(self, room: "FairCapacity", owner: str, size_bytes: int) -> None:
        self._capacity = room
        self.owner = owner
        self.size_bytes = size_bytes

    def shrink_to(self, size_bytes: int) -> None:
        """Keep only so much, now that the answer's size is known; never more than was lent."""
        freed_bytes = self.size_bytes - size_bytes
        if freed_bytes > 0:
            self.size_bytes = size_bytes
            self._capacity.release_bytes(self.owner, freed_bytes)

    def release(self) -> None:
        """Keep nothing; to do it twice is harmless."""
        self.shrink_to(0)


class FairCapacity:
    """``total_bytes`` of room (or whatever else is counted), of which ``largest_bytes`` are lent at a time, and in any
    case to one.

    No owner by itself gets the last that could be lent, however many it asks for and however long it keeps them: that
    one is for somebody else.
    """

    def __init__(self, total_bytes: int, largest_bytes: int) -> None:
        self._total_bytes = self._free_bytes = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self.resize(total_bytes, largest_bytes)
        self._held: Counter[str] = Counter()

    def resize(self, total_bytes: int, largest_bytes: int) -> None:
        """Change both bounds. What is lent stays lent; until it is back there may be less than nothing free."""
        total_bytes = max(total_bytes, largest_bytes)
        self._free_bytes += total_bytes - self._total_bytes
        self._total_bytes, self._largest_bytes = total_bytes, largest_bytes
        self._most_bytes = max(largest_bytes, total_bytes - largest_bytes)
        self._lend_to_who_waits()

    @property
    def free_bytes(self) -> int:
        """How much is not lent."""
        return self._free_bytes

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def try_reserve(self, owner: str) -> Reservation | None:
        """Lend room if there is some; nobody is passed over, since who waits could not have had it."""
        return self._lend(owner) if self._may_have_some(owner) else None

    async def reserve(self, owner: str) -> Reservation:
        """Wait for room; ``Loan.give_back`` it."""
        loan = self.try_reserve(owner)
        if loan is not None:
            return loan
        turn = _Waiter()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn.came.wait()
        except trio.Cancelled:
            if turn.loan is not None:  # it came in the very moment
                turn.loan.release()
            else:
                self._leave(owner, turn)
            raise
        assert turn.loan is not None
        return turn.loan

    def release_bytes(self, owner: str, size_bytes: int) -> None:
        """Take back room of an owner's (a Loan's business), and lend it to who is next."""
        self._free_bytes += size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner]
        self._lend_to_who_waits()

    def _lend_to_who_waits(self) -> None:
        while (following := next(filter(self._may_have_some, self._waiting), None)) is not None:
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            turn.loan = self._lend(following)
            turn.came.set()
            if turns:
                self._waiting[following] = turns  # at the end

    def _may_have_some(self, owner: str) -> bool:
        largest_bytes = self._largest_bytes
        return self._free_bytes >= largest_bytes and self._held[owner] + largest_bytes <= self._most_bytes

    def _lend(self, owner: str) -> Reservation:
        self._free_bytes -= self._largest_bytes
        self._held[owner] += self._largest_bytes
        return Reservation(self, owner, self._largest_bytes)

    def _leave(self, owner: str, turn: "_Waiter") -> None:
        turns = self._waiting[owner]
        turns.remove(turn)
        if not turns:
            del self._waiting[owner]


class _Waiter:
    """Somebody who waits, until a loan has come."""

    __slots__ = ("came", "loan")

    def __init__(self) -> None:
        self.came = trio.Event()
        self.loan: Reservation | None = None
