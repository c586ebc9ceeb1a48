"""Where frames begin in a stream of bytes that are not kept: for relays that must know it (KIP-368).

A relay whose session can expire puts a challenge in between two frames, takes the answer out, and stops at the first
frame that is sent too late; one that counts messages looks at SEND and MESSAGE. All of that stands in the first bytes
of a frame, so these are looked at and the rest is passed over, wherever the bytes may be: in the kernel, seen through
a copy (``FrameWalk``), or in memory (``FrameCutter``).

A frame begins ``[total size u32][command size u32][08 type]``: clients and brokers write a BaseCommand's first field
first. Whoever does not is understood as something else, which can only harm his own connection: what is taken for an
answer is parsed whole before anything believes it, and never reaches the broker.
"""

import struct
from collections.abc import Set as AbstractSet

from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import BaseCommand, CommandConnected

HEADER_BYTES = 10
"""Both sizes, the tag of a BaseCommand's type, and the type."""

COUNTED_BYTES = 40
"""By here the fields of a SEND that are read have ended, however large their numbers are."""

PART = -1
"""Instead of a command's type: its frame has begun, but too little of it is there."""

GOES_ON = 0
"""Instead of a command's type: there is nothing to stop at."""

NO_STOPS: frozenset[int] = frozenset()
ALL_STOPS = frozenset(range(256))
"""None or all types of commands to stop at."""

_SIZE_BYTES = 4
_FRAME_SIZE_MIN = HEADER_BYTES - _SIZE_BYTES
_DEFAULT_MESSAGE_BYTES_MAX = 5 * 1024 * 1024
_FRAME_PADDING_BYTES = 10 * 1024
_TYPE_TAG = 0x08
_SEND_TAG = 0x32
_SEND_FIELDS = (0x08, 0x10)  # producer_id, sequence_id: they stand before num_messages
_NUM_MESSAGES_TAG = 0x18
_MESSAGES_MAX = (1 << 31) - 1

_head = struct.Struct(">I5xB").unpack_from
"""A frame's size and the type of its command."""

_HEAD_COLUMNS = (3, 2, 9, 1, 0)
"""Where the bytes of these two stand in a frame; first those that tell frames apart most often."""

_ROW = 3
"""After so many repetitions of a size the next frames are expected to be alike, too."""

_ALIKE_MAX = 128
"""Frames that are looked at in one go, since they may be alike; bounds what it costs where they are not."""


class FrameSizeWrong(RemoteProtocolError):
    """A frame of a size that none can have: the stream has no further boundary to find."""


def frame_bytes_max(connected: CommandConnected) -> int:
    """The largest size that a frame of this broker's connections may announce."""
    return (connected.max_message_size or _DEFAULT_MESSAGE_BYTES_MAX) + _FRAME_PADDING_BYTES


class FrameWalk:
    """Finds boundaries in bytes that begin at one.

    ``stops``: the types of commands to stop at. ``counts``: the type whose messages are counted in ``messages``; 0:
    none. A SEND counts as many messages as it says are in its batch, a MESSAGE as one: what the broker gives out is
    entries, and how many messages are in one stands in its metadata, which nobody here reads.
    """

    __slots__ = ("_counts", "_size_max", "messages", "stops")

    def __init__(self, *, frame_bytes_max: int, stops: AbstractSet[int] = NO_STOPS, counts: int = 0) -> None:
        self.stops = stops
        self.messages = 0
        self._counts = counts
        self._size_max = frame_bytes_max

    def walk(self, buffer: bytes | bytearray, size: int) -> tuple[int, int]:
        """How many bytes from the buffer's beginning may pass, up to a boundary, perhaps one beyond ``size``; and what
        is there: the type of a command to stop at, PART or GOES_ON. Messages in frames that may pass are counted.
        Raises FrameSizeWrong where the first frame is no frame; a later one is only stopped before.
        """
        at, head, stops, counts, size_max = 0, _head, self.stops, self._counts, self._size_max
        before = row = 0
        special = stops | {counts} if counts else stops
        last = size - HEADER_BYTES
        while at <= last:
            frame, command_type = head(buffer, at)
            if frame > size_max or frame < _FRAME_SIZE_MIN:
                if at:
                    return at, GOES_ON
                raise FrameSizeWrong(f"a frame of {frame} bytes; the limit is {size_max}")
            if command_type in special:
                if command_type in stops:
                    return at, command_type
                if not self._count(buffer, at, size, frame):
                    return at, PART
            elif frame != before:
                before, row = frame, 0
            elif (row := row + 1) == _ROW:  # messages of one size come in long rows
                at += _bytes_of_alike(buffer, at, size, frame + _SIZE_BYTES)
                row = 0
            at += frame + _SIZE_BYTES
        return at, PART if at < size else GOES_ON

    def _count(self, buffer: bytes | bytearray | memoryview, at: int, size: int, frame: int) -> bool:
        """Count the messages of a frame that counts; whether enough of it is there."""
        if self._counts != BaseCommand.SEND:
            self.messages += 1
        elif size - at < COUNTED_BYTES and size - at < frame + _SIZE_BYTES:
            return False
        else:
            self.messages += messages_of_send(buffer, at, size)
        return True

    def first(self, buffer: bytes | bytearray | memoryview, size: int) -> tuple[int, int]:
        """Of the first frame: its length with its size, and the type of its command or PART. Counts nothing.
        Raises FrameSizeWrong.
        """
        if size < HEADER_BYTES:
            if size >= _SIZE_BYTES:
                self._check(int.from_bytes(buffer[:_SIZE_BYTES], "big"))
            return 0, PART
        frame, command_type = _head(buffer, 0)
        self._check(frame)
        return frame + _SIZE_BYTES, command_type

    def _check(self, frame: int) -> None:
        if not _FRAME_SIZE_MIN <= frame <= self._size_max:
            raise FrameSizeWrong(f"a frame of {frame} bytes; the limit is {self._size_max}")

    def take_messages(self) -> int:
        """How many were counted since the last time."""
        messages, self.messages = self.messages, 0
        return messages


def _bytes_of_alike(buffer: bytes | bytearray, at: int, size: int, length: int) -> int:
    """How many bytes the frames take that follow the one at ``at``, of this length, and are as long and of its type.

    Not all of them, and only frames whose header is there. One look at a column of headers costs as much as a look at
    one header by itself.
    """
    first = at + length
    stop = min(size - HEADER_BYTES + 1, first + _ALIKE_MAX * length)
    alike = _ALIKE_MAX
    for column in _HEAD_COLUMNS:
        values = buffer[first + column : stop + column : length]
        alike = min(alike, len(values) - len(values.lstrip(buffer[at + column : at + column + 1])))
        if not alike:
            break
    return alike * length


def messages_of_send(buffer: bytes | bytearray | memoryview, frame_at: int, end: int) -> int:
    """The ``num_messages`` of a SEND whose frame begins at ``frame_at``; 1 where it does not say."""
    at = frame_at + HEADER_BYTES
    if at >= end or buffer[at] != _SEND_TAG:
        return 1
    _length, at = _varint(buffer, at + 1, end)
    while at < end:
        tag = buffer[at]
        number, at = _varint(buffer, at + 1, end)
        if tag == _NUM_MESSAGES_TAG:
            return number if 1 <= number <= _MESSAGES_MAX else 1
        if tag not in _SEND_FIELDS:
            break
    return 1


def _varint(buffer: bytes | bytearray | memoryview, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; 0 where it is cut off."""
    value = shift = 0
    while at < end:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 -- the last byte of a varint
            return value, at
        shift += 7
    return 0, end


class FrameCutter:
    """The same for bytes in memory, in whatever pieces they come. Holds no more than the beginning of one frame.

    ``receive`` a piece, then ``pass_on`` until it gives nothing. Where ``stop`` is a command's type then, its frame
    comes next: change the walk's ``stops`` and ask again, or ``take`` it out piece by piece, or stop for good.
    """

    __slots__ = ("_bytes", "_left", "_taken", "_walk", "stop")

    def __init__(self, walk: FrameWalk) -> None:
        self._walk = walk
        self._bytes = b""
        self._left = 0
        self._taken = b""
        self.stop = GOES_ON

    @property
    def at_boundary(self) -> bool:
        """Whether everything that was passed on ends with a frame."""
        return not self._left

    def receive(self, data: bytes | bytearray) -> None:
        """The next bytes of the stream."""
        self._bytes = self._bytes + data if self._bytes else bytes(data)

    def pass_on(self, *, one_frame: bool = False) -> bytes:
        """Bytes that may pass; ``one_frame``: no further than to the next boundary. Raises FrameSizeWrong."""
        data, left, self.stop = self._bytes, self._left, GOES_ON
        if left < len(data) and not (one_frame and left):
            rest = data[left:] if left else data
            more, self.stop = self._walk.walk(rest, len(rest))
            left += more
        passed = data[:left]
        self._bytes = data[left:]
        self._left = left - len(passed)
        return passed

    def one_frame(self) -> bytes:
        """Of bytes that may pass, those of the frame that is stopped at. Raises FrameSizeWrong."""
        length, self.stop = self._walk.first(self._bytes, len(self._bytes))
        passed, self._bytes = self._bytes[:length], self._bytes[length:]
        self._left = length - len(passed)
        return passed

    def length_of_next(self) -> int:
        """Of the frame that is stopped at, its size included. Raises FrameSizeWrong."""
        return self._walk.first(self._bytes, len(self._bytes))[0]

    def take(self) -> bytes | None:
        """The frame that is stopped at, out of the stream; None until all of it is there. Raises FrameSizeWrong."""
        length = self.length_of_next()
        if len(self._bytes) < length:
            return None
        frame, self._bytes = self._bytes[:length], self._bytes[length:]
        self.stop = GOES_ON
        return frame

    def take_rest(self) -> bytes:
        """What is held: the stream ends here."""
        rest, self._bytes = self._bytes, b""
        return rest
