"""Protobuf's varints, for the few places where a message is cut and put together without being parsed."""

_PAYLOAD_BITS = 7
_PAYLOAD = 0x7F
_MORE = 0x80


def varint(value: int) -> bytes:
    """A number that is not negative, as protobuf writes it."""
    out = bytearray()
    while value > _PAYLOAD:
        out.append(value & _PAYLOAD | _MORE)
        value >>= _PAYLOAD_BITS
    out.append(value)
    return bytes(out)


def tag(field_number: int, wire_type: int) -> bytes:
    """What stands before a field's value; wire type 0: a varint, 2: bytes with their length."""
    return varint(field_number << 3 | wire_type)
