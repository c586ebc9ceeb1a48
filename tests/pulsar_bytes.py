"""Pulsar's bytes written and read by hand: what a test expects must not come from the schema that it tests.

Field numbers in the tests are those of Pulsar 4.0.8's compiled classes (``javap -constants`` on pulsar-common).
"""

import struct

Field = tuple[int, int | bytes]
"""Field number, and its value: an int (wire type 0) or bytes (wire type 2)."""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    """One field: an int as a varint, all else with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(*pairs: tuple[int, int | bytes | str]) -> bytes:
    """A message of several fields."""
    return b"".join(field(number, value) for number, value in pairs)


def command(kind: int, body: bytes | None = b"") -> bytes:
    """A BaseCommand: its message stands in the field whose number is the type's value."""
    return field(1, kind) + (b"" if body is None else field(kind, body))


def frame(command_bytes: bytes, payload: bytes = b"") -> bytes:
    """A frame: total size, command size, command, payload."""
    return struct.pack(">II", 4 + len(command_bytes) + len(payload), len(command_bytes)) + command_bytes + payload


def decoded(message: bytes) -> list[Field]:
    """The fields of a message, sorted: the order of fields says nothing."""
    found: list[Field] = []
    position = 0
    while position < len(message):
        tag, position = _varint_at(message, position)
        value, position = _varint_at(message, position)
        if tag & 7 == 0:
            found.append((tag >> 3, value))
        elif tag & 7 == 2:
            found.append((tag >> 3, message[position : position + value]))
            position += value
        else:
            raise AssertionError(f"wire type {tag & 7} at {position}")
    return sorted(found, key=lambda pair: (pair[0], str(pair[1])))


def decoded_command(command_bytes: bytes) -> tuple[int, dict[int, int | bytes]]:
    """The type of a BaseCommand, and the fields of its message."""
    outer = dict(decoded(command_bytes))
    kind = outer.pop(1)
    assert isinstance(kind, int)
    assert list(outer) == [kind], "the message stands under the number of its type, and nothing beside it"
    body = outer[kind]
    assert isinstance(body, bytes)
    return kind, dict(decoded(body))


def decoded_frame(frame_bytes: bytes) -> tuple[int, dict[int, int | bytes]]:
    """The same for a frame without payload; its sizes must be right."""
    total, size = struct.unpack(">II", frame_bytes[:8])
    assert total == len(frame_bytes) - 4
    assert size == len(frame_bytes) - 8
    return decoded_command(frame_bytes[8:])


def _varint_at(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
