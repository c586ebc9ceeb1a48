"""proxy.supervisor.operators.ancestry: who is an operator at control.sock. Real trees of processes:
tests/e2e/test_inside.py."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
import trio

from proto.roles import Role
from proxy.runtime.rpc.peers import Caller
from proxy.supervisor.operators import ancestry as descent
from proxy.supervisor.operators.ancestry import AncestryUnknown, ProcessStat, identify_operator, is_descendant

SUPERVISOR, WORKER, GRANDCHILD, SHELL, OPERATOR = 50, 51, 60, 40, 77
UID = 1000


class FakeSocket:
    """A socket whose peer is anybody; `pidfd`: what the kernel gives for it, None on an old one, or an error."""

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


def test_what_proc_says(tmp_path: Path) -> None:
    """Of this very process, whose name may hold anything."""
    parent, began = descent._look(os.getpid())
    assert parent == os.getppid()
    assert began >= descent._look(parent).began
    with pytest.raises(AncestryUnknown, match="cannot be read"):
        descent._look(2**30)
