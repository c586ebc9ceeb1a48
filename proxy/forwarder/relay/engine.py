"""The relay engine: every relay of a forwarder in one edge-triggered epoll, drained by one Trio task.

Trio waits on the epoll's own descriptor (epolls nest), so one wake-up of Trio serves a whole batch of sockets, and no
epoll_ctl is made per event. Bytes move by splice, socket → pipe → socket: none of them is ever in this process's
memory, and what is on its way is where the kernel keeps it. Which pipe holds whose bytes stands in the relay table, so
a successor can go on from any instant (proxy.runtime.shared.relay_table).

Edges: a direction is pumped until its source says EAGAIN (more input raises a new edge) or its sink does (room raises
one). Each turn is one portion; after it the direction stands in line for the next round, so that a busy relay starves
nobody.

Ends: a direction ends when its source has ended or broken and everything before that was delivered; the sink's writing
side is then shut down, and the other direction goes on (half-close) as long as its bytes move. Where the sink breaks,
what is on its way to it is dropped; what it had sent is still delivered.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger
from proxy.forwarder.relay.expiring.splice_pump import FramedSplicePump
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import Direction, Relay, shut_down
from proxy.forwarder.relay.splice_pump import SplicePump
from proxy.runtime.loop.timer_fd import TimerFd
from proxy.runtime.shared.relay_table import PIPE, RelayTable

EVENTS_PER_POLL = 64
LINGER_S = 0.001
BUSY_GAP_S = 0.0003
"""How long events are waited for without Trio, and how closely they must follow each other for that to be worth it."""
LOOK_S = 1.0

_OUTPUT = select.EPOLLOUT
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_INPUT = select.EPOLLIN | _ENDED
_EVENTS = _INPUT | _OUTPUT | select.EPOLLET


class RelayEngine:
    """See the module. ``run`` is the one task that moves bytes; all else may be called from any task.

    ``on_end`` is called with each relay that has ended; its sockets are the owner's to close then. ``may_linger`` says
    whether nobody else in this process is in a hurry.
    """

    def __init__(
        self,
        table: RelayTable,
        pool: PipePool,
        on_end: Callable[[Relay], None],
        may_linger: Callable[[], bool],
    ) -> None:
        self._epoll = select.epoll()
        self._alarm = TimerFd()
        self._epoll.register(self._alarm, select.EPOLLIN | select.EPOLLET)
        self._cells = table.cells
        self._pool = pool
        self._on_end = on_end
        self._may_linger = may_linger
        self.pump = SplicePump(table.cells, pool, self._finish, self._alarm.fire_now)
        self._line = self.pump.run_queue
        self._without_pipe = self.pump.waiting_for_pipe
        self._by_source: dict[int, Direction] = {}
        self._running = trio.CancelScope()
        self._served_at = 0.0
        self.pump.is_serving = False
        self.frozen = False

    # ---- relays in and out

    def reserve_pipe(self, direction: Direction) -> int:
        """Lend a pipe to a direction that has not begun; how many bytes fit. Raises OSError."""
        if direction.pipe is None:
            direction.pipe = self._pool.acquire_pipe()
            self._cells[direction.row + PIPE] = direction.pipe.id
        return direction.pipe.size_bytes

    def preload_pipe(self, direction: Direction, first: bytes) -> None:
        """Put what was read ahead of a relay, not more than ``room_ahead``, where it will be relayed from first."""
        assert direction.pipe is not None  # room was asked for
        direction.in_pipe = os.write(direction.pipe.write_end, first)

    def start_relay(self, relay: Relay) -> None:
        """Begin to relay between two connected, non-blocking sockets. Raises OSError, and then has not begun."""
        try:
            for direction in (relay.to_broker, relay.to_client):
                if direction.cursor is None:
                    direction.pump = self.pump.pump
                self._by_source[direction.source] = direction
                # Registering raises the first edges by itself: for input that waits, and for room for first bytes.
                self._epoll.register(direction.source, _EVENTS)
        except OSError:
            self._leave(relay)
            raise

    def adopt_relay(self, relay: Relay, pipes: dict[int, Pipe], framer: FramedSplicePump) -> None:
        """Go on with a relay of a predecessor's; or end it, where a pipe did not come. Those of ``pipes`` bound
        to it are taken out. ``framer`` knows what to make of relays whose frames are followed. Raises OSError, and then
        has not begun.
        """
        missing = False
        for direction in (relay.to_broker, relay.to_client):
            pipe_id = self._cells[direction.row + PIPE]
            pipe = pipes.pop(pipe_id, None)
            if pipe is None:
                missing |= pipe_id != 0  # the table goes on saying so until the sockets are shut down
            elif (waiting := pipe.queued_bytes()) and not framer.journal.undo_injection(direction, pipe, waiting):
                direction.pipe, direction.in_pipe = pipe, waiting
            else:
                self._cells[direction.row + PIPE] = 0
                self._pool.release_pipe(pipe)
        if relay.session is not None:
            framer.resume_relay(relay)
        self.start_relay(relay)
        if missing:
            get_logger().error(
                "a relay was ended, since some of its bytes are lost", client=relay.record.client_address
            )
            self.abort_relay(relay)

    def close_pipes(self) -> None:
        """Close this process's ends of all pipes, which are a successor's now."""
        for direction in self._by_source.values():
            if direction.pipe is not None:
                direction.pipe.close()
        self.pump.close_free_pipes()

    def abandon_relay(self, relay: Relay) -> None:
        """Give back what a relay that has not begun was lent."""
        for direction in (relay.to_broker, relay.to_client):
            direction.detach_source()
            self.pump.discard_in_flight(direction)

    def abort_relay(self, relay: Relay) -> None:
        """End a relay at once, with whatever is on its way."""
        if self._by_source.get(relay.to_broker.source) is relay.to_broker:
            relay.broken = True
            self._finish(relay)

    def stop_client_input(self, relay: Relay) -> None:
        """Let nothing more of a blind relay's client pass; the broker is not told that."""
        relay.to_broker.pump = self.pump.drain_only

    def close_relay(self, relay: Relay) -> None:
        """End both directions of a blind relay as they are, and close once the peers have read what they were sent."""
        relay.broken = True
        for direction in (relay.to_client, relay.to_broker):
            if not direction.done:
                self.pump.end_direction(direction)

    def abort_relays(self) -> None:
        """End all relays at once; not those that are a successor's."""
        if self.frozen:
            return
        for relay in self.relays:
            self.abort_relay(relay)

    def freeze(self) -> list[Relay]:
        """Move nothing from now on, and leave everything as it is, for a successor; the relays that live."""
        self.frozen = True
        self._running.cancel()
        self.detach_sockets()
        return self.relays

    @property
    def relays(self) -> list[Relay]:
        """Those that live."""
        return [direction.relay for direction in self._by_source.values() if direction is direction.relay.to_broker]

    def detach_sockets(self) -> None:
        """Forget the sockets, which are about to be another process's."""
        for direction in self._by_source.values():
            direction.detach_source()

    def bytes_moved(self, relay: Relay) -> tuple[int, int]:
        """To the broker and to the client, so far."""
        return self.pump.bytes_moved(relay.to_broker), self.pump.bytes_moved(relay.to_client)

    def __len__(self) -> int:
        return len(self._by_source) // 2

    # ---- the loop

    async def run(self) -> None:
        """Move bytes until cancelled or frozen. Relays are left as they are: whatever ends this process unasked, a
        successor goes on with them.
        """
        try:
            with self._running:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    await self._move_bytes()
        finally:
            self.frozen = True
            self._epoll.close()
            self._alarm.close()

    async def _move_bytes(self) -> None:
        while not self.frozen:
            self.pump.is_serving = True
            self._serve()
            self.pump.is_serving = False
            if self._line:
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(self._epoll.fileno())

    def _serve(self) -> None:
        """Serve what the epoll has and who stands in line; where much goes on, also what comes in the next moment.

        A wake-up by way of Trio costs more than a portion's way through a pipe. Where one follows the other closely,
        and nobody shakes hands, the next is therefore waited for here, which delays all else in this process by little
        more than LINGER_S.
        """
        now = time.monotonic()
        until = now + LINGER_S
        lingers = now - self._served_at < BUSY_GAP_S and self._may_linger()
        if lingers:
            self._alarm.arm(LINGER_S)
        events = self._epoll.poll(0, EVENTS_PER_POLL)
        while events or self._line:
            self._serve_events(events)
            if self._line:
                self._serve_line()
            if self._without_pipe:
                self._serve_those_without_pipe()
            now = time.monotonic()
            if now >= until:
                break
            # Without a timeout: the alarm ends it.
            events = self._epoll.poll(-1 if lingers and not self._line else 0, EVENTS_PER_POLL)
        self._served_at = now

    def _serve_events(self, events: list[tuple[int, int]]) -> None:
        by_source = self._by_source
        for descriptor, mask in events:
            outgoing = by_source.get(descriptor)
            if outgoing is None:  # finished earlier in this batch
                continue
            if mask & _ENDED:
                self._note_end(outgoing, mask)
            if mask & _OUTPUT and outgoing.opposite.in_pipe:
                outgoing.opposite.pump(outgoing.opposite)
            if mask & _INPUT and not outgoing.in_pipe:  # else it waits for room, not for input
                outgoing.pump(outgoing)

    def _serve_line(self) -> None:
        for _ in range(min(len(self._line), EVENTS_PER_POLL)):
            direction = self._line.popleft()
            direction.queued = False
            direction.pump(direction)

    def _serve_those_without_pipe(self) -> None:
        """Their edge has passed, so they must be called: as soon as a pipe is free again."""
        while self._without_pipe and self.pump.has_free_pipe:
            direction = self._without_pipe.popleft()
            direction.queued = False
            self.pump.enqueue(direction)
            if len(self._line) >= EVENTS_PER_POLL:
                return

    def _note_end(self, outgoing: Direction, mask: int) -> None:
        outgoing.eof_seen = True
        # The end may stand behind bytes that the sink does not take: from now on they must move.
        self.pump.start_idle_timeout(outgoing.relay)
        if mask & select.EPOLLHUP and outgoing.done and not outgoing.opposite.done:
            # It had ended its own direction before; now it takes nothing either. Only a reset says that.
            self.pump.on_sink_broken(outgoing.opposite)

    # ---- ends

    def _finish(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            if not direction.done:
                # Before its bytes are forgotten: a successor must not go on behind a hole.
                shut_down(direction.sink, socket.SHUT_WR)
        self._leave(relay)
        self._on_end(relay)

    def _leave(self, relay: Relay) -> None:
        for direction in (relay.to_broker, relay.to_client):
            direction.done = True
            direction.detach_source()
            self.pump.discard_in_flight(direction)
            if self._by_source.pop(direction.source, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(direction.source)
        self.pump.half_closed.pop(relay, None)

    async def _watch(self) -> None:
        """What no edge tells."""
        while True:
            await trio.sleep(LOOK_S)
            if self.frozen:
                return
            self._end_the_stuck(trio.current_time())
            self._look_again()

    def _end_the_stuck(self, now: float) -> None:
        """End the relays of which one direction is done and the other has moved nothing for too long."""
        for relay, (moved_before, deadline) in list(self.pump.half_closed.items()):
            moved = sum(self.bytes_moved(relay))
            if moved != moved_before:
                self.pump.half_closed[relay] = (moved, now + relay.half_close_timeout_s)
            elif now >= deadline:
                relay.broken = True
                self._finish(relay)

    def _look_again(self) -> None:
        """Directions that wait for a pipe, since descriptors may be free again without one having come back; and those
        whose source was taken for dry.
        """
        unsure, self.pump.to_recheck = self.pump.to_recheck, set()
        for direction in unsure:
            direction.pump(direction)
        for _ in range(len(self._without_pipe)):
            direction = self._without_pipe.popleft()
            direction.queued = False
            direction.pump(direction)
        if self._line:
            self._alarm.fire_now()  # the loop waits for the epoll alone
