"""Relays whose TLS is in the kernel outlive their forwarders, as those without TLS do: in a guest that has it."""

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
    """No stream was cut, and what the proxy has counted is what they moved."""
    seen = observations[sides]
    assert (seen["errors"], seen["not_whole"]) == ([], []), seen
    assert (seen["kills"] >= KILLS, seen["ways"], seen["adopted"] >= STREAMS) == (True, 2 * STREAMS, True), seen
