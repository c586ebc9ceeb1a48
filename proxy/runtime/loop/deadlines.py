"""Deadlines of many connections, served by one task: most are never reached, so they must cost nothing.

A connection that ends clears its deadline, so that no reference to it is left. A callback is never called early, and at
most GRAIN_S late.
"""

import math
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import ignore

GRAIN_S = 0.1

OnPassed = Callable[[], None]


class Deadline:
    """A connection's deadline. ``on_passed`` is called once it has passed, and may call ``set`` again."""

    __slots__ = ("_all", "grain", "on_passed")

    def __init__(self, all_: "Deadlines", on_passed: OnPassed) -> None:
        self._all = all_
        self.grain = 0
        self.on_passed = on_passed

    def set(self, when: float) -> None:
        """Set the deadline, in Trio's time; this replaces an earlier one."""
        self.clear()
        self.grain = math.ceil(when / GRAIN_S)
        self._all.add(self)

    def clear(self) -> None:
        """Remove the deadline, if one is set."""
        if self.grain:
            self._all.remove(self)
            self.grain = 0

    def close(self) -> None:
        """Remove the deadline for good, and its callback, which mostly leads back to who has the deadline: in such a
        circle both would wait for a garbage collection.
        """
        self.clear()
        self.on_passed = ignore


class Deadlines:
    """All deadlines of a process. ``run`` calls their callbacks."""

    def __init__(self) -> None:
        self._by_grain: dict[int, dict[Deadline, None]] = {}
        self._sleep = trio.CancelScope()
        self._sleeps_until = math.inf

    def new_deadline(self, on_passed: OnPassed) -> Deadline:
        """Return a new deadline, not set yet."""
        return Deadline(self, on_passed)

    def add(self, deadline: Deadline) -> None:
        """Register a deadline that was set; only ``Deadline`` calls this."""
        grain = deadline.grain
        deadlines = self._by_grain.get(grain)
        if deadlines is None:
            deadlines = self._by_grain[grain] = {}
            if grain < self._sleeps_until:
                self._sleeps_until = grain
                self._sleep.deadline = grain * GRAIN_S
        deadlines[deadline] = None

    def remove(self, deadline: Deadline) -> None:
        """Unregister a deadline; only ``Deadline`` calls this."""
        deadlines = self._by_grain[deadline.grain]
        del deadlines[deadline]
        if not deadlines:
            del self._by_grain[deadline.grain]

    async def run(self) -> None:
        """Call the callbacks of deadlines that have passed, until cancelled."""
        while True:
            self._sleeps_until = min(self._by_grain, default=math.inf)
            with trio.CancelScope(deadline=self._sleeps_until * GRAIN_S) as self._sleep:
                await trio.sleep_forever()
            self._call_passed()

    def _call_passed(self) -> None:
        now = trio.current_time()
        for grain in sorted(grain for grain in self._by_grain if grain * GRAIN_S <= now):
            for deadline in list(self._by_grain.get(grain, ())):
                if deadline.grain != grain:  # a callback before this one has changed it
                    continue
                deadline.clear()
                try:
                    deadline.on_passed()
                except Exception as error:  # noqa: BLE001 -- one callback's error must not keep others waiting
                    get_logger().error("a connection whose deadline has passed met a defect", exc_info=error)
