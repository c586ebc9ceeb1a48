"""What the supervisor tells operators, and the admin worker for them: each process's metrics, readiness, and status.

What a worker says of itself is a stranger's word as soon as the worker was taken over: it is bounded, it cannot replace
what the supervisor knows by itself, and where it makes no sense it is left out.
"""

import time
from typing import Any

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Text
from proxy import __version__
from proxy.config.types import Listener
from proxy.runtime.logs import get_logger
from proxy.runtime.metrics import exposition
from proxy.runtime.near_expiry import NearExpiry, merged
from proxy.runtime.rpc_client import RpcError
from proxy.supervisor.cluster import Cluster
from proxy.supervisor.slot import Slot, SlotState

ASK_TIMEOUT_S = 2.0

METRICS_BYTES_MAX = 4 * 1024 * 1024
"""Of one worker; see proxy.admin.exposition."""

STATUS_BYTES_MAX = 1024 * 1024
"""Of one worker."""

NEAR_EXPIRY = "sessions_near_expiry"
"""What each forwarder says of its own (proxy.forwarder.service) is shown of all together."""


class MetricsTooLarge(Exception):
    """A worker writes more than it can have to say."""


class Report:
    """Asks the workers, and puts their answers together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._complained: set[str] = set()

    def places(self) -> list[tuple[Role, int]]:
        """The processes that can be asked for their metrics; the admin worker, which asks, knows its own."""
        slots = [slot for slot in self._cluster.slots if slot.role is not Role.ADMIN]
        running = [(slot.role, slot.index) for slot in slots if slot.state is SlotState.RUNNING]
        return [(Role.SUPERVISOR, 0), *running]

    async def metrics(self, role: str, index: int) -> str:
        """The metrics of one process; nothing where it does not answer: its restart shows elsewhere. Raises
        MetricsTooLarge.
        """
        if role == Role.SUPERVISOR:
            return exposition(self._cluster.registry)
        for slot in self._cluster.slots:
            if (slot.role, slot.index) == (role, index):
                text = await self._ask(slot, Method.COLLECT_METRICS)
                if text is not None and len(text) > METRICS_BYTES_MAX:
                    raise MetricsTooLarge(f"{slot.name} writes more than {METRICS_BYTES_MAX} bytes of metrics")
                return text or ""
        return ""

    async def status_json(self) -> bytes:
        """The whole cluster, as JSON."""
        return msgspec.json.encode(await self.status())

    async def status(self) -> dict[str, object]:
        """The whole cluster, as /status and `status` show it."""
        told = await self._ask_all()
        reasons = self._not_ready(told)
        near_expiry = [near for slot in told if (near := self._near_expiry(slot, told[slot])) is not None]
        workers = [self._worker_status(slot, told.get(slot)) for slot in self._cluster.slots]
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
            NEAR_EXPIRY: merged(near_expiry),
            "workers": workers,
        }

    async def not_ready_reasons(self) -> list[str]:
        """Why clients should not be sent here now; empty: they should."""
        return self._not_ready(await self._ask_all())

    def _not_ready(self, told: dict[Slot, dict[str, Any]]) -> list[str]:
        reasons = ["draining"] if self._cluster.draining else []
        if not self._cluster.started:
            reasons.append("starting")
        reasons += [
            f"no {role} worker answers"
            for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER)
            if not any(slot in told for slot in self._cluster.of(role))
        ]
        lookups = [told[slot] for slot in self._cluster.of(Role.LOOKUP) if slot in told]
        if lookups and not any(status.get("ready") for status in lookups):
            reasons.append("no broker is reachable")
        return reasons

    def _near_expiry(self, slot: Slot, told: dict[str, Any]) -> NearExpiry | None:
        """Take what a forwarder says of its sessions' ends out of its status; None where it makes no sense."""
        near = told.pop(NEAR_EXPIRY, None)
        if near is None or slot.role is not Role.FORWARDER:
            return None
        try:
            return msgspec.convert(near, NearExpiry)
        except msgspec.ValidationError as error:
            self._complain(slot, f"{NEAR_EXPIRY}: {error}")
            return None

    def _complain(self, slot: Slot, reason: str) -> None:
        """Log once for each place: it may be so at each status from now on."""
        if slot.name not in self._complained:
            self._complained.add(slot.name)
            get_logger().error("a worker's status is not shown in full", who=slot.name, reason=reason)

    def _worker_status(self, slot: Slot, told: dict[str, Any] | None) -> dict[str, Any]:
        known: dict[str, Any] = {
            "role": slot.role.value,
            "worker": slot.index,
            "state": slot.state.value,
            "restarts": slot.restarts,
        }
        if slot.worker is not None:
            known["pid"] = slot.worker.pid
            known["uptime_seconds"] = round(time.monotonic() - slot.worker.started, 1)
        if told is None and slot.state is SlotState.RUNNING:
            known["state"] = "not answering"
        return {**known, **(told or {}), **known}

    async def _ask_all(self) -> dict[Slot, dict[str, Any]]:
        """Ask every running worker how it is, all at the same time; those that answer, and what."""
        told: dict[Slot, dict[str, Any]] = {}

        async def ask(slot: Slot) -> None:
            status = _status_of(await self._ask(slot, Method.GET_STATUS))
            if status is not None:
                told[slot] = status

        async with trio.open_nursery() as nursery:
            for slot in self._cluster.slots:
                if slot.state is SlotState.RUNNING:
                    nursery.start_soon(ask, slot)
        return told

    async def _ask(self, slot: Slot, method: int) -> str | None:
        if slot.worker is None or slot.state is not SlotState.RUNNING:
            return None
        try:
            return (await slot.worker.call(method, Empty(), Text, timeout_s=ASK_TIMEOUT_S)).text
        except RpcError:
            return None


def _status_of(text: str | None) -> dict[str, Any] | None:
    """What a worker says of itself; None where it says nothing that makes sense."""
    if text is None or len(text) > STATUS_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _url(listener: Listener) -> str:
    return f"pulsar{'+ssl' if listener.tls is not None else ''}://{listener.bind}"
