"""The framed splice pump: follows frames while their bytes stay in the kernel (KIP-368).

For sessions that can expire, and where messages are counted. What is queued in a socket is peeked at (MSG_PEEK into one
buffer for all) from a boundary on, and then spliced up to the last boundary that was seen. At a boundary the pump does
what proto.framed_stream says. All else passes untouched.

The beginning of a frame that is too short to decide by is removed from the socket and held, since a few bytes left
there keep the whole buffer that they came in charged to the socket: its window would stay shut, and the rest could
never come. It passes as soon as it is understood, or at the stream's end.

What a peek costs is the copy, so where frames are large only their headers are peeked at, one after the other.

A turn is bounded: by ``PEEK_BYTES`` and ``RunQueue.portion_bytes_max``, and in frames that take longer
(proto.relay_frames).

Before every step proxy.forwarder.relay.framed_journal has written down what a successor must know. Only the methods
that run for each portion write the table's cells themselves, since a method call costs more than the store that it
makes: ``PIPE`` in ``_move``, ``BOUNDARY`` and ``MESSAGES`` in ``_let_pass``.
"""

import os
import socket
from collections.abc import Callable

from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.framed_stream import Action
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import COUNTED_BYTES
from proxy.forwarder.lifetime.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.lifetime.session import (
    PEEK_BYTES,
    ExpiringSession,
    FrameCursor,
    Injection,
)
from proxy.forwarder.relay.framed_control import FramedControl
from proxy.forwarder.relay.framed_injection import FrameInjector
from proxy.forwarder.relay.framed_journal import FramedJournal
from proxy.forwarder.relay.pipes import Pipe
from proxy.forwarder.relay.pump import PEER_GONE
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.forwarder.relay.splice_pump import FEW_BYTES, SPLICE_FLAGS, SplicePump
from proxy.runtime.shared.relay_table import BOUNDARY, MESSAGES, PIPE, TO_CLIENT, RelayTable

HEADER_PEEK_BYTES = 64
LARGE_FRAME_BYTES = 1 << 15
"""From this size on to peek at a frame costs more than a call for its header alone."""

_REMOVE_BYTES = 65536
_PASS = Action.PASS  # for the hot path


class FramedSplicePump:
    """The pump of directions of which the frames are followed, made of the parts of SplicePump.

    ``reauthentication`` is called with what is found in the streams. ``now``: seconds of the clock that all of the
    cluster's processes share.
    """

    def __init__(
        self,
        table: RelayTable,
        pump: SplicePump,
        reauthentication: ReauthenticationCoordinator,
        now: Callable[[], float],
    ) -> None:
        self.journal = FramedJournal(table, now)
        self._injector = FrameInjector(pump, self.journal, now)
        self._now = now
        self._pump = pump
        self._reauthentication = reauthentication
        self._cells = table.cells
        self._peeked = bytearray(PEEK_BYTES)

    # ---- relays in

    def follow_relay(
        self, relay: Relay, session: ExpiringSession, first_to_broker: bytes, first_to_client: bytes
    ) -> tuple[bytes, bytes]:
        """Follow a relay that has not started; see FramedJournal.start_cursors. Raises OSError, FrameInvalid."""
        control = self._attach_control(relay, session)
        passing = self.journal.start_cursors(relay, session, first_to_broker, first_to_client)
        if control.has_opened_producer:
            self._reauthentication.on_producer_opened(session)
        return passing

    def resume_relay(self, relay: Relay, session: ExpiringSession) -> None:
        """Follow a predecessor's relay from where it was; see FramedJournal.restore_cursors. Raises OSError."""
        control = self._attach_control(relay, session)
        if close_reason := self.journal.restore_cursors(relay, session):
            control.resume_closing(close_reason)
        for direction in (relay.to_broker, relay.to_client):
            if direction.cursor is not None and direction.cursor.removed_bytes is not None:
                self._pump.enqueue(direction)  # the frame may be complete

    def _attach_control(self, relay: Relay, session: ExpiringSession) -> FramedControl:
        for direction in (relay.to_broker, relay.to_client):
            direction.pump = self.pump
        return FramedControl(relay, session, self._pump, self.journal, self._reauthentication)

    # ---- pumping

    def pump(self, direction: Direction) -> None:
        """Do what is due at the next boundary, then move at most one portion of what may pass (see SplicePump.pump)."""
        if direction.queued or direction.done:
            return
        pump, cursor = self._pump, direction.cursor
        assert cursor is not None
        try:
            if direction.held_bytes and not pump.drain_pipe(direction):
                return
            passing = cursor.bytes_to_boundary if cursor.removed_bytes is None else 0
            if passing and cursor.stream.decide_rest(self._now()) is not _PASS:
                passing = self._decide_late_rest(direction, cursor)
            passing = passing or self._process_boundary(direction, cursor)
            if passing and (pipe := pump.get_empty_pipe(direction)) is not None:
                self._move(direction, cursor, pipe, passing)
        except FrameInvalid as error:
            self._reauthentication.on_invalid_frame(cursor.session, error)
        except Exception as error:  # noqa: BLE001 -- as SplicePump.pump
            pump.on_internal_error(direction, error)

    def _move(self, direction: Direction, cursor: FrameCursor, pipe: Pipe, passing: int) -> None:
        self._cells[direction.row + PIPE] = pipe.id
        try:
            most = self._pump.run_queue.portion_bytes_max
            moved = os.splice(direction.source, pipe.write_end, min(passing, most), None, None, SPLICE_FLAGS)
        except OSError as error:
            self._pump.on_source_error(direction, error)
            return
        if not moved:
            self._cells[direction.row + PIPE] = 0
            self._pump.end_direction(direction)
            return
        direction.held_bytes = moved
        is_all = cursor.record_consumed(moved, few=moved < FEW_BYTES) or self._add_to_pipe(direction, cursor, pipe)
        self._pump.deliver_from_pipe(direction, pipe, is_all=is_all)

    def _process_boundary(self, direction: Direction, cursor: FrameCursor) -> int:
        """Do what is due at a boundary; return how many bytes may pass from it, 0 if none may now."""
        stream, may_inject = cursor.stream, True
        while not (direction.done or direction.queued or direction.held_bytes):
            action = stream.decide_boundary(may_inject)
            if action is _PASS and cursor.removed_bytes is None:
                if not (size := self._peek(direction, cursor)):
                    return 0
                if passing := self._scan_peeked(direction, cursor, size):
                    return passing
            elif action is Action.INJECT:
                may_inject = self._injector.inject_own(direction, cursor)
            elif action is Action.DROP:
                stream.own = None
            elif action is Action.END:
                self._pump.end_direction(direction)
            elif cursor.removed_bytes is None:
                return 0
            # Of a frame that is being removed nothing has passed: the sink is at a boundary, however long it takes.
            elif self._remove_frame(direction, cursor, cursor.removed_bytes):
                self._pump.enqueue(direction)  # one frame in each round, for clients that send nothing else
            else:
                return 0
        return 0

    def _add_to_pipe(self, direction: Direction, cursor: FrameCursor, pipe: Pipe) -> bool:
        """Splice more into the pipe before it is delivered; return True if the source is assumed to be empty.

        To follow frames makes small portions, and a splice to the sink costs the same for small and large ones. Only
        what passes as it is; all else that is due waits until the pipe is empty.
        """
        is_all, most = False, self._pump.run_queue.portion_bytes_max
        try:
            while not is_all and direction.held_bytes < most and (passing := self._more_to_pass(direction, cursor)):
                passing = min(passing, most - direction.held_bytes)
                moved = os.splice(direction.source, pipe.write_end, passing, None, None, SPLICE_FLAGS)
                direction.held_bytes += moved
                is_all = cursor.record_consumed(moved, few=False)
        except OSError:  # the pipe is full, or the source has no more: the next round meets either again
            pass
        return is_all

    def _more_to_pass(self, direction: Direction, cursor: FrameCursor) -> int:
        if (
            cursor.bytes_to_boundary
            or cursor.scanner.slow_frames_left <= 0  # the turn is over
            or cursor.stream.decide_boundary() is not _PASS
        ):
            return 0
        try:
            size = cursor.sock.recv_into(self._peeked, cursor.peek_bytes, socket.MSG_PEEK)
            if not size:
                return 0
            cursor.scanner.stop_types = cursor.stream.stop_types(self._now())
            passing = cursor.scanner.scan_frames(self._peeked, size, cursor.scanner.slow_frames_left)[0]
        except (OSError, FrameInvalid):
            return 0  # the next round meets it again
        return self._let_pass(direction, cursor, passing, size) if passing else 0

    def _peek(self, direction: Direction, cursor: FrameCursor) -> int:
        """Peek at the source; return how many bytes are seen, 0 if none now, or none any more."""
        try:
            size = cursor.sock.recv_into(self._peeked, cursor.peek_bytes, socket.MSG_PEEK)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._on_source_error(direction, error)
            size = 0
        if not size:
            self._on_source_end(direction, cursor)
        return size

    @staticmethod
    def _on_source_error(direction: Direction, error: OSError) -> None:
        if error.errno not in PEER_GONE:
            raise error
        direction.relay.broken = True

    def _on_source_end(self, direction: Direction, cursor: FrameCursor) -> None:
        session = cursor.session
        if cursor.held_head:
            # In the middle of a frame: what is there of it is delivered all the same.
            boundary = cursor.boundary + len(cursor.held_head)
            if self._injector.inject(direction, cursor, cursor.held_head, Injection.HELD_HEAD, boundary):
                cursor.boundary += len(cursor.held_head)
                cursor.held_head = b""
                cursor.stream.ends = True  # an error would be read as part of the frame
            if direction.held_bytes or cursor.held_head or direction.done:
                return  # it is called again
        elif session.close_reason and not cursor.stream.ends and direction is direction.relay.to_client:
            session.control.close_with_error(self._reauthentication.closing_error_frame(session))
            return
        self._pump.end_direction(direction)

    def _scan_peeked(self, direction: Direction, cursor: FrameCursor, size: int) -> int:
        """Scan the frames that were peeked at; return how many bytes may pass, 0 if none now, or all is done."""
        buffer: bytes | bytearray = self._peeked
        if cursor.held_head:
            buffer = cursor.held_head + bytes(memoryview(buffer)[: min(size, COUNTED_BYTES)])
            size = len(buffer)
        scanner = cursor.scanner
        scanner.stop_types = cursor.stream.stop_types(self._now())
        passing, stop = scanner.scan_frames(buffer, size)
        if not passing:
            if stop == INCOMPLETE:
                self._hold_head(cursor, bytes(buffer[:size]))
            else:
                self._on_stop_type(cursor, buffer, size)
            return 0
        return self._let_pass(direction, cursor, passing, size)

    def _let_pass(self, direction: Direction, cursor: FrameCursor, passing: int, size: int) -> int:
        """Record the boundary behind ``passing`` bytes; return how many of them may be spliced now."""
        boundary, held = cursor.boundary + passing, len(cursor.held_head)
        if held:
            if not self._injector.inject(direction, cursor, cursor.held_head, Injection.HELD_HEAD, boundary):
                cursor.scanner.take_message_count()  # they are counted when there is a pipe
                return 0
            cursor.held_head = b""
        else:
            self._cells[cursor.row + BOUNDARY] = boundary
            # All that there was at the time of the peek passes, and more will raise an edge.
            cursor.peeked_bytes = size if size < cursor.peek_bytes and passing >= size else 0
            if cursor.peek_bytes != PEEK_BYTES or passing - size >= LARGE_FRAME_BYTES:
                self._adapt_peek_bytes(cursor, passing, size)
        if cursor.scanner.message_count:
            self._cells[cursor.row + MESSAGES] += cursor.scanner.take_message_count()
        cursor.boundary = boundary
        cursor.bytes_to_boundary = passing - held
        return 0 if held and (direction.held_bytes or direction.done) else cursor.bytes_to_boundary

    @staticmethod
    def _adapt_peek_bytes(cursor: FrameCursor, passing: int, size: int) -> None:
        """Choose the size of the next peek by the last frame's size, as far as it is known."""
        is_large = (passing if cursor.peek_bytes == HEADER_PEEK_BYTES else passing - size) >= LARGE_FRAME_BYTES
        cursor.peek_bytes = HEADER_PEEK_BYTES if is_large else PEEK_BYTES

    def _hold_head(self, cursor: FrameCursor, head: bytes) -> None:
        """Remove the beginning of a frame from the socket; ``head`` begins with what is held already."""
        before = len(cursor.held_head)
        self.journal.write_head(cursor, head)
        cursor.sock.recv(len(head) - before)

    # ---- commands that the scan stops at

    def _on_stop_type(self, cursor: FrameCursor, buffer: bytes | bytearray, size: int) -> None:
        """Do what is due for a command stopped at; if it may pass, it is scanned once more. Raises FrameInvalid."""
        session, stream = cursor.session, cursor.stream
        length, command_type = cursor.scanner.read_first_head(buffer, size)
        action = stream.decide_frame(command_type, length, self._now())
        self._reauthentication.on_action(session, stream, action)
        if action is Action.REMOVE:
            self._start_removal(cursor, length)
        elif action is Action.PASS and command_type == BaseCommand.PRODUCER and stream.watches_producers:
            self.journal.write_producer(session, stream)
            self._reauthentication.on_producer_opened(session)

    def _decide_late_rest(self, direction: Direction, cursor: FrameCursor) -> int:
        """Do what is due for the rest of a frame past the session's end; return how many bytes of it may pass."""
        action = cursor.stream.decide_rest(self._now())
        self._reauthentication.on_action(cursor.session, cursor.stream, action)
        if action is Action.CUT:
            cursor.bytes_to_boundary = 0
            if cursor.way == TO_CLIENT:  # which would read an error as part of the frame
                self._pump.end_direction(direction)
        return cursor.bytes_to_boundary

    def _start_removal(self, cursor: FrameCursor, length: int) -> None:
        """Start to remove a frame from the stream."""
        self.journal.write_removal(cursor, length)
        cursor.boundary += length
        cursor.bytes_to_boundary = length - len(cursor.held_head)
        cursor.removed_bytes = bytearray(cursor.held_head)
        cursor.held_head = b""

    def _remove_frame(self, direction: Direction, cursor: FrameCursor, removed: bytearray) -> bool:
        """Remove what has arrived of a frame from the stream; return True if all of it has."""
        while cursor.bytes_to_boundary:
            try:
                data = cursor.sock.recv(min(cursor.bytes_to_boundary, _REMOVE_BYTES))
            except BlockingIOError:
                return False
            except OSError as error:
                self._on_source_error(direction, error)
                data = b""
            if not data:
                self._on_source_end(direction, cursor)
                return False
            removed += data
            cursor.bytes_to_boundary -= len(data)
        self._on_frame_removed(cursor, bytes(removed))
        return True

    def _on_frame_removed(self, cursor: FrameCursor, frame: bytes) -> None:
        session = cursor.session
        if cursor.way == TO_CLIENT:
            challenges = session.broker_challenges
            assert challenges is not None  # or nothing is removed
            challenges.on_challenge_frame(frame)
            self.journal.write_exchange(session, challenges.phase)  # before the frame counts as removed
            self.journal.write_boundary(cursor)
            cursor.removed_bytes = None
            return
        assert session.clock is not None
        failure = None
        drops, session.drops_next_answer = session.drops_next_answer, False
        if drops:
            session.clock.on_answer_lost(self._now())
        else:
            failure = session.clock.on_answer(self._now())
        self.journal.write_clock(session)
        self.journal.write_boundary(cursor)
        cursor.removed_bytes = None
        if drops:
            self._reauthentication.on_answer_lost(session)
        elif failure is not None:
            self._reauthentication.on_failure(session, failure)
        else:
            self._reauthentication.on_answer(session, frame)
