"""The factory of relays' expiring sessions: for relays that start, and for those of a predecessor."""

from proto.rpc_pb2 import StoredRelay
from proto.session_clock import SessionClock
from proxy.forwarder.relay.expiring.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.relay.expiring.forwarded_answers import ForwardedAnswers, RequestChallenge
from proxy.forwarder.relay.expiring.relay_session import Reauthenticate, RelaySession
from proxy.forwarder.relay.expiring.session import ExpiringSession
from proxy.forwarder.relay.options import SessionOptions


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

    def create_session(self, record: StoredRelay, session: RelaySession | None) -> ExpiringSession | None:
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
