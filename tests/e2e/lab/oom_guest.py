"""What a container's memory running out does to a cluster, in a guest with cgroups of version 2 (test_oom.py).

The guest makes the cgroups that the kubelet makes, a pod's and a container's in it. Only the cluster is in them, and the
program that uses their memory up; broker and clients are outside. Observations are lines of JSON on the console.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
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
from .user_mode_linux import serve_as_init
from .waiting import eventually
from .wire import Ended, WireClient

MEMORY_MIB = 384
RELAYS = 6
PATIENCE_S = 120.0
ROOT_CGROUP = Path("/sys/fs/cgroup")
CONTAINER = ROOT_CGROUP / "pod" / "container"
PREFIX = ("sh", "-c", f'echo $$ > {CONTAINER}/cgroup.procs && exec "$@"', "sh")
"""How a command is started in the container."""


def main() -> None:
    """Run the memory out twice, as it ends one process, and as it ends all of them."""
    CONTAINER.mkdir(parents=True)
    for folder in (ROOT_CGROUP, CONTAINER.parent):
        (folder / "cgroup.subtree_control").write_text("+memory")
    (CONTAINER / "memory.max").write_text(str(MEMORY_MIB << 20))
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})) as broker:
        target = f"127.0.0.1:{broker.port}"
        cluster = ProxyCluster({"brokers": {"service_url": f"pulsar://{target}"}}, prefix=PREFIX)
        with cluster:
            for group in (0, 1):
                (CONTAINER / "memory.oom.group").write_text(str(group))
                with _relays(cluster, target) as clients:
                    observe = _observe_all_ending if group else _observe_one_ending
                    _report(group=group, **observe(cluster, clients))
            cluster.stop()
            began_s = time.monotonic()
            cluster.start()
            with _relays(cluster, target) as clients:
                _report(ready_s=time.monotonic() - began_s, living_relays=_living(clients))


def _report(**observation: Any) -> None:
    print(json.dumps(observation))


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
    supervisor, before = cluster.pid, cluster.worker_pids()
    started = set(children(supervisor))
    _run_out_of_memory("once")
    now = eventually(
        lambda: (found := cluster.worker_pids()).keys() == before.keys() and found != before and found,
        what="a successor of the worker that was killed",
        within_s=PATIENCE_S,
    )
    return {
        "counters": _counters(),
        "replaced": [name for name, pid in now.items() if pid != before[name]],
        "killed": len(started - set(children(supervisor))),
        "supervisor_code": cluster.wait(0),
        "living_relays": _living(clients),
        "planned": cluster.wait_for_log("what the container allows"),
    }


def _observe_all_ending(cluster: ProxyCluster, clients: list[WireClient]) -> dict[str, Any]:
    _run_out_of_memory("once")
    return {
        "supervisor_code": cluster.wait(PATIENCE_S),
        "left": eventually(lambda: not (CONTAINER / "cgroup.procs").read_text(), what="all have ended"),
        "counters": _counters(),
        "living_relays": _living(clients),
    }


def _run_out_of_memory(mode: str) -> None:
    """Use the container's memory up, from within; where all end together, so does this program."""
    command = [*PREFIX, sys.executable, hog.__file__, mode, str(CONTAINER / "memory.events")]
    subprocess.run(command, check=False, timeout=PATIENCE_S)


def _counters() -> dict[str, int]:
    lines = (CONTAINER / "memory.events").read_text().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


if __name__ == "__main__":
    serve_as_init(main)
