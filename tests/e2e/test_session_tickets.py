"""Clients that come back with a ticket of TLS: every forwarder accepts it, as long as the configuration lets it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from local.ports import free_port

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import HOST, ProxyCluster, merged
from .lab.waiting import eventually

RESUMED = "pulsar_proxy_tls_resumed_sessions_total"
FORWARDERS = ("forwarder-0", "forwarder-1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def cluster(authority: Authority) -> Iterator[ProxyCluster]:
    pair = authority.server("server")
    tls = {"certificate": pair.certificate, "key": pair.key, "minimum_version": "1.3", "session_tickets": True}
    tables = {"brokers": {"service_url": f"pulsar://{HOST}:{free_port()}"}, "listener": {"tls": tls}}
    with running(ProxyCluster(tables), ready=False) as cluster:
        cluster.wait_for_log("ready for clients")
        yield cluster


class ReturningClient:
    """It keeps the ticket of its first session."""

    def __init__(self, cluster: ProxyCluster, authority: Authority) -> None:
        self._cluster = cluster
        self._context = ssl.create_default_context(cafile=authority.file)
        self._session: ssl.SSLSession | None = None
        assert not self.come()

    def come(self) -> bool:
        """Whether it could resume its session."""
        with (
            socket.create_connection((HOST, self._cluster.port), timeout=30) as plain,
            self._context.wrap_socket(plain, server_hostname="localhost", session=self._session) as stream,
        ):
            stream.sendall(b"no command")
            with suppress(ConnectionResetError):
                stream.recv(1)  # reads what comes before data, too: the ticket
            assert self._session is not None or stream.session.has_ticket
            self._session = self._session or stream.session
            return bool(stream.session_reused)

    def come_until_each_forwarder_has_resumed(self) -> None:
        before = self._cluster.metrics()

        def all_have() -> bool:
            assert self.come()
            now = self._cluster.metrics()
            return all(now.total(RESUMED, worker=one) > before.total(RESUMED, worker=one) for one in ("0", "1"))

        eventually(all_have, what="a session resumed at each forwarder")


def test_every_forwarder_accepts_a_ticket_and_so_does_a_successor(cluster: ProxyCluster, authority: Authority) -> None:
    client = ReturningClient(cluster, authority)
    client.come_until_each_forwarder_has_resumed()
    killed = cluster.worker_pids()
    for one in FORWARDERS:
        os.kill(killed[one], signal.SIGKILL)
    eventually(
        lambda: all(cluster.worker_pids().get(one, 0) not in (killed[one], 0) for one in FORWARDERS), what="successors"
    )
    assert client.come()


def test_no_ticket_is_accepted_once_clients_need_certificates(cluster: ProxyCluster, authority: Authority) -> None:
    """Security: at the reload, by forwarders that know the tickets' keys."""
    client = ReturningClient(cluster, authority)
    assert client.come()
    tls = dict(cluster.tables["listener"]["tls"])
    changed = {"client_ca": authority.file, "session_tickets": False}
    cluster.write_config(merged(cluster.tables, {"listener": {"tls": tls | changed}}))
    assert cluster.command("reload").returncode == 0
    assert not client.come()
    cluster.write_config(merged(cluster.tables, {"listener": {"tls": tls | {"client_ca": authority.file}}}))
    refused = cluster.command("reload")
    assert refused.returncode != 0
    assert "session_tickets: not together with client_ca" in refused.stderr + refused.stdout
    assert not client.come()


def test_an_upgrade_has_other_keys(cluster: ProxyCluster, authority: Authority) -> None:
    client = ReturningClient(cluster, authority)
    assert client.come()
    assert cluster.command("upgrade", timeout_s=300).returncode == 0
    assert not client.come()
