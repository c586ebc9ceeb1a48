"""Protobuf's varints, for the few places that split and join messages without parsing them."""

_PAYLOAD_BITS = 7
_PAYLOAD = 0x7F
_MORE = 0x80
_BYTES_MAX = 10


def varint(value: int) -> bytes:
    """Encode a number that is not negative as protobuf writes it."""
    out = bytearray()
    while value > _PAYLOAD:
        out.append(value & _PAYLOAD | _MORE)
        value >>= _PAYLOAD_BITS
    out.append(value)
    return bytes(out)


def tag(field_number: int, wire_type: int) -> bytes:
    """Encode the tag in front of a field's value. Wire type 0: a varint; 2: bytes behind their length."""
    return varint(field_number << 3 | wire_type)


def read_varint(buffer: bytes | bytearray | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at ``at`` and where it ends; 0 and ``end`` if it is cut off."""
    value = shift = 0
    while at < end:
        byte = buffer[at]
        at += 1
        value |= (byte & _PAYLOAD) << shift
        if byte <= _PAYLOAD:
            return value, at
        shift += _PAYLOAD_BITS
    return 0, end


def has_more_fields(message: bytes, count_max: int) -> bool:
    """Return whether a message has more than ``count_max`` fields, without parsing it; each element of a list counts.

    A message that ends before is malformed, or has no more: parsing it then costs no more than that many fields.
    """
    at, end = 0, len(message)
    for _ in range(count_max):
        key, at = read_varint(message, at, min(at + _BYTES_MAX, end))
        match key & 7:  # the wire type; groups are counted by their tags
            case 0:
                _, at = read_varint(message, at, min(at + _BYTES_MAX, end))
            case 1:
                at += 8
            case 2:
                size, at = read_varint(message, at, min(at + _BYTES_MAX, end))
                at += size
            case 5:
                at += 4
        if at >= end:
            return False
    return True
