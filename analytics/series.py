"""The identity of a series: a 64-bit hash of its labels, the same in every process and version.

Two Prometheus servers that scrape the same targets (a highly available pair) send the same series, distinguished only
by a replica label. That label is no part of the identity: both servers' samples become one series, of two replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

METRIC_NAME = "__name__"
_CREATED = "_created"
REPLICA_LABELS = ("prometheus_replica", "__replica__")
"""The replica label's names in Prometheus' operator and the usual configurations."""

# Bytes that UTF-8 never contains: no two label sets give the same text.
_IN_A_PAIR, _BETWEEN_PAIRS = b"\xfe", b"\xff"

Labels = Iterable[tuple[str, str]]


def series_id(labels: Labels, replica_labels: Collection[str] = REPLICA_LABELS) -> int:
    """Return the identity of a label set, in any order: the first 64 bits of its BLAKE2b, as a signed number."""
    return _hash(pair for pair in labels if pair[0] not in replica_labels)


def replica_id(labels: Labels, replica_labels: Collection[str] = REPLICA_LABELS) -> int:
    """Return the identity of the sender among replicas, by its replica labels; 0 without any."""
    own = [pair for pair in labels if pair[0] in replica_labels]
    return _hash(own) if own else 0


def counter_id(labels: Labels, replica_labels: Collection[str] = REPLICA_LABELS) -> int | None:
    """Return the series whose start a gauge `…_created` tells: the counter `…_total` of its labels; else None."""
    pairs = dict(labels)
    metric = pairs.get(METRIC_NAME, "")
    if not metric.endswith(_CREATED):
        return None
    return series_id((pairs | {METRIC_NAME: metric.removesuffix(_CREATED) + "_total"}).items(), replica_labels)


def _hash(labels: Labels) -> int:
    pairs = sorted(labels)
    text = _BETWEEN_PAIRS.join(name.encode() + _IN_A_PAIR + value.encode() for name, value in pairs)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def metric_and_labels(
    labels: Labels, replica_labels: Collection[str] = REPLICA_LABELS
) -> tuple[str, list[tuple[str, str]]]:
    """Return the metric's name, and the other labels without the replica's."""
    pairs = dict(labels)
    metric = pairs.pop(METRIC_NAME, "")
    return metric, sorted(pair for pair in pairs.items() if pair[0] not in replica_labels)
