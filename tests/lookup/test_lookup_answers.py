"""lookup.answers: each answer once, in parts of bounded size, the last one marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup.answers import PART_BYTES_MAX, Answers
from lookup.turn import Turn
from proto.rpc_pb2 import EnvelopeError, EnvelopeResponse


class Reply:
    """What was said, part by part."""

    def __init__(self) -> None:
        self.parts: list[tuple[EnvelopeResponse, bool]] = []

    def __call__(self, part: bytes, more: bool) -> None:
        self.parts.append((EnvelopeResponse.FromString(part), more))

    @property
    def indices(self) -> list[list[int]]:
        return [[embedded.index for embedded in part.responses] for part, _ in self.parts]

    @property
    def more(self) -> list[bool]:
        return [more for _, more in self.parts]


@pytest.fixture
def turn() -> Turn:
    return Turn()


@pytest.fixture
def reply() -> Reply:
    return Reply()


def test_answers_of_one_turn_travel_together(turn: Turn, reply: Reply) -> None:
    answers = Answers(4, reply, turn)
    answers.put(2, b"two")
    answers.put(0, b"zero")
    assert reply.parts == [], "not before the turn ends"
    turn.end()
    assert (reply.indices, reply.more) == ([[2, 0]], [True])
    answers.put(3, b"three")
    turn.end()
    answers.put(1, b"one")
    turn.end()
    assert (reply.indices, reply.more) == ([[2, 0], [3], [1]], [True, True, False])
    assert [embedded.response for part, _ in reply.parts for embedded in part.responses] == [
        b"two",
        b"zero",
        b"three",
        b"one",
    ]
    turn.end()
    assert len(reply.parts) == 3


def test_one_bad_request_is_refused_among_good_ones(turn: Turn, reply: Reply) -> None:
    answers = Answers(3, reply, turn)
    answers.put(0, b"zero")
    answers.refuse(1, "ENVELOPE_INVALID_REQUEST", "why")
    answers.put(2, b"two")
    turn.end()
    [(part, more)] = reply.parts
    assert not more
    assert part.error == EnvelopeError.ENVELOPE_OK, "the Envelope itself is accepted"
    good, bad, also_good = part.responses
    assert (good.error, good.response, also_good.response) == (EnvelopeError.ENVELOPE_OK, b"zero", b"two")
    assert (bad.index, bad.error, bad.error_message, bad.response) == (
        1,
        EnvelopeError.ENVELOPE_INVALID_REQUEST,
        "why",
        b"",
    )


def test_a_part_holds_as_much_as_it_may(turn: Turn, reply: Reply) -> None:
    answers = Answers(5, reply, turn)
    for index in range(5):
        answers.put(index, b"x" * (PART_BYTES_MAX // 2))
    turn.end()
    assert (reply.indices, reply.more) == ([[0, 1], [2, 3], [4]], [True, True, False])


def test_a_large_answer_travels_alone(turn: Turn, reply: Reply) -> None:
    answers = Answers(4, reply, turn)
    for index, size in enumerate((1, 10 * PART_BYTES_MAX, 1, 1)):
        answers.put(index, b"x" * size)
    turn.end()
    assert (reply.indices, reply.more) == ([[0], [1], [2, 3]], [True, True, False])


def test_where_answers_are_missing_the_last_part_of_a_turn_is_not_the_last(turn: Turn, reply: Reply) -> None:
    answers = Answers(3, reply, turn)
    for index in range(2):
        answers.put(index, b"x" * PART_BYTES_MAX)
    turn.end()
    assert (reply.indices, reply.more) == ([[0], [1]], [True, True])


@given(turns=st.lists(st.lists(st.integers(0, PART_BYTES_MAX * 2), min_size=1, max_size=5), min_size=1, max_size=4))
def test_whatever_sizes_come_when_all_arrive_once_in_order_and_in_bounds(turns: list[list[int]]) -> None:
    turn, reply = Turn(), Reply()
    count = sum(map(len, turns))
    answers = Answers(count, reply, turn)
    index = 0
    for sizes in turns:
        for size in sizes:
            answers.put(index, b"x" * size)
            index += 1
        turn.end()
    assert [one for part in reply.indices for one in part] == list(range(count))
    assert reply.more == [True] * (len(reply.parts) - 1) + [False]
    for part, _ in reply.parts:
        sizes = [len(embedded.response) for embedded in part.responses]
        assert sum(sizes) <= PART_BYTES_MAX or len([size for size in sizes if size]) == 1
