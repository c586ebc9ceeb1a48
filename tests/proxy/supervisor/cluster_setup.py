"""A cluster of fake workers and sockets, for the tests of proxy.supervisor.cluster."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from supervisor_fakes import FakeDirectory, FakeSocket, FakeWorker, Workshop, make_config

from proto.rpc_pb2 import Method
from proxy.config.types import Config
from proxy.runtime.shared.fd_store_channel import StoreChannel, close_descriptors
from proxy.supervisor.cluster import client_listeners
from proxy.supervisor.cluster import cluster as cluster_module
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.cluster.slot import ServeChannel
from proxy.supervisor.handover.exec_handover import HandoverState

KEY = b"s" * 32


def config_with(**tables: Any) -> Config:
    tables["cluster"] = {"forwarders": 2} | tables.get("cluster", {})
    tables["relay"] = {"crash_safe": False} | tables.get("relay", {})
    return make_config(**tables)


def forwarder_like(worker: FakeWorker) -> None:
    """Forwarders take over what they are given, and leave what they have."""

    async def adopt(line: StoreChannel) -> None:
        while (received := await line.receive()) is not None:
            close_descriptors(received[1])
            worker.adopted += [relay.id for relay in received[0].relays]
            worker.listeners += received[0].listeners
            if received[0].complete:
                return

    if worker.line is not None:
        line = worker.line
        worker.answers[Method.START] = lambda _request: adopt(line)
        worker.answers[Method.DRAIN] = lambda request: worker.leave_line() if request.hand_over else None


class Setup:
    """A cluster of fakes, and the log of all that happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.workshop = Workshop(self.log)
        self.directory = FakeDirectory(self.log)
        self.serve_admin: ServeChannel | None = None
        self._clusters: list[Cluster] = []
        monkeypatch.setattr(cluster_module, "WorkerProcess", self.workshop)
        monkeypatch.setattr(client_listeners, "bind_tcp", lambda key, _bind: FakeSocket(key, self.log))

    def make(self, handover: HandoverState | None = None, **tables: Any) -> Cluster:
        handover = handover or HandoverState(seal_key=KEY)
        fork_server: Any = None  # of no use to a Workshop
        cluster = Cluster(config_with(**tables), self.directory, handover, fork_server, self.serve_admin)  # type: ignore[arg-type]
        self._clusters.append(cluster)
        return cluster

    async def started(self, nursery: trio.Nursery, handover: HandoverState | None = None, **tables: Any) -> Cluster:
        cluster = self.make(handover, **tables)
        ready = trio.Event()
        nursery.start_soon(cluster.run, ready)
        await ready.wait()
        return cluster

    async def crash_safe(self, nursery: trio.Nursery, **tables: Any) -> Cluster:
        """A cluster whose forwarders leave their relays to their successors."""
        self.workshop.prepare = forwarder_like
        cluster = await self.started(nursery, relay={"crash_safe": True}, **tables)
        await trio.testing.wait_all_tasks_blocked()
        return cluster

    def events(self, what: Any) -> list[str]:
        return [name for name, event in self.log if event == what]

    def close(self) -> None:
        self.workshop.close()
        for cluster in self._clusters:
            cluster.close_sockets()
