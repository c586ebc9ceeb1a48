"""What one turn of the event loop has to say to others, said once at the end of the turn.

A chunk from a broker answers many requests, an Envelope asks many, and in one round of the reactor many connections
have something to say: each connection then gets all of its bytes in one system call.
"""

from typing import Protocol

import trio

from proxy.common.logs import get_logger


class Flushable(Protocol):
    """Something that holds back what it has to say."""

    def flush(self) -> None:
        """Say it."""
        ...


class Tick:
    """As a context it is a turn: whoever is touched in it speaks at its end. Outside of one they speak at once."""

    def __init__(self) -> None:
        self._touched: dict[Flushable, None] = {}
        self._depth = 0
        self._now: float | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self._end()
            self._now = None
        self._depth -= 1

    @property
    def now(self) -> float:
        """Trio's time; in a turn, when it was asked for first. To look at the clock costs more than much of a turn."""
        if self._now is not None:
            return self._now
        now = trio.current_time()
        if self._depth:
            self._now = now
        return now

    def schedule_flush(self, who: Flushable) -> None:
        """Remember somebody for the end of the turn."""
        self._touched[who] = None
        if not self._depth:
            with self:
                pass

    def _end(self) -> None:
        while self._touched:
            touched, self._touched = self._touched, {}
            for who in touched:
                try:
                    who.flush()
                except Exception as error:  # noqa: BLE001 -- what one cannot say must not keep the others from it
                    get_logger().error("what was to be said at the end of a turn met a defect", exc_info=error)


_current: trio.lowlevel.RunVar[Tick] = trio.lowlevel.RunVar("turn")


def current_tick() -> Tick:
    """The turn of this event loop: there is one, since all that happens in it happens in one thread."""
    try:
        return _current.get()
    except LookupError:
        turn = Tick()
        _current.set(turn)
        return turn
