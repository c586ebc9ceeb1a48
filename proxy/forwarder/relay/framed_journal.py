"""The journal of framed relays: what a forwarder writes to the relay table of them, and a successor reads.

Framed rows of the table are written and read here, except for the stores that the pump makes for each portion
(proxy.forwarder.relay.framed_splice_pump).

**Killed at any step.** A successor asks the kernel how much of a stream was consumed
(proxy.runtime.network.stream_position), and finds in the relay table, always written *before* the step that it
describes, what it needs to know of that position:

* ``BOUNDARY``: if less was consumed, the difference is left of frames that may pass (negative: of a frame that is being
  removed). If as much: the source is at a boundary. If more: the bytes in between are held, and are in ``HEAD``.
* ``INJECTING``: the proxy's own bytes are being put into the pipe, which was empty. ``INJECTING`` is cleared only after
  the store that completes the injection, and only then anything leaves the pipe. So where the one is set and the other
  not made, all that the pipe holds is the proxy's own: the injection is undone, and made once more.
* ``EXCHANGE``: the phase of the exchange with the broker, in which the proxy or the client answers. What the broker
  asks for is stored before the challenge counts as removed; that it was answered completes the answer's injection.
* ``PHASE``, times: the session clock. An answer that was removed, and rounds that were begun, are lost with their
  process: the client is asked once more.
"""

import enum
import os
from collections.abc import Callable
from typing import TypeVar

from proto.broker_exchange import UNANSWERED, ExchangePhase
from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.framed_stream import FramedStream
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_STOP
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER, ClockSnapshot, Phase, SessionClock
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession, FrameCursor, Injection
from proxy.forwarder.relay.pipes import Pipe
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.runtime.network.stream_position import consumed_bytes
from proxy.runtime.shared.relay_table import (
    BOUNDARY,
    CHALLENGE_AT,
    CLOSING,
    EXCHANGE,
    EXPIRES_AT,
    HAS_PRODUCER,
    HEAD,
    HEAD_CELLS,
    INJECTING,
    LAST_AT,
    MESSAGES,
    OBSERVED,
    PHASE,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    as_cell,
    framed_row,
)

COMPLETION_CELLS = {
    Injection.HELD_HEAD: BOUNDARY,
    Injection.CHALLENGE: PHASE,
    Injection.CLOSING_ERROR: CLOSING,
    Injection.BROKER_ANSWER: EXCHANGE,
}
"""The cell of which the store completes an injection."""

_NS_PER_S = 1_000_000_000

NumberT = TypeVar("NumberT", bound=enum.IntEnum)


class FramedJournal:
    """Writes and reads the framed rows of a forwarder's relays.

    ``now``: seconds of the clock that all of the cluster's processes share.
    """

    def __init__(self, table: RelayTable, now: Callable[[], float]) -> None:
        self._table = table
        self._cells = table.cells
        self._now = now

    # ---- a relay that starts

    def start_cursors(
        self, relay: Relay, session: ExpiringSession, first_to_broker: bytes, first_to_client: bytes
    ) -> tuple[bytes, bytes]:
        """Find where the frames of a relay begin that has not started.

        Return which of its first bytes go to the broker and to the client at once: the beginning of a frame, at their
        end, is held. Raises OSError, FrameInvalid.
        """
        self._table.record_framed(relay.record.id)
        self.write_clock(session)
        to_broker = self._start_cursor(relay.to_broker, session, first_to_broker)
        return to_broker, self._start_cursor(relay.to_client, session, first_to_client)

    def _start_cursor(self, direction: Direction, session: ExpiringSession, first: bytes) -> bytes:
        """Start a direction's cursor behind its first bytes; return those of them that go at once."""
        cursor = self._new_cursor(direction, session, has_producer=False)
        consumed = consumed_bytes(direction.source)
        passing, stop = 0, NO_STOP
        cursor.scanner.stop_types = cursor.stream.usual_stop_types
        # To connect took its time. Where ends are only observed, the next use will be counted.
        if cursor.way == TO_BROKER and not cursor.session.observes_ends:
            cursor.scanner.stop_types = cursor.stream.stop_types(self._now())
        while passing < len(first) and stop != INCOMPLETE:
            more, stop = cursor.scanner.scan_frames(first[passing:], len(first) - passing)
            passing += more
            if cursor.scanner.stop_types is ALL_TYPES and stop not in {NO_STOP, INCOMPLETE}:
                raise FrameInvalid("a command past the session's end, which came before the relay began")
            if stop == BaseCommand.PRODUCER:
                self.write_producer(session, cursor.stream)
                cursor.scanner.stop_types = cursor.stream.usual_stop_types
            elif stop == BaseCommand.AUTH_RESPONSE:
                raise FrameInvalid("an answer before any challenge")
            elif stop == BaseCommand.AUTH_CHALLENGE:
                raise FrameInvalid("a challenge of the broker's before the relay began")
        cursor.boundary = consumed - len(first) + passing
        cursor.bytes_to_boundary = max(0, passing - len(first))
        self._cells[cursor.row + MESSAGES] = cursor.scanner.take_message_count()
        self.write_head(cursor, first[passing:])
        self.write_boundary(cursor)
        return first[:passing]

    @staticmethod
    def _new_cursor(direction: Direction, session: ExpiringSession, *, has_producer: bool) -> FrameCursor:
        way = _way(direction)
        row = framed_row(direction.relay.record.id, way)
        cursor = direction.cursor = FrameCursor(row, direction.source, session, way, has_producer=has_producer)
        direction.stream = cursor.stream
        return cursor

    # ---- while a relay runs

    def begin_injection(self, direction: Direction, cursor: FrameCursor, pipe: Pipe, what: Injection) -> None:
        """Bind an empty pipe that the proxy's own bytes are about to be written to."""
        self._table.bind_pipe(direction.row, pipe.id)
        self._cells[cursor.row + INJECTING] = what

    def complete_injection(self, cursor: FrameCursor, what: Injection, completion: int) -> None:
        """Record that the bytes are in the pipe, by the store of ``completion`` that makes it true for a successor."""
        self._cells[cursor.row + COMPLETION_CELLS[what]] = completion
        self._cells[cursor.row + INJECTING] = 0

    def write_removal(self, cursor: FrameCursor, length: int) -> None:
        """Record that the frame at the boundary, of ``length`` bytes, is about to be removed."""
        self._cells[cursor.row + BOUNDARY] = -(cursor.boundary + length)

    def write_boundary(self, cursor: FrameCursor) -> None:
        """Record the cursor's boundary: that a frame was removed, if one was being removed."""
        self._cells[cursor.row + BOUNDARY] = cursor.boundary

    def write_head(self, cursor: FrameCursor, head: bytes) -> None:
        """Record the beginning of a frame, which may be removed from the socket from now on."""
        for cell, at in enumerate(range(0, len(head), 8)):
            self._cells[cursor.row + HEAD + cell] = as_cell(head[at : at + 8])
        cursor.held_head = head

    def write_producer(self, session: ExpiringSession, stream: FramedStream) -> None:
        """Record that the client has opened a producer; the stream, to the broker, has no other one stopped at."""
        self._cells[framed_row(session.relay_record.id, TO_CLIENT) + HAS_PRODUCER] = 1
        stream.record_producer()

    def has_producer(self, session: ExpiringSession) -> bool:
        """Return whether a client that is not asked while it has a producer ever had one on this connection."""
        return bool(self._cells[framed_row(session.relay_record.id, TO_CLIENT) + HAS_PRODUCER])

    def write_exchange(self, session: ExpiringSession, phase: ExchangePhase) -> None:
        """Record the phase of the proxy's own exchange with the broker."""
        self._cells[framed_row(session.relay_record.id, TO_BROKER) + EXCHANGE] = phase

    def write_close_reason(self, session: ExpiringSession, why: CloseReason) -> None:
        """Record that the relay is being closed."""
        self._cells[framed_row(session.relay_record.id, TO_CLIENT) + CLOSING] = why

    def write_clock(self, session: ExpiringSession) -> None:
        """Record the session's clock, if it has one.

        The end first and the phase last: whatever a kill leaves of it, no session lasts longer than it may.
        """
        clock = session.clock
        if clock is None:
            return
        cells, row, snapshot = self._cells, framed_row(session.relay_record.id, TO_CLIENT), clock.snapshot
        for cell, time_s in (
            (EXPIRES_AT, snapshot.expires_at_s),
            (CHALLENGE_AT, snapshot.challenge_at_s),
            (LAST_AT, snapshot.last_attempt_at_s),
        ):
            cells[row + cell] = 0 if time_s == NEVER else int(time_s * _NS_PER_S)
        cells[row + OBSERVED] = snapshot.end_observed
        cells[row + PHASE] = snapshot.phase

    # ---- a predecessor's relay

    def undo_injection(self, direction: Direction, pipe: Pipe, queued: int) -> bool:
        """Empty a pipe that holds a predecessor's injection that was not completed; return False if it does not."""
        if direction.relay.session is None:
            return False
        row = framed_row(direction.relay.record.id, _way(direction))
        injecting = self._cells[row + INJECTING]
        if not injecting or self._is_complete(direction, row, injecting):
            return False
        while queued:
            queued -= len(os.read(pipe.read_end, queued))
        return True

    def _is_complete(self, direction: Direction, row: int, injecting: int) -> bool:
        if injecting == Injection.HELD_HEAD:
            return bool(self._cells[row + BOUNDARY] >= consumed_bytes(direction.source))
        if injecting == Injection.CHALLENGE:
            return self._cells[row + PHASE] in {Phase.CHALLENGED, Phase.CHALLENGED_AGAIN}
        if injecting == Injection.BROKER_ANSWER:
            return self._cells[row + EXCHANGE] not in UNANSWERED
        return bool(self._cells[row + CLOSING] == CloseReason.ERROR_SENT)

    def restore_clock(self, relay: StoredRelay) -> SessionClock | None:
        """Return the clock of a predecessor's relay; None if its session does not expire.

        Rounds that the predecessor began with the client are lost.
        """
        if not relay.session.expires:
            return None
        cells, row = self._cells, framed_row(relay.id, TO_CLIENT)
        expires_at_s, challenge_at_s, last_at_s = (
            cells[row + cell] / _NS_PER_S or NEVER for cell in (EXPIRES_AT, CHALLENGE_AT, LAST_AT)
        )
        # The next answer may belong to a phase that is not known: it is dropped, and the client is asked again.
        phase, observed = _decode(Phase, cells[row + PHASE], Phase.CHALLENGED_AGAIN), bool(cells[row + OBSERVED])
        snapshot = ClockSnapshot(expires_at_s, challenge_at_s, last_at_s, phase, observed)
        return SessionClock.from_snapshot(
            relay.session.principal,
            lifetime_ms_max=relay.session.lifetime_ms_max,
            snapshot=snapshot,
            now_s=self._now(),
        )

    def restore_cursors(self, relay: Relay, session: ExpiringSession) -> CloseReason:
        """Find where the frames of a predecessor's relay begin, whatever it was doing; return its close reason.

        Injections that were not completed have been undone. Raises OSError.
        """
        for direction in (relay.to_broker, relay.to_client):
            cursor = self._restore_cursor(direction, session)
            self._cells[cursor.row + INJECTING] = 0
        self.write_clock(session)
        if session.broker_challenges is not None:
            exchange = self._cells[framed_row(relay.record.id, TO_BROKER) + EXCHANGE]
            session.broker_challenges.restore_phase(_decode(ExchangePhase, exchange, ExchangePhase.QUIET))
        return _decode(CloseReason, self._cells[framed_row(relay.record.id, TO_CLIENT) + CLOSING], CloseReason.EXPIRED)

    def _restore_cursor(self, direction: Direction, session: ExpiringSession) -> FrameCursor:
        cursor = self._new_cursor(direction, session, has_producer=self.has_producer(session))
        consumed, boundary = consumed_bytes(direction.source), self._cells[cursor.row + BOUNDARY]
        cursor.boundary = abs(boundary)
        cursor.bytes_to_boundary = max(0, cursor.boundary - consumed)
        if boundary < 0:
            cursor.removed_bytes = bytearray()
            if cursor.way == TO_BROKER:
                session.drops_next_answer = True
            elif session.broker_challenges is not None:
                session.broker_challenges.challenge_truncated = True
        elif consumed > boundary:
            held = self._cells[cursor.row + HEAD : cursor.row + HEAD + HEAD_CELLS].tobytes()
            cursor.held_head = held[: consumed - boundary]
        if session.clock is not None and session.clock.phase is Phase.CHALLENGED_AGAIN:
            session.drops_next_answer = True
        return cursor


def _decode(kind: type[NumberT], number: int, otherwise: NumberT) -> NumberT:
    """Return the member of this number; ``otherwise`` if only a later version of the program knows it."""
    try:
        return kind(number)
    except ValueError:
        return otherwise


def _way(direction: Direction) -> int:
    """Return TO_BROKER or TO_CLIENT."""
    return TO_BROKER if direction is direction.relay.to_broker else TO_CLIENT
