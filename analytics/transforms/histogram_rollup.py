"""Rollup of native histograms to windows of a minute, and of windows to wider ones, on DataFrames.

The model is the counters' (`counter_state.py`): the growth from a sample to the next belongs to the window of the later
one. Histograms are some hundred times fewer than plain samples, so all of a series go to one worker, in order of time,
and are added one by one: there are no partial states, and sums are the same in every run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from analytics.tables.schemas import HISTOGRAM, HISTOGRAMS_1H
from analytics.transforms.counter_state import NO_START, horizon
from analytics.transforms.histograms import (
    BUCKETS_MAX,
    CUSTOM_BOUNDS,
    SCHEMA_MAX,
    SCHEMA_MIN,
    Histogram,
    HistogramSample,
    Incompatible,
    add,
    empty_like,
    from_row,
    growth,
    growth_at_first,
    to_row,
)
from analytics.transforms.rollup import MINUTE_MS, run_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LOG = logging.getLogger(__name__)
_ROWS: Final = StructType([field for field in HISTOGRAMS_1H.fields if field.name != "date"])
_BATCH_ROWS: Final = 4096
_OFFSETS: Final = ("positive_offsets", "negative_offsets")


def is_usable(histograms: DataFrame) -> Column:
    """Return a column that is true for histograms of a known schema with at most BUCKETS_MAX buckets.

    The others are in no rollup.
    """
    schema = histograms["schema"]
    buckets = sum((F.coalesce(F.size(histograms[name]), F.lit(0)) for name in _OFFSETS), F.lit(0))
    is_known = (schema == CUSTOM_BOUNDS) | schema.between(SCHEMA_MIN, SCHEMA_MAX)
    return F.coalesce(is_known & (buckets <= BUCKETS_MAX), F.lit(False))


def single_histograms(histograms: DataFrame) -> DataFrame:
    """Return the usable rows of the table `histograms` as (series_id, ts, start, is_tail, histogram)."""
    return histograms.where(is_usable(histograms)).select(
        "series_id",
        F.unix_millis("ts").alias("ts"),
        F.coalesce(F.unix_millis("start_ts"), F.lit(NO_START)).alias("start"),
        F.lit(False).alias("is_tail"),
        F.struct(*HISTOGRAM.fieldNames()).alias("histogram"),
    )


def histogram_tails(rows: DataFrame, hours: Sequence[datetime]) -> DataFrame:
    """Return the last histogram of each series before each run of consecutive `hours`; as `rollup.tails`."""
    before = rows.where(F.col("window") < F.lit(max(hours))).groupBy("series_id", run_of(hours).alias("run"))
    last = before.agg(F.max_by(F.struct("last_ts", "last_start_ts", "last"), "last_ts").alias("row"))
    return last.select(
        "series_id",
        F.unix_millis("row.last_ts").alias("ts"),
        F.coalesce(F.unix_millis("row.last_start_ts"), F.lit(NO_START)).alias("start"),
        F.lit(True).alias("is_tail"),
        F.col("row.last").alias("histogram"),
    )


def histogram_windows(rows: DataFrame, lookback_days: int) -> DataFrame:
    """Compute rows of histograms_1m from `single_histograms` and `histogram_tails`."""
    ordered = rows.repartition("series_id").sortWithinPartitions("series_id", "ts", F.desc("histogram.count"))
    windows = ordered.mapInArrow(partial(_minutes, lookback_days=lookback_days), _ROWS)
    return windows.select("*", F.to_date("window").alias("date"), F.hour("window").alias("hour"))


def coarser_histograms(rows: DataFrame, unit: str) -> DataFrame:
    """Compute rows of histograms_1h (`unit` "hour") or histograms_1d ("day") from finer ones."""
    finer = rows.select(*_ROWS.fieldNames(), F.date_trunc(unit, "window").alias("wide"))
    ordered = finer.repartition("series_id").sortWithinPartitions("series_id", "window")
    return ordered.mapInArrow(_coarser, _ROWS).select("*", F.to_date("window").alias("date"))


def minutes_of(
    series_id: int, samples: Iterable[tuple[HistogramSample, bool]], lookback_days: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one series from its samples in order of time, each with True if it is a tail."""
    previous: HistogramSample | None = None
    for start, group in groupby(samples, key=lambda pair: pair[0].ts // MINUTE_MS * MINUTE_MS):
        window = _HistogramWindow(series_id, start)
        for sample, is_tail in group:
            if previous is not None and sample.ts == previous.ts:
                continue  # a duplicate; the one with the larger count came first
            if not is_tail:
                window.add_sample(sample, previous, lookback_days)
            previous = sample
        if window.n:
            yield window.row()


class _HistogramWindow:
    """Accumulator of one window of one series."""

    def __init__(self, series_id: int, start: int) -> None:
        self._series_id, self._start = series_id, start
        self.n = self._resets = self._refused = 0
        self._first: HistogramSample | None = None
        self._last: HistogramSample | None = None
        self._increase: Histogram | None = None

    def add_sample(self, sample: HistogramSample, previous: HistogramSample | None, lookback_days: int) -> None:
        self.n += 1
        self._first = self._first or sample
        self._last = sample
        limit = horizon(sample.ts, lookback_days)
        try:
            if previous is None or previous.ts < limit:
                gained, reset = growth_at_first(sample, limit), 0
            else:
                gained, reset = growth(previous, sample)
            self._increase = gained if self._increase is None else add(self._increase, gained)
            self._resets += reset
        except Incompatible as reason:
            self._refused += 1
            _LOG.warning("series %d: a histogram at %d ms is left out: %s", self._series_id, sample.ts, reason)

    def row(self) -> dict[str, Any]:
        assert self._first is not None
        assert self._last is not None
        increase = self._increase if self._increase is not None else empty_like(self._last.histogram)
        return {
            "series_id": self._series_id,
            "window": _moment(self._start),
            "n": self.n,
            "first_ts": _moment(self._first.ts),
            "last_ts": _moment(self._last.ts),
            "last_start_ts": _moment(self._last.start_ts) if self._last.start_ts != NO_START else None,
            "increase": to_row(increase),
            "last": to_row(self._last.histogram),
            "resets": self._resets,
            "refused": self._refused,
        }


def merged_row(rows: Sequence[dict[str, Any]], start: datetime) -> dict[str, Any]:
    """Merge the rows of one series, in order of time, to a row of a wider window."""
    total, refused = from_row(rows[0]["increase"]), sum(row["refused"] for row in rows)
    for row in rows[1:]:
        try:
            total = add(total, from_row(row["increase"]))
        except Incompatible as reason:
            refused += row["n"] - row["refused"]
            _LOG.warning("series %d: histograms at %s are left out: %s", row["series_id"], row["window"], reason)
    ends = {name: rows[-1][name] for name in ("last", "last_ts", "last_start_ts")}
    return {
        **ends,
        "series_id": rows[0]["series_id"],
        "window": start,
        "n": sum(row["n"] for row in rows),
        "first_ts": rows[0]["first_ts"],
        "increase": to_row(total),
        "resets": sum(row["resets"] for row in rows),
        "refused": refused,
    }


def _minutes(batches: Iterable[pa.RecordBatch], lookback_days: int) -> Iterator[pa.RecordBatch]:
    def rows() -> Iterator[dict[str, Any]]:
        for series_id, group in groupby(_python_rows(batches), key=lambda row: row["series_id"]):
            pairs = (
                (HistogramSample(row["ts"], from_row(row["histogram"]), row["start"]), row["is_tail"]) for row in group
            )
            yield from minutes_of(series_id, pairs, lookback_days)

    return _batched(rows())


def _coarser(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    groups = groupby(_python_rows(batches), key=lambda row: (row["series_id"], row["wide"]))
    return _batched(merged_row(list(rows), wide) for (_, wide), rows in groups)


def _python_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


def _batched(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    schema = to_arrow_schema(_ROWS, timezone="UTC")
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == _BATCH_ROWS:
            yield pa.RecordBatch.from_pylist(held, schema=schema)
            held = []
    if held:
        yield pa.RecordBatch.from_pylist(held, schema=schema)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
