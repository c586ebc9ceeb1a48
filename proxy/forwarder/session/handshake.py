"""The way of a client into lookup mode or to a broker: CONNECT, the rounds of authentication, the broker's connection.

Each step returns its outcome, a value that the session acts upon. A handshake changes no state of the session.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from proto import commands
from proto.client_machine import Event
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE, check_connect, lookup_mode_connected, wants_broker
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.session.broker_connector import BrokerConnectFailed, BrokerConnector
from proxy.forwarder.session.failures import ConnectionFailure
from proxy.forwarder.workers.authentication import (
    SERVER_VERSION,
    AuthenticationExchange,
    Challenge,
    ClientEndpoint,
    ClientIdentity,
    Denial,
)
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc.errors import RpcError

TARGET_SHOWN_MAX = 300
"""How many characters of a target are kept, for logs and for the record of a relay."""

ANY_BROKER = "any broker"

RoundOutcome = ClientIdentity | Challenge | ConnectionFailure
"""The outcome of one round: the client is authenticated, is challenged, or its connection ends."""


class Handshake:
    """The handshake of one client. ``receive_connect`` comes first; ``abandon_rounds`` when the session is over.

    ``target``: the broker that the client wants, for logs: as the client wrote it, or, where it takes any, the one that
    it got; empty in lookup mode. ``in_progress`` counts the handshake from ``start_handshake`` to
    ``finish_handshake``.
    """

    def __init__(
        self,
        client: ClientEndpoint,
        workers: WorkerClients,
        metrics: ForwarderMetrics,
        broker_connector: BrokerConnector,
        in_progress: InFlightCounter,
    ) -> None:
        self.target = ""
        self.connect: CommandConnect
        self._client = client
        self._workers = workers
        self._metrics = metrics
        self._broker_connector = broker_connector
        self._in_progress = in_progress
        self._tick = current_tick()
        self._is_counted = False
        self._started_at_unix_ms = int(time.time() * 1000)
        self._broker_started_at = 0.0
        self._authentication: AuthenticationExchange | None = None

    def start_handshake(self) -> None:
        """Count the handshake as in progress."""
        self._is_counted = True
        self._in_progress.increment()

    def finish_handshake(self) -> None:
        """Count it no longer: it is decided whether the connection serves lookups or is a relay. May be repeated."""
        if self._is_counted:
            self._is_counted = False
            self._in_progress.decrement()

    def abandon_rounds(self) -> None:
        """Let the auth worker forget rounds that no client will finish."""
        if self._authentication is not None:
            self._authentication.abandon_exchange()

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

    async def run_round(self, command: BaseCommand) -> RoundOutcome:
        """Have the auth worker verify a CONNECT, or the answer to a challenge."""
        assert self._authentication is not None  # needs_rounds
        try:
            verdict = await self._authentication.authenticate_round(command)
        except RpcError as error:
            return ConnectionFailure(
                Event.DENIED,
                DisconnectCause.AUTHENTICATION_UNAVAILABLE,
                ServerError.ServiceNotReady,
                AUTHENTICATION_UNAVAILABLE,
                f"no verdict from the auth worker: {error}",
            )
        if isinstance(verdict, Denial):
            return ConnectionFailure(
                Event.DENIED,
                DisconnectCause.AUTHENTICATION_FAILED,
                verdict.refusal.code,
                verdict.refusal.message,
                f"authentication denied: {verdict.reason}",
                delay_s=seconds(self._workers.config.authentication.failure_delay_ms),
            )
        return verdict

    # ---- into lookup mode, or to a broker

    @property
    def wants_broker(self) -> bool:
        """Return whether the client wants a relay to a broker, rather than lookup mode."""
        return wants_broker(self.connect)

    def connected_frame(self, profile: CommandConnected | None) -> bytes:
        """Return the CONNECTED of lookup mode; ``profile``: the brokers' own, None if unknown."""
        return commands.connected(lookup_mode_connected(self.connect, profile, SERVER_VERSION))

    def connect_broker(self, identity: ClientIdentity, on_done: Callable[[ConnectionFailure | None], None]) -> None:
        """Open the broker's side of a relay. ``on_done`` is called once, with None or why the connection ends."""
        self._broker_started_at = self._tick.now
        self._broker_connector.connect(self.connect, identity, partial(self._on_broker, on_done))

    def _on_broker(
        self, on_done: Callable[[ConnectionFailure | None], None], failed: BrokerConnectFailed | None
    ) -> None:
        if failed is not None:
            self._metrics.count_broker_failure(failed.reason)
            on_done(ConnectionFailure(Event.BROKER_FAILED, failed.cause, failed.code, failed.message, str(failed)))
            return
        if not self.connect.proxy_to_broker_url:
            self.target = str(self._broker_connector.link.broker)
        on_done(None)

    # ---- what is recorded of it

    def record_duration(self, stage: Literal["authentication", "broker", "total"]) -> None:
        """Record how long a stage took that ends now. All but "broker" begin when the client was accepted."""
        since = self._broker_started_at if stage == "broker" else self._client.accepted_at
        self._metrics.handshake_seconds[stage].observe(self._tick.now - since)

    def stored_relay(self, identity: ClientIdentity) -> StoredRelay:
        """Return the record of the connection, now that the client is known."""
        return StoredRelay(
            client_address=self._client.address,
            principal=identity.role,
            target=self.target,
            started_at_unix_ms=self._started_at_unix_ms,
            expires_at_unix_ms=identity.principal.expires_at_unix_ms,
            proxy=identity.principal.proxy,
        )
