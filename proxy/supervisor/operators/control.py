"""The server at control.sock: status, connections, drain, reload and upgrade for operators on this machine."""

import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from proto.rpc_pb2 import (
    ConnectionsRequest,
    Empty,
    LogLevelRequest,
    Method,
    ReloadRequest,
    Status,
    Text,
    UnreadyRequest,
)
from proxy.common.errors import ConfigError, ProxyError
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import Handler, RpcRefused, RpcServer
from proxy.supervisor.operators.ancestry import identify_operator
from proxy.supervisor.operators.connections import ClusterConnections
from proxy.supervisor.operators.log_levels import LogLevelControl, LogLevelRefused
from proxy.supervisor.operators.report import ClusterReport
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.startup.sockets import CONTROL_SOCKET

UNREADY_REASON_CHARACTERS_MAX = 200


class UpgradeRefused(ProxyError):
    """An upgrade was refused, and the running program goes on. The text is the reason."""


class ControlServer:
    """RPC server of control.sock, with a callback for each operation."""

    def __init__(
        self,
        report: ClusterReport,
        connections: ClusterConnections,
        *,
        drain: Callable[[], None],
        reload: Callable[[bool], Awaitable[None]],
        upgrade: Callable[[], Awaitable[int]],
        log_levels: LogLevelControl,
        set_unready: Callable[[str | None], None],
    ) -> None:
        self._report = report
        self._connections = connections
        self._drain = drain
        self._reload = reload
        self._upgrade = upgrade
        self._log_levels = log_levels
        self._set_unready = set_unready

    def _handlers(self) -> dict[int, Handler]:
        return {
            Method.CLUSTER_STATUS: self._cluster_status,
            Method.CLUSTER_DRAIN: self._cluster_drain,
            Method.CLUSTER_RELOAD: self._cluster_reload,
            Method.CLUSTER_UPGRADE: self._cluster_upgrade,
            Method.CLUSTER_LOG_LEVEL: self._cluster_log_level,
            Method.CLUSTER_UNREADY: self._cluster_unready,
            Method.CLUSTER_CONNECTIONS: partial(self._cluster_connections, ends=False),
            Method.CLUSTER_DISCONNECT: partial(self._cluster_connections, ends=True),
        }

    async def serve(self, sock: socket.socket) -> None:
        """Serve operators until cancelled."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        server = RpcServer(self._handlers(), max_frame_bytes=CONTROL_FRAME_BYTES_MAX)
        await server.serve_listener(listener, identify_operator)

    async def _cluster_status(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        return Text(text=(await self._report.status_json()).decode()).SerializeToString()

    async def _cluster_connections(self, data: bytes, _caller: Caller, *, ends: bool) -> bytes:
        page = await self._connections.page(ConnectionsRequest.FromString(data), ends=ends)
        return page.SerializeToString()

    async def _cluster_drain(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        self._drain()
        return b""

    async def _cluster_reload(self, data: bytes, _caller: Caller) -> bytes:
        try:
            await self._reload(ReloadRequest.FromString(data).force)
        except (ConfigError, ReloadRefused) as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        return b""

    async def _cluster_upgrade(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        try:
            generation = await self._upgrade()
        except UpgradeRefused as refused:
            raise RpcRefused(Status.INVALID_REQUEST, str(refused)) from None
        return Text(text=str(generation)).SerializeToString()

    async def _cluster_log_level(self, data: bytes, _caller: Caller) -> bytes:
        try:
            answer = await self._log_levels.change(LogLevelRequest.FromString(data))
        except LogLevelRefused as refused:
            raise RpcRefused(Status.INVALID_REQUEST, str(refused)) from None
        return Text(text=answer).SerializeToString()

    async def _cluster_unready(self, data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        request = UnreadyRequest.FromString(data)
        if len(request.reason) > UNREADY_REASON_CHARACTERS_MAX or not request.reason.isprintable():
            raise RpcRefused(
                Status.INVALID_REQUEST,
                f"the reason has more than {UNREADY_REASON_CHARACTERS_MAX} characters, or some that cannot be printed",
            )
        self._set_unready(request.reason if request.unready else None)
        return b""


def control_path(runtime_dir: str) -> str:
    """Return the path of control.sock in a runtime directory."""
    return os.path.join(runtime_dir, CONTROL_SOCKET)  # noqa: PTH118 -- a socket's address is text
