"""The HTTP reverse proxy before a real broker: admin requests and lookups, kills, reloads, upgrades."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from local.ports import free_port
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, before, running
from .lab.certificates import Authority
from .lab.cluster import HOST, ProxyCluster, Tables, merged
from .lab.waiting import BUSY_S, eventually
from .lab.wire import WireClient


class HttpCluster(ProxyCluster):
    """A cluster with one listener for HTTP."""

    def __init__(
        self,
        broker: Standalone,
        tables: Tables | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **listener: object,
    ) -> None:
        self.http_port = free_port()
        own: Tables = {
            "brokers": before(broker, web_service_url=broker.admin_url),
            "http_listener": {"bind": f"{HOST}:{self.http_port}", **listener},
        }
        super().__init__(merged(own, tables or {}), environment=environment)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one request."""
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=BUSY_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text else None
        finally:
            connection.close()


@pytest.fixture(scope="module")
def proxied(broker: Standalone) -> Iterator[HttpCluster]:
    with running(HttpCluster(broker)) as cluster:
        assert isinstance(cluster, HttpCluster)
        yield cluster


def test_the_brokers_admin_api_through_the_proxy(proxied: HttpCluster, broker: Standalone) -> None:
    assert proxied.request("GET", "/admin/v2/clusters") == (200, broker.admin().request("GET", "clusters"))
    topic = "/admin/v2/persistent/public/default/by-http%2Fwith-slash"
    assert proxied.request("PUT", topic) == (204, None)
    assert proxied.request("PUT", topic)[0] == 409, "the broker's own refusal"
    broker.admin().request("DELETE", topic)  # which the broker knows by that very name
    assert proxied.request("DELETE", topic)[0] == 404
    body = json.dumps({"retentionTimeInMinutes": 7, "retentionSizeInMB": 3}).encode()
    path = "/admin/v2/namespaces/public/default/retention"
    assert proxied.request("POST", path, body, Content_Type="application/json")[0] == 204
    assert proxied.request("GET", path)[1]["retentionTimeInMinutes"] == 7


def test_a_lookup_by_http(proxied: HttpCluster, broker: Standalone) -> None:
    status, found = proxied.request("GET", "/lookup/v2/topic/persistent/public/default/looked-up")
    assert (status, found["brokerUrl"]) == (200, broker.service_url)


def test_paths_without_a_route_and_the_load_balancers_check(proxied: HttpCluster) -> None:
    assert proxied.request("GET", "/metrics")[0] == 404
    connection = http.client.HTTPConnection(HOST, proxied.http_port, timeout=BUSY_S)
    connection.request("GET", "/status.html")
    assert connection.getresponse().read() == b"OK"
    connection.close()


def test_a_killed_http_worker_is_replaced_and_no_relay_notices(broker: Standalone) -> None:
    with running(HttpCluster(broker)) as cluster:
        assert isinstance(cluster, HttpCluster)
        relay = WireClient(cluster.port)
        assert relay.connect(proxy_to_broker_url=f"localhost:{broker.broker_port}").type == BaseCommand.CONNECTED
        before_kill = cluster.worker_pids()
        os.kill(before_kill["http-0"], signal.SIGKILL)
        assert cluster.request("GET", "/admin/v2/clusters")[0] == 200, "it waits in the kernel's queue"
        after = cluster.worker_pids()
        assert after.pop("http-0") != before_kill.pop("http-0")
        assert after == before_kill
        relay.close()


def test_an_upgrade_keeps_the_port_and_a_reload_refuses_another(broker: Standalone) -> None:
    with running(HttpCluster(broker)) as cluster:
        assert isinstance(cluster, HttpCluster)
        cluster.write_config(merged(cluster.tables, {"http_listener": {"bind": f"{HOST}:{free_port()}"}}))
        refused = cluster.command("reload")
        assert refused.returncode
        assert "http_listener" in refused.stderr
        cluster.write_config(merged(cluster.tables, {"http": {"response_headers": {"X-Frame-Options": "DENY"}}}))
        kept = http.client.HTTPConnection(HOST, cluster.http_port, timeout=BUSY_S)
        kept.request("GET", "/admin/v2/clusters")
        assert kept.getresponse().read()
        assert not cluster.command("reload").returncode
        kept.request("GET", "/admin/v2/clusters")
        response = kept.getresponse()
        assert (response.read(), response.headers["x-frame-options"])[1] == "DENY", "for requests from then on"
        kept.close()
        pid = cluster.worker_pids()["http-0"]
        assert not cluster.command("upgrade").returncode
        assert cluster.request("GET", "/admin/v2/clusters")[0] == 200
        eventually(lambda: cluster.worker_pids().get("http-0") not in {None, pid}, what="a new HTTP worker")
        assert cluster.request("GET", "/admin/v2/clusters")[0] == 200


def test_an_upgrade_without_http_closes_its_port(broker: Standalone) -> None:
    with running(HttpCluster(broker)) as cluster:
        assert isinstance(cluster, HttpCluster)
        tables = {name: keys for name, keys in cluster.tables.items() if name != "http_listener"}
        cluster.write_config(tables)
        assert not cluster.command("upgrade").returncode
        assert "http-0" not in cluster.worker_pids()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, cluster.http_port), timeout=BUSY_S)


def test_tls_and_tokens(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The client's own token goes on to the broker, which authorizes it."""
    authority = Authority(tmp_path_factory.mktemp("certificates"), "http")
    server = authority.server("proxy")
    tls = {"certificate": server.certificate, "key": server.key}
    cluster = HttpCluster(secured_broker, authentication(secured_broker), tls=tls)
    context = ssl.create_default_context(cafile=authority.file)
    with running(cluster):

        def status(token: str) -> int:
            connection = http.client.HTTPSConnection("localhost", cluster.http_port, timeout=BUSY_S, context=context)
            connection.request(
                "GET", "/admin/v2/tenants", headers={"Authorization": f"Bearer {token}"} if token else {}
            )
            found = connection.getresponse().status
            connection.close()
            return found

        assert status(secured_broker.token("admin")) == 200
        assert status("") == status("e30.e30.x") == 401
