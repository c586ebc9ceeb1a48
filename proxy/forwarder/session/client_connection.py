"""A client's connection with its state machine, and every way in which it ends."""

from collections.abc import Callable

import trio

from proto import commands
from proto.client_machine import Action, ClientMachine, Event, State
from proto.commands import NO_REQUEST_ID
from proxy.common.logs import get_logger
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.pre_auth import PreAuthConnection
from proxy.forwarder.session.closing import ConnectionCloser
from proxy.forwarder.session.failures import ConnectionFailure
from proxy.forwarder.session.handshake import Handshake
from proxy.forwarder.session.services import SessionServices
from proxy.forwarder.session.transport import ClientTransport
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientEndpoint
from proxy.runtime.loop.scoped_tasks import ScopedTasks
from proxy.runtime.loop.tick import current_tick


class ClientConnection:
    """The connection of one client, until it is closed or becomes a relay; then it calls ``on_end``.

    What happens in between is ClientSession's. ``became_relay``: whether the connection is a relay's now. ``cause``:
    why it ended otherwise. ``is_over``: whether the client is served no more, since the session ends or its relay
    starts. ``pre_auth``: how the connection is counted before its client has authenticated.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        client: ClientEndpoint,
        services: SessionServices,
        on_end: Callable[["ClientConnection"], None],
        pre_auth: PreAuthConnection | None = None,
    ) -> None:
        limits = services.workers.config.limits
        self.address = client.address
        self.became_relay = False
        self.cause = DisconnectCause.SHUT_DOWN
        self.identity = ANONYMOUS
        self.is_over = False
        self._services = services
        self._on_end = on_end
        self._pre_auth = pre_auth or PreAuthConnection()
        self._pre_auth.evict = self.evict
        self._tick = current_tick()
        self._tasks = ScopedTasks(services.nursery, self._on_internal_error)
        self._transport = ClientTransport(
            stream,
            self._tasks,
            max_frame_bytes=limits.max_command_bytes,
            write_timeout_ms=limits.keep_alive_interval_ms,
        )
        self._closer = ConnectionCloser(self._transport)
        self._machine = ClientMachine()
        self._handshake = Handshake(client, services, self._tasks)

    @property
    def state(self) -> State:
        """The state of the connection, for texts and counts."""
        return self._machine.state

    @property
    def target(self) -> str:
        """The broker that the client wants, for logs; empty: none, or not known yet."""
        return self._handshake.target

    # ---- ends that come from outside

    def shut_down(self) -> None:
        """Close at once. A relay that is being started goes on."""
        if not self.is_over:
            self._machine.handle(Event.SHUT_DOWN)
            self._end(DisconnectCause.SHUT_DOWN)

    def evict(self, cause: DisconnectCause = DisconnectCause.GAVE_WAY) -> None:
        """Close at once, for a newcomer."""
        if self.is_over:
            self._closer.drop_final_frame()
        else:
            self._machine.handle(Event.EVICTED)
            self._end(cause)

    # ---- ends that the session comes to

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

    # ---- the end

    def _end(self, cause: DisconnectCause) -> None:
        """Note the cause and serve the client no more; close once this tick is over."""
        self.cause = cause
        if self.is_over:
            return
        self._stop_serving()
        self._pre_auth.mark_silent()  # until it is closed, which may take its time
        self._tick.schedule_flush(self)  # the caller may still be handling frames

    def _stop_serving(self) -> None:
        self.is_over = True
        self._transport.pause_reading()

    def flush(self) -> None:
        """Close, at the end of the tick in which the connection has ended."""
        if not self._handshake.has_link and self._closer.close_if_silent():
            self._finish()
        else:
            self._services.nursery.start_soon(self._close)

    async def _close(self) -> None:
        """Close the client's connection behind its final frame, and the broker's, if there is one."""
        try:
            await self._closer.send_final_frame()
        except Exception as error:  # noqa: BLE001 -- the session ends in any case
            self._on_internal_error(error)
        finally:
            self._release_resources()
            try:
                await self._handshake.close_link()
                await self._closer.close_connection()
            finally:
                self._on_end(self)

    def _finish(self) -> None:
        """Report the end of a connection that is closed, or a relay's."""
        self._release_resources()
        self._on_end(self)

    def _release_resources(self) -> None:
        """Give back what is counted for the client, and cancel its tasks."""
        self._tasks.cancel()
        self._handshake.abandon_handshake()
