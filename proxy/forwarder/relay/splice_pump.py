"""The splice pump: moves the bytes of one direction at a time, socket → pipe → socket, and ends directions.

``SplicePump.pump`` moves a portion of a blind direction, which is all that most relays ever need. A direction of which
the frames are followed has another pump (proxy.forwarder.relay.framed_splice_pump), made of the same parts.
``Direction.pump`` is the one of the direction.

The order of stores that a successor relies on is RelayTable's: bind a pipe before bytes enter it, count what has left
it, unbind it when it is empty. The methods that run for each portion write the table's cells themselves, in that very
order: a method call costs more than the store that it makes.
"""

import errno
import os
from collections import deque

from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.pump import PEER_GONE, Pump, PumpHost
from proxy.forwarder.relay.relay import Direction
from proxy.runtime.shared.relay_table import BYTES, OPERATIONS, PIPE, RelayTable

SPLICE_FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK, splice(2)
FEW_BYTES = 256
"""A portion below this is assumed to be all that its source has. A splice takes 16 pieces or more, and pieces that
small on average are next to impossible: the kernel puts small segments together."""

_NO_PIPE_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETOOMANYREFS})


class SplicePump(Pump):
    """Moves portions of bytes between the sockets of relays, through pipes of a pool.

    ``waiting_for_pipe``: directions that found no free pipe.
    """

    def __init__(self, table: RelayTable, pool: PipePool, host: PumpHost) -> None:
        super().__init__(table, host)
        self._pool = pool
        self.waiting_for_pipe: deque[Direction] = deque()

    # ---- pumping

    def pump(self, direction: Direction) -> None:  # noqa: PLR0911 -- the hot path: a call costs more than it explains
        """Move at most one portion; see Pump.pump. Two system calls for each, and as little else as possible."""
        if direction.queued or direction.done:
            return
        try:
            if direction.held_bytes and not self.drain_pipe(direction):
                return
            pipe = direction.share.lane.ready or self._acquire_pipe(direction)
            if pipe is None:
                return
            cells, row = self._cells, direction.row
            cells[row + PIPE] = pipe.id
            try:
                bytes_max = self.run_queue.portion_bytes_max
                moved = os.splice(direction.source, pipe.write_end, bytes_max, None, None, SPLICE_FLAGS)
            except OSError as error:
                self.on_source_error(direction, error)
                return
            if not moved:
                cells[row + PIPE] = 0
                self.end_direction(direction)
                return
            direction.held_bytes = moved
            try:
                sent = os.splice(pipe.read_end, direction.sink, moved, None, None, SPLICE_FLAGS)
            except OSError as error:
                self._on_sink_error(direction, pipe, error)
                return
            direction.held_bytes = moved - sent
            cells[row + BYTES] += sent
            cells[row + OPERATIONS] += 1
            if sent == moved:
                cells[row + PIPE] = 0
                # So few bytes are all that there was, and more will raise an edge; an end that was seen already will
                # not. (Where they lay in more pieces than a splice takes at a time, that is wrong: see the engine's
                # _recheck_directions.)
                if moved < FEW_BYTES and not direction.eof_seen:
                    self.to_recheck.add(direction)
                    return
            else:
                self.lend_pipe(direction, pipe)
            self.enqueue(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self.on_internal_error(direction, error)

    def drain_only(self, direction: Direction) -> None:
        """Deliver what is in the pipe, and read nothing more; see Pump.drain_only."""
        if direction.queued or direction.done:
            return
        try:
            if direction.held_bytes:
                self.drain_pipe(direction)
        except Exception as error:  # noqa: BLE001 -- as pump
            self.on_internal_error(direction, error)

    def deliver_from_pipe(self, direction: Direction, pipe: Pipe, *, is_all: bool) -> None:
        """Move the bytes of a portion from its pipe to the sink: the second half of ``pump``.

        ``is_all``: the source is assumed to be empty.
        """
        cells, row, moved = self._cells, direction.row, direction.held_bytes
        try:
            sent = os.splice(pipe.read_end, direction.sink, moved, None, None, SPLICE_FLAGS)
        except OSError as error:
            self._on_sink_error(direction, pipe, error)
            return
        direction.held_bytes = moved - sent
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
        """Handle a splice from the source that failed: it is empty now, or its peer has gone.

        Raises errors that are neither.
        """
        self._cells[direction.row + PIPE] = 0  # for each portion of a busy relay there is one such error
        if error.errno == errno.EAGAIN:
            return
        if error.errno not in PEER_GONE:
            raise error
        direction.relay.broken = True
        self.end_direction(direction)

    def _on_sink_error(self, direction: Direction, pipe: Pipe, error: OSError) -> None:
        """Handle a splice to the sink that failed: it is full now, or its peer has gone."""
        self.lend_pipe(direction, pipe)
        if error.errno != errno.EAGAIN:
            self.on_sink_broken(direction)

    def on_internal_error(self, direction: Direction, error: Exception) -> None:
        """End the relay of a direction whose pumping raised an unexpected error."""
        super().on_internal_error(direction, error)
        for lane in self._pool.lanes:
            if lane.ready is not None:  # what it may hold must reach no other relay
                self._pool.discard_pipe(lane.ready)
                lane.ready = None

    # ---- pipes

    def _acquire_pipe(self, direction: Direction) -> Pipe | None:
        """Make an empty pipe the ready one and return it; None where none is free: the direction waits for one then."""
        lane = direction.share.lane
        try:
            lane.ready = self._pool.acquire_pipe(lane.size_bytes_max)
        except OSError as error:
            if error.errno not in _NO_PIPE_NOW:
                raise
            other = next((other for other in self._pool.lanes if other.ready is not None), None)
            if other is not None:  # of another size: better than none
                lane.ready, other.ready = other.ready, None
            else:
                direction.queued = True
                self.waiting_for_pipe.append(direction)
        return lane.ready

    def get_empty_pipe(self, direction: Direction) -> Pipe | None:
        """Return an empty pipe; None where none is free: the direction waits for one then."""
        return direction.share.lane.ready or self._acquire_pipe(direction)

    def get_pipe_for(self, direction: Direction, size_bytes: int) -> Pipe | None:
        """Return an empty pipe that holds ``size_bytes``; None where none is free: the direction is pumped again within
        a second then.
        """
        lane = direction.share.lane
        if lane.ready is not None and lane.ready.size_bytes < size_bytes:
            self._pool.release_pipe(lane.ready)
            lane.ready = None
        if lane.ready is None:
            try:
                lane.ready = self._pool.acquire_pipe_for(size_bytes)
            except OSError as error:
                if error.errno not in _NO_PIPE_NOW:
                    raise
                self.to_recheck.add(direction)
        return lane.ready

    def lend_pipe(self, direction: Direction, pipe: Pipe) -> None:
        """Leave the pipe to a direction of which bytes are in it; the next portion goes through another."""
        direction.pipe = pipe
        direction.share.lane.ready = None
        self._pool.lend_pipe(pipe, direction.share)

    def drain_pipe(self, direction: Direction) -> bool:
        """Splice from a direction's pipe into the sink; return False if bytes are left, since it is full or broken."""
        pipe, cells = direction.pipe, self._cells
        assert pipe is not None  # bytes are left in a pipe that was lent
        try:
            while direction.held_bytes:
                moved = os.splice(pipe.read_end, direction.sink, direction.held_bytes, None, None, SPLICE_FLAGS)
                direction.held_bytes -= moved
                cells[direction.row + BYTES] += moved
                cells[direction.row + OPERATIONS] += 1
        except BlockingIOError:
            return False
        except OSError:
            self.on_sink_broken(direction)
            return False
        self._table.unbind_pipe(direction.row)
        direction.pipe = None
        self._pool.release_pipe(pipe)
        return True

    def discard_in_flight(self, direction: Direction) -> None:
        """Drop what is on its way to a direction's sink."""
        if direction.pipe is not None:
            self._table.unbind_pipe(direction.row)
            self._pool.discard_pipe(direction.pipe)
            direction.pipe, direction.held_bytes = None, 0
