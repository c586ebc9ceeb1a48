"""Pipes for splicing, lent out while bytes are in them.

A direction of a relay needs a pipe only while bytes are on their way, so a few pipes serve thousands of idle relays.
The kernel bounds the pages that all pipes of a user without CAP_SYS_RESOURCE may have (fs.pipe-user-pages-soft: 16,384
as a rule, which is 64 MiB); above that every new pipe gets two pages. So a few pipes are huge, for bulk (half the CPU
of large ones), some hundred are large, and those made when all of them are lent out (because as many receivers do not
read) are small: even ten thousand stuck relays stay below the bound, and each still has a pipe of its own. The
forwarders of a cluster share the bound, and therefore the numbers.
"""

import contextlib
import errno
import fcntl
import os
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable, Sequence

HUGE_PIPE_BYTES = 1 << 20
LARGE_PIPE_BYTES = 1 << 16
SMALL_PIPE_BYTES = 1 << 12
HUGE_PIPES_MAX = 16
LARGE_PIPES_MAX = 512
"""Of all forwarders together: 12,288 pages."""
FREE_SMALL_PIPES_MAX = 64
RESERVE = 16
"""Pipes made beforehand, so that bytes move even when the process may open no more files."""


class Pipe:
    """One pipe, by its two descriptors; empty whenever it is not lent out.

    ``wanted_bytes`` is the size that was asked for, ``size_bytes`` what the kernel gave.
    """

    __slots__ = ("id", "read_end", "size_bytes", "wanted_bytes", "write_end")

    def __init__(self, pipe_id: int, reading: int, writing: int, wanted_bytes: int) -> None:
        self.id = pipe_id
        self.read_end = reading
        self.write_end = writing
        self.wanted_bytes = wanted_bytes
        self.size_bytes = int(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))

    @classmethod
    def create(cls, pipe_id: int, size_bytes: int) -> "Pipe":
        """A new pipe, of the size wanted if the kernel allows it. Raises OSError."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # the kernel keeps the size it gave, which is none too small
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, size_bytes)
        return cls(pipe_id, reading, writing, size_bytes)

    def queued_bytes(self) -> int:
        """How many bytes are in it."""
        return int(struct.unpack("i", fcntl.ioctl(self.read_end, termios.FIONREAD, b"\0\0\0\0"))[0])

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


OnPipesCreated = Callable[[Sequence[Pipe]], None]
OnPipeClosed = Callable[[Pipe], None]


class PipePool:
    """Lends pipes, the largest that are free; makes new ones where none is.

    ``made`` hears of new pipes before anything is in them, and may refuse them with an OSError; ``closed`` hears of
    those that are gone.
    """

    def __init__(self, made: OnPipesCreated, closed: OnPipeClosed, *, forwarders: int) -> None:
        self._made = made
        self._closed = closed
        self._last_id = 0
        self._most = {
            HUGE_PIPE_BYTES: max(1, HUGE_PIPES_MAX // forwarders),
            LARGE_PIPE_BYTES: max(1, LARGE_PIPES_MAX // forwarders),
        }
        self._free: dict[int, list[Pipe]] = {HUGE_PIPE_BYTES: [], LARGE_PIPE_BYTES: [], SMALL_PIPE_BYTES: []}
        self._count: Counter[int] = Counter()
        """Of the pipes that there are, by the size that was wanted for them: what the kernel gave may be less."""

    def reserve_pipes(self) -> None:
        """Make the first pipes, as many as are missing. Raises OSError."""
        while sum(len(free) for free in self._free.values()) < RESERVE:
            self.release_pipe(self._make(HUGE_PIPE_BYTES if self._may_make(HUGE_PIPE_BYTES) else LARGE_PIPE_BYTES))

    def adopt_pipe(self, pipe: Pipe) -> None:
        """Count a predecessor's pipe as one that is lent out."""
        self._last_id = max(self._last_id, pipe.id)
        self._count[pipe.wanted_bytes] += 1

    @property
    def has_free_pipe(self) -> bool:
        """Whether a pipe can be lent without making one."""
        return any(self._free.values())

    def acquire_pipe(self) -> Pipe:
        """An empty pipe. Raises OSError where none is free and there can be no more."""
        for wanted_bytes, free in self._free.items():
            if free:
                return free.pop()
            if self._may_make(wanted_bytes):
                try:
                    return self._make(wanted_bytes)
                except OSError:
                    if not self.has_free_pipe:
                        raise
        raise AssertionError("a small pipe may always be made")

    def acquire_pipe_for(self, size_bytes: int) -> Pipe:
        """An empty pipe that holds so many bytes. Raises OSError where none is free and there can be no more."""
        for wanted_bytes, free in self._free.items():
            for at, pipe in enumerate(free):
                if pipe.size_bytes >= size_bytes:
                    return free.pop(at)
            # One that was made smaller than wanted, and is free, says that the kernel gives no more now.
            if wanted_bytes >= size_bytes and not free and self._may_make(wanted_bytes):
                pipe = self._make(wanted_bytes)
                if pipe.size_bytes >= size_bytes:
                    return pipe
                self.release_pipe(pipe)
        raise BlockingIOError(errno.EAGAIN, f"no pipe for {size_bytes} bytes now")

    def _may_make(self, wanted_bytes: int) -> bool:
        return self._count[wanted_bytes] < self._most.get(wanted_bytes, sys.maxsize)

    def _make(self, wanted_bytes: int) -> Pipe:
        pipe = Pipe.create(self._last_id + 1, wanted_bytes)
        try:
            self._made([pipe])
        except OSError:
            pipe.close()
            raise
        self._last_id += 1
        self._count[wanted_bytes] += 1
        return pipe

    def release_pipe(self, pipe: Pipe) -> None:
        """Take an empty pipe back."""
        free = self._free[pipe.wanted_bytes]
        if pipe.wanted_bytes == SMALL_PIPE_BYTES and len(free) >= FREE_SMALL_PIPES_MAX:
            self.discard_pipe(pipe)
        else:
            free.append(pipe)

    def discard_pipe(self, pipe: Pipe) -> None:
        """Close a pipe that is lent out, and whatever is in it."""
        pipe.close()
        self._count[pipe.wanted_bytes] -= 1
        self._closed(pipe)

    def close_free_pipes(self) -> None:
        """Close this process's ends of the free pipes; nobody hears of it, since they are a successor's now."""
        for free in self._free.values():
            while free:
                free.pop().close()
