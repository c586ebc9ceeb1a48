"""A real Prometheus on loopback; one that scrapes a target and sends what it scraped to a receiver."""

from __future__ import annotations

import json
import shutil
import struct
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from local.ports import free_port
from local.process import OwnedProcess
from prometheus_client.parser import text_string_to_metric_families

from .waiting import BUSY_S, eventually

JOB = "proxy"
REPLICA = {"prometheus_replica": "a"}
SCRAPE_INTERVAL_MS = 500

Labels = frozenset[tuple[str, str]]
Key = tuple[Labels, int]
"""A series by its labels (with `__name__`), and milliseconds since 1970."""
Samples = dict[Key, bytes]
"""The value as its eight bytes: NaN is equal to NaN, and nothing is rounded."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def packed(value: float) -> bytes:
    """A value's eight bytes."""
    return struct.pack("<d", value)


class Server:
    """One server with these settings. Data and port stay the same from start to start."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], *options: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._directory, self._options = directory, options
        self._process: OwnedProcess | None = None
        (directory / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML

    def start(self) -> None:
        """Start, and return when it is ready."""
        program = shutil.which("prometheus")
        assert program is not None, "the Debian package `prometheus` is not installed"
        command = [
            program,
            f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--log.level=warn",
            *self._options,
        ]
        self._process = OwnedProcess(command, log=self._directory / "prometheus.log", cwd=self._directory)
        eventually(self._is_ready, what=f"Prometheus is ready\n{self._process.log_tail()}")

    def kill(self) -> None:
        """SIGKILL; harmless if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def query(self, query: str, at_ms: int) -> list[dict[str, Any]]:
        """Return the result of a query at a moment, with its labels."""
        arguments = urllib.parse.urlencode({"query": query, "time": f"{at_ms / 1000:.3f}"})
        answer: dict[str, Any] = json.loads(self._get(f"/api/v1/query?{arguments}", timeout_s=60))
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def write(self, body: bytes) -> None:
        """Send it a request of remote write 1.0, which `--web.enable-remote-write-receiver` lets it take."""
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "snappy",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        with _opener.open(urllib.request.Request(f"{self.url}/api/v1/write", body, headers), timeout=BUSY_S):
            pass

    def version(self) -> str:
        """Return its version, as 2.42.0."""
        return str(json.loads(self._get("/api/v1/status/buildinfo"))["data"]["version"])

    def _is_ready(self) -> bool:
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def _get(self, path: str, timeout_s: float = 30.0) -> str:
        with _opener.open(f"{self.url}{path}", timeout=timeout_s) as answer:
            return str(answer.read().decode())


class Prometheus(Server):
    """One that scrapes one target, and sends to one receiver."""

    def __init__(self, directory: Path, *, target: str, write_url: str, token_file: Path) -> None:
        interval = f"{SCRAPE_INTERVAL_MS}ms"
        settings = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "external_labels": REPLICA},
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
            "remote_write": [
                {
                    "url": write_url,
                    "authorization": {"credentials_file": str(token_file)},
                    # One shard: what was sent up to a moment can be told from the last timestamp.
                    "queue_config": {"max_shards": 1, "batch_send_deadline": "200ms", "max_backoff": "500ms"},
                }
            ],
        }
        super().__init__(directory, settings)

    def sent_until_s(self) -> float:
        """Unix time, whole seconds: what it scraped before has arrived at the receiver."""
        return self._own("prometheus_remote_storage_queue_highest_sent_timestamp_seconds")

    def _own(self, name: str) -> float:
        """The value of a metric of its own."""
        families = text_string_to_metric_families(self._get("/metrics"))
        return max((sample.value for family in families for sample in family.samples if sample.name == name), default=0)

    def wait_until_sent(self, moment_s: float, within_s: float = 60.0) -> None:
        """Wait until a scrape after this moment has arrived at the receiver, all of it, and so everything before.

        One of many series goes in several requests, one after the other: a later scrape's comes behind all of them.
        """
        eventually(lambda: self._scraped_until_s() > moment_s, what=f"scraped after {moment_s}", within_s=within_s)
        scrape_s = self._scraped_until_s()
        eventually(lambda: self.sent_until_s() > scrape_s, what=f"sent until {scrape_s}", within_s=within_s)

    def _scraped_until_s(self) -> float:
        return self._own("prometheus_remote_storage_highest_timestamp_in_seconds")

    def samples(self, start_ms: int, end_ms: int) -> Samples:
        """Everything that it has of the target, as it is stored."""
        query = f'{{job="{JOB}"}}[{end_ms - start_ms}ms]'
        return {
            (frozenset(series["metric"].items()), round(ts_s * 1000)): packed(float(value))
            for series in self.query(query, end_ms)
            for ts_s, value in series["values"]
        }
