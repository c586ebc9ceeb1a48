"""Frames: golden bytes cut at every byte, round trips, and the limits."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.errors import RemoteProtocolError
from proto.frames import Frame, FrameCorrupt, FrameDecoder, FrameTooLarge, encode_frame

# Written out byte for byte: the total size, the command size, the command, and for SEND what follows it.
CONNECT = bytes.fromhex("0000000d 00000009  0802 1205 0a0178 2015")
LOOKUP = bytes.fromhex("0000000e 0000000a  0817 ba0105 0a0174 1007")
SEND = bytes.fromhex("0000001d 00000008  0806 3204 0801 1002  0e01 deadbeef 00000002 0a00 68656c6c6f")
PING = bytes.fromhex("00000009 00000005  0812 920100")

GOLDEN = {
    "CONNECT": (CONNECT, Frame(CONNECT[8:])),
    "LOOKUP": (LOOKUP, Frame(LOOKUP[8:])),
    "SEND": (SEND, Frame(SEND[8:16], SEND[16:])),
    "PING": (PING, Frame(PING[8:])),
}
IN_A_ROW = CONNECT + PING + SEND + LOOKUP + PING
FRAMES_IN_A_ROW = [GOLDEN[name][1] for name in ("CONNECT", "PING", "SEND", "LOOKUP", "PING")]

LIMIT = 1024


def decoder(limit: int = LIMIT) -> FrameDecoder:
    return FrameDecoder(max_frame_bytes=limit)


def drained(decoder: FrameDecoder) -> list[Frame]:
    return list(iter(decoder.next_frame, None))


def fed(*chunks: bytes, limit: int = LIMIT) -> list[Frame]:
    """All frames of a stream that arrives in these chunks."""
    subject = decoder(limit)
    found = []
    for chunk in chunks:
        subject.receive_data(chunk)
        found += drained(subject)
    assert subject.take_unread_data() == b""
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_frame_is_decoded_and_written_again(name: str) -> None:
    wire, frame = GOLDEN[name]
    assert fed(wire) == [frame]
    assert frame.encode() == wire
    assert encode_frame(frame.command, frame.payload) == wire


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_frame_split_at_every_byte(name: str) -> None:
    wire, frame = GOLDEN[name]
    for cut in range(len(wire) + 1):
        assert fed(wire[:cut], wire[cut:]) == [frame]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_frame_appears_with_its_last_byte_and_not_before(name: str) -> None:
    wire, frame = GOLDEN[name]
    subject = decoder()
    for byte in wire[:-1]:
        subject.receive_data(bytes([byte]))
        assert subject.next_frame() is None
    subject.receive_data(wire[-1:])
    assert subject.next_frame() == frame
    assert subject.next_frame() is None


def test_several_frames_in_a_row_split_at_every_pair_of_bytes() -> None:
    for first, second in itertools.combinations_with_replacement(range(len(IN_A_ROW) + 1), 2):
        assert fed(IN_A_ROW[:first], IN_A_ROW[first:second], IN_A_ROW[second:]) == FRAMES_IN_A_ROW


def test_several_frames_byte_by_byte() -> None:
    assert fed(*(bytes([byte]) for byte in IN_A_ROW)) == FRAMES_IN_A_ROW


def test_nothing_is_decoded_from_nothing() -> None:
    subject = decoder()
    subject.receive_data(b"")
    assert subject.next_frame() is None
    assert subject.take_unread_data() == b""


def test_a_bytearray_is_taken_and_copied() -> None:
    chunk = bytearray(PING)
    subject = decoder()
    subject.receive_data(chunk)
    chunk[:] = bytes(len(chunk))
    frame = subject.next_frame()
    assert frame == GOLDEN["PING"][1]
    assert isinstance(frame.command, bytes)
    assert isinstance(frame.payload, bytes)


FRAMES = st.builds(Frame, st.binary(max_size=60), st.binary(max_size=60))


@given(st.lists(FRAMES, max_size=6), st.data())
def test_encoded_frames_are_decoded_however_their_bytes_are_split(frames: list[Frame], data: st.DataObject) -> None:
    wire = b"".join(frame.encode() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    chunks = [wire[start:end] for start, end in itertools.pairwise([0, *cuts, len(wire)])]
    assert fed(*chunks) == frames


@given(st.lists(FRAMES, max_size=3), st.binary(max_size=40))
def test_bytes_after_the_frames_taken_are_handed_over_unchanged(frames: list[Frame], tail: bytes) -> None:
    subject = decoder()
    subject.receive_data(b"".join(frame.encode() for frame in frames) + tail)
    assert [subject.next_frame() for _ in frames] == frames
    assert subject.take_unread_data() == tail
    assert subject.take_unread_data() == b""
    assert subject.next_frame() is None


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_bytes_of_a_peer_cause_only_protocol_errors(chunks: list[bytes]) -> None:
    subject = decoder()
    for chunk in chunks:
        subject.receive_data(chunk)
        try:
            drained(subject)
        except RemoteProtocolError:
            return


# ---- limits


def test_a_frame_of_exactly_the_limit() -> None:
    frame = Frame(b"c" * 100, b"p" * (LIMIT - 4 - 100))
    wire = frame.encode()
    assert int.from_bytes(wire[:4], "big") == LIMIT
    assert fed(wire) == [frame]


def test_a_frame_a_byte_above_the_limit_is_refused_on_its_first_four_bytes() -> None:
    subject = decoder()
    subject.receive_data((LIMIT + 1).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge, match="1025 bytes; the limit is 1024"):
        subject.next_frame()


@pytest.mark.conforms("kip-368.54")
@pytest.mark.parametrize("claim", [2**31 - 1, 2**31, 2**32 - 1])
def test_an_enormous_claim_is_refused_on_its_first_four_bytes(claim: int) -> None:
    subject = decoder(limit=128 * 1024 * 1024)
    subject.receive_data(claim.to_bytes(4, "big")[:3])
    assert subject.next_frame() is None
    subject.receive_data(claim.to_bytes(4, "big")[3:])
    with pytest.raises(FrameTooLarge):
        subject.next_frame()


def test_there_is_no_frame_behind_one_that_was_too_large() -> None:
    subject = decoder()
    subject.receive_data((LIMIT + 1).to_bytes(4, "big") + PING)
    for _ in range(2):
        with pytest.raises(FrameTooLarge):
            subject.next_frame()


@pytest.mark.parametrize("total", [0, 1, 2, 3])
def test_a_frame_without_room_for_its_command_size(total: int) -> None:
    subject = decoder()
    subject.receive_data(total.to_bytes(4, "big"))
    with pytest.raises(FrameCorrupt, match=f"a frame of {total} bytes"):
        subject.next_frame()


def test_the_smallest_frame_is_an_empty_command() -> None:
    assert fed(struct.pack(">II", 4, 0)) == [Frame(b"")]


def test_a_command_that_fills_its_frame_and_one_byte_more() -> None:
    assert fed(struct.pack(">II", 9, 5) + b"abcde") == [Frame(b"abcde")]
    with pytest.raises(FrameCorrupt, match="a command of 6 bytes in a frame of 9"):
        fed(struct.pack(">II", 9, 6) + b"abcde")


@pytest.mark.parametrize("size", [10, 2**31 - 1, 2**32 - 1])
def test_a_command_beyond_its_frame_takes_nothing_of_the_next(size: int) -> None:
    with pytest.raises(FrameCorrupt):
        fed(struct.pack(">II", 4, size) + PING)


def test_no_more_is_kept_than_one_frame_and_what_came_with_it() -> None:
    subject = decoder()
    for _ in range(1000):
        subject.receive_data(SEND)
        assert subject.next_frame() is not None
    subject.receive_data(SEND[:7])
    assert subject.next_frame() is None
    assert subject.take_unread_data() == SEND[:7]


def test_garbage_of_other_protocols_is_no_frame() -> None:
    for greeting in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"SSH-2.0-OpenSSH\r\n"):
        subject = decoder(limit=128 * 1024)
        subject.receive_data(greeting)
        with pytest.raises(RemoteProtocolError):
            subject.next_frame()
