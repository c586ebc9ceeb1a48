"""proxy.forwarder.relay.turns against a model: thousands of random steps, after each of which all rules hold."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from proxy.forwarder.relay.relay import Direction
from proxy.forwarder.relay.turns import BURST_S, PAUSE_S_MIN, RunQueue

PORTION_MAX = 1 << 20
STEPS = 3_000


class Model:
    """A run queue whose time goes on only here, and whose timer fires only when it is due."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.timer_at: float | None = None
        self.queue = RunQueue(lambda: self.now, self._set_timer)
        self.rate = 0.0
        self.is_dry_run = False
        self.limited_since = self.now
        self.waiting: dict[Direction, int] = {}  # bytes of which the source has announced that they are there
        self.moved: dict[Direction, int] = {}
        self.portions: dict[tuple[str, int], list[tuple[float, int]]] = {}

    def _set_timer(self, seconds: float) -> None:
        self.timer_at = self.now + seconds

    # ---- what may happen

    def step(self) -> None:
        usual = (self.add, self.send, self.send, self.send, self.pump, self.pump, self.pass_time, self.end)
        rare = (self.limit, self.leave, self.queue.forget_full)
        self.random.choice(rare if self.random.random() < 0.02 else usual)()

    def add(self) -> None:
        if len(self.waiting) < 60:
            direction = Direction(0, 0, 0)
            way = self.random.randrange(2)
            direction.turns = self.queue.turns_of(self.random.choice("abcdef"), way)
            direction.pump = self._pump_direction
            self.waiting[direction] = self.moved[direction] = 0

    def send(self) -> None:
        """Let bytes arrive, which an edge announces."""
        if self.waiting:
            direction = self.random.choice([*self.waiting])
            self.waiting[direction] += self.random.choice((1, 100, 30_000, 5_000_000))
            self.queue.enqueue(direction)

    def end(self) -> None:
        """End a direction, queued or not, as a relay's abort does: it stays in the queue."""
        if self.waiting and self.random.random() < 0.3:
            direction = self.random.choice([*self.waiting])
            direction.done = True
            del self.waiting[direction], self.moved[direction]

    def leave(self) -> None:
        """Hand directions over to a successor."""
        gone = {direction for direction in self.waiting if self.random.random() < 0.2}
        self.queue.keep(lambda direction: direction not in gone)
        for direction in gone:  # with the last one its owner's turns are forgotten, unless they owe something
            del self.waiting[direction], self.moved[direction]

    def limit(self) -> None:
        before = self.rate, self.is_dry_run
        self.rate = self.random.choice((0.0, 50_000.0, 2_000_000.0))
        self.is_dry_run = self.random.random() < 0.3
        self.queue.limit_bytes(self.rate, dry_run=self.is_dry_run)
        if (self.rate, self.is_dry_run) != before:
            self.limited_since = self.now
            self.portions.clear()

    def pass_time(self) -> None:
        self.now += self.random.choice((0.0001, 0.005, 0.3, 20))
        if self.timer_at is not None and self.timer_at <= self.now:
            self.timer_at = None
            self.queue.resume_due()

    def pump(self) -> None:
        self.queue.pump_turns(self.random.randrange(1, 65), self.bytes_moved)

    def bytes_moved(self, direction: Direction) -> int:
        return self.moved.get(direction, 0)

    def _pump_direction(self, direction: Direction) -> None:
        assert not direction.queued
        if direction.done:
            return
        portion = min(self.waiting[direction], self.random.choice((0, 1, 1000, PORTION_MAX)))
        self.waiting[direction] -= portion
        self.moved[direction] += portion
        turns = direction.turns
        self.portions.setdefault((turns.owner, turns.way), []).append((self.now, portion))
        if self.waiting[direction]:
            self.queue.enqueue(direction)
        if self.random.random() < 0.1:  # what passes one way may wake another
            self.send()

    # ---- the rules

    def check(self) -> None:
        active, paused = [*self.queue.active], [turns for _at, _number, turns in self.queue.paused]
        assert len({*active, *paused}) == len(active) + len(paused), "once, and in one place"
        assert all(turns.directions and not turns.is_paused for turns in active)
        assert all(turns.is_paused for turns in paused)
        for direction, waiting in self.waiting.items():
            assert direction.queued or not waiting, "nobody would ever pump it"
            assert direction.queued is (direction in direction.turns.directions)
            if direction.queued:
                assert direction.turns in (paused if direction.turns.is_paused else active)
            assert direction.turns.directions.count(direction) <= 1
        if paused:
            assert self.timer_at is not None, "nobody would ever resume them"
            assert self.timer_at <= max(self.now, self.queue.paused[0][0]) + 1e-6
        if self.rate and not self.is_dry_run:
            self._check_rates()

    def _check_rates(self) -> None:
        """No owner moves more than its bucket gives, and one portion, from when its bucket was full."""
        for portions in self.portions.values():
            seconds = self.now - self.limited_since
            in_excess = PORTION_MAX + self.rate * (BURST_S + 0.002)
            assert sum(size for _at, size in portions) <= self.rate * seconds + in_excess


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_all_bytes_arrive_and_no_owner_moves_more_than_its_bucket(seed: int) -> None:
    model = Model(seed)
    for _ in range(STEPS):
        model.step()
        model.check()
    left = {direction: waiting + model.moved[direction] for direction, waiting in model.waiting.items()}
    model.random = random.Random()
    model.send = lambda: None  # type: ignore[method-assign] -- nothing more comes
    for _ in range(1_000_000):
        if not any(model.waiting.values()):
            break
        if not model.queue.pump_turns(64, model.bytes_moved):
            assert model.timer_at is not None
            model.now = max(model.now, model.timer_at)
            model.timer_at = None
            model.queue.resume_due()
    assert {direction: model.moved[direction] for direction in left} == left


@pytest.mark.parametrize("rate", [0.0, 3_000_000.0])
def test_owners_with_bytes_have_as_many_portions_however_large_they_are(rate: float) -> None:
    """Without a limit none waits for more than one portion of each other owner, and in the end all have had as many."""
    model = Model(0)
    model.queue.limit_bytes(rate, dry_run=False)
    sizes = {"a": PORTION_MAX, "b": 1, "c": 30_000}
    counts = dict.fromkeys(sizes, 0)
    order: list[str] = []

    def pump(direction: Direction) -> None:
        owner = direction.turns.owner
        counts[owner] += 1
        order.append(owner)
        model.moved[direction] += sizes[owner]
        model.queue.enqueue(direction)

    for owner in sizes:
        for _ in range(5 if owner == "a" else 1):
            direction = Direction(0, 0, 0)
            direction.turns = model.queue.turns_of(owner, 0)
            direction.pump = pump
            model.moved[direction] = 0
            model.queue.enqueue(direction)
    for _ in range(1000):
        model.now += PAUSE_S_MIN
        model.queue.resume_due()
        model.queue.pump_turns(3, model.bytes_moved)
    assert all(one != other for one, other in pairwise(order[:3])), "each has its turn"
    if rate:
        assert counts["b"] == 1000 > counts["a"], "an owner with small portions is not held for another's large ones"
        assert counts["a"] * sizes["a"] == pytest.approx(rate * 11, abs=PORTION_MAX)
    else:
        assert max(counts.values()) - min(counts.values()) <= 1
