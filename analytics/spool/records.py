r"""The format of segment files: a header, then records, each with a CRC of its header and one of its body.

    segment  b"PRWSPOOL" · format (u16) · two bytes of zero · number (u64) · CRC-32 of all before (u32)
    record   b"\xf5PRW" · body length (u32) · received at, ms since 1970 (u64) · version (u8) · three bytes of zero
             · CRC-32 of the body (u32) · CRC-32 of all before (u32) · body

All numbers are little-endian. The header's own CRC lets a reader skip a damaged body by its length; if the header
itself is damaged, the next record is found by its magic and accepted only when both CRCs match.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from analytics.errors import AnalyticsError

FORMAT = 1
BODY_BYTES_MAX = 256 * 1024 * 1024
"""A longer length in a header is damage, even if its CRC matches."""

_SEGMENT_MAGIC = b"PRWSPOOL"
_SEGMENT = struct.Struct("<8sHxxQ")
_RECORD_MAGIC = b"\xf5PRW"
_RECORD = struct.Struct("<4sIQBxxxI")
_CRC = struct.Struct("<I")

SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD.size + _CRC.size
_SEARCH_BYTES = 1024 * 1024


class SpoolError(AnalyticsError):
    """A spool that cannot be used; the text says where and what to do."""


class Record(NamedTuple):
    """One request as received: `body` is compressed, `version` the protocol's (1 or 2); offsets are in the segment."""

    offset: int
    next_offset: int
    received_at_unix_ms: int
    version: int
    body: bytes


class Damage(NamedTuple):
    """Bytes [offset, next_offset) of a segment that are no record, or one whose body does not match its CRC."""

    offset: int
    next_offset: int
    reason: str


class _Header(NamedTuple):
    length: int
    received_at_unix_ms: int
    version: int
    body_crc: int


def pack_segment_header(number: int) -> bytes:
    """Return the header of segment `number`."""
    head = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, number)
    return head + _CRC.pack(zlib.crc32(head))


def check_segment_header(data: bytes, number: int) -> str | None:
    """Return what is wrong with the header of segment `number`; None if it is valid."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return "its header is cut off"
    head = data[: _SEGMENT.size]
    magic, form, found = _SEGMENT.unpack(head)
    if magic != _SEGMENT_MAGIC or _CRC.unpack_from(data, _SEGMENT.size)[0] != zlib.crc32(head):
        return "its header is damaged"
    if form != FORMAT:
        return f"its format is {form}, and this program knows {FORMAT}"
    return None if found == number else f"its header says that it is segment {found}"


def pack_record(version: int, received_at_unix_ms: int, body: bytes) -> bytes:
    """Return a record's bytes. Raises ValueError if the body is larger than BODY_BYTES_MAX."""
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a record of {len(body)} bytes; at most {BODY_BYTES_MAX} are possible")
    head = _RECORD.pack(_RECORD_MAGIC, len(body), received_at_unix_ms, version, zlib.crc32(body))
    return b"".join((head, _CRC.pack(zlib.crc32(head)), body))


def scan_records(file: BinaryIO, start: int, end: int) -> Iterator[Record | Damage]:
    """Yield the records in [start, end) of a segment and the damage between them, in order."""
    offset = start
    while offset < end:
        found = _read_record(file, offset, end)
        if isinstance(found, str):
            following = _find_next_record(file, offset + 1, end)
            yield Damage(offset, following, found)
            offset = following
        else:
            yield found
            offset = found.next_offset


def _read_record(file: BinaryIO, offset: int, end: int) -> Record | Damage | str:
    """Read the record at an offset; return Damage if only its body is damaged, a text if its end is unknown."""
    file.seek(offset)
    header = _parse_header(file.read(min(RECORD_HEADER_BYTES, end - offset)))
    if isinstance(header, str):
        return header
    body_at = offset + RECORD_HEADER_BYTES
    following = body_at + header.length
    if following > end:
        return "the record is cut off"
    body = file.read(header.length)
    if len(body) < header.length:
        return "the file ends within the record"
    if zlib.crc32(body) != header.body_crc:
        return Damage(offset, following, "the body does not match its CRC")
    return Record(offset, following, header.received_at_unix_ms, header.version, body)


def _parse_header(data: bytes) -> _Header | str:
    if len(data) < RECORD_HEADER_BYTES:
        return "the record's header is cut off"
    magic, length, received_at, version, body_crc = _RECORD.unpack_from(data)
    if magic != _RECORD_MAGIC:
        return "no record begins here"
    if _CRC.unpack_from(data, _RECORD.size)[0] != zlib.crc32(data[: _RECORD.size]) or length > BODY_BYTES_MAX:
        return "the record's header is damaged"
    return _Header(length, received_at, version, body_crc)


def _find_next_record(file: BinaryIO, offset: int, end: int) -> int:
    """Return the offset of the next valid record, or `end`."""
    while offset < end:
        file.seek(offset)
        chunk = file.read(min(_SEARCH_BYTES, end - offset))
        if not chunk:
            return end
        at = chunk.find(_RECORD_MAGIC)
        if at < 0:  # the magic may lie across the chunk's end
            offset += max(1, len(chunk) - len(_RECORD_MAGIC) + 1)
        elif isinstance(_read_record(file, offset + at, end), Record):
            return offset + at
        else:
            offset += at + 1
    return end
