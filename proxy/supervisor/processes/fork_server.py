"""The fork server from the supervisor's side: its execution, its requests, its replacement where it dies."""

import array
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import trio

from proto.roles import Role
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.config.load import worker_environment
from proxy.runtime.process.fork_request import REQUEST_BYTES_MAX, ForkReply, ForkRequest
from proxy.runtime.process.hardening import FileAccess
from proxy.supervisor.processes.children import child_reaper

COMMAND = (sys.executable, "-P", "-m", "proxy.fork_server")
"""-P: a folder called "auth" in the operator's working directory must not be imported."""

IMPORT_TIMEOUT_S = 30.0
FORK_TIMEOUT_S = 10.0
PAUSE_S = 1.0
"""Pause before the next attempt where none can be started."""

NO_FILES = FileAccess()


class ForkFailed(ProxyError, OSError):
    """A worker that could not be forked; the text is the reason."""


@dataclass(frozen=True, slots=True)
class _Server:
    process: trio.Process
    channel: trio.socket.SocketType


class ForkServer:
    """The process that forks the workers: one at a time, executed from the program that is installed then.

    Where it dies, or does not answer, another takes its place. The workers that it has forked go on.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._server: _Server | None = None
        self._lock = trio.Lock()

    async def run(self) -> None:
        """Keep a fork server ready until cancelled."""
        try:
            while True:
                try:
                    async with self._lock:
                        server = await self._require()
                except OSError as error:
                    get_logger().error("no fork server, so no new worker", reason=str(error))
                    await trio.sleep(PAUSE_S)
                else:
                    code = await server.process.wait()
                    get_logger().error("the fork server ended; starting another", pid=server.process.pid, code=code)
        finally:
            if self._server is not None:
                await _end(self._server)

    async def fork(self, role: Role, descriptors: Mapping[str, int], files: FileAccess = NO_FILES) -> int:
        """Fork a worker and return its process id. ``descriptors``: what it gets, by names of ``Descriptors``.
        ``files``: what it may open by itself.

        The worker is a child of this process. The caller registers it with the ``child_reaper`` before it waits for
        anything else. Raises OSError.
        """
        async with self._lock:
            for is_last in (False, True):
                server = await self._require()
                # Shielded: the reply to a request that was given up would be taken for the next one's.
                with trio.CancelScope(shield=True):
                    try:
                        return await _request(server.channel, ForkRequest(role, tuple(descriptors), files), descriptors)
                    except (ConnectionError, TimeoutError, msgspec.MsgspecError) as error:
                        await _end(server)
                        if is_last:
                            raise ForkFailed(f"the fork server ended, or did not answer: {error}") from None
        raise AssertionError("unreachable")

    async def _require(self) -> _Server:
        """Return the running fork server; execute one where there is none. Raises OSError."""
        if self._server is None or self._server.process.returncode is not None:
            if self._server is not None:
                self._server.channel.close()
                self._server = None
            self._server = await _execute(self._command)
        return self._server


async def _execute(command: tuple[str, ...]) -> _Server:
    """Execute a fork server, and wait until it has imported all. Raises OSError.

    Not a fork of the supervisor, of whose memory a worker's must hold nothing.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = trio.socket.from_stdlib_socket(ours)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(channel.close)
        with child_reaper.pause_while_spawning():
            process = await trio.lowlevel.open_process(
                [*command, "--channel", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=worker_environment(os.environ),
                process_group=0,  # Ctrl-C must reach the supervisor alone
            )
            child_reaper.register_own(process)
        theirs.close()
        server = _Server(process, channel)
        try:
            await _receive(channel, IMPORT_TIMEOUT_S)  # READY
        except (ConnectionError, TimeoutError) as error:
            await _end(server)
            raise ForkFailed(f"the fork server does not start ({error}); see its log") from None
        except BaseException:
            await _end(server)
            raise
        undo.pop_all()
    return server


async def _request(channel: trio.socket.SocketType, request: ForkRequest, descriptors: Mapping[str, int]) -> int:
    """Request a worker and return its process id.

    Raises ConnectionError, TimeoutError, msgspec.MsgspecError, and ForkFailed where no process could be forked.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors.values()))
    await channel.sendmsg([request.encode()], [rights])
    reply = ForkReply.decode(await _receive(channel, FORK_TIMEOUT_S))
    if not reply.pid:
        raise ForkFailed(reply.error, os.strerror(reply.error))
    return reply.pid


async def _receive(channel: trio.socket.SocketType, timeout_s: float) -> bytes:
    with trio.move_on_after(timeout_s):
        data = await channel.recv(REQUEST_BYTES_MAX)
        if not data:
            raise ConnectionResetError("its end of the channel is closed")
        return data
    raise TimeoutError(f"no answer within {timeout_s:.0f} s")


async def _end(server: _Server) -> None:
    """Kill a fork server, which has nothing to lose, and fetch its exit code."""
    with trio.CancelScope(shield=True):
        server.channel.close()
        server.process.kill()
        await server.process.wait()
