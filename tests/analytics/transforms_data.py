"""Samples made up for the tests of rollups, put into tables, and what the definition says of them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.tables.partitions import hour_of
from analytics.tables.store import Tables
from analytics.transforms.counter_state import Sample, coarser, windows

DAY = datetime(2026, 11, 20, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
Raw = list[tuple[int, Sample]]
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


def moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def samples_frame(spark: SparkSession, rows: Raw) -> DataFrame:
    table = pa.table(
        {
            "series_id": pa.array([row[0] for row in rows], pa.int64()),
            "ts": pa.array([row[1].ts for row in rows], pa.int64()),
            "start": pa.array([row[1].start_ts or None for row in rows], pa.int64()),
            "value": pa.array([row[1].value for row in rows], pa.float64()),
        }
    )
    frame = spark.createDataFrame(table)
    return frame.select(
        "series_id",
        F.timestamp_millis("ts").alias("ts"),
        F.timestamp_millis("start").alias("start_ts"),
        "value",
        F.lit(1).cast("long").alias("batch_id"),
        F.to_date(F.timestamp_millis("ts")).alias("date"),
        F.hour(F.timestamp_millis("ts")).alias("hour"),
    )


def ingest(spark: SparkSession, root: Path, rows: Raw, *, repeat: int = 1) -> Tables:
    """Add the samples and mark their hours dirty, as `ingest` does; `repeat`: in so many files, all the same."""
    tables = Tables.open(spark, str(root))
    for _ in range(repeat):
        with tables.transaction("test") as change:
            change.append_rows("samples", samples_frame(spark, rows).coalesce(1))
            change.mark_dirty("rollup", {hour_of(moment(sample.ts)) for _, sample in rows})
    return tables


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows with times in milliseconds, sorted."""
    times = {
        field.name: F.unix_millis(field.name)
        for field in frame.schema.fields
        if field.dataType.typeName() == "timestamp"
    }
    plain = frame.drop("date", "hour").withColumns(times)
    return sorted((row.asDict(recursive=True) for row in plain.collect()), key=lambda row: str(sorted(row.items())))


def table_rows(tables: Tables, *names: str) -> dict[str, list[dict[str, Any]]]:
    return {name: rows_of(tables.read(name)) for name in names}


def expected(rows: Raw, lookback_days: int) -> dict[str, set[tuple[Any, ...]]]:
    """The rollups of these samples by the definition."""
    result: dict[str, set[tuple[Any, ...]]] = {"rollup_1m": set(), "rollup_1h": set(), "rollup_1d": set()}
    for series in {row[0] for row in rows}:
        minutes = windows([sample for number, sample in rows if number == series], MINUTE_MS, lookback_days)
        hours = coarser(minutes, HOUR_MS)
        for table, found in (("1m", minutes), ("1h", hours), ("1d", coarser(hours, 24 * HOUR_MS))):
            for row in found:
                state = row.state
                assert state.first
                assert state.last
                ends = (*_sample(state.first), *_sample(state.last))
                numbers = (state.n, state.sum, state.min, state.max, row.increase, row.entry, row.resets, row.overlaps)
                result[f"rollup_{table}"].add((series, row.start, *ends, *numbers))
    return result


def got(tables: Tables) -> dict[str, set[tuple[Any, ...]]]:
    """The same of the tables. Fails where a row is there twice."""
    result = {}
    for table in ("rollup_1m", "rollup_1h", "rollup_1d"):
        rows = [_plain(row) for row in rows_of(tables.read(table))]
        assert len(set(rows)) == len(rows)
        result[table] = set(rows)
    return result


def _sample(sample: Sample) -> tuple[int, float, int | None]:
    return sample.ts, sample.value, sample.start_ts or None


def _plain(row: dict[str, Any]) -> tuple[Any, ...]:
    total, increase = (Fraction(row[name]) + Fraction(row[f"{name}_lo"]) for name in ("sum", "increase"))
    names = ("series_id", "window", "first_ts", "first_v", "first_start_ts", "last_ts", "last_v", "last_start_ts", "n")
    rest = (total, row["min"], row["max"], increase, row["entry"], row["resets"], row["overlaps"])
    return (*(row[name] for name in names), *rest)


def counter(series: int, hours: Iterable[int], *, step_s: int = 300, start: float = 0.0, by: float = 7.0) -> Raw:
    """A counter that grows by `by` at each sample; hours are counted from DAY."""
    rows, value = [], start
    for hour in hours:
        for second in range(13, 3600, step_s):
            value += by
            rows.append((series, Sample(DAY_MS + hour * HOUR_MS + second * 1000, value)))
    return rows
