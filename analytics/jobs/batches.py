"""Writes one batch of a source's rows to the tables: no (series_id, replica, ts) twice, and a batch of a spool once.

The input is decoded once, into Spark's cache: samples, histograms and series are written from there. A check on few
rows decides first if duplicates are possible, since shuffling all rows costs as much as decoding them: the spans of the
series cover duplicates within the batch, and of the tables only rows between the batch's first and last instant can be
duplicates (Parquet's statistics skip the other files).

Each table changes on its own, and records the position in the spool. The comparison with the table and the commit are
of the same version, so two ingests, or an ingest and a backfill, never add a row twice. Samples come last: the next
batch begins at their position.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812 -- the usual name

from analytics.errors import AnalyticsError
from analytics.tables.partitions import hour_of, moment_of
from analytics.tables.store import Tables, attempt

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.tables.store import Snapshot

BROADCAST_ROWS_MAX: Final = 1_000_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
_MS_OF_DAY: Final = f"pmod(unix_millis(ts), {DAY_MS})"
HOURS_MAX: Final = 20_000
"""Limit of hours for one batch: more than two years are a sender's wrong clock or a backfill in too large steps."""
SERIES_KNOWN_MAX: Final = 10_000_000
"""Limit of the identities in memory (8 bytes each); beyond, all are forgotten, and series are added again."""
KEYS: Final = ["series_id", "replica", "ts"]
_KINDS: Final = {"histograms": "histogram", "samples": "value"}
"""Table → the column that its rows have. In the order in which the tables change."""


class TooManyHours(AnalyticsError):
    """A batch touches more hours than is plausible."""


class Position(NamedTuple):
    """Where a batch of a spool ends: the name under which the tables record it, and a number that grows."""

    app: str
    number: int


@dataclass(slots=True)
class BatchCounts:
    """Numbers of rows that a batch added; `duplicates` counts skipped samples and histograms."""

    samples: int = 0
    histograms: int = 0
    duplicates: int = 0
    new_series: int = 0
    hours: int = 0


@dataclass(frozen=True, slots=True)
class _Summary:
    """Summary of one kind of rows in a batch: number, first and last instant."""

    rows: int
    first_ms: int
    last_ms: int


class KnownSeries:
    """Identities of the series that the table has, so that a batch only adds others. Repeated rows are harmless."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        rows = tables.snapshot("series").read("series").select("series_id").distinct().toArrow()
        self._known: npt.NDArray[np.int64] = np.sort(rows.column(0).to_numpy())

    def add_new(self, rows: DataFrame, met: npt.NDArray[np.int64]) -> int:
        """Append the batch's series that are not known, of those that it met; return their number."""
        new = np.setdiff1d(met, self._known)
        if not len(new):
            return 0
        wanted = self._tables.spark.createDataFrame(pa.table({"series_id": new}))
        series = rows.where("series is not null").join(F.broadcast(wanted), "series_id", "left_semi")
        found = series.groupBy("series_id").agg(
            F.first("series.metric").alias("metric"),
            F.first("series.labels").alias("labels"),
            F.max("series.kind").alias("kind"),
            F.min("ts").alias("first_seen"),
        )
        attempt(lambda: self._append(found))
        whole = np.union1d(self._known, new)
        self._known = whole if len(whole) <= SERIES_KNOWN_MAX else np.empty(0, np.int64)
        return len(new)

    def _append(self, found: DataFrame) -> None:
        with self._tables.change("series") as change:
            change.append(change.write("series", found.coalesce(1)))


def write_batch(tables: Tables, series: KnownSeries, rows: DataFrame, position: Position | None = None) -> BatchCounts:
    """Add a source's rows (`table=all`) to the tables, without those that they have.

    Raises TablesError, TooManyHours; then call it again with the same rows.
    """
    cached = rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        summaries = _summarize(cached)
        met, may_repeat = _spans(cached)
        counts = BatchCounts(new_series=series.add_new(cached, met))
        hours: set[datetime] = set()
        for table in _KINDS:
            batch = _TableBatch(tables, table, cached, summaries.get(table), may_repeat, position)
            added, own_hours = attempt(batch.add)
            setattr(counts, table, added)
            hours |= own_hours
        counts.hours = len(hours)
        counts.duplicates = sum(one.rows for one in summaries.values()) - counts.samples - counts.histograms
        return counts
    finally:
        cached.unpersist()


@dataclass(frozen=True, slots=True)
class _TableBatch:
    """A batch's rows for one table."""

    tables: Tables
    table: str
    rows: DataFrame
    summary: _Summary | None
    may_repeat: bool
    position: Position | None

    def add(self) -> tuple[int, set[datetime]]:
        """Add the rows that the table does not have; return their number and hours."""
        snapshot, position = self.tables.snapshot(self.table), self.position
        if position is not None and (snapshot.recorded(position.app) or 0) >= position.number:
            return 0, set()
        if self.summary is None and (position is None or self.table != "samples"):
            return 0, set()
        with self.tables.change(self.table, snapshot) as change:
            if position is not None:
                change.record(*position)
            if self.summary is None:
                return 0, set()
            written = change.write(self.table, self._new_rows(snapshot, self.summary))
            change.append(written)
            return written.rows, set(written.hours)

    def _new_rows(self, snapshot: Snapshot, summary: _Summary) -> DataFrame:
        rows = _table_rows(self.table, self.rows)
        if self.may_repeat:
            rows = _deduplicated(rows)
        known = _existing_keys(snapshot, self.table, summary)
        return rows if known is None else _without_existing(rows, *known)


def _summarize(rows: DataFrame) -> dict[str, _Summary]:
    """Return each kind's summary. The first action: it fills the cache."""
    ts_ms = F.unix_millis("ts")  # numbers: Spark would make local times without a zone of timestamps
    found = rows.agg(
        *(
            function(F.when(F.col(column).isNotNull(), ts_ms)).alias(f"{table}_{name}")
            for table, column in _KINDS.items()
            for name, function in (("rows", F.count), ("first", F.min), ("last", F.max))
        )
    ).collect()[0]
    return {
        table: _Summary(found[f"{table}_rows"], found[f"{table}_first"], found[f"{table}_last"])
        for table in _KINDS
        if found[f"{table}_rows"]
    }


def _spans(rows: DataFrame) -> tuple[npt.NDArray[np.int64], bool]:
    """Return the batch's series, and if a row may be there twice: rows out of order, or two partitions' overlap."""
    spans = rows.where("series is not null").select(
        "series_id", "replica", F.unix_millis("ts"), F.unix_millis("series.last_ts"), "series.ordered"
    )
    found: Any = spans.toArrow()
    series, replica, first, last = (found.column(place).to_numpy() for place in range(4))
    order = np.lexsort((last, first, replica, series))
    series, replica, first, last = series[order], replica[order], first[order], last[order]
    same = (series[1:] == series[:-1]) & (replica[1:] == replica[:-1])
    overlap = bool((same & (first[1:] <= last[:-1])).any())
    return np.unique(series), overlap or not all(found.column(4).to_pylist())


def _table_rows(table: str, rows: DataFrame) -> DataFrame:
    """Return the rows of one table, with its columns."""
    chosen = rows.where(F.col(_KINDS[table]).isNotNull())
    own = ["value", "counter_id"] if table == "samples" else ["histogram.*"]
    # Arithmetic: Spark's to_date and hour make a local time of each row first, whatever the time zone.
    day, rest = F.expr(f"unix_millis(ts) - {_MS_OF_DAY}"), F.expr(f"{_MS_OF_DAY} div {HOUR_MS}")
    date = F.date_from_unix_date((day / DAY_MS).cast("int"))
    return chosen.select(*KEYS, "start_ts", *own).withColumns({"date": date, "hour": rest.cast("int")})


def _deduplicated(rows: DataFrame) -> DataFrame:
    """Return one row for each key: of several the greatest, so that a repeated batch chooses the same."""
    others = [name for name in rows.columns if name not in KEYS]
    if "value" in others:  # plain columns: a hash aggregation does it, several times faster
        return rows.groupBy(*KEYS).agg(*(F.max(name).alias(name) for name in others))
    greatest = rows.groupBy(*KEYS).agg(F.max(F.struct(*others)).alias("row"))
    return greatest.select(*KEYS, "row.*")


def _existing_keys(snapshot: Snapshot, table: str, summary: _Summary) -> tuple[DataFrame, int, int] | None:
    """Return the table's keys within the batch's span, their last instant (ms) and their number; None without any."""
    first, last = moment_of(summary.first_ms), moment_of(summary.last_ms)
    hours = snapshot.hours(table, hour_of(first), hour_of(last))
    if len(hours) > HOURS_MAX:
        raise TooManyHours(
            f"the batch's {table} reach from {first} to {last}, and would have to be compared with {len(hours)} hours "
            f"of the tables ({HOURS_MAX} are allowed): is a sender's clock wrong?"
        )
    if not hours:
        return None
    within = F.col("ts").between(F.lit(first), F.lit(last))
    keys = snapshot.read(table, hours).select(*KEYS).where(within)
    last_ms, count = keys.agg(F.max(F.unix_millis("ts")), F.count("*")).collect()[0]
    return (keys, last_ms, count) if count else None


def _without_existing(rows: DataFrame, keys: DataFrame, last_ms: int, count: int) -> DataFrame:
    """Return the rows whose keys are new. Rows after the last key need no join.

    A sample without a replica is that of any replica: Prometheus' API, from which `backfill` has it, names none.
    """
    keys = keys.toDF("known_series", "known_replica", "known_ts")
    if count <= BROADCAST_ROWS_MAX:
        keys = F.broadcast(keys)
    last = F.lit(moment_of(last_ms))
    replica, known = F.col("replica"), F.col("known_replica")
    is_known = (F.col("series_id") == F.col("known_series")) & (F.col("ts") == F.col("known_ts"))
    is_known &= (replica == known) | (replica == 0) | (known == 0)
    overlapping = rows.where(F.col("ts") <= last).join(keys, is_known, "left_anti")
    return rows.where(F.col("ts") > last).unionByName(overlapping.select(*rows.columns))
