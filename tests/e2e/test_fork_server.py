"""The process from which workers are forked, in a cluster without a broker: what it has, and what its end costs."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port

from .conftest import running
from .lab.cluster import ProxyCluster
from .lab.processes import PROC, children, holds
from .lab.waiting import eventually

KEY = secrets.token_bytes(48)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProxyCluster]:
    """A cluster that has a secret."""
    key = tmp_path / "token.key"
    key.write_bytes(KEY)
    tables: dict[str, dict[str, Any]] = {
        "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True, "token": {"secret_key": str(key)}},
    }
    with running(ProxyCluster(tables), ready=False) as it:
        wait_until_all_answer(it)
        yield it


def wait_until_all_answer(cluster: ProxyCluster) -> None:
    eventually(lambda: cluster.get("/readyz").text == "no broker is reachable\n", what="all workers answer")


def fork_server(cluster: ProxyCluster) -> int:
    """Its process id, once there is one."""
    return eventually(lambda: children(cluster.pid, "fork server"), what="a fork server runs")[0]


def test_the_fork_server_has_one_thread_the_supervisors_socket_and_no_secret(cluster: ProxyCluster) -> None:
    """Security: what it held, each later worker would hold. Only the auth worker has the key of tokens."""
    pid = fork_server(cluster)
    assert len(list((PROC / f"{pid}/task").iterdir())) == 1
    opened = {path.name: os.readlink(path) for path in (PROC / f"{pid}/fd").iterdir()}
    others = [target for number, target in opened.items() if int(number) > 2]
    assert len(others) == 1
    assert others[0].startswith("socket:")
    assert opened["0"] == "/dev/null"
    if os.geteuid() == 0:
        workers = cluster.worker_pids()
        assert holds(workers["auth-0"], KEY), "this finds what is there"
        assert not any(holds(one, KEY) for one in (pid, workers["lookup-0"], workers["forwarder-0"], cluster.pid))


def test_lists_of_processes_name_each(cluster: ProxyCluster) -> None:
    names = {(PROC / f"{pid}/cmdline").read_text().strip("\0") for pid in children(cluster.pid)}
    assert names == {f"pulsar-trio-proxy: {what}" for what in ("fork server", "admin", "auth", "lookup", "forwarder")}


def test_its_end_costs_no_worker_and_another_takes_its_place(cluster: ProxyCluster) -> None:
    workers, first = cluster.worker_pids(), fork_server(cluster)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: children(cluster.pid, "fork server") not in ([first], []), what="another fork server runs")
    assert cluster.worker_pids() == workers
    os.kill(workers["forwarder-0"], signal.SIGKILL)
    eventually(
        lambda: cluster.worker_pids().get("forwarder-0", 0) not in (workers["forwarder-0"], 0), what="a successor"
    )
    wait_until_all_answer(cluster)
    cluster.wait_for_log("the fork server ended; starting another", f"pid={first}")


def test_a_worker_and_the_fork_server_that_end_together_have_successors(cluster: ProxyCluster) -> None:
    workers, first = cluster.worker_pids(), fork_server(cluster)
    for pid in (first, *workers.values()):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not set(workers.values()) & set(children(cluster.pid)), what="they are gone")
    wait_until_all_answer(cluster)
    assert cluster.worker_pids().keys() == workers.keys()


def test_the_fork_server_ends_with_a_supervisor_that_is_killed(cluster: ProxyCluster) -> None:
    """So do its workers."""
    pids = children(cluster.pid)
    assert len(pids) == 5
    os.kill(cluster.pid, signal.SIGKILL)
    cluster.wait()
    eventually(lambda: not any((PROC / f"{pid}/fd").exists() for pid in pids), what="no process is left")


def test_an_upgrade_executes_another(cluster: ProxyCluster) -> None:
    """The program may be another one by then."""
    first = fork_server(cluster)
    assert cluster.command("upgrade", timeout_s=300).returncode == 0
    eventually(lambda: children(cluster.pid, "fork server") not in ([first], []), what="another fork server runs")
    assert first not in children(cluster.pid)
    wait_until_all_answer(cluster)
