"""proxy.supervisor.operators.connections: pages of forwarders, which may be compromised, for operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from proto.roles import Role
from proto.rpc_pb2 import (
    Connection,
    ConnectionFilter,
    ConnectionsPage,
    ConnectionsRequest,
    ForwarderProcess,
    Method,
    Status,
)
from proxy.common.connection_kinds import LOOKUP
from proxy.forwarder.client.listing import SCANNED_MAX
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcResponseCorrupt
from proxy.runtime.rpc.replies import RESPONSE_BYTES_MAX, RESPONSE_FIELDS_MAX
from proxy.runtime.rpc.server import RPC_FRAME_OVERHEAD_BYTES, RpcRefused
from proxy.supervisor.cluster.slot import SlotState, WorkerSlot
from proxy.supervisor.operators.connections import (
    ROWS_MAX,
    TEXT_CHARACTERS_MAX,
    ClusterConnections,
)

ROW = Connection(client_address="192.0.2.7:4000", principal="alice", kind=LOOKUP)
ALICE = ConnectionFilter(principal="alice")


class Worker:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.answer: ConnectionsPage | Exception = ConnectionsPage(connections=[ROW])
        self.calls: list[int] = []

    async def call(self, method: int, _request: Any, _type: Any, *, timeout_s: float) -> ConnectionsPage:
        await trio.lowlevel.checkpoint()
        self.calls.append(method)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def workers() -> list[Worker]:
    return [Worker(10), Worker(11), Worker(12)]


@pytest.fixture
def connections(workers: list[Worker]) -> ClusterConnections:
    """A forwarder with a predecessor, and one that is only starting."""
    hooks: Any = None
    slots: list[Any] = [WorkerSlot(Role.FORWARDER, index, hooks) for index in range(2)]
    slots[0].state, slots[0].worker = SlotState.RUNNING, workers[0]
    slots[0].runs.append(SimpleNamespace(worker=workers[1], retired=True))
    slots[1].state, slots[1].worker = SlotState.STARTING, workers[2]
    cluster: Any = SimpleNamespace(slots_of=lambda _role: slots)
    return ClusterConnections(cluster)


async def test_forwarders_and_their_predecessors(connections: ClusterConnections) -> None:
    page = await connections.page(ConnectionsRequest(), ends=False)
    assert sorted((one.pid, one.index) for one in page.forwarders) == [(10, 0), (11, 0)]


@pytest.mark.parametrize(("ends", "method"), [(False, Method.LIST_CONNECTIONS), (True, Method.END_CONNECTIONS)])
async def test_a_page_is_passed_on(
    connections: ClusterConnections, workers: list[Worker], ends: bool, method: int
) -> None:
    assert await connections.page(ConnectionsRequest(pid=11, filter=ALICE), ends=ends) == workers[1].answer
    assert [worker.calls for worker in workers] == [[], [method], []]


@pytest.mark.parametrize("pid", [12, 13, 1])
async def test_no_other_process_is_asked(connections: ClusterConnections, workers: list[Worker], pid: int) -> None:
    with pytest.raises(RpcRefused, match="has ended"):
        await connections.page(ConnectionsRequest(pid=pid), ends=False)
    assert not any(worker.calls for worker in workers)


async def test_nothing_is_ended_without_a_filter(connections: ClusterConnections, workers: list[Worker]) -> None:
    with pytest.raises(RpcRefused, match="a filter is needed"):
        await connections.page(ConnectionsRequest(pid=10), ends=True)
    assert not workers[0].calls
    await connections.page(ConnectionsRequest(pid=10, filter=ConnectionFilter(principal="")), ends=True)
    assert workers[0].calls, "an empty principal names those without one"


async def test_a_forwarder_that_does_not_answer_or_refuses(
    connections: ClusterConnections, workers: list[Worker]
) -> None:
    workers[0].answer = RpcConnectionLost("gone")
    with pytest.raises(RpcRefused, match="does not answer"):
        await connections.page(ConnectionsRequest(pid=10), ends=False)
    workers[0].answer = RpcCallRefused(Status.UNSUPPORTED_VERSION, "LIST_CONNECTIONS is not served here")
    with pytest.raises(RpcRefused, match="not served here"):
        await connections.page(ConnectionsRequest(pid=10), ends=False)
    workers[0].answer = RpcResponseCorrupt("a ConnectionsPage of 9 bytes is too much")
    with pytest.raises(RpcRefused, match="answer is refused: a ConnectionsPage of 9 bytes"):
        await connections.page(ConnectionsRequest(pid=10), ends=False)


def text_row(text: str) -> Connection:
    return Connection(principal=text, kind=LOOKUP)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (ConnectionsPage(connections=[ROW] * (ROWS_MAX + 1)), "too much"),
        (ConnectionsPage(forwarders=[ForwarderProcess(pid=1)]), "too much"),
        (ConnectionsPage(connections=[text_row("x" * (TEXT_CHARACTERS_MAX + 1))]), "too long"),
        (ConnectionsPage(connections=[Connection(kind="\x1b[2J")]), "no such kind"),
        (ConnectionsPage(next=5), "backwards"),
        (ConnectionsPage(next=4), "backwards"),
    ],
)
async def test_what_no_sound_forwarder_answers_is_refused(
    connections: ClusterConnections, workers: list[Worker], page: ConnectionsPage, fault: str
) -> None:
    """Security: the supervisor's reply is bounded, and an operator's command comes to its end."""
    workers[0].answer = page
    with pytest.raises(RpcRefused, match=fault):
        await connections.page(ConnectionsRequest(pid=10, after=5), ends=False)


def test_a_page_fits() -> None:
    assert SCANNED_MAX <= ROWS_MAX < RESPONSE_FIELDS_MAX
    assert RESPONSE_BYTES_MAX[ConnectionsPage] + RPC_FRAME_OVERHEAD_BYTES < CONTROL_FRAME_BYTES_MAX
