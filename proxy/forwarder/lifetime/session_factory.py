"""The factory of relays' expiring sessions: for relays that start, and for those of a predecessor."""

from dataclasses import dataclass, field

from proto.rpc_pb2 import StoredRelay
from proto.session_clock import SessionClock
from proxy.forwarder.lifetime.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.lifetime.enforcement import Enforcement
from proxy.forwarder.lifetime.forwarded_answers import ForwardedAnswers, RequestChallenge
from proxy.forwarder.lifetime.metrics import ReauthenticationMetrics
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.lifetime.terms import (
    Reauthenticate,
    ReauthenticatorFactory,
    SessionTerms,
    reauthentication_unavailable,
)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How the sessions of a forwarder's relays are authenticated again.

    ``reauthenticator_factory`` makes what verifies the answers of clients of a predecessor's relays; ``enforcement``
    tells whether sessions' ends close connections, in lookup mode, too; ``broker_factory`` answers brokers that
    challenge the proxy itself; None: with no credentials.
    """

    reauthenticator_factory: ReauthenticatorFactory = reauthentication_unavailable
    enforcement: Enforcement = field(default_factory=Enforcement)
    broker_factory: BrokerReauthenticationFactory | None = None
    metrics: ReauthenticationMetrics = field(default_factory=lambda: ReauthenticationMetrics(None))


class SessionFactory:
    """Makes the sessions of one forwarder's relays. ``request_challenge``: has a session's client challenged."""

    def __init__(
        self,
        options: SessionOptions,
        broker_factory: BrokerReauthenticationFactory,
        request_challenge: RequestChallenge,
    ) -> None:
        self._options = options
        self._broker_factory = broker_factory
        self._request_challenge = request_challenge

    def create_session(self, record: StoredRelay, session: SessionTerms | None) -> ExpiringSession | None:
        """Return the session of a relay that is about to start, and write it to the record; None for a blind relay."""
        if session is None or not (session.inspects_frames or record.leave_at_ms):
            return None
        record.session.CopyFrom(session.to_stored_session())
        return self._session(record, session.clock if session.expires else None, session.reauthenticate)

    def restore_session(self, record: StoredRelay, clock: SessionClock | None) -> ExpiringSession:
        """Return the session of a predecessor's relay."""
        return self._session(record, clock, self._options.reauthenticator_factory(record))

    def _session(
        self, record: StoredRelay, clock: SessionClock | None, reauthenticate: Reauthenticate
    ) -> ExpiringSession:
        session = ExpiringSession(record, clock, reauthenticate, self._options.enforcement)
        if session.terms.passes_answers:
            session.broker_challenges = ForwardedAnswers(session, self._request_challenge)
        else:
            self._broker_factory.attach_to(session)
        return session
