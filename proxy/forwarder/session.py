"""One client's connection, from accept to close: performs what proto.client_machine decides.

Frames come by callback (proxy.forwarder.wire), and whatever can be done at once is done there: no task is woken for a
lookup. The session's own task sleeps until the connection ends or a deadline passes; what takes time (a round of
authentication, opening the broker's side) is a task beside it, so that a PING is answered and a client that leaves is
noticed at any moment. Those tasks report back with events.
"""

import time
from dataclasses import dataclass

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event, State, event_of, is_plainly_lookup
from proto.commands import NO_REQUEST_ID, command_name
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE, check_connect, lookup_mode_connected
from proto.errors import RemoteProtocolError
from proto.frames import Frame, FrameTooLarge
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import StoredRelay
from proto.session_clock import Use
from proxy.forwarder.authentication import (
    ANONYMOUS,
    SERVER_VERSION,
    Authentication,
    Challenge,
    ClientEnd,
    ClientIdentity,
    Denial,
)
from proxy.forwarder.backends import Backends
from proxy.forwarder.broker_side import BrokerSide, BrokerSideFailed
from proxy.forwarder.cause import Cause
from proxy.forwarder.lookup_mode import LookupMode
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relays import RelayNotBegun, Relays
from proxy.forwarder.renewal import Renewal
from proxy.forwarder.wire import ClientSlow, ClientWire
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.tasks import InFlight, close_at_once, close_politely, seconds

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
        self._deadline = self._started + seconds(limits.handshake_timeout_ms)
        self._keep_alive_s = seconds(limits.keep_alive_interval_ms)
        self._pinged_at = float("-inf")
        self._over = trio.Event()
        self._defect: Exception | None = None
        self._waits = False
        self._is_full = False
        self._has_said_all = False
        self._waiting = trio.CancelScope()
        self._connect: CommandConnect
        self._authentication: Authentication | None = None
        self._farewell: Farewell | None = None
        self._held = b""
        self._draining = False
        self._broker = BrokerSide(backends, client.address)
        self._renewal = Renewal(backends, client, relays, metrics)
        self._postponed: Frame | None = None
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
                    self._backends,
                    self._metrics,
                    self.address,
                    self._nursery,
                    self._wire,
                    self._take_frames,
                    self._client_corrupt,
                )
                try:
                    await self._lead()
                finally:
                    self._lookup_mode.close()  # an answer must not start a task in a nursery that is ending
                    self._stop()
                self._nursery.cancel_scope.cancel()
        finally:
            if self._authentication is not None:
                self._authentication.abandon()
            self._renewal.abandon()
            self._end_handshake()
            await self._close()

    async def _lead(self) -> None:
        self._wire.begin(self._nursery, self._take_frames, self._client_ended)
        while not self._over.is_set():
            with trio.CancelScope(deadline=self._deadline) as self._waiting:
                await self._over.wait()
            if not self._over.is_set() and trio.current_time() >= self._deadline:
                self._deadline_passed()
        if self._defect is not None:
            raise self._defect
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
        if self.became_relay:  # both streams are the relay's now
            return
        await self._broker.close()
        if self._farewell is None:
            await close_at_once(self._wire.stream)
            return
        with trio.CancelScope(shield=True):
            await close_politely(self._wire.stream)

    async def _say_farewell(self) -> None:
        if self._farewell is None:
            return
        await trio.sleep(self._farewell.delay_s)
        self._wire.send(self._farewell.frame)
        if not await self._wire.until_sent():
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
            await self._wire.until_sent()
            self._end(Cause.SHUT_DOWN)

    # ---- endings

    def _end(self, cause: Cause) -> None:
        """Note why, and read no more: ``run`` takes it from there."""
        self.cause = cause
        self._stop()

    def _stop(self) -> None:
        self._wire.pause()
        self._over.set()

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

    def _client_corrupt(self, error: RemoteProtocolError) -> None:
        too_large = isinstance(error, FrameTooLarge)
        cause = Cause.FRAME_TOO_LARGE if too_large else Cause.PROTOCOL_ERROR
        text = f"{'Too large' if too_large else 'Not Pulsar'}: {error}"
        self._fail(Event.CLIENT_CORRUPT, cause, ServerError.NotAllowedError, text)

    def _client_ended(self, error: Exception | None) -> None:
        match error:
            case None if self._lookup_mode.under_way.count or self._wire.unsent_bytes:
                self._has_said_all = True
                self._nursery.start_soon(self._client_has_said_all)
            case None:
                self._client_gone(Cause.CLIENT_CLOSED)
            case trio.BrokenResourceError():
                self._client_gone(Cause.CLIENT_BROKE_OFF)
            case ClientSlow():
                self._client_gone(Cause.CLIENT_DOES_NOT_READ)
            case _:
                self._defect = error
                self._stop()

    def _client_gone(self, cause: Cause) -> None:
        if self._machine.handle(Event.CLIENT_CLOSED) is not Action.IGNORE:
            self._end(cause)

    async def _client_has_said_all(self) -> None:
        """A client that only ended its own direction may still be waiting for answers."""
        timeout_s = seconds(self._limits.lookup_timeout_ms)
        await self._lookup_mode.under_way.wait_until_empty(timeout_s=timeout_s)
        await self._wire.until_sent()
        self._client_gone(Cause.CLIENT_CLOSED)

    # ---- deadlines

    def _deadline_passed(self) -> None:
        now = trio.current_time()
        if self.state is not State.LOOKUP:
            self._fail(
                Event.DEADLINE,
                Cause.HANDSHAKE_TIMEOUT,
                ServerError.ServiceNotReady,
                "The handshake took too long",
                f"the handshake was not finished within {self._limits.handshake_timeout_ms} ms ({self.state.value})",
            )
        elif self._is_full or self._has_said_all:  # nothing is read from it: it may well have answered
            self._deadline = now + self._keep_alive_s
        elif now < self._wire.heard_at + self._keep_alive_s:
            self._deadline = self._wire.heard_at + self._keep_alive_s
        elif self._pinged_at > self._wire.heard_at:
            self._machine.handle(Event.DEADLINE)
            self._end(Cause.KEEP_ALIVE_TIMEOUT)
        else:
            self._pinged_at = now
            self._deadline = now + self._keep_alive_s
            self._wire.send(commands.ping())

    # ---- reading

    def _take_frames(self) -> None:
        """Perform what the frames that are here lead to; those behind one that must wait, wait."""
        if self._waits or self._over.is_set():
            return
        try:
            has_room, expired = self._has_room(), self._renewal.has_expired
            while has_room and not self._waits and not self._over.is_set():
                frame = self._postponed or self._wire.next_frame()
                self._postponed = None
                if frame is None:
                    break
                if not expired and is_plainly_lookup(frame.command) and self.state is State.LOOKUP:
                    self._lookup_mode.forward(frame.command)  # of which a chunk brings only so many bytes
                elif not expired or self._may_pass(frame):
                    self._take(frame)
                    has_room = self._has_room()
        except RemoteProtocolError as error:
            self._client_corrupt(error)
        self._lookup_mode.flush()

    def _has_room(self) -> bool:
        """Whether more may be taken from this client; else it goes on with an answer that leaves."""
        has_room = self._lookup_mode.has_room
        if has_room is self._is_full:
            self._is_full = not has_room
            if has_room:
                self._wire.resume()
            else:
                self._wire.pause()
        return has_room

    def _take(self, frame: Frame) -> None:
        """Perform what a client's command leads to."""
        command = commands.parse_command(frame.command)
        event = event_of(command)
        state = self.state
        match self._machine.handle(event):
            case Action.SEND_PONG:
                self._wire.send(commands.pong())
            case Action.AUTHENTICATE:
                self._begin(command)
            case Action.FORWARD_REQUEST:
                self._lookup_mode.forward_parsed(command, frame.command)
            case Action.REAUTHENTICATE:
                self._answered(command, frame)
            case Action.REFUSE_COMMAND:
                self._lookup_mode.refuse(command)
            case Action.HOLD_COMMAND:
                self._held = frame.encode()  # for the relay, like whatever stands behind it
                self._wait()
            case Action.FAIL:
                self._out_of_turn(command, state)
            case _:
                pass

    def _answered(self, command: BaseCommand, frame: Frame) -> None:
        """An AUTH_RESPONSE in lookup mode: an answer, asked for or not, where the session can expire."""
        if self._renewal.is_under_way:
            self._renewal.answered(frame)
        else:
            self._machine.handle(Event.DENIED)
            self._out_of_turn(command, State.LOOKUP)

    def _wait(self) -> None:
        """Take no more frames until ``_go_on``, or until the connection is a relay."""
        self._waits = True
        self._wire.pause()

    def _go_on(self) -> None:
        self._waits = False
        if not self._over.is_set():
            self._wire.resume()
            self._take_frames()

    def _out_of_turn(self, command: BaseCommand, state: State) -> None:
        text = f"{command_name(command.type)} while {state.value}"
        self._farewell = Farewell(commands.error(NO_REQUEST_ID, ServerError.NotAllowedError, f"Not allowed: {text}"))
        get_logger().warning(
            "a client sent a command out of turn", client=self.address, principal=self.identity.role, reason=text
        )
        self._end(Cause.NOT_ALLOWED)

    # ---- authentication

    def _begin(self, command: BaseCommand) -> None:
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
            if authentication.enabled:
                self._authentication = self._backends.new_authentication(self._client, self._connect)
        if self._authentication is not None:
            self._nursery.start_soon(self._authenticate, self._authentication, command)
        else:
            self._accepted(ANONYMOUS)

    async def _authenticate(self, authentication: Authentication, command: BaseCommand) -> None:
        """One round with the auth worker."""
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
                self._accepted(verdict)
            case Challenge():
                if self._machine.handle(Event.CHALLENGED) is Action.SEND_CHALLENGE:
                    self._wire.send(verdict.frame)
            case Denial():
                self._fail(
                    Event.DENIED,
                    Cause.AUTHENTICATION_FAILED,
                    verdict.refusal.code,
                    verdict.refusal.message,
                    f"authentication denied: {verdict.reason}",
                    delay_s=seconds(self._backends.config.authentication.failure_delay_ms),
                )

    def _accepted(self, identity: ClientIdentity) -> None:
        self.identity = identity
        self._measure("authentication", self._started)
        self._renewal.begin(self._connect, identity.principal)
        if self.target:
            if self._machine.handle(Event.ACCEPTED_FOR_TARGET) is Action.CONNECT_BROKER:
                self._nursery.start_soon(self._open_broker)
        elif self._backends.profile_is_fresh:
            self._connected(self._backends.profile)
        else:
            self._wait()
            self._nursery.start_soon(self._connected_later)

    async def _connected_later(self) -> None:
        self._connected(await self._backends.broker_profile())
        self._go_on()

    def _connected(self, profile: CommandConnected | None) -> None:
        """Enter lookup mode."""
        if self._machine.handle(Event.ACCEPTED_FOR_LOOKUP) is not Action.SEND_CONNECTED:
            return
        self._lookup_mode.identify(self.identity)
        self._renewal.follow(self, self._about())
        connected = lookup_mode_connected(self._connect, profile, SERVER_VERSION)
        self._wire.send(commands.connected(connected))
        self._deadline = trio.current_time() + self._keep_alive_s
        self._waiting.deadline = min(self._waiting.deadline, self._deadline)
        self._measure("total", self._started)
        self._end_handshake()
        if self._draining:
            self.drain()

    def _measure(self, stage: str, since: float) -> None:
        self._metrics.handshake_seconds.labels(stage=stage).observe(trio.current_time() - since)

    # ---- a renewal's client (proxy.forwarder.renewal.LookupClient)

    def _may_pass(self, frame: Frame) -> bool:
        """Whether a frame may be taken now that the session has expired: it may come too late, or too early."""
        use = self._renewal.use(commands.parse_command(frame.command))
        if use is Use.HOLD:
            self._postponed = frame
            self._wait()
        return use is Use.GO_ON

    def ask_again(self, challenge: bytes) -> None:
        """Send a challenge."""
        self._wire.send(challenge)

    def renewed(self, identity: ClientIdentity | None) -> None:
        """There is a verdict: who the client is now, if that is new; what waits for it goes on."""
        if identity is not None:
            self.identity = identity
            self._lookup_mode.identify(identity)
        if self._postponed is not None:
            self._go_on()

    def hold(self) -> None:
        """Take nothing more from the client."""
        self._wait()

    def say_farewell(self, cause: Cause, frame: bytes) -> None:
        """End the connection with this frame."""
        if self._machine.handle(Event.DENIED) is Action.FAIL:
            self._farewell = Farewell(frame)
            self._end(cause)

    @property
    def answers_due(self) -> int:
        """Requests under way, and bytes that have not left."""
        return self._lookup_mode.under_way.count + self._wire.unsent_bytes

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    # ---- the relay

    async def _open_broker(self) -> None:
        started = trio.current_time()
        try:
            await self._broker.open(self._connect, self.identity)
        except BrokerSideFailed as failed:
            self._metrics.broker_failures.labels(reason=failed.reason).inc()
            self._fail(Event.BROKER_FAILED, failed.cause, failed.code, failed.message, str(failed))
            return
        if self._machine.handle(Event.BROKER_CONNECTED) is Action.START_RELAY:
            self._measure("broker", started)
            self._measure("total", self._started)
            self._stop()

    async def _relay(self) -> None:
        rest = await self._wire.end_reading()
        if not await self._wire.until_sent():  # Connected would be read as the other half of something
            self.cause = Cause.CLIENT_DOES_NOT_READ
            return
        link = self._broker.link
        session = self._renewal.for_relay(link.connected.message, self.identity)
        try:
            # Connected goes out as the relay's first bytes, so nothing can come before it.
            await self._relays.begin(
                self._wire.stream,
                link.stream,
                self._about(),
                first_to_broker=self._held + rest,
                first_to_client=link.connected.frame.encode() + link.connected.rest,
                config=self._backends.config.relay,
                session=session,
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
