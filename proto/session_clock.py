"""The session clock: how long a client's authentication lasts, and what that allows (KIP-368, PIP-55).

A session lives as long as the client's credential, at most as long as the configuration says. Some time before its end
(at a random point, so that clients that came together do not come back together) a client that can is asked for
fresh credentials; an answer that is accepted begins a new life. What has expired is not ended by the clock: only *use*
ends it, which is any command but an answer to a challenge; and a PING or PONG, which an idle client sends too. What
comes to the client is use, too, once a grace is over: whoever lets himself be sent messages need not say a word.

    QUIET ──challenged──▶ CHALLENGED ──answered──▶ JUDGING ──accepted──▶ QUIET, with a new end
      │                       ▲                     │  │ └──lost──▶ QUIET, with the old end
      └──answered, unasked────┼─────────────────────┘  │
                              └──challenged (a further round of the mechanism)

Any failure (denied, another principal, another method, an answer in the middle of judging, answers that follow each
other too closely) is final: the caller closes, nothing is tried again. That nobody could judge is no failure: the
client is asked again. Where ends are only observed the caller closes nothing, and says ``failed``.

Time comes in two forms. Credentials end by the wall clock, but that is read only once a life, when it begins: a step
of it neither ends the sessions that are there nor lengthens them. All else is *now*: seconds of any clock that only
goes forward, the same one in all calls. Nothing here reads a clock, or draws a random number.
"""

import enum
import math
from dataclasses import dataclass

from proto.errors import LocalProtocolError
from proto.rpc_pb2 import Principal

CHALLENGE_FRACTION_MIN = 0.85
CHALLENGE_FRACTION_MAX = 0.95
"""Between these parts of its lifetime a session is challenged."""

REAUTHENTICATION_INTERVAL_S_MIN = 1.0
"""Nobody is authenticated again faster than this: neither does the proxy ask, nor may a client come by itself."""

NEVER = math.inf


class Phase(enum.IntEnum):
    """Where a re-authentication stands. The numbers are what a relay's successor reads: add, never renumber."""

    QUIET = 0
    CHALLENGED = 1
    JUDGING = 2
    CHALLENGED_AGAIN = 3
    """In a further round: only whoever began these rounds can go on with them."""


class CommandDecision(enum.Enum):
    """What may become of a client's command."""

    PASS = "pass"  # noqa: S105 -- a decision, no secret
    HOLD = "hold"
    """The session has expired, and whether it goes on is being judged: the command waits."""
    CLOSE = "close"


class ReauthenticationFailure(enum.Enum):
    """Why a re-authentication failed; the values are stable names for logs."""

    DENIED = "denied"
    ANOTHER_PRINCIPAL = "another_principal"
    ANOTHER_METHOD = "another_method"
    ANSWERED_TWICE = "answered_twice"
    TOO_SOON = "too_soon"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class ClockSnapshot:
    """All that a clock knows beside its terms, in numbers that another process can go on with.

    In seconds of *now*; NEVER where there is no such time.
    """

    expires_at_s: float
    challenge_at_s: float
    last_attempt_at_s: float
    phase: Phase
    end_observed: bool = False


class SessionClock:
    """See the module. One for each session, from its first authentication on.

    ``observed``: whether it was counted in this life that enforcement would have closed this session, which was let go
    on since it is only observed.

    ``principal`` is who was authenticated, how and until when; ``lifetime_ms_max`` bounds each life (0: it does not);
    ``fraction``, at least 0 and below 1, is drawn at random by the caller.
    """

    __slots__ = (
        "_asked_at_s",
        "_challenge_at_s",
        "_expires_at_s",
        "_last_attempt_at_s",
        "_lifetime_ms_max",
        "end_observed",
        "phase",
        "principal",
    )

    def __init__(
        self, principal: Principal, *, lifetime_ms_max: int, now_s: float, now_unix_ms: float, fraction: float
    ) -> None:
        self.principal = principal
        self.phase = Phase.QUIET
        self._lifetime_ms_max = lifetime_ms_max
        self._asked_at_s = now_s
        self._start_lifetime(principal, now_s, now_unix_ms, fraction)

    def _start_lifetime(self, principal: Principal, now_s: float, now_unix_ms: float, fraction: float) -> None:
        lifetime_s = NEVER
        if principal.expires_at_unix_ms:
            lifetime_s = max(0.0, (principal.expires_at_unix_ms - now_unix_ms) / 1000)
        if self._lifetime_ms_max:
            lifetime_s = min(lifetime_s, self._lifetime_ms_max / 1000)
        part = CHALLENGE_FRACTION_MIN + (CHALLENGE_FRACTION_MAX - CHALLENGE_FRACTION_MIN) * fraction
        self._last_attempt_at_s = now_s
        self._expires_at_s = now_s + lifetime_s
        self._challenge_at_s = now_s + max(lifetime_s * part, REAUTHENTICATION_INTERVAL_S_MIN)
        self.end_observed = False

    # ---- for another process

    @classmethod
    def from_snapshot(
        cls, principal: Principal, *, lifetime_ms_max: int, snapshot: ClockSnapshot, now_s: float
    ) -> "SessionClock":
        """The clock of a session whose process died. What the client said to that one is gone: it is asked again, at
        once, since little of its life is left.
        """
        clock = cls(principal, lifetime_ms_max=lifetime_ms_max, now_s=now_s, now_unix_ms=0.0, fraction=0.0)
        clock._expires_at_s = snapshot.expires_at_s
        clock._challenge_at_s = snapshot.challenge_at_s
        clock._last_attempt_at_s = snapshot.last_attempt_at_s
        clock.end_observed = snapshot.end_observed
        clock.phase = snapshot.phase
        if snapshot.phase is Phase.JUDGING:
            clock.phase = Phase.QUIET
        return clock

    @property
    def snapshot(self) -> ClockSnapshot:
        """What ``recalled`` needs."""
        return ClockSnapshot(
            self._expires_at_s, self._challenge_at_s, self._last_attempt_at_s, self.phase, self.end_observed
        )

    # ---- questions

    @property
    def expires(self) -> bool:
        """Whether this session ever ends by itself."""
        return self._expires_at_s < NEVER

    @property
    def expires_at_s(self) -> float:
        """When it does; NEVER: never."""
        return self._expires_at_s

    @property
    def challenge_at_s(self) -> float:
        """When the client is to be asked for fresh credentials; NEVER where it is not, or has been already."""
        return self._challenge_at_s if self.phase is Phase.QUIET else NEVER

    def decide_command(self, now_s: float) -> CommandDecision:
        """What may become of a command of the client's. Answers to challenges, and KEEP_ALIVE_FRAMES
        (proto.command_heads), always pass.
        """
        if now_s < self._expires_at_s:
            return CommandDecision.PASS
        return CommandDecision.HOLD if self.phase is Phase.JUDGING else CommandDecision.CLOSE

    def seconds_since_challenge(self, now_s: float) -> float:
        """How long this re-authentication has taken so far, the client's own time included."""
        return now_s - self._asked_at_s

    # ---- events

    def on_challenge_sent(self, now_s: float) -> None:
        """The client was asked: for fresh credentials, or, while they are judged, for a further round."""
        if self.phase is Phase.QUIET:
            self._asked_at_s = now_s
            self.phase = Phase.CHALLENGED
        elif self.phase is Phase.JUDGING:
            self.phase = Phase.CHALLENGED_AGAIN
        else:
            raise LocalProtocolError("a second challenge while one is outstanding")

    def on_answer(self, now_s: float) -> ReauthenticationFailure | None:
        """The client has sent an answer: whether that alone is a failure. Else it is being judged from now on."""
        if self.phase is Phase.JUDGING:
            return ReauthenticationFailure.ANSWERED_TWICE
        if self.phase is Phase.QUIET:  # unasked, as KIP-368's clients do it
            if now_s < self._last_attempt_at_s + REAUTHENTICATION_INTERVAL_S_MIN:
                return ReauthenticationFailure.TOO_SOON
            self._asked_at_s = now_s
        self.phase = Phase.JUDGING
        return None

    def on_accepted(
        self, principal: Principal, *, now_s: float, now_unix_ms: float, fraction: float
    ) -> ReauthenticationFailure | None:
        """The answer is good for ``principal``. A new life begins, unless that is somebody else: which is a failure."""
        if self.phase is not Phase.JUDGING:
            raise LocalProtocolError(f"a verdict on no answer, while {self.phase.name}")
        failure = self.find_mismatch(principal)
        if failure is None:
            self.phase = Phase.QUIET
            self._start_lifetime(principal, now_s, now_unix_ms, fraction)
        return failure

    def find_mismatch(self, principal: Principal) -> ReauthenticationFailure | None:
        """Tell why ``principal`` cannot go on with this session; None: it is the same one, by the same method."""
        mine = self.principal
        if principal.method != mine.method:
            return ReauthenticationFailure.ANOTHER_METHOD
        if (principal.type, principal.name, principal.proxy) != (mine.type, mine.name, mine.proxy):
            return ReauthenticationFailure.ANOTHER_PRINCIPAL
        return None

    def on_observed_failure(self, now_s: float) -> None:
        """Let a session that is only observed go on after a failure: with its old end, and asked no more in this life.
        The client may still come by itself.
        """
        self.phase = Phase.QUIET
        self._last_attempt_at_s = now_s
        self._challenge_at_s = NEVER

    def on_answer_lost(self, now_s: float) -> None:
        """The answer is lost, or nobody could judge it: the client is asked again, though not at once."""
        self.phase = Phase.QUIET
        self._last_attempt_at_s = now_s
        self._challenge_at_s = max(self._challenge_at_s, now_s + REAUTHENTICATION_INTERVAL_S_MIN)
