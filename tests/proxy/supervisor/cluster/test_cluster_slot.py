"""proxy.supervisor.cluster.slot: a place that is kept filled."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeWorker, SpawnSequence, after, hang, no_listeners

from proto.roles import Role
from proto.rpc_pb2 import Method, StartRequest, StoredRelay, StoreMessage
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.shared.fd_store_channel import close_descriptors
from proxy.supervisor.cluster.slot import HAND_OVER_TIMEOUT_S, STABLE_AFTER_S, SlotHooks, SlotState, WorkerSlot
from proxy.supervisor.cluster.worker_run import (
    DRAIN_GRACE_S,
    HEALTH_FAILURES_MAX,
    HEALTH_INTERVAL_S,
    HEALTH_TIMEOUT_S,
)
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot
from proxy.supervisor.startup.sockets import StartFailed


class Place:
    def __init__(self) -> None:
        self.workers = SpawnSequence()
        self.ended: list[WorkerSlot] = []
        self.spawn_error: OSError | None = None
        self.spawn_gate = trio.Event()
        self.spawn_gate.set()
        self.start_by: Callable[[FakeWorker], Any] | None = None
        self.slot: Any = WorkerSlot(Role.LOOKUP, 1, SlotHooks(self._spawn, self._start, self.ended.append))  # type: ignore[arg-type]

    async def _spawn(self) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        await self.spawn_gate.wait()
        if self.spawn_error is not None:
            raise self.spawn_error
        worker = self.workers.add(FakeWorker(Role.LOOKUP, 1))
        if self.start_by is not None:
            start_by = self.start_by
            worker.answers[Method.START] = lambda _request: start_by(worker)
        return worker

    async def _start(self, slot: WorkerSlot, worker: FakeWorker) -> None:
        """As the cluster does it."""
        await worker.send_command(Method.START, StartRequest(index=slot.index), timeout_s=30)
        slot.worker = worker  # type: ignore[assignment]
        slot.state = SlotState.RUNNING

    @property
    def worker(self) -> FakeWorker:
        return self.workers[-1]  # type: ignore[no-any-return]

    @property
    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.code is None]


class ForwarderPlace(Place):
    """Forwarders that have a real channel to a real slot of the fd store."""

    def __init__(self) -> None:
        super().__init__()
        self.store_slot = FdStoreSlot()
        self.adopted: dict[int, list[int]] = {}
        self.slot = WorkerSlot(
            Role.FORWARDER,
            0,
            SlotHooks(self._spawn, self._start, self.ended.append, self._keep_fd_store_slot),  # type: ignore[arg-type]
        )

    async def _keep_fd_store_slot(self, worker: FakeWorker) -> None:
        assert worker.store_channel is not None
        await self.store_slot.serve_forwarder(
            worker.store_channel,
            no_listeners,
            pid=worker.pid,
            is_new=not worker.is_inherited,
            tables=AddressTableExchange().open_channel(0),
        )

    async def _spawn(self) -> FakeWorker:
        worker = await super()._spawn()
        worker.role, worker.index = Role.FORWARDER, 0
        self.equip(worker)
        return worker

    def equip(self, worker: FakeWorker) -> None:
        worker.open_line()
        worker.answers.setdefault(Method.START, lambda _request: self.adopt(worker))
        worker.answers[Method.DRAIN] = lambda request: worker.leave_line() if request.hand_over else None

    async def adopt(self, worker: FakeWorker) -> None:
        """What a forwarder does at its start."""
        self.adopted[worker.pid] = []
        while True:
            received = await worker.line.receive()  # type: ignore[union-attr]
            if received is None:
                return
            message, descriptors = received
            close_descriptors(descriptors)
            self.adopted[worker.pid] += [relay.id for relay in message.relays]
            if message.complete:
                return

    def relay(self, worker: FakeWorker, *ids: int) -> None:
        """A forwarder has new relays."""
        ends = os.pipe()
        relays = [StoredRelay(id=number) for number in ids]
        worker.line.send_now(StoreMessage(relays=relays), ends * len(ids))  # type: ignore[union-attr]
        close_descriptors(ends)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
async def forwarders() -> AsyncIterator[ForwarderPlace]:
    await trio.lowlevel.checkpoint()
    place = ForwarderPlace()
    yield place
    for worker in place.workers:
        worker.leave_line()
        if worker.store_channel is not None:
            worker.store_channel.sock.close()
    place.store_slot.close_stored()
    os.close(place.store_slot.table_fd)


async def test_a_slot_starts_a_worker_and_becomes_running(place: Place, nursery: trio.Nursery) -> None:
    assert place.slot.state is SlotState.STARTING
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    assert place.slot.state is SlotState.RUNNING  # type: ignore[comparison-overlap]
    assert place.slot.worker is place.worker
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
    assert place.slot.state is SlotState.RUNNING  # type: ignore[comparison-overlap]
    assert place.worker is not first
    assert place.slot.restarts == 1
    nursery.cancel_scope.cancel()


async def test_a_worker_that_dies_at_its_start_is_restarted_with_growing_pauses(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()

    async def die_at_once(worker: FakeWorker) -> None:
        worker.end(1)
        await trio.sleep_forever()

    place.start_by = die_at_once
    place.worker.end(1)
    started = trio.current_time()
    await trio.sleep(60)
    assert 10 < len(place.workers) < 25, "about every 5 s in the end"
    assert trio.current_time() - started == pytest.approx(60)
    nursery.cancel_scope.cancel()


async def test_relays_do_not_wait_long_for_a_forwarder_that_fails_again_and_again(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """What makes it fail may pass at any moment, and its predecessor's relays stand still until then."""
    nursery.start_soon(forwarders.slot.run)
    await forwarders.slot.ready.wait()
    forwarders.start_by = lambda _worker: RpcError("not now")
    forwarders.relay(forwarders.worker, 1, 2)
    forwarders.worker.end(-9)
    await trio.sleep(60)
    assert 60 <= len(forwarders.workers) < 67, "about every second in the end"
    forwarders.start_by = None
    await trio.sleep(1.1)
    assert forwarders.slot.state is SlotState.RUNNING
    assert forwarders.adopted[forwarders.worker.pid] == [1, 2]
    nursery.cancel_scope.cancel()


async def test_a_stable_run_resets_the_pause_before_a_restart(
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
    async def never(worker: FakeWorker) -> None:
        worker.end(3)
        await trio.sleep_forever()

    place.start_by = never
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match=r"^the lookup worker 1 cannot start: .*; see its log$"),
        flatten_subgroups=True,
    ):
        await place.slot.run()
    assert len(place.workers) == 1


async def test_the_very_first_that_refuses_fails_the_start(place: Place) -> None:
    place.start_by = lambda _worker: RpcError("INVALID_REQUEST: brokers.credentials.file: ...")
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match=r"cannot start: INVALID_REQUEST: brokers.credentials.file: ...; see its"),
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

    def refuse(_worker: FakeWorker) -> RpcError | None:
        nonlocal refusals
        refusals -= 1
        return RpcError("not now") if refusals >= 0 else None

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
            await place.slot.stop_workers()
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
        await place.slot.stop_workers()
    assert place.slot.state is SlotState.STOPPED
    assert len(place.workers) == 1


@pytest.mark.parametrize("call_fails", [True, False])
async def test_stop_during_the_very_first_start_is_no_failure(place: Place, call_fails: bool) -> None:
    """SIGTERM while the cluster starts: its end is what was asked for."""
    gate = trio.Event()

    async def starting(_worker: FakeWorker) -> RpcError | None:
        await gate.wait()
        return RpcError("the worker went away") if call_fails else None

    place.start_by = starting

    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        await place.slot.stop_workers()
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
    cannot = pytest.RaisesExc(StartFailed, match=r"the lookup worker 1 cannot be started: .*Cannot allocate memory")
    with pytest.RaisesGroup(cannot):
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
    assert place.slot.state is SlotState.RUNNING  # type: ignore[comparison-overlap]
    nursery.cancel_scope.cancel()


def test_states_are_words_for_operators() -> None:
    assert [str(state) for state in SlotState] == ["starting", "running", "restarting", "stopped"]


# ---- a worker that hangs


async def test_a_worker_that_fails_its_health_checks_is_killed_and_replaced(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    first = place.worker
    first.answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(HEALTH_FAILURES_MAX * (HEALTH_INTERVAL_S + HEALTH_TIMEOUT_S) + 2)
    assert first.code == -9
    assert "a worker hangs; ending it" in {entry["event"] for entry in logs}
    assert place.worker is not first
    nursery.cancel_scope.cancel()


async def test_a_worker_that_answers_some_health_checks_keeps_running(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    looks = itertools.count(1)
    place.worker.answers[Method.GET_STATUS] = lambda _request: (
        "{}" if next(looks) % HEALTH_FAILURES_MAX == 0 else RpcError("slow")
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

    monkeypatch.setattr(place.slot, "_hooks", dataclasses.replace(place.slot._hooks, spawn=fail))
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

    monkeypatch.setattr(place.slot, "_hooks", dataclasses.replace(place.slot._hooks, spawn=fail))
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailed, match="Too many open files")):
        await place.slot.run()


async def test_stop_while_the_process_is_being_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    making = trio.Event()
    made: list[FakeWorker] = []

    async def slowly() -> FakeWorker:
        await making.wait()
        made.append(FakeWorker(Role.LOOKUP, 1))
        return made[0]

    monkeypatch.setattr(place.slot, "_hooks", dataclasses.replace(place.slot._hooks, spawn=slowly))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.slot.run)
        await trio.testing.wait_all_tasks_blocked()
        await place.slot.stop_workers()
        making.set()
    assert made[0].code == -9
    assert place.slot.state is SlotState.STOPPED


# ---- a worker that ends, with or without a pause


async def test_the_successor_of_one_that_lived_comes_at_once(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    for _ in range(3):
        await trio.sleep(STABLE_AFTER_S)
        before = trio.current_time()
        place.worker.end(-9)
        await trio.testing.wait_all_tasks_blocked()
        assert place.slot.state is SlotState.RUNNING
        assert place.worker.born == before
    assert place.slot.restarts == 3
    nursery.cancel_scope.cancel()


async def test_the_pauses_double_up_to_a_bound(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    place.start_by = lambda worker: worker.end(1)
    place.worker.end(1)
    await trio.sleep(30)
    starts = [worker.born for worker in place.workers]
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert pauses[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert max(pauses) == pytest.approx(5)
    nursery.cancel_scope.cancel()


async def test_the_pauses_begin_anew_after_one_that_lived(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    for _ in range(3):
        place.worker.end(1)
        await trio.sleep(0.9)
    await trio.sleep(STABLE_AFTER_S)
    place.worker.end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert place.slot.state is SlotState.RUNNING
    died = trio.current_time()
    place.worker.end(1)
    await trio.sleep(0.15)
    assert place.worker.born == pytest.approx(died + 0.1)
    nursery.cancel_scope.cancel()


async def test_a_worker_that_dies_while_it_starts_is_replaced(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    place.start_by = hang
    place.worker.end(1)
    await trio.sleep(0.5)
    pending = place.worker
    assert [method for method, _request in pending.calls] == [Method.START]
    place.start_by = None
    pending.end(-11)
    await trio.sleep(0.5)
    assert place.slot.state is SlotState.RUNNING
    assert place.alive == [place.slot.worker]
    assert place.slot.restarts == 2
    nursery.cancel_scope.cancel()


# ---- successors


async def started(place: Place, nursery: trio.Nursery) -> FakeWorker:
    nursery.start_soon(place.slot.run)
    await place.slot.ready.wait()
    await trio.testing.wait_all_tasks_blocked()
    return place.worker


def retiring(place: Place) -> bool:
    return any(life.retired for life in place.slot.runs)


def called(worker: FakeWorker, method: int) -> list[Any]:
    return [request for asked, request in worker.calls if asked == method]


class Replacement:
    """Replace a place's worker beside the test."""

    def __init__(self, place: Place, nursery: trio.Nursery, *, hand_over: bool) -> None:
        self.done = trio.Event()
        self.result: bool | None = None
        self._place = place
        self._hand_over = hand_over
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        self.result = await self._place.slot.replace_worker(hand_over=self._hand_over, drain_timeout_ms=60_000)
        self.done.set()


async def test_replace(place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    old = await started(place, nursery)
    assert await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    new = place.worker
    assert new is not old
    assert place.slot.worker is new
    assert place.slot.state is SlotState.RUNNING
    await trio.sleep(10)
    assert [(request.timeout_ms, request.hand_over) for request in called(old, Method.DRAIN)] == [(3000, True)]
    assert old.timeouts[-1] == pytest.approx(3 + DRAIN_GRACE_S)
    assert old.story[0] == "stop"
    assert place.alive == [new]
    assert (place.slot.restarts, place.ended) == (0, []), "that was no failure"
    assert called(new, Method.GET_STATUS), "it is looked after like any other"
    looks = len(called(old, Method.GET_STATUS))
    await trio.sleep(60)
    assert len(called(old, Method.GET_STATUS)) == looks
    nursery.cancel_scope.cancel()


async def test_the_old_one_stays_until_the_new_one_is_ready(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    gate = trio.Event()
    place.start_by = lambda _worker: gate.wait()
    replacement = Replacement(place, nursery, hand_over=False)
    await trio.sleep(20)
    assert place.slot.worker is old
    assert place.slot.state is SlotState.RUNNING
    assert not called(old, Method.DRAIN)
    assert not retiring(place)
    gate.set()
    await replacement.done.wait()
    assert replacement.result is True
    assert place.slot.worker is place.worker
    assert called(place.worker, Method.START)
    nursery.cancel_scope.cancel()


async def test_the_old_one_may_finish_what_it_has(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    finished = trio.Event()
    old.answers[Method.DRAIN] = lambda _request: finished.wait()
    assert await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    await trio.sleep(2)
    assert (old.code, retiring(place)) == (None, True)
    assert [life.worker for life in place.slot.runs] == [old, place.worker]
    finished.set()
    await trio.sleep(0.1)
    assert (old.code, retiring(place)) == (0, False)
    nursery.cancel_scope.cancel()


async def test_wait_for_those_that_finish(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    await place.slot.wait_for_leaving()
    old.answers[Method.DRAIN] = after(2)
    await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    next_old = place.worker
    next_old.answers[Method.DRAIN] = after(5)
    await place.slot.replace_worker(hand_over=False, drain_timeout_ms=60_000)
    await place.slot.wait_for_leaving()
    assert trio.current_time() == pytest.approx(5)
    assert place.alive == [place.worker]
    nursery.cancel_scope.cancel()


async def test_an_old_one_that_does_not_drain_is_stopped(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    old.answers[Method.DRAIN] = hang
    with structlog.testing.capture_logs() as logs:
        await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
        await trio.sleep(3 + DRAIN_GRACE_S - 0.1)
        assert old.code is None
        await trio.sleep(0.2)
    assert old.code is not None
    assert [entry["event"] for entry in logs] == ["a replaced worker did not drain"]
    nursery.cancel_scope.cancel()


async def test_an_old_one_that_dies_while_it_finishes_is_no_failure(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    old.answers[Method.DRAIN] = hang
    await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    old.end(-11)
    await trio.sleep(20)
    assert (place.slot.restarts, place.ended) == (0, [])
    assert place.alive == [place.slot.worker]
    assert len(place.workers) == 2
    nursery.cancel_scope.cancel()


async def test_a_successor_that_does_not_start_leaves_the_old_one_in_its_place(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    place.start_by = lambda _worker: RpcError("INVALID_REQUEST: no")
    with structlog.testing.capture_logs() as logs:
        assert not await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    await trio.sleep(20)
    assert [entry["event"] for entry in logs] == ["a worker cannot start"]
    assert place.slot.worker is old
    assert place.alive == [old]
    assert not called(old, Method.DRAIN)
    assert not retiring(place)
    old.end(1)
    place.start_by = None
    await trio.sleep(1)
    assert place.slot.state is SlotState.RUNNING, "the place is kept filled as before"
    nursery.cancel_scope.cancel()


async def test_a_successor_that_dies_while_it_starts(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    place.start_by = hang
    replacement = Replacement(place, nursery, hand_over=False)
    await trio.sleep(1)
    place.worker.end(-11)
    await replacement.done.wait()
    assert replacement.result is False
    assert place.alive == [old]
    assert place.slot.worker is old
    nursery.cancel_scope.cancel()


async def test_a_successor_that_dies_later_is_followed_as_usual(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await started(place, nursery)
    await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    await trio.sleep(STABLE_AFTER_S)
    new = place.worker
    new.end(-9)
    await trio.testing.wait_all_tasks_blocked()
    assert place.worker is not new
    assert place.slot.worker is place.worker
    assert (place.slot.restarts, place.ended) == (1, [place.slot])
    nursery.cancel_scope.cancel()


async def test_a_successor_that_dies_while_the_old_one_finishes(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The place does not wait for one that has left it."""
    old = await started(place, nursery)
    old.answers[Method.DRAIN] = hang
    await place.slot.replace_worker(hand_over=False, drain_timeout_ms=60_000)
    await trio.sleep(STABLE_AFTER_S)
    new = place.worker
    new.end(-9)
    await trio.testing.wait_all_tasks_blocked()
    assert place.alive == [old, place.slot.worker]
    assert place.slot.restarts == 1
    nursery.cancel_scope.cancel()


async def test_no_process_for_a_successor(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    place.spawn_error = OSError(12, "Cannot allocate memory")
    for hand_over in (False, True):
        with pytest.raises(OSError, match="Cannot allocate"):
            await place.slot.replace_worker(hand_over=hand_over, drain_timeout_ms=3000)
    await trio.sleep(20)
    assert place.slot.worker is old
    assert place.alive == [old]
    place.spawn_error = None
    assert await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000), "nothing is locked"
    nursery.cancel_scope.cancel()


async def test_replacing_a_dead_worker_adds_no_second_successor(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever comes after a death is new already."""
    await started(place, nursery)
    place.worker.end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert place.slot.state is SlotState.RESTARTING
    assert await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    assert len(place.workers) == 1
    await trio.sleep(1)
    assert len(place.workers) == 2
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lived_s", [0, 10])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("when", ["spawn", "start"])
async def test_the_old_one_dies_during_its_replacement(  # noqa: PLR0917 -- parameters
    place: Place, nursery: trio.Nursery, when: str, starts: bool, lived_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(place, nursery)
    await trio.sleep(lived_s)
    gate = trio.Event()

    async def start_by(_worker: FakeWorker) -> RpcError | None:
        await gate.wait()
        return None if starts else RpcError("no")

    if when == "spawn":
        place.spawn_gate = gate
    place.start_by = start_by
    replacement = Replacement(place, nursery, hand_over=False)
    await trio.sleep(0.1)
    old.end(-9)
    await trio.sleep(1)
    assert len(place.workers) == (1 if when == "spawn" else 2), "not two at a time into one place"
    gate.set()
    await replacement.done.wait()
    assert replacement.result is starts
    place.start_by = None
    await trio.sleep(10)
    assert place.slot.state is SlotState.RUNNING
    assert place.alive == [place.slot.worker]
    assert len(place.workers) == (2 if starts else 3)
    assert (place.slot.restarts, len(place.ended)) == (1, 1)
    nursery.cancel_scope.cancel()


async def test_stop_while_a_successor_starts(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await started(place, nursery)
        place.start_by = hang
        replacement = Replacement(place, nursery, hand_over=False)
        await trio.sleep(1)
        assert len(place.alive) == 2
        with structlog.testing.capture_logs() as logs:
            await place.slot.stop_workers()
            await replacement.done.wait()
    assert replacement.result is False
    assert place.alive == []
    assert place.slot.state is SlotState.STOPPED
    assert logs == [], "an end that was asked for is no error"


@pytest.mark.parametrize("hand_over", [True, False])
async def test_stop_while_a_successor_is_made(
    place: Place, hand_over: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await started(place, nursery)
        place.spawn_gate = trio.Event()
        replacement = Replacement(place, nursery, hand_over=hand_over)
        await trio.sleep(1)
        await place.slot.stop_workers()
        place.spawn_gate.set()
        await replacement.done.wait()
    assert replacement.result is False
    assert place.worker.calls == []
    assert place.alive == []
    assert trio.current_time() < 2


async def test_stop_while_a_replaced_one_finishes(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        old = await started(place, nursery)
        old.answers[Method.DRAIN] = hang
        await place.slot.replace_worker(hand_over=False, drain_timeout_ms=60_000)
        await place.slot.stop_workers()
    assert trio.current_time() < 1
    assert place.alive == []


async def test_no_other_worker_while_it_must_not_change(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await started(place, nursery)
    async with place.slot.lock_changes():
        place.worker.end(1)
        replacement = Replacement(place, nursery, hand_over=False)
        await trio.sleep(20)
        assert len(place.workers) == 1
    await replacement.done.wait()
    await trio.sleep(1)
    assert place.alive == [place.slot.worker]
    assert len(place.workers) == 2
    nursery.cancel_scope.cancel()


async def test_fill_no_more(place: Place, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        await started(place, nursery)
        place.slot.stop_filling()
        await trio.sleep(5)
        assert place.worker.code is None, "who is there stays"
        place.worker.end(0)
    assert len(place.workers) == 1
    assert place.ended == []


# ---- successors of forwarders, with their relays


async def test_a_successor_gets_what_a_dead_forwarder_had(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(forwarders, nursery)
    assert forwarders.adopted == {old.pid: []}
    forwarders.relay(old, 1, 2, 3)
    old.end(-9)
    await trio.sleep(1)
    assert forwarders.adopted[forwarders.worker.pid] == [1, 2, 3]
    assert forwarders.slot.worker is forwarders.worker
    nursery.cancel_scope.cancel()


async def test_hand_over(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(forwarders, nursery)
    finished = trio.Event()

    async def drain(request: Any) -> None:
        assert request.hand_over
        forwarders.relay(old, 5)  # to the last moment
        old.leave_line()
        await finished.wait()

    old.answers[Method.DRAIN] = drain
    forwarders.relay(old, 1, 2, 3)
    assert await forwarders.slot.replace_worker(hand_over=True, drain_timeout_ms=3000)
    new = forwarders.worker
    assert forwarders.slot.worker is new
    assert forwarders.adopted[new.pid] == [1, 2, 3, 5]
    assert [method for method, _request in new.calls] == [Method.START]
    assert (old.code, retiring(forwarders)) == (None, True), "it may have what cannot be handed over"
    finished.set()
    await trio.sleep(1)
    assert forwarders.alive == [new]
    assert len(called(old, Method.DRAIN)) == 1
    assert (forwarders.slot.restarts, forwarders.ended) == (0, [])
    forwarders.relay(new, 9)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(forwarders.store_slot.relays) == [1, 2, 3, 5, 9], "the store_slot listens to the new one"
    nursery.cancel_scope.cancel()


async def test_relays_do_not_stand_still_before_the_successor_is_forked(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(forwarders, nursery)
    gate = trio.Event()
    forwarders.spawn_gate = gate
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await trio.sleep(1)
    assert not called(old, Method.DRAIN)
    forwarders.spawn_gate = trio.Event()
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    await replacement.done.wait()
    nursery.cancel_scope.cancel()


async def test_a_forwarder_that_hangs_in_its_hand_over_is_killed_and_heard_to_the_end(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(forwarders, nursery)
    old.answers[Method.DRAIN] = hang
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await trio.sleep(HAND_OVER_TIMEOUT_S - 0.1)
    assert old.code is None
    for number in range(1, 100):
        forwarders.relay(old, number)
    with structlog.testing.capture_logs() as logs:
        await replacement.done.wait()
    assert replacement.result is True
    assert old.code == -9
    assert trio.current_time() == pytest.approx(HAND_OVER_TIMEOUT_S)
    assert forwarders.adopted[forwarders.worker.pid] == list(range(1, 100))
    assert "a forwarder does not hand its relays over; ending it" in {entry["event"] for entry in logs}
    await trio.sleep(30)
    assert forwarders.alive == [forwarders.slot.worker]
    assert (forwarders.slot.restarts, forwarders.ended) == (0, [])
    nursery.cancel_scope.cancel()


async def test_a_place_does_not_wait_for_the_forwarder_that_has_left_it(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """No other process has its relays if its successor does not start; it may have other things to finish."""
    old = await started(forwarders, nursery)
    forwarders.relay(old, 1, 2, 3)

    async def drain(_request: Any) -> None:
        old.leave_line()
        await trio.sleep(50)

    old.answers[Method.DRAIN] = drain
    forwarders.start_by = lambda _worker: RpcError("no")
    assert not await forwarders.slot.replace_worker(hand_over=True, drain_timeout_ms=60_000)
    forwarders.start_by = None
    await trio.sleep(2)
    assert forwarders.alive == [old, forwarders.slot.worker]
    assert forwarders.adopted[forwarders.worker.pid] == [1, 2, 3]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("failure", ["refuses", "dies at its start", "dies at once"])
async def test_a_place_whose_relays_were_handed_over_is_filled_again(
    forwarders: ForwarderPlace, nursery: trio.Nursery, failure: str, autojump_clock: trio.testing.MockClock
) -> None:
    """The old one has left already: the next one must have its relays."""

    async def die(worker: FakeWorker) -> None:
        worker.end(1)
        await trio.sleep_forever()

    old = await started(forwarders, nursery)
    forwarders.relay(old, 1, 2, 3)
    equip = forwarders.equip

    def weak(worker: FakeWorker) -> None:
        equip(worker)
        if failure == "dies at once":
            worker.end(1)
        elif failure == "refuses":
            worker.answers[Method.START] = lambda _request: RpcError("no")
        else:
            worker.answers[Method.START] = lambda _request: die(worker)

    forwarders.equip = weak  # type: ignore[method-assign]
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await replacement.done.wait()
    forwarders.equip = equip  # type: ignore[method-assign]
    assert replacement.result is False
    await trio.sleep(2)
    assert forwarders.slot.state is SlotState.RUNNING
    assert forwarders.alive == [forwarders.slot.worker]
    assert forwarders.adopted[forwarders.worker.pid] == [1, 2, 3]
    assert len(forwarders.workers) <= 4
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("when", ["spawn", "hand over", "start"])
async def test_an_old_forwarder_dies_during_its_replacement(
    forwarders: ForwarderPlace, nursery: trio.Nursery, when: str, autojump_clock: trio.testing.MockClock
) -> None:
    old = await started(forwarders, nursery)
    await trio.sleep(5)
    forwarders.relay(old, 1, 2, 3)
    gate = trio.Event()
    equip = forwarders.equip

    async def adopt_later(worker: FakeWorker) -> None:
        await gate.wait()
        await forwarders.adopt(worker)

    def waiting(worker: FakeWorker) -> None:
        if when == "start":
            worker.answers[Method.START] = lambda _request: adopt_later(worker)
        equip(worker)

    forwarders.equip = waiting  # type: ignore[method-assign]
    if when == "spawn":
        forwarders.spawn_gate = gate
    elif when == "hand over":
        old.answers[Method.DRAIN] = hang
    else:
        old.answers[Method.DRAIN] = lambda _request: old.leave_line()
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await trio.sleep(0.5)
    old.end(-9)
    await trio.sleep(0.5)
    gate.set()
    await replacement.done.wait()
    assert replacement.result is True
    await trio.sleep(10)
    assert len(forwarders.workers) == 2, "no other worker was started"
    assert forwarders.alive == [forwarders.slot.worker]
    assert forwarders.slot.state is SlotState.RUNNING
    assert forwarders.adopted[forwarders.worker.pid] == [1, 2, 3]
    retired_already = when in {"hand over", "start"}
    assert (forwarders.slot.restarts, len(forwarders.ended)) == ((0, 0) if retired_already else (1, 1))
    nursery.cancel_scope.cancel()


async def test_stop_during_a_hand_over(forwarders: ForwarderPlace, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        old = await started(forwarders, nursery)
        old.answers[Method.DRAIN] = hang
        replacement = Replacement(forwarders, nursery, hand_over=True)
        await trio.sleep(1)
        await forwarders.slot.stop_workers()
        await replacement.done.wait()
    assert replacement.result is False
    assert forwarders.alive == []
    assert forwarders.slot.state is SlotState.STOPPED
    assert trio.current_time() < 2


async def test_a_drain_takes_no_successor_that_is_being_forked(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The relays are still the old one's, which has all of the time for them."""
    old = await started(forwarders, nursery)
    forwarders.spawn_gate = trio.Event()
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await trio.sleep(1)
    nursery.start_soon(forwarders.slot.drain_workers, trio.current_time() + 60)
    await trio.sleep(1)
    forwarders.spawn_gate.set()
    await replacement.done.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert replacement.result is False
    assert [request.hand_over for request in called(old, Method.DRAIN)] == [False]
    nursery.cancel_scope.cancel()


async def test_a_drain_waits_for_a_hand_over(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The relays are the successor's, which has what is left of the time."""
    await started(forwarders, nursery)

    async def slow(worker: FakeWorker) -> None:
        await trio.sleep(3 * DRAIN_GRACE_S)
        await forwarders.adopt(worker)

    forwarders.start_by = slow
    replacement = Replacement(forwarders, nursery, hand_over=True)
    await trio.sleep(1)
    await forwarders.slot.drain_workers(trio.current_time() + 60)
    assert replacement.result is True
    new = forwarders.worker
    assert [request.hand_over for request in called(new, Method.DRAIN)] == [False]
    nursery.cancel_scope.cancel()


# ---- a worker that ran before we did


async def test_an_inherited_worker_goes_on(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = FakeWorker(Role.LOOKUP, 1)
    place.slot.inherit_worker(worker)
    assert place.slot.ready.is_set()
    assert place.slot.state is SlotState.RUNNING
    nursery.start_soon(place.slot.run)
    await trio.sleep(20)
    assert len(place.workers) == 0
    assert place.slot.worker is worker
    assert not called(worker, Method.START)
    assert called(worker, Method.GET_STATUS), "it is looked after like any other"
    worker.end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert place.slot.worker is place.worker
    assert (place.slot.restarts, place.ended) == (1, [place.slot])
    nursery.cancel_scope.cancel()


async def test_an_inherited_worker_that_hangs_is_ended(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = FakeWorker(Role.LOOKUP, 1)
    worker.answers[Method.GET_STATUS] = hang
    place.slot.inherit_worker(worker)
    nursery.start_soon(place.slot.run)
    await trio.sleep(HEALTH_FAILURES_MAX * (HEALTH_INTERVAL_S + HEALTH_TIMEOUT_S) + 1)
    assert worker.code == -9
    assert place.slot.worker is place.worker
    nursery.cancel_scope.cancel()


async def test_an_inherited_worker_is_replaced(
    place: Place, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = FakeWorker(Role.LOOKUP, 1)
    place.slot.inherit_worker(worker)
    nursery.start_soon(place.slot.run)
    await trio.testing.wait_all_tasks_blocked()
    assert await place.slot.replace_worker(hand_over=False, drain_timeout_ms=3000)
    await trio.sleep(1)
    assert worker.code == 0
    assert place.slot.worker is place.worker
    assert place.slot.restarts == 0
    nursery.cancel_scope.cancel()


async def test_an_inherited_forwarder_has_its_relays_already(
    forwarders: ForwarderPlace, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = forwarders.workers.add(FakeWorker(Role.FORWARDER))
    worker.is_inherited = True
    forwarders.equip(worker)
    forwarders.slot.inherit_worker(worker)
    nursery.start_soon(forwarders.slot.run)
    forwarders.relay(worker, 4, 5)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BlockingIOError):
        worker.line.sock.recv(1)  # type: ignore[union-attr]
    assert sorted(forwarders.store_slot.relays) == [4, 5]
    assert await forwarders.slot.replace_worker(hand_over=True, drain_timeout_ms=3000)
    assert forwarders.adopted[forwarders.worker.pid] == [4, 5]
    nursery.cancel_scope.cancel()
