"""proxy.forwarder.listen.shares: where all places are taken, the owner with most gives way, down to what it keeps."""

from __future__ import annotations

from functools import partial

import pytest

from proxy.forwarder.listen.shares import KEPT_PARTS, ConnectionShares, Place

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
