"""proxy.runtime.rpc.callback_call: one outcome by callback, and none after a cancellation.

What replies lead to is tested where calls are made: test_workers_authentication, test_workers_broker_links.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from proto.rpc_frames import Reply
from proto.rpc_pb2 import BrokerProfileRequest, BrokerProfileResponse, Method, Status
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.rpc.callback_call import CallbackCall
from proxy.runtime.rpc.errors import RpcDeadlineExceeded

TIMEOUT_S = 5.0


class FakeClient:
    """An RpcClient; ``answers``: has a task's call answered."""

    def __init__(self, *, reached: bool = True) -> None:
        self.reached = reached
        self.answers = trio.Event()
        self.on_reply: Any = None
        self.cancelled: list[int] = []
        self.timeouts_s: list[float] = []
        self.outcomes: list[Any] = []

    def start_call(self, _method: int, _body: bytes, on_reply: Any, *, timeout_ms: int, deadline: float) -> int | None:
        assert timeout_ms / 1000 == pytest.approx(deadline - trio.current_time(), abs=1)
        self.on_reply = on_reply
        return 7 if self.reached else None

    def cancel_call(self, number: int) -> None:
        self.cancelled.append(number)

    async def call(self, _method: int, _request: Any, _type: Any, *, timeout_s: float, retry: bool) -> Any:
        assert retry
        self.timeouts_s.append(timeout_s)
        await self.answers.wait()
        return BrokerProfileResponse(connected=b"from the task")


def start(client: FakeClient, tasks: TaskSpawner) -> CallbackCall[BrokerProfileResponse, BrokerProfileResponse]:
    return CallbackCall(
        client,  # type: ignore[arg-type]
        Method.BROKER_PROFILE,
        BrokerProfileRequest(),
        BrokerProfileResponse,
        tasks=tasks,
        read=lambda response: response,
        on_outcome=client.outcomes.append,
        timeout_s=TIMEOUT_S,
        retry=True,
    )


async def test_a_reply_is_the_outcome_and_nothing_is_left_to_cancel(nursery: trio.Nursery) -> None:
    client = FakeClient()
    call = start(client, nursery)
    response = BrokerProfileResponse(connected=b"by callback")
    client.on_reply(Reply(7, Status.OK, response.SerializeToString()))
    call.cancel()
    assert (client.outcomes, client.cancelled, client.timeouts_s) == ([response], [], [])


async def test_a_task_has_what_is_left_of_the_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    client = FakeClient()
    start(client, nursery)
    await trio.sleep(2.0)
    client.on_reply(None)
    client.answers.set()
    await trio.testing.wait_all_tasks_blocked()
    assert client.outcomes == [BrokerProfileResponse(connected=b"from the task")]
    assert client.timeouts_s == [pytest.approx(3.0)]


async def test_after_its_time_no_call_is_repeated(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    client = FakeClient()
    start(client, nursery)
    await trio.sleep(TIMEOUT_S)
    client.on_reply(None)
    [outcome] = client.outcomes
    assert isinstance(outcome, RpcDeadlineExceeded)
    assert str(outcome) == "no answer within 5.0 s"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_task_of_a_cancelled_call_ends(has_begun: bool) -> None:
    client = FakeClient(reached=False)
    async with trio.open_nursery() as tasks:
        call = start(client, tasks)
        if has_begun:
            await trio.testing.wait_all_tasks_blocked()
        call.cancel()
    assert (client.outcomes, client.cancelled) == ([], [])


async def test_a_call_cancelled_while_a_lost_connections_calls_are_told_is_not_repeated() -> None:
    client = FakeClient()
    async with trio.open_nursery() as tasks:
        call = start(client, tasks)
        call.cancel()
        client.on_reply(None)
    assert (client.outcomes, client.cancelled) == ([], [7])
