"""Deadlines of many connections, kept by one task: most are never reached, so they must cost nothing.

A connection that ends takes its deadline with it, so that nothing remembers it. Nobody is woken early, and late by at
most GRAIN_S.
"""

import math
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger

GRAIN_S = 0.1

Wake = Callable[[], None]


class Deadline:
    """One owner's; ``on_passed`` is called when it has passed, which ``set`` may be called from."""

    __slots__ = ("_all", "grain", "on_passed")

    def __init__(self, all_: "Deadlines", on_passed: Wake) -> None:
        self._all = all_
        self.grain = 0
        self.on_passed = on_passed

    def set(self, when: float) -> None:
        """Replace what was set before; in Trio's time."""
        self.clear()
        self.grain = math.ceil(when / GRAIN_S)
        self._all.add(self)

    def clear(self) -> None:
        """There is none (any more)."""
        if self.grain:
            self._all.remove(self)
            self.grain = 0


class Deadlines:
    """See the module."""

    def __init__(self) -> None:
        self._by_grain: dict[int, dict[Deadline, None]] = {}
        self._sleep = trio.CancelScope()
        self._sleeps_until = math.inf

    def new_deadline(self, on_passed: Wake) -> Deadline:
        """One more, which is not set."""
        return Deadline(self, on_passed)

    def add(self, deadline: Deadline) -> None:
        """For Deadline only."""
        grain = deadline.grain
        owners = self._by_grain.get(grain)
        if owners is None:
            owners = self._by_grain[grain] = {}
            if grain < self._sleeps_until:
                self._sleeps_until = grain
                self._sleep.deadline = grain * GRAIN_S
        owners[deadline] = None

    def remove(self, deadline: Deadline) -> None:
        """For Deadline only."""
        owners = self._by_grain[deadline.grain]
        del owners[deadline]
        if not owners:
            del self._by_grain[deadline.grain]

    async def run(self) -> None:
        """Wake owners until cancelled."""
        while True:
            self._sleeps_until = min(self._by_grain, default=math.inf)
            with trio.CancelScope(deadline=self._sleeps_until * GRAIN_S) as self._sleep:
                await trio.sleep_forever()
            self._wake()

    def _wake(self) -> None:
        now = trio.current_time()
        for grain in sorted(grain for grain in self._by_grain if grain * GRAIN_S <= now):
            for deadline in list(self._by_grain.get(grain, ())):
                if deadline.grain != grain:  # one that was woken before it has changed it
                    continue
                deadline.clear()
                try:
                    deadline.on_passed()
                except Exception as error:  # noqa: BLE001 -- one owner's defect must not keep the others waiting
                    get_logger().error("a connection whose deadline has passed met a defect", exc_info=error)
