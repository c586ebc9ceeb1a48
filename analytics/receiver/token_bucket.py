"""A rate limit: a token bucket for all senders together."""

from collections.abc import Callable


class TokenBucket:
    """Token bucket of one second's capacity. A request may overdraw it; then all wait until the debt is repaid.

    So a single request larger than the bucket is accepted, and the long-term rate still holds. A rate of 0 means no
    limit.
    """

    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._level = float(per_second)
        self._at = clock()

    def wait_s(self) -> float:
        """Return the seconds until the next request is allowed; 0 means now."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._level = min(self._per_second, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, -self._level / self._per_second)

    def withdraw(self, amount: int) -> None:
        """Withdraw tokens, even more than there are."""
        if self._per_second:
            self._level -= amount
