"""Relays whose TLS is in the kernel: in a guest that has kernel TLS (test_kernel_tls_relays.py).

Observations are lines of JSON on the console.
"""

from __future__ import annotations

import json
import os
import random
import signal
import ssl
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import trio
from local.ports import free_port

from proxy.runtime.network.kernel_tls import use_kernel_tls
from proxy.runtime.network.tls import new_client_context

from .certificates import Authority, Pair
from .cluster import HOST, ProxyCluster, Tables, to_toml
from .fakes import FakeBroker, LookupBroker
from .kernel_tls_attacks import Attacks, EchoBroker
from .kernel_tls_guest import MODULES
from .processes import children
from .schema import LOOKUP_CONNECT
from .streams import Streams
from .user_mode_linux import be_first_process

PATIENCE_S = 120.0
STREAMS = 3
KILLS = 2


class KernelTlsCluster(ProxyCluster):
    """One whose second listener speaks TLS."""

    def __init__(self, tables: Tables, certificate: Pair) -> None:
        self.tls_port = free_port()
        self._listener = {
            "bind": f"{HOST}:{self.tls_port}",
            "tls": {
                "certificate": certificate.certificate,
                "key": certificate.key,
                "minimum_version": "1.3",
                "session_tickets": True,  # each is a record before the first that the kernel sends
            },
        }
        super().__init__(tables, ready_timeout_s=PATIENCE_S)

    def write_config(self, tables: Tables) -> None:
        """With the listener."""
        self.config_path.write_text(f"{to_toml(tables)}\n{to_toml({'listener': self._listener})}")


def main() -> None:
    """Let streams go through forwarders that are killed, with TLS to clients, and to brokers, too."""
    authority = Authority(Path(tempfile.mkdtemp()), "authority")
    server = authority.server("server")
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(server.certificate, server.key)
    of_client = ssl.create_default_context(cafile=authority.file)
    for broker_tls in (None, of_server):
        print(json.dumps(_observe(authority, server, of_client, broker_tls)))


def _lookup_broker() -> LookupBroker:
    return LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})


def _observe(
    authority: Authority, server: Pair, client_tls: ssl.SSLContext, broker_tls: ssl.SSLContext | None
) -> dict[str, Any]:
    broker_port = free_port()
    with FakeBroker(_lookup_broker(), tls=broker_tls) as broker:
        scheme, tls = ("pulsar", {}) if broker_tls is None else ("pulsar+ssl", {"tls": {"trust": authority.file}})
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {"service_url": f"{scheme}://localhost:{broker.port}", "allowed_ports": [broker_port], **tls},
            "relay": {"kernel_tls": "required"},
        }
        with KernelTlsCluster(tables, server) as cluster:
            found = _observe_kills(cluster, broker_port, client_tls, broker_tls)
            if broker_tls is None:
                found |= _observe_attacks(cluster, broker_port, authority)
            return {"tls": "client" if broker_tls is None else "both", "log": cluster.log_text(), **found}


def _observe_kills(
    cluster: KernelTlsCluster, broker_port: int, client_tls: ssl.SSLContext, broker_tls: ssl.SSLContext | None
) -> dict[str, Any]:
    streams = Streams(
        cluster.tls_port,
        STREAMS,
        broker_port=broker_port,
        portion_bytes_max=60_000,
        pause_s_max=0.2,
        client_tls=client_tls,
        broker_tls=broker_tls,
    )
    kills: list[int] = []
    status: dict[str, Any] = {}
    trio.run(streams.run, partial(_kill, cluster, kills, status))
    return {
        "kills": len(kills),
        "status": status,
        "errors": streams.errors,
        "ways": len(streams.ways),
        "not_whole": [(way.sent_bytes, way.got_bytes) for way in streams.not_whole],
        "adopted": cluster.metrics().total("pulsar_proxy_adopted_relays_total"),
    }


def _observe_attacks(cluster: KernelTlsCluster, broker_port: int, authority: Authority) -> dict[str, Any]:
    use_kernel_tls("required")  # in this process: a client keeps its secrets, for records by hand
    echo, context = EchoBroker(), new_client_context(authority.file)
    with FakeBroker(echo, port=broker_port):
        return {"attacks": Attacks(cluster, cluster.tls_port, context, echo, broker_port).run()}


async def _kill(cluster: ProxyCluster, kills: list[int], status: dict[str, Any]) -> None:
    chosen = random.Random(7)
    while len(kills) < KILLS:
        await trio.sleep(0.5 + chosen.random())
        for pid in await trio.to_thread.run_sync(children, cluster.pid, "forwarder"):
            os.kill(pid, signal.SIGKILL)
            kills.append(pid)
    await trio.to_thread.run_sync(cluster.wait_for_total, "pulsar_proxy_kernel_tls_relays", STREAMS)
    status.update((await trio.to_thread.run_sync(cluster.status))["kernel_tls"])
    if cluster.tables["brokers"].get("tls"):
        answer = await trio.to_thread.run_sync(cluster.command, "upgrade")
        assert answer.returncode == 0, answer.stderr


if __name__ == "__main__":
    be_first_process(main, MODULES)
