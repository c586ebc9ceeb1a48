"""Command types read from a frame's first bytes without a parser, in the one form that every parser reads alike.

In protobuf the last ``type`` counts, at any position and in any encoding of its tag. Pulsar's own parser (LightProto)
differs from protobuf: a field may reach beyond the message that contains it, and the bytes behind are then read as the
command's next field. A type at the beginning is therefore no proof by itself. It is one in the form that all clients
write, and only that form passes here:

    [total size u32][command size u32][08 type], and at most one further field, a message, which ends with the command:
    [its tag, one or two bytes][its length, to the command's end]

Behind such a message no parser finds anything to read. Fields behind it are refused, harmless ones included: to find
their ends takes a parser, and only the broker knows which one it uses. No BaseCommand of any version of Pulsar has had
such a field.
"""

from proto.errors import RemoteProtocolError
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand

HEAD_BYTES = 12
"""Bytes that determine the type of most commands that clients send: a tag and a length of one byte each."""

HEAD_BYTES_MAX = 17
"""Bytes that determine the type of any command: a tag of two bytes, a length of five."""

INCOMPLETE = -1
"""Result in place of a command's type: too few bytes of the frame have arrived."""

SIZE_BYTES = 4
KEEP_ALIVE_BYTES = 13
KEEP_ALIVE_FRAMES = frozenset(
    encode_frame(command.SerializeToString())
    for command in (BaseCommand(type=BaseCommand.PING, ping={}), BaseCommand(type=BaseCommand.PONG, pong={}))
)
"""PING and PONG as every client and broker writes them. Only these bytes are certain to be a keep-alive and no more."""

_COMMAND_AT = 2 * SIZE_BYTES
_TYPE_BYTES = 2
_TYPE_TAG = 0x08
_ONE_BYTE_MAX = 0x7F
_WIRE_TYPE = 0x07
_BYTES = 2
_FIELD_TAG_MIN = 0x12  # of field 2: field 1 is the type's
_LENGTH_BYTES_MAX = 5
_TYPE_OF_ONE_BYTE_TAG_MAX = 15

Buffer = bytes | bytearray | memoryview


class FrameInvalid(RemoteProtocolError):
    """Bytes that cannot be a frame. No further frame boundary of the stream is reliable."""


class CommandHeadInvalid(FrameInvalid):
    """A command that does not begin with its type, or that a parser may read as one of another type."""


def _plain_heads() -> dict[int, int]:
    """Build PLAIN_HEADS. The field number of a command's message equals the command's type."""
    heads = {}
    for command_type in range(BaseCommand.CONNECT, _TYPE_OF_ONE_BYTE_TAG_MAX + 1):
        for length in range(_ONE_BYTE_MAX + 1):
            command = _TYPE_BYTES + 2 + length
            tag = command_type << 3 | _BYTES
            head = command.to_bytes(SIZE_BYTES, "big") + bytes((_TYPE_TAG, command_type, tag, length))
            heads[int.from_bytes(head, "big")] = (SIZE_BYTES + command) << 8 | command_type
    return heads


PLAIN_HEADS = _plain_heads()
"""Fast path for commands whose tag and length take a byte each; ``command_type_at`` covers all.

Key: the eight bytes behind a frame's size, as a number. Value: the least size of the frame << 8 | the type.
"""


def command_type_at(buffer: Buffer, at: int, size: int) -> int:
    """Return the type of the command in the frame at ``at``; INCOMPLETE if the bytes up to ``size`` are too few.

    The caller has checked the frame's own size. Raises CommandHeadInvalid.
    """
    there = size - at
    if there < _COMMAND_AT + _TYPE_BYTES:
        return INCOMPLETE
    frame = int.from_bytes(buffer[at : at + SIZE_BYTES], "big")
    command = int.from_bytes(buffer[at + SIZE_BYTES : at + _COMMAND_AT], "big")
    if not _TYPE_BYTES <= command <= frame - SIZE_BYTES:
        raise CommandHeadInvalid(f"a command of {command} bytes in a frame of {frame}")
    begin = at + _COMMAND_AT
    return command_type_of(bytes(buffer[begin : min(begin + HEAD_BYTES_MAX, size)]), command)


def command_type_of(head: bytes, command_bytes: int) -> int:
    """Return the type of a serialized command of ``command_bytes`` bytes by its first bytes.

    INCOMPLETE if ``head`` is too short for that. Raises CommandHeadInvalid.
    """
    if len(head) < min(_TYPE_BYTES, command_bytes):
        return INCOMPLETE
    if command_bytes < _TYPE_BYTES or head[0] != _TYPE_TAG or head[1] > _ONE_BYTE_MAX:
        raise CommandHeadInvalid("a command that does not begin with its type")
    if command_bytes > _TYPE_BYTES:
        at = _end_of_tag(head, _TYPE_BYTES)
        if at != INCOMPLETE:
            at = _end_of_length(head, at, command_bytes)
        if at == INCOMPLETE:
            if len(head) < command_bytes:
                return INCOMPLETE
            raise CommandHeadInvalid("a command that ends within its message's head")
    return head[1]


def check_type_is_first(command: BaseCommand, data: bytes) -> None:
    """Check that the type is the first field of a serialized command, in one byte, once, given the parsed command.

    A parsed command needs no more than that, so fields that are newer than this proxy may follow. Raises
    CommandHeadInvalid.
    """
    # Serializing again drops repeated fields and encodings that are longer than needed.
    size = len(command.SerializePartialToString())
    one_byte = 0 <= command.type <= _ONE_BYTE_MAX
    if size != len(data) or not one_byte or data[:_TYPE_BYTES] != bytes((_TYPE_TAG, command.type)):
        raise CommandHeadInvalid("a command whose type does not stand first, and once")


def _end_of_tag(head: bytes, at: int) -> int:
    """Return where the tag of the command's message ends; INCOMPLETE if that byte has not arrived."""
    if at >= len(head):
        return INCOMPLETE
    first = head[at]
    if first & _WIRE_TYPE != _BYTES or first < _FIELD_TAG_MIN:
        raise CommandHeadInvalid("a command with something else than its message behind its type")
    if first <= _ONE_BYTE_MAX:
        return at + 1
    if at + 1 >= len(head):
        return INCOMPLETE
    if not 0 < head[at + 1] <= _ONE_BYTE_MAX:
        raise CommandHeadInvalid("a command with an invalid tag of its message")
    return at + 2


def _end_of_length(head: bytes, at: int, command_bytes: int) -> int:
    """Return where the length of the command's message ends; INCOMPLETE if that byte has not arrived.

    The message must reach to the command's end.
    """
    length = 0
    for index in range(_LENGTH_BYTES_MAX):
        if at + index >= len(head):
            return INCOMPLETE
        byte = head[at + index]
        length |= (byte & _ONE_BYTE_MAX) << 7 * index
        if byte <= _ONE_BYTE_MAX:
            if at + index + 1 + length != command_bytes:
                break
            return at + index + 1
    raise CommandHeadInvalid("a command that does not end with its message")


def keep_alive_at(buffer: Buffer, at: int, size: int) -> int:
    """Return the length of the PING or PONG at ``at``; INCOMPLETE if it may become one; 0 if it is something else."""
    seen = bytes(buffer[at : min(size, at + KEEP_ALIVE_BYTES)])
    if seen in KEEP_ALIVE_FRAMES:
        return KEEP_ALIVE_BYTES
    return INCOMPLETE if any(frame.startswith(seen) for frame in KEEP_ALIVE_FRAMES) else 0
