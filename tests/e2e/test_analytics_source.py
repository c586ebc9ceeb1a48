"""The source `prometheus`: a real Prometheus gives the same rows by remote read and by its API as its spool holds.

They are a counter's with its `…_created`, one's that goes stale, and native histograms. And the lines of the page run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.decode import Decoder
from analytics.remote_write.snappy import compress
from analytics.sources.prometheus import Prometheus as Source
from analytics.spool import reader
from tests.analytics.spark_settings import SHORT_JOBS

from .lab.pipeline import JOB_TIMEOUT_S, Receiver
from .lab.prometheus import JOB, REPLICA, Server
from .lab.waiting import eventually
from .test_analytics_histograms import observed

DOCS = Path(__file__).parents[2] / "docs" / "analytics-source.md"
STEPS = 5
READS_HISTOGRAMS = (2, 44)
"""The first version whose remote read has native histograms; Debian's, 2.42, leaves them out without a word."""

Row = tuple[Any, ...]


class Target:
    """What is scraped: a counter with the time of its start, and a gauge that vanishes."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.has_gauge = True
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                target.scrapes += 1
                lines = [f'made_total{{kind="a\\"b"}} {target.scrapes}', 'made_created{kind="a\\"b"} 1.76e9']
                text = "\n".join([*lines, *(["gauge NaN"] if target.has_gauge else []), ""]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"


@dataclass
class Scene:
    """A Prometheus, the spool of what it sent, and the time (ms) of both."""

    url: str
    spool: Path
    start_ms: int
    end_ms: int
    reads_histograms: bool

    def rows(self, *filters: Any, **options: str) -> list[Row]:
        """The source's rows, sorted, without the labels of the replica, which the API does not tell."""
        made = Source({"start": str(self.start_ms / 1000), "end": str(self.end_ms / 1000), **options})
        found = made.reader(made.schema())
        found.pushFilters(list(filters))
        batches = [batch for one in found.partitions() for batch in found.read(one)]
        return sorted((plain(row) for batch in batches for row in batch.to_pylist()), key=repr)


def plain(row: dict[str, Any]) -> Row:
    labels = tuple(sorted(pair for pair in row["labels"] if pair[0] not in REPLICA))
    return (row["metric"], labels, row["ts"], row["start_ts"], repr(row["value"]), repr(row["histogram"]))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("source")
    target, receiver = Target(), Receiver(directory)
    thread = threading.Thread(target=target.server.serve_forever, kwargs={"poll_interval": 0.05})
    interval = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    settings = {
        "global": {**interval, "external_labels": REPLICA},
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target.address]}]}],
        "remote_write": [
            {
                "url": receiver.write_url,
                "authorization": {"credentials_file": str(receiver.token_file)},
                "send_native_histograms": True,
                "queue_config": {"max_shards": 1, "batch_send_deadline": "200ms"},
            }
        ],
    }
    options = ("--enable-feature=native-histograms", "--web.enable-remote-write-receiver")
    prometheus = Server(directory, settings, *options)
    try:
        thread.start()
        receiver.start()
        start_ms = int(time.time() * 1000)
        prometheus.start()
        eventually(lambda: target.scrapes > STEPS, what="some scrapes")
        for step in range(STEPS):  # it sends on only what is not older than its own start
            write(prometheus, int(time.time() * 1000) + step, observed(10 * step + 10, 3))
        target.has_gauge = False
        seen = target.scrapes
        eventually(lambda: target.scrapes > seen + STEPS, what="scrapes without the gauge")
        end_ms = int(time.time() * 1000)
        eventually(lambda: sent_after(receiver.spool, end_ms), what="all before the end is in the spool", within_s=60)
        version = tuple(map(int, prometheus.version().split(".")[:2]))
        yield Scene(prometheus.url, receiver.spool, start_ms, end_ms, version >= READS_HISTOGRAMS)
    finally:
        prometheus.kill()
        receiver.kill()
        target.server.shutdown()
        target.server.server_close()
        thread.join()


def write(prometheus: Server, ts_ms: int, histogram: pb.Histogram) -> None:
    request = pb.WriteRequest()
    series = request.timeseries.add(labels=[pb.Label(name="__name__", value="h")])
    series.histograms.add().CopyFrom(histogram)
    series.histograms[0].timestamp = ts_ms
    prometheus.write(compress(request.SerializeToString()))


def sent_after(spool: Path, ms: int) -> bool:
    """Whether `up` of a scrape after a moment has arrived: one shard sends in order."""
    decoder = Decoder()
    for segment in reader.list_segments(spool):
        for record in reader.read_records(segment.path, 0, segment.size_bytes):
            decoder.add_body(record.body, record.version)
    columns = decoder.take_columns()
    up = {n for n, one in enumerate(columns.series) if ("__name__", "up") in one.labels}
    return any(n in up and ts > ms for n, ts in zip(columns.sample_series, columns.sample_ts_ms, strict=True))


def test_remote_read_gives_what_the_spool_has(scene: Scene) -> None:
    stored = scene.rows(path=str(scene.spool))
    assert {"made_total", "made_created", "gauge", "h", "up"} <= {row[0] for row in stored}
    assert sum(row[0] == "h" for row in stored) == STEPS
    stored = [row for row in stored if scene.reads_histograms or row[0] != "h"]
    assert scene.rows(url=scene.url) == stored
    assert scene.rows(url=scene.url, stepSeconds="1") == stored


def test_the_query_api_gives_the_same_without_native_histograms(scene: Scene) -> None:
    stored = [row for row in scene.rows(path=str(scene.spool)) if row[0] != "h"]
    assert scene.rows(url=scene.url, api="query", match='{__name__!="h"}') == stored
    assert scene.rows(url=scene.url, api="query", skipHistograms="true") == stored


def test_a_gauge_that_vanished_has_no_sample_after(scene: Scene) -> None:
    """Its own NaN are samples; Prometheus' mark of the end is none, in either source."""
    for place in ({"url": scene.url}, {"path": str(scene.spool)}):
        gauge = scene.rows(match="gauge", **place)
        last = max(row[2] for row in scene.rows(match="made_total", **place))
        assert {row[4] for row in gauge} == {"nan"}
        assert max(row[2] for row in gauge) < last


def test_filters_give_the_same_rows_from_either(scene: Scene) -> None:
    filters = [EqualTo(("metric",), "made_total"), EqualTo(("kind",), 'a"b')]
    moment = scene.rows(*filters, path=str(scene.spool))[2][2]
    filters.append(GreaterThanOrEqual(("ts",), moment))
    stored = scene.rows(*filters, path=str(scene.spool), labelColumns="kind")
    assert min(row[2] for row in stored) == moment
    assert scene.rows(*filters, url=scene.url, labelColumns="kind") == stored


def test_the_lines_of_the_page_run(scene: Scene) -> None:
    """In a notebook's kernel, or where there is none in a new interpreter. It has nothing but the installed package."""
    (code,) = re.findall(r"^```python notebook\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 12
    code = code.replace("http://127.0.0.1:9090", scene.url)
    environment = os.environ | SHORT_JOBS | {"PYSPARK_PYTHON": sys.executable}
    text = run_in_kernel(code, environment) if importlib.util.find_spec("ipykernel") else run(code, environment)
    assert f"|{JOB}" in text, text


def run(code: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=JOB_TIMEOUT_S,
        check=True,
    ).stdout


def run_in_kernel(code: str, environment: dict[str, str]) -> str:
    manager, client = importlib.import_module("jupyter_client.manager").start_new_kernel(env=environment)
    printed: list[str] = []
    try:
        client.execute_interactive(
            code, timeout=JOB_TIMEOUT_S, output_hook=lambda message: printed.append(str(message["content"].get("text")))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(printed)
