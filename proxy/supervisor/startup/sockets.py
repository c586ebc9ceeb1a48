"""Binding of all sockets, once, before any worker starts; workers inherit them.

A worker that dies closes no listening socket: clients and callers queue in the kernel until its successor runs.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from proto.addresses import parse_host_port

BACKLOG = 4096
CONTROL_SOCKET = "control.sock"
PRIVILEGED_PORTS_END = 1024


class StartFailed(Exception):
    """The cluster cannot start. The text names the obstacle and what to do about it."""


def bind_tcp(key: str, bind: str) -> socket.socket:
    """Bind, but do not yet listen on, ``address:port``. Raises StartFailed, which names the configuration's key."""
    where = parse_host_port(bind)
    try:
        entry = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(entry[0], socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(entry[4])
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise StartFailed(f"{key}: cannot bind {bind}: {error.strerror}{_advice(error, where.port)}") from None
    sock.setblocking(False)
    return sock


def _advice(error: OSError, port: int) -> str:
    """Return what an operator may do about an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return f"; `ss -ltnp 'sport = :{port}'` says by which process"
    if error.errno == errno.EADDRNOTAVAIL:
        return "; this machine has no such address"
    if error.errno in {errno.EACCES, errno.EPERM} and port < PRIVILEGED_PORTS_END:
        return (
            f"; ports below {PRIVILEGED_PORTS_END} are root's: take a higher one, give the process "
            "CAP_NET_BIND_SERVICE, or lower the sysctl net.ipv4.ip_unprivileged_port_start"
        )
    return ""


def runtime_dir_obstacle(path: str) -> str:
    """Return what keeps this user from having a cluster's sockets in a folder, without making it; "" for nothing.

    Raises StartFailed for an obstacle to every user.
    """
    folder = Path(path)
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return _parent_obstacle(path, next((one for one in folder.absolute().parents if one.exists()), Path("/")))
    except PermissionError as error:
        return f"cluster.runtime_dir: {path}: {error.strerror}"
    except OSError as error:
        raise StartFailed(f"cluster.runtime_dir: {path}: {error.strerror}") from None
    obstacle = _owner_obstacle(path, state)
    if not obstacle and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        obstacle = f"cluster.runtime_dir: {path} cannot be written by this user"
    return obstacle


def _parent_obstacle(path: str, parent: Path) -> str:
    if not parent.is_dir():
        raise StartFailed(f"cluster.runtime_dir: {path} cannot be made: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return (
            f"cluster.runtime_dir: {path} cannot be made: {parent} cannot be written by this user; make the folder "
            "beforehand, or name another"
        )
    return ""


def _owner_obstacle(path: str, state: os.stat_result) -> str:
    if not stat.S_ISDIR(state.st_mode):  # a link: what it leads to is not ours to change
        raise StartFailed(f"cluster.runtime_dir: {path} is not a folder")
    return "" if state.st_uid == os.geteuid() else f"cluster.runtime_dir: {path} belongs to another user"


class RuntimeDirectory:
    """The folder of the Unix sockets, private to this user and locked by one supervisor at a time."""

    def __init__(self, path: str, inherited_lock: int = -1) -> None:
        self.path = Path(path)
        if inherited_lock >= 0:
            self._lock = os.fdopen(inherited_lock, "w")
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self.path.lstat()
        except OSError as error:
            raise StartFailed(f"cluster.runtime_dir: {path}: {error.strerror}") from None
        if obstacle := _owner_obstacle(path, state):
            raise StartFailed(obstacle)
        if stat.S_IMODE(state.st_mode) & 0o077:
            self.path.chmod(0o700)
        try:
            self._lock = (self.path / "supervisor.lock").open("w")
        except OSError as error:
            raise StartFailed(f"cluster.runtime_dir: {path}/supervisor.lock: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StartFailed(f"cluster.runtime_dir: another cluster is running in {path}") from None

    @property
    def lock_fd(self) -> int:
        """Descriptor of the lock file, which is locked for as long as any process has it open."""
        return self._lock.fileno()

    def bind_socket(self, name: str) -> socket.socket:
        """Bind a listening Unix socket in the folder, in place of one that an earlier run has left."""
        path = self.path / name
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise StartFailed(f"cluster.runtime_dir: {path}: {error.strerror}") from None
        sock.setblocking(False)
        return sock

    def remove_sockets(self) -> None:
        """Remove the sockets; the folder and its lock stay."""
        for path in self.path.glob("*.sock"):
            with contextlib.suppress(OSError):
                path.unlink()
        self._lock.close()
