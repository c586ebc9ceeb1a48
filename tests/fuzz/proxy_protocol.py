"""proto.proxy_protocol: the outcome depends on the bytes alone, nothing behind a header is taken, nor too much held.

What is announced to a broker is read in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from proto.addresses import HostPort
from proto.proxy_protocol import (
    HEADER_BYTES_MAX,
    V2_SIGNATURE,
    ProxyHeader,
    ProxyHeaderInvalid,
    ProxyHeaderParser,
    encode_header,
)
from tests.fuzz.splits import splits

IPV4 = bytes([192, 0, 2, 7, 198, 51, 100, 1, 15, 160, 25, 250])

SEEDS = (
    b"PROXY TCP4 192.0.2.7 198.51.100.1 4000 6650\r\nbehind",
    b"PROXY TCP6 2001:db8::7 ::1 4000 6650\r\n",
    b"PROXY UNKNOWN\r\n",
    V2_SIGNATURE + b"\x21\x11\x00\x0c" + IPV4 + b"behind",
    V2_SIGNATURE + b"\x21\x11\x00\x13" + IPV4 + b"\x03\x00\x04\x00\x00\x00\x00",
    V2_SIGNATURE + b"\x21\x21\x00\x24" + bytes(36),
    V2_SIGNATURE + b"\x21\x11\x00\x19" + IPV4 + b"\x04\x00\x01\x00" + b"\xea\x00\x06vpce-1",
    V2_SIGNATURE + b"\x20\x00\x00\x00",
    b"\x16\x03\x01\x02\x00",
)


def check(data: bytes) -> None:
    whole = _parse([data])
    for pieces in splits(data):
        assert _parse(pieces) == whole, pieces
    match whole[0]:
        case ProxyHeader(client=HostPort() as client, destination=HostPort() as destination, tlvs=tlvs):
            announced = encode_header(client, destination, tlvs)
            assert len(announced) <= HEADER_BYTES_MAX
            [again, taken] = _parse([announced])
            assert isinstance(again, ProxyHeader)
            assert (again.tlvs, taken) == (tlvs, announced)
            assert again.client is not None
            assert again.destination is not None
            assert encode_header(again.client, again.destination, again.tlvs) == announced


def _parse(pieces: Sequence[bytes]) -> tuple[object, bytes]:
    """The outcome, and what of a header belongs to it."""
    parser = ProxyHeaderParser()
    for piece in pieces:
        try:
            size = parser.receive_data(piece)
        except ProxyHeaderInvalid as error:
            return str(error), b""
        assert 0 <= size <= len(piece)
        assert len(parser.taken) <= HEADER_BYTES_MAX
    return parser.outcome, bytes(parser.taken) if isinstance(parser.outcome, ProxyHeader) else b""
