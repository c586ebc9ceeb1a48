"""Two real brokers on one metadata store: topics have an owner, and the other broker redirects to it.

Three Java processes: ZooKeeper; a broker with a bookie in it, as the standalone is; and a broker that has nothing of its
own, which may be killed. They listen on loopback only.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from local.ports import free_port
from local.process import OwnedProcess
from local.standalone import Standalone, StandaloneError

from .waiting import eventually

ZOOKEEPER_TIMEOUT_S = 30.0
SMALL = "-Xms32m -Xmx96m -XX:MaxDirectMemorySize=64m"
SESSION_TIMEOUT_MS = 3000
"""How long after a broker's death its topics have no owner."""


class PairedBroker(Standalone):
    """One of the two. With ``has_bookie`` it keeps the messages of both."""

    def __init__(self, home: Path, data: Path, metadata_url: str, *, has_bookie: bool) -> None:
        conf = {
            "loadBalancerEnabled": "true",
            "loadManagerClassName": "org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl",
            "loadBalancerLoadSheddingStrategy": "org.apache.pulsar.broker.loadbalance.impl.ThresholdShedder",
            "loadBalancerSheddingEnabled": "false",
            "defaultNumberOfNamespaceBundles": "16",
            "metadataStoreUrl": metadata_url,
            "metadataStoreSessionTimeoutMillis": str(SESSION_TIMEOUT_MS),
            "bookkeeperMetadataServiceUri": f"metadata-store:{metadata_url}",
        }
        super().__init__(home, data, conf=conf)
        self._command = [str(home / "bin" / "pulsar"), "broker"]
        if has_bookie:
            self._command[1:] = [
                "standalone",
                *("--no-functions-worker", "--no-stream-storage"),
                *("--metadata-url", metadata_url),
                *("--bookkeeper-port", str(self.bookie_port)),
                *("--bookkeeper-dir", str(self.data / "bookkeeper")),
            ]

    def start(self) -> None:
        if self.running:
            raise StandaloneError("the broker is running already")
        self._prepare()
        self.kill()
        self._process = OwnedProcess(
            self._command,
            log=self.log_path,
            env=self._environment() | {"PULSAR_BROKER_CONF": str(self.data / "broker.conf")},
        )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.kill()
            raise


class Pair:
    def __init__(self, home: Path, data: Path) -> None:
        self._home, self._data = home, data
        self._port = free_port()
        url = f"zk:127.0.0.1:{self._port}"
        self.brokers = (
            PairedBroker(home, data / "a", url, has_bookie=True),
            PairedBroker(home, data / "b", url, has_bookie=False),
        )
        self._zookeeper: OwnedProcess | None = None

    def __enter__(self) -> Self:
        self._data.mkdir(exist_ok=True)
        (self._data / "tmp").mkdir(exist_ok=True)
        conf = self._data / "zookeeper.conf"
        conf.write_text(
            f"tickTime=500\ndataDir={self._data / 'zookeeper'}\nclientPort={self._port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\nforceSync=no\n"
        )
        environment = self.brokers[0]._environment() | {
            "PULSAR_ZK_CONF": str(conf),
            "PULSAR_MEM": SMALL,
            "PULSAR_LOG_DIR": str(self._data / "logs"),
            "PULSAR_EXTRA_OPTS": f"-Djava.io.tmpdir={self._data / 'tmp'}",
        }
        command = [str(self._home / "bin" / "pulsar"), "zookeeper"]
        self._zookeeper = OwnedProcess(command, log=self._data / "zookeeper.log", env=environment)
        eventually(self._takes, what="ZooKeeper takes connections", within_s=ZOOKEEPER_TIMEOUT_S)
        print("zk up", time.monotonic())
        for broker in self.brokers:
            broker.start()
            print("broker up", time.monotonic())
        return self

    def _takes(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in reversed(self.brokers):
            broker.kill()
        if self._zookeeper is not None:
            self._zookeeper.kill()
