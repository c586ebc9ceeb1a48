"""What a process of the cluster gives up at its start, so that its memory stays its own.

A process that may not be dumped writes no core file, and the kernel refuses other processes of the same user its
memory, its environment and its descriptors (``/proc/<pid>/mem``, ``ptrace``, ``pidfd_getfd``). An exec makes a process
dumpable again, so every program of the cluster calls ``harden_process`` before it has read anything.
"""

import ctypes
import os
import resource

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def harden_process() -> None:
    """Refuse core dumps, being traced by processes of the same user, and every privilege that an exec could bring.

    Raises OSError where the kernel does not allow that; nothing that Linux 3.5 or newer does.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Become the parent of all descendants that lose theirs, so none leaves this process's tree. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if _libc.prctl(option, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
