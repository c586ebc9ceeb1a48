"""The engine's hands: the bytes of one direction at a time, socket → pipe → socket, and how a direction ends.

``SplicePump.pump`` is a blind direction's turn, which is all that most relays ever need; one whose frames are
followed has
another turn (proxy.forwarder.relay.expiring.splice_pump), made of the same parts. A direction knows which one is its
own.
"""

import errno
import os
import socket
from collections import deque
from collections.abc import Callable

from proxy.common.logs import get_logger
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import Direction, Relay, shut_down
from proxy.runtime.shared.relay_table import BYTES, OPERATIONS, PIPE

SPLICE_BYTES_MAX = 1 << 20
SPLICE_FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK, splice(2)
FEW_BYTES = 256
"""A portion below this is taken for all that its source has. A splice takes 16 pieces or more, and pieces that small on
average are next to impossible: the kernel puts small segments together."""

PEER_GONE = frozenset(
    {
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.EPROTO,
    }
)
_NO_PIPE_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETOOMANYREFS})


class SplicePump:
    """See the module.

    ``finish`` ends a relay of which both directions are done, or that is defective; ``ring`` makes the loop look at the
    line. ``line``: who gets another turn that no edge gives; ``without_pipe``: who waits for a pipe; ``unsure``: whose
    source was taken for dry; ``half_closed``: who lives only as long as bytes move, with how many had moved and until
    when that is good for.
    """

    def __init__(
        self, cells: memoryview, pool: PipePool, finish: Callable[[Relay], None], ring: Callable[[], None]
    ) -> None:
        self._cells = cells
        self._pool = pool
        self._finish = finish
        self._ring = ring
        self._ready: Pipe | None = None
        """The pipe that the next portion goes through; the pool's again at the end."""
        self.run_queue: deque[Direction] = deque()
        self.waiting_for_pipe: deque[Direction] = deque()
        self.to_recheck: set[Direction] = set()
        self.half_closed: dict[Relay, tuple[int, float]] = {}
        self.is_serving = False

    # ---- turns

    def enqueue(self, direction: Direction) -> None:
        """Give a direction another turn."""
        if not direction.queued:
            direction.queued = True
            self.run_queue.append(direction)

    def wake_direction(self, direction: Direction) -> None:
        """Give a direction a turn, although nothing is being served."""
        if not direction.done:
            self.enqueue(direction)
            if not self.is_serving:  # which would lose the alarm that ends its waiting, and looks at the line anyway
                self._ring()

    def pump(self, direction: Direction) -> None:  # noqa: PLR0911 -- the hot path: a call costs more than it says
        """Give a direction its turn, unless it is done or in line: at most one portion; more is left to the next turn,
        or to an edge. Per portion two system calls, and as little else as possible.

        A defect ends its relay and no other.
        """
        if direction.queued or direction.done:
            return
        try:
            if direction.in_pipe and not self.drain_pipe(direction):
                return
            pipe = self._ready or self.acquire_pipe(direction)
            if pipe is None:
                return
            cells, row = self._cells, direction.row
            cells[row + PIPE] = pipe.id
            try:
                moved = os.splice(direction.source, pipe.write_end, SPLICE_BYTES_MAX, None, None, SPLICE_FLAGS)
            except OSError as error:
                self.on_source_error(direction, error)
                return
            if not moved:
                cells[row + PIPE] = 0
                self.end_direction(direction)
                return
            direction.in_pipe = moved
            try:
                sent = os.splice(pipe.read_end, direction.sink, moved, None, None, SPLICE_FLAGS)
            except OSError as error:
                self.on_sink_error(direction, pipe, error)
                return
            direction.in_pipe = moved - sent
            cells[row + BYTES] += sent
            cells[row + OPERATIONS] += 1
            if sent == moved:
                cells[row + PIPE] = 0
                # So few bytes are all that there was, and more will raise an edge; an end that was seen already will
                # not. (Where they lay in more pieces than a splice takes at a time, that is wrong: see the engine's
                # _look_again.)
                if moved < FEW_BYTES and not direction.eof_seen:
                    self.to_recheck.add(direction)
                    return
            else:
                self.lend_pipe(direction, pipe)
            self.enqueue(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self.on_internal_error(direction, error)

    def drain_only(self, direction: Direction) -> None:
        """Give its turn to a direction of a relay that is being ended: what has left the source is delivered, nothing
        else.
        """
        if direction.queued or direction.done:
            return
        try:
            if direction.in_pipe:
                self.drain_pipe(direction)
        except Exception as error:  # noqa: BLE001 -- as pump
            self.on_internal_error(direction, error)

    def deliver_from_pipe(self, direction: Direction, pipe: Pipe, *, is_all: bool) -> None:
        """The second half of a turn, as ``pump`` has it: from the pipe in hand to the sink. ``is_all``: the source was
        taken for dry.
        """
        cells, row, moved = self._cells, direction.row, direction.in_pipe
        try:
            sent = os.splice(pipe.read_end, direction.sink, moved, None, None, SPLICE_FLAGS)
        except OSError as error:
            self.on_sink_error(direction, pipe, error)
            return
        direction.in_pipe = moved - sent
        cells[row + BYTES] += sent
        cells[row + OPERATIONS] += 1
        if sent < moved:
            self.lend_pipe(direction, pipe)
        else:
            cells[row + PIPE] = 0
            if is_all and not direction.eof_seen:
                self.to_recheck.add(direction)
                return
        self.enqueue(direction)

    def on_source_error(self, direction: Direction, error: OSError) -> None:
        """Nothing came: since there is nothing now, or since nothing ever will."""
        self._cells[direction.row + PIPE] = 0
        if error.errno == errno.EAGAIN:
            return
        if error.errno not in PEER_GONE:
            raise error
        direction.relay.broken = True
        self.end_direction(direction)

    def on_sink_error(self, direction: Direction, pipe: Pipe, error: OSError) -> None:
        """Nothing went: since there is no room now, or since there never will be."""
        self.lend_pipe(direction, pipe)
        if error.errno != errno.EAGAIN:
            self.on_sink_broken(direction)

    def on_internal_error(self, direction: Direction, error: Exception) -> None:
        """End the relay of a direction whose turn has failed in a way that none should."""
        direction.relay.broken = True
        self._finish(direction.relay)
        if self._ready is not None:  # nobody else may get what it may hold
            self._pool.discard_pipe(self._ready)
            self._ready = None
        get_logger().error("a relay was ended by an unexpected error", exc_info=error)

    # ---- pipes

    def acquire_pipe(self, direction: Direction) -> Pipe | None:
        """Take an empty pipe in hand; None where there is none now, and the direction waits for one."""
        try:
            self._ready = self._pool.acquire_pipe()
        except OSError as error:
            if error.errno not in _NO_PIPE_NOW:
                raise
            direction.queued = True
            self.waiting_for_pipe.append(direction)
        return self._ready

    def get_empty_pipe(self, direction: Direction) -> Pipe | None:
        """The pipe in hand, or another; None where there is none now, and the direction waits for one."""
        return self._ready or self.acquire_pipe(direction)

    def get_pipe_for(self, direction: Direction, size_bytes: int) -> Pipe | None:
        """An empty pipe in hand that holds so many bytes; None where there is none now, and the direction is looked at
        again within a second.
        """
        if self._ready is not None and self._ready.size_bytes < size_bytes:
            self._pool.release_pipe(self._ready)
            self._ready = None
        if self._ready is None:
            try:
                self._ready = self._pool.acquire_pipe_for(size_bytes)
            except OSError as error:
                if error.errno not in _NO_PIPE_NOW:
                    raise
                self.to_recheck.add(direction)
        return self._ready

    def lend_pipe(self, direction: Direction, pipe: Pipe) -> None:
        """Leave the pipe to a direction whose bytes are in it; the next one takes another."""
        direction.pipe = pipe
        self._ready = None

    def drain_pipe(self, direction: Direction) -> bool:
        """Splice from a direction's pipe into the sink; False where bytes are left, since it is full or broken."""
        pipe, cells = direction.pipe, self._cells
        assert pipe is not None  # bytes are left in a pipe that was lent
        try:
            while direction.in_pipe:
                moved = os.splice(pipe.read_end, direction.sink, direction.in_pipe, None, None, SPLICE_FLAGS)
                direction.in_pipe -= moved
                cells[direction.row + BYTES] += moved
                cells[direction.row + OPERATIONS] += 1
        except BlockingIOError:
            return False
        except OSError:
            self.on_sink_broken(direction)
            return False
        cells[direction.row + PIPE] = 0
        direction.pipe = None
        self._pool.release_pipe(pipe)
        return True

    @property
    def has_free_pipe(self) -> bool:
        """Whether somebody who waits for a pipe would get one without one being made."""
        return self._ready is not None or self._pool.has_free_pipe

    def discard_in_flight(self, direction: Direction) -> None:
        """Drop what is on its way to a direction's sink."""
        if direction.pipe is not None:
            self._cells[direction.row + PIPE] = 0
            self._pool.discard_pipe(direction.pipe)
            direction.pipe, direction.in_pipe = None, 0

    def close_free_pipes(self) -> None:
        """Close this process's ends of the pipes that no direction was lent."""
        if self._ready is not None:
            self._ready.close()
        self._pool.close_free_pipes()

    def bytes_moved(self, direction: Direction) -> int:
        """How many have gone to its sink, ever."""
        return self._cells[direction.row + BYTES]

    # ---- ends

    def on_sink_broken(self, direction: Direction) -> None:
        """Nothing that is sent there arrives any more."""
        direction.relay.broken = True
        self.discard_in_flight(direction)
        # The same socket is the opposite direction's source: it will find its end there, after what was sent before.
        self.end_direction(direction)
        direction.opposite.pump(direction.opposite)

    def end_direction(self, direction: Direction) -> None:
        """Tell the sink that nothing more comes."""
        direction.done = True
        shut_down(direction.sink, socket.SHUT_WR)
        if direction.opposite.done:
            self._finish(direction.relay)
        else:
            self.start_idle_timeout(direction.relay)

    def start_idle_timeout(self, relay: Relay) -> None:
        """From now on the relay lives only as long as its bytes move (see the engine's _end_the_stuck)."""
        self.half_closed.setdefault(relay, (-1, 0.0))
