"""Windows of counters and gauges: one pass with numpy over whole series, sorted by time.

A row is a sample, or a *tail*: the last sample of a series before the following ones, for the growth up to them; it
yields no window. Times are milliseconds since 1970. All rows of a series are in one call, so nothing has to be merged.

Growth belongs to the window of the later of two samples. From one sample to the next of a series:

* both have a start: a start later than all before is a reset, and nothing else is, whatever the values do;
* only the later one has a start: it is a reset if it began after the earlier sample, or the value fell;
* no start: it is a reset if the value fell. Where the earlier sample is another replica's, only if the value fell
  against its own replica's sample before, too: the clocks of replicas differ.

A reset's growth is the new value, any other the difference, even if negative: so growths add up to last minus first.
The first sample of a series counts its value if it started within the lookback, else nothing.

A counter's start is its own, or the newest value at that time of its gauge `…_created`, which has the counter's key,
and no growth.

Of several replicas one is chosen for each series and span: the lowest, unless it has less than half of the samples of
the best one there. So the others fill its gaps, and do not interleave with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.intp]

NO_START: Final = 0
NO_SAMPLE: Final = 0
SPAN_MS: Final = 60_000
DAY_MS: Final = 86_400_000
HOUR_MS: Final = 3_600_000
WIDTHS_MS: Final = {"1m": 60_000, "1h": HOUR_MS}
TIME_BITS: Final = 42  # milliseconds until the year 2109
TIME_MAX: Final = (1 << TIME_BITS) - 1
SORTED_BITS: Final = TIME_BITS + 1
"""The lower bits of a key, by which Spark has not sorted: keys that differ only there come mixed."""


def horizon(ts: Any, lookback_days: int) -> Any:
    """Return the earliest time from which a sample at `ts` (one time or many) counts growth."""
    return ts // DAY_MS * DAY_MS - lookback_days * DAY_MS


class Rows(NamedTuple):
    """Columns of samples and tails; a tail has the start -1 - start.

    They come sorted by the upper bits of the key, counter before gauge, time; `_in_order` does the rest.
    """

    key: Longs
    series_id: Longs
    replica: Longs
    ts: Longs
    start: Longs
    value: Doubles


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth up to each row from the one before, and if it is a reset, or a fall that is none.

    `since`: the time of the row before, NO_SAMPLE if there is none within the lookback.
    """

    gained: Doubles
    since: Longs
    reset: Mask
    overlap: Mask


def windows(batches: Iterable[pa.RecordBatch], lookback_days: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all widths of a task's samples, batches of the columns of Rows.

    Keys that go on in the next batch wait for the rest: memory holds a batch and the keys of one prefix.
    """
    held: Rows | None = None
    for batch in batches:
        rows = Rows._make(column.to_numpy(zero_copy_only=False) for column in batch.columns)
        if held is not None:
            rows = Rows._make(np.concatenate(pair) for pair in zip(held, rows, strict=True))
        if not len(rows.key):
            continue
        prefix = rows.key >> SORTED_BITS
        cut = int(np.searchsorted(prefix, prefix[-1]))
        held = _select(rows, slice(cut, None))
        if cut:
            yield from _windows_of(_select(rows, slice(cut)), lookback_days)
    if held is not None and len(held.key):
        yield from _windows_of(held, lookback_days)


def _windows_of(rows: Rows, lookback_days: int) -> Iterator[pa.RecordBatch]:
    rows = _without_repeated(_in_order(rows))
    is_tail = rows.start < 0
    rows = rows._replace(start=np.clip(np.where(is_tail, -1 - rows.start, rows.start), 0, TIME_MAX))
    rows, is_created = _with_starts(rows, is_tail)
    fell_itself = np.ones(len(rows.key), bool)
    if (same_series := _same(rows.series_id)).any() and (rows.replica[1:] != rows.replica[:-1])[same_series[1:]].any():
        fell_itself = _fell_itself(rows)
        chosen = is_tail | _chosen(rows, is_tail)
        rows, is_tail = _select(rows, chosen), is_tail[chosen]
        is_created, fell_itself = is_created[chosen], fell_itself[chosen]
    growth = _growth(rows, is_created, fell_itself, lookback_days)
    if is_tail.any():
        there = ~is_tail
        rows = _select(rows, there)
        growth = Growth(growth.gained[there], growth.since[there], growth.reset[there], growth.overlap[there])
    if len(rows.key):
        for width, width_ms in WIDTHS_MS.items():
            yield _batch(rows, growth, width, width_ms)


def _select(rows: Rows, chosen: slice | Mask | Places) -> Rows:
    return Rows._make(column[chosen] for column in rows)


def _same(values: Longs) -> Mask:
    """Return if each value is that of the row before."""
    same = np.zeros(len(values), bool)
    same[1:] = values[1:] == values[:-1]
    return same


def _before(values: Longs) -> Longs:
    """Return the value of the row before, the first for the first."""
    return np.concatenate([values[:1], values[:-1]])


def _in_order(rows: Rows) -> Rows:
    """Sort the rows by key, counter before gauge, series and time, of those prefixes of keys where they are not."""
    levels = (rows.key, rows.series_id != rows.key, rows.series_id, rows.ts)
    falls, equal = np.zeros(len(rows.key), bool), np.ones(max(len(rows.key) - 1, 0), bool)
    for level in levels:
        falls[1:] |= equal & (level[1:] < level[:-1])
        equal &= level[1:] == level[:-1]
    if not falls.any():
        return rows
    prefix = rows.key >> SORTED_BITS
    places = np.flatnonzero(np.isin(prefix, prefix[falls]))
    order = np.arange(len(prefix))
    order[places] = places[np.lexsort([level[places] for level in reversed(levels)])]
    return _select(rows, order)


def _without_repeated(rows: Rows) -> Rows:
    """Drop NaN, which is no number; of samples of one instant and replica keep the largest value, then latest start."""
    if (unknown := np.isnan(rows.value)).any():
        rows = _select(rows, ~unknown)
    if not (_same(rows.series_id) & _same(rows.ts)).any():
        return rows
    order = np.lexsort((-rows.start, -rows.value, rows.replica, rows.ts, rows.series_id, rows.key))
    rows = _select(rows, order)
    return _select(rows, ~(_same(rows.series_id) & _same(rows.ts) & _same(rows.replica)))


def _with_starts(rows: Rows, is_tail: Mask) -> tuple[Rows, Mask]:
    """Return the rows with the starts that gauges `…_created` tell, and which these are."""
    counters = rows.series_id == rows.key
    told = np.rint(rows.value * 1000)
    created = np.flatnonzero(~counters & ~is_tail & (told > 0) & (told <= TIME_MAX))
    wanted = np.flatnonzero(counters & ~is_tail & (rows.start == NO_START))
    is_created = np.zeros(len(rows.key), bool)
    if not len(created) or not len(wanted):
        return rows, is_created
    start = rows.start.copy()
    for with_replica in (True, False):
        places = _newest(rows, created, wanted, with_replica=with_replica)
        found = (places >= 0) & (start[wanted] == NO_START)
        start[wanted[found]] = told[created[places[found]]].astype(np.int64)
        is_created[wanted[found]] = True
    return rows._replace(start=start), is_created


def _newest(rows: Rows, created: Places, wanted: Places, *, with_replica: bool) -> Places:
    """Return for each wanted row the place in `created` of the newest at its time of its key; -1 without any."""
    both = np.concatenate([created, wanted])
    key, ts = rows.key[both], rows.ts[both]
    replica = rows.replica[both] if with_replica else np.zeros(len(both), np.int64)
    is_wanted = np.arange(len(both)) >= len(created)
    order = np.lexsort((is_wanted, ts, replica, key))
    same = _same(key[order]) & _same(replica[order])
    group = np.cumsum(~same)
    last = np.maximum.accumulate(np.where(is_wanted[order], -1, np.arange(len(both))))
    found = (last >= 0) & (group[np.maximum(last, 0)] == group)
    places = np.empty(len(both), np.intp)
    places[order] = np.where(found, order[np.maximum(last, 0)], -1)
    return places[len(created) :]


def _fell_itself(rows: Rows) -> Mask:
    """Return if each sample is less than its own replica's sample before; not if there is none."""
    order = np.lexsort((rows.ts, rows.replica, rows.series_id, rows.key))
    value = rows.value[order]
    fell = np.zeros(len(order), bool)
    fell[1:] = value[1:] < value[:-1]
    result = np.empty(len(order), bool)
    result[order] = fell & _same(rows.series_id[order]) & _same(rows.replica[order])
    return result


def _chosen(rows: Rows, is_tail: Mask) -> Mask:
    """Return which samples are of the replica that is chosen for their series and span."""
    samples = np.flatnonzero(~is_tail)
    order = samples[np.lexsort((rows.replica[samples], rows.ts[samples] // SPAN_MS, rows.series_id[samples]))]
    series_id, replica, span = rows.series_id[order], rows.replica[order], rows.ts[order] // SPAN_MS
    same_span = _same(series_id) & _same(span)
    spans = np.flatnonzero(~same_span)
    groups = np.flatnonzero(~(same_span & _same(replica)))  # of one replica in one span
    counts = np.diff(np.append(groups, len(order)))
    firsts = np.searchsorted(groups, spans)
    best = np.maximum.reduceat(counts, firsts)
    span_of_group = np.repeat(np.arange(len(spans)), np.diff(np.append(firsts, len(groups))))
    is_best = counts == best[span_of_group]
    first_best = np.minimum.reduceat(np.where(is_best, np.arange(len(groups)), len(groups)), firsts)
    taken = np.where(2 * counts[firsts] >= best, firsts, first_best)
    is_taken = np.zeros(len(groups), bool)
    is_taken[taken] = True
    chosen = np.zeros(len(rows.key), bool)
    chosen[order] = np.repeat(is_taken, counts)
    return chosen


def _growth(rows: Rows, is_created: Mask, fell_itself: Mask, lookback_days: int) -> Growth:
    same = _same(rows.series_id) & (rows.series_id == rows.key)  # the tail of a `…_created` has another key than it
    series = np.cumsum(~same)
    newest = np.maximum.accumulate(series << TIME_BITS | rows.start)
    known_before = _before(newest) & TIME_MAX
    since = horizon(rows.ts, lookback_days)
    earlier = _before(rows.ts)
    follows = same & (earlier >= since)
    has_start, had_start = rows.start != NO_START, same & (known_before != NO_START)
    before = np.concatenate([rows.value[:1], rows.value[:-1]])
    fell = follows & (rows.value < before)
    believed = fell & (fell_itself | (rows.replica == _before(rows.replica)))
    told = np.where(had_start, rows.start > known_before, (rows.start >= earlier) | believed)
    reset = follows & np.where(has_start, told, believed)
    with np.errstate(invalid="ignore"):  # inf - inf
        gained = np.where(reset, rows.value, rows.value - before)
    began = has_start & (rows.start >= since) & (is_created | (rows.start < rows.ts))
    gained = np.where(follows, gained, np.where(began, rows.value, 0.0))
    gained[~np.isfinite(gained)] = 0.0
    return Growth(gained, np.where(follows, earlier, NO_SAMPLE), reset, fell & ~reset)


def _batch(rows: Rows, growth: Growth, width: str, width_ms: int) -> pa.RecordBatch:
    """Return the rows of one width."""
    window = rows.ts // width_ms
    begins = np.flatnonzero(~(_same(rows.series_id) & _same(window)))
    ends = np.append(begins[1:], len(window)) - 1
    first_ts, value = rows.ts[begins], rows.value
    with np.errstate(invalid="ignore"):
        total = np.add.reduceat(value, begins)
    hours = (first_ts // HOUR_MS).astype(np.int32)
    columns = {
        "series_id": rows.series_id[begins],
        "window": _times(window[begins] * width_ms),
        "n": ends - begins + 1,
        "sum": total,
        "min": np.minimum.reduceat(value, begins),
        "max": np.maximum.reduceat(value, begins),
        "first_ts": _times(first_ts),
        "first_v": value[begins],
        "first_start_ts": _times_or_null(rows.start[begins]),
        "last_ts": _times(rows.ts[ends]),
        "last_v": value[ends],
        "last_start_ts": _times_or_null(rows.start[ends]),
        "last_replica": rows.replica[ends],
        "entry": growth.gained[begins],
        "entry_ts": _times_or_null(growth.since[begins]),
        "increase": np.add.reduceat(growth.gained, begins),
        "resets": np.add.reduceat(growth.reset, begins, dtype=np.int64),
        "overlaps": np.add.reduceat(growth.overlap, begins, dtype=np.int64),
        "width": pa.repeat(width, len(begins)),
        "date": pa.array(hours // 24).view(pa.date32()),
        "hour": pa.array(hours % 24) if width_ms < HOUR_MS else pa.nulls(len(begins), pa.int32()),
    }
    return pa.record_batch({name: pa.array(column) for name, column in columns.items()})


def _times(unix_ms: Longs) -> pa.Array:
    return pa.array(unix_ms * 1000).view(pa.timestamp("us", tz="UTC"))


def _times_or_null(unix_ms: Longs) -> pa.Array:
    return pa.array(unix_ms * 1000, mask=unix_ms == 0).view(pa.timestamp("us", tz="UTC"))
