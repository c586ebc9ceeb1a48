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
from proto.command_heads import SIZE_BYTES, FrameWrong
from proto.commands import parse_command
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_STOPS, NO_STOPS, ClientFrameWalk, FrameWalk
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import CommandDecision, Failure, SessionClock
from proxy.forwarder.relay.expiring.enforcement import Enforcement
from proxy.forwarder.relay.expiring.relay_session import Reauthenticate, grace_ms_of
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT


class Injection(enum.IntEnum):
    """What is being put into a pipe. The numbers are what a successor reads."""

    HELD = 1
    CHALLENGE = 2
    FAREWELL = 3
    ANSWER = 4
    """Of the way to the broker: the proxy's answer to the broker's challenge."""


PUT_IN_BYTES_MAX = 4096
"""What is put in towards the client goes into any empty pipe whole or not at all (PIPE_BUF)."""

BROKER_ANSWER_BYTES_MAX = 1 << 16
"""An answer to a broker goes into one empty pipe, too, which must be large enough: Kerberos' tickets and tokens may be
larger than a page.
"""

BROKER_CHALLENGE_BYTES_MAX = 1 << 16
"""Of a broker's challenge to the proxy; those that there are have some hundred bytes."""


class CloseReason(enum.IntEnum):
    """Why a followed relay is being closed. The numbers are what a successor reads."""

    NO = 0
    SAID = 1
    """The client has been told."""
    EXPIRED = 2
    FAILED = 3
    """The client was to authenticate itself again, and did not."""
    CORRUPT = 4
    """No boundary can be found any more, or none that the broker would find, too."""
    STILL_SERVED = 5
    """It has expired and is not used, but past its grace the broker still sends more than PING and PONG."""
    MAX_AGE = 6
    """Its connection has reached `limits.max_connection_age_ms`."""
    SHUT_DOWN = 7
    """The cluster is draining."""
    OUT_OF_TURN = 8
    """The broker asks the proxy itself for credentials as no broker does."""


LEAVING = frozenset({CloseReason.MAX_AGE, CloseReason.SHUT_DOWN})
"""Why a relay is closed although nothing is wrong with it."""


BROKER_STOPS = frozenset({BaseCommand.AUTH_CHALLENGE})
"""What is taken out of the way to the client where the proxy answers the broker's challenges."""

LOOK_BYTES = 1 << 20
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
        "boundary",
        "followed",
        "head",
        "left",
        "look_bytes",
        "over",
        "row",
        "seen",
        "sock",
        "stopped",
        "stops",
        "taken",
        "to_put_in",
        "waits",
        "walk",
        "way",
    )

    def __init__(self, row: int, source: int, followed: "ExpiringSession", way: int, walk: FrameWalk) -> None:
        self.row = row
        self.followed = followed
        self.way = way
        # The family is not asked for: see proxy.forwarder.relay.relay.shut_down. Never closed, only detached.
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=source)
        self.walk = walk
        self.stops = walk.stops
        self.look_bytes = LOOK_BYTES
        self.boundary = self.left = self.seen = 0
        self.head = b""
        self.taken: bytearray | None = None
        self.to_put_in: tuple[bytes, Injection] | None = None
        self.stopped = self.over = self.waits = False

    def passed(self, moved: int, *, few: bool) -> bool:
        """So many bytes have left the source: whether that was all that it had."""
        self.left -= moved
        seen, self.seen = self.seen, 0
        if not self.left:
            return 0 < seen <= moved and not (self.over or self.to_put_in)
        return seen <= moved if seen else few


class ExpiringSession:
    """A session whose frames a relay follows: what never changes, its clock, and how it ends.

    ``clock``: None where nothing expires; ``closing_frame``: the client's last word, where it is not the usual one;
    ``discards``: whether the next answer belongs to rounds that died with a predecessor; ``line``: set when it begins.
    ``enforcement``: the forwarder's; ``listener``: where the client's is bound, by which it is asked.
    ``broker``: answers the broker's challenges; None: they go to the client.
    """

    __slots__ = (
        "about",
        "broker",
        "clock",
        "closing",
        "closing_frame",
        "discards",
        "enforcement",
        "grace_s",
        "line",
        "listener",
        "reauthenticate",
        "relay",
    )

    line: "SessionControl"

    def __init__(
        self,
        relay: StoredRelay,
        clock: SessionClock | None,
        reauthenticate: Reauthenticate,
        enforcement: Enforcement | None = None,
    ) -> None:
        self.relay = relay
        self.enforcement = enforcement or Enforcement()
        self.listener = relay.session.listener_bind
        self.about = relay.session
        self.clock = clock
        self.reauthenticate = reauthenticate
        self.closing = CloseReason.NO
        self.closing_frame = b""
        self.discards = False
        self.broker: BrokerSession | None = None
        self.grace_s = seconds(grace_ms_of(relay.session))

    @property
    def observes(self) -> bool:
        """Whether its end is only counted, by the configuration in force now."""
        return self.enforcement.observes(self.listener)

    def stops(self, way: int, *, has_producer: bool) -> frozenset[int]:
        """What to stop at, as long as it has not expired."""
        if way == TO_CLIENT:
            return NO_STOPS if self.broker is None else BROKER_STOPS
        if self.clock is None:
            return NO_STOPS
        watches_producers = self.about.spares_producers and not has_producer
        return frozenset({BaseCommand.AUTH_RESPONSE} | ({BaseCommand.PRODUCER} if watches_producers else set()))

    def walk(self, way: int, *, has_producer: bool = False) -> FrameWalk:
        """How the frames of a direction are looked at."""
        counts = 0
        if self.about.counts_messages:
            counts = BaseCommand.SEND if way == TO_BROKER else BaseCommand.MESSAGE
        stops = self.stops(way, has_producer=has_producer)
        kind = ClientFrameWalk if way == TO_BROKER else FrameWalk
        return kind(frame_bytes_max=self.about.frame_bytes_max, stops=stops, counts=counts)

    def stops_now(self, way: int, stops: AbstractSet[int], now_s: float) -> AbstractSet[int]:
        """What to stop at now, where it would be ``stops`` as long as the session has not expired."""
        clock = self.clock
        if clock is None or now_s < clock.expires_at_s:
            return stops
        if clock.observed and self.observes:  # all that there is to say of its end was said
            return stops
        if way == TO_BROKER:
            return ALL_STOPS
        # What the broker says while the relay is being closed, or before the verdict on an answer, is delivered.
        is_over = (
            now_s >= clock.expires_at_s + self.grace_s
            and clock.use(now_s) is CommandDecision.CLOSE
            and not self.closing
        )
        return ALL_STOPS if is_over else stops


class SessionControl(Protocol):
    """A followed relay, as its judge needs it, whichever way its bytes go."""

    def ask(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""

    def go_on(self) -> None:
        """There is a verdict, and the clock knows it."""

    def close(self, why: CloseReason, frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on. ``frame``: what to tell the client;
        empty: the usual.
        """

    def say_farewell(self, frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end, each at a boundary of its own."""

    def note_observed(self) -> None:
        """Write down that the clock knows of an observed end, so that a successor does not count it again."""

    @property
    def has_producer(self) -> bool:
        """Whether a client that is not asked while it has a producer had one ever on this connection."""

    @property
    def bytes_to_client(self) -> int:
        """How many have gone."""

    @property
    def is_over(self) -> bool:
        """Whether the client can be told nothing any more."""


class RelaySessionControl(SessionControl, Protocol):
    """The same, as the answers to the broker's challenges need it."""

    def answer_broker(self, frame: bytes) -> None:
        """Put an answer in towards the broker, at the next boundary of what it is sent."""

    def note_exchange(self) -> None:
        """Write down where the exchange with the broker stands, since it was given up outside of the stream's turns."""


class BrokerSession(Protocol):
    """The proxy's own session with a relay's broker (proxy.forwarder.relay.expiring.broker_reauthentication).

    ``line``: set when the relay begins; ``discards``: whether the beginning of the challenge that is being taken out
    died with a predecessor.
    """

    line: RelaySessionControl
    discards: bool

    @property
    def phase(self) -> ExchangePhase:
        """Where the exchange stands: what a successor has to know."""

    @property
    def phase_when_answered(self) -> ExchangePhase:
        """Where it will stand as soon as the answer is on its way."""

    def recall(self, phase: ExchangePhase) -> None:
        """Go on where a predecessor's exchange stood."""

    def go_on(self) -> None:
        """Answer what a predecessor took out of the stream and did not answer."""

    def take(self, frame: bytes) -> None:
        """Take a challenge that was taken out of the broker's stream."""

    def answered(self) -> None:
        """Note that the answer is on its way to the broker."""


class ReauthenticationCoordinator(Protocol):
    """Who is told of what is found in followed relays."""

    def answered(self, followed: ExpiringSession, frame: bytes) -> None:
        """The client's answer; it is being judged from now on."""

    def use(self, followed: ExpiringSession) -> CommandDecision:
        """Decide what may become of a command, and count an observed end. The session must have a clock."""

    def still_served(self, followed: ExpiringSession) -> None:
        """End a session, or count its end, over which the broker still sends past its grace."""

    def spared(self, followed: ExpiringSession) -> None:
        """Count a client that is not asked any more, since it has opened its first producer."""

    def failed(self, followed: ExpiringSession, failure: Failure, *, over_limit: bool = False) -> None:
        """An answer that is none; ``over_limit``: nor can it be taken out of the stream, so the relay ends."""

    def lost(self, followed: ExpiringSession) -> None:
        """An answer to a predecessor."""

    def corrupt(self, followed: ExpiringSession, error: FrameWrong) -> None:
        """What the client or the broker has sent is no frame: the relay is closed."""

    def closing(self, followed: ExpiringSession) -> None:
        """Nothing more passes to the broker; the client is to be told when what is on its way to it has come."""

    def farewell(self, followed: ExpiringSession) -> bytes:
        """The frame that tells a client why its relay is being closed."""


def command_in(frame: bytes) -> BaseCommand:
    """Parse the command of a whole frame. Raises CommandCorrupt."""
    size = int.from_bytes(frame[SIZE_BYTES : 2 * SIZE_BYTES], "big")
    return parse_command(frame[2 * SIZE_BYTES : 2 * SIZE_BYTES + size])


def check_challenge_size(length: int) -> None:
    """Check how large a broker's challenge to the proxy is. Raises FrameWrong."""
    if length > BROKER_CHALLENGE_BYTES_MAX:
        raise FrameWrong(f"a challenge to the proxy of {length} bytes; the limit is {BROKER_CHALLENGE_BYTES_MAX}")
