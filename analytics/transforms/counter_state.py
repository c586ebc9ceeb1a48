"""The counter model in plain Python: a mergeable summary of one series' samples in one period.

This module is the definition; `kernel.py` computes the same with arrays. A state has its first and last sample and the
growth between them. Two consecutive states merge: their numbers add, plus the growth from the first state's last sample
to the second's first. `merge` is associative and EMPTY is its identity, so any split of a series, merged in any
grouping, gives the same as the samples themselves. States that overlap in time cannot be merged: the result is `mixed`,
has only its ends, and means that the samples must be read again.

Growth from a sample to the next (`growth`), for a counter that may restart at zero:

* the start timestamp changed, and is not before the earlier sample: a restart, the growth is the new value;
* both have the same start timestamp: no restart (OpenTelemetry's unbroken sequence), the growth is the difference, even
  if negative: two replicas with different clocks reported one counter out of order;
* no start timestamp, and the value fell: a restart, too; else the difference.

Growth before the first sample of a series (`growth_at_first`): its value, if it started within the lookback, else 0,
since the time over which it was counted is unknown.

Sums are exact. A double is rounded to a multiple of 2^-53 (`to_fixed_point`), the sum of those is stored in two doubles
whose own sums have no rounding error: the same samples give the same bits in any order. That holds for whole numbers up
to 2^53, and for fractions while the sum stays below 2^32; beyond, the last bits may depend on the order, as with any
sum of doubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

HIGH_GRID: Final = 2.0**21
LOW_GRID: Final = 2.0**53
SPLIT_BELOW: Final = 2.0**32
NO_START: Final = 0
DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample. Times are milliseconds since 1970; `start_ts` is NO_START if unknown. The value is not NaN."""

    ts: int
    value: float
    start_ts: int = NO_START


@dataclass(frozen=True, slots=True)
class CounterState:
    """Summary of one series' samples from `first` to `last`; `increase` is the growth between these two."""

    n: int = 0
    sum: Fraction = Fraction(0)
    min: float = math.inf
    max: float = -math.inf
    first: Sample | None = None
    last: Sample | None = None
    increase: Fraction = Fraction(0)
    resets: int = 0
    overlaps: int = 0
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """A row of a rollup: the samples in [start, start + width), and the growth up to the first (`entry`)."""

    start: int
    state: CounterState
    entry: float
    increase: Fraction
    resets: int
    overlaps: int


EMPTY: Final = CounterState()


def to_fixed_point(value: float) -> Fraction:
    """Round to the multiple of 2^-53 that represents the value in sums; values from 2^32 on stay."""
    if abs(value) >= SPLIT_BELOW:
        return Fraction(value)
    high = round(value * HIGH_GRID) / HIGH_GRID
    return Fraction(high) + Fraction(round((value - high) * LOW_GRID) / LOW_GRID)


def growth(earlier: Sample, later: Sample) -> tuple[float, int, int]:
    """Return the growth between two consecutive samples, the number of resets (0, 1) and of overlaps (0, 1)."""
    known = later.start_ts != NO_START
    restarted = known and later.start_ts != earlier.start_ts and later.start_ts >= earlier.ts
    unbroken = known and later.start_ts == earlier.start_ts
    fell = later.value < earlier.value
    if restarted or (fell and not unbroken):
        return _finite(later.value), 1, 0
    return _finite(later.value - earlier.value), 0, int(fell)


def growth_at_first(first: Sample, horizon_ms: int) -> float:
    """Return the growth up to a counter's first sample: its value if it started at or after `horizon_ms`, else 0."""
    return _finite(first.value) if first.start_ts != NO_START and horizon_ms <= first.start_ts < first.ts else 0.0


def horizon(ts: int, lookback_days: int) -> int:
    """Return the moment before which samples do not count for the growth up to a sample at `ts`."""
    return ts // DAY_MS * DAY_MS - lookback_days * DAY_MS


def state_of_sample(sample: Sample) -> CounterState:
    """Return the state of a single sample."""
    return CounterState(1, to_fixed_point(sample.value), sample.value, sample.value, sample, sample)


def merge(earlier: CounterState, later: CounterState) -> CounterState:
    """Merge two states; the result is `mixed` if `later` does not begin after `earlier` ends."""
    if earlier.first is None or earlier.last is None:
        return later
    if later.first is None or later.last is None:
        return earlier
    if earlier.mixed or later.mixed or later.first.ts <= earlier.last.ts:
        ends = sorted((earlier.first, earlier.last, later.first, later.last), key=_precedence)
        last = max(ends, key=lambda sample: (sample.ts, sample.value, sample.start_ts))
        return CounterState(first=ends[0], last=last, mixed=True)
    gained, reset, overlap = growth(earlier.last, later.first)
    return CounterState(
        n=earlier.n + later.n,
        sum=earlier.sum + later.sum,
        min=min(earlier.min, later.min),
        max=max(earlier.max, later.max),
        first=earlier.first,
        last=later.last,
        increase=earlier.increase + to_fixed_point(gained) + later.increase,
        resets=earlier.resets + reset + later.resets,
        overlaps=earlier.overlaps + overlap + later.overlaps,
    )


def state_of_samples(samples: Iterable[Sample]) -> CounterState:
    """Return the state of samples in any order; of several with one timestamp the largest counts."""
    state = EMPTY
    for sample in deduplicate(samples):
        state = merge(state, state_of_sample(sample))
    return state


def deduplicate(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples in order of time, one for each timestamp: the largest value, then the latest start."""
    kept: list[Sample] = []
    for sample in sorted(samples, key=_precedence):
        if not kept or kept[-1].ts != sample.ts:
            kept.append(sample)
    return kept


def merge_all(states: Iterable[CounterState]) -> CounterState:
    """Merge states in any order."""
    total = EMPTY
    for state in sorted((state for state in states if state.first), key=lambda state: _precedence(_first(state))):
        total = merge(total, state)
    return total


def windows(samples: Iterable[Sample], width_ms: int, lookback_days: int, tail: Sample | None = None) -> list[Window]:
    """Return the windows of these samples; `tail` is the series' last sample before all of them."""
    groups: dict[int, list[Sample]] = {}
    for sample in deduplicate(samples):
        groups.setdefault(sample.ts // width_ms * width_ms, []).append(sample)
    rows = []
    for start, group in groups.items():
        rows.append(window_of_state(start, state_of_samples(group), tail, lookback_days))
        tail = group[-1]
    return rows


def window_of_state(start: int, state: CounterState, tail: Sample | None, lookback_days: int) -> Window:
    """Return the window of a state, with the growth from `tail`, the series' last sample before it."""
    first = _first(state)
    limit = horizon(first.ts, lookback_days)
    if tail is None or tail.ts < limit:
        entry, reset, overlap = growth_at_first(first, limit), 0, 0
    else:
        entry, reset, overlap = growth(tail, first)
    increase = to_fixed_point(entry) + state.increase
    return Window(start, state, entry, increase, state.resets + reset, state.overlaps + overlap)


def coarser(rows: Sequence[Window], width_ms: int) -> list[Window]:
    """Sum rows, in order of time, to wider windows: each row already has the growth up to its first sample."""
    wide: dict[int, Window] = {}
    for row in rows:
        start = row.start // width_ms * width_ms
        before = wide.get(start)
        wide[start] = replace(row, start=start) if before is None else _join(before, row)
    return list(wide.values())


def _join(before: Window, row: Window) -> Window:
    return Window(
        before.start,
        merge(before.state, row.state),
        before.entry,
        before.increase + row.increase,
        before.resets + row.resets,
        before.overlaps + row.overlaps,
    )


def _first(state: CounterState) -> Sample:
    assert state.first is not None
    return state.first


def _precedence(sample: Sample) -> tuple[int, float, int]:
    return sample.ts, -sample.value, -sample.start_ts


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
