"""One batch of a source's rows into the tables: exactly once, and no (series_id, ts) twice.

The input is decoded once, into Spark's cache: samples, histograms and series are written from there. Whether a row can
be there twice is asked of few rows first, for shuffling all of them costs as much as decoding them: the spans of the
series tell about the batch itself, and of the tables only rows between the batch's first and last instant can be the
same (Parquet's statistics skip the other files).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 -- what everybody calls it
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
"""Of one batch: more than two years of hours are a sender's broken clock or a backfill in too large steps."""


class TooManyHours(Exception):
    """A batch touches more hours than can be right."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a batch added; `duplicates` counts the rows (samples and histograms) that were there already."""

    samples: int = 0
    histograms: int = 0
    duplicates: int = 0
    new_series: int = 0
    hours: int = 0


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of one kind of rows in a batch: their number, the first and last instant, and can one be there twice."""

    rows: int
    first_ms: int
    last_ms: int
    doubtful: bool


def write_batch(tables: Tables, identity: str, rows: DataFrame, batch_id: int) -> Figures | None:
    """Add a source's rows (`table=all`) to the tables; None where a batch of this identity was added before.

    Raises FilesystemError, NoSnapshot and TooManyHours; then nothing was added.
    """
    if tables.is_done(identity):
        return None
    cached = rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        with tables.transaction("batch", identity=identity) as change:
            return _add(tables, change, cached, batch_id)
    finally:
        cached.unpersist()


def _add(tables: Tables, change: Transaction, rows: DataFrame, batch_id: int) -> Figures:
    counts, shapes = _look(rows)
    added = {
        table: _add_rows(tables, change, table, _of(table, rows, batch_id), shape) for table, shape in shapes.items()
    }
    hours = sorted({hour for table in shapes for hour in change.staged_hours(table)})
    change.mark_dirty(ROLLUP_QUEUE, hours)
    new_series = _add_series(tables, change, rows)
    return Figures(
        samples=added.get("samples", 0),
        histograms=added.get("histograms", 0),
        duplicates=counts - sum(added.values()),
        new_series=new_series,
        hours=len(hours),
    )


def _look(rows: DataFrame) -> tuple[int, dict[str, _Shape]]:
    """How many samples and histograms there are, and each kind's shape. The first action: it fills the cache."""
    columns = {"samples": "value", "histograms": "histogram"}
    ts_ms = F.unix_millis("ts")  # numbers: Spark would make local times without a zone of timestamps
    found = rows.agg(
        *(
            function(F.when(F.col(column).isNotNull(), ts_ms)).alias(f"{table}_{name}")
            for table, column in columns.items()
            for name, function in (("rows", F.count), ("first", F.min), ("last", F.max))
        )
    ).collect()[0]
    doubtful = _has_doubtful_spans(rows)
    shapes = {
        table: _Shape(found[f"{table}_rows"], found[f"{table}_first"], found[f"{table}_last"], doubtful)
        for table in columns
        if found[f"{table}_rows"]
    }
    return sum(shape.rows for shape in shapes.values()), shapes


def _has_doubtful_spans(rows: DataFrame) -> bool:
    """Is there a series whose rows are not in order, or whose spans in two partitions overlap."""
    spans = rows.where("series is not null").select(
        "series_id", F.col("ts").alias("first_ts"), "series.last_ts", "series.ordered"
    )
    before = F.lag("last_ts").over(Window.partitionBy("series_id").orderBy("first_ts", "last_ts"))
    doubt = spans.withColumn("before", before).where("not ordered or before >= first_ts")
    return not doubt.isEmpty()


def _of(table: str, rows: DataFrame, batch_id: int) -> DataFrame:
    """The rows of one table, as it has them."""
    if table == "samples":
        chosen = rows.where("value is not null").select("series_id", "ts", "start_ts", "value")
    else:
        chosen = rows.where("histogram is not null").select("series_id", "ts", "start_ts", "histogram.*")
    # Arithmetic: Spark's to_date and hour make a local time of each row first, whatever the time zone.
    day, rest = F.expr(f"unix_millis(ts) - {_MS_OF_DAY}"), F.expr(f"{_MS_OF_DAY} div {HOUR_MS}")
    date = F.date_from_unix_date((day / DAY_MS).cast("int"))
    return chosen.withColumns({"batch_id": F.lit(batch_id), "date": date, "hour": rest.cast("int")})


def _add_rows(tables: Tables, change: Transaction, table: str, rows: DataFrame, shape: _Shape) -> int:
    """Stage what is not there yet; how many rows that is."""
    if shape.doubtful:
        rows = _once(rows)
    known = _known(tables, table, shape)
    if known is not None:
        rows = _without(rows, *known)
    staged = change.stage(table, rows)
    change.add_staged(table)
    return staged.count() if shape.doubtful or known is not None else shape.rows


def _once(rows: DataFrame) -> DataFrame:
    """One row for each (series_id, ts): where two differ, the greater, so that a replay chooses the same."""
    others = [name for name in rows.columns if name not in {"series_id", "ts"}]
    if "value" in others:  # plain columns: a hash aggregation does it, several times faster
        return rows.groupBy("series_id", "ts").agg(*(F.max(name).alias(name) for name in others))
    greatest = rows.groupBy("series_id", "ts").agg(F.max(F.struct(*others)).alias("row"))
    return greatest.select("series_id", "ts", "row.*")


def _known(tables: Tables, table: str, shape: _Shape) -> tuple[DataFrame, int, int] | None:
    """The table's keys within the batch's span, the last instant (ms) and their number; None if there is none."""
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


def _without(rows: DataFrame, keys: DataFrame, last_ms: int, count: int) -> DataFrame:
    """The rows that are not among the keys. Rows after the last key need no look."""
    if count <= BROADCAST_ROWS_MAX:
        keys = F.broadcast(keys)
    last = F.lit(_moment(last_ms))
    overlapping = rows.where(F.col("ts") <= last).join(keys, ["series_id", "ts"], "left_anti")
    return rows.where(F.col("ts") > last).unionByName(overlapping)


def _add_series(tables: Tables, change: Transaction, rows: DataFrame) -> int:
    """Stage the series that the table does not have; how many."""
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
    count = change.stage("series", met.join(known, "series_id", "left_anti").coalesce(1)).count()
    if count:
        change.add_staged("series")
    return count
