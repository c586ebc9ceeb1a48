"""Tell a command's type from its frame's first bytes, without parsing it, so that no parser finds another one.

In protobuf the last ``type`` counts, wherever it stands and however its tag is written. Pulsar's own parser
(LightProto) differs from protobuf in ways of its own: a field may reach beyond the message that it is in, and what
stands behind is then read as the command's next field. So a type at the beginning says nothing by itself. It does in
the one form that all clients write, and only that is let pass here:

    [total size u32][command size u32][08 type], and at most one further field, a message, which ends with the command:
    [its tag, one or two bytes][its length, to the command's end]

Behind such a message there is nothing left to be read, for any parser. Fields behind it are refused, also harmless
ones: to find their ends is a parser's work, and which parser's, only the broker knows. No BaseCommand of any version
of Pulsar has had one.
"""

from proto.errors import RemoteProtocolError
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand

HEAD_BYTES = 12
"""Of most commands that clients send, by here the type is known for certain: a tag and a length of one byte each."""

HEAD_BYTES_MAX = 17
"""The same of all: a tag of two bytes, a length of five."""

INCOMPLETE = -1
"""Instead of a command's type: its frame has begun, but too little of it is there."""

SIZE_BYTES = 4
KEEP_ALIVE_BYTES = 13
KEEP_ALIVE_FRAMES = frozenset(
    encode_frame(command.SerializeToString())
    for command in (BaseCommand(type=BaseCommand.PING, ping={}), BaseCommand(type=BaseCommand.PONG, pong={}))
)
"""PING and PONG as every client and broker writes them: only these say that somebody is there, and nothing else."""

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
    """A frame that none can be: the stream has no further boundary that can be relied on."""


class CommandHeadInvalid(FrameInvalid):
    """A command that does not begin with its type, or may hold another one behind it."""


def _plain_heads() -> dict[int, int]:
    """See PLAIN_HEADS. A command's message has its type as its field's number."""
    heads = {}
    for command_type in range(BaseCommand.CONNECT, _TYPE_OF_ONE_BYTE_TAG_MAX + 1):
        for length in range(_ONE_BYTE_MAX + 1):
            command = _TYPE_BYTES + 2 + length
            tag = command_type << 3 | _BYTES
            head = command.to_bytes(SIZE_BYTES, "big") + bytes((_TYPE_TAG, command_type, tag, length))
            heads[int.from_bytes(head, "big")] = (SIZE_BYTES + command) << 8 | command_type
    return heads


PLAIN_HEADS = _plain_heads()
"""Of commands whose tag and length take a byte each: the eight bytes behind a frame's size, as a number → the least
size of their frame, and in the last byte the type. A quick way for most frames; ``command_type_at`` knows all.
"""


def command_type_at(buffer: Buffer, at: int, size: int) -> int:
    """The type of the command whose frame begins at ``at``, whose own size was looked at; PART where less than that is
    there up to ``size``. Raises CommandHeadWrong.
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
    """The type of a serialized command of so many bytes, by those that it begins with; PART where these are too few to
    tell. Raises CommandHeadWrong.
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
    """Check that the type stands first in a serialized command, and nowhere else, where protobuf has parsed it whole:
    that needs no more, so fields that are newer than this proxy may follow. Raises CommandHeadWrong.
    """
    # What stands twice, or is written longer than needed, is gone when it is written again.
    size = len(command.SerializePartialToString())
    if size != len(data) or data[:_TYPE_BYTES] != bytes((_TYPE_TAG, command.type & 0xFF)):
        raise CommandHeadInvalid("a command whose type does not stand first, and once")


def _end_of_tag(head: bytes, at: int) -> int:
    """Where the tag of the command's message ends; PART where that is not there."""
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
        raise CommandHeadInvalid("a command whose message has a tag that none has")
    return at + 2


def _end_of_length(head: bytes, at: int, command_bytes: int) -> int:
    """Where the length of the command's message ends, a message that must reach to the command's end; PART where that
    is not there.
    """
    length = 0
    for place in range(_LENGTH_BYTES_MAX):
        if at + place >= len(head):
            return INCOMPLETE
        byte = head[at + place]
        length |= (byte & _ONE_BYTE_MAX) << 7 * place
        if byte <= _ONE_BYTE_MAX:
            if at + place + 1 + length != command_bytes:
                break
            return at + place + 1
    raise CommandHeadInvalid("a command whose message does not end with it")


def keep_alive_at(buffer: Buffer, at: int, size: int) -> int:
    """How long the PING or PONG is that begins at ``at``; PART: perhaps it is one; 0: it is something else."""
    seen = bytes(buffer[at : min(size, at + KEEP_ALIVE_BYTES)])
    if seen in KEEP_ALIVE_FRAMES:
        return KEEP_ALIVE_BYTES
    return INCOMPLETE if any(frame.startswith(seen) for frame in KEEP_ALIVE_FRAMES) else 0
