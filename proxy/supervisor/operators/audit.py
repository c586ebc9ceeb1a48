"""The destination of audit events: workers write lines into a pipe, and the supervisor writes them on.

A destination that takes nothing stops the writing thread alone: then the pipe is full, and workers drop and count.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from functools import partial

import trio
from prometheus_client import CollectorRegistry, Counter

from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger
from proxy.config.types import Audit
from proxy.supervisor.operators.journal import is_journal, open_journal, write_to_journal
from proxy.supervisor.processes.signals import in_thread_without_signals

READ_BYTES = 64 * 1024
FLUSH_TIMEOUT_S = 1.0
"""How long the end of the cluster waits for the last events to be written."""

_STDOUT = 1
_MODE = 0o640
_PARTIAL_BYTES_MAX = 4096


def open_destination(audit: Audit) -> int:
    """Open the destination, -1 for none; a file that does not exist is made. Raises ConfigError."""
    if not audit.events:
        return -1
    if audit.output == "journald":
        return open_journal()
    if audit.output == "stdout":
        try:
            return os.dup(_STDOUT)
        except OSError as error:
            raise ConfigError(f'audit.output: "stdout" cannot be used: {error.strerror}') from None
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(audit.file, flags, _MODE)
    except OSError as error:
        raise ConfigError(f"audit.file: {audit.file} cannot be written: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"audit.file: {audit.file} is no regular file")
    os.set_blocking(descriptor, True)
    return descriptor


def close_destination(descriptor: int) -> None:
    """Close what ``open_destination`` has returned."""
    if descriptor >= 0:
        os.close(descriptor)


class AuditWriter:
    """Writes the lines of the pipe to the destination. ``pipe``: its reading end."""

    def __init__(self, pipe: int, registry: CollectorRegistry) -> None:
        self._pipe = pipe
        self._destination = -1
        self._write_to: Callable[[int, bytes], tuple[int, str]] = _write_all
        self._rest = b""
        self._fails = False
        self._limiter = trio.CapacityLimiter(1)
        self._lost = Counter(
            "pulsar_proxy_audit_lost_bytes",
            "Bytes of audit events that the destination did not take: a full disk, a reader that is gone.",
            registry=registry,
        )

    def set_destination(self, descriptor: int) -> None:
        """Write to a new destination from now on; -1: drop everything."""
        before, self._destination = self._destination, descriptor
        self._write_to = write_to_journal if is_journal(descriptor) else _write_all
        self._fails = False
        close_destination(before)

    async def run(self) -> None:
        """Write lines until cancelled; then those that the pipe still holds, for a moment."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._pipe)
                await self._write_some()
        finally:
            with trio.move_on_after(FLUSH_TIMEOUT_S, shield=True):
                async with self._limiter:  # which a thread has whose call was cancelled, until it has written
                    pass
                while await self._write_some():
                    pass

    async def _write_some(self) -> bool:
        """Write what is in the pipe; return False where it is empty."""
        try:
            data = self._rest + os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return False
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if len(self._rest) > _PARTIAL_BYTES_MAX:  # no worker of ours writes that
            self._rest = b""
        lines = data[:end]
        if not lines or self._destination < 0:
            return True
        # A descriptor of the thread's own: a reload may close the other meanwhile, and its number be another file's.
        try:
            write = partial(self._write_to, os.dup(self._destination))
        except OSError as error:  # no descriptor is left
            self._on_lost(len(lines), error.strerror or "")
            return True
        lost, reason = await in_thread_without_signals(write, lines, limiter=self._limiter)
        if lost:
            self._on_lost(lost, reason)
        else:
            self._fails = False
        return True

    def _on_lost(self, lost_bytes: int, reason: str) -> None:
        self._lost.inc(lost_bytes)
        if not self._fails:
            get_logger().error("audit events cannot be written", reason=reason)
        self._fails = True


def _write_all(descriptor: int, lines: bytes) -> tuple[int, str]:
    """Write to a descriptor and close it; return how many bytes were lost, and why."""
    left = memoryview(lines)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:
        return len(left), error.strerror or ""
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return 0, ""
