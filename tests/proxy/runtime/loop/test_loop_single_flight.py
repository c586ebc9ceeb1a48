"""proxy.runtime.loop.single_flight: one run for all tasks that want its result at the same time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from proxy.runtime.loop.single_flight import SingleFlight


class Maker:
    """Takes a second, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.error: Exception | None = None
        self.flight = SingleFlight(self.make)

    async def make(self) -> int:
        self.begun += 1
        number = self.begun
        await trio.sleep(1)
        if self.error is not None:
            raise self.error
        return number


async def results(maker: Maker, count: int) -> list[int]:
    found: list[int] = []

    async def ask() -> None:
        found.append(await maker.flight.result())

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask)
    return found


async def test_callers_during_a_run_get_its_result_and_later_ones_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    maker = Maker()
    assert await results(maker, 100) == [1] * 100
    assert not maker.flight.is_under_way
    assert await results(maker, 100) == [2] * 100


async def test_a_run_that_was_started_twice_begins_once(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    maker.flight.start()
    maker.flight.start()
    assert maker.flight.is_under_way
    assert await maker.flight.result() == 1


async def test_a_caller_that_gives_up_leaves_the_run_to_the_others(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    with trio.move_on_after(0.5) as scope:
        await maker.flight.result()
    assert scope.cancelled_caught
    assert await maker.flight.result() == 1


async def test_an_error_reaches_all_callers_of_its_run_and_no_later_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    maker = Maker()
    maker.error = ValueError("no answer")
    failed = 0

    async def ask() -> None:
        nonlocal failed
        with pytest.raises(ValueError, match="no answer"):
            await maker.flight.result()
        failed += 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
    assert (failed, maker.begun) == (10, 1)
    maker.error = None
    assert await maker.flight.result() == 2


async def test_an_error_without_a_caller_ends_no_process(autojump_clock: trio.testing.MockClock) -> None:
    """In a task of Trio's system an error would end the process."""
    maker = Maker()
    maker.error = ValueError("no answer")
    maker.flight.start()
    await trio.sleep(2)
    assert not maker.flight.is_under_way
