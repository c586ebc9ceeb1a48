"""A real broker is told its clients' addresses by PROXY headers of the proxy, and shows them in topics' statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from local.ports import free_port
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import NO_PINGS, before, running
from .lab.certificates import Authority
from .lab.cluster import HOST, ProxyCluster, Tables
from .lab.programs import Program
from .lab.wire import WireClient
from .test_connections import listed
from .test_proxy_protocol import HAPROXY, Balancer
from .test_relays_survive import ADOPTED, kill_forwarder


@dataclass
class Scene:
    """A broker that takes PROXY headers, on both ports."""

    broker: Standalone
    tls_port: int
    authority: Authority

    def cluster(self, mode: str, *, tls: bool = False, **tables: Any) -> ProxyCluster:
        port = self.tls_port if tls else self.broker.broker_port
        brokers: dict[str, object] = {
            "service_url": f"pulsar{'+ssl' if tls else ''}://localhost:{port}",
            "allowed_ports": [port],
            "port_pairs": [[self.broker.broker_port, self.tls_port]],
            "proxy_protocol": mode,
        }
        if tls:
            brokers["tls"] = {"trust": self.authority.file}
        return ProxyCluster({"cluster": {"forwarders": 1}, "brokers": brokers, **tables})

    def producers(self, topic: str) -> list[str]:
        """The addresses of a topic's producers, by the broker's statistics."""
        stats = self.broker.admin().request("GET", f"{topic.replace('://', '/')}/stats")
        return sorted(one["address"] for one in cast("dict[str, Any]", stats)["publishers"])


@pytest.fixture(scope="module")
def scene(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    pair, tls_port = authority.server("broker", "localhost"), free_port()
    conf = NO_PINGS | {
        "haProxyProtocolEnabled": "true",
        "brokerServicePortTls": str(tls_port),
        "tlsCertificateFilePath": pair.certificate,
        "tlsKeyFilePath": pair.key,
    }
    with Standalone(pulsar_home, tmp_path_factory.mktemp("broker"), conf=conf) as broker:
        yield Scene(broker, tls_port, authority)


def relayed(cluster: ProxyCluster, scene: Scene, topic: str, client: WireClient) -> None:
    """Make a client a topic's producer. The lookup, on a connection of the proxy's own, comes first."""
    with WireClient(cluster.port) as other:
        assert other.connect().type == BaseCommand.CONNECTED
        assert other.lookup(topic).type == BaseCommand.LOOKUP_RESPONSE
    assert client.connect(proxy_to_broker_url=f"localhost:{scene.broker.broker_port}").type == BaseCommand.CONNECTED
    assert client.producer(topic).type == BaseCommand.PRODUCER_SUCCESS


@pytest.mark.parametrize("tls", [False, True])
def test_statistics_show_the_client(scene: Scene, topic: str, tls: bool) -> None:
    """Also after its forwarder was killed: the header is before the relay. The second is dialled by callback."""
    with running(scene.cluster("within_tls", tls=tls)) as cluster, ExitStack() as stack:
        clients = [stack.enter_context(WireClient(cluster.port, source=f"127.0.0.{host}")) for host in (8, 9)]
        for number, client in enumerate(clients):
            relayed(cluster, scene, f"{topic}-{number}", client)
            assert scene.producers(f"{topic}-{number}") == [client.address]
        if tls:
            return
        kill_forwarder(cluster)
        cluster.wait_for_total(ADOPTED, 2)
        for number, client in enumerate(clients):
            assert client.lookup(topic).type == BaseCommand.LOOKUP_RESPONSE
            assert scene.producers(f"{topic}-{number}") == [client.address]


def test_statistics_show_a_real_client(scene: Scene, topic: str, python_client: Program) -> None:
    with (
        running(scene.cluster("within_tls")) as cluster,
        python_client.start("stream", cluster.service_url, topic) as run,
    ):
        run.wait_for_progress(10)
        [producer] = scene.producers(topic)
        assert producer in {row["address"] for row in listed(cluster)}
        assert run.stop().result["ok"]


@pytest.mark.parametrize("host", ["127.0.0.9", "::1"])
@pytest.mark.parametrize("options", ["send-proxy", "send-proxy-v2 proxy-v2-options crc32c,unique-id"])
def test_statistics_show_whom_a_load_balancer_announces(
    scene: Scene, topic: str, tmp_path: Path, host: str, options: str
) -> None:
    if not HAPROXY:
        pytest.skip("HAProxy is not installed")
    listener = {"proxy_protocol": "required", "proxy_protocol_sources": ["127.0.0.1/32"]}
    with running(scene.cluster("within_tls", listener=listener)) as cluster, ExitStack() as stack:
        balancer = Balancer(tmp_path)
        balancer.add("it", f"{HOST}:{cluster.port}", options)
        balancer.start(stack)
        to, source = ("::1", "") if ":" in host else (HOST, host)
        lookup = stack.enter_context(WireClient(balancer.ports["it"]))
        assert lookup.connect().type == BaseCommand.CONNECTED
        assert lookup.lookup(topic).type == BaseCommand.LOOKUP_RESPONSE
        client = stack.enter_context(WireClient(balancer.ports["it"], to, source=source))
        target = f"localhost:{scene.broker.broker_port}"
        assert client.connect(proxy_to_broker_url=target).type == BaseCommand.CONNECTED
        assert client.producer(topic).type == BaseCommand.PRODUCER_SUCCESS
        shown = "0:0:0:0:0:0:0:1" if ":" in host else host  # as Java writes it
        assert scene.producers(topic) == [f"{shown}:{client.address.rpartition(':')[2]}"]


def test_through_another_proxy(scene: Scene, topic: str, tmp_path: Path) -> None:
    """Before TLS, where the second proxy requires a header; on connections for lookups it is that of no client."""
    key, token = tmp_path / "secret.key", tmp_path / "proxy-a.jwt"
    key.write_bytes(bytes(range(64)))
    token.write_text(make_token(key.read_bytes(), "proxy-a"))
    pair = scene.authority.server("b", "localhost")
    authentication = {"enabled": True, "proxy_roles": ["proxy-a"]}
    tables: Tables = {"authentication": authentication, "authentication.token": {"secret_key": str(key)}}
    listener = {"proxy_protocol": "required", "proxy_protocol_sources": ["127.0.0.1/32"]}
    tls = {"listener": listener, "listener.tls": {"certificate": pair.certificate, "key": pair.key}}
    with running(scene.cluster("within_tls", **tables, **tls)) as b:
        to_b: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {
                "service_url": f"pulsar+ssl://localhost:{b.port}",
                "through_proxy": True,
                "allowed_ports": [scene.broker.broker_port],
                "proxy_protocol": "before_tls",
                "tls": {"trust": scene.authority.file},
                "credentials": {"method": "token", "file": str(token)},
            },
        }
        with running(ProxyCluster(to_b | tables)) as a, ExitStack() as stack:
            alice = {"token": make_token(key.read_bytes(), "alice")}
            other = stack.enter_context(WireClient(a.port))
            assert other.connect(**alice).type == BaseCommand.CONNECTED
            assert other.lookup(topic).type == BaseCommand.LOOKUP_RESPONSE
            client = stack.enter_context(WireClient(a.port, source="127.0.0.9"))
            target = f"localhost:{scene.broker.broker_port}"
            assert client.connect(proxy_to_broker_url=target, **alice).type == BaseCommand.CONNECTED
            assert client.producer(topic).type == BaseCommand.PRODUCER_SUCCESS
            assert scene.producers(topic) == [client.address]


def test_a_broker_that_takes_no_header(broker: Standalone) -> None:
    """The log and `check --connect` say what it lacks."""
    tables: Tables = {"cluster": {"forwarders": 1}, "brokers": before(broker, proxy_protocol="within_tls")}
    with running(ProxyCluster(tables), ready=False) as cluster:
        assert "haProxyProtocolEnabled=true" in cluster.wait_for_log("haProxyProtocolEnabled")
        checked = cluster.command("check", "--connect")
        assert checked.returncode == 1
        assert "haProxyProtocolEnabled=true" in checked.stdout + checked.stderr
