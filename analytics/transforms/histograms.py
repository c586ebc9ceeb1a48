"""Native histograms in plain Python: their growth, and the sum of growths over common bounds.

A histogram of schema -53 has custom bounds (a converted classic one); one of -4 to 8 has exponential bounds, with the
upper bound of bucket i at 2^(i / 2^schema), and a zero bucket. Two are converted to *common bounds* before any other
operation:

* exponential: the coarser schema; two buckets of the finer one are one of the coarser. The wider zero bucket; it
  absorbs whole buckets, and widens to the end of one that it would cut in two.
* custom: the bounds that both have; buckets between them are summed. Without any in common they are incompatible.
* one of each: they are incompatible.

Of incompatible histograms only `count` and `sum` are added or compared: these are always complete, and a rollup counts
in `refused` how many histograms' buckets are missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from analytics.errors import AnalyticsError
from analytics.transforms.counters import NO_START

CUSTOM_BOUNDS: Final = -53
SCHEMA_MIN: Final = -4
SCHEMA_MAX: Final = 8
BUCKETS_MAX: Final = 100_000


class Incompatible(AnalyticsError):
    """Two histograms have no bounds in common."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A native histogram. Buckets: index → count, not cumulative; a custom bucket i ends at custom_bounds[i]."""

    schema: int
    count: float = 0.0
    sum: float = 0.0
    zero_threshold: float = 0.0
    zero_count: float = 0.0
    positive: Mapping[int, float] = field(default_factory=dict)
    negative: Mapping[int, float] = field(default_factory=dict)
    custom_bounds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """A histogram at a moment (milliseconds since 1970); `start_ts` is NO_START if unknown."""

    ts: int
    histogram: Histogram
    start_ts: int = NO_START


def to_common_bounds(first: Histogram, second: Histogram) -> tuple[Histogram, Histogram]:
    """Convert both to common bounds. Raises Incompatible."""
    if (first.schema == CUSTOM_BOUNDS) != (second.schema == CUSTOM_BOUNDS):
        raise Incompatible("one has custom bounds, the other exponential ones")
    if first.schema == CUSTOM_BOUNDS:
        if first.custom_bounds == second.custom_bounds:
            return first, second
        bounds = tuple(sorted(set(first.custom_bounds) & set(second.custom_bounds)))
        if not bounds:
            raise Incompatible("their custom bounds have none in common")
        return _to_bounds(first, bounds), _to_bounds(second, bounds)
    return _common_exponential(first, second)


def add(first: Histogram, second: Histogram) -> tuple[Histogram, bool]:
    """Add two histograms over common bounds; the flag is False where only count and sum could be added."""
    try:
        return _combine(*to_common_bounds(first, second), 1.0), True
    except Incompatible:
        return replace(first, count=first.count + second.count, sum=first.sum + second.sum), False


def growth(earlier: HistogramSample, later: HistogramSample) -> tuple[Histogram, int, bool]:
    """Return the observations between two consecutive samples, the number of resets (0, 1), and if it has buckets.

    As with counters: a new start timestamp is a reset; without one, a fall of the count or of any bucket is. (The sum
    may fall without a reset: observations may be negative.)
    """
    known = later.start_ts != NO_START
    if known and later.start_ts != earlier.start_ts and later.start_ts >= earlier.ts:
        return later.histogram, 1, True
    before, after, comparable = earlier.histogram, later.histogram, True
    try:
        before, after = to_common_bounds(before, after)
    except Incompatible:
        comparable = False
        before, after = (replace(empty_like(after), count=one.count, sum=one.sum) for one in (before, after))
    difference = _combine(after, before, -1.0)
    unbroken = known and later.start_ts == earlier.start_ts
    if not unbroken and _has_fallen(difference):
        return later.histogram, 1, True
    return difference, 0, comparable


def growth_at_first(first: HistogramSample, horizon_ms: int) -> Histogram:
    """Return the growth up to the first sample: all of it if it started at or after `horizon_ms`, else nothing."""
    if first.start_ts != NO_START and horizon_ms <= first.start_ts < first.ts:
        return first.histogram
    return empty_like(first.histogram)


def empty_like(histogram: Histogram) -> Histogram:
    """Return an empty histogram of the same bounds."""
    return Histogram(histogram.schema, zero_threshold=histogram.zero_threshold, custom_bounds=histogram.custom_bounds)


def from_row(row: Mapping[str, Any]) -> Histogram:
    """Make a histogram from the columns of the schema HISTOGRAM."""
    return Histogram(
        row["schema"],
        row["count"],
        row["sum"],
        row["zero_threshold"],
        row["zero_count"],
        _buckets(row["positive_offsets"], row["positive_counts"]),
        _buckets(row["negative_offsets"], row["negative_counts"]),
        tuple(row["custom_bounds"] or ()),
    )


def to_row(histogram: Histogram) -> dict[str, Any]:
    """Return the columns of the schema HISTOGRAM: buckets in order, without empty ones."""
    positive, negative = (
        sorted((i, n) for i, n in side.items() if n) for side in (histogram.positive, histogram.negative)
    )
    return {
        "count": histogram.count,
        "sum": histogram.sum,
        "schema": histogram.schema,
        "zero_threshold": histogram.zero_threshold,
        "zero_count": histogram.zero_count,
        "positive_offsets": [index for index, _ in positive],
        "positive_counts": [count for _, count in positive],
        "negative_offsets": [index for index, _ in negative],
        "negative_counts": [count for _, count in negative],
        "custom_bounds": list(histogram.custom_bounds),
    }


def _buckets(offsets: Iterable[int] | None, counts: Iterable[float] | None) -> dict[int, float]:
    return {int(offset): float(count) for offset, count in zip(offsets or (), counts or (), strict=True)}


def _to_bounds(histogram: Histogram, bounds: tuple[float, ...]) -> Histogram:
    """Convert to fewer bounds: a bucket's observations go to the bucket that contains its upper bound."""
    ends = (*histogram.custom_bounds, math.inf)
    buckets: dict[int, float] = {}
    for index, count in histogram.positive.items():
        target = sum(bound < ends[index] for bound in bounds)
        buckets[target] = buckets.get(target, 0.0) + count
    return replace(histogram, positive=buckets, custom_bounds=bounds)


def _common_exponential(first: Histogram, second: Histogram) -> tuple[Histogram, Histogram]:
    schema = min(first.schema, second.schema)
    first, second = _to_schema(first, schema), _to_schema(second, schema)
    threshold = max(first.zero_threshold, second.zero_threshold)
    threshold = max(_widened(first, threshold), _widened(second, threshold))
    return _to_threshold(first, threshold), _to_threshold(second, threshold)


def _to_schema(histogram: Histogram, schema: int) -> Histogram:
    shift = histogram.schema - schema
    if not shift:
        return histogram
    return replace(
        histogram,
        schema=schema,
        positive=_shifted(histogram.positive, shift),
        negative=_shifted(histogram.negative, shift),
    )


def _shifted(buckets: Mapping[int, float], shift: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for index, count in buckets.items():
        target = ((index - 1) >> shift) + 1
        result[target] = result.get(target, 0.0) + count
    return result


def _end(index: int, schema: int) -> float:
    """Return the upper bound of an exponential bucket; infinity if no double is as large."""
    try:
        return float(2.0 ** (index * 2.0**-schema))
    except OverflowError:
        return math.inf


def _widened(histogram: Histogram, threshold: float) -> float:
    """Return the zero bucket's threshold, widened to the end of a bucket that it would cut in two."""
    if threshold == histogram.zero_threshold:
        return threshold
    for index, count in (*histogram.positive.items(), *histogram.negative.items()):
        if count and _end(index - 1, histogram.schema) < threshold < (end := _end(index, histogram.schema)):
            return end
    return threshold


def _to_threshold(histogram: Histogram, threshold: float) -> Histogram:
    if threshold == histogram.zero_threshold:
        return histogram
    zero_count, sides = histogram.zero_count, []
    for buckets in (histogram.positive, histogram.negative):
        inside = {index for index in buckets if _end(index, histogram.schema) <= threshold}
        zero_count += sum(buckets[index] for index in inside)
        sides.append({index: count for index, count in buckets.items() if index not in inside})
    return replace(histogram, zero_threshold=threshold, zero_count=zero_count, positive=sides[0], negative=sides[1])


def _combine(first: Histogram, second: Histogram, sign: float) -> Histogram:
    """Return first + sign · second, of common bounds."""
    return replace(
        first,
        count=first.count + sign * second.count,
        sum=first.sum + sign * second.sum,
        zero_count=first.zero_count + sign * second.zero_count,
        positive=_combined(first.positive, second.positive, sign),
        negative=_combined(first.negative, second.negative, sign),
    )


def _combined(first: Mapping[int, float], second: Mapping[int, float], sign: float) -> dict[int, float]:
    return {index: first.get(index, 0.0) + sign * second.get(index, 0.0) for index in sorted({*first, *second})}


def _has_fallen(difference: Histogram) -> bool:
    counts = (difference.count, difference.zero_count, *difference.positive.values(), *difference.negative.values())
    return any(count < 0 for count in counts)
