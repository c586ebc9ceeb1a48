"""Requests to columns: what is encoded by the typed messages comes out again, whatever it is."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pulsar_bytes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receiver_requests import STALE, OneSeries, body, compressed, message_v1, message_v2, named, raw

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.bounds import Bounds
from analytics.remote_write.decode import Decoder, decode_request
from analytics.remote_write.errors import BoundError, DecodeError, TooLargeError
from analytics.remote_write.series import NullSeriesTable, SeriesTable
from analytics.remote_write.series_interner import SeriesInterner
from analytics.remote_write.series_validator import SeriesValidator
from analytics.remote_write.splitting import remove_series

VERSIONS = [1, 2]
TS = 1_760_000_000_000

Sample = tuple[tuple[tuple[str, str], ...], int, int, bytes]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def canonical(labels: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in labels if value))


def samples_of(decoder: Decoder) -> list[Sample]:
    columns = decoder.take_columns()
    rows = zip(
        columns.sample_series.tolist(),
        columns.sample_ts_ms.tolist(),
        columns.sample_start_ts_ms.tolist(),
        columns.sample_value.tolist(),
        strict=True,
    )
    return [(columns.series[number].labels, ts, start, bits(value)) for number, ts, start, value in rows]


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
labels = st.dictionaries(names, st.text(max_size=10), max_size=6).flatmap(
    lambda more: st.permutations([*more.items()] if more.get("__name__") else [*{**more, "__name__": "m"}.items()])
)
timestamps = st.integers(1, 253_402_300_799_999)
starts = st.just(0) | timestamps
values = st.floats(allow_nan=True) | st.sampled_from([0.0, -0.0, math.inf, -math.inf])
sample_lists = st.lists(st.tuples(timestamps, values, starts), max_size=4)
series = st.builds(OneSeries, labels=labels, samples=sample_lists, exemplars=st.integers(0, 2), kind=st.integers(0, 7))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=50, deadline=None)
@given(requests=st.lists(st.lists(series, max_size=30), max_size=3))
def test_decode_is_the_inverse_of_encode(version: int, requests: list[list[OneSeries]]) -> None:
    decoder = Decoder()
    expected: list[Sample] = []
    for request in requests:
        counts = decoder.add_body(body(version, request), version)
        assert counts.samples == sum(len(one.samples) for one in request)
        assert counts.exemplars == sum(one.exemplars for one in request)
        assert counts.faulty_series == 0
        for one in request:
            for ts, value, start in one.samples:
                if bits(value) != struct.pack("<Q", STALE):
                    expected.append((canonical(list(one.labels)), ts, start if version == 2 else 0, bits(value)))
    assert samples_of(decoder) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_series_has_one_number_over_all_requests(version: int) -> None:
    decoder = Decoder()
    decoder.add_body(body(version, [named("a", x="1"), named("b", x="1")]), version)
    first = decoder.take_columns()
    reordered = OneSeries([("x", "1"), ("empty", ""), ("__name__", "b")], [(TS, 2.0, 0)])
    decoder.add_body(body(version, [named("new"), reordered, named("a", x="1")]), version)
    second = decoder.take_columns()
    assert first.sample_series.tolist() == [0, 1]
    assert second.sample_series.tolist() == [2, 1, 0]
    assert [one.labels[0] for one in second.series] == [("__name__", "a"), ("__name__", "b"), ("__name__", "new")]
    assert decoder.series(2) == second.series[2:]
    assert decoder.take_columns().sample_series.size == 0


def test_both_versions_share_numbers() -> None:
    decoder = Decoder()
    for version in VERSIONS:
        decoder.add_body(body(version, [named("a", x="1")]), version)
    assert decoder.take_columns().sample_series.tolist() == [0, 0]


@pytest.mark.parametrize("metadata", [b"\x08", b"\x0b", b"\x08\x01" * 200_001], ids=["cut off", "a group", "too long"])
def test_metadata_that_cannot_be_read_loses_no_samples_that_the_receiver_accepts(metadata: bytes) -> None:
    message = message_v2([named("a", x="1")])
    one = message.timeseries.pop().SerializeToString() + pulsar_bytes.field(5, metadata)
    data = message.SerializeToString() + pulsar_bytes.field(5, one)
    assert decode_request(data, 2, SeriesValidator()).counts.samples == 1
    decoder = Decoder()
    assert decoder.add_body(compressed(data), 2).samples == 1
    columns = decoder.take_columns()
    assert (columns.sample_value.tolist(), [one.kind for one in columns.series]) == ([1.0], [None])


def test_kinds_come_from_2_0_metadata_and_the_last_word_counts() -> None:
    decoder = Decoder()
    every = [OneSeries([("__name__", f"m{kind}")], [(TS, 1.0, 0)], kind=kind) for kind in range(8)]
    decoder.add_body(body(2, every), 2)
    kinds = [one.kind for one in decoder.take_columns().series]
    assert kinds == [None, "counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset"]
    decoder.add_body(body(2, [OneSeries([("__name__", "m1")], [(TS, 1.0, 0)], kind=2), every[0]]), 2)
    decoder.add_body(body(2, [OneSeries([("__name__", "m1")], [(TS, 1.0, 0)], kind=99)]), 2)
    assert [one.kind for one in decoder.take_columns().series][:2] == [None, "gauge"]


@pytest.mark.parametrize("version", VERSIONS)
def test_stale_markers_are_dropped_and_counted_other_nans_are_not(version: int) -> None:
    stale, nan = (struct.unpack("<d", struct.pack("<Q", one))[0] for one in (STALE, 0x7FF8000000000001))
    decoder = Decoder()
    histogram = pb.Histogram(count_int=0, sum=stale, timestamp=TS)
    request = [named("a", (TS, stale, 0), (TS + 1, nan, 0)), OneSeries([("__name__", "h")], histograms=[histogram])]
    counts = decoder.add_body(body(version, request), version)
    assert (counts.samples, counts.histograms, counts.stale) == (2, 1, 2)
    columns = decoder.take_columns()
    assert columns.sample_ts_ms.tolist() == [TS + 1]
    assert columns.histograms == []
    assert columns.counts == counts


FAULTS = {
    "no name": ([("x", "1")], "there is no __name__ label"),
    "empty name": ([("__name__", "")], "there is no __name__ label"),
    "no labels": ([], "there is no __name__ label"),
    "twice": ([("__name__", "a"), ("x", "1"), ("x", "2")], "a label's name occurs twice"),
    "nameless": ([("__name__", "a"), ("", "1")], "a label has no name"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", FAULTS)
def test_a_series_with_impossible_labels_is_left_out_and_told(version: int, case: str) -> None:
    pairs, why = FAULTS[case]
    request = [named("good"), OneSeries(pairs, [(TS, 1.0, 0)] * 3, exemplars=1), named("too")]
    for interner in (SeriesInterner(SeriesTable()), SeriesInterner(NullSeriesTable()), SeriesValidator()):
        for _ in range(2):  # also when it is known already
            found = decode_request(raw(version, request), version, interner)
            assert found.faults == {1: why}
            assert (found.counts.samples, found.counts.exemplars, found.counts.faulty_series) == (2, 0, 1)
            assert found.series.size == 2
            interner.clear_caches()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ts", [0, -1, 253_402_300_800_000, 2**63 - 1, -(2**63)])
def test_a_timestamp_that_no_calendar_has(version: int, ts: int) -> None:
    request = [named("a", (ts, 1.0, 0), (TS, 1.0, 0)), named("b")]
    found = decode_request(raw(version, request), version, SeriesInterner(SeriesTable()))
    assert found.faults == {0: "a sample's timestamp is not between 1970 and 9999"}
    assert found.ts_ms.tolist() == [TS]


@pytest.mark.parametrize(("start", "fault"), [(-5, True), (253_402_300_800_000, True), (1, False), (0, False)])
def test_start_timestamps_count_in_2_0_only(start: int, fault: bool) -> None:
    request = [named("a", (TS, 1.0, start))]
    assert bool(decode_request(raw(2, request), 2, SeriesInterner(SeriesTable())).faults) is fault
    first = message_v1(request)
    first.timeseries[0].samples[0].start_timestamp = start
    found = decode_request(first.SerializeToString(), 1, SeriesInterner(SeriesTable()))
    assert found.faults == {}
    assert found.start_ts_ms.tolist() == [0]


def test_a_reference_to_no_symbol_and_half_a_label() -> None:
    message = message_v2([named("good", x="1") for _ in range(3)])
    message.timeseries[0].labels_refs[1] = 99
    message.timeseries[2].labels_refs.append(1)
    found = decode_request(message.SerializeToString(), 2, SeriesInterner(SeriesTable()))
    assert found.faults == {0: "it refers to a symbol that is not there", 2: "it has a label name without a value"}
    message = pb.RequestV2()
    message.timeseries.add(labels_refs=[0, 0]).samples.add(value=1, timestamp=TS)
    found = decode_request(message.SerializeToString(), 2, SeriesInterner(SeriesTable()))
    assert found.faults == {0: "it refers to a symbol that is not there"}


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def test_labels_that_do_not_stand_together() -> None:
    """Protobuf lets fields come in any order."""
    label = [pb.Label(name=name, value="v").SerializeToString() for name in ("__name__", "a", "b")]
    sample = pb.Sample(value=3, timestamp=TS).SerializeToString()
    one = field(1, label[0]) + field(2, sample) + field(1, label[1]) + field(7, b"unknown") + field(1, label[2])
    for copies in (1, 40):
        request = b"".join(field(1, one) for _ in range(copies))
        interner = SeriesInterner(SeriesTable())
        found = decode_request(request, 1, interner)
        assert interner.table.series()[0].labels == (("__name__", "v"), ("a", "v"), ("b", "v"))
        assert found.series.tolist() == [0] * copies


def test_references_that_are_not_packed_or_only_some() -> None:
    """Protobuf lets a list of numbers be written either way, and both."""
    symbols = b"".join(field(4, text.encode()) for text in ("", "__name__", "m", "a", "v"))
    sample = field(2, pb.Sample(value=3, timestamp=TS).SerializeToString())
    for refs in (
        b"\x08\x01\x08\x02\x08\x03\x08\x04",
        b"\x0a\x02\x01\x02\x08\x03\x08\x04",
        b"\x08\x01\x0a\x02\x02\x03\x08\x04",
    ):
        interner = SeriesInterner(SeriesTable())
        decode_request(symbols + field(5, refs + sample) + field(5, field(1, b"\x01\x02") + sample), 2, interner)
        assert [one.labels for one in interner.table.series()] == [
            (("__name__", "m"), ("a", "v")),
            (("__name__", "m"),),
        ]


def test_references_in_several_parts_belong_to_their_own_series() -> None:
    symbols = b"".join(field(4, text.encode()) for text in ("", "__name__", "m", "a", "v"))
    sample = field(2, pb.Sample(value=3, timestamp=TS).SerializeToString())
    two_parts = field(1, b"\x01\x02") + field(1, b"\x03\x04") + sample
    interner = SeriesInterner(SeriesTable())
    found = decode_request(symbols + field(5, two_parts) + field(5, sample), 2, interner)
    assert found.faults == {1: "there is no __name__ label"}
    assert interner.table.series()[0].labels == (("__name__", "m"), ("a", "v"))


@pytest.mark.parametrize("parts", [(b"\x01\x82", b"\x01\x02"), (b"\x81", b"\x01"), (b"\x01\x02\x83",)])
def test_a_reference_must_not_go_over_the_end_of_its_part(parts: tuple[bytes, ...]) -> None:
    symbols = b"".join(field(4, text.encode()) for text in ("", "__name__", "m"))
    series = b"".join(field(1, part) for part in parts)
    for request in (field(5, series), b"".join(field(5, field(1, part)) for part in parts)):
        with pytest.raises(DecodeError):
            decode_request(symbols + request, 2, SeriesInterner(SeriesTable()))


@pytest.mark.parametrize("version", VERSIONS)
def test_text_that_is_not_utf_8(version: int) -> None:
    data = raw(version, [named("good"), named("bad", x="\N{EURO SIGN}")]).replace(
        "\N{EURO SIGN}".encode(), b"\xff\xfe\xfd"
    )
    if version == 2:
        with pytest.raises(DecodeError, match=r"no remote-write 2\.0 request"):
            decode_request(data, 2, SeriesInterner(SeriesTable()))
    else:
        assert decode_request(data, 1, SeriesInterner(SeriesTable())).faults == {
            1: "its labels are no labels, or not UTF-8"
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_cut_anywhere_raises_or_is_shorter_and_never_anything_else(version: int) -> None:
    data = raw(version, [named(f"m{number}", x="1") for number in range(20)])
    whole = decode_request(data, version, SeriesInterner(SeriesTable()))
    for length in range(len(data)):
        try:
            found = decode_request(data[:length], version, SeriesInterner(SeriesTable()))
        except DecodeError:
            continue
        assert found.series.size <= whole.series.size


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), version=st.sampled_from(VERSIONS), number=st.sampled_from([1, 5]))
def test_rubbish_raises_decode_errors_only(data: bytes, version: int, number: int) -> None:
    decoder = Decoder()
    for one in (compressed(data), compressed(field(number, data[:127])), data):
        try:
            decoder.add_body(one, version)
        except DecodeError:
            continue


def test_the_other_versions_body_is_not_taken_for_an_empty_request() -> None:
    for version in VERSIONS:
        with pytest.raises(DecodeError, match="is the Content-Type right"):
            decode_request(raw(3 - version, [named("a")]), version, SeriesInterner(SeriesTable()))
    empty = decode_request(b"", 1, SeriesInterner(SeriesTable()))
    assert empty.counts.samples == 0
    metadata = pb.WriteRequest(metadata=[pb.MetricMetadata(metric_family_name="m")]).SerializeToString()
    assert decode_request(metadata, 1, SeriesInterner(SeriesTable())).series.size == 0


def test_bounds() -> None:
    data = body(1, [named("a"), named("b")])
    with pytest.raises(TooLargeError, match="at most 10 are taken"):
        Decoder(bytes_max=10).add_body(data, 1)
    with pytest.raises(BoundError, match=r"more than 1 series in a request \(limits.max_series\)"):
        Decoder(bounds=Bounds(series=1)).add_body(data, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_without_series_leaves_all_else_as_it_was(version: int) -> None:
    request = [named(name) for name in "abcd"]
    rest = remove_series(raw(version, request), version, {0, 2})
    interner = SeriesInterner(SeriesTable())
    decode_request(rest, version, interner)
    assert [one.labels for one in interner.table.series()] == [(("__name__", "b"),), (("__name__", "d"),)]


# ---- native histograms


def histogram(**values: object) -> pb.Histogram:
    return pb.Histogram(timestamp=TS, **values)  # type: ignore[arg-type]


def span(offset: int, length: int) -> pb.BucketSpan:
    return pb.BucketSpan(offset=offset, length=length)


WHOLE = {
    "count_int": 17,
    "sum": 3.5,
    "schema": 2,
    "zero_threshold": 0.001,
    "zero_count_int": 2,
    "positive_spans": [span(-3, 2), span(0, 0), span(2, 1)],
    "positive_deltas": [1, 2, 4],
    "negative_spans": [span(1, 1)],
    "negative_deltas": [4],
    "start_timestamp": 5,
}
FRACTIONAL = {
    "count_float": 2.5,
    "sum": 1.0,
    "schema": -4,
    "zero_count_float": 0.5,
    "positive_spans": [span(0, 2)],
    "positive_counts": [0.5, 1.5],
}
CUSTOM = {
    "count_int": 6,
    "schema": -53,
    "sum": 1.0,
    "positive_spans": [span(0, 1), span(1, 2)],
    "positive_deltas": [1, 1, 1],
    "custom_values": [-1.0, 0.5, 2.0],
}


@pytest.mark.parametrize("version", VERSIONS)
def test_histograms_are_resolved(version: int) -> None:
    decoder = Decoder()
    made = [histogram(**WHOLE), histogram(**FRACTIONAL), histogram(**CUSTOM)]
    counts = decoder.add_body(body(version, [named("x"), OneSeries([("__name__", "h")], histograms=made)]), version)
    assert counts.histograms == 3
    columns = decoder.take_columns()
    whole, fractional, custom = columns.histograms
    assert columns.series[whole.series].labels == (("__name__", "h"),)
    assert whole.ts_ms == TS
    assert whole.start_ts_ms == (5 if version == 2 else 0)
    assert (whole.count, whole.sum, whole.schema, whole.zero_threshold, whole.zero_count) == (17, 3.5, 2, 0.001, 2)
    assert (whole.positive_offsets, whole.positive_counts) == ([-3, -2, 1], [1, 3, 7])
    assert (whole.negative_offsets, whole.negative_counts) == ([1], [4])
    assert whole.custom_bounds == []
    assert (fractional.count, fractional.zero_count, fractional.schema) == (2.5, 0.5, -4)
    assert (fractional.positive_offsets, fractional.positive_counts) == ([0, 1], [0.5, 1.5])
    assert (custom.positive_offsets, custom.positive_counts) == ([0, 2, 3], [1, 2, 3])
    assert custom.custom_bounds == [-1, 0.5, 2]


BAD = {
    "more buckets than spans": {**WHOLE, "positive_deltas": [1, 2, 4, 0]},
    "spans without end": {**FRACTIONAL, "positive_spans": [span(0, 2**32 - 1)]},
    "overlapping spans": {**WHOLE, "positive_spans": [span(3, 2), span(-1, 1)]},
    "a negative bucket": {**WHOLE, "positive_deltas": [1, -2, 4]},
    "a negative count": {**FRACTIONAL, "count_float": -1.0},
    "a count that does not add up": {**WHOLE, "count_int": 18},
    "an unknown schema": {**WHOLE, "schema": 9},
    "an unknown low schema": {**WHOLE, "schema": -5},
    "both kinds of counts": {**WHOLE, "positive_counts": [1.0]},
    "both kinds of counts, fractional": {**FRACTIONAL, "negative_deltas": [1]},
    "bounds with an exponential schema": {**WHOLE, "custom_values": [1.0]},
    "bounds that do not ascend": {**CUSTOM, "custom_values": [1.0, 1.0, 2.0]},
    "a bound that is no number": {**CUSTOM, "custom_values": [1.0, math.nan, 2.0]},
    "an infinite last bound": {**CUSTOM, "custom_values": [1.0, 2.0, math.inf]},
    "a bucket outside the bounds": {**CUSTOM, "custom_values": [1.0, 2.0]},
    "a bucket before the bounds": {**CUSTOM, "positive_spans": [span(-1, 1), span(1, 2)]},
    "custom and negative buckets": {**CUSTOM, "negative_spans": [span(0, 1)], "negative_deltas": [0]},
    "custom and a zero bucket": {**CUSTOM, "zero_threshold": 1.0},
    "an index beyond 32 bits": {**WHOLE, "positive_spans": [span(2**31 - 1, 2), span(0, 1)]},
    "no timestamp": {**WHOLE, "timestamp": 0},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", BAD)
def test_a_histogram_that_cannot_be_is_left_out_with_its_series(version: int, case: str) -> None:
    bad = pb.Histogram(**{"timestamp": TS, **BAD[case]})  # type: ignore[arg-type]
    request = [OneSeries([("__name__", "h")], [(TS, 1.0, 0)], histograms=[bad, histogram(**WHOLE)]), named("good")]
    found = decode_request(raw(version, request), version, SeriesInterner(SeriesTable()))
    assert list(found.faults) == [0]
    assert found.faults[0].startswith("a histogram")
    assert (found.counts.samples, found.counts.histograms, found.histograms) == (1, 0, [])


def test_observations_that_are_no_numbers_are_in_no_bucket() -> None:
    made = histogram(**{**WHOLE, "sum": math.nan, "count_int": 20})
    found = decode_request(
        raw(2, [OneSeries([("__name__", "h")], histograms=[made])]), 2, SeriesInterner(SeriesTable())
    )
    assert found.faults == {}
    assert len(found.histograms) == 1


def test_a_broken_histogram_message() -> None:
    one = field(1, pb.Label(name="__name__", value="h").SerializeToString()) + field(4, b"\x19\x00")
    found = decode_request(field(1, one), 1, SeriesInterner(SeriesTable()))
    assert found.faults == {0: "a histogram: it is no histogram message"}


# ---- shape does not matter


@pytest.mark.parametrize("version", VERSIONS)
def test_few_long_series_and_many_short_ones_together(version: int) -> None:
    """The last messages of a batch are read another way than the first."""
    counts = [0, 1, 1, 1, 500, *[2] * 30, 3]
    request = [
        OneSeries([("__name__", f"m{number}")], [(TS + at, at * 1.5, TS) for at in range(count)])
        for number, count in enumerate(counts)
    ]
    found = decode_request(raw(version, request), version, SeriesInterner(SeriesTable()))
    expected = list(itertools.chain.from_iterable([number] * count for number, count in enumerate(counts)))
    assert found.series.tolist() == expected
    assert found.ts_ms.tolist() == [TS + at for count in counts for at in range(count)]
    assert np.array_equal(found.value, [at * 1.5 for count in counts for at in range(count)])
