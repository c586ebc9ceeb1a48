"""How much of everything one request may have. Each bound is checked before memory or time is spent in proportion.

A body of some kilobytes can stand for millions of empty messages (snappy writes 64 bytes as 3), and each of them costs
the decoder many times its two bytes. So bytes alone bound nothing here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from analytics.remote_write.errors import BoundError

KIB, MIB = 1024, 1024**2

WHAT = {
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
"""What each bound counts."""


@dataclass(frozen=True)
class Bounds:
    """The most that is taken; the receiver's configuration describes each as limits.max_<name>.

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

    def at_most(self, other: Bounds) -> Bounds:
        """The smaller bound of each two."""
        mine, others = vars(self), vars(other)
        return Bounds(**{name: min(mine[name], others[name]) for name in mine})

    def error(self, bound: str) -> BoundError:
        """The error for more than this bound, by its name."""
        return BoundError(bound, getattr(self, bound), WHAT[bound])

    def check(self, bound: str, count: int) -> None:
        """Raise BoundError if there are more than this bound allows."""
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
"""What no configuration of a receiver can exceed. The ingest job is held to it, so it reads what receivers took."""


class Budget:
    """What is left of the bounds that hold for a request as a whole."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._left: dict[str, int] = dataclasses.asdict(bounds)

    def spend(self, bound: str, count: int) -> None:
        """Count what is about to be read; raises BoundError if there is more than is left."""
        left = self._left[bound] = self._left[bound] - count
        if left < 0:
            raise self.bounds.error(bound)

    def left(self, bound: str) -> int:
        """How much of a bound is left."""
        return self._left[bound]
