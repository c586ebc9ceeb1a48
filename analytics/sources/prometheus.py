"""`spark.read.format("prometheus")`, and `readStream`: samples with their labels, from a spool or from a Prometheus.

What a query says of `metric`, `ts` and the labels' columns narrows what is read (and Spark applies it, too). Spark does
not tell Python sources which columns a query needs; those of the reader's schema are made, and no others.

With the option `table` it has the jobs' rows instead (`analytics.sources.rows`), which no filter narrows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import datasource as spark_filters
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DoubleType, MapType, StringType, StructField, StructType, TimestampType

from analytics.series import METRIC_NAME, REPLICA_LABELS
from analytics.sources.http import SERVER_OPTIONS, Settings, Span, parse_span, query_samples, read_samples
from analytics.sources.options import BadOption, Options
from analytics.sources.rows import BATCH_ROWS, SCHEMAS, RowBuilder, histogram_structs, times, times_or_null
from analytics.sources.selector import Matcher, parse_selector, selector_text
from analytics.sources.spool import SPLIT_BYTES, check_segments_present, decode_split, parse_directory, plan_splits
from analytics.spool import reader
from analytics.spool.positions import Position
from analytics.tables.schemas import HISTOGRAM

if TYPE_CHECKING:
    from analytics.remote_write.decode import Columns

JOB_OPTIONS = ("table", "replicaLabels", "fromPosition", "toPosition")
OPTIONS = (*SERVER_OPTIONS, "api", "path", "splitBytes", "labelColumns", "delaySeconds", *JOB_OPTIONS)
COLUMNS = StructType(
    [
        StructField("metric", StringType()),
        StructField("labels", MapType(StringType(), StringType())),
        StructField("ts", TimestampType()),
        StructField("start_ts", TimestampType()),
        StructField("value", DoubleType()),
        StructField("histogram", HISTOGRAM),
    ]
)
"""Any other column is a label's."""
BATCH_BYTES = 64 << 20
"""Limit of a batch's labels and buckets: a label's text is written once for each row."""
BUCKET_BYTES = 16
EVERYTHING = (Matcher(METRIC_NAME, "!=", ""),)
"""In each selector, since PromQL refuses those that an empty label set would meet."""
FOREVER = ("0", "9999-12-31T23:59:59Z")

Offset = dict[str, int]


@dataclass(frozen=True)
class Server:
    """A Prometheus server; offsets are times."""

    settings: Settings
    by_query: bool
    delay_s: int

    @property
    def begin(self) -> Offset:
        """Return where a new stream begins."""
        return {"ms": self.settings.start_ms}

    def end(self) -> Offset:
        """Return up to when a stream may read: what is younger may still be on its way into the server."""
        return {"ms": max(self.settings.start_ms, round((time.time() - self.delay_s) * 1000))}

    def plan(self, begin: Offset, end: Offset, span: Span) -> list[InputPartition]:
        """Return the partitions between two offsets, within a span."""
        return self.settings.plan(Span(max(begin["ms"], span.start_ms), min(end["ms"], span.end_ms)))

    def read(self, partition: InputPartition, matchers: tuple[Matcher, ...]) -> Iterator[Columns]:
        """Yield what one query finds. Raises QueryFailed."""
        assert isinstance(partition, Span)
        chosen = replace(self.settings, match=selector_text(matchers))
        yield query_samples(chosen, partition) if self.by_query else read_samples(chosen, matchers, partition)


@dataclass(frozen=True)
class Spool:
    """A receiver's spool; offsets are positions of its records. `last` 0: all that is committed."""

    directory: str
    split_bytes: int
    first: int
    last: int

    @property
    def begin(self) -> Offset:
        """Return where a new stream begins."""
        return Position.from_number(self.first)._asdict()

    def end(self) -> Offset:
        """Return where what may be read ends."""
        return (Position.from_number(self.last) if self.last else reader.committed_end(self.directory))._asdict()

    def plan(self, begin: Offset, end: Offset, _: Span) -> list[InputPartition]:
        """Return the splits between two offsets. Raises LostSegments, BadOption."""
        check_segments_present(self.directory, Position(**begin))
        return plan_splits(self.directory, Position(**begin), Position(**end), self.split_bytes)

    def read(self, partition: InputPartition, _: tuple[Matcher, ...]) -> Iterator[Columns]:
        """Yield what a split holds."""
        return decode_split(partition)


class Prometheus(DataSource):
    """Spark data source `prometheus`; docs/analytics-source.md lists its options."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        given = Options("prometheus", options, OPTIONS)
        self._labels = [name for name in given.names("labelColumns", ()) if name not in COLUMNS.names]
        self._matchers = EVERYTHING + parse_selector(given.text("match", ""))
        api = given.text("api", "read")
        if api not in {"read", "query"}:
            raise BadOption(f"prometheus: api is {api!r}, and must be read or query")
        if bool(given.text("path", "")) == bool(given.text("url", "")):
            raise BadOption("prometheus needs either the option 'path', a spool, or 'url', a Prometheus server")
        self._origin: Server | Spool
        if given.text("path", ""):
            self._span = parse_span(given, *FOREVER)
            splits = given.integer("splitBytes", SPLIT_BYTES, least=1, most=1 << 32)
            places = (given.integer(name, 0, least=0, most=1 << 62) for name in ("fromPosition", "toPosition"))
            self._origin = Spool(parse_directory(given), splits, *places)
        else:
            self._span = parse_span(given, "-1h", "-0s")
            delay_s = given.integer("delaySeconds", 60, least=0, most=86_400)
            server = Settings.parse_server(given, selector_text(self._matchers), self._span)
            self._origin = Server(server, api == "query", delay_s)
        self._ends = bool(given.text("end", ""))
        self._table = given.table()
        self._replica_labels = given.names("replicaLabels", REPLICA_LABELS)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "prometheus"

    def schema(self) -> StructType:
        """Return all columns, with those of the option `labelColumns`; or the columns of the option `table`."""
        if self._table:
            return SCHEMAS[self._table]
        return StructType([*COLUMNS, *(StructField(name, StringType()) for name in self._labels)])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of all that is there when the query is planned."""
        if self._table:
            return Reader(JobRows(self._table, self._replica_labels, self._matchers, self._span), self._origin)
        return Reader(Rows(schema, self._matchers, self._span), self._origin)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 -- Spark's name
        """Return a reader that goes on for ever. Raises BadOption for a stream with an end."""
        if self._ends:
            raise BadOption("prometheus: a stream has no end")
        span = replace(self._span, end_ms=parse_span(Options("", {}, ()), *FOREVER).end_ms)
        return StreamReader(Rows(schema, self._matchers, span), self._origin)


@dataclass(frozen=True)
class JobRows:
    """The jobs' rows of a table, of all that an origin has."""

    table: str
    replica_labels: tuple[str, ...]
    matchers: tuple[Matcher, ...]
    span: Span

    def narrow(self, one: Filter) -> None:
        """Leave the filter to Spark."""

    def batches(self, portions: Iterable[Columns]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        rows = RowBuilder(self.table, self.replica_labels)
        for columns in portions:
            yield from rows.build_batches(columns)
        yield from rows.build_series_rows()


class Rows:
    """The rows of a schema that match, from decoded columns."""

    def __init__(self, schema: StructType, matchers: tuple[Matcher, ...], span: Span) -> None:
        known = {field.name: field.dataType.simpleString() for field in COLUMNS}
        for field in schema:
            if field.dataType.simpleString() != known.get(field.name, "string"):
                raise BadOption(f"prometheus: the column {field.name} is {known.get(field.name, 'string')}")
        self.schema, self.matchers, self.span = schema, matchers, span

    def narrow(self, one: Filter) -> None:
        """Restrict what is read to a part that has all rows for which a filter holds."""
        negated = isinstance(one, spark_filters.Not)
        inner: Any = one.child if isinstance(one, spark_filters.Not) else one
        column, value = inner.attribute[0], getattr(inner, "value", "")
        if len(inner.attribute) > 1:
            return
        if column == "ts" and isinstance(value, datetime) and not negated:
            self._narrow_span(inner, int(value.timestamp() * 1000))
        elif column == "metric" or column not in COLUMNS.names:
            label = METRIC_NAME if column == "metric" else column
            self.matchers += tuple(_matchers(inner, label, value, negated=negated))

    def _narrow_span(self, one: Filter, ms: int) -> None:
        span = self.span
        if isinstance(one, spark_filters.GreaterThan | spark_filters.GreaterThanOrEqual | spark_filters.EqualTo):
            self.span = span = replace(span, start_ms=max(span.start_ms, ms))
        if isinstance(one, spark_filters.LessThan | spark_filters.LessThanOrEqual | spark_filters.EqualTo):
            self.span = replace(span, end_ms=min(span.end_ms, ms + 1))

    def batches(self, portions: Iterable[Columns]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition: of each portion those of samples, then those of histograms."""
        for columns in portions:
            yield from self._batches(columns)

    def _batches(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        series = [dict(one.labels) for one in columns.series]
        chosen = np.array([all(one.holds(labels) for one in self.matchers) for labels in series], np.bool_)
        texts = [self._label_values(field.name, series) for field in self.schema]
        label_bytes = max((len(name) + len(text) for one in series for name, text in one.items()), default=1)
        label_bytes *= max(map(len, series), default=1)
        first, end = self.span.start_ms, self.span.end_ms
        ts_ms = columns.sample_ts_ms
        inside = np.flatnonzero(chosen[columns.sample_series] & (ts_ms >= first) & (ts_ms < end))
        for part in _portions(inside, label_bytes):
            values = {"value": columns.sample_value[part]}
            yield self._batch(texts, columns.sample_series[part], ts_ms[part], columns.sample_start_ts_ms[part], values)
        found = [one for one in columns.histograms if chosen[one.series] and first <= one.ts_ms < end]
        buckets = max((len(one.positive_counts) + len(one.negative_counts) for one in found), default=0)
        for part in _portions(np.arange(len(found)), label_bytes + BUCKET_BYTES * buckets):
            some = [found[number] for number in part]
            number, ts, start = (
                np.array([getattr(one, name) for one in some]) for name in ("series", "ts_ms", "start_ts_ms")
            )
            yield self._batch(texts, number, ts, start, {"histogram": some})

    def _label_values(self, column: str, series: list[dict[str, str]]) -> list[Any]:
        """Return the value of a column by series; nulls if it is none of labels."""
        if column == "labels":
            return [[pair for pair in labels.items() if pair[0] != METRIC_NAME] for labels in series]
        name = METRIC_NAME if column == "metric" else column
        return [None if column in COLUMNS.names[2:] else labels.get(name) for labels in series]

    def _batch(
        self, texts: list[list[Any]], number: Any, ts_ms: Any, start_ts_ms: Any, values: dict[str, Any]
    ) -> pa.RecordBatch:
        schema = to_arrow_schema(self.schema, timezone="UTC")
        arrays: list[Any] = []
        for field, by_series in zip(schema, texts, strict=True):
            if field.name == "ts":
                arrays.append(times(ts_ms))
            elif field.name == "start_ts":
                arrays.append(times_or_null(start_ts_ms))
            elif field.name == "histogram" and "histogram" in values:
                arrays.append(histogram_structs(values["histogram"], field.type))
            elif field.name in {"value", "histogram"}:
                arrays.append(
                    pa.array(values[field.name]) if field.name in values else pa.nulls(len(number), field.type)
                )
            else:
                arrays.append(pa.array(by_series, field.type).take(pa.array(number)))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _portions(places: Any, row_bytes: int) -> Iterator[Any]:
    """Yield portions of a batch's size."""
    rows = min(BATCH_ROWS, max(1, BATCH_BYTES // row_bytes))
    for begin in range(0, len(places), rows):
        yield places[begin : begin + rows]


def _matchers(one: Filter, label: str, value: Any, *, negated: bool) -> Iterator[Matcher]:
    """Yield conditions that hold for all rows for which a filter of a label's column does, negated or not."""
    match one:
        case spark_filters.IsNotNull() | spark_filters.IsNull():
            yield Matcher(label, "=" if isinstance(one, spark_filters.IsNull) != negated else "!=", "")
            return
        case spark_filters.EqualTo() | spark_filters.EqualNullSafe() if value:
            yield Matcher(label, "!=" if negated else "=", value)
            return
        case spark_filters.In() if all(value):
            expression = "|".join(map(re.escape, value))
        case spark_filters.StringStartsWith():
            expression = re.escape(value) + "(?s:.*)"
        case spark_filters.StringEndsWith():
            expression = "(?s:.*)" + re.escape(value)
        case spark_filters.StringContains():
            expression = f"(?s:.*){re.escape(value)}(?s:.*)"
        case _:
            return
    yield Matcher(label, "!~" if negated else "=~", expression)


class _PushFilters:
    """`pushFilters` of a reader, which takes notice of filters and leaves all to Spark.

    Spark refuses readers with a `pushFilters` of their own unless spark.sql.python.filterPushdown.enabled is set, by
    comparing `__func__`. A reader that may be used without must pass for one that has none.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, rows: Rows | JobRows) -> None:
        self._rows = rows

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            self._rows.narrow(one)
        return filters


class _PartitionReader:
    """What executors do, for queries and for streams."""

    def __init__(self, rows: Rows | JobRows, origin: Server | Spool) -> None:
        self._rows, self._origin = rows, origin

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        return self._rows.batches(self._origin.read(partition, self._rows.matchers))


class Reader(_PartitionReader, DataSourceReader):
    """Reader of all that is there."""

    def __init__(self, rows: Rows | JobRows, origin: Server | Spool) -> None:
        super().__init__(rows, origin)
        self.pushFilters = _PushFilters(rows)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        """Return what the executors read."""
        end = {"ms": self._rows.span.end_ms} if isinstance(self._origin, Server) else self._origin.end()
        return self._origin.plan(self._origin.begin, end, self._rows.span)


class StreamReader(_PartitionReader, DataSourceStreamReader):
    """Reader of what came since the batch before. Offsets are the origin's, so a checkpoint goes on where it was."""

    def initialOffset(self) -> Offset:  # noqa: N802 -- Spark's name
        """Return where a new query begins."""
        return self._origin.begin

    def latestOffset(self, start: Offset | None = None, limit: Any = None) -> Offset:  # noqa: ARG002, N802 -- Spark's
        """Return up to where there is something; never before `start`, even if the clock was set back."""
        return max(start or self._origin.begin, self._origin.end(), key=lambda one: tuple(one.values()))

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return what the executors read of one batch."""
        return self._origin.plan(start, end, self._rows.span)
