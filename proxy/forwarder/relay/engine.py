"""The relay engine: the relays of a forwarder in one edge-triggered epoll, drained by one Trio task.

Between two plain sockets bytes move by splice, socket → pipe → socket: none of them is ever in this process's memory,
and what is on its way is where the kernel keeps it. The relay table tells which pipe holds the bytes of which
direction, so a successor can go on from any instant (proxy.runtime.shared.relay_table). With TLS on a side they move
through this process's memory, and end with it (proxy.forwarder.relay.copy_pump).

Edges: a direction is pumped until its source says EAGAIN (more input raises a new edge) or its sink does (room raises
one). Each call moves one portion; after it the direction is enqueued, and owners take turns, so that neither a busy
relay nor many of one owner starve another (proxy.forwarder.relay.turns).

Ends: a direction ends when its source has ended or broken and everything before that was delivered; the sink's writing
side is then shut down, and the other direction goes on (half-close) as long as its bytes move. Where the sink breaks,
what is on its way to it is dropped; what it had sent is still delivered.
"""

import contextlib
import os
import select
from collections.abc import Callable, Iterable

import trio

from proto.rpc_pb2 import StoredRelay
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.closing import until_quiet
from proxy.forwarder.relay.copy_pump import CopyPump
from proxy.forwarder.relay.framed_splice_pump import FramedSplicePump
from proxy.forwarder.relay.kernel_tls_pump import KernelTlsPump, KernelTlsRelay
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.pump import Pump, PumpHost
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.forwarder.relay.splice_pump import SplicePump
from proxy.forwarder.relay.turns import RunQueue
from proxy.runtime.loop.epoll_loop import EVENTS_PER_BATCH, EpollLoop, Events, TimerFd
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, RelayTable

RECHECK_INTERVAL_S = 1.0
"""Between two looks at what no edge announces."""

EVENTS_BETWEEN_MAX = 16
"""Of relays, between two steps of another task: together they take about as long as a TLS handshake's step."""

_OUTPUT = select.EPOLLOUT
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_INPUT = select.EPOLLIN | _ENDED
_EVENTS = _INPUT | _OUTPUT | select.EPOLLET


class RelayEngine:
    """The relays of one forwarder.

    ``run`` is the one task that moves bytes; all else may be called from any task of its Trio loop. ``on_end`` is
    called with each relay that has ended; its sockets are the owner's to close then. ``may_linger`` returns True if no
    other task of this process is in a hurry (proxy.runtime.loop.epoll_loop). ``owner_of`` names the owner that a
    relay's pipes, turns and bytes a second count for.
    """

    def __init__(
        self,
        table: RelayTable,
        pool: PipePool,
        on_end: Callable[[Relay], None],
        may_linger: Callable[[], bool],
        owner_of: Callable[[StoredRelay], str],
    ) -> None:
        self._table = table
        self._owner_of = owner_of
        self._pool = pool
        self._on_end = on_end
        self._pace_timer = TimerFd()
        self.run_queue = run_queue = RunQueue(set_timer=self._pace_timer.arm)
        self._loop = EpollLoop(self._process_batch, run_queue.active, may_linger=may_linger)
        self._epoll = self._loop.epoll
        self._epoll.register(self._pace_timer, select.EPOLLIN | select.EPOLLET)
        self.host = host = PumpHost(self._finish, self._loop.wake, run_queue)
        self._half_closed, self._to_recheck = host.half_closed, host.to_recheck
        self.pump = SplicePump(table, pool, host)
        self._copy_pump = CopyPump(table, host)
        self._kernel_tls_pump = KernelTlsPump(table, self.pump, host)
        self._waiting_for_pipe = self.pump.waiting_for_pipe
        self._by_source: dict[int, Direction] = {}
        self._nursery: trio.Nursery
        self.frozen = False
        """Whether the spliced relays are a successor's."""

    # ---- relays in and out

    def reserve_pipe(self, direction: Direction) -> int:
        """Bind a pipe to a direction that has not started; return how many bytes it holds. Raises OSError."""
        if direction.pipe is None:
            direction.pipe = self._pool.acquire_pipe(direction.share.lane.size_bytes_max)
            self._pool.lend_pipe(direction.pipe, direction.share)
            self._table.bind_pipe(direction.row, direction.pipe.id)
        return direction.pipe.size_bytes

    def preload_pipe(self, direction: Direction, first: bytes) -> None:
        """Write what was read ahead of a relay, not more than ``reserve_pipe`` returned, to its pipe."""
        assert direction.pipe is not None  # it was reserved
        direction.held_bytes = os.write(direction.pipe.write_end, first)

    def set_owner(self, relay: Relay) -> None:
        """Let a relay count for its owner: once, before it gets a pipe, is queued or starts."""
        owner = self._owner_of(relay.record)
        relay.to_broker.turns = self.run_queue.turns_of(owner, TO_BROKER)
        relay.to_client.turns = self.run_queue.turns_of(owner, TO_CLIENT)
        if relay.is_spliced:
            relay.to_broker.share = relay.to_client.share = self._pool.share_of(owner)

    def start_relay(self, relay: Relay) -> None:
        """Start to relay between two connected, non-blocking sockets. Raises OSError; it has not started then."""
        pump = self._pump_of(relay)
        relay.engine = self
        try:
            for direction in (relay.to_broker, relay.to_client):
                if relay.session is None:
                    direction.pump = pump.pump
                self._by_source[direction.source] = direction
                # Registering raises the first edges by itself: for input that waits, and for room for first bytes.
                self._epoll.register(direction.source, _EVENTS)
        except OSError:
            self._leave(relay)
            raise
        if not relay.is_spliced:
            self._copy_pump.pass_early_ends_on(relay)

    def _pump_of(self, relay: Relay) -> Pump:
        if isinstance(relay, KernelTlsRelay):
            return self._kernel_tls_pump
        return self.pump if relay.is_spliced else self._copy_pump

    def run_once(self) -> None:
        """Process what is ready now: the first edges of a relay that has started, without a wake-up of ``run``."""
        self._loop.process_once()

    def run_between(self) -> None:
        """Process a few ready sockets between two long steps of another task, and nothing of the run queue.

        What is in the queue moves as fast as it can, and would take the time that the other task has.
        """
        self._loop.process_once(self._process_between, EVENTS_BETWEEN_MAX)

    def adopt_relay(self, relay: Relay, pipes: dict[int, Pipe], framed_pump: FramedSplicePump) -> None:
        """Continue a predecessor's relay, or end it where one of its pipes did not arrive.

        Takes those of ``pipes`` out that are bound to it. ``framed_pump`` restores the state of framed relays. Raises
        OSError; the relay has not started then.
        """
        missing = False
        self.set_owner(relay)
        for direction in (relay.to_broker, relay.to_client):
            pipe_id = self._table.bound_pipe(direction.row)
            pipe = pipes.pop(pipe_id, None)
            if pipe is None:
                missing |= pipe_id != 0  # the table goes on saying so until the sockets are shut down
            elif (queued := pipe.queued_bytes()) and not framed_pump.journal.undo_injection(direction, pipe, queued):
                direction.pipe, direction.held_bytes = pipe, queued
                self._pool.lend_pipe(pipe, direction.share)
            else:
                self._table.unbind_pipe(direction.row)
                self._pool.release_pipe(pipe)
        if relay.session is not None:
            framed_pump.resume_relay(relay, relay.session)
        self.start_relay(relay)
        if missing:
            get_logger().error(
                "a relay was ended, since some of its bytes are lost", client=relay.record.client_address
            )
            self.abort_relay(relay)

    def close_pipes(self, handed_over: Iterable[Relay]) -> None:
        """Close this process's ends of all pipes, which are a successor's now, as these relays are."""
        for relay in handed_over:
            for direction in (relay.to_broker, relay.to_client):
                if direction.pipe is not None:
                    direction.pipe.close()
        self._pool.close_free_pipes()

    def abandon_relay(self, relay: Relay) -> None:
        """Release the pipes of a relay that has not started."""
        for direction in (relay.to_broker, relay.to_client):
            direction.detach_source()
            self.pump.discard_in_flight(direction)

    def abort_relay(self, relay: Relay) -> None:
        """End a relay at once, and drop what is on its way, unless it is a successor's."""
        if self._by_source.get(relay.to_broker.source) is relay.to_broker:
            relay.broken = True
            self._finish(relay)

    def close_when_quiet(self, relay: Relay) -> None:
        """Close a blind relay when the broker has answered what it was sent.

        Nothing more is read from the client; the broker sees no end of stream. Then both directions end as they are,
        and the relay is over once the peers have read what they were sent.
        """
        relay.to_broker.pump = self._pump_of(relay).drain_only
        self._nursery.start_soon(self._close_when_quiet, relay)

    async def _close_when_quiet(self, relay: Relay) -> None:
        def position() -> object:  # which differs from itself as long as bytes are on their way
            waits = relay.to_broker.held_bytes or relay.to_client.held_bytes or relay.to_client.queued  # for its turn
            return object() if waits else self.bytes_moved(relay)

        await until_quiet(position)
        if relay.is_over or relay.handed_over:
            return
        relay.broken = True
        for direction in (relay.to_client, relay.to_broker):
            if not direction.done:
                self.pump.end_direction(direction)

    def abort_relays(self) -> None:
        """End all relays at once, unless they are a successor's."""
        for relay in self.relays:
            self.abort_relay(relay)

    def freeze(self) -> list[Relay]:
        """Leave all spliced relays as they are for a successor, and return them. The others go on."""
        self.frozen = True
        handed_over = [relay for relay in self.relays if relay.is_spliced]
        for relay in handed_over:
            relay.handed_over = True  # verdicts and credentials that are still on their way change nothing of it
            for direction in (relay.to_broker, relay.to_client):
                direction.detach_source()
                del self._by_source[direction.source]
                # Not by the close: the fd store's copy of the socket would keep it here.
                self._epoll.unregister(direction.source)
                self._to_recheck.discard(direction)
            self._half_closed.pop(relay, None)
        self._waiting_for_pipe.clear()
        self.run_queue.keep(lambda direction: not direction.relay.handed_over)
        return handed_over

    @property
    def relays(self) -> list[Relay]:
        """The live relays."""
        return [direction.relay for direction in self._by_source.values() if direction is direction.relay.to_broker]

    def bytes_moved(self, relay: Relay) -> tuple[int, int]:
        """Return the bytes moved so far, to the broker and to the client."""
        return self._table.bytes_moved(relay.to_broker.row), self._table.bytes_moved(relay.to_client.row)

    def __len__(self) -> int:
        return len(self._by_source) // 2

    # ---- the loop

    async def run(self) -> None:
        """Move bytes until cancelled. Spliced relays are left as they are: a successor goes on with them, however this
        process ends. The others end with it.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._recheck_regularly)
                await self._loop.run()
        finally:
            self._pace_timer.close()
            self.frozen = True
            for relay in self.relays:
                if not relay.is_spliced:
                    self.abort_relay(relay)

    def _process_batch(self, events: Events) -> None:
        """Process ready sockets, then at most a batch of the run queue, then directions that wait for a pipe."""
        self._process_events(events)
        run_queue = self.run_queue
        if run_queue.paused:
            run_queue.resume_due()
        if run_queue.active:
            run_queue.pump_turns(EVENTS_PER_BATCH, self.pump.bytes_moved)
        if self._waiting_for_pipe:
            self._enqueue_those_without_pipe()

    def _process_between(self, events: Events) -> None:
        self._process_events(events)
        self.run_queue.resume_due()  # the timer's event may have been among them
        if self._waiting_for_pipe:
            self._enqueue_those_without_pipe()

    def _process_events(self, events: Events) -> None:
        """Pump the directions of sockets that are ready; those whose owner has others in the queue come in its turn."""
        by_source, enqueue = self._by_source, self.run_queue.enqueue
        for descriptor, mask in events:
            outgoing = by_source.get(descriptor)
            if outgoing is None:  # finished earlier in this batch, or the timer
                continue
            if mask & _ENDED:
                self._on_eof_seen(outgoing, mask)
            if mask & _OUTPUT and (incoming := outgoing.opposite).held_bytes:
                if incoming.turns.directions or incoming.turns.bucket is not None:
                    enqueue(incoming)
                else:
                    incoming.pump(incoming)
            if mask & _INPUT and not outgoing.held_bytes:  # else it waits for room, not for input
                if outgoing.turns.directions or outgoing.turns.bucket is not None:
                    enqueue(outgoing)
                else:
                    outgoing.pump(outgoing)

    def _enqueue_those_without_pipe(self) -> None:
        """Enqueue directions that wait for a pipe, as far as pipes are free again: no edge will come for them."""
        waiting = self._waiting_for_pipe
        while waiting and self._pool.has_free_pipe:
            direction = waiting.popleft()
            direction.queued = False
            self.pump.enqueue(direction)
            if self.run_queue.count(EVENTS_PER_BATCH) >= EVENTS_PER_BATCH:
                return

    def _on_eof_seen(self, outgoing: Direction, mask: int) -> None:
        outgoing.eof_seen = True
        # The end may be queued behind bytes that the sink does not accept: from now on they must move.
        self.pump.start_idle_timeout(outgoing.relay)
        if mask & select.EPOLLHUP and outgoing.done and not outgoing.opposite.done:
            # It had ended its own direction before; now it receives nothing either. Only a reset says that.
            self.pump.on_sink_broken(outgoing.opposite)

    # ---- ends

    def _finish(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            if not direction.done:
                # Before its bytes are forgotten: a successor must not go on behind a hole.
                direction.shut_down_sink()
        self._leave(relay)
        self._on_end(relay)

    def _leave(self, relay: Relay) -> None:
        pump = self._pump_of(relay)
        for direction in (relay.to_broker, relay.to_client):
            direction.done = True
            direction.detach_source()
            pump.discard_in_flight(direction)
            if self._by_source.pop(direction.source, None) is not None:
                with contextlib.suppress(OSError, ValueError):  # ValueError: the loop has ended
                    self._epoll.unregister(direction.source)
        self._half_closed.pop(relay, None)

    async def _recheck_regularly(self) -> None:
        """Look once a second at what no edge announces."""
        while True:
            await trio.sleep(RECHECK_INTERVAL_S)
            self._end_idle_half_closed(trio.current_time())
            if not self.frozen:
                self._pool.rebalance()
            self.run_queue.forget_full()
            self._recheck_directions()

    def _end_idle_half_closed(self, now: float) -> None:
        """End the relays of which one direction is done and the other has moved nothing for too long."""
        for relay, (moved_before, deadline) in list(self._half_closed.items()):
            moved = sum(self.bytes_moved(relay))
            is_paused = relay.to_broker.queued or relay.to_client.queued  # it is not its peers that move nothing
            if moved != moved_before or is_paused:
                self._half_closed[relay] = (moved, now + relay.half_close_timeout_s)
            elif now >= deadline:
                relay.broken = True
                self._finish(relay)

    def _recheck_directions(self) -> None:
        """Enqueue the directions that an edge may have missed.

        Those that wait for a pipe, since descriptors may be free again without a pipe having been released; and those
        of which the source was assumed to be empty.
        """
        to_recheck = [*self._to_recheck]
        self._to_recheck.clear()
        for direction in to_recheck:
            self.run_queue.enqueue(direction)
        for _ in range(len(self._waiting_for_pipe)):
            direction = self._waiting_for_pipe.popleft()
            direction.queued = False
            self.run_queue.enqueue(direction)
        self.run_queue.resume_due()
        if self.run_queue.active:
            self._loop.wake()  # it waits for the epoll alone
