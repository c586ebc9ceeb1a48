"""Samples made up for the tests of rollups, put into tables, and what the model says of them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from hypothesis import HealthCheck, settings
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.tables.schemas import PARTITIONS, VIEWS
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample, windows
from tests.analytics.recomputed import arrows_own

DAY = datetime(2026, 11, 20, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
WIDTHS_MS = {"rollup_1m": MINUTE_MS, "rollup_1h": HOUR_MS, "rollup_1d": 24 * HOUR_MS}
Raw = list[tuple[int, Sample]]
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


def moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def samples_frame(spark: SparkSession, rows: Raw, counter_ids: dict[int, int] | None = None) -> DataFrame:
    """`counter_ids`: series_id of a gauge `_created` → its counter."""
    table = pa.table(
        {
            "series_id": pa.array([row[0] for row in rows], pa.int64()),
            "replica": pa.array([row[1].replica for row in rows], pa.int64()),
            "ts": pa.array([row[1].ts for row in rows], pa.int64()),
            "start": pa.array([row[1].start_ts or None for row in rows], pa.int64()),
            "value": pa.array([row[1].value for row in rows], pa.float64()),
            "counter_id": pa.array([(counter_ids or {}).get(row[0]) for row in rows], pa.int64()),
        }
    )
    return spark.createDataFrame(table).select(
        "series_id",
        "replica",
        F.timestamp_millis("ts").alias("ts"),
        F.timestamp_millis("start").alias("start_ts"),
        "value",
        "counter_id",
        F.to_date(F.timestamp_millis("ts")).alias("date"),
        F.hour(F.timestamp_millis("ts")).alias("hour"),
    )


def ingest(spark: SparkSession, root: Path, rows: Raw, counter_ids: dict[int, int] | None = None) -> Tables:
    """Add the samples, as `ingest` does."""
    tables = Tables.open(spark, str(root))
    with tables.change("samples") as change:
        change.append(change.write("samples", samples_frame(spark, rows, counter_ids).coalesce(1)))
    return tables


def table_rows(tables: Tables, *names: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of views with times in milliseconds, sorted; read without Spark, which needs a job for it."""
    return {name: _stored_rows(tables, name) for name in names}


def _stored_rows(tables: Tables, view: str) -> list[dict[str, Any]]:
    table, width, _ = VIEWS[view]
    delta = DeltaTable(f"{tables.location.delta_url}/{table}")
    chosen = None if width is None else ds.field("width") == width
    found = delta.to_pyarrow_dataset(filesystem=arrows_own(delta)).to_table(filter=chosen).to_pylist()
    plain = [{name: _in_ms(value) for name, value in row.items() if name not in PARTITIONS[table]} for row in found]
    return sorted(plain, key=lambda row: str(sorted(row.items())))


def _in_ms(value: Any) -> Any:
    return round(value.timestamp() * 1000) if isinstance(value, datetime) else value


def expected(rows: Raw, lookback_days: int) -> dict[str, set[tuple[Any, ...]]]:
    """The rollups of these samples by the model."""
    result: dict[str, set[tuple[Any, ...]]] = {view: set() for view in WIDTHS_MS}
    for series in {row[0] for row in rows}:
        own = [sample for number, sample in rows if number == series]
        for view, width_ms in WIDTHS_MS.items():
            for row in windows(own, width_ms, lookback_days):
                ends = (*_sample(row.first), *_sample(row.last), row.last.replica)
                sums = (_rounded(row.sum), row.min, row.max, _rounded(row.increase))
                result[view].add((series, row.start, row.n, *ends, *sums, row.entry, row.resets, row.overlaps))
    return result


def got(tables: Tables) -> dict[str, set[tuple[Any, ...]]]:
    """The same of the tables. Fails where a row is there twice."""
    result = {}
    for view, found in table_rows(tables, *WIDTHS_MS).items():
        rows = [_plain(row) for row in found]
        assert len({row[:2] for row in rows}) == len(rows)
        result[view] = set(rows)
    return result


def _rounded(total: float) -> str:
    """Without the last digits, which depend on the order in which fractions are added."""
    return f"{total:.9g}" if total % 1 else f"{total:.0f}"


def _sample(sample: Sample) -> tuple[int, float, int | None]:
    return sample.ts, sample.value, sample.start_ts or None


def _plain(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("series_id", "window", "n", "first_ts", "first_v", "first_start_ts", "last_ts", "last_v", "last_start_ts")
    sums = (_rounded(row["sum"]), row["min"], row["max"], _rounded(row["increase"]))
    return (*(row[name] for name in names), row["last_replica"], *sums, row["entry"], row["resets"], row["overlaps"])


def counter(series: int, hours: Iterable[int], *, step_s: int = 300, start: float = 0.0, by: float = 7.0) -> Raw:
    """A counter that grows by `by` at each sample; hours are counted from DAY."""
    rows, value = [], start
    for hour in hours:
        for second in range(13, 3600, step_s):
            value += by
            rows.append((series, Sample(DAY_MS + hour * HOUR_MS + second * 1000, value)))
    return rows
