"""Rate limit for an expensive answer whose callers may be compromised."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

ValueT = TypeVar("ValueT")


class _Run(Generic[ValueT]):
    """One run and its outcome."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.values: list[ValueT] = []
        self.error: Exception | None = None


class RateLimitedAnswer(Generic[ValueT]):
    """Runs ``make`` once for all who ask at the same time, and begins at most once in ``interval_s`` seconds.

    Nothing is kept: who asks after a run waits for the next one, and is told nothing that is older than the question.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], interval_s: float) -> None:
        self._make = make
        self._interval_s = interval_s
        self._began_at_s = float("-inf")
        self._run: _Run[ValueT] | None = None

    async def current(self) -> ValueT:
        """Return a fresh answer. Raises what ``make`` raises, in all callers that wait for it."""
        while (run := self._run) is not None:
            await run.over.wait()
            if run.error is not None:
                raise run.error
            if run.values:
                return run.values[0]
            # Whoever ran it was cancelled: the first of those who wait runs it.
        return await self._begin()

    async def _begin(self) -> ValueT:
        run = self._run = _Run()
        try:
            await trio.sleep_until(self._began_at_s + self._interval_s)
            self._began_at_s = trio.current_time()
            run.values.append(await self._make())
        except Exception as error:
            run.error = error
            raise
        finally:
            self._run = None
            run.over.set()
        return run.values[0]
