"""proxy.supervisor.operators.report and proxy.status_text: sessions that end soon, of all forwarders together."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog.testing
from test_operators_report import Setup

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.status_text import status_text


def near(expired: int, *sessions: tuple[str, str, float]) -> dict[str, Any]:
    soonest = [{"client": client, "principal": who, "seconds_left": left} for client, who, left in sessions]
    return {"expired_and_idle": expired, "ending_within_60_s": len(soonest), "soonest": soonest}


def report(setup: Setup, index: int, status: dict[str, Any]) -> None:
    setup.worker(Role.FORWARDER, index).answers[Method.GET_STATUS] = lambda _request: json.dumps(status)


async def test_forwarders_are_taken_together() -> None:
    setup = Setup()
    report(setup, 0, {"connections": 3, "sessions_near_expiry": near(1, ("c:1", "alice", 12.5), ("c:2", "bob", 40.0))})
    report(setup, 1, {"connections": 2, "sessions_near_expiry": near(2, ("c:3", "", 20.1))})
    status = await setup.report.status()
    assert status["sessions_near_expiry"] == near(3, ("c:1", "alice", 12.5), ("c:3", "", 20.1), ("c:2", "bob", 40.0))
    workers: Any = status["workers"]
    assert [worker["connections"] for worker in workers if worker["role"] == "forwarder"] == [3, 2]
    assert not any("sessions_near_expiry" in worker for worker in workers), "said once"


async def test_forwarders_that_say_nothing_of_it() -> None:
    """One from before an upgrade, one that is being restarted."""
    setup = Setup()
    setup.cluster.slots_of(Role.FORWARDER)[1].worker = None
    status = await setup.report.status()
    assert status["sessions_near_expiry"] == near(0)
    assert "expired" not in status_text(status)


def broken(**parts: Any) -> dict[str, Any]:
    return {**near(1, ("c:1", "mallory", 1.5)), **parts}


@pytest.mark.parametrize(
    "claim",
    [
        5,
        [],
        "text",
        {},
        {"soonest": []},
        broken(expired_and_idle="1"),
        broken(expired_and_idle=-1),
        broken(expired_and_idle=2**63),
        broken(ending_within_60_s=1.5),
        broken(soonest=None),
        broken(soonest=[7]),
        broken(soonest=[{"seconds_left": "soon"}]),
        broken(soonest=[{"client": "c:1", "principal": 7, "seconds_left": 1.0}]),
        broken(soonest=near(0, *[("c:1", "mallory", 1.5)] * 21)["soonest"]),
    ],
)
async def test_a_captured_forwarder_cannot_take_the_status_away(claim: Any) -> None:
    """Security: what makes no sense is left out, and said once; the others' is shown."""
    setup = Setup()
    report(setup, 0, {"connections": 3, "sessions_near_expiry": claim})
    report(setup, 1, {"connections": 2, "sessions_near_expiry": near(2, ("c:3", "alice", 20.1))})
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            status = json.loads(await setup.report.status_json())
    assert status["sessions_near_expiry"] == near(2, ("c:3", "alice", 20.1))
    assert [worker["connections"] for worker in status["workers"] if worker["role"] == "forwarder"] == [3, 2]
    assert [(entry["event"], entry["who"]) for entry in logs] == [
        ("a worker's status is not shown in full", "forwarder-0")
    ]
    assert "mallory" not in str(logs)


async def test_only_forwarders_have_sessions() -> None:
    """Security."""
    setup = Setup()
    claim = {"ready": True, "sessions_near_expiry": near(1, ("c:1", "mallory", 1.5))}
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: json.dumps(claim)
    status = await setup.report.status()
    assert status["sessions_near_expiry"] == near(0)
    assert "mallory" not in str(status)


async def test_for_people() -> None:
    setup = Setup()
    report(setup, 0, {"sessions_near_expiry": near(1, ("192.0.2.7:4000", "alice", 12.5), ("192.0.2.8:4000", "", 40.0))})
    lines = status_text(await setup.report.status()).splitlines()
    at = lines.index("  sessions        1 expired and idle, 2 end within 60 s")
    assert lines[at + 1 : at + 3] == [
        "      alice at 192.0.2.7:4000: 12.5 s left",
        "      nobody at 192.0.2.8:4000: 40.0 s left",
    ]


async def test_only_those_that_have_expired() -> None:
    setup = Setup()
    report(setup, 0, {"sessions_near_expiry": near(4)})
    assert "  sessions        4 expired and idle, 0 end within 60 s" in status_text(await setup.report.status())


async def test_a_supervisor_from_before_an_upgrade() -> None:
    status = await Setup().report.status()
    del status["sessions_near_expiry"]
    assert "expired" not in status_text(status)
