"""The maximum of the last minutes, for a metric that several Prometheus servers scrape: no scrape resets it."""

from collections import deque

WINDOW_S = 300
SLOTS = 10
_SLOT_S = WINDOW_S / SLOTS


class WindowedMaximum:
    """The largest value of the last WINDOW_S seconds, and of up to one slot (a tenth of that) before.

    Keeps one value for each slot in which there was any: at most SLOTS + 1 of them.
    """

    def __init__(self) -> None:
        self._slots: deque[tuple[int, float]] = deque(maxlen=SLOTS + 1)

    def observe(self, value: float, now_s: float) -> None:
        """Record a value. ``now_s``: seconds of a monotonic clock."""
        slot = int(now_s // _SLOT_S)
        if self._slots and self._slots[-1][0] == slot:
            value = max(value, self._slots.pop()[1])
        self._slots.append((slot, value))

    def value(self, now_s: float) -> float:
        """Return the maximum; 0 where there was no value in the window."""
        first = int(now_s // _SLOT_S) - SLOTS
        return max((value for slot, value in self._slots if slot >= first), default=0.0)
