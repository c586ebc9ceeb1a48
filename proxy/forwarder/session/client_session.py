"""One client's connection, from accept to close: performs what proto.client_machine decides.

Frames come by callback (proxy.forwarder.session.transport), and whatever can be done at once is done there: a client
that connects,
asks and leaves costs no task at all. What takes time (a round of authentication, opening the broker's side, a last word
before the close) is a task, beside which a PING is answered and a client that leaves is noticed at any moment. Those
tasks report back with events.
"""

from collections.abc import Callable
from functools import partial

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event, State, event_of, is_plainly_lookup
from proto.command_heads import check_type_is_first
from proto.commands import NO_REQUEST_ID, command_name
from proto.errors import RemoteProtocolError
from proto.frames import Frame, FrameTooLarge
from proto.pulsar_pb2 import BaseCommand, CommandConnect, ServerError
from proto.session_clock import CommandDecision
from proxy.common.logs import get_logger
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.pre_auth import PreAuthConnection
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.relay.start import RelayStartFailed
from proxy.forwarder.session.broker_connector import RELAY_NOT_BEGUN, BrokerConnector
from proxy.forwarder.session.closing import ConnectionCloser
from proxy.forwarder.session.connection_age import ConnectionAge
from proxy.forwarder.session.handshake import Handshake
from proxy.forwarder.session.lifetime import SessionLifetime
from proxy.forwarder.session.lookup_mode import LookupMode, budget_owner
from proxy.forwarder.session.timeouts import ClientTimeouts
from proxy.forwarder.session.transport import ClientSlow, ClientTransport
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientEndpoint, ClientIdentity
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.fairness.byte_budget import ByteReservation
from proxy.runtime.fairness.fair_capacity import owner_of
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.scoped_tasks import ScopedTasks
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.loop.tick import current_tick

UNFINISHED_BYTES_MIN = 16 * 1024
"""What is here of a frame is counted above this size; whoever connects and asks sends less."""


class ClientSession:
    """See the module. ``begin`` it once, then ``drain`` or ``shut_down``; when it has ended, it calls ``on_end``.

    ``handshakes`` counts it for as long as it is not decided what the connection will be. ``nursery`` is for what takes
    time. ``became_relay``: how it ended; if so, the connection is no longer this session's. ``renewal``: how long it
    lasts (KIP-368). ``stranger``: how it is counted before its client is known.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        client: ClientEndpoint,
        backends: WorkerClients,
        relays: RelayManager,
        metrics: ForwarderMetrics,
        *,
        handshakes: InFlightCounter,
        nursery: trio.Nursery,
        deadlines: Deadlines,
        on_end: Callable[["ClientSession"], None],
        stranger: PreAuthConnection | None = None,
    ) -> None:
        self.address = client.address
        self.became_relay = False
        self.cause = DisconnectCause.SHUT_DOWN
        self.identity = ANONYMOUS
        self.is_over = False
        self._workers = backends
        self._relays = relays
        self._limits = limits = backends.config.limits
        self._metrics = metrics
        self._nursery = nursery
        self._pre_auth = stranger or PreAuthConnection()
        self._pre_auth.evict = self.evict
        self._on_end = on_end
        self._tick = current_tick()
        self._tasks = tasks = ScopedTasks(nursery, self._on_internal_error)
        self._transport = wire = ClientTransport(
            stream,
            tasks,
            max_frame_bytes=limits.max_command_bytes,
            write_timeout_ms=limits.keep_alive_interval_ms,
        )
        self._closer = ConnectionCloser(wire)
        self._machine = machine = ClientMachine()
        self._broker_connector = BrokerConnector(backends, client.address)
        self._handshake = Handshake(
            self,
            client,
            backends,
            metrics,
            broker=self._broker_connector,
            machine=machine,
            wire=wire,
            tasks=tasks,
            handshakes=handshakes,
            stranger=self._pre_auth,
        )
        self.lifetime = SessionLifetime(backends, client, relays, metrics)
        self._lookup_mode = LookupMode(
            backends, metrics, client.address, tasks, wire, self._handle_frames, self._client_corrupt
        )
        self._unfinished = ByteReservation(backends.budget, owner_of("", client.address))
        self._accepted_at = client.accepted_at
        self._age = ConnectionAge(deadlines, limits, client.accepted_at, self._reached_age)
        self._timeouts = ClientTimeouts(deadlines, wire, limits, give_up=self._give_up, is_unheard=self._is_unheard)
        self._waits = False
        self._is_full = False
        self._has_said_all = False
        self._held = b""
        self._draining = False
        self._postponed: Frame | None = None

    @property
    def state(self) -> State:
        """Where the connection stands."""
        return self._machine.state

    # ---- life

    def start_session(self) -> None:
        """Lead the client through, until its connection is closed, or a relay."""
        try:
            self._handshake.begin()
            self._timeouts.start_handshake_deadline(self._accepted_at)
            self._transport.start_reading(self._handle_frames, self._client_ended)
        except Exception as error:  # noqa: BLE001 -- whoever accepts must go on
            self._on_internal_error(error)

    def drain(self) -> None:
        """Leave as soon as nothing is under way. A relay goes on: its client decides when it ends."""
        self._draining = True
        if self.state in {State.AWAITING_CONNECT, State.LOOKUP}:
            self._tasks.start_soon(self._leave, DisconnectCause.SHUT_DOWN)

    def _reached_age(self) -> None:
        get_logger().debug("a lookup connection is being ended", client=self.address, reason="max_age")
        self._tasks.start_soon(self._leave, DisconnectCause.MAX_AGE)

    async def _leave(self, cause: DisconnectCause) -> None:
        """End the connection at a moment when nothing is asked; where there is none, answer what was, and no more."""
        under_way, timeout_s = self._lookup_mode.in_flight, self._workers.answer_timeout_s
        if not await under_way.wait_until_empty(timeout_s=timeout_s):
            self.wait()
            await under_way.wait_until_empty(timeout_s=timeout_s)
        if self.state in {State.AWAITING_CONNECT, State.LOOKUP}:
            self._machine.handle(Event.SHUT_DOWN)
            await self._transport.wait_until_sent()
            self._end(cause)

    def shut_down(self) -> None:
        """Leave now."""
        if not self.is_over:
            self._machine.handle(Event.SHUT_DOWN)
            self._end(DisconnectCause.SHUT_DOWN)

    def evict(self) -> None:
        """Close at once, since others need the place: this client has been silent before it was known."""
        if not self.is_over:
            self._machine.handle(Event.SHUT_DOWN)
            self._end(DisconnectCause.GAVE_WAY)
        else:
            self._closer.drop_final_frame()

    # ---- endings

    def _end(self, cause: DisconnectCause) -> None:
        """Note why, and read no more."""
        self.cause = cause
        self._stop()

    def _stop(self) -> None:
        self._transport.pause_reading()
        self._timeouts.clear_deadline()
        self._age.clear_deadline()
        if not self.is_over:
            self.is_over = True
            if self.state is not State.RELAYING:
                self._pre_auth.mark_silent()  # until it is closed, which may take its time
            self._tick.schedule_flush(self)  # whoever noticed the end may still be in the middle of something

    def _on_internal_error(self, error: Exception) -> None:
        """What one client meets must not end all the others."""
        get_logger().error("a client's connection met a defect", client=self.address, exc_info=error)
        self._end(DisconnectCause.DEFECT)

    def flush(self) -> None:
        """The turn in which it ended is over: close, or become a relay."""
        if not self._broker_connector.is_open and self._closer.close_if_silent():
            self._release_resources()
            self._on_end(self)
        else:
            self._nursery.start_soon(self._end_in_time)

    async def _end_in_time(self) -> None:
        try:
            if self.state is State.RELAYING:
                await self._relay()
            else:
                await self._closer.send_final_frame()
        except Exception as error:  # noqa: BLE001 -- it ends in any case
            self._on_internal_error(error)
        finally:
            self._release_resources()
            try:
                if not self.became_relay:  # then both streams are the relay's
                    await self._broker_connector.close_link()
                    await self._closer.close_connection()
            finally:
                self._on_end(self)

    def _release_resources(self) -> None:
        self._unfinished.resize(0)
        self._lookup_mode.close()
        self._tasks.cancel()
        self._handshake.end()
        self.lifetime.abandon_reauthentication()

    def fail(
        self, event: Event, cause: DisconnectCause, code: int, message: str, detail: str = "", *, delay_s: float = 0.0
    ) -> None:
        """End the connection with an error that the client is told. ``message`` is for it, ``detail`` for the log."""
        action = self._machine.handle(event)
        if action is Action.IGNORE:  # it has ended already
            return
        if action is Action.FAIL:
            self._closer.set_final_frame(commands.error(NO_REQUEST_ID, code, message), delay_s=delay_s)
        self._end(cause)
        self._log_failure(detail or message)

    def _log_failure(self, reason: str) -> None:
        get_logger().warning(
            "a client's connection failed",
            client=self.address,
            principal=self.identity.role,
            target=self._handshake.target,
            cause=self.cause.value,
            reason=reason,
            **self.identity.proxy_log_fields,
        )

    def _client_corrupt(self, error: RemoteProtocolError) -> None:
        too_large = isinstance(error, FrameTooLarge)
        cause = DisconnectCause.FRAME_TOO_LARGE if too_large else DisconnectCause.PROTOCOL_ERROR
        text = f"{'Too large' if too_large else 'Not Pulsar'}: {error}"
        self.fail(Event.CLIENT_CORRUPT, cause, ServerError.NotAllowedError, text)

    def _client_ended(self, error: Exception | None) -> None:
        match error:
            case None if self._lookup_mode.in_flight.count or self._transport.unsent_bytes:
                self._has_said_all = True
                self._tasks.start_soon(self._client_has_said_all)
            case None:
                self._client_gone(DisconnectCause.CLIENT_CLOSED)
            case trio.BrokenResourceError():
                self._client_gone(DisconnectCause.CLIENT_BROKE_OFF)
            case ClientSlow():
                self._client_gone(DisconnectCause.CLIENT_DOES_NOT_READ)
            case _:
                self._on_internal_error(error)

    def _client_gone(self, cause: DisconnectCause) -> None:
        if self._machine.handle(Event.CLIENT_CLOSED) is not Action.IGNORE:
            self._end(cause)

    async def _client_has_said_all(self) -> None:
        """A client that only ended its own direction may still be waiting for answers."""
        timeout_s = seconds(self._limits.lookup_timeout_ms)
        await self._lookup_mode.in_flight.wait_until_empty(timeout_s=timeout_s)
        await self._transport.wait_until_sent()
        self._client_gone(DisconnectCause.CLIENT_CLOSED)

    def _give_up(self) -> None:
        if self.state is State.LOOKUP:
            self._machine.handle(Event.DEADLINE)
            self._end(DisconnectCause.KEEP_ALIVE_TIMEOUT)
            return
        self.fail(
            Event.DEADLINE,
            DisconnectCause.HANDSHAKE_TIMEOUT,
            ServerError.ServiceNotReady,
            "The handshake took too long",
            f"the handshake was not finished within {self._limits.handshake_timeout_ms} ms ({self.state.value})",
        )

    # ---- reading

    def _is_unheard(self) -> bool:
        return self._is_full or self._has_said_all or self._waits

    def _handle_frames(self) -> None:
        """Perform what the frames that are here lead to; those behind one that must wait, wait."""
        if self._waits or self.is_over:
            return
        try:
            has_room, expired = self._has_room(), self.lifetime.has_expired
            while has_room and not self._waits and not self.is_over:
                frame = self._postponed or self._transport.next_frame()
                self._postponed = None
                if frame is None:
                    break
                if not expired and is_plainly_lookup(frame.command) and self.state is State.LOOKUP:
                    self._lookup_mode.forward_request(frame.command)  # of which a chunk brings only so many bytes
                elif not expired or self._may_pass(frame):
                    self._handle_frame(frame)
                    has_room = self._has_room()
        except RemoteProtocolError as error:
            self._client_corrupt(error)
        self._lookup_mode.send_batch()
        self._count_unfinished()

    def _count_unfinished(self) -> None:
        """Count what is here of a large frame: one that cannot be kept ends its sender, and nobody else.

        A client that is not read ends by nobody's shortage: what is here may be whole frames, and no more comes.
        """
        unfinished = self._transport.partial_frame_bytes
        if unfinished < UNFINISHED_BYTES_MIN:
            unfinished = 0
        if unfinished == self._unfinished.size_bytes or self.is_over or self._unfinished.resize(unfinished):
            return
        if not (self._is_full or self._waits):
            text = "The proxy has no memory for a frame of this size now"
            detail = f"{text} (limits.max_lookup_bytes)"
            self.fail(Event.CLIENT_CORRUPT, DisconnectCause.NO_MEMORY, ServerError.ServiceNotReady, text, detail)

    def _has_room(self) -> bool:
        """Whether more may be taken from this client; else it goes on with an answer that leaves."""
        has_room = self._lookup_mode.has_room and not self._transport.has_many_unsent_pongs
        if has_room is self._is_full:
            self._is_full = not has_room
            if has_room:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        return has_room

    def _handle_frame(self, frame: Frame) -> None:
        """Perform what a client's command leads to. Raises RemoteProtocolError."""
        command = commands.parse_command(frame.command)
        state = self.state
        if state is State.LOOKUP:
            check_type_is_first(command, frame.command)  # a relay's client may not say it otherwise, either
        match self._machine.handle(event_of(command)):
            case Action.SEND_PONG:
                self._transport.send_pong(commands.pong())
            case Action.AUTHENTICATE:
                self._handshake.take(command)
            case Action.FORWARD_REQUEST:
                self._lookup_mode.forward_parsed_request(command, frame.command)
            case Action.REAUTHENTICATE:
                if not self.lifetime.on_auth_response(frame):
                    self._machine.handle(Event.DENIED)
                    self._out_of_turn(command, state)
            case Action.REFUSE_COMMAND:
                self._lookup_mode.refuse_command(command)
            case Action.HOLD_COMMAND:
                self._held = frame.encode()  # for the relay, like whatever stands behind it
                self.wait()
            case Action.FAIL:
                self._out_of_turn(command, state)

    def wait(self) -> None:
        """Take no more frames until ``go_on``, or until the connection is a relay."""
        self._waits = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        """Take frames again."""
        self._waits = False
        if not self.is_over:
            self._transport.resume_reading()
            self._handle_frames()

    def _out_of_turn(self, command: BaseCommand, state: State) -> None:
        text = f"{command_name(command.type)} while {state.value}"
        self._closer.set_final_frame(commands.error(NO_REQUEST_ID, ServerError.NotAllowedError, f"Not allowed: {text}"))
        get_logger().warning(
            "a client sent a command out of turn", client=self.address, principal=self.identity.role, reason=text
        )
        self._end(DisconnectCause.NOT_ALLOWED)

    # ---- a handshake's session (proxy.forwarder.session.handshake.HandshakeSession)

    def accepted(self, connect: CommandConnect, identity: ClientIdentity) -> None:
        """It is known who the client is."""
        self.identity = identity
        self._unfinished.transfer_to(budget_owner(identity, self.address, self._workers.config))
        self.lifetime.on_authenticated(connect, identity.principal)

    def enter_lookup_mode(self, connected: bytes) -> None:
        """Serve lookups from now on; ``connected`` tells the client."""
        self._lookup_mode.set_identity(self.identity)
        self.lifetime.start_in_lookup_mode(self, partial(self._handshake.stored_relay, self.identity))
        self._transport.send(connected)
        self._timeouts.start_keep_alive()
        self._age.start_deadline()
        if self._draining:
            self.drain()

    def begin_relay(self) -> None:
        """The broker's side is there."""
        self._stop()

    # ---- a renewal's client (proxy.forwarder.session.lifetime.LookupClient), which can wait, too

    def _may_pass(self, frame: Frame) -> bool:
        """Whether a frame may be taken now that the session has expired: it may come too late, or too early."""
        use = self.lifetime.decide_command(frame)
        if use is CommandDecision.HOLD:
            self._postponed = frame
            self.wait()
        return use is CommandDecision.PASS

    def ask_again(self, challenge: bytes) -> None:
        """Send a challenge. A command that waits for the verdict has waited in vain: the answer stands behind it."""
        self._transport.send(challenge)
        if self._postponed is not None:
            self.go_on()

    def renewed(self, identity: ClientIdentity | None) -> None:
        """There is a verdict: who the client is now, if that is new; what waits for it goes on."""
        if identity is not None:
            self.identity = identity
            self._lookup_mode.set_identity(identity)
        if self._postponed is not None:
            self.go_on()

    def say_farewell(self, cause: DisconnectCause, frame: bytes) -> None:
        """End the connection with this frame, once everything under way has been answered."""
        if not self.is_over:
            self._tasks.start_soon(self._say_farewell, cause, frame)

    async def _say_farewell(self, cause: DisconnectCause, frame: bytes) -> None:
        await self._lookup_mode.in_flight.wait_until_empty(timeout_s=self._workers.answer_timeout_s)
        if self._machine.handle(Event.DENIED) is Action.FAIL:
            self._closer.set_final_frame(frame)
            self._end(cause)

    # ---- the relay

    async def _relay(self) -> None:
        rest = await self._transport.stop_reading()
        if not await self._transport.wait_until_sent():  # Connected would be read as the other half of something
            self.cause = DisconnectCause.CLIENT_DOES_NOT_READ
            return
        link = self._broker_connector.link
        session = self.lifetime.relay_session(
            link.connected.message, self.identity, answers_broker=link.broker.host if link.answers_challenges else ""
        )
        about = self._handshake.stored_relay(self.identity)
        about.leave_at_ms = self._age.leave_at_ms(self._relays.now())
        try:
            await self._relays.start_relay(
                self._broker_connector.relay_start(
                    self._transport.stream, about, first_to_broker=self._held + rest, session=session
                )
            )
        except RelayStartFailed as error:
            self._closer.set_final_frame(commands.error(NO_REQUEST_ID, ServerError.ServiceNotReady, RELAY_NOT_BEGUN))
            self.cause = DisconnectCause.RELAY_NOT_BEGUN
            self._log_failure(str(error))
            await self._closer.send_final_frame()
        else:
            self.became_relay = True
            self._pre_auth.stop_counting()
