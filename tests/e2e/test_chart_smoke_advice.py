"""What `helm test` (files/smoke.py) says of what is wrong: the chart's value, and why. Real processes, fake brokers."""

from __future__ import annotations

import contextlib
import runpy
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.certificates import OTHER_HOST, Authority
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import Behaviour, FakeBroker, LookupBroker, receive_command
from .lab.schema import LOOKUP_CONNECT, LOOKUP_REDIRECT, NO_REQUEST_ID
from .lab.wire import frame
from .test_chart_smoke import SCRIPT, smoke


@contextlib.contextmanager
def cluster_before(
    behaviour: Behaviour, tables: Tables | None = None, *, ready: bool = True, **keys: object
) -> Iterator[ProxyCluster]:
    """A cluster of one forwarder before one fake broker; ``keys``: of `[brokers]`."""
    with FakeBroker(behaviour) as broker:
        brokers = {"service_url": f"pulsar://127.0.0.1:{broker.port}", "allowed_ports": [broker.port], **keys}
        base: Tables = {"cluster": {"forwarders": 1}, "brokers": brokers, "limits": {"lookup_timeout_ms": 3000}}
        with running(ProxyCluster({**base, **(tables or {})}), ready=ready) as cluster:
            yield cluster


def failure_of(url: str, **variables: str) -> str:
    """The one line of a test that fails."""
    failed = smoke(url, ATTEMPTS="1", **variables)
    assert failed.returncode == 1, failed.stdout
    (line,) = failed.stderr.splitlines()
    return line


def named(url: str, response: int) -> dict[str, object]:
    """A broker's answer to a lookup."""
    return {"response": response, "authoritative": True, "broker_service_url": url}


@pytest.mark.parametrize(
    ("host", "key", "value"),
    [("localhost", "allowed_hosts", "localhost"), ("127.0.0.66", "allowed_addresses", "127.0.0.66")],
)
def test_a_refused_target_is_told_with_the_key_and_its_value(host: str, key: str, value: str) -> None:
    port = free_port()
    with cluster_before(LookupBroker(named(f"pulsar://{host}:{port}", LOOKUP_CONNECT))) as cluster:
        line = failure_of(cluster.service_url)
        assert "Target broker cannot be validated" in line
        assert f"config.brokers.{key}: the lookup named a broker to which the proxy may not connect" in line
        assert line.endswith(f'add "{value}", and {port} to config.brokers.allowed_ports')


def test_of_a_pods_name_the_pattern_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = "pulsar-broker-0.pulsar-broker-headless.ns.svc.cluster.local"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.244.0.7", 0))])
    told = runpy.run_path(str(SCRIPT))["target_advice"](f"{broker}:6650")
    assert told.endswith('if it is yours, add "*.pulsar-broker-headless.ns.svc.cluster.local"')
    assert told.startswith("config.brokers.allowed_hosts: ")


def test_a_target_that_dns_does_not_know_is_told() -> None:
    with cluster_before(LookupBroker(named("pulsar://b0.nowhere.invalid:6650", LOOKUP_CONNECT))) as cluster:
        line = failure_of(cluster.service_url)
        assert line.endswith("DNS does not know b0.nowhere.invalid: correct the brokers' advertisedAddress")


def test_a_redirect_to_a_host_outside_of_the_rules_is_told() -> None:
    port = free_port()
    with cluster_before(LookupBroker(named(f"pulsar://127.0.0.66:{port}", LOOKUP_REDIRECT))) as cluster:
        assert "config.brokers.allowed_hosts: a broker redirects to a host" in failure_of(cluster.service_url)


def test_a_broker_that_does_not_answer_is_told() -> None:
    gone = free_port()
    answer = named(f"pulsar://127.0.0.1:{gone}", LOOKUP_CONNECT)
    with cluster_before(LookupBroker(answer), allowed_ports=[gone]) as cluster:
        line = failure_of(cluster.service_url)
        assert line.startswith(f"attempt 1: CONNECT to broker 127.0.0.1:{gone}: The proxy cannot connect")
        assert "config.brokers.service_url, brokerTls: the broker does not answer" in line


def test_a_brokers_certificate_for_another_name_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "lab")
    pair = authority.server("broker", OTHER_HOST)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    with FakeBroker(LookupBroker({}), tls=context) as broker:
        brokers = {"service_url": f"pulsar+ssl://127.0.0.1:{broker.port}", "tls": {"trust": authority.file}}
        tables: Tables = {"cluster": {"forwarders": 1}, "brokers": brokers, "limits": {"lookup_timeout_ms": 3000}}
        with running(ProxyCluster(tables), ready=False) as cluster:
            assert "certificate is not accepted or for another name" in failure_of(cluster.service_url)


def refuses_credentials(connection: socket.socket) -> None:
    """Answer each CONNECT as a broker that does not accept the credentials."""
    receive_command(connection)
    error: dict[str, Any] = {"request_id": NO_REQUEST_ID, "error": ServerError.AuthenticationError, "message": "no"}
    connection.sendall(frame(BaseCommand.ERROR, error=error))


def test_credentials_of_the_proxy_that_brokers_refuse_are_told() -> None:
    with cluster_before(refuses_credentials, ready=False) as cluster:
        assert "auth.proxyToken, config.brokers.credentials: brokers refuse" in failure_of(cluster.service_url)


def test_a_token_that_the_proxy_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_bytes(b"k" * 32)
    (tmp_path / "token").write_text(make_token(b"x" * 32, "alice"))
    tables: Tables = {
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(tmp_path / "secret.key")},
    }
    with cluster_before(LookupBroker({}), tables) as cluster:
        line = failure_of(cluster.service_url, TOKEN_FILE=str(tmp_path / "token"))
        assert "test.tokenSecret: the proxy does not accept the test's credentials" in line


@pytest.mark.parametrize(("trusted", "key"), [(True, "test.host"), (False, "test.caSecret")])
def test_the_listeners_certificate_is_told(tmp_path: Path, *, trusted: bool, key: str) -> None:
    authority, other = Authority(tmp_path, "lab"), Authority(tmp_path, "other")
    pair = authority.server("proxy", OTHER_HOST)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    with FakeBroker(receive_command, tls=context) as listener:
        line = failure_of(f"pulsar+ssl://localhost:{listener.port}", CA_FILE=authority.file if trusted else other.file)
        assert f"; {key}: the listener's certificate is not " in line


def test_a_service_without_a_ready_pod_is_told() -> None:
    line = failure_of(f"pulsar://127.0.0.1:{free_port()}")
    assert "no pod of the proxy is ready behind 127.0.0.1" in line
    assert "config.brokers.service_url" in line


def test_a_service_that_dns_does_not_know_is_told() -> None:
    assert failure_of("pulsar://proxy.nowhere.invalid:6650").endswith(
        "test.host: DNS does not know proxy.nowhere.invalid"
    )
