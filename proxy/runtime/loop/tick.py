"""Ticks of the event loop: what is written during one tick is flushed once, at its end.

A chunk from a broker answers many requests, an Envelope holds many, and one round of the reactor serves many
connections: each connection then gets all of its bytes in one system call.
"""

from typing import Protocol

import trio

from proxy.common.logs import get_logger


class Flushable(Protocol):
    """An object that buffers output until it is flushed."""

    def flush(self) -> None:
        """Send what is buffered, without waiting."""
        ...


class Tick:
    """A tick, as a context manager: scheduled objects are flushed at its exit; outside of a tick, at once."""

    def __init__(self) -> None:
        self._scheduled: dict[Flushable, None] = {}
        self._depth = 0
        self._now: float | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self._flush_scheduled()
            self._now = None
        self._depth -= 1

    @property
    def now(self) -> float:
        """Trio's time; within a tick, as it was at the first use: reading the clock costs more than much of a tick."""
        if self._now is not None:
            return self._now
        now = trio.current_time()
        if self._depth:
            self._now = now
        return now

    def schedule_flush(self, flushable: Flushable) -> None:
        """Have an object flushed at the end of the tick, once however often it is scheduled."""
        self._scheduled[flushable] = None
        if not self._depth:
            with self:
                pass

    def _flush_scheduled(self) -> None:
        while self._scheduled:
            scheduled, self._scheduled = self._scheduled, {}
            for flushable in scheduled:
                try:
                    flushable.flush()
                except Exception as error:  # noqa: BLE001 -- one object's error must not keep others unflushed
                    get_logger().error("what was to be said at the end of a turn met a defect", exc_info=error)


_current: trio.lowlevel.RunVar[Tick] = trio.lowlevel.RunVar("tick")


def current_tick() -> Tick:
    """Return the tick of this event loop. There is one for each loop, since a loop runs in one thread."""
    try:
        return _current.get()
    except LookupError:
        tick = Tick()
        _current.set(tick)
        return tick
