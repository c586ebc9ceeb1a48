"""Opening of files for a worker, which the kernel lets open none: those that the configuration names for its role."""

import array
import errno
import os
import socket
from collections.abc import Callable

import msgspec
import trio

from proxy.common.files import open_directly
from proxy.runtime.process.file_requests import REQUEST_BYTES_MAX, FileReply, FileRequest
from proxy.supervisor.processes.signals import in_thread_without_signals

REQUESTS_PER_S_MAX = 200
"""Of one worker: a start or a reload needs a few; each takes a thread of the supervisor's for a moment."""

_threads = trio.CapacityLimiter(16)
"""Of their own: where a file system hangs, the supervisor goes on to read other files."""


async def serve_files(sock: socket.socket, allowed_files: Callable[[], frozenset[str]]) -> None:
    """Open files for one worker, one at a time, until its end of the socket is closed, or it sends nonsense.

    ``allowed_files`` returns the paths that may be opened at that moment. Closes the socket.
    """
    channel = trio.socket.from_stdlib_socket(sock)
    window_end_s, requests = 0.0, 0
    with channel:
        while True:
            try:
                data = await channel.recv(REQUEST_BYTES_MAX)
                if not data:
                    return
                request = FileRequest.decode(data)
                if requests == REQUESTS_PER_S_MAX:
                    await trio.sleep_until(window_end_s)
                if trio.current_time() >= window_end_s:
                    window_end_s, requests = trio.current_time() + 1, 0
                requests += 1
                await _answer(channel, request, allowed_files())
            except (OSError, msgspec.MsgspecError):
                return


async def _answer(channel: trio.socket.SocketType, request: FileRequest, allowed: frozenset[str]) -> None:
    if request.path not in allowed:
        await channel.send(FileReply(request.number, errno.EACCES).encode())
        return
    try:
        descriptor = await in_thread_without_signals(open_directly, request.path, limiter=_threads)
    except (OSError, ValueError) as error:
        number = (error.errno or errno.EIO) if isinstance(error, OSError) else errno.EINVAL
        await channel.send(FileReply(request.number, number).encode())
        return
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        await channel.sendmsg([FileReply(request.number).encode()], [rights])
    finally:
        os.close(descriptor)
