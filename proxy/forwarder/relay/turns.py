"""Turns of relays: which direction is pumped next, fairly by owner, and at most so many bytes a second of each.

An owner (proxy.runtime.fairness.owners) has turns of its own for each way, to brokers and to clients. Owners take
turns, each with one portion of one of its directions, and an owner's directions take turns among themselves: one with
two hundred busy relays has as many portions as another with a single one.

Where a limit is set, an owner's turns have a bucket of tokens, one for each byte, which holds a second's worth. A
portion is charged once it has moved, so the bucket may get below zero. Then the owner's directions stay queued, and
nobody reads their sources, until the tokens are there. Nothing runs meanwhile: one timer wakes the engine for the owner
that comes first.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proxy.common.logs import get_logger
from proxy.forwarder.relay.relay import Direction, Turns
from proxy.runtime.fairness.token_buckets import TokenBucket
from proxy.runtime.loop.tasks import ignore

BURST_S = 1.0
"""What a bucket holds, in seconds of its rate."""

PAUSE_S_MIN = 0.01
"""Shorter pauses would only make portions small and wake-ups many."""

PORTION_BYTES_MAX = 1 << 20
PORTION_BYTES_MIN = 1 << 14
"""Where a limit is set, a portion has no more than the bytes of PAUSE_S_MIN, or this: each of an owner's relays waits
for a portion of each other one, and its client's keep-alive waits with it."""

_SLACK_S = 0.001
"""The timer is set in whole nanoseconds: it may fire a moment before the time that it was set for."""

_WAYS = ("to_broker", "to_client")


class RunQueue(Collector):
    """The directions that are to be pumped again although no edge announces it, fairly by owner and way.

    ``clock``: monotonic seconds. ``set_timer`` is called with the seconds after which ``resume_due`` is to be called.
    ``portion_bytes_max``: what a pump moves of a direction in one turn. ``active``: turns with a direction that may be
    pumped now, in their order. ``paused``: the others that have a time at which they may go on, the earliest first.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, set_timer: Callable[[float], None] = ignore
    ) -> None:
        self._clock = clock
        self._set_timer = set_timer
        self._rate = 0.0
        self._is_dry_run = False
        self.portion_bytes_max = PORTION_BYTES_MAX
        self._turns: WeakValueDictionary[tuple[str, int], Turns] = WeakValueDictionary()
        self._not_full: set[Turns] = set()
        """Keeps those without a direction, too: who comes back at once must not find a full bucket."""
        self._sequence = itertools.count()
        self._pauses = [0, 0]
        self._paused_s = [0.0, 0.0]
        self.active: deque[Turns] = deque()
        self.paused: list[tuple[float, int, Turns]] = []

    def turns_of(self, owner: str, way: int) -> Turns:
        """Return an owner's turns for one way, which are forgotten with its last direction once the bucket is full."""
        turns = self._turns.get((owner, way))
        if turns is None:
            turns = self._turns[owner, way] = Turns(owner, way)
            turns.bucket = self._new_bucket()
        return turns

    def limit_bytes(self, bytes_per_s: float, *, dry_run: bool) -> None:
        """Limit the bytes a second of each owner and way from now on; 0: no limit. ``dry_run``: only count pauses."""
        if (bytes_per_s, dry_run) == (self._rate, self._is_dry_run):
            return
        self._rate, self._is_dry_run = bytes_per_s, dry_run
        is_off = dry_run or not bytes_per_s
        of_pause = PORTION_BYTES_MAX if is_off else int(bytes_per_s * PAUSE_S_MIN)
        self.portion_bytes_max = min(max(of_pause, PORTION_BYTES_MIN), PORTION_BYTES_MAX)
        self._not_full.clear()
        for turns in list(self._turns.values()):
            turns.bucket = self._new_bucket()
            turns.dry_pause_until = 0.0
        paused, self.paused = self.paused, []
        for _at, _number, turns in paused:
            self._resume(turns)
        if paused:
            self._set_timer(0.0)

    def _new_bucket(self) -> TokenBucket | None:
        return TokenBucket(self._rate, self._rate * BURST_S, self._clock()) if self._rate else None

    # ---- the queue

    def enqueue(self, direction: Direction) -> None:
        """Have a direction pumped in its owner's turn, if it is not queued."""
        if not direction.queued:
            direction.queued = True
            turns = direction.turns
            if not turns.directions and not turns.is_paused:
                self.active.append(turns)
            turns.directions.append(direction)

    def count(self, count_max: int) -> int:
        """Return how many directions may be pumped now, or ``count_max`` if they are more."""
        found = 0
        for turns in self.active:
            found += len(turns.directions)
            if found >= count_max:
                return count_max
        return found

    def pump_turns(self, turns_max: int, moved: Callable[[Direction], int]) -> int:
        """Pump the directions whose turn it is, at most so many; return how many there were.

        What is enqueued meanwhile is left to the next call. ``moved`` returns how many bytes have ever gone to a
        direction's sink.
        """
        active = self.active
        for done in range(turns_left := self.count(turns_max)):
            if not active:  # the others are paused
                return done
            turns = active.popleft()
            direction = turns.directions.popleft()
            direction.queued = False
            if turns.bucket is None:
                if turns.directions:
                    active.append(turns)
                direction.pump(direction)
            else:
                self._pump_limited(turns, turns.bucket, direction, moved)
        return turns_left

    def _pump_limited(
        self, turns: Turns, bucket: TokenBucket, direction: Direction, moved: Callable[[Direction], int]
    ) -> None:
        turns.is_paused = True  # until it is known whether it goes on
        before = moved(direction)
        direction.pump(direction)
        size = max(0, moved(direction) - before)  # less than before, once its rows are another relay's
        if not size or not self._pause_after(turns, bucket, size):
            self._resume(turns)

    def keep(self, stays: Callable[[Direction], bool]) -> None:
        """Forget all queued directions but those that stay."""
        for turns in list(self._turns.values()):
            turns.directions = deque(filter(stays, turns.directions))
        active = [turns for turns in self.active if turns.directions]
        self.active.clear()
        self.active.extend(active)

    # ---- bytes a second

    def _pause_after(self, turns: Turns, bucket: TokenBucket, size: int) -> bool:
        """Charge a portion; return True if the owner's directions are paused now."""
        now = self._clock()
        if now < turns.dry_pause_until:
            return False
        self._not_full.add(turns)
        wait_s = bucket.charge(size, now)
        if not wait_s:
            return False
        wait_s = max(wait_s, PAUSE_S_MIN)
        self._pauses[turns.way] += 1
        self._paused_s[turns.way] += wait_s
        if not turns.was_paused:
            turns.was_paused = True
            get_logger().info(
                "an owner's relays have moved their bytes a second",
                owner=turns.owner,
                direction=_WAYS[turns.way],
                limit="limits.max_bytes_per_second_per_principal",
                dry_run=self._is_dry_run,
            )
        if self._is_dry_run:
            turns.dry_pause_until = now + wait_s
            return False
        heapq.heappush(self.paused, (now + wait_s, next(self._sequence), turns))
        if self.paused[0][2] is turns:
            self._set_timer(wait_s)
        return True

    def charge(self, turns: Turns, size: int) -> None:
        """Charge bytes that have moved without a turn: the owner's next portion pays for them."""
        if turns.bucket is not None:
            self._not_full.add(turns)
            turns.bucket.charge(size, self._clock())

    def _resume(self, turns: Turns) -> None:
        turns.is_paused = False
        if turns.directions:
            self.active.append(turns)

    def resume_due(self) -> None:
        """Let those owners go on whose tokens are there again."""
        paused, now = self.paused, self._clock()
        if not paused or paused[0][0] > now + _SLACK_S:
            return
        while paused and paused[0][0] <= now + _SLACK_S:
            self._resume(heapq.heappop(paused)[2])
        if paused:
            self._set_timer(paused[0][0] - now)

    def forget_full(self) -> None:
        """Forget the owners without a direction whose buckets are full again."""
        now = self._clock()
        self._not_full = {
            turns for turns in self._not_full if turns.bucket is not None and not turns.bucket.is_full(now)
        }

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return Prometheus counters of the pauses."""
        pauses = CounterMetricFamily(
            "pulsar_proxy_paced_pauses",
            "Pauses of a principal's relays, which had moved limits.max_bytes_per_second_per_principal, by direction; "
            "with limits.principal_limits_dry_run those that there would have been.",
            labels=["direction"],
        )
        paused_s = CounterMetricFamily(
            "pulsar_proxy_paced_pause_seconds", "Time of such pauses, of all principals.", labels=["direction"]
        )
        for way, direction in enumerate(_WAYS):
            pauses.add_metric([direction], self._pauses[way])
            paused_s.add_metric([direction], self._paused_s[way])
        yield pauses
        yield paused_s
