"""proxy.supervisor.slot: a place that is kept filled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeWorker, SpawnSequence

from proto.roles import Role
from proxy.runtime.rpc_client import RpcError
from proxy.supervisor.slot import STABLE_AFTER_S, Slot, SlotState
from proxy.supervisor.sockets import StartFailed


class Place:
    def __init__(self) -> None:
        self.workers = SpawnSequence()
        self.ended: list[Slot] = []
        self.start_by: Callable[[Slot], Awaitable[None]] | None = None
        self.slot = Slot(Role.LOOKUP, 1, self._spawn, self._start, self.ended.append)  # type: ignore[arg-type]

    async def _spawn(self) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        return self.workers.add(FakeWorker(Role.LOOKUP, 1))

    async def _start(self, slot: Slot) -> None:
        await trio.lowlevel.checkpoint()
        if self.start_by is not None:
            await self.start_by(slot)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[-1]  # type: ignore[no-any-return]


@pytest.fixture
def place() -> Place:
    return Place()


async def test_it_is_filled(place: Place, nursery: trio.Nursery) -> None:
    assert place.slot.state is SlotState.STARTING
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    assert place.slot.state is SlotState.RUNNING
    assert place.slot.worker is place.worker  # type: ignore[comparison-overlap]
    nursery.cancel_scope.cancel()


async def test_a_worker_that_ends_is_replaced(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    first = place.worker
    with structlog.testing.capture_logs() as logs:
        first.end(-9)
        await trio.testing.wait_all_tasks_blocked()
    assert place.slot.state is SlotState.RESTARTING
    assert place.slot.worker is None
    assert place.ended == [place.slot]
    [entry] = logs
    assert (entry["who"], entry["pid"], entry["code"]) == ("lookup-1", first.pid, -9)
    await trio.sleep(1)
    assert place.slot.state is SlotState.RUNNING
    assert place.worker is not first
    assert place.slot.restarts == 1
    nursery.cancel_scope.cancel()


async def test_one_that_ends_at_once_is_replaced_more_and_more_slowly(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()

    async def die_at_once(_slot: Slot) -> None:
        place.worker.end(1)
        await trio.sleep_forever()

    place.start_by = die_at_once
    place.worker.end(1)
    started = trio.current_time()
    await trio.sleep(60)
    assert 10 < len(place.workers) < 25, "about every 5 s in the end"
    assert trio.current_time() - started == pytest.approx(60)
    nursery.cancel_scope.cancel()


async def test_one_that_was_stable_is_replaced_quickly_again(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    for _ in range(8):
        place.worker.end(1)
        await trio.sleep(6)
    await trio.sleep(STABLE_AFTER_S)
    place.worker.end(1)
    before = len(place.workers)
    await trio.sleep(0.2)
    assert len(place.workers) == before + 1
    nursery.cancel_scope.cancel()


async def test_the_very_first_that_ends_before_it_is_ready_fails_the_start(place: Place) -> None:
    async def never(_slot: Slot) -> None:
        place.worker.end(3)
        await trio.sleep_forever()

    place.start_by = never
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match="the lookup worker 1 ended with code 3 before it was ready"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        await place.slot.run()


async def test_the_very_first_that_refuses_fails_the_start(place: Place) -> None:
    async def refuse(_slot: Slot) -> None:
        await trio.lowlevel.checkpoint()
        raise RpcError("INVALID_REQUEST: brokers.credentials.file: ...")

    place.start_by = refuse
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match=r"cannot start: INVALID_REQUEST: brokers.credentials.file"),
        flatten_subgroups=True,
    ):
        await place.slot.run()
    assert place.worker.code == -9, "it is not left behind"


async def test_a_later_one_that_refuses_is_tried_again(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    refusals = 2

    async def refuse(_slot: Slot) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise RpcError("not now")
        await trio.lowlevel.checkpoint()

    place.start_by = refuse
    place.worker.end(1)
    await trio.sleep(5)
    assert place.slot.state is SlotState.RUNNING
    assert place.slot.restarts == 3
    nursery.cancel_scope.cancel()


async def test_stop(place: Place) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await place.slot.ready.wait()
        with structlog.testing.capture_logs() as logs:
            await place.slot.stop()
    assert place.slot.state is SlotState.STOPPED
    assert place.worker.story[0] == "stop"
    assert len(place.workers) == 1
    assert logs == [], "an end that was asked for is no error"


async def test_stop_during_the_pause_before_the_next(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await place.slot.ready.wait()
        place.worker.end(1)
        await trio.testing.wait_all_tasks_blocked()
        await place.slot.stop()
    assert place.slot.state is SlotState.STOPPED
    assert len(place.workers) == 1


@pytest.mark.parametrize("call_fails", [True, False])
async def test_stop_during_the_very_first_start_is_no_failure(place: Place, call_fails: bool) -> None:
    """SIGTERM while the cluster starts: its end is what was asked for."""
    gate = trio.Event()

    async def starting(_slot: Slot) -> None:
        await gate.wait()
        if call_fails:
            raise RpcError("the worker went away")

    place.start_by = starting

    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        await place.slot.stop()
    assert place.slot.state is SlotState.STOPPED


async def test_cancel_kills_the_process(place: Place) -> None:
    with trio.CancelScope() as scope:

        async def cancel() -> None:
            await place.slot.ready.wait()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.slot.run)
            nursery.start_soon(cancel)
    assert place.worker.code == -9


def test_states_are_words_for_operators() -> None:
    assert [str(state) for state in SlotState] == ["starting", "running", "restarting", "stopped"]
