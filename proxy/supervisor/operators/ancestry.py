"""Identification of both ends of control.sock: descendants of the supervisor are no operators, and no supervisor.

All processes of a cluster run as one user, so a compromised worker could open control.sock like any operator, itself or
by a process that it starts. It cannot choose its ancestors, though: the supervisor adopts every descendant that loses
its parent (``become_subreaper``), so the chain of parents of every process that a worker has begun,
directly or not, leads to the supervisor, for as long as that process lives.

In the same way it could put a socket of its own in the place of control.sock, and answer operators. It cannot get rid
of its filter of system calls, though, nor have a child with it (``require_supervisor``).
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
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.runtime.rpc.client import Connect
from proxy.runtime.rpc.peers import Caller, bound_path, peer_credentials
from proxy.supervisor.processes.children import children_of
from proxy.supervisor.startup.sockets import CONTROL_SOCKET, open_folder, writable_by_others

_SO_PEERPIDFD = 77  # since Linux 6.5
_PARENT_FIELD, _START_FIELD = 1, 19  # of /proc/<pid>/stat (proc_pid_stat(5)), counted after the command's name
_GENERATIONS_MAX = 1000
_ATTEMPTS = 3
FIRST_CHILD_S = 2.0
"""Time within which a supervisor that has just started, or whose fork server has just ended, has a child."""
_CHILD_POLL_S = 0.05


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat: the parent, and the start in ticks of the kernel's clock."""

    parent: int
    began: int


class AncestryUnknown(ProxyError):
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


class NotSupervisor(ProxyError, OSError):
    """A process listens at control.sock that cannot be told from a worker. The text is for the operator."""


def supervisor_connector(path: str) -> Connect:
    """Return a function that connects to control.sock. It raises NotSupervisor before anything is sent."""

    async def connect() -> trio.abc.HalfCloseableStream:
        folder = _open_private_folder(Path(path).parent)
        try:
            stream = await trio.open_unix_socket(f"/proc/self/fd/{folder}/{Path(path).name}")
        finally:
            os.close(folder)
        try:
            await require_supervisor(stream.socket)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    return connect


def _open_private_folder(path: Path) -> int:
    """Open the folder of control.sock, where no user but its owner can have put another socket. Raises OSError."""
    try:
        folder = open_folder(path)
    except NotADirectoryError:
        raise NotSupervisor(errno.ENOTDIR, "the folder is a link, or no folder") from None
    if shared := writable_by_others(os.fstat(folder)):
        os.close(folder)
        raise NotSupervisor(errno.EPERM, f"the folder {shared}")
    return folder


async def require_supervisor(sock: trio.socket.SocketType) -> None:
    """Raise NotSupervisor unless a supervisor listens at the other end of a connection to control.sock.

    * It has to be this user's, unless root asks.
    * The name at which the socket was bound has to be control.sock's. A rename does not change it: auth and lookup
      workers have sockets on which the supervisor has called listen(2), and could move one here.
    * The process that called listen(2) has to be alive, and not confined as a worker is: with a filter of system calls,
      and without a child. A filter stays for life, and a worker's refuses to make processes. The supervisor may have
      another one (a container's, systemd's), but it has children.

    Where the kernel refuses workers their filter, nothing tells them from a supervisor.
    """
    pid, uid = peer_credentials(sock)
    if os.geteuid() not in {0, uid}:  # the folder may be another user's
        raise NotSupervisor(errno.EPERM, f"user {uid} listens there, not this user; ask as that user, or as root")
    if (name := bound_path(sock).name) != CONTROL_SOCKET:
        raise NotSupervisor(errno.EPERM, f"the socket of another name was put there: {name!r}")
    if pid == 0:
        raise NotSupervisor(errno.EPERM, "the cluster's processes cannot be seen from here: ask in its container")
    pidfd: int | None = None
    try:
        pidfd = _peer_pidfd(sock)
        deadline = trio.current_time() + FIRST_CHILD_S
        while not (pidfd is not None and _has_ended(pidfd)):
            if not _has_filter(pid) or children_of(pid):
                return
            if trio.current_time() >= deadline:
                break
            await trio.sleep(_CHILD_POLL_S)
    except AncestryUnknown as error:
        raise NotSupervisor(errno.EPERM, f"who listens there is not known: {error}") from None
    finally:
        if pidfd is not None:
            os.close(pidfd)
    raise NotSupervisor(errno.EPERM, f"process {pid}, which listens there, is not the supervisor, but may be a worker")


def _has_filter(pid: int) -> bool:
    try:
        return b"\nSeccomp:\t0\n" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        raise AncestryUnknown(f"/proc/{pid}/status cannot be read") from None
