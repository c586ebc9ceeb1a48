"""Records: torn at every byte, flipped at every byte."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analytics.spool import records
from analytics.spool.records import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Record,
    check_segment_header,
    pack_record,
    pack_segment_header,
    scan_records,
)

BODIES = [b"first", b"", os.urandom(300), b"\xf5PRW" * 5]


def everything(data: bytes) -> list[Record | Damage]:
    return list(scan_records(io.BytesIO(data), 0, len(data)))


def packed(bodies: list[bytes]) -> bytes:
    return b"".join(pack_record(number % 2 + 1, 1000 + number, one) for number, one in enumerate(bodies))


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=200))))
def test_packed_records_are_read(made: list[tuple[int, int, bytes]]) -> None:
    data = b"".join(pack_record(*one) for one in made)
    found = everything(data)
    assert [(one.version, one.received_at_unix_ms, one.body) for one in found if isinstance(one, Record)] == made
    assert [one.offset for one in found] == [0, *(one.next_offset for one in found)][: len(found)]


def test_cut_at_every_byte_the_whole_records_stay_and_the_rest_is_told() -> None:
    data = packed(BODIES)
    ends = [one.next_offset for one in everything(data)]
    for length in range(len(data)):
        found = everything(data[:length])
        whole = [one for one in found if isinstance(one, Record)]
        assert [one.body for one in whole] == BODIES[: sum(end <= length for end in ends)]
        last = whole[-1].next_offset if whole else 0
        damages = [one for one in found if isinstance(one, Damage)]
        assert bool(damages) == (last < length)
        assert all(one.offset >= last for one in damages)


def test_every_flipped_byte_costs_its_own_record_and_is_told() -> None:
    bodies = [os.urandom(20), os.urandom(30), os.urandom(10)]
    data = packed(bodies)
    ends = [one.next_offset for one in everything(data)]
    for position in range(len(data)):
        hit = sum(end <= position for end in ends)
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            found = everything(bytes(damaged))
            whole = [one.body for one in found if isinstance(one, Record)]
            assert whole == bodies[:hit] + bodies[hit + 1 :], position
            assert [type(one) for one in found].count(Damage) == 1


def test_a_record_within_a_damaged_records_body_is_not_taken_for_one() -> None:
    inner = pack_record(1, 5, b"forged")
    data = bytearray(packed([b"x" + inner + b"y", b"next"]))
    data[-len(b"next") - records.RECORD_HEADER_BYTES - 1] ^= 1  # the last byte of the first body
    found = everything(bytes(data))
    assert [type(one) for one in found] == [Damage, Record]


def test_the_next_record_is_found_across_the_chunks_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_SEARCH_BYTES", 7)
    for rubbish in range(1, 40):
        found = everything(b"r" * rubbish + pack_record(1, 1, b"kept"))
        assert [type(one) for one in found] == [Damage, Record]
        assert found[0].next_offset == rubbish


def test_a_length_that_cannot_be_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed([b"long body", b"kept"])
    monkeypatch.setattr(records, "BODY_BYTES_MAX", 8)
    assert [type(one) for one in everything(data)] == [Damage, Record]
    with pytest.raises(ValueError, match="9 bytes"):
        pack_record(1, 1, b"long body")


def test_a_file_that_became_shorter_is_damage() -> None:
    data = packed([b"a", b"b"])
    found = list(scan_records(io.BytesIO(data[:-1]), 0, len(data)))
    assert [type(one) for one in found] == [Record, Damage]
    found = list(scan_records(io.BytesIO(b""), 0, 10))
    assert found == [Damage(0, 10, "the record's header is cut off")]


def test_segment_headers() -> None:
    header = pack_segment_header(7)
    assert len(header) == SEGMENT_HEADER_BYTES
    assert check_segment_header(header + b"more", 7) is None
    assert check_segment_header(header, 8) == "its header says that it is segment 7"
    assert check_segment_header(header[:-1], 7) == "its header is cut off"
    for position in range(len(header)):
        flipped = bytearray(header)
        flipped[position] ^= 1
        assert check_segment_header(bytes(flipped), 7) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "FORMAT", 2)
        newer = pack_segment_header(7)
    assert check_segment_header(newer, 7) == "its format is 2, and this program knows 1"


def test_golden_bytes() -> None:
    """The format on the disk: an upgrade must read what is there."""
    assert pack_segment_header(1).hex() == "50525753504f4f4c" + "0100" + "0000" + "0100000000000000" + "5e97a7ad"
    head = ["f5505257", "04000000", "00c02cc899010000", "02", "000000", "b20ba8db", "398341ea", "626f6479"]
    assert pack_record(2, 1_760_000_000_000, b"body").hex() == "".join(head)
