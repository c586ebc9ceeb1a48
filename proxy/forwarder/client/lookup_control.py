"""How the lifetime of an authentication reaches a connection in lookup mode: as events that it acts upon."""

from collections.abc import Callable
from dataclasses import dataclass

from proto.session_clock import SessionClock
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.authentication import ClientIdentity, Reauthenticator


@dataclass(frozen=True, slots=True)
class ChallengeDue:
    """The client is to be asked for fresh credentials, with this frame. A command that waits for a verdict may pass."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class VerdictKnown:
    """The client's answer has been verified. ``identity``: who the client is now; None: who it was before."""

    identity: ClientIdentity | None


@dataclass(frozen=True, slots=True)
class SessionClosing:
    """No more commands of the client are taken; requests that are under way are answered."""


@dataclass(frozen=True, slots=True)
class LifetimeOver:
    """The session ends with this frame, once every request that is under way has been answered."""

    cause: DisconnectCause
    frame: bytes


LifetimeEvent = ChallengeDue | VerdictKnown | SessionClosing | LifetimeOver


class LookupControl:
    """The control of a session in lookup mode (proxy.forwarder.lifetime.session.SessionControl).

    ``has_ended``: set by the session's lifetime, from when on the client can be sent nothing.
    """

    has_opened_producer = False
    bytes_sent_to_client = 0
    """Nothing to wait for: the connection itself waits for the answers that are under way."""

    def __init__(
        self,
        on_event: Callable[[LifetimeEvent], None],
        expiring_session: ExpiringSession,
        relays: RelayManager,
        reauthenticator: Reauthenticator,
    ) -> None:
        self.has_ended = False
        self._on_event = on_event
        self._expiring_session = expiring_session
        self._relays = relays
        self._reauthenticator = reauthenticator

    def send_challenge(self, challenge: bytes) -> None:
        """Send a challenge. A connection in lookup mode is always at a frame boundary."""
        clock_of(self._expiring_session).on_challenge_sent(self._relays.now())
        self._on_event(ChallengeDue(challenge))

    def resume_after_verdict(self) -> None:
        """Report that there is a verdict, which the clock knows."""
        if not self._expiring_session.close_reason:
            self._on_event(VerdictKnown(self._own_identity()))

    def _own_identity(self) -> ClientIdentity | None:
        """Return the identity that was verified last, unless it is another client's.

        A failure that is only observed changes no identity.
        """
        identity = self._reauthenticator.last_identity
        if identity is None or clock_of(self._expiring_session).find_mismatch(identity.principal) is not None:
            return None
        return identity

    def record_observed_end(self) -> None:
        """Record nothing: the connection ends with its process, so no successor needs it."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Take no more commands; requests under way are answered before the client is sent the error."""
        session = self._expiring_session
        if not session.close_reason:
            session.close_reason, session.closing_error_frame = reason, error_frame
            self._on_event(SessionClosing())
            self._relays.reauthentication.on_closing(session)

    def close_with_error(self, error_frame: bytes) -> None:
        """End the session with an error."""
        expired = self._expiring_session.close_reason is CloseReason.EXPIRED
        cause = DisconnectCause.SESSION_EXPIRED if expired else DisconnectCause.REAUTHENTICATION_FAILED
        self._on_event(LifetimeOver(cause, error_frame))


def clock_of(session: ExpiringSession) -> SessionClock:
    """Return the clock of a session in lookup mode: only those that can expire are controlled here."""
    assert session.clock is not None
    return session.clock
