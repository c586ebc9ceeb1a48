"""The forwarding worker's service: accepts clients from the inherited listeners and serves each of them."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import trio

from proto.addresses import HostPort
from proto.client_machine import State
from proto.proxy_protocol import ProxyHeader
from proto.roles import Role
from proto.rpc_pb2 import ConnectionsPage, ConnectionsRequest, ConnectionSums, StoredRelay
from proxy.common.deny_list import DenyList
from proxy.common.logs import get_logger
from proxy.config.memory import forwarder_count
from proxy.config.types import Config
from proxy.forwarder.audit import ForwarderAudit
from proxy.forwarder.client.connection import ClientConnection
from proxy.forwarder.client.lifetime import reauthenticator_factory
from proxy.forwarder.client.listing import Entry, ListedConnection, connection_of, page_of
from proxy.forwarder.client.passed import PassedConnections
from proxy.forwarder.client.phases import Phase
from proxy.forwarder.client.seen_hellos import SeenHellos
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.client.sni import SniConnection
from proxy.forwarder.client.turning_away import TurnedAwayClients
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.lifetime.denied import DeniedCredentials
from proxy.forwarder.lifetime.enforcement import Enforcement
from proxy.forwarder.lifetime.session_factory import SessionOptions
from proxy.forwarder.listen.admission import Admission, AdmittedConnection, Refusal, accept_clients
from proxy.forwarder.listen.announced_clients import AnnouncedClients
from proxy.forwarder.listen.eviction import Place, log_eviction, log_over_share
from proxy.forwarder.listen.tls_opening import Outcome, TlsOpening
from proxy.forwarder.listen.transports import ListenerTransport, listener_transports
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.fd_store_client import FdStoreClient
from proxy.forwarder.relay.manager import RelayCallbacks, RelayManager, RelayOptions
from proxy.forwarder.relay.sockets import ip_of, tune_listener
from proxy.forwarder.workers.authentication import ClientEndpoint
from proxy.forwarder.workers.clients import WorkerClients
from proxy.forwarder.workers.relay_outcomes import RelayOutcomes
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.congestion import set_congestion_control_of_accepted
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.kernel_tls import usable_ciphers, use_kernel_tls
from proxy.runtime.network.proxy_header import announcement_of
from proxy.runtime.network.tls import TlsFailed, TlsStream
from proxy.runtime.observability.near_expiry import SessionEnd, summarize_near_expiry
from proxy.runtime.observability.quota_refusals import QuotaRefusals
from proxy.runtime.process.descriptors import adopt_socket
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.server import Handler
from proxy.runtime.shared.address_tables import AddressTables
from proxy.runtime.shared.connection_count import ConnectionCounters
from proxy.runtime.shared.relay_request_channel import RelayRequestChannel

HANDSHAKES_GRACE_S = 1.0
"""How long a hand-over waits for handshakes in progress."""

_COUNTED_AS_RELAY_ENDED = frozenset(
    {DisconnectCause.SESSION_EXPIRED, DisconnectCause.REAUTHENTICATION_FAILED, DisconnectCause.PROTOCOL_ERROR}
)
"""Causes that the metric tells apart for lookup mode alone; the audit has a relay's, too."""


class ForwarderService:
    """The service of one forwarder process: its clients' connections, and its relays."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._metrics = ForwarderMetrics(context.registry)
        self._audit = ForwarderAudit(context.registry, context.role, context.index, context.descriptors.audit)
        self._audit.configure(context.config)
        self._turned_away = TurnedAwayClients(self._metrics, self._audit)
        self._metrics.active_connections.set_function(lambda: self._connections)
        self._metrics.reauthentication.expired_sessions.set_function(self._count_expired)
        for state in State:
            gauge = self._metrics.connections_by_state.labels(state=state.value.replace(" ", "_"))
            gauge.set_function(partial(self._count_in, state))
        counters = ConnectionCounters(context.descriptors.connections)
        self._address_tables = AddressTables()
        self._admission = Admission(
            context.config.limits,
            counters,
            context.index,
            self._address_tables,
            QuotaRefusals(context.registry).count_refusal,
        )
        self._admission.set_quotas(context.config.quota)
        self._auth = context.new_rpc_pool(Role.AUTH)
        self._lookup = context.new_rpc_pool(Role.LOOKUP)
        use_kernel_tls(context.config.relay.kernel_tls)  # before any context is made
        self._outcomes = RelayOutcomes(self._lookup)
        self._workers = WorkerClients(context.config, self._auth, self._lookup, context.nursery, self._outcomes)
        self._transports = listener_transports(context.config)
        self._deadlines = Deadlines()
        self._denied = DeniedCredentials(context.config)
        self._clients: trio.Nursery
        self._metrics.kernel_tls_available.set_function(lambda: bool(usable_ciphers()))
        self._metrics.kernel_tls_relays.set_function(lambda: self._relays.kernel_tls_relays)
        self._metrics.denied_credentials.set_function(lambda: len(self._denied.value.kinds))
        self._connection_services: ConnectionServices | None = None
        self._relays: RelayManager
        self._listeners: list[socket.socket]
        self._client_connections: set[ClientConnection] = set()
        self._sni_connections: set[SniConnection] = set()
        self._seen_hellos = SeenHellos()
        self._openings: dict[TlsOpening, ClientEndpoint] = {}
        # The relays are there from the start on, before any client.
        self._handshake_turns = HandshakeTurns(lambda: self._relays.run_between())  # noqa: PLW0108
        context.reactor.may_linger = lambda: not self._handshake_turns.are_waiting
        self._in_flight = InFlightCounter()
        self._handshakes = InFlightCounter()
        self._announced = AnnouncedClients(
            context.reactor,
            self._deadlines,
            self._admission,
            self._in_flight,
            on_client=self._admit_known_client,
            on_refused=lambda reason: self._metrics.rejected_connections.labels(reason=reason.value).inc(),
        )
        self._accepting = trio.CancelScope()
        self._serving = trio.CancelScope()
        self._relay_places: dict[int, Place] = {}
        self._passed: PassedConnections | None = None

    @property
    def _connections(self) -> int:
        """Return the number of clients' connections in this process, without those that its predecessors still have."""
        return self._admission.connections - self._relays.left_behind.count

    def _count_in(self, state: State) -> int:
        return self._by_state()[state]

    def _count_expired(self) -> int:
        return sum(session.seconds_left <= 0 for session in self._session_ends())

    def _by_state(self) -> Counter[State]:
        states = Counter(connection.state for connection in self._client_connections)
        states.update(connection.state for connection in self._sni_connections)
        states[State.RELAYING] += self._relays.in_flight.count
        return states

    def handlers(self) -> dict[int, Handler]:
        """Return no handlers: a forwarder serves no other worker."""
        return {}

    async def start(self) -> None:
        """Take over the listeners and relays of a predecessor, then start to accept."""
        nursery = self._context.nursery
        nursery.start_soon(self._auth.run)
        nursery.start_soon(self._lookup.run)
        nursery.start_soon(self._deadlines.run)
        nursery.start_soon(self._outcomes.run)
        await self._start_relays()
        nursery.start_soon(self._serve)
        nursery.start_soon(self._denied.watch, self._deny_credentials)

    async def _start_relays(self) -> None:
        context, config = self._context, self._context.config.relay
        fd_store = FdStoreClient(adopt_socket(context.descriptors.store), crash_safe=config.crash_safe)
        handover = await fd_store.receive_handover()
        self._listeners = [adopt_socket(descriptor) for descriptor in handover.listeners]
        self._tune_listeners(context.config)
        callbacks = RelayCallbacks(
            on_end=self._on_relay_end,
            on_live=self._on_relay_live,
            on_handed_over=self._release_relay,
            on_left_behind_gone=self._admission.release_client,
        )
        sessions = SessionOptions(
            reauthenticator_factory=reauthenticator_factory(lambda: self._workers),
            enforcement=Enforcement(context.config),
            broker_factory=BrokerReauthenticationFactory(
                context.nursery,
                self._metrics.broker_reauthentication,
                lambda host: self._workers.broker_links.credentials_for(host),  # noqa: PLW0108 -- a reload replaces them
            ),
            metrics=self._metrics.reauthentication,
        )
        options = RelayOptions(
            forwarders=forwarder_count(context.config),
            may_linger=lambda: (
                not (self._handshakes.count or self._handshake_turns.are_waiting or context.reactor.is_busy)
            ),
            owner_of=self._owner_of,
            principals_max=context.config.metrics.principals_max,
            principal_idle_s=seconds(context.config.metrics.principal_idle_ms),
            denied=self._denied.value,
            sessions=sessions,
        )
        self._relays = RelayManager(context.nursery, fd_store, handover, callbacks, options)
        self._limit_bytes(context.config)
        for relay in handover.relays:
            self._admission.adopt_client(ip_of(relay.record))
            self._metrics.adopted_relays.inc()
        self._relays.reauthentication.on_verdict = self._audit.on_reauthentication
        self._passed = self._passed_connections()
        self._relays.adopt_relays(handover, config)
        for client_ip in self._relays.left_behind.client_ips:
            self._admission.adopt_client(client_ip)
        context.nursery.start_soon(fd_store.run_sender)
        context.nursery.start_soon(
            fd_store.run_receiver, self._address_tables.read_table, self._relays.left_behind.on_process_ended
        )
        self._address_tables.start_publishing(
            lambda table: context.nursery.start_soon(fd_store.publish_address_table, table)
        )
        context.nursery.start_soon(self._relays.run)
        context.registry.register(self._relays)
        context.registry.register(self._relays.run_queue)
        if handover.relays:
            get_logger().info("took over the relays of a predecessor", relays=len(handover.relays))
        for pid, relays in handover.left_behind.items():
            get_logger().info("relays that cannot move stay in a predecessor", relays=len(relays), predecessor_pid=pid)

    def _passed_connections(self) -> PassedConnections | None:
        """Return what takes connections from HTTP workers; None under a supervisor of an older version."""
        descriptor = self._context.descriptors.relay_requests
        if descriptor < 0:
            return None
        return PassedConnections(
            RelayRequestChannel(adopt_socket(descriptor)),
            admission=self._admission,
            relays=self._relays,
            deadlines=self._deadlines,
            under_way=self._handshakes,
            metrics=self._metrics,
            owner_of=self._owner_of,
            config=lambda: self._workers.config,
        )

    def _deny_credentials(self, denied: DenyList) -> None:
        self._relays.deny_credentials(denied)
        for connection in list(self._client_connections):
            connection.deny_if_listed(denied)

    def _owner_of(self, about: StoredRelay) -> str:
        anonymous_role = self._workers.config.authentication.anonymous_role
        return owner_of(about.principal, about.client_address, anonymous_role)

    def _on_relay_live(self, about: StoredRelay, give_way: Callable[[], None]) -> None:
        self._relay_places[about.id] = self._admission.shares.adopt_place(self._owner_of(about), give_way)
        if self._passed is not None and about.passed:
            self._passed.on_live()

    def _release_relay(self, about: StoredRelay) -> None:
        self._admission.release_client(ip_of(about))
        place = self._relay_places.pop(about.id, None)
        if place is not None:  # None: it could not be adopted
            self._admission.shares.leave_place(place)
            if self._passed is not None and about.passed:
                self._passed.on_over()

    def _on_relay_end(self, about: StoredRelay, cause: DisconnectCause, to_broker: int, to_client: int) -> None:
        self._audit.on_relay_end(about, cause, to_broker, to_client)
        self._release_relay(about)
        if cause is DisconnectCause.OVER_SHARE:
            log_over_share(about.client_address, about.principal)
        counted = DisconnectCause.RELAY_ENDED if cause in _COUNTED_AS_RELAY_ENDED else cause
        self._metrics.ended_connections[counted].inc()

    def _release_connection(self, admitted: AdmittedConnection, cause: DisconnectCause) -> None:
        admitted.release()
        self._metrics.ended_connections[cause].inc()

    async def configure(self, config: Config) -> None:
        """Use new settings for connections that come from now on, and `session.enforcement` for all connections.

        A forwarder that was replaced accepts none, and uses the settings of the relays that it has. Raises ConfigError.
        """
        if self._accepting.cancel_called:  # even if the rest cannot be used: the ends of its sessions are enforced
            self._relays.enforcement.configure(config)
        use_kernel_tls(config.relay.kernel_tls)  # may raise
        nursery = self._context.nursery
        workers = WorkerClients(config, self._auth, self._lookup, nursery, self._outcomes)  # may raise
        denied = self._denied.read_file(config)  # may raise
        self._audit.configure(config)  # may raise
        if not self._accepting.cancel_called:
            self._transports = listener_transports(config)  # may raise
            self._admission.limits = config.limits
            self._admission.set_quotas(config.quota)
            self._relays.enforcement.configure(config)
            self._tune_listeners(config)
        self._limit_bytes(config)  # also for relays that stay here while a successor accepts
        self._denied.use_file(denied)
        workers.inherit_budgets(self._workers.room, self._workers.budget)
        self._workers = workers

    def _limit_bytes(self, config: Config) -> None:
        limits, forwarders = config.limits, forwarder_count(self._context.config)
        bytes_per_s = limits.max_bytes_per_second_per_principal / forwarders
        self._relays.run_queue.limit_bytes(bytes_per_s, dry_run=limits.principal_limits_dry_run)

    def _tune_listeners(self, config: Config) -> None:
        """Set options of the listeners' sockets, which the connections that they accept inherit."""
        for listener, transport in zip(self._listeners, self._transports, strict=False):  # a drain has closed them
            if listener.fileno() >= 0:
                tune_listener(listener, config.relay)
                set_congestion_control_of_accepted(listener, transport.congestion_control)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:
        """Accept no more; let connections end for up to ``timeout_s``, then close those that are left.

        ``hand_over``: a successor waits for the relays; those that cannot be handed over have the same time as lookups.
        A second drain may follow for these, when the cluster drains. Relays are ended one after the other, spread over
        the time, or over its second half after a hand-over, so that their clients do not all come back in one second.
        """
        started = trio.current_time()
        self._accepting.cancel()
        if hand_over:
            # A connection that becomes a relay before the hand-over moves; one that would later has to come again.
            await self._handshakes.wait_until_empty(timeout_s=HANDSHAKES_GRACE_S)
            self._admission.retire_counters()  # the successor counts in the same cells
            await self._relays.hand_over_relays()
        for connection in list(self._client_connections):
            connection.drain()
        for sni in list(self._sni_connections):
            sni.drain()
        # Relays that stay after a hand-over have half of the time to end by themselves.
        self._relays.spread_closes(timeout_s, after_s=timeout_s / 2 if hand_over else 0.0)
        both_empty = True
        for in_flight in (self._in_flight, self._relays.in_flight):
            left_s = max(0.0, timeout_s - (trio.current_time() - started))
            both_empty &= await in_flight.wait_until_empty(timeout_s=left_s)
        if not both_empty:
            left = len(self._client_connections) + self._relays.in_flight.count
            get_logger().warning("the drain's time is over; closing what is left", connections=left)
        self._serving.cancel()
        self._relays.abort_relays()

    def status(self) -> dict[str, object]:
        """Return the connections by state, the sessions that end soon, the use of kernel TLS, and what is known of the
        deny list.
        """
        states = {state.value: count for state, count in self._by_state().items()}
        return {
            "connections": self._connections,
            "connections_by_state": states,
            "sessions_near_expiry": summarize_near_expiry(self._session_ends()),
            **self._kernel_tls_status(),
            **self._denied.status(),
        }

    def _kernel_tls_status(self) -> dict[str, object]:
        relays = self._relays.kernel_tls_relays
        if not relays and self._workers.config.relay.kernel_tls == "off":
            return {}
        return {"kernel_tls": bool(usable_ciphers()), "kernel_tls_relays": relays}

    async def list_connections(self, request: ConnectionsRequest, *, ends: bool) -> ConnectionsPage:
        """Return a page of the clients' connections; ``ends``: of those that are ended by it. Raises FilterInvalid."""
        unix_ms = time.time() * 1000
        return await page_of(request, partial(self._before_relay, unix_ms), self._relays, unix_ms=unix_ms, ends=ends)

    async def sum_connections(self) -> ConnectionSums:
        """Return connections and bytes a second by principal, of relays and in lookup mode."""
        in_lookup_mode = (one.identity.role for one in self._client_connections if one.state is State.LOOKUP)
        relays = [relay.record.id for relay in self._relays.live if not relay.is_over]
        return await self._relays.rates.sample(relays, in_lookup_mode)

    def _before_relay(self, unix_ms: float) -> Iterator[Entry]:
        """Yield the connections that are no relays."""
        for opening, client in self._openings.items():
            yield client.number, partial(self._listed_opening, opening, client)
        for sni in self._sni_connections:
            yield sni.number, sni.listed
        for connection in self._client_connections:
            yield connection.number, partial(connection.listed, unix_ms)

    def _listed_opening(self, opening: TlsOpening, client: ClientEndpoint) -> ListedConnection | None:
        if opening not in self._openings:
            return None
        return ListedConnection(connection_of(_record_of(client)), partial(_end_opening, opening))

    def _session_ends(self) -> Iterator[SessionEnd]:
        """Yield the ends of all sessions that can expire: those of relays, and those in lookup mode."""
        now = self._relays.now()
        in_lookup_mode = (one.lifetime.expiring_session for one in self._client_connections)
        for session in chain(self._relays.expiring_sessions(), in_lookup_mode):
            if session is not None and session.clock is not None and not session.close_reason:
                record = session.relay_record
                yield SessionEnd(session.clock.expires_at_s - now, record.client_address, record.principal)

    # ---- clients

    async def _serve(self) -> None:
        with self._serving:
            async with trio.open_nursery() as self._clients:
                try:
                    with self._accepting:
                        async with trio.open_nursery() as nursery:
                            for index, listener in enumerate(self._listeners):
                                nursery.start_soon(
                                    accept_clients, listener, self._admission, partial(self._admit_client, index)
                                )
                            if self._passed is not None:
                                nursery.start_soon(self._passed.run, self._clients)
                    await trio.sleep_forever()
                finally:
                    for connection in list(self._client_connections):
                        connection.shut_down()
                    for sni in list(self._sni_connections):
                        sni.shut_down()
                    for opening in list(self._openings):
                        opening.end(DisconnectCause.SHUT_DOWN)
                    self._announced.shut_down()

    def _current_services(self) -> ConnectionServices:
        """Return what a connection that begins now shares with the others that have the same settings."""
        services = self._connection_services
        if services is None or services.workers is not self._workers:
            self._connection_services = services = ConnectionServices(
                self._workers,
                self._relays,
                self._metrics,
                self._handshakes,
                self._clients,
                self._deadlines,
                lambda: self._denied.value,
                self._seen_hellos,
                self._handshake_turns,
                self._audit,
            )
        return services

    def _admit_client(self, index: int, stream: TcpStream, peer: tuple[str, int]) -> None:
        """Serve a client that a listener has accepted, or turn it away."""
        if self._accepting.cancel_called:  # in the instant of a drain, which would not wait for it
            stream.socket.close()
            return
        proxy, accepted_at, refusal = self._transports[index].proxy, trio.current_time(), None
        if proxy.refuses(peer[0]):
            refusal, key = Refusal.PROXY_PROTOCOL, f"listener[{index}].proxy_protocol_sources"
        elif proxy.expects_header(peer[0]):
            deadline = accepted_at + seconds(self._workers.config.limits.handshake_timeout_ms)
            refusal = self._announced.await_header(
                index, stream, peer, required=proxy.required, accepted_at=accepted_at, deadline=deadline
            )
            key = "" if refusal is None else refusal.key
        else:
            self._admit_known_client(index, stream, peer, accepted_at)
        if refusal is not None:
            self._turned_away.turn_away(self._clients, stream, str(HostPort(*peer)), refusal, key, mute=True)

    def _admit_known_client(
        self,
        index: int,
        stream: TcpStream,
        peer: tuple[str, int],
        accepted_at: float,
        header: ProxyHeader | None = None,
    ) -> None:
        """Serve a client of which the address is known, or turn it away. ``header``: that announces it."""
        if self._accepting.cancel_called:  # a drain that began in the meantime does not know of it
            stream.close_now()
            return
        ip, port = peer
        listener, address = self._transports[index], str(HostPort(ip, port))
        if not listener.networks.allows(ip):
            key = f"listener[{index}].allowed_networks, denied_networks"
            self._turned_away.turn_away(self._clients, stream, address, Refusal.NETWORK, key, mute=True)
            return
        is_anonymous = listener.routes_sni or not self._workers.config.authentication.enabled
        owner = owner_of("", address) if is_anonymous else ""
        refusal = self._admission.check_admission(ip, owner)
        if refusal is not None:
            mute = listener.uses_tls or listener.routes_sni
            self._turned_away.turn_away(self._clients, stream, address, refusal, refusal.key, mute=mute)
            return
        self._metrics.new_connections.inc()
        admitted = self._admission.admit_client(ip)
        self._in_flight.increment()
        announcement = b""
        if self._workers.config.brokers.proxy_protocol != "off":
            announcement = announcement_of(HostPort(ip, port), stream.socket, header)
        client = ClientEndpoint(address, accepted_at, b"", index, announcement)
        if listener.routes_sni:
            sni = SniConnection(stream, client, self._current_services(), admitted, self._on_sni_end)
            self._sni_connections.add(sni)
            self._audit.on_opened(sni.stored_relay)
            sni.start_serving()
        elif listener.uses_tls:
            self._accept_tls_client(listener, stream, client, admitted)
        else:
            self._serve_client(stream, client, admitted)

    def _accept_tls_client(
        self, listener: ListenerTransport, stream: TcpStream, client: ClientEndpoint, admitted: AdmittedConnection
    ) -> None:
        """Serve a client behind its TLS handshake."""
        opening = TlsOpening(
            self._context.reactor,
            self._handshake_turns,
            self._deadlines,
            self._clients,
            listener,
            stream,
            owner=owner_of("", client.address),
            on_done=partial(self._on_tls_opened, client, admitted),
        )
        admitted.evict = opening.evict
        self._openings[opening] = client
        opening.start(seconds(self._workers.config.limits.handshake_timeout_ms), client.accepted_at)

    def _on_tls_opened(
        self, client: ClientEndpoint, admitted: AdmittedConnection, opening: TlsOpening, outcome: Outcome
    ) -> None:
        self._openings.pop(opening, None)
        self._count_tls_handshake(client.listener, outcome)
        match outcome:
            case TlsStream() if not self._accepting.cancel_called:
                self._serve_client(outcome, replace(client, certificate=outcome.peer_certificate()), admitted)
                return
            case TlsStream():  # a drain that began in the meantime does not know of it
                outcome.transport.close_now()
                cause = DisconnectCause.SHUT_DOWN
            case DisconnectCause():
                cause = outcome
                if cause is DisconnectCause.GAVE_WAY:
                    log_eviction(client.address)
            case TlsFailed():
                get_logger().warning("no TLS with a client", client=client.address, reason=str(outcome))
                cause = DisconnectCause.TLS_FAILED
            case _:
                get_logger().error("a client's connection met a defect", client=client.address, exc_info=outcome)
                cause = DisconnectCause.DEFECT
        self._release_connection(admitted, cause)
        self._audit.on_connection_end(partial(_record_of, client), "tls_handshake", cause)
        self._in_flight.decrement()

    def _count_tls_handshake(self, listener: int, outcome: Outcome) -> None:
        """Count a handshake that has succeeded or failed; not one that the proxy itself has ended."""
        labels = self._metrics.tls_handshakes.labels
        if isinstance(outcome, TlsStream):
            labels(listener=str(listener), result="success", reason="").inc()
            if outcome.session.was_resumed_by_client:
                self._metrics.tls_resumed_sessions.labels(listener=str(listener)).inc()
        elif isinstance(outcome, TlsFailed):
            labels(listener=str(listener), result="failure", reason=outcome.kind).inc()

    def _serve_client(
        self, stream: trio.abc.HalfCloseableStream, client: ClientEndpoint, admitted: AdmittedConnection
    ) -> None:
        on_end = partial(self._on_connection_end, admitted)
        connection = ClientConnection(stream, client, self._current_services(), on_end, admitted)
        self._client_connections.add(connection)
        self._audit.on_opened(connection.handshake.audit_record)
        connection.start_serving()

    def _on_connection_end(self, admitted: AdmittedConnection, connection: ClientConnection) -> None:
        self._client_connections.discard(connection)
        if connection.phase is Phase.RELAYED:  # which ends in its own time: see _on_relay_end
            admitted.on_relay_started()
        else:
            self._release_connection(admitted, connection.cause)
            handshake = connection.handshake
            kind = "lookups" if handshake.serves_lookups else "handshake"
            self._audit.on_connection_end(partial(handshake.audit_record, connection.identity), kind, connection.cause)
            match connection.cause:
                case DisconnectCause.GAVE_WAY:
                    log_eviction(connection.address)
                case DisconnectCause.OVER_SHARE:
                    log_over_share(connection.address, connection.identity.role)
                case DisconnectCause.MAX_CONNECTIONS:
                    self._metrics.rejected_connections.labels(reason=Refusal.MAX_CONNECTIONS.value).inc()
        self._in_flight.decrement()

    def _on_sni_end(self, admitted: AdmittedConnection, connection: SniConnection) -> None:
        self._sni_connections.discard(connection)
        if connection.is_relayed:
            admitted.on_relay_started()
        else:
            self._release_connection(admitted, connection.cause)
            self._audit.on_connection_end(connection.stored_relay, "sni", connection.cause)
        self._in_flight.decrement()


def _record_of(client: ClientEndpoint) -> StoredRelay:
    """Return what is known of a client whose TLS handshake is not done."""
    started_at_unix_ms = int(1000 * (time.time() - trio.current_time() + client.accepted_at))
    return StoredRelay(client_address=client.address, started_at_unix_ms=started_at_unix_ms)


def _end_opening(opening: TlsOpening) -> bool:
    opening.end(DisconnectCause.DISCONNECTED)
    return True
