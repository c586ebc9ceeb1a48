"""The counter model of `counter_state.py` on arrays: the code that Spark's Python workers run.

Rows are states of the columns of States, sorted by series, then by first sample. Times are milliseconds since 1970.
A row with n = 0 is a *tail*: the last sample of a series before the following rows, for the growth up to them; it
yields no window of its own. The samples of a chunk become states of one window each (`partial_states`); states of a
window, from any number of chunks, become its row (`window_rows`).

Most rows of a chunk skip the second step. A *run* is a sequence of a series' windows in a chunk without a gap, in one
hour. If no other chunk has samples between the run's first and last, all but its first and last window are complete at
once; `split_runs` separates these from the *open* ones, which `window_rows` merges with those of other chunks. There,
overlapping runs are detected: every state has the end of its run. Since a run is in one hour, the sum of its whole
windows is one row (`Runs.added_up`): the wider windows need not read them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analytics.transforms.counter_state import DAY_MS, HIGH_GRID, LOW_GRID, NO_START, SPLIT_BELOW

Longs: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


class States(NamedTuple):
    """Columns of states, equally long; sums are in two parts (`to_fixed_point`), the start is NO_START if unknown."""

    series_id: Longs
    first_ts: Longs
    first_v: Doubles
    first_start: Longs
    last_ts: Longs
    last_v: Doubles
    last_start: Longs
    n: Longs
    sum: Doubles
    sum_lo: Doubles
    min: Doubles
    max: Doubles
    increase: Doubles
    increase_lo: Doubles
    resets: Longs
    overlaps: Longs
    run_end: Longs


LONG_COLUMNS: Final = frozenset(
    ["series_id", "first_ts", "first_start", "last_ts", "last_start", "n", "resets", "overlaps", "run_end"]
)


class Runs(NamedTuple):
    """Result of a chunk: whole windows with the growth up to them (`entry`), their sums, and states to be merged."""

    whole: States
    entry: Doubles
    added_up: States
    """The sum of each run's whole windows."""
    added_up_entry: Doubles
    open: States


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Finished windows (`increase` includes the growth up to them), and which came from overlapping states."""

    states: States
    entry: Doubles
    mixed: Mask


def select_rows(states: States, rows: slice | npt.NDArray[np.intp] | Mask) -> States:
    """Return some of the rows."""
    return States._make(column[rows] for column in states)


def to_fixed_point(values: Doubles) -> tuple[Doubles, Doubles]:
    """Split each value into two doubles, multiples of 2^-21 and 2^-53, whose sums are exact."""
    high = np.where(np.abs(values) < SPLIT_BELOW, np.rint(values * HIGH_GRID) / HIGH_GRID, values)
    with np.errstate(invalid="ignore"):  # inf - inf
        low = values - high
    if not low.any():
        return high, low
    return high, np.where(np.isfinite(low), np.rint(low * LOW_GRID) / LOW_GRID, 0.0)


def normalize_sum(high: Doubles, low: Doubles) -> tuple[Doubles, Doubles]:
    """Normalize the two parts of a sum to the nearest double and the remainder: equal sums have equal parts."""
    with np.errstate(invalid="ignore"):
        total = high + low
        carried = total - high
        rest = (high - (total - carried)) + (low - carried)
    return total, np.where(np.isfinite(rest), rest, 0.0)


def growth(earlier: tuple[Longs, Doubles, Longs], later: tuple[Longs, Doubles, Longs]) -> tuple[Doubles, Mask, Mask]:
    """Return growth, resets and overlaps between consecutive samples (ts, value, start)."""
    earlier_ts, earlier_v, earlier_start = earlier
    _, v, start = later
    with np.errstate(invalid="ignore"):
        gained = v - earlier_v
    fell = v < earlier_v
    reset = fell
    if start.any():
        known = start != NO_START
        unbroken = start == earlier_start
        reset = (fell & ~(known & unbroken)) | (known & ~unbroken & (start >= earlier_ts))
    gained = np.where(reset, v, gained)
    gained[~np.isfinite(gained)] = 0.0
    return gained, reset, fell & ~reset


def partial_states(series_id: Longs, ts: Longs, value: Doubles, start: Longs, width_ms: int) -> States:
    """Return one state for each window of each series in the chunk, sorted; NaN and duplicates are dropped.

    Growth between windows is not counted yet: samples between them may be in another chunk.
    """
    series_id, ts, value, start = _unique(series_id, ts, value, start)
    if not len(ts):
        return States._make(np.empty(0, _dtype(name)) for name in States._fields)
    begins = _group_starts(series_id, ts // width_ms)
    ends = np.append(begins[1:], len(ts)) - 1
    gained, reset, overlap = _growth_within(ts, value, start, begins)
    sums = normalize_sum(*(np.add.reduceat(part, begins) for part in to_fixed_point(value)))
    increases = normalize_sum(*(np.add.reduceat(part, begins) for part in to_fixed_point(gained)))
    return States._make(
        (
            series_id[begins],
            *(column[begins] for column in (ts, value, start)),
            *(column[ends] for column in (ts, value, start)),
            ends - begins + 1,
            *sums,
            np.minimum.reduceat(value, begins),
            np.maximum.reduceat(value, begins),
            *increases,
            *(np.add.reduceat(mask, begins, dtype=np.int64) for mask in (reset, overlap)),
            ts[ends],
        )
    )


def split_runs(states: States, width_ms: int, run_ms: int) -> Runs:
    """Split one chunk's `partial_states`: windows that are whole if no other run overlaps, and states to be merged.

    Open are the first and the last window of a run, and as a tail the last sample before the last one.
    """
    if not len(states.n):
        return Runs(states, states.sum, states, states.sum, states)
    windows = states.first_ts // width_ms
    follows = np.zeros(len(windows), bool)
    follows[1:] = (
        (states.series_id[1:] == states.series_id[:-1])
        & (windows[1:] == windows[:-1] + 1)
        & (windows[1:] % (run_ms // width_ms) != 0)
    )
    begins = np.flatnonzero(~follows)
    ends = np.append(begins[1:], len(windows)) - 1
    states = states._replace(run_end=np.repeat(states.last_ts[ends], ends - begins + 1))
    is_open = np.zeros(len(windows), bool)
    is_open[begins] = is_open[ends] = True
    before_last = ends[ends - begins > 1] - 1
    opened = concatenate([select_rows(states, is_open), _tails(states, before_last)])
    inner = np.flatnonzero(~is_open)
    gained, reset, overlap = growth(_last(states, inner - 1), _first(states, inner))
    whole = select_rows(states, inner)
    increase, increase_lo = normalize_sum(*_added(whole.increase, whole.increase_lo, gained))
    resets, overlaps = whole.resets + reset, whole.overlaps + overlap
    whole = whole._replace(increase=increase, increase_lo=increase_lo, resets=resets, overlaps=overlaps)
    lengths = np.maximum(ends - begins - 1, 0)
    stops, some = np.cumsum(lengths), lengths > 0
    no_more = np.zeros(len(inner)), np.zeros(len(inner), bool), np.zeros(len(inner), bool)
    added_up = _merged(whole, (stops - lengths)[some], stops[some] - 1, no_more)
    return Runs(whole, gained, added_up, gained[(stops - lengths)[some]], opened)


def window_rows(states: States, width_ms: int, lookback_days: int) -> WindowRows:
    """Merge sorted states and tails to windows. Of a mixed window only the first and last sample are valid."""
    overlapping = np.logical_or.reduceat(
        _in_another_run(states), _group_starts(states.series_id, states.first_ts // width_ms)
    )
    states = _without_copies(states)  # of the same groups: one of the copies stays
    windows = states.first_ts // width_ms
    begins = _group_starts(states.series_id, windows)
    ends = np.append(begins[1:], len(windows)) - 1
    inner = np.ones(len(windows), dtype=bool)
    inner[begins] = False
    lasts, mixed = _lasts(states, begins, ends, inner)
    mixed |= overlapping
    gained, reset, overlap = _growth_between(states, inner)
    entry, entry_reset, entry_overlap = _entry_growth(states, begins, lasts, lookback_days)
    gained[begins] = entry
    reset[begins] |= entry_reset
    overlap[begins] |= entry_overlap
    merged = _merged(states, begins, lasts, (gained, reset, overlap))
    keep = merged.n > 0
    return WindowRows(select_rows(merged, keep), entry[keep], mixed[keep])


def last_group_start(states: States, width_ms: int) -> int:
    """Return the index of the last window's first row: more of its rows may follow in the next batch."""
    return int(_group_starts(states.series_id, states.first_ts // width_ms)[-1])


def tail_before(states: States, index: int, width_ms: int) -> States:
    """Return the last sample before the window that begins at row `index`, as a tail; no row if there is none."""
    if not index or states.series_id[index - 1] != states.series_id[index]:
        return select_rows(states, slice(0))
    begin = last_group_start(select_rows(states, slice(index)), width_ms)
    rows = slice(begin, index)
    order = np.lexsort((states.last_start[rows], states.last_v[rows], states.last_ts[rows]))
    tail = _tails(states, np.array([begin + order[-1]]))
    return tail._replace(run_end=states.run_end[index - 1 : index])


def concatenate(pieces: list[States]) -> States:
    """Concatenate the rows of all pieces."""
    return States._make(np.concatenate(columns) for columns in zip(*pieces, strict=True))


def _tails(states: States, rows: npt.NDArray[np.intp]) -> States:
    """Return the last samples of these rows, as tails."""
    none, zero = np.zeros(len(rows), np.int64), np.zeros(len(rows))
    ends = _last(states, rows)
    return States._make((states.series_id[rows], *ends, *ends, none, *(zero,) * 6, none, none, states.run_end[rows]))


def _in_another_run(states: States) -> Mask:
    """Return a mask of the rows that lie within the previous row's run but belong to another."""
    within = np.zeros(len(states.n), bool)
    within[1:] = (
        (states.series_id[1:] == states.series_id[:-1])
        & (states.run_end[1:] != states.run_end[:-1])
        & (states.first_ts[1:] <= states.run_end[:-1])
    )
    return within


def _dtype(name: str) -> type[np.int64 | np.float64]:
    return np.int64 if name in LONG_COLUMNS else np.float64


def _unique(series_id: Longs, ts: Longs, value: Doubles, start: Longs) -> tuple[Longs, Longs, Doubles, Longs]:
    """Sort by series and time; of samples with one timestamp keep the largest value, then the latest start."""
    order = _order(series_id, ts)
    series_id, ts, value, start = series_id[order], ts[order], value[order], start[order]
    numbers = ~np.isnan(value)
    if not numbers.all():
        series_id, ts, value, start = series_id[numbers], ts[numbers], value[numbers], start[numbers]
    same = (ts[1:] == ts[:-1]) & (series_id[1:] == series_id[:-1])
    if not same.any():
        return series_id, ts, value, start
    if (same & ((value[1:] != value[:-1]) | (start[1:] != start[:-1]))).any():
        order = np.lexsort((-start, -value, ts, series_id))
        series_id, ts, value, start = series_id[order], ts[order], value[order], start[order]
        same = (ts[1:] == ts[:-1]) & (series_id[1:] == series_id[:-1])
    keep = np.append(True, ~same)
    return series_id[keep], ts[keep], value[keep], start[keep]


def _order(series_id: Longs, ts: Longs) -> npt.NDArray[np.intp]:
    """Return lexsort((ts, series_id)), from small numbers for series, whose radix sort is several times faster."""
    number = _numbers(series_id)
    by_series = np.argsort(number, kind="stable")
    number, ts = number[by_series], ts[by_series]
    if ((ts[1:] >= ts[:-1]) | (number[1:] != number[:-1])).all():
        return by_series
    # Few samples are out of order, and a stable sort of one number is fast on sorted runs.
    span = int(ts.max()) - int(ts.min()) + 1
    if span > np.iinfo(np.int64).max // (int(number[-1]) + 1):
        return by_series[np.lexsort((ts, number))]
    return by_series[np.argsort(number.astype(np.int64) * span + (ts - ts.min()), kind="stable")]


def _numbers(series_id: Longs) -> npt.NDArray[np.integer[Any]]:
    """Return each series' rank. A hash table finds the few distinct ones, which is faster than sorting all rows."""
    encoded = pa.array(series_id).dictionary_encode()
    series = encoded.dictionary.to_numpy()
    place: npt.NDArray[np.integer[Any]] = np.empty(len(series), np.uint16 if len(series) <= 1 << 16 else np.int64)
    place[np.argsort(series)] = np.arange(len(series))
    indices: npt.NDArray[np.int32] = encoded.indices.to_numpy()
    return place[indices]


def _group_starts(series_id: Longs, windows: Longs) -> npt.NDArray[np.intp]:
    """Return the indexes where a new series or window begins, in sorted rows."""
    new = (windows[1:] != windows[:-1]) | (series_id[1:] != series_id[:-1])
    return np.append(0, np.flatnonzero(new) + 1)


def _growth_within(ts: Longs, value: Doubles, start: Longs, begins: npt.NDArray[np.intp]) -> tuple[Doubles, Mask, Mask]:
    """Return the growth up to each sample from the previous one; none at the first of a group."""
    gained, reset, overlap = np.zeros_like(value), np.zeros(len(ts), bool), np.zeros(len(ts), bool)
    gained[1:], reset[1:], overlap[1:] = growth((ts[:-1], value[:-1], start[:-1]), (ts[1:], value[1:], start[1:]))
    gained[begins], reset[begins], overlap[begins] = 0.0, False, False
    return gained, reset, overlap


def _growth_between(states: States, inner: Mask) -> tuple[Doubles, Mask, Mask]:
    """Return the growth from each state to the next of the same window."""
    gained, reset, overlap = (np.zeros(len(inner)), np.zeros(len(inner), bool), np.zeros(len(inner), bool))
    later = np.flatnonzero(inner)
    if len(later):
        gained[later], reset[later], overlap[later] = growth(_last(states, later - 1), _first(states, later))
    return gained, reset, overlap


def _entry_growth(
    states: States, begins: npt.NDArray[np.intp], lasts: npt.NDArray[np.intp], lookback_days: int
) -> tuple[Doubles, Mask, Mask]:
    """Return the growth up to the first sample of each window: from the series' previous one, or since its start."""
    ts, value, start = _first(states, begins)
    earlier = np.append(0, lasts[:-1])
    horizon = ts // DAY_MS * DAY_MS - lookback_days * DAY_MS
    follows = (states.series_id[earlier] == states.series_id[begins]) & (states.last_ts[earlier] >= horizon)
    follows[0] = False
    gained, reset, overlap = growth(_last(states, earlier), (ts, value, start))
    since_start = (start != NO_START) & (start >= horizon) & (start < ts) & np.isfinite(value)
    entry = np.where(follows, gained, np.where(since_start, value, 0.0))
    return entry, reset & follows, overlap & follows


def _merged(
    states: States,
    begins: npt.NDArray[np.intp],
    lasts: npt.NDArray[np.intp],
    grown: tuple[Doubles, Mask, Mask],
) -> States:
    gained, reset, overlap = grown
    return States(
        states.series_id[begins],
        *_first(states, begins),
        *_last(states, lasts),
        np.add.reduceat(states.n, begins),
        *_sum(states.sum, states.sum_lo, None, begins),
        np.minimum.reduceat(states.min, begins),
        np.maximum.reduceat(states.max, begins),
        *_sum(states.increase, states.increase_lo, gained, begins),
        np.add.reduceat(states.resets + reset, begins),
        np.add.reduceat(states.overlaps + overlap, begins),
        states.run_end[lasts],
    )


def _sum(total: Doubles, rest: Doubles, more: Doubles | None, begins: npt.NDArray[np.intp]) -> tuple[Doubles, Doubles]:
    return normalize_sum(*(np.add.reduceat(part, begins) for part in _added(total, rest, more)))


def _added(total: Doubles, rest: Doubles, more: Doubles | None) -> tuple[Doubles, Doubles]:
    """Add in two parts (`to_fixed_point`), whose sums are exact."""
    high, low = to_fixed_point(total)
    low = low + rest
    if more is None:
        return high, low
    more_high, more_low = to_fixed_point(more)
    return high + more_high, low + more_low


def _lasts(
    states: States, begins: npt.NDArray[np.intp], ends: npt.NDArray[np.intp], inner: Mask
) -> tuple[npt.NDArray[np.intp], Mask]:
    """Return the row that holds each window's last sample, and a mask of the windows whose rows overlap in time."""
    touching = np.zeros(len(inner), bool)
    touching[1:] = inner[1:] & (states.first_ts[1:] <= states.last_ts[:-1])
    mixed = np.logical_or.reduceat(touching, begins)
    lasts = ends.copy()
    for group in np.flatnonzero(mixed):
        rows = slice(begins[group], ends[group] + 1)
        order = np.lexsort((states.last_start[rows], states.last_v[rows], states.last_ts[rows]))
        lasts[group] = begins[group] + order[-1]
    return lasts, mixed


def _without_copies(states: States) -> States:
    """Drop the second of two single samples with one timestamp, for which the samples need not be read again."""
    copy = np.zeros(len(states.n), bool)
    single = states.n == 1
    copy[1:] = (
        single[1:]
        & single[:-1]
        & (states.series_id[1:] == states.series_id[:-1])
        & (states.first_ts[1:] == states.first_ts[:-1])
    )
    return select_rows(states, ~copy) if copy.any() else states


def _first(states: States, rows: npt.NDArray[np.intp]) -> tuple[Longs, Doubles, Longs]:
    return states.first_ts[rows], states.first_v[rows], states.first_start[rows]


def _last(states: States, rows: npt.NDArray[np.intp]) -> tuple[Longs, Doubles, Longs]:
    return states.last_ts[rows], states.last_v[rows], states.last_start[rows]
