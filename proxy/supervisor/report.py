"""What the cluster tells operators: metrics of all processes in one, readiness, and status."""

import time
from typing import Any

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Text
from proxy import __version__
from proxy.config.types import Listener
from proxy.runtime.metrics import exposition, merged_exposition
from proxy.runtime.near_expiry import merged
from proxy.runtime.rpc_client import RpcError
from proxy.supervisor.cluster import Cluster
from proxy.supervisor.slot import Slot, SlotState

ASK_TIMEOUT_S = 2.0

NEAR_EXPIRY = "sessions_near_expiry"
"""What each forwarder says of its own (proxy.forwarder.service) is shown of all together."""


class Report:
    """Asks the workers, and puts their answers together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def metrics(self) -> bytes:
        """The metrics of every process. A worker that does not answer is left out; its restart shows elsewhere."""
        name = self._cluster.config.cluster.name
        own = {"cluster": name, "role": Role.SUPERVISOR.value, "worker": "0"}
        parts = [(own, exposition(self._cluster.registry))]
        texts = await self._ask_all(Method.COLLECT_METRICS)
        for slot in self._cluster.slots:
            if slot in texts:
                labels = {"cluster": name, "role": slot.role.value, "worker": str(slot.index)}
                parts.append((labels, texts[slot]))
        return merged_exposition(parts)

    async def status(self) -> dict[str, object]:
        """The whole cluster, as /status and `status` show it."""
        texts = await self._ask_all(Method.GET_STATUS)
        reasons = self._not_ready(texts)
        workers = [self._worker_status(slot, texts.get(slot)) for slot in self._cluster.slots]
        return {
            "cluster": self._cluster.config.cluster.name,
            "version": __version__,
            "ready": not reasons,
            "not_ready_because": reasons,
            "draining": self._cluster.draining,
            "generation": self._cluster.generation,
            "replacing_workers": self._cluster.replacing,
            "listeners": [_url(listener) for listener in self._cluster.config.listener],
            "service_url": self._cluster.config.brokers.service_url,
            "authentication": self._cluster.config.authentication.enabled,
            NEAR_EXPIRY: merged(worker.pop(NEAR_EXPIRY) for worker in workers if NEAR_EXPIRY in worker),
            "workers": workers,
        }

    async def not_ready_reasons(self) -> list[str]:
        """Why clients should not be sent here now; empty: they should."""
        return self._not_ready(await self._ask_all(Method.GET_STATUS))

    def _not_ready(self, texts: dict[Slot, str]) -> list[str]:
        reasons = ["draining"] if self._cluster.draining else []
        if not self._cluster.started:
            reasons.append("starting")
        reasons += [
            f"no {role} worker answers"
            for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER)
            if not any(slot in texts for slot in self._cluster.of(role))
        ]
        lookups = [msgspec.json.decode(texts[slot]) for slot in self._cluster.of(Role.LOOKUP) if slot in texts]
        if lookups and not any(status["ready"] for status in lookups):
            reasons.append("no broker is reachable")
        return reasons

    def _worker_status(self, slot: Slot, text: str | None) -> dict[str, Any]:
        status: dict[str, Any] = {
            "role": slot.role.value,
            "worker": slot.index,
            "state": slot.state.value,
            "restarts": slot.restarts,
        }
        if slot.worker is not None:
            status["pid"] = slot.worker.pid
            status["uptime_seconds"] = round(time.monotonic() - slot.worker.started, 1)
        if text is not None:
            status.update(msgspec.json.decode(text))
        elif slot.state is SlotState.RUNNING:
            status["state"] = "not answering"
        return status

    async def _ask_all(self, method: int) -> dict[Slot, str]:
        """Ask every running worker at the same time."""
        texts: dict[Slot, str] = {}

        async def ask(slot: Slot) -> None:
            if slot.worker is None:
                return
            try:
                texts[slot] = (await slot.worker.call(method, Empty(), Text, timeout_s=ASK_TIMEOUT_S)).text
            except RpcError:
                return

        async with trio.open_nursery() as nursery:
            for slot in self._cluster.slots:
                if slot.state is SlotState.RUNNING:
                    nursery.start_soon(ask, slot)
        return texts


def _url(listener: Listener) -> str:
    return f"pulsar{'+ssl' if listener.tls is not None else ''}://{listener.bind}"
