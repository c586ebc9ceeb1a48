"""The receiver's check of all labels together: it says what the Interner says, whatever is sent."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from receiver_requests import OneSeries, named, raw

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.decode import decode_request
from analytics.remote_write.series import SeriesTable
from analytics.remote_write.series_interner import SeriesInterner
from analytics.remote_write.series_validator import SeriesValidator

SYMBOLS = ["", "__name__", "m", "a", "b", "a", "Z", "__name__"]  # two of them stand there twice
EMPTY, NAME, M, A, B, A_AGAIN, Z, NAME_AGAIN = range(len(SYMBOLS))


def request(series: list[list[int]]) -> bytes:
    message = pb.RequestV2(symbols=SYMBOLS)
    for references in series:
        message.timeseries.add(labels_refs=references).samples.add(value=1, timestamp=1)
    return message.SerializeToString()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, len(SYMBOLS)), max_size=8), min_size=1, max_size=5))
@example([[NAME, M, A, B], [NAME, M]])
@example([[NAME, M], [NAME, M, A]])  # half a label
@example([[NAME, M, A], [NAME, M, A]])  # together even, each odd
@example([[NAME, M], [NAME, len(SYMBOLS)]])  # no such symbol
@example([[NAME, M, len(SYMBOLS), B]])
@example([[EMPTY, M, NAME, M]])  # a label without a name
@example([[NAME, EMPTY]])  # no value is no label
@example([[NAME, M, A, EMPTY]])
@example([[NAME, M, A, M, A_AGAIN, B]])  # twice, by two symbols
@example([[NAME, M, NAME_AGAIN, B]])
@example([[NAME, M, NAME, M], [A, B]])  # as many metric names as series
@example([[A, B], [NAME, M]])
@example([[], [NAME, M]])
@example([[NAME, M, Z, B]])  # not in order, and nothing is wrong with it
@example([[Z, M, NAME, M, A, B], [NAME_AGAIN, M, A_AGAIN, B]])
@example([[NAME, M], [NAME, M], []])
def test_faults_are_those_of_the_interner(series: list[list[int]]) -> None:
    data, checker = request(series), SeriesValidator()
    expected = decode_request(data, 2, SeriesInterner(SeriesTable()))
    for _ in range(2):
        found = decode_request(data, 2, checker)
        assert found.faults == expected.faults
        assert found.counts == expected.counts
        assert found.series.tolist() == [0] * found.counts.samples


def test_series_as_the_specification_wants_them_leave_nothing_behind() -> None:
    checker = SeriesValidator()
    plain = [named("a", x="1"), named("b", x="1", y="2"), OneSeries([("A", "1"), ("__name__", "c")], [(1, 1.0, 0)])]
    assert decode_request(raw(2, plain), 2, checker).faults == {}
    assert len(checker) == 0
    unsorted = OneSeries([("x", "1"), ("__name__", "a")], [(1, 1.0, 0)])
    assert decode_request(raw(2, [*plain, unsorted]), 2, checker).faults == {}
    assert len(checker) > 0
