"""Who is measured: proxies in front of the same scripted broker, each as shipped where nothing else is said."""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from local.cluster import Cluster, ClusterConfig
from local.distribution import PULSAR, pulsar_home
from local.ports import free_port
from local.process import OwnedProcess
from local.tokens import make_token

from tests.bench.generator import BenchError, Broker
from tests.e2e.lab.certificates import Pair

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.1
TOKEN_LIFETIME_S = 86_400.0


class Contender(ABC):
    """Something that passes connections on to the broker. What it writes goes below `directory`.

    With a certificate it takes connections in TLS. Brokers say for themselves whether they do.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    answers_lookups: ClassVar[bool] = True
    warm_up_s: ClassVar[float] = 0.5
    """How long each kind of load runs before anything counts."""
    token: str = ""
    """What the load authenticates itself with."""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        self.broker = broker
        self.certificate = certificate
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=directory))
        self.port = free_port()

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The root of its processes."""

    @abstractmethod
    def start(self) -> None:
        """Return when clients can connect."""

    @abstractmethod
    def stop(self) -> None:
        """End it."""

    @abstractmethod
    def log_tail(self) -> str:
        """The end of what it wrote, for an error message."""


class Straight(Contender):
    """No proxy at all: what the generator and the kernel can do by themselves."""

    name = "straight"
    label = "no proxy"

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        super().__init__(broker, directory, certificate)
        self.port = broker.port

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def log_tail(self) -> str:
        return ""


class Ours(Contender):
    """This project's cluster: one forwarder for each CPU, one worker of each other kind; with TLS, session tickets."""

    name = "ours"
    label = "pulsar-trio-proxy"

    _LISTENER = """
[listener.tls]
certificate = "{certificate}"
key = "{key}"
minimum_version = "1.3"
session_tickets = true
"""
    _BROKERS = """
[brokers.tls]
trust = "{trust}"
"""

    def __init__(
        self,
        broker: Broker,
        directory: Path,
        certificate: Pair | None = None,
        more_config: str = "",
        http_port: int = 0,
    ) -> None:
        super().__init__(broker, directory, certificate)
        if certificate:
            more_config += self._LISTENER.format(certificate=certificate.certificate, key=certificate.key)
        if broker.trust:
            more_config += self._BROKERS.format(trust=broker.trust)
        command = Path(sys.executable).with_name("pulsar-trio-proxy")
        self._cluster = Cluster(
            command,
            self.directory,
            ClusterConfig(
                service_url=broker.url,
                port=self.port,
                admin_port=free_port(avoid=(self.port,)),
                web_service_url=f"http://{broker.web_address}",
                http_port=http_port,
                more_config=more_config,
            ),
        )

    @property
    def pid(self) -> int | None:
        return self._cluster.pid

    def start(self) -> None:
        self._cluster.start()

    def stop(self) -> None:
        self._cluster.stop()

    def log_tail(self) -> str:
        return self._cluster.log_tail()


class FramedRelays(Ours):
    """The same cluster with clients whose tokens expire: their relays track frame boundaries (KIP-368)."""

    name = "framed"
    label = "pulsar-trio-proxy, framed relays"

    _CONFIG = """
[authentication]
enabled = true

[authentication.token]
secret_key = "{key}"
"""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        secret = secrets.token_bytes(32)
        key = Path(tempfile.mkdtemp(prefix="key-", dir=directory)) / "secret.key"
        key.write_bytes(secret)
        self.token = make_token(secret, "bench", TOKEN_LIFETIME_S)
        super().__init__(broker, directory, certificate, self._CONFIG.format(key=key))


class _Program(Contender):
    """A contender that is one command."""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        super().__init__(broker, directory, certificate)
        self._process: OwnedProcess | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @abstractmethod
    def command(self) -> list[str]:
        """What to execute; writes the configuration it names."""

    def environment(self) -> Mapping[str, str] | None:
        """Its environment; None: ours."""
        return None

    def start(self) -> None:
        self._process = OwnedProcess(self.command(), log=self.directory / "output.log", env=self.environment())
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _answers(self.port):
            if self._process.exit_code() is not None or time.monotonic() > deadline:
                raise BenchError(f"{self.label} did not start:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(_STOP_TIMEOUT_S)

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process else ""


class Java(_Program):
    """Apache Pulsar's own proxy: its configuration as shipped, the broker's and its own addresses apart."""

    name = "java"
    label = f"Pulsar proxy {PULSAR.version}"
    more_settings: Mapping[str, str] = {}
    warm_up_s = 10.0  # after that much the JIT has compiled what it will: 40,000 connects, 500,000 round trips

    def command(self) -> list[str]:
        home = pulsar_home()
        settings = {
            "clusterName": "bench",
            "brokerServiceURL": f"pulsar://{self.broker.address}",
            "brokerWebServiceURL": f"http://{self.broker.address}",
            "bindAddress": "127.0.0.1",
            "advertisedAddress": "127.0.0.1",
            "servicePort": str(self.port),
            "webServicePort": str(free_port(avoid=(self.port,))),
            "brokerProxyAllowedTargetPorts": str(self.broker.port),
        }
        if self.certificate:
            settings |= {
                "tlsEnabledInProxy": "true",
                "servicePort": "",
                "servicePortTls": str(self.port),
                "tlsCertificateFilePath": self.certificate.certificate,
                "tlsKeyFilePath": self.certificate.key,
            }
        if self.broker.trust:
            settings |= {
                "tlsEnabledWithBroker": "true",
                # 4.0.8 takes the broker's connection for plain if the client's is, and splices into it.
                "proxyZeroCopyModeEnabled": "false",
                "brokerServiceURLTLS": self.broker.url,
                "brokerWebServiceURLTLS": f"https://{self.broker.address}",
                "brokerClientTrustCertsFilePath": self.broker.trust,
            }
        settings |= self.more_settings
        # A Java properties file, where the last of equal keys wins.
        lines = [(home / "conf" / "proxy.conf").read_text(), *(f"{key}={value}" for key, value in settings.items())]
        (self.directory / "proxy.conf").write_text("\n".join(lines) + "\n")
        return [str(home / "bin" / "pulsar"), "proxy"]

    def environment(self) -> Mapping[str, str]:
        # What the user has set for other proxies must not change this one: memory and collector stay the script's.
        unwanted = ("PULSAR_", "BOOKIE_", "BK_", "OPTS", "CLASSPATH")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        settings = {"PULSAR_PROXY_CONF": self.directory / "proxy.conf", "PULSAR_LOG_DIR": self.directory / "logs"}
        return kept | {key: str(value) for key, value in settings.items()}


class HAProxy(_Program):
    """HAProxy, which passes bytes on and knows nothing of Pulsar: what a TCP proxy in C costs."""

    name = "haproxy"
    label = "HAProxy"
    answers_lookups = False

    config = """\
global
    nbthread {threads}
    maxconn 7500
defaults
    mode tcp
    option splice-auto
    timeout connect 10s
    timeout client 1h
    timeout server 1h
frontend clients
    bind 127.0.0.1:{port}{bind}
    default_backend brokers
backend brokers
    server broker {broker}{server}
"""

    def command(self) -> list[str]:
        path = self.directory / "haproxy.cfg"
        bind = ""
        if self.certificate:
            both = self.directory / "listener.pem"
            parts = (self.certificate.certificate, self.certificate.key)
            both.write_text("".join(Path(part).read_text() for part in parts))
            bind = f" ssl crt {both}"
        settings = {"port": self.port, "bind": bind, "broker": self.broker.address}
        settings["server"] = " ssl verify none" if self.broker.trust else ""
        path.write_text(self.config.format(threads=os.cpu_count(), **settings))
        return [haproxy_path(), "-db", "-f", str(path)]


CONTENDERS: dict[str, type[Contender]] = {kind.name: kind for kind in (Ours, Java, HAProxy)}


def haproxy_path() -> str:
    """The program, which Debian keeps where only root looks; empty if it is not installed."""
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin") or ""


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False
