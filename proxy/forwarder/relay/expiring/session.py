"""State of a session with inspected frames within its relay, and the interfaces around it.

Two pumps read frame boundaries: proxy.forwarder.relay.expiring.splice_pump in the kernel, and
proxy.forwarder.relay.expiring.copy_loop in memory. Both report to the same ReauthenticationHandler
(proxy.forwarder.relay.expiring.reauthentication), which acts on a relay through its SessionControl.
"""

import enum
import socket
from collections.abc import Set as AbstractSet
from typing import Protocol

from proto.broker_exchange import ExchangePhase
from proto.command_heads import SIZE_BYTES, FrameInvalid
from proto.commands import parse_command
from proto.framed_stream import Action, FramedStream, Own
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_TYPES, ClientFrameScanner, FrameScanner
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER, CommandDecision, ReauthenticationFailure, SessionClock
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.enforcement import Enforcement
from proxy.forwarder.relay.expiring.relay_session import Reauthenticate, stored_grace_ms
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT


class Injection(enum.IntEnum):
    """Kind of bytes that the proxy writes into a relay's pipe. A forwarder's successor reads the numbers."""

    HELD_HEAD = 1
    """The beginning of a frame, which was taken out of the socket and held."""
    CHALLENGE = 2
    CLOSING_ERROR = 3
    """The error that tells the client why its relay is closed."""
    BROKER_ANSWER = 4
    """The proxy's answer to the broker's challenge, or the client's that goes on, towards the broker."""


INJECTION_BYTES_MAX = 4096
"""Limit of an injection towards the client: any empty pipe takes it whole or not at all (PIPE_BUF)."""

BROKER_ANSWER_BYTES_MAX = 1 << 16
"""Limit of an answer to a broker. It goes into one empty pipe, too, which must be large enough: Kerberos' tickets and
tokens may be larger than a page.
"""

BROKER_CHALLENGE_BYTES_MAX = 1 << 16
"""Limit of a broker's challenge that does not pass; existing ones have some hundred bytes."""


BROKER_STOP_TYPES = frozenset({BaseCommand.AUTH_CHALLENGE})
"""Commands to stop at on the way to the client, where the broker's challenges do not pass."""

PEEK_BYTES = 1 << 20
"""Most bytes to peek at in one call. A peek costs a copy, but each further call costs more."""


class FrameCursor:
    """Position of one direction of a relay in its source's frames.

    * ``boundary``: the next known frame boundary, as an offset in the source's stream; ``bytes_to_boundary``: how many
      bytes may pass up to there.
    * ``held_head``: the beginning of the frame at the boundary, as far as it is held.
    * ``removed_bytes``: the bytes so far of a frame that is being removed from the stream and ends at the boundary.
    * ``pending_injection``: what the proxy will write at the next boundary.
    * ``stops_at_boundary``: nothing behind the next boundary may pass; ``ends_at_boundary``: the direction ends there.
    * ``awaits_verdict``: a command waits until an answer is verified.
    * ``peek_bytes``: how many bytes to peek at in one call; ``peeked_bytes``: how many were seen, if that was all.
    * ``session``, ``way``: the session, and which of its relay's directions this is; ``row``: of the relay table.
    """

    __slots__ = (
        "awaits_verdict",
        "boundary",
        "bytes_to_boundary",
        "ends_at_boundary",
        "held_head",
        "peek_bytes",
        "peeked_bytes",
        "pending_injection",
        "removed_bytes",
        "row",
        "scanner",
        "session",
        "sock",
        "stop_types",
        "stops_at_boundary",
        "way",
    )

    def __init__(self, row: int, source: int, session: "ExpiringSession", way: int, scanner: FrameScanner) -> None:
        self.row = row
        self.session = session
        self.way = way
        # The family is not queried: see proxy.forwarder.relay.relay.shut_down. Never closed, only detached.
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=source)
        self.scanner = scanner
        self.stop_types = scanner.stop_types
        self.peek_bytes = PEEK_BYTES
        self.boundary = self.bytes_to_boundary = self.peeked_bytes = 0
        self.held_head = b""
        self.removed_bytes: bytearray | None = None
        self.pending_injection: tuple[bytes, Injection] | None = None
        self.stops_at_boundary = self.ends_at_boundary = self.awaits_verdict = False

    def record_consumed(self, moved: int, *, few: bool) -> bool:
        """Record ``moved`` bytes that have left the source; return True if the source is drained.

        ``few``: the portion is small enough to take the source for drained where nothing was peeked at.
        """
        self.bytes_to_boundary -= moved
        seen, self.peeked_bytes = self.peeked_bytes, 0
        if not self.bytes_to_boundary:
            return 0 < seen <= moved and not (self.ends_at_boundary or self.pending_injection)
        return seen <= moved if seen else few


class ExpiringSession:
    """Session whose frames are inspected: its stored terms, its clock and how it closes.

    * ``relay_record``: the relay as the fd store keeps it; ``terms``: the session's part of that.
    * ``clock``: None where nothing expires.
    * ``close_reason``, ``closing_error_frame``: why the relay closes, and the error for the client where it is not the
      reason's usual one.
    * ``drops_next_answer``: the client's next answer belongs to an exchange that ended with a predecessor.
    * ``control``: set when the relay begins.
    * ``enforcement``: the forwarder's; ``listener``: where the client's listener is bound, the key for enforcement.
    * ``scheduled_at_s``: the time for which the coordinator's schedule has a challenge; NEVER if it has none.
    * ``broker_challenges``: has the broker's challenges answered; None: they go to the client.
    """

    __slots__ = (
        "broker_challenges",
        "clock",
        "close_reason",
        "closing_error_frame",
        "control",
        "drops_next_answer",
        "enforcement",
        "grace_s",
        "listener",
        "reauthenticate",
        "relay_record",
        "scheduled_at_s",
        "terms",
    )

    control: "SessionControl"

    def __init__(
        self,
        relay_record: StoredRelay,
        clock: SessionClock | None,
        reauthenticate: Reauthenticate,
        enforcement: Enforcement | None = None,
    ) -> None:
        self.relay_record = relay_record
        self.enforcement = enforcement or Enforcement()
        self.listener = relay_record.session.listener_bind
        self.terms = relay_record.session
        self.clock = clock
        self.reauthenticate = reauthenticate
        self.close_reason = CloseReason.NOT_CLOSING
        self.closing_error_frame = b""
        self.drops_next_answer = False
        self.scheduled_at_s = NEVER
        self.broker_challenges: BrokerChallengeHandler | None = None
        self.grace_s = seconds(stored_grace_ms(relay_record.session))

    @property
    def observes_ends(self) -> bool:
        """Whether the configuration in force only counts this session's end."""
        return self.enforcement.observes_ends(self.listener)

    @property
    def answer_bytes_max(self) -> int:
        """Limit of the client's answers to challenges."""
        return self.terms.answer_bytes_max

    def new_stream(self, way: int, *, has_producer: bool = False) -> FramedStream:
        """Build the state machine of a direction."""
        return FramedStream(
            self,
            to_broker=way == TO_BROKER,
            watches_producers=self.terms.spares_producers and not has_producer,
            removes_challenges=self.broker_challenges is not None,
        )

    def own_challenge(self, frame: bytes) -> tuple[Own, bytes]:
        """Return a challenge to the client as a stream's own frame."""
        return Own.CHALLENGE if frame == self.terms.challenge else Own.ROUND, frame

    def initial_stop_types(self, way: int, *, has_producer: bool) -> frozenset[int]:
        """Return the commands to stop at in a direction before the session has expired."""
        if way == TO_CLIENT:
            return NO_TYPES if self.broker_challenges is None else BROKER_STOP_TYPES
        if self.clock is None:
            return NO_TYPES
        watches_producers = self.terms.spares_producers and not has_producer
        return frozenset({BaseCommand.AUTH_RESPONSE} | ({BaseCommand.PRODUCER} if watches_producers else set()))

    def new_scanner(self, way: int, *, has_producer: bool = False) -> FrameScanner:
        """Build the frame scanner of a direction."""
        counted_type = 0
        if self.terms.counts_messages:
            counted_type = BaseCommand.SEND if way == TO_BROKER else BaseCommand.MESSAGE
        scanner_class = ClientFrameScanner if way == TO_BROKER else FrameScanner
        return scanner_class(
            frame_bytes_max=self.terms.frame_bytes_max,
            stop_types=self.initial_stop_types(way, has_producer=has_producer),
            counted_type=counted_type,
        )

    def current_stop_types(self, way: int, stop_types: AbstractSet[int], now_s: float) -> AbstractSet[int]:
        """Return the commands to stop at now, given the ``stop_types`` before the session has expired."""
        clock = self.clock
        if clock is None or now_s < clock.expires_at_s:
            return stop_types
        if clock.end_observed and self.observes_ends:  # the end was counted and logged
            return stop_types
        if way == TO_BROKER:
            return ALL_TYPES
        # What the broker sends while the relay closes, or before the verdict on an answer, is delivered.
        is_over = (
            now_s >= clock.expires_at_s + self.grace_s
            and clock.decide_command(now_s) is CommandDecision.CLOSE
            and not self.close_reason
        )
        return ALL_TYPES if is_over else stop_types


class SessionControl(Protocol):
    """Actions of re-authentication on one session, whichever way its bytes are moved."""

    def send_challenge(self, challenge: bytes) -> None:
        """Inject a challenge frame towards the client at the next boundary."""

    def resume_after_verdict(self) -> None:
        """Let a waiting command continue after a verdict that the session's clock has recorded."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Start to close: from the next boundary on nothing passes to the broker.

        ``error_frame``: the error for the client; empty: the reason's usual one.
        """

    def close_with_error(self, error_frame: bytes) -> None:
        """Send the client an error at the next boundary, then end both directions, each at its next boundary."""

    def record_observed_end(self) -> None:
        """Record in the relay table that an observed end was counted, so that a successor does not count it again."""

    @property
    def has_opened_producer(self) -> bool:
        """Whether the client has ever opened a producer on this connection, where the session depends on that."""

    @property
    def bytes_sent_to_client(self) -> int:
        """Number of bytes sent to the client so far."""

    @property
    def has_ended(self) -> bool:
        """Whether this process can send the client nothing more."""


class RelaySessionControl(SessionControl, Protocol):
    """SessionControl of a relay, with the actions for answers to the broker's challenges."""

    def send_broker_answer(self, frame: bytes) -> None:
        """Inject an answer towards the broker at the next boundary of that direction."""

    def record_exchange(self) -> None:
        """Record the phase of an exchange with the broker that was abandoned while no direction was being pumped."""


class BrokerChallengeHandler(Protocol):
    """Receiver of the challenges of a relay's broker that do not pass to the client.

    The implementations are proxy.forwarder.relay.expiring.broker_reauthentication.BrokerReauthentication, where the
    broker asks the proxy itself, and proxy.forwarder.relay.expiring.forwarded_answers.ForwardedAnswers, where it asks
    the client.
    ``control``: set when the relay begins. ``challenge_truncated``: a predecessor lost the beginning of the challenge
    that is being removed from the stream.
    """

    control: RelaySessionControl
    challenge_truncated: bool

    @property
    def phase(self) -> ExchangePhase:
        """Phase of the exchange, which a successor has to know."""

    @property
    def phase_after_answer(self) -> ExchangePhase:
        """Phase of the exchange as soon as the answer is sent."""

    def restore_phase(self, phase: ExchangePhase) -> None:
        """Continue in the phase of a predecessor's exchange."""

    def resume_exchange(self) -> None:
        """Answer a challenge that a predecessor removed from the stream and did not answer."""

    def on_challenge_frame(self, frame: bytes) -> None:
        """Handle a challenge frame that was removed from the broker's stream."""

    def on_answer_accepted(self, frame: bytes) -> None:
        """Handle an answer of the client's own, which an auth worker has accepted."""

    def on_answer_sent(self) -> None:
        """Record that the answer was sent to the broker."""


class ReauthenticationHandler(Protocol):
    """Receiver of what a relay's pump finds in a session's frames.

    The implementation is proxy.forwarder.relay.expiring.reauthentication.ReauthenticationCoordinator.
    """

    def on_answer(self, session: ExpiringSession, frame: bytes) -> None:
        """Start to verify the client's answer to a challenge."""

    def on_action(self, session: ExpiringSession, stream: FramedStream, action: Action) -> None:
        """Close the session, or count its end, where a stream's decision says so. Raises FrameInvalid."""

    def decide_command(self, session: ExpiringSession) -> CommandDecision:
        """Decide about a client's command, and count an end that is only observed. The session must have a clock."""

    def on_served_past_grace(self, session: ExpiringSession) -> None:
        """Close a session, or count its end, to which the broker still sends past the grace period."""

    def on_producer_opened(self, session: ExpiringSession) -> None:
        """Count a client that is no longer challenged because it has opened its first producer."""

    def on_failure(
        self, session: ExpiringSession, failure: ReauthenticationFailure, *, over_limit: bool = False
    ) -> None:
        """Handle an invalid answer.

        ``over_limit``: it is too large to be removed from the stream, so the relay ends in any case.
        """

    def on_answer_lost(self, session: ExpiringSession) -> None:
        """Schedule another challenge after an answer to a predecessor's challenge."""

    def on_invalid_frame(self, session: ExpiringSession, error: FrameInvalid) -> None:
        """Close a relay after bytes of the client or the broker that are no frame."""

    def on_closing(self, session: ExpiringSession) -> None:
        """Send the client its error as soon as the broker's bytes on the way to it have arrived.

        Nothing more passes to the broker.
        """

    def closing_error_frame(self, session: ExpiringSession) -> bytes:
        """Return the error frame that tells the client why its relay closes."""


def parse_frame_command(frame: bytes) -> BaseCommand:
    """Parse the command of a whole frame. Raises CommandCorrupt."""
    size = int.from_bytes(frame[SIZE_BYTES : 2 * SIZE_BYTES], "big")
    return parse_command(frame[2 * SIZE_BYTES : 2 * SIZE_BYTES + size])


def check_challenge_size(length: int) -> None:
    """Check the size of a broker's challenge that does not pass. Raises FrameInvalid."""
    if length > BROKER_CHALLENGE_BYTES_MAX:
        raise FrameInvalid(f"a challenge to the proxy of {length} bytes; the limit is {BROKER_CHALLENGE_BYTES_MAX}")
