"""What is decided about one write request: which answer, which headers, what is committed."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from receiver_requests import CONTENT_TYPES, OneSeries, body, compressed, message_v1, named, raw

from analytics.receiver import request_parser
from analytics.receiver.config import Limits
from analytics.receiver.group_commit import NotCommittedError
from analytics.receiver.http_server import RequestHead, Response
from analytics.receiver.metrics import Metrics
from analytics.receiver.write_endpoint import PATH, WriteEndpoint
from analytics.remote_write.decode import Decoder
from analytics.spool.records import RECORD_HEADER_BYTES
from proxy.common.bearer_tokens import token_digest

VERSIONS = [1, 2]
TS = 1_760_000_000_000
TOKEN = b"a-token-of-good-length"


class FakeCommit:
    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.error: NotCommittedError | None = None

    async def commit_record(self, record: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)

    def committed(self, version: int) -> list[tuple[str, list[float]]]:
        decoder = Decoder()
        for record in self.records:
            decoder.add_body(record[RECORD_HEADER_BYTES:], version)
        columns = decoder.take_columns()
        return [
            (dict(one.labels)["__name__"], columns.sample_value[columns.sample_series == number].tolist())
            for number, one in enumerate(columns.series)
        ]


class FakeTokens:
    async def current_value(self) -> tuple[bytes, ...]:
        return (token_digest(b"another-token-entirely"), token_digest(TOKEN))


class Case:
    def __init__(self, *, tokens: bool = False, **limits: int) -> None:
        self.commit = FakeCommit()
        self.metrics = Metrics()
        self.now = 100.0
        self.endpoint = WriteEndpoint(
            self.commit,  # type: ignore[arg-type]
            FakeTokens() if tokens else None,  # type: ignore[arg-type]
            Limits(**limits),
            self.metrics,
            lambda: self.now,
        )

    async def post(self, data: bytes, version: int) -> Response:
        asked = head(version)
        assert await self.endpoint.check_head(asked) is None
        return await self.endpoint.respond(asked, data)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"pulsar_proxy_analytics_receiver_{name}", labels) or 0.0


def head(version: int = 1, method: str = "POST", path: str = PATH, **headers: str) -> RequestHead:
    given = {"content-type": CONTENT_TYPES[version], "content-encoding": "snappy"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead(method, path, {name.encode(): value.encode() for name, value in given.items()})


def written(response: Response) -> tuple[int, ...]:
    headers = dict(response.headers)
    names = ("Samples", "Histograms", "Exemplars")
    return tuple(int(headers[f"X-Prometheus-Remote-Write-{name}-Written"]) for name in names)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_good_request_is_committed_as_it_came(version: int) -> None:
    case = Case()
    series = [named("a", (TS, 1.0, 0), (TS + 1, 2.0, 0)), OneSeries([("__name__", "b")], [(TS, 3.0, 0)], exemplars=2)]
    data = body(version, series)
    response = await case.post(data, version)
    assert (response.status, response.body) == (204, "")
    assert [record[RECORD_HEADER_BYTES:] for record in case.commit.records] == [data]
    assert case.metric("samples_total", version=str(version)) == 3
    assert case.metric("exemplars_total", version=str(version)) == 2
    assert case.metric("compressed_bytes_total", version=str(version)) == len(data)
    assert case.metric("decompressed_bytes_total", version=str(version)) == len(raw(version, series))
    assert case.metric("requests_total", version=str(version), code="204") == 1
    if version == 2:
        assert written(response) == (3, 0, 2)
    else:
        assert response.headers == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_of_a_partly_faulty_request_the_rest_is_committed_and_the_answer_is_400(version: int) -> None:
    case = Case()
    series = [named("a"), OneSeries([("secret", "value")], [(TS, 9.0, 0)]), named("b")]
    response = await case.post(body(version, series), version)
    assert response.status == 400
    assert "1 series cannot be accepted, 2 samples" in str(response.body)
    assert "series 1: there is no __name__ label" in str(response.body)
    assert "secret" not in str(response.body)
    assert case.commit.committed(version) == [("a", [1.0]), ("b", [1.0])]
    assert case.metric("faulty_series_total") == 1
    assert case.metric("rejected_requests_total", reason="partly_faulty") == 1
    assert case.metric("samples_total", version=str(version)) == 2
    if version == 2:
        assert written(response) == (2, 0, 0)


@pytest.mark.parametrize("version", VERSIONS)
async def test_of_a_request_with_nothing_good_nothing_is_committed(version: int) -> None:
    case = Case()
    response = await case.post(body(version, [OneSeries([("x", "1")], [(TS, 1.0, 0)])]), version)
    assert response.status == 400
    assert case.commit.records == []
    assert case.metric("rejected_requests_total", reason="faulty") == 1
    if version == 2:
        assert written(response) == (0, 0, 0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("data", "status"),
    [(b"no snappy at all", 400), (compressed(b"\xff\xff"), 400), (compressed(bytes(2000)), 413), (b"", 400)],
)
async def test_a_body_that_can_never_be_accepted(version: int, data: bytes, status: int) -> None:
    case = Case(max_decompressed_bytes=1000)
    response = await case.post(data, version)
    assert response.status == status
    assert case.commit.records == []
    assert "Retry-After" not in dict(response.headers)
    if version == 2:
        assert written(response) == (0, 0, 0)


async def test_metadata_alone_is_committed_too() -> None:
    """What was answered with success is on the disk, whatever it is."""
    case = Case()
    message = message_v1([])
    message.metadata.add(metric_family_name="m", type=1)
    response = await case.post(compressed(message.SerializeToString()), 1)
    assert response.status == 204
    assert len(case.commit.records) == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("reason", "retry_after"), [("slow", "5"), ("full", "30"), ("failed", "30")])
async def test_a_write_that_is_not_on_the_disk_is_never_answered_with_success(
    version: int, reason: str, retry_after: str
) -> None:
    case = Case()
    case.commit.error = NotCommittedError(reason, "/secret/path: No space left on device")
    response = await case.post(body(version, [named("a")]), version)
    assert response.status == 503
    assert dict(response.headers)["Retry-After"] == retry_after
    assert "/secret/path" not in str(response.body)
    assert case.metric("samples_total", version=str(version)) == 0
    assert case.metric("rejected_requests_total", reason=reason) == 1
    if version == 2:
        assert written(response) == (0, 0, 0)


@pytest.mark.parametrize("limit", ["max_samples_per_second", "max_bytes_per_second"])
async def test_beyond_the_rate_senders_wait(limit: str) -> None:
    data = body(2, [named("a", *[(TS + at, 1.0, 0) for at in range(250)])])
    rate = 100 if limit == "max_samples_per_second" else len(data) * 2 // 5
    case = Case(**{limit: rate})
    assert (await case.post(data, 2)).status == 204  # overdrawn by one and a half seconds
    response = await case.post(data, 2)
    assert (response.status, dict(response.headers)["Retry-After"]) == (429, "2")
    assert written(response) == (0, 0, 0)
    case.now += 1.4
    assert (await case.post(data, 2)).status == 429
    case.now += 0.2
    assert (await case.post(data, 2)).status == 204
    assert len(case.commit.records) == 2
    assert case.metric("rejected_requests_total", reason="rate") == 2


async def test_without_a_limit_no_request_waits() -> None:
    case = Case()
    data = body(1, [named("a", *[(TS + at, 1.0, 0) for at in range(250)])])
    for _ in range(20):
        assert (await case.post(data, 1)).status == 204


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (head(path="/"), 404),
        (head(path="/api/v1/write/"), 404),
        (head(method="GET"), 405),
        (head(content_type="application/json"), 415),
        (head(content_encoding="gzip"), 415),
        (head(content_type="application/x-protobuf;proto*0=a;proto*=b"), 415),
        (head(content_length="101"), 413),
        (head(content_length="9" * 30), 413),
        (head(content_length="100"), None),
    ],
)
async def test_requests_that_are_refused_before_their_body(asked: RequestHead, status: int | None) -> None:
    case = Case(max_compressed_bytes=100)
    response = await case.endpoint.check_head(asked)
    assert (response and response.status) == status


@pytest.mark.parametrize(
    ("header", "let_in"),
    [
        ("Bearer " + TOKEN.decode(), True),
        ("bearer  " + TOKEN.decode(), True),
        ("Bearer another-token-entirely", True),
        ("Bearer " + TOKEN.decode() + "x", False),
        ("Bearer " + TOKEN.decode()[:-1], False),
        ("Bearer", False),
        ("Bearer ", False),
        (TOKEN.decode(), False),
        ("Basic " + TOKEN.decode(), False),
        ("", False),
    ],
)
async def test_only_a_token_lets_in(header: str, let_in: bool) -> None:
    case = Case(tokens=True)
    response = await case.endpoint.check_head(head(authorization=header))
    assert (response is None) is let_in
    if response is not None:
        assert (response.status, dict(response.headers)["WWW-Authenticate"]) == (401, "Bearer")


async def test_without_a_token_the_answer_says_nothing_else() -> None:
    case = Case(tokens=True)
    for asked in (head(path="/"), head(method="GET"), head(content_type="x/y"), head(content_length="9" * 19)):
        response = await case.endpoint.check_head(asked)
        assert response is not None
        assert response.status == 401


async def test_every_2_0_answer_has_the_numbers_and_refusals_are_counted() -> None:
    case = Case()
    for status, reason in ((401, "unauthorized"), (413, "too_large"), (503, "late"), (404, "other")):
        assert written(case.endpoint.on_refusal(head(2), Response(status, "no"))) == (0, 0, 0)
        assert case.metric("rejected_requests_total", reason=reason) == 1
    assert case.endpoint.on_refusal(head(1), Response(401)).headers == []
    assert case.endpoint.on_refusal(head(content_type="x/y"), Response(415)).headers == []
    assert case.endpoint.on_refusal(None, Response(400)).headers == []
    assert case.metric("requests_total", version="unknown", code="400") == 1


async def test_the_memory_of_labels_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parser, "CACHE_ENTRIES_MAX", 50)
    case = Case()
    for version in VERSIONS:
        for request in range(30):
            # not in the order of their names: in 2.0 such labels alone are remembered
            series = [[("x", "1"), ("__name__", f"m{version}_{request}_{number}")] for number in range(10)]
            data = body(version, [OneSeries(one, [(1, 1.0, 0)]) for one in series])
            assert (await case.post(data, version)).status == 204
            assert 0 < len(case.endpoint._parser._checker) <= 50 + 32


@pytest.mark.parametrize("large", [False, True])
async def test_the_memory_of_labels_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Few series, each with long labels: here, and in the thread for large requests."""
    monkeypatch.setattr(request_parser, "CACHE_BYTES_MAX", 100_000)
    if large:
        monkeypatch.setattr(request_parser, "INLINE_BYTES_MAX", 0)
    case = Case()
    checker = case.endpoint._parser._thread_checker if large else case.endpoint._parser._checker
    for version in VERSIONS:
        for request in range(10):
            series = OneSeries([("x", f"{request}" * 40_000), ("__name__", f"m{version}")], [(1, 1.0, 0)])
            assert (await case.post(body(version, [series]), version)).status == 204
            assert 40_000 < checker.cached_bytes < 200_000


async def test_tokens_are_in_no_log() -> None:
    case = Case(tokens=True)
    with structlog.testing.capture_logs() as entries:
        asked: Any = head(authorization="Bearer wrong-and-secret-token")
        response = await case.endpoint.check_head(asked)
        assert response is not None
        case.endpoint.on_refusal(asked, response)
    assert entries
    assert "secret" not in repr(entries)
