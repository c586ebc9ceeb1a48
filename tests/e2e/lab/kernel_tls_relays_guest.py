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

from .certificates import Authority, Pair
from .cluster import HOST, ProxyCluster, Tables, to_toml
from .fakes import FakeBroker, LookupBroker
from .kernel_tls_guest import MODULES
from .processes import children
from .schema import LOOKUP_CONNECT
from .streams import Streams
from .user_mode_linux import be_first_process

PATIENCE_S = 120.0
STREAMS = 3
KILLS = 3


class KernelTlsCluster(ProxyCluster):
    """One whose second listener speaks TLS."""

    def __init__(self, tables: Tables, certificate: Pair) -> None:
        self.tls_port = free_port()
        self._listener = {
            "bind": f"{HOST}:{self.tls_port}",
            "tls": {"certificate": certificate.certificate, "key": certificate.key},
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
        observed = _observe_kills(authority, server, of_client, broker_tls)
        print(json.dumps(observed))


def _observe_kills(
    authority: Authority, server: Pair, client_tls: ssl.SSLContext, broker_tls: ssl.SSLContext | None
) -> dict[str, Any]:
    broker_port = free_port()
    answer = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})
    scheme = "pulsar" if broker_tls is None else "pulsar+ssl"
    with FakeBroker(answer, tls=broker_tls) as broker:
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {
                "service_url": f"{scheme}://localhost:{broker.port}",
                "allowed_ports": [broker_port],
                **({} if broker_tls is None else {"tls": {"trust": authority.file}}),
            },
            "relay": {"kernel_tls": "required"},
        }
        with KernelTlsCluster(tables, server) as cluster:
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
            trio.run(streams.run, partial(_kill, cluster, kills))
            return {
                "tls": "client" if broker_tls is None else "both",
                "kills": len(kills),
                "errors": streams.errors,
                "ways": len(streams.ways),
                "not_whole": [(way.sent_bytes, way.got_bytes) for way in streams.not_whole],
                "moved_bytes": streams.moved_bytes,
                "moved_by_proxy": _counted(cluster),
                "adopted": cluster.metrics().total("pulsar_proxy_adopted_relays_total"),
                "log": cluster.log_tail(),
            }


async def _kill(cluster: ProxyCluster, kills: list[int]) -> None:
    chosen = random.Random(7)
    while len(kills) < KILLS:
        await trio.sleep(1 + chosen.random())
        for pid in await trio.to_thread.run_sync(children, cluster.pid, "forwarder"):
            os.kill(pid, signal.SIGKILL)
            kills.append(pid)
    if cluster.tables["brokers"].get("tls"):
        answer = await trio.to_thread.run_sync(cluster.command, "upgrade")
        assert answer.returncode == 0, answer.stderr


def _counted(cluster: ProxyCluster) -> float:
    return cluster.metrics().total("pulsar_proxy_relayed_bytes_total")


if __name__ == "__main__":
    be_first_process(main, MODULES)
