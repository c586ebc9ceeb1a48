"""Snappy's block format, within a bound: the length that a body claims is checked before anything is allocated.

https://github.com/google/snappy/blob/main/format_description.txt, section 1: the uncompressed length comes first, as
a little-endian varint of at most 32 bits.
"""

import cramjam

from analytics.remote_write.errors import DecodeError, TooLargeError

_LENGTH_BYTES_MAX = 5


def decompressed_length(body: bytes) -> int:
    """Return the decompressed length that the body claims, in bytes. Raises DecodeError."""
    length = 0
    for position, byte in enumerate(body[:_LENGTH_BYTES_MAX]):
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:  # noqa: PLR2004 -- a varint's last byte
            return length
    raise DecodeError("the body is not compressed with snappy (block format): it has no length")


def decompress(body: bytes, bytes_max: int) -> bytes:
    """Decompress a body. Raises TooLargeError beyond `bytes_max`, and DecodeError."""
    length = decompressed_length(body)
    if length > bytes_max:
        raise TooLargeError(f"the body claims to be {length} bytes when decompressed; at most {bytes_max} are taken")
    try:
        data = bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as error:
        raise DecodeError(f"the body is not compressed with snappy (block format): {error}") from None
    if len(data) != length:
        raise DecodeError(f"the body claims to be {length} bytes when decompressed, and is {len(data)}")
    return data


def compress(data: bytes) -> bytes:
    """Compress data, as the inverse of `decompress`."""
    return bytes(cramjam.snappy.compress_raw(data))
