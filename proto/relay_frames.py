"""Frame boundaries in a relay's byte stream, found from the first bytes of each frame (KIP-368).

A relay with a session that can expire injects a challenge between two frames, removes the answer from the stream, and
stops at the first frame that is sent too late. A relay that counts messages reads SEND and MESSAGE. All this takes only
the first bytes of a frame. So only these are read and the rest is skipped, whether the bytes are in the kernel and seen
through a copy (``FrameScanner``) or in memory (``FrameCutter``).

A frame begins ``[total size u32][command size u32][08 type]``: clients and brokers write a BaseCommand's first field
first. ``ClientFrameScanner`` reads a client's frames and accepts no other form, in which the broker could read another
command than the proxy (proto.command_heads). A broker's frames are trusted to be of the type that they begin with: a
broker that wants to deceive can do so in any form.
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
from proto.varints import read_varint

HEADER_BYTES = 10
"""Length of both sizes, the tag of a BaseCommand's type, and the type."""

COUNTED_BYTES = 40
"""Bytes of a SEND that contain all fields to read, however large their numbers are."""

NO_STOP = 0
"""Result in place of a command's type: there is no command to stop at."""

NO_TYPES: frozenset[int] = frozenset()
ALL_TYPES = frozenset(range(256))
"""All types of commands to stop at: only PING and PONG pass then, and these only byte for byte."""

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
"""Read a frame's size and the type of its command."""

_HEAD_COLUMNS = (3, 2, 9, 1, 0)
"""Offsets of the bytes of these two in a frame; those that differ most often come first."""

_client_head = struct.Struct(">IQ").unpack_from
"""Read a frame's size and its key in PLAIN_HEADS."""

_CLIENT_HEAD_COLUMNS = (3, 9, 7, 11, 10, 2, 1, 0, 6, 5, 4, 8)
"""Offsets of all bytes of these two: a frame that is equal in them to a checked one needs no check."""

_NOT_PLAIN = 1 << 40
"""Stand-in for heads that are not in PLAIN_HEADS: a least frame size that no frame has."""

_ROW = 3
"""Repetitions of a frame size after which the next frames are expected to be equal, too."""

_EQUAL_FRAMES_MAX = 128
"""Most frames that are compared at once in the hope that they are equal; bounds the cost where they are not."""

SLOW_FRAMES_MAX = 128
"""Most frames that a scan looks at for longer, to count their messages or to check their heads (PING among them): a
peer that sends nothing but these delays no other. A look at any other frame is short, and the buffer bounds them."""


class FrameSizeInvalid(FrameInvalid):
    """A frame of an impossible size. No further frame boundary can be found in the stream."""


def frame_bytes_max(connected: CommandConnected) -> int:
    """Return the largest size that a frame on a connection with this broker may announce, in bytes."""
    return (connected.max_message_size or _DEFAULT_MESSAGE_BYTES_MAX) + _FRAME_PADDING_BYTES


class FrameScanner:
    """Scanner for frame boundaries in bytes that begin at one.

    ``stop_types``: the types of commands to stop at. ``counted_type``: the type of command to count in
    ``message_count``; 0: none. A SEND counts as many messages as it states for its batch. A MESSAGE counts as one: the
    broker delivers entries, and the number of messages in an entry is in its metadata, which the proxy does not read.
    ``slow_frames_left``: how many more slow frames the last scan could have looked at.
    """

    __slots__ = ("_counted_type", "_size_max", "message_count", "slow_frames_left", "stop_types")

    def __init__(self, *, frame_bytes_max: int, stop_types: AbstractSet[int] = NO_TYPES, counted_type: int = 0) -> None:
        self.stop_types = stop_types
        self.message_count = 0
        self.slow_frames_left = SLOW_FRAMES_MAX
        self._counted_type = counted_type
        self._size_max = frame_bytes_max

    def scan_frames(  # noqa: C901 -- the hot path
        self, buffer: bytes | bytearray, size: int, slow_max: int = SLOW_FRAMES_MAX
    ) -> tuple[int, int]:
        """Return how many of the buffer's bytes may pass, and what follows them.

        The first number ends at a frame boundary, which may be beyond ``size``. The second one is the type of a command
        to stop at, INCOMPLETE or NO_STOP. Messages in frames that may pass are counted. Raises FrameInvalid if the
        first frame is invalid; before a later invalid one the scan only ends, as after ``slow_max`` slow frames.
        """
        at, head, stops, counts, size_max = 0, _head, self.stop_types, self._counted_type, self._size_max
        before = row = 0
        special = stops | {counts} if counts else stops
        last = size - HEADER_BYTES
        self.slow_frames_left = slow_max
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
                elif not self._count_messages(buffer, at, size, frame):
                    return at, INCOMPLETE
                if self._is_last_slow_frame():
                    return at + frame + _SIZE_BYTES, NO_STOP
            elif frame != before:
                before, row = frame, 0
            elif (row := row + 1) == _ROW:  # messages of one size come in long rows
                at += _bytes_of_equal_frames(buffer, at, last - at, frame + _SIZE_BYTES, _HEAD_COLUMNS)
                row = 0
            at += frame + _SIZE_BYTES
        return at, INCOMPLETE if at < size else NO_STOP

    def _is_last_slow_frame(self) -> bool:
        """Record a slow frame; return whether the scan is to end behind it."""
        self.slow_frames_left -= 1
        return self.slow_frames_left <= 0

    def _count_messages(self, buffer: bytes | bytearray | memoryview, at: int, size: int, frame: int) -> bool:
        """Count the messages of a frame of the counted type; return False if too few of its bytes are there."""
        if self._counted_type != BaseCommand.SEND:
            self.message_count += 1
        else:
            needed = min(COUNTED_BYTES, frame + _SIZE_BYTES)  # no further: what follows is another frame's
            if size - at < needed:
                return False
            self.message_count += messages_of_send(buffer, at, at + needed)
        return True

    def read_first_head(self, buffer: bytes | bytearray | memoryview, size: int) -> tuple[int, int]:
        """Return the first frame's length, its size field included, and its command's type.

        The length is 0 and the type INCOMPLETE if the head is incomplete. Counts no messages. Raises FrameInvalid.
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
        """Return the messages counted since the last call, and reset the count."""
        messages, self.message_count = self.message_count, 0
        return messages


class ClientFrameScanner(FrameScanner):
    """FrameScanner for a client's bytes: each command's type is known for certain, or its frame is invalid."""

    __slots__ = ()

    def scan_frames(  # noqa: C901, PLR0912 -- the hot path
        self, buffer: bytes | bytearray, size: int, slow_max: int = SLOW_FRAMES_MAX
    ) -> tuple[int, int]:
        """Scan as in FrameScanner; needs more bytes of a frame, at most HEAD_BYTES_MAX where none is counted."""
        at, head, plain_heads, stops, size_max = 0, _client_head, PLAIN_HEADS, self.stop_types, self._size_max
        before = row = 0
        special = stops | {self._counted_type} if self._counted_type else stops
        last = size - HEAD_BYTES
        known_key, least, command_type, is_special = -1, 0, 0, False
        self.slow_frames_left = slow_max
        while True:
            while at <= last:
                frame, key = head(buffer, at)
                if key != known_key:  # where sizes change, heads other than the last one are still rare
                    least, command_type = divmod(plain_heads.get(key, _NOT_PLAIN), 256)
                    known_key, is_special = key, command_type in special
                if not least <= frame <= size_max:
                    break
                if is_special:
                    if command_type in stops:  # neither PING nor PONG has a plain head
                        return at, command_type
                    if not self._count_messages(buffer, at, size, frame):
                        return at, INCOMPLETE
                    if self._is_last_slow_frame():
                        return at + frame + _SIZE_BYTES, NO_STOP
                elif frame != before:
                    before, row = frame, 0
                elif (row := row + 1) == _ROW:
                    at += _bytes_of_equal_frames(buffer, at, last - at, frame + _SIZE_BYTES, _CLIENT_HEAD_COLUMNS)
                    row = 0
                at += frame + _SIZE_BYTES
            if at >= size:
                return at, NO_STOP
            length, stop = self._check_head(buffer, at, size)
            if not length:
                return at, stop
            at += length
            before = 0
            if self._is_last_slow_frame():
                return at, NO_STOP

    def _check_head(self, buffer: bytes | bytearray, at: int, size: int) -> tuple[int, int]:
        """Return the length of the frame at ``at`` if it may pass, else 0, and what follows, as ``scan_frames`` does.

        Covers every valid form of a head.
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
        if command_type == self._counted_type and not self._count_messages(buffer, at, size, frame):
            return 0, INCOMPLETE
        return frame + _SIZE_BYTES, NO_STOP


def _bytes_of_equal_frames(
    buffer: bytes | bytearray, at: int, headers_bytes: int, length: int, columns: tuple[int, ...]
) -> int:
    """Return how many bytes the frames take that follow the one at ``at`` and equal it in length and all ``columns``.

    ``headers_bytes``: from the frame at ``at`` to the start of the last header that is there whole. Not all equal
    frames are found, and only those with a whole header. To compare a column of headers costs as much as to compare a
    single header.
    """
    first = at + length
    equal = max(0, min(_EQUAL_FRAMES_MAX, headers_bytes // length))
    for column in columns:
        values = buffer[first + column : first + column + equal * length : length]
        one = buffer[at + column : at + column + 1]
        if values != one * equal:
            equal -= len(values.lstrip(one))
            if not equal:
                break
    return equal * length


def messages_of_send(buffer: bytes | bytearray | memoryview, frame_at: int, end: int) -> int:
    """Return the ``num_messages`` of the SEND in the frame at ``frame_at``; 1 if it has none."""
    at = frame_at + HEADER_BYTES
    if at >= end or buffer[at] != _SEND_TAG:
        return 1
    _length, at = read_varint(buffer, at + 1, end)
    while at < end:
        tag = buffer[at]
        number, at = read_varint(buffer, at + 1, end)
        if tag == _NUM_MESSAGES_TAG:
            return number if 1 <= number <= _MESSAGES_MAX else 1
        if tag not in _SEND_FIELDS:
            break
    return 1


class FrameCutter:
    """FrameScanner for bytes in memory that arrive in any pieces. Holds at most the beginning of one frame.

    Call ``receive_data`` with a piece, then ``take_passable`` until it returns nothing. If ``stopped_at`` is then a
    command's type, its frame comes next: change the scanner's ``stop_types`` and call again, or call ``remove_frame``
    until it returns the frame, or stop for good.
    """

    __slots__ = ("_bytes", "_bytes_to_boundary", "scanner", "stopped_at")

    def __init__(self, scanner: FrameScanner) -> None:
        self.scanner = scanner
        self._bytes = b""
        self._bytes_to_boundary = 0
        self.stopped_at = NO_STOP
        """Type of the command whose frame comes next, INCOMPLETE or NO_STOP."""

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes returned so far end with a frame."""
        return not self._bytes_to_boundary

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Append the stream's next bytes."""
        self._bytes = self._bytes + data if self._bytes else bytes(data)

    def take_passable(self, *, one_frame: bool = False) -> bytes:
        """Return bytes that may pass; with ``one_frame`` no further than to the next boundary. Raises FrameInvalid."""
        data, left, self.stopped_at = self._bytes, self._bytes_to_boundary, NO_STOP
        if left < len(data) and not (one_frame and left):
            rest = data[left:] if left else data
            try:
                more, self.stopped_at = self.scanner.scan_frames(rest, len(rest))
            except FrameInvalid:
                if not left:
                    raise
                more = 0  # the end of the frame before it passes first, as where both arrive in one piece
            left += more
        passed = data[:left]
        self._bytes = data[left:]
        self._bytes_to_boundary = left - len(passed)
        return passed

    def stopped_frame_length(self) -> int:
        """Return the length of the frame stopped at, its size field included. Raises FrameInvalid."""
        return self.scanner.read_first_head(self._bytes, len(self._bytes))[0]

    def remove_frame(self) -> bytes | None:
        """Remove the frame stopped at from the stream; return None until all of it is there. Raises FrameInvalid."""
        length = self.stopped_frame_length()
        if len(self._bytes) < length:
            return None
        frame, self._bytes = self._bytes[:length], self._bytes[length:]
        self.stopped_at = NO_STOP
        return frame

    def take_unread_data(self) -> bytes:
        """Return the bytes that are held, and clear them: the stream ends here."""
        rest, self._bytes = self._bytes, b""
        return rest

    def drop_rest(self) -> None:
        """Drop what is left of the frame that has begun to pass, and all behind it that is held."""
        self._bytes, self._bytes_to_boundary = b"", 0
