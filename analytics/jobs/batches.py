"""Writes one batch of a source's rows to the tables: exactly once, and no (series_id, ts) twice.

The input is decoded once, into Spark's cache: samples, histograms and series are written from there. A check on few
rows decides first if duplicates are possible, since shuffling all rows costs as much as decoding them: the spans of the
series cover duplicates within the batch, and of the tables only rows between the batch's first and last instant can be
duplicates (Parquet's statistics skip the other files).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 -- the usual name
from pyspark.sql.window import Window

from analytics.tables.partitions import hour_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.tables.store import Tables
    from analytics.tables.transaction import Transaction

ROLLUP_QUEUE = "rollup"
BROADCAST_ROWS_MAX = 1_000_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
_MS_OF_DAY = f"pmod(unix_millis(ts), {DAY_MS})"
HOURS_MAX = 20_000
"""Limit of hours for one batch: more than two years are a sender's wrong clock or a backfill in too large steps."""


class TooManyHours(Exception):
    """A batch touches more hours than is plausible."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Numbers of rows that a batch added; `duplicates` counts skipped samples and histograms."""

    samples: int = 0
    histograms: int = 0
    duplicates: int = 0
    new_series: int = 0
    hours: int = 0


@dataclass(frozen=True, slots=True)
class _RowsSummary:
    """Summary of one kind of rows in a batch: number, first and last instant, and if duplicates are possible."""

    rows: int
    first_ms: int
    last_ms: int
    may_repeat: bool


def write_batch(tables: Tables, identity: str, rows: DataFrame, batch_id: int) -> BatchCounts | None:
    """Add a source's rows (`table=all`) to the tables; return None if a batch of this identity was added before.

    Raises FilesystemError, NoSnapshot and TooManyHours; then nothing was added.
    """
    if tables.is_done(identity):
        return None
    cached = rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        with tables.transaction("batch", identity=identity) as change:
            return _add_batch(tables, change, cached, batch_id)
    finally:
        cached.unpersist()


def _add_batch(tables: Tables, change: Transaction, rows: DataFrame, batch_id: int) -> BatchCounts:
    counts, shapes = _summarize(rows)
    added = {
        table: _add_rows(tables, change, table, _table_rows(table, rows, batch_id), shape)
        for table, shape in shapes.items()
    }
    hours = sorted({hour for table in shapes for hour in change.staged_hours(table)})
    change.mark_dirty(ROLLUP_QUEUE, hours)
    new_series = _add_series(tables, change, rows)
    return BatchCounts(
        samples=added.get("samples", 0),
        histograms=added.get("histograms", 0),
        duplicates=counts - sum(added.values()),
        new_series=new_series,
        hours=len(hours),
    )


def _summarize(rows: DataFrame) -> tuple[int, dict[str, _RowsSummary]]:
    """Return the number of samples and histograms, and each kind's summary. The first action: it fills the cache."""
    columns = {"samples": "value", "histograms": "histogram"}
    ts_ms = F.unix_millis("ts")  # numbers: Spark would make local times without a zone of timestamps
    found = rows.agg(
        *(
            function(F.when(F.col(column).isNotNull(), ts_ms)).alias(f"{table}_{name}")
            for table, column in columns.items()
            for name, function in (("rows", F.count), ("first", F.min), ("last", F.max))
        )
    ).collect()[0]
    doubtful = _may_repeat_rows(rows)
    shapes = {
        table: _RowsSummary(found[f"{table}_rows"], found[f"{table}_first"], found[f"{table}_last"], doubtful)
        for table in columns
        if found[f"{table}_rows"]
    }
    return sum(shape.rows for shape in shapes.values()), shapes


def _may_repeat_rows(rows: DataFrame) -> bool:
    """Return True if a series has rows out of order, or spans in two partitions that overlap."""
    spans = rows.where("series is not null").select(
        "series_id", F.col("ts").alias("first_ts"), "series.last_ts", "series.ordered"
    )
    before = F.lag("last_ts").over(Window.partitionBy("series_id").orderBy("first_ts", "last_ts"))
    doubt = spans.withColumn("before", before).where("not ordered or before >= first_ts")
    return not doubt.isEmpty()


def _table_rows(table: str, rows: DataFrame, batch_id: int) -> DataFrame:
    """Return the rows of one table, with its columns."""
    if table == "samples":
        chosen = rows.where("value is not null").select("series_id", "ts", "start_ts", "value")
    else:
        chosen = rows.where("histogram is not null").select("series_id", "ts", "start_ts", "histogram.*")
    # Arithmetic: Spark's to_date and hour make a local time of each row first, whatever the time zone.
    day, rest = F.expr(f"unix_millis(ts) - {_MS_OF_DAY}"), F.expr(f"{_MS_OF_DAY} div {HOUR_MS}")
    date = F.date_from_unix_date((day / DAY_MS).cast("int"))
    return chosen.withColumns({"batch_id": F.lit(batch_id), "date": date, "hour": rest.cast("int")})


def _add_rows(tables: Tables, change: Transaction, table: str, rows: DataFrame, shape: _RowsSummary) -> int:
    """Stage the rows that the table does not have; return their number."""
    if shape.may_repeat:
        rows = _deduplicated(rows)
    known = _existing_keys(tables, table, shape)
    if known is not None:
        rows = _without_existing(rows, *known)
    staged = change.stage_rows(table, rows)
    change.add_staged(table)
    return staged.count() if shape.may_repeat or known is not None else shape.rows


def _deduplicated(rows: DataFrame) -> DataFrame:
    """Return one row for each (series_id, ts): of several the greatest, so that a replay chooses the same."""
    others = [name for name in rows.columns if name not in {"series_id", "ts"}]
    if "value" in others:  # plain columns: a hash aggregation does it, several times faster
        return rows.groupBy("series_id", "ts").agg(*(F.max(name).alias(name) for name in others))
    greatest = rows.groupBy("series_id", "ts").agg(F.max(F.struct(*others)).alias("row"))
    return greatest.select("series_id", "ts", "row.*")


def _existing_keys(tables: Tables, table: str, shape: _RowsSummary) -> tuple[DataFrame, int, int] | None:
    """Return the table's keys within the batch's span, their last instant (ms) and their number; None without any."""
    first, last = _moment(shape.first_ms), _moment(shape.last_ms)
    hours = tables.hours(table, hour_of(first), hour_of(last))
    if len(hours) > HOURS_MAX:
        raise TooManyHours(
            f"the batch's {table} reach from {first} to {last}, and would have to be compared with {len(hours)} hours "
            f"of the tables ({HOURS_MAX} are allowed): is a sender's clock wrong?"
        )
    if not hours:
        return None
    within = F.col("ts").between(F.lit(first), F.lit(last))
    keys = tables.read(table, hours).select("series_id", "ts").where(within)
    last_ms, count = keys.agg(F.max(F.unix_millis("ts")), F.count("*")).collect()[0]
    return (keys, last_ms, count) if count else None


def _moment(unix_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=unix_ms)


def _without_existing(rows: DataFrame, keys: DataFrame, last_ms: int, count: int) -> DataFrame:
    """Return the rows whose keys are new. Rows after the last key need no join."""
    if count <= BROADCAST_ROWS_MAX:
        keys = F.broadcast(keys)
    last = F.lit(_moment(last_ms))
    overlapping = rows.where(F.col("ts") <= last).join(keys, ["series_id", "ts"], "left_anti")
    return rows.where(F.col("ts") > last).unionByName(overlapping)


def _add_series(tables: Tables, change: Transaction, rows: DataFrame) -> int:
    """Stage the series that the table does not have; return their number."""
    met = (
        rows.where("series is not null")
        .groupBy("series_id")
        .agg(
            F.first("series.metric").alias("metric"),
            F.first("series.labels").alias("labels"),
            F.max("series.kind").alias("kind"),
            F.min("ts").alias("first_seen"),
        )
    )
    known = tables.read("series").select("series_id")
    count = change.stage_rows("series", met.join(known, "series_id", "left_anti").coalesce(1)).count()
    if count:
        change.add_staged("series")
    return count
