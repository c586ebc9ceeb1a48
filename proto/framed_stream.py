"""State machine of one framed direction of a client's connection (KIP-368): what becomes of each frame, and when.

A framed stream is followed from frame to frame, so that a session's end takes effect between two of them. The two
pumps of relays and lookup mode execute what the machine decides, and differ only in where the bytes are. ``RULES``
decides about what is seen, by how the session stands at that time; ``OWN_FRAMES`` about a frame of the proxy's own,
which is put in at a boundary.

* A client uses its session by any command except an answer to a challenge, PING and PONG. Past the end that closes it;
  while an answer is being verified, the command is held until the verdict.
* A broker may send for a grace period past the end: to a client that is served longer than that, it is use, too.
* A frame that began in time may end in time: what is left of it past the end and the grace does not pass.
* Where ends are only observed, what would close the session is counted, once in a lifetime, and passes.
* While a session closes, nothing new passes to the broker; what the broker sends is delivered.

A scanner finds the frames (proto.relay_frames) and stops at those of ``stop_types``, which are the ones that RULES does
not simply let pass. This module reads no clock: ``now_s`` is in seconds of the session clock's time base.
"""

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Protocol

from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_TYPES
from proto.session_clock import Phase, SessionClock

CHALLENGE_BYTES_MAX = 1 << 16
"""Limit of a broker's challenge that is removed from its stream; existing ones have some hundred bytes."""


class Seen(enum.Enum):
    """What comes next in a stream."""

    CLIENT_KEEP_ALIVE = "PING or PONG of the client"
    ANSWER = "answer of the client to a challenge"
    LARGE_ANSWER = "answer larger than its limit"
    COMMAND = "command of the client"
    COMMAND_REST = "rest of a command that has begun to pass"
    BROKER_KEEP_ALIVE = "PING or PONG of the broker"
    CHALLENGE = "challenge of the broker that is not for the client"
    LARGE_CHALLENGE = "such a challenge larger than its limit"
    DELIVERY = "frame of the broker"
    DELIVERY_REST = "rest of a frame of the broker that has begun to pass"


class Standing(enum.Enum):
    """How a session stands at a time."""

    LIVE = "not at its end"
    VERIFYING = "past its end, with an answer being verified"
    ENDED = "past its end"
    OVERDUE = "past its end and its grace"
    OBSERVED = "past its end, which is to be counted only"
    OBSERVED_OVERDUE = "past its end, which is to be counted only, and its grace"
    TOLERATED = "past its end, with nothing to count"
    CLOSING = "closing"
    CLOSING_OVERDUE = "closing, and past its end and its grace"


class Own(enum.Enum):
    """A frame of the proxy's own, to be put into a stream at a boundary."""

    CHALLENGE = "request for fresh credentials"
    ROUND = "challenge of a further round"
    ERROR = "error that ends the connection"
    BROKER_ANSWER = "answer to the broker's challenge"


class Action(enum.Enum):
    """What to do with what is seen, or with the proxy's own frame."""

    PASS = "pass"  # noqa: S105 -- an action, no secret
    """Let it pass."""
    REMOVE = "remove"
    """Take the frame out of the stream, when all of it is there, and handle it."""
    REFUSE = "refuse"
    """Start to close: the frame to be removed is too large."""
    HOLD = "hold"
    """Let nothing pass until ``awaits_verdict`` is cleared, then decide again."""
    COUNT = "count"
    """Count the end that is only observed, then let it pass."""
    CLOSE = "close"
    """Start to close; nothing passes."""
    CUT = "cut"
    """Start to close, if that has not begun; the rest of the frame never passes, and a client's stream ends here."""
    WAIT = "wait"
    """Let nothing pass until something changes."""
    INJECT = "inject"
    """Put the own frame in."""
    DROP = "drop"
    """Forget the own frame: it is obsolete."""
    END = "end"
    """End the direction."""


_COLUMNS = (
    Standing.LIVE,
    Standing.VERIFYING,
    Standing.ENDED,
    Standing.OVERDUE,
    Standing.OBSERVED,
    Standing.OBSERVED_OVERDUE,
    Standing.TOLERATED,
    Standing.CLOSING,
    Standing.CLOSING_OVERDUE,
)
_PASS, _COUNT, _CLOSE, _CUT, _WAIT = Action.PASS, Action.COUNT, Action.CLOSE, Action.CUT, Action.WAIT
_DELIVERED = (_PASS, _PASS, _PASS, _CLOSE, _PASS, _COUNT, _PASS, _PASS, _PASS)


def _row(*actions: Action) -> Mapping[Standing, Action]:
    return MappingProxyType(dict(zip(_COLUMNS, actions, strict=True)))


RULES: Mapping[Seen, Mapping[Standing, Action]] = MappingProxyType(
    {
        Seen.CLIENT_KEEP_ALIVE: _row(*[_PASS] * 7, _WAIT, _WAIT),
        Seen.ANSWER: _row(*[Action.REMOVE] * 7, _WAIT, _WAIT),
        Seen.LARGE_ANSWER: _row(*[Action.REFUSE] * 7, _WAIT, _WAIT),
        Seen.COMMAND: _row(_PASS, Action.HOLD, _CLOSE, _CLOSE, _COUNT, _COUNT, _PASS, _WAIT, _WAIT),
        # Until the end and the grace the broker gets the whole of a frame; half a one would be lost for all.
        Seen.COMMAND_REST: _row(_PASS, _PASS, _PASS, _CUT, _PASS, _COUNT, _PASS, _PASS, _CUT),
        Seen.BROKER_KEEP_ALIVE: _row(*[_PASS] * 9),
        Seen.CHALLENGE: _row(*[Action.REMOVE] * 9),
        Seen.LARGE_CHALLENGE: _row(*[Action.REFUSE] * 9),
        Seen.DELIVERY: _row(*_DELIVERED),
        Seen.DELIVERY_REST: _row(*(_CUT if action is _CLOSE else action for action in _DELIVERED)),
    }
)

OWN_FRAMES: Mapping[Own, tuple[frozenset[Phase], bool]] = MappingProxyType(
    {
        # An answer that came unasked overtakes a challenge, and a verdict the challenge of a further round.
        Own.CHALLENGE: (frozenset({Phase.QUIET}), True),
        Own.ROUND: (frozenset({Phase.VERIFYING}), True),
        Own.ERROR: (frozenset(Phase), True),
        Own.BROKER_ANSWER: (frozenset(Phase), False),
    }
)
"""In which phases each is put in, and whether also while the session closes; else it is dropped."""


class FramedSession(Protocol):
    """What a stream has to know of its session."""

    @property
    def clock(self) -> SessionClock | None:
        """The session's clock; None: it has no end."""

    @property
    def close_reason(self) -> int:
        """Not 0 while the session closes."""

    @property
    def observes_ends(self) -> bool:
        """Whether the session's end is only counted."""

    @property
    def grace_s(self) -> float:
        """How long past its end the broker may still send."""

    @property
    def answer_bytes_max(self) -> int:
        """Limit of an answer to a challenge."""


def standing_at(session: FramedSession, now_s: float) -> Standing:
    """Return how a session stands."""
    clock = session.clock
    closing = bool(session.close_reason)
    if clock is None or now_s < clock.expires_at_s:
        return Standing.CLOSING if closing else Standing.LIVE
    observes, overdue = session.observes_ends, now_s >= clock.expires_at_s + session.grace_s
    if closing:
        return Standing.CLOSING_OVERDUE if overdue and not observes else Standing.CLOSING
    verifying = clock.phase is Phase.VERIFYING
    if observes:
        if verifying or clock.end_observed:
            return Standing.TOLERATED
        return Standing.OBSERVED_OVERDUE if overdue else Standing.OBSERVED
    if verifying:
        return Standing.VERIFYING
    return Standing.OVERDUE if overdue else Standing.ENDED


class FramedStream:
    """The state of one framed direction: to the broker, or to the client.

    * ``usual_stop_types``: the commands to stop at before the session's end.
    * ``watches_producers``: the client's first producer is stopped at, and is then recorded with ``record_producer``.
    * ``own``: the kind and the bytes of the proxy's own frame for the next boundary; None: there is none.
    * ``awaits_verdict``: a command is held.
    * ``ends``: the direction ends at the next boundary, behind the own frame.
    """

    __slots__ = ("_next", "_rest", "_session", "awaits_verdict", "ends", "own", "to_broker", "usual_stop_types")

    def __init__(
        self,
        session: FramedSession,
        *,
        to_broker: bool,
        watches_producers: bool = False,
        removes_challenges: bool = False,
    ) -> None:
        self._session = session
        self.to_broker = to_broker
        self._next = Seen.COMMAND if to_broker else Seen.DELIVERY
        self._rest = Seen.COMMAND_REST if to_broker else Seen.DELIVERY_REST
        self.usual_stop_types: frozenset[int] = NO_TYPES
        if to_broker and session.clock is not None:
            producers = {BaseCommand.PRODUCER} if watches_producers else set()
            self.usual_stop_types = frozenset({BaseCommand.AUTH_RESPONSE} | producers)
        elif removes_challenges and not to_broker:
            self.usual_stop_types = frozenset({BaseCommand.AUTH_CHALLENGE})
        self.own: tuple[Own, bytes] | None = None
        self.awaits_verdict = self.ends = False

    @property
    def watches_producers(self) -> bool:
        """Whether the client's next producer is its first one, as far as that matters."""
        return BaseCommand.PRODUCER in self.usual_stop_types

    def record_producer(self) -> None:
        """Record that the client has opened a producer: no other one is stopped at."""
        self.usual_stop_types -= {BaseCommand.PRODUCER}

    # ---- decisions

    def decide_boundary(self, may_inject: bool = True) -> Action:  # noqa: FBT001, FBT002 -- the hot path
        """Decide what to do at a boundary before looking at what comes next; PASS: look.

        ``may_inject``: whether the own frame can be put in now; all else does not wait for it.
        """
        if not (self.own or self.ends or self.awaits_verdict or self._session.close_reason):
            return _PASS
        if self.own is not None and may_inject:
            kind, clock = self.own[0], self._session.clock
            phases, while_closing = OWN_FRAMES[kind]
            if self._session.close_reason and not while_closing:
                return Action.DROP
            return Action.INJECT if clock is None or clock.phase in phases else Action.DROP
        if self.ends:
            return Action.END
        return Action.WAIT if self.awaits_verdict or (self.to_broker and self._session.close_reason) else Action.PASS

    def stop_types(self, now_s: float) -> AbstractSet[int]:
        """Return the commands to stop at; ALL_TYPES from the session's end on, where it takes effect."""
        clock = self._session.clock
        if clock is None or now_s < clock.expires_at_s:
            return self.usual_stop_types
        passes = RULES[self._next][standing_at(self._session, now_s)] is Action.PASS
        return self.usual_stop_types if passes else ALL_TYPES

    def decide_frame(self, command_type: int, length: int, now_s: float) -> Action:
        """Decide about a frame of ``length`` bytes that was stopped at. Sets ``awaits_verdict`` where it is held."""
        seen = self._next
        if command_type in self.usual_stop_types:
            if command_type == BaseCommand.AUTH_RESPONSE:
                seen = Seen.LARGE_ANSWER if length > self._session.answer_bytes_max else Seen.ANSWER
            elif command_type == BaseCommand.AUTH_CHALLENGE:
                seen = Seen.LARGE_CHALLENGE if length > CHALLENGE_BYTES_MAX else Seen.CHALLENGE
        action = RULES[seen][standing_at(self._session, now_s)]
        self.awaits_verdict = action is Action.HOLD
        return action

    def decide_rest(self, now_s: float) -> Action:
        """Decide about the rest of a frame that has begun to pass."""
        clock = self._session.clock
        if clock is None or now_s < clock.expires_at_s:
            return _PASS
        return RULES[self._rest][standing_at(self._session, now_s)]
