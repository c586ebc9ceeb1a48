"""A slot of the cluster, filled by one worker process: restarts with pauses, and replacement without a gap."""

import contextlib
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from proto.roles import Role
from proto.rpc_pb2 import DrainRequest
from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import Backoff, seconds
from proxy.runtime.rpc.errors import RpcError
from proxy.supervisor.cluster.worker_run import DRAIN_GRACE_S, WorkerRun, request_drain
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess
from proxy.supervisor.startup.sockets import StartFailed

STABLE_AFTER_S = 1.0
"""A worker that ran this long has not failed to start; its successor is spawned at once."""

PAUSE_MAX_S = {Role.ADMIN: 1.0, Role.AUTH: 5.0, Role.LOOKUP: 5.0, Role.HTTP: 1.0, Role.FORWARDER: 1.0}
"""The longest pause between failures. Relays may be waiting for a forwarder, Kubernetes' probes for an admin worker."""

HAND_OVER_TIMEOUT_S = 10.0

LEAVING_MAX = 8
"""Replaced workers of one slot that finish their work at the same time; each takes the memory of a process
(proxy.config.memory.WORKER_BYTES), which no container's plan includes (docs/upgrade.md).
"""

NEXT_PROGRAM_DRAIN_MS = 1_000


class SlotState(enum.StrEnum):
    """State of a slot, as /status shows it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"


SpawnWorker = Callable[[], Awaitable[WorkerProcess]]
StartWorker = Callable[["WorkerSlot", WorkerProcess], Awaitable[None]]
ServeChannel = Callable[[WorkerProcess], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SlotHooks:
    """What the cluster does for one slot.

    ``spawn`` makes a process. ``start`` sends it all that it needs to serve, and makes it the slot's worker. ``on_end``
    is called after a worker has ended unexpectedly. ``serve_channel`` serves a worker's own channel until it is
    drained: for a forwarder the fd store, for an admin worker its calls. ``on_process_ended`` is called with the
    process id of each worker that has ended, after everything that it sent was applied. ``allowed_files`` returns the
    files that are opened for a worker.
    """

    spawn: SpawnWorker
    start: StartWorker
    on_end: Callable[["WorkerSlot"], None]
    serve_channel: ServeChannel | None = None
    on_process_ended: Callable[[int], None] = lambda _pid: None
    allowed_files: Callable[[], frozenset[str]] = frozenset


class WorkerSlot:
    """The slot of one role and index. ``must_start``: whether a first worker that cannot start ends the cluster."""

    def __init__(self, role: Role, index: int, hooks: SlotHooks) -> None:
        self.role = role
        self.index = index
        self.state = SlotState.STARTING
        self.restarts = 0
        self.worker: WorkerProcess | None = None
        self.runs: list[WorkerRun] = []
        self.ready = trio.Event()
        self.must_start = True
        self._hooks = hooks
        self._stopping = False
        self._needs_successor: Callable[[], bool] = lambda: False
        self._came_up = trio.Event()
        self._backoff = Backoff(initial_s=0.1, max_s=PAUSE_MAX_S[role])
        self._next_run: WorkerRun | None = None
        self._change_lock = trio.Lock()
        self._nursery: trio.Nursery
        self._inherited: WorkerProcess | None = None

    @property
    def name(self) -> str:
        """Role and index, for logs."""
        return f"{self.role}-{self.index}"

    @property
    def running_worker(self) -> WorkerProcess | None:
        """The slot's worker, if it can be called; none that is only starting."""
        return self.worker if self.state is SlotState.RUNNING else None

    @property
    def leaving_runs(self) -> list[WorkerRun]:
        """Runs of workers that were replaced and finish their work, the oldest first."""
        return [run for run in self.runs if run.retired and run.worker is not self.worker]

    @property
    def callable_workers(self) -> list[WorkerProcess]:
        """The workers that can be called: the slot's own, then those that were replaced and finish their work."""
        own = self.running_worker
        return [*([own] if own is not None else ()), *(run.worker for run in self.leaving_runs)]

    async def wait_for_leaving(self) -> None:
        """Wait until every replaced worker has ended."""
        for run in list(self.runs):
            if run.retired:
                await run.ended.wait()

    def inherit_worker(self, worker: WorkerProcess) -> None:
        """Fill the slot with a running worker, which the program before the exec has started."""
        self._inherited = worker
        self.worker = worker
        self.state = SlotState.RUNNING
        self.ready.set()

    # ---- filling

    @property
    def _is_finished(self) -> bool:
        """Whether no further worker fills this slot; in a drain, relays left behind may need one."""
        return self._stopping and not self._needs_successor()

    async def run(self) -> None:
        """Keep the slot filled until ``stop_workers``. Raises StartFailed where the very first worker cannot start."""
        async with trio.open_nursery() as self._nursery:
            while not self._is_finished:
                await self._run_one_worker()
            self.state = SlotState.STOPPED

    async def _run_one_worker(self) -> None:
        """Run one worker until the slot is vacant, then pause if it failed."""
        started = trio.current_time()
        try:
            run = await self._obtain_run()
        except OSError as error:  # out of descriptors, memory or processes
            if self.must_start and not self.ready.is_set():
                raise StartFailed(f"the {self.role} worker {self.index} cannot be started: {error}") from None
            get_logger().error("a worker cannot be started", who=self.name, reason=str(error))
        else:
            await run.slot_vacated.wait()
            if run.retired or self._is_finished:
                return
            self._on_run_failed(run)
        self.restarts += 1
        self.state = SlotState.RESTARTING
        if trio.current_time() - started >= STABLE_AFTER_S:
            self._backoff.reset()
        else:
            await trio.sleep(self._backoff.next_pause_s())

    async def _obtain_run(self) -> WorkerRun:
        async with self._change_lock:  # not during ``replace_worker``
            if self._next_run is not None:
                run, self._next_run = self._next_run, None
                return run
            if self._inherited is not None:
                worker, self._inherited = self._inherited, None
                run = self._start_run(worker)
                self._nursery.start_soon(run.kill_if_hung)
                return run
            run = self._start_run(await self._hooks.spawn())
            if self._is_finished:
                run.worker.kill()
            else:
                await self._start_worker(run)
            return run

    def _start_run(self, worker: WorkerProcess) -> WorkerRun:
        run = WorkerRun(worker, self.name)
        self.runs.append(run)
        self._nursery.start_soon(self._supervise_run, run)
        return run

    async def _supervise_run(self, run: WorkerRun) -> None:
        """Run a process's channels until it has ended and everything that it sent was applied."""
        worker = run.worker
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_channel_of, run)
                async with trio.open_nursery() as talking:
                    talking.start_soon(worker.run_channel)
                    talking.start_soon(worker.serve_files, self._hooks.allowed_files)
                    run.exit_code = await worker.wait()
                    talking.cancel_scope.cancel()
            self._hooks.on_process_ended(worker.pid)
        finally:
            worker.kill()
            self.runs.remove(run)
            if self.worker is worker:
                self.worker = None
            run.slot_vacated.set()
            run.ended.set()

    async def _serve_channel_of(self, run: WorkerRun) -> None:
        if self._hooks.serve_channel is not None:
            await self._hooks.serve_channel(run.worker)
        run.channel_drained.set()

    def _on_run_failed(self, run: WorkerRun) -> None:
        self._hooks.on_end(self)
        get_logger().error("a worker ended; starting another", who=self.name, pid=run.worker.pid, code=run.exit_code)

    async def _start_worker(self, run: WorkerRun) -> bool:
        """Send a new worker its START; return True if it runs."""
        worker = run.worker
        if self.worker is None:
            self.worker = worker
        try:
            await self._hooks.start(self, worker)
        except RpcError as error:
            if not self._stopping:
                if self.must_start and not self.ready.is_set():
                    raise StartFailed(
                        f"the {self.role} worker {self.index} cannot start: {error.reason}; see its log"
                    ) from None
                get_logger().error("a worker cannot start", who=self.name, pid=worker.pid, reason=error.reason)
            worker.kill()
            return False
        self.ready.set()
        self._came_up.set()
        self._nursery.start_soon(run.kill_if_hung)
        return True

    # ---- one worker after another

    async def replace_worker(self, *, hand_over: bool, drain_timeout_ms: int) -> bool:
        """Replace the worker by a new process; return True if that runs. The old one finishes its work and ends.

        ``hand_over``: the old one first leaves its relays to the fd store, and the new one takes them from there.
        Otherwise the old one stays in the slot until the new one is ready, and for good if that does not start.
        """
        async with self._change_lock:
            old = next((run for run in self.runs if run.worker is self.worker), None)
            if old is None:  # it has died in the meantime: its successor is new anyway
                return True
            run = self._start_run(await self._hooks.spawn())
            if self._stopping:
                run.worker.kill()
                return False
            if hand_over:
                await self._await_relay_release(old, drain_timeout_ms)
            up = await self._start_worker(run)
            if up:
                self._next_run = run
                if not old.retired:
                    self._retire(old, drain_timeout_ms)
            if old.retired:
                old.slot_vacated.set()
            return up

    async def quiesce_workers(self, at_rest: dict[WorkerRun, SerializedWorker], timeout_s: float) -> None:
        """Quiesce the slot's workers for an exec and add them to ``at_rest``; kill those that take too long."""
        for run in list(self.runs):
            one = await run.worker.quiesce_and_serialize(self.index, timeout_s=timeout_s)
            if one is not None:
                at_rest[run] = one
                continue
            get_logger().error("a worker does not come to rest; ending it", who=self.name)
            run.worker.kill()
            await run.slot_vacated.wait()

    async def end_before_exec(self, timeout_s: float) -> None:
        """End workers that the next program spawns again; they have ``timeout_s`` to finish their work."""
        for run in list(self.runs):
            run.retired = True  # it has not failed
            with trio.move_on_after(timeout_s):
                await run.drain_and_stop(NEXT_PROGRAM_DRAIN_MS)
            run.worker.kill()
            await run.slot_vacated.wait()

    async def _await_relay_release(self, old: WorkerRun, drain_timeout_ms: int) -> None:
        """Retire a forwarder and wait until it has left its relays to the fd store; kill one that does not."""
        self._retire(old, drain_timeout_ms)
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):
            await old.channel_drained.wait()
        if not old.channel_drained.is_set():
            get_logger().error("a forwarder does not hand its relays over; ending it", who=self.name)
            old.worker.kill()
            await old.channel_drained.wait()

    def _enforce_leaving_max(self) -> None:
        """Stop the oldest replaced workers where one more would exceed LEAVING_MAX."""
        for run in self.leaving_runs[: max(0, len(self.leaving_runs) + 1 - LEAVING_MAX)]:
            get_logger().error(
                "a replaced worker is ended before its time, and its connections with it: too many replacements "
                "follow each other within limits.drain_timeout_ms",
                who=self.name,
                pid=run.worker.pid,
                most=LEAVING_MAX,
            )
            self._nursery.start_soon(run.worker.stop)

    def _retire(self, old: WorkerRun, drain_timeout_ms: int) -> None:
        self._enforce_leaving_max()  # not earlier: the successor might not start
        old.retired = True
        old.drain_until = trio.current_time() + seconds(drain_timeout_ms)
        self._nursery.start_soon(old.drain_and_stop, drain_timeout_ms)

    # ---- draining and stopping

    async def drain_workers(self, until: float, *, needs_successor: Callable[[], bool] = lambda: False) -> None:
        """Drain the slot's workers until then (Trio's time), stop them, and spawn no other.

        Where one dies meanwhile and ``needs_successor()``, another one follows it and drains the rest.
        """
        self._stopping = True
        self._needs_successor = needs_successor
        # During a hand-over, the successor has to drain the relays.
        with trio.move_on_at(max(until, trio.current_time() + DRAIN_GRACE_S)):
            async with self._change_lock:
                pass
        async with trio.open_nursery() as nursery:
            for run in self.leaving_runs:
                nursery.start_soon(self._drain_leaving, run, until)
            while (worker := await self._next_worker_to_drain(until)) is not None:
                if not await self._drain_worker(worker, until):
                    break
        self.stop_filling()
        with trio.move_on_at(until):
            await self.wait_for_leaving()
        await self.stop_workers()

    async def _drain_leaving(self, run: WorkerRun, until: float) -> None:
        """Drain a replaced worker, at the latest when its own time is up."""
        left_ms = max(0, round((min(until, run.drain_until) - trio.current_time()) * 1000))
        await request_drain(run.worker, DrainRequest(timeout_ms=left_ms), self.name, "a replaced worker did not drain")

    async def _next_worker_to_drain(self, until: float) -> WorkerProcess | None:
        """Return the slot's worker once it runs; None where none is needed, or none starts in time."""
        while True:
            came_up = self._came_up = trio.Event()
            if self.worker is not None and self.state is SlotState.RUNNING:
                return self.worker
            if not self._needs_successor() or trio.current_time() >= until:
                return None
            with trio.move_on_at(until):
                await came_up.wait()

    async def _drain_worker(self, worker: WorkerProcess, until: float) -> bool:
        """Drain one worker; return True if it died instead."""
        left_ms = max(0, round((until - trio.current_time()) * 1000))
        lost = await request_drain(worker, DrainRequest(timeout_ms=left_ms), self.name, "a worker did not drain")
        if lost:
            for run in [run for run in self.runs if run.worker is worker]:
                worker.kill()  # its channel is gone
                await run.ended.wait()
        return lost

    def lock_changes(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return a context in which no worker enters this slot."""
        return self._change_lock

    def stop_filling(self) -> None:
        """Spawn no further worker."""
        self._stopping = True
        self._needs_successor = lambda: False

    async def stop_workers(self) -> None:
        """Stop the slot's workers, and spawn no other."""
        self.stop_filling()
        async with trio.open_nursery() as nursery:
            for run in list(self.runs):
                nursery.start_soon(run.worker.stop)
