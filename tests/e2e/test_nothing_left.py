"""The end of a cluster is the end of all that its workers have begun, where no filter of system calls keeps them from
it.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port

from .conftest import running
from .lab.cluster import ROOT, ProxyCluster
from .lab.processes import PROC
from .lab.waiting import eventually

_PLUGIN = '''
import os, signal, socket, time

class Provider:
    """Leaves a grandchild: in a session of its own, deaf to SIGTERM."""
    method = "leaving"

    def __init__(self, options):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if os.fork() == 0:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(options["left"])
                    sock.sendall(str(os.getpid()).encode())
                os.closerange(0, 1000)
                time.sleep(600)
            os._exit(0)
        os.wait()
'''
_WITHOUT_FILTER = "import platform; platform.machine = lambda: 'an unknown architecture'"


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM)], ids=["drain", "at once"])
def test_processes_of_a_captured_worker_end_with_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...]
) -> None:
    """Security."""
    about = tmp_path / "leaving-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: leaving\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pulsar_trio_proxy.authentication]\nleaving = leaving_plugin:Provider\n")
    (tmp_path / "leaving_plugin.py").write_text(_PLUGIN)
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_FILTER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    left = tmp_path / "left"
    told = socket.socket(socket.AF_UNIX)
    told.bind(str(left))
    told.listen()
    told.settimeout(60)
    tables: dict[str, dict[str, Any]] = {
        "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True},
        "authentication.plugins.leaving": {"left": str(left)},
    }
    with told, running(ProxyCluster(tables), ready=False) as cluster:
        with told.accept()[0] as accepted:
            process = PROC / accepted.recv(20).decode() / "cmdline"
        eventually(lambda: cluster.get("/readyz").text == "no broker is reachable\n", what="all workers answer")
        assert process.exists()
        for one in signals:
            cluster.signal(one)
        cluster.wait()
        assert not process.exists()
