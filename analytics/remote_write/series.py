"""Label sets: validation, and a table that gives each one a number."""

from typing import NamedTuple

import google.protobuf.message

from analytics.remote_write.bounds import Bounds
from analytics.remote_write.errors import BoundFault
from analytics.remote_write.remote_pb2 import Labels as LabelsMessage

METRIC_NAME = "__name__"

_LABEL_OVERHEAD_BYTES = 16  # what the wire format adds to a name and a value: three tags and three lengths

KINDS = (None, "counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset")
"""Names of MetricType's codes, by position; the same in both versions."""

Labels = tuple[tuple[str, str], ...]


class Series(NamedTuple):
    """A series: its labels sorted by name, `__name__` among them, and the metric's kind in lower case if known."""

    labels: Labels
    kind: str | None


class SeriesTable:
    """Table of the series met so far. A series' number is its position and is never reused."""

    stores_series = True

    def __init__(self) -> None:
        self._labels: list[Labels] = []
        self._kinds: list[str | None] = []
        self._numbers: dict[Labels, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def number_for(self, labels: Labels) -> int:
        """Return the number of a normalized label set."""
        found = self._numbers.get(labels)
        if found is None:
            found = self._numbers[labels] = len(self._labels)
            self._labels.append(labels)
            self._kinds.append(None)
        return found

    def set_kinds(self, numbers: list[int], codes: list[int]) -> None:
        """Record the metrics' kinds, as positions in KINDS; later calls win."""
        kinds = self._kinds
        for number, code in zip(numbers, codes, strict=True):
            kinds[number] = KINDS[code]

    def series(self, begin: int = 0) -> list[Series]:
        """Return the series from number `begin` on."""
        return [Series(*one) for one in zip(self._labels[begin:], self._kinds[begin:], strict=True)]


class NullSeriesTable(SeriesTable):
    """Table that stores nothing: every valid label set is number 0. For callers that only validate requests."""

    stores_series = False

    def number_for(self, labels: Labels) -> int:  # noqa: ARG002
        """Return 0."""
        return 0


def normalize_labels(pairs: list[tuple[str, str]]) -> Labels | str:
    """Return the labels sorted by name, without empty values (the same as absent); or a text saying what is wrong."""
    labels = tuple(sorted(pair for pair in pairs if pair[1]))
    names = [name for name, _ in labels]
    if "" in names:
        return "a label has no name"
    if len(set(names)) < len(names):
        return "a label's name occurs twice"
    return labels if METRIC_NAME in names else f"there is no {METRIC_NAME} label"


def parse_labels(region: bytes, bounds: Bounds) -> Labels | str:
    """Parse and normalize the encoded label fields of a 1.0 series; return a BoundFault beyond a bound."""
    if len(region) > bounds.label_bytes_per_series + _LABEL_OVERHEAD_BYTES * bounds.labels_per_series:
        return BoundFault(bounds.error("label_bytes_per_series"))
    try:
        message = LabelsMessage.FromString(region)
    except google.protobuf.message.DecodeError:
        return "its labels are no labels, or not UTF-8"
    if len(message.labels) > bounds.labels_per_series:
        return BoundFault(bounds.error("labels_per_series"))
    pairs = [(label.name, label.value) for label in message.labels]
    if sum(len(name) + len(value) for name, value in pairs) > bounds.label_bytes_per_series:
        return BoundFault(bounds.error("label_bytes_per_series"))
    return normalize_labels(pairs)
