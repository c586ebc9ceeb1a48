"""State of a session with inspected frames within its relay, and the interfaces around it.

Two pumps read frame boundaries: proxy.forwarder.relay.framed_splice_pump in the kernel, and
proxy.forwarder.relay.framed_copy_pump in memory. Both report to the same ReauthenticationCoordinator
(proxy.forwarder.lifetime.reauthentication), which acts on a relay through its SessionControl.
"""

import enum
import socket
from typing import Protocol

from proto.broker_exchange import ExchangePhase
from proto.command_heads import SIZE_BYTES
from proto.commands import parse_command
from proto.framed_stream import FramedStream, Own
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ClientFrameScanner, FrameScanner
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER, SessionClock
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.enforcement import Enforcement
from proxy.forwarder.lifetime.terms import Reauthenticate, stored_grace_ms
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.relay_table import TO_BROKER


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

PEEK_BYTES = 1 << 20
"""Most bytes to peek at in one call. A peek costs a copy, but each further call costs more."""


class FrameCursor:
    """Position of one direction of a relay in its source's frames.

    * ``boundary``: the next known frame boundary, as an offset in the source's stream; ``bytes_to_boundary``: how many
      bytes may pass up to there.
    * ``held_head``: the beginning of the frame at the boundary, as far as it is held.
    * ``removed_bytes``: the bytes so far of a frame that is being removed from the stream and ends at the boundary.
    * ``stream``: the rules of what passes at a boundary.
    * ``peek_bytes``: how many bytes to peek at in one call; ``peeked_bytes``: how many were seen, if that was all.
    * ``session``, ``way``: the session, and which of its relay's directions this is; ``row``: of the relay table.
    """

    __slots__ = (
        "boundary",
        "bytes_to_boundary",
        "held_head",
        "peek_bytes",
        "peeked_bytes",
        "removed_bytes",
        "row",
        "scanner",
        "session",
        "sock",
        "stream",
        "way",
    )

    def __init__(self, row: int, source: int, session: "ExpiringSession", way: int, *, has_producer: bool) -> None:
        self.row = row
        self.session = session
        self.way = way
        # The family is not queried: see proxy.forwarder.relay.relay.shut_down. Never closed, only detached.
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=source)
        self.scanner = session.new_scanner(way)
        self.stream = session.new_stream(way, has_producer=has_producer)
        self.peek_bytes = PEEK_BYTES
        self.boundary = self.bytes_to_boundary = self.peeked_bytes = 0
        self.held_head = b""
        self.removed_bytes: bytearray | None = None

    def record_consumed(self, moved: int, *, few: bool) -> bool:
        """Record ``moved`` bytes that have left the source; return True if the source is drained.

        ``few``: the portion is small enough to take the source for drained where nothing was peeked at.
        """
        self.bytes_to_boundary -= moved
        seen, self.peeked_bytes = self.peeked_bytes, 0
        if not self.bytes_to_boundary:
            return 0 < seen <= moved and not (self.stream.ends or self.stream.own)
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

    def new_scanner(self, way: int) -> FrameScanner:
        """Build the frame scanner of a direction."""
        counted_type = 0
        if self.terms.counts_messages:
            counted_type = BaseCommand.SEND if way == TO_BROKER else BaseCommand.MESSAGE
        scanner_class = ClientFrameScanner if way == TO_BROKER else FrameScanner
        return scanner_class(frame_bytes_max=self.terms.frame_bytes_max, counted_type=counted_type)


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


class RelayControl(SessionControl, Protocol):
    """SessionControl of a relay, with the actions for answers to the broker's challenges."""

    def send_broker_answer(self, frame: bytes) -> None:
        """Inject an answer towards the broker at the next boundary of that direction."""

    def record_exchange(self) -> None:
        """Record the phase of an exchange with the broker that was abandoned while no direction was being pumped."""


class BrokerChallengeHandler(Protocol):
    """Receiver of the challenges of a relay's broker that do not pass to the client.

    The implementations are proxy.forwarder.lifetime.broker_reauthentication.BrokerReauthentication, where the
    broker asks the proxy itself, and proxy.forwarder.lifetime.forwarded_answers.ForwardedAnswers, where it asks
    the client.
    ``control``: set when the relay begins. ``challenge_truncated``: a predecessor lost the beginning of the challenge
    that is being removed from the stream.
    """

    control: RelayControl
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


def parse_frame_command(frame: bytes) -> BaseCommand:
    """Parse the command of a whole frame. Raises CommandCorrupt."""
    size = int.from_bytes(frame[SIZE_BYTES : 2 * SIZE_BYTES], "big")
    return parse_command(frame[2 * SIZE_BYTES : 2 * SIZE_BYTES + size])
