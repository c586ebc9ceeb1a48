"""When the proxy itself closes relays: at their maximum age, and spread over a drain.

A relay closes gently: nothing more passes to the broker (from the next frame boundary on, where frames are followed),
what the broker still sends is delivered, then both sides end in order. A peer that delays this, in the middle of a
frame or by not reading, has CLOSE_S_MAX.

A successor gets only what the store's record holds: when a relay reaches its age. The supervisor announces a drain to a
successor again, with the time that is left of it.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial

import trio

from proto.session_clock import NEVER
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.relay.relay import Relay

CLOSE_S_MAX = 10.0
"""How long a relay may take to close gently."""

SPREAD_SHARE = 0.8
"""The share of a drain's time over which closes begin; the rest is for the last ones to end."""

DUE_MIN = 1_000
"""The heap may always hold this many entries; above, at most half of them are of relays that have ended."""


class CloseSchedule:
    """The schedule of one forwarder. ``now``: seconds of a clock that only goes forward and is a successor's, too."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.fraction: Callable[[], float] = random.random  # no secret
        self._now = now
        self._due: list[tuple[float, int, Relay, CloseReason]] = []
        self._due_max = DUE_MIN
        self._numbers = itertools.count()
        self._drain_until_s = NEVER
        self._earlier = trio.Event()

    def add_relay(self, relay: Relay) -> None:
        """Schedule the close of a relay that has started or was adopted."""
        if relay.close_reason:  # a predecessor began it
            self._push(self._now() + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
            return
        if relay.record.leave_at_ms:
            self._push(relay.record.leave_at_ms / 1000, relay, CloseReason.MAX_AGE)
        if self._drain_until_s < NEVER:  # it was still being opened when the drain began
            left_s = max(0.0, self._drain_until_s - self._now())
            self._push(self._now() + left_s * self.fraction(), relay, CloseReason.SHUT_DOWN)

    def spread_closes(self, relays: Iterable[Relay], timeout_s: float, *, after_s: float = 0.0) -> None:
        """Schedule the closes of these relays in random order, spread evenly over SPREAD_SHARE of ``timeout_s`` without
        its first ``after_s``; the first one is not at once.
        """
        start_s, window_s = self._now() + after_s, (timeout_s - after_s) * SPREAD_SHARE
        self._drain_until_s = start_s + window_s
        shuffled = sorted(relays, key=lambda _relay: self.fraction())
        for number, relay in enumerate(shuffled):
            # In the second half of its own interval: a few relays, which have all of the time, need not hurry.
            at_s = start_s + window_s * (number + 0.5 + self.fraction() / 2) / len(shuffled)
            self._push(at_s, relay, CloseReason.SHUT_DOWN)

    def forget_relays(self, relays: Iterable[Relay]) -> None:
        """Remove these relays from the schedule: they are a successor's."""
        gone = {id(relay) for relay in relays}
        self._due = [entry for entry in self._due if id(entry[2]) not in gone]
        heapq.heapify(self._due)

    def _push(self, at_s: float, relay: Relay, why: CloseReason) -> None:
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
                self._abort(relay)
            else:
                self.close_relay(relay, why)

    def close_relay(self, relay: Relay, why: CloseReason) -> bool:
        """Begin to close a relay now; return False if it has ended, or is being closed already."""
        if relay.is_over or relay.close_reason:
            return False
        relay.close_reason = why
        self._push(self._now() + CLOSE_S_MAX, relay, CloseReason.NOT_CLOSING)
        about = relay.record
        get_logger().debug(
            "a relay is being ended",
            client=about.client_address,
            principal=about.principal,
            reason=why.name.lower(),
        )
        if not self._try(partial(relay.close, why), relay):
            self._abort(relay)
        return True

    def _abort(self, relay: Relay) -> None:
        get_logger().info("a relay that does not end is closed", client=relay.record.client_address)
        self._try(relay.abort, relay)

    @staticmethod
    def _try(close: Callable[[], None], relay: Relay) -> bool:
        """Call what closes a relay; return False if that raised, which must not keep other relays from being closed."""
        try:
            close()
        except Exception as error:  # noqa: BLE001 -- one relay's, as in proxy.runtime.loop.deadlines
            client = relay.record.client_address
            get_logger().error("closing a relay raised an unexpected error", client=client, exc_info=error)
            return False
        return True
