"""The rows of both sources, as Arrow record batches.

One pass over the input gives samples, histograms and series. Labels in every sample's row would cost more than all the
rest together (0.19 M samples/s against 0.49 M), so samples and histograms carry the series' number, and each partition
has one row for each series and replica in it. The option `table` chooses: `samples`, `histograms`, `series`, or `all`,
the three as rows of one schema, for callers that need all from one pass (the ingest job, which caches them).

A series' row also has `first_ts` and `last_ts`, the span of the partition's rows of it, and `ordered`: every row is
later than the one before. If the spans of one series do not overlap and all are ordered, no row can be there twice;
the ingest job checks that on the few rows of series instead of the many of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from analytics.series import counter_id, metric_and_labels, replica_id, series_id
from analytics.tables.schemas import HISTOGRAM

if TYPE_CHECKING:
    from analytics.remote_write.decode import Columns
    from analytics.remote_write.histograms import Histogram

BATCH_ROWS = 131_072
NO_COUNTER = 0
SERIES_MAX = 2_000_000
"""Limit of different series in one partition of the input; splits are far smaller than that."""

_KEY = [
    StructField("series_id", LongType(), nullable=False),
    StructField("replica", LongType(), nullable=False),
    StructField("ts", TimestampType(), nullable=False),
    StructField("start_ts", TimestampType()),
]
_VALUE = [StructField("value", DoubleType()), StructField("counter_id", LongType())]
_SERIES = StructType(
    [
        StructField("metric", StringType(), nullable=False),
        StructField("labels", MapType(StringType(), StringType(), valueContainsNull=False), nullable=False),
        StructField("kind", StringType()),
        StructField("last_ts", TimestampType(), nullable=False),
        StructField("ordered", BooleanType(), nullable=False),
    ]
)
SCHEMAS = {
    "samples": StructType([*_KEY, *_VALUE]),
    "histograms": StructType([*_KEY, *HISTOGRAM.fields]),
    "series": StructType(
        [*_KEY[:2], StructField("first_ts", TimestampType(), nullable=False), *_SERIES.fields],
    ),
    # A sample has a value, a histogram's row a histogram, a series' row a series (its ts is the first).
    "all": StructType(
        [
            *_KEY,
            *_VALUE,
            StructField("histogram", HISTOGRAM),
            StructField("series", _SERIES),
        ]
    ),
}

Integers = npt.NDArray[np.int64]
_BEFORE_ALL, _AFTER_ALL = -(1 << 62), 1 << 62


@dataclass
class _Spans:
    """Columns by a series' number in the decoder: identity, replica, counter (NO_COUNTER if it is no `_created` gauge),
    first and last timestamp (ms), and if it is ordered.
    """

    identity: Integers
    replica: Integers
    counter: Integers
    first_ms: Integers
    last_ms: Integers
    ordered: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls) -> _Spans:
        integers = np.zeros(0, np.int64)
        return cls(integers, integers, integers, integers, integers, np.zeros(0, np.bool_))

    def add_series(self, identities: list[tuple[int, int, int]]) -> None:
        count = len(identities)
        added = np.array(identities, np.int64).reshape(-1, 3)
        self.identity = np.concatenate([self.identity, added[:, 0]])
        self.replica = np.concatenate([self.replica, added[:, 1]])
        self.counter = np.concatenate([self.counter, added[:, 2]])
        self.first_ms = np.concatenate([self.first_ms, np.full(count, _AFTER_ALL)])
        self.last_ms = np.concatenate([self.last_ms, np.full(count, _BEFORE_ALL)])
        self.ordered = np.concatenate([self.ordered, np.ones(count, np.bool_)])

    def record_rows(self, number: Integers, ts_ms: Integers) -> None:
        """Update the spans by rows in input order."""
        if not number.size:
            return
        small = number.astype(np.uint16) if len(self.identity) <= np.iinfo(np.uint16).max else number
        order = np.argsort(small, kind="stable")  # of 16 bits: a radix sort
        number, ts_ms = number[order], ts_ms[order]
        begins = np.flatnonzero(np.concatenate([[True], number[1:] != number[:-1]]))
        late = np.concatenate([[False], (number[1:] == number[:-1]) & (ts_ms[1:] <= ts_ms[:-1])])
        met = number[begins]
        first, last = np.minimum.reduceat(ts_ms, begins), np.maximum.reduceat(ts_ms, begins)
        self.ordered[met] &= ~np.logical_or.reduceat(late, begins) & (first > self.last_ms[met])
        self.first_ms[met] = np.minimum(self.first_ms[met], first)
        self.last_ms[met] = np.maximum(self.last_ms[met], last)


class RowBuilder:
    """Builder of one partition's rows: `build_batches` for each decoded portion, `build_series_rows` at the end."""

    def __init__(self, table: str, replica_labels: tuple[str, ...]) -> None:
        self._table = table
        self._replica_labels = frozenset(replica_labels)
        self._schema: Any = to_arrow_schema(SCHEMAS[table], timezone="UTC")
        self._spans = _Spans.empty()
        self._series: list[Any] = []

    def build_batches(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the rows of samples and histograms; `columns.series` must begin with the series of earlier calls."""
        fresh = columns.series[len(self._series) :]
        if len(columns.series) > SERIES_MAX:
            raise ValueError(f"one partition of the input has more than {SERIES_MAX} series: use a smaller splitBytes")
        self._spans.add_series([self._identities(one.labels) for one in fresh])
        self._series = columns.series
        if self._table in {"series", "all"}:
            self._record_spans(columns)
        if self._table in {"samples", "all"}:
            yield from self._sample_batches(columns)
        if self._table in {"histograms", "all"} and columns.histograms:
            for begin in range(0, len(columns.histograms), BATCH_ROWS):
                yield self._histogram_batch(columns.histograms[begin : begin + BATCH_ROWS])

    def _identities(self, labels: Sequence[tuple[str, str]]) -> tuple[int, int, int]:
        counter = counter_id(labels, self._replica_labels)
        return (
            series_id(labels, self._replica_labels),
            replica_id(labels, self._replica_labels),
            NO_COUNTER if counter is None else counter,
        )

    def build_series_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the series."""
        if self._table not in {"series", "all"}:
            return
        met = np.flatnonzero(self._spans.last_ms != _BEFORE_ALL)
        for begin in range(0, len(met), BATCH_ROWS):
            yield self._series_batch(met[begin : begin + BATCH_ROWS])

    def _record_spans(self, columns: Columns) -> None:
        self._spans.record_rows(columns.sample_series, columns.sample_ts_ms)
        pairs = np.array([(one.series, one.ts_ms) for one in columns.histograms], np.int64).reshape(-1, 2)
        self._spans.record_rows(pairs[:, 0], pairs[:, 1])

    def _sample_batches(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        spans = self._spans
        for begin in range(0, len(columns.sample_series), BATCH_ROWS):
            part = slice(begin, begin + BATCH_ROWS)
            series = columns.sample_series[part]
            counter = spans.counter[series]
            yield self._record_batch(
                {
                    "series_id": pa.array(spans.identity[series]),
                    "replica": pa.array(spans.replica[series]),
                    "counter_id": pa.array(counter, mask=counter == NO_COUNTER),
                    "ts": times(columns.sample_ts_ms[part]),
                    "start_ts": times_or_null(columns.sample_start_ts_ms[part]),
                    "value": pa.array(columns.sample_value[part]),
                },
                len(series),
            )

    def _histogram_batch(self, histograms: list[Histogram]) -> pa.RecordBatch:
        values = {"histogram": histogram_structs(histograms, to_arrow_schema(HISTOGRAM))}
        if self._table == "histograms":
            values = dict(zip(HISTOGRAM.names, values["histogram"].flatten(), strict=True))
        numbers = [one.series for one in histograms]
        keys = {
            "series_id": pa.array(self._spans.identity[numbers]),
            "replica": pa.array(self._spans.replica[numbers]),
            "ts": times(np.array([one.ts_ms for one in histograms], np.int64)),
            "start_ts": times_or_null(np.array([one.start_ts_ms for one in histograms], np.int64)),
        }
        return self._record_batch(keys | values, len(histograms))

    def _series_batch(self, met: Integers) -> pa.RecordBatch:
        series = [self._series[number] for number in met.tolist()]
        named = [metric_and_labels(one.labels, self._replica_labels) for one in series]
        values: dict[str, Any] = {
            "metric": pa.array([metric for metric, _ in named], pa.string()),
            "labels": pa.array(
                [labels for _, labels in named], to_arrow_schema(_SERIES, timezone="UTC").field("labels").type
            ),
            "kind": pa.array([one.kind for one in series], pa.string()),
            "last_ts": times(self._spans.last_ms[met]),
            "ordered": pa.array(self._spans.ordered[met]),
        }
        first = times(self._spans.first_ms[met])
        keys = {
            "series_id": pa.array(self._spans.identity[met]),
            "replica": pa.array(self._spans.replica[met]),
            "ts": first,
            "first_ts": first,
        }
        if self._table == "all":
            kind = self._schema.field("series").type
            values = {"series": pa.StructArray.from_arrays(list(values.values()), fields=list(kind))}
        return self._record_batch(keys | values, len(met))

    def _record_batch(self, columns: dict[str, Any], rows: int) -> pa.RecordBatch:
        """Return a batch of the table's schema; columns that this kind of row lacks are null."""
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def histogram_structs(histograms: list[Histogram], fields: Any) -> Any:
    """Return histograms as structs of these Arrow fields, which have HISTOGRAM's names and types."""
    columns = [pa.array([getattr(one, field.name) for one in histograms], field.type) for field in fields]
    return pa.StructArray.from_arrays(columns, fields=list(fields))


def times(ms: Integers) -> Any:
    """Return timestamps of milliseconds since 1970."""
    return pa.array(ms * 1000).view(pa.timestamp("us", tz="UTC"))


def times_or_null(ms: Integers) -> Any:
    """Return timestamps, null for 0."""
    return pa.array(ms * 1000, mask=ms == 0).view(pa.timestamp("us", tz="UTC"))
