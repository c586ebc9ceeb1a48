"""Clients behind a real HAProxy, which announces them by the PROXY protocol: whom the proxy then knows, and limits."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from local.ports import free_port
from local.process import OwnedProcess
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.certificates import Authority
from .lab.cluster import HOST, ProxyCluster, Tables
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient
from .test_sni import SniClient

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin") or ""

_CONFIG = """\
global
    nbthread 1
defaults
    mode tcp
    timeout connect 10s
    timeout client 1m
    timeout server 1m
"""
_PAIR = """\
listen {name}
    bind 127.0.0.1:{port}
    bind [::1]:{port}
    server proxy {target} {options}
"""


@dataclass
class Balancer:
    """HAProxy with a port for each way of sending a header to a proxy's port."""

    directory: Path
    ports: dict[str, int] = field(default_factory=dict)
    _text: str = _CONFIG

    def add(self, name: str, target: str, options: str) -> None:
        self.ports[name] = free_port(avoid=tuple(self.ports.values()))
        self._text += _PAIR.format(name=name, port=self.ports[name], target=target, options=options)

    def start(self, stack: ExitStack) -> None:
        path = self.directory / "haproxy.cfg"
        path.write_text(self._text)
        process = OwnedProcess([HAPROXY, "-db", "-f", str(path)], log=self.directory / "haproxy.log")
        stack.callback(process.stop, 10)

        def answers() -> bool:
            assert process.exit_code() is None, process.log_tail()
            try:
                origin = ("127.0.0.99", 0)  # whose connection may stay for a moment, and counts for its limit
                socket.create_connection((HOST, next(iter(self.ports.values()))), source_address=origin).close()
            except OSError:
                return False
            return True

        eventually(answers, what="HAProxy listens")


@dataclass
class Scene:
    cluster: ProxyCluster
    balancer: Balancer


@pytest.fixture(scope="module")
def scene(broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if not HAPROXY:
        pytest.skip("HAProxy is not installed")
    with ExitStack() as stack:
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "listener": {"proxy_protocol": "required", "proxy_protocol_sources": ["127.0.0.1/32"]},
            "brokers": before(broker),
            "limits": {"max_connections_per_address": 2},
        }
        cluster = stack.enter_context(running(ProxyCluster(tables)))
        balancer = Balancer(tmp_path_factory.mktemp("haproxy"))
        for name in ("send-proxy", "send-proxy-v2"):
            balancer.add(name, f"{HOST}:{cluster.port}", name)
        balancer.add("without", f"{HOST}:{cluster.port}", "")
        balancer.add("checksum", f"{HOST}:{cluster.port}", "send-proxy-v2 proxy-v2-options crc32c,unique-id")
        balancer.start(stack)
        yield Scene(cluster, balancer)


@pytest.mark.parametrize("way", ["send-proxy", "send-proxy-v2", "checksum"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_the_client_is_known_and_limited(scene: Scene, way: str, host: str) -> None:
    """Two of an address, whatever way they come; the log names it, with its port."""
    port, to = scene.balancer.ports[way], "::1" if ":" in host else "127.0.0.1"
    source = "" if ":" in host else host
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(port, to, source=source)) for _ in range(2)]
        for client in clients:
            assert client.connect().type == BaseCommand.CONNECTED
        since = len(scene.cluster.log_text())
        third = stack.enter_context(WireClient(port, to, source=source))
        answer = third.connect()
        assert answer.type == BaseCommand.ERROR
        own = f"[{host}]:{third.address.rpartition(':')[2]}" if ":" in host else third.address
        line = scene.cluster.wait_for_log("a client was turned away", own, since=since)
        assert "max_connections_per_address" in line
        other = stack.enter_context(WireClient(port, "127.0.0.1", source="127.0.0.77"))
        assert other.connect().type == BaseCommand.CONNECTED
    eventually(lambda: _connections(scene.cluster) == 0, what="all have ended")


def _connections(cluster: ProxyCluster) -> int:
    return sum(one["connections"] for one in cluster.status()["workers"] if one["role"] == "forwarder")


def test_a_balancer_that_sends_no_header(scene: Scene) -> None:
    since = len(scene.cluster.log_text())
    with WireClient(scene.balancer.ports["without"]) as client, pytest.raises((Ended, OSError)):
        client.connect()
    assert "no PROXY header" in scene.cluster.wait_for_log("no client behind a load balancer", since=since)


def test_a_stranger_with_a_header(scene: Scene) -> None:
    """Security: he is closed at once, whatever he says."""
    since = len(scene.cluster.log_text())
    with WireClient(scene.cluster.port, source="127.0.0.66") as client:
        with contextlib.suppress(OSError):  # it may be closed already
            client.send_bytes(b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n")
        with pytest.raises((Ended, OSError)):
            client.connect()
        scene.cluster.wait_for_log("a client was turned away", client.address, "proxy_protocol_sources", since=since)


def test_tls_is_behind_the_header(broker: Standalone, tmp_path: Path) -> None:
    """And a relay's record, as the log and the broker see it, is the client's."""
    if not HAPROXY:
        pytest.skip("HAProxy is not installed")
    authority = Authority(tmp_path, "ours")
    pair = authority.server("proxy", "localhost")
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "listener": {"proxy_protocol": "optional", "proxy_protocol_sources": ["127.0.0.1/32"]},
        "listener.tls": {"certificate": pair.certificate, "key": pair.key},
        "brokers": before(broker),
        "limits": {"max_connections_per_address": 1},
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(running(ProxyCluster(tables)))
        balancer = Balancer(tmp_path)
        balancer.add("v2", f"{HOST}:{cluster.port}", "send-proxy-v2")
        balancer.start(stack)
        context = ssl.create_default_context(cafile=authority.file)
        through = stack.enter_context(SniClient(balancer.ports["v2"], context, "localhost"))
        assert through.connect().type == BaseCommand.CONNECTED
        since = len(cluster.log_text())
        with pytest.raises(OSError):
            SniClient(balancer.ports["v2"], context, "localhost")
        assert "127.0.0.1:" in cluster.wait_for_log("a client was turned away", "max_connections_per_addr", since=since)
