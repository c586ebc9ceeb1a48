"""proxy.forwarder.listen.eviction: who may be closed for a newcomer, before authentication and where all places are
taken: the owner with most gives way, down to what it keeps."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.forwarder.listen.eviction import (
    KEPT_PARTS,
    ConnectionShares,
    Place,
    PreAuthConnection,
    PreAuthConnections,
)

# ---- before authentication


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


# ---- of owners

PLACES = 32


@pytest.fixture
def closed() -> list[str]:
    """Names of the connections that gave way, in order."""
    return []


def take(shares: ConnectionShares, owner: str, closed: list[str], count: int = 1) -> list[Place | None]:
    return [shares.take_place(owner, partial(closed.append, f"{owner}{number}")) for number in range(count)]


def test_an_owner_alone_may_take_all_places_and_no_more(closed: list[str]) -> None:
    shares = ConnectionShares(PLACES)
    assert None not in take(shares, "a", closed, PLACES)
    assert take(shares, "a", closed) == [None]
    assert not closed


def test_the_newest_connection_of_the_owner_with_most_gives_way_until_owners_are_equal(closed: list[str]) -> None:
    shares = ConnectionShares(PLACES)
    take(shares, "a", closed, 22)
    take(shares, "b", closed, 10)
    places = take(shares, "c", closed, PLACES)
    assert places.index(None) == 11, "each of them has a third"
    assert closed == [f"a{number}" for number in reversed(range(11, 22))]
    assert take(shares, "b", closed) == [None], "one less is as good as equal"


def test_an_owner_with_an_eighth_of_the_places_keeps_them_however_many_come(closed: list[str]) -> None:
    """Security: a thousand addresses cannot drive one out."""
    shares = ConnectionShares(PLACES)
    take(shares, "a", closed, PLACES)
    for number in range(1000):
        take(shares, f"stranger {number}", closed)
    assert len(closed) == PLACES - PLACES // KEPT_PARTS


def test_a_place_that_is_left_is_free_again_and_left_once(closed: list[str]) -> None:
    shares = ConnectionShares(1)
    place = take(shares, "a", closed)[0]
    assert place is not None
    shares.leave_place(place)
    shares.leave_place(place)
    assert take(shares, "b", closed, 2)[1] is None
    assert not closed


def test_adopted_places_count_and_give_way(closed: list[str]) -> None:
    """A successor has its predecessor's relays, even where they are more than it may have."""
    shares = ConnectionShares(4)
    for number in range(6):
        shares.adopt_place("a", partial(closed.append, str(number)))
    assert not shares.can_make_room("a")
    assert shares.can_make_room("b")
    take(shares, "b", closed)
    assert closed == ["5"]


def test_fewer_places_close_no_connection_by_themselves(closed: list[str]) -> None:
    shares = ConnectionShares(4)
    take(shares, "a", closed, 4)
    shares.resize(2)
    assert not closed
    assert take(shares, "a", closed) == [None]
    assert take(shares, "b", closed) != [None]
