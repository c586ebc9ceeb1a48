"""The age that one client's connection may reach (`limits.max_connection_age_ms`)."""

import random
from collections.abc import Callable

import trio

from proxy.config.types import Limits
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import seconds

SPREAD = 0.1
"""The share of the age that is added or taken away at random: clients that came together must not leave together."""

fraction: Callable[[], float] = random.random  # no secret


class ConnectionAge:
    """The age limit of one connection: a deadline in lookup mode, which calls ``on_reached``; a time for a relay."""

    def __init__(
        self, deadlines: Deadlines, limits: Limits, accepted_at: float, on_reached: Callable[[], None]
    ) -> None:
        self._deadline = deadlines.new_deadline(on_reached)
        age_s = seconds(limits.max_connection_age_ms)
        self._leave_at = accepted_at + age_s * (1 - SPREAD + 2 * SPREAD * fraction()) if age_s else 0.0

    def start_deadline(self) -> None:
        """Start the deadline: the connection is in lookup mode."""
        if self._leave_at:
            self._deadline.set(self._leave_at)

    def clear_deadline(self) -> None:
        """Call ``on_reached`` no more."""
        self._deadline.clear()

    def leave_at_ms(self, now_s: float) -> int:
        """Return when a relay is to be ended, in milliseconds; 0: never.

        ``now_s``: the time now, by the clock that the result is of, and that all processes share.
        """
        return max(1, round((now_s + self._leave_at - trio.current_time()) * 1000)) if self._leave_at else 0
