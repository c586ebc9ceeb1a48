"""Samples as they are sent, as requests in a spool and as DuckDB's tables for `recomputed`."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa

from analytics.series import replica_id, series_id
from tests.analytics.spool_files import T0_MS, SpoolFiles, body_v1, body_v2

Labels = dict[str, str]


class Sent(NamedTuple):
    """A sample as it is sent, with the number of its batch."""

    labels: Labels
    ts: int
    value: float
    batch: int
    start: int = 0


def principal(name: str, what: str = "bytes", direction: str = "to_broker", **others: str) -> Labels:
    found = {"__name__": f"pulsar_proxy_principal_{what}_total", "cluster": "c", "instance": "a:8080", "job": "proxy"}
    return found | {"principal": name} | ({"direction": direction} if what != "sessions" else {}) | others


def created_gauge(labels: Labels) -> Labels:
    return labels | {"__name__": labels["__name__"].removesuffix("_total") + "_created"}


def fill(spool: SpoolFiles, samples: Sequence[Sent]) -> None:
    """In order of time, as scrapes are; samples with a start by remote write 2.0."""
    for start, own in groupby(sorted(samples, key=lambda one: (one.start, one.ts)), key=lambda one: one.start):
        points = [(one.labels, one.ts - T0_MS, one.value) for one in own]
        spool.add(*((body_v2(points, start_ms=start - T0_MS), 2) if start else (body_v1(points), 1)))


def samples_table(samples: Sequence[Sent]) -> pa.Table:
    def counter(labels: Labels) -> int | None:
        metric = labels["__name__"]
        is_created = metric.endswith("_created")
        return number(labels | {"__name__": metric.removesuffix("_created") + "_total"}) if is_created else None

    return pa.table(
        {
            "series_id": pa.array([number(one.labels) for one in samples], pa.int64()),
            "replica": pa.array([replica_id(one.labels.items()) for one in samples], pa.int64()),
            "ts": pa.array([one.ts for one in samples], pa.int64()),
            "start": pa.array([one.start or None for one in samples], pa.int64()),
            "value": pa.array([one.value for one in samples], pa.float64()),
            "counter_id": pa.array([counter(one.labels) for one in samples], pa.int64()),
            "batch": pa.array([one.batch for one in samples], pa.int64()),
        }
    )


def number(labels: Labels) -> int:
    return series_id(labels.items())


def named_table(samples: Sequence[Sent]) -> pa.Table:
    kinds = {"to_broker": "in", "to_client": "out"}
    rows = {}
    for labels in (one.labels for one in samples):
        metric, direction = labels["__name__"], kinds.get(labels.get("direction", ""), "")
        what = metric.removeprefix("pulsar_proxy_principal_").removesuffix("_total")
        billed = f"{what}_{direction}".rstrip("_") if metric.endswith("_total") else None
        rows[number(labels)] = (labels["cluster"], labels["instance"], labels.get("principal"), billed)
    columns = map(list, zip(*((key, *row) for key, row in rows.items()), strict=True))
    return pa.table(
        dict(zip(("series_id", "cluster", "instance", "principal", "what"), map(list, columns), strict=True))
    )
