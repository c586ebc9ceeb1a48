"""How many clients the whole cluster has: one counter a forwarder, in memory that all forwarders share.

Each forwarder writes only its own counter and reads all of them, so no lock is needed; a reader may be late by the few
connections that are being accepted at that very moment. The supervisor zeroes the counter of a forwarder that died.

The counters are hints, and no more: for how long a forwarder leaves a new client to the others. No client is refused
because of them, since a forwarder that was taken over can write whatever it likes (proxy.forwarder.listen.admission).
"""

import mmap
import os

from proxy.runtime.shared.memory import create_shared_memory

_COUNTER_BYTES = 8


def create_shared_counters(forwarders: int) -> int:
    """A descriptor of memory for so many counters, all zero; for the supervisor to pass on."""
    return create_shared_memory("connection-counters", forwarders * _COUNTER_BYTES)


class ConnectionCounters:
    """The counters, seen from one process."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._counters = memoryview(mmap.mmap(descriptor, size)).cast("q")

    @property
    def forwarders(self) -> int:
        """How many forwarders there are."""
        return len(self._counters)

    def total_connections(self) -> int:
        """Connections in the whole cluster."""
        return sum(self._counters)

    def is_above_mean(self, forwarder: int) -> bool:
        """Whether a forwarder has more connections than the forwarders have on average."""
        return self._counters[forwarder] * len(self._counters) > sum(self._counters)

    def set_connections(self, forwarder: int, connections: int) -> None:
        """Say how many connections a forwarder has."""
        self._counters[forwarder] = connections
