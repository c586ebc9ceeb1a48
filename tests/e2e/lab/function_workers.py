"""Two real function workers beside a broker: one of them is the leader, and each runs its share of the instances."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from local.admin import Admin, AdminError
from local.ports import free_port
from local.process import OwnedProcess

from .two_brokers import HOST, TwoBrokers
from .waiting import eventually

READY_S = 180.0
PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
_RUNTIME = "org.apache.pulsar.functions.runtime.thread.ThreadRuntimeFactory"


class FunctionWorkers:
    """The workers' URLs, and the broker for both; all of them take tokens, and know `proxy` as a proxy."""

    def __init__(self, home: Path, data: Path) -> None:
        self._home = home
        self._data = data
        self._brokers = TwoBrokers(home, data, secured=True, alone=True)
        self.broker = self._brokers.lasting
        self.ports = (free_port(), free_port())
        self._processes: list[OwnedProcess] = []

    def __enter__(self) -> Self:
        try:
            self._brokers.__enter__()
            for port in self.ports:  # one after the other: two that create the same topics at once fail
                self._start(port)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        self._brokers.__exit__(kind, error, trace)

    def leader(self, port: int) -> int:
        """The leader's port, as the worker at this one says; 0 if it knows none, or does not answer."""
        admin = Admin(f"http://{HOST}:{port}", self.broker.token("admin"), READY_S)
        try:
            found = admin.request("GET", "worker/cluster/leader")
        except (AdminError, OSError):
            return 0
        return found["port"] if isinstance(found, dict) else 0

    def _start(self, port: int) -> None:
        directory = self._data / f"worker-{port}"
        (directory / "tmp").mkdir(parents=True)
        broker = self.broker
        token = broker.token_file("admin")
        settings = {
            "workerId": f"worker-{port}",
            "workerHostname": "localhost",
            "workerPort": port,
            "configurationMetadataStoreUrl": self._brokers.metadata_url,
            "pulsarServiceUrl": broker.service_url,
            "pulsarWebServiceUrl": broker.admin_url,
            "pulsarFunctionsCluster": "standalone",
            "pulsarFunctionsNamespace": "public/functions",
            "functionMetadataTopicName": "metadata",
            "clusterCoordinationTopicName": "coordinate",
            "functionAssignmentTopicName": "assignments",
            "schedulerClassName": "org.apache.pulsar.functions.worker.scheduler.RoundRobinScheduler",
            "numFunctionPackageReplicas": 1,
            "failureCheckFreqMs": 30_000,
            "rescheduleTimeoutMs": 60_000,
            "instanceLivenessCheckFreqMs": 30_000,
            "topicCompactionFrequencySec": 1800,
            "initialBrokerReconnectMaxRetries": 60,
            "assignmentWriteMaxRetries": 60,
            "rebalanceCheckFreqSec": -1,
            "downloadDirectory": str(directory / "download"),
            "functionRuntimeFactoryClassName": _RUNTIME,
            "functionRuntimeFactoryConfigs": {"threadGroupName": "functions"},
            "authenticationEnabled": True,
            "authorizationEnabled": True,
            "authenticationProviders": ["org.apache.pulsar.broker.authentication.AuthenticationProviderToken"],
            "properties": {"tokenSecretKey": f"file://{broker.secret_key}"},
            "superUserRoles": ["admin", "proxy"],
            "proxyRoles": ["proxy"],
            "brokerClientAuthenticationEnabled": True,
            "brokerClientAuthenticationPlugin": PLUGIN,
            "brokerClientAuthenticationParameters": f"file://{token}",
        }
        conf = directory / "functions_worker.yml"
        conf.write_text(json.dumps(settings))  # JSON is YAML
        environment = broker.environment() | {
            "PULSAR_WORKER_CONF": str(conf),
            "PULSAR_MEM": "-Xms64m -Xmx192m -XX:MaxDirectMemorySize=128m",
            "PULSAR_LOG_DIR": str(directory),
            "PULSAR_EXTRA_OPTS": f"-Djava.io.tmpdir={directory / 'tmp'}",
        }
        command = [str(self._home / "bin" / "pulsar"), "functions-worker"]
        process = OwnedProcess(command, log=directory / "worker.log", env=environment)
        self._processes.append(process)

        def answers() -> bool:
            assert process.exit_code() is None, process.log_tail()
            return self.leader(port) != 0

        eventually(answers, what="a function worker knows its leader", within_s=READY_S, every_s=0.25)
