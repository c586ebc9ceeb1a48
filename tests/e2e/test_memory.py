"""Where memory runs out: which process the kernel would end first, and what its end does to the others' relays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.process.hardening import DATA_WORKER_OOM_SCORE, WORKER_OOM_SCORE

from .conftest import running
from .lab.cluster import ProxyCluster
from .lab.fakes import FakeBroker, LookupBroker
from .lab.processes import children
from .lab.schema import LOOKUP_CONNECT
from .lab.waiting import eventually
from .lab.wire import WireClient

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 60.0
RELAYS = 12
NAMES = (
    "cpu_seconds_total",
    "resident_memory_bytes",
    "virtual_memory_bytes",
    "start_time_seconds",
    "open_fds",
    "max_fds",
)
PROC = Path("/proc")
MOST = 1000
"""The largest adjustment there is. A cluster that is started with it (some CI does) has no worker that would be ended
before its supervisor: their memory alone decides.
"""


def oom_score_adj(pid: int) -> int:
    return int((PROC / str(pid) / "oom_score_adj").read_text())


def oom_score(pid: int) -> int:
    """As the kernel reckons: memory and adjustment together."""
    return int((PROC / str(pid) / "oom_score").read_text())


def test_the_kernel_ends_a_worker_first_and_the_others_relays_live() -> None:
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})) as broker:
        target = f"127.0.0.1:{broker.port}"
        tables = {"brokers": {"service_url": f"pulsar://{target}"}, "cluster": {"forwarders": 2}}
        with running(ProxyCluster(tables, ready_timeout_s=90)) as cluster:
            own = oom_score_adj(cluster.pid)
            pids = cluster.worker_pids()
            for name, pid in pids.items():
                more = DATA_WORKER_OOM_SCORE if name.startswith(("forwarder", "lookup")) else WORKER_OOM_SCORE
                assert oom_score_adj(pid) == min(own + more, MOST), name
            if own < MOST:
                chosen = max((cluster.pid, *children(cluster.pid)), key=oom_score)
                assert chosen != cluster.pid
            clients = [WireClient(cluster.port, timeout_s=PATIENCE_S) for _ in range(RELAYS)]
            for client in clients:
                answer = client.connect(proxy_to_broker_url=target)
                assert answer.type == BaseCommand.CONNECTED, answer
            for name in ("forwarder-0", "lookup-0"):
                before = cluster.worker_pids()
                os.kill(before[name], signal.SIGKILL)
                eventually(
                    lambda: cluster.worker_pids().get(name, before[name]) != before[name],  # noqa: B023 -- called here
                    what=f"{name} has a successor",
                    within_s=PATIENCE_S,
                )
                assert {key: pid for key, pid in cluster.worker_pids().items() if key != name} == {
                    key: pid for key, pid in before.items() if key != name
                }, "no other process ends with it"
                for client in clients:
                    assert client.ping().type == BaseCommand.PONG
            for client in clients:
                client.close()


def test_every_process_says_what_it_uses() -> None:
    with running(ProxyCluster({}, ready_timeout_s=90), ready=False) as cluster:
        eventually(lambda: len(cluster.worker_pids()) == 5, what="all workers run", within_s=PATIENCE_S)
        pids = cluster.worker_pids() | {"supervisor-0": cluster.pid}

        def labels(name: str) -> str:
            role, _, number = name.rpartition("-")
            return f'{{cluster="e2e",role="{role}",worker="{number}"}}'

        def complete() -> str:
            """A scrape with all metrics of all processes: one that is still starting is not asked."""
            text = cluster.get("/metrics").text
            wanted = (f"process_{metric}{labels(name)}" for name in pids for metric in NAMES)
            return text if all(one in text for one in wanted) else ""

        text = eventually(complete, what="all processes tell what they use", within_s=PATIENCE_S)
        for name, pid in pids.items():
            found = float(text.partition(f"process_resident_memory_bytes{labels(name)} ")[2].partition("\n")[0])
            kernels = int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            assert kernels / 2 < found < kernels * 2
