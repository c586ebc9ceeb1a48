"""proto.lookup_answers: an answer that is known again is the one that protobuf would read; clients get it whole."""

from __future__ import annotations

import struct

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from pulsar_bytes import command, decoded_frame, field, fields, frame, varint

from proto.lookup_answers import TEMPLATE_BYTES_MAX, TEMPLATES_MAX, AnswerTemplates, BrokerAnswer, ClientAnswer
from proto.lookup_kinds import response_request_id, set_response_request_id
from proto.lookup_requests import PROXY_ID_MAX, PROXY_ID_MIN
from proto.pulsar_pb2 import BaseCommand

LOOKUP, METADATA, TOPICS, SCHEMA, ERROR = 24, 22, 33, 35, 14
ID_FIELD = {LOOKUP: 4, METADATA: 2, TOPICS: 1, SCHEMA: 1, ERROR: 1}
FIRST, OTHER = PROXY_ID_MIN + 4711, 2**34 + 12345
URL = "pulsar://b0:6650"


def connect(number: int = FIRST, url: str = URL, *more: tuple[int, int | bytes | str]) -> bytes:
    """A broker's answer to a LOOKUP, in the order in which brokers write it."""
    return command(LOOKUP, fields((1, url), (3, 1), (4, number), (5, 1), *more))


FRAME = frame(connect())
ID_AT = FRAME.index(varint(FIRST))


def known(*commands: bytes) -> tuple[AnswerTemplates, list[BrokerAnswer]]:
    shapes, answers = AnswerTemplates(), [BrokerAnswer(BaseCommand.FromString(one)) for one in commands]
    for one, answer in zip(commands, answers, strict=True):
        shapes.learn_answer(one, answer)
    return shapes, answers


# ---- known again


def test_an_answer_is_known_again_by_all_but_its_id() -> None:
    shapes, [answer] = known(connect())
    data = b"before" + frame(connect(OTHER)) + b"behind"
    assert shapes.find_answer(data, 6) == (answer, varint(OTHER), len(data) - 6)


def test_answers_of_several_brokers_and_kinds_are_told_apart() -> None:
    commands = [
        connect(),
        connect(url="pulsar://b1:6650"),
        connect(url="pulsar://broker-10:6650"),
        command(METADATA, fields((1, 4), (2, FIRST), (3, 0))),
        command(SCHEMA, fields((1, FIRST), (5, b"v"))),
        command(METADATA, fields((1, 4000), (2, FIRST), (3, 0))),
    ]
    shapes, answers = known(*commands)
    for one, answer in zip(commands, answers, strict=True):
        found = shapes.find_answer(frame(one), 0)
        assert found is not None
        assert found[0] is answer


@pytest.mark.parametrize(
    "answer", [connect(), command(LOOKUP, fields((1, URL), (3, 1), (4, FIRST)))], ids=["", "id last"]
)
def test_a_frame_that_is_not_all_there_is_not_known(answer: bytes) -> None:
    shapes, _ = known(answer)
    data = frame(answer)
    assert [end for end in range(len(data)) if shapes.find_answer(data[:end], 0) is not None] == []


@pytest.mark.parametrize("at", sorted({*range(len(FRAME))} - {*range(ID_AT, ID_AT + 5)}))
def test_any_other_byte_makes_it_another_answer(at: int) -> None:
    shapes, _ = known(connect())
    data = bytearray(FRAME)
    data[at] ^= 1
    assert shapes.find_answer(bytes(data), 0) is None


NO_NUMBERS = {
    "an id of one byte and another field": b"\x07\x3a\x02hi",
    "an id of one byte and a second id": b"\x07" + b"\x20" + varint(2**20),
    "an id of four bytes": b"\x81\x82\x83\x04\x28",
    "an id of five bytes that four would hold": b"\x81\x82\x83\x84\x00",
    "an id of more than five bytes": b"\x81\x82\x83\x84\x85",
}


@pytest.mark.parametrize("place", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_an_answer_without_a_proxy_id_in_its_place_is_not_a_known_answer(place: bytes) -> None:
    shapes, _ = known(connect())
    assert len(place) == 5
    assert shapes.find_answer(FRAME[:ID_AT] + place + FRAME[ID_AT + 5 :], 0) is None


@given(place=st.binary(min_size=5, max_size=5))
@example(place=b"\x80\x80\x80\x80\x01")
def test_only_an_id_of_ours_may_stand_in_the_ids_place(place: bytes) -> None:
    shapes, _ = known(connect())
    value = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(place))
    ours = PROXY_ID_MIN <= value <= PROXY_ID_MAX and varint(value) == place
    assert (shapes.find_answer(FRAME[:ID_AT] + place + FRAME[ID_AT + 5 :], 0) is not None) is ours


def test_with_a_payload_it_is_another_frame() -> None:
    shapes, _ = known(connect())
    assert shapes.find_answer(frame(connect(), b"payload"), 0) is None


def test_of_two_that_have_their_ids_elsewhere_the_one_does_not_pass_for_the_other() -> None:
    """They are as long as each other; a broker that writes both is parsed more often, and no more."""
    first = connect(FIRST, "pulsar://b0:6650/")
    second = command(LOOKUP, fields((1, "pulsar://b0:665"), (3, 1), (4, FIRST), (5, 1), (8, 1)))
    assert len(first) == len(second)
    shapes, _ = known(first, second, first, second)
    for one in (first, second):
        found = shapes.find_answer(frame(one), 0)
        assert found is None or (found[1], found[0].command) == (varint(FIRST), BaseCommand.FromString(one))
    assert shapes.find_answer(frame(second), 0) is not None


MIRROR = 0x7F << 14 | 0x7F << 21 | 0x7E << 28
"""Moved by two bytes and inverted, its varint differs from itself in as few bytes as an id from another."""

NOT_LEARNED = {
    "an id before the other fields that looks like them": command(LOOKUP, fields((1, URL), (4, MIRROR), (3, 1))),
    "an id of one byte": connect(7),
    "of four": connect(PROXY_ID_MIN - 1),
    "of six": connect(PROXY_ID_MAX + 1),
    "of ten": connect(2**64 - 1),
    "fields in another order": command(LOOKUP, fields((4, FIRST), (1, URL), (3, 1))),
    "an id twice": command(LOOKUP, fields((1, URL), (3, 1), (4, FIRST), (4, FIRST))),
    "a message twice": connect() + field(LOOKUP, fields((4, FIRST + 1))),
    "too long": connect(FIRST, URL, (7, "x" * TEMPLATE_BYTES_MAX)),
    "no answer": command(3, fields((1, "x"))),
}


@pytest.mark.parametrize("data", NOT_LEARNED.values(), ids=NOT_LEARNED)
def test_an_answer_in_an_unusual_encoding_is_parsed_each_time(data: bytes) -> None:
    shapes, _ = known(data)
    assert shapes.find_answer(frame(data), 0) is None


def test_a_bounded_number_is_known() -> None:
    shapes, _ = known(*(connect(FIRST, f"pulsar://b{number}:6650") for number in range(TEMPLATES_MAX + 1)))
    found = [
        shapes.find_answer(frame(connect(OTHER, f"pulsar://b{number}:6650")), 0) for number in range(TEMPLATES_MAX + 1)
    ]
    assert 0 < sum(one is not None for one in found) <= TEMPLATES_MAX


values = st.one_of(st.integers(0, 3), st.integers(0, 2**40), st.sampled_from(["", "t", URL, "\x20"]))
answers = st.builds(
    lambda kind, number, before, behind: command(kind, fields(*before, (ID_FIELD[kind], number), *behind)),
    st.sampled_from([LOOKUP, METADATA, SCHEMA, ERROR]),
    st.integers(PROXY_ID_MIN, PROXY_ID_MAX) | st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(1, 12), values), max_size=4),
    st.lists(st.tuples(st.integers(1, 40), values), max_size=4),
)


@given(first=answers, second=answers, number=st.integers(PROXY_ID_MIN, PROXY_ID_MAX))
def test_a_known_answer_is_equal_to_what_protobuf_parses(first: bytes, second: bytes, number: int) -> None:
    try:
        shapes, _ = known(first, second)
    except DecodeError:  # such an answer never gets as far as here
        return
    for learned in (first, second):
        plain = BaseCommand.FromString(learned)
        assert plain.type
        set_response_request_id(plain, number)
        for data in (plain.SerializePartialToString(), learned):
            found = shapes.find_answer(frame(data), 0)
            if found is not None:
                answer, request_id, end = found
                read = BaseCommand.FromString(data)
                assert end == len(frame(data))
                assert request_id == varint(response_request_id(read) or 0)
                ours = BaseCommand()
                ours.CopyFrom(answer.command)
                for one in (ours, read):
                    set_response_request_id(one, 0)
                assert ours == read


# ---- for clients


@pytest.mark.parametrize("kind", ID_FIELD)
@pytest.mark.parametrize("request_id", [0, 127, 128, 2**32, 2**64 - 1])
def test_each_client_gets_the_answer_under_its_own_id_and_else_unchanged(kind: int, request_id: int) -> None:
    others = [(number, f"field {number}") for number in (30, 31)]
    answer = ClientAnswer(BaseCommand.FromString(command(kind, fields((ID_FIELD[kind], FIRST), *others))))
    for _ in range(2):
        expected = kind, {ID_FIELD[kind]: request_id, 30: b"field 30", 31: b"field 31"}
        assert decoded_frame(answer.frame_for(varint(request_id))) == expected


@pytest.mark.parametrize("size", [0, 100, 115, 120, 125, 130, 20_000])
def test_answers_of_every_size(size: int) -> None:
    answer = ClientAnswer(BaseCommand.FromString(connect(FIRST, "x" * size)))
    for request_id in (7, 2**63):
        kind, found = decoded_frame(answer.frame_for(varint(request_id)))
        assert (kind, found) == (LOOKUP, {1: b"x" * size, 3: 1, 4: request_id, 5: 1})


def test_a_field_beside_the_message_passes_too() -> None:
    answer = ClientAnswer(BaseCommand.FromString(connect() + field(200, "of the future")))
    data = answer.frame_for(b"\x07")
    total, size = struct.unpack(">II", data[:8])
    assert (total, size) == (len(data) - 4, len(data) - 8)
    expected = BaseCommand.FromString(connect(7) + field(200, "of the future"))
    assert BaseCommand.FromString(data[8:]).SerializeToString() == expected.SerializeToString()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (connect(), None),
        (command(LOOKUP, fields((3, 2), (4, FIRST), (6, 11))), 11),
        (command(ERROR, fields((1, FIRST), (2, 4), (3, "no"))), 4),
        (command(SCHEMA, fields((1, FIRST), (2, 0))), 0),
    ],
)
def test_which_error_it_is(data: bytes, error: int | None) -> None:
    assert ClientAnswer(BaseCommand.FromString(data)).error == error


def test_a_command_that_answers_no_request_cannot_be_a_client_answer() -> None:
    with pytest.raises(ValueError, match="answers no request"):
        ClientAnswer(BaseCommand(type=BaseCommand.PING, ping={}))
