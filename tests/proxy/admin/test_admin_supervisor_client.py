"""proxy.admin.supervisor_client and proxy.supervisor.operators.admin_channel: both ends of the line on which the
admin worker
asks."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from proto.roles import MAY_CALL, Role
from proto.rpc_pb2 import Empty, Method, Place, Reasons, Text
from proxy.admin.supervisor_client import (
    GONE_TIMEOUT_S,
    HEALTH_INTERVAL_S,
    SILENCE_S_MAX,
    ChannelLost,
    SupervisorClient,
)
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.rpc.errors import RpcCallRefused
from proxy.runtime.rpc.peers import Caller
from proxy.supervisor.operators.admin_channel import CONCURRENT_CALLS_MAX, REPORT_INTERVAL_S, AdminChannel
from proxy.supervisor.operators.report import MetricsTooLarge

FORWARDER = ProcessIdentity("forwarder", 1)
LEAVING = ProcessIdentity("forwarder", 1, leaving_pid=4711)


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


class FakeReport:
    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.asked: list[Any] = []

    async def readiness(self) -> Reasons:
        self.asked.append("readiness")
        await self.gate.wait()
        return Reasons(reasons=["draining"], notes=["clients by tls: no"])

    async def status_json(self) -> bytes:
        self.asked.append("status")
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        return b'{"cluster":"prod"}'

    async def overview_json(self) -> bytes:
        self.asked.append("overview")
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        return b'{"cluster":"page"}'

    def places(self) -> list[ProcessIdentity]:
        return [ProcessIdentity("supervisor", 0), ProcessIdentity("auth", 0), FORWARDER, LEAVING]

    async def metrics(self, place: ProcessIdentity) -> str:
        self.asked.append(place)
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        if place.role == "auth":
            raise MetricsTooLarge("auth-0 writes more than it may")
        return "g 1.0\n"


class Setup:
    """Both ends, over a real pair of sockets: a descriptor is passed, so no stream in memory will do."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.port = socket.socket()
        self.port.bind(("127.0.0.1", 0))
        self.port.listen(1)
        self.report = FakeReport()
        self.line = AdminChannel(self.report, self.report, self.port.fileno)  # type: ignore[arg-type]
        self.questions = SupervisorClient(theirs.detach())
        self.ended = trio.Event()
        self.worker = SimpleNamespace(questions_socket=self.ours, pid=77, wait=self.ended.wait)
        self.served = trio.Event()

    async def serve(self) -> None:
        await self.line.serve(self.worker)  # type: ignore[arg-type]
        self.served.set()


@pytest.fixture
async def setup(nursery: trio.Nursery) -> AsyncIterator[Setup]:
    setup = Setup()
    nursery.start_soon(setup.serve)
    yield setup
    setup.ended.set()
    await setup.served.wait()
    setup.port.close()
    setup.questions._socket.close()


@pytest.fixture
async def questions(setup: Setup, nursery: trio.Nursery) -> SupervisorClient:
    listener = await setup.questions.receive_listener()
    assert same_file(listener.socket.fileno(), setup.port.fileno())
    await listener.aclose()
    nursery.start_soon(setup.questions.run)
    return setup.questions


async def test_questions_and_answers(setup: Setup, questions: SupervisorClient) -> None:
    assert questions.is_responsive()
    assert await questions.readiness() == Reasons(reasons=["draining"], notes=["clients by tls: no"])
    assert await questions.status() == '{"cluster":"prod"}'
    assert await questions.overview() == '{"cluster":"page"}'
    assert await questions.places() == [
        ProcessIdentity("supervisor", 0),
        ProcessIdentity("auth", 0),
        FORWARDER,
        LEAVING,
    ]
    assert await questions.metrics(FORWARDER) == await questions.metrics(LEAVING) == "g 1.0\n"
    assert setup.report.asked == ["readiness", "status", "overview", FORWARDER, LEAVING]
    with pytest.raises(RpcCallRefused, match="auth-0 writes more than it may"):
        await questions.metrics(ProcessIdentity("auth", 0))


def test_the_admin_channel_serves_exactly_the_methods_of_the_admin_role() -> None:
    """Security: an admin worker may call only these methods, and no other role may call them."""
    line = AdminChannel(FakeReport(), FakeReport(), lambda: -1)  # type: ignore[arg-type]
    served = set(line._handlers())
    assert served == {method for method, roles in MAY_CALL.items() if Role.ADMIN in roles}
    assert all(MAY_CALL[method] == {Role.ADMIN} for method in served)


@pytest.mark.parametrize("method", [Method.CLUSTER_DRAIN, Method.CLUSTER_UPGRADE, Method.START, Method.AUTHENTICATE])
async def test_an_admin_worker_is_refused_all_other_methods(questions: SupervisorClient, method: int) -> None:
    """Security: also one that was taken over."""
    with pytest.raises(RpcCallRefused, match="CLUSTER_AUTHORIZATION_FAILED"):
        await questions._rpc.call(method, Empty(), Text, timeout_s=60)


async def test_questions_at_a_time_are_bounded(setup: Setup, nursery: trio.Nursery) -> None:
    """Security: each may make every worker answer."""
    handler = setup.line._handlers()[Method.REPORT_READINESS]
    setup.report.gate = trio.Event()
    for _ in range(CONCURRENT_CALLS_MAX):
        nursery.start_soon(handler, b"", Caller(Role.ADMIN, 77))
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(Exception, match="too many calls at a time"):
        await handler(b"", Caller(Role.ADMIN, 77))
    setup.report.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert await handler(b"", Caller(Role.ADMIN, 77))


METRICS_OF = Place(role="forwarder", index=1).SerializeToString()
EXPENSIVE = {
    Method.REPORT_READINESS: b"",
    Method.REPORT_STATUS: b"",
    Method.REPORT_OVERVIEW: b"",
    Method.REPORT_METRICS: METRICS_OF,
}


@pytest.mark.parametrize(("method", "request_bytes"), EXPENSIVE.items())
async def test_an_admin_worker_that_asks_without_pause_gets_reports_at_a_bounded_rate(
    setup: Setup, autojump_clock: trio.testing.MockClock, method: int, request_bytes: bytes
) -> None:
    """Security: an admin worker that was taken over asks as often as it may, over two lines."""
    ends_at = trio.current_time() + 10 * REPORT_INTERVAL_S
    answers = 0

    async def ask_again_and_again() -> None:
        nonlocal answers
        handler = setup.line._handlers()[method]
        while trio.current_time() < ends_at:
            assert await handler(request_bytes, Caller(Role.ADMIN, 77))
            answers += 1

    async with trio.open_nursery() as asking:
        for _ in range(CONCURRENT_CALLS_MAX):
            asking.start_soon(ask_again_and_again)
    assert len(setup.report.asked) <= 12
    assert answers == CONCURRENT_CALLS_MAX * len(setup.report.asked)


async def test_each_place_and_question_has_its_own_pause(setup: Setup, autojump_clock: trio.testing.MockClock) -> None:
    """A scrape is not the slower for that."""
    handlers, caller = setup.line._handlers(), Caller(Role.ADMIN, 77)
    for place in (Place(role="supervisor", index=0).SerializeToString(), METRICS_OF):
        await handlers[Method.REPORT_METRICS](place, caller)
    await handlers[Method.REPORT_STATUS](b"", caller)
    await handlers[Method.REPORT_READINESS](b"", caller)
    assert len(setup.report.asked) == 4
    assert trio.current_time() < REPORT_INTERVAL_S / 2


async def test_places_that_are_none_are_not_remembered(setup: Setup) -> None:
    """Security."""
    handler = setup.line._handlers()[Method.REPORT_METRICS]
    for index in range(2, 50):
        place = Place(role="forwarder", index=index)
        assert await handler(place.SerializeToString(), Caller(Role.ADMIN, 77)) == Text(text="").SerializeToString()
    assert not setup.report.asked
    assert not setup.line._metrics_of


async def test_places_that_have_ended_are_forgotten(setup: Setup) -> None:
    """Each replaced worker is a place of its own: all that there ever were would be too many."""
    handler = setup.line._handlers()[Method.REPORT_METRICS]
    for place in (FORWARDER, LEAVING):
        await handler(place.to_protobuf().SerializeToString(), Caller(Role.ADMIN, 77))
    another = ProcessIdentity("forwarder", 1, leaving_pid=4712)
    setup.report.places = lambda: [FORWARDER, another]  # type: ignore[method-assign]
    await handler(another.to_protobuf().SerializeToString(), Caller(Role.ADMIN, 77))
    assert set(setup.line._metrics_of) == {FORWARDER, another}


async def test_the_line_ends_with_the_worker(setup: Setup, questions: SupervisorClient, nursery: trio.Nursery) -> None:
    """Also where something that it has started holds the other end open."""
    setup.ended.set()
    await setup.served.wait()
    assert setup.ours.fileno() == -1


async def test_clients_that_are_gone_are_noticed(setup: Setup, questions: SupervisorClient) -> None:
    """A viewer of the page that has lost its network keeps no place. What the port has, its connections have."""
    assert questions.is_responsive()
    with socket.create_connection(setup.port.getsockname()), setup.port.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE_TIMEOUT_S * 1000


async def test_a_worker_that_never_wants_its_port(setup: Setup) -> None:
    await trio.testing.wait_all_tasks_blocked()
    setup.questions._socket.close()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert not setup.served.is_set(), "until it has ended"


async def test_a_supervisor_that_gives_no_port(setup: Setup) -> None:
    setup.port.close()
    with pytest.raises(ChannelLost):
        await setup.questions.receive_listener()
    setup.questions._socket.close()


async def test_a_supervisor_that_falls_silent_is_not_well(
    setup: Setup, questions: SupervisorClient, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: a machine may be busy."""
    await trio.sleep(20 * HEALTH_INTERVAL_S)
    assert questions.is_responsive()

    async def silence(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(questions._rpc, "call", silence)
    await trio.sleep(SILENCE_S_MAX - HEALTH_INTERVAL_S - 1)
    assert questions.is_responsive()
    await trio.sleep(HEALTH_INTERVAL_S + 2)
    assert not questions.is_responsive()
