"""proto.varints, against varints written elsewhere."""

import pulsar_bytes
import pytest
from google.protobuf.internal import encoder  # type: ignore[import-untyped]

from proto.rpc_pb2 import Connection, ConnectionsPage, ForwarderProcess
from proto.varints import has_more_fields, read_varint, tag, varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**28, 2**35 - 1, 2**63, 2**64 - 1])
def test_a_number(value: int) -> None:
    out: list[bytes] = []
    encoder._EncodeVarint(out.append, value)
    written = varint(value)
    assert written == pulsar_bytes.varint(value) == b"".join(out)
    assert read_varint(b"\xff" + written + b"\xff", 1, len(written) + 2) == (value, 1 + len(written))
    assert read_varint(written, 0, len(written) - 1) == (0, len(written) - 1), "cut off"


@pytest.mark.parametrize("number", [1, 15, 16, 23, 2047, 2**29 - 1])
@pytest.mark.parametrize("wire_type", [0, 2])
def test_a_tag(number: int, wire_type: int) -> None:
    assert tag(number, wire_type) == encoder.TagBytes(number, wire_type)


def test_fields_are_counted_without_parsing() -> None:
    row = Connection(client_address="x" * 300, bytes_to_broker=2**40)
    page = ConnectionsPage(connections=[row, Connection()], next=1 << 63, forwarders=[ForwarderProcess(pid=1)])
    of_other_types = b"\x7d" + bytes(4) + b"\x79" + bytes(8) + b"\x7b\x7c"  # 4 and 8 bytes, an empty group
    for message, fields in ((page.SerializeToString(), 4), (of_other_types, 4)):
        assert not has_more_fields(message, fields)
        assert has_more_fields(message + b"\x10\x00", fields)
        assert has_more_fields(message, fields - 1)


@pytest.mark.parametrize("message", [b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 100_000, b"\x10", b"\x0a\x05ab"])
def test_what_is_cut_off_has_no_more_fields(message: bytes) -> None:
    """Security: the parser stops there, too."""
    assert not has_more_fields(message, 100_000)
