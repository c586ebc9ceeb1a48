"""The arrays compute what the definition says: for any samples, any chunks, any batches."""

import math
from collections.abc import Iterator
from fractions import Fraction
from operator import itemgetter
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analytics.transforms import kernel
from analytics.transforms.counter_state import Sample, deduplicate, windows
from analytics.transforms.kernel import States
from tests.analytics.transforms_data import patient

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
LOOKBACK = 2
Raw = list[tuple[int, Sample]]

wholes = st.integers(0, 1 << 46).map(float)
fractions = st.one_of(st.floats(0, 1e6), st.sampled_from([0.1, 5.0]))


def lists_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[Raw]:
    starts = st.one_of(st.just(0), st.integers(1, 300_000_000))
    samples = st.builds(Sample, st.integers(0, 40_000).map(lambda ticks: ticks * 7_500), values, starts)
    return st.lists(st.tuples(st.sampled_from([-(2**63), -3, 5, 2**63 - 1]), samples), max_size=40)


raws = st.one_of(lists_of(wholes), lists_of(fractions))


def states_of(rows: Raw) -> States:
    ids, ts, values, starts = ([row[0] for row in rows], *([getattr(row[1], name) for row in rows] for name in NAMES))
    return kernel.partial_states(
        np.array(ids, np.int64), np.array(ts, np.int64), np.array(values, float), np.array(starts, np.int64), MINUTE_MS
    )


NAMES = ("ts", "value", "start_ts")


def sorted_states(pieces: list[States]) -> States:
    states = kernel.concatenate(pieces)
    order = np.lexsort((-states.first_start, -states.first_v, states.first_ts, states.series_id))
    return kernel.select_rows(states, order)


def expected(rows: Raw) -> list[tuple[object, ...]]:
    result: list[tuple[object, ...]] = []
    for series in sorted({row[0] for row in rows}):
        for row in windows([sample for number, sample in rows if number == series], MINUTE_MS, LOOKBACK):
            first, last = row.state.first, row.state.last
            assert first
            assert last
            ends = (first.ts, first.value, first.start_ts, last.ts, last.value, last.start_ts)
            numbers = (row.state.n, row.state.sum, row.state.min, row.state.max, row.increase, row.resets, row.overlaps)
            result.append((series, *ends, *numbers, row.entry))
    return result


def run_pieces(rows: Raw) -> kernel.Runs:
    return kernel.split_runs(states_of(rows), MINUTE_MS, HOUR_MS)


def in_batches(states: States, size: int) -> Iterator[kernel.WindowRows]:
    """As Spark gives them: rows come in batches, the last window is held back, its series' last sample goes on."""
    held = kernel.select_rows(states, slice(0))
    for begin in range(0, len(states.n), size):
        batch = kernel.concatenate([held, kernel.select_rows(states, slice(begin, begin + size))])
        end = kernel.last_group_start(batch, MINUTE_MS)
        held = kernel.concatenate(
            [kernel.tail_before(batch, end, MINUTE_MS), kernel.select_rows(batch, slice(end, None))]
        )
        if end:
            yield kernel.window_rows(kernel.select_rows(batch, slice(end)), MINUTE_MS, LOOKBACK)
    yield kernel.window_rows(held, MINUTE_MS, LOOKBACK)


def got_of_runs(pieces: list[kernel.Runs], size: int = 1000) -> tuple[list[tuple[object, ...]], set[int]]:
    """Whole windows of all chunks and the merged ones, and the hours that are mixed."""
    merged = list(in_batches(sorted_states([piece.open for piece in pieces]), size))
    whole = [kernel.WindowRows(piece.whole, piece.entry, np.zeros(len(piece.entry), bool)) for piece in pieces]
    mixed = {hour for found in merged for hour in (found.states.first_ts[found.mixed] // HOUR_MS).tolist()}
    return sorted(row for found in (*merged, *whole) for row in got(found)), mixed


def got(found: kernel.WindowRows) -> list[tuple[object, ...]]:
    names = ("series_id", "first_ts", "first_v", "first_start", "last_ts", "last_v", "last_start", "n")
    rows = []
    for index in range(len(found.entry)):
        row = {name: column[index].item() for name, column in found.states._asdict().items()}
        total, increase = (Fraction(row[name]) + Fraction(row[f"{name}_lo"]) for name in ("sum", "increase"))
        rest = (total, row["min"], row["max"], increase, row["resets"], row["overlaps"], found.entry[index].item())
        rows.append((*(row[name] for name in names), *rest))
    return rows


@patient
@given(raws.filter(bool))
def test_one_chunk_equals_the_definition(rows: Raw) -> None:
    found = kernel.window_rows(states_of(rows), MINUTE_MS, LOOKBACK)
    assert got(found) == expected(rows)
    assert not found.mixed.any()


@patient
@given(raws.filter(bool))
def test_single_samples_equal_the_definition_with_all_duplicates(rows: Raw) -> None:
    found = kernel.window_rows(sorted_states([states_of([row]) for row in rows]), MINUTE_MS, LOOKBACK)
    assert got(found) == expected(rows)
    assert not found.mixed.any()


@patient
@given(raws.filter(bool), st.integers(2, 4), st.randoms())
def test_any_chunks_equal_the_definition_where_nothing_is_mixed(rows: Raw, parts: int, random: object) -> None:
    random.shuffle(rows)  # type: ignore[attr-defined]
    found = kernel.window_rows(
        sorted_states([states_of(rows[part::parts]) for part in range(parts)]), MINUTE_MS, LOOKBACK
    )
    truth = expected(rows)
    assert [row[:7] for row in got(found)] == [row[:7] for row in truth]  # a mixed window's ends hold, too
    for row, true, mixed in zip(got(found), truth, found.mixed, strict=True):
        assert mixed or row == true


@patient
@given(raws.filter(bool), st.integers(1, 5))
def test_batches_with_tails_equal_one_batch(rows: Raw, size: int) -> None:
    found = in_batches(sorted_states([states_of([row]) for row in rows]), size)
    assert [row for part in found for row in got(part)] == expected(rows)


dense = st.lists(st.integers(0, 1000).map(lambda ticks: ticks * 7_500), min_size=20, max_size=150)
counted = st.tuples(dense, st.randoms()).map(
    lambda drawn: [
        (drawn[1].choice([3, 4]), Sample(ts, float(drawn[1].randrange(1000)), drawn[1].choice([0, 0, ts - 20_000])))
        for ts in drawn[0]
    ]
)


@patient
@given(counted)
def test_whole_windows_and_merged_open_ones_equal_the_definition(rows: Raw) -> None:
    assert got_of_runs([run_pieces(rows)]) == (expected(rows), set())


@patient
@given(counted)
def test_what_whole_windows_add_up_to_stands_for_them(rows: Raw) -> None:
    """With the open ones it makes the same hours as all windows do."""
    piece = run_pieces(rows)
    summed = kernel.WindowRows(piece.added_up, piece.added_up_entry, np.zeros(len(piece.added_up_entry), bool))
    whole = kernel.WindowRows(piece.whole, piece.entry, np.zeros(len(piece.entry), bool))
    assert hours_of(got(summed)) == hours_of(got(whole))
    assert len(piece.added_up.n) <= len(piece.open.n) / 2


def hours_of(rows: list[tuple[object, ...]]) -> dict[tuple[object, int], tuple[object, ...]]:
    """Rows of `got` added up by series and hour: what is first, what is last, sums, extremes."""
    hours: dict[tuple[object, int], list[tuple[Any, ...]]] = {}
    for row in sorted(rows, key=itemgetter(0, 1)):
        hours.setdefault((row[0], cast("int", row[1]) // HOUR_MS), []).append(row)
    return {
        key: (
            *(found[0][1:4], found[-1][4:7], found[0][14], min(row[9] for row in found), max(row[10] for row in found)),
            *(sum(row[index] for row in found) for index in (7, 8, 11, 12, 13)),
        )
        for key, found in hours.items()
    }


def test_only_samples_out_of_order_in_a_span_too_wide_are_sorted_in_two_steps() -> None:
    ts = np.array([5, 1 << 62, -(1 << 62), 7, 7], np.int64)
    ids = np.array([1, 2, 2, 1, 0], np.int64)
    states = kernel.partial_states(ids, ts, ts.astype(float), np.zeros_like(ts), MINUTE_MS)
    assert list(zip(states.series_id.tolist(), states.first_ts.tolist(), states.n.tolist(), strict=True)) == [
        (0, 7, 1),
        (1, 5, 2),
        (2, -(1 << 62), 1),
        (2, 1 << 62, 1),
    ]


@patient
@given(counted, st.lists(st.integers(0, 125), min_size=1, max_size=4), st.randoms(), st.sampled_from([1, 2, 5, 1000]))
def test_runs_of_any_chunks_equal_the_definition_or_their_hours_are_mixed(
    rows: Raw, cuts: list[int], random: object, size: int
) -> None:
    """Chunks that follow each other, in part: some samples are in a chunk where they lie within another's run."""
    edges = [-1, *sorted(cut * MINUTE_MS + 30_000 for cut in cuts), 1 << 40]
    chunks: list[Raw] = [[] for _ in edges]
    for row in rows:
        own = next(number for number, edge in enumerate(edges) if row[1].ts < edge)
        stray = random.random() < 0.02  # type: ignore[attr-defined]
        chunks[random.randrange(len(edges)) if stray else own].append(row)  # type: ignore[attr-defined]
    found, mixed = got_of_runs([run_pieces(chunk) for chunk in chunks if chunk], size)
    whole = [row for row in found if cast("int", row[1]) // HOUR_MS not in mixed]
    assert whole == [row for row in expected(rows) if cast("int", row[1]) // HOUR_MS not in mixed]


def test_chunks_one_after_the_other_are_not_mixed() -> None:
    rows = [(1, Sample(tick * 15_000, float(tick))) for tick in range(400)]
    assert got_of_runs([run_pieces(rows[:210]), run_pieces(rows[210:])]) == (expected(rows), set())


def test_a_sample_within_another_chunks_run_mixes_the_hour() -> None:
    rows = [(1, Sample(tick * 15_000, float(tick))) for tick in range(200)]
    for stray in (1, 4 * 30 + 1, 197):
        _, mixed = got_of_runs([run_pieces(rows[:stray] + rows[stray + 1 :]), run_pieces([rows[stray]])])
        assert mixed == {0}


def test_of_a_run_three_states_are_open_however_long_it_is_and_it_ends_with_the_hour() -> None:
    pieces = run_pieces([(1, Sample(tick * 15_000, float(tick))) for tick in range(400)])
    assert (len(pieces.open.n), len(pieces.whole.n)) == (3 + 3, 58 + 38)


def test_duplicates_in_two_chunks_are_mixed() -> None:
    rows = [(1, Sample(ts, 1.0)) for ts in (0, 15_000, 30_000)]
    found = kernel.window_rows(sorted_states([states_of(rows), states_of(rows)]), MINUTE_MS, LOOKBACK)
    assert found.mixed.tolist() == [True]


def test_of_duplicates_that_differ_the_largest_counts() -> None:
    rows = [(1, Sample(0, 1.0)), (1, Sample(0, 3.0)), (1, Sample(0, 2.0))]
    assert kernel.window_rows(states_of(rows), MINUTE_MS, LOOKBACK).states.sum.tolist() == [3.0]
    assert deduplicate(sample for _, sample in rows) == [Sample(0, 3.0)]


def test_nan_is_no_sample() -> None:
    rows = [(1, Sample(0, 1.0)), (1, Sample(1, math.nan)), (2, Sample(0, math.nan))]
    states = states_of(rows)
    assert (states.series_id.tolist(), states.n.tolist()) == ([1], [1])
    assert not len(states_of(rows[1:]).n)


def test_infinity_stays_in_the_sum_and_out_of_the_increase() -> None:
    found = kernel.window_rows(states_of([(1, Sample(0, 1.0)), (1, Sample(1, math.inf))]), MINUTE_MS, LOOKBACK)
    assert (found.states.sum[0], found.states.sum_lo[0], found.states.increase[0]) == (math.inf, 0.0, 0.0)


def test_more_series_than_fit_in_16_bits() -> None:
    ids = np.arange(70_000, dtype=np.int64)[::-1]
    states = kernel.partial_states(ids, np.zeros_like(ids), ids.astype(float), np.zeros_like(ids), MINUTE_MS)
    assert (states.series_id == np.arange(70_000)).all()
    assert (states.first_v == np.arange(70_000)).all()


def test_interleaved_series_keep_the_order_of_time() -> None:
    rows = [(series, Sample(tick * 100, float(tick))) for tick in range(500) for series in (3, 1, 2)]
    found = kernel.window_rows(states_of(rows), MINUTE_MS, LOOKBACK)
    assert found.states.increase.tolist() == [499.0] * 3
    assert not found.states.resets.any()


def test_the_window_after_a_mixed_one_grows_from_its_true_last_sample() -> None:
    around, inside = (
        [(1, Sample(0, 1.0)), (1, Sample(45_000, 9.0))],
        [(1, Sample(15_000, 2.0)), (1, Sample(30_000, 4.0))],
    )
    states = sorted_states([states_of(around), states_of(inside), states_of([(1, Sample(60_000, 10.0))])])
    found = kernel.window_rows(states, MINUTE_MS, LOOKBACK)
    assert found.mixed.tolist() == [True, False]
    assert (found.states.last_ts[0], found.entry[1]) == (45_000, 1.0)
