"""Names that clients invent, and that no name server answers for, delay no client that asks for a broker's own name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.cluster import ProxyCluster, Tables
from .lab.dns import NameServer
from .lab.fakes import FakeBroker, LookupBroker
from .lab.schema import LOOKUP_CONNECT
from .lab.waiting import eventually
from .lab.wire import WireClient

SLOW_ZONE = "slow.test"
ATTACKERS = 400
ASKED_AT_LEAST = 8
ATTACKER = "127.0.0.66"
RESOLV_CONF = "/etc/resolv.conf"
WITH_RESOLV_CONF = ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {RESOLV_CONF} && exec "$@"']
LONG_MS = 120_000
TOPIC = "persistent://public/default/slow-names"


@dataclass
class Place:
    """A cluster whose only name server is ours, and the port that its broker listens on."""

    cluster: ProxyCluster
    names: NameServer
    port: int


def name_server() -> NameServer:
    """A name server that resolv.conf can name, which has no ports; a skip where this machine forbids one."""
    host = f"127.0.53.{os.getpid() % 250 + 1}"
    try:
        return NameServer(host, 53, silent_zone=SLOW_ZONE)
    except PermissionError:
        pytest.skip("needs to listen on port 53 (root)")


def own_resolv_conf(directory: Path, server: str) -> list[str]:
    """How to run a command with a resolv.conf of its own; a skip where this machine forbids it."""
    file = directory / "resolv.conf"
    file.write_text(f"nameserver {server}\n")
    prefix = [*WITH_RESOLV_CONF, str(file)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs a mount namespace (root, with unshare)")
    return prefix


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster that waits long for names, without authentication: its clients are told apart by their addresses."""
    directory = tmp_path_factory.mktemp("names")
    answer = {"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://advertised.test:1"}
    broker = LookupBroker(answer)
    with name_server() as names, FakeBroker(broker) as fake:
        broker.answer = {**answer, "broker_service_url": f"pulsar://advertised.test:{fake.port}"}
        for name in ("brokers.test", "b7.brokers.test", "advertised.test", "other.test", "shared.test"):
            names.add(name, "A", "127.0.0.1", ttl=600)
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {
                "service_url": f"pulsar://brokers.test:{fake.port}",
                "allowed_ports": [fake.port],
                "allowed_hosts": ["*"],
                "allowed_addresses": ["127.0.0.0/8"],
                "connect_timeout_ms": LONG_MS,
                "handshake_timeout_ms": LONG_MS,
            },
            "limits": {"handshake_timeout_ms": LONG_MS},
        }
        prefix = own_resolv_conf(directory, names.host)
        with running(ProxyCluster(tables, prefix=prefix, ready_timeout_s=90)) as cluster:
            yield Place(cluster, names, fake.port)


@pytest.fixture(scope="module")
def attackers(place: Place) -> Iterator[list[WireClient]]:
    """Clients at one address, each of which waits to be relayed to a name of its own which no server answers for."""
    with contextlib.ExitStack() as stack:
        clients = []
        for index in range(ATTACKERS):
            client = stack.enter_context(WireClient(place.cluster.port, source=ATTACKER))
            client.send_connect(proxy_to_broker_url=f"n{index}.{SLOW_ZONE}:{place.port}")
            clients.append(client)
        what = "the first names are asked for"
        eventually(lambda: len(place.names.silent_names()) >= ASKED_AT_LEAST, what=what)
        yield clients


def assert_relayed(place: Place, name: str, *, source: str = "") -> None:
    """A client that names this broker is connected to it."""
    with WireClient(place.cluster.port, source=source) as client:
        answer = client.connect(proxy_to_broker_url=f"{name}:{place.port}")
        assert answer.type == BaseCommand.CONNECTED, answer


def assert_all_wait(clients: list[WireClient]) -> None:
    """No client has been told anything: so a client that was served did not wait for any of these."""
    assert not any(client.has_heard() for client in clients)


@pytest.mark.parametrize("name", ["brokers.test", "BROKERS.test", "b7.brokers.test"])
def test_brokers_own_names_wait_for_no_invented_one(place: Place, attackers: list[WireClient], name: str) -> None:
    """Not even at the attackers' own address."""
    assert_relayed(place, name, source=ATTACKER)
    assert_all_wait(attackers)


def test_a_name_that_a_broker_has_answered_with_waits_for_no_invented_one(
    place: Place, attackers: list[WireClient]
) -> None:
    with WireClient(place.cluster.port) as client:
        assert client.connect().type == BaseCommand.CONNECTED
        answer = client.lookup(TOPIC).lookup_topic_response
        assert answer.broker_service_url == f"pulsar://advertised.test:{place.port}"
    assert_relayed(place, "advertised.test", source=ATTACKER)
    assert_all_wait(attackers)


def test_another_addresss_names_wait_for_none_of_an_attackers(place: Place, attackers: list[WireClient]) -> None:
    assert_relayed(place, "other.test")
    assert_all_wait(attackers)


def test_a_name_that_an_attacker_has_asked_for_before_does_not_wait_among_its_names(
    place: Place, attackers: list[WireClient]
) -> None:
    with WireClient(place.cluster.port, source=ATTACKER) as last:
        last.send_connect(proxy_to_broker_url=f"shared.test:{place.port}")
        assert_relayed(place, "shared.test")
        assert_all_wait(attackers)
        assert last.receive().type == BaseCommand.CONNECTED, "it shares the answer"
