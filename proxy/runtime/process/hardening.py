"""Hardening of a process at its start: no core dumps, no tracing, no new privileges, Landlock, OOM score.

A process that may not be dumped writes no core file, and the kernel denies other processes of the same user access to
its memory, environment and descriptors (``/proc/<pid>/mem``, ``ptrace``, ``pidfd_getfd``). An exec makes a process
dumpable again, so every program of the cluster calls ``harden_process`` before it has read anything.

Until then another process of the user could still attach to it. So workers also give up the right to attach to any
process (``confine_process``): a worker that was taken over cannot wait for the next one to start and attach to it.
"""

import contextlib
import ctypes
import os
import resource
import stat
import struct

import msgspec

DATA_WORKER_OOM_SCORE = 200
"""Added for forwarders, lookup workers and trials at brokers: their memory use depends on clients and brokers."""

WORKER_OOM_SCORE = 100
"""Added for auth and admin workers; the supervisor, which holds the descriptors of all relays, adds none."""

_OOM_SCORE_MAX = 1000

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

# System call numbers, the same on all architectures.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_GIVE_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_FS_WRITE_FILE, _LANDLOCK_FS_READ_FILE, _LANDLOCK_FS_READ_DIR = 1 << 1, 1 << 2, 1 << 3
_LANDLOCK_FS_MAKE_REG, _LANDLOCK_FS_MAKE_BLOCK, _LANDLOCK_FS_TRUNCATE = 1 << 8, 1 << 11, 1 << 14
_LANDLOCK_FS_OF_VERSION = ((3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
"""All that a version can deny about files, the newest version first. (What 5 adds concerns devices: none is opened.)"""
_LANDLOCK_FS_OF_A_FILE = _LANDLOCK_FS_WRITE_FILE | _LANDLOCK_FS_READ_FILE | _LANDLOCK_FS_TRUNCATE
_LANDLOCK_SCOPE_SIGNAL = 1 << 1
_LANDLOCK_VERSION_WITH_SCOPES = 6

_READ = _LANDLOCK_FS_READ_FILE | _LANDLOCK_FS_READ_DIR
_WRITE = _READ | _LANDLOCK_FS_WRITE_FILE | _LANDLOCK_FS_MAKE_REG | _LANDLOCK_FS_TRUNCATE


class FileAccess(msgspec.Struct, frozen=True):
    """The files and directories that a process may open by itself; what is beneath a directory is included."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr of linux/landlock.h."""

    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def restrict_process(oom_score: int) -> None:
    """Harden and confine a process that is not the supervisor. ``oom_score``: see ``raise_oom_score``."""
    raise_oom_score(oom_score)
    harden_process()
    confine_process()


def restrict_fork(oom_score: int, files: FileAccess) -> bool:
    """Confine a process that was forked from a hardened one, and raise its OOM score. Return ``confine_process``'s
    result.

    The file of the score belongs to root until the process may be dumped. It may be for as long as that file is
    written: still before it has read anything. Raises OSError.
    """
    _prctl(_PR_SET_DUMPABLE, 1)
    try:
        raise_oom_score(oom_score)
    finally:
        harden_process()
    return confine_process(files)


def raise_oom_score(more: int) -> None:
    """Raise this process's OOM score, so that the kernel kills it before the supervisor where memory runs out: a worker
    has a successor at once, and the relays of all other workers go on.

    ``more``: thousandths of the memory, above the score that the process started with (which Kubernetes sets by the
    pod's QoS class). Call it before ``harden_process``, after which the file belongs to root.
    """
    with contextlib.suppress(OSError, ValueError):  # a /proc that cannot be written
        path = "/proc/self/oom_score_adj"
        with open(path, encoding="ascii") as file:  # noqa: PTH123 -- imports are kept few here
            score = int(file.read())
        with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(str(min(score + more, _OOM_SCORE_MAX)))


def harden_process() -> None:
    """Forbid core dumps, tracing by processes of the same user, and every privilege that an exec could bring.

    Raises OSError where the kernel does not allow that, which Linux 3.5 and newer do.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def confine_process(files: FileAccess | None = None) -> bool:
    """Give up tracing processes that this one has not started (Linux 5.13), and sending them signals (6.12); with
    ``files``, opening, making, moving and removing any others.

    Return False where the kernel has no Landlock. Call ``harden_process`` first, in a process with one thread: other
    threads are not confined. Raises OSError.

    Landlock: a process in a domain of its own may trace only processes in that domain. A domain must deny something.
    Without ``files`` that is signals to others, where the kernel can (version 6); before, making block devices. In a
    domain that denies anything about files, none can be renamed or linked from one directory to another (EXDEV).
    """
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_GIVE_VERSION))
    if version < 1:
        return False
    ruleset, size = _Ruleset(), ctypes.sizeof(ctypes.c_uint64)  # all that version 1 has
    if version >= _LANDLOCK_VERSION_WITH_SCOPES:
        ruleset.scoped, size = _LANDLOCK_SCOPE_SIGNAL, ctypes.sizeof(ruleset)
    if files is not None:
        ruleset.handled_fs = next(access for least, access in _LANDLOCK_FS_OF_VERSION if version >= least)
    elif not ruleset.scoped:
        ruleset.handled_fs = _LANDLOCK_FS_MAKE_BLOCK
    descriptor = _checked(_libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))
    try:
        for paths, access in ((files.readable, _READ), (files.writable, _WRITE)) if files is not None else ():
            for path in paths:
                _allow_beneath(descriptor, path, access & ruleset.handled_fs)
        _checked(_libc.syscall(_LANDLOCK_RESTRICT_SELF, descriptor, 0))
    finally:
        os.close(descriptor)
    return True


def _allow_beneath(ruleset: int, path: str, access: int) -> None:
    """Allow access to a file, or to all files of a directory; to none where there is no such path."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= _LANDLOCK_FS_OF_A_FILE
        rule = struct.pack("=Qi", access, opened)  # struct landlock_path_beneath_attr, which is packed
        _checked(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, so that none leaves this process's tree. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if _libc.prctl(option, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
