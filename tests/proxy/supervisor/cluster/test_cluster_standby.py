"""proxy.supervisor.cluster.standby: a forwarder that is ready before it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeWorker

from proto.roles import Role
from proxy.supervisor.cluster.standby import PAUSE_S, StandbyForwarder


class Setup:
    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.error: OSError | None = None
        self.with_line = True
        self.delay_s = 0.0
        self.standby: Any = StandbyForwarder(self._spawn)  # type: ignore[arg-type]

    async def _spawn(self) -> FakeWorker:
        with trio.CancelScope(shield=True):  # a process that is being made is made
            await trio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.workers.append(FakeWorker(Role.FORWARDER))
        if self.with_line:
            self.workers[-1].open_line()
        return self.workers[-1]

    @property
    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.code is None]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    await trio.lowlevel.checkpoint()
    setup = Setup()
    yield setup
    for worker in setup.workers:
        worker.leave_line()
        if worker.store_channel is not None:
            worker.store_channel.sock.close()


async def test_one_is_kept_ready(setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    nursery.start_soon(setup.standby.run)
    await trio.sleep(100)
    [worker] = setup.workers
    assert (worker.code, worker.calls) == (None, []), "it waits for its START"
    assert setup.standby.take_worker() is worker
    assert setup.standby.take_worker() is None, "nobody else gets it"
    nursery.cancel_scope.cancel()


async def test_one_that_was_taken_is_its_takers(setup: Setup, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.standby.run)
        await trio.sleep(10)
        setup.standby.take_worker()
        await trio.sleep(10)
        await setup.standby.stop_and_wait()
    taken = setup.workers[0]
    assert (taken.code, taken.story) == (None, [])
    assert taken.store_channel is not None
    assert taken.store_channel.sock.fileno() >= 0


async def test_the_next_comes_after_a_pause(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The successor that was taken needs the CPU first."""
    nursery.start_soon(setup.standby.run)
    await trio.sleep(10)
    assert setup.standby.take_worker() is not None
    await trio.sleep(PAUSE_S - 0.01)
    assert len(setup.workers) == 1
    await trio.sleep(0.02)
    assert len(setup.workers) == 2
    await trio.sleep(100)
    assert len(setup.workers) == 2
    nursery.cancel_scope.cancel()


async def test_one_that_died_is_followed_by_another_after_a_pause(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(setup.standby.run)
    await trio.sleep(10)
    [dead] = setup.workers
    dead.end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.standby.take_worker() is None, "a dead one is of no use"
    assert dead.store_channel is not None
    assert dead.store_channel.sock.fileno() == -1
    setup.workers.clear()
    await trio.sleep(PAUSE_S - 0.01)
    assert setup.workers == []
    await trio.sleep(5)
    assert setup.standby.take_worker() is not None
    nursery.cancel_scope.cancel()


async def test_no_process_to_be_had(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.error = OSError(24, "Too many open files")
    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(setup.standby.run)
        await trio.sleep(3.5 * PAUSE_S)
    assert [entry["event"] for entry in logs] == ["no standby forwarder"] * 4
    assert setup.standby.take_worker() is None
    setup.error = None
    await trio.sleep(5)
    assert setup.standby.take_worker() is not None
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("with_line", [True, False])
async def test_stop(
    setup: Setup, nursery: trio.Nursery, with_line: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """At a drain: its copies of the listeners must not outlive theirs."""
    setup.with_line = with_line
    ended = trio.Event()

    async def run() -> None:
        await setup.standby.run()
        ended.set()

    nursery.start_soon(run)
    await trio.sleep(10)
    await setup.standby.stop_and_wait()
    [worker] = setup.workers
    assert worker.code == -9
    assert worker.store_channel is None or worker.store_channel.sock.fileno() == -1
    assert setup.standby.take_worker() is None
    await ended.wait()
    await trio.sleep(100)
    assert len(setup.workers) == 1, "no other is started"
    await setup.standby.stop_and_wait()


async def test_stop_waits_for_the_end_of_the_process(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Or another program in this process would have a child that it does not know."""
    nursery.start_soon(setup.standby.run)
    await trio.sleep(10)
    [worker] = setup.workers
    monkeypatch.setattr(worker, "kill", lambda: nursery.start_soon(die_slowly, worker))
    await setup.standby.stop_and_wait()
    assert trio.current_time() == pytest.approx(11)


async def die_slowly(worker: FakeWorker) -> None:
    await trio.sleep(1)
    worker.end(-9)


@pytest.mark.parametrize("when", ["at once", "in the pause", "while it is made"])
async def test_stop_while_there_is_none(
    setup: Setup, nursery: trio.Nursery, when: str, autojump_clock: trio.testing.MockClock
) -> None:
    if when == "at once":
        setup.standby.stop()
    if when == "while it is made":
        setup.delay_s = 5
    nursery.start_soon(setup.standby.run)
    await trio.sleep(1)
    if when == "in the pause":
        taken = setup.standby.take_worker()
        assert taken is not None
    await setup.standby.stop_and_wait()
    await trio.sleep(100)
    assert setup.alive == ([taken] if when == "in the pause" else [])


async def test_to_want_one_that_is_not_there_does_not_end_the_next(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(setup.standby.run)
    await trio.sleep(10)
    first = setup.standby.take_worker()
    assert setup.standby.take_worker() is None
    assert setup.standby.take_worker() is None
    await trio.sleep(10)
    assert setup.alive == [first, setup.standby.take_worker()]
    assert len(setup.workers) == 2


async def test_it_does_not_outlive_its_keeper(setup: Setup, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.standby.run)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert setup.alive == []
    assert len(setup.workers) == 1


async def test_nobody_is_ready_at_first(setup: Setup) -> None:
    assert setup.standby.take_worker() is None
