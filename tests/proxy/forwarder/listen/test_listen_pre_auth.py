"""proxy.forwarder.listen.pre_auth: who may be closed for a newcomer."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.forwarder.listen.pre_auth import PreAuthConnection, PreAuthConnections


def come(pre_auth: PreAuthConnections, address: str) -> PreAuthConnection:
    connection = PreAuthConnection(pre_auth, address)
    pre_auth.add_connection(connection)
    return connection


def test_the_address_with_most_gives_way_and_of_it_the_oldest() -> None:
    pre_auth = PreAuthConnections()
    come(pre_auth, "a")
    first, second = come(pre_auth, "b"), come(pre_auth, "b")
    assert pre_auth.find_longest_silent() is first
    first.stop_counting()
    assert (pre_auth.count, pre_auth.count_of_address("b")) == (2, 1)
    assert pre_auth.find_longest_silent("b") is second


def test_a_busy_connection_is_not_chosen_for_eviction() -> None:
    pre_auth = PreAuthConnections()
    busy = come(pre_auth, "a")
    busy.mark_busy()
    assert (pre_auth.find_longest_silent(), pre_auth.has_silent, pre_auth.count) == (None, False, 1)
    assert pre_auth.find_longest_silent("a") is None


def test_a_connection_that_was_busy_is_evicted_after_those_that_stayed_silent() -> None:
    pre_auth = PreAuthConnections()
    asked, silent = come(pre_auth, "a"), come(pre_auth, "a")
    asked.mark_busy()
    asked.mark_silent()
    assert pre_auth.find_longest_silent("a") is silent


def test_state_changes_of_a_connection_that_is_not_counted_raise_nothing() -> None:
    connection = PreAuthConnection()
    connection.mark_busy()
    connection.mark_silent()
    connection.stop_counting()
    connection.evict()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "busy", "silent", "known"]))))
def test_counts_and_the_eviction_candidate_match_the_open_connections(steps: list[tuple[str, str]]) -> None:
    pre_auth, there = PreAuthConnections(), dict[PreAuthConnection, bool]()
    for address, step in steps:
        if step == "come":
            there[come(pre_auth, address)] = True
            continue
        one = next((connection for connection in there if connection.address == address), None)
        if one is None:
            continue
        if step == "known":
            one.stop_counting()
            del there[one]
        else:
            getattr(one, f"mark_{step}")()
            there[one] = step == "silent"
        silent = Counter(connection.address for connection, is_silent in there.items() if is_silent)
        assert pre_auth.has_silent == bool(silent)
        victim = pre_auth.find_longest_silent()
        assert (victim is None) == (not silent)
        assert victim is None or silent[victim.address] == max(silent.values())
    assert pre_auth.count == len(there)
    assert not there or pre_auth.count_of_address("a") == sum(connection.address == "a" for connection in there)
