"""proxy.forwarder.workers.relay_outcomes: which brokers are reported as outliers, and the bounds of what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from proto.addresses import HostPort
from proto.broker_handshake import Refused
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import Method, ReportOutlierRequest, ResolveTargetResponse
from proxy.forwarder.workers import relay_outcomes
from proxy.forwarder.workers.relay_outcomes import EARLY_S, ERROR_CHARACTERS_MAX, WINDOW_S, RelayOutcomes
from proxy.runtime.network.broker_link import (
    BrokerLinkFailed,
    broken_off,
    not_reached,
    refused_by,
    too_slow,
    without_credentials,
)
from proxy.runtime.rpc.errors import RpcDeadlineExceeded
from proxy.runtime.rpc.pool import RpcPool

B0 = HostPort("b0", 6650)
RESET = "the broker broke off the relay"


def target(*addresses: str, port: int = 6650) -> ResolveTargetResponse:
    return ResolveTargetResponse(host="b0", port=port, addresses=addresses or ("10.0.0.1",))


class FakeLookup:
    """All lookup workers, which note what they are told."""

    def __init__(self) -> None:
        self.reports: list[ReportOutlierRequest] = []

    def notify_all(self, method: int, request: ReportOutlierRequest, *, timeout_s: float) -> None:
        assert (method, timeout_s) == (Method.REPORT_OUTLIER, 1.0)
        self.reports.append(request)


class Counted:
    """Outcomes under test."""

    def __init__(self) -> None:
        self.lookup = FakeLookup()
        self.real = RelayOutcomes(self.lookup)  # type: ignore[arg-type]

    def good(self, *owners: str) -> None:
        for owner in owners:
            self.real.record_link(target(), owner)

    def reset(self, *owners: str, where: ResolveTargetResponse | None = None) -> None:
        """Have the broker end a relay of each of these owners at once."""
        for owner in owners:
            self.real.record_link(where or target(), owner)(RESET)

    def fail(self, failed: BrokerLinkFailed, *owners: str) -> None:
        for owner in owners:
            self.real.record_failure(target(), owner, failed)

    def judged(self) -> list[tuple[int, int]]:
        """Owners failing, and owners, of each report at the end of this window."""
        self.lookup.reports.clear()
        self.real.judge_window()
        return [(report.owners_failing, report.owners) for report in self.lookup.reports]


async def test_a_broker_that_fails_relays_of_three_owners_and_a_half_is_reported() -> None:
    counted = Counted()
    counted.good("a", "b", "c")
    counted.reset("d", "e", "f")
    assert counted.judged() == [(3, 6)]
    [report] = counted.lookup.reports
    assert report == ReportOutlierRequest(
        addresses=["10.0.0.1"], port=6650, owners=6, owners_failing=3, last_error=RESET, window_ms=int(WINDOW_S * 1000)
    )
    assert counted.judged() == [], "the next window begins with nothing"


async def test_two_owners_are_too_few_however_many_relays_they_have() -> None:
    counted = Counted()
    counted.reset(*["a", "b"] * 500)
    assert counted.judged() == []


async def test_hostile_owners_among_as_many_good_ones_and_one_more_eject_no_broker() -> None:
    counted = Counted()
    counted.reset(*["x", "y", "z"] * 100)
    counted.good("a", "b", "c", "d")
    assert counted.judged() == []


async def test_an_owner_of_whom_most_relays_go_well_does_not_fail() -> None:
    counted = Counted()
    counted.good(*["a", "b", "c"] * 2)
    counted.reset("a", "b", "c")
    assert counted.judged() == []
    counted.good("a", "b", "c")
    counted.reset("a", "b", "c")
    assert counted.judged() == [(3, 3)]


async def test_hostile_owners_who_are_the_first_of_a_window_must_wait_for_the_others() -> None:
    counted = Counted()
    counted.reset("x", "y", "z")
    assert counted.lookup.reports == []
    counted.good("a", "b", "c", "d")
    assert counted.judged() == []


async def test_each_window_is_evaluated_by_itself(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    counted = Counted()
    nursery.start_soon(counted.real.run)
    await trio.testing.wait_all_tasks_blocked()
    counted.reset("a", "b")
    await trio.sleep(WINDOW_S + 0.1)
    counted.reset("c")
    await trio.sleep(WINDOW_S)
    assert counted.lookup.reports == [], "not three in one window"
    counted.reset("a", "b", "c")
    await trio.sleep(WINDOW_S)
    assert [report.owners for report in counted.lookup.reports] == [3]


async def test_an_end_is_early_for_so_long_and_no_longer(autojump_clock: trio.testing.MockClock) -> None:
    counted = Counted()
    ends = [counted.real.record_link(target(), owner) for owner in ("a", "b", "c")]
    await trio.sleep(EARLY_S)
    for end in ends[:2]:
        end(RESET)
    await trio.sleep(0.1)
    ends[2](RESET)
    counted.reset("d")
    assert counted.judged() == [(3, 4)]
    ends = [counted.real.record_link(target(), owner) for owner in ("a", "b", "c")]
    await trio.sleep(EARLY_S + 0.1)
    for end in ends:
        end(RESET)
    assert counted.judged() == []


async def test_an_early_end_counts_in_the_window_in_which_it_comes() -> None:
    counted = Counted()
    ends = [counted.real.record_link(target(), owner) for owner in ("a", "b", "c")]
    assert counted.judged() == []
    for end in ends:
        end(RESET)
    assert counted.judged() == [(3, 3)]


REFUSED_FOR_NOW = refused_by(B0, Refused(ServerError.ServiceNotReady, "starting"))
FAILURES: dict[str, tuple[BrokerLinkFailed, bool]] = {
    "unreachable": (not_reached(B0, "unreachable", "10.0.0.1: Connection refused"), True),
    "tls": (not_reached(B0, "tls", "10.0.0.1: no"), True),
    "too slow": (too_slow(B0, 8.0), True),
    "broken off": (broken_off(B0, ConnectionResetError("reset")), True),
    "refused for now": (REFUSED_FOR_NOW, True),
    "the client's credentials": (refused_by(B0, Refused(ServerError.AuthorizationError, "no")), False),
    "the proxy's credentials": (refused_by(B0, Refused(ServerError.AuthenticationError, "no")), False),
    "no credentials": (without_credentials(B0, RpcDeadlineExceeded("no answer")), False),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_what_of_a_handshake_is_the_brokers_fault(name: str) -> None:
    failed, is_brokers = FAILURES[name]
    counted = Counted()
    counted.fail(failed, "a", "b", "c")
    assert counted.judged() == ([(3, 3)] if is_brokers else [])
    assert [report.last_error for report in counted.lookup.reports] == [str(failed)] * is_brokers


async def test_brokers_are_told_apart_by_where_they_are_dialled() -> None:
    counted = Counted()
    one, same, other = target("10.0.0.1", "fd00::1"), target("fd00::1", "10.0.0.1"), target("10.0.0.1", port=6651)
    same.host = "another-name"
    counted.reset("a", "b", where=one)
    counted.reset("c", where=same)
    counted.reset("d", "e", where=other)
    assert counted.judged() == [(3, 3)]


async def test_what_is_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_outcomes, "BROKERS_MAX", 2)
    monkeypatch.setattr(relay_outcomes, "OWNERS_MAX", 4)
    counted = Counted()
    for number in range(5):
        counted.reset(*"abcdefg", where=target(port=number + 1))
    assert counted.judged() == [(4, 4)] * 2


async def test_a_long_error_is_cut() -> None:
    counted = Counted()
    counted.fail(broken_off(B0, ValueError("x" * 10_000)), "a", "b", "c")
    assert counted.judged() == [(3, 3)]
    assert len(counted.lookup.reports[0].last_error) == ERROR_CHARACTERS_MAX


async def test_all_workers_are_notified() -> None:
    class FakeClient:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def send_notification(self, *args: Any, timeout_s: float) -> None:
            self.got.append((*args, timeout_s))

    clients = [FakeClient(), FakeClient()]
    request = ReportOutlierRequest(port=1)
    RpcPool(clients).notify_all(Method.REPORT_OUTLIER, request, timeout_s=2.0)  # type: ignore[arg-type]
    assert [client.got for client in clients] == [[(Method.REPORT_OUTLIER, request, 2.0)]] * 2
