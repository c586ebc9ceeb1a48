"""A bound on what all senders together may send in a second."""

from collections.abc import Callable


class Rate:
    """A bucket that holds one second's worth. A request may overdraw it once; then all wait until it is paid back.

    So a single request larger than the bucket gets through, and the long-term rate still holds. 0: no limit.
    """

    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._level = float(per_second)
        self._at = clock()

    def wait_s(self) -> float:
        """How long until the next request may come; 0: now."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._level = min(self._per_second, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, -self._level / self._per_second)

    def take(self, amount: int) -> None:
        """Count what has come."""
        if self._per_second:
            self._level -= amount
