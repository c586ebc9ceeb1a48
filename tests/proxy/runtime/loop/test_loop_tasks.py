"""proxy.runtime.loop.tasks: closing, repeating, counting, backing off."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from proxy.runtime.loop.tasks import Backoff, InFlightCounter, close_gracefully, run_every, seconds


def test_seconds() -> None:
    assert seconds(1500) == 1.5


async def test_close_gracefully_waits_for_the_peer_to_read_to_the_end() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(b"last words")
    await theirs.send_all(b"unread")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_gracefully, ours)
        await trio.testing.wait_all_tasks_blocked()
        assert await theirs.receive_some(100) == b"last words"
        assert await theirs.receive_some(100) == b""
        await theirs.aclose()


async def test_close_gracefully_does_not_wait_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def chatter() -> None:
        while True:
            await theirs.send_all(b"x")
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        await close_gracefully(ours, linger_s=2)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == pytest.approx(2)


async def test_close_gracefully_of_what_is_broken() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.aclose()
    await close_gracefully(ours)
    await close_gracefully(ours)


async def test_repeat(autojump_clock: trio.testing.MockClock) -> None:
    times: list[float] = []

    async def work() -> None:
        times.append(trio.current_time())
        await trio.sleep(1)

    with trio.move_on_after(10):
        await run_every(2, work)
    assert times == pytest.approx([0, 3, 6, 9])


async def test_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    work = InFlightCounter()
    assert await work.wait_until_empty(timeout_s=0.1)

    async def one(duration_s: float) -> None:
        with work:
            await trio.sleep(duration_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, 2)
        nursery.start_soon(one, 4)
        await trio.sleep(1)
        assert work.count == 2
        assert not await work.wait_until_empty(timeout_s=2)
        assert await work.wait_until_empty(timeout_s=60)
        assert trio.current_time() == pytest.approx(4)


async def test_in_flight_empty_for_a_moment_only(autojump_clock: trio.testing.MockClock) -> None:
    work = InFlightCounter()

    async def relay_race() -> None:
        for _ in range(3):
            with work:
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay_race)
        await trio.sleep(0.5)
        assert await work.wait_until_empty(timeout_s=10)
        assert work.count == 0


async def test_in_flight_several_at_a_time(nursery: trio.Nursery) -> None:
    work = InFlightCounter()
    told: list[bool] = []

    async def wait() -> None:
        told.append(await work.wait_until_empty(timeout_s=60))

    work.increment(5)
    for _ in range(2):
        nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    work.decrement(3)
    work.increment()
    await trio.testing.wait_all_tasks_blocked()
    assert (work.count, told) == (3, [])
    work.decrement(3)
    await trio.testing.wait_all_tasks_blocked()
    assert (work.count, told) == (0, [True, True])


def test_backoff() -> None:
    backoff = Backoff(initial_s=1, max_s=5)
    assert [backoff.next_pause_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_pause_s() == 1
