"""Counters of the cluster's connections: one for each forwarder, in memory that all forwarders share.

Each forwarder writes only its own counter and reads all of them, so no lock is needed; a reader may be late by the few
connections that are being accepted at that very moment. The supervisor zeroes the counter of a forwarder that died.

The counters are hints, and no more: for how long a forwarder leaves a new client to the others. No client is refused
because of them, since a compromised forwarder can write whatever it likes (proxy.forwarder.listen.admission).
"""

import mmap
import os

from proxy.runtime.shared.memory import create_shared_memory

_COUNTER_BYTES = 8

SLACK_PART = 8
"""The part of the mean by which a forwarder may have more clients before it leaves new ones to the others, which takes
time: where many come and go, one of two forwarders always has a few more. Of few clients it has none more.
"""


def create_shared_counters(forwarders: int) -> int:
    """Create memory for the counters of ``forwarders``, all zero; return its descriptor, for the supervisor to pass."""
    return create_shared_memory("connection-counters", forwarders * _COUNTER_BYTES)


class ConnectionCounters:
    """The counters as one process uses them."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._counters = memoryview(mmap.mmap(descriptor, size)).cast("q")

    @property
    def forwarders(self) -> int:
        """The number of forwarders."""
        return len(self._counters)

    def total_connections(self) -> int:
        """Return the number of connections in the whole cluster."""
        return sum(self._counters)

    def is_above_mean(self, forwarder: int) -> bool:
        """Return whether a forwarder has more connections than the forwarders have on average, by 1 in SLACK_PART."""
        total = sum(self._counters)
        return self._counters[forwarder] * len(self._counters) > total + total // SLACK_PART

    def set_connections(self, forwarder: int, connections: int) -> None:
        """Set the number of a forwarder's connections."""
        self._counters[forwarder] = connections
