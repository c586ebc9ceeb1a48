"""One client's connection, from accept to close: performs what proto.client_machine decides.

One task reads frames; whatever takes time (a round of authentication, opening the broker's side, a lookup) runs beside
it, so that a PING is answered and a client that leaves is noticed at any moment. Those tasks report back with events.
"""

import time
from dataclasses import dataclass

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event, State, event_of
from proto.commands import NO_REQUEST_ID, command_name
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE, check_connect, lookup_mode_connected
from proto.errors import RemoteProtocolError
from proto.frames import Frame, FrameTooLarge
from proto.pulsar_pb2 import BaseCommand, CommandConnect, ServerError
from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.authentication import (
    ANONYMOUS,
    SERVER_VERSION,
    Authentication,
    Challenge,
    ClientEnd,
    ClientIdentity,
    Denial,
)
from proxy.forwarder.backends import Backends, TargetRefused
from proxy.forwarder.cause import Cause
from proxy.forwarder.lookup_mode import LookupMode
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relays import RelayNotBegun, Relays
from proxy.forwarder.wire import ClientSlow, ClientWire
from proxy.runtime.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.tasks import InFlight, close_politely, seconds

TARGET_REFUSED = "Target broker cannot be validated."
"""What the client learns of a denied target: the same words as the Java proxy's, and no more."""

RELAY_NOT_BEGUN = "The proxy cannot relay at the moment"


@dataclass(frozen=True, slots=True)
class Farewell:
    """The last frame for a client, and how long to wait before it is sent."""

    frame: bytes
    delay_s: float = 0.0


class ClientSession:
    """See the module. ``run`` once; ``drain`` may be called meanwhile.

    ``handshakes`` counts it for as long as it is not decided what the connection will be. ``became_relay``: how ``run``
    ended; if so, the connection is no longer this session's.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        client: ClientEnd,
        backends: Backends,
        relays: Relays,
        metrics: ForwarderMetrics,
        *,
        handshakes: InFlight,
    ) -> None:
        limits = backends.config.limits
        self.address = client.address
        self._client = client
        self.became_relay = False
        self.cause = Cause.SHUT_DOWN  # unless another is found: whoever is cancelled was in the way of a drain
        self.identity = ANONYMOUS
        self.target = ""
        self._backends = backends
        self._relays = relays
        self._limits = limits
        self._metrics = metrics
        self._handshakes = handshakes
        self._shaking_hands = False
        self._wire = ClientWire(
            stream, max_frame_bytes=limits.max_command_bytes, write_timeout_ms=limits.keep_alive_interval_ms
        )
        self._machine = ClientMachine()
        self._started = client.accepted_at
        self._started_at_unix_ms = int(time.time() * 1000)
        self._wire.deadline = self._started + seconds(limits.handshake_timeout_ms)
        self._ping_outstanding = False
        self._reading = trio.CancelScope()
        self._connect: CommandConnect
        self._authentication: Authentication | None = None
        self._farewell: Farewell | None = None
        self._link: BrokerLink | None = None
        self._held = b""
        self._draining = False
        self._nursery: trio.Nursery
        self._lookup_mode: LookupMode

    @property
    def state(self) -> State:
        """Where the connection stands."""
        return self._machine.state

    # ---- life

    async def run(self) -> None:
        """Lead the client through; returns when its connection is closed, or a relay."""
        self._shaking_hands = True
        self._handshakes.begin()
        try:
            async with trio.open_nursery() as self._nursery:
                self._lookup_mode = LookupMode(
                    self._backends, self._metrics, self.address, self._nursery, self._wire, self._send
                )
                try:
                    await self._lead()
                finally:
                    self._lookup_mode.close()  # an answer must not start a task in a nursery that is ending
                self._nursery.cancel_scope.cancel()
        finally:
            if self._authentication is not None:
                self._authentication.abandon()
            self._end_handshake()
            await self._close()

    async def _lead(self) -> None:
        with self._reading:
            await self._read_commands()
        if self.state is State.RELAYING:
            await self._relay()
        else:
            await self._say_farewell()

    def _end_handshake(self) -> None:
        """It is decided what the connection will be."""
        if self._shaking_hands:
            self._shaking_hands = False
            self._handshakes.end()

    async def _close(self) -> None:
        with trio.CancelScope(shield=True):
            if self.became_relay:  # both streams are the relay's now
                return
            if self._link is not None:
                await trio.aclose_forcefully(self._link.stream)
            if self._farewell is not None:
                await close_politely(self._wire.stream)
            else:
                await trio.aclose_forcefully(self._wire.stream)

    async def _say_farewell(self) -> None:
        if self._farewell is None:
            return
        await trio.sleep(self._farewell.delay_s)
        try:
            await self._wire.send(self._farewell.frame)
        except (trio.BrokenResourceError, ClientSlow):
            self._farewell = None

    def drain(self) -> None:
        """Leave as soon as nothing is under way. A relay goes on: its client decides when it ends."""
        self._draining = True
        if self.state in {State.AWAITING_CONNECT, State.LOOKUP}:
            self._nursery.start_soon(self._leave)

    async def _leave(self) -> None:
        await self._lookup_mode.under_way.wait_until_empty(timeout_s=float("inf"))
        if self.state in {State.AWAITING_CONNECT, State.LOOKUP}:
            self._machine.handle(Event.SHUT_DOWN)
            self._end(Cause.SHUT_DOWN)

    # ---- endings

    def _end(self, cause: Cause) -> None:
        """Note why, and stop reading: ``run`` takes it from there."""
        self.cause = cause
        self._reading.cancel()

    def _fail(
        self, event: Event, cause: Cause, code: int, message: str, detail: str = "", *, delay_s: float = 0.0
    ) -> None:
        """End the connection with an error that the client is told. ``message`` is for it, ``detail`` for the log."""
        action = self._machine.handle(event)
        if action is Action.IGNORE:  # it has ended already
            return
        if action is Action.FAIL:
            self._farewell = Farewell(commands.error(NO_REQUEST_ID, code, message), delay_s)
        self._end(cause)
        self._log_failure(detail or message)

    def _log_failure(self, reason: str) -> None:
        get_logger().warning(
            "a client's connection failed",
            client=self.address,
            principal=self.identity.role,
            target=self.target,
            cause=self.cause.value,
            reason=reason,
            **self.identity.before,
        )

    # ---- reading

    async def _read_commands(self) -> None:
        while True:
            try:
                await self._read_command()
            except FrameTooLarge as error:
                self._fail(
                    Event.CLIENT_CORRUPT, Cause.FRAME_TOO_LARGE, ServerError.NotAllowedError, f"Too large: {error}"
                )
            except RemoteProtocolError as error:
                self._fail(
                    Event.CLIENT_CORRUPT, Cause.PROTOCOL_ERROR, ServerError.NotAllowedError, f"Not Pulsar: {error}"
                )
            except trio.BrokenResourceError:
                self._machine.handle(Event.CLIENT_CLOSED)
                self._end(Cause.CLIENT_BROKE_OFF)
            except ClientSlow:
                self._machine.handle(Event.CLIENT_CLOSED)
                self._end(Cause.CLIENT_DOES_NOT_READ)
            await trio.lowlevel.checkpoint_if_cancelled()

    async def _read_command(self) -> None:
        try:
            frame = self._wire.next_frame()
            if frame is None:
                self._lookup_mode.flush()
                frame = await self._wire.receive()
            if frame is None:
                # A client that only ended its own direction may still be waiting for answers.
                await self._lookup_mode.under_way.wait_until_empty(timeout_s=seconds(self._limits.lookup_timeout_ms))
                self._machine.handle(Event.CLIENT_CLOSED)
                self._end(Cause.CLIENT_CLOSED)
                return
            if self.state is State.RELAYING:  # in the very instant: it is the relay's, whatever it is
                await self._hold(frame)
            self._ping_outstanding = False
            if self.state is State.LOOKUP:
                self._await_next_command()
            await self._take(frame)
        except trio.TooSlowError:
            await self._deadline_passed()

    def _await_next_command(self) -> None:
        self._wire.deadline = trio.current_time() + seconds(self._limits.keep_alive_interval_ms)

    async def _deadline_passed(self) -> None:
        if self.state is not State.LOOKUP:
            self._fail(
                Event.DEADLINE,
                Cause.HANDSHAKE_TIMEOUT,
                ServerError.ServiceNotReady,
                "The handshake took too long",
                f"the handshake was not finished within {self._limits.handshake_timeout_ms} ms ({self.state.value})",
            )
        elif self._ping_outstanding:
            self._machine.handle(Event.DEADLINE)
            self._end(Cause.KEEP_ALIVE_TIMEOUT)
        else:
            self._ping_outstanding = True
            self._await_next_command()
            await self._wire.send(commands.ping())

    async def _take(self, frame: Frame) -> None:
        """Perform what a client's command leads to."""
        command = commands.parse_command(frame.command)
        event = event_of(command)
        state = self.state
        match self._machine.handle(event):
            case Action.SEND_PONG:
                await self._wire.send(commands.pong())
            case Action.AUTHENTICATE:
                await self._begin(command)
            case Action.FORWARD_REQUEST:
                await self._lookup_mode.forward(command, frame, self.identity)
            case Action.REFUSE_COMMAND:
                await self._lookup_mode.refuse(command, self.identity)
            case Action.HOLD_COMMAND:
                await self._hold(frame)
            case Action.FAIL:
                self._out_of_turn(command, state)
            case _:
                pass

    async def _hold(self, frame: Frame) -> None:
        """Keep a frame for the relay, and read no further: the relay's beginning, or another end, cancels this."""
        self._held = frame.encode()
        await trio.sleep_until(self._wire.deadline)
        raise trio.TooSlowError

    def _out_of_turn(self, command: BaseCommand, state: State) -> None:
        text = f"{command_name(command.type)} while {state.value}"
        self._farewell = Farewell(commands.error(NO_REQUEST_ID, ServerError.NotAllowedError, f"Not allowed: {text}"))
        get_logger().warning(
            "a client sent a command out of turn", client=self.address, principal=self.identity.role, reason=text
        )
        self._end(Cause.NOT_ALLOWED)

    # ---- authentication

    async def _begin(self, command: BaseCommand) -> None:
        """CONNECT, or the answer to a challenge. Without authentication the way is clear at once: a client in a hurry
        must not be told, depending on a moment, that its next frame is out of turn.
        """
        authentication = self._backends.config.authentication
        if command.type == BaseCommand.CONNECT:
            proxies_allowed = authentication.enabled and bool(authentication.proxy_roles)
            refusal = check_connect(command, proxies_allowed=proxies_allowed)
            if refusal is not None:
                self._fail(Event.DENIED, Cause.NOT_ALLOWED, refusal.code, refusal.message)
                return
            self._connect = command.connect
            self.target = self._connect.proxy_to_broker_url[:300]
            self._authentication = self._backends.new_authentication(self._client, self._connect)
        if authentication.enabled:
            self._nursery.start_soon(self._authenticate, self._authentication, command)
        else:
            await self._accepted(ANONYMOUS)

    async def _authenticate(self, authentication: Authentication | None, command: BaseCommand) -> None:
        """One round with the auth worker."""
        if authentication is None:
            raise RuntimeError("a round before CONNECT")
        try:
            verdict = await authentication.round(command)
        except RpcError as error:
            self._fail(
                Event.DENIED,
                Cause.AUTHENTICATION_UNAVAILABLE,
                ServerError.ServiceNotReady,
                AUTHENTICATION_UNAVAILABLE,
                f"no verdict from the auth worker: {error}",
            )
            return
        match verdict:
            case ClientIdentity():
                await self._accepted(verdict)
            case Challenge():
                if self._machine.handle(Event.CHALLENGED) is Action.SEND_CHALLENGE:
                    await self._send(verdict.frame)
            case Denial():
                self._fail(
                    Event.DENIED,
                    Cause.AUTHENTICATION_FAILED,
                    verdict.refusal.code,
                    verdict.refusal.message,
                    f"authentication denied: {verdict.reason}",
                    delay_s=seconds(self._backends.config.authentication.failure_delay_ms),
                )

    async def _accepted(self, identity: ClientIdentity) -> None:
        self.identity = identity
        self._measure("authentication", self._started)
        if self.target:
            if self._machine.handle(Event.ACCEPTED_FOR_TARGET) is Action.CONNECT_BROKER:
                self._nursery.start_soon(self._open_broker)
            return
        profile = await self._backends.broker_profile()
        if self._machine.handle(Event.ACCEPTED_FOR_LOOKUP) is Action.SEND_CONNECTED:
            connected = lookup_mode_connected(self._connect, profile, SERVER_VERSION)
            self._await_next_command()
            await self._send(commands.connected(connected))
            self._measure("total", self._started)
            self._end_handshake()
            if self._draining:
                self.drain()

    async def _send(self, frame: bytes) -> None:
        """Send from a task beside the reader: if the client is gone, the reader will notice and end the session."""
        try:
            await self._wire.send(frame)
        except trio.BrokenResourceError:
            pass
        except ClientSlow:
            self._machine.handle(Event.CLIENT_CLOSED)
            self._end(Cause.CLIENT_DOES_NOT_READ)

    def _measure(self, stage: str, since: float) -> None:
        self._metrics.handshake_seconds.labels(stage=stage).observe(trio.current_time() - since)

    # ---- the relay

    async def _open_broker(self) -> None:
        started = trio.current_time()
        try:
            link = await self._backends.open_broker(self._connect, self.identity, self.address)
        except TargetRefused as refused:
            self._broker_failed(
                Cause.TARGET_DENIED, refused.reason, ServerError.ServiceNotReady, TARGET_REFUSED, str(refused)
            )
        except BrokerLinkFailed as failed:
            self._broker_failed(Cause.BROKER_FAILED, failed.reason, failed.code, failed.message, str(failed))
        except RpcError as error:
            text = "The proxy cannot check the target broker at the moment"
            detail = f"no answer from the lookup worker: {error}"
            self._broker_failed(Cause.LOOKUP_UNAVAILABLE, "lookup_worker", ServerError.ServiceNotReady, text, detail)
        else:
            self._link = link
            if self._machine.handle(Event.BROKER_CONNECTED) is Action.START_RELAY:
                self._measure("broker", started)
                self._measure("total", self._started)
                self._reading.cancel()

    def _broker_failed(self, cause: Cause, reason: str, code: int, message: str, detail: str) -> None:
        self._metrics.broker_failures.labels(reason=reason).inc()
        self._fail(Event.BROKER_FAILED, cause, code, message, detail)

    async def _relay(self) -> None:
        """Connected goes out as the relay's first bytes, so nothing can come before it."""
        link = self._link
        if link is None:
            raise RuntimeError("a relay without a broker")
        try:
            await self._relays.begin(
                self._wire.stream,
                link.stream,
                self._about(),
                first_to_broker=self._held + self._wire.take_rest(),
                first_to_client=link.connected.frame.encode() + link.connected.rest,
                config=self._backends.config.relay,
            )
        except RelayNotBegun as error:
            self._farewell = Farewell(commands.error(NO_REQUEST_ID, ServerError.ServiceNotReady, RELAY_NOT_BEGUN))
            self.cause = Cause.RELAY_NOT_BEGUN
            self._log_failure(str(error))
            await self._say_farewell()
        else:
            self.became_relay = True

    def _about(self) -> StoredRelay:
        return StoredRelay(
            client_address=self.address,
            principal=self.identity.role,
            target=self.target,
            started_at_unix_ms=self._started_at_unix_ms,
            expires_at_unix_ms=self.identity.principal.expires_at_unix_ms,
            proxy=self.identity.principal.proxy,
        )
