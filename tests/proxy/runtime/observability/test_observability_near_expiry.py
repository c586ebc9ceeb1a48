"""proxy.runtime.observability.near_expiry: which sessions /status shows."""

from __future__ import annotations

import json

import msgspec
import pytest

from proxy.runtime.observability.near_expiry import (
    SHOWN_MAX,
    NearExpiry,
    SessionEnd,
    merge_near_expiry,
    summarize_near_expiry,
)

NONE = {"expired_and_idle": 0, "ending_within_60_s": 0, "soonest": []}


def ends(*seconds_left: float) -> list[SessionEnd]:
    return [SessionEnd(left, f"192.0.2.7:{number}", "alice") for number, left in enumerate(seconds_left)]


def test_without_clients_there_is_no_near_expiry() -> None:
    assert summarize_near_expiry([]) == NONE
    assert merge_near_expiry([]) == NONE


@pytest.mark.parametrize(
    ("seconds_left", "expired", "ending"),
    [(-1000.0, 1, 0), (0.0, 1, 0), (0.001, 0, 1), (60.0, 0, 1), (60.001, 0, 0), (float("inf"), 0, 0)],
)
def test_sessions_count_as_expired_or_as_ending_within_60_s(seconds_left: float, expired: int, ending: int) -> None:
    found = summarize_near_expiry(ends(seconds_left))
    assert (found["expired_and_idle"], found["ending_within_60_s"]) == (expired, ending)
    assert len(found["soonest"]) == ending


def test_the_soonest_come_first_and_are_few() -> None:
    """Those that have expired already would hide them: nothing is about to happen to these."""
    found = summarize_near_expiry(ends(*range(59, -60, -1)))
    assert (found["expired_and_idle"], found["ending_within_60_s"]) == (60, 59)
    assert [session["seconds_left"] for session in found["soonest"]] == list(range(1, SHOWN_MAX + 1))
    assert found["soonest"][0] == {"client": "192.0.2.7:58", "principal": "alice", "seconds_left": 1}


def test_as_json() -> None:
    found = json.loads(json.dumps(summarize_near_expiry(ends(12.3456))))
    assert found["soonest"] == [{"client": "192.0.2.7:0", "principal": "alice", "seconds_left": 12.3}]


def test_near_expiries_of_several_forwarders_are_merged_into_one_list() -> None:
    parts = [msgspec.convert(summarize_near_expiry(ends(*range(first, 60, 2), -1)), NearExpiry) for first in (1, 2)]
    found = merge_near_expiry(iter(parts))
    assert (found["expired_and_idle"], found["ending_within_60_s"]) == (2, 59)
    assert [session["seconds_left"] for session in found["soonest"]] == list(range(1, SHOWN_MAX + 1))
