"""The query API: stored samples as they are, each once, and clear words where a server does not give them."""

import json
import threading
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from analytics.jobs import backfill
from analytics.series import series_id
from analytics.sources.http import QueryFailed as Failed
from analytics.sources.http import Settings, Span, query_samples
from analytics.sources.options import BadOption
from analytics.sources.prometheus import Prometheus, Server
from analytics.tables.store import Tables

T0_MS = 1_763_712_000_000
STORED = [(T0_MS + at, value) for at, value in ((0, "1"), (15_001, "2.5"), (3_599_999, "+Inf"), (3_600_000, "NaN"))]
UP = {"__name__": "up", "job": "x"}


class FakePrometheus:
    """Answers range selectors from STORED; version 2 takes both ends of a range in, 3 leaves its beginning out."""

    def __init__(self) -> None:
        self.version = 3
        self.answers: list[tuple[int, bytes, dict[str, str]]] = []
        self.requests: list[dict[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = dict(urllib.parse.parse_qsl(body)) | {"authorization": self.headers.get("Authorization", "")}
                fake.requests.append(form)
                status, data, headers = fake.answers.pop(0) if fake.answers else (200, fake.matrix(form), {})
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def matrix(self, form: dict[str, str]) -> bytes:
        end = round(float(form["time"]) * 1000)
        begin = end - int(form["query"].rpartition("[")[2].removesuffix("ms]"))
        first = begin if self.version == 2 else begin + 1
        inside = [[ts / 1000, value] for ts, value in STORED if first <= ts <= end]
        result = [{"metric": UP, "values": inside}] if inside else []
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    fake = FakePrometheus()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


def source(prometheus: FakePrometheus, **others: str) -> Prometheus:
    span = {"start": str(T0_MS / 1000), "end": str(T0_MS / 1000 + 7200)}
    return Prometheus({"url": prometheus.url, "api": "query", "table": "samples", "match": "up"} | span | others)


def settings(prometheus: FakePrometheus, **others: str) -> Settings:
    origin = source(prometheus, **others)._origin
    assert isinstance(origin, Server)
    return origin.settings


def rows(prometheus: FakePrometheus, **others: str) -> list[tuple[int, float]]:
    reader = source(prometheus, **others).reader(StructType())
    batches = [batch for span in reader.partitions() for batch in reader.read(span)]
    return [(row["ts"].timestamp() * 1000, row["value"]) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("version", [2, 3])
def test_every_stored_sample_comes_once_whatever_the_steps(prometheus: FakePrometheus, version: int) -> None:
    prometheus.version = version
    for step in ("3600", "1", "7200", "1199"):
        if step == "1":
            found = rows(prometheus, stepSeconds=step, end=str(T0_MS / 1000 + 20))
            assert [value for _, value in found] == [1.0, 2.5]
        else:
            found = rows(prometheus, stepSeconds=step)
            assert [ts for ts, _ in found] == [ts for ts, _ in STORED]
            assert [str(value) for _, value in found] == ["1.0", "2.5", "inf", "nan"]


def test_the_token_is_sent_and_stays_out_of_sight(prometheus: FakePrometheus, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    chosen = settings(prometheus, bearerTokenFile=str(tmp_path / "token"))
    rows(prometheus, bearerTokenFile=str(tmp_path / "token"))
    assert prometheus.requests[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(chosen)
    prometheus.answers = [(400, b'{"error": "bad selector"}', {})]
    with pytest.raises(Failed) as caught:
        query_samples(chosen, Span(T0_MS, T0_MS + 1000))
    assert "s3cret" not in str(caught.value)


def test_a_redirect_is_not_followed(prometheus: FakePrometheus, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    prometheus.answers = [(302, b"", {"Location": f"{prometheus.url}/elsewhere"})]
    with pytest.raises(Failed, match="302"):
        query_samples(settings(prometheus, bearerTokenFile=str(tmp_path / "token")), Span(T0_MS, T0_MS + 1000))
    assert len(prometheus.requests) == 1


def test_errors_that_may_pass_are_tried_again_with_pauses(prometheus: FakePrometheus) -> None:
    prometheus.answers = [(503, b"busy", {}), (429, b"slow down", {})]
    pauses: list[float] = []
    [series] = query_samples(settings(prometheus), Span(T0_MS, T0_MS + 1000), pauses.append).series
    assert dict(series.labels) == UP
    assert pauses == [1.0, 2.0]
    prometheus.answers = [(503, b"busy", {})] * 5
    with pytest.raises(Failed, match=r"from 2025-11-21T08:00:00.* 503 Service Unavailable: busy"):
        query_samples(settings(prometheus), Span(T0_MS, T0_MS + 1000), pauses.append)
    assert pauses[2:] == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, b'{"error": "parse error"}', {}), "400 Bad Request: parse error"),
        ((401, b"", {}), "401 Unauthorized: no further word"),
        ((200, b"<html>", {}), "is no Prometheus API"),
        ((200, b'{"data": {"resultType": "vector", "result": []}}', {}), "must be a plain selector"),
        (
            (200, b'{"data": {"resultType": "matrix", "result": [{"metric": {}, "histograms": [[1, {}]]}]}}', {}),
            "whose schema the API does not return",
        ),
        ((200, b" " * 2000, {}), "more than 1000 bytes: use a smaller stepSeconds"),
    ],
)
def test_errors_that_will_not_pass_are_told_at_once(
    prometheus: FakePrometheus, answer: tuple[int, bytes, dict[str, str]], said: str
) -> None:
    prometheus.answers = [answer]
    with pytest.raises(Failed, match=said):
        rows(prometheus, maxResponseBytes="1000")
    assert len(prometheus.requests) == 1


def test_histograms_are_left_out_when_told(prometheus: FakePrometheus) -> None:
    result = [{"metric": UP, "histograms": [[1, {}]]}]
    data = json.dumps({"data": {"resultType": "matrix", "result": result}}).encode()
    prometheus.answers = [(200, data, {})] * 2
    assert rows(prometheus, skipHistograms="true") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "ftp://x"}, "url must be http"),
        ({"url": "http://me:pw@x"}, "use bearerTokenFile"),
        ({"start": "yesterday"}, "start is 'yesterday'"),
        ({"end": "0"}, "start must be before end"),
        ({"start": "0", "stepSeconds": "1"}, "use a larger stepSeconds"),
        ({"stepSeconds": "0"}, "stepSeconds is '0'"),
        ({"query": "x"}, "no option 'query'"),
    ],
)
def test_bad_options_are_told(prometheus: FakePrometheus, options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said) as caught:
        settings(prometheus, **options)
    assert "pw" not in str(caught.value)


def test_backfill_adds_what_is_missing_once(spark: SparkSession, prometheus: FakePrometheus, tmp_path: Path) -> None:
    start, end = (datetime(2025, 11, 21, hour, tzinfo=UTC) for hour in (8, 11))
    options = {"url": prometheus.url, "match": "up", "stepSeconds": "1800"}
    root = str(tmp_path / "tables")
    assert backfill.run(spark, root, options, start=start, end=end, batch_hours=2) == 4
    assert backfill.run(spark, root, options, start=start, end=end, batch_hours=3) == 0
    tables = Tables.open(spark, root)
    samples = tables.read("samples").selectExpr("series_id", "unix_millis(ts) ts").collect()
    assert sorted((row.series_id, row.ts) for row in samples) == [(series_id(UP.items()), ts) for ts, _ in STORED]
    assert tables.read("series").count() == 1
