"""The pipe by which workers pass audit events to the supervisor."""

import os


def create_audit_pipe() -> tuple[int, int]:
    """Return the two ends of the pipe, both non-blocking."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


def open_for_worker(pipe: int) -> int:
    """Open the pipe's writing end once more: a worker that makes its own blocking makes nobody else's so."""
    return os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
