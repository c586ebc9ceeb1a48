"""proxy.forwarder.listen.pre_auth: who may be closed for a newcomer."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.forwarder.listen.pre_auth import PreAuthConnection, PreAuthConnections


def come(strangers: PreAuthConnections, address: str) -> PreAuthConnection:
    stranger = PreAuthConnection(strangers, address)
    strangers.add_connection(stranger)
    return stranger


def test_the_address_with_most_gives_way_and_of_it_the_oldest() -> None:
    strangers = PreAuthConnections()
    come(strangers, "a")
    first, second = come(strangers, "b"), come(strangers, "b")
    assert strangers.find_longest_silent() is first
    first.stop_counting()
    assert (strangers.count, strangers.count_of_address("b")) == (2, 1)
    assert strangers.find_longest_silent("b") is second


def test_one_that_is_served_is_not_closed() -> None:
    strangers = PreAuthConnections()
    busy = come(strangers, "a")
    busy.mark_busy()
    assert (strangers.find_longest_silent(), strangers.has_silent, strangers.count) == (None, False, 1)
    assert strangers.find_longest_silent("a") is None


def test_one_that_was_served_stands_behind_those_that_said_nothing_meanwhile() -> None:
    strangers = PreAuthConnections()
    asked, silent = come(strangers, "a"), come(strangers, "a")
    asked.mark_busy()
    asked.mark_silent()
    assert strangers.find_longest_silent("a") is silent


def test_one_that_is_counted_nowhere() -> None:
    stranger = PreAuthConnection()
    stranger.mark_busy()
    stranger.mark_silent()
    stranger.stop_counting()
    stranger.evict()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "busy", "silent", "known"]))))
def test_what_is_counted_is_what_is_there(steps: list[tuple[str, str]]) -> None:
    strangers, there = PreAuthConnections(), dict[PreAuthConnection, bool]()
    for address, step in steps:
        if step == "come":
            there[come(strangers, address)] = True
            continue
        one = next((stranger for stranger in there if stranger.address == address), None)
        if one is None:
            continue
        if step == "known":
            one.stop_counting()
            del there[one]
        else:
            getattr(one, f"mark_{step}")()
            there[one] = step == "silent"
        silent = Counter(stranger.address for stranger, is_silent in there.items() if is_silent)
        assert strangers.has_silent == bool(silent)
        victim = strangers.find_longest_silent()
        assert (victim is None) == (not silent)
        assert victim is None or silent[victim.address] == max(silent.values())
    assert strangers.count == len(there)
    assert not there or strangers.count_of_address("a") == sum(stranger.address == "a" for stranger in there)
