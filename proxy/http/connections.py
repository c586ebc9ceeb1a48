"""The clients' connections of an HTTP worker, and its requests under way: their bounds, which are shared fairly."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from proto.http_rules import RequestRefused
from proto.roles import Role
from proxy.common.logs import get_logger, is_dropped
from proxy.common.networks import network_of
from proxy.config.types import Config
from proxy.http.client import HttpClient, RequestRecord
from proxy.http.metrics import HttpMetrics
from proxy.http.server import STATUS_PATH, HttpConnection
from proxy.runtime.observability.audit import AuditLog

REQUEST_EVENT = "http request"
TOO_MANY_REQUESTS = "the proxy has too many requests under way; try again later"


@dataclass(eq=False, slots=True)
class Connection:
    """A client's connection. ``requests``: how many of its requests are under way; without any it is idle.

    ``http``: None during its TLS handshake.
    """

    client: HttpClient
    network: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    requests: int = 0
    http: HttpConnection | None = None


class Connections:
    """The open connections of one worker, in the order in which they came.

    A worker that has its part of ``http.max_connections`` closes one for a new one: the oldest idle one of the address
    that has most connections; where none is idle, the oldest one of that address, if it has more than the new client's.
    """

    def __init__(self, config: Config, metrics: HttpMetrics) -> None:
        self.displaced = 0
        self._metrics = metrics
        self._open: dict[int, Connection] = {}
        self._by_network: Counter[str] = Counter()
        self._empty = trio.Event()
        self.configure(config)
        metrics.active_connections.set_function(lambda: len(self._open))

    def configure(self, config: Config) -> None:
        """Take over another bound; connections above it stay."""
        self._max = _part(config.http.max_connections, config)

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, client: HttpClient) -> Connection | None:
        """Count a new connection until ``remove``; None where there is no place for it, and none that it may have."""
        network = network_of(client.ip)
        if len(self._open) >= self._max:
            other = self._one_to_displace(network)
            if other is None:
                return None
            self.displaced += 1
            self._metrics.closed_connections.labels(reason="displaced").inc()
            self._forget(other)  # it may take its time to end
            other.scope.cancel()
        connection = Connection(client, network)
        self._open[client.connection] = connection
        self._by_network[network] += 1
        return connection

    def _one_to_displace(self, newcomer: str) -> Connection | None:
        counts = self._by_network
        idle = Counter(one.network for one in self._open.values() if not one.requests)
        if idle:
            most = max(idle, key=lambda network: (counts[network], idle[network]))
            return next(one for one in self._open.values() if not one.requests and one.network == most)
        most, count = counts.most_common(1)[0]
        if count <= counts[newcomer] + 1:
            return None
        return next(one for one in self._open.values() if one.network == most)

    def remove(self, connection: Connection) -> None:
        """Count a connection that has ended no longer."""
        if self._open.get(connection.client.connection) is connection:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        del self._open[connection.client.connection]
        self._by_network[connection.network] -= 1
        if not self._by_network[connection.network]:
            del self._by_network[connection.network]
        if not self._open:
            self._empty.set()

    def of_client(self, client: HttpClient) -> Connection | None:
        """Return the connection of a client; None for one that was displaced."""
        return self._open.get(client.connection)

    def drain(self) -> None:
        """Close connections that are idle now, the others after their request, new ones after their first one."""
        for connection in list(self._open.values()):
            if connection.http is not None:  # else its TLS handshake is under way
                connection.http.drain()

    def judge_again(self, may_stay: Callable[[HttpClient], bool]) -> None:
        """Close connections that may not stay after a reload, and after their request those with a certificate:
        its authority may be trusted no longer.
        """
        for connection in list(self._open.values()):
            if not may_stay(connection.client):
                connection.scope.cancel()
            elif connection.client.certificate and connection.http is not None:
                connection.http.drain()

    def close_all(self) -> None:
        """Close all connections, requests under way included."""
        for connection in list(self._open.values()):
            connection.scope.cancel()

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no connection is open, for at most ``timeout_s`` seconds; return True if none is."""
        if self._open:
            self._empty = trio.Event()
            with trio.move_on_after(timeout_s):
                await self._empty.wait()
        return not self._open


class WorkerRequests:
    """proxy.http.client.Requests: bounds, counts and logs the requests of one worker.

    Half of its part of ``http.max_requests`` is for who comes first; of the rest, no address gets more than an equal
    share, and one share is for an address that has none yet.
    """

    def __init__(
        self, config: Config, connections: Connections, metrics: HttpMetrics, audit: AuditLog | None = None
    ) -> None:
        self._connections = connections
        self._audit = audit or AuditLog(None, Role.HTTP, 0, -1)
        self._metrics = metrics
        self._by_network: Counter[str] = Counter()
        self.under_way = 0
        self.configure(config)
        metrics.requests_under_way.set_function(lambda: self.under_way)

    def configure(self, config: Config) -> None:
        """Take over another bound, and whether requests are logged."""
        self._max = _part(config.http.max_requests, config)
        self._logs = config.http.access_log

    def begin(self, record: RequestRecord) -> None:
        """Admit a request of which the head is known. Raises RequestRefused: 503 where too many are under way."""
        network = network_of(record.client.ip)
        if not self._has_place(network):
            raise RequestRefused(503, TOO_MANY_REQUESTS, "too_many_requests")
        record.counted = True
        self.under_way += 1
        self._by_network[network] += 1
        connection = self._connections.of_client(record.client)
        if connection is not None:
            connection.requests += 1

    def _has_place(self, network: str) -> bool:
        if self.under_way >= self._max // 2:
            share = max(1, self._max // (2 + len(self._by_network.keys() - {network})))
            return self.under_way < self._max and self._by_network[network] < share
        return True

    def end(self, record: RequestRecord) -> None:
        """Count and log a request that has ended."""
        if record.counted:
            record.counted = False
            network = network_of(record.client.ip)
            self.under_way -= 1
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]
            connection = self._connections.of_client(record.client)
            if connection is not None:
                connection.requests -= 1
        self._metrics.count_request(record)
        if self._audit.writes("http_request"):
            self._audit.write("http_request", **_entry(record, upstream_as="target"))
        if self._logs and not is_dropped(REQUEST_EVENT):
            log = get_logger().debug if record.path == STATUS_PATH else get_logger().info  # polled by load balancers
            log(REQUEST_EVENT, **_entry(record, upstream_as="upstream"))


def _entry(record: RequestRecord, *, upstream_as: str) -> dict[str, Any]:
    """Return what is logged of a request that has ended. ``upstream_as``: the name of where it was passed on."""
    return {
        "client": record.client.address,
        "principal": record.principal,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "route": record.route,
        upstream_as: record.upstream,
        "request_bytes": record.request_bytes,
        "response_bytes": record.response_bytes,
        "ms": round((trio.current_time() - record.started) * 1000),
        "cause": record.cause,
    }


def _part(total: int, config: Config) -> int:
    """Return a worker's equal part of what all HTTP workers may have together."""
    return max(1, total // config.cluster.http_workers)
