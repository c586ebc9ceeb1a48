"""What one request may hold: each bound refuses what is one beyond it, says so, and lets what is at it through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio
from receiver_requests import CONTENT_TYPES, OneSeries, compressed, named, raw

from analytics.receiver import request_parser
from analytics.receiver.config import Limits
from analytics.receiver.fair_lock import FairLock, LockTimeoutError
from analytics.receiver.http_server import BodyBudget, RequestHead, Response
from analytics.receiver.metrics import Metrics
from analytics.receiver.write_endpoint import PATH, WriteEndpoint
from analytics.remote_write import bounds as bounds_module
from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write import splitting
from analytics.remote_write.bounds import CEILING, Bounds
from analytics.remote_write.decode import Decoder, decode_request
from analytics.remote_write.errors import BoundError, BoundFault, DecodeError
from analytics.remote_write.protobuf_fields import padded_buffer
from analytics.remote_write.series import SeriesTable
from analytics.remote_write.series_interner import SeriesInterner
from proxy.common.networks import network_of

TS = 1_760_000_000_000
VERSIONS = [1, 2]


def histogram(buckets: int, *, spans: int = 1) -> pb.Histogram:
    made = pb.Histogram(sum=1, timestamp=TS, positive_deltas=[0] * buckets)
    for place in range(spans):
        made.positive_spans.add(offset=0, length=0 if place else buckets)
    return made


def with_histograms(*histograms: pb.Histogram) -> OneSeries:
    return OneSeries([("__name__", "h")], histograms=histograms)


def long_label(length: int) -> list[OneSeries]:
    return [OneSeries([("__name__", "m"), ("x", "y" * length)], [(TS, 1.0, 0)])]


def many_labels(count: int) -> list[OneSeries]:
    return [OneSeries([("__name__", "m"), *((f"l{one:03}", "v") for one in range(count - 1))], [(TS, 1.0, 0)])]


CUSTOM = pb.Histogram(schema=-53, sum=1, timestamp=TS, custom_values=[float(one) for one in range(21)])
FRACTIONAL = pb.Histogram(count_float=0, sum=1, timestamp=TS, negative_counts=[0.0] * 21)
FRACTIONAL.negative_spans.add(length=21)

OF_A_REQUEST: list[tuple[str, int, Callable[[int], list[OneSeries]]]] = [
    ("series", 5, lambda count: [named(f"m{one}") for one in range(count)]),
    ("histograms", 6, lambda count: [with_histograms(histogram(1)), with_histograms(*[histogram(0)] * (count - 1))]),
    ("buckets", 30, lambda count: [with_histograms(histogram(9)), with_histograms(*map(histogram, (9, count - 18)))]),
    ("series_fields", 8, lambda count: [named("m", *[(TS, 1.0, 0)] * (count - 1))]),
    ("series_fields", 8, lambda count: [OneSeries([("__name__", "m")], exemplars=count - 1)] * 20),
]  # fmt: skip
OF_A_SERIES: list[tuple[str, Bounds, Sequence[OneSeries]]] = [
    ("labels_per_series", Bounds(labels_per_series=20), many_labels(21)),
    ("label_bytes_per_series", Bounds(label_bytes_per_series=500), long_label(500)),
    ("buckets_per_histogram", Bounds(buckets_per_histogram=20), [with_histograms(histogram(21))]),
    ("buckets_per_histogram", Bounds(buckets_per_histogram=20), [with_histograms(histogram(3, spans=21))]),
    ("buckets_per_histogram", Bounds(buckets_per_histogram=20), [with_histograms(CUSTOM)]),
    ("buckets_per_histogram", Bounds(buckets_per_histogram=20), [with_histograms(FRACTIONAL)]),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("bound", "most", "make"), OF_A_REQUEST)
def test_bounds_of_a_request(version: int, bound: str, most: int, make: Callable[[int], list[OneSeries]]) -> None:
    bounds = Bounds(**{bound: most})
    assert not decode_request(raw(version, make(most)), version, SeriesInterner(SeriesTable(), bounds)).faults
    with pytest.raises(BoundError, match=rf"more than {most} .*\(limits.max_{bound}\)") as raised:
        decode_request(raw(version, make(most + 1)), version, SeriesInterner(SeriesTable(), bounds))
    assert raised.value.bound == bound


def test_symbols_and_written_out_labels_are_bounded() -> None:
    request = raw(2, [OneSeries([("__name__", "m" * 50), ("l", str(one % 2))], [(TS, 1.0, 0)]) for one in range(10)])
    written_out = 10 * (len("__name__") + 50 + 2)
    for bounds in (Bounds(symbols=6), Bounds(label_bytes=written_out)):  # the empty symbol is one, too
        assert not decode_request(request, 2, SeriesInterner(SeriesTable(), bounds)).faults
    for bounds, name in ((Bounds(symbols=5), "symbols"), (Bounds(label_bytes=written_out - 1), "label_bytes")):
        with pytest.raises(BoundError, match=rf"\(limits.max_{name}\)"):
            decode_request(request, 2, SeriesInterner(SeriesTable(), bounds))


def test_metadata_of_1_0_is_bounded_as_fields_are() -> None:
    request = pb.WriteRequest(metadata=[pb.MetricMetadata()] * 11).SerializeToString()
    decode_request(request, 1, SeriesInterner(SeriesTable(), Bounds(fields=11)))
    with pytest.raises(BoundError, match="max_fields"):
        decode_request(request, 1, SeriesInterner(SeriesTable(), Bounds(fields=10)))


def test_references_are_bounded_before_there_is_a_number_for_each() -> None:
    """Far too many of them by their bytes alone; a few too many by their count."""
    for count in (200, 5000):
        request = pb.RequestV2(symbols=["", "__name__", "m"])
        request.timeseries.add(labels_refs=[1, 2] * (count // 2))
        with pytest.raises(BoundError, match="max_fields"):
            decode_request(request.SerializeToString(), 2, SeriesInterner(SeriesTable(), Bounds(fields=count)))
        found = decode_request(request.SerializeToString(), 2, SeriesInterner(SeriesTable(), Bounds(fields=count + 1)))
        assert found.faults


def test_far_too_many_references_are_not_even_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analytics.remote_write.series_interner.join_spans", None)
    request = pb.RequestV2(symbols=["", "__name__", "m"])
    request.timeseries.add(labels_refs=[1, 2] * 100)
    with pytest.raises(BoundError, match="max_fields"):
        decode_request(request.SerializeToString(), 2, SeriesInterner(SeriesTable(), Bounds(fields=50)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [SeriesInterner, request_parser.SeriesValidator])
@pytest.mark.parametrize(("bound", "bounds", "bad"), OF_A_SERIES)
def test_bounds_of_a_series_leave_out_that_series(
    version: int, kind: type[SeriesInterner], bound: str, bounds: Bounds, bad: Sequence[OneSeries]
) -> None:
    series = [named("a"), *bad, named("b")]
    table = SeriesTable()
    interner = SeriesInterner(table, bounds) if kind is SeriesInterner else request_parser.SeriesValidator(bounds)
    found = decode_request(raw(version, series), version, interner)
    assert list(found.faults) == [1]
    assert isinstance(found.faults[1], BoundFault)
    assert found.faults[1].bound == bound
    assert f"(limits.max_{bound})" in found.faults[1]
    assert found.counts.samples == 2
    larger = Bounds(**{bound: getattr(bounds, bound) + 10})
    interner = (
        SeriesInterner(SeriesTable(), larger) if kind is SeriesInterner else request_parser.SeriesValidator(larger)
    )
    assert not decode_request(raw(version, series), version, interner).faults


def test_a_histogram_far_too_large_is_not_even_parsed() -> None:
    """Its message is no histogram, which is not detected."""
    bounds = Bounds(buckets_per_histogram=1)
    data = b"\xff" * 400
    request = pb.SplitRequest(timeseries=[b"\x0a\x0d\x0a\x08__name__\x12\x01m" + b"\x22\x90\x03" + data])
    [fault] = decode_request(request.SerializeToString(), 1, SeriesInterner(SeriesTable(), bounds)).faults.values()
    assert "limits.max_buckets_per_histogram" in fault


def test_of_a_series_that_is_a_fault_no_other_histogram_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decodings = []
    real = request_parser.decode_request.__globals__["decode_histogram"]
    monkeypatch.setitem(
        request_parser.decode_request.__globals__,
        "decode_histogram",
        lambda *given: decodings.append(1) or real(*given),
    )
    found = decode_request(raw(1, [with_histograms(*[pb.Histogram()] * 1000)]), 1, SeriesInterner(SeriesTable()))
    assert list(found.faults) == [0]
    assert len(decodings) == 1


def test_series_and_symbols_of_a_large_body_are_counted_before_the_parser_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parser allocates for each of them: it must not be asked."""
    monkeypatch.setattr(splitting, "COUNT_BYTES_MIN", 10)
    for name in ("SplitRequest", "SplitRequestV2"):
        monkeypatch.setattr(splitting, name, None)
    for version, data, bound in ((1, b"\x0a\x00", "series"), (2, b"\x2a\x00", "series"), (2, b"\x22\x00", "symbols")):
        with pytest.raises(BoundError, match=f"max_{bound}"):
            splitting.split_request(data * 11, version, Bounds(series=10, symbols=10))
    with pytest.raises(BoundError, match="max_fields"):
        splitting.split_request(b"\x78\x01" * 11, 1, Bounds(fields=10))
    with pytest.raises(DecodeError, match="groups"):
        splitting.split_request(b"\x7b" * 11, 1, Bounds())


def test_no_configuration_exceeds_what_ingest_reads() -> None:
    highest = Limits.__annotations__
    assert (
        set(vars(Bounds()))
        == set(bounds_module.COUNTED)
        == {name.removeprefix("max_") for name in highest} & set(bounds_module.COUNTED)
    )
    assert Bounds().limited_by(CEILING) == Bounds()
    assert Limits().bounds() == Bounds()
    body = compressed(raw(1, many_labels(300)))
    decoder = Decoder()
    assert decoder.add_body(body, 1).samples == 1


def test_a_column_is_read_a_little_beyond_its_end() -> None:
    blob, data = padded_buffer(b"ab", b"c")
    assert (blob[:3], data.size) == (b"abc", 13)


# ---- the receiver


class Commit:
    def __init__(self) -> None:
        self.records: list[bytes] = []

    async def commit_record(self, record: bytes) -> None:
        self.records.append(record)


class Case:
    def __init__(self, **limits: int) -> None:
        self.metrics = Metrics()
        self.commit = Commit()
        self.endpoint = WriteEndpoint(self.commit, None, Limits(**limits), self.metrics)  # type: ignore[arg-type]

    async def post(self, series: Sequence[OneSeries], version: int = 1, address: str = "10.0.0.1") -> Response:
        headers = {b"content-type": CONTENT_TYPES[version].encode(), b"content-encoding": b"snappy"}
        head = RequestHead("POST", PATH, headers, address)
        assert await self.endpoint.check_head(head) is None
        return await self.endpoint.respond(head, compressed(raw(version, series)))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"pulsar_proxy_analytics_receiver_{name}", labels) or 0.0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("inline_bytes", [0, 512 * 1024])
async def test_a_request_beyond_a_bound_is_answered_400_with_the_key_and_counted(
    version: int, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_parser, "INLINE_BYTES_MAX", inline_bytes)
    case = Case(max_series=2)
    response = await case.post([named("a"), named("b"), named("c")], version)
    assert response.status == 400
    assert response.body == "more than 2 series in a request (limits.max_series)"
    assert "Retry-After" not in dict(response.headers)
    assert case.metric("rejected_requests_total", reason="beyond_bound") == 1
    assert case.metric("beyond_bounds_total", bound="series") == 1
    assert not case.commit.records
    assert (await case.post([named("a"), named("b")], version)).status == 204
    assert case.metric("large_requests_total") == (2 if inline_bytes == 0 else 1)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_series_beyond_a_bound_is_left_out_and_counted(version: int) -> None:
    case = Case(max_buckets_per_histogram=20, max_labels_per_series=4)
    series = [named("a"), with_histograms(histogram(21)), *many_labels(5), *many_labels(6), named("b")]
    response = await case.post(series, version)
    assert response.status == 400
    assert "3 series cannot be accepted, 2 samples" in str(response.body)
    assert "series 1: a histogram: more than 20 buckets, custom bounds or spans in a histogram" in str(response.body)
    assert "series 2: more than 4 labels in a series (limits.max_labels_per_series)" in str(response.body)
    assert case.metric("beyond_bounds_total", bound="buckets_per_histogram") == 1
    assert case.metric("beyond_bounds_total", bound="labels_per_series") == 2
    assert case.metric("rejected_requests_total", reason="partly_faulty") == 1
    assert len(case.commit.records) == 1


async def test_a_request_too_large_for_here_goes_to_the_thread_with_the_configurations_bounds() -> None:
    case = Case()
    assert (await case.post([named("a")])).status == 204
    assert case.metric("large_requests_total") == 0
    assert (
        await case.post([with_histograms(*[histogram(1)] * (request_parser.INLINE_BOUNDS.histograms + 1))])
    ).status == 204
    assert (
        await case.post([named("a", *[(TS, 1.0, 0)] * (request_parser.INLINE_BOUNDS.series_fields + 1))])
    ).status == 204
    assert (await case.post([named(f"m{one}") for one in range(request_parser.INLINE_BOUNDS.series + 1)])).status == 204
    assert case.metric("large_requests_total") == 3


async def test_while_a_large_request_is_decoded_small_ones_are_answered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """And another large one waits, until it is told to come again."""
    began, proceed = trio.Event(), trio.Event()

    async def held(work: Callable[..., object], *given: object) -> object:
        began.set()
        await proceed.wait()
        return work(*given)

    monkeypatch.setattr("analytics.receiver.request_parser.trio.to_thread.run_sync", held)
    case = Case(decode_timeout_ms=5_000)
    large = [named("a", *[(TS, 1.0, 0)] * 200)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.post, large)
        await began.wait()
        assert (await case.post([named("a")])).status == 204
        response = await case.post(large, address="10.0.0.2")
        assert (response.status, dict(response.headers)["Retry-After"]) == (503, "5")
        assert case.metric("rejected_requests_total", reason="busy") == 1
        proceed.set()
    assert len(case.commit.records) == 2
    assert (await case.post(large)).status == 204


async def test_senders_take_turns(autojump_clock: trio.testing.MockClock) -> None:
    """However many requests one of them has waiting before the others come."""
    turns = FairLock(1000.0)
    order: list[str] = []

    async def one(sender: str) -> None:
        async with turns.hold_for(sender):
            order.append(sender)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for sender in ["many"] * 20 + ["few"] * 2:
            nursery.start_soon(one, sender)
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(order) == ["few"] * 2 + ["many"] * 20
    places = [place for place, sender in enumerate(order) if sender == "few"]
    assert places[0] <= 2
    assert places[1] <= 4


async def test_a_turn_that_does_not_come_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    turns = FairLock(5.0)
    has_it, done = trio.Event(), trio.Event()

    async def hold() -> None:
        async with turns.hold_for("a"):
            has_it.set()
            await done.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await has_it.wait()
        for sender in ("a", "b"):
            before = trio.current_time()
            with pytest.raises(LockTimeoutError):
                async with turns.hold_for(sender):
                    pass
            assert trio.current_time() - before == 5
        done.set()
    for sender in ("a", "b"):
        async with turns.hold_for(sender):
            pass
    assert not turns._queues


def test_bytes_held_are_bounded_in_all_and_for_each_sender() -> None:
    bodies = BodyBudget(100)
    assert bodies.reserve_bytes("a", 50)
    assert not bodies.reserve_bytes("a", 1)
    assert bodies.reserve_bytes("b", 30)
    assert bodies.reserve_bytes("c", 20)
    assert not bodies.reserve_bytes("d", 1)
    assert bodies.held_bytes == 100
    bodies.release_bytes("a", 50)
    assert bodies.reserve_bytes("d", 50)
    for sender, size in (("b", 30), ("c", 20), ("d", 50)):
        bodies.release_bytes(sender, size)
    assert (bodies.held_bytes, dict(bodies._by_sender)) == (0, {})


@pytest.mark.parametrize(
    ("address", "sender"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_an_addresses_network(address: str, sender: str) -> None:
    assert network_of(address) == sender
