"""A client whose TLS is passed through to the broker that it names (SNI; Pulsar's PIP-60, ``ProxyProtocol.SNI``).

Its ClientHello is read within bounds, and the broker is dialled, by callback (proxy.forwarder.workers.broker_opening),
or else in a task, which has the target checked before. Then both sockets become a blind relay, whose first bytes are
the hello, exactly as it came. The proxy sees neither credentials nor a principal, and sends nothing of its own but an
alert where no relay starts.
"""

import select
import time
from collections.abc import Callable

import trio

from proto.client_hello import INTERNAL_ERROR, UNRECOGNIZED_NAME, ClientHelloParser, HelloRefused, alert_record
from proto.client_machine import State
from proto.rpc_pb2 import StoredRelay
from proxy.common.logs import get_logger
from proxy.forwarder.client.failures import BrokerError, broker_failure
from proxy.forwarder.client.listing import ListedConnection, connection_of
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.client.timeouts import ConnectionAge
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.admission import AdmittedConnection, Refusal
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.workers.authentication import ClientEndpoint
from proxy.forwarder.workers.broker_links import NamedLink, NamedRequest, TargetRefused
from proxy.forwarder.workers.broker_opening import NamedOpening, start_named_opening
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.reactor import Reading, current_reactor
from proxy.runtime.loop.scoped_tasks import ScopedTasks
from proxy.runtime.loop.tasks import close_gracefully, seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcError

_LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
"""A half-close counts, too: TLS needs more of a client than its hello."""

OnSniEnd = Callable[[AdmittedConnection, "SniConnection"], None]


class SniConnection:
    """The connection of one client, until it is closed or a relay's (``is_relayed``); then it calls ``on_end``, once.

    ``cause``: why it ended, unless it is a relay's. ``state``: for counts.
    """

    def __init__(
        self,
        stream: TcpStream,
        client: ClientEndpoint,
        services: ConnectionServices,
        admitted: AdmittedConnection,
        on_end: OnSniEnd,
    ) -> None:
        self.cause = DisconnectCause.SHUT_DOWN
        self.is_relayed = False
        self.state = State.AWAITING_CONNECT
        self._stream = stream
        self._client = client
        self._services = services
        self._admitted = admitted
        self._on_end = on_end
        self._started_at_unix_ms = int(time.time() * 1000)
        self._parser = ClientHelloParser()
        self._tasks = ScopedTasks(services.nursery, self._on_internal_error)
        self._deadline = services.deadlines.new_deadline(self._on_timeout)
        limits = services.workers.config.limits
        self._age = ConnectionAge(services.deadlines, limits, client.accepted_at, self.shut_down)
        self._handshake_s = seconds(limits.handshake_timeout_ms)
        reactor = current_reactor()
        assert reactor is not None  # each worker has one
        self._reactor = reactor
        self._descriptor = stream.socket.fileno()
        self._reading: Reading | None = None
        self._asked: NamedRequest
        self._opening: NamedOpening | None = None
        self._is_over = False
        admitted.evict = self.evict

    def start_serving(self) -> None:
        """Read the client's hello, until the handshake's deadline."""
        self._services.handshakes.increment()
        self._deadline.set(self._client.accepted_at + self._handshake_s)
        try:
            self._reading = self._reactor.start_reading(self._descriptor, self._on_data, self._on_client_end)
        except OSError as error:  # no memory for it; other clients are accepted
            self._on_internal_error(error)

    # ---- ends that come from outside

    def shut_down(self) -> None:
        """Close at once. A relay that has started goes on."""
        self._end(DisconnectCause.SHUT_DOWN)

    def drain(self) -> None:
        """Close unless a broker is being dialled, which soon is decided."""
        if self.state is not State.CONNECTING_TO_BROKER:
            self.shut_down()

    def evict(self, cause: DisconnectCause = DisconnectCause.GAVE_WAY) -> None:
        """Close at once, for a newcomer."""
        self._end(cause)

    def disconnect(self) -> bool:
        """Close at once, for an operator; return False if it has ended, or if its relay starts in this moment."""
        if self._is_over or self.state is State.RELAYING:
            return False
        self._end(DisconnectCause.DISCONNECTED)
        return True

    @property
    def number(self) -> int:
        """The client's number."""
        return self._client.number

    def listed(self) -> ListedConnection | None:
        """Return what an operator is told of the connection; None: it has ended."""
        if self._is_over:
            return None
        return ListedConnection(connection_of(self.stored_relay()), self.disconnect)

    def stored_relay(self) -> StoredRelay:
        """Return what is known of the connection, before it is a relay."""
        return StoredRelay(client_address=self._client.address, started_at_unix_ms=self._started_at_unix_ms)

    def _on_timeout(self) -> None:
        self._services.metrics.count_sni_refusal("timeout")
        get_logger().warning("a client's TLS names no broker in time", client=self._client.address)
        self._end(DisconnectCause.HANDSHAKE_TIMEOUT)

    def _on_client_end(self, error: Exception | None) -> None:
        match error:
            case None:
                self._end(DisconnectCause.CLIENT_CLOSED)
            case trio.BrokenResourceError():
                self._end(DisconnectCause.CLIENT_BROKE_OFF)
            case _:
                self._on_internal_error(error)

    def _on_internal_error(self, error: Exception) -> None:
        get_logger().error("a client's connection met a defect", client=self._client.address, exc_info=error)
        self._end(DisconnectCause.DEFECT)

    def _end(self, cause: DisconnectCause) -> None:
        """Close the client's connection now, unless it has ended, or its relay is being started."""
        if self._is_over or self.state is State.RELAYING:
            return
        self.cause = cause
        self._stop_reading()
        if self._opening is not None:
            self._opening.abandon()
        self._stream.close_now()
        self._finish()

    def _finish(self) -> None:
        self._is_over = True
        self._tasks.cancel()
        self._deadline.close()
        self._age.clear_deadline()
        self._services.handshakes.decrement()
        self._on_end(self._admitted, self)

    def _stop_reading(self) -> None:
        """Neither read nor watch the client any more."""
        if self._reading is not None:
            self._reading.pause()
            self._reading = None
        self._reactor.forget(self._descriptor)

    # ---- the hello

    def _on_data(self, data: bytes | bytearray) -> None:
        match self._parser.receive_data(data):
            case HelloRefused() as refused:
                self._refuse(refused, DisconnectCause.TLS_FAILED)
            case str() as name:
                self._stop_reading()  # what follows the hello is the relay's
                self._on_name(name)

    def _on_name(self, name: str) -> None:
        if not self._services.seen_hellos.add(self._parser.hello):
            detail = "this very ClientHello has come before; does brokers.service_url lead back here?"
            self._refuse(HelloRefused("circle", INTERNAL_ERROR, detail, name), DisconnectCause.TARGET_DENIED)
            return
        owner = owner_of("", self._client.address)
        limit = self._admitted.take_place(owner, lambda: self.evict(DisconnectCause.OVER_SHARE))
        if limit is not None:
            is_quota = limit != Refusal.MAX_CONNECTIONS
            cause = DisconnectCause.QUOTA if is_quota else DisconnectCause.MAX_CONNECTIONS
            detail = limit if is_quota else f"limits.{limit}"
            self._refuse(HelloRefused(cause.value, INTERNAL_ERROR, detail, name), cause)
            return
        self._deadline.clear()
        self._admitted.mark_busy()
        self.state = State.CONNECTING_TO_BROKER
        self._reactor.watch(self._descriptor, _LEFT, lambda: self._end(DisconnectCause.CLIENT_CLOSED))
        self._asked = NamedRequest(name, self._client.address, self._client.announcement)
        links, deadlines = self._services.workers.broker_links, self._services.deadlines
        self._opening = start_named_opening(links, self._asked, deadlines, on_done=self._on_opened)
        if self._opening is None:
            self._tasks.start_soon(self._open_in_task)

    def _refuse(self, refused: HelloRefused, cause: DisconnectCause) -> None:
        """Log and count why no broker gets this client, tell it so by an alert, and close behind that."""
        if self._is_over:  # since a broker's failure and the client's end may come in one round of the loop
            return
        self._stop_reading()
        self._services.metrics.count_sni_refusal(refused.reason)
        get_logger().warning(
            "a client's TLS was not passed on to a broker",
            client=self._client.address,
            name=ascii(refused.name)[1:-1],
            reason=refused.reason,
            detail=refused.detail,
        )
        self.cause = cause
        self.state = State.CLOSED
        self._deadline.clear()
        self._admitted.mark_silent()  # until it is closed, which may take its time
        self._tasks.start_soon(self._close_behind_alert, refused.alert)

    async def _close_behind_alert(self, alert: int) -> None:
        try:
            with trio.move_on_after(1):
                await self._stream.send_all(alert_record(alert))
            await close_gracefully(self._stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._end(self.cause)

    # ---- the broker, and the relay

    async def _open_in_task(self) -> None:
        try:
            link = await self._services.workers.broker_links.open_named(self._asked)
        except (TargetRefused, BrokerLinkFailed, RpcError) as error:
            self._on_opened(error)
        else:
            self._on_opened(link)

    def _on_opened(self, outcome: NamedLink | BrokerError | None) -> None:
        try:
            if outcome is None:
                self._tasks.start_soon(self._open_in_task)
            elif isinstance(outcome, NamedLink):
                self._become_relay(outcome)
            else:
                failure, reason = broker_failure(outcome)
                alert = UNRECOGNIZED_NAME if isinstance(outcome, TargetRefused) else INTERNAL_ERROR
                self._refuse(HelloRefused(reason, alert, failure.detail, self._asked.name), failure.cause)
        except Exception as error:  # noqa: BLE001 -- the caller serves other connections, too
            self._on_internal_error(error)

    def _become_relay(self, link: NamedLink) -> None:
        """Start the relay, which cannot be ended from outside before."""
        if self._is_over:  # since a broker's answer and the client's end may come in one round of the loop
            link.stream.close_now()
            return
        stored = self.stored_relay()
        stored.target = str(link.broker)
        stored.leave_at_ms = self._age.leave_at_ms(self._services.relays.now())
        config, hello = self._services.workers.config.relay, bytes(self._parser.received)
        start = RelayStart(self._stream, link.stream, stored, config, first_to_broker=hello)
        self._stop_reading()
        self.state = State.RELAYING
        try:
            is_started = self._services.relays.start_relay_now(start)
        except Exception:  # noqa: BLE001 -- the task meets it, too, and tells the client
            is_started = False
        if is_started:
            self._on_relay_started()
        else:
            self._tasks.start_soon(self._start_relay, start, link.stream)

    async def _start_relay(self, start: RelayStart, broker: TcpStream) -> None:
        try:
            with trio.CancelScope(shield=True):
                await self._services.relays.start_relay(start)
        except Exception as error:
            self.state = State.CONNECTING_TO_BROKER  # so that it can end
            broker.close_now()
            if not isinstance(error, RelayStartFailed):
                raise
            refused = HelloRefused("relay_not_begun", INTERNAL_ERROR, str(error), self._asked.name)
            self._refuse(refused, DisconnectCause.RELAY_NOT_BEGUN)
        else:
            self._on_relay_started()

    def _on_relay_started(self) -> None:
        self.is_relayed = True
        self._finish()
