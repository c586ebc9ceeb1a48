"""The PROXY protocol, versions 1 and 2: the header by which a load balancer announces its client's address.

After HAProxy's specification (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt). A header may be split
anywhere; the outcome depends on the bytes alone. Of what was received, the parser takes what belongs to the header, and
nothing behind it: that is for TLS or Pulsar's protocol. The headers that the proxy itself sends are of version 2.
"""

import enum
import ipaddress
import re
from dataclasses import dataclass

from proto.addresses import HostPort
from proto.errors import RemoteProtocolError

V1_BYTES_MAX = 107
"""Bound of a header of version 1, its CRLF included (section 2.1)."""

HEADER_BYTES_MAX = 536
"""Bound of a header of version 2, its TLVs included: what any receiver gets in one segment (section 2)."""

V1_SIGNATURE = b"PROXY "
V2_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"

_HEAD_BYTES = 16
_LOCAL, _PROXY = 0x20, 0x21
_UNSPECIFIED = 0x00
_AddressType = type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]
_ADDRESSES: dict[int, tuple[int, _AddressType]] = {0x11: (4, ipaddress.IPv4Address), 0x21: (16, ipaddress.IPv6Address)}
"""TCP over IPv4 and IPv6: the size of an address in bytes, and its type. Clients do not come in another way."""

_V1_ADDRESSES: dict[bytes, _AddressType] = {b"TCP4": ipaddress.IPv4Address, b"TCP6": ipaddress.IPv6Address}
_V1_WORDS = 6
_PORT = re.compile(rb"(0|[1-9][0-9]{0,4})\Z")
_PORT_MAX = 65_535
_V1_ADDRESS = re.compile(rb"[0-9A-Fa-f:.]{2,39}\Z")  # no scope, which a type of ipaddress would take

_TLV_HEAD_BYTES = 3
_CRC32C, _CRC32C_BYTES = 3, 4
_NOOP = 4

LOCAL_HEADER = V2_SIGNATURE + bytes([_LOCAL, _UNSPECIFIED, 0, 0])
"""The header of a connection that is the sender's own, and no client's."""


class ProxyHeaderInvalid(RemoteProtocolError):
    """A header is malformed, too long, or announces what no client here can have."""


class NoProxyHeader(enum.Enum):
    """The outcome for a stream that does not begin with a header."""

    FOUND = "no PROXY header"


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """A header. ``client``: the announced address; None: the connection is the sender's own (LOCAL, UNKNOWN).

    ``destination``: the address that the client connected to; of the client's family. ``tlvs``: as they came, without
    checksum and padding; both only with a client.
    """

    client: HostPort | None = None
    destination: HostPort | None = None
    tlvs: bytes = b""


class ProxyHeaderParser:
    """Parser of the start of one connection. ``outcome``: None until it is known.

    ``taken``: the bytes that were taken; with NoProxyHeader they are the stream's first ones.
    """

    __slots__ = ("outcome", "taken")

    def __init__(self) -> None:
        self.taken = bytearray()
        self.outcome: ProxyHeader | NoProxyHeader | None = None

    def receive_data(self, data: bytes | bytearray | memoryview) -> int:
        """Take from the start of ``data`` what may belong to the header; return how many bytes that are.

        Raises ProxyHeaderInvalid, after which nothing more may be passed.
        """
        before = len(self.taken)
        if self.outcome is None:
            self.taken += data[: HEADER_BYTES_MAX - before]
            end = self._parse()
            del self.taken[end:]
        return len(self.taken) - before

    def _parse(self) -> int:
        """Set the outcome if it is known; return how many of the bytes belong to the header."""
        taken = self.taken
        if taken.startswith(V1_SIGNATURE):
            return self._parse_v1()
        if taken.startswith(V2_SIGNATURE):
            return self._parse_v2()
        if not (V1_SIGNATURE.startswith(taken) or V2_SIGNATURE.startswith(taken)):
            self.outcome = NoProxyHeader.FOUND
        return len(taken)

    def _parse_v1(self) -> int:
        line_end = self.taken.find(b"\r\n", 0, V1_BYTES_MAX)
        if line_end >= 0:
            self.outcome = _v1_header(bytes(self.taken[:line_end]))
            return line_end + 2
        if len(self.taken) >= V1_BYTES_MAX:
            raise ProxyHeaderInvalid(f"a PROXY header of version 1 has no CRLF within {V1_BYTES_MAX} bytes")
        return len(self.taken)

    def _parse_v2(self) -> int:
        taken = self.taken
        if len(taken) < _HEAD_BYTES:
            return len(taken)
        command, family, length = taken[12], taken[13], int.from_bytes(taken[14:_HEAD_BYTES])
        end = _HEAD_BYTES + length
        if command not in {_LOCAL, _PROXY}:
            raise ProxyHeaderInvalid(f"a PROXY header of version and command 0x{command:02x}")
        if end > HEADER_BYTES_MAX:
            raise ProxyHeaderInvalid(f"a PROXY header of {end} bytes; the limit is {HEADER_BYTES_MAX}")
        if len(taken) >= end:
            self.outcome = _v2_header(bytes(taken[:end]), command, family)
            return end
        return len(taken)


def _v1_header(line: bytes) -> ProxyHeader:
    """Return the header of a line of version 1, without its CRLF. Raises ProxyHeaderInvalid."""
    words = line.split(b" ")
    if words[1] == b"UNKNOWN":  # whatever follows is to be ignored
        return ProxyHeader()
    kind = _V1_ADDRESSES.get(words[1])
    if kind is None or len(words) != _V1_WORDS:
        raise ProxyHeaderInvalid("a PROXY header of version 1 is neither of TCP4 or TCP6 nor UNKNOWN")
    _, _, source, destination, source_port, destination_port = words
    try:
        return ProxyHeader(_v1_endpoint(kind, source, source_port), _v1_endpoint(kind, destination, destination_port))
    except ValueError:
        raise ProxyHeaderInvalid("a PROXY header of version 1 has an address or port that is none") from None


def _v1_endpoint(kind: _AddressType, address: bytes, port: bytes) -> HostPort:
    """Return an address with its port. Raises ValueError."""
    if not _V1_ADDRESS.match(address) or not _PORT.match(port) or int(port) > _PORT_MAX:
        raise ValueError
    return HostPort(str(kind(address.decode("ascii"))), int(port))


def _v2_header(header: bytes, command: int, family: int) -> ProxyHeader:
    """Return what a whole header of version 2 says. Raises ProxyHeaderInvalid."""
    if command == _LOCAL:  # the family and what follows are to be ignored
        return ProxyHeader()
    if family == _UNSPECIFIED:
        _checked_tlvs(header, _HEAD_BYTES)
        return ProxyHeader()
    if family not in _ADDRESSES:
        raise ProxyHeaderInvalid(f"a PROXY header of family and transport 0x{family:02x}, which is not TCP")
    size, kind = _ADDRESSES[family]
    tlvs_start = _HEAD_BYTES + 2 * size + 4
    if len(header) < tlvs_start:
        raise ProxyHeaderInvalid("a PROXY header ends within its addresses")
    tlvs = _checked_tlvs(header, tlvs_start)
    at = _HEAD_BYTES
    source, destination = (str(kind(header[start : start + size])) for start in (at, at + size))
    source_port, destination_port = (int.from_bytes(header[end - 2 : end]) for end in (tlvs_start - 2, tlvs_start))
    return ProxyHeader(HostPort(source, source_port), HostPort(destination, destination_port), tlvs)


def _checked_tlvs(header: bytes, start: int) -> bytes:
    """Check the boundaries of TLVs, and the checksum if there is one; return the TLVs but for this and padding, which
    are about the header itself. Raises ProxyHeaderInvalid.
    """
    checksum_at = 0
    kept = b""
    while start < len(header):
        value_start = start + _TLV_HEAD_BYTES
        end = value_start + int.from_bytes(header[start + 1 : value_start])
        if value_start > len(header) or end > len(header):
            raise ProxyHeaderInvalid("a PROXY header ends within a TLV")
        if header[start] == _CRC32C:
            if end - value_start != _CRC32C_BYTES or checksum_at:
                raise ProxyHeaderInvalid("a PROXY header has a checksum of another size, or two of them")
            checksum_at = value_start
        elif header[start] != _NOOP:
            kept += header[start:end]
        start = end
    if checksum_at:
        checksum_end = checksum_at + _CRC32C_BYTES
        zeroed = header[:checksum_at] + bytes(_CRC32C_BYTES) + header[checksum_end:]
        if int.from_bytes(header[checksum_at:checksum_end]) != crc32c(zeroed):
            raise ProxyHeaderInvalid("a PROXY header's checksum is not that of its bytes")
    return kept


def encode_header(client: HostPort, destination: HostPort, tlvs: bytes = b"") -> bytes:
    """Return the header of version 2 that announces a client; an IPv4-mapped address counts as IPv4.

    ``destination``: the address that the client connected to; one of the other family becomes the unspecified address.
    ``tlvs``: those of a ProxyHeader, which are dropped where the header would have more than HEADER_BYTES_MAX bytes.
    """
    source, target = _unmapped(client.host), _unmapped(destination.host)
    if source.version != target.version:
        target = type(source)(0)
    family = 0x11 if source.version == 4 else 0x21  # noqa: PLR2004 -- TCP over IPv4, or IPv6
    body = source.packed + target.packed + client.port.to_bytes(2) + destination.port.to_bytes(2)
    if _HEAD_BYTES + len(body) + len(tlvs) <= HEADER_BYTES_MAX:
        body += tlvs
    return V2_SIGNATURE + bytes([_PROXY, family]) + len(body).to_bytes(2) + body


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901 -- the bits of one entry
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli; RFC 3720, appendix B.4) of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
