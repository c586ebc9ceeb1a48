"""Thousands of connections that never authenticate: users come in beside them, also from the same address."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import before, running
from .lab.certificates import Authority
from .lab.cluster import Tables
from .lab.crowd import many_open_files
from .lab.listeners import ManyListenersCluster
from .lab.strangers import Strangers, client_hello
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient

TOPIC = "persistent://public/default/strangers"
STRANGERS = 5_000
CONNECTIONS_MAX = 4_000
FROM = "127.0.0.66"
ELSEWHERE = "127.0.0.77"
PATIENCE_S = 60.0
ENDED = "pulsar_proxy_ended_connections_total"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def cluster(broker: Standalone, authority: Authority) -> Iterator[ManyListenersCluster]:
    """Fewer connections than there are strangers, who have a long time for their handshake."""
    server = authority.server("server")
    tables: Tables = {
        "brokers": before(broker),
        "limits": {"max_connections": CONNECTIONS_MAX, "handshake_timeout_ms": 120_000},
    }
    with many_open_files(20_000):
        tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
        with running(ManyListenersCluster(tables, {"tls": tls})) as cluster:
            yield cluster


class TlsClient(WireClient):
    """Raw frames, through TLS."""

    def __init__(self, port: int, context: ssl.SSLContext, source: str = "") -> None:
        super().__init__(port, source=source, timeout_s=PATIENCE_S)
        self._socket = context.wrap_socket(self._socket, server_hostname="localhost")


@pytest.mark.parametrize("what", ["silent", "silent at a TLS listener", "half-open TLS handshakes"])
def test_strangers_keep_no_client_out(cluster: ManyListenersCluster, authority: Authority, what: str) -> None:
    """Security: 5,000 connections from one address, where the cluster takes 4,000. Every user comes in and is served,
    from another address and, as behind a load balancer, from the very same; strangers have a bounded part.
    """
    context = ssl.create_default_context(cafile=authority.file)
    [tls_port] = cluster.ports
    speaks_tls = what != "silent"
    port = tls_port if speaks_tls else cluster.port
    with Strangers(port, FROM, client_hello() if "half-open" in what else b"") as strangers:
        strangers.open(STRANGERS)
        for number in range(10):
            source = (ELSEWHERE, FROM)[number % 2]
            client = TlsClient(port, context, source) if speaks_tls else WireClient(port, source=source, timeout_s=60)
            with client:
                client.send_connect()
                assert client.receive(PATIENCE_S).type == BaseCommand.CONNECTED
                assert client.lookup(TOPIC).lookup_topic_response.proxy_through_service_url
        eventually(
            lambda: cluster.metrics().total("pulsar_proxy_active_connections") <= CONNECTIONS_MAX // 8,
            what="one address has half of the quarter that strangers have",
            within_s=PATIENCE_S,
        )
        assert strangers.left() <= CONNECTIONS_MAX // 8
        assert cluster.metrics().total(ENDED, cause="gave_way") > 0
        assert cluster.metrics().total("pulsar_proxy_rejected_connections_total") == 0
    eventually(
        lambda: cluster.metrics().total("pulsar_proxy_active_connections") == 0, what="all have gone", within_s=60
    )


def test_a_fleet_from_one_address_comes_in_at_once(cluster: ManyListenersCluster) -> None:
    """Behind a load balancer all clients have the same address: more come at one time than strangers may be of one."""
    with Strangers(cluster.port, FROM) as silent:
        silent.open(CONNECTIONS_MAX // 8)
        fleet = []
        try:
            for _ in range(1_000):
                fleet.append(WireClient(cluster.port, source=FROM, timeout_s=PATIENCE_S))
                fleet[-1].send_connect()
            assert {client.receive(PATIENCE_S).type for client in fleet} == {BaseCommand.CONNECTED}
        finally:
            for client in fleet:
                client.close()


def test_the_limit_by_address_is_the_clusters(broker: Standalone) -> None:
    """Two forwarders, and an address that is served by both."""
    tables: Tables = {"brokers": before(broker), "limits": {"max_connections_per_address": 3}}
    with running(ProxyClusterOfTwo(tables)) as cluster:
        inside = [WireClient(cluster.port, source=FROM) for _ in range(3)]
        assert [client.connect().type for client in inside] == [BaseCommand.CONNECTED] * 3
        connections = [worker["connections"] for worker in cluster.status()["workers"] if "connections" in worker]
        assert sorted(connections) == [1, 2], "neither forwarder alone has three"
        for _ in range(4):
            with WireClient(cluster.port, source=FROM) as fourth:
                [error] = fourth.wait_for_end()
                assert error.error.error == ServerError.NotAllowedError
        with WireClient(cluster.port, source=ELSEWHERE) as other:
            assert other.connect().type == BaseCommand.CONNECTED
        inside.pop().close()
        eventually(lambda: comes_in(cluster.port), what="there is room again")
        for client in inside:
            client.close()


class ProxyClusterOfTwo(ManyListenersCluster):
    """The lab's own listener alone."""


def comes_in(port: int) -> bool:
    """Whether a newcomer from there gets CONNECTED."""
    with WireClient(port, source=FROM) as client:
        try:
            return bool(client.connect().type == BaseCommand.CONNECTED)
        except (Ended, OSError):
            return False
