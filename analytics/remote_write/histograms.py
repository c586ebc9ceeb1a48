"""Native histograms: decodes spans and deltas to bucket indexes and counts, and validates them as Prometheus does.

https://prometheus.io/docs/specs/native_histograms/; the checks are those of Histogram.Validate in Prometheus's package
model/histogram. Schemas from -4 to 8 are exponential; -53 has bounds of its own (what classic histograms become).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import google.protobuf.message

from analytics.errors import AnalyticsError
from analytics.remote_write.bounds import CEILING, Bounds
from analytics.remote_write.remote_pb2 import BucketSpan
from analytics.remote_write.remote_pb2 import Histogram as Message

CUSTOM_SCHEMA = -53
SCHEMA_MIN, SCHEMA_MAX = -4, 8

_INDEX_MIN, _INDEX_MAX = -(2**31), 2**31 - 1
_BYTES_MIN, _BYTES_PER_BUCKET_MAX = 256, 64  # of a message; the most that a bucket with a span of its own takes
_WHOLE_MAX = 2.0**53  # beyond it sums of floating point numbers are not exact


class HistogramError(AnalyticsError, ValueError):
    """An invalid histogram; the text says why."""


class Histogram(NamedTuple):
    """A native histogram. Offsets are absolute bucket indexes; counts are per bucket, not cumulative.

    series: the series's number; ts_ms, start_ts_ms: since 1970, a start of 0 is none; custom_bounds: upper bounds of
    the buckets if schema is -53, else empty (the bucket behind the last bound has the index len(custom_bounds)).
    """

    series: int
    ts_ms: int
    start_ts_ms: int
    count: float  # type: ignore[assignment]  # the field's standard name, over tuple's method
    sum: float
    schema: int
    zero_threshold: float
    zero_count: float
    positive_offsets: list[int]
    positive_counts: list[float]
    negative_offsets: list[int]
    negative_counts: list[float]
    custom_bounds: list[float]


NO_BUCKETS = Histogram(0, 0, 0, 0.0, 0.0, 0, 0.0, 0.0, [], [], [], [], [])
"""Placeholder for a histogram that is only counted."""


def decode_histogram(data: bytes, series: int, bounds: Bounds = CEILING) -> Histogram:
    """Decode a histogram message. Raises HistogramError, and BoundError beyond `buckets_per_histogram`."""
    if len(data) > _BYTES_MIN + _BYTES_PER_BUCKET_MAX * bounds.buckets_per_histogram:
        raise bounds.error("buckets_per_histogram")
    try:
        message = Message.FromString(data)
    except google.protobuf.message.DecodeError:
        raise HistogramError("it is no histogram message") from None
    _check_sizes(message, bounds)
    is_float = message.WhichOneof("count") == "count_float"
    positive = _counts(message.positive_deltas, message.positive_counts, is_float=is_float)
    negative = _counts(message.negative_deltas, message.negative_counts, is_float=is_float)
    found = Histogram(
        series=series,
        ts_ms=message.timestamp,
        start_ts_ms=message.start_timestamp,
        count=message.count_float if is_float else float(message.count_int),
        sum=message.sum,
        schema=message.schema,
        zero_threshold=message.zero_threshold,
        zero_count=message.zero_count_float if is_float else float(message.zero_count_int),
        positive_offsets=_indexes(message.positive_spans, len(positive)),
        positive_counts=positive,
        negative_offsets=_indexes(message.negative_spans, len(negative)),
        negative_counts=negative,
        custom_bounds=list(message.custom_values),
    )
    _check(found)
    if not is_float:
        _check_total(found)
    return found


def _check_sizes(message: Message, bounds: Bounds) -> None:
    """Raise BoundError for lists that are too long, before Python makes an object for each of their elements."""
    buckets = len(message.positive_deltas) + len(message.positive_counts)
    buckets += len(message.negative_deltas) + len(message.negative_counts)
    spans = len(message.positive_spans) + len(message.negative_spans)
    bounds.check("buckets_per_histogram", max(buckets, spans, len(message.custom_values)))


def _counts(deltas: Sequence[int], counts: Sequence[float], *, is_float: bool) -> list[float]:
    if len(counts if not is_float else deltas):
        raise HistogramError("it has both whole and fractional counts")
    if is_float:
        return list(counts)
    return [float(count) for count in itertools.accumulate(deltas)]


def _indexes(spans: Sequence[BucketSpan], buckets: int) -> list[int]:
    """Return the absolute index of each bucket; checks the spans' lengths before expanding them."""
    if sum(span.length for span in spans) != buckets:
        raise HistogramError(f"its spans are not for {buckets} buckets")
    indexes: list[int] = []
    at = 0
    for position, span in enumerate(spans):
        if position and span.offset < 0:
            raise HistogramError("its spans overlap")
        at += span.offset
        indexes.extend(range(at, at + span.length))
        at += span.length
    if indexes and (indexes[0] < _INDEX_MIN or indexes[-1] > _INDEX_MAX):
        raise HistogramError("a bucket's index is out of range")
    return indexes


def _check(found: Histogram) -> None:
    if found.schema == CUSTOM_SCHEMA:
        _check_custom(found)
    elif not SCHEMA_MIN <= found.schema <= SCHEMA_MAX:
        raise HistogramError(
            f"its schema is {found.schema}; {SCHEMA_MIN} to {SCHEMA_MAX} and {CUSTOM_SCHEMA} are known"
        )
    elif found.custom_bounds:
        raise HistogramError("it has bounds of its own, and a schema that has none")
    counts = (found.count, found.zero_count, *found.positive_counts, *found.negative_counts)
    if any(count < 0 for count in counts):
        raise HistogramError("a count is negative")


def _check_custom(found: Histogram) -> None:
    bounds = found.custom_bounds
    if any(math.isnan(bound) for bound in bounds) or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise HistogramError("its bounds do not ascend")
    if bounds and bounds[-1] == math.inf:
        raise HistogramError("its last bound is infinite, which is implied")
    if found.negative_offsets or found.zero_count or found.zero_threshold:
        raise HistogramError("it has bounds of its own and also negative buckets or a zero bucket")
    if found.positive_offsets and (found.positive_offsets[0] < 0 or found.positive_offsets[-1] > len(bounds)):
        raise HistogramError("a bucket lies outside its bounds")


def _check_total(found: Histogram) -> None:
    """Check that whole counts add up; NaN observations are counted but in no bucket."""
    if found.count > _WHOLE_MAX:
        return
    total = sum(found.positive_counts) + sum(found.negative_counts) + found.zero_count
    if total > found.count if math.isnan(found.sum) else total != found.count:
        raise HistogramError(f"its buckets hold {total:.0f} observations, and its count is {found.count:.0f}")
