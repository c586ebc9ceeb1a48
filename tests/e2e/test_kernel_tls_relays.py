"""Relays whose TLS is in the kernel, in a guest that has it: they outlive their forwarders, as those without TLS do;
and whatever a client does costs its own relay alone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import NEEDS_USER_MODE_LINUX
from .lab.kernel_tls_relays_guest import KILLS, STREAMS
from .lab.user_mode_linux import run_guest
from .test_oom import GUEST_MEMORY_MIB, IMPORTED, IMPORTED_BY_WORKERS, PATIENCE_S

pytestmark = NEEDS_USER_MODE_LINUX

GUEST = "tests.e2e.lab.kernel_tls_relays_guest"


@pytest.fixture(scope="module")
def observations() -> dict[str, dict[str, Any]]:
    """What the guest has seen, by the sides that use TLS."""
    console = run_guest(
        GUEST, imports=(*IMPORTED, *IMPORTED_BY_WORKERS), memory_mib=GUEST_MEMORY_MIB, timeout_s=PATIENCE_S
    )
    found = [json.loads(line) for line in console.splitlines() if line.startswith("{")]
    assert len(found) == 2, console
    return {one["tls"]: one for one in found}


@pytest.mark.parametrize("sides", ["client", "both"])
def test_streams_are_whole_after_kills_of_their_forwarders_and_an_upgrade(
    observations: dict[str, dict[str, Any]], sides: str
) -> None:
    seen = observations[sides]
    assert (seen["errors"], seen["not_whole"]) == ([], []), seen
    assert (seen["kills"] >= KILLS, seen["ways"], seen["adopted"] >= STREAMS) == (True, 2 * STREAMS, True), seen


@pytest.mark.parametrize("sides", ["client", "both"])
def test_the_status_counts_them(observations: dict[str, dict[str, Any]], sides: str) -> None:
    """In the successor of a forwarder that was killed; the metric, too, for which the guest has waited."""
    expected = {"setting": "required", "forwarders_with": 1, "forwarders_without": 0, "relays": STREAMS}
    assert observations[sides]["status"] == expected


BROKEN = {
    "key update": "a record of type 22 that begins with 1800",
    "fatal alert": "a record of type 21 that begins with 0228",
    "garbage": "the peer does not speak TLS any more",
    "too long": "EMSGSIZE",
    "changed": "EBADMSG",
}


@pytest.mark.parametrize("attack", BROKEN)
def test_what_breaks_tls_ends_its_relay_alone(observations: dict[str, dict[str, Any]], attack: str) -> None:
    """Security: at once, for the broker, too, and with the reason in the log."""
    seen = observations["client"]["attacks"][attack]
    assert (seen["broker"], seen["other"]) == ("end", True)
    assert seen["client"] in {"goodbye, close_notify", ", FIN"}  # after EBADMSG nothing can be sent
    broken = [line for line in observations["client"]["log"].splitlines() if "a relay's TLS is broken" in line]
    assert len(broken) == len(BROKEN)
    assert any(BROKEN[attack] in line and "client=127.0.0.1:" in line for line in broken), broken


def test_an_end_within_a_record(observations: dict[str, dict[str, Any]]) -> None:
    seen = observations["client"]["attacks"]["end within a record"]
    assert seen == {"found": None, "client": "goodbye, close_notify", "broker": "end", "other": True}


def test_many_empty_records_and_then_data(observations: dict[str, dict[str, Any]]) -> None:
    """They are no end, and cost nobody else."""
    seen = observations["client"]["attacks"]["empty records"]
    assert seen == {"found": True, "client": "goodbye, close_notify", "broker": "end", "other": True}


def test_a_client_that_has_ended_its_direction_receives_the_rest(observations: dict[str, dict[str, Any]]) -> None:
    seen = observations["client"]["attacks"]["close_notify"]
    assert seen == {"found": None, "client": "lastgoodbye, close_notify", "broker": "end", "other": True}


def test_bytes_behind_connect(observations: dict[str, dict[str, Any]]) -> None:
    """In its record, and in the next one of the same segment: the guest has checked what came back."""
    seen = observations["client"]["attacks"]["pipelined"]
    assert seen == {"found": None, "client": "goodbye, close_notify", "broker": "end", "other": True}


def test_a_client_that_does_not_read(observations: dict[str, dict[str, Any]]) -> None:
    """Security: the forwarder's memory does not grow with what waits for it."""
    seen = observations["client"]["attacks"]["bulk"]
    assert (seen["broker"], seen["other"], seen["found"]["is_whole"]) == ("end", True, True)
    assert seen["found"]["grown_kib"] < 1024
