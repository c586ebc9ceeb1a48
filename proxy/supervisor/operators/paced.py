"""Rate limit for an expensive answer whose callers may be compromised."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from proxy.runtime.loop.single_flight import SingleFlight

ValueT = TypeVar("ValueT")


class RateLimitedAnswer(Generic[ValueT]):
    """Runs ``make`` once for all who ask at the same time, and begins at most once in ``interval_s`` seconds.

    Nothing is kept: who asks after a run waits for the next one.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], interval_s: float) -> None:
        self._make = make
        self._interval_s = interval_s
        self._began_at_s = float("-inf")
        self.current = SingleFlight(self._begin).result
        """Return a fresh answer. Raises what ``make`` raises, in all callers that wait for it."""

    async def _begin(self) -> ValueT:
        await trio.sleep_until(self._began_at_s + self._interval_s)
        self._began_at_s = trio.current_time()
        return await self._make()
