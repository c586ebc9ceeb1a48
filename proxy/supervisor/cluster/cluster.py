"""The cluster of workers: started in order, told about each other, reloaded, drained in order."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import trio
from prometheus_client import Counter, Gauge

from proto.roles import Role
from proto.rpc_pb2 import Method, Peer, SetPeersRequest, StartRequest
from proxy import __version__
from proxy.config.load import (
    changes_that_need_a_restart,
    changes_that_need_an_upgrade,
    changes_that_need_new_processes,
    forwarder_count,
)
from proxy.config.types import Config
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.observability.logs import get_logger
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.observability.process_metrics import measure_process
from proxy.runtime.rpc.client import RpcError
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters
from proxy.supervisor.cluster.slot import KeepShelf, SlotState, Spawn, WorkerRun, WorkerSlot
from proxy.supervisor.cluster.standby import Standby
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.exec_handover import HandoverState, place_name, shelf_state
from proxy.supervisor.handover.fd_store import FdStoreSlot
from proxy.supervisor.processes.configure import (
    ReloadRefused,
    config_for,
    configure_all,
    configure_leaving,
    configure_or_end,
)
from proxy.supervisor.processes.worker_process import Inherited, WorkerProcess
from proxy.supervisor.startup.sockets import BACKLOG, RuntimeDirectory, StartFailed, bind_tcp

START_TIMEOUT_S = 30.0
PEERS_TIMEOUT_S = 5.0
QUIESCE_TIMEOUT_S = 5.0
REPLACING_LOOK_S = 0.1

START_ORDER = (Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.FORWARDER)
"""Who must be there before whom; the drain goes the other way. Nobody waits for the admin worker."""

KEY_HOLDERS = frozenset({Role.AUTH, Role.LOOKUP})  # who seals principals, or opens them


class Cluster:
    """All workers of one supervisor, and what they share. ``serve_admin`` answers what an admin worker asks."""

    def __init__(
        self, config: Config, directory: RuntimeDirectory, legacy: HandoverState, serve_admin: KeepShelf | None = None
    ) -> None:
        self.config = config
        self.begun = trio.Event()
        self.leaving = False
        """Whether clients should not be sent here any more, though they are still accepted."""
        self.draining = False
        self.generation = legacy.generation
        self.replacing = legacy.generation > 1
        self.listeners: list[socket.socket] = []
        self._binds: list[str] = []
        for index, listener in enumerate(config.listener):
            self._bind(f"listener[{index}].bind", listener.bind, legacy)
        self.registry = new_registry()
        measure_process(self.registry)
        self._seal_key = legacy.seal_key
        self._workers_lock = trio.Lock()
        self._services = {
            (role, index): legacy.take_service(role, index) or directory.bind(f"{role.value}-{index}.sock")
            for role, count in ((Role.AUTH, config.cluster.auth_workers), (Role.LOOKUP, config.cluster.lookup_workers))
            for index in range(count)
        }
        # An upgrade cannot take forwarders away: somebody has to go on with their relays.
        forwarders = max(forwarder_count(config), len(legacy.shelves))
        self.shelves = [*legacy.shelves, *(FdStoreSlot() for _ in range(forwarders - len(legacy.shelves)))]
        as_before = len(legacy.shelves) == forwarders
        self._connections = legacy.connections if as_before else create_shared_counters(forwarders)
        if legacy.connections not in {-1, self._connections}:
            os.close(legacy.connections)
        self._counters = ConnectionCounters(self._connections)
        self._address_tables = AddressTableExchange()
        self._standby = Standby(self._spawn_forwarder)
        self._serve_admin = serve_admin
        places = [(Role.ADMIN, 0)] * (serve_admin is not None)
        places += [*self._services, *((Role.FORWARDER, index) for index in range(forwarders))]
        self.slots = [self._slot(role, index) for role, index in places]
        for slot in self.slots:
            inherited = legacy.workers.pop((slot.role, slot.index), None)
            if inherited is not None:
                slot.inherit(inherited)
            # A first start that fails must not end what the program before left.
            slot.must_start = self.generation == 1
            if not slot.must_start and slot.role is not Role.ADMIN:
                slot.ready.set()
        self._legacy = legacy
        self._measure()

    @property
    def started(self) -> bool:
        """Whether every place has been filled once."""
        return self.begun.is_set()

    def _bind(self, key: str, bind: str, legacy: HandoverState) -> None:
        sock = legacy.take_listener(bind)
        if sock is None:
            try:
                sock = bind_tcp(key, bind)
            except StartFailed as error:
                if self.generation == 1:
                    raise
                # What the program before left must not end by this.
                get_logger().error("the cluster goes on without a listener", reason=str(error))
                return
        self.listeners.append(sock)
        self._binds.append(bind)

    def _measure(self) -> None:
        self._restarts = Counter(
            "pulsar_proxy_worker_restarts", "Workers that ended and were replaced.", ["of"], registry=self.registry
        )
        for role in START_ORDER:
            self._restarts.labels(of=role.value)
        stored = Gauge(
            "pulsar_proxy_stored_relays", "Relays whose sockets the supervisor keeps a copy of.", registry=self.registry
        )
        stored.set_function(lambda: sum(len(shelf.relays) for shelf in self.shelves))
        info = Gauge(
            "pulsar_proxy_build_info", "Always 1; the version is the label.", ["version"], registry=self.registry
        )
        info.labels(version=__version__).set(1)

    def _slot(self, role: Role, index: int) -> WorkerSlot:
        if role is Role.FORWARDER:
            keep_shelf = partial(self._keep_shelf, index)
            process_ended = self.shelves[index].process_ended
            return WorkerSlot(
                role, index, self._next_forwarder, self._start_worker, self._worker_ended, keep_shelf, process_ended
            )

        service = self._services[role, index].fileno() if role in KEY_HOLDERS else -1
        spawn: Spawn = lambda: WorkerProcess.spawn(role, service=service)  # noqa: E731
        keep = self._serve_admin if role is Role.ADMIN else None
        return WorkerSlot(role, index, spawn, self._start_worker, self._worker_ended, keep)

    async def _next_forwarder(self) -> WorkerProcess:
        return self._standby.take() or await self._spawn_forwarder()

    async def _spawn_forwarder(self) -> WorkerProcess:
        return await WorkerProcess.spawn(Role.FORWARDER, connections=self._connections)

    async def _keep_shelf(self, index: int, worker: WorkerProcess) -> None:
        if worker.store is None:
            raise RuntimeError("a forwarder without a line to the fd store")

        # Only with its START: a process that has not got that far would keep them open if the supervisor were killed.
        def listeners() -> list[int]:
            return [listener.fileno() for listener in self.listeners if listener.fileno() >= 0]

        tables = self._address_tables.line(index)
        orderly = await self.shelves[index].serve(
            worker.store,
            listeners,
            pid=worker.pid,
            new=not worker.inherited,
            tables=tables,
            keeps_relays=self.config.relay.crash_safe,
        )
        if not orderly:
            worker.kill()

    def of(self, role: Role) -> list[WorkerSlot]:
        """The places of one role."""
        return [slot for slot in self.slots if slot.role is role]

    # ---- start

    async def run(self, ready: trio.Event) -> None:
        """Start all workers in order, set ``ready`` once they are, and keep them running. Raises StartFailed."""
        async with trio.open_nursery() as nursery:
            for role in START_ORDER:
                if self.draining:  # a signal that came while the first workers were starting
                    return
                if role is Role.FORWARDER:
                    self._listen()
                for slot in self.of(role):
                    nursery.start_soon(slot.run)
                await self._wait_until_ready([] if role is Role.ADMIN else [role])
            with trio.move_on_after(START_TIMEOUT_S if self.generation > 1 else float("inf")):
                await self._wait_until_ready(START_ORDER)
            if self.draining:
                return
            if self.config.relay.crash_safe:
                nursery.start_soon(self._standby.run)
            self.begun.set()
            if self.generation > 1:
                await self.replace_all([role for role in START_ORDER if role is not Role.ADMIN])  # that one is new
                await self._legacy.discard()
            ready.set()

    async def _wait_until_ready(self, roles: Iterable[Role]) -> None:
        for slot in [slot for role in roles for slot in self.of(role)]:
            await slot.ready.wait()

    def _listen(self) -> None:
        """Only now may clients come: whoever serves them is ready."""
        for listener in self.listeners:
            listener.listen(BACKLOG)

    async def _start_worker(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        """Tell the workers who the new one is, and the new one all it needs. Raises RpcError."""
        if slot.role is Role.ADMIN:  # the others need not wait for its imports
            await slot.wait_until_awake(worker)
        async with self._workers_lock:
            peers = self._peers()
            async with trio.open_nursery() as nursery:
                for other in self._running({Role.AUTH, Role.LOOKUP}):
                    if other is not worker:
                        nursery.start_soon(self._tell_peers, other, peers)
            seal_key = self._seal_key if slot.role in KEY_HOLDERS else b""
            config = config_for(slot.role, self.config)
            request = StartRequest(config=config, seal_key=seal_key, peers=peers, index=slot.index)
            await worker.command(Method.START, request, timeout_s=START_TIMEOUT_S)
            slot.worker = worker
            slot.state = SlotState.RUNNING

    async def _tell_peers(self, worker: WorkerProcess, peers: list[Peer]) -> None:
        try:
            await worker.command(Method.SET_PEERS, SetPeersRequest(peers=peers), timeout_s=PEERS_TIMEOUT_S)
        except RpcError as error:
            # It is ending, or it hangs: it would turn the new worker away. Its successor will be told at its start.
            get_logger().warning("a worker was not told of its peers; ending it", pid=worker.pid, reason=str(error))
            worker.kill()

    def _peers(self) -> list[Peer]:
        """Who may call workers; the admin worker calls none, and is a stranger to them."""
        callers = [(slot.role, life) for slot in self.slots for life in slot.lives if slot.role is not Role.ADMIN]
        return [Peer(pid=life.worker.pid, role=role.value) for role, life in callers]

    def _running(self, roles: Iterable[Role]) -> list[WorkerProcess]:
        """The workers of some roles; not those that only finish what they have."""
        return [
            slot.worker
            for slot in self.slots
            if slot.role in roles and slot.state is SlotState.RUNNING and slot.worker is not None
        ]

    def _leaving_forwarders(self) -> list[WorkerProcess]:
        """Forwarders that were replaced and still have relays."""
        return [life.worker for slot in self.of(Role.FORWARDER) for life in slot.leaving]

    def _worker_ended(self, slot: WorkerSlot) -> None:
        if slot.role is Role.FORWARDER:
            self._counters.set_connections(slot.index, 0)
        if not self.draining:
            self._restarts.labels(of=slot.role.value).inc()

    # ---- reload

    async def reload(self, config: Config) -> None:
        """Give every worker a new configuration; all or nobody. Raises ReloadRefused.

        Most of it a worker takes over as it is, and nobody notices. What it cannot, makes new processes necessary,
        which follow the old ones without a reset.
        """
        refusal = _beyond_a_reload(self.config, config)
        if refusal:
            raise ReloadRefused(refusal)
        new_processes = changes_that_need_new_processes(self.config, config)
        async with self._workers_lock:  # a worker that is starting has the old configuration on its way
            if not new_processes:
                # Looked for one role after another: who has died meanwhile has no say.
                roles = [role for role in START_ORDER if role is not Role.ADMIN]
                asked = (worker for role in roles for worker in self._running({role}))
                await configure_all(asked, self.config, config)
                await configure_or_end(self._running({Role.ADMIN}), config)
                await configure_leaving(self._leaving_forwarders(), config)
            self.config = config
        if new_processes:
            get_logger().info("replacing all workers", because_of=",".join(new_processes))
            await self.replace_all()

    # ---- new processes

    async def replace_all(self, roles: Iterable[Role] = START_ORDER) -> None:
        """Let new processes follow the old ones, one by one; relays go on, lookups under way are finished."""
        self.replacing = True
        try:
            for role in roles:
                for slot in self.of(role):
                    if self.draining:
                        return
                    await self._replace(slot)
        finally:
            self.replacing = False
        async with self._workers_lock:  # the configuration may be newer than the processes that were replaced
            await configure_leaving(self._leaving_forwarders(), self.config)

    async def _replace(self, slot: WorkerSlot) -> None:
        try:
            # A forwarder at least leaves its counters: two cannot write the same table.
            hand_over = slot.role is Role.FORWARDER
            done = await slot.replace(hand_over=hand_over, drain_timeout_ms=self.config.limits.drain_timeout_ms)
        except OSError as error:
            get_logger().error("a worker was not replaced", who=slot.name, reason=error.strerror)
        else:
            get_logger().info("replaced a worker" if done else "a worker's successor did not start", who=slot.name)

    async def wait_for_retired(self) -> None:
        """Return when no worker is being replaced, and no replaced one is left that still finishes what it has."""
        while self.replacing:  # noqa: ASYNC110 -- once in an upgrade
            await trio.sleep(REPLACING_LOOK_S)
        for slot in self.slots:
            await slot.wait_for_retired()

    @contextlib.asynccontextmanager
    async def standing_still(self) -> AsyncIterator[list[Inherited]]:
        """Nothing changes and no call is under way; the workers as another program in this process may inherit them.

        A worker that does not come to rest is ended: whoever comes next begins with another.
        """
        at_rest: dict[WorkerRun, Inherited] = {}
        async with contextlib.AsyncExitStack() as locks:
            for slot in self.slots:
                await locks.enter_async_context(slot.unchanging())
            if self.config.relay.crash_safe:
                await self._standby.stop_and_wait()
            async with trio.open_nursery() as nursery:
                for slot in self.slots:
                    if slot.role is not Role.ADMIN:
                        nursery.start_soon(slot.come_to_rest, at_rest, QUIESCE_TIMEOUT_S)
            for slot in self.of(Role.ADMIN):  # it has nothing that would have to go on; last, as /healthz is its
                await slot.end_for_next_program(QUIESCE_TIMEOUT_S)
            try:
                # One that has died in the meantime has left nothing but numbers, which are others' now.
                yield [at_rest[life] for slot in self.slots for life in slot.lives if life in at_rest]
            finally:
                for slot in self.slots:
                    for life in slot.lives:
                        life.worker.resume()

    def state(self, workers: list[Inherited]) -> dict[str, Any]:
        """What another program in this process has to know: fields of proxy.supervisor.handover.exec_handover.State."""
        return {
            "generation": self.generation + 1,
            "runtime_dir": self.config.cluster.runtime_dir,
            "seal_key": self._seal_key,
            "listeners": {bind: sock.fileno() for bind, sock in zip(self._binds, self.listeners, strict=True)},
            "services": {place_name(*place): sock.fileno() for place, sock in self._services.items()},
            "connections": self._connections,
            "shelves": [shelf_state(shelf) for shelf in self.shelves],
            "workers": workers,
        }

    # ---- drain

    async def drain(self) -> None:
        """Finish in order: forwarders let their clients leave, then the workers that they needed may go. All together
        have the time that is configured.
        """
        self.draining = True
        until = trio.current_time() + seconds(self.config.limits.drain_timeout_ms)
        self._standby.stop()
        for listener in self.listeners:
            listener.close()
        for role in reversed(START_ORDER):
            async with trio.open_nursery() as nursery:
                for slot in self.of(role):
                    nursery.start_soon(self._drain_slot, slot, until)
            get_logger().info("drained", who=role.value)

    async def _drain_slot(self, slot: WorkerSlot, until: float) -> None:
        if slot.role is not Role.FORWARDER:
            await slot.drain(until)
            return
        shelf = self.shelves[slot.index]
        # As long as the store keeps relays, somebody has to go on with them.
        await slot.drain(until, needs_successor=lambda: bool(shelf.relays))
        shelf.clear()  # nobody will go on with what it may have left

    def stop_at_once(self) -> None:
        """End every worker, now."""
        for slot in self.slots:
            for life in slot.lives:
                life.worker.kill()

    def close(self) -> None:
        """Close what was bound."""
        for sock in (*self.listeners, *self._services.values()):
            sock.close()
        self._address_tables.close()


def _beyond_a_reload(old: Config, new: Config) -> str:
    """Say which changes a reload cannot make, and what can; nothing where it can make all."""
    upgrade, restart = changes_that_need_an_upgrade(old, new), changes_that_need_a_restart(old, new)
    parts = [f"a restart is needed to change: {', '.join(restart)}"] if restart else []
    if upgrade:
        parts.append(f"an upgrade (pulsar-trio-proxy upgrade) is needed to change: {', '.join(upgrade)}")
    return "; ".join(parts)
