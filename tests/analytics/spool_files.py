"""Spools as the receiver writes them, for tests and measurements."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from analytics.remote_write.remote_pb2 import Histogram, MetadataV2, RequestV2, WriteRequest
from analytics.remote_write.snappy import compress
from analytics.spool.records import pack_record
from analytics.spool.writer import SpoolLimits, SpoolWriter

T0_MS = 1_763_712_000_000
"""2025-11-21 08:00 UTC."""

Labels = Mapping[str, str]
Point = tuple[Labels, int, float]
"""Labels (with __name__), milliseconds since T0_MS, value."""


def labels(metric: str, **others: str) -> dict[str, str]:
    return {"__name__": metric, **others}


def body_v1(points: Iterable[Point]) -> bytes:
    request = WriteRequest()
    for names, at_ms, value in points:
        series = request.timeseries.add()
        for name, text in names.items():
            series.labels.add(name=name, value=text)
        series.samples.add(value=value, timestamp=T0_MS + at_ms)
    return compress(request.SerializeToString())


class _Symbols:
    def __init__(self, request: RequestV2) -> None:
        self._request = request
        self._numbers = {"": 0}
        request.symbols.append("")

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self._request.symbols.append(text)
        return self._numbers[text]


def body_v2(
    points: Iterable[Point],
    *,
    start_ms: int | None = None,
    kind: int = 0,
    histograms: Sequence[tuple[Labels, int, Histogram]] = (),
) -> bytes:
    request = RequestV2()
    symbols = _Symbols(request)
    for names, at_ms, value in points:
        series = request.timeseries.add(metadata=MetadataV2(type=kind))
        series.labels_refs.extend(symbols.number(text) for pair in names.items() for text in pair)
        series.samples.add(
            value=value, timestamp=T0_MS + at_ms, start_timestamp=0 if start_ms is None else T0_MS + start_ms
        )
    for names, at_ms, histogram in histograms:
        series = request.timeseries.add()
        series.labels_refs.extend(symbols.number(text) for pair in names.items() for text in pair)
        histogram.timestamp = T0_MS + at_ms
        series.histograms.append(histogram)
    return compress(request.SerializeToString())


class SpoolFiles:
    """A spool that grows by bodies; each `add` is one record."""

    def __init__(self, directory: Path, segment_bytes_max: int = 1 << 30) -> None:
        self.directory = directory
        self._writer = SpoolWriter(directory, SpoolLimits(segment_bytes_max, 1 << 40, 0))

    def add(self, body: bytes, version: int) -> None:
        self._writer.append_records([pack_record(version, T0_MS, body)])

    def v1(self, *points: Point) -> None:
        self.add(body_v1(points), 1)

    def v2(self, *points: Point) -> None:
        self.add(body_v2(points), 2)

    def close(self) -> None:
        self._writer.close()
