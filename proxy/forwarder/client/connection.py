"""One client's connection, from accept until it is closed or a relay's.

It performs the actions that proto.client_machine decides. Frames come by callback (proxy.forwarder.client.transport),
and so do an auth worker's verdicts: a client that connects, asks and leaves costs no task at all, nor does one that
becomes a relay to a broker on plain TCP. What takes longer (any other connection to a broker, a final frame before the
close) is a task. Meanwhile a PING is answered, and the end of a client is noticed at any moment. Outcomes become events
of the machine here.
"""

import ssl
from collections.abc import Callable
from functools import partial

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event, State, event_of, is_plainly_lookup
from proto.command_heads import check_type_is_first
from proto.commands import NO_REQUEST_ID, command_name
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.framed_stream import Action as FrameAction
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proxy.common.connection_kinds import HANDSHAKE, LOOKUP
from proxy.common.deny_list import DenyList
from proxy.common.logs import get_logger
from proxy.forwarder.client.failures import (
    ConnectionFailure,
    corrupt_failure,
    denied_failure,
    disconnected_failure,
    envelope_unsupported_failure,
    handshake_timeout_failure,
    no_memory_failure,
    refusal_failure,
    relay_start_failure,
)
from proxy.forwarder.client.handshake import Handshake, RoundOutcome
from proxy.forwarder.client.lifetime import SessionLifetime
from proxy.forwarder.client.listing import ListedConnection, connection_of, session_end
from proxy.forwarder.client.lookup_control import (
    ChallengeDue,
    LifetimeEvent,
    LifetimeOver,
    SessionClosing,
    VerdictKnown,
)
from proxy.forwarder.client.lookup_mode import LookupMode
from proxy.forwarder.client.phases import NEXT_PHASES, SERVED, Phase
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.client.timeouts import ClientTimeouts, ConnectionAge
from proxy.forwarder.client.transport import ClientSlow, ClientTransport, ConnectionCloser, InboundFlow
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.eviction import PreAuthConnection
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.workers.authentication import ANONYMOUS, Challenge, ClientEndpoint, ClientIdentity
from proxy.runtime.fairness.byte_budget import ByteReservation
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.scoped_tasks import ScopedTasks
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tick import current_tick


class ClientConnection:
    """The connection of one client, until it is closed or becomes a relay; then it calls ``on_end``.

    ``start_serving`` once, then ``drain`` or ``shut_down``. ``cause``: why it ended, unless its phase is RELAYED.
    ``lifetime``: how long the client's authentication lasts (KIP-368). ``pre_auth``: how the connection is counted
    before its client has authenticated.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        client: ClientEndpoint,
        services: ConnectionServices,
        on_end: Callable[["ClientConnection"], None],
        pre_auth: PreAuthConnection | None = None,
    ) -> None:
        workers, metrics = services.workers, services.metrics
        limits = workers.config.limits
        self.address = client.address
        self.number = client.number
        self.phase = Phase.SERVING
        self.cause = DisconnectCause.SHUT_DOWN
        self.identity = ANONYMOUS
        self._services = services
        self._on_end = on_end
        self._pre_auth = pre_auth or PreAuthConnection()
        self._pre_auth.evict = self.evict
        self._tick = current_tick()
        self._tasks = ScopedTasks(services.nursery, self._on_internal_error)
        self._transport = transport = ClientTransport(
            stream,
            self._tasks,
            max_frame_bytes=limits.max_command_bytes,
            write_timeout_ms=limits.keep_alive_interval_ms,
        )
        self._closer = ConnectionCloser(self._transport)
        self._machine = ClientMachine()
        self.handshake = Handshake(client, services, self._tasks)
        self._workers = workers
        self._limits = limits
        self.lifetime = SessionLifetime(client, workers, services.relays, metrics, self._on_lifetime_event)
        self._lookup_mode = LookupMode(client.address, workers, metrics, transport, self._on_corrupt)
        self._lookup_mode.on_unsupported_envelope = self._on_unsupported_envelope
        partial_frame = ByteReservation(workers.budget, owner_of("", client.address))
        self._inbound = inbound = InboundFlow(transport, self._lookup_mode, partial_frame)
        self._accepted_at = client.accepted_at
        self._age = ConnectionAge(services.deadlines, limits, client.accepted_at, self._on_age_reached)
        self._timeouts = ClientTimeouts(
            services.deadlines, transport, limits, on_timeout=self._on_timeout, is_unread=inbound.is_unread
        )
        self._held = b""
        self._postponed: Frame | None = None

    @property
    def state(self) -> State:
        """The state of the connection, for texts and counts."""
        return self._machine.state

    @property
    def target(self) -> str:
        """The broker that the client wants, for logs; empty: none, or not known yet."""
        return self.handshake.target

    @property
    def _is_served(self) -> bool:
        return self.phase in SERVED

    def enter_phase(self, phase: Phase) -> None:
        """Change the phase. Raises LocalProtocolError, for a defect, where none of NEXT_PHASES allows it."""
        if phase not in NEXT_PHASES[self.phase]:
            raise LocalProtocolError(f"{phase.value} after {self.phase.value}")
        self.phase = phase

    def start_serving(self) -> None:
        """Serve the client until its connection is closed, or a relay's."""
        try:
            self.handshake.start_handshake()
            self._timeouts.start_handshake_deadline(self._accepted_at)
            self._transport.start_reading(self._handle_frames, self._on_client_end)
        except Exception as error:  # noqa: BLE001 -- the caller must go on to accept others
            self._on_internal_error(error)

    # ---- ends that come from outside

    def shut_down(self) -> None:
        """Close at once. A relay that is being started goes on."""
        if self._is_served:
            self._machine.handle(Event.SHUT_DOWN)
            self._end(DisconnectCause.SHUT_DOWN)

    def evict(self, cause: DisconnectCause = DisconnectCause.GAVE_WAY) -> None:
        """Close at once, for a newcomer."""
        if self._is_served:
            self._machine.handle(Event.EVICTED)
            self._end(cause)
        else:
            self._closer.drop_final_frame()

    def deny_if_listed(self, denied: DenyList) -> None:
        """End the connection with an error if a deny list names the client's credentials.

        One that waits for its broker is ended as soon as it is a relay.
        """
        kind = denied.matching_kind(self.identity.credentials)
        if kind and self._is_served and self.state is not State.CONNECTING_TO_BROKER:
            self._fail(denied_failure(f"an entry {kind} of authentication.deny_file names its credentials"))

    def disconnect(self) -> bool:
        """End the connection for an operator, behind answers; return False if it has ended, or its relay starts."""
        if not self._is_served:
            return False
        if self.state is State.CONNECTING_TO_BROKER:
            self.evict(DisconnectCause.DISCONNECTED)
        elif self._lookup_mode.in_flight.count:
            self._inbound.hold_frames()
            self._tasks.start_soon(self._fail_after_answers, disconnected_failure())
        else:
            self._fail(disconnected_failure())
        return True

    def listed(self, unix_ms: float) -> ListedConnection | None:
        """Return what an operator is told of the connection; None: it has ended, or is a relay."""
        if self.phase in {Phase.RELAYED, Phase.ENDING}:
            return None
        ends_at = session_end(self.lifetime.expiring_session, self._services.relays.now(), unix_ms)
        kind = LOOKUP if self.state is State.LOOKUP else HANDSHAKE
        record = self.handshake.stored_relay(self.identity)
        return ListedConnection(connection_of(record, kind, ends_at), self.disconnect)

    # ---- the end, as soon as no request is under way

    def drain(self) -> None:
        """Leave as soon as no request is under way. A relay goes on: its client decides when it ends."""
        if self._is_served:
            self.enter_phase(Phase.DRAINING)
            self._finish_requests(DisconnectCause.SHUT_DOWN)

    def _on_age_reached(self) -> None:
        get_logger().debug("a lookup connection is being ended", client=self.address, reason="max_age")
        self._finish_requests(DisconnectCause.MAX_AGE)

    def _finish_requests(self, cause: DisconnectCause) -> None:
        if self._machine.handle(Event.DRAIN) is Action.FINISH_REQUESTS:
            self._tasks.start_soon(self._close_when_idle, cause)

    async def _close_when_idle(self, cause: DisconnectCause) -> None:
        """Close at a moment when no request is under way; where none comes, take no more, and answer what is there."""
        in_flight, timeout_s = self._lookup_mode.in_flight, self._workers.answer_timeout_s
        if not await in_flight.wait_until_empty(timeout_s=timeout_s):
            self._inbound.hold_frames()
            await in_flight.wait_until_empty(timeout_s=timeout_s)
        if self._machine.handle(Event.DRAINED) is Action.CLOSE:
            await self._transport.wait_until_sent()
            self._end(cause)

    # ---- the end, for what the client does or fails to do

    def _on_client_end(self, error: Exception | None) -> None:
        match error:
            case None if self._lookup_mode.in_flight.count or self._transport.unsent_bytes:
                self._inbound.is_at_end = True
                self._tasks.start_soon(self._close_when_answered)
            case None:
                self._close_on(Event.CLIENT_CLOSED, DisconnectCause.CLIENT_CLOSED)
            case trio.BrokenResourceError():
                if isinstance(error.__cause__, ssl.SSLError):
                    self._log_tls_violation(error)
                self._close_on(Event.CLIENT_CLOSED, DisconnectCause.CLIENT_BROKE_OFF)
            case ClientSlow():
                self._close_on(Event.CLIENT_STALLED, DisconnectCause.CLIENT_DOES_NOT_READ)
            case _:
                self._on_internal_error(error)

    def _log_tls_violation(self, error: trio.BrokenResourceError) -> None:
        event = "a client's connection ends, since TLS has failed"
        get_logger().warning(event, client=self.address, principal=self.identity.role, reason=str(error))

    async def _close_when_answered(self) -> None:
        """Close behind the last answer: a client that has only ended its own direction may still wait for some."""
        timeout_s = seconds(self._limits.lookup_timeout_ms)
        await self._lookup_mode.in_flight.wait_until_empty(timeout_s=timeout_s)
        await self._transport.wait_until_sent()
        self._close_on(Event.CLIENT_CLOSED, DisconnectCause.CLIENT_CLOSED)

    def _on_timeout(self, event: Event) -> None:
        if event is Event.KEEP_ALIVE_TIMEOUT:
            self._close_on(event, DisconnectCause.KEEP_ALIVE_TIMEOUT)
        else:
            self._fail(handshake_timeout_failure(self._limits.handshake_timeout_ms, self.state))

    def _on_corrupt(self, error: RemoteProtocolError) -> None:
        self._fail(corrupt_failure(error))

    def _on_unsupported_envelope(self) -> None:
        """Have the client connect again, as Kafka's forwarding broker does: another lookup worker may know the version.

        No more is taken, and the requests under way are answered before.
        """
        self._inbound.hold_frames()
        self._tasks.start_soon(self._fail_after_answers, envelope_unsupported_failure())

    async def _fail_after_answers(self, failure: ConnectionFailure) -> None:
        await self._lookup_mode.in_flight.wait_until_empty(timeout_s=self._workers.answer_timeout_s)
        self._fail(failure)

    def _fail_command(self, command: BaseCommand, state: State) -> None:
        """End the connection for a command that is not allowed; ``state``: the one in which it came."""
        text = f"{command_name(command.type)} while {state.value}"
        self._closer.set_final_frame(commands.error(NO_REQUEST_ID, ServerError.NotAllowedError, f"Not allowed: {text}"))
        get_logger().warning(
            "a client sent a command out of turn", client=self.address, principal=self.identity.role, reason=text
        )
        self._end(DisconnectCause.NOT_ALLOWED)

    # ---- the end, with or without an error

    def _close_on(self, event: Event, cause: DisconnectCause) -> None:
        """End the connection without an error, if that is what the event leads to."""
        if self._machine.handle(event) is Action.CLOSE:
            self._end(cause)

    def _fail(self, failure: ConnectionFailure) -> None:
        """End the connection with an error, unless it has ended already."""
        action = self._machine.handle(failure.event)
        if action is Action.IGNORE:
            return
        if action is Action.FAIL:
            frame = commands.error(NO_REQUEST_ID, failure.code, failure.message)
            self._closer.set_final_frame(frame, delay_s=failure.delay_s)
        self._end(failure.cause)
        get_logger().warning(
            "a client's connection failed",
            client=self.address,
            principal=self.identity.role,
            target=self.target,
            cause=self.cause.value,
            reason=failure.detail or failure.message,
            **self.identity.proxy_log_fields,
        )

    def _on_internal_error(self, error: Exception) -> None:
        """Log an error that no code handles, and end this connection only."""
        get_logger().error("a client's connection met a defect", client=self.address, exc_info=error)
        self._machine.handle(Event.INTERNAL_ERROR)
        self._end(DisconnectCause.DEFECT)

    def _end(self, cause: DisconnectCause) -> None:
        """Note the cause and serve the client no more; close once this tick is over."""
        self.cause = cause
        if self._is_served:  # otherwise it is being closed already, or will be where its relay does not start
            self._stop_serving(Phase.ENDING)
            self._pre_auth.mark_silent()  # until it is closed, which may take its time
            self._tick.schedule_flush(self)  # the caller may still be handling frames

    def _stop_serving(self, phase: Phase) -> None:
        self.enter_phase(phase)
        self._inbound.hold_frames()
        self.lifetime.stop_events()
        self._timeouts.clear_deadline()
        self._age.clear_deadline()

    def flush(self) -> None:
        """Close, at the end of the tick in which the connection has ended."""
        if not self.handshake.has_link and self._closer.close_if_silent():
            self._finish()
        else:
            self._services.nursery.start_soon(self._close)

    async def _close(self) -> None:
        """Close the client's connection behind its final frame, and the broker's, if there is one."""
        try:
            await self._closer.send_final_frame()
        except Exception as error:  # noqa: BLE001 -- the connection ends in any case
            self._on_internal_error(error)
        finally:
            self._release_resources()
            try:
                await self.handshake.close_link()
                await self._closer.close_connection()
            finally:
                self._on_end(self)

    def _finish(self) -> None:
        """Report the end of a connection that is closed, or a relay's."""
        self._release_resources()
        self._on_end(self)

    def _release_resources(self) -> None:
        """Give back what is counted for the client, and cancel its tasks."""
        self._inbound.release_memory()
        self._lookup_mode.close()
        self._tasks.cancel()
        self.handshake.abandon_handshake()
        self.lifetime.abandon_reauthentication()
        self._transport.drop_callbacks()

    # ---- frames

    def _handle_frames(self) -> None:
        """Handle the frames that are here; those behind one that must wait, wait as well."""
        inbound = self._inbound
        if inbound.is_held:
            return
        machine, lookup_mode, next_frame = self._machine, self._lookup_mode, self._transport.next_frame
        try:
            has_room, expired = inbound.check_room(), self.lifetime.has_expired
            while has_room and not inbound.is_held:
                frame = self._postponed or next_frame()
                self._postponed = None
                if frame is None:
                    break
                if machine.serves_lookups and not expired and is_plainly_lookup(frame.command):
                    lookup_mode.forward_request(frame.command)  # of which a chunk brings only so many bytes
                elif not expired or self._may_pass(frame):
                    self._handle_frame(frame)
                    has_room = inbound.check_room()
        except RemoteProtocolError as error:
            self._on_corrupt(error)
        lookup_mode.send_batch()
        if self._is_served and not inbound.count_partial_frame():
            self._fail(no_memory_failure())

    def _may_pass(self, frame: Frame) -> bool:
        """Return whether a frame may be handled although the session has expired; one that is held comes again."""
        decision = self.lifetime.decide_command(frame)
        if decision is FrameAction.HOLD:
            self._postponed = frame
            self._inbound.hold_frames()
        return decision in {FrameAction.PASS, FrameAction.COUNT, FrameAction.REMOVE}

    def _handle_frame(self, frame: Frame) -> None:
        """Perform the action for a client's command. Raises RemoteProtocolError."""
        command = commands.parse_command(frame.command)
        machine = self._machine
        state = machine.state
        if machine.serves_lookups:
            check_type_is_first(command, frame.command)  # a relay's client may not write it otherwise, either
        match machine.handle(event_of(command)):
            case Action.SEND_PONG:
                self._transport.send_pong(commands.pong())
            case Action.AUTHENTICATE:
                self._authenticate(command)
            case Action.FORWARD_REQUEST:
                self._lookup_mode.forward_parsed_request(command, frame.command)
            case Action.REAUTHENTICATE:
                if not self.lifetime.on_auth_response(frame):
                    machine.handle(Event.DENIED)
                    self._fail_command(command, state)
            case Action.REFUSE_COMMAND:
                self._lookup_mode.refuse_command(command)
            case Action.HOLD_COMMAND:
                self._held = frame.encode()  # for the relay, like the bytes behind it
                self._inbound.hold_frames()
            case Action.FAIL:
                self._fail_command(command, state)

    def _release_frames(self) -> None:
        """Handle frames again, those first that have waited."""
        if self._is_served:
            with self._tick:  # an end that TLS tells of comes behind the frames
                self._inbound.release_frames()
                self._handle_frames()

    # ---- the handshake

    def _authenticate(self, command: BaseCommand) -> None:
        """Start a round of authentication. Without authentication the client is accepted in the same call: a client
        that does not wait for CONNECTED must not fail, depending on a moment, for the frame that it sends next.
        """
        if command.type == BaseCommand.CONNECT:
            failure = self.handshake.receive_connect(command)
            if failure is not None:
                self._fail(failure)
                return
        self._pre_auth.mark_busy()
        if self.handshake.needs_rounds:
            self.handshake.start_round(command, self._on_round_outcome)
        else:
            self._on_authenticated(ANONYMOUS)

    def _on_round_outcome(self, outcome: RoundOutcome) -> None:
        if not self._is_served:  # since this tick: the round was not abandoned yet
            return
        try:
            match outcome:
                case ClientIdentity():
                    self._on_authenticated(outcome)
                case Challenge():
                    if self._machine.handle(Event.CHALLENGED) is Action.SEND_CHALLENGE:
                        self._transport.send(outcome.frame)
                        self._pre_auth.mark_silent()
                case ConnectionFailure():
                    self._fail(outcome)
        except Exception as error:  # noqa: BLE001 -- the caller serves other connections, too
            self._on_internal_error(error)

    def _on_authenticated(self, identity: ClientIdentity) -> None:
        config = self._workers.config
        if config.authentication.enabled:
            self.handshake.record_duration("authentication")
        self.identity = identity
        self.deny_if_listed(self._services.denied())
        if not self._is_served:
            return
        owner = owner_of(identity.role, self.address, config.authentication.anonymous_role)
        refused = self._pre_auth.take_place(owner, partial(self.evict, DisconnectCause.OVER_SHARE))
        if refused is not None:
            self._fail(refusal_failure(refused))
            return
        self._inbound.set_owner(owner)
        self.lifetime.on_authenticated(self.handshake.connect, identity.principal)
        if config.authentication.enabled:
            self._pre_auth.stop_counting()
        if self.handshake.wants_broker:
            if self._machine.handle(Event.ACCEPTED_FOR_TARGET) is Action.CONNECT_BROKER:
                self.handshake.connect_broker(self.identity, self._on_broker)
        elif self._workers.is_profile_fresh:
            self._enter_lookup_mode(self._workers.profile)
        else:
            self._inbound.hold_frames()
            self._tasks.start_soon(self._enter_lookup_mode_later)

    async def _enter_lookup_mode_later(self) -> None:
        self._enter_lookup_mode(await self._workers.broker_profile())
        self._release_frames()

    def _enter_lookup_mode(self, profile: CommandConnected | None) -> None:
        if self._machine.handle(Event.ACCEPTED_FOR_LOOKUP) is not Action.SEND_CONNECTED:
            return
        self._pre_auth.stop_counting()
        self._lookup_mode.set_identity(self.identity)
        self.lifetime.start_in_lookup_mode(partial(self.handshake.stored_relay, self.identity))
        self._transport.send(self.handshake.connected_frame(profile))
        self._timeouts.start_keep_alive()
        self._age.start_deadline()
        if self.phase is Phase.DRAINING:
            self.drain()
        self.handshake.finish_for_lookups()

    # ---- the relay

    def _on_broker(self, failure: ConnectionFailure | None) -> None:
        try:
            if failure is not None:
                self._fail(failure)
            elif self._machine.handle(Event.BROKER_CONNECTED) is Action.START_RELAY:
                self._become_relay()
            else:  # the client has gone in this very moment
                self._services.nursery.start_soon(self.handshake.close_link)
        except Exception as error:  # noqa: BLE001 -- the caller serves other connections, too
            self._on_internal_error(error)

    def _become_relay(self) -> None:
        self.handshake.record_duration("broker")
        self.handshake.record_duration("total")
        self._stop_serving(Phase.STARTING_RELAY)
        if self._start_relay_now():
            self._on_relay_started()
            self._finish()
        else:
            self._services.nursery.start_soon(self._start_relay)

    def _start_relay_now(self) -> bool:
        """Hand both connections to a relay if that needs no waiting; return whether it has started."""
        rest = self._transport.stop_reading_now()
        if rest is None:
            return False
        self._held += rest
        try:
            return self._services.relays.start_relay_now(self._relay_start(b""))
        except Exception:  # noqa: BLE001 -- the task meets it, too, and tells the client
            return False

    def _on_relay_started(self) -> None:
        self.enter_phase(Phase.RELAYED)
        self._pre_auth.stop_counting()

    async def _start_relay(self) -> None:
        """Hand both connections to a relay. Where none starts, close them like those of any other session."""
        try:
            rest = await self._transport.stop_reading()
            if await self._transport.wait_until_sent():
                await self._services.relays.start_relay(self._relay_start(rest))
                self._on_relay_started()
            else:  # CONNECTED would be read as the other half of a frame
                self._close_on(Event.CLIENT_STALLED, DisconnectCause.CLIENT_DOES_NOT_READ)
        except RelayStartFailed as error:
            self._fail(relay_start_failure(error))
        except Exception as error:  # noqa: BLE001 -- the connection ends in any case
            self._on_internal_error(error)
        finally:
            if self.phase is Phase.RELAYED:
                self._finish()
            else:
                self.enter_phase(Phase.ENDING)
                self._machine.handle(Event.SHUT_DOWN)  # for a start that was cancelled, or met an internal error
                await self._close()

    def _relay_start(self, rest: bytes) -> RelayStart:
        """Return what the relay needs; ``rest``: what was received from the client and is no frame yet."""
        link, stored = self.handshake.link, self.handshake.stored_relay(self.identity)
        stored.leave_at_ms = self._age.leave_at_ms(self._services.relays.now())
        answers_broker = link.broker.host if link.answers_challenges else ""
        session = self.lifetime.relay_session(
            link.connected.message, self.identity, answers_broker=answers_broker, original_data=link.original_data
        )
        held = self._held + rest
        return self.handshake.relay_start(self._transport.stream, stored, first_to_broker=held, session=session)

    # ---- the lifetime of the client's authentication, in lookup mode

    def _on_lifetime_event(self, event: LifetimeEvent) -> None:
        match event:
            case ChallengeDue():
                self._transport.send(event.frame)
                self._release_postponed()  # the answer to the challenge is behind it
            case VerdictKnown():
                if event.identity is not None:
                    self.identity = event.identity
                    self._lookup_mode.set_identity(event.identity)
                    self.deny_if_listed(self._services.denied())
                self._release_postponed()
            case SessionClosing():
                self._inbound.hold_frames()
            case LifetimeOver() if self._is_served:
                self._tasks.start_soon(self._close_after_answers, event)

    def _release_postponed(self) -> None:
        if self._postponed is not None:
            self._release_frames()

    async def _close_after_answers(self, over: LifetimeOver) -> None:
        await self._lookup_mode.in_flight.wait_until_empty(timeout_s=self._workers.answer_timeout_s)
        if self._machine.handle(Event.DENIED) is Action.FAIL:
            self._closer.set_final_frame(over.frame)
            self._end(over.cause)
