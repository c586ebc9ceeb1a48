"""The proxy cluster as a child process, with a configuration of its own, for `make run`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from local.console import Progress, silent
from local.environment import clean_environment
from local.process import OwnedProcess

_POLL_S = 0.2
_DRAIN_MS = 5000
_CONFIG = """\
# Written by `make run`.
[cluster]
name = "local"
runtime_dir = {runtime_dir}

[[listener]]
bind = "127.0.0.1:{port}"

[brokers]
service_url = {service_url}

[admin]
bind = "127.0.0.1:{admin_port}"

[limits]
drain_timeout_ms = {drain_timeout_ms}
"""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ClusterError(Exception):
    """The cluster did not become ready; the text holds the end of its log."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The brokers' `service_url`, the listeners' ports, and further TOML."""

    service_url: str
    port: int
    admin_port: int
    more_config: str = ""


class Cluster:
    """A `pulsar-trio-proxy serve` process, with its files in `directory` (a short path: Unix sockets are in it)."""

    def __init__(
        self,
        command: Path,
        directory: Path,
        config: ClusterConfig,
        *,
        ready_timeout_s: float = 60.0,
        progress: Progress = silent,
    ) -> None:
        self.config_path = directory / "config.toml"
        self.log_path = directory / "cluster.log"
        self.service_url = f"pulsar://127.0.0.1:{config.port}"
        self.admin_url = f"http://127.0.0.1:{config.admin_port}"
        self._command = command
        self._runtime_dir = directory / "run"
        self._config = _CONFIG.format(
            runtime_dir=json.dumps(str(self._runtime_dir)),
            port=config.port,
            service_url=json.dumps(config.service_url),
            admin_port=config.admin_port,
            drain_timeout_ms=_DRAIN_MS,
        )
        self._config += config.more_config
        self._ready_timeout_s = ready_timeout_s
        self._progress = progress
        self._process: OwnedProcess | None = None

    @property
    def running(self) -> bool:
        """True while the supervisor runs."""
        return self._process is not None and self._process.exit_code() is None

    @property
    def pid(self) -> int | None:
        """The supervisor's process id."""
        return self._process.pid if self._process else None

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self._process.log_tail() if self._process else ""

    def start(self) -> None:
        """Start, and return when the cluster is ready, which needs a reachable broker."""
        self._runtime_dir.mkdir(mode=0o700, exist_ok=True)
        self.config_path.write_text(self._config)
        command = [str(self._command), "serve", "--config", str(self.config_path)]
        self._process = process = OwnedProcess(command, log=self.log_path, env=clean_environment())
        started_at = time.monotonic()
        while not (answer := self._ready())[0]:
            elapsed_s = time.monotonic() - started_at
            if (code := process.exit_code()) is not None:
                raise ClusterError(f"the cluster ended with code {code}:\n{process.log_tail()}")
            if elapsed_s > self._ready_timeout_s:
                text = f"the cluster was not ready after {elapsed_s:.0f} s ({answer[1]})"
                raise ClusterError(f"{text}:\n{process.log_tail()}")
            self._progress(f"Starting the cluster: {elapsed_s:.0f} s ({answer[1]})")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Send SIGTERM, which starts a drain; kill the cluster some time after its own deadline."""
        if self._process is not None:
            self._process.stop(_DRAIN_MS / 1000 + 10)
            self._process = None

    def kill(self) -> None:
        """Kill the supervisor; its workers exit at the end of their liveness pipe."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _ready(self) -> tuple[bool, str]:
        try:
            with _opener.open(f"{self.admin_url}/readyz", timeout=5):
                return True, ""
        except urllib.error.HTTPError as error:
            with error:
                return False, error.read(200).decode(errors="replace").strip()
        except OSError:
            return False, "not listening yet"
