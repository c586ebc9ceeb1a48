"""When the proxy itself ends relays: at their maximum age, and spread over a drain.

A relay that leaves ends gently: nothing more passes to the broker (from the next frame's boundary on, where frames are
followed), what the broker still says is delivered, then both sides end in order. A peer that holds this up, in the
middle of a frame or by not reading, is given LEAVE_S_MAX.

Nothing is kept for a successor but what the store's record holds: when a relay reaches its age. A drain is told anew to
a successor, with the time that is left of it.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

import trio

from proto.rpc_pb2 import StoredRelay
from proto.session_clock import NEVER
from proxy.common.logs import get_logger
from proxy.forwarder.relay.expiring.session import CloseReason

CLOSE_S_MAX = 10.0
"""How long a relay may take to end gently."""

SPREAD_SHARE = 0.8
"""Over so much of a drain's time the ends of relays begin; the rest is for the last ones to end."""

QUIET_S = 0.1
QUIET_S_MAX = 1.0
"""A broker that is silent for so long has answered what it was sent; none is waited for longer than the second."""

DUE_MIN = 1_000
"""Entries that may always wait; above, at most as many are of relays that have ended as are not."""


async def until_quiet(position: Callable[[], object], *, quiet_s: float = QUIET_S, most_s: float = QUIET_S_MAX) -> None:
    """Wait until what is moved stands still for ``quiet_s``, at most ``most_s``."""
    deadline = trio.current_time() + most_s
    before: object = None
    while (now := position()) != before and trio.current_time() < deadline:
        before = now
        await trio.sleep(quiet_s)


class Closable(Protocol):
    """A relay, as it is scheduled here. ``leaving``: why it is being ended; ``is_over``: whether it has ended."""

    record: StoredRelay
    close_reason: CloseReason

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


RelayT = TypeVar("RelayT", bound=Closable)


class CloseSchedule(Generic[RelayT]):
    """The schedule of one forwarder. ``leave`` begins to end a relay; ``drop`` ends it at once. ``now``: see Relays."""

    def __init__(
        self, leave: Callable[[RelayT, CloseReason], None], drop: Callable[[RelayT], None], now: Callable[[], float]
    ) -> None:
        self.fraction: Callable[[], float] = random.random  # no secret
        self._leave = leave
        self._drop = drop
        self._now = now
        self._due: list[tuple[float, int, RelayT, CloseReason]] = []
        self._due_max = DUE_MIN
        self._numbers = itertools.count()
        self._drain_until_s = NEVER
        self._earlier = trio.Event()

    def add_relay(self, relay: RelayT) -> None:
        """Schedule the end of a relay that has begun, or was taken over."""
        if relay.close_reason:  # a predecessor began it
            self._push(self._now() + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
            return
        if relay.record.leave_at_ms:
            self._push(relay.record.leave_at_ms / 1000, relay, CloseReason.MAX_AGE)
        if self._drain_until_s < NEVER:  # it was still being opened when the drain began
            left_s = max(0.0, self._drain_until_s - self._now())
            self._push(self._now() + left_s * self.fraction(), relay, CloseReason.SHUT_DOWN)

    def spread_closes(self, relays: Iterable[RelayT], timeout_s: float) -> None:
        """End all relays, evenly spread over SPREAD_SHARE of this time, in random order, the first one not at once."""
        now, window_s = self._now(), timeout_s * SPREAD_SHARE
        self._drain_until_s = now + window_s
        shuffled = sorted(relays, key=lambda _relay: self.fraction())
        for number, relay in enumerate(shuffled):
            # In the second half of its own part: a few relays, with all of the time for them, need not hurry.
            at_s = now + window_s * (number + 0.5 + self.fraction() / 2) / len(shuffled)
            self._push(at_s, relay, CloseReason.SHUT_DOWN)

    def forget_relays(self, relays: Iterable[RelayT]) -> None:
        """Schedule nothing more for these relays, which are a successor's."""
        gone = {id(relay) for relay in relays}
        self._due = [entry for entry in self._due if id(entry[2]) not in gone]
        heapq.heapify(self._due)

    def _push(self, at_s: float, relay: RelayT, why: CloseReason) -> None:
        """``why``: NO stands for the end of patience."""
        if not self._due or at_s < self._due[0][0]:
            self._earlier.set()
        heapq.heappush(self._due, (at_s, next(self._numbers), relay, why))
        if len(self._due) > self._due_max:
            self._due = [entry for entry in self._due if not entry[2].is_over]
            heapq.heapify(self._due)
            self._due_max = max(DUE_MIN, 2 * len(self._due))

    async def run(self) -> None:
        """End each relay when it is time, until cancelled."""
        while True:
            self._earlier = trio.Event()
            wait_s = self._due[0][0] - self._now() if self._due else NEVER
            with trio.move_on_after(max(0.0, wait_s)):
                await self._earlier.wait()
            self.close_due_relays()

    def close_due_relays(self) -> None:
        """End all whose time has come."""
        now = self._now()
        while self._due and self._due[0][0] <= now:
            _, _, relay, why = heapq.heappop(self._due)
            if relay.is_over:
                continue
            if why is CloseReason.NOT_CLOSING:
                self._end(partial(self._drop, relay), relay)
            elif not relay.close_reason:
                relay.close_reason = why
                self._push(now + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
                if not self._end(partial(self._leave, relay, why), relay):
                    self._end(partial(self._drop, relay), relay)

    @staticmethod
    def _end(end: Callable[[], None], relay: RelayT) -> bool:
        """Do what ends a relay; whether that met no defect, which must not keep the others from their ends."""
        try:
            end()
        except Exception as error:  # noqa: BLE001 -- one relay's, as in proxy.runtime.loop.deadlines
            get_logger().error("a relay's end met a defect", client=relay.record.client_address, exc_info=error)
            return False
        return True
