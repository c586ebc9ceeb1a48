"""The relay engine: every relay of a forwarder in one edge-triggered epoll, drained by one Trio task.

Trio waits on the epoll's own descriptor (epolls nest), so one wake-up of Trio serves a whole batch of sockets, and no
epoll_ctl is made per event. Bytes move by splice, socket → pipe → socket: none of them is ever in this process's
memory, and what is on its way is where the kernel keeps it.

Edges: a direction is pumped until its source says EAGAIN (more input raises a new edge) or its sink does (room raises
one), or until its turn is over; then it stands in line for the next round, so that a busy relay starves nobody.

Ends: a direction ends when its source has ended or broken and everything before that was delivered; the sink's writing
side is then shut down, and the other direction goes on (half-close) as long as its bytes move. Where the sink breaks,
what is on its way to it is dropped; what it had sent is still delivered.
"""

import contextlib
import errno
import os
import select
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import trio

from proxy.forwarder.pipes import SMALL_PIPE_BYTES, Pipe, PipePool
from proxy.runtime.logs import get_logger

SPLICE_FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK, splice(2)
SPLICE_BYTES_MAX = 1 << 20
SPLICES_PER_TURN = 4
EVENTS_PER_POLL = 256
POLLS_PER_WAKE_UP = 8
HALF_CLOSED_LOOK_S = 1.0
FIRST_BYTES_MAX = SMALL_PIPE_BYTES
"""What was read ahead of a relay must fit the smallest pipe."""

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_PEER_GONE = frozenset(
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

_INPUT = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = _INPUT | select.EPOLLOUT | select.EPOLLET


class Socket(Protocol):
    """What the engine needs of a socket beside its descriptor."""

    def fileno(self) -> int:
        """The descriptor."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End one direction, or both."""
        ...


class Direction:
    """One way of a relay: from a source socket to a sink socket.

    ``pipe`` is lent only while bytes are in it; ``ended`` means that nothing more comes from the source, ``done`` that
    the sink knows it too.
    """

    __slots__ = (
        "bytes_moved",
        "done",
        "ended",
        "in_line",
        "in_pipe",
        "operations",
        "opposite",
        "pipe",
        "relay",
        "sink",
        "sink_socket",
        "source",
    )

    opposite: "Direction"
    relay: "Relay"

    def __init__(self, source: Socket, sink: Socket) -> None:
        self.source = source.fileno()
        self.sink = sink.fileno()
        self.sink_socket = sink
        self.operations = 0
        self.pipe: Pipe | None = None
        self.in_pipe = 0
        self.bytes_moved = 0
        self.ended = self.done = self.in_line = False


@dataclass(slots=True, eq=False)
class Relay:
    """Two sockets and the two directions between them; ``finished`` once both are done."""

    to_broker: Direction
    to_client: Direction
    half_close_timeout_s: float
    finished: trio.Event = field(default_factory=trio.Event)


class RelayEngine:
    """See the module. ``add`` and ``drop`` from any task of the process; ``run`` is the one task that moves bytes."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pool = PipePool()
        self._by_source: dict[int, Direction] = {}
        self._line: deque[Direction] = deque()
        self._without_pipe: deque[Direction] = deque()
        self._half_closed: dict[Relay, tuple[int, float]] = {}

    # ---- relays in and out

    def add(
        self, client: Socket, broker: Socket, *, to_broker: bytes, to_client: bytes, half_close_timeout_s: float
    ) -> Relay:
        """Begin to relay between two connected, non-blocking sockets; they stay the caller's to close, after ``drop``.

        ``to_broker`` and ``to_client`` were read ahead of the relay and go first; at most FIRST_BYTES_MAX each.
        Raises OSError where the process may open no more files.
        """
        there, back = Direction(client, broker), Direction(broker, client)
        there.opposite, back.opposite = back, there
        relay = there.relay = back.relay = Relay(there, back, half_close_timeout_s)
        try:
            for direction, first in ((there, to_broker), (back, to_client)):
                if first:
                    direction.pipe = self._pool.take()
                    direction.in_pipe = os.write(direction.pipe.writing, first)
            for direction in (there, back):
                self._by_source[direction.source] = direction
                # Registering raises the first edges by itself: for input that waits, and for room for first bytes.
                self._epoll.register(direction.source, _EVENTS)
        except OSError:
            self._finish(relay)
            raise
        return relay

    def drop(self, relay: Relay) -> None:
        """End a relay at once, with whatever is on its way."""
        if self._by_source.get(relay.to_broker.source) is relay.to_broker:
            self._finish(relay)

    def __len__(self) -> int:
        return len(self._by_source) // 2

    # ---- the loop

    async def run(self) -> None:
        """Move bytes until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_half_closed)
                while True:
                    if self._line:
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(self._epoll.fileno())
                    self._serve_line()
                    self._serve_events()
                    self._serve_those_without_pipe()
        finally:
            for direction in list(self._by_source.values()):
                self.drop(direction.relay)
            self._pool.close()
            self._epoll.close()

    def _serve_line(self) -> None:
        for _ in range(len(self._line)):
            direction = self._line.popleft()
            direction.in_line = False
            self._pump(direction)

    def _serve_those_without_pipe(self) -> None:
        """Their edge has passed, so they must be called: as soon as a pipe is free again."""
        while self._without_pipe and self._pool.has_free:
            self._stand_in_line(self._without_pipe.popleft())
            if len(self._line) >= EVENTS_PER_POLL:
                return

    def _stand_in_line(self, direction: Direction) -> None:
        if not direction.in_line:
            direction.in_line = True
            self._line.append(direction)

    def _serve_events(self) -> None:
        for _ in range(POLLS_PER_WAKE_UP):
            events = self._epoll.poll(0, EVENTS_PER_POLL)
            for descriptor, mask in events:
                outgoing = self._by_source.get(descriptor)
                if outgoing is None:  # finished earlier in this batch
                    continue
                if mask & select.EPOLLRDHUP:
                    # Its end may stand behind bytes that the sink does not take: from now on they must move.
                    self._must_move(outgoing.relay)
                if mask & select.EPOLLOUT and outgoing.opposite.in_pipe:
                    self._pump(outgoing.opposite)
                if mask & select.EPOLLHUP and outgoing.done and not outgoing.opposite.done:
                    # It had ended its own direction before; now it takes nothing either. Only a reset says that.
                    self._sink_broke(outgoing.opposite)
                elif mask & _INPUT and not outgoing.done:
                    self._pump(outgoing)
            if len(events) < EVENTS_PER_POLL:
                return

    def _pump(self, direction: Direction) -> None:
        """Give a direction its turn, unless it is done or in line. A defect ends its relay and no other."""
        if direction.in_line or direction.done:
            return
        try:
            self._move(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self._finish(direction.relay)
            get_logger().error("a relay was ended by an unexpected error", exc_info=error)

    def _move(self, direction: Direction) -> None:
        """Move bytes until the source is dry, the sink is full, the direction is done, or its turn is over."""
        for _ in range(SPLICES_PER_TURN):
            if direction.in_pipe and not self._drain(direction):
                return
            if direction.ended:
                self._end(direction)
                return
            if not self._fill(direction):
                return
        self._stand_in_line(direction)

    def _fill(self, direction: Direction) -> bool:
        """Splice from the source into a pipe; False where the source is dry. Its end is noted, not acted on."""
        try:
            pipe = self._pool.take()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            self._without_pipe.append(direction)
            return False
        try:
            moved = os.splice(direction.source, pipe.writing, SPLICE_BYTES_MAX, flags=SPLICE_FLAGS)
        except BlockingIOError:
            self._pool.give(pipe)
            return False
        except OSError as error:
            if error.errno not in _PEER_GONE:
                self._pool.discard(pipe)
                raise
            moved = 0  # nothing more will come, as after an end of file
        if moved:
            direction.pipe, direction.in_pipe = pipe, moved
        else:
            self._pool.give(pipe)
            direction.ended = True
        return True

    def _drain(self, direction: Direction) -> bool:
        """Splice from the pipe into the sink; False where bytes are left, since the sink is full or broken."""
        pipe = direction.pipe
        assert pipe is not None  # bytes in a pipe mean that there is one
        try:
            while direction.in_pipe:
                moved = os.splice(pipe.reading, direction.sink, direction.in_pipe, flags=SPLICE_FLAGS)
                direction.in_pipe -= moved
                direction.bytes_moved += moved
                direction.operations += 1
        except BlockingIOError:
            return False
        except OSError:
            self._sink_broke(direction)
            return False
        self._pool.give(pipe)
        direction.pipe = None
        return True

    # ---- ends

    def _sink_broke(self, direction: Direction) -> None:
        self._forget_in_flight(direction)
        direction.ended = True
        # The same socket is the opposite direction's source: it will find its end there, after what was sent before.
        self._end(direction)
        self._pump(direction.opposite)

    def _end(self, direction: Direction) -> None:
        """Tell the sink that nothing more comes."""
        direction.done = True
        with contextlib.suppress(OSError):
            direction.sink_socket.shutdown(socket.SHUT_WR)
        if direction.opposite.done:
            self._finish(direction.relay)
        else:
            self._must_move(direction.relay)

    def _must_move(self, relay: Relay) -> None:
        """From now on the relay lives only as long as its bytes move (see _watch_half_closed)."""
        self._half_closed.setdefault(relay, (-1, 0.0))

    def _finish(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            direction.done = True
            self._forget_in_flight(direction)
            if self._by_source.pop(direction.source, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(direction.source)
        self._half_closed.pop(relay, None)
        relay.finished.set()

    def _forget_in_flight(self, direction: Direction) -> None:
        if direction.pipe is not None:
            self._pool.discard(direction.pipe)
            direction.pipe, direction.in_pipe = None, 0

    async def _watch_half_closed(self) -> None:
        """End the relays of which one direction is done and the other has moved nothing for too long."""
        while True:
            await trio.sleep(HALF_CLOSED_LOOK_S)
            now = trio.current_time()
            for relay, (moved_before, deadline) in list(self._half_closed.items()):
                moved = relay.to_broker.bytes_moved + relay.to_client.bytes_moved
                if moved != moved_before:
                    self._half_closed[relay] = (moved, now + relay.half_close_timeout_s)
                elif now >= deadline:
                    self._finish(relay)
            for _ in range(len(self._without_pipe)):  # descriptors may be free again without a pipe having come back
                self._pump(self._without_pipe.popleft())
