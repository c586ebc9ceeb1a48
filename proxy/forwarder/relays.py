"""All relays of a forwarder, from the moment when both sides are connected until both are closed.

Where both sides are plain sockets and the kernel splices, the engine moves the bytes (proxy.forwarder.engine), no task
belongs to a relay, and the fd store keeps it for this forwarder's successor (proxy.forwarder.keeping). Anything else
goes the way through user space (proxy.forwarder.user_space), behind the same call; such a relay ends with the process.

A relay is blind, unless it is given a session that can expire or whose messages are counted
(proxy.forwarder.relay_session): then its frames are followed, either way.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proto.command_heads import FrameWrong
from proto.rpc_pb2 import StoredRelay
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.broker_reauthentication import BrokerReauthentication
from proxy.forwarder.departures import Departures, until_quiet
from proxy.forwarder.directions import Relay, shut_down
from proxy.forwarder.engine import RelayEngine
from proxy.forwarder.followed import LEAVING, Closing, Followed
from proxy.forwarder.framed import Framer
from proxy.forwarder.keeping import Inheritance, RelayKeeper
from proxy.forwarder.moving import SPLICE_FLAGS
from proxy.forwarder.pipes import SMALL_PIPE_BYTES, PipePool
from proxy.forwarder.principals import Principals
from proxy.forwarder.reauthentication import Reauthentication, ReauthenticationMetrics
from proxy.forwarder.relay_session import Recall, RelaySession, nobody_judges
from proxy.forwarder.user_space import LINGER_S, Stream, UserSpaceRelay, UserSpaceRelays
from proxy.runtime.descriptors import adopt_stream
from proxy.runtime.logs import get_logger
from proxy.runtime.relay_table import BYTES, OPERATIONS, TO_BROKER, TO_CLIENT, RelayTable
from proxy.runtime.store_channel import MessageTooLong, StoreLost
from proxy.runtime.tasks import InFlight, seconds
from proxy.runtime.tls import TlsStream

REPLACED = "this forwarder is being replaced"

_TCP_NOTSENT_LOWAT = 25  # tcp(7); the socket module has no name for it
_NO_LOWAT = 0x7FFFFFFF


_NOT_BEGUN = (
    OSError,
    StoreLost,
    MessageTooLong,
    FrameWrong,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class RelayNotBegun(Exception):
    """A relay could not begin; both streams are still the caller's."""


class Relays(Collector):
    """See the module. As a collector it reads the relay table, so that no event has to touch a metric.

    ``judge`` and ``now`` are lookup mode's, too: one place asks clients in time, and judges what they answer.

    ``on_end`` is called for each relay that has ended, with what the store knew about it. ``recall`` makes what judges
    the answers of clients of a predecessor's relays; ``brokers`` answers those that ask the proxy itself;
    ``principals_max`` bounds whose use is counted by name; ``now``:
    seconds of a clock that goes forward only, and is the same in a successor.
    """

    def __init__(
        self,
        keeper: RelayKeeper,
        inheritance: Inheritance,
        on_end: Callable[[StoredRelay], None],
        nursery: trio.Nursery,
        *,
        forwarders: int,
        may_linger: Callable[[], bool],
        recall: Recall = nobody_judges,
        brokers: BrokerReauthentication | None = None,
        reauthentication_metrics: ReauthenticationMetrics | None = None,
        principals_max: int = 100,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = InFlight()
        self._keeper = keeper
        self._on_end = on_end
        self._nursery = nursery
        self.now = now
        self._closing = False
        self._table = RelayTable(inheritance.table)
        self._pool = PipePool(keeper.put_pipes, keeper.drop_pipe, forwarders=forwarders)
        self._splices = splice_works()
        self._engine = RelayEngine(self._table, self._pool, self._relay_ended, may_linger)
        self._recall = recall
        self.judge = Reauthentication(nursery, reauthentication_metrics or ReauthenticationMetrics(None), now)
        self._brokers = brokers or BrokerReauthentication(nursery)
        self._framer = Framer(self._table, self._engine.mover, self.judge, now)
        self._in_user_space = UserSpaceRelays(nursery, self._table, self.judge, self._tell_of_end)
        self._principals = Principals(self._table, principals_max)
        self.departures: Departures[Relay | UserSpaceRelay] = Departures(self._leave, self._drop, now)
        self._left_because: dict[int, Closing] = {}

    async def run(self) -> None:
        """Move bytes until cancelled or handed over; relays are left as they are either way."""
        if not self._splices:
            get_logger().warning("the kernel refuses to splice; relays go through user space, which costs more")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.judge.run)
            nursery.start_soon(self.departures.run)
            await self._engine.run()
            nursery.cancel_scope.cancel()

    # ---- a predecessor's

    def adopt(self, left: Inheritance, config: RelayConfig) -> None:
        """Go on with what a predecessor left."""
        self._table.adopt({kept.about.id for kept in left.relays})
        pipes = {pipe.id: pipe for pipe in left.pipes}
        for pipe in left.pipes:
            self._pool.adopt(pipe)
        for kept in left.relays:
            relay = Relay(kept.about, kept.client, kept.broker, seconds(config.half_close_timeout_ms))
            if kept.about.HasField("session") and self._table.is_followed(kept.about.id):
                relay.followed = Followed(
                    kept.about, self._framer.journal.recalled_clock(kept.about), self._recall(kept.about)
                )
                self._brokers.follow(relay.followed)
            self.in_flight.begin()
            try:
                self._engine.adopt(relay, pipes, self._framer)
                if relay.followed is not None:
                    self.judge.watch(relay.followed)
                    if relay.followed.broker is not None:
                        relay.followed.broker.go_on()
                    if relay.followed.closing in LEAVING:
                        relay.leaving = self._left_because[kept.about.id] = relay.followed.closing
                self.departures.watch(relay)
            except OSError as error:
                get_logger().error("a relay cannot be taken over", client=kept.about.client_address, reason=str(error))
                self._relay_ended(relay)
        for pipe in pipes.values():
            if pipe.waiting():  # of a relay that was ended in that very moment, or had never begun
                self._pool.discard(pipe)
            else:
                self._pool.give(pipe)
        with contextlib.suppress(OSError):  # there may be no more descriptors; the engine copes
            self._pool.reserve()

    def spread_ends(self, timeout_s: float) -> None:
        """End all relays gently and by themselves, spread over this time."""
        self.departures.spread([*self._engine.relays, *self._in_user_space.relays], timeout_s)

    def end_all(self) -> None:
        """End all relays that this process can end: the time of a drain is over."""
        self._engine.end_all()

    async def hand_over(self) -> None:
        """Leave all relays that the store keeps to a successor, and tell it so."""
        self._closing = True
        left = self._engine.freeze()
        self._table = RelayTable()  # the other one is the successor's from now on
        self._in_user_space.leave_table(self._table)
        self._principals = Principals(self._table, self._principals.max)
        await self._keeper.close()
        self._engine.close_pipes()
        for relay in left:
            for descriptor in relay.sockets:
                os.close(descriptor)
            self.in_flight.end()

    # ---- a new one

    async def begin(
        self,
        client: Stream,
        broker: Stream,
        about: StoredRelay,
        *,
        first_to_broker: bytes,
        first_to_client: bytes,
        config: RelayConfig,
        session: RelaySession | None = None,
    ) -> None:
        """Begin to relay; from now on both streams are the relay's. What was read ahead goes first: a client's from
        the beginning of a frame on.

        The client is told nothing before its relay is safe in the fd store. ``session``: None for a blind relay.
        Raises RelayNotBegun.
        """
        if self._closing:
            raise RelayNotBegun(REPLACED)
        try:
            about.id = self._table.take()
        except OverflowError as error:
            raise RelayNotBegun(str(error)) from None
        followed = None
        if session is not None and (session.is_followed or about.leave_at_ms):
            about.session.CopyFrom(session.stored())
            followed = Followed(about, session.clock if session.expires else None, session.reauthenticate)
            self._brokers.follow(followed)
        self._table.belongs(about.id, self._principals.number_of(about.principal))
        if self._splices and isinstance(client, trio.SocketStream) and isinstance(broker, trio.SocketStream):
            await self._begin_to_splice(client, broker, about, first_to_broker, first_to_client, config, followed)
            return
        try:
            for stream in (client, broker):
                tune_for_relay(transport_of(stream), config)
        except OSError as error:  # it has gone again
            self._table.give(about.id)
            raise RelayNotBegun(f"a relay cannot begin: {error}") from error
        self.in_flight.begin()
        self._principals.add_session(about.principal)
        relay = UserSpaceRelay(about, followed)
        self._in_user_space.begin(client, broker, relay, first_to_broker, first_to_client, config)
        self.departures.watch(relay)

    async def _begin_to_splice(  # noqa: PLR0917 -- private, and called once
        self,
        client: trio.SocketStream,
        broker: trio.SocketStream,
        about: StoredRelay,
        first_to_broker: bytes,
        first_to_client: bytes,
        config: RelayConfig,
        followed: Followed | None,
    ) -> None:
        sockets = client.socket.fileno(), broker.socket.fileno()
        relay = Relay(about, *sockets, seconds(config.half_close_timeout_ms))
        relay.followed = followed
        begun = False
        try:
            for stream in (client, broker):
                tune_for_relay(stream, config)
            if followed is not None:
                first_to_broker, first_to_client = self._framer.follow(relay, first_to_broker, first_to_client)
            await self._load(relay, broker, first_to_broker, first_to_client)
            await self._keeper.put(about, *sockets)
            if not self._engine.frozen:  # otherwise it is the successor's already
                self._principals.add_session(about.principal)
                self._engine.start(relay)
            begun = True
        except _NOT_BEGUN as error:
            raise RelayNotBegun(f"a relay cannot begin: {error}") from error
        finally:
            if not begun and not self._engine.frozen:  # a frozen engine's table is the successor's
                self._engine.abandon(relay)
                self._release(relay)
        for stream, descriptor in zip((client, broker), sockets, strict=True):
            stream.socket.detach()
            if self._engine.frozen:
                os.close(descriptor)
        if not self._engine.frozen:
            self.in_flight.begin()
            if followed is not None:
                self.judge.watch(followed)
            self.departures.watch(relay)

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
                raise RelayNotBegun("the broker does not take what the client sent first")
            if self._closing:
                raise RelayNotBegun(REPLACED)
            self._table.cells[relay.to_broker.row + BYTES] += ahead
        # No waiting from here on: a pipe that is lent must not be a successor's.
        if first_to_client:
            if len(first_to_client) > self._engine.room_ahead(relay.to_client):
                raise RelayNotBegun(f"the broker said {len(first_to_client)} bytes with CONNECTED, which is too much")
            self._engine.preload(relay.to_client, first_to_client)
        if first_to_broker:
            self._engine.room_ahead(relay.to_broker)
            self._engine.preload(relay.to_broker, first_to_broker[ahead:])

    # ---- ends

    def _leave(self, relay: Relay | UserSpaceRelay, why: Closing) -> None:
        """Begin to end a relay gently."""
        about = relay.about
        get_logger().debug(
            "a relay is being ended",
            client=about.client_address,
            principal=about.principal,
            reason=why.name.lower(),
        )
        self._left_because[about.id] = why
        if isinstance(relay, UserSpaceRelay):
            self._in_user_space.leave(relay, why)
        elif self._engine.frozen:
            return  # it is a successor's
        elif relay.followed is not None:
            relay.followed.line.close(why)
        else:
            self._engine.hold_back(relay)
            self._nursery.start_soon(self._see_off, relay)

    async def _see_off(self, relay: Relay) -> None:
        """End a relay of whose frames nothing is known: when the broker has answered what it was sent."""

        def position() -> object:  # which differs from itself as long as bytes are on their way
            in_pipes = relay.to_broker.in_pipe or relay.to_client.in_pipe
            return object() if in_pipes else self._engine.bytes_moved(relay)

        await until_quiet(position)
        if not (relay.is_over or self._engine.frozen):
            self._engine.end_in_order(relay)

    def _drop(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay that takes too long to end."""
        get_logger().info("a relay that does not end is closed", client=relay.about.client_address)
        if isinstance(relay, UserSpaceRelay):
            self._in_user_space.drop(relay)
        elif not self._engine.frozen:
            self._engine.drop(relay)

    def left_because(self, about: StoredRelay) -> Closing:
        """Why the proxy itself has ended a relay of which it is being told that it has ended; NO: it has not."""
        return self._left_because.get(about.id, Closing.NO)

    def _relay_ended(self, relay: Relay) -> None:
        """Tell of it, and close both sides; where one broke, only once the other has read what it was sent."""
        self._tell_of_end(relay.about, *self._engine.bytes_moved(relay))
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
                    nursery.start_soon(partial(_read_to_the_end, stream))
        finally:
            for stream in streams:
                if not self._engine.frozen:
                    shut_down(stream.socket.fileno(), socket.SHUT_RDWR)
                stream.socket.close()
            if not self._engine.frozen:
                self._release(relay)

    def _release(self, relay: Relay) -> None:
        self._table.give(relay.about.id)
        self._keeper.drop_relay(relay.about.id)

    def _tell_of_end(self, about: StoredRelay, bytes_to_broker: int, bytes_to_client: int) -> None:
        self.in_flight.end()
        get_logger().info(
            "a relay has ended",
            client=about.client_address,
            principal=about.principal,
            broker=about.target,
            seconds=round(time.time() - about.started_at_unix_ms / 1000, 3),
            bytes_to_broker=bytes_to_broker,
            bytes_to_client=bytes_to_client,
            **({"proxy": about.proxy} if about.proxy else {}),
        )
        self._on_end(about)
        self._left_because.pop(about.id, None)

    # ---- for those who look

    def followed(self) -> list[Followed]:
        """The relays that live whose frames are followed, whichever way they go."""
        spliced = (relay.followed for relay in self._engine.relays)
        return [*(one for one in spliced if one is not None), *self._in_user_space.followed]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Prometheus: bytes and portions by direction, and use by principal. A successor goes on counting where its
        predecessor ended.
        """
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


async def _read_to_the_end(stream: trio.SocketStream) -> None:
    """Read and drop what still comes, for a bounded time: see close_politely. The stream stays open."""
    with trio.move_on_after(LINGER_S):
        try:
            await stream.send_eof()
            while await stream.receive_some(65536):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


def transport_of(stream: Stream) -> trio.SocketStream:
    """The TCP connection below a stream."""
    return stream.transport if isinstance(stream, TlsStream) else cast("trio.SocketStream", stream)


def tune_for_relay(stream: trio.SocketStream, config: RelayConfig) -> None:
    """What a relay's socket needs beside what every connection has (proxy.runtime.broker_link.tune_socket)."""
    for option, value in (
        (socket.TCP_KEEPIDLE, config.keep_alive_idle_ms // 1000),
        (socket.TCP_KEEPINTVL, config.keep_alive_probe_interval_ms // 1000),
        (socket.TCP_KEEPCNT, config.keep_alive_probes),
    ):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    # A peer that takes nothing also keeps the other's end from being seen: it stands behind the bytes.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, config.user_timeout_ms)
    # Trio's streams ask to be woken for each 16 KiB that leave; a relay's kernel buffers may be used in full.
    stream.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _NO_LOWAT)


def splice_works() -> bool:
    """Whether this kernel splices between a socket and a pipe (some sandboxes refuse)."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        theirs.send(b"x")
        return os.splice(ours.fileno(), writing, 1, flags=SPLICE_FLAGS) == 1
    except OSError:
        return False
    finally:
        ours.close()
        theirs.close()
        os.close(reading)
        os.close(writing)
