"""proto.rpc_frames: what a captured worker may send to another process, however it arrives."""

from __future__ import annotations

from collections.abc import Sequence

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
from tests.fuzz.splits import splits

FRAME_BYTES_MAX = 300

SEEDS = (
    encode_call(Call(1, 2, 3000, b"request")) + encode_cancel(Cancel(1)),
    encode_reply(Reply(1, 2, b"response", True, "detail")) + encode_reply(Reply(2)),
    encode_reply(Reply(1, 1, b"", False, "ü" * 100)),
    encode_call(Call(7, 1, 5, b"x" * FRAME_BYTES_MAX)),
    encode_cancel(Cancel(1))[:-1],
    b"\x00\x00\x00\x0f" + bytes(15),
)


def check(data: bytes) -> None:
    whole = _decode([data])
    for frame in whole[0]:
        assert _decode([_encode(frame)], bytes_max=4 * FRAME_BYTES_MAX)[0] == [frame]  # U+FFFD has three bytes
    for pieces in splits(data):
        assert _decode(pieces) == whole, pieces


def _encode(frame: Frame) -> bytes:
    if isinstance(frame, Call):
        return encode_call(frame)
    return encode_reply(frame) if isinstance(frame, Reply) else encode_cancel(frame)


def _decode(pieces: Sequence[bytes], bytes_max: int = FRAME_BYTES_MAX) -> tuple[list[Frame], str]:
    """Frames, and the error that ended the stream."""
    decoder = RpcDecoder(max_frame_bytes=bytes_max)
    frames: list[Frame] = []
    for piece in pieces:
        decoder.receive_data(piece)
        try:
            while (frame := decoder.next_frame()) is not None:
                frames.append(frame)
        except RpcCorrupt as error:
            return frames, str(error)
        assert decoder.unread_bytes < 4 + bytes_max
    return frames, ""
