"""proxy.runtime.loop.tick: scheduled objects are flushed once, at the end of the tick; outside of one, at once."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.runtime.loop.tick import Tick, current_tick


class Speaker:
    def __init__(self, said: list[str], name: str) -> None:
        self._said = said
        self._name = name

    def flush(self) -> None:
        self._said.append(self._name)


def test_each_is_flushed_once_a_tick_in_the_order_of_the_first_schedule() -> None:
    said: list[str] = []
    tick, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    with tick:
        for who in (b, a, b, b):
            tick.schedule_flush(who)
        assert said == []
    assert said == ["b", "a"]
    with tick:
        pass
    assert said == ["b", "a"], "said once"
    with tick:
        tick.schedule_flush(a)
    assert said == ["b", "a", "a"]


def test_outside_of_a_tick_they_are_flushed_at_once() -> None:
    said: list[str] = []
    tick, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    tick.schedule_flush(a)
    assert said == ["a"]
    tick.schedule_flush(b)
    tick.schedule_flush(a)
    assert said == ["a", "b", "a"]
    with tick:
        tick.schedule_flush(b)
        assert said == ["a", "b", "a"], "and a tick that follows is one"
    assert said == ["a", "b", "a", "b"]


def test_a_tick_within_a_tick_is_part_of_it() -> None:
    said: list[str] = []
    tick, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    with tick:
        tick.schedule_flush(a)
        with tick:
            tick.schedule_flush(b)
            with tick:
                tick.schedule_flush(a)
        assert said == []
    assert said == ["a", "b"]
    tick.schedule_flush(a)
    assert said == ["a", "b", "a"], "the tick is over"


def test_an_object_scheduled_by_a_flush_is_flushed_in_the_same_tick() -> None:
    said: list[str] = []
    tick, last = Tick(), Speaker(said, "last")

    class Chained(Speaker):
        def flush(self) -> None:
            super().flush()
            tick.schedule_flush(last)

    with tick:
        tick.schedule_flush(Chained(said, "first"))
        tick.schedule_flush(Chained(said, "second"))
    assert said == ["first", "second", "last"]
    tick.schedule_flush(Chained(said, "alone"))
    assert said == ["first", "second", "last", "alone", "last"]


def test_a_tick_within_a_flush_keeps_the_order() -> None:
    """A push may read frames that waited for room, which is a tick, too."""
    said: list[str] = []
    tick, last = Tick(), Speaker(said, "last")

    class Reading(Speaker):
        def flush(self) -> None:
            with tick:
                tick.schedule_flush(last)
            super().flush()

    with tick:
        tick.schedule_flush(Reading(said, "first"))
        tick.schedule_flush(Speaker(said, "second"))
    assert said == ["first", "second", "last"]


def test_an_error_of_one_keeps_no_other_unflushed() -> None:
    said: list[str] = []
    tick = Tick()

    class Broken(Speaker):
        def flush(self) -> None:
            raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs, tick:
        for who in (Speaker(said, "before"), Broken(said, ""), Speaker(said, "behind")):
            tick.schedule_flush(who)
    assert said == ["before", "behind"]
    assert [entry["log_level"] for entry in logs] == ["error"]
    with structlog.testing.capture_logs() as logs:
        tick.schedule_flush(Broken(said, ""))
    assert [entry["log_level"] for entry in logs] == ["error"], "nor is it raised to who spoke outside of a tick"


def test_a_tick_that_ends_with_an_exception_is_a_tick() -> None:
    """What one connection's callback raises must not keep back what others have to say."""
    said: list[str] = []
    tick = Tick()

    def fail() -> None:
        with tick:
            tick.schedule_flush(Speaker(said, "a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert said == ["a"]
    tick.schedule_flush(Speaker(said, "b"))
    assert said == ["a", "b"]


async def test_in_a_tick_the_clock_is_looked_at_once(autojump_clock: trio.testing.MockClock) -> None:
    tick = Tick()
    assert tick.now == trio.current_time()
    autojump_clock.jump(1)
    assert tick.now == trio.current_time()
    with tick:
        began = tick.now
        assert began == trio.current_time()
        autojump_clock.jump(1)
        with tick:
            assert tick.now == began
        assert tick.now == began
    assert tick.now == began + 1 == trio.current_time()
    with tick:
        assert tick.now == began + 1, "each tick again"


def test_there_is_one_for_each_event_loop() -> None:
    async def main() -> Tick:
        first = current_tick()
        seen: list[Tick] = []

        async def another_task() -> None:
            await trio.lowlevel.checkpoint()
            seen.append(current_tick())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(another_task)
        assert seen == [first]
        return first

    assert trio.run(main) is not trio.run(main)


def test_where_there_is_no_event_loop_there_is_no_tick() -> None:
    with pytest.raises(RuntimeError):
        current_tick()
