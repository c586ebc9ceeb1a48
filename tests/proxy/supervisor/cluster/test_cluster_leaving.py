"""Workers that were replaced and finish what they have: proxy.supervisor.cluster.slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeWorker, SpawnSequence, no_listeners

from proto.roles import Role
from proto.rpc_pb2 import Method, RelayLeftBehind, StartRequest, StoreMessage
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.shared.fd_store_channel import close_descriptors
from proxy.supervisor.cluster.slot import LEAVING_MAX, SlotHooks, SlotState, WorkerSlot
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot

DRAIN_MS = 100_000


class Place:
    """A place for forwarders with relays that cannot move, each of which finishes after ``finish_s``."""

    def __init__(self, finish_s: float = 1000.0) -> None:
        self.workers = SpawnSequence()
        self.store_slot = FdStoreSlot()
        self.spawn_error: OSError | None = None
        self.start_error: RpcError | None = None
        self.forked = trio.Event()
        self.forked.set()
        self._finish_s = finish_s
        self.slot = WorkerSlot(
            Role.FORWARDER,
            0,
            SlotHooks(
                self._spawn,  # type: ignore[arg-type]
                self._start,  # type: ignore[arg-type]
                lambda _slot: None,
                self._keep_fd_store_slot,  # type: ignore[arg-type]
                self.store_slot.on_process_ended,
            ),
        )

    async def _spawn(self) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        if self.spawn_error is not None:
            raise self.spawn_error
        await self.forked.wait()
        worker = self.workers.add(FakeWorker(Role.FORWARDER, 0))
        worker.open_line()
        worker.answers[Method.START] = lambda _request: self._adopt(worker)
        worker.answers[Method.DRAIN] = self._leave_relays(worker)
        return worker

    @staticmethod
    async def _adopt(worker: FakeWorker) -> None:
        assert worker.line is not None
        while (received := await worker.line.receive()) is not None:
            close_descriptors(received[1])
            if received[0].complete:
                return

    async def _start(self, slot: WorkerSlot, worker: FakeWorker) -> None:
        """As the cluster does it."""
        if self.start_error is not None:
            raise self.start_error
        await worker.send_command(Method.START, StartRequest(index=slot.index), timeout_s=30)
        slot.worker = worker  # type: ignore[assignment]
        slot.state = SlotState.RUNNING

    async def _keep_fd_store_slot(self, worker: FakeWorker) -> None:
        assert worker.store_channel is not None
        tables = AddressTableExchange().open_channel(0)
        await self.store_slot.serve_forwarder(
            worker.store_channel, no_listeners, pid=worker.pid, is_new=True, tables=tables
        )

    def _leave_relays(self, worker: FakeWorker) -> Callable[[Any], Awaitable[None]]:
        async def drain(request: Any) -> None:
            if request.hand_over:
                relay = RelayLeftBehind(id=len(self.workers), client_ip="192.0.2.1")
                assert worker.line is not None
                worker.line.send_now(StoreMessage(left_behind=[relay]))
                worker.leave_line()
                await trio.sleep(self._finish_s)

        return drain

    async def replace(self) -> FakeWorker:
        """Let another worker have the place; the one that had it."""
        old: FakeWorker = self.workers[-1]
        assert await self.slot.replace_worker(hand_over=True, drain_timeout_ms=DRAIN_MS)
        return old

    async def started(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.slot.run)
        await self.slot.ready.wait()
        await trio.testing.wait_all_tasks_blocked()

    def leaving(self) -> list[Any]:
        return [life.worker for life in self.slot.leaving_runs]

    def close(self) -> None:
        for worker in self.workers:
            for channel in (worker.store_channel, worker.line):
                if channel is not None:
                    channel.sock.close()
        self.store_slot.close_stored()
        close_descriptors([self.store_slot.table_fd])


async def test_they_are_known_until_they_end(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    place = Place()
    await place.started(nursery)
    first = await place.replace()
    second = await place.replace()
    assert place.leaving() == [first, second]
    assert {pid: len(relays) for pid, relays in place.store_slot.left_behind.items()} == {first.pid: 1, second.pid: 1}
    first.end(-9)
    await trio.testing.wait_all_tasks_blocked()
    assert place.leaving() == [second]
    assert set(place.store_slot.left_behind) == {second.pid}, "its rows are its successor's to sum up"
    await trio.sleep(DRAIN_MS / 1000 + 10)
    assert second.code == 0
    assert (place.leaving(), place.store_slot.left_behind) == ([], {})
    nursery.cancel_scope.cancel()
    place.close()


async def test_the_last_message_of_a_killed_worker_is_read_before_its_end_is_reported(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Otherwise its relays left behind would be recorded for a process whose end is never reported."""
    place = Place()
    await place.started(nursery)
    worker: FakeWorker = place.workers[-1]
    assert worker.line is not None
    worker.line.send_now(StoreMessage(left_behind=[RelayLeftBehind(id=1, client_ip="192.0.2.1")]))
    worker.end(-9)
    await trio.testing.wait_all_tasks_blocked()
    assert place.store_slot.left_behind == {}
    nursery.cancel_scope.cancel()
    place.close()


async def test_a_drain_is_theirs_too(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """Each in the time that it has left, and no more than the drain's."""
    place = Place()
    await place.started(nursery)
    first = await place.replace()
    await trio.sleep(60)
    second = await place.replace()
    until = trio.current_time() + 50
    nursery.start_soon(place.slot.drain_workers, until)
    await trio.sleep(1)
    for worker, left_ms in ((first, 40_000), (second, 50_000)):
        *_, request = [request for method, request in worker.calls if method == Method.DRAIN]
        assert (request.timeout_ms, request.hand_over) == (left_ms, False)
    await trio.sleep(70)
    assert {worker.code for worker in place.workers} == {0}
    assert trio.current_time() > until
    nursery.cancel_scope.cancel()
    place.close()


async def test_not_too_many_finish_at_a_time(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """Each is a whole process: reloads that follow each other must not use up the machine's memory."""
    place = Place()
    await place.started(nursery)
    with structlog.testing.capture_logs() as logs:
        old = [await place.replace() for _ in range(LEAVING_MAX)]
        assert not logs
        old.append(await place.replace())
        await trio.testing.wait_all_tasks_blocked()
    assert [worker.code for worker in old] == [0, *[None] * LEAVING_MAX]
    assert [entry["pid"] for entry in logs if entry["log_level"] == "error"] == [old[0].pid]
    assert place.leaving() == old[1:]
    nursery.cancel_scope.cancel()
    place.close()


@pytest.mark.parametrize("hand_over", [True, False])
async def test_none_is_ended_for_a_successor_that_cannot_be_started(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, hand_over: bool
) -> None:
    """No descriptors, no memory: the relays of the oldest would end for nothing."""
    place = Place()
    await place.started(nursery)
    old = [await place.replace() for _ in range(LEAVING_MAX)]
    place.spawn_error = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        await place.slot.replace_worker(hand_over=hand_over, drain_timeout_ms=DRAIN_MS)
    await trio.testing.wait_all_tasks_blocked()
    assert [worker.code for worker in old] == [None] * LEAVING_MAX
    nursery.cancel_scope.cancel()
    place.close()


async def test_none_is_ended_for_a_successor_that_does_not_come_up(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Without a handover the old one stays in its place, so that there is not one more that leaves."""
    place = Place()
    await place.started(nursery)
    old = [await place.replace() for _ in range(LEAVING_MAX)]
    place.start_error = RpcError("its key cannot be read")
    assert not await place.slot.replace_worker(hand_over=False, drain_timeout_ms=DRAIN_MS)
    await trio.testing.wait_all_tasks_blocked()
    assert [worker.code for worker in old] == [None] * LEAVING_MAX
    nursery.cancel_scope.cancel()
    place.close()


async def test_none_is_ended_before_the_successor_is_forked(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    place = Place()
    await place.started(nursery)
    old = [await place.replace() for _ in range(LEAVING_MAX)]
    place.forked = trio.Event()
    nursery.start_soon(place.replace)
    await trio.testing.wait_all_tasks_blocked()
    assert [worker.code for worker in old] == [None] * LEAVING_MAX
    place.forked.set()
    await trio.testing.wait_all_tasks_blocked()
    assert [worker.code for worker in old] == [0, *[None] * (LEAVING_MAX - 1)]
    nursery.cancel_scope.cancel()
    place.close()
