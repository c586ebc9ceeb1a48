"""A place in the cluster that one worker process fills: keeps it filled, with pauses between failures, and lets one
worker follow another without a gap.
"""

import contextlib
import enum
from collections.abc import Awaitable, Callable

import trio

from proto.roles import Role
from proto.rpc_pb2 import DrainRequest, Empty, Method, Text
from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import Backoff, seconds
from proxy.runtime.rpc.client import RpcConnectionLost, RpcError
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess
from proxy.supervisor.startup.sockets import StartFailed

HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
HEALTH_FAILURES_MAX = 3

STABLE_AFTER_S = 1.0
"""A worker that lived this long was no failure to start; its successor comes at once."""

PAUSE_MAX_S = {Role.ADMIN: 1.0, Role.AUTH: 5.0, Role.LOOKUP: 5.0, Role.FORWARDER: 1.0}
"""The longest pause between failures. Relays may be waiting for a forwarder, Kubernetes' probes for an admin worker."""

DRAIN_GRACE_S = 5.0
"""How much longer than its timeout a drain is waited for."""

IMPORT_TIMEOUT_S = 30.0
HAND_OVER_TIMEOUT_S = 10.0

LEAVING_MAX = 8
"""Replaced workers of one place that finish what they have at the same time; each takes the memory of a process
(proxy.config.memory.WORKER_BYTES), which no container's plan knows of (docs/upgrade.md).
"""

NEXT_PROGRAM_DRAIN_MS = 1_000


class SlotState(enum.StrEnum):
    """What is to be seen of a place."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class WorkerRun:
    """One process in a place. ``left``: it has ended, or its place is another's; ``shelf_free``: nothing more comes
    from it that its successor would have to know. ``retired``: it was replaced, and finishes what it has by
    ``leaves_until`` (Trio's time).
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.slot_vacated = trio.Event()
        self.ended = trio.Event()
        self.channel_drained = trio.Event()
        self.retired = False
        self.drain_until = float("inf")
        self.exit_code = 0


SpawnWorker = Callable[[], Awaitable[WorkerProcess]]
StartWorker = Callable[["WorkerSlot", WorkerProcess], Awaitable[None]]
ServeChannel = Callable[[WorkerProcess], Awaitable[None]]


class WorkerSlot:
    """One role and number.

    ``spawn`` makes a process; ``start`` tells it all it needs to be ready, and makes it this place's worker.
    ``keep_shelf`` (forwarders) gives it what its predecessor left, and returns when it has said its last; that of an
    admin worker answers what it asks. ``process_ended`` is called with the process id of each worker that has ended,
    after everything that it said was heard. ``must_start``: whether a very first worker that cannot start ends the
    cluster.
    """

    def __init__(  # noqa: PLR0917 -- one call
        self,
        role: Role,
        index: int,
        spawn: SpawnWorker,
        start: StartWorker,
        on_end: Callable[["WorkerSlot"], None],
        serve_channel: ServeChannel | None = None,
        on_process_ended: Callable[[int], None] = lambda _pid: None,
    ) -> None:
        self.role = role
        self.index = index
        self.state = SlotState.STARTING
        self.restarts = 0
        self.worker: WorkerProcess | None = None
        self.runs: list[WorkerRun] = []
        self.ready = trio.Event()
        self.must_start = True
        self._spawn = spawn
        self._start = start
        self._on_end = on_end
        self._serve_worker_channel = serve_channel
        self._on_process_ended = on_process_ended
        self._stopping = False
        self._stop_begun = trio.Event()
        self._needs_successor: Callable[[], bool] = lambda: False
        self._came_up = trio.Event()
        self._backoff = Backoff(initial_s=0.1, max_s=PAUSE_MAX_S[role])
        self._next_run: WorkerRun | None = None
        self._change_lock = trio.Lock()
        self._nursery: trio.Nursery
        self._inherited: WorkerProcess | None = None

    @property
    def name(self) -> str:
        """Role and number, for logs."""
        return f"{self.role}-{self.index}"

    @property
    def leaving_runs(self) -> list[WorkerRun]:
        """Workers that were replaced and finish what they have, the oldest first."""
        return [life for life in self.runs if life.retired and life.worker is not self.worker]

    async def wait_for_leaving(self) -> None:
        """Return when no worker that was replaced still finishes what it has."""
        for life in list(self.runs):
            if life.retired:
                await life.ended.wait()

    def inherit_worker(self, worker: WorkerProcess) -> None:
        """Begin with a worker that runs already (after the supervisor became another by exec)."""
        self._inherited = worker
        self.worker = worker
        self.state = SlotState.RUNNING
        self.ready.set()

    # ---- the place

    @property
    def _is_finished(self) -> bool:
        """Whether nobody else comes into this place; in a drain somebody may have to."""
        return self._stopping and not self._needs_successor()

    async def run(self) -> None:
        """Keep the place filled until ``stop``. Raises StartFailed where the very first worker cannot start."""
        async with trio.open_nursery() as self._nursery:
            while not self._is_finished:
                await self._run_one_worker()
            self.state = SlotState.STOPPED

    async def _run_one_worker(self) -> None:
        """One worker, until its place is free."""
        started = trio.current_time()
        try:
            life = await self._obtain_run()
        except OSError as error:  # no descriptors, no memory, no processes to be had
            if self.must_start and not self.ready.is_set():
                raise StartFailed(f"the {self.role} worker {self.index} cannot be started: {error}") from None
            get_logger().error("a worker cannot be started", who=self.name, reason=str(error))
        else:
            await life.slot_vacated.wait()
            if life.retired or self._is_finished:
                return
            self._on_run_failed(life)
        self.restarts += 1
        self.state = SlotState.RESTARTING
        if trio.current_time() - started >= STABLE_AFTER_S:
            self._backoff.reset()
        else:
            await trio.sleep(self._backoff.next_pause_s())

    async def _obtain_run(self) -> WorkerRun:
        async with self._change_lock:  # not while ``replace`` is about it
            if self._next_run is not None:
                life, self._next_run = self._next_run, None
                return life
            if self._inherited is not None:
                worker, self._inherited = self._inherited, None
                life = self._start_run(worker)
                self._nursery.start_soon(self._kill_if_hung, life)
                return life
            life = self._start_run(await self._spawn())
            if self._is_finished:
                life.worker.kill()
            else:
                await self._start_worker(life)
            return life

    def _start_run(self, worker: WorkerProcess) -> WorkerRun:
        life = WorkerRun(worker)
        self.runs.append(life)
        self._nursery.start_soon(self._supervise_run, life)
        return life

    async def _supervise_run(self, life: WorkerRun) -> None:
        """Talk to a process until it has ended and has been heard to the end."""
        worker = life.worker
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_channel_of, life)
                async with trio.open_nursery() as talking:
                    talking.start_soon(worker.run_channel)
                    life.exit_code = await worker.wait()
                    talking.cancel_scope.cancel()
            self._on_process_ended(worker.pid)
        finally:
            worker.kill()
            self.runs.remove(life)
            if self.worker is worker:
                self.worker = None
            life.slot_vacated.set()
            life.ended.set()

    async def _serve_channel_of(self, life: WorkerRun) -> None:
        if self._serve_worker_channel is not None:
            await self._serve_worker_channel(life.worker)
        life.channel_drained.set()

    def _on_run_failed(self, life: WorkerRun) -> None:
        self._on_end(self)
        get_logger().error("a worker ended; starting another", who=self.name, pid=life.worker.pid, code=life.exit_code)

    async def _start_worker(self, life: WorkerRun) -> bool:
        """Have a new worker start; whether it runs."""
        worker = life.worker
        if self.worker is None:
            self.worker = worker
        try:
            await self._start(self, worker)
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
        self._nursery.start_soon(self._kill_if_hung, life)
        return True

    async def _kill_if_hung(self, life: WorkerRun) -> None:
        """End a worker that hangs: it would keep its clients waiting for ever."""
        missed = 0
        while missed < HEALTH_FAILURES_MAX:
            with trio.move_on_after(HEALTH_INTERVAL_S):
                await life.slot_vacated.wait()
                return
            try:
                await life.worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=HEALTH_TIMEOUT_S)
                missed = 0
            except RpcError:
                missed += 1
        get_logger().error("a worker hangs; ending it", who=self.name, pid=life.worker.pid)
        life.worker.kill()

    # ---- one worker after another

    async def replace_worker(self, *, hand_over: bool, drain_timeout_ms: int) -> bool:
        """Let a new process take the place; whether it runs. The old one finishes what it has, and ends.

        ``hand_over``: the old one first leaves its relays to the fd store, and the new one takes them from there.
        Otherwise the old one stays in its place until the new one is ready, and for good if that does not start.
        """
        async with self._change_lock:
            old = next((life for life in self.runs if life.worker is self.worker), None)
            if old is None:  # it has died in the meantime: whoever comes now is new
                return True
            life = self._start_run(await self._spawn())
            if self._stopping:
                life.worker.kill()
                return False
            if hand_over:
                await self._wait_until_imported_or_stopping(life.worker)
                if self._stopping:  # the relays are the old one's to drain
                    life.worker.kill()
                    return False
                await self._await_relay_release(old, drain_timeout_ms)
            up = await self._start_worker(life)
            if up:
                self._next_run = life
                if not old.retired:
                    self._retire(old, drain_timeout_ms)
            if old.retired:
                old.slot_vacated.set()
            return up

    async def quiesce_workers(self, at_rest: dict[WorkerRun, SerializedWorker], timeout_s: float) -> None:
        """Prepare the place's workers to be inherited, and note how; end those that do not come to rest in time."""
        for life in list(self.runs):
            one = await life.worker.quiesce_and_serialize(self.index, timeout_s=timeout_s)
            if one is not None:
                at_rest[life] = one
                continue
            get_logger().error("a worker does not come to rest; ending it", who=self.name)
            life.worker.kill()
            await life.slot_vacated.wait()

    async def end_before_exec(self, timeout_s: float) -> None:
        """End workers that another program in this process starts afresh; in time, they finish what they have."""
        for life in list(self.runs):
            life.retired = True  # it has not failed
            with trio.move_on_after(timeout_s):
                await self._drain_and_stop(life, NEXT_PROGRAM_DRAIN_MS)
            life.worker.kill()
            await life.slot_vacated.wait()

    async def wait_until_imported(self, worker: WorkerProcess) -> None:
        """Until a new process has done its imports, or failed to: relays need not stand still for that."""
        with contextlib.suppress(RpcError):  # it has not been started: that it says so is all we want to know
            await worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=IMPORT_TIMEOUT_S)

    async def _wait_until_imported_or_stopping(self, worker: WorkerProcess) -> None:
        async with trio.open_nursery() as nursery:

            async def end_early() -> None:
                await self._stop_begun.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_early)
            await self.wait_until_imported(worker)
            nursery.cancel_scope.cancel()

    async def _await_relay_release(self, old: WorkerRun, drain_timeout_ms: int) -> None:
        """Until an old forwarder has left its relays to the store."""
        self._retire(old, drain_timeout_ms)
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):
            await old.channel_drained.wait()
        if not old.channel_drained.is_set():
            get_logger().error("a forwarder does not hand its relays over; ending it", who=self.name)
            old.worker.kill()
            await old.channel_drained.wait()

    def _enforce_leaving_max(self) -> None:
        """End the oldest workers that still finish what they have, where there are too many of them."""
        for life in self.leaving_runs[: max(0, len(self.leaving_runs) + 1 - LEAVING_MAX)]:
            get_logger().error(
                "a replaced worker is ended before its time, and its connections with it: too many replacements "
                "follow each other within limits.drain_timeout_ms",
                who=self.name,
                pid=life.worker.pid,
                most=LEAVING_MAX,
            )
            self._nursery.start_soon(life.worker.stop)

    def _retire(self, old: WorkerRun, drain_timeout_ms: int) -> None:
        self._enforce_leaving_max()  # not earlier: its successor might not start
        old.retired = True
        old.drain_until = trio.current_time() + seconds(drain_timeout_ms)
        self._nursery.start_soon(self._drain_and_stop, old, drain_timeout_ms)

    async def _drain_and_stop(self, old: WorkerRun, drain_timeout_ms: int) -> None:
        request = DrainRequest(timeout_ms=drain_timeout_ms, hand_over=True)
        await self._request_drain(old.worker, request, "a replaced worker did not drain")
        await old.worker.stop()

    async def _request_drain(self, worker: WorkerProcess, request: DrainRequest, failure: str) -> bool:
        """Let a worker finish what it has; whether it was lost meanwhile."""
        try:
            await worker.send_command(Method.DRAIN, request, timeout_s=seconds(request.timeout_ms) + DRAIN_GRACE_S)
        except RpcError as error:
            get_logger().warning(failure, who=self.name, reason=str(error))
            return isinstance(error, RpcConnectionLost)
        return False

    # ---- the end

    async def drain_workers(self, until: float, *, needs_successor: Callable[[], bool] = lambda: False) -> None:
        """Let the place's workers finish what they have until then (Trio's time), end them, and start no other.

        Where one dies meanwhile and ``needs_successor``, another one follows it, and finishes the rest.
        """
        self._stopping = True
        self._stop_begun.set()
        self._needs_successor = needs_successor
        # A hand-over under way: the relays are its successor's to drain.
        with trio.move_on_at(max(until, trio.current_time() + DRAIN_GRACE_S)):
            async with self._change_lock:
                pass
        async with trio.open_nursery() as nursery:
            for life in self.leaving_runs:
                nursery.start_soon(self._drain_leaving, life, until)
            while (worker := await self._next_worker_to_drain(until)) is not None:
                if not await self._drain_worker(worker, until):
                    break
        self.stop_filling()
        with trio.move_on_at(until):
            await self.wait_for_leaving()
        await self.stop_workers()

    async def _drain_leaving(self, life: WorkerRun, until: float) -> None:
        """Have a replaced worker end its connections in order, within the time that it has anyway."""
        left_ms = max(0, round((min(until, life.drain_until) - trio.current_time()) * 1000))
        await self._request_drain(life.worker, DrainRequest(timeout_ms=left_ms), "a replaced worker did not drain")

    async def _next_worker_to_drain(self, until: float) -> WorkerProcess | None:
        """The place's worker once it runs; None where none does and none is needed, or none comes in time."""
        while True:
            came_up = self._came_up = trio.Event()
            if self.worker is not None and self.state is SlotState.RUNNING:
                return self.worker
            if not self._needs_successor() or trio.current_time() >= until:
                return None
            with trio.move_on_at(until):
                await came_up.wait()

    async def _drain_worker(self, worker: WorkerProcess, until: float) -> bool:
        """Let one worker finish; whether it died instead."""
        left_ms = max(0, round((until - trio.current_time()) * 1000))
        lost = await self._request_drain(worker, DrainRequest(timeout_ms=left_ms), "a worker did not drain")
        if lost:
            for life in [life for life in self.runs if life.worker is worker]:
                worker.kill()  # it cannot be talked to any more
                await life.ended.wait()
        return lost

    def lock_changes(self) -> contextlib.AbstractAsyncContextManager[object]:
        """While it lasts, no worker comes into this place."""
        return self._change_lock

    def stop_filling(self) -> None:
        """Start no other worker."""
        self._stopping = True
        self._stop_begun.set()
        self._needs_successor = lambda: False

    async def stop_workers(self) -> None:
        """End the place's workers, and start no other."""
        self.stop_filling()
        async with trio.open_nursery() as nursery:
            for life in list(self.runs):
                nursery.start_soon(life.worker.stop)
