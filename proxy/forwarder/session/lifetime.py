"""A client's session from its first authentication on: what a relay is told of it, and how it goes on in lookup mode.

Sessions can expire (KIP-368). Relays follow the frames of those (proxy.forwarder.relay.expiring.relay_session). In
lookup mode all
frames are read anyway: there the connection itself is the line on which a client is asked for fresh credentials.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from proto import commands
from proto.command_heads import KEEP_ALIVE_FRAMES
from proto.connect_rules import connect_without_credentials, wants_broker
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected
from proto.relay_frames import frame_bytes_max
from proto.rpc_pb2 import Principal, StoredClient, StoredRelay
from proto.session_clock import CommandDecision, SessionClock
from proxy.config.session_lifetime import max_reauth_ms
from proxy.config.types import Config
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.reauthentication import NoReauthReason
from proxy.forwarder.relay.expiring.relay_session import (
    ChallengePermission,
    Reauthenticate,
    ReauthenticatorFactory,
    RelaySession,
    challenge_permission,
)
from proxy.forwarder.relay.expiring.session import ExpiringSession
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.authentication import SERVER_VERSION, ClientEndpoint, ClientIdentity, Reauthenticator
from proxy.forwarder.workers.clients import WorkerClients

LISTENER_BIND_MAX = 300
"""Characters of a listener's `bind` that fit a relay's record: a host name has 253 at most, and there is a port."""


class SessionLifetime:
    """One client's. ``begin`` when it has authenticated itself; then either ``follow``, or ``for_relay``."""

    def __init__(
        self, backends: WorkerClients, client: ClientEndpoint, relays: RelayManager, metrics: ForwarderMetrics
    ) -> None:
        self._workers = backends
        self._client = client
        self._relays = relays
        self._metrics = metrics
        self._session: RelaySession | None = None
        self._make_session: Callable[[], RelaySession]
        self._reauthenticator: Reauthenticator | None = None
        self.expiring_session: ExpiringSession | None = None
        """In lookup mode, where the session can expire."""

    def on_authenticated(self, connect: CommandConnect, principal: Principal) -> None:
        """The client was authenticated, or nobody is here."""
        config = self._workers.config
        if config.authentication.enabled and not connect.feature_flags.supports_auth_refresh:
            self._metrics.reauthentication.count_never_asked(principal.method, NoReauthReason.CLIENT_CANNOT)
        lifetime_ms_max = 0  # nobody is asked for credentials where there are none
        if config.authentication.enabled:
            lifetime_ms_max = max_reauth_ms(config, self._client.listener, principal.method)
        judge = self._relays.reauthentication
        clock = SessionClock(
            principal,
            lifetime_ms_max=lifetime_ms_max,
            now_s=self._relays.now(),
            now_unix_ms=judge.unix_ms(),
            fraction=judge.fraction(),
        )
        self._make_session = partial(self._new_session, connect, clock, lifetime_ms_max)
        if clock.expires or config.metrics.count_messages or config.limits.max_connection_age_ms:
            self._session = self._make_session()

    def _new_session(self, connect: CommandConnect, clock: SessionClock, lifetime_ms_max: int) -> RelaySession:
        config = self._workers.config
        if wants_broker(connect):
            policy = config.session.relay_reauthentication
            asked = challenge_permission(connect, policy, from_proxy=bool(clock.principal.proxy))
        else:
            asked = ChallengePermission(connect.feature_flags.supports_auth_refresh, allowed_with_producer=True)
        self._reauthenticator = Reauthenticator(
            connect, partial(self._workers.new_authentication_exchange, self._client)
        )
        return RelaySession(
            principal=clock.principal,
            clock=clock,
            reauthenticate=self._reauthenticator.reauthenticate,
            lifetime_ms_max=lifetime_ms_max,
            challenge=_challenge(connect) if asked.allowed else b"",
            exempts_producers=not asked.allowed_with_producer,
            frame_bytes_max=0,  # as the broker will say
            answer_bytes_max=config.limits.max_command_bytes,
            counts_messages=config.metrics.count_messages,
            failure_delay_ms=config.authentication.failure_delay_ms,
            grace_ms=config.session.grace_ms,
            listener=_bind(config, self._client.listener),
            context=_context(self._client, connect),
        )

    def abandon_reauthentication(self) -> None:
        """The connection has ended, or is a relay, whose answers are judged by what ``for_relay`` gave it."""
        if self.expiring_session is not None and self._reauthenticator is not None:
            self._reauthenticator.abandon_exchange()

    # ---- as a relay

    def relay_session(
        self, broker: CommandConnected, identity: ClientIdentity, *, answers_broker: str = ""
    ) -> RelaySession | None:
        """What a relay has to know; None: nothing. ``answers_broker``: the host of a broker whose challenges the proxy
        answers; empty: it does not.
        """
        session = self._session
        if answers_broker:
            session = replace(session or self._make_session(), broker_host=answers_broker)
        if session is None:
            return None
        if identity.original is not None:  # the client's credentials are forwarded: the broker asks, and ends it
            session = replace(session, clock=None, challenge=b"")
        return replace(session, frame_bytes_max=frame_bytes_max(broker))

    # ---- in lookup mode

    def start_in_lookup_mode(self, client: "LookupClient", tell_about: Callable[[], StoredRelay]) -> None:
        """Have a client in lookup mode asked in time."""
        session, reauthenticator = self._session, self._reauthenticator
        if session is None or reauthenticator is None or not session.expires:
            return
        about = tell_about()
        about.session.CopyFrom(session.to_stored_session())
        self.expiring_session = ExpiringSession(about, session.clock, session.reauthenticate, self._relays.enforcement)
        self.expiring_session.control = LookupSessionControl(
            client, self.expiring_session, self._relays, reauthenticator
        )
        self._relays.reauthentication.add_session(self.expiring_session)

    @property
    def has_expired(self) -> bool:
        """Whether it has: then ``use`` says what may still be done. Not where its end was observed, and counted."""
        followed = self.expiring_session
        if followed is None or self._relays.now() < _clock(followed).expires_at_s:
            return False
        return not (_clock(followed).end_observed and followed.observes_ends)

    def decide_command(self, frame: Frame) -> CommandDecision:
        """What may become of a command, now that the session has expired. Begins to close it, where that is due.
        Raises CommandCorrupt.
        """
        followed = self.expiring_session
        if (
            followed is None
            or frame.encode() in KEEP_ALIVE_FRAMES
            or commands.parse_command(frame.command).type == BaseCommand.AUTH_RESPONSE
        ):
            return CommandDecision.PASS
        use = self._relays.reauthentication.decide_command(followed)
        if use is CommandDecision.CLOSE:
            followed.control.start_closing(CloseReason.EXPIRED)
        return use

    def on_auth_response(self, frame: Frame) -> bool:
        """The client has sent an AUTH_RESPONSE, asked for or not. False: this session never expires, so it is none."""
        followed = self.expiring_session
        if followed is None:
            return False
        failure = _clock(followed).on_answer(self._relays.now())
        if failure is None:
            self._relays.reauthentication.on_answer(followed, frame.encode())
        else:
            self._relays.reauthentication.on_failure(followed, failure)
        return True


def _clock(followed: ExpiringSession) -> SessionClock:
    assert followed.clock is not None  # only sessions that can expire are followed here
    return followed.clock


def _challenge(connect: CommandConnect) -> bytes:
    version = min(connect.protocol_version, commands.PROTOCOL_VERSION)
    return commands.auth_challenge(SERVER_VERSION, version, commands.auth_method_of(connect), commands.AUTH_REFRESH)


def _bind(config: Config, listener: int) -> str:
    """Return where a listener is bound, as it is kept in each relay's record; empty where that is no address."""
    bind = config.listener[listener].bind
    return bind if len(bind) <= LISTENER_BIND_MAX else ""


def _context(client: ClientEndpoint, connect: CommandConnect) -> bytes:
    stored = StoredClient(
        connect=connect_without_credentials(connect).SerializeToString(), certificate=client.certificate
    )
    return stored.SerializeToString()


def reauthenticator_factory(backends: Callable[[], WorkerClients]) -> ReauthenticatorFactory:
    """What judges the answers of a predecessor's clients, by the settings that are in force then."""

    def recalled(relay: StoredRelay) -> Reauthenticate:
        stored = StoredClient.FromString(relay.session.context)
        client = ClientEndpoint(relay.client_address, 0.0, stored.certificate)
        connect = CommandConnect.FromString(stored.connect)
        return Reauthenticator(
            connect, lambda fresh: backends().new_authentication_exchange(client, fresh)
        ).reauthenticate

    return recalled


class LookupClient(Protocol):
    """A session in lookup mode, as its line needs it."""

    def ask_again(self, challenge: bytes) -> None:
        """Send a challenge; a command that waits for a verdict waits no longer."""

    def renewed(self, identity: ClientIdentity | None) -> None:
        """There is a verdict: who the client is now, if that is new; what waits for it may go on."""

    def wait(self) -> None:
        """Take nothing more from the client, until there is a verdict."""

    def say_farewell(self, cause: DisconnectCause, frame: bytes) -> None:
        """End the connection with this frame, once everything under way has been answered."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


class LookupSessionControl:
    """A session in lookup mode, as its judge needs it (proxy.forwarder.relay.expiring.splice_pump.Line)."""

    has_opened_producer = False

    def __init__(
        self, client: LookupClient, followed: ExpiringSession, relays: RelayManager, reauthenticator: Reauthenticator
    ) -> None:
        self._client = client
        self._followed = followed
        self._relays = relays
        self._reauthenticator = reauthenticator

    def send_challenge(self, challenge: bytes) -> None:
        """Send a challenge; a connection in lookup mode is always at a boundary."""
        _clock(self._followed).on_challenge_sent(self._relays.now())
        self._client.ask_again(challenge)

    def resume_after_verdict(self) -> None:
        """There is a verdict, and the clock knows it."""
        if not self._followed.close_reason:
            self._client.renewed(self._own_identity())

    def _own_identity(self) -> ClientIdentity | None:
        """Return who the client last was, unless that was somebody else: an observed failure does not change sides."""
        identity = self._reauthenticator.last_identity
        if identity is None or _clock(self._followed).find_mismatch(identity.principal) is not None:
            return None
        return identity

    def record_observed_end(self) -> None:
        """Nothing to write down: the connection ends with its process."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Take nothing more; what is under way is answered before the client is told."""
        if not self._followed.close_reason:
            self._followed.close_reason, self._followed.closing_error_frame = reason, error_frame
            self._client.wait()
            self._relays.reauthentication.on_closing(self._followed)

    def close_with_error(self, error_frame: bytes) -> None:
        """Tell the client, and end."""
        expired = self._followed.close_reason is CloseReason.EXPIRED
        self._client.say_farewell(
            DisconnectCause.SESSION_EXPIRED if expired else DisconnectCause.REAUTHENTICATION_FAILED, error_frame
        )

    @property
    def bytes_sent_to_client(self) -> int:
        """Nothing to wait for: the session itself knows what it has to answer first."""
        return 0

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended."""
        return self._client.is_over
