"""The analytics as an operator runs them: the receiver, the jobs as commands, and their tables read by another tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.dataset as ds
from deltalake import DeltaTable
from local.ports import free_port
from local.process import OwnedProcess

from analytics.tables.schemas import VIEWS
from tests.analytics.spark_settings import FEW_ROWS, QUICK_START

from .cluster import to_toml
from .prometheus import Samples, packed
from .waiting import eventually

COMMAND = Path(sys.executable).with_name("pulsar-proxy-analytics")
JOB_TIMEOUT_S = 900
IDENTITY_CHARACTERS = 32
"""Of the name of a change's directory."""
TOKEN = "a-token-of-the-tests-own"

_ENVIRONMENT = os.environ | {
    "JDK_JAVA_OPTIONS": " ".join([QUICK_START, *(f"-D{name}={value}" for name, value in FEW_ROWS.items())])
}
# Several jobs share a Spark session where the test is not about their ends: a session costs seconds.
TOGETHER = """\
import json, sys
from analytics.cli import main
for arguments in json.loads(sys.argv[1]):
    main(arguments, standalone_mode=False)
"""


class Receiver:
    """`pulsar-proxy-analytics receive`, with a bearer token. Ports and spool stay the same from start to start."""

    def __init__(self, directory: Path) -> None:
        self.spool = directory / "spool"
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.write_url = f"http://{self.address}/api/v1/write"
        self._config = directory / "receiver.toml"
        self._log = directory / "receiver.log"
        tables = {
            "listen": {"bind": self.address},
            "authentication": {"token_files": [str(self.token_file)]},
            "spool": {"directory": str(self.spool), "segment_bytes_max": 256 << 10},
            "admin": {"bind": f"127.0.0.1:{free_port(avoid=(port,))}"},
        }
        self._config.write_text(to_toml(tables))
        self._process: OwnedProcess | None = None

    def start(self) -> None:
        """Start, and return when it takes writes."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        self._process = process = OwnedProcess([COMMAND, "receive", "--config", self._config], log=self._log)

        def takes_writes() -> bool:
            assert process.exit_code() is None, process.log_tail()
            return "the receiver takes writes" in self._log.read_text()[begin:]

        eventually(takes_writes, what="the receiver takes writes")

    def kill(self) -> None:
        """SIGKILL; harmless if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def run_jobs(*jobs: Sequence[object], env: Mapping[str, str] | None = None) -> None:
    """Several jobs, one after the other, in one process, with more variables in its environment."""
    command = [sys.executable, "-c", TOGETHER, as_argument(jobs)]
    variables = _ENVIRONMENT | dict(env or {})
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=JOB_TIMEOUT_S, check=False)
    assert result.returncode == 0, f"{jobs}:\n{result.stderr[-4000:]}"


def start_jobs(log: Path, *jobs: Sequence[object], env: Mapping[str, str] | None = None) -> OwnedProcess:
    """The same in the background. Its `kill` is a SIGKILL for Python and the JVM at once."""
    command = [sys.executable, "-c", TOGETHER, as_argument(jobs)]
    return OwnedProcess(command, log=log, env=_ENVIRONMENT | dict(env or {}))


def as_argument(jobs: Sequence[Sequence[object]]) -> str:
    """The jobs' arguments for TOGETHER."""
    return json.dumps([[str(one) for one in job] for job in jobs])


def wait_for_write(root: Path, table: str, process: OwnedProcess) -> None:
    """Wait until Spark writes files of a table, which no version names yet: the middle of a job."""

    def is_writing() -> bool:
        assert process.exit_code() is None, process.log_tail()
        return any(root.glob(f"{table}/*/*/_temporary"))

    eventually(is_writing, what=f"{table} is being written", within_s=JOB_TIMEOUT_S, every_s=0.002)


class Tables:
    """The Delta tables below a root, read without Spark."""

    env: Mapping[str, str] = MappingProxyType({})
    """Variables that a job needs to reach the tables."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """For `--tables`."""
        return self.root.as_uri()

    def table(self, name: str) -> DeltaTable:
        """The newest version of one."""
        return DeltaTable(self.root / name)

    def rows(self, view: str, *columns: str) -> list[dict[str, Any]]:
        """The rows of a table, or of one width of it."""
        table, width, _ = VIEWS[view]
        found = self.table(table).to_pyarrow_dataset()
        chosen = found if width is None else found.filter(ds.field("width") == width)
        rows: list[dict[str, Any]] = chosen.to_table(list(columns) or None).to_pylist()
        return rows

    def samples(self, start_ms: int, end_ms: int, *, backfilled: bool = True) -> Samples:
        """Samples of that time, both ends included; each (series, ts) is once there."""
        names = {
            row["series_id"]: frozenset({"__name__": row["metric"], **dict(row["labels"])}.items())
            for row in self.rows("series")
        }
        delta = self.table("samples")
        paths = [path for path in delta.file_uris() if backfilled or path not in self._backfilled()]
        read = ds.dataset(paths, format="parquet").to_table(["series_id", "ts", "value"])
        times = read["ts"].cast("timestamp[us]").cast("int64").to_pylist()
        rows = [
            (names[series_id], ts_us // 1000, value)
            for series_id, ts_us, value in zip(
                read["series_id"].to_pylist(), times, read["value"].to_pylist(), strict=True
            )
        ]
        chosen = {(labels, ts_ms): packed(value) for labels, ts_ms, value in rows if start_ms <= ts_ms <= end_ms}
        assert len(chosen) == sum(start_ms <= ts_ms <= end_ms for _, ts_ms, _ in rows), "a sample is there twice"
        return chosen

    def _backfilled(self) -> set[str]:
        """The files of samples that changes without a position in a spool have added."""
        found = set()
        for actions in self._commits("samples"):
            if not any("txn" in action for action in actions):
                found |= {str(self.root / "samples" / action["add"]["path"]) for action in actions if "add" in action}
        return found

    def _commits(self, table: str) -> Iterator[list[dict[str, Any]]]:
        for log in (self.root / table / "_delta_log").glob("*.json"):
            yield [json.loads(line) for line in self._text(log).splitlines()]

    def _text(self, path: Path) -> str:
        return path.read_text()

    def versions(self, table: str = "*") -> set[str]:
        """The versions of one table, or of all."""
        return {f"{path.parts[-3]}/{path.stem}" for path in self.root.glob(f"{table}/_delta_log/*.json")}

    def changes(self, table: str = "*") -> set[str]:
        """The directories of changes of one table, or of all, committed or not."""
        found = (path for path in self.root.glob(f"{table}/*") if len(path.name) == IDENTITY_CHARACTERS)
        return {f"{path.parent.name}/{path.name}" for path in found}

    def unfinished_changes(self) -> set[str]:
        """Those whose files no version ever named: of jobs that run, or that were killed."""
        named = {
            f"{table.name}/{action['add']['path'].partition('/')[0]}"
            for table in self.root.iterdir()
            for actions in self._commits(table.name)
            for action in actions
            if "add" in action
        }
        return self.changes() - named

    def usage(self, view: str = "usage_hourly") -> dict[str, dict[str, int]]:
        """The sums over time, by principal."""
        sums: dict[str, dict[str, int]] = {}
        for row in self.rows(view):
            mine = sums.setdefault(row["principal"], {})
            for what in ("bytes_in", "bytes_out", "messages_in", "messages_out", "sessions"):
                mine[what] = mine.get(what, 0) + row[what]
        return sums
