"""Label sets: each is checked and sorted once, and is a number from then on."""

from typing import NamedTuple

import google.protobuf.message

from analytics.remote_write.bounds import Bounds
from analytics.remote_write.errors import BoundFault
from analytics.remote_write.remote_pb2 import Labels as LabelsMessage

METRIC_NAME = "__name__"

_LABEL_OVERHEAD_BYTES = 16  # what the wire format adds to a name and a value: three tags and three lengths

KINDS = (None, "counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset")
"""What the codes of MetricType mean, in both versions."""

Labels = tuple[tuple[str, str], ...]


class Series(NamedTuple):
    """A series: its labels by name, `__name__` among them, and the metric's kind, in lower case, if a sender tells."""

    labels: Labels
    kind: str | None


class SeriesTable:
    """The series met so far. Numbers are positions; they are never given twice."""

    keeps = True

    def __init__(self) -> None:
        self._labels: list[Labels] = []
        self._kinds: list[str | None] = []
        self._numbers: dict[Labels, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def number(self, labels: Labels) -> int:
        """The number of a checked label set."""
        found = self._numbers.get(labels)
        if found is None:
            found = self._numbers[labels] = len(self._labels)
            self._labels.append(labels)
            self._kinds.append(None)
        return found

    def set_kinds(self, numbers: list[int], codes: list[int]) -> None:
        """Record the metrics' kinds, as positions in KINDS; the last word counts."""
        kinds = self._kinds
        for number, code in zip(numbers, codes, strict=True):
            kinds[number] = KINDS[code]

    def series(self, begin: int = 0) -> list[Series]:
        """The series from number `begin` on."""
        return [Series(*one) for one in zip(self._labels[begin:], self._kinds[begin:], strict=True)]


class NoSeriesTable(SeriesTable):
    """For who only checks requests: every good label set is number 0, and nothing is kept."""

    keeps = False

    def number(self, labels: Labels) -> int:  # noqa: ARG002
        """Zero."""
        return 0


def checked_labels(pairs: list[tuple[str, str]]) -> Labels | str:
    """The labels by name, without those that have no value (that is the same as absent); or what is wrong with them."""
    labels = tuple(sorted(pair for pair in pairs if pair[1]))
    names = [name for name, _ in labels]
    if "" in names:
        return "a label has no name"
    if len(set(names)) < len(names):
        return "a label's name stands there twice"
    return labels if METRIC_NAME in names else f"there is no {METRIC_NAME} label"


def parsed_labels(region: bytes, bounds: Bounds) -> Labels | str:
    """The same for the label fields of a 1.0 series as they stand on the wire; a BoundFault beyond a bound."""
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
    return checked_labels(pairs)
