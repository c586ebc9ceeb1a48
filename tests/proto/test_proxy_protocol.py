"""proto.proxy_protocol: headers of both versions, however they arrive; what is none, and what is broken."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.addresses import HostPort
from proto.proxy_protocol import (
    HEADER_BYTES_MAX,
    LOCAL_HEADER,
    V2_SIGNATURE,
    NoProxyHeader,
    ProxyHeader,
    ProxyHeaderInvalid,
    ProxyHeaderParser,
    crc32c,
    encode_header,
)

CLIENT, CLIENT_6 = HostPort("192.0.2.7", 4000), HostPort("2001:db8::7", 4000)
IPV4 = bytes([192, 0, 2, 7, 198, 51, 100, 1]) + struct.pack(">HH", 4000, 6650)
IPV6 = bytes.fromhex("20010db8000000000000000000000007") + bytes(16) + struct.pack(">HH", 4000, 6650)


def v2(command: int = 0x21, family: int = 0x11, body: bytes = IPV4) -> bytes:
    return V2_SIGNATURE + struct.pack(">BBH", command, family, len(body)) + body


def tlv(kind: int, value: bytes) -> bytes:
    return struct.pack(">BH", kind, len(value)) + value


def with_checksum(addresses: bytes, family: int = 0x11, *, wrong: int = 0) -> bytes:
    zeroed = v2(family=family, body=addresses + tlv(3, bytes(4)))
    return zeroed[:-4] + struct.pack(">I", crc32c(zeroed) ^ wrong)


def parse(data: bytes, *cuts: int) -> tuple[ProxyHeader | NoProxyHeader | None, bytes]:
    """The outcome, and what is left for who comes next."""
    parser = ProxyHeaderParser()
    left = b""
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        piece = data[start:end]
        left += piece[parser.receive_data(piece) :]
    if parser.outcome is NoProxyHeader.FOUND:
        left = bytes(parser.taken) + left
    return parser.outcome, left


GOOD = [
    (b"PROXY TCP4 192.0.2.7 198.51.100.1 4000 6650\r\n", CLIENT),
    (b"PROXY TCP6 2001:db8::7 ::1 4000 6650\r\n", CLIENT_6),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n", None),
    (b"PROXY TCP4 255.255.255.255 0.0.0.0 65535 0\r\n", HostPort("255.255.255.255", 65535)),
    (b"PROXY UNKNOWN " + b"x" * 91 + b"\r\n", None),  # 107 bytes
    (v2(), CLIENT),
    (v2(family=0x21, body=IPV6), CLIENT_6),
    (v2(command=0x20), None),
    (v2(command=0x20, family=0, body=b""), None),
    (v2(command=0x20, family=0x31, body=b"anything"), None),
    (v2(family=0, body=b""), None),
    (v2(body=IPV4 + tlv(4, b"\0" * 9) + tlv(0xEA, b"vpce-1")), CLIENT),
    (v2(body=IPV4 + tlv(4, b"\0" * (HEADER_BYTES_MAX - 16 - 12 - 3))), CLIENT),
    (with_checksum(IPV4), CLIENT),
    (with_checksum(IPV6, 0x21), CLIENT_6),
]


@pytest.mark.parametrize(("header", "client"), GOOD)
def test_headers_split_everywhere(header: bytes, client: HostPort | None) -> None:
    """What comes behind is left, for TLS or Pulsar's protocol."""
    behind = b"\r\n\x16\x03\x01behind"
    expected = found, _ = parse(header + behind)
    assert isinstance(found, ProxyHeader)
    assert (found.client, expected[1]) == (client, behind)
    for cut in range(len(header) + 1):
        assert parse(header + behind, cut) == expected
    assert parse(header + behind, *range(1, len(header))) == expected


@pytest.mark.parametrize("header", [header for header, _ in GOOD])
def test_a_header_that_is_not_whole(header: bytes) -> None:
    for end in range(len(header)):
        assert parse(header[:end])[0] is None


@pytest.mark.parametrize(
    "data",
    [b"\x00\x00\x00\x10", b"\x16\x03\x01", b"GET / HTTP/1.1", b"POST / HTTP/1.1", b"PROXYING", b"\r\n\r\n\0\r\nQUIT\r"],
)
def test_what_is_none(data: bytes) -> None:
    for cut in range(len(data)):
        assert parse(data, cut) == (NoProxyHeader.FOUND, data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 4000\r\n", "neither"),
        (b"PROXY TCP4 192.0.2.7  198.51.100.1 4000 1\r\n", "neither"),
        (b"PROXY UDP4 192.0.2.7 198.51.100.1 4000 1\r\n", "neither"),
        (b"PROXY \r\n", "neither"),
        (b"PROXY TCP4 192.0.2.07 198.51.100.1 4000 1\r\n", "address or port"),
        (b"PROXY TCP4 ::1 ::1 4000 1\r\n", "address or port"),
        (b"PROXY TCP6 192.0.2.7 192.0.2.7 4000 1\r\n", "address or port"),
        (b"PROXY TCP6 fe80::1%eth0 ::1 4000 1\r\n", "address or port"),
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 65536 1\r\n", "address or port"),
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 1 -1\r\n", "address or port"),
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 01 1\r\n", "address or port"),
        (b"PROXY TCP4 \xd9\xa1.0.2.7 198.51.100.1 1 1\r\n", "address or port"),
        (b"PROXY UNKNOWN " + b"x" * 92 + b"\r\n", "within 107"),
        (b"PROXY " + b"x" * 600, "within 107"),
        (v2(command=0x22), "command 0x22"),
        (v2(command=0x11), "command 0x11"),
        (v2(family=0x12), "transport 0x12"),
        (v2(family=0x31, body=bytes(216)), "transport 0x31"),
        (v2(body=IPV4[:-1]), "within its addresses"),
        (v2(family=0x21), "within its addresses"),
        (v2(body=bytes(HEADER_BYTES_MAX - 15)), "bytes; the limit"),
        (V2_SIGNATURE + b"\x21\x11\xff\xff", "bytes; the limit"),
        (v2(body=IPV4 + b"\x04\x00"), "within a TLV"),
        (v2(body=IPV4 + b"\x04\x00\x02\x00"), "within a TLV"),
        (v2(family=0, body=b"\x04\x00\x02\x00"), "within a TLV"),
        (with_checksum(IPV4, wrong=1), "checksum is not"),
        (v2(body=IPV4 + tlv(3, b"")), "checksum of another size"),
        (v2(body=IPV4 + tlv(3, bytes(4)) * 2), "or two of them"),
    ],
)
def test_what_is_broken(data: bytes, reason: str) -> None:
    with pytest.raises(ProxyHeaderInvalid, match=reason):
        parse(data)
    with pytest.raises(ProxyHeaderInvalid, match=reason):
        parse(data, *range(1, len(data)))


def test_a_checksum_that_is_known() -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@given(
    st.binary(max_size=700), st.lists(st.integers(0, 700), max_size=4), st.sampled_from([b"", b"PROXY ", V2_SIGNATURE])
)
def test_the_outcome_depends_on_the_bytes_alone(data: bytes, cuts: list[int], start: bytes) -> None:
    whole = start + data

    def outcome(*at: int) -> object:
        try:
            return parse(whole, *at)
        except ProxyHeaderInvalid as error:
            return str(error)

    assert outcome(*sorted(cut for cut in cuts if cut <= len(whole))) == outcome()


@given(st.ip_addresses(), st.integers(0, 65535), st.binary(max_size=100))
def test_any_client(address: object, port: int, behind: bytes) -> None:
    packed = address.packed  # type: ignore[attr-defined]
    family = 0x11 if len(packed) == 4 else 0x21
    body = packed + bytes(len(packed)) + struct.pack(">HH", port, 1)
    destination = HostPort(str(type(address)(0)), 1)  # type: ignore[call-arg]
    expected = ProxyHeader(HostPort(str(address), port), destination), behind
    assert parse(v2(family=family, body=body) + behind) == expected
    word = b"TCP4" if len(packed) == 4 else b"TCP6"
    text, to = str(address).encode(), destination.host.encode()
    assert parse(b"PROXY %b %b %b %d 1\r\n%b" % (word, text, to, port, behind)) == expected


# ---- the proxy's own headers


PORTS = st.integers(0, 65535)
KEPT_TLV = st.tuples(st.integers(0, 255).filter(lambda kind: kind not in {3, 4}), st.binary(max_size=90))


@given(st.sampled_from([4, 6]), st.data(), st.lists(KEPT_TLV, max_size=4))
def test_what_is_announced_is_what_the_parser_reads(
    version: Any, data: st.DataObject, tlvs: list[tuple[int, bytes]]
) -> None:
    plain = st.ip_addresses(v=version).filter(lambda address: not getattr(address, "ipv4_mapped", None))
    client, to = (HostPort(str(data.draw(plain)), data.draw(PORTS)) for _ in range(2))
    kept = b"".join(tlv(kind, value) for kind, value in tlvs)
    assert parse(encode_header(client, to, kept) + b"behind") == (ProxyHeader(client, to, kept), b"behind")


@pytest.mark.parametrize(
    ("client", "destination", "family", "ends"),
    [
        ("192.0.2.7", "198.51.100.1", 0x11, ("192.0.2.7", "198.51.100.1")),
        ("2001:db8::7", "2001:db8::1", 0x21, ("2001:db8::7", "2001:db8::1")),
        ("::ffff:192.0.2.7", "::ffff:198.51.100.1", 0x11, ("192.0.2.7", "198.51.100.1")),
        ("::ffff:192.0.2.7", "2001:db8::1", 0x11, ("192.0.2.7", "0.0.0.0")),
        ("2001:db8::7", "198.51.100.1", 0x21, ("2001:db8::7", "::")),
        ("fe80::7%eth0", "fe80::1%eth0", 0x21, ("fe80::7", "fe80::1")),
    ],
)
def test_both_ends_are_of_the_clients_family(client: str, destination: str, family: int, ends: tuple[str, str]) -> None:
    header = encode_header(HostPort(client, 4000), HostPort(destination, 6650))
    assert header[13] == family
    assert parse(header)[0] == ProxyHeader(HostPort(ends[0], 4000), HostPort(ends[1], 6650))


def test_checksum_and_padding_are_not_passed_on() -> None:
    """They are about the header that came, not about the client."""
    vpce, unique = tlv(0xEA, b"vpce-1"), tlv(5, b"id")
    found, _ = parse(with_checksum(IPV4 + vpce + tlv(4, b"\0" * 9) + unique))
    assert isinstance(found, ProxyHeader)
    assert found.tlvs == vpce + unique


@pytest.mark.parametrize("header", [v2(command=0x20, body=IPV4 + tlv(5, b"id")), v2(family=0, body=tlv(5, b"id"))])
def test_a_header_of_no_client_leaves_no_tlvs(header: bytes) -> None:
    """Security: its sender's own connection is announced without them."""
    assert parse(header)[0] == ProxyHeader()


def test_a_header_is_never_longer_than_a_receiver_takes() -> None:
    """Security: the TLVs are left out."""
    client, to = HostPort("192.0.2.7", 1), HostPort("192.0.2.1", 2)
    longest = tlv(5, bytes(HEADER_BYTES_MAX - 28 - 3))
    assert len(encode_header(client, to, longest)) == HEADER_BYTES_MAX
    assert encode_header(client, to, longest + b"\0") == encode_header(client, to)


def test_the_header_of_a_connection_of_the_proxys_own() -> None:
    assert parse(LOCAL_HEADER + b"behind") == (ProxyHeader(), b"behind")
