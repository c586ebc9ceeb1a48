"""Whether the series of a request can be, for who keeps no series: the receiver.

In 2.0 names and values are numbers, so the labels of all series of a request are checked together, and what that costs
does not depend on how many different series there are. Senders write labels as the specification wants them (in the
order of their names, each name once, no empty value); where one series is not like that the `Interner` decides on all
of its request, and says what is wrong with which.

https://prometheus.io/docs/specs/prw/remote_write_spec_2_0/#labels
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from analytics.remote_write.bounds import CEILING, Bounds
from analytics.remote_write.interning import Interner, References
from analytics.remote_write.series import METRIC_NAME, NoSeriesTable
from analytics.remote_write.wire import Integers


class Checker(Interner):
    """An Interner for which every good series is number 0."""

    def __init__(self, bounds: Bounds = CEILING) -> None:
        super().__init__(NoSeriesTable(), bounds)

    def numbers_v2(self, references: References, symbols: Sequence[str]) -> Integers:
        """0 for a good series; below zero for a fault."""
        if _are_as_specified(references, symbols) and _are_within_bounds(references, self.bounds):
            return np.zeros(references.behind.size, dtype=np.int64)
        return super().numbers_v2(references, symbols)


def _are_within_bounds(references: References, bounds: Bounds) -> bool:
    """Whether no series has too many labels, nor too long ones; False if that is not certain."""
    numbers, behind, characters = references
    most = int(np.diff(behind, prepend=0).max())
    if most > 2 * bounds.labels_per_series:
        return False
    if most * int(characters.max()) <= bounds.label_bytes_per_series:
        return True
    total = np.concatenate(([0], np.cumsum(characters[numbers])))
    return int(np.diff(total[behind], prepend=0).max()) <= bounds.label_bytes_per_series


def _are_as_specified(given: References, symbols: Sequence[str]) -> bool:
    """Whether all series have pairs of symbols that are there and not empty, in ascending order, with a metric name."""
    references, behind, characters = given
    if not references.size or (behind & 1).any() or int(references.view(np.uint32).max()) >= len(symbols):
        return False
    if (characters == 0)[references].any():
        return False
    ranks, metric_rank = _ranks(references[::2], symbols)
    not_ascending = np.flatnonzero(ranks[1:] <= ranks[:-1]) + 1
    begins = np.zeros(ranks.size + 1, dtype=np.bool_)
    begins[behind >> 1] = True
    # each name stands at most once in a series, so there are as many metric names as series that have one
    return bool(begins[not_ascending].all()) and np.count_nonzero(ranks == metric_rank) == behind.size


def _ranks(names: npt.NDArray[np.int32], symbols: Sequence[str]) -> tuple[npt.NDArray[np.int32], int]:
    """Each name's place in the order of the texts, and that of the metric's name; equal texts have equal places."""
    used = np.flatnonzero(np.bincount(names, minlength=len(symbols))).tolist()
    places = {text: place for place, text in enumerate(sorted({symbols[one] for one in used}))}
    rank = np.zeros(len(symbols), dtype=np.int32)
    rank[used] = [places[symbols[one]] for one in used]
    return rank[names], places.get(METRIC_NAME, -1)
