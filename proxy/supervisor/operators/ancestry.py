"""Identification of callers at control.sock: descendants of the supervisor are no operators.

All processes of a cluster run as one user, so a compromised worker could open control.sock like any operator, itself or
by a process that it starts. It cannot choose its ancestors, though: the supervisor adopts every descendant that loses
its parent (``become_subreaper``), so the chain of parents of every process that a worker has begun,
directly or not, leads to the supervisor, for as long as that process lives.
"""

import errno
import os
import select
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import trio

from proto.roles import Role
from proxy.common.logs import get_logger
from proxy.runtime.rpc.peers import Caller, peer_credentials

_SO_PEERPIDFD = 77  # since Linux 6.5
_PARENT_FIELD, _START_FIELD = 1, 19  # of /proc/<pid>/stat (proc_pid_stat(5)), counted after the command's name
_GENERATIONS_MAX = 1000
_ATTEMPTS = 3


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat: the parent, and the start in ticks of the kernel's clock."""

    parent: int
    began: int


class AncestryUnknown(Exception):
    """The ancestors of a process cannot be determined. The text names the process."""


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return True if a process is ``ancestor`` or descends from it. Raises AncestryUnknown.

    Parents may end during the walk, and their children get other parents then: an inconsistent chain is read again.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _reaches_ancestor(pid, ancestor)
        except AncestryUnknown:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError  # not reached


def _reaches_ancestor(pid: int, ancestor: int) -> bool:
    began: int | None = None
    for _ in range(_GENERATIONS_MAX):
        if pid == ancestor:
            return True
        if pid <= 0:  # the chain ends: init's parent, or a parent outside of this pid namespace
            return False
        found = _look(pid)
        if began is not None and found.began > began:
            raise AncestryUnknown(f"process {pid} is younger than its child")  # its number is another's now
        pid, began = found
    raise AncestryUnknown("there are too many generations")


def _look(pid: int) -> ProcessStat:
    try:
        # The command's name may hold anything, parentheses and spaces among it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return ProcessStat(int(fields[_PARENT_FIELD]), int(fields[_START_FIELD]))
    except (OSError, IndexError, ValueError):
        raise AncestryUnknown(f"/proc/{pid}/stat cannot be read") from None


def identify_operator(sock: trio.socket.SocketType) -> Caller | None:
    """Identify a caller at control.sock: this user or root, but no descendant of this process; None for all others.

    A caller that has ended is refused, since its number may be another's by now; so is one whose ancestors are hidden.
    A caller without a number is outside of this process's pid namespace, where none of its descendants can be.
    """
    pid, uid = peer_credentials(sock)
    own = os.geteuid()
    if uid not in {0, own}:
        return None
    if uid == 0 and own != 0:
        return Caller(Role.OPERATOR, pid)  # no child of ours can be root: none of them can gain privileges
    pidfd: int | None = None
    try:
        pidfd = _peer_pidfd(sock)
        if pid not in {0, os.getpid()} and is_descendant(pid, os.getpid()):
            get_logger().error("refused a process of the cluster itself at control.sock", pid=pid)
            return None
        if pidfd is not None and _has_ended(pidfd):
            return None
    except AncestryUnknown as error:
        get_logger().error("refused a caller at control.sock: ask as root", pid=pid, reason=str(error))
        return None
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return Caller(Role.OPERATOR, pid)


def _peer_pidfd(sock: trio.socket.SocketType) -> int | None:
    """Return a pidfd of the process that connected; None where the kernel has no SO_PEERPIDFD.

    Raises AncestryUnknown where there is none any more: some kernels have none for a process that has ended (EINVAL
    up to
    Linux 6.15), and its number may be another's.
    """
    try:
        return int(struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        raise AncestryUnknown(f"the kernel does not tell its process: {error.strerror}") from None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
