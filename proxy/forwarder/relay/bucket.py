"""The bucket of tokens by which an owner's bytes a second are limited (proxy.forwarder.relay.turns)."""

BURST_S = 1.0
"""What a bucket holds, in seconds of its rate."""


class Bucket:
    """The tokens of one owner for one way, one for each byte; ``full_at``: when it is, or was, full again."""

    __slots__ = ("full_at", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.full_at = now

    def take(self, size: int, now: float) -> float:
        """Take tokens; return after how many seconds there are any, 0 if there are some left."""
        self.full_at = max(self.full_at, now) + size / self.rate
        return max(0.0, self.full_at - now - BURST_S)
