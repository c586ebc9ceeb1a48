"""The judgement of what the steps on a node observe."""

import pytest

from .results import (
    RelayEnds,
    added,
    by_second,
    chosen,
    fleet_faults,
    most_in_one_second,
    spread_fault,
    usage_differences,
)

STEPS = ("install", "clients", "oom")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ["install", "clients", "oom"]),
        (["oom"], ["install", "oom"]),
        (["oom", "clients"], ["install", "clients", "oom"]),  # in the steps' order, not as they are named
        (["install"], ["install"]),
    ],
)
def test_steps_run_in_their_order_after_the_installation(names: list[str], expected: list[str]) -> None:
    assert chosen(names, STEPS) == expected


def test_a_step_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no such step: rolout"):
        chosen(["rolout"], STEPS)


MADE = "[persistent://a/b/fleet-1, p-1] Created producer on broker [10.0.0.1:1 -> 10.0.0.2:2] "
LOST = "[persistent://a/b/fleet-1, p-1] Schedule reconnection in 0.1 s"
CONSUMER = "[persistent://a/b/fleet-1, s, 0] Schedule reconnection in 0.1 s"


def ends(*lines: str) -> RelayEnds:
    """What a log of one line a second tells."""
    found = RelayEnds()
    for second, line in enumerate(lines):
        found.receive_line(line, float(second))
    return found


def test_a_producer_that_loses_its_connection_is_one_end() -> None:
    assert ends(MADE, LOST).moments_s == [1.0]


def test_further_attempts_to_come_back_are_no_further_ends() -> None:
    assert ends(MADE, LOST, LOST, LOST, MADE, LOST).moments_s == [1.0, 5.0]


def test_a_consumer_shares_its_producers_relay() -> None:
    assert ends(MADE, CONSUMER).moments_s == []


def test_producers_are_told_apart() -> None:
    other = LOST.replace("fleet-1", "fleet-2")
    found = ends(MADE, LOST, other)
    assert (found.moments_s, found.away) == ([1.0, 2.0], 2)


def test_a_client_that_has_reconnected_is_not_away() -> None:
    assert ends(MADE, LOST, MADE).away == 0


@pytest.mark.parametrize(
    ("moments_s", "most"),
    [
        ([], 0),
        ([5.0], 1),
        ([0.9, 1.1, 1.8], 3),  # across a whole second's boundary
        ([0.0, 1.0, 2.0], 1),  # a second has no two ends
        ([3.0, 0.1, 0.2, 3.1, 3.2], 3),  # in whatever order
    ],
)
def test_the_fullest_second_begins_anywhere(moments_s: list[float], most: int) -> None:
    assert most_in_one_second(moments_s) == most


def test_seconds_are_listed_in_order() -> None:
    assert by_second([12.5, 10.1, 12.9]) == {10: 1, 12: 2}


def test_a_tenth_in_one_second_is_allowed_and_no_more() -> None:
    assert spread_fault([0.01 * n for n in range(20)], 200) == ""
    assert spread_fault([0.01 * n for n in range(21)], 200) == "21 of 200 relays ended within one second, 20 may"


GOOD = {"sent": 10, "missing": 0, "disordered": 0, "send_failures": 0}


def test_a_good_result_has_no_fault() -> None:
    assert fleet_faults(GOOD) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"sent": 0}, "nothing was sent"),
        ({"missing": 2}, "2 of 10 messages are missing"),
        ({"disordered": 1}, "1 clients saw messages out of order"),
        ({"send_failures": 3}, "3 sends failed"),
    ],
)
def test_each_fault_is_named(change: dict[str, int], fault: str) -> None:
    assert fleet_faults(GOOD | change) == [fault]


def test_equal_bills_do_not_differ() -> None:
    assert usage_differences({"alice": {"bytes_in": 1}}, {"alice": {"bytes_in": 1}}) == []


@pytest.mark.parametrize(
    ("billed", "counted"),
    [
        ({"alice": {"bytes_in": 1}}, {"alice": {"bytes_in": 2}}),
        ({}, {"alice": {"bytes_in": 2}}),
        ({"alice": {"bytes_in": 1}}, {}),
        ({"alice": {"bytes_in": 1}}, {"alice": {"bytes_in": 1, "sessions": 0}}),
    ],
)
def test_every_difference_of_bills_is_told(
    billed: dict[str, dict[str, int]], counted: dict[str, dict[str, int]]
) -> None:
    (difference,) = usage_differences(billed, counted)
    assert difference.startswith("alice ")


def test_pods_add_up() -> None:
    parts = [{"alice": {"sessions": 1}}, {"alice": {"sessions": 2}, "bob": {"sessions": 3}}]
    assert added(parts) == {"alice": {"sessions": 3}, "bob": {"sessions": 3}}
