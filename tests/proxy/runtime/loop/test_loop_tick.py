"""proxy.runtime.loop.tick: everybody who was touched in a turn speaks once, at its end; outside of one, at once."""

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


def test_each_speaks_once_a_turn_in_the_order_of_the_first_touch() -> None:
    said: list[str] = []
    turn, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    with turn:
        for who in (b, a, b, b):
            turn.schedule_flush(who)
        assert said == []
    assert said == ["b", "a"]
    with turn:
        pass
    assert said == ["b", "a"], "said once"
    with turn:
        turn.schedule_flush(a)
    assert said == ["b", "a", "a"]


def test_outside_of_a_turn_they_speak_at_once() -> None:
    said: list[str] = []
    turn, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    turn.schedule_flush(a)
    assert said == ["a"]
    turn.schedule_flush(b)
    turn.schedule_flush(a)
    assert said == ["a", "b", "a"]
    with turn:
        turn.schedule_flush(b)
        assert said == ["a", "b", "a"], "and a turn that follows is one"
    assert said == ["a", "b", "a", "b"]


def test_a_turn_within_a_turn_is_part_of_it() -> None:
    said: list[str] = []
    turn, a, b = Tick(), Speaker(said, "a"), Speaker(said, "b")
    with turn:
        turn.schedule_flush(a)
        with turn:
            turn.schedule_flush(b)
            with turn:
                turn.schedule_flush(a)
        assert said == []
    assert said == ["a", "b"]
    turn.schedule_flush(a)
    assert said == ["a", "b", "a"], "the turn is over"


def test_who_is_touched_by_another_ones_speech_speaks_in_the_same_turn() -> None:
    said: list[str] = []
    turn, last = Tick(), Speaker(said, "last")

    class Chained(Speaker):
        def flush(self) -> None:
            super().flush()
            turn.schedule_flush(last)

    with turn:
        turn.schedule_flush(Chained(said, "first"))
        turn.schedule_flush(Chained(said, "second"))
    assert said == ["first", "second", "last"]
    turn.schedule_flush(Chained(said, "alone"))
    assert said == ["first", "second", "last", "alone", "last"]


def test_a_turn_within_a_speech_keeps_the_order() -> None:
    """A push may read frames that waited for room, which is a turn, too."""
    said: list[str] = []
    turn, last = Tick(), Speaker(said, "last")

    class Reading(Speaker):
        def flush(self) -> None:
            with turn:
                turn.schedule_flush(last)
            super().flush()

    with turn:
        turn.schedule_flush(Reading(said, "first"))
        turn.schedule_flush(Speaker(said, "second"))
    assert said == ["first", "second", "last"]


def test_a_defect_of_one_keeps_no_other_from_speaking() -> None:
    said: list[str] = []
    turn = Tick()

    class Broken(Speaker):
        def flush(self) -> None:
            raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs, turn:
        for who in (Speaker(said, "before"), Broken(said, ""), Speaker(said, "behind")):
            turn.schedule_flush(who)
    assert said == ["before", "behind"]
    assert [entry["log_level"] for entry in logs] == ["error"]
    with structlog.testing.capture_logs() as logs:
        turn.schedule_flush(Broken(said, ""))
    assert [entry["log_level"] for entry in logs] == ["error"], "nor is it raised to who spoke outside of a turn"


def test_a_turn_that_ends_with_an_exception_is_a_turn() -> None:
    """What one connection's callback raises must not keep back what others have to say."""
    said: list[str] = []
    turn = Tick()

    def fail() -> None:
        with turn:
            turn.schedule_flush(Speaker(said, "a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert said == ["a"]
    turn.schedule_flush(Speaker(said, "b"))
    assert said == ["a", "b"]


async def test_in_a_turn_the_clock_is_looked_at_once(autojump_clock: trio.testing.MockClock) -> None:
    turn = Tick()
    assert turn.now == trio.current_time()
    autojump_clock.jump(1)
    assert turn.now == trio.current_time()
    with turn:
        began = turn.now
        assert began == trio.current_time()
        autojump_clock.jump(1)
        with turn:
            assert turn.now == began
        assert turn.now == began
    assert turn.now == began + 1 == trio.current_time()
    with turn:
        assert turn.now == began + 1, "each turn anew"


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


def test_where_there_is_no_event_loop_there_is_no_turn() -> None:
    with pytest.raises(RuntimeError):
        current_tick()
