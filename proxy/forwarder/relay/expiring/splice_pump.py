"""The framed relay: frames are followed, while their bytes stay in the kernel (KIP-368).

For sessions that can expire, and where messages are counted. What is queued in a socket is looked at (MSG_PEEK into
one buffer for all) from a boundary on, and then spliced up to the last boundary that was seen. At a boundary
of the way to the client a challenge is put in; at one of the way to the broker the answer is taken out, and there the
session ends if it is used after its end. All else passes untouched.

The beginning of a frame that is too little to judge by is taken out of the socket and held, since a few bytes left
there keep the whole buffer that they came in charged to the socket: its window would stay shut, and the rest could
never come. It goes on as soon as it is understood, or at the stream's end.

What a look costs is the copy, so where frames are large only their headers are looked at, one after the other.

Before every step proxy.forwarder.relay.expiring.journal has written down what a successor must know.
"""

import os
import socket
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import COUNTED_BYTES
from proto.session_clock import CommandDecision, Phase, ReauthenticationFailure
from proxy.forwarder.relay.expiring.control import SplicedSessionControl
from proxy.forwarder.relay.expiring.journal import SAYS, FramedJournal
from proxy.forwarder.relay.expiring.session import (
    INJECTION_BYTES_MAX,
    PEEK_BYTES,
    CloseReason,
    ExpiringSession,
    FrameCursor,
    Injection,
    ReauthenticationHandler,
    check_challenge_size,
)
from proxy.forwarder.relay.pipes import Pipe
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.forwarder.relay.splice_pump import FEW_BYTES, PEER_GONE, SPLICE_FLAGS, SplicePump
from proxy.runtime.shared.relay_table import BOUNDARY, INJECTING, MESSAGES, PIPE, TO_CLIENT, RelayTable

HEADER_LOOK_BYTES = 64
LARGE_FRAME_BYTES = 1 << 15
"""From here on to look at a frame costs more than a call for its header alone."""
FILL_BYTES = 1 << 20

_TAKE_BYTES = 65536


class FramedSplicePump:
    """See the module: the turn of a direction whose frames are followed, as the mover has one for all others."""

    def __init__(
        self, table: RelayTable, mover: SplicePump, judge: ReauthenticationHandler, now: Callable[[], float]
    ) -> None:
        self.journal = FramedJournal(table, now)
        self._now = now
        self._mover = mover
        self._judge = judge
        self._cells = table.cells
        self._looked = bytearray(PEEK_BYTES)

    # ---- relays in

    def follow_relay(self, relay: Relay, first_to_broker: bytes, first_to_client: bytes) -> tuple[bytes, bytes]:
        """Follow a relay that has not begun; see FramedJournal.follow. Raises OSError, FrameWrong."""
        line = self._take_over(relay)
        passing = self.journal.start_cursors(relay, first_to_broker, first_to_client)
        if line.has_opened_producer:
            self._judge.on_producer_opened(_known(relay.to_broker)[0])
        return passing

    def resume_relay(self, relay: Relay) -> None:
        """Go on with a predecessor's relay, wherever it stood; see FramedJournal.recall. Raises OSError."""
        line = self._take_over(relay)
        if closing := self.journal.restore_cursors(relay):
            line.resume_closing(closing)
        for direction in (relay.to_broker, relay.to_client):
            if direction.cursor is not None and direction.cursor.removed_bytes is not None:
                self._mover.enqueue(direction)  # it may be complete

    def _take_over(self, relay: Relay) -> SplicedSessionControl:
        assert relay.session is not None  # the caller's reason to call
        relay.session.control = line = SplicedSessionControl(relay, self._mover, self.journal, self._judge)
        if relay.session.broker_challenges is not None:
            relay.session.broker_challenges.control = line
        for direction in (relay.to_broker, relay.to_client):
            direction.pump = self.pump
        return line

    # ---- a turn

    def pump(self, direction: Direction) -> None:
        """As Mover.pump: a portion of what may pass, after whatever else there is to do at the boundary before it."""
        if direction.queued or direction.done:
            return
        mover, framing = self._mover, direction.cursor
        assert framing is not None
        try:
            if direction.in_pipe and not mover.drain_pipe(direction):
                return
            passing = framing.bytes_to_boundary if framing.removed_bytes is None else 0
            passing = passing or self._at_boundary(direction, framing)
            if passing and (pipe := mover.get_empty_pipe(direction)) is not None:
                self._move(direction, framing, pipe, passing)
        except FrameInvalid as error:
            self._judge.on_invalid_frame(_known(direction)[0], error)
        except Exception as error:  # noqa: BLE001 -- as Mover.pump
            mover.on_internal_error(direction, error)

    def _move(self, direction: Direction, framing: FrameCursor, pipe: Pipe, passing: int) -> None:
        self._cells[direction.row + PIPE] = pipe.id
        try:
            moved = os.splice(direction.source, pipe.write_end, passing, None, None, SPLICE_FLAGS)
        except OSError as error:
            self._mover.on_source_error(direction, error)
            return
        if not moved:
            self._cells[direction.row + PIPE] = 0
            self._mover.end_direction(direction)
            return
        direction.in_pipe = moved
        is_all = framing.record_consumed(moved, few=moved < FEW_BYTES) or self._fill_up(direction, framing, pipe)
        self._mover.deliver_from_pipe(direction, pipe, is_all=is_all)

    def _at_boundary(self, direction: Direction, framing: FrameCursor) -> int:
        """How much may pass from here; 0: nothing now, all was done that could be."""
        may_say = True
        while not (direction.done or direction.queued or direction.in_pipe):
            # Of a frame that is being taken out nothing has passed: the sink is at a boundary, however long it takes.
            if framing.pending_injection is not None and may_say:
                may_say = self._say(direction, framing, *framing.pending_injection)
            elif framing.ends_at_boundary:
                self._mover.end_direction(direction)
            elif framing.removed_bytes is not None:
                if not self._take(direction, framing, framing.removed_bytes):
                    return 0
                self._mover.enqueue(direction)  # whoever sends nothing else has a turn for each
            elif framing.stops_at_boundary or framing.awaits_verdict or not (size := self._look(direction, framing)):
                return 0
            elif passing := self._judge_frames(direction, framing, size):
                return passing
        return 0

    def _fill_up(self, direction: Direction, framing: FrameCursor, pipe: Pipe) -> bool:
        """Let more pass into the pipe, which a turn empties only once: to follow frames makes small portions, and a
        splice to the sink costs the same for small and large ones. Whether the source was taken for dry.

        Only what passes as it is; whatever else there is to do, has to wait until the pipe is empty.
        """
        is_all = False
        try:
            while (
                not is_all
                and direction.in_pipe < FILL_BYTES
                and (passing := self._more_that_may_pass(direction, framing))
            ):
                moved = os.splice(direction.source, pipe.write_end, passing, None, None, SPLICE_FLAGS)
                direction.in_pipe += moved
                is_all = framing.record_consumed(moved, few=False)
        except OSError:  # the pipe is full, or the source has no more: either is met again
            pass
        return is_all

    def _more_that_may_pass(self, direction: Direction, framing: FrameCursor) -> int:
        if (
            framing.bytes_to_boundary
            or framing.stops_at_boundary
            or framing.ends_at_boundary
            or framing.awaits_verdict
            or framing.pending_injection is not None
        ):
            return 0
        try:
            size = framing.sock.recv_into(self._looked, framing.peek_bytes, socket.MSG_PEEK)
            if not size:
                return 0
            framing.scanner.stop_types = self._stops(framing)
            passing = framing.scanner.scan_frames(self._looked, size)[0]
        except (OSError, FrameInvalid):
            return 0  # it will be met again
        return self._let_pass(direction, framing, passing, size) if passing else 0

    def _stops(self, framing: FrameCursor) -> AbstractSet[int]:
        return framing.session.current_stop_types(framing.way, framing.stop_types, self._now())

    def _look(self, direction: Direction, framing: FrameCursor) -> int:
        """How many bytes there are to be seen; 0: none for now, or none any more."""
        try:
            size = framing.sock.recv_into(self._looked, framing.peek_bytes, socket.MSG_PEEK)
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

    def _source_ended(self, direction: Direction, framing: FrameCursor) -> None:
        followed, line = _known(direction)
        if framing.held_head:
            # In the middle of a frame: what is there of it is delivered, as ever.
            if self._put(
                direction, framing, framing.held_head, Injection.HELD_HEAD, framing.boundary + len(framing.held_head)
            ):
                framing.boundary += len(framing.held_head)
                framing.held_head = b""
            if direction.in_pipe or framing.held_head or direction.done:
                return  # it is called again
        elif followed.close_reason and not framing.ends_at_boundary and direction is direction.relay.to_client:
            line.close_with_error(self._judge.closing_error_frame(followed))
            return
        self._mover.end_direction(direction)

    def _judge_frames(self, direction: Direction, framing: FrameCursor, size: int) -> int:
        """How much of what is seen may pass; 0: nothing now, or something else was done."""
        buffer: bytes | bytearray = self._looked
        if framing.held_head:
            buffer = framing.held_head + bytes(memoryview(buffer)[: min(size, COUNTED_BYTES)])
            size = len(buffer)
        walk = framing.scanner
        walk.stop_types = self._stops(framing)
        passing, stop = walk.scan_frames(buffer, size)
        if not passing:
            if stop == INCOMPLETE:
                self._hold(framing, bytes(buffer[:size]))
                return 0
            passing = self._stopped_at(direction, framing, buffer, size)
            if not passing:
                return 0
        return self._let_pass(direction, framing, passing, size)

    def _let_pass(self, direction: Direction, framing: FrameCursor, passing: int, size: int) -> int:
        boundary, held = framing.boundary + passing, len(framing.held_head)
        if held:
            if not self._put(direction, framing, framing.held_head, Injection.HELD_HEAD, boundary):
                framing.scanner.take_message_count()  # they are counted when there is a pipe
                return 0
            framing.held_head = b""
        else:
            self._cells[framing.row + BOUNDARY] = boundary
            # All that there was at the time of the look passes, and more will raise an edge.
            framing.peeked_bytes = size if size < framing.peek_bytes and passing >= size else 0
            if framing.peek_bytes != PEEK_BYTES or passing - size >= LARGE_FRAME_BYTES:
                self._adapt(framing, passing, size)
        if framing.scanner.message_count:
            self._cells[framing.row + MESSAGES] += framing.scanner.take_message_count()
        framing.boundary = boundary
        framing.bytes_to_boundary = passing - held
        return 0 if held and (direction.in_pipe or direction.done) else framing.bytes_to_boundary

    @staticmethod
    def _adapt(framing: FrameCursor, passing: int, size: int) -> None:
        """Choose the next look's size by the last frame's, as far as it is known."""
        is_large = (passing if framing.peek_bytes == HEADER_LOOK_BYTES else passing - size) >= LARGE_FRAME_BYTES
        framing.peek_bytes = HEADER_LOOK_BYTES if is_large else PEEK_BYTES

    def _hold(self, framing: FrameCursor, head: bytes) -> None:
        """Take the beginning of a frame out of the socket; ``head`` begins with what is held already."""
        before = len(framing.held_head)
        self.journal.write_head(framing, head)
        framing.sock.recv(len(head) - before)

    # ---- commands that are stopped at

    def _stopped_at(self, direction: Direction, framing: FrameCursor, buffer: bytes | bytearray, size: int) -> int:
        """Do what a command is stopped for; its frame's length where it may pass."""
        followed, line = _known(direction)
        length, command_type = framing.scanner.read_first_head(buffer, size)
        if framing.way == TO_CLIENT:
            if command_type == BaseCommand.AUTH_CHALLENGE and followed.broker_challenges is not None:
                self._begin_to_take(direction, framing, length)
            else:
                self._judge.on_served_past_grace(followed)  # now the frame may pass, and is looked at once more
            return 0
        assert followed.clock is not None  # nothing else stops on the way to the broker
        if command_type == BaseCommand.AUTH_RESPONSE:
            self._begin_to_take(direction, framing, length)
            return 0
        use = self._judge.decide_command(followed)
        if use is CommandDecision.PASS:
            if command_type == BaseCommand.PRODUCER and not line.has_opened_producer:
                self.journal.write_producer(direction.relay, framing)
                self._judge.on_producer_opened(followed)
            return length
        if use is CommandDecision.HOLD:
            framing.awaits_verdict = True
        else:
            line.start_closing(CloseReason.EXPIRED)
        return 0

    def _begin_to_take(self, direction: Direction, framing: FrameCursor, length: int) -> None:
        followed = _known(direction)[0]
        if framing.way == TO_CLIENT:
            check_challenge_size(length)
        elif length > followed.terms.answer_bytes_max:
            self._judge.on_failure(followed, ReauthenticationFailure.TOO_LARGE, over_limit=True)
            return
        self._cells[framing.row + BOUNDARY] = -(framing.boundary + length)
        framing.boundary += length
        framing.bytes_to_boundary = length - len(framing.held_head)
        framing.removed_bytes = bytearray(framing.held_head)
        framing.held_head = b""

    def _take(self, direction: Direction, framing: FrameCursor, taken: bytearray) -> bool:
        """Take what is there of a frame out of the stream; whether all of it is."""
        while framing.bytes_to_boundary:
            try:
                data = framing.sock.recv(min(framing.bytes_to_boundary, _TAKE_BYTES))
            except BlockingIOError:
                return False
            except OSError as error:
                self._source_broke(direction, error)
                data = b""
            if not data:
                self._source_ended(direction, framing)
                return False
            taken += data
            framing.bytes_to_boundary -= len(data)
        self._taken(direction, framing, bytes(taken))
        return True

    def _taken(self, direction: Direction, framing: FrameCursor, frame: bytes) -> None:
        followed = _known(direction)[0]
        if framing.way == TO_CLIENT:
            assert followed.broker_challenges is not None  # or nothing is taken out
            followed.broker_challenges.on_challenge_frame(frame)
            self.journal.write_exchange(
                direction.relay, followed.broker_challenges.phase
            )  # before it counts as taken out
            self._cells[framing.row + BOUNDARY] = framing.boundary
            framing.removed_bytes = None
            return
        assert followed.clock is not None
        failure = None
        discards, followed.drops_next_answer = followed.drops_next_answer, False
        if discards:
            followed.clock.on_answer_lost(self._now())
        else:
            failure = followed.clock.on_answer(self._now())
        self.journal.write_clock(direction.relay)
        self._cells[framing.row + BOUNDARY] = framing.boundary
        framing.removed_bytes = None
        if discards:
            self._judge.on_answer_lost(followed)
        elif failure is not None:
            self._judge.on_failure(followed, failure)
        else:
            self._judge.on_answer(followed, frame)

    # ---- frames that are put in

    def _put(self, direction: Direction, framing: FrameCursor, data: bytes, what: Injection, value: int) -> bool:
        """Put bytes of ours into the direction's pipe, which is empty, and say so by the one store that makes it true;
        False where there is no pipe now. What the sink takes at once has left it.
        """
        if len(data) > INJECTION_BYTES_MAX:
            pipe = self._mover.get_pipe_for(direction, len(data))
        else:
            pipe = self._mover.get_empty_pipe(direction)
        if pipe is None:
            return False
        cells = self._cells
        cells[direction.row + PIPE] = pipe.id
        cells[framing.row + INJECTING] = what
        written = os.write(pipe.write_end, data)
        assert written == len(data)  # it was empty, and is large enough
        cells[framing.row + SAYS[what]] = value
        cells[framing.row + INJECTING] = 0
        direction.in_pipe = written
        self._mover.lend_pipe(direction, pipe)
        self._mover.drain_pipe(direction)
        return True

    def _say(self, direction: Direction, framing: FrameCursor, frame: bytes, what: Injection) -> bool:
        """Say what is to be said, or drop what is not to be said any more; False where there is no pipe for it now."""
        followed, line = _known(direction)
        if what is Injection.CLOSING_ERROR:
            if self._put(direction, framing, frame, what, CloseReason.ERROR_SENT):
                framing.pending_injection = None
            return framing.pending_injection is None
        if what is Injection.BROKER_ANSWER:
            return self._answer_broker(direction, framing, frame)
        clock = followed.clock
        assert clock is not None  # or nobody asks
        if (frame == followed.terms.challenge) != (clock.phase is Phase.QUIET):
            framing.pending_injection = None  # overtaken by an answer that came unasked
            return True
        phase = Phase.CHALLENGED if clock.phase is Phase.QUIET else Phase.CHALLENGED_AGAIN
        if not self._put(direction, framing, frame, what, phase):
            return False
        framing.pending_injection = None
        clock.on_challenge_sent(self._now())
        line.recheck_held_command()  # a command that waited for this round's verdict came too late
        return True

    def _answer_broker(self, direction: Direction, framing: FrameCursor, frame: bytes) -> bool:
        followed = _known(direction)[0]
        assert followed.broker_challenges is not None  # or nobody answers
        if not followed.close_reason:  # else nothing more passes to the broker
            if not self._put(
                direction, framing, frame, Injection.BROKER_ANSWER, followed.broker_challenges.phase_after_answer
            ):
                return False
            followed.broker_challenges.on_answer_sent()
        framing.pending_injection = None
        return True


def _known(direction: Direction) -> tuple[ExpiringSession, SplicedSessionControl]:
    followed = direction.relay.session
    assert followed is not None  # or nobody looks
    assert isinstance(followed.control, SplicedSessionControl)  # Framer made it
    return followed, followed.control
