"""The pool of pipes for splicing: a direction holds one only while bytes are in it.

So a few pipes serve thousands of idle relays.

The kernel bounds the pages that all pipes of a user without CAP_SYS_RESOURCE may have (fs.pipe-user-pages-soft: 16,384
as a rule, which is 64 MiB); above that every new pipe gets two pages. So a few pipes are huge, for bulk (half the CPU
of large ones), some hundred are large, and those made when all of them are lent out (because as many receivers do not
read) are small: even ten thousand stuck relays stay below the bound, and each still has a pipe of its own. The
forwarders of a cluster share the bound, and therefore these numbers.

Pipes in which bytes stay behind count for their owner (proxy.runtime.fairness.owners). Of each size but the small one
an owner may hold SHARE_FACTOR times as many as it leaves for others ("dynamic thresholds", Choudhury and Hahne, 1998),
so two thirds at most, and one in any case as long as one is left. Above that its directions use smaller pipes. The size
is chosen before bytes enter a pipe, since one that holds many pieces can neither shrink nor be emptied into a smaller
one. Where few are in it, it is shrunk in place once no byte has moved for a while: it stays the same pipe with the same
bytes, so a successor finds them whenever this process is killed.
"""

import contextlib
import errno
import fcntl
import os
import struct
import sys
import termios
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

HUGE_PIPE_BYTES = 1 << 20
LARGE_PIPE_BYTES = 1 << 16
SMALL_PIPE_BYTES = 1 << 12
HUGE_PIPES_MAX = 24
LARGE_PIPES_MAX = 384
"""Of all forwarders together: 12,288 pages."""
SHARE_FACTOR = 2
FREE_SMALL_PIPES_MAX = 64
RESERVE = 16
"""Pipes created in advance, so that bytes move even when the process may open no more files."""


class Pipe:
    """One pipe, by its two descriptors; empty whenever it is in the pool.

    ``wanted_bytes`` is the size that was requested, ``size_bytes`` what the kernel granted. ``share``: where it counts
    while bytes stay behind in it. ``seen_bytes``: how many did at the last look; inverted once it was tried to shrink.
    """

    __slots__ = ("id", "read_end", "seen_bytes", "share", "size_bytes", "wanted_bytes", "write_end")

    def __init__(self, pipe_id: int, reading: int, writing: int, wanted_bytes: int) -> None:
        self.id = pipe_id
        self.read_end = reading
        self.write_end = writing
        self.wanted_bytes = wanted_bytes
        self.share: PipeShare | None = None
        self.seen_bytes = 0
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

    def shrink_to(self, size_bytes: int) -> bool:
        """Shrink the pipe in place; return False if what is in it needs more room."""
        try:
            self.size_bytes = int(fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, size_bytes))
        except OSError:  # EBUSY
            return False
        self.wanted_bytes = size_bytes
        return True

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


class PipeLane:
    """The directions that may have pipes of ``size_bytes_max``. ``ready``: the empty pipe for their next portion, which
    saves the pool's two calls for each.
    """

    __slots__ = ("ready", "size_bytes_max")

    def __init__(self, size_bytes_max: int) -> None:
        self.size_bytes_max = size_bytes_max
        self.ready: Pipe | None = None


class PipeShare:
    """What one owner's directions hold: ``held``, by size, pipes in which bytes stay behind. ``lane``: what its next
    portions may use.
    """

    __slots__ = ("__weakref__", "held", "lane")

    def __init__(self, lane: PipeLane) -> None:
        self.held = {HUGE_PIPE_BYTES: 0, LARGE_PIPE_BYTES: 0}
        self.lane = lane


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
        self.lanes = tuple(map(PipeLane, self._free))
        self._held = {HUGE_PIPE_BYTES: 0, LARGE_PIPE_BYTES: 0}
        self._held_pipes: set[Pipe] = set()
        """Those in which bytes stay behind, without small ones."""
        self._shares: weakref.WeakValueDictionary[str, PipeShare] = weakref.WeakValueDictionary()
        self._limited: weakref.WeakSet[PipeShare] = weakref.WeakSet()

    def reserve_pipes(self) -> None:
        """Create free pipes until there are RESERVE. Raises OSError."""
        while sum(len(free) for free in self._free.values()) < RESERVE:
            self.release_pipe(self._create(HUGE_PIPE_BYTES if self._may_create(HUGE_PIPE_BYTES) else LARGE_PIPE_BYTES))

    def adopt_pipe(self, pipe: Pipe) -> None:
        """Count a predecessor's pipe as one of this pool that is lent out: it may have been shrunk."""
        self._last_id = max(self._last_id, pipe.id)
        granted_bytes = min(pipe.wanted_bytes, pipe.size_bytes)
        pipe.wanted_bytes = next((size for size in self._free if size <= granted_bytes), SMALL_PIPE_BYTES)
        self._count[pipe.wanted_bytes] += 1

    @property
    def has_free_pipe(self) -> bool:
        """Whether a pipe can be had without creating one."""
        return any(self._free.values()) or any(lane.ready for lane in self.lanes)

    def acquire_pipe(self, size_bytes_max: int = HUGE_PIPE_BYTES) -> Pipe:
        """Return an empty pipe, of at most this size unless none of those can be had. Raises OSError if none is free
        and none can be created.
        """
        for wanted_bytes, free in self._free.items():
            if wanted_bytes > size_bytes_max:
                continue
            if free:
                return free.pop()
            if self._may_create(wanted_bytes):
                try:
                    return self._create(wanted_bytes)
                except OSError:
                    if not any(self._free.values()):
                        raise
        return next(free.pop() for free in self._free.values() if free)

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
        self._stop_counting(pipe)
        free = self._free[pipe.wanted_bytes]
        if pipe.wanted_bytes == SMALL_PIPE_BYTES and len(free) >= FREE_SMALL_PIPES_MAX:
            self.discard_pipe(pipe)
        else:
            free.append(pipe)

    def discard_pipe(self, pipe: Pipe) -> None:
        """Close a pipe that is lent out, with what is in it."""
        self._stop_counting(pipe)
        pipe.close()
        self._count[pipe.wanted_bytes] -= 1
        self._on_closed(pipe)

    def close_free_pipes(self) -> None:
        """Close this process's ends of the free pipes, without ``on_closed``: they are a successor's now."""
        for free in self._free.values():
            while free:
                free.pop().close()
        for lane in self.lanes:
            if lane.ready is not None:
                lane.ready.close()

    # ---- shares

    def share_of(self, owner: str) -> PipeShare:
        """Return the share of an owner. It is forgotten with the last direction that refers to it."""
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = PipeShare(self.lanes[0])
            self._choose_lane(share)
        return share

    def lend_pipe(self, pipe: Pipe, share: PipeShare) -> None:
        """Count a pipe for the owner of the bytes that stay behind in it, until it is released or discarded."""
        pipe.share = share
        if pipe.wanted_bytes != SMALL_PIPE_BYTES:
            pipe.seen_bytes = 0
            self._held_pipes.add(pipe)
            self._held[pipe.wanted_bytes] += 1
            share.held[pipe.wanted_bytes] += 1
        self._choose_lane(share)

    def _stop_counting(self, pipe: Pipe) -> None:
        share, pipe.share = pipe.share, None
        if share is None:
            return
        if pipe.wanted_bytes != SMALL_PIPE_BYTES:
            self._held_pipes.remove(pipe)
            self._held[pipe.wanted_bytes] -= 1
            share.held[pipe.wanted_bytes] -= 1
        if share.lane is not self.lanes[0]:  # else it may have the largest already
            self._choose_lane(share)

    def _choose_lane(self, share: PipeShare) -> None:
        huge, large, small = self.lanes
        may_hold = self._may_hold
        lane = huge if may_hold(share, HUGE_PIPE_BYTES) else large if may_hold(share, LARGE_PIPE_BYTES) else small
        if lane is not share.lane:
            share.lane = lane
            if lane is huge:
                self._limited.discard(share)
            else:
                self._limited.add(share)

    def _may_hold(self, share: PipeShare, size_bytes: int) -> bool:
        """Return True if an owner may hold one more pipe of a size."""
        held = share.held[size_bytes] + 1
        left = self._count_max[size_bytes] - self._held[size_bytes] - 1
        return left >= 0 and (held == 1 or held <= SHARE_FACTOR * left)

    def rebalance(self) -> None:
        """Shrink pipes of which no byte has moved since the last call, and let owners and portions have larger ones
        that have become free.
        """
        for pipe in list(self._held_pipes):
            queued = pipe.queued_bytes()
            if pipe.seen_bytes == queued:
                self._shrink(pipe)
                pipe.seen_bytes = ~queued
            elif pipe.seen_bytes != ~queued:
                pipe.seen_bytes = queued
        for share in list(self._limited):
            self._choose_lane(share)
        for lane in self.lanes:
            if lane.ready is not None and lane.ready.wanted_bytes < lane.size_bytes_max:
                self.release_pipe(lane.ready)
                lane.ready = None

    def _shrink(self, pipe: Pipe) -> None:
        share, old_bytes = pipe.share, pipe.wanted_bytes
        assert share is not None  # it is held
        for size_bytes in (SMALL_PIPE_BYTES, LARGE_PIPE_BYTES):
            if size_bytes >= old_bytes or not self._may_create(size_bytes):
                continue
            self._stop_counting(pipe)
            if pipe.shrink_to(size_bytes):
                self._count[old_bytes] -= 1
                self._count[size_bytes] += 1
            self.lend_pipe(pipe, share)
            if pipe.wanted_bytes != old_bytes:
                return
