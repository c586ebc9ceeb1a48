"""Snappy within a bound, and which message a request is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analytics.remote_write.errors import DecodeError, TooLargeError
from analytics.remote_write.negotiation import UnsupportedError, protocol_version
from analytics.remote_write.snappy import compress, decompress, decompressed_length

V2 = "io.prometheus.write.v2.Request"


@given(st.binary(max_size=2000))
def test_round_trip(data: bytes) -> None:
    assert decompressed_length(compress(data)) == len(data)
    assert decompress(compress(data), len(data)) == data


def test_the_claim_is_checked_before_anything_is_decompressed() -> None:
    bomb = b"\xff\xff\xff\xff\x0f" + b"nothing behind it"
    with pytest.raises(TooLargeError, match="4294967295 bytes"):
        decompress(bomb, 1000)
    with pytest.raises(TooLargeError):
        decompress(compress(bytes(1001)), 1000)
    assert decompress(compress(bytes(1000)), 1000) == bytes(1000)


def test_a_body_cut_or_flipped_anywhere_raises_decode_error_or_has_its_length() -> None:
    body = compress(b"the same again, the same again, the same again" * 3)
    length = decompressed_length(body)
    for position in range(len(body)):
        with pytest.raises(DecodeError):
            decompress(body[:position], 10_000)
        flipped = bytearray(body)
        flipped[position] ^= 0x40
        try:
            data = decompress(bytes(flipped), 10_000)
        except DecodeError:
            continue
        assert len(data) == length


@pytest.mark.parametrize("body", [b"", b"\x80", b"\xff\xff\xff\xff\xff\xff", b"\x05hello there"])
def test_bytes_that_are_no_snappy_are_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decompress(body, 10_000)


@pytest.mark.parametrize(
    ("content_type", "encoding", "version"),
    [
        ("application/x-protobuf", "snappy", 1),
        ("application/x-protobuf;proto=prometheus.WriteRequest", "snappy", 1),
        (f"application/x-protobuf;proto={V2}", "snappy", 2),
        (f'Application/X-Protobuf; charset=x; proto="{V2}"', "Snappy", 2),
        ("", "", 1),
    ],
)
def test_versions_of_remote_write_that_are_spoken(content_type: str, encoding: str, version: int) -> None:
    assert protocol_version(content_type, encoding) == version


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/x-protobuf", "gzip"),
        ("application/x-protobuf", "zstd"),
        ("application/x-protobuf", "snappy, gzip"),
        ("application/json", "snappy"),
        ("application/x-protobuf;proto=io.prometheus.write.v3.Request", "snappy"),
        (f"application/json;proto={V2}", "snappy"),
        (f"text/plain;proto={V2}", "snappy"),
        ("application/x-protobuf;proto=" + "x" * 300, "snappy"),
        ("application/x-protobuf;proto*0=a;proto*=b", "snappy"),  # email.message raises TypeError
    ],
)
def test_versions_of_remote_write_that_are_not_spoken(content_type: str, encoding: str) -> None:
    with pytest.raises(UnsupportedError):
        protocol_version(content_type, encoding)
