"""The counter model's laws, on the definition in plain Python."""

import itertools
import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from analytics.transforms.counter_state import (
    DAY_MS,
    EMPTY,
    CounterState,
    Sample,
    coarser,
    deduplicate,
    growth,
    growth_at_first,
    merge,
    merge_all,
    state_of_sample,
    state_of_samples,
    to_fixed_point,
    windows,
)
from tests.analytics.transforms_data import patient

MINUTE_MS = 60_000
HOUR_MS = 3_600_000
whole = st.integers(0, 1 << 43).map(float)
values = st.one_of(whole, st.floats(0, 1e6), st.sampled_from([0.0, 0.1, 1.5, 1e9]))
stamps = st.integers(1, 500).map(lambda ticks: ticks * 15_000)


@st.composite
def sample_lists(draw: st.DrawFn, max_size: int = 30) -> list[Sample]:
    """Any order, with duplicates; starts unknown, true, or nonsense."""
    starts = st.one_of(st.just(0), st.integers(1, 8_000_000))
    return draw(st.lists(st.builds(Sample, stamps, values, starts), max_size=max_size))


@st.composite
def consecutive(draw: st.DrawFn, parts: int) -> list[CounterState]:
    ordered = deduplicate(draw(sample_lists()))
    cuts = sorted(draw(st.lists(st.integers(0, len(ordered)), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *cuts, len(ordered)]
    return [state_of_samples(ordered[a:b]) for a, b in itertools.pairwise(edges)]


any_state = sample_lists(6).map(state_of_samples)


@patient
@given(any_state, any_state, any_state)
def test_merge_is_associative_for_any_three_states(a: CounterState, b: CounterState, c: CounterState) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@patient
@given(any_state)
def test_the_empty_state_is_the_identity(a: CounterState) -> None:
    assert merge(EMPTY, a) == a == merge(a, EMPTY)


@patient
@given(consecutive(4), st.randoms())
def test_any_split_in_any_order_equals_the_samples(states: list[CounterState], random: object) -> None:
    whole_state = EMPTY
    for state in states:
        whole_state = merge(whole_state, state)
    random.shuffle(states)  # type: ignore[attr-defined]
    assert merge_all(states) == whole_state
    assert not whole_state.mixed


@patient
@given(sample_lists())
def test_states_of_single_samples_equal_the_raw_computation(samples: list[Sample]) -> None:
    state, kept = state_of_samples(samples), deduplicate(samples)
    steps = [growth(a, b) for a, b in itertools.pairwise(kept)]
    assert state.n == len(kept)
    assert state.increase == sum((to_fixed_point(step[0]) for step in steps), Fraction(0))
    assert state.resets == sum(step[1] for step in steps)
    assert state.overlaps == sum(step[2] for step in steps)
    assert state.sum == sum((to_fixed_point(sample.value) for sample in kept), Fraction(0))


@patient
@given(sample_lists(), st.integers(0, 3))
def test_hours_from_minutes_equal_hours_from_samples_and_days_too(samples: list[Sample], lookback_days: int) -> None:
    minutes = windows(samples, MINUTE_MS, lookback_days)
    hours = coarser(minutes, HOUR_MS)
    assert [(row.start, row.increase, row.resets, row.overlaps, row.entry, row.state.sum) for row in hours] == [
        (row.start, row.increase, row.resets, row.overlaps, row.entry, row.state.sum)
        for row in windows(samples, HOUR_MS, lookback_days)
    ]
    assert [row.state.last for row in hours] == [row.state.last for row in windows(samples, HOUR_MS, lookback_days)]
    assert [(row.start, row.increase) for row in coarser(hours, DAY_MS)] == [
        (row.start, row.increase) for row in windows(samples, DAY_MS, lookback_days)
    ]


@patient
@given(sample_lists())
def test_the_windows_sum_is_the_total_increase(samples: list[Sample]) -> None:
    """Each growth between two samples is in one window, exactly once."""
    rows = windows(samples, MINUTE_MS, 7)
    first = deduplicate(samples)[:1]
    before = to_fixed_point(growth_at_first(first[0], -7 * DAY_MS)) if first else 0
    assert sum((row.increase for row in rows), Fraction(0)) == before + state_of_samples(samples).increase


def test_overlapping_states_are_mixed_and_stay_so() -> None:
    a, b = state_of_samples([Sample(1, 1.0), Sample(5, 2.0)]), state_of_samples([Sample(5, 3.0), Sample(6, 4.0)])
    mixed = merge(a, b)
    assert mixed.mixed
    assert (mixed.first, mixed.last, mixed.n) == (Sample(1, 1.0), Sample(6, 4.0), 0)
    assert merge(mixed, state_of_sample(Sample(9, 9.0))).mixed


def test_a_fall_is_a_reset_and_the_new_value_is_the_growth() -> None:
    assert growth(Sample(1, 100.0), Sample(2, 7.0)) == (7.0, 1, 0)


def test_a_start_timestamp_tells_of_a_reset_that_the_value_hides() -> None:
    assert growth(Sample(10, 100.0, 1), Sample(20, 150.0, 15)) == (150.0, 1, 0)


def test_a_first_start_timestamp_before_the_earlier_sample_is_no_reset() -> None:
    assert growth(Sample(10, 100.0), Sample(20, 150.0, 5)) == (50.0, 0, 0)


def test_one_start_timestamp_means_no_reset_two_replicas_overlap() -> None:
    assert growth(Sample(10, 100.0, 1), Sample(20, 99.0, 1)) == (-1.0, 0, 1)


def test_the_first_increment_is_exact_where_the_start_is_known() -> None:
    assert growth_at_first(Sample(100, 42.0, 50), 0) == 42.0
    assert growth_at_first(Sample(100, 42.0), 0) == 0.0


def test_a_start_before_the_horizon_or_at_the_sample_itself_is_no_start() -> None:
    """Before the horizon there may have been samples; a start of its own time is OpenTelemetry's "unknown"."""
    assert growth_at_first(Sample(100, 42.0, 49), 50) == 0.0
    assert growth_at_first(Sample(100, 42.0, 100), 0) == 0.0


def test_a_tail_older_than_the_lookback_is_not_looked_at() -> None:
    old, new = Sample(5 * DAY_MS, 10.0), Sample(9 * DAY_MS + 7, 30.0)
    assert windows([new], HOUR_MS, 4, old)[0].increase == 20
    assert windows([new], HOUR_MS, 3, old)[0].increase == 0


def test_infinite_values_do_not_spoil_increases() -> None:
    assert growth(Sample(1, math.inf), Sample(2, 5.0)) == (5.0, 1, 0)
    assert growth(Sample(1, 5.0), Sample(2, math.inf)) == (0.0, 0, 0)


@patient
@given(st.floats(-1e300, 1e300))
def test_fixed_is_within_2_to_the_minus_54(value: float) -> None:
    assert abs(to_fixed_point(value) - Fraction(value)) <= Fraction(1, 2**54)


@patient
@given(st.integers(-(2**53), 2**53))
def test_fixed_keeps_whole_numbers(value: int) -> None:
    assert to_fixed_point(float(value)) == value
