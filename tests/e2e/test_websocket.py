"""WebSocket through the HTTP port, before a real broker, with the JDK's client: kills, upgrades, usage, TLS."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from local.standalone import Standalone

from .conftest import NO_PINGS, authentication, running
from .lab.certificates import Authority
from .lab.cluster import HOST
from .lab.programs import Program
from .lab.security import NAMESPACE, grant
from .lab.waiting import eventually
from .test_http import HttpCluster

MESSAGES = 1_000


@pytest.fixture(scope="module")
def ws_broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A secured broker that serves WebSocket."""
    conf = NO_PINGS | {"webSocketServiceEnabled": "true"}
    with Standalone(pulsar_home, tmp_path_factory.mktemp("ws"), secured=True, conf=conf) as standalone:
        grant(standalone)
        yield standalone


@pytest.fixture(scope="module")
def cluster(ws_broker: Standalone) -> Iterator[HttpCluster]:
    with running(HttpCluster(ws_broker, authentication(ws_broker))) as started:
        assert isinstance(started, HttpCluster)
        yield started


@pytest.fixture(scope="module")
def client(java_client: Program) -> Program:
    *command, _main = java_client.command
    return dataclasses.replace(java_client, name="websocket", command=(*command, "WebSocketClient"))


def topic(name: str) -> str:
    return f"{NAMESPACE}/{name}"


def test_relays_outlive_kills_and_an_upgrade(cluster: HttpCluster, ws_broker: Standalone, client: Program) -> None:
    """A producer and a consumer, which never connect twice, have each message once and in order."""
    url, token = f"ws://{HOST}:{cluster.http_port}", ws_broker.token("alice")
    before = cluster.metrics().total("pulsar_proxy_principal_bytes_total", principal="alice")
    with client.start("stream", url, topic("kills"), token=token, count=MESSAGES) as run:
        run.wait_for_progress(50)
        pids = cluster.worker_pids()
        os.kill(pids["http-0"], signal.SIGKILL)
        run.wait_for_progress(50)
        for name, pid in pids.items():
            if name.startswith("forwarder-"):
                os.kill(pid, signal.SIGKILL)
        run.wait_for_progress(50)
        eventually(lambda: len(cluster.worker_pids()) == len(pids), what="all workers again")
        assert not cluster.command("upgrade").returncode
        run.wait_for_progress(50)
        result = run.stop().result
    assert result["ok"], result
    assert result["received"] >= MESSAGES
    assert result["in_order"]
    name = "pulsar_proxy_principal_bytes_total"
    eventually(
        lambda: cluster.metrics().total(name, principal="alice") - before > MESSAGES * 100, what="usage of alice"
    )


def test_tokens(cluster: HttpCluster, ws_broker: Standalone, client: Program) -> None:
    url = f"ws://{HOST}:{cluster.http_port}"
    with client.start("stream", url, topic("token"), token=ws_broker.token("alice"), in_query=1, count=2) as run:
        result = run.stop().result
        assert result["ok"], result
    with client.start("stream", url, topic("token"), token="e30.e30.x", in_query=1, count=2) as run:
        assert not run.wait().result["ok"]
    status, _ = cluster.request(
        "GET",
        f"/ws/v2/producer/persistent/{topic('token')}?token=e30.e30.x",
        Connection="Upgrade",
        Upgrade="websocket",
        Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
        Sec_WebSocket_Version="13",
    )
    assert status == 401


def test_tls(ws_broker: Standalone, client: Program, tmp_path: Path) -> None:
    """Its relay outlives a forwarder that is killed; it is counted and ends in the same place as any other."""
    authority = Authority(tmp_path, "http")
    server = authority.server("proxy")
    tls = {"certificate": server.certificate, "key": server.key}
    with running(HttpCluster(ws_broker, authentication(ws_broker), tls=tls)) as cluster:
        assert isinstance(cluster, HttpCluster)
        options = {"token": ws_broker.token("alice"), "ca": authority.file, "count": 200}
        with client.start("stream", f"wss://localhost:{cluster.http_port}", topic("tls"), **options) as run:
            run.wait_for_progress(50)
            for name, pid in cluster.worker_pids().items():
                if name.startswith("forwarder-"):
                    os.kill(pid, signal.SIGKILL)
            run.wait_for_progress(50)
            result = run.stop().result
        assert result["ok"], result
        assert result["received"] >= 200
        assert result["in_order"]
        name = "pulsar_proxy_principal_sessions_total"
        eventually(lambda: cluster.metrics().total(name, principal="alice") == 2, what="two sessions of alice")
