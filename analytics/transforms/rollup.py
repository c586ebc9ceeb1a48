"""Rollup of samples to windows of a minute, and of windows to wider ones, on DataFrames of `samples` and `rollup_…`.

                       ┌──WHOLE───────────────────────────▶ rollup_1m
    samples ──minutes──┼──ADDED_UP────────────────────────────────────┬─coarser──▶ rollup_1h ──coarser──▶ rollup_1d
                       └──OPEN──open_states──┐                        │
    rollup_1h ─────────tails─────────────────┴──minute_windows──▶ rollup_1m

A Python worker computes windows from each chunk of samples where it was read. Most are whole (`kernel.split_runs`) and
only need writing, plus one summed row by hour; the others, two or three in an hour and series, are shuffled and merged.
Runs and states from different chunks may overlap in time (duplicates in two files, two replicas, late samples); such a
window is *mixed*, and its hour has to be computed from `single_states`: a state for each sample, which cannot overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile
from pyspark import AccumulatorParam
from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.types import IntegerType, StructField, StructType

from analytics.tables.schemas import ROLLUP_1H, ROLLUP_1M
from analytics.transforms import kernel
from analytics.transforms.counter_state import HIGH_GRID, NO_START, SPLIT_BELOW
from analytics.transforms.kernel import LONG_COLUMNS, States

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import Column, DataFrame

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
CHUNK_ROWS: Final = 1 << 20
"""Samples in a worker's memory at a time (about 200 bytes each during the computation)."""
FILE_ROWS: Final = 1 << 17
_COLUMNS: Final = ["series_id", "ts", "value", "start_ts"]
MERGE_ROWS: Final = 1 << 18
PART: Final = "part"
WHOLE, OPEN, ADDED_UP = range(3)
"""Values of PART: rows of rollup_1m, states to be merged, and sums of a chunk's whole rows by hour and series."""
STATES_DDL: Final = ", ".join(f"{name} {'long' if name in LONG_COLUMNS else 'double'}" for name in States._fields)
_WINDOW: Final = StructType([StructField(field.name, field.dataType) for field in ROLLUP_1M])
_MINUTES: Final = StructType([*_WINDOW, StructField(PART, IntegerType())])


class HourSet(AccumulatorParam[frozenset[int]]):
    """Accumulator of hours (milliseconds since 1970). It is idempotent: a task that runs twice adds the same."""

    def zero(self, value: frozenset[int]) -> frozenset[int]:
        """Return a task's initial value."""
        return value

    def addInPlace(self, value1: frozenset[int], value2: frozenset[int]) -> frozenset[int]:  # noqa: N802 -- Spark's
        """Return the union."""
        return value1 | value2


def minutes(samples: DataFrame) -> DataFrame:
    """Compute rows with the columns of rollup_1m and PART. If PART is OPEN, `window` is the end of the state's run."""
    return _numeric_columns(samples).mapInArrow(_minutes, _MINUTES)


def minutes_of_files(contents: DataFrame) -> DataFrame:
    """Compute the same from whole Parquet files of samples, each in a row's `content`."""
    return contents.mapInArrow(_minutes_of_files, _MINUTES)


def open_states(rows: DataFrame) -> DataFrame:
    """Convert the OPEN rows of `minutes` back to states."""
    names = {"first_start": "first_start_ts", "last_start": "last_start_ts", "run_end": "window"}
    return rows.select(
        *(
            _millis(names.get(name, name)).alias(name) if name in names or name.endswith("_ts") else F.col(name)
            for name in States._fields
        )
    )


def single_states(samples: DataFrame) -> DataFrame:
    """Return a state for each sample, for hours with mixed windows. Shuffles several times as much."""
    zero, none, value = F.lit(0.0), F.lit(0).cast("long"), F.col("value")
    columns: dict[str, Column] = dict.fromkeys(("sum_lo", "increase", "increase_lo"), zero)
    columns |= dict.fromkeys(("first_v", "last_v", "sum", "min", "max"), value)
    columns |= dict.fromkeys(("first_ts", "last_ts", "run_end"), F.col("ts")) | {"series_id": F.col("series_id")}
    columns |= {"first_start": F.col("start"), "last_start": F.col("start")}
    columns |= {"n": F.lit(1).cast("long"), "resets": none, "overlaps": none}
    numbers = _numeric_columns(samples).where(~F.isnan("value"))
    return numbers.select(*(columns[name].alias(name) for name in States._fields))


def tails(rows: DataFrame, hours: Sequence[datetime]) -> DataFrame:
    """Return tails: the last sample of each series before each run of consecutive `hours`.

    `rows` are of rollup_1h, rollup_1d or both, of any time, without rows of `hours`.
    """
    last = rows.where(F.col("window") < F.lit(max(hours))).groupBy("series_id", run_of(hours).alias("run"))
    found = last.agg(
        _millis(F.max("last_ts")).alias("last_ts"),
        F.max_by("last_v", "last_ts").alias("last_v"),
        _millis(F.max_by("last_start_ts", "last_ts")).alias("last_start"),
    )
    same = {"first_ts": "last_ts", "first_v": "last_v", "first_start": "last_start", "run_end": "last_ts"}
    kept = {"series_id", *same.values()}
    return found.select(
        *(
            F.col(same.get(name, name)).alias(name)
            if name in kept or name in same
            else F.lit(0).cast("long" if name in LONG_COLUMNS else "double").alias(name)
            for name in States._fields
        )
    )


def run_of(hours: Sequence[datetime]) -> Column:
    """Return a column: how many runs of consecutive hours begin at or before the column `window`."""
    known = set(hours)
    begins = [hour for hour in hours if hour - timedelta(hours=1) not in known]
    return F.size(F.filter(F.array(*map(F.lit, begins)), lambda begin: begin <= F.col("window")))


def minute_windows(
    states: DataFrame, lookback_days: int, mixed: Accumulator[frozenset[int]] | None = None
) -> DataFrame:
    """Merge states and tails to rows of rollup_1m. Adds hours with mixed windows, whose rows are void, to `mixed`."""
    by_series = states.repartition("series_id").sortWithinPartitions(
        "series_id", "first_ts", F.desc("first_v"), F.desc("first_start")
    )
    return by_series.mapInArrow(partial(_windows, lookback_days=lookback_days, mixed=mixed), _WINDOW)


def coarser(rows: DataFrame, unit: str) -> DataFrame:
    """Compute rows of rollup_1h (`unit` "hour") or rollup_1d ("day") from finer ones, exactly as from the samples."""
    wide = F.date_trunc(unit, "window").alias("window")
    totals = rows.groupBy("series_id", wide).agg(
        *(F.sum(name).alias(name) for name in ("n", "resets", "overlaps")),
        *(part for name in ("sum", "increase") for part in _parts(name)),
        F.min("min").alias("min"),
        F.max("max").alias("max"),
        *(F.min_by(name, "first_ts").alias(name) for name in ("first_v", "first_start_ts", "entry")),
        *(F.max_by(name, "last_ts").alias(name) for name in ("last_v", "last_start_ts")),
        F.min("first_ts").alias("first_ts"),
        F.max("last_ts").alias("last_ts"),
    )
    settled = totals.withColumns(
        {name: column for total in ("sum", "increase") for name, column in _normalized_sum(total)}
    )
    return settled.select(*_data_columns(), F.to_date("window").alias("date"))


def hours_after(changed: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the column `window` of the hours whose growth up to their first sample depends on changed hours.

    That is the first hour of each series after a changed one. `changed` has (series_id, window) of recomputed hours,
    `rows` is rollup_1h without them.
    """
    from pyspark.sql import Window

    marked = changed.select("series_id", "window", F.lit(True).alias("is_changed"))
    others = rows.select("series_id", "window", F.lit(False).alias("is_changed"))
    before = F.lag("is_changed").over(Window.partitionBy("series_id").orderBy("window"))
    follows = marked.unionAll(others).withColumn("before", before).where(~F.col("is_changed") & F.col("before"))
    return follows.select("window").distinct()


def _numeric_columns(samples: DataFrame) -> DataFrame:
    """Return numeric columns only, which reach Python without a conversion."""
    return samples.select("series_id", _millis("ts").alias("ts"), "value", _millis("start_ts").alias("start"))


def _millis(column: Column | str) -> Column:
    return F.coalesce(F.unix_millis(column), F.lit(0).cast("long"))


def _data_columns() -> list[str]:
    return [name for name in ROLLUP_1H.fieldNames() if name != "date"]


def _parts(name: str) -> tuple[Column, Column]:
    """Return the sums of the two parts of a sum, each without rounding error (`counter_state.to_fixed_point`)."""
    total = F.col(name)
    high = F.when(F.abs(total) < SPLIT_BELOW, F.rint(total * HIGH_GRID) / HIGH_GRID).otherwise(total)
    low = F.nanvl(total - high, F.lit(0.0)) + F.col(f"{name}_lo")
    return F.sum(high).alias(f"{name}_high"), F.sum(low).alias(f"{name}_low")


def _normalized_sum(name: str) -> tuple[tuple[str, Column], tuple[str, Column]]:
    """Return the columns of `kernel.normalize_sum`."""
    high, low = F.col(f"{name}_high"), F.col(f"{name}_low")
    total = high + low
    carried = total - high
    rest = (high - (total - carried)) + (low - carried)
    finite = F.abs(total) < float("inf")
    return (name, total), (f"{name}_lo", F.when(finite, rest).otherwise(F.lit(0.0)))


def _minutes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for chunk in _chunks(batches, CHUNK_ROWS):
        series_id, ts, value, start = (np.concatenate(columns) for columns in zip(*chunk, strict=True))
        runs = kernel.split_runs(kernel.partial_states(series_id, ts, value, start, MINUTE_MS), MINUTE_MS, HOUR_MS)
        parts = {
            WHOLE: (runs.whole, runs.entry),
            ADDED_UP: (runs.added_up, runs.added_up_entry),
            OPEN: (runs.open, np.zeros(len(runs.open.n))),
        }
        for part, (states, entry) in parts.items():
            if len(states.n):
                yield _batch({**_row_columns(states, entry, part), PART: pa.array(np.full(len(entry), part, np.int32))})


def _minutes_of_files(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return _minutes(
        _plain_batch(rows)
        for batch in batches
        for content in batch.column(0)
        for rows in ParquetFile(pa.BufferReader(content.as_buffer())).iter_batches(FILE_ROWS, columns=_COLUMNS)
    )


def _plain_batch(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of `_numeric_columns`."""
    has_starts = "start_ts" in rows.schema.names
    start = _unix_ms(rows.column("start_ts")) if has_starts else pa.array(np.zeros(rows.num_rows, np.int64))
    columns = [rows.column("series_id"), _unix_ms(rows.column("ts")), rows.column("value"), start]
    return pa.RecordBatch.from_arrays(columns, names=["series_id", "ts", "value", "start"])


def _unix_ms(times: pa.Array) -> pa.Array:
    """Return milliseconds since 1970; 0 for null."""
    return times.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).fill_null(0)


def _windows(
    batches: Iterable[pa.RecordBatch], lookback_days: int, mixed: Accumulator[frozenset[int]] | None
) -> Iterator[pa.RecordBatch]:
    """Yield finished windows: one is complete when another window's row arrives; its last sample stays as a tail."""
    held: list[States] = []
    for chunk in _chunks(batches, MERGE_ROWS):
        states = kernel.concatenate([*held, *(States(*columns) for columns in chunk)])
        end = kernel.last_group_start(states, MINUTE_MS)
        held = [kernel.tail_before(states, end, MINUTE_MS), kernel.select_rows(states, slice(end, None))]
        yield from _finished_windows(kernel.select_rows(states, slice(end)), lookback_days, mixed)
    if held:
        yield from _finished_windows(kernel.concatenate(held), lookback_days, mixed)


def _finished_windows(
    states: States, lookback_days: int, mixed: Accumulator[frozenset[int]] | None
) -> Iterator[pa.RecordBatch]:
    if not len(states.n):
        return
    rows = kernel.window_rows(states, MINUTE_MS, lookback_days)
    if mixed is not None and rows.mixed.any():
        mixed.add(frozenset((np.unique(rows.states.first_ts[rows.mixed] // HOUR_MS) * HOUR_MS).tolist()))
    yield _batch(_row_columns(rows.states, rows.entry, WHOLE))


def _chunks(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[list[list[np.ndarray]]]:
    """Yield the columns of batches, in chunks of batches with at least `rows_max` rows together."""
    chunk, rows = [], 0
    for batch in batches:
        if batch.num_rows:
            chunk.append([column.to_numpy() for column in batch.columns])
            rows += batch.num_rows
        if rows >= rows_max:
            yield chunk
            chunk, rows = [], 0
    if chunk:
        yield chunk


def _row_columns(states: States, entry: np.ndarray, part: int) -> dict[str, pa.Array]:
    """Return the columns of rollup_1m. States and sums of windows are in none of its partitions: they have no date."""
    first, rows = states.first_ts, len(states.n)
    columns = {name: pa.array(column) for name, column in states._asdict().items()} | {"entry": pa.array(entry)}
    for end in ("first", "last"):
        columns[f"{end}_ts"] = _times(getattr(states, f"{end}_ts"))
        start = getattr(states, f"{end}_start")
        columns[f"{end}_start_ts"] = _times(start, start == NO_START)
    columns["window"] = _times(states.run_end if part == OPEN else first // MINUTE_MS * MINUTE_MS)
    columns |= {"date": pa.nulls(rows, pa.date32()), "hour": pa.nulls(rows, pa.int32())}
    if part == WHOLE:
        hours = (first // HOUR_MS).astype(np.int32)
        columns |= {"date": pa.array(hours // 24).view(pa.date32()), "hour": pa.array(hours % 24)}
    return {name: columns[name] for name in ROLLUP_1M.fieldNames()}


def _times(unix_ms: np.ndarray, is_null: np.ndarray | None = None) -> pa.Array:
    return pa.array(unix_ms * 1000, mask=is_null).view(pa.timestamp("us", tz="UTC"))


def _batch(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
