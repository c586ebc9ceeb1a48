"""Lifecycle of a worker process: inherited descriptors, the supervisor's control channel, the liveness pipe.

A worker starts with nothing but its descriptors. The supervisor's START brings the configuration; then the worker
serves until the liveness pipe ends, which happens when the supervisor closes it or exits, for whatever reason. Among
the calls that may come between are CONFIGURE (a reload), TAKE_OVER_FILES (changed files that a broker has accepted) and
DRAIN (finish what is in flight).
"""

import gc
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec
import trio
from prometheus_client import CollectorRegistry, Gauge

from proto.roles import Role
from proto.rpc_pb2 import (
    ConfigureRequest,
    ConnectionsPage,
    ConnectionsRequest,
    ConnectionSums,
    DrainRequest,
    Empty,
    LogLevelRequest,
    Method,
    SetPeersRequest,
    StartRequest,
    Status,
    TakeOverFilesRequest,
    Text,
)
from proxy.common.errors import ConfigError, ProxyError
from proxy.common.files import set_opener
from proxy.common.logs import get_logger, set_log_level
from proxy.common.reloading_file import take_over_held_files
from proxy.config.types import Config
from proxy.config.worker_config import decode_config
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.tls_certificates import ignore_names_that_are_no_text
from proxy.runtime.observability.certificate_status import first_ends
from proxy.runtime.observability.logs import configure_logs
from proxy.runtime.observability.metrics import new_registry, render_metrics
from proxy.runtime.observability.process_metrics import ProcessMetrics
from proxy.runtime.process.descriptors import Descriptors, adopt_listener, adopt_stream
from proxy.runtime.process.file_requests import FileClient
from proxy.runtime.process.file_watch import FileWatch
from proxy.runtime.rpc.client import RpcClient, unix_connector
from proxy.runtime.rpc.peers import Caller, PeerTable
from proxy.runtime.rpc.pool import RpcPool
from proxy.runtime.rpc.server import (
    RPC_FRAME_OVERHEAD_BYTES,
    WAITING_BYTES_MAX,
    AnyHandler,
    Handler,
    RpcRefused,
    RpcServer,
)

CONTROL_FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Bound of a frame between supervisor and worker; the largest ones hold a worker's metrics."""

GC_THRESHOLDS = {Role.LOOKUP: (3_000, 10, 10), Role.FORWARDER: (1_500, 4, 4)}
"""When Python collects garbage, other than usual: the youngest less often. Relays leave cycles behind, so a forwarder
collects the oldest more often than usual.
"""

DRAIN_GRACE_S = 3.0
"""Time that a drain may take beyond its timeout, to hand relays over and to close what is left."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """All that a worker's service is built from."""

    role: Role
    index: int
    config: Config
    seal_key: bytes = field(repr=False)
    descriptors: Descriptors
    registry: CollectorRegistry
    nursery: trio.Nursery
    reactor: Reactor

    def rpc_frame_bytes_max(self) -> int:
        """Return the bound of a frame between workers: the largest payload and its overhead.

        An Envelope may carry a request and, forwarded, credentials: each fits a client's frame.
        """
        limits = self.config.limits
        return max(limits.max_broker_frame_bytes, 2 * limits.max_command_bytes) + RPC_FRAME_OVERHEAD_BYTES

    def socket_path(self, role: Role, index: int) -> str:
        """Return the path of the Unix socket on which a worker listens."""
        return service_socket_path(self.config, role, index)

    def new_rpc_pool(self, role: Role) -> RpcPool:
        """Return a new pool of clients of all auth workers, or of all lookup workers; the caller runs it."""
        cluster = self.config.cluster
        count = cluster.auth_workers if role is Role.AUTH else cluster.lookup_workers
        size = self.rpc_frame_bytes_max()
        paths = [self.socket_path(role, index) for index in range(count)]
        # The supervisor listens for all workers: a socket that a captured worker has put in a place gets no call.
        listener_pid = os.getppid()
        connectors = [unix_connector(path, listener_pid=listener_pid) for path in paths]
        return RpcPool([RpcClient(connect, max_frame_bytes=size) for connect in connectors])


@dataclass(frozen=True, slots=True)
class Confinement:
    """What the kernel refuses this process: whether Landlock and a filter of system calls (seccomp) are in force."""

    landlock: bool
    seccomp: bool

    def missing(self) -> list[str]:
        """Return the names of those that are not in force."""
        return [name for name, is_on in (("landlock", self.landlock), ("seccomp", self.seccomp)) if not is_on]


class Service(Protocol):
    """The service of one role, which a worker process runs."""

    def handlers(self) -> Mapping[int, AnyHandler]:
        """Return the RPC methods that this role serves to other workers; none for forwarders."""
        ...

    async def start(self) -> None:
        """Start; ready for work when this returns. Raises ConfigError where the configuration cannot be used."""
        ...

    async def configure(self, config: Config) -> None:
        """Apply a new configuration to what starts from now on. Raises ConfigError and then keeps the old one."""
        ...

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:
        """Accept nothing new; return when all work is finished, at the latest after the timeout.

        ``hand_over``: a successor is ready for what can be handed over.
        """
        ...

    def status(self) -> dict[str, object]:
        """Return the worker's part of the cluster's status, as values that JSON can hold."""
        ...


@runtime_checkable
class ListsConnections(Protocol):
    """A service that has clients' connections, and tells the supervisor of them."""

    async def list_connections(self, request: ConnectionsRequest, *, ends: bool) -> ConnectionsPage:
        """Return a page of the connections that a filter matches; ``ends``: of those that are ended by it.

        Raises ProxyError for a filter that cannot be used.
        """
        ...

    async def sum_connections(self) -> ConnectionSums:
        """Return connections and bytes a second by principal."""
        ...


ServiceFactory = Callable[[WorkerContext], Service]


def service_socket_path(config: Config, role: Role, index: int) -> str:
    """Return the path of the Unix socket of one auth or lookup worker."""
    return os.path.join(config.cluster.runtime_dir, f"{role.value}-{index}.sock")  # noqa: PTH118 -- a socket's address is text


class _Worker:
    """A worker process: serves the supervisor's control channel and runs the role's service."""

    def __init__(
        self,
        role: Role,
        descriptors: Descriptors,
        factory: ServiceFactory,
        confinement: Confinement,
        process_metrics: ProcessMetrics,
    ) -> None:
        self._role = role
        self._confinement = confinement
        self._descriptors = descriptors
        self._factory = factory
        self._registry = new_registry()
        self._registry.register(process_metrics)
        _register_confinement(self._registry, confinement)
        self._file_watch = FileWatch()
        self._registry.register(self._file_watch)
        self._peers = PeerTable()
        self._service: Service | None = None
        self._relays_outlive_supervisor = False
        self._server: RpcServer | None = None
        self._reactor = Reactor()
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Serve until the supervisor closes the liveness pipe or the channel, or exits."""
        channel = RpcServer(self._control_handlers(), max_frame_bytes=CONTROL_FRAME_BYTES_MAX)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._reactor.run)
            stream = adopt_stream(self._descriptors.channel)
            self._nursery.start_soon(
                self._exit_after, channel.serve_connection, stream, Caller(Role.SUPERVISOR, os.getppid())
            )
            self._nursery.start_soon(self._exit_after, _wait_for_end_of_pipe, self._descriptors.liveness)

    async def _exit_after(self, connection: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Exit once either connection to the supervisor ends: without both it could not be drained or reloaded."""
        await connection(*arguments)
        if self._relays_outlive_supervisor:
            os._exit(0)  # an orderly end would shut relays' sockets down
        self._nursery.cancel_scope.cancel()

    def _control_handlers(self) -> dict[int, Handler]:
        return {
            Method.START: self._start,
            Method.SET_PEERS: self._set_peers,
            Method.CONFIGURE: self._configure,
            Method.TAKE_OVER_FILES: self._take_over_files,
            Method.SET_LOG_LEVEL: self._set_log_level,
            Method.DRAIN: self._drain,
            Method.COLLECT_METRICS: self._collect_metrics,
            Method.GET_STATUS: self._get_status,
            Method.LIST_CONNECTIONS: partial(self._list_connections, ends=False),
            Method.END_CONNECTIONS: partial(self._list_connections, ends=True),
            Method.SUM_CONNECTIONS: self._sum_connections,
        }

    async def _start(self, data: bytes, _caller: Caller) -> bytes:
        request = StartRequest.FromString(data)
        config = decode_config(request.config)
        configure_logs(config.log, self._role, request.index)
        if missing := self._confinement.missing():
            get_logger().warning("the kernel confines this worker less than it could", without=",".join(missing))
        self._peers.replace_peers(request.peers)
        self._relays_outlive_supervisor = request.relays_outlive_supervisor
        context = WorkerContext(
            self._role,
            request.index,
            config,
            request.seal_key,
            self._descriptors,
            self._registry,
            self._nursery,
            self._reactor,
        )
        try:
            service = self._factory(context)
            await service.start()
        except ConfigError as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        self._service = service
        self._file_watch.shows_ends = request.index == 0
        self._nursery.start_soon(self._file_watch.run)
        if self._descriptors.service >= 0:
            self._server = RpcServer(
                service.handlers(),
                max_frame_bytes=context.rpc_frame_bytes_max(),
                max_waiting_bytes=WAITING_BYTES_MAX + config.limits.max_topic_lists_bytes,
            )
            listener = adopt_listener(self._descriptors.service)
            self._nursery.start_soon(self._server.serve_listener, listener, self._peers.identify_caller)
        _tune_garbage_collector(self._role)
        return b""

    async def _set_peers(self, data: bytes, _caller: Caller) -> bytes:
        self._peers.replace_peers(SetPeersRequest.FromString(data).peers)
        return b""

    async def _configure(self, data: bytes, _caller: Caller) -> bytes:
        try:
            await self._started().configure(decode_config(ConfigureRequest.FromString(data).config))
        except ConfigError as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        return b""

    async def _take_over_files(self, data: bytes, _caller: Caller) -> bytes:
        files = TakeOverFilesRequest.FromString(data).files
        try:
            await take_over_held_files({file.path: file.stamp for file in files})
        except ConfigError as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        return b""

    async def _set_log_level(self, data: bytes, _caller: Caller) -> bytes:
        try:
            set_log_level(LogLevelRequest.FromString(data).level)
        except KeyError:
            raise RpcRefused(Status.INVALID_REQUEST, "there is no such level") from None
        return b""

    async def _drain(self, data: bytes, _caller: Caller) -> bytes:
        request = DrainRequest.FromString(data)
        timeout_s = seconds(request.timeout_ms)
        self._file_watch.shows_ends = False  # a successor shows its own
        with trio.move_on_after(timeout_s + DRAIN_GRACE_S):
            if self._server is not None:
                # Callers disconnect when they are drained themselves; new ones connect to the successor.
                self._server.stop_accepting()
                await self._server.connections.wait_until_empty(timeout_s=timeout_s)
            await self._started().drain(timeout_s, hand_over=request.hand_over)
        return b""

    async def _collect_metrics(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        return Text(text=render_metrics(self._registry)).SerializeToString()

    async def _get_status(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        status = self._started().status()
        if ends := first_ends(self._file_watch.ends()):
            status["certificate_ends"] = ends
        return Text(text=msgspec.json.encode(status).decode()).SerializeToString()

    async def _list_connections(self, data: bytes, _caller: Caller, *, ends: bool) -> bytes:
        service = self._started()
        if not isinstance(service, ListsConnections):
            raise RpcRefused(Status.UNSUPPORTED_VERSION, "this worker has no connections")
        try:
            page = await service.list_connections(ConnectionsRequest.FromString(data), ends=ends)
        except ProxyError as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        return page.SerializeToString()

    async def _sum_connections(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        service = self._started()
        if not isinstance(service, ListsConnections):
            raise RpcRefused(Status.UNSUPPORTED_VERSION, "this worker has no connections")
        return (await service.sum_connections()).SerializeToString()

    def _started(self) -> Service:
        if self._service is None:
            raise RpcRefused(Status.INVALID_REQUEST, "the worker has not been started")
        return self._service


def _tune_garbage_collector(role: Role) -> None:
    """Exempt all that was imported from Python's cyclic garbage collection, since it is never freed.

    In lookup workers, where a few hundred requests are in flight, and in forwarders collect at other times, too:
    together that was 40 % of a lookup's CPU time, and 5 % of a connection's.
    """
    gc.collect()
    gc.freeze()
    if role in GC_THRESHOLDS:
        gc.set_threshold(*GC_THRESHOLDS[role])


async def _wait_for_end_of_pipe(descriptor: int) -> None:
    """Return when no process holds the writing end any more; nothing is ever written."""
    os.set_blocking(descriptor, False)
    await trio.lowlevel.wait_readable(descriptor)


def _register_confinement(registry: CollectorRegistry, confinement: Confinement) -> None:
    gauge = Gauge(
        "pulsar_proxy_confined",
        "1 where the kernel confines the process in this way (by: landlock, seccomp), 0 where it does not.",
        ["by"],
        registry=registry,
    )
    gauge.labels("landlock").set(confinement.landlock)
    gauge.labels("seccomp").set(confinement.seccomp)


def run_worker(
    role: Role,
    factory: ServiceFactory,
    descriptors: Descriptors,
    confinement: Confinement,
    process_metrics: ProcessMetrics,
) -> None:
    """Run a worker until the supervisor ends it. It opens files by requests to the supervisor."""
    set_opener(FileClient(descriptors.files).open_file)
    ignore_names_that_are_no_text()
    worker = _Worker(role, descriptors, factory, confinement, process_metrics)
    trio.run(worker.run, strict_exception_groups=True)
