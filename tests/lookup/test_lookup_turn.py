"""lookup.turn: everybody who was touched speaks once, at the end."""

import structlog.testing

from lookup.turn import Turn


class Speaker:
    def __init__(self, said: list[str], name: str) -> None:
        self._said = said
        self._name = name

    def push(self) -> None:
        self._said.append(self._name)


def test_each_speaks_once_a_turn_in_the_order_of_the_first_touch() -> None:
    said: list[str] = []
    turn, a, b = Turn(), Speaker(said, "a"), Speaker(said, "b")
    for who in (b, a, b, b):
        turn.touch(who)
    assert said == []
    turn.end()
    assert said == ["b", "a"]
    turn.end()
    assert said == ["b", "a"], "said once"
    turn.touch(a)
    turn.end()
    assert said == ["b", "a", "a"]


def test_who_is_touched_by_another_ones_speech_speaks_in_the_same_turn() -> None:
    said: list[str] = []
    turn, last = Turn(), Speaker(said, "last")

    class Chained(Speaker):
        def push(self) -> None:
            super().push()
            turn.touch(last)

    turn.touch(Chained(said, "first"))
    turn.touch(Chained(said, "second"))
    turn.end()
    assert said == ["first", "second", "last"]


def test_a_defect_of_one_keeps_no_other_from_speaking() -> None:
    said: list[str] = []
    turn = Turn()

    class Broken(Speaker):
        def push(self) -> None:
            raise ZeroDivisionError

    for who in (Speaker(said, "before"), Broken(said, ""), Speaker(said, "behind")):
        turn.touch(who)
    with structlog.testing.capture_logs() as logs:
        turn.end()
    assert said == ["before", "behind"]
    assert [entry["log_level"] for entry in logs] == ["error"]
