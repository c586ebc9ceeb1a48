"""Pipes for splicing, lent out while bytes are in them.

A direction of a relay needs a pipe only while bytes are on their way, so a few pipes serve thousands of idle relays.
The kernel bounds the pages that all pipes of a user without CAP_SYS_RESOURCE may have (fs.pipe-user-pages-soft: 16,384
as a rule, which is 64 MiB); above that every new pipe gets two pages. So the first pipes are large, for bulk, and those
made when all of them are lent out (because as many receivers do not read) are small: even ten thousand stuck relays
stay below the bound, and each still has a pipe of its own.
"""

import contextlib
import fcntl
import os

LARGE_PIPE_BYTES = 1 << 16
SMALL_PIPE_BYTES = 1 << 12
LARGE_PIPES_MAX = 256
FREE_SMALL_PIPES_MAX = 64
RESERVE = 16
"""Pipes made beforehand, so that bytes move even when the process may open no more files."""


class Pipe:
    """One pipe; empty whenever it is not lent out."""

    __slots__ = ("large", "reading", "writing")

    def __init__(self, *, large: bool) -> None:
        self.large = large
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # the kernel keeps the size it gave, which is none too small
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, LARGE_PIPE_BYTES if large else SMALL_PIPE_BYTES)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reading)
        os.close(self.writing)


class PipePool:
    """Lends pipes; makes new ones where none is free."""

    def __init__(self) -> None:
        self._free_large: list[Pipe] = []
        self._free_small: list[Pipe] = []
        self._large_made = 0
        for _ in range(RESERVE):
            self._free_large.append(Pipe(large=True))
            self._large_made += 1

    @property
    def has_free(self) -> bool:
        """Whether a pipe can be lent without making one."""
        return bool(self._free_large or self._free_small)

    def take(self) -> Pipe:
        """An empty pipe, a large one if there is one. Raises OSError where the process may open no more files."""
        if self._free_large:
            return self._free_large.pop()
        if self._large_made < LARGE_PIPES_MAX:
            pipe = Pipe(large=True)
            self._large_made += 1
            return pipe
        return self._free_small.pop() if self._free_small else Pipe(large=False)

    def give(self, pipe: Pipe) -> None:
        """Take an empty pipe back."""
        if pipe.large:
            self._free_large.append(pipe)
        elif len(self._free_small) < FREE_SMALL_PIPES_MAX:
            self._free_small.append(pipe)
        else:
            pipe.close()

    def discard(self, pipe: Pipe) -> None:
        """Close a pipe with bytes in it that nobody wants any more."""
        pipe.close()
        if pipe.large:
            self._large_made -= 1

    def close(self) -> None:
        """Close the free pipes."""
        for pipe in (*self._free_large, *self._free_small):
            pipe.close()
        self._free_large.clear()
        self._free_small.clear()
