"""The counter model in plain Python, as docs/analytics-tables.md defines it: what the tests compare the rollup with."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

DAY_MS = 86_400_000
SPAN_MS = 60_000


class Sample(NamedTuple):
    """A sample. Times are milliseconds since 1970; `start_ts` 0: unknown."""

    ts: int
    value: float
    start_ts: int = 0
    replica: int = 0


class Created(NamedTuple):
    """A sample of a counter's gauge `_created`: seconds since 1970."""

    ts: int
    value: float
    replica: int = 0


@dataclass(frozen=True)
class Window:
    """A row of a rollup."""

    start: int
    n: int
    sum: float
    min: float
    max: float
    first: Sample
    last: Sample
    entry: float
    increase: float
    resets: int
    overlaps: int


def windows(
    samples: Iterable[Sample], width_ms: int, lookback_days: int, created: Sequence[Created] = ()
) -> list[Window]:
    """The windows of one series."""
    known = [with_start(sample, created) for sample in deduplicated(samples)]
    chosen = one_replica([sample for sample, _ in known])
    told = {sample for sample, is_created in known if is_created}
    growths = growths_of(chosen, {(one.replica, one.ts): one for one, _ in known}, told, lookback_days)
    rows = []
    for number, group in groupby(zip(chosen, growths, strict=True), key=lambda pair: pair[0].ts // width_ms):
        pairs = list(group)
        values = [sample.value for sample, _ in pairs]
        gained, resets, overlaps = (sum(kind) for kind in zip(*(growth for _, growth in pairs), strict=True))
        ends = pairs[0][0], pairs[-1][0]
        entry = pairs[0][1][0]
        rows.append(
            Window(
                number * width_ms,
                len(pairs),
                sum(values),
                min(values),
                max(values),
                *ends,
                entry,
                gained,
                int(resets),
                int(overlaps),
            )
        )
    return rows


def deduplicated(samples: Iterable[Sample]) -> list[Sample]:
    """Without NaN; of one instant and replica the largest value, then the latest start."""
    best: dict[tuple[int, int], Sample] = {}
    for sample in samples:
        key = (sample.ts, sample.replica)
        if not math.isnan(sample.value) and (key not in best or best[key][1:3] < sample[1:3]):
            best[key] = sample
    return [best[key] for key in sorted(best)]


def with_start(sample: Sample, created: Sequence[Created]) -> tuple[Sample, bool]:
    """The sample with its start; True if the gauge told it."""
    before = sorted(one for one in created if one.ts <= sample.ts and 0 < one.value * 1000 < 1 << 42)
    own = [one for one in before if one.replica == sample.replica] or before
    if sample.start_ts or not own:
        return sample, False
    return sample._replace(start_ts=round(max(own, key=lambda one: (one.ts, one.replica)).value * 1000)), True


def one_replica(samples: Sequence[Sample]) -> list[Sample]:
    """Of each span the lowest replica's, unless it has less than half of the samples of the best one."""
    chosen = []
    for _, group in groupby(samples, key=lambda sample: sample.ts // SPAN_MS):
        span = list(group)
        counts = Counter(sample.replica for sample in span)
        lowest, best = min(counts), max(counts.values())
        if 2 * counts[lowest] < best:
            lowest = min(replica for replica, count in counts.items() if count == best)
        chosen += [sample for sample in span if sample.replica == lowest]
    return chosen


def growths_of(
    samples: Sequence[Sample], every: dict[tuple[int, int], Sample], told: set[Sample], lookback_days: int
) -> list[tuple[float, bool, bool]]:
    """Growth up to each sample, and if it is a reset, or a fall that is none."""
    found = []
    previous: Sample | None = None
    newest = 0
    for sample in samples:
        since = sample.ts // DAY_MS * DAY_MS - lookback_days * DAY_MS
        if previous is None or previous.ts < since:
            began = since <= sample.start_ts and (sample.start_ts < sample.ts or sample in told) and sample.start_ts
            found.append((sample.value if began and math.isfinite(sample.value) else 0.0, False, False))
        else:
            reset = is_reset(sample, previous, newest, every)
            gained = sample.value if reset else sample.value - previous.value
            fell = sample.value < previous.value
            found.append((gained if math.isfinite(gained) else 0.0, reset, fell and not reset))
        previous, newest = sample, max(newest, sample.start_ts)
    return found


def is_reset(sample: Sample, previous: Sample, newest: int, every: dict[tuple[int, int], Sample]) -> bool:
    """Whether the counter began again between two samples; `newest`: the latest start before."""
    fell = sample.value < previous.value
    if fell and sample.replica != previous.replica:
        before = [one for (replica, ts), one in every.items() if replica == sample.replica and ts < sample.ts]
        fell = bool(before) and sample.value < max(before).value
    if not sample.start_ts:
        return fell
    return sample.start_ts > newest if newest else sample.start_ts >= previous.ts or fell
