"""proxy.supervisor.slot: a place that is kept filled."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeWorker, SpawnSequence

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.runtime.rpc_client import RpcError
from proxy.supervisor.slot import LOOK_INTERVAL_S, LOOK_TIMEOUT_S, LOOKS_MISSED_MAX, STABLE_AFTER_S, Slot, SlotState
from proxy.supervisor.sockets import StartFailed


class Place:
    def __init__(self) -> None:
        self.workers = SpawnSequence()
        self.ended: list[Slot] = []
        self.spawn_error: OSError | None = None
        self.start_by: Callable[[Slot], Awaitable[None]] | None = None
        self.slot = Slot(Role.LOOKUP, 1, self._spawn, self._start, self.ended.append)  # type: ignore[arg-type]

    async def _spawn(self) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        if self.spawn_error is not None:
            raise self.spawn_error
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


async def test_a_worker_that_hangs_is_ended(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    first = place.worker
    await trio.sleep(60)
    assert first.code is None, "one that answers is left alone"
    first.answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(60)
    assert first.code == -9
    assert "a worker hangs; ending it" in {entry["event"] for entry in logs}
    assert place.slot.state is SlotState.RUNNING
    nursery.cancel_scope.cancel()


async def test_a_few_missed_answers_are_forgiven(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    answers = itertools.cycle([RpcError("no answer"), RpcError("no answer"), "{}"])
    place.worker.answers[Method.GET_STATUS] = lambda _request: next(answers)
    await trio.sleep(120)
    assert len(place.workers) == 1
    nursery.cancel_scope.cancel()


async def test_a_process_that_cannot_be_had_at_first(place: Place) -> None:
    place.spawn_error = OSError(12, "Cannot allocate memory")
    with pytest.raises(StartFailed, match=r"the lookup worker 1 cannot be started: .*Cannot allocate memory"):
        await place.slot.run()


async def test_a_process_that_cannot_be_had_later_on(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    place.spawn_error = OSError(24, "Too many open files")
    place.worker.end(1)
    await trio.sleep(20)
    assert place.slot.state is SlotState.RESTARTING
    place.spawn_error = None
    await trio.sleep(20)
    assert place.slot.state is SlotState.RUNNING
    nursery.cancel_scope.cancel()


def test_states_are_words_for_operators() -> None:
    assert [str(state) for state in SlotState] == ["starting", "running", "restarting", "stopped"]


# ---- a worker that hangs


async def test_one_that_hangs_is_ended_and_replaced(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    first = place.worker
    first.answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(LOOKS_MISSED_MAX * (LOOK_INTERVAL_S + LOOK_TIMEOUT_S) + 2)
    assert first.code == -9
    assert "a worker hangs; ending it" in {entry["event"] for entry in logs}
    assert place.worker is not first
    nursery.cancel_scope.cancel()


async def test_one_that_answers_now_and_then_stays(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    looks = itertools.count(1)
    place.worker.answers[Method.GET_STATUS] = lambda _request: (
        "{}" if next(looks) % LOOKS_MISSED_MAX == 0 else RpcError("slow")
    )
    await trio.sleep(300)
    assert place.worker.code is None
    nursery.cancel_scope.cancel()


# ---- nothing to make a process from


async def test_no_descriptors_for_a_successor(
    place: Place, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A shortage that passes must not end the cluster, and with it all other clients."""
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()

    async def fail() -> FakeWorker:
        await trio.lowlevel.checkpoint()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(place.slot, "_spawn", fail)
    with structlog.testing.capture_logs() as logs:
        place.worker.end(1)
        await trio.sleep(3)
    assert "a worker cannot be started" in {entry["event"] for entry in logs}
    monkeypatch.undo()
    await trio.sleep(10)
    assert place.slot.state is SlotState.RUNNING
    nursery.cancel_scope.cancel()


async def test_no_descriptors_for_the_very_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> FakeWorker:
        await trio.lowlevel.checkpoint()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(place.slot, "_spawn", fail)
    with pytest.raises(StartFailed, match="Too many open files"):
        await place.slot.run()


async def test_stop_while_the_process_is_being_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    making = trio.Event()
    made: list[FakeWorker] = []

    async def slowly() -> FakeWorker:
        await making.wait()
        made.append(FakeWorker(Role.LOOKUP, 1))
        return made[0]

    monkeypatch.setattr(place.slot, "_spawn", slowly)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await trio.testing.wait_all_tasks_blocked()
        await place.slot.stop()
        making.set()
    assert made[0].code == -9
    assert place.slot.state is SlotState.STOPPED
