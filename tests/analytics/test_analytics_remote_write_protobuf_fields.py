"""Protobuf's wire format in numpy: against a reading of the specification, one field at a time."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.remote_write import protobuf_fields
from analytics.remote_write.bounds import Bounds, Budget
from analytics.remote_write.errors import BoundError, DecodeError
from analytics.remote_write.protobuf_fields import FieldColumns, padded_buffer, read_fields

Field = tuple[int, int, bytes]  # number, kind, payload


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encoded(message: list[Field]) -> bytes:
    parts = []
    for number, kind, payload in message:
        length = varint(len(payload)) if kind == 2 else b""
        parts.append(varint(number << 3 | kind) + length + payload)
    return b"".join(parts)


def parse(messages: list[bytes], bounds: Bounds | None = None) -> tuple[bytes, protobuf_fields.Fields]:
    blob = b"".join(messages)
    ends = np.cumsum([len(one) for one in messages], dtype=np.int64)
    starts = ends - np.array([len(one) for one in messages], dtype=np.int64)
    return blob, read_fields(padded_buffer(blob)[1], starts, ends, None if bounds is None else Budget(bounds))


def rows(blob: bytes, found: FieldColumns) -> list[tuple[int, bytes, int]]:
    columns = zip(found.owner.tolist(), found.begin.tolist(), found.end.tolist(), found.value.tolist(), strict=True)
    return [(owner, blob[begin:end], value) for owner, begin, end, value in columns]


numbers = st.integers(1, 4) | st.integers(1, 2**29 - 1)
field_values = st.one_of(
    st.tuples(numbers, st.just(0), st.integers(0, 2**64 - 1).map(varint)),
    st.tuples(numbers, st.just(1), st.binary(min_size=8, max_size=8)),
    st.tuples(numbers, st.just(2), st.binary(max_size=200)),
    st.tuples(numbers, st.just(5), st.binary(min_size=4, max_size=4)),
)


@settings(deadline=None)
@given(st.lists(st.lists(field_values, max_size=5), max_size=40))
def test_every_field_is_found_where_it_is(messages: list[list[Field]]) -> None:
    blob, found = parse([encoded(message) for message in messages])
    for number in (1, 2, 3, 4):
        for kind in (0, 1, 2, 5):
            expected = [
                (owner, payload, _signed(payload) if kind == 0 else 0)
                for owner, message in enumerate(messages)
                for one, its_kind, payload in message
                if (one, its_kind) == (number, kind)
            ]
            assert rows(blob, found.select(number, kind)) == expected
    run = found.find_runs(1, 2)
    at = 0
    for owner, message in enumerate(messages):
        places = [place for place, one in enumerate(message) if one[:2] == (1, 2)]
        assert run.size[owner] == sum(len(encoded([message[place]])) for place in places)
        if places:
            assert run.begin[owner] == at + len(encoded(message[: places[0]]))
            assert run.end[owner] == at + len(encoded(message[: places[-1] + 1]))
        at += len(encoded(message))


def _signed(payload: bytes) -> int:
    value = sum((byte & 0x7F) << 7 * position for position, byte in enumerate(payload))
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("copies", [1, 40])  # alone, and in company
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a", "ends within"),
        (b"\x0a\x05abc", "ends within"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "ends within"),
        (b"\x09abc", "ends within"),
        (b"\x0dab", "ends within"),
        (b"\x08", "ends within"),
        (b"\x08\x80", "ends within"),
        (b"\x80", "ends within|number"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "more than ten bytes"),
        (b"\x0b", "wire type"),
        (b"\x0c", "wire type"),
        (b"\x0e", "wire type"),
        (b"\x00\x01", "number"),
        (b"\xff\xff\xff\xff\xff\x00\x01", "number|wire type"),
    ],
)
def test_bytes_that_are_no_message_are_refused(copies: int, data: bytes, why: str) -> None:
    good = encoded([(1, 2, b"good")])
    with pytest.raises(DecodeError, match=why):
        parse([good + data] * copies)


@pytest.mark.parametrize("copies", [1, 20])
def test_the_number_of_a_messages_fields_is_bounded(copies: int) -> None:
    bounds = Bounds(series_fields=50)
    parse([encoded([(1, 0, b"\x01")] * 50)] * copies, bounds)
    with pytest.raises(BoundError, match=r"more than 50 fields .*limits.max_series_fields"):
        parse([encoded([(1, 0, b"\x01")] * 51)] * copies, bounds)
    with pytest.raises(BoundError, match="50 fields"):
        parse([encoded([(1, 0, b"\x01")] * 51), *[encoded([(1, 0, b"\x01")] * 20)] * copies], bounds)


@pytest.mark.parametrize("copies", [1, 20])
def test_the_number_of_all_fields_is_bounded(copies: int) -> None:
    """By what is left of one budget: for messages that are read together, and for the last ones alone."""
    bounds = Bounds(fields=50 * copies)
    parse([encoded([(1, 0, b"\x01")] * 50)] * copies, bounds)
    with pytest.raises(BoundError, match=r"more than \d+ fields and label references .*limits.max_fields"):
        parse([encoded([(1, 0, b"\x01")] * 51)] * copies, bounds)


def test_fields_are_counted_before_the_parser_sees_them() -> None:
    series, symbol, other = encoded([(5, 2, b"")]), encoded([(4, 2, b"x" * 300)]), encoded([(9, 0, varint(2**60))])
    counted = {5 << 3 | 2: "series", 4 << 3 | 2: "symbols"}
    good = series * 5 + symbol * 4 + other * 3 + b"\xaa\x00\x00"  # a tag of two bytes is the same tag
    protobuf_fields.count_fields(good, Bounds(series=6, symbols=4, fields=13), counted)
    for bounds, name in (
        (Bounds(series=5), "max_series\\)"),
        (Bounds(symbols=3), "max_symbols"),
        (Bounds(fields=12), "max_fields"),
    ):
        with pytest.raises(BoundError, match=name):
            protobuf_fields.count_fields(good, bounds, counted)
    with pytest.raises(DecodeError, match="groups are not taken"):
        protobuf_fields.count_fields(good + b"\x0b", Bounds(), counted)
    for end in range(len(good)):
        with contextlib.suppress(DecodeError):
            protobuf_fields.count_fields(good[:end], Bounds(), counted)


@given(st.lists(st.integers(0, 2**28 - 1) | st.integers(0, 2**64 - 1), max_size=60))
def test_packed_numbers(numbers: list[int]) -> None:
    data = b"".join(map(varint, numbers))
    found, last = protobuf_fields.read_packed_varints(np.frombuffer(data, dtype=np.uint8))
    assert found.tolist() == [number if number < 2**28 else -1 for number in numbers]
    assert last.tolist() == [len(b"".join(map(varint, numbers[: one + 1]))) - 1 for one in range(len(numbers))]


def test_packed_numbers_that_end_within_one() -> None:
    for data in (b"\x80", b"\x01\x80"):
        with pytest.raises(DecodeError):
            protobuf_fields.read_packed_varints(np.frombuffer(data, dtype=np.uint8))


@given(st.lists(st.floats(allow_nan=True), max_size=20), st.integers(0, 7))
def test_doubles_at_any_offset(values: list[float], shift: int) -> None:
    column = np.array(values, dtype="<f8")
    _, data = padded_buffer(bytes(shift) + column.tobytes())
    found = protobuf_fields.read_doubles(data, np.arange(len(values), dtype=np.int64) * 8 + shift)
    assert found.tobytes() == column.tobytes()
