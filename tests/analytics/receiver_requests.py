"""Remote-write requests, made from plain values by the typed messages: the other way from what the product does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import cramjam

from analytics.remote_write import remote_pb2 as pb

CONTENT_TYPES = {1: "application/x-protobuf", 2: "application/x-protobuf;proto=io.prometheus.write.v2.Request"}

STALE = 0x7FF0000000000002


@dataclass
class OneSeries:
    labels: Sequence[tuple[str, str]]
    samples: Sequence[tuple[int, float, int]] = ()  # timestamp, value, start timestamp
    histograms: Sequence[pb.Histogram] = ()
    exemplars: int = 0
    kind: int = 0
    more: dict[str, str] = field(default_factory=dict)


def named(name: str, *samples: tuple[int, float, int], **labels: str) -> OneSeries:
    return OneSeries([("__name__", name), *labels.items()], samples or [(1_760_000_000_000, 1.0, 0)])


def message_v1(series: Sequence[OneSeries]) -> pb.WriteRequest:
    request = pb.WriteRequest()
    for one in series:
        made = request.timeseries.add()
        for name, value in one.labels:
            made.labels.add(name=name, value=value)
        for ts, value, _ in one.samples:
            made.samples.add(timestamp=ts, value=value)
        for _ in range(one.exemplars):
            made.exemplars.add(value=1, timestamp=1).labels.add(name="trace_id", value="x")
        made.histograms.extend(one.histograms)
    return request


def message_v2(series: Sequence[OneSeries]) -> pb.RequestV2:
    request = pb.RequestV2(symbols=[""])
    known = {"": 0}

    def symbol(text: str) -> int:
        if text not in known:
            known[text] = len(known)
            request.symbols.append(text)
        return known[text]

    for one in series:
        made = request.timeseries.add()
        for name, value in one.labels:
            made.labels_refs.extend([symbol(name), symbol(value)])
        for ts, value, start in one.samples:
            made.samples.add(timestamp=ts, value=value, start_timestamp=start)
        for _ in range(one.exemplars):
            made.exemplars.add(value=1, timestamp=1)
        made.histograms.extend(one.histograms)
        if one.kind:
            made.metadata.type = one.kind
    return request


def raw(version: int, series: Sequence[OneSeries]) -> bytes:
    return (message_v1(series) if version == 1 else message_v2(series)).SerializeToString()


def compressed(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def body(version: int, series: Sequence[OneSeries]) -> bytes:
    return compressed(raw(version, series))


def http_request(version: int, data: bytes, *headers: str, content_type: str | None = None) -> bytes:
    lines = [
        "POST /api/v1/write HTTP/1.1",
        "Host: receiver",
        "Content-Encoding: snappy",
        f"Content-Type: {content_type or CONTENT_TYPES[version]}",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data
