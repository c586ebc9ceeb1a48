"""The factory of relays' expiring sessions: for relays that start, and for those of a predecessor."""

from proto.rpc_pb2 import StoredRelay
from proto.session_clock import SessionClock
from proxy.forwarder.relay.expiring.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.relay.expiring.relay_session import RelaySession
from proxy.forwarder.relay.expiring.session import ExpiringSession
from proxy.forwarder.relay.options import SessionOptions


class SessionFactory:
    """Makes the sessions of one forwarder's relays."""

    def __init__(self, options: SessionOptions, broker_factory: BrokerReauthenticationFactory) -> None:
        self._options = options
        self._broker_factory = broker_factory

    def create_session(self, record: StoredRelay, session: RelaySession | None) -> ExpiringSession | None:
        """Return the session of a relay that is about to start, and write it to the record; None for a blind relay."""
        if session is None or not (session.inspects_frames or record.leave_at_ms):
            return None
        record.session.CopyFrom(session.to_stored_session())
        clock = session.clock if session.expires else None
        expiring = ExpiringSession(record, clock, session.reauthenticate, self._options.enforcement)
        self._broker_factory.attach_to(expiring)
        return expiring

    def restore_session(self, record: StoredRelay, clock: SessionClock | None) -> ExpiringSession:
        """Return the session of a predecessor's relay."""
        reauthenticate = self._options.reauthenticator_factory(record)
        expiring = ExpiringSession(record, clock, reauthenticate, self._options.enforcement)
        self._broker_factory.attach_to(expiring)
        return expiring
