"""Rollup of native histograms to windows of a minute and an hour, and of hours to days, on DataFrames.

The model is the counters' (`counters.py`): the growth from a sample to the next belongs to the window of the later one,
and one replica is chosen for each series and span. Histograms are some hundred times fewer than plain samples, so all
of a series go to one worker, in order of time, and are added one by one: sums are the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from analytics.tables.schemas import HISTOGRAM, HISTOGRAM_ROLLUP
from analytics.transforms.counters import HOUR_MS, NO_START, SPAN_MS, horizon
from analytics.transforms.histograms import (
    BUCKETS_MAX,
    CUSTOM_BOUNDS,
    SCHEMA_MAX,
    SCHEMA_MIN,
    Histogram,
    HistogramSample,
    add,
    from_row,
    growth,
    growth_at_first,
    to_row,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ROWS: Final = StructType([StructField(field.name, field.dataType) for field in HISTOGRAM_ROLLUP])
_BATCH_ROWS: Final = 4096
_MINUTE_MS: Final = 60_000
_OFFSETS: Final = ("positive_offsets", "negative_offsets")


def is_usable(histograms: DataFrame) -> Column:
    """Return a column that is true for histograms of a known schema with at most BUCKETS_MAX buckets.

    The others are in no rollup.
    """
    schema = histograms["schema"]
    buckets = sum((F.coalesce(F.size(histograms[name]), F.lit(0)) for name in _OFFSETS), F.lit(0))
    is_known = (schema == CUSTOM_BOUNDS) | schema.between(SCHEMA_MIN, SCHEMA_MAX)
    return F.coalesce(is_known & (buckets <= BUCKETS_MAX), F.lit(False))


def histogram_windows(histograms: DataFrame, tails: DataFrame, lookback_days: int) -> DataFrame:
    """Compute rows of histograms_1m and histograms_1h; `tails` as `rollup.windows` takes them."""
    samples = histograms.where(is_usable(histograms)).select(
        "series_id",
        _millis("ts"),
        _millis("start_ts"),
        "replica",
        F.lit(False),
        F.struct(*HISTOGRAM.fieldNames()),
    )
    last = tails.select(
        "series_id",
        _millis("last_ts"),
        _millis("last_start_ts"),
        F.lit(0).cast("long"),
        F.lit(True),
        "last",
    )
    rows = samples.union(last).toDF("series_id", "ts", "start", "replica", "is_tail", "histogram")
    ordered = rows.repartition("series_id").sortWithinPartitions("series_id", "ts", F.desc("histogram.count"))
    return ordered.mapInArrow(partial(_windows, lookback_days=lookback_days), _ROWS)


def histogram_days(hours: DataFrame) -> DataFrame:
    """Compute rows of histograms_1d from all rows of histograms_1h of these days."""
    return hours.repartition("series_id").sortWithinPartitions("series_id", "window").mapInArrow(_days, _ROWS)


def one_replica(samples: Sequence[_Sample]) -> list[_Sample]:
    """Return the tails and, for each span, the samples of one replica of a series: as `counters`' rows."""
    if len({one.replica for one in samples if not one.is_tail}) <= 1:
        return list(samples)
    chosen: list[_Sample] = []
    for _, group in groupby(samples, key=lambda one: one.sample.ts // SPAN_MS):
        span = list(group)
        counts = Counter(one.replica for one in span if not one.is_tail)
        best = max(counts.values(), default=0)
        taken = min((one for one, count in sorted(counts.items()) if count == best), default=0)
        if counts and 2 * counts[min(counts)] >= best:
            taken = min(counts)
        chosen += [one for one in span if one.is_tail or one.replica == taken]
    return chosen


def minutes_of(series_id: int, samples: Iterable[_Sample], lookback_days: int) -> Iterator[dict[str, Any]]:
    """Yield the minutes of one series from its samples and tails in order of time."""
    previous: HistogramSample | None = None
    for start, group in groupby(samples, key=lambda one: one.sample.ts // _MINUTE_MS * _MINUTE_MS):
        rows = []
        for one in group:
            if previous is not None and one.sample.ts == previous.ts:
                continue  # a duplicate; the one with the larger count came first
            if not one.is_tail:
                rows.append(_sample_row(series_id, one.sample, previous, lookback_days))
            previous = one.sample
        if rows:
            yield merged_row(rows, "1m", start)


class _Sample(NamedTuple):
    """A histogram at a moment, of a replica; or a tail, the last one before the following ones."""

    sample: HistogramSample
    replica: int = 0
    is_tail: bool = False


def _sample_row(
    series_id: int, sample: HistogramSample, previous: HistogramSample | None, lookback_days: int
) -> dict[str, Any]:
    """Return a sample as a row of its own for `merged_row`, with histograms that are no rows yet."""
    limit = horizon(sample.ts, lookback_days)
    gained, reset, complete = growth_at_first(sample, limit), 0, True
    if previous is not None and previous.ts >= limit:
        gained, reset, complete = growth(previous, sample)
    return {
        "series_id": series_id,
        "n": 1,
        "first_ts": _moment(sample.ts),
        "last_ts": _moment(sample.ts),
        "last_start_ts": _moment(sample.start_ts) if sample.start_ts != NO_START else None,
        "increase": gained,
        "last": sample.histogram,
        "resets": reset,
        "refused": int(not complete),
    }


def merged_row(rows: Sequence[dict[str, Any]], width: str, start_ms: int) -> dict[str, Any]:
    """Merge the rows of one series, in order of time, to a row of a wider window."""
    total, *others = (one if isinstance(one, Histogram) else from_row(one) for one in (row["increase"] for row in rows))
    refused = sum(row["refused"] for row in rows)
    for row, increase in zip(rows[1:], others, strict=True):
        total, added = add(total, increase)
        if not added:
            refused += row["n"] - row["refused"]
    moment, last = _moment(start_ms), rows[-1]["last"]
    return {
        "series_id": rows[0]["series_id"],
        "window": moment,
        "n": sum(row["n"] for row in rows),
        "first_ts": rows[0]["first_ts"],
        "last_ts": rows[-1]["last_ts"],
        "last_start_ts": rows[-1]["last_start_ts"],
        "increase": to_row(total),
        "last": to_row(last) if isinstance(last, Histogram) else last,
        "resets": sum(row["resets"] for row in rows),
        "refused": refused,
        "width": width,
        "date": moment.date(),
        "hour": moment.hour if width == "1m" else None,
    }


def _windows(batches: Iterable[pa.RecordBatch], lookback_days: int) -> Iterator[pa.RecordBatch]:
    def rows() -> Iterator[dict[str, Any]]:
        for series_id, group in groupby(_python_rows(batches), key=lambda row: row["series_id"]):
            samples = [
                _Sample(
                    HistogramSample(row["ts"], from_row(row["histogram"]), row["start"]), row["replica"], row["is_tail"]
                )
                for row in group
            ]
            minutes = minutes_of(series_id, one_replica(samples), lookback_days)
            for hour_ms, own in groupby(minutes, key=lambda row: _unix_ms(row["window"]) // HOUR_MS * HOUR_MS):
                of_hour = list(own)
                yield from of_hour
                yield merged_row(of_hour, "1h", hour_ms)

    return _batched(rows())


def _days(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    groups = groupby(_python_rows(batches), key=lambda row: (row["series_id"], row["window"].date()))
    midnights = ((day, list(rows)) for (_, day), rows in groups)
    return _batched(
        merged_row(rows, "1d", _unix_ms(datetime(day.year, day.month, day.day, tzinfo=UTC))) for day, rows in midnights
    )


def _millis(column: str) -> Column:
    return F.coalesce(F.unix_millis(column), F.lit(NO_START).cast("long"))


def _unix_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


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
