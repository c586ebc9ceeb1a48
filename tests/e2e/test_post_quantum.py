"""Clients that offer X25519MLKEM768: their hellos are larger than a segment, and each side may lack the group."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.certificates import Authority, Pair
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.post_quantum import CLASSIC, HYBRID, PostQuantumSocket, client_session, server_session
from .lab.wire import WireClient

SEGMENT_BYTES = 1_460
OF_THIS_PYTHON = HYBRID if ssl.OPENSSL_VERSION_INFO >= (3, 5) else CLASSIC


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.server("server")


@pytest.fixture
def lookups() -> LookupBroker:
    return LookupBroker({})


class PostQuantumClient(WireClient):
    """Raw frames through such TLS."""

    def __init__(self, port: int, authority: Authority) -> None:
        super().__init__(port)
        self.tls: Any = PostQuantumSocket(self._socket, client_session(authority.file))
        self._socket = self.tls


@pytest.fixture
def broker(lookups: LookupBroker) -> Iterator[FakeBroker]:
    with FakeBroker(lookups) as broker:
        yield broker


def listener_tables(broker_port: int, pair: Pair) -> Tables:
    tls = {"certificate": pair.certificate, "key": pair.key}
    return {
        "cluster": {"forwarders": 1},
        "listener": {"tls": tls},
        "brokers": {"service_url": f"pulsar://localhost:{broker_port}"},
    }


def assert_relays(client: PostQuantumClient, target: str = "") -> None:
    assert client.tls.sent_bytes[0] > SEGMENT_BYTES
    fields = {"proxy_to_broker_url": target} if target else {}
    assert client.connect(**fields).type == BaseCommand.CONNECTED
    assert client.ping().type == BaseCommand.PONG


def test_a_listener(broker: FakeBroker, authority: Authority, pair: Pair) -> None:
    """It has the group from OpenSSL 3.5 on; before, it falls back to the other key share."""
    with (
        running(ProxyCluster(listener_tables(broker.port, pair))) as cluster,
        PostQuantumClient(cluster.port, authority) as client,
    ):
        assert client.tls.group == OF_THIS_PYTHON
        assert_relays(client, f"localhost:{broker.port}")


@pytest.mark.parametrize("broker_has_it", [True, False])
def test_routing_by_sni(lookups: LookupBroker, authority: Authority, pair: Pair, broker_has_it: bool) -> None:
    """The group is the client's and the broker's affair: the proxy's OpenSSL has no part in it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)

    def serve(connection: Any) -> None:
        lookups(PostQuantumSocket(connection, server_session(pair)))  # type: ignore[arg-type]

    with (
        FakeBroker(serve) if broker_has_it else FakeBroker(lookups, tls=context) as broker,
    ):
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "listener": {"routing": "sni"},
            "brokers": {"service_url": f"pulsar+ssl://localhost:{broker.port}", "tls": {"trust": authority.file}},
        }
        with (
            running(ProxyCluster(tables)) as cluster,
            PostQuantumClient(cluster.port, authority) as client,
        ):
            assert client.tls.group == (HYBRID if broker_has_it else OF_THIS_PYTHON)
            assert_relays(client)


def test_the_environment_chooses_groups(broker: FakeBroker, authority: Authority, pair: Pair, tmp_path: Path) -> None:
    """By OpenSSL's own configuration, where Python cannot: only P-384, so a client's other shares are no use."""
    file = tmp_path / "openssl.cnf"
    sections = "openssl_conf = init\n[init]\nssl_conf = ssl\n[ssl]\nsystem_default = tls\n[tls]\nGroups = P-384\n"
    file.write_text(sections)
    cluster = ProxyCluster(listener_tables(broker.port, pair), environment={"OPENSSL_CONF": str(file)})
    with running(cluster), PostQuantumClient(cluster.port, authority) as client:
        assert client.tls.group == "secp384r1"
        assert_relays(client, f"localhost:{broker.port}")
