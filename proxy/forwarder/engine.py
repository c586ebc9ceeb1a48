"""The relay engine: every relay of a forwarder in one edge-triggered epoll, drained by one Trio task.

Trio waits on the epoll's own descriptor (epolls nest), so one wake-up of Trio serves a whole batch of sockets, and no
epoll_ctl is made per event. Bytes move by splice, socket → pipe → socket: none of them is ever in this process's
memory, and what is on its way is where the kernel keeps it. Which pipe holds whose bytes stands in the relay table, so
a successor can go on from any instant (proxy.runtime.relay_table).

Edges: a direction is pumped until its source says EAGAIN (more input raises a new edge) or its sink does (room raises
one). Each turn is one portion; after it the direction stands in line for the next round, so that a busy relay starves
nobody.

Ends: a direction ends when its source has ended or broken and everything before that was delivered; the sink's writing
side is then shut down, and the other direction goes on (half-close) as long as its bytes move. Where the sink breaks,
what is on its way to it is dropped; what it had sent is still delivered.
"""

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

import trio

from proxy.forwarder.directions import Direction, Relay, shut_down
from proxy.forwarder.framed import PEER_GONE, SPLICE_FLAGS, Framer
from proxy.forwarder.pipes import Pipe, PipePool
from proxy.runtime.alarm import Alarm
from proxy.runtime.logs import get_logger
from proxy.runtime.relay_table import BYTES, OPERATIONS, PIPE, RelayTable

SPLICE_BYTES_MAX = 1 << 20
EVENTS_PER_POLL = 64
LINGER_S = 0.001
BUSY_GAP_S = 0.0003
"""How long events are waited for without Trio, and how closely they must follow each other for that to be worth it."""
LOOK_S = 1.0
FEW_BYTES = 256
"""A portion below this is taken for all that its source has. A splice takes 16 pieces or more, and pieces that small on
average are next to impossible: the kernel puts small segments together."""

_NO_PIPE_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETOOMANYREFS})

_OUTPUT = select.EPOLLOUT
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_INPUT = select.EPOLLIN | _ENDED
_EVENTS = _INPUT | _OUTPUT | select.EPOLLET


class RelayEngine:
    """See the module. ``run`` is the one task that moves bytes; all else may be called from any task.

    ``on_end`` is called with each relay that has ended; its sockets are the owner's to close then. ``may_linger`` says
    whether nobody else in this process is in a hurry.
    """

    def __init__(
        self,
        table: RelayTable,
        pool: PipePool,
        on_end: Callable[[Relay], None],
        may_linger: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoll = select.epoll()
        self._alarm = Alarm()
        self._epoll.register(self._alarm, select.EPOLLIN | select.EPOLLET)
        self._cells = table.cells
        self._pool = pool
        self._on_end = on_end
        self._may_linger = may_linger
        self.framer = Framer(self, table, now)
        self._by_source: dict[int, Direction] = {}
        self._line: deque[Direction] = deque()
        self._without_pipe: deque[Direction] = deque()
        self._unsure: set[Direction] = set()
        self._half_closed: dict[Relay, tuple[int, float]] = {}
        self._running = trio.CancelScope()
        self._ready: Pipe | None = None
        """The pipe that the next portion goes through; the pool's again at the end."""
        self._served_at = 0.0
        self._is_serving = False
        self.frozen = False

    # ---- relays in and out

    def room_ahead(self, direction: Direction) -> int:
        """Lend a pipe to a direction that has not begun; how many bytes fit. Raises OSError."""
        if direction.pipe is None:
            direction.pipe = self._pool.take()
            self._cells[direction.row + PIPE] = direction.pipe.id
        return direction.pipe.size_bytes

    def preload(self, direction: Direction, first: bytes) -> None:
        """Put what was read ahead of a relay, not more than ``room_ahead``, where it will be relayed from first."""
        assert direction.pipe is not None  # room was asked for
        direction.in_pipe = os.write(direction.pipe.writing, first)

    def start(self, relay: Relay) -> None:
        """Begin to relay between two connected, non-blocking sockets. Raises OSError, and then has not begun."""
        try:
            for direction in (relay.to_broker, relay.to_client):
                self._by_source[direction.source] = direction
                # Registering raises the first edges by itself: for input that waits, and for room for first bytes.
                self._epoll.register(direction.source, _EVENTS)
        except OSError:
            self._leave(relay)
            raise

    def adopt(self, relay: Relay, pipes: dict[int, Pipe]) -> None:
        """Go on with a relay of a predecessor's; or end it, where a pipe did not come. Those of ``pipes`` bound
        to it are taken out. Raises OSError, and then has not begun.
        """
        missing = False
        for direction in (relay.to_broker, relay.to_client):
            pipe_id = self._cells[direction.row + PIPE]
            pipe = pipes.pop(pipe_id, None)
            if pipe is None:
                missing |= pipe_id != 0  # the table goes on saying so until the sockets are shut down
            elif (waiting := pipe.waiting()) and not self.framer.take_back(direction, pipe, waiting):
                direction.pipe, direction.in_pipe = pipe, waiting
            else:
                self._cells[direction.row + PIPE] = 0
                self._pool.give(pipe)
        if relay.followed is not None:
            self.framer.recall(relay)
        self.start(relay)
        if missing:
            get_logger().error("a relay was ended, since some of its bytes are lost", client=relay.about.client_address)
            self.drop(relay)

    def close_pipes(self) -> None:
        """Close this process's ends of all pipes, which are a successor's now."""
        for direction in self._by_source.values():
            if direction.pipe is not None:
                direction.pipe.close()
        if self._ready is not None:
            self._ready.close()
        self._pool.close_free()

    def abandon(self, relay: Relay) -> None:
        """Give back what a relay that has not begun was lent."""
        for direction in (relay.to_broker, relay.to_client):
            self.framer.let_go(direction)
            self._forget_in_flight(direction)

    def drop(self, relay: Relay) -> None:
        """End a relay at once, with whatever is on its way."""
        if self._by_source.get(relay.to_broker.source) is relay.to_broker:
            relay.broken = True
            self._finish(relay)

    def end_all(self) -> None:
        """End all relays at once; not those that are a successor's."""
        if self.frozen:
            return
        for direction in list(self._by_source.values()):
            self.drop(direction.relay)

    def freeze(self) -> list[Relay]:
        """Move nothing from now on, and leave everything as it is, for a successor; the relays that live."""
        self.frozen = True
        self._running.cancel()
        self.let_go()
        return [direction.relay for direction in self._by_source.values() if direction is direction.relay.to_broker]

    def let_go(self) -> None:
        """Forget the sockets, which are about to be another process's."""
        for direction in self._by_source.values():
            self.framer.let_go(direction)

    def bytes_moved(self, relay: Relay) -> tuple[int, int]:
        """To the broker and to the client, so far."""
        return self._cells[relay.to_broker.row + BYTES], self._cells[relay.to_client.row + BYTES]

    def __len__(self) -> int:
        return len(self._by_source) // 2

    # ---- the loop

    async def run(self) -> None:
        """Move bytes until cancelled or frozen. Relays are left as they are: whatever ends this process unasked, a
        successor goes on with them.
        """
        try:
            with self._running:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    await self._move_bytes()
        finally:
            self.frozen = True
            self._epoll.close()
            self._alarm.close()

    async def _move_bytes(self) -> None:
        while not self.frozen:
            self._is_serving = True
            self._serve()
            self._is_serving = False
            if self._line:
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(self._epoll.fileno())

    def _serve(self) -> None:
        """Serve what the epoll has and who stands in line; where much goes on, also what comes in the next moment.

        A wake-up by way of Trio costs more than a portion's way through a pipe. Where one follows the other closely,
        and nobody shakes hands, the next is therefore waited for here, which delays all else in this process by little
        more than LINGER_S.
        """
        now = time.monotonic()
        until = now + LINGER_S
        lingers = now - self._served_at < BUSY_GAP_S and self._may_linger()
        if lingers:
            self._alarm.set(LINGER_S)
        events = self._epoll.poll(0, EVENTS_PER_POLL)
        while events or self._line:
            self._serve_events(events)
            if self._line:
                self._serve_line()
            if self._without_pipe:
                self._serve_those_without_pipe()
            now = time.monotonic()
            if now >= until:
                break
            # Without a timeout: the alarm ends it.
            events = self._epoll.poll(-1 if lingers and not self._line else 0, EVENTS_PER_POLL)
        self._served_at = now

    def _serve_events(self, events: list[tuple[int, int]]) -> None:
        by_source = self._by_source
        for descriptor, mask in events:
            outgoing = by_source.get(descriptor)
            if outgoing is None:  # finished earlier in this batch
                continue
            if mask & _ENDED:
                self._note_end(outgoing, mask)
            if mask & _OUTPUT and outgoing.opposite.in_pipe:
                self._pump(outgoing.opposite)
            if mask & _INPUT and not outgoing.in_pipe:  # else it waits for room, not for input
                self._pump(outgoing)

    def _serve_line(self) -> None:
        for _ in range(min(len(self._line), EVENTS_PER_POLL)):
            direction = self._line.popleft()
            direction.in_line = False
            self._pump(direction)

    def _serve_those_without_pipe(self) -> None:
        """Their edge has passed, so they must be called: as soon as a pipe is free again."""
        while self._without_pipe and (self._ready is not None or self._pool.has_free):
            direction = self._without_pipe.popleft()
            direction.in_line = False
            self.stand_in_line(direction)
            if len(self._line) >= EVENTS_PER_POLL:
                return

    def wake(self, direction: Direction) -> None:
        """Give a direction a turn that no edge gives it."""
        if not direction.done:
            self.stand_in_line(direction)
            if not self._is_serving:  # which would lose the alarm that ends its waiting, and looks at the line anyway
                self._alarm.ring()

    def stand_in_line(self, direction: Direction) -> None:
        """Give a direction another turn."""
        if not direction.in_line:
            direction.in_line = True
            self._line.append(direction)

    def _note_end(self, outgoing: Direction, mask: int) -> None:
        outgoing.ends = True
        # The end may stand behind bytes that the sink does not take: from now on they must move.
        self.must_move(outgoing.relay)
        if mask & select.EPOLLHUP and outgoing.done and not outgoing.opposite.done:
            # It had ended its own direction before; now it takes nothing either. Only a reset says that.
            self._sink_broke(outgoing.opposite)

    def _pump(self, direction: Direction) -> None:  # noqa: C901, PLR0911, PLR0912 -- the hot path: a call costs more than it says
        """Give a direction its turn, unless it is done or in line: at most one portion; more is left to the next turn,
        or to an edge. Per portion two system calls, and as little else as possible.

        A defect ends its relay and no other.
        """
        if direction.in_line or direction.done:
            return
        try:
            if direction.in_pipe and not self.drain(direction):
                return
            framing, bytes_max = direction.framing, SPLICE_BYTES_MAX
            if framing is not None:
                bytes_max = self.framer.bytes_that_may_pass(direction, framing)
                if not bytes_max:
                    return
            pipe = self._ready or self._take_pipe(direction)
            if pipe is None:
                return
            cells, row = self._cells, direction.row
            cells[row + PIPE] = pipe.id
            try:
                moved = os.splice(direction.source, pipe.writing, bytes_max, None, None, SPLICE_FLAGS)
            except OSError as error:
                self._source_failed(direction, error)
                return
            if not moved:
                cells[row + PIPE] = 0
                self.end(direction)
                return
            direction.in_pipe = moved
            if framing is None:
                few = moved < FEW_BYTES
            else:
                few = framing.passed(moved, few=moved < FEW_BYTES)
                if not few:
                    moved, few = self.framer.fill_up(direction, framing, pipe)
            try:
                sent = os.splice(pipe.reading, direction.sink, moved, None, None, SPLICE_FLAGS)
            except OSError as error:
                self._sink_failed(direction, pipe, error)
                return
            direction.in_pipe = moved - sent
            cells[row + BYTES] += sent
            cells[row + OPERATIONS] += 1
            if sent == moved:
                cells[row + PIPE] = 0
                # So few bytes are all that there was, and more will raise an edge; an end that was seen already will
                # not. (Where they lay in more pieces than a splice takes at a time, that is wrong: see _look_again.)
                if few and not direction.ends:
                    self._unsure.add(direction)
                    return
            else:
                self.lend(direction, pipe)
            self.stand_in_line(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self._defect(direction, error)

    def _source_failed(self, direction: Direction, error: OSError) -> None:
        """Nothing came: since there is nothing now, or since nothing ever will."""
        self._cells[direction.row + PIPE] = 0
        if error.errno == errno.EAGAIN:
            return
        if error.errno not in PEER_GONE:
            raise error
        direction.relay.broken = True
        self.end(direction)

    def _sink_failed(self, direction: Direction, pipe: Pipe, error: OSError) -> None:
        """Nothing went: since there is no room now, or since there never will be."""
        self.lend(direction, pipe)
        if error.errno != errno.EAGAIN:
            self._sink_broke(direction)

    def _defect(self, direction: Direction, error: Exception) -> None:
        direction.relay.broken = True
        self._finish(direction.relay)
        if self._ready is not None:  # nobody else may get what it may hold
            self._pool.discard(self._ready)
            self._ready = None
        get_logger().error("a relay was ended by an unexpected error", exc_info=error)

    def _take_pipe(self, direction: Direction) -> Pipe | None:
        """An empty pipe; None where there is none now, and the direction waits for one."""
        try:
            self._ready = self._pool.take()
        except OSError as error:
            if error.errno not in _NO_PIPE_NOW:
                raise
            direction.in_line = True
            self._without_pipe.append(direction)
        return self._ready

    def empty_pipe(self, direction: Direction) -> Pipe | None:
        """The pipe for a direction's next bytes; None where there is none now, and the direction waits for one."""
        return self._ready or self._take_pipe(direction)

    def lend(self, direction: Direction, pipe: Pipe) -> None:
        """Leave the pipe to a direction whose bytes are in it; the next one takes another."""
        direction.pipe = pipe
        self._ready = None

    def drain(self, direction: Direction) -> bool:
        """Splice from a direction's pipe into the sink; False where bytes are left, since it is full or broken."""
        pipe, cells = direction.pipe, self._cells
        assert pipe is not None  # bytes are left in a pipe that was lent
        try:
            while direction.in_pipe:
                moved = os.splice(pipe.reading, direction.sink, direction.in_pipe, None, None, SPLICE_FLAGS)
                direction.in_pipe -= moved
                cells[direction.row + BYTES] += moved
                cells[direction.row + OPERATIONS] += 1
        except BlockingIOError:
            return False
        except OSError:
            self._sink_broke(direction)
            return False
        cells[direction.row + PIPE] = 0
        direction.pipe = None
        self._pool.give(pipe)
        return True

    # ---- ends

    def _sink_broke(self, direction: Direction) -> None:
        direction.relay.broken = True
        self._forget_in_flight(direction)
        # The same socket is the opposite direction's source: it will find its end there, after what was sent before.
        self.end(direction)
        self._pump(direction.opposite)

    def end(self, direction: Direction) -> None:
        """Tell the sink that nothing more comes."""
        direction.done = True
        shut_down(direction.sink, socket.SHUT_WR)
        if direction.opposite.done:
            self._finish(direction.relay)
        else:
            self.must_move(direction.relay)

    def must_move(self, relay: Relay) -> None:
        """From now on the relay lives only as long as its bytes move (see _end_the_stuck)."""
        self._half_closed.setdefault(relay, (-1, 0.0))

    def _finish(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            if not direction.done:
                # Before its bytes are forgotten: a successor must not go on behind a hole.
                shut_down(direction.sink, socket.SHUT_WR)
        self._leave(relay)
        self._on_end(relay)

    def _leave(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            direction.done = True
            self.framer.let_go(direction)
            self._forget_in_flight(direction)
            if self._by_source.pop(direction.source, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(direction.source)
        self._half_closed.pop(relay, None)

    def _forget_in_flight(self, direction: Direction) -> None:
        if direction.pipe is not None:
            self._cells[direction.row + PIPE] = 0
            self._pool.discard(direction.pipe)
            direction.pipe, direction.in_pipe = None, 0

    async def _watch(self) -> None:
        """What no edge tells."""
        while True:
            await trio.sleep(LOOK_S)
            if self.frozen:
                return
            self._end_the_stuck(trio.current_time())
            self._look_again()

    def _end_the_stuck(self, now: float) -> None:
        """End the relays of which one direction is done and the other has moved nothing for too long."""
        for relay, (moved_before, deadline) in list(self._half_closed.items()):
            moved = sum(self.bytes_moved(relay))
            if moved != moved_before:
                self._half_closed[relay] = (moved, now + relay.half_close_timeout_s)
            elif now >= deadline:
                relay.broken = True
                self._finish(relay)

    def _look_again(self) -> None:
        """Directions that wait for a pipe, since descriptors may be free again without one having come back; and those
        whose source was taken for dry.
        """
        unsure, self._unsure = self._unsure, set()
        for direction in unsure:
            self._pump(direction)
        for _ in range(len(self._without_pipe)):
            direction = self._without_pipe.popleft()
            direction.in_line = False
            self._pump(direction)
        if self._line:
            self._alarm.ring()  # the loop waits for the epoll alone
