"""analytics.remote_write: bodies are decoded as protobuf decodes them, by the receiver as by the ingest job; what is
beyond a bound is refused, and what is left after invalid series are removed is valid.
"""

from __future__ import annotations

import struct

import numpy as np
from google.protobuf.message import DecodeError as ProtobufError

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.bounds import Bounds
from analytics.remote_write.decode import STALE_BITS, DecodedRequest, decode_request
from analytics.remote_write.errors import DecodeError
from analytics.remote_write.series import SeriesTable
from analytics.remote_write.series_interner import SeriesInterner
from analytics.remote_write.series_validator import SeriesValidator
from analytics.remote_write.snappy import compress, decompress, decompressed_length
from analytics.remote_write.splitting import remove_series
from tests.analytics.receiver_requests import OneSeries, named, raw

BYTES_MAX = 64 * 1024
BOUNDS = Bounds(
    series=100,
    fields=2000,
    series_fields=200,
    symbols=100,
    labels_per_series=20,
    label_bytes_per_series=500,
    label_bytes=5000,
    histograms=50,
    buckets=500,
    buckets_per_histogram=100,
)

_TS = 1_760_000_000_000
_HISTOGRAM = pb.Histogram(
    count_int=6, sum=3.5, schema=1, zero_count_int=1, positive_deltas=[2, 1], timestamp=_TS, positive_spans=[{}]
)
_HISTOGRAM.positive_spans[0].length = 2
_CUSTOM = pb.Histogram(count_float=2, schema=-53, custom_values=[1, 2], positive_counts=[1, 1], timestamp=_TS)
_CUSTOM.positive_spans.add(offset=0, length=2)
_REQUESTS: tuple[list[OneSeries], ...] = (
    [named("a", x="1"), named("b", (_TS, 2.0, 0), (_TS + 1, 3.0, 5), x="1")],
    [named(f"m{number}", x="1") for number in range(20)],
    [OneSeries([("__name__", "h")], histograms=[_HISTOGRAM, _CUSTOM], kind=3)],
    [OneSeries([("__name__", "e")], [(_TS, 1.0, 0)], exemplars=2, kind=1), OneSeries([("x", "1")], [(_TS, 1.0, 0)])],
    [named("a", (-1, 1.0, 0)), named("a", (1 << 62, 1.0, 0)), OneSeries([("__name__", "a"), ("__name__", "b")])],
)
VERSIONS = (1, 2)
SEEDS = (
    *(bytes([version]) + raw(version, request) for version in VERSIONS for request in _REQUESTS),
    *(bytes([version + 2]) + compress(raw(version, _REQUESTS[0])) for version in VERSIONS),
    b"\x03" + b"\xff\xff\xff\xff\x0f" + b"\x00",
    b"\x03\x80\x80\x04\x00a" + b"\xfe\x01\x00" * 1024,
)

_validator = SeriesValidator(BOUNDS)


def check(data: bytes) -> None:
    """The first byte: the version; and 2 more where the rest is compressed."""
    mode, body = data[:1], data[1:]
    version = VERSIONS[(mode or b"\x01")[0] - 1 & 1]
    if mode in {b"\x03", b"\x04"}:
        try:
            plain = decompress(body, BYTES_MAX)
        except DecodeError:
            return
        assert len(plain) == decompressed_length(body) <= BYTES_MAX
    else:
        plain = body[:BYTES_MAX]
    assert decompress(compress(plain), BYTES_MAX) == plain
    _check_request(plain, version)


def _check_request(plain: bytes, version: int) -> None:
    table = SeriesTable()
    interner = SeriesInterner(table, BOUNDS)
    found = _decode(plain, version, interner)
    if len(_validator) > 10_000:
        _validator.clear_caches()
    validated = _decode(plain, version, _validator)
    if isinstance(found, str) or isinstance(validated, str):
        assert found == validated
        return
    assert (found.counts, found.faults) == (validated.counts, validated.faults)
    again = _decode(plain, version, interner)
    assert isinstance(again, DecodedRequest)
    assert np.array_equal(again.series, found.series)
    _check_bounds(found)
    _check_against_protobuf(found, plain, version, table)
    if found.faults:
        _check_rest(found, remove_series(plain, version, set(found.faults), BOUNDS), version, table)


def _decode(plain: bytes, version: int, interner: SeriesInterner) -> DecodedRequest | str:
    try:
        return decode_request(plain, version, interner, BOUNDS)
    except DecodeError as error:
        return repr(error)


def _check_bounds(found: DecodedRequest) -> None:
    assert found.series.size <= BOUNDS.fields
    assert len(found.histograms) <= BOUNDS.histograms
    assert found.counts.buckets <= BOUNDS.buckets
    assert len(found.faults) <= BOUNDS.series


def _samples(found: DecodedRequest, table: SeriesTable) -> list[tuple[object, int, int, bytes]]:
    series = table.series()
    columns = (found.series.tolist(), found.ts_ms.tolist(), found.start_ts_ms.tolist(), found.value.tolist())
    return [
        (series[number].labels, ts, start, struct.pack("<d", value))
        for number, ts, start, value in zip(*columns, strict=True)
    ]


def _check_against_protobuf(found: DecodedRequest, plain: bytes, version: int, table: SeriesTable) -> None:
    """What protobuf's own parser reads of the series that have no fault."""
    message = pb.WriteRequest if version == 1 else pb.RequestV2
    try:
        request = message.FromString(plain)
    except ProtobufError:
        return  # in a field that is not decoded
    expected = []
    for place, one in enumerate(request.timeseries):
        if place in found.faults:
            continue
        if version == 1:
            labels = [(label.name, label.value) for label in one.labels]
        else:
            texts = [request.symbols[number] for number in one.labels_refs]
            labels = list(zip(texts[::2], texts[1::2], strict=True))
        key = tuple(sorted(label for label in labels if label[1]))
        for sample in one.samples:
            start = sample.start_timestamp if version > 1 else 0
            bits = struct.pack("<d", sample.value)
            if bits != struct.pack("<Q", STALE_BITS):
                expected.append((key, sample.timestamp, start, bits))
    assert _samples(found, table) == expected


def _check_rest(found: DecodedRequest, rest: bytes, version: int, table: SeriesTable) -> None:
    if not found.counts.samples + found.counts.histograms:
        return  # nothing is committed
    others = SeriesTable()
    left = _decode(rest, version, SeriesInterner(others, BOUNDS))
    assert isinstance(left, DecodedRequest), left
    assert not left.faults
    assert _samples(left, others) == _samples(found, table)
    assert left.counts.histograms == found.counts.histograms
