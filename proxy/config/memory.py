"""Fit of the configuration to a container's memory: the operator's settings stay, open ones share the rest.

All figures are estimates from measurements (`make bench ARGS=--sizing`, docs/installation.md) and on the large side: a
container that needs more than its limit is ended by the kernel, with all its relays.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from proto.addresses import speaks_tls
from proxy.common.errors import ConfigError
from proxy.config.cgroups import ContainerLimits, container_limits, usable_cpus
from proxy.config.http import http_worker_count, replay_bytes_total
from proxy.config.types import MIB, Config, Limits

SUPERVISION_BYTES = 96 * MIB
"""Supervisor and admin worker, a scrape under way included, and what all workers share with the fork server."""

WORKER_BYTES = 20 * MIB
"""Each forwarder, lookup, auth and HTTP worker, and the fork server: what they do not share. An old worker has
grown.
"""

CONNECTION_BYTES = 24 * 1024
"""A client's connection and, of a relay, the broker's, the kernel's part included."""

TLS_BYTES = 48 * 1024
"""What TLS on one side of a connection adds."""

RESERVE_SHARE = 16
"""One part in so many stays free: page tables, files' pages, what Python keeps back."""

HTTP_REQUEST_BYTES = 256 * 1024
"""A request under way: a portion of a body each way, also as records of TLS, further requests that the client has sent,
heads, and the upstream's connection.
"""

ANSWER_OVERHEAD = 1.1
"""What a large answer costs for each of its bytes."""

FORWARDERS_MAX = 256
CONNECTIONS_MIN = 100
UNAUTHENTICATED_MIN = 32
LOOKUP_BYTES_MIN = MIB

CONNECTIONS = "limits.max_connections"
UNAUTHENTICATED = "limits.max_unauthenticated_connections"
LARGE_ANSWERS = "limits.max_topic_lists_bytes"
LOOKUPS = "limits.max_lookup_bytes"
HTTP_CONNECTIONS = "http.max_connections"
HTTP_REQUESTS = "http.max_requests"
HTTP_BODIES = "cluster.http_workers"

_SHARES = {LARGE_ANSWERS: 0.3, LOOKUPS: 0.15, UNAUTHENTICATED: 0.15}
"""Of what the processes and the operator's own settings leave; connections get the rest."""


class MemoryDemand(NamedTuple):
    """Memory that one key allows the cluster to use: ``amount`` times ``bytes_each``."""

    key: str
    amount: int
    bytes_each: float
    is_given: bool

    @property
    def bytes(self) -> int:
        """The product, in bytes."""
        return int(self.amount * self.bytes_each)


class MemoryPlan(NamedTuple):
    """A configuration with every number that depends on the container; ``shortage``: why it does not fit, if so."""

    config: Config
    container: ContainerLimits
    processes_bytes: int
    demands: tuple[MemoryDemand, ...]
    shortage: str = ""

    @property
    def needed_bytes(self) -> int:
        """The container limit that this configuration needs."""
        used = self.processes_bytes + sum(demand.bytes for demand in self.demands)
        return _with_reserve(used)

    def require(self) -> "MemoryPlan":
        """Raise ConfigError where the container has too little memory."""
        if self.shortage:
            raise ConfigError(self.shortage)
        return self

    def summary(self) -> Mapping[str, Any]:
        """Return the plan's numbers for one log entry, sizes in MiB."""
        cpus, memory = self.container
        limits = self.config.limits
        return {
            "memory_limit_mib": "none" if memory is None else memory // MIB,
            "cpu_limit": "none" if cpus is None else float(cpus),
            "needed_mib": -(-self.needed_bytes // MIB),
            "processes_mib": self.processes_bytes // MIB,
            "forwarders": self.config.cluster.forwarders,
            "max_connections": limits.max_connections,
            "max_unauthenticated_connections": _unauthenticated_max(limits),
            "max_topic_lists_bytes": limits.max_topic_lists_bytes,
            "max_lookup_bytes": limits.max_lookup_bytes,
        }


def fit_to_container(
    config: Config, given: Collection[str], container: ContainerLimits, running_forwarders: int = 0
) -> MemoryPlan:
    """Decide what a configuration leaves open, for a container.

    ``given``: the keys that the operator has set. ``running_forwarders``: how many there are already, which only a
    restart changes.
    """
    config = _with_forwarders(config, container, running_forwarders)
    processes = _processes_bytes(config, config.cluster.forwarders)
    demands = _demands(config, given)
    memory = container.memory_bytes
    if memory is None:
        return MemoryPlan(config, container, processes, tuple(demands.values()))
    room = memory - memory // RESERVE_SHARE - processes
    for share_out in (_in_shares, _at_least):
        fitted = share_out(config, demands, room)
        plan = MemoryPlan(_with_demands(config, fitted), container, processes, tuple(fitted.values()))
        if sum(demand.bytes for demand in fitted.values()) <= room:
            return plan
    return plan._replace(shortage=_shortage(plan, memory))


def _in_shares(config: Config, demands: Mapping[str, MemoryDemand], room: int) -> dict[str, MemoryDemand]:
    """Give what the operator's settings leave of the room to the others, none of which gets more than its default."""
    room -= sum(demand.bytes for demand in demands.values() if demand.is_given)
    lowest = _at_least(config, demands, room)
    fitted = dict(demands)
    left = room
    for key in (LARGE_ANSWERS, LOOKUPS, UNAUTHENTICATED, CONNECTIONS):
        demand = demands[key]
        if not demand.is_given:
            share = left if key == CONNECTIONS else int(room * _SHARES[key])
            count = max(lowest[key].amount, min(demand.amount, int(share / demand.bytes_each)))
            fitted[key] = demand._replace(amount=count)
            left -= fitted[key].bytes
    strangers = fitted[UNAUTHENTICATED]
    if not strangers.is_given:
        count = min(strangers.amount, max(1, fitted[CONNECTIONS].amount // 4))
        fitted[UNAUTHENTICATED] = strangers._replace(amount=count)
    return fitted


def _at_least(config: Config, demands: Mapping[str, MemoryDemand], _room: int) -> dict[str, MemoryDemand]:
    """Give what is left open the least that serves any client; below it the container is too small."""
    limits = config.limits
    lowest = {
        LARGE_ANSWERS: limits.max_broker_frame_bytes,
        LOOKUPS: max(LOOKUP_BYTES_MIN, 4 * limits.max_command_bytes),
        UNAUTHENTICATED: UNAUTHENTICATED_MIN,
        CONNECTIONS: CONNECTIONS_MIN,
    }
    return {
        key: demand if demand.is_given else demand._replace(amount=min(demand.amount, lowest[key]))
        for key, demand in demands.items()
    }


def usable_forwarders(limits: ContainerLimits) -> int:
    """How many forwarders the CPUs have work for."""
    return min(FORWARDERS_MAX, usable_cpus(len(os.sched_getaffinity(0)), limits))


def _with_forwarders(config: Config, limits: ContainerLimits, running: int) -> Config:
    """One forwarder for each CPU, but no more than half of the memory has room for all processes of."""
    if config.cluster.forwarders:
        return config
    count = usable_forwarders(limits)
    if limits.memory_bytes is not None:
        spare = limits.memory_bytes // 2 - _processes_bytes(config, 0)
        count = max(1, min(count, spare // WORKER_BYTES))
    cluster = msgspec.structs.replace(config.cluster, forwarders=running or count)
    return msgspec.structs.replace(config, cluster=cluster)


def _processes_bytes(config: Config, forwarders: int) -> int:
    cluster = config.cluster
    processes = 1 + forwarders + cluster.lookup_workers + cluster.auth_workers + http_worker_count(config)
    return SUPERVISION_BYTES + processes * WORKER_BYTES


def _demands(config: Config, given: Collection[str]) -> dict[str, MemoryDemand]:
    """Return the demand of each key, as it is set."""
    limits, holders = config.limits, config.cluster.forwarders + config.cluster.lookup_workers
    demands: tuple[MemoryDemand, ...] = (
        MemoryDemand(
            LARGE_ANSWERS,
            max(limits.max_topic_lists_bytes, limits.max_broker_frame_bytes),
            holders * ANSWER_OVERHEAD,
            LARGE_ANSWERS in given,
        ),
        MemoryDemand(LOOKUPS, limits.max_lookup_bytes, holders, LOOKUPS in given),
        MemoryDemand(
            UNAUTHENTICATED,
            _unauthenticated_max(limits),
            limits.max_command_bytes,
            bool(limits.max_unauthenticated_connections),
        ),
        MemoryDemand(CONNECTIONS, limits.max_connections, _connection_bytes(config), CONNECTIONS in given),
    )
    if config.http_listener:  # as they are set: 503 is no answer to a container's size
        tls = any(listener.tls is not None for listener in config.http_listener)
        each = CONNECTION_BYTES + tls * TLS_BYTES
        demands += (
            MemoryDemand(HTTP_CONNECTIONS, config.http.max_connections, each, is_given=True),
            MemoryDemand(HTTP_BODIES, http_worker_count(config), replay_bytes_total(config), is_given=True),
            MemoryDemand(HTTP_REQUESTS, config.http.max_requests, HTTP_REQUEST_BYTES, is_given=True),
        )
    return {demand.key: demand for demand in demands}


def _connection_bytes(config: Config) -> int:
    """Return the bytes of a connection of the most expensive kind that is configured."""
    sides = any(listener.tls is not None for listener in config.listener) + speaks_tls(config.brokers.service_url)
    return CONNECTION_BYTES + sides * TLS_BYTES


def _unauthenticated_max(limits: Limits) -> int:
    """How many connections may be unauthenticated (proxy.forwarder.listen.admission)."""
    return limits.max_unauthenticated_connections or max(1, limits.max_connections // 4)


def _with_demands(config: Config, demands: Mapping[str, MemoryDemand]) -> Config:
    values = {key.removeprefix("limits."): demand.amount for key, demand in demands.items() if not demand.is_given}
    return msgspec.structs.replace(config, limits=msgspec.structs.replace(config.limits, **values))


def _shortage(plan: MemoryPlan, memory: int) -> str:
    """Say how much is missing, and which of the operator's own settings would help most."""
    cluster = plan.config.cluster
    settings = [(demand.bytes, demand.key, demand.amount) for demand in plan.demands if demand.is_given]
    workers = (
        ("forwarders", cluster.forwarders),
        ("lookup_workers", cluster.lookup_workers),
        ("auth_workers", cluster.auth_workers),
        ("http_workers", http_worker_count(plan.config)),
    )
    settings += [(count * WORKER_BYTES, f"cluster.{name}", count) for name, count in workers if count > 1]
    text = (
        f"the container's memory limit of {memory // MIB} MiB is too small: "
        f"this configuration needs {-(-plan.needed_bytes // MIB)} MiB"
    )
    if not settings:
        return f"{text}; raise the limit"
    used, key, count = max(settings)
    return f"{key}: {text}; lower {key} (now {count}, for {used // MIB} MiB), or raise the limit"


def _with_reserve(used: int) -> int:
    """Return the smallest limit that leaves the reserve beside the used bytes."""
    return -(-used * RESERVE_SHARE // (RESERVE_SHARE - 1))


def forwarder_count(config: Config) -> int:
    """Return how many forwarders to run; for a configuration that was not fitted to a container, one for each CPU."""
    return config.cluster.forwarders or usable_forwarders(container_limits())
