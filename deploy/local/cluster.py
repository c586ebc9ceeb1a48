"""The proxy cluster as a child process, with a configuration of its own, for `make run`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from local.console import MakeError, Progress, silent
from local.environment import clean_environment
from local.process import OwnedProcess, OwnedServer

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
{web}

[admin]
bind = "127.0.0.1:{admin_port}"

[limits]
drain_timeout_ms = {drain_timeout_ms}
"""
_HTTP = """
[[http_listener]]
bind = "127.0.0.1:{http_port}"
"""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ClusterError(MakeError):
    """The cluster did not become ready; the text holds the end of its log."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The brokers' `service_url`, the listeners' ports, and further TOML.

    `http_port`: of a listener for HTTP, which needs the brokers' `web_service_url`; 0: none.
    """

    service_url: str
    port: int
    admin_port: int
    web_service_url: str = ""
    http_port: int = 0
    more_config: str = ""


class Cluster(OwnedServer):
    """A `pulsar-trio-proxy serve` process, with its files in `directory` (a short path: Unix sockets are in it).

    A stop starts a drain, which has a deadline of its own; workers exit at the end of a killed supervisor's pipe.
    """

    stop_timeout_s = _DRAIN_MS / 1000 + 10

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
        self.http_url = f"http://127.0.0.1:{config.http_port}" if config.http_port else ""
        self.admin_url = f"http://127.0.0.1:{config.admin_port}"
        self._command = command
        self._runtime_dir = directory / "run"
        self._config = _CONFIG.format(
            runtime_dir=json.dumps(str(self._runtime_dir)),
            port=config.port,
            service_url=json.dumps(config.service_url),
            web=f"web_service_url = {json.dumps(config.web_service_url)}" if config.http_port else "",
            admin_port=config.admin_port,
            drain_timeout_ms=_DRAIN_MS,
        )
        if config.http_port:
            self._config += _HTTP.format(http_port=config.http_port)
        self._config += config.more_config
        self._ready_timeout_s = ready_timeout_s
        self._progress = progress

    def start(self) -> None:
        """Start, and return when the cluster is ready, which needs a reachable broker."""
        self._runtime_dir.mkdir(mode=0o700, exist_ok=True)
        self.config_path.write_text(self._config)
        command = [str(self._command), "serve", "--config", str(self.config_path)]
        self._process = OwnedProcess(command, log=self.log_path, env=clean_environment())
        self._wait_until_ready(
            "the cluster",
            self._obstacle,
            ClusterError,
            timeout_s=self._ready_timeout_s,
            poll_s=_POLL_S,
            progress=self._progress,
        )

    def _obstacle(self) -> str:
        try:
            with _opener.open(f"{self.admin_url}/readyz", timeout=5):
                return ""
        except urllib.error.HTTPError as error:
            with error:
                return error.read(200).decode(errors="replace").strip() or str(error)
        except OSError:
            return "not listening yet"
