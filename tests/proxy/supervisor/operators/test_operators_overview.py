"""proxy.supervisor.operators.overview and events: what the page at the admin port shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
from test_operators_report import Setup

from proto.roles import Role
from proto.rpc_pb2 import ConnectionSums, Method, PrincipalSum, Status
from proxy.config.types import Log
from proxy.runtime.observability.logs import configure_logs
from proxy.runtime.rpc.errors import RpcCallRefused
from proxy.supervisor.operators.events import EVENTS_MAX, RecentEvents
from proxy.supervisor.operators.overview import BROKERS_SHOWN_MAX, ClusterOverview
from proxy.supervisor.operators.overview import TEXT_CHARACTERS_MAX as TEXT_MAX

ALICE = ConnectionSums(principals=[PrincipalSum(principal="alice", connections=2)], interval_ms=2000)
OVERVIEW_BYTES_MAX = 256 * 1024


class Page(Setup):
    """A cluster, and its page."""

    def __init__(self) -> None:
        super().__init__(Role.AUTH, Role.LOOKUP, Role.LOOKUP, Role.FORWARDER, Role.FORWARDER)
        self.events = RecentEvents()
        for index in range(2):
            self.worker(Role.FORWARDER, index).answers[Method.SUM_CONNECTIONS] = lambda _request: ALICE

    def tell(self, role: Role, index: int, status: dict[str, Any]) -> None:
        self.worker(role, index).answers[Method.GET_STATUS] = lambda _request: json.dumps(status)

    async def shown(self) -> dict[str, Any]:
        text = await ClusterOverview(self.cluster, self.report, self.events).overview_json()  # type: ignore[arg-type]
        assert b"\n" not in text, "it is one line of an event"
        assert len(text) <= OVERVIEW_BYTES_MAX
        return json.loads(text)  # type: ignore[no-any-return]


async def test_the_overview() -> None:
    page = Page()
    page.tell(Role.FORWARDER, 0, {"connections": 7, "connections_by_state": {"lookup": 7}})
    page.tell(Role.LOOKUP, 0, {"ready": True, "brokers": [{"broker": "b:1", "reachable": True, "detail": "login ok"}]})
    page.tell(Role.LOOKUP, 1, {"ready": True, "brokers": [{"broker": "b:1", "reachable": False, "detail": "refused"}]})
    shown = await page.shown()
    assert (shown["cluster"], shown["ready"], shown["has_rates"]) == ("prod", True, True)
    assert shown["principals"] == [{"principal": "alice", "connections": 4, "to_broker": 0, "to_client": 0}]
    assert shown["brokers"] == [{"broker": "b:1", "reachable": 1, "asked": 2, "detail": "refused"}]
    assert (shown["brokers_known"], shown["brokers_reachable"]) == (1, 0)
    [forwarder] = [one for one in shown["workers"] if one["role"] == "forwarder" and one["worker"] == 0]
    assert forwarder["connections"] == 7
    assert "connections_by_state" not in forwarder, "only what the page shows"


async def test_a_forwarder_that_does_not_know_sums() -> None:
    """During an upgrade one may be of an older version."""
    page = Page()

    def refuse(_request: object) -> ConnectionSums:
        raise RpcCallRefused(Status.UNSUPPORTED_VERSION, "not served here")

    page.worker(Role.FORWARDER).answers[Method.SUM_CONNECTIONS] = refuse
    assert (await page.shown())["principals"][0]["connections"] == 2


async def test_captured_workers_make_it_no_larger() -> None:
    """Security: every viewer gets it every two seconds."""
    page = Page()
    long = "x" * 5_000
    brokers = [{"broker": f"{number}.{long[:400]}", "reachable": False, "detail": long[:800]} for number in range(1000)]
    page.tell(Role.LOOKUP, 0, {"ready": True, "brokers": brokers})
    soonest = [{"client": long, "principal": long, "seconds_left": 1.0}] * 20
    page.tell(Role.AUTH, 0, {"brokers": brokers[:1], "connections": 1e300})
    near = {"expired_and_idle": 0, "ending_within_60_s": 20, "soonest": soonest}
    page.tell(Role.FORWARDER, 0, {"connections": long, "sessions_near_expiry": near})
    shown = await page.shown()
    assert (len(shown["brokers"]), shown["brokers_known"]) == (BROKERS_SHOWN_MAX, 1000)
    assert {one["asked"] for one in shown["brokers"]} == {1}, "lookup workers alone know brokers"
    assert all("connections" not in one for one in shown["workers"]), "what is no number is not summed"
    assert len(shown["sessions"]["soonest"][0]["principal"]) == TEXT_MAX


async def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    """As the log has them: escaped, without what its level leaves out, and without tracebacks."""
    page = Page()
    before = structlog.get_config()
    try:
        configure_logs(Log(format="json"), Role.SUPERVISOR, 0, page.events)
        log = structlog.get_logger()
        log.debug("nobody sees this")
        log.warning("a worker ended", who="auth-0", reason="line\nbreak")
        try:
            raise ValueError("its text is in the traceback")
        except ValueError as error:
            log.error("met a defect", exc_info=error, who="x")
    finally:
        structlog.configure(**before)
    defect, ended = (await page.shown())["events"]
    assert (ended["level"], ended["event"], ended["details"]) == (
        *("warning", "a worker ended"),
        "who: auth-0, reason: line\\nbreak",
    )
    assert ended["at"] == json.loads(capsys.readouterr().err.splitlines()[0])["timestamp"]
    assert defect["details"] == "who: x"


def test_events_are_bounded() -> None:
    """Security."""
    events = RecentEvents()
    for number in range(3 * EVENTS_MAX):
        events(None, "info", {"event": str(number), "level": "info"})
    assert [one["event"] for one in events.latest()] == [str(3 * EVENTS_MAX - 1 - one) for one in range(EVENTS_MAX)]
