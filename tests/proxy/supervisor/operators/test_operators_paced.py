"""proxy.supervisor.operators.admin_channel: an expensive answer is made once for all, and not too often."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from proxy.supervisor.operators.admin_channel import RateLimitedAnswer


class Maker:
    """Takes a second, and remembers when it began."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.at_a_time = 0
        self.error: Exception | None = None

    async def make(self) -> int:
        assert self.at_a_time == 0
        self.at_a_time += 1
        self.began.append(trio.current_time())
        made = len(self.began)
        try:
            await trio.sleep(1)
        finally:
            self.at_a_time -= 1
        if self.error is not None:
            raise self.error
        return made


async def answers(paced: RateLimitedAnswer[int], count: int) -> list[int]:
    got: list[int] = []

    async def ask() -> None:
        got.append(await paced.current())

    async with trio.open_nursery() as asking:
        for _ in range(count):
            asking.start_soon(ask)
    return got


async def test_all_who_ask_at_the_same_time_get_the_same(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    paced = RateLimitedAnswer(maker.make, 5)
    assert await answers(paced, 100) == [1] * 100
    assert await answers(paced, 100) == [2] * 100
    assert maker.began == pytest.approx([0, 5])


async def test_nothing_old_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """A scrape says when it was collected."""
    maker = Maker()
    paced = RateLimitedAnswer(maker.make, 0.2)
    for expected in (1, 2, 3):
        assert await paced.current() == expected
    assert maker.began == pytest.approx([0, 1, 2]), "no pause where it takes longer"


async def test_a_cancelled_caller_does_not_affect_the_other_callers(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    maker = Maker()
    paced = RateLimitedAnswer(maker.make, 5)
    scope = trio.CancelScope()

    async def ask_and_go_away() -> None:
        with scope:
            await paced.current()

    nursery.start_soon(ask_and_go_away)
    await trio.testing.wait_all_tasks_blocked()
    with trio.CancelScope() as waiting:
        nursery.start_soon(cancel_after, scope, 0.5)
        assert await answers(paced, 3) == [1, 1, 1]
    assert not waiting.cancelled_caught
    assert await paced.current() == 2
    assert maker.began == pytest.approx([0, 5]), "those who go away do not make it begin more often"


async def cancel_after(scope: trio.CancelScope, seconds: float) -> None:
    await trio.sleep(seconds)
    scope.cancel()


async def test_all_who_wait_get_its_error(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    maker.error = ValueError("too large")
    paced = RateLimitedAnswer(maker.make, 0.2)
    refused = 0

    async def ask() -> None:
        nonlocal refused
        with pytest.raises(ValueError, match="too large"):
            await paced.current()
        refused += 1

    async with trio.open_nursery() as asking:
        for _ in range(10):
            asking.start_soon(ask)
    assert (refused, len(maker.began)) == (10, 1)
    maker.error = None
    assert await paced.current() == 2
