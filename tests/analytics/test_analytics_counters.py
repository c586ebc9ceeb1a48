"""The pass over sorted samples equals the model in plain Python, however it is cut into batches."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analytics.transforms import counters
from tests.analytics.counter_model import Created, Sample, Window, windows
from tests.analytics.transforms_data import DAY_MS, HOUR_MS, MINUTE_MS, patient

KEY, CREATED_ID = 7, 3
T = DAY_MS + 10 * HOUR_MS
SCRAPE_MS = 15_000


def rows_of(samples: list[Sample], created: list[Created], series_id: int = KEY) -> list[tuple[Any, ...]]:
    rows = [(series_id, series_id, one.replica, one.ts, one.start_ts, one.value) for one in samples]
    return rows + [(series_id, CREATED_ID, one.replica, one.ts, 0, one.value) for one in created]


def run(
    rows: list[tuple[Any, ...]], *, lookback: int = 7, batch_rows: int = 1 << 20
) -> dict[str, list[dict[str, Any]]]:
    """The rows of the counters by width. As from Spark, keys are mixed that differ only in their lower bits."""
    rows = sorted(rows, key=lambda row: (row[0] >> counters.SORTED_BITS, row[1] != row[0], row[3]))
    kinds = [*[pa.int64()] * 5, pa.float64()]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, names=list(counters.Rows._fields))
    pieces = [batch.slice(begin, batch_rows) for begin in range(0, len(rows), batch_rows)]
    found: dict[str, list[dict[str, Any]]] = {"1m": [], "1h": []}
    for result in counters.windows(pieces, lookback):
        for row in result.to_pylist():
            if row["series_id"] != CREATED_ID:
                found[row["width"]].append(row)
    return found


def increase(samples: list[Sample], created: list[Created] | None = None, **options: Any) -> float:
    """The growth altogether, which both widths agree on."""
    found = run(rows_of(samples, created or []), **options)
    sums = {sum(row["increase"] for row in rows) for rows in found.values()}
    assert len(sums) == 1
    return float(sums.pop())


def plain(row: dict[str, Any]) -> tuple[Any, ...]:
    times = [None if row[name] is None else round(row[name].timestamp() * 1000) for name in TIMES]
    return (*times, *(row[name] for name in NUMBERS))


TIMES = ("window", "first_ts", "first_start_ts", "last_ts", "last_start_ts")
NUMBERS = ("n", "sum", "min", "max", "first_v", "last_v", "last_replica", "entry", "increase", "resets", "overlaps")


def of_model(window: Window) -> tuple[Any, ...]:
    first, last = window.first, window.last
    times = (window.start, first.ts, first.start_ts or None, last.ts, last.start_ts or None)
    numbers = (window.n, window.sum, window.min, window.max, first.value, last.value, last.replica)
    return (*times, *numbers, window.entry, window.increase, window.resets, window.overlaps)


starts = st.sampled_from([0, 0, 0, T - HOUR_MS, T + 60_000, T + 61_000, T - 9 * 24 * HOUR_MS])
samples_of_a_series = st.lists(
    st.builds(
        Sample,
        st.integers(0, 100).map(lambda step: T + step * 9_700),
        st.sampled_from([0.0, 1.0, 5.0, 6.0, 100.0, math.nan]) | st.integers(0, 1 << 50).map(float),
        starts,
        st.sampled_from([0, 0, 0, -4, 11]),
    ),
    min_size=1,
    max_size=40,
)
gauges = st.lists(
    st.builds(
        Created,
        st.integers(0, 50).map(lambda step: T + step * 19_400),
        st.sampled_from([(T - 3_600_000) / 1000, (T + 60_500) / 1000, 1e300, -5.0]),
        st.sampled_from([0, -4]),
    ),
    max_size=4,
    unique_by=lambda one: (one.ts, one.replica),
)


@given(samples_of_a_series, gauges, st.integers(1, 50))
@patient
def test_the_pass_equals_the_model(samples: list[Sample], created: list[Created], batch_rows: int) -> None:
    others = [(9, 9, 0, T + 20_000, 0, 1.0), (-2, -2, 5, T, 0, 2.0)]  # neighbours that must not matter
    found = run(rows_of(samples, created) + others, batch_rows=batch_rows)
    for width, width_ms in (("1m", MINUTE_MS), ("1h", HOUR_MS)):
        got = [plain(row) for row in found[width] if row["series_id"] == KEY]
        assert got == [of_model(window) for window in windows(samples, width_ms, 7, created)]


def test_two_replicas_of_which_one_reads_less_are_one_counter() -> None:
    """A hundred milliseconds apart, the second reads 10 bytes less: no reset at each scrape (300 TB in a day)."""
    samples = []
    for step in range(60):
        total = 10**12 + step * 6000.0
        samples += [
            Sample(T + step * SCRAPE_MS, total, replica=1),
            Sample(T + step * SCRAPE_MS + 100, total - 10, replica=2),
        ]
    assert increase(samples) == 59 * 6000 == 354_000


@pytest.mark.parametrize("first", [1, 2])
def test_a_gap_of_one_replica_is_filled_by_the_other(first: int) -> None:
    """It takes over and gives back without a reset, and all growth counts."""
    samples = []
    for step in range(120):
        total = 10**12 + step * 6000.0
        if not 32 <= step < 88:
            samples.append(Sample(T + step * SCRAPE_MS, total, replica=first))
        samples.append(Sample(T + step * SCRAPE_MS + 100, total - 10, replica=3 - first))
    found = run(rows_of(samples, []))["1m"]
    assert {row["n"] for row in found} == {4}
    assert sum(row["increase"] for row in found) == pytest.approx(119 * 6000, abs=10)
    assert sum(row["resets"] for row in found) == 0
    replicas = {row["last_replica"] for row in found}
    assert replicas == ({1, 2} if first == 1 else {1})


def test_a_reset_while_replicas_change_is_a_reset() -> None:
    """The other replica has seen the fall as well."""
    samples = [Sample(T + step * SCRAPE_MS, 1000.0 + step, replica=1) for step in range(20)]
    samples += [Sample(T + step * SCRAPE_MS + 100, 990.0 + step, replica=2) for step in range(20)]
    samples += [Sample(T + step * SCRAPE_MS + 100, step - 19.0, replica=2) for step in range(20, 60)]
    assert increase(samples) == 19 + 1 + 39


def test_created_alone_tells_resets_within_an_hour() -> None:
    """100 bytes, then a restart up to 199: 299 in all, which the values alone do not show."""
    samples = [Sample(T + MINUTE_MS, 100.0), Sample(T + 2 * MINUTE_MS, 199.0)]
    created = [Created(T + MINUTE_MS, T / 1000), Created(T + 2 * MINUTE_MS, (T + 90_000) / 1000)]
    assert increase(samples, created) == 299
    assert increase(samples, []) == 99


def test_a_fall_with_an_unchanged_start_is_no_reset() -> None:
    start = T - 1000
    samples = [Sample(T, 100.0, start), Sample(T + SCRAPE_MS, 90.0, start), Sample(T + 2 * SCRAPE_MS, 120.0, start)]
    found = run(rows_of(samples, []))["1m"][0]
    assert (found["increase"], found["resets"], found["overlaps"]) == (120, 0, 1)


def test_an_earlier_start_is_an_older_process_and_no_reset() -> None:
    """Two processes with the same labels for some scrapes: the older one's samples neither reset nor add up."""
    old, new = T - HOUR_MS, T - 1000
    samples = [
        Sample(T + step * SCRAPE_MS, 500.0 if step % 2 else 10.0 + step, old if step % 2 else new) for step in range(9)
    ]
    assert increase(samples) == 10 + 8


def test_a_start_later_than_the_first_sample_still_counts_it() -> None:
    """The proxy's clock may be ahead of Prometheus'."""
    assert increase([Sample(T, 42.0)], [Created(T, (T + 500) / 1000)]) == 42
    assert increase([Sample(T, 42.0, T + 500)]) == 0


def tail(ts: int, value: float, start: int = 0, replica: int = 0) -> tuple[Any, ...]:
    return KEY, KEY, replica, ts, -1 - start, value


def test_growth_begins_at_the_tail_within_the_lookback() -> None:
    """The lookback ends at a midnight; an older tail is as none."""
    sample = rows_of([Sample(T, 100.0)], [])
    edge = DAY_MS - 2 * 24 * HOUR_MS
    for before, entry in ((edge, 70.0), (edge - 1, 0.0), (T - 1, 70.0)):
        (found,) = run([tail(before, 30.0), *sample], lookback=2)["1h"]
        assert (found["entry"], found["increase"], found["n"]) == (entry, entry, 1)
    (found,) = run([tail(T - 1, 130.0), *sample])["1h"]
    assert (found["increase"], found["resets"]) == (100, 1)
    (found,) = run([tail(T - 1, 130.0, replica=5), *sample])["1h"]
    assert (found["increase"], found["resets"], found["overlaps"]) == (-30, 0, 1)


def test_a_tail_knows_the_start() -> None:
    start = T - HOUR_MS
    for own, gained in ((start, -30), (start + 1, 100)):
        (found,) = run([tail(T - 1, 130.0, start), *rows_of([Sample(T, 100.0, own)], [])])["1h"]
        assert found["increase"] == gained


def test_infinite_values_break_nothing() -> None:
    samples = [Sample(T, math.inf), Sample(T + 1, math.inf), Sample(T + 2, 5.0), Sample(T + 3, -math.inf)]
    found = run(rows_of(samples, []))["1m"][0]
    assert np.isfinite(found["increase"])
