"""State machine of a session's expiry and re-authentication (KIP-368, PIP-55).

A session lasts as long as the client's credential, and at most as long as the configuration allows. Before its end the
proxy challenges a client that supports it for fresh credentials, at a random point, so that clients that connected
together do not return together. An accepted answer starts a new lifetime.

Expiry alone does not end a session; *use* after the end does. Use is any command of the client except an answer to a
challenge, PING and PONG, which an idle client sends too. After a grace period, traffic to the client also counts as
use: a consumer receives messages without sending a command.

    QUIET ──on_challenge_sent──▶ CHALLENGED ──on_answer──▶ VERIFYING ──on_accepted──▶ QUIET, with a new end
      │                              ▲                      │  │ └──on_answer_lost──▶ QUIET, with the old end
      └──on_answer, unsolicited──────┼──────────────────────┘  │
                                     └──on_challenge_sent (a further round of the mechanism)

Every failure is final: a denial, another principal, another method, an answer while one is being verified, answers that
follow each other too closely. The caller then closes the connection without a retry. An answer that no auth worker
could verify is not a failure: the client is challenged again. Where the configuration only observes ends, the caller
closes nothing and reports ``on_observed_failure``.

There are two time bases. Credentials end by the wall clock, which is read once per lifetime, at its start: a step of
the wall clock neither ends nor lengthens existing sessions. Everything else is in *now*: seconds of a monotonic clock,
the same one in all calls. This module reads no clock and draws no random number.
"""

import enum
import math
from dataclasses import dataclass

from proto.errors import LocalProtocolError
from proto.rpc_pb2 import Principal

CHALLENGE_FRACTION_MIN = 0.85
CHALLENGE_FRACTION_MAX = 0.95
"""Bounds of the part of its lifetime after which a session is challenged."""

REAUTHENTICATION_INTERVAL_S_MIN = 1.0
"""Least time between two authentications of a client, whether the proxy or the client starts the second one."""

NEVER = math.inf


class Phase(enum.IntEnum):
    """Phase of a session's re-authentication. A forwarder's successor reads the numbers: add, never renumber."""

    QUIET = 0
    CHALLENGED = 1
    VERIFYING = 2
    CHALLENGED_AGAIN = 3
    """In a further round, which only the process that started the exchange can continue."""


class ReauthenticationFailure(enum.Enum):
    """Reason why a re-authentication failed. The values are stable names for logs."""

    DENIED = "denied"
    ANOTHER_PRINCIPAL = "another_principal"
    ANOTHER_METHOD = "another_method"
    ANSWERED_TWICE = "answered_twice"
    TOO_SOON = "too_soon"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class ClockSnapshot:
    """Variable state of a SessionClock, in numbers with which another process can continue.

    Times are in seconds of *now*; NEVER where there is no such time.
    """

    expires_at_s: float
    challenge_at_s: float
    last_attempt_at_s: float
    phase: Phase
    end_observed: bool = False


class SessionClock:
    """Expiry and re-authentication state of one session, from its first authentication on.

    ``principal`` states which client was authenticated, by which method and until when. ``lifetime_ms_max`` bounds each
    lifetime; 0 means no bound. ``fraction``, at least 0 and below 1, is drawn at random by the caller.

    ``expires_at_s``: the time of the session's end; NEVER if it has none. It is read for each portion: no property.

    ``end_observed``: enforcement would have closed the session in this lifetime, this was counted, and the session
    continues because the configuration only observes ends.
    """

    __slots__ = (
        "_asked_at_s",
        "_challenge_at_s",
        "_last_attempt_at_s",
        "_lifetime_ms_max",
        "end_observed",
        "expires_at_s",
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
        self.expires_at_s = now_s + lifetime_s
        self._challenge_at_s = now_s + max(lifetime_s * part, REAUTHENTICATION_INTERVAL_S_MIN)
        self.end_observed = False

    # ---- hand-over to another process

    @classmethod
    def from_snapshot(
        cls, principal: Principal, *, lifetime_ms_max: int, snapshot: ClockSnapshot, now_s: float
    ) -> "SessionClock":
        """Restore the clock of a session whose process ended.

        An answer that the process was verifying is lost. The client is challenged again at once, since little of the
        session's lifetime is left.
        """
        clock = cls(principal, lifetime_ms_max=lifetime_ms_max, now_s=now_s, now_unix_ms=0.0, fraction=0.0)
        clock.expires_at_s = snapshot.expires_at_s
        clock._challenge_at_s = snapshot.challenge_at_s
        clock._last_attempt_at_s = snapshot.last_attempt_at_s
        clock.end_observed = snapshot.end_observed
        clock.phase = snapshot.phase
        if snapshot.phase is Phase.VERIFYING:
            clock.phase = Phase.QUIET
        return clock

    @property
    def snapshot(self) -> ClockSnapshot:
        """State from which ``from_snapshot`` restores the clock."""
        return ClockSnapshot(
            self.expires_at_s, self._challenge_at_s, self._last_attempt_at_s, self.phase, self.end_observed
        )

    # ---- queries

    @property
    def expires(self) -> bool:
        """Whether this session has an end."""
        return self.expires_at_s < NEVER

    @property
    def challenge_at_s(self) -> float:
        """Time at which to challenge the client; NEVER if it is not to be challenged or has been already."""
        return self._challenge_at_s if self.phase is Phase.QUIET else NEVER

    def seconds_since_challenge(self, now_s: float) -> float:
        """Return the seconds since this re-authentication started, the client's own time included."""
        return now_s - self._asked_at_s

    # ---- events

    def on_challenge_sent(self, now_s: float) -> None:
        """Record that a challenge was sent: for fresh credentials, or for a further round while an answer is verified.

        Raises LocalProtocolError while another challenge is outstanding.
        """
        if self.phase is Phase.QUIET:
            self._asked_at_s = now_s
            self.phase = Phase.CHALLENGED
        elif self.phase is Phase.VERIFYING:
            self.phase = Phase.CHALLENGED_AGAIN
        else:
            raise LocalProtocolError("a second challenge while one is outstanding")

    def hasten_challenge(self, now_s: float) -> None:
        """Schedule the challenge for now, or for the first moment when the client may be asked again.

        A client that is not asked again in this lifetime, after a failure that was only observed, stays so.
        """
        if self.end_observed and self._challenge_at_s == NEVER:  # NEVER alone: nothing expires
            return
        self._challenge_at_s = min(
            self._challenge_at_s, max(now_s, self._last_attempt_at_s + REAUTHENTICATION_INTERVAL_S_MIN)
        )

    def on_answer(self, now_s: float) -> ReauthenticationFailure | None:
        """Record an answer of the client, and return the failure if its arrival alone is one.

        None means that the answer is to be verified; the phase is VERIFYING from now on.
        """
        if self.phase is Phase.VERIFYING:
            return ReauthenticationFailure.ANSWERED_TWICE
        if self.phase is Phase.QUIET:  # unsolicited, as KIP-368's clients do it
            if now_s < self._last_attempt_at_s + REAUTHENTICATION_INTERVAL_S_MIN:
                return ReauthenticationFailure.TOO_SOON
            self._asked_at_s = now_s
        self.phase = Phase.VERIFYING
        return None

    def on_accepted(
        self, principal: Principal, *, now_s: float, now_unix_ms: float, fraction: float
    ) -> ReauthenticationFailure | None:
        """Start a new lifetime with the principal of an accepted answer; return the failure if it is another principal.

        Raises LocalProtocolError where no answer is being verified.
        """
        if self.phase is not Phase.VERIFYING:
            raise LocalProtocolError(f"a verdict on no answer, while {self.phase.name}")
        failure = self.find_mismatch(principal)
        if failure is None:
            self.phase = Phase.QUIET
            self._start_lifetime(principal, now_s, now_unix_ms, fraction)
        return failure

    def find_mismatch(self, principal: Principal) -> ReauthenticationFailure | None:
        """Return why ``principal`` cannot continue this session; None if it is the same one, by the same method."""
        mine = self.principal
        if principal.method != mine.method:
            return ReauthenticationFailure.ANOTHER_METHOD
        if (principal.type, principal.name, principal.proxy) != (mine.type, mine.name, mine.proxy):
            return ReauthenticationFailure.ANOTHER_PRINCIPAL
        return None

    def on_observed_failure(self, now_s: float) -> None:
        """Let a session whose end is only observed continue after a failure.

        It keeps its end and is not challenged again in this lifetime. The client may still authenticate unsolicited.
        """
        self.phase = Phase.QUIET
        self._last_attempt_at_s = now_s
        self._challenge_at_s = NEVER

    def on_answer_lost(self, now_s: float) -> None:
        """Schedule another challenge after an answer that is lost or that no auth worker could verify."""
        self.phase = Phase.QUIET
        self._last_attempt_at_s = now_s
        self._challenge_at_s = max(self._challenge_at_s, now_s + REAUTHENTICATION_INTERVAL_S_MIN)
