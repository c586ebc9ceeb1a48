"""Protobuf's varints, for the few places that split and join messages without parsing them."""

_PAYLOAD_BITS = 7
_PAYLOAD = 0x7F
_MORE = 0x80


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
