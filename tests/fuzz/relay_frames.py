"""proto.relay_frames: the same bytes pass and the same messages are counted however a stream arrives, and no command to
stop at passes, as protobuf or Pulsar's parser read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from proto import commands
from proto.command_heads import KEEP_ALIVE_FRAMES, FrameInvalid
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, INCOMPLETE, NO_TYPES, ClientFrameScanner, FrameCutter, FrameScanner
from tests.fuzz.splits import splits
from tests.proto.light_proto import VALUES_OF_BROKERS, LightProto

FRAME_BYTES_MAX = 400
STOPS = (NO_TYPES, frozenset({int(BaseCommand.AUTH_RESPONSE)}), ALL_TYPES)
COUNTED = (0, int(BaseCommand.SEND), int(BaseCommand.MESSAGE))
KINDS: tuple[Callable[..., FrameScanner], ...] = (ClientFrameScanner, FrameScanner)

_SEND = encode_frame(b"\x08\x06\x32\x06\x08\x01\x10\x05\x18\x64", b"payload")
_ANSWER = commands.auth_response("client", 21, "token", b"data")
_STREAMS = (
    _SEND * 5 + commands.ping(),
    commands.ping() + commands.pong() + _ANSWER + _SEND,
    encode_frame(b"\x08\x06\x32\x04\x08\x01\x10\x05", b"x" * 30) * 9,
    encode_frame(b"\x08\x09\x4a\x02\x08\x01", b"message") * 8,
    encode_frame(b"\x08\x12\x92\x01\x00\x08\x06") + _SEND,
    encode_frame(b"\x08\x06\x32\x02\x08\xff") + encode_frame(b"\x08\x25\xaa\x02\x00", b"y" * 300),
    encode_frame(b"\x08\x06\x32\x06\x08\x01\x10\xff\xff\xff") + b"\xff" * 30 + b"\x05\x18d",  # beyond its frame
)
SEEDS = tuple(bytes([mode]) + stream for stream in _STREAMS for mode in range(len(STOPS) * len(COUNTED) * len(KINDS)))


def check(data: bytes) -> None:
    """The first byte chooses the scanner."""
    if not data:
        return
    mode, stream = data[0], data[1:]
    mode, kind = divmod(mode, len(KINDS))
    mode, stops = divmod(mode, len(STOPS))
    stop_types = STOPS[stops]

    def cut(pieces: Sequence[bytes]) -> tuple[bytes, int, str, int]:
        counted = COUNTED[mode % len(COUNTED)]
        return _cut(KINDS[kind](frame_bytes_max=FRAME_BYTES_MAX, stop_types=stop_types, counted_type=counted), pieces)

    whole = cut([stream])
    assert stream.startswith(whole[0])
    if KINDS[kind] is ClientFrameScanner:
        _check_types(whole[0], stop_types)
    for pieces in splits(stream):
        assert cut(pieces) == whole, pieces


def _cut(scanner: FrameScanner, pieces: Sequence[bytes]) -> tuple[bytes, int, str, int]:
    """The bytes that pass, what comes next, the error that ended the stream, and the messages counted."""
    cutter = FrameCutter(scanner)
    passed = b""
    try:
        for piece in pieces:
            cutter.receive_data(piece)
            while some := cutter.take_passable():
                passed += some
            if cutter.stopped_at > 0:
                break
    except FrameInvalid as error:
        return passed, INCOMPLETE, type(error).__name__, scanner.take_message_count()
    return passed, cutter.stopped_at, "", scanner.take_message_count()


def _check_types(passed: bytes, stop_types: frozenset[int]) -> None:
    """Whole frames that have passed are none to stop at, to whichever parser."""
    at = 0
    while len(passed) - at >= 4 and at + 4 + (size := int.from_bytes(passed[at : at + 4], "big")) <= len(passed):
        frame = passed[at : at + 4 + size]
        at += len(frame)
        if stop_types is ALL_TYPES:
            assert frame in KEEP_ALIVE_FRAMES
            continue
        length = int.from_bytes(frame[4:8], "big")
        found = {LightProto(frame[8:], values).command_type(length) for values in VALUES_OF_BROKERS}
        with contextlib.suppress(DecodeError):
            found.add(int(BaseCommand.FromString(frame[8 : 8 + length]).type))
        found.discard(None)
        assert len(found) <= 1, "parsers differ"
        assert not found & stop_types
