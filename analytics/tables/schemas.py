"""The schema and the partition columns of every table. Meanings: docs/analytics-tables.md.

Columns are only added, never renamed, retyped or removed: old files stay readable, and columns that they lack are null.
All timestamps are UTC with a precision of milliseconds. The columns of PARTITIONS come last in a schema.

A table is one Delta table, so all its rows change at once. Tables with the column `width` hold windows of several
widths, and have a *view* for each of them, as which jobs read and write them.
"""

from typing import Final, NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

SCHEMA_VERSION: Final = 2


def _struct(*columns: tuple[str, DataType] | tuple[str, DataType, bool]) -> StructType:
    """Return a struct type of columns (name, type), or (name, type, True) if nullable."""
    return StructType([StructField(column[0], column[1], len(column) > 2) for column in columns])  # noqa: PLR2004


_LONG, _DOUBLE, _INT, _TIME, _STRING = LongType(), DoubleType(), IntegerType(), TimestampType(), StringType()
_DOUBLES, _INTS = ArrayType(_DOUBLE), ArrayType(_INT)
_DATE = (("date", DateType()),)
_DATE_HOUR = (("date", DateType()), ("hour", _INT, True))
_WIDTH = (("width", _STRING),)

# One native histogram at one instant. Offsets are absolute bucket indexes, counts are per bucket (not cumulative);
# schema -53 has custom bounds, 0 to 8 and -4 to -1 are exponential.
_BUCKETS = (
    ("count", _DOUBLE),
    ("sum", _DOUBLE),
    ("schema", _INT),
    ("zero_threshold", _DOUBLE),
    ("zero_count", _DOUBLE),
    ("positive_offsets", _INTS),
    ("positive_counts", _DOUBLES),
    ("negative_offsets", _INTS),
    ("negative_counts", _DOUBLES),
    ("custom_bounds", _DOUBLES),
)
# Spark regards everything read from Parquet as nullable, and casts no array, map or struct to a non-nullable one.
HISTOGRAM: Final = _struct(*((name, kind, True) for name, kind in _BUCKETS))

SERIES: Final = _struct(
    ("series_id", _LONG),
    ("metric", _STRING),
    ("labels", MapType(_STRING, _STRING)),
    ("kind", _STRING, True),
    ("first_seen", _TIME),
)
_KEY = (("series_id", _LONG), ("replica", _LONG), ("ts", _TIME), ("start_ts", _TIME, True))
SAMPLES: Final = _struct(*_KEY, ("value", _DOUBLE), ("counter_id", _LONG, True), *_DATE_HOUR)
HISTOGRAMS: Final = _struct(*_KEY, *_BUCKETS, *_DATE_HOUR)
ROLLUP: Final = _struct(
    ("series_id", _LONG),
    ("window", _TIME),
    ("n", _LONG),
    ("sum", _DOUBLE),
    ("min", _DOUBLE),
    ("max", _DOUBLE),
    ("first_ts", _TIME),
    ("first_v", _DOUBLE),
    ("first_start_ts", _TIME, True),
    ("last_ts", _TIME),
    ("last_v", _DOUBLE),
    ("last_start_ts", _TIME, True),
    ("last_replica", _LONG),
    ("entry", _DOUBLE),
    ("entry_ts", _TIME, True),
    ("increase", _DOUBLE),
    ("resets", _LONG),
    ("overlaps", _LONG),
    *_WIDTH,
    *_DATE_HOUR,
)
HISTOGRAM_ROLLUP: Final = _struct(
    ("series_id", _LONG),
    ("window", _TIME),
    ("n", _LONG),
    ("first_ts", _TIME),
    ("last_ts", _TIME),
    ("last_start_ts", _TIME, True),
    ("increase", HISTOGRAM),
    ("last", HISTOGRAM),
    ("resets", _LONG),
    ("refused", _LONG),
    *_WIDTH,
    *_DATE_HOUR,
)

# The growth of each of the proxy's usage counters by hour: usage_hourly is summed from it.
USAGE_LEDGER: Final = _struct(
    ("series_id", _LONG),
    ("cluster", _STRING),
    ("principal", _STRING),
    ("what", _STRING),
    ("window", _TIME),
    ("n", _LONG),
    ("increase", _LONG),
    ("last_ts", _TIME),
    ("last_v", _DOUBLE),
    ("last_start_ts", _TIME, True),
    *_DATE_HOUR,
)
USAGE: Final = _struct(
    ("cluster", _STRING),
    ("principal", _STRING),
    ("window", _TIME),
    ("bytes_in", _LONG),
    ("bytes_out", _LONG),
    ("messages_in", _LONG),
    ("messages_out", _LONG),
    ("sessions", _LONG),
    ("closed", BooleanType()),
    *_WIDTH,
    *_DATE,
)

SCHEMAS: Final[dict[str, StructType]] = {
    "series": SERIES,
    "samples": SAMPLES,
    "histograms": HISTOGRAMS,
    "rollup": ROLLUP,
    "histogram_rollup": HISTOGRAM_ROLLUP,
    "usage_ledger": USAGE_LEDGER,
    "usage": USAGE,
}
_PARTITION_COLUMNS: Final = ("width", "date", "hour")
PARTITIONS: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(field for field in _PARTITION_COLUMNS if field in schema.fieldNames())
    for name, schema in SCHEMAS.items()
}


class View(NamedTuple):
    """A table's rows of one width (None: all); `by`: the time of one partition, "hour", "day", or "" for no time."""

    table: str
    width: str | None
    by: str


VIEWS: Final[dict[str, View]] = {
    "series": View("series", None, ""),
    "samples": View("samples", None, "hour"),
    "histograms": View("histograms", None, "hour"),
    "rollup_1m": View("rollup", "1m", "hour"),
    "rollup_1h": View("rollup", "1h", "day"),
    "rollup_1d": View("rollup", "1d", "day"),
    "histograms_1m": View("histogram_rollup", "1m", "hour"),
    "histograms_1h": View("histogram_rollup", "1h", "day"),
    "histograms_1d": View("histogram_rollup", "1d", "day"),
    "usage_ledger": View("usage_ledger", None, "hour"),
    "usage_hourly": View("usage", "1h", "day"),
    "usage_daily": View("usage", "1d", "day"),
}
"""What jobs read and write, by name."""
