"""One worker process, seen from the supervisor: start it, talk to it, end it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

import trio
from google.protobuf.message import Message

from proto.roles import Role
from proto.rpc_pb2 import Empty
from proxy.runtime.descriptors import Descriptors
from proxy.runtime.rpc_client import NoMoreConnections, RpcClient
from proxy.runtime.worker import CONTROL_FRAME_BYTES_MAX

MODULES = {Role.AUTH: "auth", Role.LOOKUP: "lookup", Role.FORWARDER: "proxy.forwarder"}

EXIT_TIMEOUT_S = 5.0

ResponseT = TypeVar("ResponseT", bound=Message)


class WorkerProcess:
    """A process and its two lines to us: the RPC channel, and the pipe whose end tells it that we are gone."""

    def __init__(self, role: Role, process: trio.Process, channel: socket.socket, liveness: int) -> None:
        self.role = role
        self.pid = process.pid
        self.started = trio.current_time()
        self._process = process
        self._liveness: int | None = liveness
        self._channel: socket.socket | None = channel
        self._rpc = RpcClient(self._connect_once, max_frame_bytes=CONTROL_FRAME_BYTES_MAX)

    @classmethod
    async def spawn(
        cls, role: Role, index: int, *, service: int = -1, listeners: Sequence[int] = (), connections: int = -1
    ) -> "WorkerProcess":
        """Start a process by exec, never by fork: its memory holds nothing of ours."""
        liveness_theirs, liveness_ours = os.pipe2(os.O_CLOEXEC)
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            os.close(liveness_theirs)
            os.close(liveness_ours)
            raise
        ours.setblocking(False)
        descriptors = Descriptors(
            channel=theirs.fileno(),
            liveness=liveness_theirs,
            service=service,
            listeners=tuple(listeners),
            connections=connections,
        )
        # -P: a folder called "auth" or "proto" where the operator happens to stand must not become our code.
        command = [sys.executable, "-P", "-m", MODULES[role]]
        arguments = ["--index", str(index), "--descriptors", descriptors.encode()]
        try:
            process = await trio.lowlevel.open_process(
                command + arguments,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors.all(),
                process_group=0,  # Ctrl-C is for the supervisor alone
            )
        except BaseException:
            ours.close()
            os.close(liveness_ours)
            raise
        finally:
            theirs.close()
            os.close(liveness_theirs)
        return cls(role, process, ours, liveness_ours)

    async def _connect_once(self) -> trio.abc.HalfCloseableStream:
        if self._channel is None:
            raise NoMoreConnections  # a broken channel means that the process ends
        channel, self._channel = self._channel, None
        return trio.SocketStream(trio.socket.from_stdlib_socket(channel))

    async def talk(self) -> None:
        """Keep the channel; runs beside everything else."""
        await self._rpc.run()

    async def call(
        self, method: int, request: Message, response_type: type[ResponseT], *, timeout_s: float
    ) -> ResponseT:
        """Call the worker. Raises RpcError."""
        return await self._rpc.call(method, request, response_type, timeout_s=timeout_s)

    async def command(self, method: int, request: Message, *, timeout_s: float) -> None:
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
        if self._process.returncode is None:
            self._process.kill()

    def _close_liveness(self) -> None:
        if self._liveness is not None:
            os.close(self._liveness)
            self._liveness = None
