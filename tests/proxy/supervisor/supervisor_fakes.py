"""Worker processes and sockets that are none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Text
from proxy.config.types import Config
from proxy.runtime.rpc_client import RpcError

_pids = itertools.count(1000)


def make_config(**tables: dict[str, Any]) -> Config:
    """A configuration with some keys set, as a file would set them."""
    return msgspec.convert(tables, Config)


class FakeWorker:
    """proxy.supervisor.worker_process.WorkerProcess without a process."""

    def __init__(self, role: Role, index: int = 0, log: list[Any] | None = None) -> None:
        self.role = role
        self.index = index
        self.pid = next(_pids)
        self.started = trio.current_time()
        self.code: int | None = None
        self.calls: list[tuple[int, Any]] = []
        self.timeouts: list[float] = []
        self.answers: dict[int, Callable[[Any], Any]] = {}
        self.story: list[str] = []
        self._ended = trio.Event()
        self._log = log if log is not None else []

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    async def talk(self) -> None:
        await trio.sleep_forever()

    async def call(self, method: int, request: Any, response_type: Any, *, timeout_s: float) -> Any:
        await trio.lowlevel.checkpoint()
        self.calls.append((method, request))
        self.timeouts.append(timeout_s)
        self._log.append((self.name, method))
        if self._ended.is_set():
            raise RpcError("the worker went away")
        answer = self.answers.get(method)
        result = None if answer is None else answer(request)
        if hasattr(result, "__await__"):
            result = await result
        if isinstance(result, Exception):
            raise result
        return Text(text=result or "") if response_type is Text else Empty()

    async def command(self, method: int, request: Any, *, timeout_s: float) -> None:
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
        """The process ends."""
        if self.code is None:
            self.code = code
            self._ended.set()


class FakeSocket:
    """A bound socket."""

    _descriptors = itertools.count(500)

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.listening = False
        self.closed = False
        self._descriptor = next(self._descriptors)
        self._log = log

    def fileno(self) -> int:
        return -1 if self.closed else self._descriptor

    def listen(self, _backlog: int) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        self.listening = True
        self._log.append((self.name, "listen"))

    def close(self) -> None:
        self.closed = True
        self._log.append((self.name, "close"))


class FakeDirectory:
    """proxy.supervisor.sockets.RuntimeDirectory without a folder."""

    def __init__(self, log: list[Any]) -> None:
        self.sockets: dict[str, FakeSocket] = {}
        self.cleared = False
        self._log = log

    def bind(self, name: str) -> FakeSocket:
        self.sockets[name] = FakeSocket(name, self._log)
        return self.sockets[name]

    def clear(self) -> None:
        self.cleared = True


class Workshop:
    """Spawns FakeWorkers, and remembers what each was given."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.workers: list[FakeWorker] = []
        self.given: list[dict[str, Any]] = []
        self.prepare: Callable[[FakeWorker], None] = lambda _worker: None

    async def spawn(self, role: Role, index: int, **given: Any) -> FakeWorker:
        await trio.lowlevel.checkpoint()
        worker = FakeWorker(role, index, self.log)
        self.prepare(worker)
        self.workers.append(worker)
        self.given.append(given)
        self.log.append((worker.name, "spawn"))
        return worker

    def of(self, role: Role) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role is role]


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
