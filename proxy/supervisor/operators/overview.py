"""What the page at the admin port shows: a bounded part of the status, connections by principal, the last events."""

import time
from typing import Any

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import ConnectionSums, Empty, Method
from proxy.runtime.observability.connection_sums import merge_sums
from proxy.runtime.rpc.errors import RpcError
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.operators.events import RecentEvents
from proxy.supervisor.operators.report import ClusterReport
from proxy.supervisor.processes.worker_process import WorkerProcess

CALL_TIMEOUT_S = 2.0
BROKERS_SHOWN_MAX = 100
CERTIFICATES_SHOWN_MAX = 50
TEXT_CHARACTERS_MAX = 300
"""Of a text that a worker tells: it may be compromised."""

_CLUSTER = (
    *("cluster", "version", "generation", "python", "openssl", "ready", "not_ready_because", "notes"),
    *("leaving", "draining", "replacing_workers", "listeners", "service_url", "authentication"),
)
_WORKER = ("role", "worker", "state", "pid", "uptime_seconds", "restarts", "connections")


class ClusterOverview:
    """Calls the workers and says what is shown of them."""

    def __init__(self, cluster: Cluster, report: ClusterReport, events: RecentEvents) -> None:
        self._cluster = cluster
        self._report = report
        self._events = events

    async def overview_json(self) -> bytes:
        """Return the overview as JSON, in one line."""
        status: dict[str, Any] = {}
        sums: list[ConnectionSums] = []

        async def ask_status() -> None:
            status.update(await self._report.status())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_status)
            for slot in self._cluster.slots_of(Role.FORWARDER):
                for worker in slot.callable_workers:
                    nursery.start_soon(self._ask_sums, worker, sums)
        return msgspec.json.encode(self._overview(status, sums))

    @staticmethod
    async def _ask_sums(worker: WorkerProcess, sums: list[ConnectionSums]) -> None:
        try:
            sums.append(await worker.call(Method.SUM_CONNECTIONS, Empty(), ConnectionSums, timeout_s=CALL_TIMEOUT_S))
        except RpcError:
            return  # it has ended, or is of a version that knows no sums

    def _overview(self, status: dict[str, Any], sums: list[ConnectionSums]) -> dict[str, Any]:
        brokers = _brokers(status)
        workers = [*status["workers"], *status["leaving_workers"]]
        ends = status["certificate_ends"]
        return {
            "at_unix_s": round(time.time(), 3),
            **{key: status[key] for key in _CLUSTER},
            "workers": [{key: _cut(one[key]) for key in _WORKER if key in one} for one in workers],
            "brokers": brokers[:BROKERS_SHOWN_MAX],
            "brokers_known": len(brokers),
            "brokers_reachable": sum(one["reachable"] == one["asked"] for one in brokers),
            "principals": [
                {
                    "principal": one.principal,
                    "connections": one.connections,
                    "to_broker": one.bytes_per_s_to_broker,
                    "to_client": one.bytes_per_s_to_client,
                }
                for one in merge_sums(sums)
            ],
            "has_rates": any(one.interval_ms for one in sums),
            "sessions": _cut(status["sessions_near_expiry"]),
            "certificates": _cut(ends[:CERTIFICATES_SHOWN_MAX]),
            "certificates_known": len(ends),
            "events": self._events.latest(),
        }


def _brokers(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the brokers as all lookup workers see them together, those that some cannot reach first."""
    known: dict[str, dict[str, Any]] = {}
    for worker in status["workers"]:
        if worker["role"] != Role.LOOKUP:  # a captured one of another role has none to tell of
            continue
        for broker in worker.get("brokers", ()):
            name = _cut(broker["broker"])
            one = known.setdefault(name, {"broker": name, "reachable": 0, "asked": 0, "detail": ""})
            one["asked"] += 1
            one["reachable"] += broker["reachable"]
            if not broker["reachable"] or not one["detail"]:
                one["detail"] = _cut(broker["detail"])
    return sorted(known.values(), key=lambda one: (one["reachable"] == one["asked"], one["broker"]))


def _cut(value: Any) -> Any:
    """Return a value with its texts cut to TEXT_CHARACTERS_MAX."""
    match value:
        case str():
            return value[:TEXT_CHARACTERS_MAX]
        case list():
            return [_cut(one) for one in value]
        case dict():
            return {key: _cut(one) for key, one in value.items()}
        case _:
            return value
