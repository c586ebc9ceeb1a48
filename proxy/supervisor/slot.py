"""A place in the cluster that one worker process fills: keeps it filled, with pauses between failures."""

import enum
from collections.abc import Awaitable, Callable

import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Text
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.tasks import Backoff
from proxy.supervisor.sockets import StartFailed
from proxy.supervisor.worker_process import WorkerProcess

LOOK_INTERVAL_S = 5.0
LOOK_TIMEOUT_S = 5.0
LOOKS_MISSED_MAX = 3

STABLE_AFTER_S = 10.0
"""A worker that lived this long was no failure to start; its successor comes at once."""


class SlotState(enum.StrEnum):
    """What is to be seen of a place."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"


Spawn = Callable[[], Awaitable[WorkerProcess]]
Start = Callable[["Slot"], Awaitable[None]]


class Slot:
    """One role and number. ``spawn`` makes a process, ``start`` tells it all it needs to be ready."""

    def __init__(self, role: Role, index: int, spawn: Spawn, start: Start, on_end: Callable[["Slot"], None]) -> None:
        self.role = role
        self.index = index
        self.state = SlotState.STARTING
        self.restarts = 0
        self.worker: WorkerProcess | None = None
        self.ready = trio.Event()
        self._spawn = spawn
        self._start = start
        self._on_end = on_end
        self._stopping = False
        self._backoff = Backoff(first_s=0.1, most_s=5.0)

    @property
    def name(self) -> str:
        """Role and number, for logs."""
        return f"{self.role}-{self.index}"

    async def run(self) -> None:
        """Keep the place filled until ``stop``. Raises StartFailed where the very first worker cannot start."""
        while not self._stopping:
            started = trio.current_time()
            try:
                await self._fill()
            except OSError as error:  # no descriptors, no memory, no processes to be had
                if not self.ready.is_set():
                    raise StartFailed(f"the {self.role} worker {self.index} cannot be started: {error}") from None
                get_logger().error("a worker cannot be started", who=self.name, reason=str(error))
            if self._stopping:
                break
            self.restarts += 1
            self.state = SlotState.RESTARTING
            if trio.current_time() - started >= STABLE_AFTER_S:
                self._backoff.reset()
            await trio.sleep(self._backoff.next_pause_s())
        self.state = SlotState.STOPPED

    async def _fill(self) -> None:
        """One process, from its start to its end."""
        worker = self.worker = await self._spawn()
        try:
            if self._stopping:
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.talk)
                nursery.start_soon(self._bring_up)
                nursery.start_soon(self._watch, worker)
                code = await worker.wait()
                nursery.cancel_scope.cancel()
        finally:
            worker.kill()
            self.worker = None
            self._on_end(self)
        if self._stopping:
            return
        get_logger().error("a worker ended; starting another", who=self.name, pid=worker.pid, code=code)
        if not self.ready.is_set():
            raise StartFailed(
                f"the {self.role} worker {self.index} ended with code {code} before it was ready; see its log"
            )

    async def _bring_up(self) -> None:
        try:
            await self._start(self)
        except RpcError as error:
            if self._stopping:
                return
            if not self.ready.is_set():
                raise StartFailed(f"the {self.role} worker {self.index} cannot start: {error}") from None
            get_logger().error("a worker cannot start", who=self.name, reason=str(error))
            if self.worker is not None:
                self.worker.kill()
            return
        self.state = SlotState.RUNNING
        self.ready.set()

    async def _watch(self, worker: WorkerProcess) -> None:
        """End a worker that hangs: it would keep its clients waiting for ever."""
        missed = 0
        while missed < LOOKS_MISSED_MAX:
            await trio.sleep(LOOK_INTERVAL_S)
            if self.state is not SlotState.RUNNING:
                continue
            try:
                await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=LOOK_TIMEOUT_S)
                missed = 0
            except RpcError:
                missed += 1
        get_logger().error("a worker hangs; ending it", who=self.name, pid=worker.pid)
        worker.kill()

    async def stop(self) -> None:
        """End the worker, and start no other."""
        self._stopping = True
        if self.worker is not None:
            await self.worker.stop()
