"""One run for all tasks that want its result at the same time."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

ValueT = TypeVar("ValueT")


class _Run(Generic[ValueT]):
    """One run and its outcome: a value or an error."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.values: list[ValueT] = []
        self.error: Exception | None = None


class SingleFlight(Generic[ValueT]):
    """Runs ``make`` in a task of its own, never twice at a time; no caller that gives up disturbs the others.

    Nothing is kept: a caller after the end of a run gets the result of the next one. A run ends with ``nursery``;
    without one, with the process.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], nursery: trio.Nursery | None = None) -> None:
        self._make = make
        self._spawn = trio.lowlevel.spawn_system_task if nursery is None else nursery.start_soon
        self._run: _Run[ValueT] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a run has begun and is not over."""
        return self._run is not None

    def start(self) -> None:
        """Start a run, unless one is under way."""
        self._current_run()

    async def result(self) -> ValueT:
        """Return the result of the run under way, or else of a new one. Raises what ``make`` raises."""
        run = self._current_run()
        await run.over.wait()
        if run.error is not None:
            raise run.error
        return run.values[0]

    def _current_run(self) -> _Run[ValueT]:
        if self._run is None:
            self._run = _Run()
            self._spawn(self._complete, self._run)
        return self._run

    async def _complete(self, run: _Run[ValueT]) -> None:
        try:
            run.values.append(await self._make())
        except Exception as error:  # noqa: BLE001 -- raised by `result`; in a task of its own it would end the process
            run.error = error
        finally:
            self._run = None
            run.over.set()
