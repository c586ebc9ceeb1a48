"""The pool of pipes for splicing: a direction holds one only while bytes are in it.

So a few pipes serve thousands of idle relays.
The kernel bounds the pages that all pipes of a user without CAP_SYS_RESOURCE may have (fs.pipe-user-pages-soft: 16,384
as a rule, which is 64 MiB); above that every new pipe gets two pages. So a few pipes are huge, for bulk (half the CPU
of large ones), some hundred are large, and those made when all of them are lent out (because as many receivers do not
read) are small: even ten thousand stuck relays stay below the bound, and each still has a pipe of its own. The
forwarders of a cluster share the bound, and therefore these numbers.
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
"""Pipes created in advance, so that bytes move even when the process may open no more files."""


class Pipe:
    """One pipe, by its two descriptors; empty whenever it is in the pool.

    ``wanted_bytes`` is the size that was requested, ``size_bytes`` what the kernel granted.
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
        """Create a pipe, of the requested size if the kernel allows it. Raises OSError."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # the kernel keeps its default size, which is enough
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, size_bytes)
        return cls(pipe_id, reading, writing, size_bytes)

    def queued_bytes(self) -> int:
        """Return how many bytes are in the pipe."""
        return int(struct.unpack("i", fcntl.ioctl(self.read_end, termios.FIONREAD, b"\0\0\0\0"))[0])

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


OnPipesCreated = Callable[[Sequence[Pipe]], None]
OnPipeClosed = Callable[[Pipe], None]


class PipePool:
    """The pipes of one forwarder: lends the largest that is free, and creates one where none is.

    ``on_created`` is called with new pipes before any byte is in them, and may refuse them with an OSError;
    ``on_closed`` with each pipe that was closed. ``forwarders``: how many share the kernel's bound.
    """

    def __init__(self, on_created: OnPipesCreated, on_closed: OnPipeClosed, *, forwarders: int) -> None:
        self._on_created = on_created
        self._on_closed = on_closed
        self._last_id = 0
        self._count_max = {
            HUGE_PIPE_BYTES: max(1, HUGE_PIPES_MAX // forwarders),
            LARGE_PIPE_BYTES: max(1, LARGE_PIPES_MAX // forwarders),
        }
        self._free: dict[int, list[Pipe]] = {HUGE_PIPE_BYTES: [], LARGE_PIPE_BYTES: [], SMALL_PIPE_BYTES: []}
        self._count: Counter[int] = Counter()
        """Of all pipes, by the size that was requested for them: what the kernel granted may be less."""

    def reserve_pipes(self) -> None:
        """Create free pipes until there are RESERVE. Raises OSError."""
        while sum(len(free) for free in self._free.values()) < RESERVE:
            self.release_pipe(self._create(HUGE_PIPE_BYTES if self._may_create(HUGE_PIPE_BYTES) else LARGE_PIPE_BYTES))

    def adopt_pipe(self, pipe: Pipe) -> None:
        """Count a predecessor's pipe as one of this pool that is lent out."""
        self._last_id = max(self._last_id, pipe.id)
        self._count[pipe.wanted_bytes] += 1

    @property
    def has_free_pipe(self) -> bool:
        """Whether a pipe can be lent without creating one."""
        return any(self._free.values())

    def acquire_pipe(self) -> Pipe:
        """Return an empty pipe. Raises OSError if none is free and none can be created."""
        for wanted_bytes, free in self._free.items():
            if free:
                return free.pop()
            if self._may_create(wanted_bytes):
                try:
                    return self._create(wanted_bytes)
                except OSError:
                    if not self.has_free_pipe:
                        raise
        raise AssertionError("a small pipe may always be created")

    def acquire_pipe_for(self, size_bytes: int) -> Pipe:
        """Return an empty pipe that holds ``size_bytes``. Raises OSError if none is free and none can be created."""
        for wanted_bytes, free in self._free.items():
            for at, pipe in enumerate(free):
                if pipe.size_bytes >= size_bytes:
                    return free.pop(at)
            # A free one that is smaller than requested shows that the kernel grants no more now.
            if wanted_bytes >= size_bytes and not free and self._may_create(wanted_bytes):
                pipe = self._create(wanted_bytes)
                if pipe.size_bytes >= size_bytes:
                    return pipe
                self.release_pipe(pipe)
        raise BlockingIOError(errno.EAGAIN, f"no pipe for {size_bytes} bytes now")

    def _may_create(self, wanted_bytes: int) -> bool:
        return self._count[wanted_bytes] < self._count_max.get(wanted_bytes, sys.maxsize)

    def _create(self, wanted_bytes: int) -> Pipe:
        pipe = Pipe.create(self._last_id + 1, wanted_bytes)
        try:
            self._on_created([pipe])
        except OSError:
            pipe.close()
            raise
        self._last_id += 1
        self._count[wanted_bytes] += 1
        return pipe

    def release_pipe(self, pipe: Pipe) -> None:
        """Return an empty pipe to the pool."""
        free = self._free[pipe.wanted_bytes]
        if pipe.wanted_bytes == SMALL_PIPE_BYTES and len(free) >= FREE_SMALL_PIPES_MAX:
            self.discard_pipe(pipe)
        else:
            free.append(pipe)

    def discard_pipe(self, pipe: Pipe) -> None:
        """Close a pipe that is lent out, with what is in it."""
        pipe.close()
        self._count[pipe.wanted_bytes] -= 1
        self._on_closed(pipe)

    def close_free_pipes(self) -> None:
        """Close this process's ends of the free pipes, without ``on_closed``: they are a successor's now."""
        for free in self._free.values():
            while free:
                free.pop().close()
