"""One worker process, seen from the supervisor: start it, talk to it, end it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Protocol, TypeVar

import msgspec
import trio
from google.protobuf.message import Message

from proto.roles import Role
from proto.rpc_pb2 import Empty
from proxy.config.load import worker_environment
from proxy.runtime.process.descriptors import Descriptors, adopt_socket
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.client import NoMoreConnections, RpcClient
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.supervisor.processes.children import child_reaper

MODULES = {Role.ADMIN: "proxy.admin", Role.AUTH: "auth", Role.LOOKUP: "lookup", Role.FORWARDER: "proxy.forwarder"}

EXIT_TIMEOUT_S = 5.0

ResponseT = TypeVar("ResponseT", bound=Message)


class ProcessHandle(Protocol):
    """What is used of trio.Process."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, once there is one; negative for a signal."""
        ...

    async def wait(self) -> int:
        """The exit code, once there is one."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class InheritedProcess:
    """A child process that an earlier program in this process started: the supervisor before its upgrade by exec."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._wait_lock = trio.Lock()

    async def wait(self) -> int:
        """The exit code, once there is one."""
        async with self._wait_lock:
            if self.returncode is None:
                await trio.lowlevel.wait_readable(self._pidfd)
                _pid, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 -- it has ended: this does not wait
                os.close(self._pidfd)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class SerializedWorker(msgspec.Struct, frozen=True):
    """A worker as the supervisor's next program takes it over: numbers that both know."""

    role: str
    index: int
    pid: int
    uptime_s: float
    channel: int
    liveness: int
    store: int = -1


class WorkerProcess:
    """A process and its lines to us: the RPC channel, the pipe whose end tells it that we are gone, a forwarder's line
    to the fd store, and the line on which an admin worker asks.
    """

    def __init__(  # noqa: PLR0917 -- private in all but name
        self,
        role: Role,
        process: ProcessHandle,
        channel: socket.socket,
        liveness: int,
        store: StoreChannel | None = None,
        uptime_s: float = 0.0,
        questions: socket.socket | None = None,
    ) -> None:
        self.role = role
        self.pid = process.pid
        self.started_at_s = time.monotonic() - uptime_s
        self.store_channel = store
        self.admin_socket = questions
        self.is_inherited = isinstance(process, InheritedProcess)
        self._process = process
        self._liveness: int | None = liveness
        self._channel = channel
        self._connected = False
        self._rpc = RpcClient(self._connect_once, max_frame_bytes=CONTROL_FRAME_BYTES_MAX)

    @classmethod
    async def spawn(cls, role: Role, *, service: int = -1, connections: int = -1) -> "WorkerProcess":
        """Start a process by exec, never by fork: its memory holds nothing of ours. It waits for its START."""
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
            store, store_theirs = both(*create_store_sockets()) if role is Role.FORWARDER else (None, None)
            questions, questions_theirs = both(*socket.socketpair()) if role is Role.ADMIN else (None, None)
            descriptors = Descriptors(
                channel=theirs.fileno(),
                liveness=liveness_theirs,
                service=service,
                connections=connections,
                store=store_theirs.fileno() if store_theirs is not None else -1,
                questions=questions_theirs.fileno() if questions_theirs is not None else -1,
            )
            with child_reaper.pause_while_spawning():
                process = await trio.lowlevel.open_process(
                    # -P: a folder called "auth" where the operator happens to stand must not become our code.
                    [sys.executable, "-P", "-m", MODULES[role], "--descriptors", descriptors.encode()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors.inheritable(),
                    env=worker_environment(os.environ),
                    process_group=0,  # Ctrl-C is for the supervisor alone
                )
                child_reaper.register_own(process)
            undo.pop_all()
        if questions is not None:
            questions.setblocking(False)
        channel = StoreChannel(store) if store is not None else None
        return cls(role, process, ours, liveness_ours, channel, questions=questions)

    @classmethod
    def from_serialized(cls, serialized: SerializedWorker) -> "WorkerProcess":
        """The worker of an earlier program in this process. Raises OSError where it has gone."""
        channel = adopt_socket(serialized.channel)
        os.set_inheritable(serialized.liveness, False)
        store = StoreChannel(adopt_socket(serialized.store)) if serialized.store >= 0 else None
        role, child = Role(serialized.role), InheritedProcess(serialized.pid)
        child_reaper.register_own(child)
        return cls(role, child, channel, serialized.liveness, store, serialized.uptime_s)

    async def quiesce_and_serialize(self, index: int, *, timeout_s: float) -> SerializedWorker | None:
        """Let nothing be on its way in the channel; None where that cannot be had: the worker has ended or hangs."""
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
        )

    def resume_calls(self) -> None:
        """There is no other program after all."""
        self._rpc.resume()

    async def _connect_once(self) -> trio.abc.HalfCloseableStream:
        if self._connected:
            raise NoMoreConnections  # a broken channel means that the process ends
        self._connected = True
        return trio.SocketStream(trio.socket.from_stdlib_socket(self._channel))

    async def run_channel(self) -> None:
        """Keep the channel; runs beside everything else."""
        await self._rpc.run()

    async def call(
        self, method: int, request: Message, response_type: type[ResponseT], *, timeout_s: float
    ) -> ResponseT:
        """Call the worker. Raises RpcError."""
        return await self._rpc.call(method, request, response_type, timeout_s=timeout_s)

    async def send_command(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Call the worker for something that has no answer but that it is done. Raises RpcError."""
        await self.call(method, request, Empty, timeout_s=timeout_s)

    async def wait(self) -> int:
        """The exit code, once there is one; negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the process to end, by closing its liveness pipe; kill it where it does not."""
        self._close_liveness()
        with trio.move_on_after(EXIT_TIMEOUT_S):
            await self._process.wait()
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._close_liveness()
        if not self._connected:  # nobody ever talked to it
            self._connected = True
            self._channel.close()
        if self._process.returncode is None:
            self._process.kill()

    def _close_liveness(self) -> None:
        if self._liveness is not None:
            os.close(self._liveness)
            self._liveness = None
