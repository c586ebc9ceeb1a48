"""The proxy cluster as a child process, with the configuration that a test asks for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from local.ports import free_port
from local.process import OwnedProcess

from .metrics import Scrape
from .waiting import BUSY_S, NotInTimeError, eventually

ROOT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1"
NOBODY = 65534
READY_TIMEOUT_S = 90.0
COMMAND_TIMEOUT_S = 120.0
NO_PINGS_S = 600
"""After so long a silent connection gets a PING: in no test, however long a busy machine takes, or it comes in place of
an answer.
"""
Tables = Mapping[str, Mapping[str, Any]]

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; status 0 stands for none at all."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


def merged(*layers: Tables) -> dict[str, dict[str, Any]]:
    """Tables of several configurations, key by key; the last one wins."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for table, keys in layer.items():
            result.setdefault(table, {}).update(keys)
    return result


def to_toml(tables: Tables) -> str:
    """Tables of plain values as TOML; `listener`, `http_listener` and `quota` become arrays of tables."""
    lines: list[str] = []
    for name, keys in tables.items():
        lines.append(f"[[{name}]]" if name in {"listener", "http_listener", "quota"} else f"[{name}]")
        lines += [f"{key} = {_value(value)}" for key, value in keys.items()]
        lines.append("")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)  # TOML writes strings, numbers and booleans as JSON does


class ProxyCluster:
    """One `serve` with its own ports, runtime directory and log. Use as a context manager, or start and stop."""

    def __init__(
        self,
        tables: Tables,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        unprivileged: bool = False,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix``: a command that runs the cluster's own command, which follows it."""
        # Not pytest's tmp_path: the runtime directory holds Unix sockets, whose paths are limited to 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ptp-"))
        self._removal = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.port = free_port()
        self.admin_port = free_port(avoid=(self.port,))
        self.config_path = self.directory / "config.toml"
        self.log_path = self.directory / "cluster.log"
        self.runtime_dir = self.directory / "run"
        self.service_url = f"pulsar://localhost:{self.port}"
        self._ready_timeout_s = ready_timeout_s
        self.prefix = self._without_privileges() if unprivileged else list(prefix)
        self._environment = environment
        self._process: OwnedProcess | None = None
        own: Tables = {
            "cluster": {"name": "e2e", "runtime_dir": str(self.runtime_dir), "forwarders": 2},
            "listener": {"bind": f"{HOST}:{self.port}"},
            "admin": {"bind": f"{HOST}:{self.admin_port}"},
            "limits": {"drain_timeout_ms": 5000, "keep_alive_interval_ms": NO_PINGS_S * 1000},
            "reload": {"watch_interval_ms": 0},  # tests that change the file say what is to come of it
        }
        self.tables = merged(own, tables)
        self.write_config(self.tables)

    def write_config(self, tables: Tables) -> None:
        """Replace the configuration file; a running cluster takes it over when told to reload."""
        self.config_path.write_text(to_toml(tables))

    def _without_privileges(self) -> list[str]:
        """How to start it as a user who may do nothing special: as nobody, if we are root."""
        if os.geteuid() != 0:
            return []
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        # By way of a shell, since setpriv itself may start what those whom it starts may not.
        probe = [*as_nobody, "sh", "-c", f"{sys.executable} -c 'import proxy.cli'"]
        if subprocess.run(probe, capture_output=True, cwd=ROOT, check=False).returncode:
            # The user nobody may not read our files. Root without capabilities is to the kernel a user like any other.
            return ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
        os.chown(self.directory, NOBODY, NOBODY)
        return as_nobody

    # ---- life

    def start(self, *, ready: bool = True) -> None:
        """Start, and return when it is ready, or, with `ready=False`, when it accepts clients."""
        command = [*self.prefix, sys.executable, "-m", "proxy", "serve", "--config", str(self.config_path)]
        self._process = process = OwnedProcess(command, log=self.log_path, env=self._environment, cwd=ROOT)
        started_at = time.monotonic()
        while not (self.get("/readyz").status == 200 if ready else self._accepts()):
            if (code := process.exit_code()) is not None:
                raise AssertionError(f"the cluster ended with code {code}:\n{self.log_tail()}")
            if time.monotonic() - started_at > self._ready_timeout_s:
                answer = self.get("/readyz")
                raise AssertionError(f"the cluster is not ready: {answer}\n{self.log_tail()}")
            time.sleep(0.05)

    def _accepts(self) -> bool:
        if self.get("/healthz").status != 200:
            return False
        try:
            socket.create_connection((HOST, self.port), timeout=BUSY_S).close()
        except OSError:
            return False
        return True

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send the supervisor a signal."""
        assert self._process is not None
        self._process.signal(number)

    def wait(self, timeout_s: float = BUSY_S) -> int | None:
        """The supervisor's exit code, or None if it is still there after that time."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> int | None:
        """SIGTERM, then force. Returns the exit code; None if it was never started."""
        process, self._process = self._process, None
        return None if process is None else process.stop(15.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        log = self.log_text()
        self._removal()
        late = [line for line in log.splitlines() if "Permission denied: '" in line and "/lib/python3" in line]
        assert not late, f"a worker imports this only when it needs it (LATE_IMPORTS): {late}"

    # ---- looks

    def get(
        self, path: str, timeout_s: float = BUSY_S, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """GET, or another method, on the admin port."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.admin_port}{path}", method=method, headers=dict(headers or {})
        )
        try:
            with _opener.open(request, timeout=timeout_s) as response:
                return Answer(response.status, response.read().decode(), dict(response.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode(), dict(error.headers))
        except OSError as error:
            return Answer(0, str(error))

    def wait_for_readiness(self, *, ready: bool) -> None:
        """Wait until `/readyz` says so."""
        status = 200 if ready else 503
        eventually(lambda: self.get("/readyz").status == status, what=f"/readyz is {status}")

    def metrics(self) -> Scrape:
        """One scrape of all processes, collected after now: the cluster keeps one for a second."""
        asked_at = time.time()
        while True:
            answer = self.get("/metrics")
            assert answer.status == 200, answer
            if float(answer.headers.get("X-Collected-At", "inf")) >= asked_at:
                return Scrape.parse(answer.text)
            time.sleep(0.1)

    def wait_for_total(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric is this over all processes: what is counted may be a moment behind what is seen."""
        seen = -1.0

        def has_come() -> bool:
            nonlocal seen
            seen = self.metrics().total(name, **labels)
            return seen == value

        with suppress(NotInTimeError):
            eventually(has_come, what=name)
        assert seen == value, f"{name}{labels}"

    def status(self) -> dict[str, Any]:
        """`/status`."""
        answer = self.get("/status")
        assert answer.status == 200, answer
        status: dict[str, Any] = json.loads(answer.text)
        return status

    def worker_pids(self) -> dict[str, int]:
        """`role-number` to process id, of the workers that run."""
        workers = self.status()["workers"]
        return {f"{worker['role']}-{worker['worker']}": worker["pid"] for worker in workers if worker.get("pid")}

    def log_text(self) -> str:
        """Everything that it has logged."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def wait_for_log(self, *words: str, within_s: float = BUSY_S, since: int = 0) -> str:
        """The first line, from offset `since` on, that has all these words."""

        def find() -> str:
            lines = self.log_text()[since:].splitlines()
            return next((line for line in lines if all(word in line for word in words)), "")

        return eventually(find, what=f"a log line with {words}", within_s=within_s)

    # ---- commands

    def command(
        self, name: str, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the commands against this cluster's configuration."""
        command = [sys.executable, "-m", "proxy", name, "--config", str(self.config_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
