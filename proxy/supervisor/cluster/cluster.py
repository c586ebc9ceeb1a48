"""The cluster of workers: start in order, peers, reload, replacement, quiescing for an exec, drain in order."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import trio
from prometheus_client import CollectorRegistry

from proto.roles import Role
from proto.rpc_pb2 import LogLevelRequest, Method, Peer, SetPeersRequest, StartRequest
from proxy.common.logs import get_logger
from proxy.config.changes import (
    changes_that_need_new_processes,
    reload_refusal,
)
from proxy.config.files import files_of_role
from proxy.config.http import http_worker_count
from proxy.config.memory import forwarder_count
from proxy.config.types import Config
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.process.listener_channel import pass_listeners, wait_for_request
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcError
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters
from proxy.runtime.shared.relay_request_channel import working_relay_request_sockets
from proxy.supervisor.cluster.client_listeners import ClientListeners
from proxy.supervisor.cluster.log_levels import LogLevels
from proxy.supervisor.cluster.metrics import ClusterMetrics
from proxy.supervisor.cluster.slot import ServeChannel, SlotHooks, SlotState, WorkerSlot
from proxy.supervisor.cluster.worker_run import WorkerRun
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.exec_handover import HandoverState, serialize_slot, slot_key
from proxy.supervisor.handover.fd_store import FdStoreSlot
from proxy.supervisor.handover.unit_store import UnitStore
from proxy.supervisor.processes.audit_pipe import create_audit_pipe
from proxy.supervisor.processes.configure import (
    ReloadRefused,
    configure_all,
    configure_or_kill,
    configure_replaced,
    encode_config_for,
    take_over_files,
)
from proxy.supervisor.processes.fork_server import NO_FILES, ForkServer
from proxy.supervisor.processes.library_files import files_of_libraries
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess
from proxy.supervisor.startup.open_files import stored_descriptors_max
from proxy.supervisor.startup.sockets import RuntimeDirectory

START_TIMEOUT_S = 30.0
PEERS_TIMEOUT_S = 5.0
LOG_LEVEL_TIMEOUT_S = 5.0
QUIESCE_TIMEOUT_S = 5.0
REPLACING_POLL_S = 0.1

START_ORDER = (Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER)
"""Order in which roles become ready. No role waits for the admin worker."""

DRAIN_ORDER = ((Role.FORWARDER, Role.HTTP), (Role.LOOKUP,), (Role.AUTH,), (Role.ADMIN,))
"""Order in which roles are drained: those that have clients at the same time, then those that they call."""

ENDED_BEFORE_EXEC = frozenset({Role.ADMIN})
"""Roles of which the next program begins with workers of its own, since it may not know those of this one."""

SEAL_KEY_ROLES = frozenset({Role.AUTH, Role.LOOKUP})  # the roles that seal or open principals


class Cluster:
    """All workers of one supervisor, and what they share. ``serve_admin`` serves an admin worker's channel."""

    def __init__(
        self,
        config: Config,
        directory: RuntimeDirectory,
        handover: HandoverState,
        fork_server: ForkServer,
        serve_admin: ServeChannel | None = None,
        *,
        unit_store: UnitStore | None = None,
    ) -> None:
        self.config = self._next_config = config
        self.all_started = trio.Event()
        self.leaving = False
        """Whether load balancers should send no more clients, though they are still accepted (shutdown.delay_ms)."""
        self.draining = False
        self.unready_because: str | None = handover.unready_because
        """Why an operator has load balancers send no clients here (`unready`); None: none has."""
        self.log_levels = LogLevels(handover.log_levels)
        self.generation = handover.generation
        self.replacing = handover.generation > 1
        self.listeners = ClientListeners("listener", config.listener, handover.listeners, self.generation)
        self.http_listeners = ClientListeners(
            "http_listener", config.http_listener, handover.http_listeners, self.generation
        )
        self._seal_key = handover.seal_key
        self._workers_lock = trio.Lock()
        self._services = {
            (role, index): handover.service_sockets.pop((role, index))
            if (role, index) in handover.service_sockets
            else directory.bind_socket(f"{role.value}-{index}.sock")
            for role, count in ((Role.AUTH, config.cluster.auth_workers), (Role.LOOKUP, config.cluster.lookup_workers))
            for index in range(count)
        }
        # An upgrade cannot remove forwarders: their relays need a process.
        forwarders = max(forwarder_count(config), len(handover.fd_store_slots))
        self.fd_store_slots = [
            *handover.fd_store_slots,
            *(FdStoreSlot() for _ in range(forwarders - len(handover.fd_store_slots))),
        ]
        stored_max = stored_descriptors_max(config, forwarders)
        for index, store_slot in enumerate(self.fd_store_slots):
            store_slot.limit_descriptors(slot_key(Role.FORWARDER, index), stored_max)
        self._unit_store = (
            unit_store if unit_store is not None and unit_store.is_on and config.relay.crash_safe else None
        )
        if self._unit_store is not None:
            for index, store_slot in enumerate(self.fd_store_slots):
                store_slot.journal = self._unit_store.journal(index, forwarders)
        as_before = len(handover.fd_store_slots) == forwarders and handover.connections_fd >= 0
        self._connections_fd = handover.connections_fd if as_before else create_shared_counters(forwarders)
        if handover.connections_fd not in {-1, self._connections_fd}:
            os.close(handover.connections_fd)
        self._counters = ConnectionCounters(self._connections_fd)
        self._relay_requests = working_relay_request_sockets(handover.relay_requests)
        self.audit_pipe = handover.audit_pipe or create_audit_pipe()
        self._address_tables = AddressTableExchange()
        self.fork_server = fork_server
        self._serve_admin = serve_admin
        slot_keys = [(Role.ADMIN, 0)] * (serve_admin is not None)
        slot_keys += [*self._services, *((Role.HTTP, index) for index in range(http_worker_count(config)))]
        slot_keys += [(Role.FORWARDER, index) for index in range(forwarders)]
        self.slots = [self._new_slot(role, index) for role, index in slot_keys]
        for slot in self.slots:
            inherited = handover.workers.pop((slot.role, slot.index), None)
            if inherited is not None:
                slot.inherit_worker(inherited)
            # A start that fails must not end what the program before the exec has left.
            slot.must_start = self.generation == 1
            if not slot.must_start and slot.role is not Role.ADMIN:
                slot.ready.set()
        self._handover = handover
        self._metrics = ClusterMetrics(
            START_ORDER,
            lambda: sum(len(slot.relays) for slot in self.fd_store_slots),
            lambda: sum(slot.journal.relays_lost for slot in self.fd_store_slots if slot.journal is not None),
        )
        self._metrics.unready.set_function(lambda: self.unready_because is not None)

    @property
    def registry(self) -> CollectorRegistry:
        """The supervisor's own metrics."""
        return self._metrics.registry

    @property
    def started(self) -> bool:
        """Whether every slot has been filled once."""
        return self.all_started.is_set()

    def _new_slot(self, role: Role, index: int) -> WorkerSlot:
        serves: dict[Role, ServeChannel | None] = {
            Role.ADMIN: self._serve_admin,
            Role.HTTP: self._serve_http_listeners,
            Role.FORWARDER: partial(self._serve_fd_store, index),
        }
        hooks = SlotHooks(
            spawn=partial(self._spawn, role, **self._descriptors_for(role, index)),
            start=self._start_worker,
            on_end=self._on_worker_ended,
            allowed_files=partial(self._files_of, role),
            serve_channel=serves.get(role),
        )
        if role is Role.FORWARDER:
            hooks = replace(hooks, on_process_ended=self.fd_store_slots[index].on_process_ended)
        return WorkerSlot(role, index, hooks)

    def _descriptors_for(self, role: Role, index: int) -> dict[str, int]:
        """Return what a slot's workers get beside their channels, as WorkerProcess.spawn names it."""
        if role in SEAL_KEY_ROLES:
            return {"service": self._services[role, index].fileno()}
        if role is Role.HTTP:
            return {"relay_requests": self._relay_requests[1].fileno(), "audit_pipe": self.audit_pipe[1]}
        if role is Role.FORWARDER:
            relay_requests, audit_pipe = self._relay_requests[0].fileno(), self.audit_pipe[1]
            return {"connections": self._connections_fd, "relay_requests": relay_requests, "audit_pipe": audit_pipe}
        return {}

    async def _spawn(self, role: Role, **descriptors: int) -> WorkerProcess:
        own_files = files_of_libraries(self.config) if role is Role.AUTH else NO_FILES
        return await WorkerProcess.spawn(self.fork_server, role, own_files, **descriptors)

    def _files_of(self, role: Role) -> frozenset[str]:
        """Return the files that workers of a role may read; during a reload by either configuration."""
        return files_of_role(role, self.config) | files_of_role(role, self._next_config)

    async def _serve_fd_store(self, index: int, worker: WorkerProcess) -> None:
        if worker.store_channel is None:
            raise RuntimeError("a forwarder without a channel to the fd store")
        tables = self._address_tables.open_channel(index)
        orderly = await self.fd_store_slots[index].serve_forwarder(
            worker.store_channel,
            # Only with its START: a process before it would keep them open if the supervisor were killed.
            self.listeners.descriptors,
            pid=worker.pid,
            is_new=not worker.is_inherited,
            tables=tables,
            stores_relays=self.config.relay.crash_safe,
        )
        if not orderly:
            worker.kill()

    async def _serve_http_listeners(self, worker: WorkerProcess) -> None:
        """Give an HTTP worker its listeners once it asks for them, when it is started; one from before has them."""
        channel = worker.questions_socket
        if channel is None:
            return
        with contextlib.closing(channel):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_http_listeners, channel, nursery)
                await worker.wait()
                nursery.cancel_scope.cancel()

    async def _pass_http_listeners(self, channel: socket.socket, nursery: trio.Nursery) -> None:
        try:
            if await wait_for_request(channel):
                await pass_listeners(channel, self.http_listeners.descriptors_by_index())
        except OSError as error:
            get_logger().error("an HTTP worker was not given its listeners", reason=str(error))
        nursery.cancel_scope.cancel()

    def slots_of(self, role: Role) -> list[WorkerSlot]:
        """Return the slots of one role."""
        return [slot for slot in self.slots if slot.role is role]

    # ---- start

    async def run(self, ready: trio.Event) -> None:
        """Start all workers in order, set ``ready`` once they are, and keep them running. Raises StartFailed."""
        if self._unit_store is not None:
            await self._unit_store.keep_state(self._seal_key)
        async with trio.open_nursery() as nursery:
            for role in START_ORDER:
                if self.draining:  # a signal that came while the first workers were starting
                    return
                if role is Role.FORWARDER:
                    self.listeners.start_listening()
                if role is Role.HTTP:
                    self.http_listeners.start_listening()
                for slot in self.slots_of(role):
                    nursery.start_soon(slot.run)
                await self._wait_until_ready([] if role is Role.ADMIN else [role])
            with trio.move_on_after(START_TIMEOUT_S if self.generation > 1 else float("inf")):
                await self._wait_until_ready(START_ORDER)
            if self.draining:
                return
            self.all_started.set()
            if self.generation > 1:
                await self.replace_all(
                    [role for role in START_ORDER if role is not Role.ADMIN]
                )  # the admin worker is new
                await self._handover.close_unused()
            ready.set()

    async def _wait_until_ready(self, roles: Iterable[Role]) -> None:
        for slot in [slot for role in roles for slot in self.slots_of(role)]:
            await slot.ready.wait()

    async def _start_worker(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        """Announce a new worker to its peers, then send it START with all that it needs. Raises RpcError."""
        async with self._workers_lock:
            peers = self._peers()
            async with trio.open_nursery() as nursery:
                for other in self._running({Role.AUTH, Role.LOOKUP}):
                    if other is not worker:
                        nursery.start_soon(self._set_peers, other, peers)
            seal_key = self._seal_key if slot.role in SEAL_KEY_ROLES else b""
            config = encode_config_for(slot.role, self.log_levels.apply_to(self.config, slot.role))
            request = StartRequest(config=config, seal_key=seal_key, peers=peers, index=slot.index)
            request.relays_outlive_supervisor = slot.role is Role.FORWARDER and self._unit_store is not None
            await worker.send_command(Method.START, request, timeout_s=START_TIMEOUT_S)
            slot.worker = worker
            slot.state = SlotState.RUNNING

    async def _set_peers(self, worker: WorkerProcess, peers: list[Peer]) -> None:
        try:
            await worker.send_command(Method.SET_PEERS, SetPeersRequest(peers=peers), timeout_s=PEERS_TIMEOUT_S)
        except RpcError as error:
            # It is ending, or it hangs, and would refuse the new worker. Its successor gets the peers by START.
            get_logger().warning("a worker was not told of its peers; ending it", pid=worker.pid, reason=str(error))
            worker.kill()

    def _peers(self) -> list[Peer]:
        """Return the processes that may call workers; the admin worker calls none, so no worker accepts it."""
        callers = [(slot.role, run) for slot in self.slots for run in slot.runs if slot.role is not Role.ADMIN]
        return [Peer(pid=run.worker.pid, role=role.value) for role, run in callers]

    def _running(self, roles: Iterable[Role]) -> list[WorkerProcess]:
        """Return the running workers of some roles, without replaced ones that finish their work."""
        running = (slot.running_worker for slot in self.slots if slot.role in roles)
        return [worker for worker in running if worker is not None]

    def _leaving_forwarders(self) -> list[WorkerProcess]:
        """Return forwarders that were replaced and still have relays."""
        return [run.worker for slot in self.slots_of(Role.FORWARDER) for run in slot.leaving_runs]

    def _on_worker_ended(self, slot: WorkerSlot) -> None:
        if slot.role is Role.FORWARDER:
            self._counters.set_connections(slot.index, 0)
        if not self.draining:
            self._metrics.count_restart(slot.role)

    # ---- reload

    async def reload(self, config: Config) -> None:
        """Give every worker a new configuration, or none. Raises ReloadRefused.

        A running worker takes most changes over. For those that it cannot, new processes replace the old ones without
        a reset of connections.
        """
        refusal = reload_refusal(self.config, config)
        if refusal:
            raise ReloadRefused(refusal)
        new_processes = changes_that_need_new_processes(self.config, config)
        if files_of_libraries(self.config) != files_of_libraries(config):
            new_processes.append("files that authentication's libraries open")
        async with self._workers_lock:  # a worker that is starting has the old configuration on its way
            self._next_config = config
            try:
                if not new_processes:
                    # Looked up one role after another: a worker that has died meanwhile has no vote.
                    roles = [role for role in START_ORDER if role is not Role.ADMIN]
                    asked = (worker for role in roles for worker in self._running({role}))
                    await configure_all(asked, self.config, config)
                    await configure_or_kill(self._running({Role.ADMIN}), config)
                    await configure_replaced(self._leaving_forwarders(), config)
                self.config = config
            finally:
                self._next_config = self.config
        if new_processes:
            get_logger().info("replacing all workers", because_of=",".join(new_processes))
            await self.replace_all()

    async def send_log_levels(self, roles: Collection[Role]) -> list[str]:
        """Give all workers of some roles the level of their logs that is in force; return the names of those that did
        not take it over.
        """
        failed: list[str] = []

        async def send(slot: WorkerSlot, worker: WorkerProcess) -> None:
            level = self.log_levels.level_of(slot.role, self.config)
            try:
                request = LogLevelRequest(level=level)
                await worker.send_command(Method.SET_LOG_LEVEL, request, timeout_s=LOG_LEVEL_TIMEOUT_S)
            except RpcConnectionLost:
                pass  # it has ended
            except RpcError:
                failed.append(slot.name)

        # A worker that is starting has the old level on its way.
        async with self._workers_lock, trio.open_nursery() as nursery:
            for slot in self.slots:
                if slot.role in roles:
                    for worker in slot.callable_workers:
                        nursery.start_soon(send, slot, worker)
        return sorted(failed)

    async def take_over_files(self, stamps: Mapping[str, str]) -> list[str]:
        """Have all workers take over changed files of ``brokers``; return the reasons of those that refuse.

        A replaced forwarder has no vote, as in a reload; one that hangs is ended, and its successor reads the files.
        """
        async with self._workers_lock:
            running = self._running({Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER})
            failures = await take_over_files([*running, *self._leaving_forwarders()], self.config, stamps)
        refusals = []
        for worker, error in failures.items():
            if worker in running and isinstance(error, RpcCallRefused):
                refusals.append(f"the {worker.role} worker with pid {worker.pid}: {error.reason}")
            elif worker in running:
                worker.kill()
        return refusals

    # ---- new processes

    async def replace_all(self, roles: Iterable[Role] = START_ORDER) -> None:
        """Replace workers by new processes, one by one; relays go on, lookups under way are finished."""
        self.replacing = True
        try:
            for role in roles:
                for slot in self.slots_of(role):
                    if self.draining:
                        return
                    await self._replace(slot)
        finally:
            self.replacing = False
        async with self._workers_lock:  # the configuration may be newer than the processes that were replaced
            await configure_replaced(self._leaving_forwarders(), self.config)

    async def _replace(self, slot: WorkerSlot) -> None:
        try:
            # A forwarder hands over at least its counters: two processes cannot write the same table.
            hand_over = slot.role is Role.FORWARDER
            done = await slot.replace_worker(hand_over=hand_over, drain_timeout_ms=self.config.limits.drain_timeout_ms)
        except OSError as error:
            get_logger().error("a worker was not replaced", who=slot.name, reason=str(error))
        else:
            get_logger().info("replaced a worker" if done else "a worker's successor did not start", who=slot.name)

    async def wait_for_leaving(self) -> None:
        """Wait until no worker is being replaced, and every replaced one has ended."""
        while self.replacing:  # noqa: ASYNC110 -- once in an upgrade
            await trio.sleep(REPLACING_POLL_S)
        for slot in self.slots:
            await slot.wait_for_leaving()

    @contextlib.asynccontextmanager
    async def quiesced(self, ended: Collection[Role] = ENDED_BEFORE_EXEC) -> AsyncIterator[list[SerializedWorker]]:
        """Keep the slots unchanged with no call under way, and yield the workers for the next program.

        A worker that does not quiesce in time is killed; the next program spawns another. ``ended``: roles of which no
        worker is left to it.
        """
        at_rest: dict[WorkerRun, SerializedWorker] = {}
        async with contextlib.AsyncExitStack() as locks:
            for slot in self.slots:
                await locks.enter_async_context(slot.lock_changes())
            async with trio.open_nursery() as nursery:
                for slot in self.slots:
                    if slot.role not in ended:
                        nursery.start_soon(slot.quiesce_workers, at_rest, QUIESCE_TIMEOUT_S)
            for role in reversed(START_ORDER):  # the admin worker last, since it serves /healthz
                for slot in self.slots_of(role) if role in ended else ():
                    await slot.end_before_exec(QUIESCE_TIMEOUT_S)
            try:
                # Of one that has died in the meantime only numbers are left, which may be other processes' now.
                yield [at_rest[run] for slot in self.slots for run in slot.runs if run in at_rest]
            finally:
                for slot in self.slots:
                    for run in slot.runs:
                        run.worker.resume_calls()

    def handover_fields(
        self, workers: list[SerializedWorker], ended: Collection[Role] = ENDED_BEFORE_EXEC
    ) -> dict[str, Any]:
        """Return the cluster's part of the fields of proxy.supervisor.handover.exec_handover.SerializedHandover.

        ``ended``: as in ``quiesced``; their listeners are not handed over.
        """
        http_listeners = {} if Role.HTTP in ended else self.http_listeners.descriptors_by_bind()
        return {
            "generation": self.generation + 1,
            "runtime_dir": self.config.cluster.runtime_dir,
            "seal_key": self._seal_key,
            "listeners": self.listeners.descriptors_by_bind(),
            "http_listeners": http_listeners,
            "services": {slot_key(*key): sock.fileno() for key, sock in self._services.items()},
            "connections": self._connections_fd,
            "relay_requests": (self._relay_requests[0].fileno(), self._relay_requests[1].fileno()),
            "audit_pipe": self.audit_pipe,
            "unit_store": sorted(self._unit_store.names) if self._unit_store is not None else [],
            "fd_store_slots": [serialize_slot(store_slot) for store_slot in self.fd_store_slots],
            "workers": workers,
            "unready_because": self.unready_because,
            "log_levels": self.log_levels.changed,
        }

    # ---- drain

    async def drain(self) -> None:
        """Drain those that have clients, then the workers that they call, all within limits.drain_timeout_ms."""
        self.draining = True
        until = trio.current_time() + seconds(self.config.limits.drain_timeout_ms)
        self.listeners.close()
        self.http_listeners.close()
        for roles in DRAIN_ORDER:
            async with trio.open_nursery() as nursery:
                for slot in [slot for role in roles for slot in self.slots_of(role)]:
                    nursery.start_soon(self._drain_slot, slot, until)
            get_logger().info("drained", who=roles[0].value)

    async def _drain_slot(self, slot: WorkerSlot, until: float) -> None:
        if slot.role is not Role.FORWARDER:
            await slot.drain_workers(until)
            return
        store_slot = self.fd_store_slots[slot.index]
        # As long as the fd store holds relays, they need a forwarder.
        await slot.drain_workers(until, needs_successor=lambda: bool(store_slot.relays))
        store_slot.close_stored()  # no process will continue what may be left
        if store_slot.journal is not None:
            await store_slot.journal.close()

    def kill_workers(self) -> None:
        """Kill every worker."""
        for slot in self.slots:
            for run in slot.runs:
                run.worker.kill()

    def close_sockets(self) -> None:
        """Close all sockets that the cluster has bound, the relay requests' two, and the address tables."""
        self.listeners.close()
        self.http_listeners.close()
        for sock in (*self._services.values(), *self._relay_requests):
            sock.close()
        ends, self.audit_pipe = self.audit_pipe, (-1, -1)
        for end in ends:
            if end >= 0:
                os.close(end)
        self._address_tables.close()
