"""The framed relay: frames are followed, while their bytes stay in the kernel (KIP-368).

For sessions that can expire, and where messages are counted. What is queued in a socket is looked at (MSG_PEEK into
one buffer for all) from a boundary on, and the engine then splices up to the last boundary that was seen. At a boundary
of the way to the client a challenge is put in; at one of the way to the broker the answer is taken out, and there the
session ends if it is used after its end. All else passes untouched.

The beginning of a frame that is too little to judge by is taken out of the socket and held, since a few bytes left
there keep the whole buffer that they came in charged to the socket: its window would stay shut, and the rest could
never come. It goes on as soon as it is understood, or at the stream's end.

**Killed at any step.** A successor asks the kernel how much of a stream was consumed (proxy.runtime.stream_position)
and finds in the relay table, always written *before* the step that it speaks of, what it needs to know where that is:

* ``BOUNDARY``: less than this was consumed: so much is left of frames that may pass (negative: of a frame that is being
  taken out). As much: it is at a boundary. More: the bytes in between are held, and stand in ``HEAD``.
* ``PUTTING``: something of ours is being put into the pipe, which was empty. Only when the store that says that it
  happened was made, ``PUTTING`` is cleared, and only then anything leaves the pipe. So where the one is set and the
  other not made, all that the pipe holds is ours: it is taken back, and done again.
* ``PHASE``, times: the session clock. An answer that was taken out, or rounds that were begun, die with their
  process: the client is asked once more.
"""

import errno
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_STOPS, COUNTED_BYTES, GOES_ON, PART, FrameSizeWrong
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER, Failure, Memo, Phase, SessionClock, Use
from proxy.forwarder.directions import Direction, Relay
from proxy.forwarder.followed import Closing, Followed, Framing, Judge, Putting
from proxy.forwarder.pipes import Pipe
from proxy.runtime.relay_table import (
    BOUNDARY,
    CHALLENGE_AT,
    CLOSING,
    EXPIRES_AT,
    HAS_PRODUCER,
    HEAD,
    HEAD_CELLS,
    LAST_AT,
    MESSAGES,
    PHASE,
    PIPE,
    PUTTING,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    as_cell,
    framed_row,
)
from proxy.runtime.stream_position import consumed_bytes

__all__ = ["PEER_GONE", "Closing", "Followed", "Framer"]

if TYPE_CHECKING:
    from proxy.forwarder.engine import RelayEngine

LOOK_BYTES = 1 << 20
"""How much is looked at at a time, if it is there: to look costs a copy, but each further call costs more."""
FILL_BYTES = 1 << 20
SPLICE_FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK, splice(2)
PUT_IN_BYTES_MAX = 4096
"""What is put in goes into an empty pipe whole or not at all (PIPE_BUF)."""

_NS_PER_S = 1_000_000_000
_TAKE_BYTES = 65536

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


class SplicedLine:
    """A followed relay in the engine (Line)."""

    __slots__ = ("_framer", "_relay")

    def __init__(self, framer: "Framer", relay: Relay) -> None:
        self._framer = framer
        self._relay = relay

    def ask(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""
        self._framer.ask(self._relay, challenge)

    def go_on(self) -> None:
        """There is a verdict, and the clock knows it."""
        self._framer.go_on(self._relay)

    def close(self, why: Closing, frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on."""
        self._framer.close(self._relay, why, frame)

    def say_farewell(self, frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end."""
        self._framer.say_farewell(self._relay, frame)

    @property
    def has_producer(self) -> bool:
        """Whether the client ever had a producer, where that counts."""
        return self._framer.has_producer(self._relay)

    @property
    def bytes_to_client(self) -> int:
        """How many have gone."""
        return self._framer.bytes_to_client(self._relay)

    @property
    def is_over(self) -> bool:
        """Whether the client can be told nothing any more."""
        return self._relay.to_client.done


class Framer:
    """See the module: what the engine does where a direction's frames are followed.

    ``now``: seconds of the clock that all of the cluster's processes share. ``judge`` must be set before any relay.
    """

    judge: Judge

    def __init__(self, engine: "RelayEngine", table: RelayTable, now: Callable[[], float]) -> None:
        self.now = now
        self._engine = engine
        self._table = table
        self._cells = table.cells
        self._looked = bytearray(LOOK_BYTES)

    # ---- relays in and out

    def follow(self, relay: Relay, first_to_broker: bytes, first_to_client: bytes) -> tuple[bytes, bytes]:
        """Follow a relay that has not begun; what of its first bytes goes to the broker and to the client at once: the
        beginning of a frame, at the end, is held. Raises OSError, FrameSizeWrong.
        """
        followed = relay.followed
        assert followed is not None  # the caller's reason to call
        followed.line = SplicedLine(self, relay)
        self._table.follow(relay.about.id)
        self._write_clock(relay)
        return self._behind(relay.to_broker, first_to_broker), self._behind(relay.to_client, first_to_client)

    def _behind(self, direction: Direction, first: bytes) -> bytes:
        """Follow a direction behind its first bytes; those of them that go at once."""
        framing = self._framing(direction, has_producer=False)
        consumed = consumed_bytes(direction.source)
        passing, stop = 0, GOES_ON
        while passing < len(first) and stop != PART:
            more, stop = framing.walk.walk(first[passing:], len(first) - passing)
            passing += more
            if stop == BaseCommand.PRODUCER:
                self._note_producer(direction, framing)
            elif stop == BaseCommand.AUTH_RESPONSE:
                raise FrameSizeWrong("an answer before any challenge")
        framing.boundary = consumed - len(first) + passing
        framing.left = max(0, passing - len(first))
        self._cells[framing.row + MESSAGES] = framing.walk.take_messages()
        self._hold_head(framing, first[passing:])
        self._cells[framing.row + BOUNDARY] = framing.boundary
        return first[:passing]

    def _framing(self, direction: Direction, *, has_producer: bool) -> Framing:
        way = self._way(direction)
        followed = direction.relay.followed
        assert followed is not None
        row = framed_row(direction.relay.about.id, way)
        walk = followed.walk(way, has_producer=has_producer)
        expires = way == TO_BROKER and followed.clock is not None
        direction.framing = Framing(row, direction.source, walk, expires=expires)
        return direction.framing

    def let_go(self, direction: Direction) -> None:
        """Forget a direction's socket, which is about to be closed, or to be another process's."""
        if direction.framing is not None:
            direction.framing.sock.detach()

    # ---- a predecessor's

    def take_back(self, direction: Direction, pipe: Pipe, waiting: int) -> bool:
        """Empty a pipe that a predecessor filled with something of its own without saying so; whether it did."""
        followed = direction.relay.followed
        if followed is None:
            return False
        row = framed_row(direction.relay.about.id, self._way(direction))
        putting = self._cells[row + PUTTING]
        if not putting or self._is_said(direction, row, putting):
            return False
        while waiting:
            waiting -= len(os.read(pipe.reading, waiting))
        return True

    def _is_said(self, direction: Direction, row: int, putting: int) -> bool:
        if putting == Putting.HELD:
            return bool(self._cells[row + BOUNDARY] >= consumed_bytes(direction.source))
        if putting == Putting.CHALLENGE:
            return self._cells[row + PHASE] in {Phase.CHALLENGED, Phase.CHALLENGED_AGAIN}
        return bool(self._cells[row + CLOSING] == Closing.SAID)

    @staticmethod
    def _way(direction: Direction) -> int:
        return TO_BROKER if direction is direction.relay.to_broker else TO_CLIENT

    def recall(self, relay: Relay) -> None:
        """Go on with a predecessor's relay, wherever it stood. What of its pipes is not to be sent was taken back."""
        followed = relay.followed
        assert followed is not None  # the caller's reason to call
        followed.line = SplicedLine(self, relay)
        cells, row = self._cells, framed_row(relay.about.id, TO_CLIENT)
        for direction in (relay.to_broker, relay.to_client):
            self._recall_framing(direction)
            cells[framed_row(relay.about.id, self._way(direction)) + PUTTING] = 0
        self._write_clock(relay)
        followed.closing = Closing(cells[row + CLOSING])
        if followed.closing:
            self._stop(relay)
        if followed.closing is Closing.SAID:
            self._end_at_boundaries(relay)

    def recalled_clock(self, relay: StoredRelay) -> SessionClock | None:
        """The clock of a predecessor's relay; one that began rounds with the client has taken them with it."""
        if not relay.session.expires:
            return None
        cells, row = self._cells, framed_row(relay.id, TO_CLIENT)
        expires_at_s, challenge_at_s, last_at_s = (
            cells[row + cell] / _NS_PER_S or NEVER for cell in (EXPIRES_AT, CHALLENGE_AT, LAST_AT)
        )
        memo = Memo(expires_at_s, challenge_at_s, last_at_s, Phase(cells[row + PHASE]))
        return SessionClock.recalled(
            relay.session.principal,
            lifetime_ms_max=relay.session.lifetime_ms_max,
            memo=memo,
            now_s=self.now(),
        )

    def _recall_framing(self, direction: Direction) -> None:
        followed = direction.relay.followed
        assert followed is not None
        framing = self._framing(direction, has_producer=self.has_producer(direction.relay))
        consumed, boundary = consumed_bytes(direction.source), self._cells[framing.row + BOUNDARY]
        framing.boundary = abs(boundary)
        framing.left = max(0, framing.boundary - consumed)
        if boundary < 0:
            framing.taken = bytearray()
            followed.discards = True
            self._engine.stand_in_line(direction)  # it may be complete
        elif consumed > boundary:
            held = self._cells[framing.row + HEAD : framing.row + HEAD + HEAD_CELLS].tobytes()
            framing.head = held[: consumed - boundary]
        if followed.clock is not None and followed.clock.phase is Phase.CHALLENGED_AGAIN:
            followed.discards = True

    # ---- the engine asks

    def bytes_that_may_pass(self, direction: Direction, framing: Framing) -> int:
        """How many bytes of a direction, whose pipe is empty, may be moved now; 0: none, all was done that could be."""
        if framing.left and framing.taken is None:
            return framing.left
        try:
            return self._at_boundary(direction, framing)
        except FrameSizeWrong:
            self.close(direction.relay, Closing.CORRUPT)
            return 0

    def _at_boundary(self, direction: Direction, framing: Framing) -> int:
        while not (direction.done or direction.in_line or direction.in_pipe):
            if framing.taken is not None:
                if not self._take(direction, framing, framing.taken):
                    return 0
            elif framing.to_put_in is not None:
                self._say(direction, framing, *framing.to_put_in)
            elif framing.over:
                self._engine.end(direction)
            elif framing.stopped or framing.waits or not (size := self._look(direction, framing)):
                return 0
            elif passing := self._judge_frames(direction, framing, size):
                return passing
        return 0

    def fill_up(self, direction: Direction, framing: Framing, pipe: Pipe) -> tuple[int, bool]:
        """Let more pass into the pipe, which a turn empties only once: to follow frames makes small portions, and a
        splice to the sink costs the same for small and large ones. How many bytes are in it now, and whether the source
        was taken for dry.

        Only what passes as it is; whatever else there is to do, has to wait until the pipe is empty.
        """
        in_pipe, few = direction.in_pipe, False
        try:
            while not few and in_pipe < FILL_BYTES and (passing := self._more_that_may_pass(direction, framing)):
                moved = os.splice(direction.source, pipe.writing, passing, None, None, SPLICE_FLAGS)
                in_pipe += moved
                direction.in_pipe = in_pipe
                few = framing.passed(moved, few=False)
        except BlockingIOError:  # the pipe is full
            pass
        return in_pipe, few

    def _more_that_may_pass(self, direction: Direction, framing: Framing) -> int:
        if framing.left or framing.stopped or framing.over or framing.waits or framing.to_put_in is not None:
            return 0
        try:
            size = framing.sock.recv_into(self._looked, LOOK_BYTES, socket.MSG_PEEK)
            if not size:
                return 0
            if framing.expires:
                framing.walk.stops = ALL_STOPS if self._has_expired(direction) else framing.stops
            passing = framing.walk.walk(self._looked, size)[0]
        except (OSError, FrameSizeWrong):
            return 0  # it will be met again
        return self._let_pass(direction, framing, passing, size) if passing else 0

    def _look(self, direction: Direction, framing: Framing) -> int:
        """How many bytes there are to be seen; 0: none for now, or none any more."""
        try:
            size = framing.sock.recv_into(self._looked, LOOK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._source_broke(direction, error)
            size = 0
        if not size:
            self._source_ended(direction, framing)
        return size

    @staticmethod
    def _source_broke(direction: Direction, error: OSError) -> None:
        if error.errno not in PEER_GONE:
            raise error
        direction.relay.broken = True

    def _source_ended(self, direction: Direction, framing: Framing) -> None:
        followed = direction.relay.followed
        assert followed is not None
        if framing.head:
            # In the middle of a frame: what is there of it is delivered, as ever.
            if self._put(direction, framing, framing.head, Putting.HELD, framing.boundary + len(framing.head)):
                framing.boundary += len(framing.head)
                framing.head = b""
            if direction.in_pipe or framing.head or direction.done:
                return  # it is called again
        elif followed.closing and not framing.over and direction is direction.relay.to_client:
            self.say_farewell(direction.relay, self.judge.farewell(followed))
            return
        self._engine.end(direction)

    def _judge_frames(self, direction: Direction, framing: Framing, size: int) -> int:
        """How much of what is seen may pass; 0: nothing now, or something else was done."""
        buffer: bytes | bytearray = self._looked
        if framing.head:
            buffer = framing.head + bytes(memoryview(buffer)[: min(size, COUNTED_BYTES)])
            size = len(buffer)
        walk = framing.walk
        if framing.expires:
            walk.stops = ALL_STOPS if self._has_expired(direction) else framing.stops
        passing, stop = walk.walk(buffer, size)
        if not passing:
            if stop == PART:
                self._hold(framing, bytes(buffer[:size]))
                return 0
            passing = self._stopped_at(direction, framing, buffer, size)
            if not passing:
                return 0
        return self._let_pass(direction, framing, passing, size)

    def _has_expired(self, direction: Direction) -> bool:
        followed = direction.relay.followed
        assert followed is not None
        assert followed.clock is not None
        return self.now() >= followed.clock.expires_at_s

    def _let_pass(self, direction: Direction, framing: Framing, passing: int, size: int) -> int:
        boundary, messages = framing.boundary + passing, framing.walk.take_messages()
        held = len(framing.head)
        if held:
            if not self._put(direction, framing, framing.head, Putting.HELD, boundary):
                return 0
            framing.head = b""
        else:
            self._cells[framing.row + BOUNDARY] = boundary
            # All that there was at the time of the look passes, and more will raise an edge.
            framing.seen = size if size < LOOK_BYTES and passing >= size else 0
        if messages:
            self._cells[framing.row + MESSAGES] += messages
        framing.boundary = boundary
        framing.left = passing - held
        return 0 if held and (direction.in_pipe or direction.done) else framing.left

    # ---- a frame's beginning

    def _hold(self, framing: Framing, head: bytes) -> None:
        """Take the beginning of a frame out of the socket; ``head`` begins with what is held already."""
        self._hold_head(framing, head, before=len(framing.head))

    def _hold_head(self, framing: Framing, head: bytes, *, before: int | None = None) -> None:
        for cell, at in enumerate(range(0, len(head), 8)):
            self._cells[framing.row + HEAD + cell] = as_cell(head[at : at + 8])
        if before is not None:
            framing.sock.recv(len(head) - before)
        framing.head = head

    # ---- commands that are stopped at

    def _stopped_at(self, direction: Direction, framing: Framing, buffer: bytes | bytearray, size: int) -> int:
        """Do what a command is stopped for; its frame's length where it may pass."""
        followed = direction.relay.followed
        assert followed is not None
        assert followed.clock is not None  # nothing else stops
        length, command_type = framing.walk.first(buffer, size)
        if command_type == BaseCommand.AUTH_RESPONSE:
            self._begin_to_take(direction, framing, length)
            return 0
        use = followed.clock.use(self.now(), command_type)
        if use is Use.GO_ON:
            if command_type == BaseCommand.PRODUCER:
                self._note_producer(direction, framing)
            return length
        if use is Use.HOLD:
            framing.waits = True
        else:
            self.close(direction.relay, Closing.EXPIRED)
        return 0

    def _note_producer(self, direction: Direction, framing: Framing) -> None:
        self._cells[framed_row(direction.relay.about.id, TO_CLIENT) + HAS_PRODUCER] = 1
        framing.walk.stops = framing.stops = framing.stops - {BaseCommand.PRODUCER}

    def has_producer(self, relay: Relay) -> bool:
        """Whether a client that is not asked while it has a producer had one ever on this connection."""
        return bool(self._cells[framed_row(relay.about.id, TO_CLIENT) + HAS_PRODUCER])

    def _begin_to_take(self, direction: Direction, framing: Framing, length: int) -> None:
        followed = direction.relay.followed
        assert followed is not None
        if length > followed.about.answer_bytes_max:
            self.judge.failed(followed, Failure.TOO_LARGE)
            return
        self._cells[framing.row + BOUNDARY] = -(framing.boundary + length)
        framing.boundary += length
        framing.left = length - len(framing.head)
        framing.taken = bytearray(framing.head)
        framing.head = b""

    def _take(self, direction: Direction, framing: Framing, taken: bytearray) -> bool:
        """Take what is there of a frame out of the stream; whether all of it is."""
        while framing.left:
            try:
                data = framing.sock.recv(min(framing.left, _TAKE_BYTES))
            except BlockingIOError:
                return False
            except OSError as error:
                self._source_broke(direction, error)
                data = b""
            if not data:
                self._engine.end(direction)
                return False
            taken += data
            framing.left -= len(data)
        self._taken(direction.relay, framing, bytes(taken))
        return True

    def _taken(self, relay: Relay, framing: Framing, frame: bytes) -> None:
        followed = relay.followed
        assert followed is not None
        assert followed.clock is not None
        failure = None
        discards, followed.discards = followed.discards, False
        if discards:
            followed.clock.lost(self.now())
        else:
            failure = followed.clock.answered(self.now())
        self._write_clock(relay)
        self._cells[framing.row + BOUNDARY] = framing.boundary
        framing.taken = None
        if discards:
            self.judge.lost(followed)
        elif failure is not None:
            self.judge.failed(followed, failure)
        else:
            self.judge.answered(followed, frame)

    # ---- frames that are put in

    def _put(self, direction: Direction, framing: Framing, data: bytes, what: Putting, value: int) -> bool:
        """Put bytes of ours into the direction's pipe, which is empty, and say so by the one store that makes it true;
        False where there is no pipe now. What the sink takes at once has left it.
        """
        pipe = self._engine.empty_pipe(direction)
        if pipe is None:
            return False
        cells = self._cells
        cells[direction.row + PIPE] = pipe.id
        cells[framing.row + PUTTING] = what
        written = os.write(pipe.writing, data)
        assert written == len(data)  # it was empty, and this little fits any
        cells[framing.row + _SAYS[what]] = value
        cells[framing.row + PUTTING] = 0
        direction.in_pipe = written
        self._engine.lend(direction, pipe)
        self._engine.drain(direction)
        return True

    def _say(self, direction: Direction, framing: Framing, frame: bytes, what: Putting) -> None:
        relay = direction.relay
        followed = relay.followed
        assert followed is not None
        if what is Putting.FAREWELL:
            if self._put(direction, framing, frame, what, Closing.SAID):
                framing.to_put_in = None
            return
        clock = followed.clock
        assert clock is not None  # or nobody asks
        if (frame == followed.about.challenge) != (clock.phase is Phase.QUIET):
            framing.to_put_in = None  # overtaken by an answer that came unasked
            return
        phase = Phase.CHALLENGED if clock.phase is Phase.QUIET else Phase.CHALLENGED_AGAIN
        if self._put(direction, framing, frame, what, phase):
            framing.to_put_in = None
            clock.challenged(self.now())

    # ---- the judge says

    def ask(self, relay: Relay, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""
        framing = relay.to_client.framing
        assert framing is not None
        framing.to_put_in = (challenge, Putting.CHALLENGE)
        self._engine.wake(relay.to_client)

    def go_on(self, relay: Relay) -> None:
        """There is a verdict, and the clock knows it."""
        framing = relay.to_broker.framing
        assert framing is not None
        self._write_clock(relay)
        framing.waits = False
        self._engine.wake(relay.to_broker)

    def bytes_to_client(self, relay: Relay) -> int:
        """How many have gone."""
        return self._engine.bytes_moved(relay)[TO_CLIENT]

    def close(self, relay: Relay, why: Closing, frame: bytes = b"") -> None:
        """Begin to close a relay: nothing passes to the broker from the next boundary on. ``frame``: what to tell the
        client; empty: the usual.
        """
        followed = relay.followed
        assert followed is not None
        if followed.closing:
            return
        followed.closing = why
        followed.closing_frame = frame
        self._cells[framed_row(relay.about.id, TO_CLIENT) + CLOSING] = why
        self._stop(relay)
        self._engine.must_move(relay)
        self.judge.closing(followed)

    def _stop(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            assert direction.framing is not None
            # The broker's may go on to what it has to say, unless nobody knows where its frames begin.
            direction.framing.stopped = direction is relay.to_broker
        relay.broken = True

    def say_farewell(self, relay: Relay, frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end, each at a boundary of its own."""
        framing = relay.to_client.framing
        assert framing is not None
        if framing.over:
            return
        framing.to_put_in = (frame, Putting.FAREWELL)
        self._end_at_boundaries(relay)

    def _end_at_boundaries(self, relay: Relay) -> None:
        for direction in (relay.to_client, relay.to_broker):
            assert direction.framing is not None
            direction.framing.over = True
            self._engine.wake(direction)

    # ---- the clock

    def _write_clock(self, relay: Relay) -> None:
        """The end first and the phase last: whatever a kill leaves of it, nobody lives longer than he may."""
        followed = relay.followed
        assert followed is not None
        if followed.clock is None:
            return
        cells, row, memo = self._cells, framed_row(relay.about.id, TO_CLIENT), followed.clock.memo
        for cell, time_s in (
            (EXPIRES_AT, memo.expires_at_s),
            (CHALLENGE_AT, memo.challenge_at_s),
            (LAST_AT, memo.last_at_s),
        ):
            cells[row + cell] = 0 if time_s == NEVER else int(time_s * _NS_PER_S)
        cells[row + PHASE] = memo.phase


_SAYS = {Putting.HELD: BOUNDARY, Putting.CHALLENGE: PHASE, Putting.FAREWELL: CLOSING}
