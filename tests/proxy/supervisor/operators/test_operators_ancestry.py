"""proxy.supervisor.operators.ancestry: who is an operator at control.sock. Real trees of processes:
tests/e2e/test_inside.py."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog.testing
import trio

from proto.roles import Role
from proxy.runtime.rpc.peers import Caller
from proxy.supervisor.operators import ancestry as descent
from proxy.supervisor.operators.ancestry import (
    AncestryUnknown,
    NotSupervisor,
    ProcessStat,
    identify_operator,
    is_descendant,
    supervisor_connector,
)
from proxy.supervisor.startup.sockets import CONTROL_SOCKET

SUPERVISOR, WORKER, GRANDCHILD, SHELL, OPERATOR = 50, 51, 60, 40, 77
UID = 1000


class FakeSocket:
    """A socket whose peer is any process; `pidfd`: what the kernel gives for it, None on an old one, or an error."""

    def __init__(self, pid: int, uid: int = UID, pidfd: int | OSError | None = None) -> None:
        self._pid, self._uid, self._pidfd = pid, uid, pidfd

    def getsockopt(self, level: int, option: int, _size: int) -> bytes:
        assert level == socket.SOL_SOCKET
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", self._pid, self._uid, 0)
        if self._pidfd is None:
            raise OSError(92, "Protocol not available")
        if isinstance(self._pidfd, OSError):
            raise self._pidfd
        return struct.pack("i", self._pidfd)


def peer(pid: int, uid: int = UID, pidfd: int | OSError | None = None) -> trio.socket.SocketType:
    return FakeSocket(pid, uid, pidfd)  # type: ignore[return-value]


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> dict[int, ProcessStat]:
    """Processes by number; those that are not there cannot be seen."""
    processes = {
        1: ProcessStat(0, 1),
        SHELL: ProcessStat(1, 10),
        SUPERVISOR: ProcessStat(SHELL, 20),
        WORKER: ProcessStat(SUPERVISOR, 30),
        GRANDCHILD: ProcessStat(WORKER, 40),
        OPERATOR: ProcessStat(SHELL, 50),
    }

    def look(pid: int) -> ProcessStat:
        if pid not in processes:
            raise AncestryUnknown(f"/proc/{pid}/stat cannot be read")
        return processes[pid]

    monkeypatch.setattr(descent, "_look", look)
    monkeypatch.setattr(os, "getpid", lambda: SUPERVISOR)
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    return processes


@pytest.mark.parametrize(("pid", "child"), [(WORKER, True), (GRANDCHILD, True), (OPERATOR, False), (SHELL, False)])
def test_whose_child(tree: dict[int, ProcessStat], pid: int, child: bool) -> None:
    assert is_descendant(pid, SUPERVISOR) is child
    assert identify_operator(peer(pid)) == (None if child else Caller(Role.OPERATOR, pid))


def test_an_adopted_orphan_is_a_child(tree: dict[int, ProcessStat]) -> None:
    """Security."""
    tree[GRANDCHILD] = ProcessStat(SUPERVISOR, 40)
    del tree[WORKER]
    assert identify_operator(peer(GRANDCHILD)) is None


def test_another_user(tree: dict[int, ProcessStat]) -> None:
    """Security."""
    assert identify_operator(peer(OPERATOR, uid=UID + 1)) is None


def test_root_is_an_operator_whatever_it_lets_us_see(tree: dict[int, ProcessStat]) -> None:
    """A worker cannot become root; /proc may be mounted so that root's processes are not seen (hidepid)."""
    assert identify_operator(peer(4711, uid=0)) is not None


def test_where_the_cluster_is_root_roots_children_are_refused(
    tree: dict[int, ProcessStat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert identify_operator(peer(WORKER, uid=0)) is None
    assert identify_operator(peer(OPERATOR, uid=0)) is not None


def test_a_supervisor_that_is_the_first_process_of_a_container(
    tree: dict[int, ProcessStat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl exec` makes processes without a parent; those outside of the namespace have no number at all."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    tree.clear()
    tree.update({1: ProcessStat(0, 1), 7: ProcessStat(1, 5), 8: ProcessStat(0, 9), 9: ProcessStat(8, 9)})
    assert identify_operator(peer(7)) is None
    assert identify_operator(peer(8)) is not None
    assert identify_operator(peer(9)) is not None
    assert identify_operator(peer(0)) is not None


def test_a_hidden_ancestor_is_refused_and_said(tree: dict[int, ProcessStat]) -> None:
    """Security: it might be a worker."""
    del tree[SHELL]
    with structlog.testing.capture_logs() as logs:
        assert identify_operator(peer(OPERATOR)) is None
    assert [entry["event"] for entry in logs] == ["refused a caller at control.sock: ask as root"]


def test_a_number_that_is_anothers_now_is_seen(tree: dict[int, ProcessStat]) -> None:
    """Security: its parent ended, and the number went to a process that began later than the child."""
    tree[WORKER] = ProcessStat(SHELL, 99)
    with pytest.raises(AncestryUnknown, match="younger than its child"):
        is_descendant(GRANDCHILD, SUPERVISOR)
    assert identify_operator(peer(GRANDCHILD)) is None


def test_parents_that_end_meanwhile_are_looked_for_again(
    tree: dict[int, ProcessStat], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = descent._look
    worker = tree.pop(SHELL)

    def look(pid: int) -> ProcessStat:
        try:
            return real(pid)
        finally:
            if pid == SHELL:
                tree[SHELL] = worker

    monkeypatch.setattr(descent, "_look", look)
    assert identify_operator(peer(OPERATOR)) is not None


def test_no_chain_is_followed_for_ever(tree: dict[int, ProcessStat]) -> None:
    tree[OPERATOR] = ProcessStat(OPERATOR, 50)
    assert identify_operator(peer(OPERATOR)) is None


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Stands for a pidfd: readable once its process has ended."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def test_a_caller_that_has_ended_is_refused(tree: dict[int, ProcessStat], pipe: tuple[int, int]) -> None:
    """Security: its number may be an operator's by now."""
    reading, writing = pipe
    assert identify_operator(peer(OPERATOR, pidfd=os.dup(reading))) is not None
    os.write(writing, b"x")
    assert identify_operator(peer(OPERATOR, pidfd=reading)) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


@pytest.mark.parametrize("number", [22, 3, 61, 24], ids=["EINVAL", "ESRCH", "ENODATA", "EMFILE"])
def test_a_caller_that_was_reaped_is_refused(tree: dict[int, ProcessStat], number: int) -> None:
    """Security: some kernels have no pidfd of a process that is gone, and its number may be an operator's by now."""
    error = OSError(number, os.strerror(number))
    with structlog.testing.capture_logs() as logs:
        assert identify_operator(peer(OPERATOR, pidfd=error)) is None
    [entry] = logs
    assert entry["event"] == "refused a caller at control.sock: ask as root"
    assert os.strerror(number) in entry["reason"]


def test_the_parent_and_the_start_time_of_a_process_are_read_from_proc(tmp_path: Path) -> None:
    """The name of a process, in the same line, may hold any character."""
    parent, began = descent._look(os.getpid())
    assert parent == os.getppid()
    assert began >= descent._look(parent).began
    with pytest.raises(AncestryUnknown, match="cannot be read"):
        descent._look(2**30)


# ---- the listener at control.sock


_LISTEN = """
import os, socket, sys, time
from proto.roles import Role
from proxy.runtime.process.hardening import harden_process
from proxy.runtime.process.seccomp import refuse_system_calls
path, *ways = sys.argv[1:]
sock = socket.socket(socket.AF_UNIX)
sock.bind(path)
sock.listen()
if "with a child" in ways and os.fork() == 0:
    time.sleep(60)
listener = os.getpid()
if "gone" in ways:
    if os.fork():
        os._exit(0)
    while os.getppid() == listener:
        time.sleep(0.01)
if "with a filter" in ways:
    harden_process()
    assert refuse_system_calls(Role.AUTH)
    try:
        os.fork()
    except PermissionError:
        pass
os.write(1, b"ready")
while True:
    sock.accept()[0].recv(1)
"""
WORKER_LIKE = ("with a filter",)


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a process that listens at a path, in a group that ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*ways: str, name: str = CONTROL_SOCKET) -> str:
        path = str(tmp_path / name)
        command = [sys.executable, "-c", _LISTEN, path, *ways]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        return path

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


async def test_no_command_connects_in_a_folder_that_others_can_write(listen: Callable[..., str]) -> None:
    """Security: any user could have put the socket there."""
    path = Path(listen())
    assert await connected(str(path))
    path.parent.chmod(0o777)
    with pytest.raises(NotSupervisor, match=r"the folder can be written by other users \(mode 0777\)"):
        await supervisor_connector(str(path))()


async def test_no_command_follows_a_link_in_place_of_the_folder(listen: Callable[..., str], tmp_path: Path) -> None:
    """Security."""
    path = Path(listen())
    (tmp_path / "link").symlink_to(path.parent)
    with pytest.raises(NotSupervisor, match="the folder is a link"):
        await supervisor_connector(str(tmp_path / "link" / path.name))()


async def test_no_command_asks_another_users_process(
    listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: but for root's."""
    path, uid = listen(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(NotSupervisor, match=f"user {uid} listens there"):
        await supervisor_connector(path)()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert await connected(path)


async def connected(path: str) -> bool:
    """Whether an operator's command takes the process that listens for the supervisor."""
    try:
        stream = await supervisor_connector(path)()
    except NotSupervisor:
        return False
    await stream.aclose()
    return True


@pytest.mark.parametrize(
    ("ways", "is_supervisor"),
    [(WORKER_LIKE, False), ((*WORKER_LIKE, "with a child"), True), (("gone", *WORKER_LIKE, "with a child"), False)],
)
async def test_a_process_confined_as_a_worker_is_not_taken_for_a_supervisor(
    listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], is_supervisor: bool
) -> None:
    """Security: a filter and no child; nor is a process that has ended, whose number may be another's."""
    monkeypatch.setattr(descent, "FIRST_CHILD_S", 0.1)
    assert await connected(listen(*ways)) is is_supervisor


async def test_without_a_filter_it_needs_no_child(listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a supervisor that has just started, outside of containers."""
    path = listen()
    monkeypatch.setattr(descent, "children_of", lambda _pid: [])
    assert await connected(path) is not descent._has_filter(os.getpid())  # here, as where tests run in a container


async def test_a_child_may_come_a_little_later(listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = listen(*WORKER_LIKE), []

    def children_of(pid: int) -> list[int]:
        asked.append(pid)
        return [os.getpid()] if len(asked) > 2 else []

    monkeypatch.setattr(descent, "children_of", children_of)
    assert await connected(path)


async def test_a_socket_that_was_moved_there_is_not_the_supervisors(listen: Callable[..., str]) -> None:
    """Security: auth and lookup workers have sockets at which the supervisor listens."""
    path = listen("with a child", name="auth-0.sock")
    moved = path.replace("auth-0.sock", CONTROL_SOCKET)
    os.rename(path, moved)
    with pytest.raises(NotSupervisor, match=r"the socket of another name was put there: 'auth-0\.sock'"):
        await supervisor_connector(moved)()


async def test_a_process_that_cannot_be_seen_is_not_known(
    listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: it is in another namespace of process ids, or /proc is hidden."""
    path = listen()
    monkeypatch.setattr(descent, "peer_credentials", lambda _sock: (0, 0))
    with pytest.raises(NotSupervisor, match="ask in its container"):
        await supervisor_connector(path)()
    monkeypatch.setattr(descent, "peer_credentials", lambda _sock: (2**22 + 1, 0))
    with pytest.raises(NotSupervisor, match="status cannot be read"):
        await supervisor_connector(path)()
