"""The counter model in plain Python: what a rollup's row says about the samples of one series in one stretch of time.

This module is the definition; `kernel.py` computes the same with arrays. A state knows its first and last sample and
what happened between them. Two states that follow each other merge: their numbers add, and to them the growth from the
first state's last sample to the second's first. `merge` is associative and EMPTY is its identity, so any split of a
series, merged in any grouping, gives what the samples themselves give. States that overlap in time cannot be merged:
the result is `mixed`, remembers only its ends, and stands for "ask the samples".

Growth from a sample to the next (`growth`), for a counter that may start again at zero:

* its start timestamp changed, and is not before the earlier sample: it was restarted, the growth is the new value;
* both have the same start timestamp: it was not (OpenTelemetry's unbroken sequence), the growth is the difference, even
  where that is negative: two replicas whose clocks differ told of one counter out of order;
* nothing is known, and the value fell: a restart, too; else the difference.

Growth before the first sample of a series (`growth_at_first`): its value, if it started within the lookback, else 0,
for nobody knows what was counted before, or since when.

Sums are exact. A double is put as a multiple of 2^-53 (`fixed`), the sum of those is kept in two doubles whose own sums
have no rounding error: the same samples give the same bits in any order. That holds for whole numbers up to 2^53, and
for fractions while the sum stays below 2^32; beyond, the last bits may depend on the order, as with any sum of doubles.
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
    """Milliseconds since 1970; `start_ts` is NO_START where unknown. The value is no NaN."""

    ts: int
    value: float
    start_ts: int = NO_START


@dataclass(frozen=True, slots=True)
class CounterState:
    """What is known of one series' samples from `first` to `last`; `increase` is the growth between these two."""

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
    """A row of a rollup: the samples in [start, start + width), and the growth up to them."""

    start: int
    state: CounterState
    entry: float
    increase: Fraction
    resets: int
    overlaps: int


EMPTY: Final = CounterState()


def fixed(value: float) -> Fraction:
    """The multiple of 2^-53 that stands for the value in sums; the value itself from 2^32 on."""
    if abs(value) >= SPLIT_BELOW:
        return Fraction(value)
    high = round(value * HIGH_GRID) / HIGH_GRID
    return Fraction(high) + Fraction(round((value - high) * LOW_GRID) / LOW_GRID)


def growth(earlier: Sample, later: Sample) -> tuple[float, int, int]:
    """The counter's growth between two samples that follow each other, whether it was reset, whether they overlap."""
    known = later.start_ts != NO_START
    restarted = known and later.start_ts != earlier.start_ts and later.start_ts >= earlier.ts
    unbroken = known and later.start_ts == earlier.start_ts
    fell = later.value < earlier.value
    if restarted or (fell and not unbroken):
        return _finite(later.value), 1, 0
    return _finite(later.value - earlier.value), 0, int(fell)


def growth_at_first(first: Sample, horizon_ms: int) -> float:
    """What the counter counted up to its first sample, where that is known: it started at or after `horizon_ms`."""
    return _finite(first.value) if first.start_ts != NO_START and horizon_ms <= first.start_ts < first.ts else 0.0


def horizon(ts: int, lookback_days: int) -> int:
    """Samples before this moment are not looked at for the growth up to a sample at `ts`."""
    return ts // DAY_MS * DAY_MS - lookback_days * DAY_MS


def of_sample(sample: Sample) -> CounterState:
    """The state of a single sample."""
    return CounterState(1, fixed(sample.value), sample.value, sample.value, sample, sample)


def merge(earlier: CounterState, later: CounterState) -> CounterState:
    """The state of both; `mixed` if `later` does not begin after `earlier` ends."""
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
        increase=earlier.increase + fixed(gained) + later.increase,
        resets=earlier.resets + reset + later.resets,
        overlaps=earlier.overlaps + overlap + later.overlaps,
    )


def of_samples(samples: Iterable[Sample]) -> CounterState:
    """The state of samples in any order; of several with one timestamp the largest counts, the rest are duplicates."""
    state = EMPTY
    for sample in unique(samples):
        state = merge(state, of_sample(sample))
    return state


def unique(samples: Iterable[Sample]) -> list[Sample]:
    """In order of time, one sample for each timestamp: the largest value, then the latest start."""
    kept: list[Sample] = []
    for sample in sorted(samples, key=_precedence):
        if not kept or kept[-1].ts != sample.ts:
            kept.append(sample)
    return kept


def merge_all(states: Iterable[CounterState]) -> CounterState:
    """The state of states in any order."""
    total = EMPTY
    for state in sorted((state for state in states if state.first), key=lambda state: _precedence(_first(state))):
        total = merge(total, state)
    return total


def windows(samples: Iterable[Sample], width_ms: int, lookback_days: int, tail: Sample | None = None) -> list[Window]:
    """The rows that these samples give; `tail` is the series' last sample before all of them."""
    groups: dict[int, list[Sample]] = {}
    for sample in unique(samples):
        groups.setdefault(sample.ts // width_ms * width_ms, []).append(sample)
    rows = []
    for start, group in groups.items():
        rows.append(enter(start, of_samples(group), tail, lookback_days))
        tail = group[-1]
    return rows


def enter(start: int, state: CounterState, tail: Sample | None, lookback_days: int) -> Window:
    """The window of a state, whose series had `tail` as the last sample before: the growth up to it is the window's."""
    first = _first(state)
    limit = horizon(first.ts, lookback_days)
    if tail is None or tail.ts < limit:
        entry, reset, overlap = growth_at_first(first, limit), 0, 0
    else:
        entry, reset, overlap = growth(tail, first)
    increase = fixed(entry) + state.increase
    return Window(start, state, entry, increase, state.resets + reset, state.overlaps + overlap)


def coarser(rows: Sequence[Window], width_ms: int) -> list[Window]:
    """Rows of wider windows from rows in order of time: everything adds, growth up to a window is there already."""
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
