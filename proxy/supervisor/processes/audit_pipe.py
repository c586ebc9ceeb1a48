"""The pipe by which workers pass audit events to the supervisor."""

import contextlib
import fcntl
import os

PIPE_BYTES = 256 * 1024
"""Room for some 700 events at a moment: when a broker ends, all of its relays end."""


def create_audit_pipe() -> tuple[int, int]:
    """Return the two ends of the pipe, both non-blocking."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(OSError):  # this user has many pipes: then it is 64 KiB
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def open_for_worker(pipe: int) -> int:
    """Open the pipe's writing end once more: a worker that makes its own blocking makes nobody else's so."""
    return os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
