"""A value from an issuer: fetched once for many, used while it is good, and not asked for without end."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing

from auth.http import HttpFailed
from auth.refreshing_cache import Fetched, NotAvailable, RefreshingCache

Clock = trio.testing.MockClock
FRESH_S, USABLE_S, RETRY_S = 100.0, 200.0, 10.0


class Source:
    """Numbers, one after the other, from an issuer that may be slow or down."""

    def __init__(self) -> None:
        self.fetches = 0
        self.finished = 0
        self.delay_s = 1.0
        self.error: Exception | None = None
        self.renewed = RefreshingCache("a number", self.fetch, retry_interval_s=RETRY_S)

    async def fetch(self) -> Fetched[int]:
        self.fetches += 1
        number = self.fetches
        await trio.sleep(self.delay_s)
        self.finished += 1
        if self.error is not None:
            raise self.error
        return Fetched(number, FRESH_S, USABLE_S)


@pytest.fixture
def source() -> Source:
    return Source()


async def not_available(source: Source) -> str:
    with pytest.raises(NotAvailable) as caught:
        await source.renewed.current_value()
    return str(caught.value)


async def test_nothing_is_fetched_before_somebody_asks(source: Source, autojump_clock: Clock) -> None:
    await trio.sleep(1000)
    assert source.fetches == 0


async def test_many_at_once_cost_one_fetch(source: Source, autojump_clock: Clock) -> None:
    found: list[int] = []

    async def ask() -> None:
        found.append(await source.renewed.current_value())

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
    assert (found, source.fetches) == ([1] * 100, 1)
    assert trio.current_time() == pytest.approx(1)


async def test_a_cancelled_caller_leaves_the_others_waiting(source: Source, autojump_clock: Clock) -> None:
    """Not even the first, for whom the fetch was begun."""
    found: list[int] = []

    async def ask() -> None:
        found.append(await source.renewed.current_value())

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.5) as first:
            async with trio.open_nursery() as leaving:
                leaving.start_soon(ask)
                await trio.sleep(0.1)
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                await trio.sleep_forever()
        assert first.cancelled_caught
    assert (found, source.fetches, source.finished) == ([1, 1], 1, 1)
    assert trio.current_time() == pytest.approx(1)


async def test_even_if_all_leave_the_fetch_was_not_for_nothing(source: Source, autojump_clock: Clock) -> None:
    for _ in range(5):
        with trio.move_on_after(0.15):
            await source.renewed.current_value()
    assert await source.renewed.current_value() == 1
    assert source.fetches == 1


async def test_a_value_is_kept_while_it_is_fresh(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    await trio.sleep(FRESH_S - 0.1)
    assert await source.renewed.current_value() == 1
    await trio.sleep(0.1)
    assert await source.renewed.current_value() == 2


async def test_an_old_value_goes_on_while_the_issuer_is_down_and_then_ends(
    source: Source, autojump_clock: Clock
) -> None:
    await source.renewed.current_value()
    source.error = HttpFailed("down")
    await trio.sleep(FRESH_S)
    assert await source.renewed.current_value() == 1
    assert source.renewed.failure == "down"
    await trio.sleep(USABLE_S - FRESH_S - 1.1)
    assert await source.renewed.current_value() == 1
    await trio.sleep(0.1)
    assert await not_available(source) == "down"


async def test_a_value_that_has_come_again_is_as_good_as_the_first(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    source.error = HttpFailed("down")
    await trio.sleep(USABLE_S)
    await not_available(source)
    source.error = None
    await trio.sleep(RETRY_S)
    assert await source.renewed.current_value() == 3
    assert source.renewed.failure == ""


async def test_a_failure_is_remembered_for_a_while(source: Source, autojump_clock: Clock) -> None:
    source.error = HttpFailed("down")
    for _ in range(100):
        assert await not_available(source) == "down"
    assert source.fetches == 1
    await trio.sleep(RETRY_S - 0.1)
    await not_available(source)
    assert source.fetches == 1
    await trio.sleep(0.1)
    await not_available(source)
    assert source.fetches == 2


async def test_a_slow_failure_is_remembered_from_its_end_on(source: Source, autojump_clock: Clock) -> None:
    source.delay_s, source.error = 3 * RETRY_S, HttpFailed("down")
    await not_available(source)
    await not_available(source)
    assert source.fetches == 1


async def test_an_old_value_is_used_while_the_issuer_is_known_to_be_down(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    source.error = HttpFailed("down")
    await trio.sleep(FRESH_S)
    await source.renewed.current_value()
    await trio.sleep(RETRY_S)
    before = trio.current_time()
    assert await source.renewed.current_value() == 1
    assert trio.current_time() == before
    await trio.sleep(source.delay_s + 0.1)
    assert source.fetches == 3  # it was tried all the same
    source.error = None
    await trio.sleep(RETRY_S)
    assert await source.renewed.current_value() == 1
    await trio.sleep(source.delay_s + 0.1)
    assert await source.renewed.current_value() == 4


async def test_a_caller_that_needs_a_newer_value_gets_it(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    await trio.sleep(RETRY_S)
    assert await source.renewed.refreshed_value() == 2


async def test_newer_values_are_asked_for_no_more_often_than_allowed(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    for _ in range(1000):
        await source.renewed.refreshed_value()
        await trio.sleep(0.1)
    passed_s = trio.current_time()
    assert source.fetches <= 1 + passed_s / (RETRY_S + source.delay_s) + 1
    assert source.fetches >= 5


async def test_no_newer_value_is_asked_for_right_after_a_failure(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    await trio.sleep(RETRY_S)
    source.error = HttpFailed("down")
    for _ in range(10):
        assert await source.renewed.refreshed_value() == 1
    assert source.fetches == 2


async def test_many_callers_that_need_a_newer_value_cost_one_fetch(source: Source, autojump_clock: Clock) -> None:
    await source.renewed.current_value()
    await trio.sleep(RETRY_S)
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(source.renewed.refreshed_value)
    assert source.fetches == 2


async def test_a_defect_is_a_failure_and_no_more(source: Source, autojump_clock: Clock) -> None:
    source.error = KeyError("not-to-be-seen")
    assert await not_available(source) == "a defect of ours: KeyError"


async def test_repeated_failures_to_fetch_are_logged_once(source: Source, autojump_clock: Clock) -> None:
    source.error = HttpFailed("down")
    with structlog.testing.capture_logs() as entries:
        for _ in range(10):
            await not_available(source)
    [entry] = entries
    assert (entry["log_level"], entry["what"], entry["reason"]) == ("error", "a number", "down")
    assert entry["going_on_with_the_old_one"] is False
