"""proxy.forwarder.relay.turns: owners take turns, and an owner's bytes a second are limited."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
import trio
import trio.testing
from framed_fakes import FakeReauthenticator, Now, send_frame, session
from relay_fakes import Engine, Lane, Place, about_relay, open_lane, read, read_all, until

from proxy.forwarder.relay import engine as engine_module
from proxy.forwarder.relay import manager
from proxy.forwarder.relay.relay import Direction
from proxy.forwarder.relay.turns import PAUSE_S_MIN, PORTION_BYTES_MAX, PORTION_BYTES_MIN, RunQueue
from proxy.runtime.shared.relay_table import OPERATIONS, TO_BROKER

RATE = 1000


class Queue:
    """A run queue with a clock of its own, and directions that always have more."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[float] = []
        self.real = RunQueue(lambda: self.now, self.timers.append)
        self.portions: dict[Direction, int] = {}
        self.portion_bytes = 100
        self.pumped: list[Direction] = []

    def add(self, owner: str, way: int = TO_BROKER) -> Direction:
        direction = Direction(0, 0, 0)
        direction.turns = self.real.turns_of(owner, way)
        direction.pump = self._pump
        self.portions[direction] = 0
        self.real.enqueue(direction)
        return direction

    def _pump(self, direction: Direction) -> None:
        self.portions[direction] += 1
        self.pumped.append(direction)
        self.real.enqueue(direction)

    def pump(self, times: int) -> int:
        """Pump so often if so much is active; return how often."""
        self.real.resume_due()
        done = 0
        while done < times and self.real.active:
            done += self.real.pump_turns(times - done, lambda direction: self.portions[direction] * self.portion_bytes)
        return done

    def counters(self) -> dict[str, float]:
        return {
            sample.name.removeprefix("pulsar_proxy_paced_"): sample.value
            for family in self.real.collect()
            for sample in family.samples
            if sample.labels == {"direction": "to_broker"}
        }


@pytest.fixture
def queue() -> Queue:
    return Queue()


# ---- turns


def test_an_owner_with_two_hundred_relays_has_as_many_portions_as_one_with_a_single_one(queue: Queue) -> None:
    for _ in range(200):
        queue.add("alice")
    single = queue.add("bob")
    queue.pump(130)
    assert queue.portions[single] == 65


def test_an_owners_relays_take_turns(queue: Queue) -> None:
    directions = [queue.add("alice") for _ in range(5)]
    queue.pump(20)
    assert [queue.portions[direction] for direction in directions] == [4] * 5


def test_what_is_queued_is_counted_up_to_a_bound(queue: Queue) -> None:
    for owner in ("alice", "alice", "bob"):
        queue.add(owner)
    assert [queue.real.count(bound) for bound in (1, 2, 3, 64)] == [1, 2, 3, 3]


def test_what_is_a_successors_leaves_the_queue(queue: Queue) -> None:
    stays, _goes, _last_of_its_owner = queue.add("alice"), queue.add("alice"), queue.add("bob")
    queue.real.keep(lambda direction: direction is stays)
    queue.pump(3)
    assert queue.pumped == [stays] * 3


async def test_many_ready_sockets_of_one_owner_do_not_keep_another_from_its_turns(engine: Engine) -> None:
    """By edges, too, which come for all of them at once: at most a batch of events, then turn by turn."""
    engine.real.run_queue.portion_bytes_max = 1000
    lanes = [Lane.new() for _ in range(41)]
    for lane in lanes:
        os.write(lane.client.socket.fileno(), bytes(40_000))
    await trio.testing.wait_all_tasks_blocked()
    relays = [engine.open(lane, principal="alice") for lane in lanes[1:]]
    single = engine.open(lanes[0], principal="bob")
    while engine.moved(single)[TO_BROKER] < 40_000:
        engine.real.run_once()
    others = sum(engine.cells(relay, OPERATIONS)[TO_BROKER] for relay in relays)
    assert others <= 40 + 64 + 1
    for lane in lanes:
        await lane.close()


# ---- bytes a second


def test_an_owner_moves_a_seconds_bytes_and_then_waits_for_each_more(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    queue.add("alice")
    assert queue.pump(100) == 11, "the last one is beyond the bucket"
    assert queue.timers == [pytest.approx(0.1)]
    assert queue.pump(100) == 0
    queue.now += 0.1
    assert queue.pump(100) == 1
    for _ in range(1000):
        queue.now += 0.01
        queue.pump(100)
    assert sum(queue.portions.values()) * queue.portion_bytes == pytest.approx(RATE * (1 + 10.1), abs=100)


def test_another_owner_and_the_other_way_are_not_held(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    alice, bob, back = queue.add("alice"), queue.add("bob"), queue.add("alice", 1)
    queue.pump(5)
    queue.pump(100)
    assert [queue.portions[one] for one in (alice, bob, back)] == [11, 11, 11]


def test_paused_relays_go_on_in_turn(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    directions = [queue.add("alice") for _ in range(7)]
    for _ in range(700):
        queue.now += 0.1
        queue.pump(100)
    portions = [queue.portions[direction] for direction in directions]
    assert max(portions) - min(portions) <= 1


def test_what_becomes_ready_during_a_pause_waits_for_its_end(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    queue.add("alice")
    queue.pump(100)
    late = queue.add("alice")
    assert queue.pump(100) == 0
    queue.now += 0.2
    queue.pump(100)
    assert queue.portions[late] == 1


def test_the_timer_is_set_for_whoever_comes_first_and_then_for_the_next(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    queue.portion_bytes = 3000
    queue.add("alice")
    queue.pump(1)
    queue.portion_bytes = 2000
    queue.add("bob")
    queue.pump(1)
    assert queue.timers == [pytest.approx(2), pytest.approx(1)]
    queue.portion_bytes = 2
    queue.now += 1
    queue.real.resume_due()
    assert queue.timers[2:] == [pytest.approx(1)]


def test_a_pause_has_a_shortest_length(queue: Queue) -> None:
    queue.real.limit_bytes(RATE * 1000, dry_run=False)
    queue.portion_bytes = RATE * 1000 + 1
    queue.add("alice")
    queue.pump(1)
    assert queue.timers == [PAUSE_S_MIN]


def test_who_comes_back_finds_no_full_bucket_and_who_stays_away_is_forgotten(queue: Queue) -> None:
    queue.real.limit_bytes(RATE, dry_run=False)
    first = queue.add("alice")
    queue.pump(9)
    queue.real.keep(lambda _direction: False)
    queue.portions.clear()
    queue.pumped.clear()
    del first
    gc.collect()
    queue.real.forget_full()
    queue.add("alice")
    assert queue.pump(100) == 2
    queue.now += 10
    queue.real.keep(lambda _direction: False)
    queue.real.resume_due()
    queue.portions.clear()
    queue.pumped.clear()
    queue.real.forget_full()
    gc.collect()
    assert len(queue.real._turns) == 0


def test_a_dry_run_counts_pauses_and_makes_none() -> None:
    counts = []
    for dry_run in (False, True):
        one = Queue()
        one.real.limit_bytes(RATE, dry_run=dry_run)
        one.add("alice")
        for _ in range(100):
            one.now += 0.05
            one.pump(3)
        counts.append(one.counters())
        assert sum(one.portions.values()) == (300 if dry_run else pytest.approx(60, abs=2))
    assert counts[1] == {name: pytest.approx(number, rel=0.5) for name, number in counts[0].items()}
    assert counts[1]["pauses_total"] > 10


def test_pauses_and_their_time_are_counted(queue: Queue) -> None:
    assert queue.counters() == {"pauses_total": 0, "pause_seconds_total": 0}
    queue.real.limit_bytes(RATE, dry_run=False)
    queue.portion_bytes = 3000
    queue.add("alice")
    queue.pump(1)
    assert queue.counters() == {"pauses_total": 1, "pause_seconds_total": pytest.approx(2)}


def test_a_new_limit_holds_for_open_relays_and_ends_pauses(queue: Queue) -> None:
    queue.add("alice")
    assert queue.pump(100) == 100
    queue.real.limit_bytes(RATE, dry_run=False)
    assert queue.pump(100) == 11
    queue.real.limit_bytes(RATE, dry_run=False)
    assert queue.pump(100) == 0, "the same limit is no new one"
    queue.real.limit_bytes(2 * RATE, dry_run=False)
    assert queue.timers[-1] == 0, "the loop is to look at once"
    assert queue.pump(100) == 21
    queue.real.limit_bytes(0, dry_run=False)
    assert queue.pump(100) == 100


async def test_the_engine_reads_nothing_of_a_paused_owner_until_the_time_has_come(engine: Engine, lane: Lane) -> None:
    """Bytes stay where they are, the sender's windows fill, and all arrive."""
    now = 100.0
    engine.real.run_queue._clock = lambda: now
    engine.real.run_queue.limit_bytes(10_000, dry_run=False)
    relay = engine.open(lane)
    said = os.urandom(20_000)
    await lane.client.send_all(said[:12_000])
    assert await read(lane.broker, 12_000) == said[:12_000], "a portion goes whole"
    await until(lambda: engine.real.run_queue.paused)
    await lane.client.send_all(said[12_000:])
    async with open_lane() as other:
        engine.open(other, principal="bob")
        await other.client.send_all(b"not held")
        assert await read(other.broker, 8) == b"not held"
    await lane.broker.send_all(b"nor is the other way")
    assert await read(lane.client, 20) == b"nor is the other way"
    await until(lambda: relay.to_broker.queued)
    assert engine.moved(relay)[TO_BROKER] == 12_000
    now += 1
    engine.real._pace_timer.fire_now()
    assert await read(lane.broker, 8_000) == said[12_000:]


async def test_a_relay_that_is_closed_gently_is_not_quiet_while_it_is_paused(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has answered, but the answer may not pass yet."""
    now, positions = 100.0, []

    async def never_quiet(position: Callable[[], object]) -> None:
        positions.append(position)
        await trio.sleep_forever()

    monkeypatch.setattr(engine_module, "until_quiet", never_quiet)
    engine.real.run_queue._clock = lambda: now
    engine.real.run_queue.limit_bytes(10_000, dry_run=False)
    relay = engine.open(lane)
    await lane.broker.send_all(bytes(12_000))
    await read(lane.client, 12_000)
    await until(lambda: engine.real.run_queue.paused)
    await lane.broker.send_all(b"the answer")
    await until(lambda: relay.to_client.queued)
    engine.real.close_when_quiet(relay)
    await until(lambda: positions)
    (position,) = positions
    assert position() != position()
    now += 1
    engine.real._pace_timer.fire_now()
    assert await read(lane.client, 10) == b"the answer"
    await until(lambda: not relay.to_client.queued)
    assert position() == position()


@pytest.mark.parametrize("pumped", ["spliced", "copied"])
@pytest.mark.parametrize("follows_frames", [False, True], ids=["blind", "framed"])
async def test_where_a_limit_is_set_portions_are_small(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    monkeypatch: pytest.MonkeyPatch,
    pumped: str,
    follows_frames: bool,
) -> None:
    """A large one would make the owner's other relays wait for a second or more, each time, and their keep-alive."""
    monkeypatch.setattr(manager, "splice_works", lambda: pumped == "spliced")
    it = await place.forwarder()
    await it.begin(lane, session=session(now, reauthenticator) if follows_frames else None)
    (relay,) = it.relays.live
    assert relay.is_spliced is (pumped == "spliced")
    portions = []

    def pump_and_count(direction: Direction) -> None:
        before = it.relays.bytes_moved(relay)[TO_BROKER]
        pump(direction)
        portions.append(it.relays.bytes_moved(relay)[TO_BROKER] - before)

    pump, relay.to_broker.pump = relay.to_broker.pump, pump_and_count
    it.relays.run_queue.limit_bytes(1_000_000_000, dry_run=False)
    assert it.relays.run_queue.portion_bytes_max == PORTION_BYTES_MAX
    it.relays.run_queue.limit_bytes(1_800_000, dry_run=False)
    assert it.relays.run_queue.portion_bytes_max == 18_000
    said = b"".join(send_frame(os.urandom(size)) for size in (150_000, 1_000, 150_000, *[3_000] * 50))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.client.send_all, said)
        assert await read(lane.broker, len(said)) == said
    await until(lambda: sum(portions) == len(said))
    assert max(portions) <= 18_000
    it.relays.run_queue.limit_bytes(1_000, dry_run=False)
    assert it.relays.run_queue.portion_bytes_max == PORTION_BYTES_MIN
    it.relays.run_queue.limit_bytes(1_000, dry_run=True)
    assert it.relays.run_queue.portion_bytes_max == PORTION_BYTES_MAX
    it.relays.run_queue.limit_bytes(0, dry_run=False)
    assert it.relays.run_queue.portion_bytes_max == PORTION_BYTES_MAX


async def test_what_is_sent_ahead_of_a_relay_counts(place: Place, lane: Lane) -> None:
    """Or to connect again and again would bring new bytes each time."""
    it = await place.forwarder()
    it.relays.run_queue._clock = lambda: 100.0
    it.relays.run_queue.limit_bytes(10_000, dry_run=False)
    await it.begin(lane, to_broker=bytes(30_000))
    (relay,) = it.relays.live
    await read(lane.broker, 30_000)
    await until(lambda: it.moved("to_broker") == 30_000)
    assert relay.to_broker.turns.bucket is not None
    assert relay.to_broker.turns.bucket.tokens == -20_000, "of the 10,000 that there were"


async def test_the_timer_ends_a_pause(engine: Engine, lane: Lane) -> None:
    engine.real.run_queue.limit_bytes(1_000_000, dry_run=False)
    engine.open(lane)
    said = os.urandom(1_100_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.client.send_all, said)
        assert await read(lane.broker, len(said)) == said
    assert sum(engine.real.run_queue._pauses) > 0


@pytest.mark.usefixtures("quick_look")
async def test_a_half_closed_relay_that_is_paused_is_not_ended_for_moving_nothing(engine: Engine, lane: Lane) -> None:
    now = 100.0
    engine.real.run_queue._clock = lambda: now
    engine.real.run_queue.limit_bytes(10_000, dry_run=False)
    relay = engine.open(lane, half_close_s=0.05)
    await lane.client.send_all(bytes(12_000))
    await read(lane.broker, 12_000)
    await until(lambda: engine.real.run_queue.paused)
    await lane.client.send_all(b"the rest")
    await lane.broker.send_eof()
    assert await read_all(lane.client) == b""
    looks = 0
    look = engine.real._end_idle_half_closed

    def counted(at: float) -> None:
        nonlocal looks
        looks += 1
        look(at + looks)  # the timeout has passed each time

    engine.real._end_idle_half_closed = counted  # type: ignore[method-assign]
    await until(lambda: looks > 3)
    assert not engine.is_over(relay)
    now += 1
    engine.real._pace_timer.fire_now()
    assert await read(lane.broker, 8) == b"the rest"


async def test_adopted_relays_have_a_bucket_again(place: Place, lane: Lane) -> None:
    first = await place.forwarder()
    await first.begin(lane, about=about_relay())
    await first.kill()
    second = await place.forwarder()
    second.relays.run_queue.limit_bytes(2_000_000, dry_run=False)
    (relay,) = second.relays.live
    for direction in (relay.to_broker, relay.to_client):
        assert direction.turns.bucket is not None
        assert direction.turns.bucket.tokens == 2_000_000
    assert relay.to_broker.turns is not relay.to_client.turns
    await lane.client.send_all(b"after")
    assert await read(lane.broker, 5) == b"after"
