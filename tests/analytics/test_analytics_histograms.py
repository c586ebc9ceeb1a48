"""Native histograms: common bounds, growth, sums, and their rollup."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession

from analytics.jobs import rollup
from analytics.tables.schemas import HISTOGRAMS
from analytics.tables.store import Tables
from analytics.transforms.histogram_rollup import _Sample, merged_row, minutes_of, one_replica
from analytics.transforms.histograms import (
    CUSTOM_BOUNDS,
    Histogram,
    HistogramSample,
    Incompatible,
    add,
    from_row,
    growth,
    growth_at_first,
    to_common_bounds,
    to_row,
)
from tests.analytics.transforms_data import DAY_MS, HOUR_MS, MINUTE_MS, moment, patient, table_rows

BOUNDS = (0.1, 0.5, 1.0)


def custom(*counts: float, bounds: tuple[float, ...] = BOUNDS) -> Histogram:
    return Histogram(CUSTOM_BOUNDS, sum(counts), 1.0, positive=dict(enumerate(counts)), custom_bounds=bounds)


def observed(values: list[float], schema: int) -> Histogram:
    """What an exponential histogram of these positive observations looks like."""
    buckets: dict[int, float] = {}
    for value in values:
        index = math.ceil(math.log2(value) * 2.0**schema)
        buckets[index] = buckets.get(index, 0.0) + 1
    return Histogram(schema, len(values), 0.0, positive=buckets)


observations = st.lists(st.integers(2, 10**6).map(lambda n: n / 997), max_size=30)


@patient
@given(observations, observations, st.integers(-4, 3), st.integers(-4, 3))
def test_the_sum_over_common_bounds_is_the_histogram_of_all_observations(
    first: list[float], second: list[float], schema: int, other: int
) -> None:
    total, complete = add(observed(first, schema), observed(second, other))
    assert complete
    assert total.schema == min(schema, other)
    assert total == Histogram(
        total.schema, len(first) + len(second), positive=observed(first + second, total.schema).positive
    )


def test_a_bucket_boundary_stays_in_its_bucket_when_the_schema_is_reduced() -> None:
    fine = Histogram(1, 3.0, positive={0: 1.0, 1: 1.0, 2: 1.0})
    assert to_common_bounds(fine, Histogram(0))[0].positive == {0: 1.0, 1: 2.0}


def test_the_wider_zero_bucket_takes_in_whole_buckets_and_widens_to_the_end_of_one_it_cuts() -> None:
    plain = Histogram(0, 6.0, zero_count=1.0, positive={-1: 1.0, 0: 2.0, 1: 1.0}, negative={-1: 1.0})
    wide = Histogram(0, 1.0, zero_threshold=0.75, zero_count=1.0)
    first, second = to_common_bounds(plain, wide)
    assert first.zero_threshold == second.zero_threshold == 1.0
    assert (first.zero_count, first.positive, first.negative) == (5.0, {1: 1.0}, {})


def test_custom_bounds_are_reduced_to_those_that_both_have() -> None:
    total, _ = add(custom(1, 2, 4, 8), custom(16, 32, 64, bounds=(0.5, 2.0)))
    assert (total.custom_bounds, total.positive, total.count) == ((0.5,), {0: 19.0, 1: 108.0}, 127.0)
    assert add(custom(3, bounds=()), custom(4, bounds=()))[0].positive == {0: 7.0}
    reduced, _ = to_common_bounds(custom(1, 2, 4, 8), custom(1, 1, 1, bounds=(0.5, 1.0)))  # the last bound is common
    assert (reduced.custom_bounds, reduced.positive) == ((0.5, 1.0), {0: 3.0, 1: 4.0, 2: 8.0})


@pytest.mark.parametrize("other", [custom(1, 1, bounds=(3.0,)), Histogram(0)])
def test_without_bounds_in_common_only_count_and_sum_add_up(other: Histogram) -> None:
    with pytest.raises(Incompatible):
        to_common_bounds(custom(1, 1, 1, 1), other)
    total, complete = add(custom(1, 1, 1, 1), other)
    assert not complete
    assert total == replace(custom(1, 1, 1, 1), count=4 + other.count, sum=1.0 + other.sum)


def test_growth_is_the_difference_and_a_fall_of_any_bucket_a_reset() -> None:
    before = HistogramSample(1, custom(1, 2, 3, 4))
    assert growth(before, HistogramSample(2, custom(2, 2, 3, 5))) == (
        Histogram(CUSTOM_BOUNDS, 2.0, 0.0, positive={0: 1.0, 1: 0.0, 2: 0.0, 3: 1.0}, custom_bounds=BOUNDS),
        0,
        True,
    )
    fallen = custom(0, 20, 30, 40)
    assert growth(before, HistogramSample(2, fallen)) == (fallen, 1, True)


def test_a_new_start_is_a_reset_that_the_counts_hide() -> None:
    later = HistogramSample(20, custom(9, 9, 9, 9), 15)
    assert growth(HistogramSample(10, custom(1, 1, 1, 1), 5), later) == (later.histogram, 1, True)


def test_the_first_growth_needs_a_start() -> None:
    assert growth_at_first(HistogramSample(10, custom(1, 1, 1, 1), 5), 0) == custom(1, 1, 1, 1)
    assert growth_at_first(HistogramSample(10, custom(1, 1, 1, 1)), 0).count == 0
    wide = Histogram(3, 2.0, zero_threshold=0.5, zero_count=2.0)
    assert growth_at_first(HistogramSample(10, wide), 0) == Histogram(3, zero_threshold=0.5)


@patient
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), observations)
def test_rows_round_trip(counts: list[int], values: list[float]) -> None:
    for histogram in (custom(*counts), observed(values, 2)):
        again = from_row(to_row(histogram))
        assert again.positive == {index: count for index, count in histogram.positive.items() if count}
        assert to_row(again) == to_row(histogram)


def test_a_row_has_every_field_and_buckets_in_order_without_empty_ones() -> None:
    full = Histogram(3, 12.0, -1.5, 0.25, 3.0, {9: 4.0, -2: 2.0, 1: 0.0}, {8: 2.0, 1: 1.0})
    row = {
        "count": 12.0,
        "sum": -1.5,
        "schema": 3,
        "zero_threshold": 0.25,
        "zero_count": 3.0,
        "positive_offsets": [-2, 9],
        "positive_counts": [2.0, 4.0],
        "negative_offsets": [1, 8],
        "negative_counts": [1.0, 2.0],
        "custom_bounds": [],
    }
    assert to_row(full) == row
    assert from_row(row) == replace(full, positive={9: 4.0, -2: 2.0})


def test_growth_over_new_bounds_has_count_and_sum_and_a_fall_is_a_reset() -> None:
    before = HistogramSample(1, custom(1, 2, 3, 4))
    more, fewer = custom(15, 0, bounds=(7.0,)), custom(9, 0, bounds=(7.0,))
    gained, resets, complete = growth(before, HistogramSample(2, replace(more, sum=3.0)))
    assert (gained, resets, complete) == (
        Histogram(CUSTOM_BOUNDS, 5.0, 2.0, custom_bounds=(7.0,)),
        0,
        False,
    )
    assert growth(before, HistogramSample(2, fewer)) == (fewer, 1, True)
    started = HistogramSample(1, custom(1, 2, 3, 4), 0), HistogramSample(2, fewer, 1)
    assert growth(*started) == (fewer, 1, True)


def test_a_new_start_of_a_sample_before_is_no_reset() -> None:
    """It began before the earlier sample: that one has not told its start."""
    earlier, later = HistogramSample(10, custom(1, 1, 1, 1)), HistogramSample(20, custom(2, 2, 2, 2), 9)
    assert growth(earlier, later)[0].count == 4
    assert growth(HistogramSample(10, custom(3, 1, 1, 1), 9), HistogramSample(20, custom(2, 2, 2, 2), 9))[1:] == (
        0,
        True,
    )


def test_a_zero_bucket_cuts_buckets_of_both_signs() -> None:
    """One that ends at the threshold is taken in whole; one that is empty widens nothing."""
    plain = Histogram(0, 10.0, zero_count=1.0, positive={0: 2.0, 1: 3.0, 2: 0.0}, negative={1: 4.0})
    first, second = to_common_bounds(plain, Histogram(0, zero_threshold=1.0, zero_count=7.0))
    assert (first.zero_threshold, first.zero_count, first.positive, first.negative) == (
        1.0,
        3.0,
        {1: 3.0, 2: 0.0},
        {1: 4.0},
    )
    assert second.zero_count == 7.0
    third, _ = to_common_bounds(plain, Histogram(0, zero_threshold=1.5))
    assert (third.zero_threshold, third.zero_count, third.positive, third.negative) == (2.0, 10.0, {2: 0.0}, {})
    negative, wide = Histogram(0, negative={1: 4.0}), Histogram(0, zero_threshold=1.5)
    for pair in (to_common_bounds(negative, wide), reversed(to_common_bounds(wide, negative))):
        assert [(one.zero_threshold, one.zero_count) for one in pair] == [(2.0, 4.0), (2.0, 0.0)]
    fourth, _ = to_common_bounds(replace(plain, negative={}), Histogram(0, zero_threshold=3.0))
    assert (fourth.zero_threshold, fourth.zero_count) == (3.0, 6.0)
    cut = Histogram(0, 3.0, zero_threshold=0.75, zero_count=1.0, positive={0: 2.0})  # by its own zero bucket: it stays
    assert add(cut, cut)[0] == replace(cut, count=6.0, zero_count=2.0, positive={0: 4.0})


def sampled(*samples: HistogramSample, replica: int = 0) -> list[_Sample]:
    return [_Sample(sample, replica) for sample in samples]


def test_a_start_is_a_reset_from_the_earlier_sample_on_and_the_first_growth_from_the_horizon_on() -> None:
    one, more = custom(1, 1, 1, 1), custom(3, 1, 1, 1)
    assert growth(HistogramSample(10, one, 5), HistogramSample(20, more, 10)) == (more, 1, True)
    assert growth(HistogramSample(10, one, 10), HistogramSample(20, more, 10))[0].count == 2
    assert growth(HistogramSample(-10, one, -20), HistogramSample(20, more))[1] == 0  # no start is none of 1970
    assert [growth_at_first(HistogramSample(10, one, start), 5).count for start in (4, 5, 9, 10)] == [0, 4, 4, 0]


@pytest.mark.parametrize("name", ["zero_count", "positive", "negative"])
def test_a_fall_of_one_kind_of_bucket_alone_is_a_reset(name: str) -> None:
    full = Histogram(1, 12.0, zero_count=4.0, positive={1: 2.0, 2: 2.0}, negative={1: 2.0, 2: 2.0})
    less = {"zero_count": 1.0, "positive": {1: 1.0, 2: 2.0}, "negative": {1: 1.0, 2: 2.0}}
    fallen = replace(full, count=20.0, **{name: less[name]})  # type: ignore[arg-type]
    assert growth(HistogramSample(1, full), HistogramSample(2, fallen)) == (fallen, 1, True)
    assert growth(HistogramSample(1, full), HistogramSample(2, full))[0].zero_count == 0
    assert list(add(Histogram(0, positive={8: 1.0}), Histogram(0, positive={1: 1.0}))[0].positive) == [1, 8]
    coarse, _ = add(full, Histogram(0, negative={1: 1.0}))
    assert (coarse.positive, coarse.negative) == ({1: 4.0}, {1: 5.0})


def test_the_minutes_and_the_hour_of_samples_with_two_resets() -> None:
    at = [(0, 4.0), (10, 6.0), (10, 5.0), (20, 1.0), (30, 3.0), (40, 2.0), (3 * 60, 5.0), (4 * 60, 1.0)]
    samples = sampled(*(HistogramSample(1000 * second, custom(count)) for second, count in at))
    rows = list(minutes_of(1, [*samples[:6], _Sample(samples[6].sample, is_tail=True), samples[7]], 7))
    assert [(row["n"], row["resets"], row["increase"]["count"], row["hour"]) for row in rows] == [
        (5, 2, 2 + 1 + 2 + 2, 0),
        (1, 1, 1, 0),
    ]
    assert (rows[0]["first_ts"], rows[0]["last_ts"]) == (moment(0), moment(40_000))
    hour = merged_row(rows, "1h", 0)
    assert (hour["first_ts"], hour["last_ts"], hour["resets"], hour["hour"], hour["increase"]["count"]) == (
        moment(0),
        moment(4 * MINUTE_MS),
        3,
        None,
        8,
    )


def test_refused_stays_counted_when_a_later_sample_of_the_minute_fits() -> None:
    """The second sample's buckets do not fit the first's; the third's fit the second's, and the minute's."""
    own = [custom(4.0), custom(5.0, bounds=(7.0,)), custom(6.0, bounds=(7.0,))]
    samples = sampled(*(HistogramSample(1000 * second, one) for second, one in enumerate(own)))
    (row,) = minutes_of(1, samples[1:], 7)
    assert row["refused"] == 0
    (row,) = minutes_of(1, [_Sample(samples[0].sample, is_tail=True), *samples[1:]], 7)
    assert (row["refused"], row["increase"]["count"]) == (1, 2)


@pytest.mark.parametrize(
    ("own", "refused"),
    [
        ([custom(4.0), custom(5.0, bounds=(7.0,)), custom(6.0)], 2),
        ([custom(4.0), custom(1.0, bounds=(7.0,))], 1),  # a reset: it has buckets, and the minute has others
    ],
)
def test_each_sample_is_refused_whose_buckets_fit_neither_the_one_before_nor_the_minute(
    own: list[Histogram], refused: int
) -> None:
    samples = sampled(*(HistogramSample(1000 * second, one) for second, one in enumerate(own)))
    (row,) = minutes_of(1, samples, 7)
    assert row["refused"] == refused


@pytest.mark.parametrize(("tail_ms", "grown"), [(DAY_MS, 5.0), (DAY_MS - 1, 0.0)])
def test_a_tail_counts_from_the_horizon_on(tail_ms: int, grown: float) -> None:
    tail, sample = HistogramSample(tail_ms, custom(4.0)), HistogramSample(DAY_MS + 7 * 24 * HOUR_MS, custom(9.0))
    (row,) = minutes_of(1, [_Sample(tail, is_tail=True), _Sample(sample)], 7)
    assert row["increase"]["count"] == grown


def test_count_and_sum_are_complete_when_bounds_change() -> None:
    """290 observations with the old bounds, then 290 with new ones: 580 in minutes and in the hour."""
    bounds = [BOUNDS] * 29 + [(7.0,)] * 30
    samples = [
        HistogramSample(MINUTE_MS * minute, replace(custom(10.0 * minute, 0, bounds=own[:1]), custom_bounds=own))
        for minute, own in enumerate(bounds)
    ]
    rows = list(minutes_of(1, sampled(*samples), 7))
    assert sum(row["increase"]["count"] for row in rows) == 580
    assert [row["refused"] for row in rows] == [0] * 29 + [1] + [0] * 29
    hour = merged_row(rows, "1h", 0)
    assert (hour["increase"]["count"], hour["n"], hour["refused"]) == (580, 59, 30)
    assert sum(hour["increase"]["positive_counts"]) == 280


def test_a_replica_is_chosen_for_each_minute() -> None:
    low, high = (
        [_Sample(HistogramSample(MINUTE_MS * minute + part * 10_000, custom(1.0)), replica) for minute, part in at]
        for replica, at in (
            (-5, [(0, 0), (0, 1), (2, 0), (3, 0)]),
            (4, [(0, 2), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]),
        )
    )
    tail = _Sample(HistogramSample(-1, custom(1.0)), is_tail=True)
    chosen = one_replica([tail, *sorted([*low, *high], key=lambda one: one.sample.ts)])
    assert chosen[0] is tail
    of_minutes = [(one.sample.ts // MINUTE_MS, one.replica) for one in chosen[1:]]
    assert of_minutes == [(0, -5), (0, -5), (1, 4), (2, -5), (3, 4), (3, 4), (3, 4)]
    assert one_replica([tail, *low]) == [tail, *low]


def put(spark: SparkSession, root: Path, samples: list[tuple[int, float]], schema: int = CUSTOM_BOUNDS) -> Tables:
    """A histogram's total count at times in minutes after DAY; half of it in the first bucket."""
    rows = [
        Row(
            series_id=1,
            replica=0,
            ts=moment(DAY_MS + minute * MINUTE_MS),
            start_ts=None,
            **to_row(replace(custom(count / 2, count / 2, 0, 0), schema=schema)),
            date=moment(DAY_MS + minute * MINUTE_MS).date(),
            hour=minute // 60 % 24,
        )
        for minute, count in samples
    ]
    tables = Tables.open(spark, str(root))
    with tables.change("histograms") as change:
        change.append(change.write("histograms", spark.createDataFrame(rows, HISTOGRAMS)))
    return tables


def test_the_rollup_of_histograms_counts_each_growth_once_late_ones_too(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = put(spark, tmp_path, [(1, 2.0), (2, 6.0), (61, 10.0), (125, 4.0), (1500, 8.0)])
    rollup.run(spark, str(tmp_path))
    hours = table_rows(tables, "histograms_1h")["histograms_1h"]
    assert {row["window"]: row["increase"]["count"] for row in hours} == {
        DAY_MS: 4,
        DAY_MS + HOUR_MS: 4,
        DAY_MS + 2 * HOUR_MS: 4,
        DAY_MS + 25 * HOUR_MS: 4,
    }
    put(spark, tmp_path, [(59, 9.0), (59, 9.0)])
    put(spark, tmp_path, [(58, 5.0)], schema=9)
    put(spark, tmp_path, [(57, 5.0)], schema=-52)
    assert rollup.run(spark, str(tmp_path)).unknown_histograms == 2
    assert "LEFT OUT: 2 histograms of an unknown schema" in capsys.readouterr().err
    found = table_rows(tables, "histograms_1m", "histograms_1h", "histograms_1d")
    first = next(row for row in found["histograms_1h"] if row["window"] == DAY_MS)
    assert (first["n"], first["increase"]["positive_counts"], first["last"]["count"]) == (3, [3.5, 3.5], 9.0)
    assert {row["window"]: (row["increase"]["count"], row["resets"]) for row in found["histograms_1d"]} == {
        DAY_MS: (7 + 1 + 4, 1),
        DAY_MS + 24 * HOUR_MS: (4, 0),
    }
    assert sum(row["increase"]["count"] for row in found["histograms_1m"]) == 16
