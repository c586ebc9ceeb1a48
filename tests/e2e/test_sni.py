"""A listener with routing by SNI (PIP-60): TLS of real clients ends at the broker, which alone authenticates them."""

from __future__ import annotations

import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from local.ports import free_port
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.dns import NameServer
from .lab.fakes import FakeBroker, LookupBroker
from .lab.programs import Program
from .lab.security import NAMESPACE, grant
from .lab.streams import SniStreams
from .lab.wire import WireClient
from .test_http import HttpCluster
from .test_relays_survive import ADOPTED, assert_whole, kill_forwarder

BROKER = "broker.pulsar.test"
RELAYS = "pulsar_proxy_new_connections_total"
REFUSED = "pulsar_proxy_sni_refused_total"


@dataclass
class Scene:
    """A cluster, which authenticates, with an SNI listener and one for HTTP; the broker behind it, and whom clients
    trust.
    """

    cluster: HttpCluster
    broker: Standalone
    broker_port: int
    authority: Authority

    def connect(self, name: str = BROKER) -> SniClient:
        """A client that asks for a name, and whose TLS is up. Raises ssl.SSLError where it is refused."""
        return SniClient(self.cluster.port, ssl.create_default_context(cafile=self.authority.file), name)

    def of_alice(self) -> dict[str, Any]:
        """Options of a Java client of hers, which comes to the broker by SNI."""
        return {
            "token": self.broker.token("alice"),
            "trust": self.authority.file,
            "sni_proxy": f"pulsar+ssl://localhost:{self.cluster.port}",
            "listener": "outside",
            "count": 10,
        }


class SniClient(WireClient):
    """Raw frames through TLS, by Python's OpenSSL."""

    def __init__(self, port: int, context: ssl.SSLContext, name: str) -> None:
        super().__init__(port)
        try:
            self._socket = context.wrap_socket(self._socket, server_hostname=name)
        except OSError:
            self.close()
            raise


@pytest.fixture(scope="module")
def scene(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    server = authority.server("broker", BROKER)
    plain, with_tls = free_port(), free_port()
    listeners = {"internal": f"pulsar://localhost:{plain}", "outside": f"pulsar+ssl://{BROKER}:{with_tls}"}
    conf = {
        "brokerServicePort": str(plain),
        "brokerServicePortTls": str(with_tls),
        "tlsCertificateFilePath": server.certificate,
        "tlsKeyFilePath": server.key,
        "advertisedListeners": ",".join(f"{name}:{url}" for name, url in listeners.items()),
        "internalListenerName": "internal",
    }
    with ExitStack() as stack:
        broker = Standalone(pulsar_home, tmp_path_factory.mktemp("sni-broker"), secured=True, conf=conf)
        broker.broker_port = plain
        stack.enter_context(broker)
        grant(broker)
        names = stack.enter_context(NameServer())
        names.add(f"{BROKER}.", "A", "127.0.0.1")
        names.add("stranger.pulsar.test.", "A", "127.0.0.1")
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "listener": {"routing": "sni"},
            "brokers": {
                "service_url": f"pulsar+ssl://{BROKER}:{with_tls}",
                "allowed_ports": [],
                "tls": {"trust": authority.file},
            },
            "authentication": {"enabled": True},
            "authentication.token": {"secret_key": str(broker.secret_key)},
        }
        environment = names.environment(tmp_path_factory.mktemp("names"))
        proxy = authority.server("proxy")
        tls = {"certificate": proxy.certificate, "key": proxy.key}
        cluster = HttpCluster(broker, tables, environment=environment, tls=tls)
        stack.enter_context(running(cluster))
        yield Scene(cluster, broker, with_tls, authority)


@pytest.fixture
def granted() -> str:
    """A topic that alice may use."""
    return f"persistent://{NAMESPACE}/sni-{uuid.uuid4().hex[:12]}"


def test_a_java_client(java_client: Program, scene: Scene, granted: str) -> None:
    result = java_client.succeed(
        "produce_consume", f"pulsar+ssl://{BROKER}:{scene.broker_port}", granted, **scene.of_alice()
    )
    assert (result["received"], result["in_order"]) == (10, True)


def test_a_java_client_with_lookups_by_http(java_client: Program, scene: Scene, granted: str) -> None:
    """Its service URL is the listener for HTTP, which answers with the broker; to that it comes by SNI."""
    relays = scene.cluster.metrics().total(RELAYS)
    url = f"https://localhost:{scene.cluster.http_port}"
    result = java_client.succeed("produce_consume", url, granted, **scene.of_alice())
    assert (result["received"], result["in_order"]) == (10, True)
    scene.cluster.wait_for_log("http request", f"/lookup/v2/topic/{granted.replace('://', '/')} ", "principal=alice")
    assert scene.cluster.metrics().total(RELAYS) > relays


def test_the_broker_authenticates_and_the_proxy_does_not(scene: Scene, granted: str) -> None:
    with scene.connect() as client:
        assert client.connect(token="no token").type == BaseCommand.ERROR
    with scene.connect() as client:
        assert client.connect(token=scene.broker.token("alice")).type == BaseCommand.CONNECTED
        assert client.lookup(granted).type == BaseCommand.LOOKUP_RESPONSE  # after which the broker has the topic
        assert client.producer(granted).type == BaseCommand.PRODUCER_SUCCESS


def test_a_relay_survives_its_forwarder(scene: Scene, granted: str) -> None:
    with scene.connect() as client:
        assert client.connect(token=scene.broker.token("alice")).type == BaseCommand.CONNECTED
        assert client.lookup(granted).type == BaseCommand.LOOKUP_RESPONSE
        kill_forwarder(scene.cluster)
        scene.cluster.wait_for_total(ADOPTED, 1)
        assert client.producer(granted).type == BaseCommand.PRODUCER_SUCCESS


@pytest.mark.parametrize("name", ["stranger.pulsar.test", "nowhere.pulsar.test", "localhost"])
def test_a_name_that_is_no_brokers(scene: Scene, name: str) -> None:
    """Of a stranger at a broker's address, too: behind an address that many share the name chooses the machine."""
    with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
        scene.connect(name)
    assert scene.cluster.metrics().total(REFUSED) >= 1
    scene.cluster.wait_for_log("not passed on", name)


def test_an_upgrade_is_noticed_by_no_relay() -> None:
    """Under load: none is cut, and every byte comes. The brokers' URL is a plain one, their ports are paired."""
    lookups, broker_port = LookupBroker({}), free_port()
    with FakeBroker(lookups) as lookup_broker:
        url = f"pulsar://localhost:{lookup_broker.port}"
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "listener": {"routing": "sni"},
            "brokers": {"service_url": url, "port_pairs": [[lookup_broker.port, broker_port]]},
        }
        with running(ProxyCluster(tables)) as cluster:
            streams = SniStreams(cluster.port, 16, portion_bytes_max=100_000, pause_s_max=0.3, broker_port=broker_port)
            generation, pids = cluster.status()["generation"], set(cluster.worker_pids().values())

            async def upgrade() -> None:
                answer = await trio.to_thread.run_sync(cluster.command, "upgrade")
                assert answer.returncode == 0, answer.stderr
                await trio.to_thread.run_sync(cluster.wait_for_total, ADOPTED, streams.count)

            trio.run(streams.run, upgrade)
            assert_whole(streams)
            assert cluster.status()["generation"] == generation + 1
            assert not pids & set(cluster.worker_pids().values())


def test_a_circle_of_proxies_ends_at_the_first_that_is_passed_twice() -> None:
    """Each one's brokers are the other proxy, so a hello would go round until a limit on connections ends it."""
    listener = {"routing": "sni"}
    with ExitStack() as stack:
        first = ProxyCluster({"cluster": {"forwarders": 1}, "listener": listener})
        second = ProxyCluster(
            {
                "cluster": {"forwarders": 1},
                "listener": listener,
                "brokers": {"service_url": f"pulsar+ssl://localhost:{first.port}"},
            }
        )
        first.write_config(merged(first.tables, {"brokers": {"service_url": f"pulsar+ssl://localhost:{second.port}"}}))
        for cluster in (first, second):
            stack.enter_context(running(cluster, ready=False))
        with pytest.raises(ssl.SSLError, match="INTERNAL_ERROR"):
            SniClient(first.port, ssl.create_default_context(), "localhost")
        for cluster in (first, second):  # lookup workers say hello, too: that of each comes back to its own proxy
            cluster.wait_for_log("not passed on", "reason=circle")


def test_what_is_no_tls(scene: Scene) -> None:
    with socket.create_connection(("127.0.0.1", scene.cluster.port), timeout=60) as client:
        client.sendall(b"\0\0\0\x20" + bytes(32))
        assert client.recv(100) == bytes.fromhex("15030300020232")
        assert client.recv(100) == b""
