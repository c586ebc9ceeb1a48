"""Geo-replication of two clusters through a listener with routing by SNI (PIP-60, apache/pulsar#17244).

Each broker's replicator reaches the other cluster by the proxy alone: only that one can resolve the brokers' names.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from local.ports import free_port
from local.standalone import BrokerOptions, Standalone

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables
from .lab.dns import NameServer
from .lab.programs import Program

EAST, WEST = "east", "west"
TENANT = "geo"
NAMESPACE = f"{TENANT}/replicated"
SMALL = BrokerOptions(memory="-Xms128m -Xmx384m -XX:MaxDirectMemorySize=256m")


@dataclass
class Site:
    """A standalone that is a cluster of its own: its TLS is for clients from elsewhere, by the proxy."""

    broker: Standalone
    host: str
    tls_port: int

    @property
    def tls_url(self) -> str:
        """What the other cluster knows of it."""
        return f"pulsar+ssl://{self.host}:{self.tls_port}"


def site(home: Path, data: Path, name: str, authority: Authority) -> Site:
    """Not yet running."""
    host = f"{name}.pulsar.test"
    server = authority.server(name, host)
    plain, with_tls = free_port(), free_port()
    conf = {
        "clusterName": name,
        "brokerServicePort": str(plain),
        "brokerServicePortTls": str(with_tls),
        "tlsCertificateFilePath": server.certificate,
        "tlsKeyFilePath": server.key,
        "tlsHostnameVerificationEnabled": "true",  # of the replicator, too
        "advertisedListeners": f"all:pulsar://localhost:{plain},all:pulsar+ssl://{host}:{with_tls}",
        "internalListenerName": "all",
    }
    broker = Standalone(home, data, conf=conf, options=SMALL)
    broker.broker_port = plain
    return Site(broker, host, with_tls)


@pytest.fixture(scope="module")
def sites(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Site, Authority]]:
    """Both run, and know nothing of each other."""
    data = tmp_path_factory.mktemp("geo")
    authority = Authority(data, "ours")
    east, west = (site(pulsar_home, data / name, name, authority) for name in (EAST, WEST))
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for one in (east, west):
            stack.callback(one.broker.stop)
        list(pool.map(lambda one: one.broker.start(), (east, west)))
        yield east, west, authority


@pytest.fixture(scope="module")
def proxy_of_both(
    sites: tuple[Site, Site, Authority], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyCluster]:
    """One listener for both clusters: the name in the TLS decides."""
    east, west, authority = sites
    with NameServer() as names:
        for one in (east, west):
            names.add(f"{one.host}.", "A", "127.0.0.1")
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "listener": {"routing": "sni"},
            "brokers": {
                "service_url": f"{east.tls_url},{west.host}:{west.tls_port}",
                "tls": {"trust": authority.file},
            },
        }
        environment = names.environment(tmp_path_factory.mktemp("names"))
        with running(ProxyCluster(tables, environment=environment)) as cluster:
            yield cluster


def introduce(at: Site, other: Site, name: str, proxy: ProxyCluster, authority: Authority) -> None:
    """Tell a site of the other cluster (``pulsar-admin clusters create``), and create the namespace of both."""
    admin = at.broker.admin()
    cluster = {
        "serviceUrlTls": f"https://{other.host}:8443",  # this host has no name here: nothing asks it
        "brokerServiceUrlTls": other.tls_url,
        "proxyServiceUrl": f"pulsar+ssl://localhost:{proxy.port}",
        "proxyProtocol": "SNI",
        "brokerClientTlsEnabled": True,
        "brokerClientTrustCertsFilePath": authority.file,
    }
    admin.request("PUT", f"clusters/{name}", cluster)
    admin.create_tenant(TENANT, (EAST, WEST))
    admin.create_namespace(NAMESPACE)
    admin.request("POST", f"namespaces/{NAMESPACE}/replication", [EAST, WEST])


def test_replicators_reach_each_other_through_the_proxy(
    sites: tuple[Site, Site, Authority], proxy_of_both: ProxyCluster, python_client: Program
) -> None:
    """Messages of one cluster come to a consumer of the other, both ways, by relays to the broker that is named."""
    east, west, authority = sites
    introduce(east, west, WEST, proxy_of_both, authority)
    introduce(west, east, EAST, proxy_of_both, authority)
    for here, there in ((east, west), (west, east)):
        topic = f"persistent://{NAMESPACE}/from-{here.host}"
        options = {"consume_url": there.broker.service_url, "count": 100}
        result = python_client.succeed("produce_consume", here.broker.service_url, topic, **options)
        assert (result["received"], result["in_order"]) == (100, True)
    scrape = proxy_of_both.metrics()
    assert scrape.total("pulsar_proxy_connections_by_state", state="relaying") >= 2  # one each way
    assert scrape.total("pulsar_proxy_sni_refused_total") == 0
