"""proxy.admin.service: an answer is made once for all who ask in the same moment."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.admin.service import CoalescingCache
from proxy.runtime.rpc.errors import RpcError


class Maker:
    """Takes a second, and counts."""

    def __init__(self) -> None:
        self.made = 0
        self.at_a_time = 0
        self.error: Exception | None = None

    async def make(self) -> int:
        assert self.at_a_time == 0
        self.at_a_time += 1
        self.made += 1
        try:
            await trio.sleep(1)
        finally:
            self.at_a_time -= 1
        if self.error is not None:
            raise self.error
        return self.made


async def test_all_who_ask_at_the_same_time_get_the_same(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    kept = CoalescingCache(maker.make, 5)
    got: list[int] = []

    async def ask() -> None:
        got.append(await kept.current())

    async with trio.open_nursery() as asking:
        for _ in range(100):
            asking.start_soon(ask)
    assert got == [1] * 100


async def test_an_answer_is_cached_for_a_time_after_it_was_made(autojump_clock: trio.testing.MockClock) -> None:
    """The time counts from the end of its making: there is a pause between two answers, however long one takes."""
    maker = Maker()
    kept = CoalescingCache(maker.make, 5)
    values = []
    for _ in range(8):
        values.append(await kept.current())
        await trio.sleep(0.9)
    assert values == [1, 1, 1, 1, 1, 1, 2, 2]


async def test_there_is_a_pause_also_where_making_takes_longer_than_it_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Security: one process's metrics can take as long as it likes to make them take."""
    maker = Maker()
    kept = CoalescingCache(maker.make, 0.5)
    for _ in range(2):
        assert await kept.current() == 1
    await trio.sleep(0.5)
    assert await kept.current() == 2


async def test_a_cancelled_caller_does_not_cancel_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    maker = Maker()
    kept = CoalescingCache(maker.make, 5)
    with trio.move_on_after(0.5):
        await kept.current()
    assert await kept.current() == 1


@pytest.mark.parametrize("error", [RpcError("no answer"), ValueError("a defect")])
async def test_an_error_is_kept_as_long(autojump_clock: trio.testing.MockClock, error: Exception) -> None:
    """And is over as soon as an answer can be made again."""
    maker = Maker()
    maker.error = error
    kept = CoalescingCache(maker.make, 5)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(RpcError, match=r"no answer|no worker answered"):
                await kept.current()
    assert [entry["event"] for entry in logs] == (
        [] if isinstance(error, RpcError) else ["the admin port met a defect"]
    )
    maker.error = None
    await trio.sleep(5)
    assert await kept.current() == 2
