"""lookup.requests.envelope_reply: each answer once, in parts of bounded size, the last one marked."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from lookup.requests.envelope_reply import PART_BYTES_MAX, EnvelopeReply
from proto.rpc_pb2 import EnvelopeResponse
from proxy.runtime.loop.tick import Tick, current_tick


class Reply:
    """What was said, part by part."""

    def __init__(self) -> None:
        self.parts: list[tuple[EnvelopeResponse, bool]] = []
        self.sent = trio.Event()
        self.broken_off = ""

    def __call__(self, part: bytes, more: bool) -> None:
        self.parts.append((EnvelopeResponse.FromString(part), more))

    async def wait_until_sent(self) -> None:
        await self.sent.wait()

    def close_connection(self, reason: str) -> None:
        self.broken_off = reason

    @property
    def indices(self) -> list[list[int]]:
        return [list(part.answered) for part, _ in self.parts]

    @property
    def more(self) -> list[bool]:
        return [more for _, more in self.parts]


@pytest.fixture
async def turn() -> Tick:
    return current_tick()


@pytest.fixture
def reply() -> Reply:
    return Reply()


async def test_answers_of_one_turn_travel_together(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(4, reply)
    with turn:
        answers.add_answer(2, b"two")
        answers.add_answer(0, b"zero")
        assert reply.parts == [], "not before the turn ends"
    assert (reply.indices, reply.more) == ([[2, 0]], [True])
    with turn:
        answers.add_answer(3, b"three")
    with turn:
        answers.add_answer(1, b"one")
    assert (reply.indices, reply.more) == ([[2, 0], [3], [1]], [True, True, False])
    assert [part.frames for part, _ in reply.parts] == [b"twozero", b"three", b"one"]
    with turn:
        pass
    assert len(reply.parts) == 3


async def test_outside_of_a_turn_an_answer_leaves_at_once(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(3, reply)
    answers.add_answer(2, b"two")
    answers.add_refusal(0, "INVALID_REQUEST", "why")
    answers.add_answer(1, b"one")
    assert (reply.indices, reply.more) == ([[2], [], [1]], [True, True, False])


async def test_a_bad_request_is_refused_and_the_others_are_answered(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(3, reply)
    with turn:
        answers.add_answer(0, b"zero")
        answers.add_refusal(1, "INVALID_REQUEST", "why")
        answers.add_answer(2, b"two")
    [(part, more)] = reply.parts
    assert not more
    assert part.error == EnvelopeResponse.NONE, "the Envelope itself is accepted"
    assert (list(part.answered), part.frames) == ([0, 2], b"zerotwo")
    [bad] = part.refused
    assert (bad.index, bad.error, bad.error_message) == (1, EnvelopeResponse.INVALID_REQUEST, "why")


async def test_a_part_holds_as_much_as_it_may(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(5, reply)
    with turn:
        for index in range(5):
            answers.add_answer(index, b"x" * (PART_BYTES_MAX // 2))
    assert (reply.indices, reply.more) == ([[0, 1], [2, 3], [4]], [True, True, False])


async def test_a_large_answer_travels_alone(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(4, reply)
    with turn:
        for index, size in enumerate((1, 10 * PART_BYTES_MAX, 1, 1)):
            answers.add_answer(index, b"x" * size)
    assert (reply.indices, reply.more) == ([[0], [1], [2, 3]], [True, True, False])


async def test_where_answers_are_missing_the_last_part_of_a_turn_is_not_the_last(turn: Tick, reply: Reply) -> None:
    answers = EnvelopeReply(3, reply)
    with turn:
        for index in range(2):
            answers.add_answer(index, b"x" * PART_BYTES_MAX)
    assert (reply.indices, reply.more) == ([[0], [1]], [True, True])


@settings(deadline=None)
@given(turns=st.lists(st.lists(st.integers(0, PART_BYTES_MAX * 2), min_size=1, max_size=5), min_size=1, max_size=4))
def test_whatever_sizes_come_when_all_arrive_once_in_order_and_in_bounds(turns: list[list[int]]) -> None:
    async def main() -> None:
        turn, reply = current_tick(), Reply()
        sizes = [size for one in turns for size in one]
        answers = EnvelopeReply(len(sizes), reply)
        numbered = iter(enumerate(sizes))
        for one in turns:
            with turn:
                for _ in one:
                    index, size = next(numbered)
                    answers.add_answer(index, b"x" * size)
        assert [one for part in reply.indices for one in part] == list(range(len(sizes)))
        assert reply.more == [True] * (len(reply.parts) - 1) + [False]
        for part, _ in reply.parts:
            found = [sizes[index] for index in part.answered]
            assert len(part.frames) == sum(found)
            assert sum(found) <= PART_BYTES_MAX or len([size for size in found if size]) == 1

    trio.run(main)


async def test_a_caller_that_takes_its_answers_keeps_its_connection(reply: Reply, nursery: trio.Nursery) -> None:
    answers = EnvelopeReply(1, reply)
    answers.add_answer(0, b"large")
    nursery.start_soon(answers.wait_until_sent, 5.0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(nursery.child_tasks) == 1
    reply.sent.set()
    await trio.testing.wait_all_tasks_blocked()
    assert not nursery.child_tasks
    assert not reply.broken_off


async def test_a_forwarder_that_takes_no_answers_loses_its_connection(
    reply: Reply, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: it would keep the room of others' large answers."""
    answers = EnvelopeReply(1, reply)
    answers.add_answer(0, b"large")
    await answers.wait_until_sent(5.0)
    assert trio.current_time() == pytest.approx(5.0)
    assert reply.broken_off
