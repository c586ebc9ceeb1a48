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

from analytics.remote_write.interning import Interner, label_references
from analytics.remote_write.series import METRIC_NAME, NoSeriesTable
from analytics.remote_write.wire import Bytes, Fields, Integers


class Checker(Interner):
    """An Interner for which every good series is number 0."""

    def __init__(self) -> None:
        super().__init__(NoSeriesTable())

    def numbers_v2(self, data: Bytes, found: Fields, symbols: Sequence[str]) -> Integers:
        """0 for a good series; below zero for a fault."""
        if _are_as_specified(*label_references(data, found), symbols):
            return np.zeros(found.count, dtype=np.int64)
        return super().numbers_v2(data, found, symbols)


def _are_as_specified(references: npt.NDArray[np.int32], behind: Integers, symbols: Sequence[str]) -> bool:
    """Whether all series have pairs of symbols that are there and not empty, in ascending order, with a metric name.

    behind: where the references of each series end.
    """
    if not references.size or (behind & 1).any() or int(references.view(np.uint32).max()) >= len(symbols):
        return False
    if not np.fromiter(map(bool, symbols), dtype=np.bool_, count=len(symbols))[references].all():
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
