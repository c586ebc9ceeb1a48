"""Bounds on the contents of one request. Each is checked before memory or time is spent in proportion.

A body of some kilobytes can stand for millions of empty messages (snappy writes 64 bytes as 3), and each of them costs
the decoder many times its two bytes. So a bound on bytes alone is not enough.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from analytics.remote_write.errors import BoundError

KIB, MIB = 1024, 1024**2

COUNTED = {
    "series": "series in a request",
    "fields": "fields and label references in a request",
    "series_fields": "fields in one series or sample",
    "symbols": "symbols in a request",
    "labels_per_series": "labels in a series",
    "label_bytes_per_series": "bytes of labels in a series",
    "label_bytes": "bytes of labels in a request when they are written out for each series",
    "histograms": "histograms in a request",
    "buckets": "histogram buckets in a request",
    "buckets_per_histogram": "buckets, custom bounds or spans in a histogram",
}
"""Bound → the things that it counts, for error texts."""


@dataclass(frozen=True)
class Bounds:
    """Maximum of each kind of content; the receiver's configuration describes each as limits.max_<name>.

    `label_bytes` counts the labels of all series of 2.0 with each reference to a symbol replaced by its text. A 1.0
    request is held to the same by the size of its body. Texts of symbols are counted in characters.
    """

    series: int = 100_000
    fields: int = 2_000_000
    series_fields: int = 50_000
    symbols: int = 200_000
    labels_per_series: int = 256
    label_bytes_per_series: int = 64 * KIB
    label_bytes: int = 64 * MIB
    histograms: int = 20_000
    buckets: int = 1_000_000
    buckets_per_histogram: int = 5_000

    def limited_by(self, other: Bounds) -> Bounds:
        """Return the smaller of each two bounds."""
        mine, others = vars(self), vars(other)
        return Bounds(**{name: min(mine[name], others[name]) for name in mine})

    def error(self, bound: str) -> BoundError:
        """Return the error for exceeding the bound of this name."""
        return BoundError(bound, getattr(self, bound), COUNTED[bound])

    def check(self, bound: str, count: int) -> None:
        """Raise BoundError if `count` exceeds the bound of this name."""
        if count > getattr(self, bound):
            raise self.error(bound)


CEILING = Bounds(
    series=200_000,
    fields=4_000_000,
    series_fields=200_000,
    symbols=500_000,
    labels_per_series=1_024,
    label_bytes_per_series=MIB,
    label_bytes=256 * MIB,
    histograms=100_000,
    buckets=2_000_000,
    buckets_per_histogram=20_000,
)
"""Upper limit of every receiver's configuration. The ingest job decodes within it: it reads all accepted requests."""


class Budget:
    """Remainder of the bounds that hold for a request as a whole."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._left: dict[str, int] = dataclasses.asdict(bounds)

    def spend(self, bound: str, count: int) -> None:
        """Subtract what is about to be read. Raises BoundError if that exceeds the remainder."""
        left = self._left[bound] = self._left[bound] - count
        if left < 0:
            raise self.bounds.error(bound)

    def remaining(self, bound: str) -> int:
        """Return the remainder of a bound."""
        return self._left[bound]
