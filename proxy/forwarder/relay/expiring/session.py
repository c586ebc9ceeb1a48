"""What is known of a relay whose frames are followed: its session, where frames begin, who is told of what is found.

The engine follows frames in the kernel (proxy.forwarder.relay.expiring.splice_pump), user space in memory
(proxy.forwarder.relay.expiring.copy_loop);
both tell the same judge (proxy.forwarder.relay.expiring.reauthentication).
"""

import enum
import socket
from collections.abc import Set as AbstractSet
from typing import Protocol

from proto.broker_exchange import ExchangePhase
from proto.command_heads import SIZE_BYTES, FrameInvalid
from proto.commands import parse_command
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_TYPES, ClientFrameScanner, FrameScanner
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import CommandDecision, ReauthenticationFailure, SessionClock
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.enforcement import Enforcement
from proxy.forwarder.relay.expiring.relay_session import Reauthenticate, stored_grace_ms
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT


class Injection(enum.IntEnum):
    """What is being put into a pipe. The numbers are what a successor reads."""

    HELD_HEAD = 1
    CHALLENGE = 2
    CLOSING_ERROR = 3
    BROKER_ANSWER = 4
    """Of the way to the broker: the proxy's answer to the broker's challenge."""


INJECTION_BYTES_MAX = 4096
"""What is put in towards the client goes into any empty pipe whole or not at all (PIPE_BUF)."""

BROKER_ANSWER_BYTES_MAX = 1 << 16
"""An answer to a broker goes into one empty pipe, too, which must be large enough: Kerberos' tickets and tokens may be
larger than a page.
"""

BROKER_CHALLENGE_BYTES_MAX = 1 << 16
"""Of a broker's challenge to the proxy; those that there are have some hundred bytes."""


BROKER_STOP_TYPES = frozenset({BaseCommand.AUTH_CHALLENGE})
"""What is taken out of the way to the client where the proxy answers the broker's challenges."""

PEEK_BYTES = 1 << 20
"""How much is looked at at a time, if it is there: to look costs a copy, but each further call costs more."""


class FrameCursor:
    """Where the frames of one direction begin.

    ``boundary``: the next one that is known, as an offset in the source's stream; ``left``: bytes up to there;
    ``head``: what is held of the frame that begins there; ``taken``: what is there of the frame that is being taken out
    up to there. ``stopped``: nothing passes behind the next boundary; ``over``: the direction ends there. ``waits``:
    for a verdict. ``look_bytes``: how much is looked at at a time. ``followed``, ``way``: which relay's direction it
    is.
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
        # The family is not asked for: see proxy.forwarder.relay.relay.shut_down. Never closed, only detached.
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
        """So many bytes have left the source: whether that was all that it had."""
        self.bytes_to_boundary -= moved
        seen, self.peeked_bytes = self.peeked_bytes, 0
        if not self.bytes_to_boundary:
            return 0 < seen <= moved and not (self.ends_at_boundary or self.pending_injection)
        return seen <= moved if seen else few


class ExpiringSession:
    """A session whose frames a relay follows: what never changes, its clock, and how it ends.

    ``clock``: None where nothing expires; ``closing_frame``: the client's last word, where it is not the usual one;
    ``discards``: whether the next answer belongs to rounds that died with a predecessor; ``line``: set when it begins.
    ``enforcement``: the forwarder's; ``listener``: where the client's is bound, by which it is asked.
    ``broker``: answers the broker's challenges; None: they go to the client.
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
        self.broker_challenges: BrokerChallengeHandler | None = None
        self.grace_s = seconds(stored_grace_ms(relay_record.session))

    @property
    def observes_ends(self) -> bool:
        """Whether its end is only counted, by the configuration in force now."""
        return self.enforcement.observes_ends(self.listener)

    def initial_stop_types(self, way: int, *, has_producer: bool) -> frozenset[int]:
        """What to stop at, as long as it has not expired."""
        if way == TO_CLIENT:
            return NO_TYPES if self.broker_challenges is None else BROKER_STOP_TYPES
        if self.clock is None:
            return NO_TYPES
        watches_producers = self.terms.spares_producers and not has_producer
        return frozenset({BaseCommand.AUTH_RESPONSE} | ({BaseCommand.PRODUCER} if watches_producers else set()))

    def new_scanner(self, way: int, *, has_producer: bool = False) -> FrameScanner:
        """How the frames of a direction are looked at."""
        counts = 0
        if self.terms.counts_messages:
            counts = BaseCommand.SEND if way == TO_BROKER else BaseCommand.MESSAGE
        stops = self.initial_stop_types(way, has_producer=has_producer)
        kind = ClientFrameScanner if way == TO_BROKER else FrameScanner
        return kind(frame_bytes_max=self.terms.frame_bytes_max, stop_types=stops, counted_type=counts)

    def current_stop_types(self, way: int, stops: AbstractSet[int], now_s: float) -> AbstractSet[int]:
        """What to stop at now, where it would be ``stops`` as long as the session has not expired."""
        clock = self.clock
        if clock is None or now_s < clock.expires_at_s:
            return stops
        if clock.end_observed and self.observes_ends:  # all that there is to say of its end was said
            return stops
        if way == TO_BROKER:
            return ALL_TYPES
        # What the broker says while the relay is being closed, or before the verdict on an answer, is delivered.
        is_over = (
            now_s >= clock.expires_at_s + self.grace_s
            and clock.decide_command(now_s) is CommandDecision.CLOSE
            and not self.close_reason
        )
        return ALL_TYPES if is_over else stops


class SessionControl(Protocol):
    """A followed relay, as its judge needs it, whichever way its bytes go."""

    def send_challenge(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""

    def resume_after_verdict(self) -> None:
        """There is a verdict, and the clock knows it."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on. ``frame``: what to tell the client;
        empty: the usual.
        """

    def close_with_error(self, error_frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end, each at a boundary of its own."""

    def record_observed_end(self) -> None:
        """Write down that the clock knows of an observed end, so that a successor does not count it again."""

    @property
    def has_opened_producer(self) -> bool:
        """Whether a client that is not asked while it has a producer had one ever on this connection."""

    @property
    def bytes_sent_to_client(self) -> int:
        """How many have gone."""

    @property
    def has_ended(self) -> bool:
        """Whether the client can be told nothing any more."""


class RelaySessionControl(SessionControl, Protocol):
    """The same, as the answers to the broker's challenges need it."""

    def send_broker_answer(self, frame: bytes) -> None:
        """Put an answer in towards the broker, at the next boundary of what it is sent."""

    def record_exchange(self) -> None:
        """Write down where the exchange with the broker stands, since it was given up outside of the stream's turns."""


class BrokerChallengeHandler(Protocol):
    """The proxy's own session with a relay's broker (proxy.forwarder.relay.expiring.broker_reauthentication).

    ``line``: set when the relay begins; ``discards``: whether the beginning of the challenge that is being taken out
    died with a predecessor.
    """

    control: RelaySessionControl
    challenge_truncated: bool

    @property
    def phase(self) -> ExchangePhase:
        """Where the exchange stands: what a successor has to know."""

    @property
    def phase_after_answer(self) -> ExchangePhase:
        """Where it will stand as soon as the answer is on its way."""

    def restore_phase(self, phase: ExchangePhase) -> None:
        """Go on where a predecessor's exchange stood."""

    def resume_exchange(self) -> None:
        """Answer what a predecessor took out of the stream and did not answer."""

    def on_challenge_frame(self, frame: bytes) -> None:
        """Take a challenge that was taken out of the broker's stream."""

    def on_answer_sent(self) -> None:
        """Note that the answer is on its way to the broker."""


class ReauthenticationHandler(Protocol):
    """Who is told of what is found in followed relays."""

    def on_answer(self, followed: ExpiringSession, frame: bytes) -> None:
        """The client's answer; it is being judged from now on."""

    def decide_command(self, followed: ExpiringSession) -> CommandDecision:
        """Decide what may become of a command, and count an observed end. The session must have a clock."""

    def on_served_past_grace(self, followed: ExpiringSession) -> None:
        """End a session, or count its end, over which the broker still sends past its grace."""

    def on_producer_opened(self, followed: ExpiringSession) -> None:
        """Count a client that is not asked any more, since it has opened its first producer."""

    def on_failure(
        self, followed: ExpiringSession, failure: ReauthenticationFailure, *, over_limit: bool = False
    ) -> None:
        """An answer that is none; ``over_limit``: nor can it be taken out of the stream, so the relay ends."""

    def on_answer_lost(self, followed: ExpiringSession) -> None:
        """An answer to a predecessor."""

    def on_invalid_frame(self, followed: ExpiringSession, error: FrameInvalid) -> None:
        """What the client or the broker has sent is no frame: the relay is closed."""

    def on_closing(self, followed: ExpiringSession) -> None:
        """Nothing more passes to the broker; the client is to be told when what is on its way to it has come."""

    def closing_error_frame(self, followed: ExpiringSession) -> bytes:
        """The frame that tells a client why its relay is being closed."""


def parse_frame_command(frame: bytes) -> BaseCommand:
    """Parse the command of a whole frame. Raises CommandCorrupt."""
    size = int.from_bytes(frame[SIZE_BYTES : 2 * SIZE_BYTES], "big")
    return parse_command(frame[2 * SIZE_BYTES : 2 * SIZE_BYTES + size])


def check_challenge_size(length: int) -> None:
    """Check how large a broker's challenge to the proxy is. Raises FrameWrong."""
    if length > BROKER_CHALLENGE_BYTES_MAX:
        raise FrameInvalid(f"a challenge to the proxy of {length} bytes; the limit is {BROKER_CHALLENGE_BYTES_MAX}")
