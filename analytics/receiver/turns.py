"""One request at a time in a narrow place; senders take turns, however many requests each of them has waiting."""

import contextlib
from collections.abc import AsyncIterator

import trio


class WaitedTooLongError(Exception):
    """The turn did not come in time."""


class _Queue:
    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.waiting = 0


class Turns:
    """First each sender's requests queue among themselves, then one of each sender's with those of the others."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._all = trio.Lock()
        self._queues: dict[str, _Queue] = {}

    @contextlib.asynccontextmanager
    async def turn(self, sender: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it within the block; raises WaitedTooLongError."""
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
                raise WaitedTooLongError
            yield

    def _leave(self, sender: str, queue: _Queue) -> None:
        queue.waiting -= 1
        if not queue.waiting:
            del self._queues[sender]
