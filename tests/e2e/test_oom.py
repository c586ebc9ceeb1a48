"""A container's memory runs out in a hierarchy of cgroups of version 2: what the kernel ends, and what goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import NEEDS_USER_MODE_LINUX
from .lab import oom_guest
from .lab.user_mode_linux import run_guest

pytestmark = NEEDS_USER_MODE_LINUX

GUEST = "tests.e2e.lab.oom_guest"
GUEST_MEMORY_MIB = 1024
PATIENCE_S = 900.0
IMPORTED = ("proxy.cli", "proxy.supervisor.main", "proxy.forwarder.service", "proxy.admin.service")
IMPORTED_BY_WORKERS = ("auth.service", "lookup.service")


@pytest.fixture(scope="module")
def observations() -> list[dict[str, Any]]:
    """What the guest has seen, with memory.oom.group 0 and 1."""
    console = run_guest(
        GUEST, imports=(*IMPORTED, *IMPORTED_BY_WORKERS), memory_mib=GUEST_MEMORY_MIB, timeout_s=PATIENCE_S
    )
    found = [json.loads(line) for line in console.splitlines() if line.startswith("{")]
    assert len(found) == 2, console
    return found


def test_the_cluster_plans_with_the_limit(observations: list[dict[str, Any]]) -> None:
    assert f"memory_limit_mib={oom_guest.MEMORY_MIB} " in observations[0]["plan"]


def test_a_worker_alone_ends_where_the_kubelet_allows_it(observations: list[dict[str, Any]]) -> None:
    seen = observations[0]
    assert (seen["oom_kill"], seen["oom_group_kill"]) == (1, 0)
    assert seen["workers_replaced"] == 1
    assert seen["living_relays"] == oom_guest.RELAYS


def test_all_processes_end_together_where_it_does_not(observations: list[dict[str, Any]]) -> None:
    """As is the kubelet's default; the container is then restarted."""
    seen = observations[1]
    assert seen["supervisor_code"] == -9
    assert seen["oom_group_kill"] == 1
    assert seen["oom_kill"] > oom_guest.WORKERS
    assert seen["living_relays"] == 0
