"""proxy.fork_server: what a worker of each role can open, in a real one that a real fork server has forked."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from proto.roles import Role
from proxy.runtime.process.hardening import FileAccess, become_subreaper
from proxy.supervisor.processes.fork_server import NO_FILES, ForkServer

_CAPTURED = """
import json, os, socket, sys
from proxy.fork_server import server

def outcome(attempt, *arguments):
    try:
        found = attempt(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done" if not isinstance(found, str) else found

def attack(role, service, descriptors, confinement, process_metrics):
    folder = sys.argv[1]
    attempts = {
        "a key": outcome(open, folder + "/key"),
        "a file of the system": outcome(open, "/etc/passwd"),
        "a folder": outcome(os.listdir, "/"),
        "the processes": outcome(os.listdir, "/proc"),
        "its own memory": outcome(open, "/proc/self/mem"),
        "a new file": outcome(open, folder + "/new", "x"),
        "a changed file": outcome(open, folder + "/key", "w"),
        "a removal": outcome(os.remove, folder + "/key"),
        "another name": outcome(os.rename, folder + "/key", folder + "/other"),
        "a link": outcome(os.symlink, folder + "/key", folder + "/link"),
        "a folder of its own": outcome(os.mkdir, folder + "/folder"),
        "a socket": outcome(lambda: socket.socket(socket.AF_UNIX).bind(folder + "/socket")),
        "a new module": outcome(__import__, "wave"),
    }
    metrics = sorted(metric.name for metric in process_metrics.collect())
    socket.socket(fileno=descriptors.channel).sendall(
        json.dumps({"attempts": attempts, "metrics": metrics, "landlock": confinement.landlock}).encode()
    )

server.run_worker = attack
server.main()
"""


async def captured(role: Role, folder: Path, files: FileAccess = NO_FILES) -> Any:
    """What a worker of a role could open after a takeover."""
    server = ForkServer((sys.executable, "-c", _CAPTURED, str(folder)))
    ours, theirs = socket.socketpair()
    with ours:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            with theirs:
                pid = await server.fork(role, {"channel": theirs.fileno(), "liveness": theirs.fileno()}, files)
            ours.settimeout(60)
            told = await trio.to_thread.run_sync(lambda: ours.makefile("rb").read())
            nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(os.waitpid, pid, 0)
    return json.loads(told)


@pytest.fixture
def subreaper() -> Iterator[None]:
    """This process adopts the workers, as the supervisor does."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.mark.parametrize("role", [Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER])
async def test_a_worker_opens_makes_moves_and_removes_nothing(role: Role, tmp_path: Path, subreaper: None) -> None:
    """Security: what belongs to its user, what is world-readable, and what it could leave for others."""
    (tmp_path / "key").write_text("secret")
    found = await captured(role, tmp_path)
    if not found["landlock"]:
        pytest.skip("this kernel has no Landlock")
    assert set(found["attempts"].values()) == {"PermissionError"}
    assert os.listdir(tmp_path) == ["key"]
    assert (tmp_path / "key").read_text() == "secret"


async def test_a_worker_measures_itself_all_the_same(tmp_path: Path, subreaper: None) -> None:
    found = await captured(Role.FORWARDER, tmp_path)
    assert found["metrics"] == sorted(
        [
            "process_cpu_seconds",
            "process_max_fds",
            "process_open_fds",
            "process_resident_memory_bytes",
            "process_start_time_seconds",
            "process_virtual_memory_bytes",
        ]
    )


async def test_an_auth_worker_reads_what_its_libraries_need(tmp_path: Path, subreaper: None) -> None:
    (tmp_path / "key").write_text("secret")
    found = await captured(Role.AUTH, tmp_path, FileAccess((str(tmp_path / "key"), *sys.path)))
    if not found["landlock"]:
        pytest.skip("this kernel has no Landlock")
    done = {what for what, outcome in found["attempts"].items() if outcome == "done"}
    assert done == {"a key", "a new module"}
