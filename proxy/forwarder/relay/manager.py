"""All relays of a forwarder, from the moment when both sides are connected until both are closed.

Where both sides are plain sockets and the kernel splices, the engine moves the bytes (proxy.forwarder.relay.engine),
no task
belongs to a relay, and the fd store keeps it for this forwarder's successor (proxy.forwarder.relay.fd_store_client).
Anything else
goes the way through user space (proxy.forwarder.relay.user_space), behind the same call; such a relay ends with the
process.

A relay is blind, unless it is given a session that can expire or whose messages are counted
(proxy.forwarder.relay.expiring.relay_session): then its frames are followed, either way.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proto.command_heads import FrameInvalid
from proto.rpc_pb2 import RelayLeftBehind, StoredRelay
from proxy.common.logs import get_logger
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.relay.close_schedule import CloseSchedule, until_quiet
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.expiring.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.relay.expiring.enforcement import Enforcement
from proxy.forwarder.relay.expiring.reauthentication import ReauthenticationCoordinator, ReauthenticationMetrics
from proxy.forwarder.relay.expiring.relay_session import (
    ReauthenticatorFactory,
    reauthentication_unavailable,
)
from proxy.forwarder.relay.expiring.session import PLANNED_CLOSE_REASONS, CloseReason, ExpiringSession
from proxy.forwarder.relay.expiring.splice_pump import FramedSplicePump
from proxy.forwarder.relay.fd_store_client import FdStoreClient, RelayHandover
from proxy.forwarder.relay.left_behind import RelaysLeftBehind
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES, PipePool
from proxy.forwarder.relay.relay import Relay, shut_down
from proxy.forwarder.relay.sockets import ip_of, read_to_the_end, splice_works, transport_of, tune_for_relay
from proxy.forwarder.relay.start import RelayStart
from proxy.forwarder.relay.usage import PrincipalUsage
from proxy.forwarder.relay.user_space import UserSpaceRelay, UserSpaceRelays
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.process.descriptors import adopt_stream
from proxy.runtime.shared.fd_store_channel import MessageTooLong, StoreLost
from proxy.runtime.shared.relay_table import BYTES, OPERATIONS, TO_BROKER, TO_CLIENT, RelayTable

REPLACED = "this forwarder is being replaced"

_NOT_BEGUN = (
    OSError,
    StoreLost,
    MessageTooLong,
    FrameInvalid,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class RelayStartFailed(Exception):
    """A relay could not begin; both streams are still the caller's."""


class RelayManager(Collector):
    """See the module. As a collector it reads the relay table, so that no event has to touch a metric.

    ``judge`` and ``now`` are lookup mode's, too: one place asks clients in time, and judges what they answer.

    ``enforcement``: whether sessions' ends close connections; of sessions in lookup mode, too.

    ``on_end`` is called for each relay that has ended, with what the store knew about it; ``on_moved`` likewise for
    each that has become a successor's; ``on_left_behind_gone`` with the client's IP address for each of a predecessor's
    that has ended there, or that a successor looks after. ``recall`` makes what judges the answers of clients of a
    predecessor's relays; ``brokers`` answers those that ask the proxy itself;
    ``principals_max`` bounds whose use is counted by name; ``now``: seconds of a clock that goes
    forward only, and is the same in a successor.
    """

    def __init__(
        self,
        keeper: FdStoreClient,
        inheritance: RelayHandover,
        on_end: Callable[[StoredRelay], None],
        nursery: trio.Nursery,
        *,
        forwarders: int,
        may_linger: Callable[[], bool],
        on_moved: Callable[[StoredRelay], None] = lambda _about: None,
        on_left_behind_gone: Callable[[str], None] = lambda _ip: None,
        recall: ReauthenticatorFactory = reauthentication_unavailable,
        enforcement: Enforcement | None = None,
        brokers: BrokerReauthenticationFactory | None = None,
        reauthentication_metrics: ReauthenticationMetrics | None = None,
        principals_max: int = 100,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = InFlightCounter()
        self._fd_store = keeper
        self._on_end = on_end
        self._on_moved = on_moved
        self._on_left_behind_gone = on_left_behind_gone
        self._nursery = nursery
        self.now = now
        self._closing = False
        self._table = RelayTable(inheritance.table)
        self._pool = PipePool(keeper.store_pipes, keeper.drop_pipe, forwarders=forwarders)
        self._splices = splice_works()
        self._engine = RelayEngine(self._table, self._pool, self._relay_ended, may_linger)
        self._recall = recall
        self.enforcement = enforcement or Enforcement()
        self.reauthentication = ReauthenticationCoordinator(
            nursery, reauthentication_metrics or ReauthenticationMetrics(None), now
        )
        self._brokers = brokers or BrokerReauthenticationFactory(nursery)
        self._framer = FramedSplicePump(self._table, self._engine.pump, self.reauthentication, now)
        self._in_user_space = UserSpaceRelays(
            nursery, self._table, self.reauthentication, self._tell_of_end, self._release_rows
        )
        self.left_behind = RelaysLeftBehind(self._table, self._left_behind_ended)
        """Those that predecessors still have; of this forwarder's own, when it is replaced, see ``hand_over``."""
        self._stay_behind: frozenset[int] | None = None
        self._principals = PrincipalUsage(self._table, principals_max)
        self.close_schedule: CloseSchedule[Relay | UserSpaceRelay] = CloseSchedule(self._leave, self._drop, now)
        self._left_because: dict[int, CloseReason] = {}

    async def run(self) -> None:
        """Move bytes until cancelled; relays are left as they are. After a hand-over, look after those that stay."""
        if not self._splices:
            get_logger().warning("the kernel refuses to splice; relays go through user space, which costs more")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reauthentication.run)
            nursery.start_soon(self.close_schedule.run)
            nursery.start_soon(self.left_behind.run)
            await self._engine.run()
            if self._stay_behind is None:
                nursery.cancel_scope.cancel()

    # ---- a predecessor's

    def adopt_relays(self, left: RelayHandover, config: RelayConfig) -> None:
        """Go on with what a predecessor left."""
        taken = {kept.record.id for kept in left.relays}
        self.left_behind.adopt_relays(left.left_behind, taken)
        self._table.adopt_rows(taken | self.left_behind.ids)
        pipes = {pipe.id: pipe for pipe in left.pipes}
        for pipe in left.pipes:
            self._pool.adopt_pipe(pipe)
        for kept in left.relays:
            relay = Relay(kept.record, kept.client, kept.broker, seconds(config.half_close_timeout_ms))
            if kept.record.HasField("session") and self._table.is_framed(kept.record.id):
                clock = self._framer.journal.restore_clock(kept.record)
                relay.session = ExpiringSession(kept.record, clock, self._recall(kept.record), self.enforcement)
                self._brokers.attach_to(relay.session)
            self.in_flight.increment()
            try:
                self._engine.adopt_relay(relay, pipes, self._framer)
                if relay.session is not None:
                    self.reauthentication.add_session(relay.session)
                    if relay.session.broker_challenges is not None:
                        relay.session.broker_challenges.resume_exchange()
                    if relay.session.close_reason in PLANNED_CLOSE_REASONS:
                        relay.close_reason = self._left_because[kept.record.id] = relay.session.close_reason
                self.close_schedule.add_relay(relay)
            except OSError as error:
                get_logger().error("a relay cannot be taken over", client=kept.record.client_address, reason=str(error))
                self._relay_ended(relay)
        for pipe in pipes.values():
            if pipe.queued_bytes():  # of a relay that was ended in that very moment, or had never begun
                self._pool.discard_pipe(pipe)
            else:
                self._pool.release_pipe(pipe)
        with contextlib.suppress(OSError):  # there may be no more descriptors; the engine copes
            self._pool.reserve_pipes()

    def spread_closes(self, timeout_s: float) -> None:
        """End all relays gently and by themselves, spread over this time."""
        spliced = [] if self._engine.frozen else self._engine.relays
        self.close_schedule.spread_closes([*spliced, *self._in_user_space.relays], timeout_s)

    def abort_relays(self) -> None:
        """End all relays that this process can end: the time of a drain is over."""
        self._engine.abort_relays()

    async def hand_over_relays(self) -> None:
        """Leave the table and all relays that the store keeps to a successor, and tell it so. The others stay here, and
        count on in rows of the table that are theirs alone.
        """
        if self._stay_behind is not None:  # it has said so already
            return
        self._closing = True
        for client_ip in self.left_behind.forget_relays():
            self._on_left_behind_gone(client_ip)
        moved = self._engine.freeze() if self._fd_store.crash_safe else []
        staying = [*self._in_user_space.relays, *(() if self._fd_store.crash_safe else self._engine.relays)]
        self._stay_behind = frozenset(relay.record.id for relay in staying)
        for relay in moved:
            relay.handed_over = True  # verdicts and credentials that are still on their way change nothing of it
        if moved:
            self.close_schedule.forget_relays(moved)
            self.reauthentication.remove_sessions([relay.session for relay in moved if relay.session is not None])
        await self._fd_store.close([RelayLeftBehind(id=one.record.id, client_ip=ip_of(one.record)) for one in staying])
        if not self._fd_store.crash_safe:
            return
        self._engine.close_pipes()
        for relay in moved:
            self.in_flight.decrement()
            self._let_go(relay)

    # ---- a new one

    async def begin(self, start: RelayStart) -> None:
        """Start a relay; from then on both streams are the relay's. Bytes that were read ahead go first.

        The client is told nothing before its relay is safe in the fd store. Raises RelayStartFailed.
        """
        client, broker, about, session = start.client, start.broker, start.stored, start.session
        if self._closing:
            raise RelayStartFailed(REPLACED)
        try:
            about.id = self._table.allocate_relay_id()
        except OverflowError as error:
            raise RelayStartFailed(str(error)) from None
        followed = None
        if session is not None and (session.inspects_frames or about.leave_at_ms):
            about.session.CopyFrom(session.to_stored_session())
            clock = session.clock if session.expires else None
            followed = ExpiringSession(about, clock, session.reauthenticate, self.enforcement)
            self._brokers.attach_to(followed)
        self._table.record_principal(about.id, self._principals.row_number_of(about.principal))
        if self._splices and isinstance(client, trio.SocketStream) and isinstance(broker, trio.SocketStream):
            await self._begin_to_splice(start, client, broker, followed)
            return
        try:
            for stream in (client, broker):
                tune_for_relay(transport_of(stream), start.config)
        except OSError as error:  # it has gone again
            self._table.release_relay_id(about.id)
            raise RelayStartFailed(f"a relay cannot begin: {error}") from error
        self.in_flight.increment()
        self._principals.add_session(about.principal)
        relay = UserSpaceRelay(about, followed)
        self._in_user_space.start_relay(relay, start)
        self.close_schedule.add_relay(relay)

    async def _begin_to_splice(
        self,
        start: RelayStart,
        client: trio.SocketStream,
        broker: trio.SocketStream,
        followed: ExpiringSession | None,
    ) -> None:
        about, config = start.stored, start.config
        first_to_broker, first_to_client = start.first_to_broker, start.first_to_client
        sockets = client.socket.fileno(), broker.socket.fileno()
        relay = Relay(about, *sockets, seconds(config.half_close_timeout_ms))
        relay.session = followed
        begun = False
        try:
            for stream in (client, broker):
                tune_for_relay(stream, config)
            if followed is not None:
                first_to_broker, first_to_client = self._framer.follow_relay(relay, first_to_broker, first_to_client)
            await self._load(relay, broker, first_to_broker, first_to_client)
            await self._fd_store.store_relay(about, *sockets)
            if not self._engine.frozen:  # otherwise it is the successor's already
                self._principals.add_session(about.principal)
                self._engine.start_relay(relay)
            begun = True
        except _NOT_BEGUN as error:
            raise RelayStartFailed(f"a relay cannot begin: {error}") from error
        finally:
            if not begun:
                self._abandon(relay)
        for stream in (client, broker):
            stream.socket.detach()
        if self._engine.frozen:
            self._let_go(relay)
        else:
            self._watch(relay)

    def _let_go(self, relay: Relay) -> None:
        """Close this process's descriptors of a relay that is a successor's."""
        for direction in (relay.to_broker, relay.to_client):
            direction.detach_source()
            os.close(direction.source)
        self._on_moved(relay.record)

    def _watch(self, relay: Relay) -> None:
        self.in_flight.increment()
        if relay.session is not None:
            self.reauthentication.add_session(relay.session)
        self.close_schedule.add_relay(relay)

    def _abandon(self, relay: Relay) -> None:
        """Give back what a relay that has not begun was lent."""
        if self._closing:  # its rows, which nothing was written to, are the successor's
            for direction in (relay.to_broker, relay.to_client):
                direction.detach_source()
            return
        self._engine.abandon_relay(relay)
        self._release(relay)

    async def _load(
        self, relay: Relay, broker: trio.SocketStream, first_to_broker: bytes, first_to_client: bytes
    ) -> None:
        """Put what was read ahead into pipes: from now on it is in the kernel.

        What the client sent, beyond what fits any pipe, goes ahead to the broker. The client has not been told
        Connected yet: should this process die now, it begins anew.
        """
        ahead = max(0, len(first_to_broker) - SMALL_PIPE_BYTES)
        if ahead:
            with trio.move_on_after(relay.half_close_timeout_s) as patience:
                await broker.send_all(first_to_broker[:ahead])
            if patience.cancelled_caught:
                raise RelayStartFailed("the broker does not take what the client sent first")
            if self._closing:
                raise RelayStartFailed(REPLACED)
            self._table.cells[relay.to_broker.row + BYTES] += ahead
        # No waiting from here on: a pipe that is lent must not be a successor's.
        if first_to_client:
            if len(first_to_client) > self._engine.reserve_pipe(relay.to_client):
                raise RelayStartFailed(
                    f"the broker said {len(first_to_client)} bytes with CONNECTED, which is too much"
                )
            self._engine.preload_pipe(relay.to_client, first_to_client)
        if first_to_broker:
            self._engine.reserve_pipe(relay.to_broker)
            self._engine.preload_pipe(relay.to_broker, first_to_broker[ahead:])

    # ---- ends

    def _leave(self, relay: Relay | UserSpaceRelay, why: CloseReason) -> None:
        """Begin to end a relay gently."""
        about = relay.record
        get_logger().debug(
            "a relay is being ended",
            client=about.client_address,
            principal=about.principal,
            reason=why.name.lower(),
        )
        self._left_because[about.id] = why
        if isinstance(relay, UserSpaceRelay):
            self._in_user_space.close_relay(relay, why)
        elif self._engine.frozen:
            return  # it is a successor's
        elif relay.session is not None:
            relay.session.control.start_closing(why)
        else:
            self._engine.stop_client_input(relay)
            self._nursery.start_soon(self._see_off, relay)

    async def _see_off(self, relay: Relay) -> None:
        """End a relay of whose frames nothing is known: when the broker has answered what it was sent."""

        def position() -> object:  # which differs from itself as long as bytes are on their way
            in_pipes = relay.to_broker.in_pipe or relay.to_client.in_pipe
            return object() if in_pipes else self._engine.bytes_moved(relay)

        await until_quiet(position)
        if not (relay.is_over or self._engine.frozen):
            self._engine.close_relay(relay)

    def _drop(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay that takes too long to end."""
        get_logger().info("a relay that does not end is closed", client=relay.record.client_address)
        if isinstance(relay, UserSpaceRelay):
            self._in_user_space.abort_relay(relay)
        elif not self._engine.frozen:
            self._engine.abort_relay(relay)

    def close_reason_of(self, about: StoredRelay) -> CloseReason:
        """Why the proxy itself has ended a relay of which it is being told that it has ended; NO: it has not."""
        return self._left_because.get(about.id, CloseReason.NOT_CLOSING)

    def _relay_ended(self, relay: Relay) -> None:
        """Tell of it, and close both sides; where one broke, only once the other has read what it was sent."""
        self._tell_of_end(relay.record, *self._engine.bytes_moved(relay))
        if relay.broken:
            self._nursery.start_soon(self._linger, relay)
            return
        for descriptor in relay.sockets:
            shut_down(descriptor, socket.SHUT_RDWR)  # the store's copy would keep it open
            os.close(descriptor)
        self._release(relay)

    async def _linger(self, relay: Relay) -> None:
        streams = [adopt_stream(descriptor) for descriptor in relay.sockets]
        try:
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(partial(read_to_the_end, stream))
        finally:
            for stream in streams:
                if not self._engine.frozen:
                    shut_down(stream.socket.fileno(), socket.SHUT_RDWR)
                stream.socket.close()
            if not self._engine.frozen:
                self._release(relay)

    def _release(self, relay: Relay) -> None:
        self._release_rows(relay.record.id)
        self._fd_store.drop_relay(relay.record.id)

    def _release_rows(self, relay_id: int) -> None:
        """Let go of a relay's rows: sum them up, or leave that to the successor whose table it is now."""
        if self._stay_behind is None:
            self._table.release_relay_id(relay_id)
        elif relay_id in self._stay_behind:
            self._table.record_ended_behind(relay_id)

    def _left_behind_ended(self, relay_id: int, client_ip: str) -> None:
        self._fd_store.drop_left_behind(relay_id)
        self._on_left_behind_gone(client_ip)

    def _tell_of_end(self, about: StoredRelay, bytes_to_broker: int, bytes_to_client: int) -> None:
        self.in_flight.decrement()
        get_logger().info(
            "a relay has ended",
            client=about.client_address,
            principal=about.principal,
            broker=about.target,
            seconds=round(time.time() - about.started_at_unix_ms / 1000, 3),
            bytes_to_broker=bytes_to_broker,
            bytes_to_client=bytes_to_client,
            **self._messages_of(about),
            **({"proxy": about.proxy} if about.proxy else {}),
        )
        self._on_end(about)
        self._left_because.pop(about.id, None)

    def _messages_of(self, about: StoredRelay) -> dict[str, int]:
        if not about.session.counts_messages:
            return {}
        to_broker, to_client = self._table.messages_of(about.id)
        return {"messages_to_broker": to_broker, "messages_to_client": to_client}

    # ---- for those who look

    def expiring_sessions(self) -> list[ExpiringSession]:
        """The relays that live here whose frames are followed, whichever way they go; none that is a successor's."""
        spliced = () if self._engine.frozen else (relay.session for relay in self._engine.relays)
        return [*(one for one in spliced if one is not None), *self._in_user_space.expiring_sessions]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Prometheus: bytes and portions by direction, and use by principal. A successor goes on counting where its
        predecessor ended, and counts what predecessors' relays still move: so a predecessor tells nothing of it.
        """
        if self._stay_behind is not None:
            return
        bytes_moved = CounterMetricFamily(
            "pulsar_proxy_binary_bytes", "Bytes relayed, by direction.", labels=["direction"]
        )
        operations = CounterMetricFamily(
            "pulsar_proxy_binary_ops", "Portions of bytes relayed, by direction.", labels=["direction"]
        )
        for name, way in (("to_broker", TO_BROKER), ("to_client", TO_CLIENT)):
            bytes_moved.add_metric([name], self._table.total(way, BYTES))
            operations.add_metric([name], self._table.total(way, OPERATIONS))
        yield bytes_moved
        yield operations
        yield from self._principals.collect()
