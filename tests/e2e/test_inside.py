"""What a worker that was taken over can do to the others: it is a child of the supervisor, and of the same user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port

from .conftest import running
from .lab.captured import Captured
from .lab.cluster import ROOT, ProxyCluster
from .lab.processes import children, zombies
from .lab.waiting import eventually

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyCluster, Mapping[str, Any]]]:
    """A cluster without privileges whose auth worker is captured, and what that could do. It needs no broker."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tables: dict[str, dict[str, Any]] = {
            "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
            "cluster": {"forwarders": 1},
            "authentication": {"enabled": True},
        }
        cluster = ProxyCluster(tables, unprivileged=True)
        folder = cluster.directory / "captured"
        folder.mkdir()
        hostile = Captured(folder)
        cluster.tables["authentication.plugins.captured"] = hostile.options(cluster.runtime_dir)
        cluster.write_config(cluster.tables)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        with running(cluster, ready=False):
            eventually(
                lambda: cluster.get("/readyz").text == "no broker is reachable\n",
                what="all workers answer",
                within_s=30,
            )
            hostile.go_on()
            yield cluster, hostile.report()


def test_control_sock_refuses_the_supervisors_own_children(captured: tuple[ProxyCluster, Mapping[str, Any]]) -> None:
    """Security: the captured worker, its child, and its grandchild that has lost its parent ask for a drain."""
    cluster, report = captured
    assert report["drains"] == {"itself": "", "a child": "", "an orphan": ""}
    assert cluster.get("/healthz").status == 200
    assert "draining" not in cluster.log_text()
    assert cluster.command("status").returncode == 0, "an operator goes on to be heard"


def test_adopted_orphans_are_reaped(captured: tuple[ProxyCluster, Mapping[str, Any]]) -> None:
    """The supervisor adopts what a worker leaves behind; their numbers must not run out."""
    cluster, _report = captured
    eventually(lambda: not zombies(cluster.pid), what="no child of the supervisor waits to be reaped", within_s=15)


def test_no_process_may_look_into_another(captured: tuple[ProxyCluster, Mapping[str, Any]]) -> None:
    """Security: PR_SET_DUMPABLE is off everywhere, or one process of a user could read another's keys."""
    _cluster, report = captured
    assert len(report["memory"]) >= 3, "the supervisor, a lookup worker, a forwarder"
    for outcomes in report["memory"].values():
        assert set(outcomes.values()) == {"PermissionError"}, report["memory"]


def test_no_process_writes_a_core_file_or_gains_privileges(captured: tuple[ProxyCluster, Mapping[str, Any]]) -> None:
    """Security."""
    cluster, _report = captured
    processes = [cluster.pid, *cluster.worker_pids().values()]
    assert len(processes) >= 4
    for pid in (*processes, *children(cluster.pid)):
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
        [limit] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert limit.split()[4:6] == ["0", "0"]
