"""Frames between workers: cut at every byte, bounded, and corrupt ones told apart from short ones."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.errors import RemoteProtocolError
from proto.rpc_frames import RpcCorrupt, RpcDecoder, encode_rpc
from proto.rpc_pb2 import Call, Frame, Method, Reply, Status

LIMIT = 1000
CALL = Frame(call=Call(correlation_id=7, method=Method.ENVELOPE, timeout_ms=100, request=b"\x00request"))
REPLY = Frame(reply=Reply(correlation_id=7, status=Status.OK, response=b"\xffresponse"))

# Written out: call (field 1) of 19 bytes: id 7, method 10, timeout 100, request.
CALL_BYTES = bytes.fromhex("00000012 0a10 0807 100a 1864 2208 00") + b"request"


def fed(*chunks: bytes) -> list[Frame]:
    decoder = RpcDecoder(max_frame_bytes=LIMIT)
    found: list[Frame] = []
    for chunk in chunks:
        decoder.receive_data(chunk)
        found += iter(decoder.next_frame, None)
    return found


def test_a_golden_call() -> None:
    assert encode_rpc(CALL) == CALL_BYTES
    assert fed(CALL_BYTES) == [CALL]


def test_calls_and_replies_split_at_every_pair_of_bytes() -> None:
    wire = encode_rpc(CALL) + encode_rpc(REPLY) + encode_rpc(Frame())
    for first, second in itertools.combinations_with_replacement(range(len(wire) + 1), 2):
        assert fed(wire[:first], wire[first:second], wire[second:]) == [CALL, REPLY, Frame()]


def test_a_frame_appears_with_its_last_byte() -> None:
    assert fed(CALL_BYTES[:-1]) == []


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 60))
def test_round_trip(requests: list[bytes], size: int) -> None:
    frames = [Frame(call=Call(correlation_id=number, request=data)) for number, data in enumerate(requests)]
    wire = b"".join(map(encode_rpc, frames))
    assert fed(*(wire[start : start + size] for start in range(0, len(wire), size))) == frames


def test_a_field_of_a_newer_worker_survives() -> None:
    newer = bytes.fromhex("00000007") + bytes.fromhex("0a02 0807 fa0100")
    (frame,) = fed(newer)
    assert frame.call.correlation_id == 7
    assert encode_rpc(frame) == newer


def test_a_frame_of_exactly_the_limit() -> None:
    room = LIMIT - len(Frame(call=Call(request=b"x" * 900)).SerializeToString()) + 900
    frame = Frame(call=Call(request=b"x" * room))
    wire = encode_rpc(frame)
    assert int.from_bytes(wire[:4], "big") == LIMIT
    assert fed(wire) == [frame]


@pytest.mark.parametrize("size", [LIMIT + 1, 2**31 - 1, 2**32 - 1])
def test_a_larger_frame_is_refused_on_its_first_four_bytes(size: int) -> None:
    with pytest.raises(RpcCorrupt, match=f"an RPC frame of {size} bytes; the limit is 1000"):
        fed(size.to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05\x00", b"\x0a\x02\xff\xff"])
def test_bytes_that_are_no_frame(body: bytes) -> None:
    with pytest.raises(RpcCorrupt, match="not an RPC frame") as caught:
        fed(len(body).to_bytes(4, "big") + body)
    assert isinstance(caught.value, RemoteProtocolError)
    assert caught.value.__cause__ is None


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_whatever_comes_there_are_only_protocol_errors(chunks: list[bytes]) -> None:
    try:
        fed(*chunks)
    except RemoteProtocolError:
        return
