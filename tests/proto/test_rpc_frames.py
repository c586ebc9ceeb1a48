"""Frames between workers: cut at every byte, bounded, and corrupt ones told apart from short ones."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.errors import RemoteProtocolError
from proto.rpc_frames import (
    Call,
    Cancel,
    Frame,
    Reply,
    RpcCorrupt,
    RpcDecoder,
    encode_call,
    encode_cancel,
    encode_reply,
)
from proto.rpc_pb2 import Method, Status

LIMIT = 1000
CALL = Call(7, Method.ENVELOPE, 100, b"\x00request")
REPLY = Reply(7, Status.TOO_MANY_REQUESTS, b"\xffresponse", has_more=True, detail="why")
CANCEL = Cancel(7)

# Written out: what follows the size is 24 bytes long, a call, no more, method 10, id 7, 100 ms.
CALL_BYTES = bytes.fromhex("00000018 01 00 000a 0000000000000007 00000064 00") + b"request"
REPLY_BYTES = bytes.fromhex("0000001c 02 01 0004 0000000000000007 00000003") + b"why\xffresponse"
CANCEL_BYTES = bytes.fromhex("00000010 03 00 0000 0000000000000007 00000000")
HEADER_BYTES = 20


def encode(frame: Frame) -> bytes:
    match frame:
        case Call():
            return encode_call(frame)
        case Reply():
            return encode_reply(frame)
        case Cancel():
            return encode_cancel(frame)


def fed(*chunks: bytes) -> list[Frame]:
    decoder = RpcDecoder(max_frame_bytes=LIMIT)
    found: list[Frame] = []
    for chunk in chunks:
        decoder.receive_data(chunk)
        found += iter(decoder.next_frame, None)
    return found


@pytest.mark.conforms("kip-590.9")
@pytest.mark.parametrize(("frame", "wire"), [(CALL, CALL_BYTES), (REPLY, REPLY_BYTES), (CANCEL, CANCEL_BYTES)])
def test_golden_frames(frame: Frame, wire: bytes) -> None:
    assert encode(frame) == wire
    [found] = fed(wire)
    assert found == frame
    assert type(found) is type(frame)


def test_frames_split_at_every_pair_of_bytes() -> None:
    wire = CALL_BYTES + REPLY_BYTES + CANCEL_BYTES
    for first, second in itertools.combinations_with_replacement(range(len(wire) + 1), 2):
        assert fed(wire[:first], wire[first:second], wire[second:]) == [CALL, REPLY, CANCEL]


def test_a_frame_appears_with_its_last_byte() -> None:
    decoder = RpcDecoder(max_frame_bytes=LIMIT)
    decoder.receive_data(CALL_BYTES[:-1])
    assert decoder.next_frame() is None
    assert not decoder.is_empty
    decoder.receive_data(CALL_BYTES[-1:])
    assert decoder.next_frame() == CALL
    assert decoder.is_empty


FRAMES = st.one_of(
    st.builds(Call, st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.binary()),
    st.builds(
        Reply,
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**16 - 1),
        st.binary(max_size=50),
        st.booleans(),
        st.text(max_size=20),
    ),
    st.builds(Cancel, st.integers(0, 2**64 - 1)),
)


@given(st.lists(FRAMES, max_size=5), st.integers(1, 60))
def test_round_trip(frames: list[Frame], size: int) -> None:
    wire = b"".join(map(encode, frames))
    assert fed(*(wire[start : start + size] for start in range(0, len(wire), size))) == frames


def test_more_time_than_there_is_room_for_is_as_much_as_fits() -> None:
    assert fed(encode_call(CALL._replace(timeout_ms=2**40))) == [CALL._replace(timeout_ms=2**32 - 1)]


def test_a_frame_of_exactly_the_limit() -> None:
    frame = CALL._replace(request=b"x" * (LIMIT - HEADER_BYTES + 4))
    wire = encode_call(frame)
    assert int.from_bytes(wire[:4], "big") == LIMIT
    assert fed(wire) == [frame]


@pytest.mark.parametrize("size", [LIMIT + 1, 2**31 - 1, 2**32 - 1])
def test_a_larger_frame_is_refused_on_its_first_four_bytes(size: int) -> None:
    with pytest.raises(RpcCorrupt, match=f"an RPC frame of {size} bytes; the limit is 1000"):
        fed(size.to_bytes(4, "big"))


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_size_without_room_for_a_header_is_refused_on_its_first_four_bytes(size: int) -> None:
    with pytest.raises(RpcCorrupt, match="not an RPC frame"):
        fed(size.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "header",
    [
        "00000010 00 00 0000 0000000000000007 00000000",  # no such kind
        "00000010 04 00 0000 0000000000000007 00000000",
        "00000010 02 00 0000 0000000000000007 00000001",  # a detail larger than all
        "00000010 02 00 0000 0000000000000007 ffffffff",
    ],
)
def test_headers_of_unknown_kinds_and_wrong_details(header: str) -> None:
    with pytest.raises(RpcCorrupt, match="unknown kind") as caught:
        fed(bytes.fromhex(header))
    assert isinstance(caught.value, RemoteProtocolError)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_whatever_comes_there_are_only_protocol_errors(chunks: list[bytes]) -> None:
    try:
        fed(*chunks)
    except RemoteProtocolError:
        return
