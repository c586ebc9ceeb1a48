"""Token buckets by owner, in bounded memory: however many owners come, none gets more than its own bucket would give.

A bucket that has refilled holds no more than a new one, so it may be forgotten; the owners that were idle for longest
have refilled first. Where none of the known owners has, the others share a few buckets by the hash of their names: they
may be limited together, but never get a fresh bucket in place of one that they have emptied.
"""

from hashlib import blake2b
from itertools import islice
from math import inf

OWNERS_MAX = 16_384
SHARED_MAX = 1_024
"""Buckets of owners for which there is no room. Python's hash of a text is seeded at random in each process."""

LOOKED_AT_MAX = 8
"""Idle buckets that are looked at to find a full one."""

NAME_CHARACTERS_MAX = 128
"""Longer names, which clients may choose, are kept as hashes."""


class TokenBucket:
    """One bucket, full at first. Times are in seconds of one clock."""

    __slots__ = ("at", "tokens")

    def __init__(self) -> None:
        self.tokens = inf
        self.at = 0.0


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
            if shared is not None and not self._is_full(shared, now):
                return self._refilled(shared, now)
            self._shared.pop(slot, None)
            if len(self._known) >= self._owners_max and not self._forget_full(now):
                bucket = self._shared[slot] = TokenBucket()
                return self._refilled(bucket, now)
            bucket = TokenBucket()
        self._known[owner] = bucket
        return self._refilled(bucket, now)

    def _forget_full(self, now: float) -> bool:
        """Forget a full bucket, of those that were idle for longest; return whether there was one."""
        for owner in islice(self._known, LOOKED_AT_MAX):
            if self._is_full(self._known[owner], now):
                del self._known[owner]
                return True
        return False

    def _is_full(self, bucket: TokenBucket, now: float) -> bool:
        return self._refilled(bucket, now).tokens >= self._capacity

    def _refilled(self, bucket: TokenBucket, now: float) -> TokenBucket:
        bucket.tokens = min(self._capacity, bucket.tokens + (now - bucket.at) * self._rate_per_s)
        bucket.at = now
        return bucket
