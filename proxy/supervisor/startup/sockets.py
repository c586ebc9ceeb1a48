"""Binding of all sockets, once, before any worker starts; workers inherit them.

A worker that dies closes no listening socket: clients and callers queue in the kernel until its successor runs.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from proto.addresses import HostPort, parse_host_port
from proxy.common.errors import ProxyError

BACKLOG = 4096
CONTROL_SOCKET = "control.sock"
LOCK_FILE = "supervisor.lock"
PRIVILEGED_PORTS_END = 1024


class StartFailed(ProxyError):
    """The cluster cannot start. The text names the obstacle and what to do about it."""


def bind_tcp(key: str, bind: str) -> socket.socket:
    """Bind, but do not yet listen on, ``address:port``. Raises StartFailed, which names the configuration's key."""
    where = parse_host_port(bind)
    try:
        family, address = find_address(where)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise StartFailed(f"{key}: cannot bind {bind}: {error.strerror}{_advice(error, where.port)}") from None
    sock.setblocking(False)
    return sock


def find_address(where: HostPort) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address to bind to. Raises OSError."""
    entry = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return entry[0], entry[4]


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
    _refuse_movable_below(path, folder.absolute().parent)
    if not obstacle and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        obstacle = f"cluster.runtime_dir: {path} cannot be written by this user"
    return obstacle


def _parent_obstacle(path: str, parent: Path) -> str:
    if not parent.is_dir():
        raise StartFailed(f"cluster.runtime_dir: {path} cannot be made: {parent} is not a folder")
    _refuse_movable_below(path, parent)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return (
            f"cluster.runtime_dir: {path} cannot be made: {parent} cannot be written by this user; make the folder "
            "beforehand, or name another"
        )
    return ""


def _refuse_movable_below(path: str, parent: Path) -> None:
    """Refuse a parent where every user may put a folder of his own in the place of this one. Raises StartFailed.

    The root of a volume is taken: Kubernetes makes those of emptyDir with mode 0777, for the pod alone.
    """
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not parent.is_mount():
        raise StartFailed(
            f"cluster.runtime_dir: {path} could be replaced by any user: {parent} has mode {stat.S_IMODE(mode):04o}; "
            f"set its sticky bit (`chmod +t {parent}`), or name another folder"
        )


def _owner_obstacle(path: str, state: os.stat_result) -> str:
    if not stat.S_ISDIR(state.st_mode):  # a link: what it leads to is not ours to change
        raise StartFailed(f"cluster.runtime_dir: {path} is not a folder")
    if shared := writable_by_others(state):
        raise StartFailed(f"cluster.runtime_dir: {path} {shared}")
    return "" if state.st_uid == os.geteuid() else f"cluster.runtime_dir: {path} belongs to another user"


def writable_by_others(state: os.stat_result) -> str:
    """Return that others than its owner may write in a folder, and what to do about it; "" if they may not."""
    if not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    mode = f"{stat.S_IMODE(state.st_mode):04o}"
    return f"can be written by other users (mode {mode}): look what is in it, then remove it, or `chmod go-w` it"


def open_folder(path: Path | str) -> int:
    """Open a folder itself, not what a link in its place leads to, as the `dir_fd` of operations in it.

    Raises OSError.
    """
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Open a folder of this user's. Raises OSError, StartFailed."""
    folder = open_folder(path)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise StartFailed(f"cluster.runtime_dir: {path} belongs to another user")
        yield folder
    finally:
        os.close(folder)


class RuntimeDirectory:
    """The folder of the Unix sockets, private to this user and locked by one supervisor at a time.

    Nothing in it is changed by way of a link, or before it is known to be this user's alone: others could have prepared
    it.
    """

    def __init__(self, path: str, inherited_lock: int = -1) -> None:
        self.path = Path(path)
        if inherited_lock >= 0:
            self._lock: TextIO = os.fdopen(inherited_lock, "w")
            return
        if obstacle := runtime_dir_obstacle(path):
            raise StartFailed(obstacle)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _own_folder(self.path) as folder:
                state = os.fstat(folder)
                if obstacle := _owner_obstacle(path, state):  # once more: of the folder that is open now
                    raise StartFailed(obstacle)
                if stat.S_IMODE(state.st_mode) & 0o077:
                    os.chmod(".", 0o700, dir_fd=folder)
                self._lock = _open_lock(path, folder)
        except OSError as error:
            raise StartFailed(f"cluster.runtime_dir: {path}: {error.strerror}") from None
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
            with _own_folder(self.path) as folder, contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            sock.bind(str(path))  # fails at a link
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise StartFailed(f"cluster.runtime_dir: {path}: {error.strerror}") from None
        except StartFailed:
            sock.close()
            raise
        sock.setblocking(False)
        return sock

    def remove_sockets(self) -> None:
        """Remove the sockets; the folder and its lock stay."""
        with contextlib.suppress(OSError, StartFailed), _own_folder(self.path) as folder:
            for path in self.path.glob("*.sock"):
                with contextlib.suppress(OSError):
                    os.unlink(path.name, dir_fd=folder)
        self._lock.close()


def _open_lock(path: str, folder: int) -> TextIO:
    """Open or make the lock file, and change nothing in it. Raises StartFailed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.fdopen(os.open(LOCK_FILE, flags, 0o600, dir_fd=folder), "w")  # truncates nothing: it is open
    except OSError as error:
        reason = "is a link; remove it" if error.errno == errno.ELOOP else error.strerror
        raise StartFailed(f"cluster.runtime_dir: {path}/{LOCK_FILE}: {reason}") from None
    state = os.fstat(lock.fileno())
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        lock.close()
        raise StartFailed(f"cluster.runtime_dir: {path}/{LOCK_FILE}: is no file of this user's; remove it")
    return lock
