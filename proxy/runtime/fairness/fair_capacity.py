"""Memory capacity for answers of unknown size: reserved before the request is sent, released once the answer has left.

Each reservation is for the largest answer possible, and shrinks once the answer's size is known. Waiting owners are
served round robin.
"""

from collections import Counter, OrderedDict, deque

import trio


class Reservation:
    """Capacity that is reserved for an owner, for one answer."""

    __slots__ = ("_capacity", "owner", "size_bytes")

    def __init__(self, capacity: "FairCapacity", owner: str, size_bytes: int) -> None:
        self._capacity = capacity
        self.owner = owner
        self.size_bytes = size_bytes

    def shrink_to(self, size_bytes: int) -> None:
        """Release all but ``size_bytes``, now that the answer's size is known; a larger size changes nothing."""
        freed_bytes = self.size_bytes - size_bytes
        if freed_bytes > 0:
            self.size_bytes = size_bytes
            self._capacity.release_bytes(self.owner, freed_bytes)

    def release(self) -> None:
        """Release all of it; a second call does nothing."""
        self.shrink_to(0)


class FairCapacity:
    """A capacity of ``total_bytes`` (or another unit), reserved in portions of ``largest_bytes``; at least one portion.

    No owner alone gets the last portion, however many it requests and however long it keeps them: that one stays for
    another owner.
    """

    def __init__(self, total_bytes: int, largest_bytes: int) -> None:
        self._total_bytes = self._free_bytes = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self.resize(total_bytes, largest_bytes)
        self._held: Counter[str] = Counter()

    def resize(self, total_bytes: int, largest_bytes: int) -> None:
        """Change both bounds. Reservations stay; until they are released the free capacity may be negative."""
        total_bytes = max(total_bytes, largest_bytes)
        self._free_bytes += total_bytes - self._total_bytes
        self._total_bytes, self._largest_bytes = total_bytes, largest_bytes
        self._most_bytes = max(largest_bytes, total_bytes - largest_bytes)
        self._serve_waiters()

    @property
    def free_bytes(self) -> int:
        """Capacity that is not reserved; negative after a ``resize`` below what is."""
        return self._free_bytes

    @property
    def has_waiters(self) -> bool:
        """True while a reservation waits."""
        return bool(self._waiting)

    def try_reserve(self, owner: str) -> Reservation | None:
        """Reserve a portion if there is one, else return None. It passes over no waiter: none could have had it."""
        return self._reserve_portion(owner) if self._may_reserve(owner) else None

    async def reserve(self, owner: str) -> Reservation:
        """Wait for a portion and reserve it; the caller must call ``Reservation.release``."""
        reservation = self.try_reserve(owner)
        if reservation is not None:
            return reservation
        waiter = _Waiter()
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter.served.wait()
        except trio.Cancelled:
            if waiter.reservation is not None:  # it came at the same moment
                waiter.reservation.release()
            else:
                self._remove_waiter(owner, waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    def release_bytes(self, owner: str, size_bytes: int) -> None:
        """Release capacity of an owner and serve the next waiter; only ``Reservation`` calls this."""
        self._free_bytes += size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner]
        self._serve_waiters()

    def _serve_waiters(self) -> None:
        while (following := next(filter(self._may_reserve, self._waiting), None)) is not None:
            waiters = self._waiting.pop(following)
            waiter = waiters.popleft()
            waiter.reservation = self._reserve_portion(following)
            waiter.served.set()
            if waiters:
                self._waiting[following] = waiters  # at the end

    def _may_reserve(self, owner: str) -> bool:
        largest_bytes = self._largest_bytes
        return self._free_bytes >= largest_bytes and self._held[owner] + largest_bytes <= self._most_bytes

    def _reserve_portion(self, owner: str) -> Reservation:
        self._free_bytes -= self._largest_bytes
        self._held[owner] += self._largest_bytes
        return Reservation(self, owner, self._largest_bytes)

    def _remove_waiter(self, owner: str, waiter: "_Waiter") -> None:
        waiters = self._waiting[owner]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[owner]


class _Waiter:
    """A task that waits for a reservation."""

    __slots__ = ("reservation", "served")

    def __init__(self) -> None:
        self.served = trio.Event()
        self.reservation: Reservation | None = None
