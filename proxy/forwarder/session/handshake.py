"""The way of a client into lookup mode or to a broker: CONNECT, the rounds of authentication, what a verdict leads to.

What takes time (a round, a broker's profile, the broker's side of a relay) is a task of the session's, and
reports back with events of proto.client_machine.
"""

import time
from typing import Protocol

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE, check_connect, lookup_mode_connected, wants_broker
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.pre_auth import PreAuthConnection
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.session.broker_connector import BrokerConnectFailed, BrokerConnector
from proxy.forwarder.session.transport import ClientTransport
from proxy.forwarder.workers.authentication import (
    ANONYMOUS,
    SERVER_VERSION,
    AuthenticationExchange,
    Challenge,
    ClientEndpoint,
    ClientIdentity,
    Denial,
)
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.rpc.client import RpcError

TARGET_SHOWN_MAX = 300
"""How many characters of a target are kept, for logs and for the record of a relay."""

ANY_BROKER = "any broker"


class HandshakeSession(Protocol):
    """A session, as its handshake needs it."""

    def fail(
        self, event: Event, cause: DisconnectCause, code: int, message: str, detail: str = "", *, delay_s: float = 0.0
    ) -> None:
        """End the connection with an error that the client is told. ``message`` is for it, ``detail`` for the log."""

    def wait(self) -> None:
        """Take no more frames until ``go_on``, or until the connection is a relay."""

    def go_on(self) -> None:
        """Take frames again."""

    def accepted(self, connect: CommandConnect, identity: ClientIdentity) -> None:
        """It is known who the client is."""

    def enter_lookup_mode(self, connected: bytes) -> None:
        """Serve lookups from now on; ``connected`` tells the client."""

    def begin_relay(self) -> None:
        """The broker's side is there."""


class Handshake:
    """One client's; see the module. ``begin`` and ``end`` once each, and ``take`` each CONNECT and AUTH_RESPONSE.

    ``handshakes`` counts it for as long as it is not decided what the connection will be; ``tasks`` are for what takes
    time. ``stranger``: how it is counted before its client is known.
    """

    def __init__(
        self,
        session: HandshakeSession,
        client: ClientEndpoint,
        backends: WorkerClients,
        metrics: ForwarderMetrics,
        *,
        broker: BrokerConnector,
        machine: ClientMachine,
        wire: ClientTransport,
        tasks: TaskSpawner,
        handshakes: InFlightCounter,
        stranger: PreAuthConnection | None = None,
    ) -> None:
        self.target = ""
        """Which broker the client wants, for logs: as it was said, or, where it takes any, which one it got."""
        self._session = session
        self._client = client
        self._backends = backends
        self._metrics = metrics
        self._broker = broker
        self._machine = machine
        self._wire = wire
        self._tasks = tasks
        self._handshakes = handshakes
        self._stranger = stranger or PreAuthConnection()
        self._is_counted = False
        self._started = client.accepted_at
        self._started_at_unix_ms = int(time.time() * 1000)
        self._connect: CommandConnect
        self._authentication: AuthenticationExchange | None = None

    def begin(self) -> None:
        """The client has come."""
        self._is_counted = True
        self._handshakes.increment()

    def end(self) -> None:
        """The session is over, or a relay: what is kept of rounds under way can be forgotten."""
        if self._authentication is not None:
            self._authentication.abandon_exchange()
        self._is_decided()

    def _is_decided(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._handshakes.decrement()

    def stored_relay(self, identity: ClientIdentity) -> StoredRelay:
        """What is known of the connection, now that the client is known."""
        return StoredRelay(
            client_address=self._client.address,
            principal=identity.role,
            target=self.target,
            started_at_unix_ms=self._started_at_unix_ms,
            expires_at_unix_ms=identity.principal.expires_at_unix_ms,
            proxy=identity.principal.proxy,
        )

    # ---- authentication

    def take(self, command: BaseCommand) -> None:
        """CONNECT, or the answer to a challenge. Without authentication the way is clear at once: a client in a hurry
        must not be told, depending on a moment, that its next frame is out of turn.
        """
        if command.type == BaseCommand.CONNECT and not self._take_connect(command):
            return
        self._stranger.mark_busy()
        if self._authentication is not None:
            self._tasks.start_soon(self._authenticate, self._authentication, command)
        else:
            self._accepted(ANONYMOUS)

    def _take_connect(self, command: BaseCommand) -> bool:
        authentication = self._backends.config.authentication
        proxies_allowed = authentication.enabled and bool(authentication.proxy_roles)
        refusal = check_connect(command, proxies_allowed=proxies_allowed)
        if refusal is not None:
            self._session.fail(Event.DENIED, DisconnectCause.NOT_ALLOWED, refusal.code, refusal.message)
            return False
        self._connect = command.connect
        if wants_broker(self._connect):
            self.target = self._connect.proxy_to_broker_url[:TARGET_SHOWN_MAX] or ANY_BROKER
        if authentication.enabled:
            self._authentication = self._backends.new_authentication_exchange(self._client, self._connect)
        return True

    async def _authenticate(self, authentication: AuthenticationExchange, command: BaseCommand) -> None:
        """One round with the auth worker."""
        try:
            verdict = await authentication.authenticate_round(command)
        except RpcError as error:
            self._session.fail(
                Event.DENIED,
                DisconnectCause.AUTHENTICATION_UNAVAILABLE,
                ServerError.ServiceNotReady,
                AUTHENTICATION_UNAVAILABLE,
                f"no verdict from the auth worker: {error}",
            )
            return
        match verdict:
            case ClientIdentity():
                self._accepted(verdict)
            case Challenge():
                if self._machine.handle(Event.CHALLENGED) is Action.SEND_CHALLENGE:
                    self._wire.send(verdict.frame)
                    self._stranger.mark_silent()
            case Denial():
                self._session.fail(
                    Event.DENIED,
                    DisconnectCause.AUTHENTICATION_FAILED,
                    verdict.refusal.code,
                    verdict.refusal.message,
                    f"authentication denied: {verdict.reason}",
                    delay_s=seconds(self._backends.config.authentication.failure_delay_ms),
                )

    def _accepted(self, identity: ClientIdentity) -> None:
        self._measure("authentication", self._started)
        self._session.accepted(self._connect, identity)
        if self._backends.config.authentication.enabled:
            self._stranger.stop_counting()
        if wants_broker(self._connect):
            if self._machine.handle(Event.ACCEPTED_FOR_TARGET) is Action.CONNECT_BROKER:
                self._tasks.start_soon(self._open_broker, identity)
        elif self._backends.is_profile_fresh:
            self._connected(self._backends.profile)
        else:
            self._session.wait()
            self._tasks.start_soon(self._connected_later)

    def _measure(self, stage: str, since: float) -> None:
        self._metrics.handshake_seconds[stage].observe(trio.current_time() - since)

    # ---- what the client came for

    async def _connected_later(self) -> None:
        self._connected(await self._backends.broker_profile())
        self._session.go_on()

    def _connected(self, profile: CommandConnected | None) -> None:
        if self._machine.handle(Event.ACCEPTED_FOR_LOOKUP) is Action.SEND_CONNECTED:
            connected = lookup_mode_connected(self._connect, profile, SERVER_VERSION)
            self._stranger.stop_counting()
            self._session.enter_lookup_mode(commands.connected(connected))
            self._measure("total", self._started)
            self._is_decided()

    async def _open_broker(self, identity: ClientIdentity) -> None:
        started = trio.current_time()
        try:
            await self._broker.open_link(self._connect, identity)
        except BrokerConnectFailed as failed:
            self._metrics.broker_failures.labels(reason=failed.reason).inc()
            self._session.fail(Event.BROKER_FAILED, failed.cause, failed.code, failed.message, str(failed))
            return
        if not self._connect.proxy_to_broker_url:
            self.target = str(self._broker.link.broker)
        if self._machine.handle(Event.BROKER_CONNECTED) is Action.START_RELAY:
            self._measure("broker", started)
            self._measure("total", self._started)
            self._session.begin_relay()
        else:  # the client has gone in this very moment
            await self._broker.close_link()
