"""What the end of a container's memory does to a cluster: in a guest with cgroups of version 2 (test_oom.py).

The guest makes the cgroups that a kubelet makes: a pod's, and a container's in it. The cluster is in the container, and
so is the program that uses the memory up; broker and clients are outside. The supervisor has used so much memory that
only the workers' higher OOM scores save it. Observations are lines of JSON on the console.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proto.pulsar_pb2 import BaseCommand

from . import hog
from .cluster import ProxyCluster
from .fakes import FakeBroker, LookupBroker
from .processes import children
from .schema import LOOKUP_CONNECT
from .user_mode_linux import be_first_process
from .waiting import eventually
from .wire import Ended, WireClient

MEMORY_MIB = 320
BALLAST_MIB = 32
RELAYS = 6
WORKERS = 5  # the fork server, too
PATIENCE_S = 120.0
ROOT_CGROUP = Path("/sys/fs/cgroup")
CONTAINER = ROOT_CGROUP / "pod" / "container"
IN_CONTAINER = ("sh", "-c", f'echo $$ > {CONTAINER}/cgroup.procs && exec "$@"', "sh")
"""Runs the command that follows in the container."""

_LARGE = f"""
import runpy, sys
ballast = b"x" * ({BALLAST_MIB} << 20)
del sys.argv[1:4]  # of the command that follows, Python and "-m proxy"
runpy.run_module("proxy", run_name="__main__", alter_sys=True)
"""


def main() -> None:
    """Let memory run out where the kernel may end one process, and where it ends all of them."""
    CONTAINER.mkdir(parents=True)
    for folder in (ROOT_CGROUP, CONTAINER.parent):
        (folder / "cgroup.subtree_control").write_text("+memory")
    (CONTAINER / "memory.max").write_text(str(MEMORY_MIB << 20))
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})) as broker:
        target = f"127.0.0.1:{broker.port}"
        tables = {"brokers": {"service_url": f"pulsar://{target}"}, "cluster": {"forwarders": 1}}
        prefix = (*IN_CONTAINER, sys.executable, "-c", _LARGE)
        with ProxyCluster(tables, prefix=prefix, ready_timeout_s=PATIENCE_S) as cluster:
            for group, observe in ((0, _observe_one_ending), (1, _observe_all_ending)):
                (CONTAINER / "memory.oom.group").write_text(str(group))
                with _relays(cluster, target) as clients:
                    print(json.dumps(observe(cluster, clients) | _kills() | {"living_relays": _living(clients)}))


@contextmanager
def _relays(cluster: ProxyCluster, target: str) -> Iterator[list[WireClient]]:
    clients = [WireClient(cluster.port, timeout_s=PATIENCE_S) for _ in range(RELAYS)]
    for client in clients:
        answer = client.connect(proxy_to_broker_url=target)
        assert answer.type == BaseCommand.CONNECTED, answer
    yield clients
    for client in clients:
        client.close()


def _living(clients: list[WireClient]) -> int:
    """How many relays still carry a PING to the broker and its answer back."""
    living = 0
    for client in clients:
        try:
            living += client.ping().type == BaseCommand.PONG
        except (Ended, OSError):
            continue
    return living


def _observe_one_ending(cluster: ProxyCluster, clients: list[WireClient]) -> dict[str, Any]:
    assert _living(clients) == RELAYS
    plan = cluster.wait_for_log("what the container allows")
    eventually(lambda: len(children(cluster.pid)) == WORKERS, what="all workers", within_s=PATIENCE_S)
    workers = set(children(cluster.pid))
    _run_out_of_memory()

    def is_whole_again() -> bool:
        assert cluster.wait(0) is None, "the kernel has killed the supervisor"
        now = set(children(cluster.pid))
        return now != workers and len(now) == WORKERS and cluster.get("/readyz").status == 200

    eventually(is_whole_again, what="a successor of the worker that was killed", within_s=PATIENCE_S)
    return {"plan": plan, "workers_replaced": len(workers - set(children(cluster.pid)))}


def _observe_all_ending(cluster: ProxyCluster, clients: list[WireClient]) -> dict[str, Any]:
    assert _living(clients) == RELAYS
    _run_out_of_memory()
    code = cluster.wait(PATIENCE_S)
    procs = CONTAINER / "cgroup.procs"
    eventually(lambda: not procs.read_text(), what="all processes have ended", within_s=PATIENCE_S)
    return {"supervisor_code": code}


def _run_out_of_memory() -> None:
    """Use the container's memory up until the kernel has killed something: this program, too, where all end."""
    command = [*IN_CONTAINER, sys.executable, hog.__file__, "once", str(CONTAINER / "memory.events")]
    subprocess.run(command, check=False, timeout=PATIENCE_S)


def _kills() -> dict[str, int]:
    lines = (CONTAINER / "memory.events").read_text().splitlines()
    counters = {name: int(count) for name, count in (line.split() for line in lines)}
    return {name: counters[name] for name in ("oom_kill", "oom_group_kill")}


if __name__ == "__main__":
    be_first_process(main)
