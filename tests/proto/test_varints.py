"""proto.varints, against varints written elsewhere."""

import pulsar_bytes
import pytest
from google.protobuf.internal import encoder  # type: ignore[import-untyped]

from proto.varints import tag, varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**28, 2**35 - 1, 2**63, 2**64 - 1])
def test_a_number(value: int) -> None:
    out: list[bytes] = []
    encoder._EncodeVarint(out.append, value)
    assert varint(value) == pulsar_bytes.varint(value) == b"".join(out)


@pytest.mark.parametrize("number", [1, 15, 16, 23, 2047, 2**29 - 1])
@pytest.mark.parametrize("wire_type", [0, 2])
def test_a_tag(number: int, wire_type: int) -> None:
    assert tag(number, wire_type) == encoder.TagBytes(number, wire_type)
