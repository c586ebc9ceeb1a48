"""Where frames begin in a stream of bytes that are not kept: for relays that must know it (KIP-368).

A relay whose session can expire puts a challenge in between two frames, takes the answer out, and stops at the first
frame that is sent too late; one that counts messages looks at SEND and MESSAGE. All of that stands in the first bytes
of a frame, so these are looked at and the rest is passed over, wherever the bytes may be: in the kernel, seen through
a copy (``FrameWalk``), or in memory (``FrameCutter``).

A frame begins ``[total size u32][command size u32][08 type]``: clients and brokers write a BaseCommand's first field
first. What a client sends is looked at by ``ClientFrameWalk``, which lets no other form pass, for the broker would see
another command in it than this side (proto.command_heads). What a broker sends is believed to be what it begins with:
a broker that wanted to deceive could do so in any form.
"""

import struct
from collections.abc import Set as AbstractSet

from proto.command_heads import (
    HEAD_BYTES,
    INCOMPLETE,
    PLAIN_HEADS,
    FrameInvalid,
    command_type_at,
    keep_alive_at,
)
from proto.pulsar_pb2 import BaseCommand, CommandConnected

HEADER_BYTES = 10
"""Both sizes, the tag of a BaseCommand's type, and the type."""

COUNTED_BYTES = 40
"""By here the fields of a SEND that are read have ended, however large their numbers are."""

NO_STOP = 0
"""Instead of a command's type: there is nothing to stop at."""

NO_TYPES: frozenset[int] = frozenset()
ALL_TYPES = frozenset(range(256))
"""No types of commands to stop at, or all: then only PING and PONG pass, and these only byte for byte."""

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

_client_head = struct.Struct(">IQ").unpack_from
"""A frame's size, and a key of PLAIN_HEADS."""

_CLIENT_HEAD_COLUMNS = (3, 9, 7, 11, 10, 2, 1, 0, 6, 5, 4, 8)
"""All that those two are made of: a frame that is like one that was judged needs no judging."""

_NOT_PLAIN = 1 << 40
"""As if the least size of its frame were one that none has."""

_ROW = 3
"""After so many repetitions of a size the next frames are expected to be alike, too."""

_ALIKE_MAX = 128
"""Frames that are looked at in one go, since they may be alike; bounds what it costs where they are not."""


class FrameSizeInvalid(FrameInvalid):
    """A frame of a size that none can have: the stream has no further boundary to find."""


def frame_bytes_max(connected: CommandConnected) -> int:
    """The largest size that a frame of this broker's connections may announce."""
    return (connected.max_message_size or _DEFAULT_MESSAGE_BYTES_MAX) + _FRAME_PADDING_BYTES


class FrameScanner:
    """Finds boundaries in bytes that begin at one.

    ``stops``: the types of commands to stop at. ``counts``: the type whose messages are counted in ``messages``; 0:
    none. A SEND counts as many messages as it says are in its batch, a MESSAGE as one: what the broker gives out is
    entries, and how many messages are in one stands in its metadata, which nobody here reads.
    """

    __slots__ = ("_counted_type", "_size_max", "message_count", "stop_types")

    def __init__(self, *, frame_bytes_max: int, stop_types: AbstractSet[int] = NO_TYPES, counted_type: int = 0) -> None:
        self.stop_types = stop_types
        self.message_count = 0
        self._counted_type = counted_type
        self._size_max = frame_bytes_max

    def scan_frames(self, buffer: bytes | bytearray, size: int) -> tuple[int, int]:
        """How many bytes from the buffer's beginning may pass, up to a boundary, perhaps one beyond ``size``; and what
        is there: the type of a command to stop at, PART or GOES_ON. Messages in frames that may pass are counted.
        Raises FrameWrong where the first frame is no frame; a later one is only stopped before.
        """
        at, head, stops, counts, size_max = 0, _head, self.stop_types, self._counted_type, self._size_max
        before = row = 0
        special = stops | {counts} if counts else stops
        last = size - HEADER_BYTES
        while at <= last:
            frame, command_type = head(buffer, at)
            if frame > size_max or frame < _FRAME_SIZE_MIN:
                if at:
                    return at, NO_STOP
                raise FrameSizeInvalid(f"a frame of {frame} bytes; the limit is {size_max}")
            if command_type in special:
                if command_type in stops:
                    keeps_alive = keep_alive_at(buffer, at, size) if stops is ALL_TYPES else 0
                    if keeps_alive <= 0:
                        return at, INCOMPLETE if keeps_alive else command_type
                elif not self._count(buffer, at, size, frame):
                    return at, INCOMPLETE
            elif frame != before:
                before, row = frame, 0
            elif (row := row + 1) == _ROW:  # messages of one size come in long rows
                at += _bytes_of_alike(buffer, at, last - at, frame + _SIZE_BYTES, _HEAD_COLUMNS)
                row = 0
            at += frame + _SIZE_BYTES
        return at, INCOMPLETE if at < size else NO_STOP

    def _count(self, buffer: bytes | bytearray | memoryview, at: int, size: int, frame: int) -> bool:
        """Count the messages of a frame that counts; whether enough of it is there."""
        if self._counted_type != BaseCommand.SEND:
            self.message_count += 1
        elif size - at < COUNTED_BYTES and size - at < frame + _SIZE_BYTES:
            return False
        else:
            self.message_count += messages_of_send(buffer, at, size)
        return True

    def read_first_head(self, buffer: bytes | bytearray | memoryview, size: int) -> tuple[int, int]:
        """Of the first frame: its length with its size, and the type of its command or PART. Counts nothing.
        Raises FrameWrong.
        """
        if size < HEADER_BYTES:
            if size >= _SIZE_BYTES:
                self._check(int.from_bytes(buffer[:_SIZE_BYTES], "big"))
            return 0, INCOMPLETE
        frame, command_type = _head(buffer, 0)
        self._check(frame)
        return frame + _SIZE_BYTES, command_type

    def _check(self, frame: int) -> None:
        if not _FRAME_SIZE_MIN <= frame <= self._size_max:
            raise FrameSizeInvalid(f"a frame of {frame} bytes; the limit is {self._size_max}")

    def take_message_count(self) -> int:
        """How many were counted since the last time."""
        messages, self.message_count = self.message_count, 0
        return messages


class ClientFrameScanner(FrameScanner):
    """The same for what a client sends: each command's type is known for certain, or its frame is wrong."""

    __slots__ = ()

    def scan_frames(self, buffer: bytes | bytearray, size: int) -> tuple[int, int]:  # noqa: C901 -- the hot path
        """As FrameWalk.walk; needs more of a frame, though never more than HEAD_BYTES_MAX, where none is counted."""
        at, head, plain_heads, stops, size_max = 0, _client_head, PLAIN_HEADS, self.stop_types, self._size_max
        before = row = 0
        special = stops | {self._counted_type} if self._counted_type else stops
        last = size - HEAD_BYTES
        known_key, least, command_type, is_special = -1, 0, 0, False
        while True:
            while at <= last:
                frame, key = head(buffer, at)
                if key != known_key:  # where sizes change, other heads than the last one are still rare
                    least, command_type = divmod(plain_heads.get(key, _NOT_PLAIN), 256)
                    known_key, is_special = key, command_type in special
                if not least <= frame <= size_max:
                    break
                if is_special:
                    if command_type in stops:  # neither PING nor PONG has a plain head
                        return at, command_type
                    if not self._count(buffer, at, size, frame):
                        return at, INCOMPLETE
                elif frame != before:
                    before, row = frame, 0
                elif (row := row + 1) == _ROW:
                    at += _bytes_of_alike(buffer, at, last - at, frame + _SIZE_BYTES, _CLIENT_HEAD_COLUMNS)
                    row = 0
                at += frame + _SIZE_BYTES
            if at >= size:
                return at, NO_STOP
            length, stop = self._look_closer(buffer, at, size)
            if not length:
                return at, stop
            at += length
            before = 0

    def _look_closer(self, buffer: bytes | bytearray, at: int, size: int) -> tuple[int, int]:
        """Of the frame at ``at``, with all that a head may be: its length where it may pass, else 0; and what is there,
        as ``walk`` says it.
        """
        if size - at < _SIZE_BYTES:
            return 0, INCOMPLETE
        frame = int.from_bytes(buffer[at : at + _SIZE_BYTES], "big")
        try:
            self._check(frame)
            if self.stop_types is ALL_TYPES and (keeps_alive := keep_alive_at(buffer, at, size)):
                return (0, INCOMPLETE) if keeps_alive == INCOMPLETE else (keeps_alive, NO_STOP)
            command_type = command_type_at(buffer, at, size)
        except FrameInvalid:
            if at:
                return 0, NO_STOP
            raise
        if command_type == INCOMPLETE or command_type in self.stop_types:
            return 0, command_type
        if command_type == self._counted_type and not self._count(buffer, at, size, frame):
            return 0, INCOMPLETE
        return frame + _SIZE_BYTES, NO_STOP


def _bytes_of_alike(buffer: bytes | bytearray, at: int, there: int, length: int, columns: tuple[int, ...]) -> int:
    """How many bytes the frames take that follow the one at ``at``, of this length, and begin as it does in all of
    these columns. ``there``: how far behind it the last header begins that is there whole.

    Not all of them, and only frames whose header is there. One look at a column of headers costs as much as a look at
    one header by itself.
    """
    first = at + length
    alike = max(0, min(_ALIKE_MAX, there // length))
    for column in columns:
        values = buffer[first + column : first + column + alike * length : length]
        one = buffer[at + column : at + column + 1]
        if values != one * alike:
            alike -= len(values.lstrip(one))
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

    __slots__ = ("_bytes", "_left", "_scanner", "_taken", "stopped_at")

    def __init__(self, walk: FrameScanner) -> None:
        self._scanner = walk
        self._bytes = b""
        self._left = 0
        self._taken = b""
        self.stopped_at = NO_STOP

    @property
    def at_boundary(self) -> bool:
        """Whether everything that was passed on ends with a frame."""
        return not self._left

    def receive_data(self, data: bytes | bytearray) -> None:
        """The next bytes of the stream."""
        self._bytes = self._bytes + data if self._bytes else bytes(data)

    def take_passable(self, *, one_frame: bool = False) -> bytes:
        """Bytes that may pass; ``one_frame``: no further than to the next boundary. Raises FrameWrong."""
        data, left, self.stopped_at = self._bytes, self._left, NO_STOP
        if left < len(data) and not (one_frame and left):
            rest = data[left:] if left else data
            more, self.stopped_at = self._scanner.scan_frames(rest, len(rest))
            left += more
        passed = data[:left]
        self._bytes = data[left:]
        self._left = left - len(passed)
        return passed

    def take_stopped_frame_bytes(self) -> bytes:
        """Of bytes that may pass, those of the frame that is stopped at. Raises FrameWrong."""
        length, self.stopped_at = self._scanner.read_first_head(self._bytes, len(self._bytes))
        passed, self._bytes = self._bytes[:length], self._bytes[length:]
        self._left = length - len(passed)
        return passed

    def stopped_frame_length(self) -> int:
        """Of the frame that is stopped at, its size included. Raises FrameWrong."""
        return self._scanner.read_first_head(self._bytes, len(self._bytes))[0]

    def remove_frame(self) -> bytes | None:
        """The frame that is stopped at, out of the stream; None until all of it is there. Raises FrameWrong."""
        length = self.stopped_frame_length()
        if len(self._bytes) < length:
            return None
        frame, self._bytes = self._bytes[:length], self._bytes[length:]
        self.stopped_at = NO_STOP
        return frame

    def take_unread_data(self) -> bytes:
        """What is held: the stream ends here."""
        rest, self._bytes = self._bytes, b""
        return rest
