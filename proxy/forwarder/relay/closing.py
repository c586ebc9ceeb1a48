"""How the proxy itself closes relays: at their maximum age, spread over a drain, and for other owners' connections.

A relay closes gently: nothing more passes to the broker (from the next frame boundary on, where frames are followed),
what the broker still sends is delivered, then both sides end in order. A peer that delays this, in the middle of a
frame or by not reading, has CLOSE_S_MAX.

A successor gets only what the store's record holds: when a relay reaches its age. The supervisor announces a drain to a
successor again, with the time that is left of it.
"""

import heapq
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

import trio

from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.closing import CloseReason, until_quiet
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.framed_relay import FramedRelay
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.relay import Relay, shut_down
from proxy.forwarder.relay.sockets import read_to_the_end
from proxy.forwarder.relay.user_space import UserSpaceRelay, UserSpaceRelays
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.process.descriptors import adopt_socket

CLOSE_S_MAX = 10.0
"""How long a relay may take to close gently."""

SPREAD_SHARE = 0.8
"""The share of a drain's time over which closes begin; the rest is for the last ones to end."""

DUE_MIN = 1_000
"""The heap may always hold this many entries; above, at most half of them are of relays that have ended."""


class Closable(Protocol):
    """A relay as this schedule needs it. ``close_reason``: why the proxy is closing it; NOT_CLOSING: it is not."""

    record: StoredRelay
    close_reason: CloseReason

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


RelayT = TypeVar("RelayT", bound=Closable)


class CloseSchedule(Generic[RelayT]):
    """The schedule of one forwarder.

    ``close`` begins to close a relay gently; ``abort`` ends it at once. ``now``: seconds of a clock that only goes
    forward and is the same in a successor.
    """

    def __init__(
        self, close: Callable[[RelayT, CloseReason], None], abort: Callable[[RelayT], None], now: Callable[[], float]
    ) -> None:
        self.fraction: Callable[[], float] = random.random  # no secret
        self._close = close
        self._abort = abort
        self._now = now
        self._due: list[tuple[float, int, RelayT, CloseReason]] = []
        self._due_max = DUE_MIN
        self._numbers = itertools.count()
        self._drain_until_s = NEVER
        self._earlier = trio.Event()

    def add_relay(self, relay: RelayT) -> None:
        """Schedule the close of a relay that has started or was adopted."""
        if relay.close_reason:  # a predecessor began it
            self._push(self._now() + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
            return
        if relay.record.leave_at_ms:
            self._push(relay.record.leave_at_ms / 1000, relay, CloseReason.MAX_AGE)
        if self._drain_until_s < NEVER:  # it was still being opened when the drain began
            left_s = max(0.0, self._drain_until_s - self._now())
            self._push(self._now() + left_s * self.fraction(), relay, CloseReason.SHUT_DOWN)

    def spread_closes(self, relays: Iterable[RelayT], timeout_s: float) -> None:
        """Schedule the closes of these relays in random order, spread evenly over SPREAD_SHARE of ``timeout_s``; the
        first one is not at once.
        """
        now, window_s = self._now(), timeout_s * SPREAD_SHARE
        self._drain_until_s = now + window_s
        shuffled = sorted(relays, key=lambda _relay: self.fraction())
        for number, relay in enumerate(shuffled):
            # In the second half of its own interval: a few relays, which have all of the time, need not hurry.
            at_s = now + window_s * (number + 0.5 + self.fraction() / 2) / len(shuffled)
            self._push(at_s, relay, CloseReason.SHUT_DOWN)

    def forget_relays(self, relays: Iterable[RelayT]) -> None:
        """Remove these relays from the schedule: they are a successor's."""
        gone = {id(relay) for relay in relays}
        self._due = [entry for entry in self._due if id(entry[2]) not in gone]
        heapq.heapify(self._due)

    def _push(self, at_s: float, relay: RelayT, why: CloseReason) -> None:
        """Add an entry. ``why``: NOT_CLOSING if the relay is to be aborted then, since it takes too long to close."""
        if not self._due or at_s < self._due[0][0]:
            self._earlier.set()
        heapq.heappush(self._due, (at_s, next(self._numbers), relay, why))
        if len(self._due) > self._due_max:
            self._due = [entry for entry in self._due if not entry[2].is_over]
            heapq.heapify(self._due)
            self._due_max = max(DUE_MIN, 2 * len(self._due))

    async def run(self) -> None:
        """Close each relay when it is due, until cancelled."""
        while True:
            self._earlier = trio.Event()
            wait_s = self._due[0][0] - self._now() if self._due else NEVER
            with trio.move_on_after(max(0.0, wait_s)):
                await self._earlier.wait()
            self.close_due_relays()

    def close_due_relays(self) -> None:
        """Close all relays that are due."""
        now = self._now()
        while self._due and self._due[0][0] <= now:
            _, _, relay, why = heapq.heappop(self._due)
            if relay.is_over:
                continue
            if why is CloseReason.NOT_CLOSING:
                self._try(partial(self._abort, relay), relay)
            elif not relay.close_reason:
                relay.close_reason = why
                self._push(now + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
                if not self._try(partial(self._close, relay, why), relay):
                    self._try(partial(self._abort, relay), relay)

    @staticmethod
    def _try(close: Callable[[], None], relay: RelayT) -> bool:
        """Call what closes a relay; return False if that raised, which must not keep other relays from being closed."""
        try:
            close()
        except Exception as error:  # noqa: BLE001 -- one relay's, as in proxy.runtime.loop.deadlines
            client = relay.record.client_address
            get_logger().error("closing a relay raised an unexpected error", client=client, exc_info=error)
            return False
        return True


class RelayCloser:
    """Closes the relays of one forwarder."""

    def __init__(
        self, nursery: trio.Nursery, engine: RelayEngine, user_space: UserSpaceRelays, ledger: RelayLedger
    ) -> None:
        self._nursery = nursery
        self._engine = engine
        self._user_space = user_space
        self._ledger = ledger

    # ---- closing

    def close_relay(self, relay: Relay | UserSpaceRelay, why: CloseReason) -> None:
        """Begin to close a relay gently."""
        record = relay.record
        get_logger().debug(
            "a relay is being ended",
            client=record.client_address,
            principal=record.principal,
            reason=why.name.lower(),
        )
        self._ledger.close_reasons[record.id] = why
        if isinstance(relay, UserSpaceRelay):
            self._user_space.close_relay(relay, why)
        elif self._engine.frozen:
            return  # it is a successor's
        elif isinstance(relay, FramedRelay):
            relay.session.control.start_closing(why)
        else:
            self._engine.stop_client_input(relay)
            self._nursery.start_soon(self._close_when_quiet, relay)

    async def _close_when_quiet(self, relay: Relay) -> None:
        """Close a blind relay when the broker has answered what it was sent."""

        def position() -> object:  # which differs from itself as long as bytes are on their way
            in_pipes = relay.to_broker.in_pipe or relay.to_client.in_pipe
            return object() if in_pipes else self._engine.bytes_moved(relay)

        await until_quiet(position)
        if not (relay.is_over or self._engine.frozen):
            self._engine.close_relay(relay)

    def abort_relay(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay at once that takes too long to close."""
        get_logger().info("a relay that does not end is closed", client=relay.record.client_address)
        self._abort(relay)

    def evict_relay(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay at once, for another owner's connection."""
        self._ledger.close_reasons[relay.record.id] = CloseReason.OVER_SHARE
        self._abort(relay)

    def _abort(self, relay: Relay | UserSpaceRelay) -> None:
        if isinstance(relay, UserSpaceRelay):
            self._user_space.abort_relay(relay)
        elif not self._engine.frozen:
            self._engine.abort_relay(relay)

    # ---- after the end

    def on_relay_end(self, relay: Relay) -> None:
        """Report a spliced relay that has ended, and close its sockets; where one side broke, only once the other has
        read what it was sent.
        """
        self._ledger.on_relay_end(relay.record, *self._engine.bytes_moved(relay))
        if relay.broken:
            self._nursery.start_soon(self._linger, relay)
            return
        for descriptor in relay.sockets:  # of which both directions have ended, for the store's copy, too
            os.close(descriptor)
        self._ledger.release_relay(relay.record.id)

    async def _linger(self, relay: Relay) -> None:
        streams = [TcpStream(adopt_socket(descriptor)) for descriptor in relay.sockets]
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
                self._ledger.release_relay(relay.record.id)
