"""One scrape: the metrics of every process, read through the supervisor and merged."""

import time
from collections import Counter
from typing import NamedTuple

import prometheus_client
import trio
from prometheus_client import CollectorRegistry

from proto.roles import Role
from proxy.admin.exposition import Exposition
from proxy.admin.supervisor_client import SupervisorClient
from proxy.common.logs import get_logger
from proxy.runtime.observability.metrics import render_metrics
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError

CONCURRENT_CALLS_MAX = 4
"""Concurrent calls: their replies (each at most exposition.PROCESS_BYTES_MAX) must fit into the supervisor's queue."""


class CollectedMetrics(NamedTuple):
    """The metrics of all processes, and the start of their collection in seconds since 1970."""

    text: bytes
    at: float


class MetricsScrape:
    """Producer of the text of ``/metrics``. Malformed lines of a process are dropped, counted and logged."""

    def __init__(self, cluster: str, source: SupervisorClient, registry: CollectorRegistry) -> None:
        self._cluster = cluster
        self._source = source
        self._registry = registry
        self._dropped = prometheus_client.Counter(
            "pulsar_proxy_dropped_metrics",
            "Lines (too_large: whole texts; principals: use by principal, where all together is too much) left out of "
            "/metrics: a process wrote what is no metric, or too much.",
            ["of", "reason"],
            registry=registry,
        )
        self._logged: set[str] = set()

    async def collect_metrics(self) -> CollectedMetrics:
        """Read and merge all processes' metrics. Raises RpcError.

        A process that does not answer is left out; its restart shows elsewhere.
        """
        at = time.time()
        places = await self._source.places()
        texts: dict[ProcessIdentity, str] = {}
        limit = trio.CapacityLimiter(CONCURRENT_CALLS_MAX)

        async def ask(place: ProcessIdentity) -> None:
            async with limit:
                try:
                    texts[place] = await self._source.metrics(place)
                except RpcCallRefused as refused:
                    self._count_dropped(place, Counter(too_large=1), str(refused))
                except RpcError:
                    return

        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(ask, place)
        merged = Exposition()
        for place in places:
            dropped: Counter[str] = Counter()
            for _part in merged.add_process_in_parts(self._labels(place), texts.pop(place, ""), dropped):
                await trio.lowlevel.checkpoint()  # other requests are served between two parts
            if dropped:
                self._count_dropped(place, dropped, "it writes what is no metric, or too much")
            await trio.lowlevel.checkpoint()
        merged.add_process(self._labels(ProcessIdentity(Role.ADMIN.value, 0)), render_metrics(self._registry))
        text = bytearray()
        for part in merged.text_in_parts():
            text += part
            await trio.lowlevel.checkpoint()
        return CollectedMetrics(bytes(text), at)

    def _labels(self, place: ProcessIdentity) -> dict[str, str]:
        return {"cluster": self._cluster, "role": place.role, "worker": place.worker_label}

    def _count_dropped(self, place: ProcessIdentity, dropped: Counter[str], why: str) -> None:
        for reason, count in dropped.items():
            self._dropped.labels(of=place.role, reason=reason).inc(count)
        name = f"{place.role}-{place.index}"
        if name not in self._logged:  # once: it may recur with each scrape
            self._logged.add(name)
            get_logger().error(
                "a process's metrics are not served in full", who=name, dropped=dict(dropped), reason=why
            )
