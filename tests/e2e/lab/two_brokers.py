"""Two real brokers on one metadata store: each topic has one of them as its owner, the other one redirects there.

Three Java processes, all on loopback: ZooKeeper; a broker with the bookie for both, as the standalone is; and a broker
that has nothing of its own, so that it may be killed.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from local.ports import free_port
from local.process import OwnedProcess
from local.standalone import Standalone

from .waiting import eventually

HOST = "127.0.0.1"
ZOOKEEPER_READY_S = 60.0
SESSION_TIMEOUT_MS = 10_000
"""So long after a broker's death its topics still count as its own; a broker that a busy machine keeps from telling
ZooKeeper that it lives, for as long, ends itself.
"""


class PairedBroker(Standalone):
    """One of the two; ``has_bookie``: it keeps the messages of both."""

    def __init__(
        self,
        home: Path,
        data: Path,
        metadata_url: str,
        *,
        has_bookie: bool,
        secured: bool = False,
        more_conf: Mapping[str, str] | None = None,
    ) -> None:
        conf = {
            "metadataStoreUrl": metadata_url,
            "metadataStoreSessionTimeoutMillis": str(SESSION_TIMEOUT_MS),
            "bookkeeperMetadataServiceUri": f"zk+hierarchical://{metadata_url.removeprefix('zk:')}/ledgers",
            "loadBalancerEnabled": "true",
            "loadBalancerSheddingEnabled": "false",
            "loadManagerClassName": "org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl",
            "defaultNumberOfNamespaceBundles": "16",
            **(more_conf or {}),
        }
        super().__init__(home, data, secured=secured, conf=conf)
        self.secret_key = self.data.parent / "secret.key"  # one for both
        self._metadata_url = metadata_url
        self._has_bookie = has_bookie

    def start(self, *, healthy: bool = True) -> None:
        """Start, and return when the broker is healthy; or, with ``healthy=False``, at once."""
        self._prepare()
        self.kill()
        environment = self.environment() | {"PULSAR_BROKER_CONF": str(self.data / "broker.conf")}
        self._process = OwnedProcess(self._command(), log=self.log_path, env=environment)
        if healthy:
            self._wait_until_healthy(self._process)

    def token_file(self, role: str) -> Path:
        """Return the file with a role's token, which is good for both."""
        return self.data.parent / "tokens" / f"{role}.jwt"

    def environment(self) -> dict[str, str]:
        """For Pulsar's scripts."""
        return self._environment()

    def _command(self) -> list[str]:
        script = str(self.home / "bin" / "pulsar")
        if not self._has_bookie:
            return [script, "broker"]
        return [
            script,
            "standalone",
            *("--no-functions-worker", "--no-stream-storage"),
            *("--metadata-url", self._metadata_url),
            *("--bookkeeper-port", str(self.bookie_port)),
            *("--bookkeeper-dir", str(self.data / "bookkeeper")),
        ]


class TwoBrokers:
    """``lasting`` has the bookie; ``mortal`` may be killed, and started again. Use as a context manager.

    ``secured``, ``conf``: as Standalone has them, of both. ``alone``: ``mortal`` is not started.
    """

    def __init__(
        self,
        home: Path,
        data: Path,
        *,
        secured: bool = False,
        conf: Mapping[str, str] | None = None,
        alone: bool = False,
    ) -> None:
        self._home = home
        self._data = data
        self._zookeeper_port = free_port()
        self._zookeeper: OwnedProcess | None = None
        self._alone = alone
        self.metadata_url = url = f"zk:{HOST}:{self._zookeeper_port}"
        self.lasting = PairedBroker(home, data / "lasting", url, has_bookie=True, secured=secured, more_conf=conf)
        self.mortal = PairedBroker(home, data / "mortal", url, has_bookie=False, secured=secured, more_conf=conf)

    def __enter__(self) -> Self:
        try:
            self._start_zookeeper()
            self.lasting.start()
            if not self._alone:
                self.mortal.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self.mortal.kill()
        self.lasting.kill()
        if self._zookeeper is not None:
            self._zookeeper.kill()

    def _start_zookeeper(self) -> None:
        settings = {
            "clientPort": self._zookeeper_port,
            "clientPortAddress": HOST,
            "dataDir": self._data / "zookeeper",
            "tickTime": 500,
            "admin.enableServer": "false",
            "forceSync": "no",
        }
        conf = self._data / "zookeeper.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        environment = self.lasting.environment() | {
            "PULSAR_ZK_CONF": str(conf),
            "PULSAR_MEM": "-Xms32m -Xmx96m",
            "PULSAR_LOG_DIR": str(self._data / "logs"),
            "PULSAR_EXTRA_OPTS": f"-Djava.io.tmpdir={self._data}",
        }
        command = [str(self._home / "bin" / "pulsar"), "zookeeper"]
        self._zookeeper = OwnedProcess(command, log=self._data / "zookeeper.log", env=environment)
        eventually(self._accepts, what="ZooKeeper accepts connections", within_s=ZOOKEEPER_READY_S)

    def _accepts(self) -> bool:
        try:
            socket.create_connection((HOST, self._zookeeper_port), timeout=10).close()
        except OSError:
            return False
        return True
