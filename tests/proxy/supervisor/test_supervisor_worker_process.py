"""proxy.supervisor.worker_process: how a worker is started, spoken to and ended, with the process left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Text
from proxy.runtime.descriptors import Descriptors, adopt_stream
from proxy.runtime.peers import Caller
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.rpc_server import RpcServer
from proxy.supervisor import worker_process
from proxy.supervisor.worker_process import EXIT_TIMEOUT_S, MODULES, WorkerProcess


class FakeProcess:
    """A trio.Process: its command, and copies of the descriptors that it inherited."""

    def __init__(self, command: list[str], options: dict[str, Any]) -> None:
        self.command = command
        self.options = options
        self.pid = 4711
        self.returncode: int | None = None
        self.killed = 0
        self.descriptors = Descriptors.decode(command[command.index("--descriptors") + 1])
        self.channel = os.dup(self.descriptors.channel)
        self.liveness = os.dup(self.descriptors.liveness)
        self._ended = trio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.killed += 1
        self.end(-9)

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def supervisor_is_gone(self) -> bool:
        """Whether nobody holds the other end of the liveness pipe."""
        os.set_blocking(self.liveness, False)
        try:
            return os.read(self.liveness, 1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for descriptor in (self.channel, self.liveness):
            os.close(descriptor)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeProcess]]:
    made: list[FakeProcess] = []

    async def open_process(command: list[str], **options: Any) -> FakeProcess:
        await trio.lowlevel.checkpoint()
        made.append(FakeProcess(command, options))
        return made[-1]

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    yield made
    for process in made:
        process.close()


Spawn = Callable[..., Awaitable[WorkerProcess]]


@pytest.fixture
def spawned(processes: list[FakeProcess]) -> Iterator[Spawn]:
    workers: list[WorkerProcess] = []

    async def spawn(**given: Any) -> WorkerProcess:
        workers.append(await WorkerProcess.spawn(Role.LOOKUP, 3, **given))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.kill()
        if worker._channel is not None:  # ``talk`` was never called
            worker._channel.close()


async def test_the_command(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned(service=77)
    [process] = processes
    assert process.command[:6] == [sys.executable, "-P", "-m", "lookup", "--index", "3"]
    assert process.descriptors.service == 77
    assert set(process.options["pass_fds"]) == {process.descriptors.channel, process.descriptors.liveness, 77}
    assert process.options["process_group"] == 0, "Ctrl-C is for the supervisor alone"
    assert worker.pid == 4711


def test_every_kind_of_worker_has_its_module() -> None:
    assert set(MODULES) == {Role.AUTH, Role.LOOKUP, Role.FORWARDER}


async def test_only_the_supervisor_holds_the_pipes_other_end(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned()
    [process] = processes
    assert not process.supervisor_is_gone()
    worker.kill()
    assert process.supervisor_is_gone()


async def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_process(*_: Any, **__: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot allocate"):
        await WorkerProcess.spawn(Role.LOOKUP, 3)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_descriptors_that_cannot_be_had_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(worker_process.socket, "socketpair", none_left)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        await WorkerProcess.spawn(Role.LOOKUP, 3)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_calls(processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery) -> None:
    worker = await spawned()
    nursery.start_soon(worker.talk)

    async def status(data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        return Text(text="fine").SerializeToString()

    server = RpcServer({Method.GET_STATUS: status}, max_frame_bytes=1000)
    stream = adopt_stream(os.dup(processes[0].channel))
    nursery.start_soon(server.serve_connection, stream, Caller(Role.SUPERVISOR, 1))
    assert (await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=5)).text == "fine"
    with pytest.raises(RpcError):
        await worker.command(Method.DRAIN, Empty(), timeout_s=5)
    nursery.cancel_scope.cancel()


async def test_calls_after_the_channel_has_ended(
    processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = await spawned()
    nursery.start_soon(worker.talk)
    stream = adopt_stream(os.dup(processes[0].channel))
    await stream.send_eof()
    await trio.sleep(0.1)
    with pytest.raises(RpcError):
        await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=5)
    await stream.aclose()
    nursery.cancel_scope.cancel()


async def test_stop_asks_first(processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery) -> None:
    worker = await spawned()
    [process] = processes
    nursery.start_soon(worker.stop)
    await trio.testing.wait_all_tasks_blocked()
    assert process.supervisor_is_gone()
    assert not process.killed
    process.end(0)
    assert await worker.wait() == 0
    await trio.testing.wait_all_tasks_blocked()
    assert not process.killed


async def test_stop_kills_what_does_not_go(
    processes: list[FakeProcess], spawned: Spawn, autojump_clock: trio.testing.MockClock
) -> None:
    worker = await spawned()
    await worker.stop()
    assert trio.current_time() == pytest.approx(EXIT_TIMEOUT_S)
    assert processes[0].killed == 1
    assert await worker.wait() == -9


async def test_kill_twice(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned()
    worker.kill()
    worker.kill()
    assert processes[0].killed == 1
    assert worker_process.EXIT_TIMEOUT_S == EXIT_TIMEOUT_S
