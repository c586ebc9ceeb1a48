"""Token buckets, one or by owner in bounded memory: however many owners come, none gets more than its own would give.

A bucket that has refilled holds no more than a new one, so it may be forgotten; the owners that were idle for longest
have refilled first. Where none of the known owners has, the others share a few buckets by the hash of their names: they
may be limited together, but never get a fresh bucket in place of one that they have emptied.
"""

from hashlib import blake2b
from itertools import islice

OWNERS_MAX = 16_384
SHARED_MAX = 1_024
"""Buckets of owners for which there is no room. Python's hash of a text is seeded at random in each process."""

LOOKED_AT_MAX = 8
"""Idle buckets that are looked at to find a full one."""

NAME_CHARACTERS_MAX = 128
"""Longer names, which clients may choose, are kept as hashes."""


class TokenBucket:
    """One bucket, full at first, that refills up to ``capacity`` tokens. Times are in seconds of one clock."""

    __slots__ = ("_at", "_capacity", "_rate_per_s", "tokens")

    def __init__(self, rate_per_s: float, capacity: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = self.tokens = capacity
        self._at = now

    def refill(self, now: float) -> None:
        """Add the tokens that have come."""
        self.tokens = min(self._capacity, self.tokens + (now - self._at) * self._rate_per_s)
        self._at = now

    def is_full(self, now: float) -> bool:
        """Refill; return whether the bucket is as a new one."""
        self.refill(now)
        return self.tokens >= self._capacity

    def charge(self, tokens: float, now: float) -> float:
        """Refill, and take tokens, whether there are that many or not; return the seconds until none is owed."""
        self.refill(now)
        self.tokens -= tokens
        return max(0.0, -self.tokens / self._rate_per_s)


class TokenBuckets:
    """Buckets that refill by ``rate_per_s`` up to ``capacity`` tokens, at least one."""

    def __init__(
        self, rate_per_s: float, capacity: float, *, owners_max: int = OWNERS_MAX, shared_max: int = SHARED_MAX
    ) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = max(1.0, capacity)
        self._owners_max = owners_max
        self._shared_max = shared_max
        self._known: dict[str, TokenBucket] = {}  # the one that was used last is last
        self._shared: dict[int, TokenBucket] = {}

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._known) + len(self._shared)

    def bucket_of(self, owner: str, now: float) -> TokenBucket:
        """Return the bucket that counts for an owner at this moment, refilled."""
        if len(owner) > NAME_CHARACTERS_MAX:
            owner = blake2b(owner.encode(errors="surrogatepass")).hexdigest()
        bucket = self._known.pop(owner, None)
        if bucket is None:
            slot = hash(owner) % self._shared_max
            shared = self._shared.get(slot)
            if shared is not None and not shared.is_full(now):
                return shared
            self._shared.pop(slot, None)
            bucket = TokenBucket(self._rate_per_s, self._capacity, now)
            if len(self._known) >= self._owners_max and not self._forget_full(now):
                self._shared[slot] = bucket
                return bucket
        bucket.refill(now)
        self._known[owner] = bucket
        return bucket

    def _forget_full(self, now: float) -> bool:
        """Forget a full bucket, of those that were idle for longest; return whether there was one."""
        for owner in islice(self._known, LOOKED_AT_MAX):
            if self._known[owner].is_full(now):
                del self._known[owner]
                return True
        return False
