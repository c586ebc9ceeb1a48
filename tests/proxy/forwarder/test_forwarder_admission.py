"""proxy.forwarder.admission: limits over the whole cluster and by address."""

import pytest

from proxy.config.types import Limits
from proxy.forwarder.admission import Admission
from proxy.runtime.connection_count import ConnectionCounters, new_shared_counters


@pytest.fixture
def memory() -> int:
    return new_shared_counters(2)


def test_the_limit_is_the_clusters(memory: int) -> None:
    limits = Limits(max_connections=3)
    first = Admission(limits, ConnectionCounters(memory), 0)
    second = Admission(limits, ConnectionCounters(memory), 1)
    first.enter("a")
    first.enter("b")
    assert second.refusal("c") is None
    second.enter("c")
    assert first.refusal("d") == second.refusal("d") == "max_connections"
    second.leave("c")
    assert first.refusal("d") is None
    assert (first.connections, second.connections) == (2, 0)


def test_by_address(memory: int) -> None:
    admission = Admission(Limits(max_connections_per_address=2), ConnectionCounters(memory), 0)
    admission.enter("a")
    admission.enter("a")
    assert admission.refusal("a") == "max_connections_per_address"
    assert admission.refusal("b") is None
    admission.leave("a")
    assert admission.refusal("a") is None


def test_no_limit_by_address_unless_asked_for(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    for _ in range(1000):
        admission.enter("a")
    assert admission.refusal("a") is None


def test_addresses_without_connections_are_forgotten(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    for number in range(100):
        assert admission.refusal(f"address-{number}") is None
        admission.enter(f"address-{number}")
        admission.leave(f"address-{number}")
    assert not admission._by_address


def test_a_new_forwarder_starts_at_zero(memory: int) -> None:
    counters = ConnectionCounters(memory)
    counters.set(0, 99)
    Admission(Limits(), counters, 0)
    assert counters.total() == 0


def test_new_limits_count_from_now_on(memory: int) -> None:
    admission = Admission(Limits(max_connections=10), ConnectionCounters(memory), 0)
    admission.enter("a")
    admission.limits = Limits(max_connections=1)
    assert admission.refusal("b") == "max_connections"


def test_shares(memory: int) -> None:
    first = Admission(Limits(), ConnectionCounters(memory), 0)
    second = Admission(Limits(), ConnectionCounters(memory), 1)
    first.enter("a")
    assert (first.has_more_than_its_share(), second.has_more_than_its_share()) == (True, False)
    second.enter("b")
    assert (first.has_more_than_its_share(), second.has_more_than_its_share()) == (False, False)


def test_one_that_was_retired_leaves_its_place_to_its_successor(memory: int) -> None:
    counters = ConnectionCounters(memory)
    old = Admission(Limits(), counters, 0)
    old.enter("a")
    old.enter("b")
    old.retire()
    new = Admission(Limits(), counters, 0)
    new.enter("c")
    old.leave("a")
    old.enter("d")
    assert counters.total() == 1
    assert (old.connections, new.connections) == (2, 1)
