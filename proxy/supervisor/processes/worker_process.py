"""One worker process from the supervisor's side: its spawning, its RPC channel, its end."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio
from google.protobuf.message import Message

from proto.roles import Role
from proto.rpc_pb2 import Empty
from proxy.runtime.process.descriptors import adopt_socket
from proxy.runtime.process.hardening import FileAccess
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.client import NoMoreConnections, RpcClient
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.supervisor.processes.audit_pipe import open_for_worker
from proxy.supervisor.processes.children import child_reaper
from proxy.supervisor.processes.file_server import serve_files
from proxy.supervisor.processes.fork_server import NO_FILES, ForkServer

EXIT_TIMEOUT_S = 5.0

ResponseT = TypeVar("ResponseT", bound=Message)


class ForkedProcess:
    """A child that another program has started: the fork server, or the program before the exec of an upgrade.

    Waits for it by a pidfd. Raises OSError where there is no such child.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._wait_lock = trio.Lock()

    async def wait(self) -> int:
        """Wait for the process to end and return its exit code."""
        async with self._wait_lock:
            if self.returncode is None:
                await trio.lowlevel.wait_readable(self._pidfd)
                _pid, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 -- it has ended: this does not wait
                os.close(self._pidfd)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class SerializedWorker(msgspec.Struct, frozen=True):
    """A worker as the next program takes it over: process id and descriptor numbers, which survive an exec.

    Field names are a format between versions: add fields with defaults, never change one.
    """

    role: str
    index: int
    pid: int
    uptime_s: float
    channel: int
    liveness: int
    store: int = -1
    files: int = -1


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """The supervisor's ends of one worker's channels.

    ``rpc``: the channel for calls. ``liveness``: a pipe's end; the worker ends when it is closed. ``files``: the socket
    on which the worker requests files. ``store``: a forwarder's channel to the fd store. ``questions``: the socket
    on which an admin or HTTP worker asks for its listeners, and an admin worker calls the supervisor.
    """

    rpc: socket.socket
    liveness: int
    files: socket.socket | None = None
    store: StoreChannel | None = None
    questions: socket.socket | None = None


class WorkerProcess:
    """A worker process and the supervisor's ends of its channels."""

    def __init__(
        self,
        role: Role,
        process: ForkedProcess,
        channels: WorkerChannels,
        uptime_s: float = 0.0,
        *,
        is_inherited: bool = False,
    ) -> None:
        self.role = role
        self.pid = process.pid
        self.started_at_s = time.monotonic() - uptime_s
        self.store_channel = channels.store
        self.questions_socket = channels.questions
        self.files_socket = channels.files
        self.is_inherited = is_inherited
        self._process = process
        self._liveness: int | None = channels.liveness
        self._channel = channels.rpc
        self._connected = False
        self._serves_files = False
        self._rpc = RpcClient(self._connect_once, max_frame_bytes=CONTROL_FRAME_BYTES_MAX)

    @classmethod
    async def spawn(
        cls,
        fork_server: ForkServer,
        role: Role,
        own_files: FileAccess = NO_FILES,
        *,
        service: int = -1,
        connections: int = -1,
        relay_requests: int = -1,
        audit_pipe: int = -1,
    ) -> "WorkerProcess":
        """Have the fork server fork a process, which waits for its START. Raises OSError.

        ``own_files``: what it may open without a request. ``service``, ``connections``,
        ``relay_requests``: see ``Descriptors``. ``audit_pipe``: the writing end, of which the worker gets its own.
        """
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs_to_close:

            def both(ours: socket.socket, theirs: socket.socket) -> tuple[socket.socket, socket.socket]:
                undo.callback(ours.close)
                theirs_to_close.callback(theirs.close)
                return ours, theirs

            liveness_theirs, liveness_ours = os.pipe2(os.O_CLOEXEC)
            theirs_to_close.callback(os.close, liveness_theirs)
            undo.callback(os.close, liveness_ours)
            ours, theirs = both(*socket.socketpair())
            ours.setblocking(False)
            files, files_theirs = both(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            store, store_theirs = both(*create_store_sockets()) if role is Role.FORWARDER else (None, None)
            asks = role in {Role.ADMIN, Role.HTTP}
            questions, questions_theirs = both(*socket.socketpair()) if asks else (None, None)
            audit = -1
            if audit_pipe >= 0:
                audit = open_for_worker(audit_pipe)
                theirs_to_close.callback(os.close, audit)
            descriptors = {
                "channel": theirs.fileno(),
                "liveness": liveness_theirs,
                "files": files_theirs.fileno(),
                "service": service,
                "connections": connections,
                "relay_requests": relay_requests,
                "audit": audit,
                "store": store_theirs.fileno() if store_theirs is not None else -1,
                "questions": questions_theirs.fileno() if questions_theirs is not None else -1,
            }
            with child_reaper.pause_while_spawning():
                passed = {name: descriptor for name, descriptor in descriptors.items() if descriptor >= 0}
                pid = await fork_server.fork(role, passed, own_files)
                process = ForkedProcess(pid)
                child_reaper.register_own(process)
            undo.pop_all()
        if questions is not None:
            questions.setblocking(False)
        store_channel = StoreChannel(store) if store is not None else None
        return cls(role, process, WorkerChannels(ours, liveness_ours, files, store_channel, questions))

    @classmethod
    def from_serialized(cls, serialized: SerializedWorker) -> "WorkerProcess":
        """Take over a worker of the program before the exec. Raises OSError where its process has gone."""
        channel = adopt_socket(serialized.channel)
        os.set_inheritable(serialized.liveness, False)
        store = StoreChannel(adopt_socket(serialized.store)) if serialized.store >= 0 else None
        files = adopt_socket(serialized.files) if serialized.files >= 0 else None
        role, child = Role(serialized.role), ForkedProcess(serialized.pid)
        child_reaper.register_own(child)
        channels = WorkerChannels(channel, serialized.liveness, files, store)
        return cls(role, child, channels, serialized.uptime_s, is_inherited=True)

    async def quiesce_and_serialize(self, index: int, *, timeout_s: float) -> SerializedWorker | None:
        """Wait until no call is in flight, then describe the worker for the next program.

        None where the worker has ended, or hangs for longer than ``timeout_s``.
        """
        quiet = await self._rpc.quiesce(timeout_s=timeout_s)
        if not quiet or self._liveness is None or self._process.returncode is not None:
            return None
        return SerializedWorker(
            role=self.role.value,
            index=index,
            pid=self.pid,
            uptime_s=time.monotonic() - self.started_at_s,
            channel=self._channel.fileno(),
            liveness=self._liveness,
            store=self.store_channel.sock.fileno() if self.store_channel is not None else -1,
            files=self.files_socket.fileno() if self.files_socket is not None else -1,
        )

    def resume_calls(self) -> None:
        """Allow calls again after ``quiesce_and_serialize``, since the exec did not take place."""
        self._rpc.resume()

    async def _connect_once(self) -> trio.abc.HalfCloseableStream:
        if self._connected:
            raise NoMoreConnections  # a broken channel means that the process ends
        self._connected = True
        return trio.SocketStream(trio.socket.from_stdlib_socket(self._channel))

    async def run_channel(self) -> None:
        """Run the RPC channel until it is closed; a task beside all calls."""
        await self._rpc.run()

    async def serve_files(self, allowed_files: Callable[[], frozenset[str]]) -> None:
        """Open files for the worker until it ends. A worker of an older program opens its files by itself."""
        if self.files_socket is not None:
            self._serves_files = True
            await serve_files(self.files_socket, allowed_files)

    async def call(
        self, method: int, request: Message, response_type: type[ResponseT], *, timeout_s: float
    ) -> ResponseT:
        """Call the worker. Raises RpcError."""
        return await self._rpc.call(method, request, response_type, timeout_s=timeout_s)

    async def send_command(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Call the worker and wait for an empty reply. Raises RpcError."""
        await self.call(method, request, Empty, timeout_s=timeout_s)

    async def wait(self) -> int:
        """Wait for the process to end and return its exit code; negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Close the liveness pipe, which asks the process to end; kill it after ``EXIT_TIMEOUT_S``."""
        self._close_liveness()
        with trio.move_on_after(EXIT_TIMEOUT_S):
            await self._process.wait()
        self.kill()

    def kill(self) -> None:
        """Kill the process, and close its channels where none ever used them."""
        self._close_liveness()
        if not self._connected:  # no call ever opened the channel
            self._connected = True
            self._channel.close()
        if self.files_socket is not None and not self._serves_files:
            self.files_socket.close()
        if self._process.returncode is None:
            self._process.kill()

    def _close_liveness(self) -> None:
        if self._liveness is not None:
            os.close(self._liveness)
            self._liveness = None
