"""A lock that senders share fairly, however many requests each of them has waiting."""

import contextlib
from collections.abc import AsyncIterator

import trio

from analytics.errors import AnalyticsError


class LockTimeoutError(AnalyticsError):
    """The lock was not acquired within the timeout."""


class _Queue:
    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.waiting = 0


class FairLock:
    """Lock in two stages: a sender's requests queue for the sender's own lock, its first one for the common lock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._all = trio.Lock()
        self._queues: dict[str, _Queue] = {}

    @contextlib.asynccontextmanager
    async def hold_for(self, sender: str) -> AsyncIterator[None]:
        """Acquire the lock for a sender and hold it within the block. Raises LockTimeoutError."""
        queue = self._queues.setdefault(sender, _Queue())
        queue.waiting += 1
        with contextlib.ExitStack() as held:
            held.callback(self._leave, sender, queue)
            with trio.move_on_after(self._timeout_s) as waiting:
                await queue.lock.acquire()
                held.callback(queue.lock.release)
                await self._all.acquire()
                held.callback(self._all.release)
            if waiting.cancelled_caught:
                raise LockTimeoutError
            yield

    def _leave(self, sender: str, queue: _Queue) -> None:
        queue.waiting -= 1
        if not queue.waiting:
            del self._queues[sender]
