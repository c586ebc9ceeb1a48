"""proxy.supervisor.processes.worker_process: how a worker is started, spoken to and ended, with the process left
out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any
from unittest.mock import ANY

import pytest
import trio
import trio.testing

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, StoreMessage, Text
from proxy.runtime.process.descriptors import Descriptors, adopt_socket, adopt_stream
from proxy.runtime.process.hardening import FileAccess
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcServer
from proxy.runtime.shared.fd_store_channel import StoreChannel
from proxy.supervisor.processes import worker_process
from proxy.supervisor.processes.children import child_reaper
from proxy.supervisor.processes.worker_process import (
    EXIT_TIMEOUT_S,
    ForkedProcess,
    SerializedWorker,
    WorkerProcess,
)


class FakeProcess:
    """A ForkedProcess: its role, what it was given, and copies of its own descriptors."""

    def __init__(self, role: Role, given: Mapping[str, int]) -> None:
        self.role = role
        self.given = given
        self.pid = 4711
        self.returncode: int | None = None
        self.killed = 0
        self.descriptors = Descriptors(**given)
        self.channel = os.dup(self.descriptors.channel)
        self.liveness = os.dup(self.descriptors.liveness)
        self.store = os.dup(self.descriptors.store) if self.descriptors.store >= 0 else None
        self.questions = os.dup(self.descriptors.questions) if self.descriptors.questions >= 0 else None
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
        """Whether no process holds the other end of the liveness pipe."""
        os.set_blocking(self.liveness, False)
        try:
            return os.read(self.liveness, 1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for descriptor in (self.channel, self.liveness, self.store, self.questions):
            if descriptor is not None:
                os.close(descriptor)


class StoreChannelOf:
    """A forwarder's end of its line to the fd store."""

    def __init__(self, process: FakeProcess) -> None:
        assert process.store is not None
        self._sock = adopt_socket(os.dup(process.store))

    def __enter__(self) -> StoreChannel:
        return StoreChannel(self._sock)

    def __exit__(self, *_: object) -> None:
        self._sock.close()


class FakeForkServer:
    """A fork server without processes; ``error``: what a fork fails with."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.forked: list[FakeProcess] = []

    async def fork(self, role: Role, descriptors: Mapping[str, int], _files: FileAccess) -> int:
        await trio.lowlevel.checkpoint()
        assert child_reaper._spawning, "only its spawner may reap it"
        if self.error is not None:
            raise self.error
        self.forked.append(FakeProcess(role, descriptors))
        return self.forked[-1].pid


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeForkServer]:
    server = FakeForkServer()
    monkeypatch.setattr(worker_process, "ForkedProcess", lambda pid: next(p for p in server.forked if p.pid == pid))
    yield server
    for process in server.forked:
        process.close()


@pytest.fixture
def processes(fork_server: FakeForkServer) -> list[FakeProcess]:
    return fork_server.forked


Spawn = Callable[..., Awaitable[WorkerProcess]]


@pytest.fixture
def spawned(fork_server: Any) -> Iterator[Spawn]:
    workers: list[WorkerProcess] = []

    async def spawn(**given: Any) -> WorkerProcess:
        workers.append(await WorkerProcess.spawn(fork_server, given.pop("role", Role.LOOKUP), **given))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.kill()
        worker._channel.close()
        if worker.store_channel is not None:
            worker.store_channel.sock.close()
        if worker.questions_socket is not None:
            worker.questions_socket.close()


async def test_a_worker_is_forked_with_its_descriptors(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned(service=77)
    [process] = processes
    assert process.role is Role.LOOKUP
    assert process.given == {"channel": ANY, "liveness": ANY, "files": ANY, "service": 77}
    assert child_reaper._own[4711] is process  # type: ignore[comparison-overlap]
    assert worker.pid == 4711
    assert (worker.store_channel, worker.is_inherited) == (None, False)


async def test_a_forwarders_descriptors(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned(role=Role.FORWARDER, connections=83)
    [process] = processes
    told = process.descriptors
    assert (told.service, told.connections) == (-1, 83)
    assert set(process.given) == {"channel", "liveness", "files", "store", "connections"}
    with StoreChannelOf(process) as theirs:
        await theirs.send(StoreMessage(dropped_relays=[5]))
        assert worker.store_channel is not None
        assert await worker.store_channel.receive() == (StoreMessage(dropped_relays=[5]), [])


async def test_an_admin_workers_descriptors(processes: list[FakeProcess], spawned: Spawn) -> None:
    """Its port comes over the line on which it asks, and only once it can serve it."""
    worker = await spawned(role=Role.ADMIN)
    [process] = processes
    told = process.descriptors
    assert process.role is Role.ADMIN
    assert (told.service, told.connections, told.store) == (-1, -1, -1)
    assert set(process.given) == {"channel", "liveness", "files", "questions"}
    assert worker.questions_socket is not None
    assert process.questions is not None
    os.write(process.questions, b"L")
    assert worker.questions_socket.recv(1) == b"L"
    assert not worker.questions_socket.getblocking()


async def test_only_the_worker_holds_the_other_ends(processes: list[FakeProcess], spawned: Spawn) -> None:
    """Or its death would not be the end of its lines."""
    worker = await spawned(role=Role.FORWARDER)
    [process] = processes
    process.close()
    processes.clear()
    assert worker.store_channel is not None
    assert await worker.store_channel.receive() is None
    assert worker._channel.recv(1) == b""


async def test_only_the_supervisor_holds_the_pipes_other_end(processes: list[FakeProcess], spawned: Spawn) -> None:
    worker = await spawned()
    [process] = processes
    assert not process.supervisor_is_gone()
    worker.kill()
    assert process.supervisor_is_gone()


@pytest.mark.parametrize("role", [Role.LOOKUP, Role.FORWARDER])
async def test_a_process_that_cannot_be_forked_leaves_nothing_open(role: Role, fork_server: Any) -> None:
    fork_server.error = OSError(12, "Cannot allocate memory")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot allocate"):
        await WorkerProcess.spawn(fork_server, role)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("role", "had"), [(Role.LOOKUP, 0), (Role.FORWARDER, 0), (Role.FORWARDER, 1)])
async def test_descriptors_that_cannot_be_had_leave_nothing_open(
    role: Role, had: int, fork_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    socketpair = socket.socketpair
    left = iter(range(had))

    def none_left(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise OSError(24, "Too many open files")
        return socketpair(*arguments)

    monkeypatch.setattr(socket, "socketpair", none_left)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        await WorkerProcess.spawn(fork_server, role)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_calls(processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery) -> None:
    worker = await spawned()
    nursery.start_soon(worker.run_channel)

    async def status(data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        return Text(text="fine").SerializeToString()

    server = RpcServer({Method.GET_STATUS: status}, max_frame_bytes=1000)
    stream = adopt_stream(os.dup(processes[0].channel))
    nursery.start_soon(server.serve_connection, stream, Caller(Role.SUPERVISOR, 1))
    assert (await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)).text == "fine"
    with pytest.raises(RpcError):
        await worker.send_command(Method.DRAIN, Empty(), timeout_s=60)
    nursery.cancel_scope.cancel()


async def test_calls_after_the_channel_has_ended(
    processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = await spawned()
    nursery.start_soon(worker.run_channel)
    stream = adopt_stream(os.dup(processes[0].channel))
    await stream.send_eof()
    await trio.sleep(0.1)
    with pytest.raises(RpcError):
        await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)
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


# ---- a child of the program before this one


Children = Callable[[str], ForkedProcess]


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    """Real processes that no other code waits for."""
    await trio.lowlevel.checkpoint()
    pids: list[int] = []

    def start(script: str) -> ForkedProcess:
        pids.append(os.posix_spawn("/bin/sh", ["sh", "-c", script], {}))
        return ForkedProcess(pids[-1])

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # noqa: ASYNC222 -- it has been killed


async def test_a_childs_exit_code(children: Children) -> None:
    child = children("exit 7")
    assert await child.wait() == 7
    assert child.returncode == 7
    assert await child.wait() == 7


async def test_a_child_is_killed(children: Children) -> None:
    child = children("exec sleep 300")
    assert child.returncode is None
    with trio.move_on_after(0.05) as scope:
        await child.wait()
    assert scope.cancelled_caught
    child.kill()
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.kill()  # its number may be another's by now


async def test_the_number_of_one_that_has_ended_is_not_used(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children("exit 0")
    await child.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: pytest.fail("a stranger was killed"))
        child.kill()


async def test_two_wait_for_a_child(children: Children, nursery: trio.Nursery) -> None:
    before = len(os.listdir("/proc/self/fd"))
    child = children("exec sleep 300")
    codes: list[int] = []

    async def wait() -> None:
        codes.append(await child.wait())

    async with trio.open_nursery() as waiting:
        for _ in range(3):
            waiting.start_soon(wait)
        with trio.move_on_after(0.05):
            await child.wait()  # and one that loses patience
        child.kill()
    assert codes == [-9, -9, -9]
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_child_that_is_none() -> None:
    with pytest.raises(ProcessLookupError):
        ForkedProcess(2**22 - 3)


class Before:
    """What the program before left open of one worker; the worker's ends."""

    def __init__(self, pid: int) -> None:
        self.channel, self.theirs = socket.socketpair()
        self.reading, self.liveness = os.pipe()
        self.store, self.store_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = pid

    def inherited(self, role: Role) -> SerializedWorker:
        channel, store = os.dup(self.channel.fileno()), os.dup(self.store.fileno())
        for number in (channel, store, self.liveness):
            os.set_inheritable(number, True)
        return SerializedWorker(role.value, 3, self.pid, 100.0, channel, self.liveness, store)

    def close(self) -> None:
        for sock in (self.channel, self.theirs, self.store, self.store_theirs):
            sock.close()
        os.close(self.reading)


@pytest.fixture
async def before(children: Children) -> AsyncIterator[Before]:
    await trio.lowlevel.checkpoint()
    before = Before(children("exec sleep 300").pid)
    yield before
    before.close()


async def answer_status(_data: bytes, _caller: Caller) -> bytes:
    await trio.lowlevel.checkpoint()
    return Text(text="as before").SerializeToString()


def serve_worker(channel: int, nursery: trio.Nursery, handler: Any = answer_status) -> None:
    """Be the worker behind a channel."""
    server = RpcServer({Method.GET_STATUS: handler}, max_frame_bytes=1000)
    nursery.start_soon(server.serve_connection, adopt_stream(os.dup(channel)), Caller(Role.SUPERVISOR, 1))


async def test_a_worker_is_taken_over(before: Before, nursery: trio.Nursery) -> None:
    told = before.inherited(Role.FORWARDER)
    worker = WorkerProcess.from_serialized(told)
    assert (worker.role, worker.pid, worker.is_inherited) == (Role.FORWARDER, before.pid, True)
    assert worker.started_at_s == pytest.approx(worker_process.time.monotonic() - 100, abs=5)  # type: ignore[attr-defined]
    assert not any(os.get_inheritable(number) for number in (told.channel, told.liveness, told.store))
    nursery.start_soon(worker.run_channel)
    serve_worker(before.theirs.fileno(), nursery)
    assert (await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)).text == "as before"
    before.store_theirs.send(StoreMessage(dropped_relays=[5]).SerializeToString())
    assert worker.store_channel is not None
    assert await worker.store_channel.receive() == (StoreMessage(dropped_relays=[5]), [])
    os.set_blocking(before.reading, False)
    with pytest.raises(BlockingIOError):
        os.read(before.reading, 1)
    worker.kill()
    assert await worker.wait() == -9
    assert os.read(before.reading, 1) == b""
    worker.store_channel.close()
    nursery.cancel_scope.cancel()


async def test_a_worker_without_a_store_is_taken_over(before: Before) -> None:
    told = before.inherited(Role.LOOKUP)
    os.close(told.store)
    worker = WorkerProcess.from_serialized(SerializedWorker("lookup", 0, before.pid, 1.0, told.channel, told.liveness))
    assert (worker.role, worker.store_channel) == (Role.LOOKUP, None)
    worker.kill()
    assert await worker.wait() == -9


# ---- a worker for the next program


async def test_a_quiesced_worker_is_serialized_and_sends_no_calls_until_resumed(
    processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery
) -> None:
    worker = await spawned(role=Role.FORWARDER)
    nursery.start_soon(worker.run_channel)
    serve_worker(processes[0].channel, nursery)
    await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)
    told = await worker.quiesce_and_serialize(5, timeout_s=60)
    assert told is not None
    assert (told.role, told.index, told.pid) == ("forwarder", 5, 4711)
    assert 0 <= told.uptime_s < 5
    assert (told.channel, told.liveness) == (worker._channel.fileno(), worker._liveness)
    assert worker.store_channel is not None
    assert told.store == worker.store_channel.sock.fileno()
    assert not processes[0].supervisor_is_gone()
    with trio.move_on_after(0.05) as scope:
        await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)
    assert scope.cancelled_caught, "nothing is on its way from now on"
    worker.resume_calls()
    await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)
    nursery.cancel_scope.cancel()


async def test_a_worker_without_a_store_for_the_next_program(
    processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery
) -> None:
    worker = await spawned()
    nursery.start_soon(worker.run_channel)
    await trio.testing.wait_all_tasks_blocked()
    told = await worker.quiesce_and_serialize(0, timeout_s=60)
    assert told is not None
    assert told.store == -1
    nursery.cancel_scope.cancel()


async def test_a_call_under_way_is_waited_for(
    processes: list[FakeProcess], spawned: Spawn, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    worker = await spawned()
    nursery.start_soon(worker.run_channel)
    ended: list[str] = []

    async def slowly(data: bytes, caller: Caller) -> bytes:
        await trio.sleep(2)
        return await answer_status(data, caller)

    async def call() -> None:
        ended.append((await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=10)).text)

    serve_worker(processes[0].channel, nursery, slowly)
    nursery.start_soon(call)
    await trio.sleep(1)
    assert await worker.quiesce_and_serialize(0, timeout_s=5) is not None
    assert trio.current_time() == pytest.approx(2, abs=0.1)
    assert ended == ["as before"]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("why", ["hangs", "ended", "let go", "never spoken to"])
async def test_a_worker_that_cannot_be_inherited_is_not_serialized(
    processes: list[FakeProcess],
    spawned: Spawn,
    nursery: trio.Nursery,
    why: str,
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = await spawned()
    if why != "never spoken to":
        nursery.start_soon(worker.run_channel)
    await trio.testing.wait_all_tasks_blocked()
    if why == "hangs":
        nursery.start_soon(ask, worker)
        await trio.sleep(1)
    elif why == "ended":
        processes[0].end(1)
    elif why == "let go":
        worker._close_liveness()
    assert await worker.quiesce_and_serialize(0, timeout_s=5) is None
    nursery.cancel_scope.cancel()


async def ask(worker: WorkerProcess) -> None:
    with pytest.raises(RpcError):
        await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=60)
