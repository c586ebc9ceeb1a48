"""The cluster's report for operators and the admin worker: each process's metrics, readiness and status.

What a worker reports of itself is untrusted, since the worker may be compromised: it is bounded, it cannot replace what
the supervisor knows by itself, and malformed parts are left out.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Reasons, Text
from proxy import __version__
from proxy.common.errors import ProxyError
from proxy.common.libraries import OPENSSL_VERSION, PYTHON_VERSION
from proxy.common.logs import get_logger
from proxy.common.readiness import LEAVING_REASON
from proxy.config.methods import forwards_credentials, refused_methods
from proxy.config.types import Config
from proxy.runtime.fairness.byte_budget import utf8_bytes
from proxy.runtime.observability.certificate_status import CertificateEnds, merge_ends
from proxy.runtime.observability.metrics import render_metrics
from proxy.runtime.observability.near_expiry import Count, NearExpiry, merge_near_expiry
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.rpc.errors import RpcError
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.cluster.slot import SlotState, WorkerSlot
from proxy.supervisor.processes.worker_process import WorkerProcess

CALL_TIMEOUT_S = 2.0

METRICS_BYTES_MAX = 4 * 1024 * 1024
"""Bound for one worker; see proxy.admin.exposition."""

STATUS_BYTES_MAX = 256 * 1024
"""Bound for one worker: the largest part of a forwarder's is 20 sessions of principals of 1 KiB."""

LOOKUP_STATUS_BYTES_MAX = 2 * 1024 * 1024
"""Bound for one lookup worker: 1,024 brokers (lookup.brokers.discovery.ENDPOINTS_MAX), each with a name of 253 bytes,
addresses of
both families, and why neither can be reached (which says the name again).
"""

STATUS_TOTAL_BYTES_MAX = 8 * 1024 * 1024
"""Bound for all workers: with the admin worker's other calls, less than its socket may queue and a frame may hold."""

CREDENTIALS_REFUSED = "every broker that can be reached refuses the proxy's own credentials (brokers.credentials)"
"""A reason not to be ready: lookups and relays would all fail."""

UNREADY_REASON = "made unready by an operator"

NO_HTTP_WORKER = "no HTTP worker answers: requests at http_listener are not served"

NEAR_EXPIRY = "sessions_near_expiry"
"""Part of each forwarder's status (proxy.forwarder.service) that is merged over all forwarders."""

CERTIFICATE_ENDS = "certificate_ends"
"""Part of the status of one worker of each role (proxy.runtime.process.worker) that is merged over all roles."""

LEAVING = "leaving"
"""State of a replaced worker that finishes its work: relays that cannot move, lookups under way."""

_Flat = str | int | float | bool | None
_Once = _Flat | list[_Flat] | dict[str, _Flat]
_Twice = _Flat | list[_Once] | dict[str, _Once]
_Value = _Flat | list[_Twice] | dict[str, _Twice]
"""Values no deeper than a sound status: output that is indented for people grows with the depth."""

ToldT = TypeVar("ToldT")


class _Readiness(msgspec.Struct):
    """The part of a status that decides on readiness."""

    ready: bool = False
    credentials_refused: bool = False
    original_data_checked: str = "none"
    """See lookup.brokers.directory."""


class _Broker(msgspec.Struct):
    """The fields of a broker that proxy.status_text shows."""

    broker: str
    reachable: bool
    detail: str
    probed_s_ago: float | None = None


class _DenyList(msgspec.Struct):
    """What a forwarder says of the deny list, as proxy.status_text shows it."""

    entries: int
    read_at_unix_s: Annotated[float, msgspec.Meta(ge=0, le=2**32)]
    error: str


_PARTS: dict[str, Any] = {
    NEAR_EXPIRY: NearExpiry,
    CERTIFICATE_ENDS: CertificateEnds,
    "connections": Count,
    "kernel_tls": bool,
    "kernel_tls_relays": Count,
    "brokers": list[_Broker],
    "brokers_changed_s_ago": float | None,
    "methods": list[str],
    "deny_list": _DenyList,
}
"""Types of the parts on which readers of a status rely."""


class MetricsTooLarge(ProxyError):
    """A worker's metrics exceed METRICS_BYTES_MAX."""


class ClusterReport:
    """Calls the workers and merges their replies."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._logged: set[str] = set()
        self._refused_clients: list[str] = []
        self.supervisor_notes: Callable[[], list[str]] = list
        """What operators should know of the supervisor's own decisions, though clients may be sent here."""

    def places(self) -> list[ProcessIdentity]:
        """Return the processes whose metrics can be read here; the admin worker, which asks, has its own."""
        processes = [process for process in self._answering_workers() if process.slot.role is not Role.ADMIN]
        return [ProcessIdentity(Role.SUPERVISOR, 0), *(process.place for process in processes)]

    async def metrics(self, place: ProcessIdentity) -> str:
        """Return the metrics of one process; "" where it does not answer, as its restart shows elsewhere. Raises
        MetricsTooLarge.
        """
        if place.role == Role.SUPERVISOR:
            return render_metrics(self._cluster.registry)
        for process in self._answering_workers():
            if process.place == place:
                text = await self._ask(process, Method.COLLECT_METRICS)
                if text is not None and utf8_bytes(text) > METRICS_BYTES_MAX:
                    raise MetricsTooLarge(f"{process.name} writes more than {METRICS_BYTES_MAX} bytes of metrics")
                return text or ""
        return ""

    def _answering_workers(self) -> list["_ReportedWorker"]:
        """Return the workers that can be called: of each slot its own, then replaced ones that finish their work."""
        return [
            _ReportedWorker(slot, worker, is_leaving=worker is not slot.worker)
            for slot in self._cluster.slots
            for worker in slot.callable_workers
        ]

    async def status_json(self) -> bytes:
        """Return the status of the whole cluster as JSON."""
        return msgspec.json.encode(await self.status())

    async def status(self) -> dict[str, object]:
        """Return the status of the whole cluster, as /status and `status` show it."""
        processes = self._answering_workers()
        texts = await self._call_all(processes)
        readiness = self._readiness_from(texts)
        reasons = list(readiness.reasons)
        statuses = _decode_all(texts, _decode_status)
        self._drop_malformed_parts(statuses)
        self._drop_oversized(statuses)
        near_expiry = [
            msgspec.convert(status.pop(NEAR_EXPIRY), NearExpiry)
            for status in statuses.values()
            if NEAR_EXPIRY in status
        ]
        ends = [status.pop(CERTIFICATE_ENDS) for status in statuses.values() if CERTIFICATE_ENDS in status]
        workers = []
        for slot in self._cluster.slots:
            own = [statuses.get(process) for process in processes if process.slot is slot and not process.is_leaving]
            workers.append(self._worker_status(slot, own[0] if own else None))
        leaving = [_leaving_status(process, statuses.get(process)) for process in processes if process.is_leaving]
        return {
            "cluster": self._cluster.config.cluster.name,
            "version": __version__,
            "python": PYTHON_VERSION,
            "openssl": OPENSSL_VERSION,
            "ready": not reasons,
            "not_ready_because": reasons,
            "notes": list(readiness.notes),
            "leaving": self._cluster.leaving,
            "unready": self._cluster.unready_because is not None,
            "log_levels": self._cluster.log_levels.status(self._cluster.config),
            "draining": self._cluster.draining,
            "generation": self._cluster.generation,
            "replacing_workers": self._cluster.replacing,
            "listeners": _urls(self._cluster.config),
            "service_url": self._cluster.config.brokers.service_url,
            "authentication": self._cluster.config.authentication.enabled,
            CERTIFICATE_ENDS: merge_ends(ends, time.time()),
            **self._kernel_tls(statuses),
            NEAR_EXPIRY: merge_near_expiry(near_expiry),
            "workers": workers,
            "leaving_workers": leaving,
        }

    async def readiness(self) -> Reasons:
        """Return why load balancers should send no clients here now, and which clients would fail all the same."""
        processes = [process for process in self._answering_workers() if not process.is_leaving]
        return self._readiness_from(await self._call_all(processes))

    def _readiness_from(self, texts: dict["_ReportedWorker", str]) -> Reasons:
        readiness_of = {
            process.slot: readiness
            for process, readiness in _decode_all(texts, _decode_readiness).items()
            if not process.is_leaving
        }
        reasons: list[str] = []
        if self._cluster.draining:
            reasons.append("draining")
        elif self._cluster.leaving:
            reasons.append(LEAVING_REASON)
        if not self._cluster.started:
            reasons.append("starting")
        if (because := self._cluster.unready_because) is not None:
            reasons.append(f"{UNREADY_REASON}: {because}" if because else UNREADY_REASON)
        reasons += [
            f"no {role} worker answers"
            for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER)
            if not any(slot in readiness_of for slot in self._cluster.slots_of(role))
        ]
        lookups = [readiness_of[slot] for slot in self._cluster.slots_of(Role.LOOKUP) if slot in readiness_of]
        if lookups and not any(lookup.ready for lookup in lookups):
            refused = any(lookup.credentials_refused for lookup in lookups)
            reasons.append(CREDENTIALS_REFUSED if refused else "no broker is reachable")
        notes = self._clients_refused([lookup for lookup in lookups if lookup.ready])
        self._log_refused_clients(notes)
        is_for_all = notes and not forwards_credentials(self._cluster.config)
        if is_for_all and all(lookup.original_data_checked == "all" for lookup in lookups if lookup.ready):
            reasons, notes = [*reasons, *notes], []
        http = self._cluster.slots_of(Role.HTTP)
        if http and not any(slot in readiness_of for slot in http):  # no reason to send clients of listener elsewhere
            notes = [*notes, NO_HTTP_WORKER]
        return Reasons(reasons=reasons, notes=[*notes, *self.supervisor_notes()])

    async def brokers_accept_proxy(self) -> bool:
        """Return True if a lookup worker reports a broker that accepts the proxy, with what is in force now."""
        lookups = [one for one in self._answering_workers() if one.slot.role is Role.LOOKUP and not one.is_leaving]
        return any(told.ready for told in _decode_all(await self._call_all(lookups), _decode_readiness).values())

    def _clients_refused(self, lookups: list[_Readiness]) -> list[str]:
        """Return a sentence for each kind of client that brokers refuse, as they check clients' own credentials."""
        if all(lookup.original_data_checked == "none" for lookup in lookups):
            return []
        methods_of: dict[str, list[str]] = {}
        for method, sentence in refused_methods(self._cluster.config).items():
            methods_of.setdefault(sentence, []).append(method)
        return [f"clients by {', '.join(methods)}: {sentence}" for sentence, methods in methods_of.items()]

    def _log_refused_clients(self, sentences: list[str]) -> None:
        """Log which clients brokers refuse, when it changes."""
        for sentence in sentences:
            if sentence not in self._refused_clients:
                get_logger().warning("brokers refuse clients", reason=sentence)
        self._refused_clients = sentences

    def _kernel_tls(self, statuses: dict["_ReportedWorker", dict[str, Any]]) -> dict[str, Any]:
        """Return how many relays have kernel TLS, and how many forwarders can have such; nothing where it is off."""
        told = [status for process, status in statuses.items() if process.slot.role is Role.FORWARDER]
        can = [status["kernel_tls"] for status in told if "kernel_tls" in status]
        if not can:
            return {}
        return {
            "kernel_tls": {
                "setting": self._cluster.config.relay.kernel_tls,
                "forwarders_with": sum(can),
                "forwarders_without": len(can) - sum(can),
                "relays": sum(status.get("kernel_tls_relays", 0) for status in told),
            }
        }

    def _drop_malformed_parts(self, statuses: dict["_ReportedWorker", dict[str, Any]]) -> None:
        for process, status in statuses.items():
            if process.slot.role is not Role.FORWARDER:
                status.pop(NEAR_EXPIRY, None)
            for part in _PARTS.keys() & status.keys():
                try:
                    msgspec.convert(status[part], _PARTS[part])
                except msgspec.ValidationError as error:
                    del status[part]
                    self._log_once(process, f"{part}: {error}")

    def _drop_oversized(self, statuses: dict["_ReportedWorker", dict[str, Any]]) -> None:
        """Drop the largest statuses first, so that no worker's displaces another's small one."""
        left = STATUS_TOTAL_BYTES_MAX
        sizes = {process: len(msgspec.json.encode(status)) for process, status in statuses.items()}
        for process in sorted(sizes, key=lambda process: (sizes[process], process.place)):
            left -= sizes[process]
            if left < 0:
                statuses[process] = {}
                self._log_once(process, f"all workers together tell more than {STATUS_TOTAL_BYTES_MAX} bytes")

    def _log_once(self, process: "_ReportedWorker", reason: str) -> None:
        """Log once for each slot: the reason may recur with each status."""
        if process.slot.name not in self._logged:
            self._logged.add(process.slot.name)
            get_logger().error("a worker's status is not shown in full", who=process.name, reason=reason)

    def _worker_status(self, slot: WorkerSlot, reported: dict[str, Any] | None) -> dict[str, Any]:
        known: dict[str, Any] = {
            "role": slot.role.value,
            "worker": slot.index,
            "state": slot.state.value,
            "restarts": slot.restarts,
        }
        if slot.worker is not None:
            known |= _process_facts(slot.worker)
        if reported is None and slot.state is SlotState.RUNNING:
            known["state"] = "not answering"
        return {**known, **(reported or {}), **known}

    async def _call_all(self, processes: list["_ReportedWorker"]) -> dict["_ReportedWorker", str]:
        """Call GET_STATUS of all workers concurrently; return the replies in the order of the workers."""
        texts: dict[_ReportedWorker, str] = {}

        async def ask(process: _ReportedWorker) -> None:
            text = await self._ask(process, Method.GET_STATUS)
            if text is not None and utf8_bytes(text) <= _status_bytes_max(process.slot.role):
                texts[process] = text

        async with trio.open_nursery() as nursery:
            for process in processes:
                nursery.start_soon(ask, process)
        return {process: texts[process] for process in processes if process in texts}

    @staticmethod
    async def _ask(process: "_ReportedWorker", method: int) -> str | None:
        try:
            return (await process.worker.call(method, Empty(), Text, timeout_s=CALL_TIMEOUT_S)).text
        except RpcError:
            return None


@dataclass(frozen=True, eq=False, slots=True)
class _ReportedWorker:
    """A worker that can be called. ``is_leaving``: it was replaced, and finishes its work."""

    slot: WorkerSlot
    worker: WorkerProcess
    is_leaving: bool

    @property
    def place(self) -> ProcessIdentity:
        """The identity under which the worker appears in reports."""
        return ProcessIdentity(self.slot.role.value, self.slot.index, self.worker.pid if self.is_leaving else 0)

    @property
    def name(self) -> str:
        """Role and index, for logs."""
        return f"{self.slot.role}-{self.place.worker_label}"


def _leaving_status(process: _ReportedWorker, reported: dict[str, Any] | None) -> dict[str, Any]:
    """Return the status of a replaced worker, whether it answers or not."""
    known = {
        "role": process.slot.role.value,
        "worker": process.slot.index,
        "state": LEAVING,
        "restarts": 0,
        **_process_facts(process.worker),
    }
    return {**known, **(reported or {}), **known}


def _process_facts(worker: WorkerProcess) -> dict[str, Any]:
    return {"pid": worker.pid, "uptime_seconds": round(time.monotonic() - worker.started_at_s, 1)}


def _status_bytes_max(role: Role) -> int:
    return LOOKUP_STATUS_BYTES_MAX if role is Role.LOOKUP else STATUS_BYTES_MAX


def _decode_all(texts: dict[_ReportedWorker, str], decode: Callable[[str], ToldT]) -> dict[_ReportedWorker, ToldT]:
    """Decode the workers' replies; leave out malformed ones."""
    decoded = {}
    for process, text in texts.items():
        with contextlib.suppress(ValueError, RecursionError):
            decoded[process] = decode(text)
    return decoded


def _decode_status(text: str) -> dict[str, Any]:
    """Decode a worker's status. Raises ValueError or RecursionError."""
    return msgspec.json.decode(text, type=dict[str, _Value])


def _decode_readiness(text: str) -> _Readiness:
    """Decode the readiness in a worker's status. Raises as _decode_status."""
    return msgspec.json.decode(text, type=_Readiness)


def _urls(config: Config) -> list[str]:
    urls = [f"pulsar{'+ssl' if one.tls is not None else ''}://{one.bind}" for one in config.listener]
    return urls + [f"http{'s' if one.tls is not None else ''}://{one.bind}" for one in config.http_listener]
