"""Where a followed relay stands, as its forwarder writes it down and a successor reads it
(proxy.forwarder.relay.expiring.splice_pump).

**Killed at any step.** A successor asks the kernel how much of a stream was consumed
(proxy.runtime.network.stream_position)
and finds in the relay table, always written *before* the step that it speaks of, what it needs to know where that is:

* ``BOUNDARY``: less than this was consumed: so much is left of frames that may pass (negative: of a frame that is being
  taken out). As much: it is at a boundary. More: the bytes in between are held, and stand in ``HEAD``.
* ``PUTTING``: something of ours is being put into the pipe, which was empty. Only when the store that says that it
  happened was made, ``PUTTING`` is cleared, and only then anything leaves the pipe. So where the one is set and the
  other not made, all that the pipe holds is ours: it is taken back, and done again.
* ``EXCHANGE``: where the proxy's own exchange with the broker stands; what it asks for is stored before the challenge
  counts as taken out, and that it was answered says that the answer was put in.
* ``PHASE``, times: the session clock. An answer that was taken out, or rounds that were begun, die with their
  process: the client is asked once more.
"""

import enum
import os
from collections.abc import Callable
from typing import TypeVar

from proto.broker_exchange import UNANSWERED, ExchangePhase
from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_STOP
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER, ClockSnapshot, Phase, SessionClock
from proxy.forwarder.relay.expiring.session import CloseReason, FrameCursor, Injection
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

SAYS = {
    Injection.HELD_HEAD: BOUNDARY,
    Injection.CHALLENGE: PHASE,
    Injection.CLOSING_ERROR: CLOSING,
    Injection.BROKER_ANSWER: EXCHANGE,
}
"""Which store says that something was put in."""

_NS_PER_S = 1_000_000_000

NumberT = TypeVar("NumberT", bound=enum.IntEnum)


class FramedJournal:
    """See the module. ``now``: seconds of the clock that all of the cluster's processes share."""

    def __init__(self, table: RelayTable, now: Callable[[], float]) -> None:
        self._table = table
        self._cells = table.cells
        self._now = now

    # ---- a relay that begins

    def start_cursors(self, relay: Relay, first_to_broker: bytes, first_to_client: bytes) -> tuple[bytes, bytes]:
        """Find where the frames of a relay begin that has not begun; what of its first bytes goes to the broker and to
        the client at once: the beginning of a frame, at the end, is held. Raises OSError, FrameWrong.
        """
        self._table.record_framed(relay.record.id)
        self.write_clock(relay)
        return self._behind(relay.to_broker, first_to_broker), self._behind(relay.to_client, first_to_client)

    def _behind(self, direction: Direction, first: bytes) -> bytes:
        """Follow a direction behind its first bytes; those of them that go at once."""
        framing = self._framing(direction, has_producer=False)
        consumed = consumed_bytes(direction.source)
        passing, stop = 0, NO_STOP
        # To connect took its time. Where ends are only observed, the next use will be counted.
        if framing.way == TO_BROKER and not framing.session.observes_ends:
            framing.scanner.stop_types = framing.session.current_stop_types(TO_BROKER, framing.stop_types, self._now())
        while passing < len(first) and stop != INCOMPLETE:
            more, stop = framing.scanner.scan_frames(first[passing:], len(first) - passing)
            passing += more
            if framing.scanner.stop_types is ALL_TYPES and stop not in {NO_STOP, INCOMPLETE}:
                raise FrameInvalid("a command past the session's end, which came before the relay began")
            if stop == BaseCommand.PRODUCER:
                self.write_producer(direction.relay, framing)
            elif stop == BaseCommand.AUTH_RESPONSE:
                raise FrameInvalid("an answer before any challenge")
            elif stop == BaseCommand.AUTH_CHALLENGE:
                raise FrameInvalid("a challenge of the broker's before the relay began")
        framing.boundary = consumed - len(first) + passing
        framing.bytes_to_boundary = max(0, passing - len(first))
        self._cells[framing.row + MESSAGES] = framing.scanner.take_message_count()
        self.write_head(framing, first[passing:])
        self._cells[framing.row + BOUNDARY] = framing.boundary
        return first[:passing]

    @staticmethod
    def _framing(direction: Direction, *, has_producer: bool) -> FrameCursor:
        way = _way(direction)
        followed = direction.relay.session
        assert followed is not None
        walk = followed.new_scanner(way, has_producer=has_producer)
        direction.cursor = FrameCursor(
            framed_row(direction.relay.record.id, way), direction.source, followed, way, walk
        )
        return direction.cursor

    # ---- what is written down

    def write_head(self, framing: FrameCursor, head: bytes) -> None:
        """The beginning of a frame, which may be taken out of the socket from now on."""
        for cell, at in enumerate(range(0, len(head), 8)):
            self._cells[framing.row + HEAD + cell] = as_cell(head[at : at + 8])
        framing.held_head = head

    def write_producer(self, relay: Relay, framing: FrameCursor) -> None:
        """The client has opened a producer; ``framing``: of the way to the broker, which need not look for it again."""
        self._cells[framed_row(relay.record.id, TO_CLIENT) + HAS_PRODUCER] = 1
        framing.scanner.stop_types = framing.stop_types = framing.stop_types - {BaseCommand.PRODUCER}

    def has_producer(self, relay: Relay) -> bool:
        """Whether a client that is not asked while it has a producer had one ever on this connection."""
        return bool(self._cells[framed_row(relay.record.id, TO_CLIENT) + HAS_PRODUCER])

    def write_exchange(self, relay: Relay, phase: ExchangePhase) -> None:
        """Write down where the proxy's own exchange with the broker stands."""
        self._cells[framed_row(relay.record.id, TO_BROKER) + EXCHANGE] = phase

    def write_close_reason(self, relay: Relay, why: CloseReason) -> None:
        """The relay is being closed."""
        self._cells[framed_row(relay.record.id, TO_CLIENT) + CLOSING] = why

    def write_clock(self, relay: Relay) -> None:
        """The end first and the phase last: whatever a kill leaves of it, nobody lives longer than he may."""
        followed = relay.session
        assert followed is not None
        if followed.clock is None:
            return
        cells, row, memo = self._cells, framed_row(relay.record.id, TO_CLIENT), followed.clock.snapshot
        for cell, time_s in (
            (EXPIRES_AT, memo.expires_at_s),
            (CHALLENGE_AT, memo.challenge_at_s),
            (LAST_AT, memo.last_attempt_at_s),
        ):
            cells[row + cell] = 0 if time_s == NEVER else int(time_s * _NS_PER_S)
        cells[row + OBSERVED] = memo.end_observed
        cells[row + PHASE] = memo.phase

    # ---- what a predecessor has written

    def undo_injection(self, direction: Direction, pipe: Pipe, waiting: int) -> bool:
        """Empty a pipe that a predecessor filled with something of its own without saying so; whether it did."""
        if direction.relay.session is None:
            return False
        row = framed_row(direction.relay.record.id, _way(direction))
        putting = self._cells[row + INJECTING]
        if not putting or self._is_said(direction, row, putting):
            return False
        while waiting:
            waiting -= len(os.read(pipe.read_end, waiting))
        return True

    def _is_said(self, direction: Direction, row: int, putting: int) -> bool:
        if putting == Injection.HELD_HEAD:
            return bool(self._cells[row + BOUNDARY] >= consumed_bytes(direction.source))
        if putting == Injection.CHALLENGE:
            return self._cells[row + PHASE] in {Phase.CHALLENGED, Phase.CHALLENGED_AGAIN}
        if putting == Injection.BROKER_ANSWER:
            return self._cells[row + EXCHANGE] not in UNANSWERED
        return bool(self._cells[row + CLOSING] == CloseReason.ERROR_SENT)

    def restore_clock(self, relay: StoredRelay) -> SessionClock | None:
        """The clock of a predecessor's relay; one that began rounds with the client has taken them with it."""
        if not relay.session.expires:
            return None
        cells, row = self._cells, framed_row(relay.id, TO_CLIENT)
        expires_at_s, challenge_at_s, last_at_s = (
            cells[row + cell] / _NS_PER_S or NEVER for cell in (EXPIRES_AT, CHALLENGE_AT, LAST_AT)
        )
        # Of a phase that is not known the next answer may belong to it: it is dropped, and the client is asked again.
        phase, observed = _meaning(Phase, cells[row + PHASE], Phase.CHALLENGED_AGAIN), bool(cells[row + OBSERVED])
        memo = ClockSnapshot(expires_at_s, challenge_at_s, last_at_s, phase, observed)
        return SessionClock.from_snapshot(
            relay.session.principal,
            lifetime_ms_max=relay.session.lifetime_ms_max,
            snapshot=memo,
            now_s=self._now(),
        )

    def restore_cursors(self, relay: Relay) -> CloseReason:
        """Find where the frames of a predecessor's relay begin, wherever it stood; whether it was being closed. What of
        its pipes is not to be sent was taken back. Raises OSError.
        """
        for direction in (relay.to_broker, relay.to_client):
            framing = self._recall_framing(direction)
            self._cells[framing.row + INJECTING] = 0
        self.write_clock(relay)
        if relay.session is not None and relay.session.broker_challenges is not None:
            exchange = self._cells[framed_row(relay.record.id, TO_BROKER) + EXCHANGE]
            relay.session.broker_challenges.restore_phase(_meaning(ExchangePhase, exchange, ExchangePhase.QUIET))
        return _meaning(CloseReason, self._cells[framed_row(relay.record.id, TO_CLIENT) + CLOSING], CloseReason.EXPIRED)

    def _recall_framing(self, direction: Direction) -> FrameCursor:
        followed = direction.relay.session
        assert followed is not None
        framing = self._framing(direction, has_producer=self.has_producer(direction.relay))
        consumed, boundary = consumed_bytes(direction.source), self._cells[framing.row + BOUNDARY]
        framing.boundary = abs(boundary)
        framing.bytes_to_boundary = max(0, framing.boundary - consumed)
        if boundary < 0:
            framing.removed_bytes = bytearray()
            if framing.way == TO_BROKER:
                followed.drops_next_answer = True
            elif followed.broker_challenges is not None:
                followed.broker_challenges.challenge_truncated = True
        elif consumed > boundary:
            held = self._cells[framing.row + HEAD : framing.row + HEAD + HEAD_CELLS].tobytes()
            framing.held_head = held[: consumed - boundary]
        if followed.clock is not None and followed.clock.phase is Phase.CHALLENGED_AGAIN:
            followed.drops_next_answer = True
        return framing


def _meaning(kind: type[NumberT], number: int, otherwise: NumberT) -> NumberT:
    """Return what a number in the table stands for; ``otherwise`` for a later version's, which this one followed."""
    try:
        return kind(number)
    except ValueError:
        return otherwise


def _way(direction: Direction) -> int:
    return TO_BROKER if direction is direction.relay.to_broker else TO_CLIENT
