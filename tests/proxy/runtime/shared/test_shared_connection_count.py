"""proxy.runtime.shared.connection_count: counters in shared memory."""

from __future__ import annotations

import os

from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters


def test_counters_are_shared() -> None:
    descriptor = create_shared_counters(3)
    one, other = ConnectionCounters(descriptor), ConnectionCounters(os.dup(descriptor))
    assert one.total_connections() == 0
    one.set_connections(0, 5)
    other.set_connections(2, 7)
    assert one.total_connections() == other.total_connections() == 12
    one.set_connections(0, 0)
    assert other.total_connections() == 7
    assert not os.get_inheritable(descriptor)


def test_a_forwarder_with_more_connections_than_the_mean_is_above_it() -> None:
    counters = ConnectionCounters(create_shared_counters(3))
    assert not any(counters.is_above_mean(number) for number in range(3))
    counters.set_connections(0, 2)
    counters.set_connections(1, 1)
    assert [counters.is_above_mean(number) for number in range(3)] == [True, False, False]
    counters.set_connections(2, 3)
    assert [counters.is_above_mean(number) for number in range(3)] == [False, False, True]
