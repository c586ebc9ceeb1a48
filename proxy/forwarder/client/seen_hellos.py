"""The ClientHellos that a forwarder has passed on lately: one that comes again has gone in a circle.

A hello holds 32 random bytes (RFC 8446, 4.1.2), and no client sends it twice. Proxies cannot tell each other how many
it has passed, as they do elsewhere, since not a byte of it may change.
"""

SEEN_MAX = 4096
"""Whoever sends so many while one goes round once has it forgotten; then limits on connections end the circle."""


class SeenHellos:
    """The last SEEN_MAX hellos, as hashes."""

    def __init__(self) -> None:
        self._seen: dict[int, None] = {}

    def add(self, hello: bytes) -> bool:
        """Remember a hello; return whether it is a new one."""
        key = hash(hello)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        return True
