"""The schema and the partition columns of every table. Meanings: docs/analytics-tables.md.

Columns are only added, never renamed, retyped or removed: old files stay readable, and columns that they lack are null.
All timestamps are UTC with a precision of milliseconds. The columns of PARTITIONS come last in a schema.
"""

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
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

SCHEMA_VERSION: Final = 1


def _struct(*columns: tuple[str, DataType] | tuple[str, DataType, bool]) -> StructType:
    """Return a struct type of columns (name, type), or (name, type, True) if nullable."""
    return StructType([StructField(column[0], column[1], len(column) > 2) for column in columns])  # noqa: PLR2004


_LONG, _DOUBLE, _INT, _TIME, _STRING = LongType(), DoubleType(), IntegerType(), TimestampType(), StringType()
_DOUBLES, _INTS = ArrayType(_DOUBLE), ArrayType(_INT)
_DATE = (("date", DateType()),)
_DATE_HOUR = (("date", DateType()), ("hour", _INT))

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
SAMPLES: Final = _struct(
    ("series_id", _LONG),
    ("ts", _TIME),
    ("start_ts", _TIME, True),
    ("value", _DOUBLE),
    ("batch_id", _LONG),
    *_DATE_HOUR,
)
HISTOGRAMS: Final = _struct(
    ("series_id", _LONG),
    ("ts", _TIME),
    ("start_ts", _TIME, True),
    *_BUCKETS,
    ("batch_id", _LONG),
    *_DATE_HOUR,
)

_ROLLUP = (
    ("series_id", _LONG),
    ("window", _TIME),
    ("n", _LONG),
    ("sum", _DOUBLE),
    ("sum_lo", _DOUBLE),
    ("min", _DOUBLE),
    ("max", _DOUBLE),
    ("first_ts", _TIME),
    ("first_v", _DOUBLE),
    ("first_start_ts", _TIME, True),
    ("last_ts", _TIME),
    ("last_v", _DOUBLE),
    ("last_start_ts", _TIME, True),
    ("entry", _DOUBLE),
    ("increase", _DOUBLE),
    ("increase_lo", _DOUBLE),
    ("resets", _LONG),
    ("overlaps", _LONG),
)
_HISTOGRAM_ROLLUP = (
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
)
ROLLUP_1M: Final = _struct(*_ROLLUP, *_DATE_HOUR)
ROLLUP_1H: Final = _struct(*_ROLLUP, *_DATE)
ROLLUP_1D: Final = ROLLUP_1H
HISTOGRAMS_1M: Final = _struct(*_HISTOGRAM_ROLLUP, *_DATE_HOUR)
HISTOGRAMS_1H: Final = _struct(*_HISTOGRAM_ROLLUP, *_DATE)
HISTOGRAMS_1D: Final = HISTOGRAMS_1H

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
USAGE_HOURLY: Final = _struct(
    ("cluster", _STRING),
    ("principal", _STRING),
    ("window", _TIME),
    ("bytes_in", _LONG),
    ("bytes_out", _LONG),
    ("messages_in", _LONG),
    ("messages_out", _LONG),
    ("sessions", _LONG),
    ("closed", BooleanType()),
    *_DATE,
)
USAGE_DAILY: Final = USAGE_HOURLY

SCHEMAS: Final[dict[str, StructType]] = {
    "series": SERIES,
    "samples": SAMPLES,
    "histograms": HISTOGRAMS,
    "rollup_1m": ROLLUP_1M,
    "rollup_1h": ROLLUP_1H,
    "rollup_1d": ROLLUP_1D,
    "histograms_1m": HISTOGRAMS_1M,
    "histograms_1h": HISTOGRAMS_1H,
    "histograms_1d": HISTOGRAMS_1D,
    "usage_ledger": USAGE_LEDGER,
    "usage_hourly": USAGE_HOURLY,
    "usage_daily": USAGE_DAILY,
}
PARTITIONS: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(field for field in ("date", "hour") if field in schema.fieldNames()) for name, schema in SCHEMAS.items()
}
CONTENT: Final = _struct(("content", BinaryType(), True))
"""Whole files, as returned by `Tables.read_file_contents`."""
