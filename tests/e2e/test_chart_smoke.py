"""What `helm test` runs (files/smoke.py), against a real broker: it succeeds where clients would, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from local.generate import CHART
from local.ports import free_port
from local.standalone import Standalone

from .conftest import authentication, running
from .lab.cluster import HOST, ROOT, ProxyCluster, merged
from .lab.security import NAMESPACE
from .test_http import HttpCluster

SCRIPT = ROOT / CHART / "files" / "smoke.py"


def smoke(url: str, *, topic: str = "public/default/helm-test", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as the pod does: nothing but the package and the environment."""
    environment = {
        "PATH": os.environ["PATH"],
        "SERVICE_URL": url,
        "TOPIC": f"non-persistent://{topic}-{uuid.uuid4()}",
        "ATTEMPTS": "3",
        "TIMEOUT_S": "25",
        **variables,
    }
    return subprocess.run(
        [sys.executable, SCRIPT], env=environment, check=False, capture_output=True, text=True, timeout=110
    )


def test_the_charts_test_sends_a_message_through(proxy: ProxyCluster) -> None:
    done = smoke(proxy.service_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("produced and consumed one message")


def test_with_a_token_and_not_without(secured_proxy: ProxyCluster, secured_broker: Standalone, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{secured_broker.token('admin')}\n")
    done = smoke(secured_proxy.service_url, TOKEN_FILE=str(token))
    assert done.returncode == 0, done.stderr
    denied = smoke(secured_proxy.service_url, ATTEMPTS="1")
    assert denied.returncode == 1
    assert "attempt 1: CONNECT" in denied.stderr


def test_a_proxy_that_is_absent_fails_the_smoke_test() -> None:
    failed = smoke(f"pulsar://127.0.0.1:{free_port()}", ATTEMPTS="2")
    assert failed.returncode == 1
    assert [line.partition(":")[0] for line in failed.stderr.splitlines()] == ["attempt 1", "attempt 2"]


def test_a_namespace_that_is_not_there_is_told(proxy: ProxyCluster) -> None:
    failed = smoke(proxy.service_url, topic=f"public/{uuid.uuid4()}/t", ATTEMPTS="1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("attempt 1: ")


def test_by_http_with_a_token_and_not_where_the_brokers_web_port_is_closed(
    secured_broker: Standalone, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{secured_broker.token('alice')}\n")
    cluster = HttpCluster(secured_broker, authentication(secured_broker))
    variables = {"TOKEN_FILE": str(token), "topic": f"{NAMESPACE}/helm-test"}
    with running(cluster):
        url = f"http://{HOST}:{cluster.http_port}"
        done = smoke(cluster.service_url, HTTP_URL=url, **variables)
        assert done.returncode == 0, done.stderr
        assert ", and asked for the clusters by HTTP, in " in done.stdout
        cluster.wait_for_log("http request", "principal=alice", "/admin/v2/clusters", "status=200")
    cluster = HttpCluster(
        secured_broker,
        merged(authentication(secured_broker), {"brokers": {"web_service_url": f"http://{HOST}:{free_port()}"}}),
    )
    with running(cluster):
        failed = smoke(cluster.service_url, ATTEMPTS="1", HTTP_URL=f"http://{HOST}:{cluster.http_port}", **variables)
    assert failed.returncode == 1
    assert "/admin/v2/clusters: HTTP 50" in failed.stderr
    assert "; config.brokers.web_service_url: " in failed.stderr
