"""The source `prometheus`: rows with labels, filters that narrow what is read, streams, and servers that misbehave."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import datasource as spark_filters
from pyspark.sql.types import StructType

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.remote_pb2 import BucketSpan, Histogram
from analytics.remote_write.snappy import compress, decompress
from analytics.sources import http, prometheus
from analytics.sources.http import QueryFailed, Settings, Span
from analytics.sources.options import BadOption
from analytics.sources.prometheus import Prometheus, Reader, StreamReader
from analytics.sources.selector import Matcher, parse_selector, selector_text
from tests.analytics.spool_files import T0_MS, SpoolFiles, body_v2, labels

ROOT = Path(__file__).parents[2]
T0 = datetime.fromtimestamp(T0_MS / 1000, UTC)
UP, DOWN = labels("up", job="x", le="0.5"), labels("down")
HOUR = {"start": str(T0_MS / 1000), "end": str(T0_MS / 1000 + 3600)}


def histogram() -> Histogram:
    spans = [BucketSpan(offset=2, length=2)]
    return Histogram(count_int=5, sum=2.5, zero_count_int=1, positive_spans=spans, positive_deltas=[1, 2])


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolFiles]:
    files = SpoolFiles(tmp_path / "spool", segment_bytes_max=1000)
    files.v1((UP, 0, 1.0), (DOWN, 5, 2.0))
    files.add(body_v2([(UP, 15_000, 3.0)], start_ms=-7, histograms=[(labels("h"), 9, histogram())]), 2)
    yield files
    files.close()


class FakeServer:
    """Answers remote read and the API as told; keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        self.claimed = 0  # bytes of Content-Length beyond the answer's
        self.drips = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake.requests.append((self.path, body, dict(self.headers)))
                answer = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
                self.send_response(200)
                if not fake.drips:
                    self.send_header("Content-Length", str(len(answer) + fake.claimed))
                self.end_headers()
                self.wfile.write(answer)
                while fake.drips and not fake.over.wait(0.05):
                    self.wfile.write(b" ")

            def log_message(self, *_: Any) -> None:
                pass

        self.over = Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def settings(self, **options: str) -> Settings:
        source = Prometheus({"url": self.url, **HOUR, **options})
        assert isinstance(source._origin, prometheus.Server)
        return source._origin.settings


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.over.set()
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


def field(number: int, data: bytes) -> bytes:
    return http._bytes_field(number, data)


def answer(*series: pb.TimeSeries) -> bytes:
    return compress(field(1, pb.WriteRequest(timeseries=series).SerializeToString()))


def one_series(**others: Any) -> pb.TimeSeries:
    names = [pb.Label(name="__name__", value="up"), pb.Label(name="job", value="x")]
    return pb.TimeSeries(labels=names, samples=[pb.Sample(value=7.0, timestamp=T0_MS + 5)], **others)


def rows(*filters: Any, **options: str) -> list[dict[str, Any]]:
    source = Prometheus(options)
    reader = source.reader(source.schema())
    assert list(reader.pushFilters(list(filters))) == list(filters)
    return [row for one in reader.partitions() for batch in reader.read(one) for row in batch.to_pylist()]


# ---- in Spark


def test_spark_finds_it_and_makes_rows_with_labels(spark: SparkSession, spool: SpoolFiles) -> None:
    read = spark.read.format("prometheus").option("path", str(spool.directory))
    found = read.option("labelColumns", "job,instance").load().orderBy("ts").collect()
    assert [(row.metric, row.labels, row.value, row.job, row.instance) for row in found] == [
        ("up", {"job": "x", "le": "0.5"}, 1.0, "x", None), ("down", {}, 2.0, None, None),
        ("h", {}, None, None, None), ("up", {"job": "x", "le": "0.5"}, 3.0, "x", None),
    ]  # fmt: skip
    assert (found[2].histogram["count"], found[2].histogram.positive_offsets) == (5.0, [2, 3])
    assert [row.start_ts is not None for row in found] == [False, False, False, True]
    chosen = read.schema("le string, value double").load()
    assert sorted(map(tuple, chosen.where("value is not null").collect()), key=str) == [
        ("0.5", 1.0), ("0.5", 3.0), (None, 2.0)
    ]  # fmt: skip


def test_filters_reach_the_server_when_spark_pushes_them(spark: SparkSession, server: FakeServer) -> None:
    server.answers = [answer(one_series())]
    load = spark.read.format("prometheus").options(url=server.url, labelColumns="job", **HOUR).load
    query = "metric = 'up' and job in ('x', 'y.z') and ts >= timestamp_millis({}) and ts < timestamp_millis({})"
    try:
        for pushed in ("true", "false"):
            spark.conf.set("spark.sql.python.filterPushdown.enabled", pushed)
            [row] = load().where(query.format(T0_MS + 1, T0_MS + 500)).collect()
            assert (row.job, row.value) == ("x", 7.0)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    (_, with_filters, _), (_, without, _) = server.requests
    narrow = http._varint(T0_MS + 500)
    assert b"y\\.z" in decompress(with_filters, 1000)
    assert b"y\\.z" not in decompress(without, 1000)
    assert narrow in decompress(with_filters, 1000)
    assert narrow not in decompress(without, 1000)


def test_a_stream_of_a_spool_goes_on_where_it_was(spark: SparkSession, spool: SpoolFiles, tmp_path: Path) -> None:
    def run() -> list[float]:
        out = tmp_path / "out"
        stream = spark.readStream.format("prometheus").option("path", str(spool.directory)).load()
        write = stream.selectExpr("value").writeStream.format("parquet").trigger(availableNow=True)
        query = write.start(str(out), checkpointLocation=str(tmp_path / "checkpoint"))
        query.awaitTermination()
        return sorted(row.value for row in spark.read.parquet(str(out)).collect() if row.value is not None)

    assert run() == [1.0, 2.0, 3.0]
    spool.v1((UP, 30_000, 4.0))
    assert run() == [1.0, 2.0, 3.0, 4.0]
    assert run() == [1.0, 2.0, 3.0, 4.0]


def test_without_the_extra_s_packages_the_module_registers_nothing() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; import pyspark_prometheus as m; print(hasattr(m, 'DefaultSource'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "False\n"


# ---- what is read


def test_a_stream_of_a_server_ends_a_delay_before_now(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Prometheus({"url": "http://x", "start": str(T0_MS / 1000), "delaySeconds": "60", "stepSeconds": "3600"})
    reader = source.streamReader(source.schema())
    assert isinstance(reader, StreamReader)
    begin = reader.initialOffset()
    assert begin == {"ms": T0_MS}
    monkeypatch.setattr(prometheus.time, "time", lambda: T0_MS / 1000 + 5460)
    end = reader.latestOffset(begin)
    assert end == {"ms": T0_MS + 5_400_000}
    assert reader.partitions(begin, end) == [
        Span(T0_MS, T0_MS + 3_600_000), Span(T0_MS + 3_600_000, T0_MS + 5_400_000)
    ]  # fmt: skip
    assert reader.partitions(end, end) == []
    monkeypatch.setattr(prometheus.time, "time", lambda: T0_MS / 1000)
    assert reader.latestOffset(end) == end


def test_filters_narrow_what_is_read() -> None:
    source = Prometheus({"path": "/x", "labelColumns": "job"})
    f = spark_filters

    def narrowed(*filters: Any) -> tuple[tuple[Matcher, ...], Span]:
        reader = source.reader(source.schema())
        assert isinstance(reader, Reader)
        reader.pushFilters(list(filters))
        return reader._rows.matchers[1:], reader._rows.span

    everything = narrowed()[1]
    job = ("job",)
    for given, matcher in {
        f.EqualTo(job, "a"): ("job", "=", "a"),
        f.Not(f.EqualTo(job, "a")): ("job", "!=", "a"),
        f.In(job, ("a", "b|c")): ("job", "=~", "a|b\\|c"),
        f.StringStartsWith(job, "a."): ("job", "=~", "a\\.(?s:.*)"),
        f.StringEndsWith(job, "a"): ("job", "=~", "(?s:.*)a"),
        f.Not(f.StringContains(job, "a")): ("job", "!~", "(?s:.*)a(?s:.*)"),
        f.IsNull(job): ("job", "=", ""),
        f.IsNotNull(job): ("job", "!=", ""),
        f.EqualTo(("metric",), "up"): ("__name__", "=", "up"),
    }.items():
        assert narrowed(given) == ((Matcher(*matcher),), everything)
    for ignored in (f.EqualTo(job, ""), f.EqualTo(("value",), 1.0), f.EqualTo(("histogram", "count"), 1.0)):
        assert narrowed(ignored) == ((), everything)
    between = f.GreaterThanOrEqual(("ts",), T0), f.LessThan(("ts",), T0 + timedelta(microseconds=500))
    assert narrowed(*between)[1] == Span(T0_MS, T0_MS + 1)
    assert narrowed(f.Not(f.EqualTo(("ts",), T0)))[1] == everything


def test_match_and_span_choose_rows_of_a_spool(spool: SpoolFiles) -> None:
    path = str(spool.directory)
    assert [row["value"] for row in rows(path=path, match='{job=~"x|y"}')] == [1.0, 3.0]
    assert [row["metric"] for row in rows(path=path, match='{job="",__name__!~"h.*"}')] == ["down"]
    start = str(T0_MS / 1000 + 0.005)
    assert {row["value"] for row in rows(path=path, start=start, end=str(T0_MS / 1000 + 15))} == {2.0, None}


def test_selectors_are_parsed_and_written() -> None:
    for text in ("up", "{}", 'up{job="a\\"b\\\\d", le=~"x|y" ,}', ' :r:s { a!="" , b!~"é"}'):
        assert parse_selector(selector_text(parse_selector(text))) == parse_selector(text)
    assert parse_selector('up{a="\\"}"}') == (Matcher("__name__", "=", "up"), Matcher("a", "=", '"}'))
    for wrong in ("up[5m]", "rate(up)", "up{a=b}", 'up{a="b" c="d"}', 'up{a=~"("}', 'up{a="\\d"}', "up{", "up or up"):
        with pytest.raises(BadOption, match="must be a plain selector"):
            parse_selector(wrong)


def test_long_labels_come_in_small_batches(spool: SpoolFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label's text is written once for each row: 131,072 rows with a megabyte each would be 128 GiB."""
    monkeypatch.setattr(prometheus, "BATCH_BYTES", 100)
    spool.v1(*((labels("long", text="x" * 60), at, float(at)) for at in range(5)))
    source = Prometheus({"path": str(spool.directory), "match": "long"})
    reader = source.reader(source.schema())
    sizes = [batch.num_rows for one in reader.partitions() for batch in reader.read(one)]
    assert sizes == [1] * 5


# ---- servers


def test_remote_read_asks_and_reads(server: FakeServer, tmp_path: Path) -> None:
    made = histogram()
    made.timestamp = T0_MS + 6
    stale = pb.Sample(value=float("nan"), timestamp=T0_MS + 7)
    server.answers = [
        answer(
            one_series(histograms=[made]), pb.TimeSeries(labels=[pb.Label(name="__name__", value="x")], samples=[stale])
        )
    ]
    (tmp_path / "token").write_text("s3cret\n")
    found = rows(url=server.url, match='up{job!="y"}', bearerTokenFile=str(tmp_path / "token"), **HOUR)
    assert [(row["value"], row["histogram"] and row["histogram"]["sum"]) for row in found] == [(7.0, None), (None, 2.5)]
    [(path, body, headers)] = server.requests
    assert (path, headers["Authorization"]) == ("/api/v1/read", "Bearer s3cret")
    end = http._varint(T0_MS + 3_600_000 - 1)
    matchers = field(3, b"\x08\x01" + field(2, b"__name__") + field(3, b""))
    matchers += field(3, b"\x08\x00" + field(2, b"__name__") + field(3, b"up"))
    matchers += field(3, b"\x08\x01" + field(2, b"job") + field(3, b"y"))
    assert decompress(body, 1000) == field(1, b"\x08" + http._varint(T0_MS) + b"\x10" + end + matchers)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<html>", "its answer cannot be read"),
        (compress(b"\x0a\xff"), "its answer cannot be read"),
        (compress(bytes(5000)), "claims to be 5000 bytes"),
        (answer() + b"x", "its answer cannot be read"),
        (compress(field(1, b"") * 3), "more than 1 series"),
        (answer(pb.TimeSeries(labels=[pb.Label(name="a", value="b")])), "a series of its answer is invalid"),
        (answer(one_series(histograms=[Histogram(schema=99, timestamp=T0_MS)])), "its schema is 99"),
        (b" " * 2000, "more than 1000 bytes"),
    ],
)
def test_what_is_no_answer_to_remote_read_is_told(server: FakeServer, data: bytes, said: str) -> None:
    server.answers = [data]
    with pytest.raises(QueryFailed, match=said):
        rows(url=server.url, maxResponseBytes="1000", **HOUR)
    assert len(server.requests) == 1


def test_an_empty_answer_has_no_rows(server: FakeServer) -> None:
    server.answers = [compress(b""), compress(field(1, b""))]
    assert rows(url=server.url, **HOUR) == rows(url=server.url, **HOUR) == []


def test_samples_outside_what_was_asked_are_no_rows(server: FakeServer) -> None:
    server.answers = [answer(one_series())]
    assert rows(url=server.url, match="down", **HOUR) == []
    assert rows(url=server.url, start=str(T0_MS / 1000 + 1), end=HOUR["end"]) == []


@pytest.mark.parametrize(
    "result",
    [
        "5", "[5]", "[{}]", '[{"metric": 5}]', '[{"metric": {"a": 5}, "values": []}]', '[{"metric": {}, "values": 5}]',
        '[{"metric": {}, "values": [[1]]}]', '[{"metric": {}, "values": [[1e30, "1"]]}]',
        '[{"metric": {}, "values": [["nan", "1"]]}]', '[{"metric": {}, "values": [[1, "one"]]}]', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_answer_of_the_api_is_told(server: FakeServer, result: str) -> None:
    server.answers = [f'{{"data": {{"resultType": "matrix", "result": {result}}}}}'.encode()]
    with pytest.raises(QueryFailed, match=r"an answer whose|is no Prometheus API"):
        rows(url=server.url, api="query", **HOUR)


def test_an_answer_that_drips_ends(server: FakeServer) -> None:
    server.answers, server.drips = [b" "], True
    chosen = replace(server.settings(), timeout_s=-4)  # a second altogether
    with pytest.raises(QueryFailed, match="not complete after 1 s"):
        http.query_samples(chosen, Span(T0_MS, T0_MS + 1000), lambda _: None)
    assert len(server.requests) == http.ATTEMPTS_MAX


def test_an_answer_that_is_cut_off_is_asked_for_again(server: FakeServer) -> None:
    server.answers, server.claimed = [answer(one_series())], 10
    pauses: list[float] = []
    with pytest.raises(QueryFailed, match="cut off"):
        http.read_samples(server.settings(), (), Span(T0_MS, T0_MS + 1000), pauses.append)
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_a_token_that_is_no_token_is_not_shown(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\nmore")
    with pytest.raises(QueryFailed, match="no token of one line") as caught:
        rows(url=server.url, bearerTokenFile=str(tmp_path / "token"), **HOUR)
    assert "s3cret" not in str(caught.value)
    assert server.requests == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either the option 'path'"),
        ({"url": "http://x", "path": "/x"}, "either the option 'path'"),
        ({"url": "http://x?token=s3cret"}, "no password or query in url"),
        ({"url": "http://x", "bearerToken": "s3cret"}, "no option 'bearertoken'"),
        ({"url": "http://x", "api": "graphql"}, "must be read or query"),
        ({"url": "http://x", "start": "-1w"}, "or -6h"),
        ({"url": "http://x", "start": "inf"}, "must be a time"),
        ({"url": "http://x", "start": "0", "stepSeconds": "1"}, "use a larger stepSeconds"),
        ({"path": "s3a://b/x"}, "must be a directory"),
        ({"path": "/x", "match": "rate(up)"}, "plain selector"),
    ],
)
def test_bad_options_are_told(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said) as caught:
        Prometheus(options)
    assert "s3cret" not in str(caught.value)


def test_a_stream_has_no_end_and_a_column_its_type() -> None:
    source = Prometheus({"url": "http://x", **HOUR})
    with pytest.raises(BadOption, match="a stream has no end"):
        source.streamReader(source.schema())
    with pytest.raises(BadOption, match="column ts is timestamp"):
        source.reader(StructType().add("ts", "long"))
    with pytest.raises(BadOption, match="column job is string"):
        source.reader(StructType().add("job", "long"))


def test_times_before_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.time, "time", lambda: 1_000_000.0)
    source = Prometheus({"url": "http://x", "start": "-6h"})
    assert source._span == Span(978_400_000, 1_000_000_000)
