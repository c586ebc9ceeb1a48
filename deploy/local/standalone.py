"""A standalone Pulsar broker as a child process, for `make run` and the end-to-end tests.

It listens on loopback only, writes only below one data directory, and ends with this process. With `secured` it has
token authentication and authorization, and `proxyRoles=proxy`, so that a client behind a proxy needs grants of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Self

from local.admin import Admin
from local.console import MakeError, Progress, silent
from local.ports import free_port
from local.process import OwnedProcess, OwnedServer
from local.tokens import make_token, write_private

ROLES = ("admin", "proxy", "alice", "bob")

_HOST = "127.0.0.1"
_POLL_S = 0.25
_TOKEN_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
_TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
_QUICK_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A broker for trials ends before the JVM's better compiler has earned its cost: a start takes half the CPU time."""
_WAKING_THREADS = ("broker-client-s", "bookkeeper-ml-c")
"""The broker's own client's timer wakes each ms, its cache each 10 ms: that is six sevenths of an idle broker's CPU."""
_TIMER_SLACK_NS = 100_000_000


class StandaloneError(MakeError):
    """The broker did not start; the text holds the end of its log."""


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """Ports (0: any free one), the JVM's options, and how long to wait for a healthy broker."""

    broker_port: int = 0
    web_port: int = 0
    bookie_port: int = 0
    jvm_options: Sequence[str] = ()
    memory: str = "-Xms256m -Xmx512m -XX:MaxDirectMemorySize=512m"
    ready_timeout_s: float = 180.0
    progress: Progress = silent


_DEFAULT_OPTIONS = BrokerOptions()


class Standalone(OwnedServer):
    """A broker process. Data, ports and tokens stay the same across restarts. `conf`: settings of broker.conf."""

    def __init__(
        self,
        home: Path,
        data: Path,
        *,
        secured: bool = False,
        conf: Mapping[str, str] | None = None,
        options: BrokerOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self.home = home
        self.data = data.absolute()  # the broker's script changes the directory
        self.secured = secured
        self.broker_port = options.broker_port or free_port()
        self.web_port = options.web_port or free_port(avoid=(self.broker_port,))
        self.bookie_port = options.bookie_port or free_port(avoid=(self.broker_port, self.web_port))
        self.log_path = self.data / "broker.log"
        self.secret_key = self.data / "secret.key"
        self._conf = dict(conf or {})
        self._options = options

    @property
    def service_url(self) -> str:
        """URL for clients of the binary protocol."""
        return f"pulsar://localhost:{self.broker_port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin API."""
        return f"http://localhost:{self.web_port}"

    def token_file(self, role: str) -> Path:
        """Return the file with a role's token."""
        return self.data / "tokens" / f"{role}.jwt"

    def token(self, role: str) -> str:
        """Return a role's token, without expiry."""
        return self.token_file(role).read_text()

    def admin(self, timeout_s: float = 30.0) -> Admin:
        """Return a client of the broker's admin API, with the role `admin` if the broker is secured."""
        url = f"http://{_HOST}:{self.web_port}"
        return Admin(url, self.token("admin") if self.secured else None, timeout_s)

    def start(self) -> None:
        """Start, and return when the broker is healthy."""
        if self.running:
            raise StandaloneError("the broker is running already")
        self._prepare()
        command = [
            str(self.home / "bin" / "pulsar"),
            "standalone",
            *("--no-functions-worker", "--no-stream-storage"),
            *("--bookkeeper-port", str(self.bookie_port)),
            *("--bookkeeper-dir", str(self.data / "bookkeeper")),
            *("--metadata-dir", str(self.data / "metadata")),
        ]
        self.kill()  # descendants of an earlier process that ended by itself
        self._process = OwnedProcess(command, log=self.log_path, env=self._environment())
        self._wait_until_healthy(self._process)

    def _wait_until_healthy(self, process: OwnedProcess) -> None:
        """Return when the broker is healthy; otherwise kill it. Raises StandaloneError."""
        admin = self.admin(timeout_s=5.0)
        try:
            self._wait_until_ready(
                "the broker",
                lambda: "" if admin.health() else f"log: {self.log_path}",
                StandaloneError,
                timeout_s=self._options.ready_timeout_s,
                poll_s=_POLL_S,
                progress=self._options.progress,
            )
            _let_sleep(process.pid)
        except BaseException:
            self.kill()
            raise

    def restart(self) -> None:
        """Stop and start, with the same data and ports."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Suspend the process: its connections stay open, and the kernel still accepts new ones."""
        if self._process is not None:
            self._process.signal(Signals.SIGSTOP)

    def resume(self) -> None:
        """Resume the process after a pause."""
        if self._process is not None:
            self._process.signal(Signals.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        (self.data / "tmp").mkdir(parents=True, exist_ok=True)
        if self.secured:
            self._write_secrets()
        # The file is a Java properties file, where the last of equal keys wins: overrides are appended.
        lines = [(self.home / "conf" / "standalone.conf").read_text(), ""]
        lines += [f"{key}={value}" for key, value in self._settings().items()]
        path = self.data / "broker.conf"
        path.touch(mode=0o600)  # it may hold the admin's token
        path.write_text("\n".join(lines) + "\n")

    def _write_secrets(self) -> None:
        if not self.secret_key.exists():
            write_private(self.secret_key, os.urandom(32))
        for role in ROLES:
            if not self.token_file(role).exists():
                token = make_token(self.secret_key.read_bytes(), role)
                write_private(self.token_file(role), token.encode())

    def _settings(self) -> dict[str, str]:
        settings = {
            "bindAddress": _HOST,
            "advertisedAddress": "localhost",
            "brokerServicePort": str(self.broker_port),
            "webServicePort": str(self.web_port),
            # The bookie uses --bookkeeper-port only with this; otherwise its port may differ at the next start, and
            # then it refuses the data that it wrote under the old one.
            "allowEphemeralPorts": "true",
            "listeningInterface": _loopback_interface(),
        }
        if self.secured:
            settings |= {
                "authenticationEnabled": "true",
                "authenticationProviders": _TOKEN_PROVIDER,
                "tokenSecretKey": f"file://{self.secret_key}",
                "authorizationEnabled": "true",
                "superUserRoles": "admin,proxy",
                "proxyRoles": "proxy",
                "brokerClientAuthenticationPlugin": _TOKEN_PLUGIN,
                "brokerClientAuthenticationParameters": f'{{"token":"{self.token("admin")}"}}',
            }
        return settings | self._conf

    def _environment(self) -> dict[str, str]:
        # The user's variables for other brokers must not change this one; the script reads all of these.
        unwanted = ("PULSAR_", "BOOKIE_", "BK_", "OPTS", "CLASSPATH")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        return environment | {
            "PULSAR_STANDALONE_CONF": str(self.data / "broker.conf"),
            "PULSAR_LOG_DIR": str(self.data / "logs"),
            "PULSAR_MEM": self._options.memory,
            "PULSAR_GC": _QUICK_START,
            "PULSAR_GC_LOG": " ",  # none: an empty value would mean the default
            # Native libraries are unpacked there, and a killed broker does not delete them.
            "PULSAR_EXTRA_OPTS": " ".join([f"-Djava.io.tmpdir={self.data / 'tmp'}", *self._options.jvm_options]),
        }


def _let_sleep(pid: int) -> None:
    """Have the kernel wake _WAKING_THREADS up to _TIMER_SLACK_NS late, where it lets us (Linux, as root)."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().startswith(_WAKING_THREADS):
                Path(f"/proc/{thread.name}/timerslack_ns").write_text(str(_TIMER_SLACK_NS))


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"
