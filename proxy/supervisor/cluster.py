"""The cluster of workers: started in order, told about each other, reloaded, drained in order."""

import socket
from collections.abc import Iterable

import trio
from prometheus_client import Counter, Gauge

from proto.roles import Role
from proto.rpc_pb2 import ConfigureRequest, DrainRequest, Method, Peer, SetPeersRequest, StartRequest
from proxy import __version__
from proxy.config.load import changes_that_need_a_restart, encode_config, forwarder_count
from proxy.config.types import Config
from proxy.runtime.connection_count import ConnectionCounters, new_shared_counters
from proxy.runtime.logs import get_logger
from proxy.runtime.metrics import new_registry
from proxy.runtime.rpc_client import RpcCallRefused, RpcError
from proxy.runtime.tasks import seconds
from proxy.supervisor.slot import Slot, SlotState
from proxy.supervisor.sockets import BACKLOG, RuntimeDirectory, bind_tcp
from proxy.supervisor.worker_process import WorkerProcess

START_TIMEOUT_S = 30.0
CONFIGURE_TIMEOUT_S = 10.0
PEERS_TIMEOUT_S = 5.0
DRAIN_GRACE_S = 5.0

START_ORDER = (Role.AUTH, Role.LOOKUP, Role.FORWARDER)
"""Who must be there before whom; the drain goes the other way."""


class ReloadRefused(Exception):
    """A new configuration was not taken over; the old one is still in force. Says why."""


class Cluster:
    """All workers of one supervisor, and what they share."""

    def __init__(self, config: Config, directory: RuntimeDirectory, seal_key: bytes) -> None:
        self.config = config
        self.started = False
        self.draining = False
        self.listeners = [
            bind_tcp(f"listener[{index}].bind", listener.bind) for index, listener in enumerate(config.listener)
        ]
        self.registry = new_registry()
        self._seal_key = seal_key
        self._workers_lock = trio.Lock()
        self._services = {
            (role, index): directory.bind(f"{role.value}-{index}.sock")
            for role, count in ((Role.AUTH, config.cluster.auth_workers), (Role.LOOKUP, config.cluster.lookup_workers))
            for index in range(count)
        }
        forwarders = forwarder_count(config)
        self._connections = new_shared_counters(forwarders)
        self._counters = ConnectionCounters(self._connections)
        places = [*self._services, *((Role.FORWARDER, index) for index in range(forwarders))]
        self.slots = [self._slot(role, index) for role, index in places]
        self._restarts = Counter(
            "pulsar_proxy_worker_restarts", "Workers that ended and were replaced.", ["of"], registry=self.registry
        )
        for role in START_ORDER:
            self._restarts.labels(of=role.value)
        info = Gauge(
            "pulsar_proxy_build_info", "Always 1; the version is the label.", ["version"], registry=self.registry
        )
        info.labels(version=__version__).set(1)

    def _slot(self, role: Role, index: int) -> Slot:
        async def spawn() -> WorkerProcess:
            if role is Role.FORWARDER:
                listeners = [listener.fileno() for listener in self.listeners]
                return await WorkerProcess.spawn(role, index, listeners=listeners, connections=self._connections)
            return await WorkerProcess.spawn(role, index, service=self._services[role, index].fileno())

        return Slot(role, index, spawn, self._start_worker, self._worker_ended)

    def of(self, role: Role) -> list[Slot]:
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
                for slot in self.of(role):
                    await slot.ready.wait()
            self.started = True
            ready.set()

    def _listen(self) -> None:
        """Only now may clients come: whoever serves them is ready."""
        for listener in self.listeners:
            listener.listen(BACKLOG)

    async def _start_worker(self, slot: Slot) -> None:
        """Tell the workers who the new one is, and the new one all it needs. Raises RpcError."""
        async with self._workers_lock:
            peers = self._peers()
            async with trio.open_nursery() as nursery:
                for other in self._running({Role.AUTH, Role.LOOKUP}):
                    nursery.start_soon(self._tell_peers, other, peers)
            # Whoever reads what strangers send must not be able to seal a principal.
            seal_key = b"" if slot.role is Role.FORWARDER else self._seal_key
            request = StartRequest(config=encode_config(self.config), seal_key=seal_key, peers=peers)
            if slot.worker is not None:
                await slot.worker.command(Method.START, request, timeout_s=START_TIMEOUT_S)
            slot.state = SlotState.RUNNING

    async def _tell_peers(self, worker: WorkerProcess, peers: list[Peer]) -> None:
        try:
            await worker.command(Method.SET_PEERS, SetPeersRequest(peers=peers), timeout_s=PEERS_TIMEOUT_S)
        except RpcError as error:
            # It is ending, or it hangs: it would turn the new worker away. Its successor will be told at its start.
            get_logger().warning("a worker was not told of its peers; ending it", pid=worker.pid, reason=str(error))
            worker.kill()

    def _peers(self) -> list[Peer]:
        return [Peer(pid=slot.worker.pid, role=slot.role.value) for slot in self.slots if slot.worker is not None]

    def _running(self, roles: Iterable[Role]) -> list[WorkerProcess]:
        return [
            slot.worker
            for slot in self.slots
            if slot.role in roles and slot.state is SlotState.RUNNING and slot.worker is not None
        ]

    def _worker_ended(self, slot: Slot) -> None:
        if slot.role is Role.FORWARDER:
            self._counters.set(slot.index, 0)
        if not self.draining:
            self._restarts.labels(of=slot.role.value).inc()

    # ---- reload

    async def reload(self, config: Config) -> None:
        """Give every worker a new configuration; all or nobody. Raises ReloadRefused."""
        fixed = changes_that_need_a_restart(self.config, config)
        if fixed:
            raise ReloadRefused(f"a restart is needed to change: {', '.join(fixed)}")
        async with self._workers_lock:  # a worker that is starting has the old configuration on its way
            await self._configure_all(config)
            self.config = config

    async def _configure_all(self, config: Config) -> None:
        changed: list[WorkerProcess] = []
        for role in START_ORDER:
            for worker in self._running({role}):
                try:
                    await self._configure(worker, config)
                except RpcError as error:
                    if not isinstance(error, RpcCallRefused):
                        worker.kill()  # whether it took it is unknown, or will be once it wakes up
                    await self._take_back(changed)
                    raise ReloadRefused(f"the {role} worker with pid {worker.pid} refused it: {error}") from None
                changed.append(worker)

    async def _configure(self, worker: WorkerProcess, config: Config) -> None:
        request = ConfigureRequest(config=encode_config(config))
        await worker.command(Method.CONFIGURE, request, timeout_s=CONFIGURE_TIMEOUT_S)

    async def _take_back(self, changed: list[WorkerProcess]) -> None:
        for worker in changed:
            try:
                await self._configure(worker, self.config)
            except RpcError as error:
                get_logger().error(
                    "a worker did not take back a configuration; ending it", pid=worker.pid, reason=str(error)
                )
                worker.kill()

    # ---- drain

    async def drain(self) -> None:
        """Finish in order: forwarders let their clients leave, then the workers that they needed may go."""
        self.draining = True
        for listener in self.listeners:
            listener.close()
        for role in reversed(START_ORDER):
            async with trio.open_nursery() as nursery:
                for slot in self.of(role):
                    nursery.start_soon(self._drain_slot, slot)
            get_logger().info("drained", who=role.value)

    async def _drain_slot(self, slot: Slot) -> None:
        timeout_ms = self.config.limits.drain_timeout_ms
        if slot.worker is not None and slot.state is SlotState.RUNNING:
            try:
                request = DrainRequest(timeout_ms=timeout_ms)
                await slot.worker.command(Method.DRAIN, request, timeout_s=seconds(timeout_ms) + DRAIN_GRACE_S)
            except RpcError as error:
                get_logger().warning("a worker did not drain", who=f"{slot.role}-{slot.index}", reason=str(error))
        await slot.stop()

    def stop_at_once(self) -> None:
        """End every worker, now."""
        for slot in self.slots:
            if slot.worker is not None:
                slot.worker.kill()

    def close(self) -> None:
        """Close what was bound."""
        sockets: list[socket.socket] = [*self.listeners, *self._services.values()]
        for sock in sockets:
            sock.close()
