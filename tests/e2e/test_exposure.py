"""Ways in which operators expose a proxy, and replace it: it keeps no state, so any instance serves any connection."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.programs import Program
from .lab.schema import LOOKUP_CONNECT
from .lab.sessions import counting
from .lab.wire import WireClient

pytestmark = pytest.mark.timeout(240)

ACCEPTED = "pulsar_proxy_new_connections_total"
RELAYS = "pulsar_proxy_principal_sessions_total"
RUNS = 4


class Balancer:
    """A load balancer as a VIP, a Service or a cloud has it: TCP, each connection to the next of the ports."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                server = socket.create_connection(("127.0.0.1", next(self._ports)))
                self._ends.append(server)
                for ends in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=_copy, args=ends))
                    self._threads[-1].start()


def _copy(source: socket.socket, destination: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            destination.sendall(data)
        destination.shutdown(socket.SHUT_WR)


@pytest.mark.conforms("pip-1.3")
@pytest.mark.parametrize("mode", ["one address before all", "a name with several addresses"])
def test_the_connections_of_a_client_may_each_reach_another_proxy(
    broker: Standalone, python_client: Program, topic: str, mode: str
) -> None:
    """One address (VIP, cluster IP, node port, a cloud's load balancer), or several of which clients choose (DNS)."""
    tables: Tables = {"brokers": before(broker)}
    with ExitStack() as stack:
        proxies = [stack.enter_context(running(ProxyCluster(tables, ready_timeout_s=120))) for _ in range(2)]
        ports = [proxy.port for proxy in proxies]
        if mode == "one address before all":
            url = f"pulsar://localhost:{stack.enter_context(Balancer(ports)).port}"
        else:
            url = "pulsar://" + ",".join(f"localhost:{port}" for port in ports)
        before_runs = [proxy.metrics() for proxy in proxies]
        for number in range(RUNS):
            with python_client.start("stream", url, f"{topic}-{number}") as run:
                run.wait_for_progress(50)
                result = run.stop().result
            assert result["ok"], result
            assert (result["missing"], result["in_order"], result["send_failures"]) == (0, True, 0), result
        moved = [proxy.metrics().moved_since(start) for proxy, start in zip(proxies, before_runs, strict=True)]
        assert all(one.get(ACCEPTED) for one in moved), f"each proxy had connections of the clients: {moved}"
        assert sum(one.get(RELAYS, 0) for one in moved) >= RUNS, "all messages went through one of them"


@pytest.mark.conforms("kip-368.35", "kip-368.36")
def test_proxies_with_a_maximum_of_0_are_upgraded_while_clients_neither_re_authenticate_nor_are_closed(
    tmp_path: Path,
) -> None:
    """Both replicas, one after the other; clients that could answer, and one that could not, with tokens that do not
    end.
    """
    key = tmp_path / "secret.key"
    key.write_bytes(os.urandom(32))
    answers = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with ExitStack() as stack:
        port = stack.enter_context(FakeBroker(answers)).port
        tables: Tables = {
            "brokers": {"service_url": f"pulsar://127.0.0.1:{port}", "allowed_ports": [port]},
            "authentication": {"enabled": True},
            "authentication.token": {"secret_key": str(key)},
        }
        proxies = [stack.enter_context(running(ProxyCluster(tables, ready_timeout_s=120))) for _ in range(2)]
        token = make_token(key.read_bytes(), "alice")
        relays = []
        with counting(*proxies, no_reauth=2):
            for proxy in proxies:
                for can_answer in (True, False):
                    client = stack.enter_context(WireClient(proxy.port))
                    flags = {"supports_auth_refresh": can_answer}
                    target = f"127.0.0.1:{port}"
                    answer = client.connect(token=token, proxy_to_broker_url=target, feature_flags=flags)
                    assert answer.type == BaseCommand.CONNECTED, answer
                    relays.append(client)
        for proxy in proxies:
            upgraded = proxy.command("upgrade", timeout_s=200)
            assert upgraded.returncode == 0, upgraded.stderr
            for client in relays:
                assert client.ping().type == BaseCommand.PONG, "no challenge, and no end"
        for proxy in proxies:
            scrape = proxy.metrics()
            for name in ("expired_connections_killed", "reauthentication_success", "reauthentication_failure"):
                assert scrape.total(f"pulsar_proxy_{name}_total") == 0, name
