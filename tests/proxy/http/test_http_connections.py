"""proxy.http.connections: who has to leave for a new connection, and how requests under way are shared."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
from prometheus_client import CollectorRegistry

from proto.http_rules import RequestRefused
from proto.roles import Role
from proxy.config.types import Config
from proxy.http.client import HttpClient, RequestRecord
from proxy.http.connections import Connection, Connections, WorkerRequests
from proxy.http.metrics import HttpMetrics
from proxy.runtime.observability.audit import AuditLog


class Setup:
    def __init__(self, workers: int = 1, **http: Any) -> None:
        self.config = msgspec.convert({"http": http, "cluster": {"http_workers": workers}}, Config)
        self.registry = CollectorRegistry()
        metrics = HttpMetrics(self.registry)
        self.connections = Connections(self.config, metrics)
        self.requests = WorkerRequests(self.config, self.connections, metrics)
        self._port = 1000

    def admit(self, ip: str) -> Connection | None:
        self._port += 1
        return self.connections.admit(HttpClient(f"{ip}:{self._port}", ip, "http", connection=self._port))

    def admitted(self, ip: str) -> Connection:
        connection = self.admit(ip)
        assert connection is not None
        return connection

    def begin(self, connection: Connection) -> RequestRecord:
        record = RequestRecord(connection.client, trio.current_time(), method="GET", path="/admin", route="brokers")
        self.requests.begin(record)
        return record

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pulsar_proxy_http_{name}", labels)


def displaced(*connections: Connection) -> list[bool]:
    return [connection.scope.cancel_called for connection in connections]


async def test_a_new_one_displaces_the_oldest_idle_one_of_the_address_with_most() -> None:
    setup = Setup(max_connections=4)
    other = setup.admitted("10.0.0.9")
    first, second, third = (setup.admitted("10.0.0.1") for _ in range(3))
    setup.begin(first)
    setup.admitted("10.0.0.2")
    assert displaced(other, first, second, third) == [False, False, True, False]
    assert (len(setup.connections), setup.connections.displaced) == (4, 1)
    assert setup.value("closed_connections_total", reason="displaced") == 1
    assert setup.value("active_connections") == 4


async def test_where_none_is_idle_the_address_with_most_makes_room() -> None:
    """Security: one address with slow requests keeps no other one out."""
    setup = Setup(max_connections=3, max_requests=100)
    mine = [setup.admitted("10.0.0.1") for _ in range(3)]
    for connection in mine:
        setup.begin(connection)
    assert setup.admit("10.0.0.1") is None, "not for another one of its own"
    newcomer = setup.admitted("10.0.0.2")
    assert displaced(*mine) == [True, False, False]
    setup.begin(newcomer)
    assert setup.admit("10.0.0.2") is None, "it would have as many then"


async def test_an_ipv6_address_is_its_network() -> None:
    setup = Setup(max_connections=2)
    ones = [setup.admitted(f"2001:db8::{number}") for number in range(2)]
    for connection in ones:
        setup.begin(connection)
    assert setup.admit("2001:db8::9") is None
    assert setup.admit("2001:db8:1::1") is not None


async def test_a_displaced_one_is_forgotten_at_once() -> None:
    setup = Setup(max_connections=1)
    first = setup.admitted("10.0.0.1")
    second = setup.admitted("10.0.0.1")
    setup.connections.remove(first)  # its task ends later
    assert len(setup.connections) == 1
    setup.connections.remove(second)
    assert len(setup.connections) == 0
    assert await setup.connections.wait_until_empty(0)


async def test_each_worker_has_its_part() -> None:
    setup = Setup(workers=4, max_connections=8, max_requests=4)
    for number in range(5):
        setup.admitted(f"10.0.0.{number}")
    assert len(setup.connections) == 2


async def test_requests_are_bounded_and_shared_between_addresses() -> None:
    """Security: no address takes all places, and there is a place for a new one."""
    setup = Setup(max_requests=8)
    greedy = setup.admitted("10.0.0.1")
    taken = [setup.begin(greedy) for _ in range(4)]
    with pytest.raises(RequestRefused) as refused:
        setup.begin(greedy)
    assert (refused.value.status, refused.value.reason) == (503, "too_many_requests")
    other = setup.admitted("10.0.0.2")
    taken += [setup.begin(other) for _ in range(2)]
    with pytest.raises(RequestRefused):
        setup.begin(other)
    taken += [setup.begin(setup.admitted(f"10.0.1.{number}")) for number in range(2)]
    assert setup.requests.under_way == 8
    with pytest.raises(RequestRefused):
        setup.begin(setup.admitted("10.0.2.1"))
    for record in taken:
        record.status = 200
        setup.requests.end(record)
    assert setup.requests.under_way == 0
    assert setup.value("requests_total", route="brokers", method="GET", status="2xx") == 8


async def test_a_request_is_counted_and_logged_without_what_clients_choose() -> None:
    """Security: no label has a value of a client, and no query is logged."""
    setup = Setup()
    record = setup.begin(setup.admitted("10.0.0.1"))
    record.method, record.status, record.cause = "BREW", 502, "upstream_cut"
    record.request_bytes, record.response_bytes = 3, 5
    with structlog.testing.capture_logs() as logs:
        setup.requests.end(record)
        setup.requests.end(RequestRecord(record.client, 0.0, status=400, cause="malformed"))
    assert setup.value("requests_total", route="brokers", method="other", status="5xx") == 1
    assert setup.value("requests_total", route="none", method="other", status="4xx") == 1
    assert setup.value("failed_requests_total", reason="upstream_cut") == 1
    assert setup.value("body_bytes_total", direction="response") == 5
    assert [entry["event"] for entry in logs] == ["http request"] * 2
    assert (logs[0]["path"], logs[0]["status"], logs[0]["cause"]) == ("/admin", 502, "upstream_cut")
    for number in range(100):
        setup.requests.end(RequestRecord(record.client, 0.0, status=502, cause=f"captured-{number}"))
    reasons = {
        sample.labels["reason"]
        for metric in setup.registry.collect()
        for sample in metric.samples
        if sample.name == "pulsar_proxy_http_failed_requests_total"
    }
    assert len(reasons) <= 33


async def test_the_polls_of_load_balancers_are_logged_at_debug() -> None:
    setup = Setup()
    client = setup.admitted("10.0.0.1").client
    with structlog.testing.capture_logs() as logs:
        for path in ("/status.html", "/admin"):
            setup.requests.end(RequestRecord(client, trio.current_time(), method="GET", path=path, status=200))
    assert [(entry["path"], entry["log_level"]) for entry in logs] == [("/status.html", "debug"), ("/admin", "info")]


async def test_a_request_is_an_audit_event() -> None:
    """Beside the log, and whether or not that is on."""
    setup = Setup(access_log=False)
    reader, writer = os.pipe()
    audit = AuditLog(None, Role.HTTP, 0, writer)
    audit.configure(msgspec.convert({"audit": {"events": ["http"]}}, Config))
    requests = WorkerRequests(setup.config, setup.connections, HttpMetrics(CollectorRegistry()), audit)
    client = setup.admitted("10.0.0.1").client
    requests.end(RequestRecord(client, trio.current_time(), method="GET", path="/admin", principal="alice", status=200))
    event = json.loads(os.read(reader, 5000))
    for end in (reader, writer):
        os.close(end)
    assert event["event"] == "http_request"
    assert (event["client"], event["principal"]) == (client.address, "alice")
    assert (event["method"], event["path"], event["status"]) == ("GET", "/admin", 200)


async def test_the_access_log_can_be_off() -> None:
    setup = Setup(access_log=False)
    with structlog.testing.capture_logs() as logs:
        setup.requests.end(RequestRecord(setup.admitted("10.0.0.1").client, 0.0, status=200))
    assert logs == []
