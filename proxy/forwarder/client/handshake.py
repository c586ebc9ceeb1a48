"""The way of a client into lookup mode or to a broker: CONNECT, the rounds of authentication, the broker's connection.

Each step returns its outcome, a value that the connection acts upon. A handshake changes no state of the connection.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import trio

from proto import commands
from proto.client_machine import Event
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE, check_connect, lookup_mode_connected, wants_broker
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import StoredRelay
from proxy import SERVER_VERSION
from proxy.config.types import Config
from proxy.forwarder.client.failures import BrokerError, ConnectionFailure, broker_failure
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.terms import SessionTerms
from proxy.forwarder.relay.relay import RelayStart
from proxy.forwarder.workers.authentication import (
    ANONYMOUS,
    AuthenticationExchange,
    Challenge,
    ClientEndpoint,
    ClientIdentity,
    Denial,
    RoundResult,
)
from proxy.forwarder.workers.broker_links import BrokerRequest, TargetRefused
from proxy.forwarder.workers.broker_opening import BrokerOpening, Outcome, start_opening
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import close_forcefully, ignore, seconds
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcError

TARGET_SHOWN_MAX = 300
"""How many characters of a target are kept, for logs and for the record of a relay."""

LISTENER_BIND_MAX = 300
"""Characters of a listener's `bind` that fit a relay's record: a host name has 253 at most, and there is a port."""

ANY_BROKER = "any broker"

RoundOutcome = ClientIdentity | Challenge | ConnectionFailure
"""The outcome of one round: the client is authenticated, is challenged, or its connection ends."""


OnConnected = Callable[[ConnectionFailure | None], None]


def bind_of(config: Config, listener: int) -> str:
    """Return where a listener is bound, for a relay's record; empty where that is too long for an address."""
    bind = config.listener[listener].bind
    return bind if len(bind) <= LISTENER_BIND_MAX else ""


class Handshake:
    """The handshake of one client. ``receive_connect`` comes first; ``abandon_handshake`` when the connection is over,
    and ``close_link`` where no relay has started.

    ``target``: the broker that the client wants, for logs: as the client wrote it, or, where it takes any, the one that
    it got; empty in lookup mode. ``services.handshakes`` counts the handshake from ``start_handshake`` to
    ``finish_handshake``. ``tasks`` spawns the task for a broker's connection that needs one.
    """

    def __init__(self, client: ClientEndpoint, services: ConnectionServices, tasks: TaskSpawner) -> None:
        self.target = ""
        self.serves_lookups = False
        self.connect: CommandConnect
        self._client = client
        self._workers = services.workers
        self._services = services
        self._tasks = tasks
        self._tick = current_tick()
        self._is_counted = False
        self.started_at_unix_ms = int(time.time() * 1000)
        self._broker_started_at = 0.0
        self._authentication: AuthenticationExchange | None = None
        self._link: BrokerLink | None = None
        self._opening: BrokerOpening | None = None
        self._asked: BrokerRequest
        self._on_connected: OnConnected

    def audit_record(self, identity: ClientIdentity = ANONYMOUS) -> StoredRelay:
        """Return what audit events tell of the connection; as long as the client is not known, the method it names."""
        record = self.stored_relay(identity)
        if not record.method and self._authentication is not None:
            record.method = commands.auth_method_of(self.connect)
        return record

    def start_handshake(self) -> None:
        """Count the handshake as in progress."""
        self._is_counted = True
        self._services.handshakes.increment()

    def finish_handshake(self) -> None:
        """Count it no longer: it is decided whether the connection serves lookups or is a relay. May be repeated."""
        if self._is_counted:
            self._is_counted = False
            self._services.handshakes.decrement()

    def finish_for_lookups(self) -> None:
        """Note that the connection serves lookups from now on."""
        self.serves_lookups = True
        self.record_duration("total")
        self.finish_handshake()

    def abandon_handshake(self) -> None:
        """Let the auth worker forget rounds that no client will finish, connect to no broker, and count no more: the
        client has gone, or its relay has started.
        """
        if self._authentication is not None:
            self._authentication.abandon_exchange()
        if self._opening is not None and self._opening.abandon():
            self._on_connected = ignore
        self.finish_handshake()

    # ---- authentication

    def receive_connect(self, command: BaseCommand) -> ConnectionFailure | None:
        """Check a CONNECT and keep it for the steps that follow. Return why the connection ends, or None."""
        config = self._workers.config.authentication
        refusal = check_connect(command, proxies_allowed=config.enabled and bool(config.proxy_roles))
        if refusal is not None:
            return ConnectionFailure(Event.DENIED, DisconnectCause.NOT_ALLOWED, refusal.code, refusal.message)
        self.connect = command.connect
        if wants_broker(self.connect):
            self.target = self.connect.proxy_to_broker_url[:TARGET_SHOWN_MAX] or ANY_BROKER
        if config.enabled:
            self._authentication = self._workers.new_authentication_exchange(self._client, self.connect)
        return None

    @property
    def needs_rounds(self) -> bool:
        """Return whether clients are authenticated. Where not, no step of the handshake is awaited before the next."""
        return self._authentication is not None

    def start_round(self, command: BaseCommand, on_outcome: Callable[[RoundOutcome], None]) -> None:
        """Have the auth worker verify a CONNECT, or the answer to a challenge.

        ``on_outcome`` is called once, unless the handshake is abandoned before.
        """
        assert self._authentication is not None  # needs_rounds
        self._authentication.start_round(
            command, self._tasks, lambda result: on_outcome(self._audited(self._outcome_of(result)))
        )

    def _audited(self, outcome: RoundOutcome) -> RoundOutcome:
        """Write the event of an authentication that is over."""
        match outcome:
            case ClientIdentity():
                self._services.audit.on_authentication(partial(self.audit_record, outcome))
            case ConnectionFailure():
                reason = outcome.detail or outcome.message
                self._services.audit.on_authentication_failure(self.audit_record, reason)
        return outcome

    def _outcome_of(self, result: RoundResult) -> RoundOutcome:
        match result:
            case RpcError():
                return ConnectionFailure(
                    Event.DENIED,
                    DisconnectCause.AUTHENTICATION_UNAVAILABLE,
                    ServerError.ServiceNotReady,
                    AUTHENTICATION_UNAVAILABLE,
                    f"no verdict from the auth worker: {result}",
                )
            case Denial():
                return ConnectionFailure(
                    Event.DENIED,
                    DisconnectCause.AUTHENTICATION_FAILED,
                    result.refusal.code,
                    result.refusal.message,
                    f"authentication denied: {result.reason}",
                    delay_s=seconds(self._workers.config.authentication.failure_delay_ms),
                )
            case _:
                return result

    # ---- into lookup mode, or to a broker

    @property
    def wants_broker(self) -> bool:
        """Return whether the client wants a relay to a broker, rather than lookup mode."""
        return wants_broker(self.connect)

    def connected_frame(self, profile: CommandConnected | None) -> bytes:
        """Return the CONNECTED of lookup mode; ``profile``: the brokers' own, None if unknown."""
        return commands.connected(lookup_mode_connected(self.connect, profile, SERVER_VERSION))

    # ---- the broker's side of a relay

    @property
    def has_link(self) -> bool:
        """Return whether there is a connection to a broker."""
        return self._link is not None

    @property
    def link(self) -> BrokerLink:
        """Return the connection, with the broker's CONNECTED. Raises RuntimeError where it is not open."""
        if self._link is None:
            raise RuntimeError("a relay without a broker")
        return self._link

    def connect_broker(self, identity: ClientIdentity, on_connected: OnConnected) -> None:
        """Have the target checked, connect to it, and send CONNECT for the client.

        ``on_connected`` is called once, with None or why the connection ends, unless the handshake is abandoned before.
        """
        self._broker_started_at = self._tick.now
        client, self._on_connected = self._client, on_connected
        self._asked = BrokerRequest(self.connect, identity, client.address, client.announcement)
        self._opening = start_opening(
            self._workers.broker_links,
            self._asked,
            self._services.deadlines,
            self._services.turns,
            self._tasks,
            on_done=self._on_opened,
        )
        if self._opening is None:
            self._tasks.start_soon(self._open_in_task)

    async def _open_in_task(self) -> None:
        try:
            outcome = await self._workers.broker_links.open_link(self._asked)
        except (TargetRefused, BrokerLinkFailed, RpcError) as error:
            self._on_opened(error)
        else:
            self._on_opened(outcome)

    def _on_opened(self, outcome: Outcome | BrokerError) -> None:
        self._opening = None
        if outcome is None:
            self._tasks.start_soon(self._open_in_task)
            return
        if not isinstance(outcome, BrokerLink):
            failure, reason = broker_failure(outcome)
            self._services.metrics.count_broker_failure(reason)
            self._report(failure)
            return
        self._link = outcome
        if not self.connect.proxy_to_broker_url:
            self.target = str(outcome.broker)
        self._report(None)

    def _report(self, failure: ConnectionFailure | None) -> None:
        on_connected, self._on_connected = self._on_connected, ignore  # it leads back to the connection
        on_connected(failure)

    def relay_start(
        self,
        client: trio.abc.HalfCloseableStream,
        stored: StoredRelay,
        *,
        first_to_broker: bytes,
        session: SessionTerms | None,
    ) -> RelayStart:
        """Return what the relay between a client's stream and the broker's needs to start.

        CONNECTED goes out as the relay's first bytes, so that no other byte can precede it.
        """
        link = self.link
        return RelayStart(
            client,
            link.stream,
            stored,
            self._workers.config.relay,
            first_to_broker=first_to_broker,
            first_to_client=link.connected.frame.encode() + link.connected.trailing_data,
            session=session,
            on_broker_end=link.on_broker_end,
        )

    async def close_link(self) -> None:
        """Close the connection to the broker, if it is open."""
        if self._link is not None:
            await close_forcefully(self._link.stream)

    # ---- what is recorded of it

    def record_duration(self, stage: Literal["authentication", "broker", "total"]) -> None:
        """Record how long a stage took that ends now. All but "broker" begin when the client was accepted."""
        since = self._broker_started_at if stage == "broker" else self._client.accepted_at
        self._services.metrics.handshake_seconds[stage].observe(self._tick.now - since)

    def stored_relay(self, identity: ClientIdentity) -> StoredRelay:
        """Return the record of the connection, now that the client is known."""
        return StoredRelay(
            client_address=self._client.address,
            principal=identity.role,
            target=self.target,
            started_at_unix_ms=self.started_at_unix_ms,
            expires_at_unix_ms=identity.principal.expires_at_unix_ms,
            proxy=identity.principal.proxy,
            credentials=identity.credentials,
            method=identity.principal.method,
            listener=bind_of(self._workers.config, self._client.listener),
        )
