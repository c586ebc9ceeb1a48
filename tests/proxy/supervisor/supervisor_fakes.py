"""Worker processes and sockets that are none."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Text
from proxy.config.types import Config
from proxy.runtime.process.hardening import FileAccess
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcDeadlineExceeded
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.supervisor.processes.fork_server import NO_FILES
from proxy.supervisor.processes.worker_process import SerializedWorker

_pids = itertools.count(1000)


def make_config(**tables: dict[str, Any]) -> Config:
    """A configuration with some keys set, as a file would set them."""
    return msgspec.convert(tables, Config)


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors are of the same open file."""
    return os.path.sameopenfile(one, other)


def no_listeners() -> Sequence[int]:
    """What the fd store is told of a cluster that listens nowhere."""
    return ()


async def hang(_request: object) -> None:
    """An answer that never comes."""
    await trio.sleep_forever()


def after(seconds: float) -> Callable[[object], Awaitable[None]]:
    """An answer that takes its time."""

    async def answer(_request: object) -> None:
        await trio.sleep(seconds)

    return answer


class FakeWorker:
    """proxy.supervisor.processes.worker_process.WorkerProcess without a process."""

    def __init__(self, role: Role, index: int = 0, log: list[Any] | None = None) -> None:
        self.role = role
        self.index = index
        self.pid = next(_pids)
        self.started_at_s = time.monotonic()
        self.born = trio.current_time()
        self.code: int | None = None
        self.calls: list[tuple[int, Any]] = []
        self.timeouts: list[float] = []
        self.answers: dict[int, Callable[[Any], Any]] = {}
        self.story: list[str] = []
        self.is_inherited = False
        self.store_channel: StoreChannel | None = None
        self.line: StoreChannel | None = None
        self.questions_socket: socket.socket | None = None
        self.adopted: list[int] = []
        self.listeners = 0
        self._ended = trio.Event()
        self._calls: set[trio.CancelScope] = set()
        self._log = log if log is not None else []

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    async def run_channel(self) -> None:
        await trio.sleep_forever()

    async def serve_files(self, allowed_files: Callable[[], frozenset[str]]) -> None:
        self.allowed_files = allowed_files
        await trio.sleep_forever()

    async def call(self, method: int, request: Any, response_type: Any, *, timeout_s: float) -> Any:
        await trio.lowlevel.checkpoint()
        self.calls.append((method, request))
        self.timeouts.append(timeout_s)
        if method == Method.START:
            self.index = getattr(request, "index", self.index)
        self._log.append((self.name, method))
        if self._ended.is_set():
            raise RpcConnectionLost("the worker went away")
        if method == Method.DRAIN and request.hand_over and method not in self.answers:
            self.leave_line()  # a real forwarder's counters are a successor's then
        answer = self.answers.get(method)
        result = None if answer is None else answer(request)
        if hasattr(result, "__await__"):
            result = await self._in_time(result, timeout_s)
        if isinstance(result, Exception):
            raise result
        if response_type is not Text and isinstance(result, response_type):
            return result
        return Text(text=result or "") if response_type is Text else Empty()

    async def _in_time(self, answer: Any, timeout_s: float) -> Any:
        """No call outlives its process, or its deadline."""
        with trio.CancelScope(deadline=trio.current_time() + timeout_s) as scope:
            self._calls.add(scope)
            try:
                return await answer
            finally:
                self._calls.discard(scope)
        if self._ended.is_set():
            raise RpcConnectionLost("the worker went away")
        raise RpcDeadlineExceeded("no answer")

    async def send_command(self, method: int, request: Any, *, timeout_s: float) -> None:
        await self.call(method, request, Empty, timeout_s=timeout_s)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.code is not None
        return self.code

    async def stop(self) -> None:
        self.story.append("stop")
        self._log.append((self.name, "stop"))
        self.end(0)
        await trio.lowlevel.checkpoint()

    def kill(self) -> None:
        self.story.append("kill")
        self.end(-9)

    def end(self, code: int) -> None:
        """The process ends, and with it all that was under way."""
        if self.code is None:
            self.code = code
            self._ended.set()
            self.leave_line()
            for scope in self._calls:
                scope.cancel()

    def open_line(self) -> StoreChannel:
        """A real line to the fd store; the forwarder's end of it."""
        ours, theirs = create_store_sockets()
        self.store_channel, self.line = StoreChannel(ours), StoreChannel(theirs)
        return self.line

    def leave_line(self) -> None:
        """The forwarder has said its last to the fd store."""
        if self.line is not None:
            self.line.close()

    async def quiesce_and_serialize(self, index: int, *, timeout_s: float) -> SerializedWorker | None:
        await trio.lowlevel.checkpoint()
        self.timeouts.append(timeout_s)
        if self._ended.is_set():
            return None
        self.story.append("pause")
        store = self.store_channel.sock.fileno() if self.store_channel is not None else -1
        uptime_s = trio.current_time() - self.born
        return SerializedWorker(self.role.value, index, self.pid, uptime_s, self.pid + 1, self.pid + 2, store)

    def resume_calls(self) -> None:
        self.story.append("resume")


class FakeSocket:
    """A bound socket; its descriptor is real."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.listening = False
        self.closed = False
        self._descriptor = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._log = log

    def fileno(self) -> int:
        return -1 if self.closed else self._descriptor

    def listen(self, _backlog: int) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        self.listening = True
        self._log.append((self.name, "listen"))

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        self.closed = True
        self._log.append((self.name, "close"))


class FakeDirectory:
    """proxy.supervisor.startup.sockets.RuntimeDirectory without a folder."""

    def __init__(self, log: list[Any]) -> None:
        self.sockets: dict[str, FakeSocket] = {}
        self.cleared = False
        self.lock_fd = 499
        self._log = log

    def bind_socket(self, name: str) -> FakeSocket:
        self.sockets[name] = FakeSocket(name, self._log)
        return self.sockets[name]

    def remove_sockets(self) -> None:
        self.cleared = True


class Workshop:
    """Spawns FakeWorkers, and remembers what each was given."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.workers: list[FakeWorker] = []
        self.given: list[dict[str, Any]] = []
        self.own_files: dict[Role, FileAccess] = {}
        self.prepare: Callable[[FakeWorker], None] = lambda _worker: None

    async def spawn(
        self, _fork_server: object, role: Role, own_files: FileAccess = NO_FILES, **given: Any
    ) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        self.own_files[role] = own_files
        worker = FakeWorker(role, log=self.log)
        if role is Role.FORWARDER:
            worker.open_line()
        self.prepare(worker)
        self.workers.append(worker)
        self.given.append(given)
        self.log.append((role.value, "spawn"))
        return worker

    def of(self, role: Role) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role is role]

    def close(self) -> None:
        """Close the lines that are left."""
        for worker in self.workers:
            for channel in (worker.store_channel, worker.line):
                if channel is not None:
                    channel.sock.close()


class SpawnSequence(Sequence[FakeWorker]):
    """Workers of one slot, in the order in which they were spawned."""

    def __init__(self) -> None:
        self._workers: list[FakeWorker] = []

    def add(self, worker: FakeWorker) -> FakeWorker:
        self._workers.append(worker)
        return worker

    def __getitem__(self, index: Any) -> Any:
        return self._workers[index]

    def __len__(self) -> int:
        return len(self._workers)
