"""What a worker that was taken over can do to the others: it is a child of the supervisor, and of the same user."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port

from proto.pulsar_pb2 import ServerError
from proto.roles import Role
from proxy.runtime.process.limits import IN_FLIGHT_DESCRIPTORS, OPEN_FILES_MAX

from .conftest import running
from .lab.captured import NONSENSE, Captured
from .lab.cluster import ROOT, ProxyCluster
from .lab.processes import PROC, children, zombies
from .lab.waiting import eventually
from .lab.wire import WireClient

REFUSED = "PermissionError"


@pytest.fixture(scope="module")
def captured(request: pytest.FixtureRequest) -> Iterator[tuple[ProxyCluster, Captured]]:
    """A cluster without privileges whose auth worker is captured, and what that could do. It needs no broker."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tables: dict[str, dict[str, Any]] = {
            "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
            "cluster": {"forwarders": 1},
            "authentication": {"enabled": True},
        }
        cluster = ProxyCluster(tables, unprivileged=True, ready_timeout_s=75)
        folder = cluster.directory / "captured"
        folder.mkdir()
        hostile = Captured(folder)
        request.addfinalizer(hostile.close)  # noqa: PT021 -- whatever follows may fail
        requested = [cluster.config_path, hostile.others / "secret", Path("/etc/hosts")]
        cluster.tables["authentication.plugins.captured"] = hostile.options(cluster.runtime_dir, requested)
        cluster.write_config(cluster.tables)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        with running(cluster, ready=False):
            eventually(
                lambda: cluster.get("/readyz").text == "no broker is reachable\n",
                what="all workers answer",
            )
            hostile.attack([pid for name, pid in cluster.worker_pids().items() if not name.startswith("auth")])
            yield cluster, hostile


def test_control_sock_refuses_the_supervisors_own_children(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: the captured worker asks for a drain; it cannot have a child, or a grandchild, that does."""
    cluster, hostile = captured
    report = hostile.report
    assert report["drains"] == {"itself": "", "a child": REFUSED, "an orphan": REFUSED}
    assert cluster.get("/healthz").status == 200
    assert "draining" not in cluster.log_text()
    assert cluster.command("status").returncode == 0, "an operator goes on to be heard"


def test_metrics_of_a_captured_worker_do_not_blind_prometheus(
    captured: tuple[ProxyCluster, Captured],
) -> None:
    """Security: of the lines that no Prometheus would read, none is served; all others are."""
    cluster, _ = captured
    scrape = cluster.metrics()
    assert scrape.total("captured", role="auth") == 7
    assert scrape.total("pulsar_proxy_build_info", role="supervisor") == 1
    assert not [sample for sample in scrape.samples if sample.name == "captured" and sample.value != 7]
    assert cluster.metrics().total("pulsar_proxy_dropped_metrics_total", of="auth", reason="malformed") >= len(NONSENSE)
    cluster.wait_for_log("a process's metrics are not served in full", "auth-0")


def test_adopted_orphans_are_reaped(captured: tuple[ProxyCluster, Captured]) -> None:
    """The supervisor adopts what a worker leaves behind; their numbers must not run out."""
    cluster, _ = captured
    eventually(lambda: not zombies(cluster.pid), what="no child of the supervisor waits to be reaped")


def test_operators_ask_nothing_of_a_captured_worker_that_has_replaced_control_sock(
    captured: tuple[ProxyCluster, Captured],
) -> None:
    """Security: by a socket of its own, or by the one at which the supervisor listens for it."""
    cluster, hostile = captured
    control, kept = cluster.runtime_dir / "control.sock", cluster.runtime_dir / "kept.sock"
    for trap, reason in (
        (hostile.control_trap, f"process {cluster.worker_pids()['auth-0']}, which listens there"),
        (cluster.runtime_dir / "auth-0.sock", "'auth-0.sock'"),
    ):
        control.rename(kept)
        trap.rename(control)
        try:
            for command in ("status", "drain", "reload", "upgrade"):
                done = cluster.command(command)
                assert done.returncode == 1, command
                assert reason in done.stderr, command
        finally:
            control.rename(trap)
            kept.rename(control)
    assert [hostile.bytes_of_operators() for _ in range(4)] == [0] * 4
    assert cluster.command("status").returncode == 0


_UNDER_A_FILTER = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000))
program = struct.pack("@HP", 1, ctypes.addressof(allow))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_operators_know_a_supervisor_that_is_filtered_itself() -> None:
    """As in containers, and by systemd's SystemCallFilter."""
    tables: dict[str, dict[str, Any]] = {
        "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
        "cluster": {"forwarders": 1},
    }
    with running(ProxyCluster(tables, prefix=[sys.executable, "-c", _UNDER_A_FILTER]), ready=False) as cluster:
        assert "Seccomp:\t2\n" in Path(f"/proc/{cluster.pid}/status").read_text()
        for command in ("status", "reload", "upgrade", "status", "drain"):
            done = cluster.command(command, timeout_s=300)
            assert done.returncode == 0, (command, done.stderr)
        cluster.wait()


DENIED = dict.fromkeys(["mem", "environ", "fd", "pidfd_getfd", "ptrace"], "PermissionError")


def test_a_captured_worker_may_not_look_into_another(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: not even into one that is just starting."""
    report = captured[1].report
    assert len(report["memory"]) >= 4, "the supervisor, an admin and a lookup worker, a forwarder"
    assert {str(outcome) for outcome in report["memory"].values()} == {str(DENIED)}


def test_a_captured_worker_may_not_end_the_cluster_by_a_signal(
    captured: tuple[ProxyCluster, Captured],
) -> None:
    """Security: SIGTERM is a drain."""
    cluster, hostile = captured
    report = hostile.report
    assert report["signal"] == "PermissionError"
    assert "draining" not in cluster.log_text()


def test_a_captured_worker_can_call_the_kernel_for_nothing_that_no_worker_needs(
    captured: tuple[ProxyCluster, Captured],
) -> None:
    """Security: it executes no program, starts no process, opens no socket of a family that it does not use, and does
    nothing to the supervisor.
    """
    cluster, hostile = captured
    attempts = hostile.report["calls"]
    assert set(attempts.values()) == {REFUSED}
    assert len(attempts) == 6
    confined = cluster.metrics()
    for role in ("auth", "lookup", "forwarder", "admin"):
        assert confined.total("pulsar_proxy_confined", role=role, by="seccomp") == 1


def test_a_worker_may_open_no_more_files_than_its_role_needs(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: it fills no table of the kernel."""
    cluster, _ = captured

    def limits(pid: int) -> list[int]:
        lines = (PROC / f"{pid}/limits").read_text().splitlines()
        return next([int(one) for one in line.split()[3:5]] for line in lines if line.startswith("Max open files"))

    supervisors = limits(cluster.pid)
    workers = cluster.worker_pids()
    most = supervisors[0] - IN_FLIGHT_DESCRIPTORS
    assert limits(workers["forwarder-0"]) == [most, most]
    for name in ("admin-0", "auth-0", "lookup-0"):
        assert limits(workers[name]) == [min(OPEN_FILES_MAX[Role(name.partition("-")[0])], most)] * 2
    assert OPEN_FILES_MAX[Role.AUTH] < supervisors[0], "this machine's limit shows something"


def test_no_other_process_of_the_user_may_look_into_one(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: PR_SET_DUMPABLE is off everywhere, or whatever runs as the same user could read keys."""
    cluster, _ = captured
    script = "import json, sys; from e2e.lab.captured_plugin import looks; print(json.dumps(looks(int(sys.argv[1]))))"
    for pid in (cluster.pid, *cluster.worker_pids().values()):
        command = [*cluster.prefix, sys.executable, "-c", script, str(pid)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'deploy'}{os.pathsep}{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert json.loads(done.stdout) == DENIED


def test_no_process_writes_a_core_file_or_gains_privileges(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security."""
    cluster, _ = captured
    processes = [cluster.pid, *cluster.worker_pids().values()]
    assert len(processes) >= 4
    for pid in (*processes, *children(cluster.pid)):
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
        [limit] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert limit.split()[4:6] == ["0", "0"]


def test_a_captured_worker_opens_makes_moves_and_removes_no_file(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: they belong to its user, who may do all of that."""
    attempts = captured[1].report["files"]
    assert set(attempts.values()) == {REFUSED}
    assert len(attempts) == 6
    assert (captured[1].others / "secret").read_text() == "secret"


def test_a_captured_worker_is_given_the_files_of_its_own_role_alone(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: the supervisor opens what the configuration names for auth workers, as the table of hosts."""
    configuration, secret, hosts = captured[1].report["requests"].values()
    assert (configuration, secret) == (REFUSED, REFUSED)
    assert "localhost" in hosts


def test_a_captured_worker_cannot_replace_another_workers_socket(captured: tuple[ProxyCluster, Captured]) -> None:
    """Security: callers would find out (WrongListener), but would have no peer to call."""
    cluster, hostile = captured
    assert hostile.report["socket"] == REFUSED
    assert (cluster.runtime_dir / "lookup-0.sock").is_socket()
    assert not (cluster.runtime_dir / "lookup-0.sock.trap").exists()


@pytest.mark.parametrize("target", ["loopback", "metadata"])
def test_a_captured_lookup_worker_does_not_make_a_forwarder_dial_the_proxys_own_machine(
    forged_targets: tuple[ProxyCluster, socket.socket], target: str
) -> None:
    """Security: the forwarder applies the rules itself, and nothing is dialled."""
    cluster, listener = forged_targets
    failures = {"name": "pulsar_proxy_broker_connection_failures_total", "reason": "bad_lookup_answer"}
    before = cluster.metrics().total(**failures)
    with WireClient(cluster.port) as client:
        client.send_connect(proxy_to_broker_url=f"{target}:{listener.getsockname()[1]}")
        [error] = client.wait_for_end()
        assert (error.error.error, error.error.message) == (
            ServerError.ServiceNotReady,
            "Target broker cannot be validated.",
        )
    cluster.wait_for_log("a lookup worker named what no relay may be dialled to", f"reason={target}")
    assert cluster.metrics().total(**failures) == before + 1
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.fixture(scope="module")
def forged_targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyCluster, socket.socket]]:
    """A cluster whose lookup worker allows what it must not, and what listens at that port. It needs no broker."""
    folder = tmp_path_factory.mktemp("captured-lookup")
    plugin = Path(__file__).parent / "lab" / "captured_lookup.py"
    (folder / "sitecustomize.py").write_text(plugin.read_text())
    with pytest.MonkeyPatch.context() as monkeypatch, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        service_url = f"pulsar://192.0.2.1:{listener.getsockname()[1]}"
        cluster = ProxyCluster({"brokers": {"service_url": service_url}, "cluster": {"forwarders": 1}})
        with running(cluster, ready=False):
            eventually(lambda: cluster.get("/readyz").text == "no broker is reachable\n", what="all workers answer")
            yield cluster, listener
