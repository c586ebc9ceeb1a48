"""How long the authentication of one client lasts: in lookup mode, and what a relay needs to know of it.

Sessions can expire (KIP-368). A relay looks at the frames of those (proxy.forwarder.lifetime.terms). In
lookup mode all frames are read in any case, and the client is asked for fresh credentials on its own connection.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from proto import commands
from proto.command_heads import KEEP_ALIVE_FRAMES
from proto.connect_rules import connect_without_credentials, wants_broker
from proto.framed_stream import Action, FramedStream
from proto.frames import Frame
from proto.pulsar_pb2 import CommandConnect, CommandConnected
from proto.relay_frames import ALL_TYPES, frame_bytes_max
from proto.rpc_pb2 import OriginalData, Principal, StoredClient, StoredRelay
from proto.session_clock import SessionClock
from proxy import SERVER_VERSION
from proxy.config.session_lifetime import max_reauth_ms
from proxy.forwarder.client.handshake import bind_of
from proxy.forwarder.client.lookup_control import LifetimeEvent, LookupControl, clock_of
from proxy.forwarder.lifetime.metrics import NoReauthReason
from proxy.forwarder.lifetime.session import BROKER_ANSWER_BYTES_MAX, ExpiringSession
from proxy.forwarder.lifetime.terms import (
    ChallengePermission,
    Reauthenticate,
    ReauthenticatorFactory,
    SessionTerms,
    challenge_permission,
    passes_challenges_on,
)
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.authentication import ClientEndpoint, ClientIdentity, Reauthenticator
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.tasks import ignore
from proxy.runtime.shared.relay_table import TO_BROKER

LEFT_TO_BROKERS = frozenset({"token"})
"""The methods of which brokers end sessions by themselves, where they have the client's own credentials."""


class SessionLifetime:
    """The lifetime of one client's authentication.

    ``on_authenticated`` comes first, then ``start_in_lookup_mode`` or ``relay_session``. In lookup mode ``on_event`` is
    called when something is due. ``expiring_session``: the session, in lookup mode, where it can expire; else None.
    """

    def __init__(
        self,
        client: ClientEndpoint,
        workers: WorkerClients,
        relays: RelayManager,
        metrics: ForwarderMetrics,
        on_event: Callable[[LifetimeEvent], None],
    ) -> None:
        self._client = client
        self._workers = workers
        self._relays = relays
        self._metrics = metrics
        self._on_event = on_event
        self._session: SessionTerms | None = None
        self._passes_challenges_on = False
        self._began_with: tuple[CommandConnect, SessionClock, int]
        self._reauthenticator: Reauthenticator | None = None
        self._control: LookupControl | None = None
        self._can_reauthenticate = False
        self._stream: FramedStream | None = None
        self.expiring_session: ExpiringSession | None = None

    def on_authenticated(self, connect: CommandConnect, principal: Principal) -> None:
        """Start the clock of a client that was authenticated, or that needs no authentication here."""
        config = self._workers.config
        self._can_reauthenticate = connect.feature_flags.supports_auth_refresh
        if config.authentication.enabled and not self._can_reauthenticate:
            self._metrics.reauthentication.count_never_asked(principal.method, NoReauthReason.CLIENT_CANNOT)
        lifetime_ms_max = 0  # no client is asked for credentials where there are none
        if config.authentication.enabled:
            lifetime_ms_max = max_reauth_ms(config, self._client.listener, principal.method)
        reauthentication = self._relays.reauthentication
        clock = SessionClock(
            principal,
            lifetime_ms_max=lifetime_ms_max,
            now_s=self._relays.now(),
            now_unix_ms=reauthentication.unix_ms(),
            fraction=reauthentication.fraction(),
        )
        self._passes_challenges_on = bool(principal.proxy) and passes_challenges_on(connect)
        self._began_with = connect, clock, lifetime_ms_max
        if clock.expires or config.metrics.count_messages or config.limits.max_connection_age_ms:
            self._session = self._new_session()

    def _new_session(self) -> SessionTerms:
        connect, clock, lifetime_ms_max = self._began_with
        config = self._workers.config
        if wants_broker(connect):
            policy = config.session.relay_reauthentication
            permission = challenge_permission(connect, policy, from_proxy=bool(clock.principal.proxy))
        else:
            permission = ChallengePermission(connect.feature_flags.supports_auth_refresh, allowed_with_producer=True)
        self._reauthenticator = Reauthenticator(
            connect, partial(self._workers.new_authentication_exchange, self._client)
        )
        return SessionTerms(
            principal=clock.principal,
            clock=clock,
            reauthenticate=self._reauthenticator.reauthenticate,
            lifetime_ms_max=lifetime_ms_max,
            challenge=_challenge(connect) if permission.allowed else b"",
            exempts_producers=not permission.allowed_with_producer,
            frame_bytes_max=0,  # the broker's CONNECTED says it later
            answer_bytes_max=config.limits.max_command_bytes,
            counts_messages=config.metrics.count_messages,
            failure_delay_ms=config.authentication.failure_delay_ms,
            grace_ms=config.session.grace_ms,
            listener=bind_of(config, self._client.listener),
            context=_context(self._client, connect),
        )

    def abandon_reauthentication(self) -> None:
        """Let the auth worker forget rounds of a session that is over.

        Those of a relay are not forgotten: its client's answers are verified by what ``relay_session`` returned.
        """
        if self.expiring_session is not None and self._reauthenticator is not None:
            self._reauthenticator.abandon_exchange()

    def stop_events(self) -> None:
        """Report nothing more to be sent to the client: the connection is over, or its relay starts."""
        self._on_event = ignore  # it leads back to the connection
        if self._control is not None:
            self._control.has_ended = True

    # ---- as a relay

    def relay_session(
        self,
        broker: CommandConnected,
        identity: ClientIdentity,
        *,
        answers_broker: str = "",
        original_data: OriginalData = OriginalData.ORIGINAL_DATA_UNKNOWN,
    ) -> SessionTerms | None:
        """Return what a relay has to know of the session; None: nothing, so that it looks at no frames.

        ``answers_broker``: the host of a broker whose challenges the proxy answers itself; empty: it answers none.
        ``original_data``: whether the broker checks the client's own credentials, where they are forwarded.
        """
        session = self._session
        if answers_broker:
            session = replace(session or self._new_session(), broker_host=answers_broker)
        if session is None:
            return None
        if identity.original is not None:
            session = self._with_forwarded_credentials(session, original_data)
        if session.expires:
            self._count_if_disabled(session.principal.method)
        return replace(session, frame_bytes_max=frame_bytes_max(broker))

    def _with_forwarded_credentials(self, session: SessionTerms, original_data: OriginalData) -> SessionTerms:
        """Return the terms where the broker has the client's credentials, too: who asks for new ones, and who ends it.

        A broker that checks tokens does both, so that the proxy need not, unless a maximum holds that the broker does
        not know; of other methods it is not known. Behind a proxy that passes challenges on to its client, no answer
        could be told from that client's, so that nothing is applied here.
        """
        is_ignored = original_data == OriginalData.ORIGINAL_DATA_IGNORED
        if not self._passes_challenges_on and (is_ignored or session.principal.proxy or not session.expires):
            return session
        is_checked = original_data == OriginalData.ORIGINAL_DATA_CHECKED
        is_brokers = is_checked and session.principal.method in LEFT_TO_BROKERS and not session.lifetime_ms_max
        if self._passes_challenges_on or is_brokers:
            return replace(session, clock=None, challenge=b"")
        answer_bytes_max = min(session.answer_bytes_max, BROKER_ANSWER_BYTES_MAX)
        return replace(session, passes_answers=True, answer_bytes_max=answer_bytes_max)

    def _count_if_disabled(self, method: str) -> None:
        """Count a client that could be asked, and is not: all others that are never asked are counted elsewhere."""
        if self._can_reauthenticate and self._workers.config.session.relay_reauthentication == "never":
            self._metrics.reauthentication.count_never_asked(method, NoReauthReason.DISABLED)

    # ---- in lookup mode

    def start_in_lookup_mode(self, stored_relay: Callable[[], StoredRelay]) -> None:
        """Have a client in lookup mode asked for fresh credentials in time, if its session can expire.

        ``stored_relay`` returns the record of the connection, which is made for such sessions only.
        """
        session, reauthenticator = self._session, self._reauthenticator
        if session is None or reauthenticator is None or not session.expires:
            return
        stored = stored_relay()
        stored.session.CopyFrom(session.to_stored_session())
        expiring = ExpiringSession(stored, session.clock, session.reauthenticate, self._relays.enforcement)
        self._control = LookupControl(self._on_event, expiring, self._relays, reauthenticator)
        expiring.control = self._control
        self._stream = expiring.new_stream(TO_BROKER)
        self.expiring_session = expiring
        self._relays.reauthentication.add_session(expiring)

    @property
    def has_expired(self) -> bool:
        """Return whether ``decide_command`` has to be asked for each command now."""
        return self._stream is not None and self._stream.stop_types(self._relays.now()) is ALL_TYPES

    def decide_command(self, frame: Frame) -> Action:
        """Decide what becomes of a command, now that the session has expired. Start to close it where that is due.

        Raises CommandCorrupt.
        """
        session, stream = self.expiring_session, self._stream
        if session is None or stream is None or frame.encode() in KEEP_ALIVE_FRAMES:
            return Action.PASS
        action = stream.decide_frame(commands.parse_command(frame.command).type, 0, self._relays.now())
        self._relays.reauthentication.on_action(session, stream, action)
        return action

    def on_auth_response(self, frame: Frame) -> bool:
        """Have an AUTH_RESPONSE verified, whether or not the client was challenged.

        Return False if this session never expires, so that there is nothing to verify.
        """
        session = self.expiring_session
        if session is None:
            return False
        failure = clock_of(session).on_answer(self._relays.now())
        if failure is None:
            self._relays.reauthentication.on_answer(session, frame.encode())
        else:
            self._relays.reauthentication.on_failure(session, failure)
        return True


def _challenge(connect: CommandConnect) -> bytes:
    version = min(connect.protocol_version, commands.PROTOCOL_VERSION)
    return commands.auth_challenge(SERVER_VERSION, version, commands.auth_method_of(connect), commands.AUTH_REFRESH)


def _context(client: ClientEndpoint, connect: CommandConnect) -> bytes:
    stored = StoredClient(
        connect=connect_without_credentials(connect).SerializeToString(), certificate=client.certificate
    )
    return stored.SerializeToString()


def reauthenticator_factory(current_workers: Callable[[], WorkerClients]) -> ReauthenticatorFactory:
    """Return the factory of reauthenticators for clients of a predecessor's relays.

    Answers are verified by the settings that are in force then: those of the workers that ``current_workers`` returns.
    """

    def reauthenticator_of(relay: StoredRelay) -> Reauthenticate:
        stored = StoredClient.FromString(relay.session.context)
        client = ClientEndpoint(relay.client_address, 0.0, stored.certificate)
        connect = CommandConnect.FromString(stored.connect)
        return Reauthenticator(
            connect, lambda fresh: current_workers().new_authentication_exchange(client, fresh)
        ).reauthenticate

    return reauthenticator_of
