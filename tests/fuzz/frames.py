"""proto.frames: what is decoded is encoded the same, however it arrives, and no more than one frame is held."""

from __future__ import annotations

from collections.abc import Sequence

from proto import commands
from proto.frames import Frame, FrameCorrupt, FrameDecoder, FrameTooLarge, encode_frame
from tests.fuzz.splits import splits

FRAME_BYTES_MAX = 300

SEEDS = (
    commands.ping() + commands.pong(),
    encode_frame(b"\x08\x06\x32\x04\x08\x01\x10\x05", b"payload") + commands.ping()[:7],
    encode_frame(b"") + encode_frame(b"x" * (FRAME_BYTES_MAX - 4)),
    encode_frame(b"x" * (FRAME_BYTES_MAX - 3)),
    b"\x00\x00\x00\x05\x00\x00\x00\x02\x08",
    b"\x00\x00\x00\x03\x00\x00\x00\x00",
    b"\x16\x03\x01\x02\x00",
    b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n",
)


def check(data: bytes) -> None:
    whole = _decode([data])
    frames, left, _ = whole
    assert b"".join(frame.encode() for frame in frames) + left == data
    for pieces in splits(data):
        assert _decode(pieces) == whole, pieces


def _decode(pieces: Sequence[bytes]) -> tuple[list[Frame], bytes, str]:
    """Frames, the bytes behind them, and the error that ended the stream."""
    decoder = FrameDecoder(max_frame_bytes=FRAME_BYTES_MAX)
    frames: list[Frame] = []
    for place, piece in enumerate(pieces):
        decoder.receive_data(piece)
        try:
            while (frame := decoder.next_frame()) is not None:
                assert 4 + len(frame.command) + len(frame.payload) <= FRAME_BYTES_MAX
                frames.append(frame)
        except (FrameTooLarge, FrameCorrupt) as error:
            return frames, decoder.take_unread_data() + b"".join(pieces[place + 1 :]), f"{error!r}"
        assert decoder.unread_bytes < 4 + FRAME_BYTES_MAX
    return frames, decoder.take_unread_data(), ""
