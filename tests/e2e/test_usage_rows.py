"""The use of principals in the metrics of a real cluster, while an issuer hands out as many roles as it likes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand
from proxy.forwarder.relay.usage import LABEL_BYTES_MAX, OTHER, label_of

from .conftest import running
from .lab.cluster import HOST, ProxyCluster, Tables
from .lab.fakes import Eavesdropper, FakeBroker
from .lab.waiting import eventually
from .lab.wire import WireClient

KEY = b"a shared secret of thirty-two by"
SESSIONS = "pulsar_proxy_principal_sessions_total"
BYTES = "pulsar_proxy_principal_bytes_total"
ENDED = "pulsar_proxy_ended_connections_total"
IDLE_MS = 1000
ROWS = 20
LONG_NAME_BYTES = 448
LONG_NAMES = 470
"""So many that all lines with such names, each character escaped, exceed what a process may write."""


@dataclass
class Stage:
    """One forwarder, between clients with any role and a broker that takes everything."""

    cluster: ProxyCluster
    broker_port: int

    def client(self, role: str, source: str = "") -> WireClient:
        """One with a relay."""
        client = WireClient(self.cluster.port, source=source)
        url = f"{HOST}:{self.broker_port}"
        answer = client.connect(token=make_token(KEY, role), proxy_to_broker_url=url)
        assert answer.type == BaseCommand.CONNECTED, answer
        return client

    def use_once(self, role: str) -> None:
        """A relay that a role needs once."""
        with self.client(role) as client:
            client.send(BaseCommand.PING, ping={})

    def wait_until_no_relay_is_open(self) -> None:
        def is_empty() -> bool:
            forwarders = [one for one in self.cluster.status()["workers"] if one["role"] == "forwarder"]
            return all(one["connections"] == 0 for one in forwarders)

        eventually(is_empty, what="every relay has ended")


@pytest.fixture(scope="module")
def broker_port() -> Iterator[int]:
    with FakeBroker(Eavesdropper()) as broker:
        yield broker.port


def stage_of(directory: Path, broker_port: int, principals_max: int) -> Stage:
    key = directory / "key"
    key.write_bytes(KEY)
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "brokers": {"service_url": f"pulsar://{HOST}:{broker_port}", "allowed_ports": [broker_port]},
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(key)},
        "metrics": {"principals_max": principals_max, "principal_idle_ms": IDLE_MS},
    }
    return Stage(ProxyCluster(tables), broker_port)


def test_bob_has_a_row_of_his_own_after_one_shot_roles_have_taken_all(tmp_path: Path, broker_port: int) -> None:
    """Security: he was billed as `other` from then on, for as long as the cluster ran."""
    stage = stage_of(tmp_path, broker_port, ROWS)
    with running(stage.cluster, ready=False) as cluster:
        with stage.client("steady") as steady:
            for number in range(ROWS + 5):
                stage.use_once(f"one-shot-{number}")
            with stage.client("bob"):
                assert cluster.metrics().total(SESSIONS, principal=OTHER) >= 1, "no row is idle before a scrape"
            roles = cluster.metrics().label_values("principal")
            assert {"steady", "one-shot-0"} <= roles
            assert "bob" not in roles

            def has_a_row() -> bool:
                cluster.metrics()
                stage.use_once("bob")
                return "bob" in cluster.metrics().label_values("principal")

            eventually(has_a_row, what="bob has a row of his own")
            before = cluster.metrics().total(BYTES, principal="steady")
            steady.send(BaseCommand.PING, ping={})
            eventually(
                lambda: cluster.metrics().total(BYTES, principal="steady") > before, what="the steady one's bytes"
            )
            named = cluster.metrics().label_values("principal")
            assert len(named) == ROWS + 1, named
        assert "Traceback" not in cluster.log_text()


def test_bob_has_a_row_of_his_own_while_another_address_has_all_that_are_first_come(
    tmp_path: Path, broker_port: int
) -> None:
    """Security: roles that all have a relay are never idle."""
    stage = stage_of(tmp_path, broker_port, ROWS)
    with running(stage.cluster, ready=False) as cluster, contextlib.ExitStack() as clients:
        for number in range(ROWS + 1):
            clients.enter_context(stage.client(f"role-{number}"))
        clients.enter_context(stage.client("bob", source="127.0.0.2"))
        assert cluster.metrics().label_values("principal") == {*(f"role-{n}" for n in range(ROWS)), "bob", OTHER}


def test_long_names_take_nothing_from_a_forwarders_metrics(tmp_path: Path, broker_port: int) -> None:
    """Security: 470 roles of 448 bytes made all metrics of their forwarder vanish."""
    stage = stage_of(tmp_path, broker_port, LONG_NAMES)
    roles = [f"{number:04}".ljust(LONG_NAME_BYTES, '"') for number in range(LONG_NAMES)]
    with running(stage.cluster, ready=False) as cluster:
        names = {one.name for one in cluster.metrics().samples if one.labels.get("role") == "forwarder"}
        for role in roles:
            stage.use_once(role)
        stage.wait_until_no_relay_is_open()
        scrape = cluster.metrics()
        assert names <= {one.name for one in scrape.samples if one.labels.get("role") == "forwarder"}
        assert scrape.total(ENDED, cause="relay_ended") == LONG_NAMES
        labels = scrape.label_values("principal")
        assert labels == {label_of(role) for role in roles}
        assert max(len(label) for label in labels) <= LABEL_BYTES_MAX
        assert scrape.total(SESSIONS) == LONG_NAMES
        assert scrape.total("pulsar_proxy_dropped_metrics_total") == 0
