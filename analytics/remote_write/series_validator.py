"""Validation of a request's series for the receiver, which stores no series.

In 2.0 names and values are numbers, so the labels of all series of a request are checked together, at a cost that does
not depend on the number of different series. Senders write labels as the specification wants them (in the order of
their names, each name once, no empty value); if one series deviates, `SeriesInterner` checks its whole request and
reports what is wrong with which series.

https://prometheus.io/docs/specs/prw/remote_write_spec_2_0/#labels
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from analytics.remote_write.bounds import CEILING, Bounds
from analytics.remote_write.protobuf_fields import Integers
from analytics.remote_write.series import METRIC_NAME, NullSeriesTable
from analytics.remote_write.series_interner import LabelReferences, SeriesInterner


class SeriesValidator(SeriesInterner):
    """Interner that stores no series: every valid series gets the number 0."""

    def __init__(self, bounds: Bounds = CEILING) -> None:
        super().__init__(NullSeriesTable(), bounds)

    def series_numbers_v2(self, references: LabelReferences, symbols: Sequence[str]) -> Integers:
        """Return 0 for each valid series, a negative number for a fault."""
        if _are_well_formed(references, symbols) and _are_within_bounds(references, self.bounds):
            return np.zeros(references.ends.size, dtype=np.int64)
        return super().series_numbers_v2(references, symbols)


def _are_within_bounds(references: LabelReferences, bounds: Bounds) -> bool:
    """Return True if certainly no series has too many or too long labels."""
    numbers, behind, characters = references
    most = int(np.diff(behind, prepend=0).max())
    if most > 2 * bounds.labels_per_series:
        return False
    if most * int(characters.max()) <= bounds.label_bytes_per_series:
        return True
    total = np.concatenate(([0], np.cumsum(characters[numbers])))
    return int(np.diff(total[behind], prepend=0).max()) <= bounds.label_bytes_per_series


def _are_well_formed(given: LabelReferences, symbols: Sequence[str]) -> bool:
    """Return True if all series have pairs of existing non-empty symbols, ascending by name, with a metric name."""
    references, behind, characters = given
    if not references.size or (behind & 1).any() or int(references.view(np.uint32).max()) >= len(symbols):
        return False
    if (characters == 0)[references].any():
        return False
    ranks, metric_rank = _ranks(references[::2], symbols)
    not_ascending = np.flatnonzero(ranks[1:] <= ranks[:-1]) + 1
    begins = np.zeros(ranks.size + 1, dtype=np.bool_)
    begins[behind >> 1] = True
    # each name occurs at most once in a series, so there are as many metric names as series that have one
    return bool(begins[not_ascending].all()) and np.count_nonzero(ranks == metric_rank) == behind.size


def _ranks(names: npt.NDArray[np.int32], symbols: Sequence[str]) -> tuple[npt.NDArray[np.int32], int]:
    """Return each name's rank in the order of the texts, and the metric name's; equal texts have equal ranks."""
    used = np.flatnonzero(np.bincount(names, minlength=len(symbols))).tolist()
    places = {text: place for place, text in enumerate(sorted({symbols[one] for one in used}))}
    rank = np.zeros(len(symbols), dtype=np.int32)
    rank[used] = [places[symbols[one]] for one in used]
    return rank[names], places.get(METRIC_NAME, -1)
