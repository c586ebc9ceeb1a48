"""proxy.forwarder.listen.admission: limits over the whole cluster, by address, and on those who have not
authenticated."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxy.config.types import Limits
from proxy.forwarder.listen.admission import PRE_AUTH_CONNECTIONS_MIN, Admission, AdmittedConnection, Refusal
from proxy.runtime.shared.address_tables import AddressTables
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_shared_counters(2)
    yield descriptor
    os.close(descriptor)


def known(admission: Admission, address: str) -> AdmittedConnection:
    """A client that has authenticated."""
    place = admission.admit_client(address)
    place.stop_counting()
    return place


def silent(admission: Admission, address: str, evicted: list[str]) -> AdmittedConnection:
    place = admission.admit_client(address)
    place.evict = lambda: evicted.append(address)
    return place


def test_the_limit_is_the_clusters(memory: int) -> None:
    """Each forwarder has its part; where one is full, another has room."""
    limits = Limits(max_connections=3)
    first = Admission(limits, ConnectionCounters(memory), 0)
    second = Admission(limits, ConnectionCounters(memory), 1)
    known(first, "a")
    place = known(first, "b")
    assert second.check_admission("c") is None
    assert (first.check_admission("c"), first.is_full(), first.others_have_room()) == (
        Refusal.MAX_CONNECTIONS,
        True,
        True,
    )
    known(second, "c")
    assert first.check_admission("d") == second.check_admission("d") == "max_connections"
    assert (second.is_full(), second.others_have_room()) == (True, False)
    place.release()
    assert first.check_admission("d") is None
    assert (first.connections, second.connections) == (1, 1)


@pytest.mark.parametrize("lie", [2**62, -(2**62)])
def test_counters_of_a_captured_forwarder_refuse_no_client(memory: int, lie: int) -> None:
    """Security: every counter is in memory that every forwarder can write."""
    counters = ConnectionCounters(memory)
    admission = Admission(Limits(max_connections=10), counters, 0)
    for forwarder in (0, 1):
        counters.set_connections(forwarder, lie)
    assert admission.check_admission("a") is None
    for _ in range(5):
        known(admission, "a")
    assert admission.check_admission("a") == "max_connections", "nor does it admit any client"


def test_a_place_is_left_once(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    place = admission.admit_client("a")
    place.release()
    place.release()
    assert admission.connections == 0


def test_a_relay_stays_counted_when_its_session_is_over(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    place = admission.admit_client("a")
    place.on_relay_started()
    place.release()
    assert admission.connections == 1
    admission.release_client("a")
    assert admission.connections == 0


def test_by_address(memory: int) -> None:
    admission = Admission(Limits(max_connections_per_address=2), ConnectionCounters(memory), 0)
    admission.admit_client("a")
    place = admission.admit_client("a")
    assert admission.check_admission("a") == "max_connections_per_address"
    assert admission.check_admission("b") is None
    place.release()
    assert admission.check_admission("a") is None


def test_a_network_of_ipv6_is_one_address(memory: int) -> None:
    admission = Admission(Limits(max_connections_per_address=1), ConnectionCounters(memory), 0)
    admission.admit_client("2001:db8::1")
    assert admission.check_admission("2001:db8::2") == "max_connections_per_address"
    assert admission.check_admission("2001:db8:0:1::1") is None
    admission.release_client("2001:db8::1")
    assert not admission._by_address


async def test_by_address_in_the_whole_cluster(memory: int) -> None:
    limits = Limits(max_connections_per_address=2)
    tables = [AddressTables(), AddressTables()]
    admissions = [Admission(limits, ConnectionCounters(memory), number, tables[number]) for number in range(2)]
    tables[0].start_publishing(lambda table: tables[1].read_table(0, table))
    tables[1].start_publishing(lambda table: tables[0].read_table(1, table))
    places = [admission.admit_client("192.0.2.1") for admission in admissions]
    assert [admission.check_admission("192.0.2.1") for admission in admissions] == ["max_connections_per_address"] * 2
    assert [admission.check_admission("192.0.2.2") for admission in admissions] == [None] * 2
    places[0].release()
    assert [admission.check_admission("192.0.2.1") for admission in admissions] == [None] * 2


async def test_a_limit_by_address_that_is_set_later_counts_those_who_are_there(memory: int) -> None:
    tables = [AddressTables(), AddressTables()]
    counters = ConnectionCounters(memory)
    one, other = (Admission(Limits(), counters, number, tables[number]) for number in range(2))
    tables[0].start_publishing(lambda table: tables[1].read_table(0, table))
    one.admit_client("192.0.2.1")
    one.limits = other.limits = Limits(max_connections_per_address=1)
    assert other.check_admission("192.0.2.1") == "max_connections_per_address"


def test_no_limit_by_address_unless_asked_for(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    for _ in range(1000):
        known(admission, "a")
    assert admission.check_admission("a") is None


def test_addresses_without_connections_are_forgotten(memory: int) -> None:
    admission = Admission(Limits(), ConnectionCounters(memory), 0)
    for number in range(100):
        assert admission.check_admission(f"address-{number}") is None
        admission.admit_client(f"address-{number}").release()
    assert not admission._by_address


def test_a_new_forwarder_starts_at_zero(memory: int) -> None:
    counters = ConnectionCounters(memory)
    counters.set_connections(0, 99)
    Admission(Limits(), counters, 0)
    assert counters.total_connections() == 0


def test_new_limits_count_from_now_on(memory: int) -> None:
    admission = Admission(Limits(max_connections=10), ConnectionCounters(memory), 0)
    known(admission, "a")
    admission.limits = Limits(max_connections=2)
    assert admission.check_admission("b") == "max_connections"


def test_shares(memory: int) -> None:
    first = Admission(Limits(), ConnectionCounters(memory), 0)
    second = Admission(Limits(), ConnectionCounters(memory), 1)
    first.admit_client("a")
    assert (first.has_more_than_its_share(), second.has_more_than_its_share()) == (True, False)
    second.admit_client("b")
    assert (first.has_more_than_its_share(), second.has_more_than_its_share()) == (False, False)


def test_a_retired_admission_leaves_the_shared_counters_to_its_successor(memory: int) -> None:
    counters = ConnectionCounters(memory)
    old = Admission(Limits(), counters, 0)
    place = old.admit_client("a")
    old.admit_client("b")
    old.retire_counters()
    new = Admission(Limits(), counters, 0)
    new.admit_client("c")
    place.release()
    old.admit_client("d")
    assert counters.total_connections() == 1
    assert (old.connections, new.connections) == (2, 1)


# ---- connections that have not authenticated


def test_a_quarter_is_theirs_and_half_of_that_one_addresss(memory: int) -> None:
    admission = Admission(Limits(max_connections=800), ConnectionCounters(memory), 0)
    assert (admission._pre_auth_max, admission._pre_auth_of_address_max) == (100, 50)
    admission.limits = Limits(max_connections=800, max_unauthenticated_connections=20)
    assert (admission._pre_auth_max, admission._pre_auth_of_address_max) == (10, 5)
    admission.limits = Limits(max_connections=3)
    assert admission._pre_auth_max == PRE_AUTH_CONNECTIONS_MIN, "of a small cluster a quarter is nothing"


def test_the_longest_silent_of_an_address_gives_way_to_its_next(memory: int) -> None:
    """So a load balancer's clients, who all have one address, come in however many say nothing."""
    admission = Admission(Limits(max_unauthenticated_connections=8), ConnectionCounters(memory), 0)
    evicted: list[str] = []
    for _ in range(100):
        assert admission.check_admission("a") is None
        silent(admission, "a", evicted)
    assert (admission.connections, len(evicted)) == (2, 98)


def test_the_address_with_most_silent_ones_is_evicted_to_another(memory: int) -> None:
    admission = Admission(Limits(max_unauthenticated_connections=16), ConnectionCounters(memory), 0)
    evicted: list[str] = []
    for address in ("a", "a", "a", "b", "b", "c", "d", "e"):
        assert admission.check_admission(address) is None
        silent(admission, address, evicted)
    assert admission.check_admission("f") is None
    assert evicted == ["a"]


def test_silent_ones_are_evicted_where_the_forwarder_is_full(memory: int) -> None:
    admission = Admission(Limits(max_connections=20), ConnectionCounters(memory), 0)
    evicted: list[str] = []
    for _ in range(9):
        known(admission, "user")
    silent(admission, "a", evicted)
    assert not admission.is_full()
    assert admission.check_admission("b") is None
    assert (evicted, admission.connections) == (["a"], 9)
    known(admission, "b")
    assert admission.is_full()
    assert admission.check_admission("c") == "max_connections"


def test_busy_connections_are_not_evicted(memory: int) -> None:
    admission = Admission(Limits(max_unauthenticated_connections=8), ConnectionCounters(memory), 0)
    evicted: list[str] = []
    for address in ("a", "a", "b", "c"):
        assert not admission.is_busy()
        silent(admission, address, evicted).mark_busy()
    assert admission.is_busy()
    assert admission.check_admission("a") == admission.check_admission("d") == "max_unauthenticated_connections"
    assert evicted == []


def test_an_address_with_its_share_of_busy_connections_is_refused_and_another_is_admitted(memory: int) -> None:
    admission = Admission(Limits(max_unauthenticated_connections=8), ConnectionCounters(memory), 0)
    for _ in range(2):
        assert admission.check_admission("a") is None
        admission.admit_client("a").mark_busy()
    assert admission.check_admission("a") == "max_unauthenticated_connections"
    assert admission.check_admission("b") is None
