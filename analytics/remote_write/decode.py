"""Decoder of a request's body to columns. The receiver validates with it what the Spark job later reads with it.

A body that is no request raises. An invalid series (no metric name, two labels of one name, a timestamp outside of the
calendar, a histogram that does not add up) is left out as a whole and reported with its position and the reason.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.remote_write.bounds import CEILING, Bounds, Budget
from analytics.remote_write.errors import BoundError, BoundFault, DecodeError
from analytics.remote_write.histograms import NO_BUCKETS, Histogram, HistogramError, decode_histogram
from analytics.remote_write.protobuf_fields import (
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    Bytes,
    FieldColumns,
    Fields,
    Integers,
    padded_buffer,
    read_doubles,
    read_fields,
)
from analytics.remote_write.remote_pb2 import SplitRequestV2
from analytics.remote_write.series import KINDS, Series, SeriesTable
from analytics.remote_write.series_interner import SeriesInterner, read_label_references
from analytics.remote_write.snappy import decompress
from analytics.remote_write.splitting import split_request

DECOMPRESSED_BYTES_MAX = 256 * 1024 * 1024
"""Limit for readers of the spool; the receiver's own limit is a setting, and smaller."""

TIMESTAMP_MS_MIN, TIMESTAMP_MS_MAX = 1, 253_402_300_799_999
"""1970 to 9999."""

STALE_BITS = 0x7FF0000000000002
"""The NaN with which Prometheus marks the end of a series (a stale marker)."""

Doubles = npt.NDArray[np.float64]

_SAMPLES = 2  # field numbers of a series; both versions have these
_HISTOGRAMS, _EXEMPLARS = {1: 4, 2: 3}, {1: 3, 2: 4}  # by version
_METADATA = 5
_VALUE, _TIMESTAMP, _START = 1, 2, 3  # of a sample
_TYPE = 1  # of metadata


@dataclass
class Counts:
    """Numbers of what was decoded. `samples` and `histograms` count those of valid series, with stale markers.

    `buckets` counts those of all histograms that were decoded.
    """

    requests: int = 0
    samples: int = 0
    histograms: int = 0
    exemplars: int = 0
    stale: int = 0
    faulty_series: int = 0
    buckets: int = 0

    def add(self, other: "Counts") -> None:
        """Add the numbers of another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class DecodedRequest:
    """Columns of one request. `faults` maps a series' position to what is wrong with it; stale markers are dropped.

    series: number of each sample's series; ts_ms, start_ts_ms: since 1970, a start of 0 is none.
    """

    series: Integers
    ts_ms: Integers
    start_ts_ms: Integers
    value: Doubles
    histograms: list[Histogram]
    counts: Counts
    faults: dict[int, str]


@dataclass
class Columns:
    """Columns of several requests. `series` has all that the decoder met so far: numbers are positions in it.

    sample_series, sample_ts_ms, sample_start_ts_ms (0: none) and sample_value are equally long.
    """

    series: list[Series]
    sample_series: Integers
    sample_ts_ms: Integers
    sample_start_ts_ms: Integers
    sample_value: Doubles
    histograms: list[Histogram]
    counts: Counts


class Decoder:
    """Decoder of many requests. `bytes_max` bounds each decompressed body, `bounds` its contents."""

    def __init__(self, bytes_max: int = DECOMPRESSED_BYTES_MAX, bounds: Bounds = CEILING) -> None:
        self._bytes_max = bytes_max
        self._table = SeriesTable()
        self._interner = SeriesInterner(self._table, bounds)
        self._requests: list[DecodedRequest] = []
        self.faults: dict[int, str] = {}
        """Faults of the request added last, by series position."""

    def add_body(self, body: bytes, version: int) -> Counts:
        """Decode one body, as the spool has it. Raises DecodeError, and then nothing was added."""
        request = decode_request(decompress(body, self._bytes_max), version, self._interner)
        self._requests.append(request)
        self.faults = request.faults
        return request.counts

    def series(self, begin: int = 0) -> list[Series]:
        """Return the series met so far, from number `begin` on."""
        return self._table.series(begin)

    def take_columns(self) -> Columns:
        """Return the columns added since the last call."""
        requests, self._requests = self._requests, []
        counts = Counts()
        for request in requests:
            counts.add(request.counts)
        return Columns(
            series=self._table.series(),
            sample_series=_concatenated([request.series for request in requests]),
            sample_ts_ms=_concatenated([request.ts_ms for request in requests]),
            sample_start_ts_ms=_concatenated([request.start_ts_ms for request in requests]),
            sample_value=np.concatenate([np.zeros(0), *(request.value for request in requests)]),
            histograms=[histogram for request in requests for histogram in request.histograms],
            counts=counts,
        )


def decode_request(raw: bytes, version: int, interner: SeriesInterner, bounds: Bounds | None = None) -> DecodedRequest:
    """Decode one decompressed body. Raises DecodeError for an invalid request, BoundError beyond a bound.

    bounds: for the request as a whole; those of a series are the interner's. Default: the interner's.
    """
    bounds = bounds or interner.bounds
    budget = Budget(bounds)
    split = split_request(raw, version, bounds)
    parts = list(split.timeseries)
    symbols = list(split.symbols) if isinstance(split, SplitRequestV2) else []
    del split  # it has a copy of everything
    ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))
    blob, data = padded_buffer(*parts)
    del parts
    found = read_fields(data, ends - np.diff(ends, prepend=0), ends, budget)
    if version == 1:
        numbers = interner.series_numbers_v1(blob, found)
    else:
        numbers = interner.series_numbers_v2(read_label_references(data, found, symbols, budget), symbols)
    reading = _RequestReader(data, found, numbers, version, budget, interner.bounds)
    for position in np.flatnonzero(numbers < 0).tolist():
        reading.faults[position] = interner.fault_text(int(numbers[position]))
    return reading.read_request(interner.table)


class _Samples(NamedTuple):
    owner: Integers
    ts_ms: Integers
    start_ts_ms: Integers
    value: Doubles


@dataclass
class _RequestReader:
    """Reader of one request's series."""

    data: Bytes
    found: Fields
    numbers: Integers
    version: int
    budget: Budget
    series_bounds: Bounds
    faults: dict[int, str] = field(default_factory=dict)

    def read_request(self, table: SeriesTable) -> DecodedRequest:
        samples = self._read_samples()
        histograms = self._read_histograms(keep=table.stores_series)
        good = np.ones(len(self.numbers), dtype=np.bool_)
        good[list(self.faults)] = False
        kept = good[samples.owner]
        fresh = samples.value.view(np.uint64) != STALE_BITS
        chosen = np.flatnonzero(kept & fresh)
        good_histograms = [one for owner, one in histograms if good[owner]]
        fresh_histograms = [one for one in good_histograms if not _is_stale(one.sum)]
        self._record_kinds(table, good)
        counts = Counts(
            requests=1,
            samples=int(kept.sum()),
            histograms=len(good_histograms),
            exemplars=int(good[self._submessages(_EXEMPLARS[self.version]).owner].sum()),
            stale=int((kept & ~fresh).sum()) + len(good_histograms) - len(fresh_histograms),
            faulty_series=len(self.faults),
            buckets=self.budget.bounds.buckets - self.budget.remaining("buckets"),
        )
        return DecodedRequest(
            series=self.numbers[samples.owner[chosen]],
            ts_ms=samples.ts_ms[chosen],
            start_ts_ms=samples.start_ts_ms[chosen],
            value=samples.value[chosen],
            histograms=fresh_histograms,
            counts=counts,
            faults=self.faults,
        )

    def _submessages(self, number: int) -> FieldColumns:
        return self.found.select(number, LENGTH_DELIMITED)

    def _read_samples(self) -> _Samples:
        parts = self._submessages(_SAMPLES)
        inner = read_fields(self.data, parts.begin, parts.end, self.budget)
        values = inner.select(_VALUE, FIXED64)
        value = np.zeros(parts.owner.size)
        value[values.owner] = read_doubles(self.data, values.begin)
        ts_ms = _by_owner(inner.select(_TIMESTAMP, VARINT), parts.owner.size)
        # 1.0 has no such field: there it would be an unknown one
        start_ts_ms = _by_owner(inner.select(_START if self.version > 1 else -1, VARINT), parts.owner.size)
        impossible = (ts_ms < TIMESTAMP_MS_MIN) | (ts_ms > TIMESTAMP_MS_MAX)
        impossible |= (start_ts_ms < 0) | (start_ts_ms > TIMESTAMP_MS_MAX)
        for place in parts.owner[impossible].tolist():
            self.faults.setdefault(place, "a sample's timestamp is not between 1970 and 9999")
        return _Samples(parts.owner, ts_ms, start_ts_ms, value)

    def _read_histograms(self, *, keep: bool) -> list[tuple[int, Histogram]]:
        """Return all valid histograms with their series' positions; without `keep`, without their buckets."""
        parts = self._submessages(_HISTOGRAMS[self.version])
        self.budget.spend("histograms", parts.owner.size)
        found = []
        for owner, begin, end in zip(parts.owner.tolist(), parts.begin.tolist(), parts.end.tolist(), strict=True):
            if owner in self.faults:
                continue
            try:
                histogram = self._read_histogram(owner, self.data[begin:end].tobytes())
            except HistogramError as error:
                self.faults[owner] = f"a histogram: {error}"
                continue
            if histogram is not None:
                found.append((owner, histogram if keep else NO_BUCKETS._replace(sum=histogram.sum)))
        return found

    def _read_histogram(self, owner: int, message: bytes) -> Histogram | None:
        """Read one histogram; None if its series became a fault. Raises HistogramError, BoundError of the request."""
        try:
            histogram = decode_histogram(message, int(self.numbers[owner]), self.series_bounds)
        except BoundError as error:
            self.faults[owner] = BoundFault(error, "a histogram: ")
            return None
        self.budget.spend("buckets", len(histogram.positive_counts) + len(histogram.negative_counts))
        if self.version == 1:
            histogram = histogram._replace(start_ts_ms=0)
        times = (histogram.ts_ms, histogram.start_ts_ms or TIMESTAMP_MS_MIN)
        if all(TIMESTAMP_MS_MIN <= one <= TIMESTAMP_MS_MAX for one in times):
            return histogram
        self.faults[owner] = "a histogram's timestamp is not between 1970 and 9999"
        return None

    def _record_kinds(self, table: SeriesTable, good: npt.NDArray[np.bool_]) -> None:
        if self.version == 1 or not table.stores_series:
            return
        parts = self._submessages(_METADATA)
        try:
            types = read_fields(self.data, parts.begin, parts.end, self.budget).select(_TYPE, VARINT)
        except DecodeError:  # the receiver has accepted the samples, and reads no metadata
            return
        owner = parts.owner[types.owner]
        chosen = np.flatnonzero(good[owner] & (types.value > 0) & (types.value < len(KINDS)))
        table.set_kinds(self.numbers[owner[chosen]].tolist(), types.value[chosen].tolist())


def _by_owner(found: FieldColumns, size: int) -> Integers:
    """Return a column of varints by owner; 0 where there is none, the last where there are several."""
    column = np.zeros(size, dtype=np.int64)
    column[found.owner] = found.value
    return column


def _is_stale(value: float) -> bool:
    return int(np.float64(value).view(np.uint64)) == STALE_BITS


def _concatenated(parts: list[Integers]) -> Integers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
