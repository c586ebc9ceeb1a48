"""proxy.supervisor.report and proxy.status_text: sessions that end soon, of all forwarders together."""

from __future__ import annotations

import json
from typing import Any

from test_supervisor_report import Setup

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.status_text import status_text


def near(expired: int, *sessions: tuple[str, str, float]) -> dict[str, Any]:
    soonest = [{"client": client, "principal": who, "seconds_left": left} for client, who, left in sessions]
    return {"expired_and_idle": expired, "ending_within_60_s": len(soonest), "soonest": soonest}


def say(setup: Setup, index: int, status: dict[str, Any]) -> None:
    setup.worker(Role.FORWARDER, index).answers[Method.GET_STATUS] = lambda _request: json.dumps(status)


async def test_forwarders_are_taken_together() -> None:
    setup = Setup()
    say(setup, 0, {"connections": 3, "sessions_near_expiry": near(1, ("c:1", "alice", 12.5), ("c:2", "bob", 40.0))})
    say(setup, 1, {"connections": 2, "sessions_near_expiry": near(2, ("c:3", "", 20.1))})
    status = await setup.report.status()
    assert status["sessions_near_expiry"] == near(3, ("c:1", "alice", 12.5), ("c:3", "", 20.1), ("c:2", "bob", 40.0))
    workers: Any = status["workers"]
    assert [worker["connections"] for worker in workers if worker["role"] == "forwarder"] == [3, 2]
    assert not any("sessions_near_expiry" in worker for worker in workers), "said once"


async def test_forwarders_that_say_nothing_of_it() -> None:
    """One from before an upgrade, one that is being restarted."""
    setup = Setup()
    setup.cluster.of(Role.FORWARDER)[1].worker = None
    status = await setup.report.status()
    assert status["sessions_near_expiry"] == near(0)
    assert "expired" not in status_text(status)


async def test_for_people() -> None:
    setup = Setup()
    say(setup, 0, {"sessions_near_expiry": near(1, ("192.0.2.7:4000", "alice", 12.5), ("192.0.2.8:4000", "", 40.0))})
    lines = status_text(await setup.report.status()).splitlines()
    at = lines.index("  sessions        1 expired and idle, 2 end within 60 s")
    assert lines[at + 1 : at + 3] == [
        "      alice at 192.0.2.7:4000: 12.5 s left",
        "      nobody at 192.0.2.8:4000: 40.0 s left",
    ]


async def test_only_those_that_have_expired() -> None:
    setup = Setup()
    say(setup, 0, {"sessions_near_expiry": near(4)})
    assert "  sessions        4 expired and idle, 0 end within 60 s" in status_text(await setup.report.status())


async def test_a_supervisor_from_before_an_upgrade() -> None:
    status = await Setup().report.status()
    del status["sessions_near_expiry"]
    assert "expired" not in status_text(status)
