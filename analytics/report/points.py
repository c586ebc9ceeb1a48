"""One cluster's collected values in plain Python, by metric, labels and window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from analytics.report.metrics import BUCKET
from analytics.transforms.histograms import CUSTOM_BOUNDS, Histogram, quantile

Line = dict[int, float]
"""Window's start, Unix milliseconds → value."""
Key = tuple[str, ...]
"""Values of the labels that `wanted` names for the metric, in its order."""

_NO_LINE: Final[Line] = {}


@dataclass(slots=True)
class Distribution:
    """Distribution of observations. `buckets`: upper bound → observations in the bucket (not cumulative)."""

    buckets: dict[float, float] = field(default_factory=dict)
    sum: float = 0.0
    count: float = 0.0

    def add_distribution(self, other: Distribution) -> None:
        """Add the observations of another."""
        self.sum += other.sum
        self.count += other.count
        for bound, count in other.buckets.items():
            self.buckets[bound] = self.buckets.get(bound, 0.0) + count

    def quantile(self, q: float) -> float:
        """Return the q-quantile, as PromQL's histogram_quantile; NaN without observations."""
        bounds = tuple(sorted(bound for bound in self.buckets if bound < math.inf))
        if not bounds:
            return math.nan
        counts = {index: max(0.0, self.buckets[bound]) for index, bound in enumerate(bounds)}
        counts[len(bounds)] = max(0.0, self.buckets.get(math.inf, 0.0))
        return quantile(Histogram(CUSTOM_BOUNDS, positive=counts, custom_bounds=bounds), q)

    @property
    def average(self) -> float:
        """Average of the observations; NaN without any."""
        return self.sum / self.count if self.count > 0 else math.nan

    @property
    def maximum(self) -> float:
        """Upper bound of the highest bucket with observations, none of which was above it. NaN without any."""
        return max((bound for bound, count in self.buckets.items() if count > 0), default=math.nan)


Distributions = dict[int, Distribution]


def classic_distribution(cumulative: Mapping[float, float], total: float, count: float) -> Distribution:
    """Make a distribution from the growth of `_bucket` (by `le`), `_sum` and `_count`.

    Sums over instances with different bounds fall where some have no bucket: they are made monotonic, as PromQL's
    histogram_quantile does, so a bound that not all have counts no observation twice.
    """
    buckets, below = {}, 0.0
    for bound in sorted(cumulative):
        buckets[bound] = max(0.0, cumulative[bound] - below)
        below += buckets[bound]
    return Distribution(buckets, total, count)


@dataclass(slots=True)
class Points:
    """One cluster's values. `increase`: counters' growth; `level`: gauges, summed at an instant, averaged over time.

    `spread`: the lines of `increase` that grew over an outage, with that growth drawn over the outage.
    """

    increase: dict[tuple[str, Key], Line] = field(default_factory=dict)
    level: dict[tuple[str, Key], Line] = field(default_factory=dict)
    spread: dict[tuple[str, Key], Line] = field(default_factory=dict)
    native: dict[tuple[str, Key], Distributions] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    exponential: int = 0

    def metrics(self) -> set[str]:
        """Return the names of the metrics with values."""
        return {metric for metric, _ in (*self.increase, *self.native)}

    def increase_by(self, metric: str, place: int | None = None) -> dict[str, Line]:
        """Return a counter's growth by window: by the label at `place` of the metric's labels, or summed under ""."""
        return _by_label(self.increase, metric, place)

    def spread_by(self, metric: str, place: int | None = None) -> dict[str, Line]:
        """Return a counter's growth by window as in `increase_by`, but growth over an outage in all of its windows."""
        return _by_label(self.increase | self.spread, metric, place)

    def level_by(self, metric: str, place: int | None = None) -> dict[str, Line]:
        """Return a gauge's level by window, by label as in `increase_by`."""
        return _by_label(self.level, metric, place)

    def distributions(self, metric: str, place: int | None = None) -> dict[str, Distributions]:
        """Return a histogram's growth, by label as in `increase_by`.

        A window's is from the classic histogram if there is one, else from the native one, so that none counts twice.
        """
        found: dict[str, Distributions] = {}
        classic = self._classic(metric)
        native = {key: lines for (name, key), lines in self.native.items() if name == metric}
        for key in {*classic, *native}:
            mine = found.setdefault("" if place is None else key[place], {})
            for window, one in (native.get(key, {}) | classic.get(key, {})).items():
                mine.setdefault(window, Distribution()).add_distribution(one)
        return found

    def _classic(self, metric: str) -> dict[Key, Distributions]:
        cumulative: dict[Key, dict[int, dict[float, float]]] = {}
        for (name, key), line in self.increase.items():
            if name == metric + BUCKET:
                for window, value in line.items():
                    cumulative.setdefault(key[:-1], {}).setdefault(window, {})[_bound(key[-1])] = value
        return {
            key: {
                window: classic_distribution(
                    buckets,
                    self.increase.get((f"{metric}_sum", key), _NO_LINE).get(window, 0.0),
                    self.increase.get((f"{metric}_count", key), _NO_LINE).get(window, 0.0),
                )
                for window, buckets in windows.items()
            }
            for key, windows in cumulative.items()
        }


def sum_lines(lines: Iterable[Line]) -> Line:
    """Sum lines by window."""
    total: Line = {}
    for line in lines:
        for window, value in line.items():
            total[window] = total.get(window, 0.0) + value
    return total


def merge_distributions(distributions: Iterable[Distribution]) -> Distribution:
    """Merge all observations."""
    total = Distribution()
    for one in distributions:
        total.add_distribution(one)
    return total


def _bound(text: str) -> float:
    """Parse the label `le`; an invalid one counts as infinity."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def _by_label(lines: Mapping[tuple[str, Key], Line], metric: str, place: int | None) -> dict[str, Line]:
    found: dict[str, list[Line]] = {}
    for (name, key), line in lines.items():
        if name == metric:
            found.setdefault("" if place is None else key[place], []).append(line)
    return {label: sum_lines(own) for label, own in found.items()}
