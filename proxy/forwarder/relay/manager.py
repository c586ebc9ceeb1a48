"""All relays of a forwarder, from the moment when both sides are connected until both are closed.

The engine moves the bytes (proxy.forwarder.relay.engine), and no task belongs to a relay. Where both sides are plain
sockets and the kernel splices, the fd store holds the relay for this forwarder's successor
(proxy.forwarder.relay.fd_store_client); any other ends with the process.

A relay is blind, unless it has a session that can expire or of which messages are counted
(proxy.forwarder.lifetime.terms): then its frames are followed, in both directions.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self, cast

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proto.command_heads import FrameInvalid
from proto.rpc_pb2 import RelayLeftBehind, StoredRelay
from proxy.common.deny_list import DenyList
from proxy.common.logs import get_logger
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.lifetime.closing import PLANNED_CLOSE_REASONS, CloseReason
from proxy.forwarder.lifetime.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.lifetime.session_factory import SessionFactory, SessionOptions
from proxy.forwarder.relay.adoption import RelayAdopter, RelaysLeftBehind
from proxy.forwarder.relay.closing import CloseSchedule
from proxy.forwarder.relay.copy_pump import CopiedRelay, Stream, transport_of
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.fd_store_client import FdStoreClient, RelayHandover
from proxy.forwarder.relay.framed_control import FramedControl
from proxy.forwarder.relay.framed_copy_pump import FramedCopyPump
from proxy.forwarder.relay.framed_splice_pump import FramedSplicePump
from proxy.forwarder.relay.kernel_tls_pump import KernelTlsRelay, new_spliced_relay
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES, PipePool
from proxy.forwarder.relay.relay import (
    Relay,
    RelayMustWait,
    RelayStart,
    RelayStartFailed,
    shut_down,
)
from proxy.forwarder.relay.sockets import ip_of, splice_works, tune_for_relay
from proxy.forwarder.relay.usage import PrincipalUsage
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import ignore, read_to_the_end, seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.kernel_tls import KernelTlsNotPossible, attach_tls, give_keys
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.shared.fd_store_channel import MessageTooLong, StoreLost
from proxy.runtime.shared.relay_table import RelayTable

STORE_WAIT_S = 5.0
STORE_PAUSE_S = 0.005
"""How long, and how often, a relay's start waits until the supervisor has taken the descriptors on their way to it: the
kernel bounds them for a user without privileges.
"""

LINGER_S = 5.0
"""How long a side of a relay that has ended may take to read what it was sent."""

REPLACED = "this forwarder is being replaced"

_START_ERRORS = (
    OSError,
    StoreLost,
    MessageTooLong,
    FrameInvalid,
    KernelTlsNotPossible,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


@dataclass(frozen=True, slots=True)
class RelayCallbacks:
    """What the owner wants to know of relays.

    ``on_live`` is called with the record of each relay that has started or was adopted, and with what ends it for
    another connection; ``on_end`` with that of each that has ended here, the cause, and its bytes to the broker and to
    the client; ``on_handed_over`` with that of each that has become a successor's; ``on_left_behind_gone`` with the
    client's IP address of each relay that has ended in a predecessor, or that a successor looks after from now on.
    """

    on_end: Callable[[StoredRelay, DisconnectCause, int, int], None]
    on_handed_over: Callable[[StoredRelay], None] = ignore
    on_left_behind_gone: Callable[[str], None] = ignore
    on_live: Callable[[StoredRelay, Callable[[], None]], None] = ignore


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The limits, clock and sessions of a forwarder's relays.

    ``forwarders``: how many share the kernel's bound on pipes. ``may_linger`` returns True if no other task of this
    process is in a hurry. ``owner_of`` names the owner that a relay's pipes, turns and bytes count for.
    ``principals_max``: how many principals are counted by name; ``principal_idle_s``: without a relay, until their
    place may be another one's. ``denied``: the deny list at first. ``now``: seconds, monotonic, as in a successor.
    """

    forwarders: int = 1
    may_linger: Callable[[], bool] = lambda: True
    owner_of: Callable[[StoredRelay], str] = lambda record: owner_of(record.principal, record.client_address)
    principals_max: int = 100
    principal_idle_s: float = 600.0
    now: Callable[[], float] = time.monotonic
    denied: DenyList = field(default_factory=DenyList)
    sessions: SessionOptions = field(default_factory=SessionOptions)


class RelayManager(Collector):
    """The relays of one forwarder. As a collector it reads the relay table, so that no event has to touch a metric.

    ``reauthentication``, ``enforcement`` and ``now`` are lookup mode's, too: one object challenges all clients in time
    and has their answers verified.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        fd_store: FdStoreClient,
        handover: RelayHandover,
        callbacks: RelayCallbacks,
        options: RelayOptions,
    ) -> None:
        self._denied = options.denied
        sessions, self.now = options.sessions, options.now
        self._nursery = nursery
        self._fd_store = fd_store
        self._callbacks = callbacks
        self._splices = splice_works()
        table = RelayTable(handover.table)
        principals = PrincipalUsage(table, options.principals_max, options.principal_idle_s, options.now)
        self._ledger = RelayLedger(table, fd_store, callbacks.on_end, principals)
        self.in_flight, self.rates = self._ledger.in_flight, self._ledger.rates
        self.enforcement = sessions.enforcement
        self.reauthentication = ReauthenticationCoordinator(nursery, sessions.metrics, options.now)
        broker_factory = sessions.broker_factory or BrokerReauthenticationFactory(nursery)
        self.reauthentication.on_credentials_changed = self._on_credentials_changed
        self._session_factory = SessionFactory(sessions, broker_factory, self.reauthentication.challenge_soon)
        pool = PipePool(fd_store.store_pipes, fd_store.drop_pipe, forwarders=options.forwarders)
        self._engine = RelayEngine(table, pool, self._on_relay_end, options.may_linger, options.owner_of)
        self.run_queue = self._engine.run_queue
        framed_pump = FramedSplicePump(table, self._engine.pump, self.reauthentication, options.now)
        self._framed_copy_pump = FramedCopyPump(
            table, self._engine.host, framed_pump.journal, self.reauthentication, options.now
        )
        self._starter = SplicedRelayStarter(self._engine, framed_pump, fd_store, self._ledger)
        self._adopter = RelayAdopter(self._engine, framed_pump, pool, self._ledger, self._session_factory)
        self.left_behind = RelaysLeftBehind(table, self._on_left_behind_end)
        """Relays that stay in predecessors; for this forwarder's own, once it is replaced, see ``hand_over_relays``."""
        self.close_schedule = CloseSchedule(options.now)

    async def run(self) -> None:
        """Move bytes until cancelled; relays are left as they are. After a hand-over, serve those that stay."""
        if not self._splices:
            get_logger().warning("the kernel refuses to splice; relays go through user space, which costs more")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reauthentication.run)
            nursery.start_soon(self.close_schedule.run)
            nursery.start_soon(self.left_behind.run)
            await self._engine.run()
            if not self._ledger.has_handed_over:
                nursery.cancel_scope.cancel()

    # ---- relays in

    async def start_relay(self, start: RelayStart) -> None:
        """Start a relay; from then on both streams are the relay's. Bytes that were read ahead go first.

        The client receives nothing before its relay is safe in the fd store. Raises RelayStartFailed.
        """
        sockets = self._sockets_to_splice(start)
        if sockets is None:
            self._start_copied(start)
            return
        relay = await self._start_spliced(start, *sockets)
        if self._engine.frozen:
            self._release_handed_over(relay)
        else:
            self.in_flight.increment()
            self._on_live(relay)

    def _sockets_to_splice(self, start: RelayStart) -> tuple[TcpStream, TcpStream] | None:
        """Return the two TCP connections of a relay that can be spliced; None: it is copied.

        TLS is moved into the kernel only for a blind relay, since nobody can look at frames of which a successor finds
        the boundaries, and if nothing has to be sent ahead of the relay, before the kernel has the keys.
        """
        streams = cast("tuple[Stream, Stream]", (start.client, start.broker))
        uses_tls = [isinstance(stream, TlsStream) for stream in streams]
        can_move = start.session is None and not (uses_tls[1] and _bytes_ahead(start.first_to_broker))
        for stream in streams:
            if isinstance(stream, TlsStream):
                can_move = can_move and stream.can_move_to_kernel and attach_tls(stream.transport.socket)
        is_spliced = self._splices and (can_move or not any(uses_tls))
        in_kernel = uses_tls if is_spliced else (False, False)
        start.stored.client_kernel_tls, start.stored.broker_kernel_tls = in_kernel
        return (transport_of(streams[0]), transport_of(streams[1])) if is_spliced else None

    def _start_copied(self, start: RelayStart) -> None:
        """Start a relay that is not spliced. Raises RelayStartFailed."""
        record, session = start.stored, self._prepare_start(start)
        client, broker = cast("Stream", start.client), cast("Stream", start.broker)
        try:
            tune_for_relay(transport_of(client), transport_of(broker), start.config)
            relay = CopiedRelay(
                record,
                client,
                broker,
                seconds(start.config.half_close_timeout_ms),
                first_to_broker=start.first_to_broker,
                first_to_client=start.first_to_client,
                session=session,
            )
            relay.on_broker_end = start.on_broker_end
            self._engine.set_owner(relay)
            if session is not None:
                self._framed_copy_pump.follow_relay(relay, session)
            self._engine.start_relay(relay)
        except OSError as error:  # it has gone again
            self._ledger.release_rows(record.id)
            raise _start_failure(error) from error
        self.in_flight.increment()
        self._ledger.count_start(record)
        self._on_live(relay)

    async def _start_spliced(self, start: RelayStart, client: TcpStream, broker: TcpStream) -> Relay:
        """Start a spliced relay, again and again for STORE_WAIT_S where it must wait. Raises RelayStartFailed."""
        give_up_at = trio.current_time() + STORE_WAIT_S
        while True:
            try:
                return await self._starter.start_relay(start, client, broker, self._prepare_start(start))
            except RelayMustWait:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(STORE_PAUSE_S)

    def start_relay_now(self, start: RelayStart) -> bool:
        """Do the same if that needs no waiting; otherwise return False: both streams are still the caller's."""
        sockets = self._sockets_to_splice(start)
        if sockets is None:
            self._start_copied(start)
            return True
        relay = self._starter.start_relay_now(start, *sockets, self._prepare_start(start))
        if relay is None:
            return False
        self.in_flight.increment()
        self._on_live(relay)
        self._engine.run_once()
        return True

    def run_between(self) -> None:
        """Move what has arrived in a few relays, between two long steps of another task."""
        self._engine.run_between()

    def _prepare_start(self, start: RelayStart) -> ExpiringSession | None:
        """Open the rows of a relay that starts, and return its session. Raises RelayStartFailed."""
        if self._ledger.is_handing_over:
            raise RelayStartFailed(REPLACED)
        record = start.stored
        try:
            self._ledger.open_rows(record)
        except OverflowError as error:
            raise RelayStartFailed(str(error)) from None
        session = self._session_factory.create_session(record, start.session)
        self._ledger.record_principal(record)
        return session

    def adopt_relays(self, handover: RelayHandover, config: RelayConfig) -> None:
        """Continue what a predecessor handed over: the table, and relays that were spliced."""
        taken = {inherited.record.id for inherited in handover.relays}
        self.left_behind.adopt_relays(handover.left_behind, taken)
        self._ledger.table.adopt_rows(taken | self.left_behind.ids)
        self._adopter.adopt_relays(handover, config, self._on_adopted, self._on_relay_end)

    def _on_adopted(self, relay: Relay) -> None:
        session = relay.session
        if session is not None:
            if session.broker_challenges is not None:
                session.broker_challenges.resume_exchange()
            if session.close_reason in PLANNED_CLOSE_REASONS:
                relay.close_reason = session.close_reason
        self._on_live(relay)

    def _on_live(self, relay: Relay) -> None:
        if relay.session is not None:
            self.reauthentication.add_session(relay.session)
        self.close_schedule.add_relay(relay)
        self._callbacks.on_live(relay.record, relay.evict)
        self._deny_if_listed(relay)

    # ---- relays out

    def spread_closes(self, timeout_s: float, *, after_s: float = 0.0) -> None:
        """Close all relays gently, spread over ``timeout_s``, the first ``after_s`` of it left out."""
        self.close_schedule.spread_closes(self._engine.relays, timeout_s, after_s=after_s)

    def disconnect(self, relay: Relay) -> bool:
        """Begin to close a relay for an operator; return False if it has ended, or is being closed already."""
        is_closing = relay.session is not None and relay.session.close_reason
        return not is_closing and self.close_schedule.close_relay(relay, CloseReason.DISCONNECTED)

    def abort_relays(self) -> None:
        """End all relays that this process can end: the time of a drain is over."""
        self._engine.abort_relays()

    def shut_down_passed(self) -> int:
        """Shut down both connections of all relays that HTTP workers have passed; return how many there are.

        They end as soon as the loop moves on. May be called in another thread while the loop is blocked.
        """
        relays = [relay for relay in self._engine.relays if relay.record.passed]
        for relay in relays:
            for descriptor in relay.sockets:
                shut_down(descriptor, socket.SHUT_RDWR)
        return len(relays)

    async def hand_over_relays(self) -> None:
        """Leave the table, and all relays that the fd store holds, to a successor, and close the store's channel.

        The other relays stay here, and go on counting in rows of the table that are theirs alone.
        """
        if self._ledger.has_handed_over:
            return
        self._ledger.is_handing_over = True
        for client_ip in self.left_behind.forget_relays():
            self._callbacks.on_left_behind_gone(client_ip)
        for relay in self._engine.relays:
            if relay.close_reason is CloseReason.DISCONNECTED and relay.session is None:
                relay.abort()  # a successor would not know that it was being closed
        crash_safe = self._fd_store.crash_safe
        handed_over = self._engine.freeze() if crash_safe else []
        staying = self._engine.relays
        self._ledger.hand_over_table(relay.record.id for relay in staying)
        if handed_over:
            self.close_schedule.forget_relays(handed_over)
            self.reauthentication.remove_sessions(relay.session for relay in handed_over if relay.session is not None)
        await self._fd_store.close([RelayLeftBehind(id=one.record.id, client_ip=ip_of(one.record)) for one in staying])
        if not crash_safe:
            return
        self._engine.close_pipes(handed_over)
        for relay in handed_over:
            self.in_flight.decrement()
            self._release_handed_over(relay)

    def _release_handed_over(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            direction.detach_source()
            os.close(direction.source)
        self._callbacks.on_handed_over(relay.record)

    def _on_relay_end(self, relay: Relay) -> None:
        """Report a relay that has ended, and close its sockets; where a close could become a reset, only once both
        peers have read what they were sent.
        """
        self._ledger.on_relay_end(relay, *self._engine.bytes_moved(relay))
        if relay.must_linger:
            self._nursery.start_soon(self._linger, relay)
            return
        relay.close_sockets()  # of which both directions have ended, for the store's copy, too
        self._ledger.release_relay(relay)

    async def _linger(self, relay: Relay) -> None:
        streams = relay.take_streams()
        try:
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(read_to_the_end, stream, LINGER_S)
        finally:
            is_successors = self._engine.frozen and relay.is_spliced
            for stream in streams:
                if not is_successors:
                    shut_down(stream.socket.fileno(), socket.SHUT_RDWR)
                stream.socket.close()
            if not is_successors:
                self._ledger.release_relay(relay)

    def _on_left_behind_end(self, relay_id: int, client_ip: str) -> None:
        self._fd_store.drop_left_behind(relay_id)
        self._callbacks.on_left_behind_gone(client_ip)

    # ---- observation

    def deny_credentials(self, denied: DenyList) -> None:
        """End the relays whose credentials a deny list names, now and when they start or are adopted."""
        self._denied = denied
        for relay in list(self._engine.relays):
            self._deny_if_listed(relay)

    def _deny_if_listed(self, relay: Relay) -> None:
        kind = self._denied.matching_kind(relay.record.credentials)
        if kind and not relay.is_over:
            client, principal = relay.record.client_address, relay.record.principal
            get_logger().warning("a denied credential's relay is ended", client=client, principal=principal, kind=kind)
            relay.deny()

    def _on_credentials_changed(self, session: ExpiringSession) -> None:
        """Check a client's new credentials, and have a successor know them, too."""
        control = session.control
        if isinstance(control, FramedControl):  # otherwise it is lookup mode's
            self._nursery.start_soon(self._store_credentials, control.relay)
            self._deny_if_listed(control.relay)

    async def _store_credentials(self, relay: Relay) -> None:
        """Store a relay's record once more, in the place of what the store has of it."""
        while relay.is_spliced and not (relay.is_over or relay.handed_over):
            try:
                if self._fd_store.store_relay_now(relay.record, *relay.sockets):
                    return
            except _START_ERRORS as error:
                get_logger().warning("a relay's new credentials are not crash-safe", reason=str(error))
                return
            await trio.sleep(STORE_PAUSE_S)

    @property
    def kernel_tls_relays(self) -> int:
        """The number of live relays of which the kernel encrypts a side."""
        return sum(isinstance(relay, KernelTlsRelay) for relay in self._engine.relays)

    @property
    def live(self) -> list[Relay]:
        """The live relays; none that is a successor's."""
        return self._engine.relays

    def bytes_moved(self, relay: Relay) -> tuple[int, int]:
        """Return the bytes that a live relay has moved so far, to the broker and to the client."""
        return self._engine.bytes_moved(relay)

    def expiring_sessions(self) -> list[ExpiringSession]:
        """Return the sessions of the live relays of which the frames are followed; none that is a successor's."""
        return [relay.session for relay in self._engine.relays if relay.session is not None]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return Prometheus counters of bytes, portions, and use by principal."""
        return self._ledger.collect()


class SplicedRelayStarter:
    """Starts relays between two plain sockets."""

    def __init__(
        self, engine: RelayEngine, framed_pump: FramedSplicePump, fd_store: FdStoreClient, ledger: RelayLedger
    ) -> None:
        self._engine = engine
        self._framed_pump = framed_pump
        self._fd_store = fd_store
        self._ledger = ledger

    async def start_relay(
        self, start: RelayStart, client: TcpStream, broker: TcpStream, session: ExpiringSession | None
    ) -> Relay:
        """Start a relay of which the rows are open; return it. Both sockets are detached from their streams then.

        Where the engine was frozen meanwhile, the relay is a successor's already. Raises RelayStartFailed: nothing is
        left of the relay then, and both streams are the caller's.
        """
        with _Starting(self, start, client, broker, session) as starting:
            relay = starting.relay
            await self._send_ahead(relay, broker, starting.first_to_broker)
            self._preload(relay, starting.first_to_broker, starting.first_to_client)
            await self._fd_store.store_relay(relay.record, *relay.sockets)
            self._run_relay(relay, start)
            starting.is_done = True
        return relay

    def start_relay_now(
        self, start: RelayStart, client: TcpStream, broker: TcpStream, session: ExpiringSession | None
    ) -> Relay | None:
        """Do the same if that needs no waiting; otherwise return None: nothing is left of the relay then."""
        with _Starting(self, start, client, broker, session) as starting:
            relay = starting.relay
            if len(starting.first_to_broker) <= SMALL_PIPE_BYTES:
                self._preload(relay, starting.first_to_broker, starting.first_to_client)
                if self._fd_store.store_relay_now(relay.record, *relay.sockets):
                    self._run_relay(relay, start)
                    starting.is_done = True
        return relay if starting.is_done else None

    def _run_relay(self, relay: Relay, start: RelayStart) -> None:
        over_tls = [stream for stream in (start.client, start.broker) if isinstance(stream, TlsStream)]
        try:
            for stream in over_tls:
                give_keys(stream.transport.socket, stream.session.take_kernel_keys())
            if not self._engine.frozen:  # otherwise it is the successor's already
                self._ledger.count_start(relay.record)
                self._engine.start_relay(relay)
        except _START_ERRORS:
            for stream in over_tls:  # its caller would encrypt with keys that the kernel may have
                shut_down(stream.transport.socket.fileno(), socket.SHUT_RDWR)
            raise

    def follow_relay(self, relay: Relay, start: RelayStart) -> tuple[bytes, bytes]:
        """Return what goes first to the broker, and to the client."""
        self._engine.set_owner(relay)
        first = start.first_to_broker, start.first_to_client
        return first if relay.session is None else self._framed_pump.follow_relay(relay, relay.session, *first)

    def abandon_relay(self, relay: Relay) -> None:
        """Release what a relay that has not started had acquired."""
        if self._ledger.is_handing_over:  # its rows, which nothing was written to, are the successor's
            for direction in (relay.to_broker, relay.to_client):
                direction.detach_source()
            return
        self._engine.abandon_relay(relay)
        self._ledger.release_relay(relay)

    async def _send_ahead(self, relay: Relay, broker: TcpStream, first_to_broker: bytes) -> None:
        """Send ahead to the broker what the client sent beyond what fits any pipe.

        The client has not received CONNECTED yet: should this process be killed now, it connects once more.
        """
        ahead = _bytes_ahead(first_to_broker)
        if not ahead:
            return
        with trio.move_on_after(relay.half_close_timeout_s) as scope:
            await broker.send_all(first_to_broker[:ahead])
        if scope.cancelled_caught:
            raise RelayStartFailed("the broker does not take what the client sent first")
        if self._ledger.is_handing_over:
            raise RelayStartFailed(REPLACED)
        self._ledger.table.add_bytes(relay.to_broker.row, ahead)
        self._engine.run_queue.charge(relay.to_broker.turns, ahead)

    def _preload(self, relay: Relay, first_to_broker: bytes, first_to_client: bytes) -> None:
        """Put what was read ahead into pipes: from then on it is in the kernel.

        No waiting from here to the start: a pipe that is lent must not be a successor's.
        """
        if first_to_client:
            if len(first_to_client) > self._engine.reserve_pipe(relay.to_client):
                raise RelayStartFailed(
                    f"the broker said {len(first_to_client)} bytes with CONNECTED, which is too much"
                )
            self._engine.preload_pipe(relay.to_client, first_to_client)
        if first_to_broker:
            self._engine.reserve_pipe(relay.to_broker)
            self._engine.preload_pipe(relay.to_broker, first_to_broker[_bytes_ahead(first_to_broker) :])


class _Starting:
    """A relay that starts within this context; at its end nothing is left of the relay, unless it ``is_done``.

    Raises RelayStartFailed for what a start may meet.
    """

    __slots__ = ("_start", "_starter", "_streams", "first_to_broker", "first_to_client", "is_done", "relay")

    def __init__(
        self,
        starter: SplicedRelayStarter,
        start: RelayStart,
        client: TcpStream,
        broker: TcpStream,
        session: ExpiringSession | None,
    ) -> None:
        sockets = client.socket.fileno(), broker.socket.fileno()
        self.relay = new_spliced_relay(start.stored, *sockets, seconds(start.config.half_close_timeout_ms), session)
        self.relay.on_broker_end = start.on_broker_end
        self.is_done = False
        self._starter = starter
        self._start = start
        self._streams = client, broker

    def __enter__(self) -> Self:
        try:
            tune_for_relay(*self._streams, self._start.config)
            self.first_to_broker, self.first_to_client = self._starter.follow_relay(self.relay, self._start)
        except _START_ERRORS as error:
            self._starter.abandon_relay(self.relay)
            raise _start_failure(error) from error
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if self.is_done:
            for stream in self._streams:
                stream.socket.detach()
            return
        self._starter.abandon_relay(self.relay)
        if isinstance(error, _START_ERRORS):
            raise _start_failure(error) from error


def _start_failure(error: Exception) -> RelayStartFailed:
    must_wait = isinstance(error, OSError) and error.errno in {errno.EAGAIN, errno.ETOOMANYREFS}
    return (RelayMustWait if must_wait else RelayStartFailed)(f"a relay cannot begin: {error}")


def _bytes_ahead(first_to_broker: bytes) -> int:
    return max(0, len(first_to_broker) - SMALL_PIPE_BYTES)
