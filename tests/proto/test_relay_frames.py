"""proto.relay_frames: boundaries in streams that come in any pieces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import commands
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected
from proto.relay_frames import (
    ALL_TYPES,
    COUNTED_BYTES,
    HEADER_BYTES,
    INCOMPLETE,
    NO_STOP,
    SLOW_FRAMES_MAX,
    ClientFrameScanner,
    FrameCutter,
    FrameScanner,
    FrameSizeInvalid,
    frame_bytes_max,
    messages_of_send,
)

MAX = 1000
ANSWER = BaseCommand.AUTH_RESPONSE


def frame(command_type: int, payload: bytes = b"") -> bytes:
    return encode_frame(bytes([8, command_type]), payload)


def send(*fields: bytes, payload: bytes = b"") -> bytes:
    body = b"".join(fields)
    return encode_frame(b"\x08\x06\x32" + bytes([len(body)]) + body, payload)


def walk(stops: set[int] | None = None, counts: int = 0) -> FrameScanner:
    return FrameScanner(frame_bytes_max=MAX, stop_types=frozenset(stops or ()), counted_type=counts)


FRAMES = [frame(6, b"x" * 90), frame(ANSWER, b"y" * 5), frame(18), frame(9, b"z" * 300)]
STREAM = b"".join(FRAMES)


# ---- looking


def test_a_walk_over_whole_frames() -> None:
    assert walk().scan_frames(STREAM, len(STREAM)) == (len(STREAM), NO_STOP)


def test_the_last_boundary_may_be_beyond() -> None:
    for size in range(len(STREAM) - 300, len(STREAM)):
        assert walk().scan_frames(STREAM, size) == (len(STREAM), NO_STOP)


@pytest.mark.parametrize("size", range(HEADER_BYTES))
def test_too_little_of_a_header(size: int) -> None:
    expected = (0, INCOMPLETE) if size else (0, NO_STOP)
    assert walk().scan_frames(STREAM, size) == expected
    assert walk().scan_frames(STREAM, len(FRAMES[0]) + size) == (len(FRAMES[0]), expected[1])


def test_only_as_far_as_there_is_something() -> None:
    """What an earlier look left behind in the buffer is no frame."""
    buffer = bytearray(STREAM)
    assert walk({18}).scan_frames(buffer, len(FRAMES[0]) + 5) == (len(FRAMES[0]), INCOMPLETE)


def test_stops() -> None:
    assert walk({ANSWER}).scan_frames(STREAM, len(STREAM)) == (len(FRAMES[0]), ANSWER)
    assert walk(set(ALL_TYPES)).scan_frames(STREAM, len(STREAM)) == (0, 6)


# Frames of one size are passed many at a time.
IN_A_ROW = 300
ROW_FRAME = frame(6, b"x" * 90)


@pytest.mark.parametrize("place", [*range(12), 131, 132, 133, 134, 135, IN_A_ROW - 1])
@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (frame(ANSWER, b"x" * 90), ANSWER),
        (frame(6, b"x" * 91), NO_STOP),
        (frame(6, b"x" * 600), NO_STOP),
        (frame(18, b"x" * 90), NO_STOP),
        ((MAX + 1).to_bytes(4, "big") + ROW_FRAME[4:], NO_STOP),
    ],
    ids=["stop", "longer", "much longer", "another type", "too large"],
)
def test_a_frame_that_differs_in_a_row_of_equal_frames_is_recognized(place: int, odd: bytes, expected: int) -> None:
    frames = [ROW_FRAME] * IN_A_ROW
    frames[place] = odd
    stream = bytearray(b"".join(frames))
    is_no_frame = odd[:4] == (MAX + 1).to_bytes(4, "big")
    if is_no_frame and not place:
        with pytest.raises(FrameSizeInvalid):
            walk({ANSWER}).scan_frames(stream, len(stream))
        return
    ends_there = expected == ANSWER or is_no_frame
    passing = place * len(ROW_FRAME) if ends_there else len(stream)
    assert walk({ANSWER}).scan_frames(stream, len(stream)) == (passing, expected)


def test_in_a_row_only_what_is_there_counts() -> None:
    buffer = bytearray(ROW_FRAME * 20)
    for size in range(1, len(buffer)):
        whole, rest = divmod(size, len(ROW_FRAME))
        beyond = rest >= HEADER_BYTES
        passing = (whole + beyond) * len(ROW_FRAME)
        assert walk().scan_frames(buffer, size) == (passing, INCOMPLETE if 0 < rest < HEADER_BYTES else NO_STOP)


def test_every_message_of_a_row_is_counted() -> None:
    one = walk(counts=BaseCommand.MESSAGE)
    row = frame(9, b"x") * IN_A_ROW
    assert one.scan_frames(row, len(row), slow_max=IN_A_ROW + 1) == (len(row), NO_STOP)
    assert one.take_message_count() == IN_A_ROW


@given(
    st.lists(st.tuples(st.sampled_from([6, 9, 18, ANSWER]), st.integers(0, 2), st.integers(1, 150)), max_size=12),
    st.integers(0, 500),
)
def test_rows_are_walked_as_if_frame_by_frame(rows: list[tuple[int, int, int]], cut: int) -> None:
    stream = b"".join(frame(kind, bytes(payload)) * count for kind, payload, count in rows)
    size = max(0, len(stream) - cut)
    at, stop = 0, NO_STOP
    while at <= size - HEADER_BYTES and stop == NO_STOP:
        if stream[at + 9] == ANSWER:
            stop = ANSWER
        else:
            at += 4 + int.from_bytes(stream[at : at + 4], "big")
    if stop == NO_STOP and at < size:
        stop = INCOMPLETE
    assert walk({ANSWER}).scan_frames(stream, size) == (at, stop)


@pytest.mark.parametrize("size", [0, 1, 5, MAX + 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_sizes_that_no_frame_has(size: int) -> None:
    bad = size.to_bytes(4, "big") + bytes(20)
    with pytest.raises(FrameSizeInvalid, match=str(size)):
        walk().scan_frames(bad, len(bad))
    with pytest.raises(FrameSizeInvalid):
        walk().read_first_head(bad, 4)
    assert walk().scan_frames(STREAM + bad, len(STREAM + bad)) == (len(STREAM), NO_STOP), "what is before it passes"


@pytest.mark.parametrize("size", [6, MAX])
def test_the_smallest_and_the_largest_frame(size: int) -> None:
    data = encode_frame(b"\x08\x06", bytes(size - 6))
    assert walk().scan_frames(data, len(data)) == (size + 4, NO_STOP)
    assert walk().read_first_head(data, HEADER_BYTES) == (size + 4, 6)
    assert walk().read_first_head(data, HEADER_BYTES - 1) == (0, INCOMPLETE)


def test_the_largest_frame_of_a_broker() -> None:
    assert frame_bytes_max(CommandConnected()) == 5 * 1024 * 1024 + 10 * 1024
    assert frame_bytes_max(CommandConnected(max_message_size=100)) == 100 + 10 * 1024


# ---- counting


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ([b"\x08\x01", b"\x10\x05"], 1),
        ([b"\x08\x01", b"\x10\x05", b"\x18\x07"], 7),
        ([b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x10\xff\x01", b"\x18\xac\x02"], 300),
        ([b"\x08\x01", b"\x10\x05", b"\x20\x07"], 1),
        ([b"\x08\x01", b"\x10\x05", b"\x18\x00"], 1),
        ([b"\x08\x01", b"\x10\x05", b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"], 1),  # a negative one
        ([b"\x08\x01", b"\x10"], 1),
        ([], 1),
    ],
)
def test_messages_of_a_send(fields: list[bytes], messages: int) -> None:
    data = send(*fields, payload=b"")
    assert messages_of_send(data, 0, len(data)) == messages
    follow = walk(counts=BaseCommand.SEND)
    assert follow.scan_frames(data * 3, len(data) * 3) == (len(data) * 3, NO_STOP)
    assert follow.take_message_count() == 3 * messages
    assert follow.take_message_count() == 0


def test_a_send_that_says_it_otherwise() -> None:
    data = encode_frame(b"\x08\x06\x3a\x00\x18\x07")
    assert messages_of_send(data, 0, len(data)) == 1


def test_a_number_without_end_is_read_no_further_than_its_own_frame() -> None:
    """Otherwise a client chooses by what it sends next, and in which pieces, how many messages a SEND counts for."""
    data = send(b"\x08\x01", b"\x10\xff\xff\xff", payload=b"")
    follow = walk(counts=BaseCommand.SEND)
    follow.scan_frames(data + b"\x05\x18\x64" + bytes(40), len(data) + 43)
    assert follow.take_message_count() == 1


@pytest.mark.parametrize("size", range(HEADER_BYTES, COUNTED_BYTES))
def test_a_send_is_counted_when_enough_of_it_is_there(size: int) -> None:
    data = send(b"\x08\x01", b"\x10\x05", b"\x18\x07", payload=bytes(100))
    follow = walk(counts=BaseCommand.SEND)
    assert follow.scan_frames(data, size) == (0, INCOMPLETE)
    assert follow.take_message_count() == 0
    assert follow.scan_frames(data, COUNTED_BYTES) == (len(data), NO_STOP)
    assert follow.take_message_count() == 7


def test_a_message_counts_as_one() -> None:
    follow = walk(counts=BaseCommand.MESSAGE)
    assert follow.scan_frames(STREAM * 2, 2 * len(STREAM)) == (2 * len(STREAM), NO_STOP)
    assert follow.take_message_count() == 2


# ---- not too much at once


def slow(scanner: type[FrameScanner]) -> tuple[FrameScanner, list[bytes]]:
    """A scanner, and frames that it counts or checks at length."""
    if scanner is ClientFrameScanner:
        return ClientFrameScanner(frame_bytes_max=MAX), [commands.ping(), frame(60)] * 50
    return walk(counts=BaseCommand.MESSAGE), [frame(9, b"x" * (number % 7)) for number in range(100)]


@pytest.mark.parametrize("scanner", [FrameScanner, ClientFrameScanner])
def test_a_scan_ends_after_so_many_slow_frames_and_the_next_one_goes_on(scanner: type[FrameScanner]) -> None:
    one, frames = slow(scanner)
    data, at = b"".join(frames), 0
    for number in range(10):
        passing, stop = one.scan_frames(data[at:], len(data) - at, 10)
        assert (passing, stop) == (sum(map(len, frames[10 * number : 10 * number + 10])), NO_STOP)
        assert one.slow_frames_left == 0
        at += passing
    assert at == len(data)
    assert one.scan_frames(data, len(data), 109) == (len(data), NO_STOP)
    assert one.slow_frames_left == 9


def test_a_send_that_is_counted_is_slow_and_one_that_is_not_is_none() -> None:
    data = send(b"\x08\x01") * 100
    for counted, passing in ((BaseCommand.SEND, len(data) // 10), (0, len(data))):
        one = ClientFrameScanner(frame_bytes_max=MAX, counted_type=counted)
        assert one.scan_frames(data, len(data), 10) == (passing, NO_STOP)
        assert one.message_count == (10 if counted else 0)


def test_a_cutter_passes_all_although_each_scan_ends_early() -> None:
    data = commands.ping() * SLOW_FRAMES_MAX * 4
    cutter, pieces = FrameCutter(ClientFrameScanner(frame_bytes_max=MAX)), []
    cutter.receive_data(data)
    while piece := cutter.take_passable():
        pieces.append(piece)
        assert cutter.at_boundary
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [len(data) // 4] * 4


# ---- cutting


def cut_up(pieces: list[bytes], cutter: FrameCutter) -> tuple[bytes, list[bytes]]:
    """What passes, and the answers that are taken out."""
    passed, taken = b"", []
    for piece in pieces:
        cutter.receive_data(piece)
        while True:
            if some := cutter.take_passable():
                passed += some
            elif cutter.stopped_at == ANSWER and (answer := cutter.remove_frame()) is not None:
                taken.append(answer)
            else:
                break
    return passed, taken


@pytest.mark.parametrize("at", range(1, len(STREAM)))
def test_split_at_every_byte(at: int) -> None:
    passed, taken = cut_up([STREAM[:at], STREAM[at:]], FrameCutter(walk({ANSWER})))
    assert passed == FRAMES[0] + FRAMES[2] + FRAMES[3]
    assert taken == [FRAMES[1]]


@pytest.mark.parametrize("at", range(1, len(FRAMES[0]) + 4))
def test_a_frame_before_an_invalid_one_passes_whole_wherever_it_is_split(at: int) -> None:
    stream = FRAMES[0] + (MAX + 1).to_bytes(4, "big") + bytes(HEADER_BYTES)
    cutter, passed = FrameCutter(walk()), b""
    cutter.receive_data(stream[:at])
    passed += cutter.take_passable()
    cutter.receive_data(stream[at:])
    while len(passed) < len(FRAMES[0]):
        passed += cutter.take_passable()
    assert passed == FRAMES[0]
    with pytest.raises(FrameSizeInvalid):
        cutter.take_passable()


@given(st.lists(st.integers(1, 60), max_size=40), st.randoms(use_true_random=False))
def test_any_pieces(sizes: list[int], chance: random.Random) -> None:
    frames = [frame(chance.choice([6, ANSWER, 18, 9]), bytes(chance.choice([0, 1, 50, 900]))) for _ in range(10)]
    stream, pieces = b"".join(frames), []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    passed, taken = cut_up([*pieces, stream], FrameCutter(walk({ANSWER})))
    assert passed == b"".join(one for one in frames if one[9] != ANSWER)
    assert taken == [one for one in frames if one[9] == ANSWER]


def test_take_passable_can_take_a_single_frame() -> None:
    cutter = FrameCutter(walk())
    cutter.receive_data(STREAM[:50])
    assert cutter.take_passable() == STREAM[:50]
    assert not cutter.at_boundary
    cutter.receive_data(STREAM[50:])
    assert cutter.take_passable(one_frame=True) == FRAMES[0][50:]
    assert cutter.at_boundary
    assert cutter.take_passable() == STREAM[len(FRAMES[0]) :]


def test_a_frame_that_was_stopped_at_passes_once_its_type_is_no_stop_type() -> None:
    cutter = FrameCutter(walk(set(ALL_TYPES)))
    cutter.receive_data(STREAM[: len(FRAMES[0]) - 5])
    assert cutter.take_passable() == b""
    assert cutter.stopped_at == 6
    cutter.scanner.stop_types = {ANSWER}
    assert cutter.take_passable() == STREAM[: len(FRAMES[0]) - 5]
    cutter.receive_data(STREAM[len(FRAMES[0]) - 5 :])
    assert cutter.take_passable() == FRAMES[0][-5:]
    assert cutter.stopped_at == ANSWER
    assert cutter.stopped_frame_length() == len(FRAMES[1])


def test_the_end_in_the_middle_of_a_header() -> None:
    cutter = FrameCutter(walk())
    cutter.receive_data(STREAM[: len(FRAMES[0]) + 7])
    assert cutter.take_passable() == FRAMES[0]
    assert cutter.at_boundary
    assert cutter.take_unread_data() == FRAMES[1][:7]
    assert cutter.take_unread_data() == b""


def test_the_rest_of_a_frame_that_is_dropped() -> None:
    cutter = FrameCutter(walk())
    cutter.receive_data(STREAM[:50])
    assert cutter.take_passable() == STREAM[:50]
    cutter.drop_rest()
    assert cutter.at_boundary
    assert cutter.take_passable() == b""
