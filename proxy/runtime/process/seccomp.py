"""A filter of system calls (seccomp): what a worker never needs, the kernel refuses it.

A worker that was taken over can execute no program, start no process, trace, signal or slow down no other one, make no
namespace, and open sockets only of the families that its role uses. Refused calls fail with EPERM. Threads, which
workers need, inherit the filter. A list of calls that are refused, not of those that are allowed: with that, a new
version of the C library would end workers.

The table has numbers of x86_64 and aarch64; on other architectures, and where the kernel or a container's profile
refuses filters, workers run without one (``is_available``).
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from proto.roles import Role

SOCKET_FAMILIES: dict[Role, frozenset[int]] = {
    Role.ADMIN: frozenset({socket.AF_UNIX}),
    Role.AUTH: frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}),
    Role.LOOKUP: frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}),
    Role.FORWARDER: frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}),
    Role.HTTP: frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}),
}
"""Families of socket(2) by role; socketpair(2) and accept(2) are not concerned."""


class _Numbers(NamedTuple):
    """Number of a system call by architecture; -1 where it has none."""

    x86_64: int
    aarch64: int


_REFUSED = {
    "fork": _Numbers(57, -1),
    "vfork": _Numbers(58, -1),
    "execve": _Numbers(59, 221),
    "execveat": _Numbers(322, 281),
    "ptrace": _Numbers(101, 117),
    "process_vm_readv": _Numbers(310, 270),
    "process_vm_writev": _Numbers(311, 271),
    "process_madvise": _Numbers(440, 440),
    "kcmp": _Numbers(312, 272),
    "pidfd_getfd": _Numbers(438, 438),
    "tkill": _Numbers(200, 130),
    "rt_sigqueueinfo": _Numbers(129, 138),
    "rt_tgsigqueueinfo": _Numbers(297, 240),
    "pidfd_send_signal": _Numbers(424, 424),
    "setpriority": _Numbers(141, 140),
    "ioprio_set": _Numbers(251, 30),
    "sched_setparam": _Numbers(142, 118),
    "sched_setscheduler": _Numbers(144, 119),
    "sched_setattr": _Numbers(314, 274),
    "unshare": _Numbers(272, 97),
    "setns": _Numbers(308, 268),
    "chroot": _Numbers(161, 51),
    "pivot_root": _Numbers(155, 41),
    "mount": _Numbers(165, 40),
    "umount2": _Numbers(166, 39),
    "open_tree": _Numbers(428, 428),
    "move_mount": _Numbers(429, 429),
    "fsopen": _Numbers(430, 430),
    "fspick": _Numbers(433, 433),
    "mount_setattr": _Numbers(442, 442),
    "open_by_handle_at": _Numbers(304, 265),
    "bpf": _Numbers(321, 280),
    "perf_event_open": _Numbers(298, 241),
    "userfaultfd": _Numbers(323, 282),
    "io_uring_setup": _Numbers(425, 425),
    "add_key": _Numbers(248, 217),
    "request_key": _Numbers(249, 218),
    "keyctl": _Numbers(250, 219),
    "init_module": _Numbers(175, 105),
    "finit_module": _Numbers(313, 273),
    "kexec_load": _Numbers(246, 104),
}
_KEPT = {Role.AUTH: frozenset({"add_key", "request_key", "keyctl"})}
"""What a role needs of these: Kerberos may keep its tickets in a keyring of the kernel."""

_OF_ITSELF = {"kill": _Numbers(62, 129), "tgkill": _Numbers(234, 131)}
"""Allowed with this process's id as the first argument."""

_OF_THE_CALLER = {"prlimit64": _Numbers(302, 261), "sched_setaffinity": _Numbers(203, 122)}
"""Allowed with 0 as the first argument, or this process's id."""

_CLONE = _Numbers(56, 220)
_CLONE3 = _Numbers(435, 435)
_SOCKET = _Numbers(41, 198)

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. (NEWTIME is for unshare(2) and clone3(2) only.)"""

_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""

# linux/bpf_common.h, linux/filter.h, linux/seccomp.h
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_FILTER = struct.Struct("=HBBI")
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_GET_SECCOMP = 21

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def is_available() -> bool:
    """Return True if workers can have a filter here."""
    return platform.machine() in _ARCHITECTURES and _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def refuse_system_calls(role: Role) -> bool:
    """Give this process its role's filter, for good; return False where the kernel does not take it.

    Call it in a process with one thread and without new privileges (``hardening.harden_process``).
    """
    architecture = platform.machine()
    if architecture not in _ARCHITECTURES:
        return False
    filters = b"".join(_FILTER.pack(*one) for one in _instructions(architecture, os.getpid(), role))
    program = _Program(len(filters) // _FILTER.size, ctypes.cast(ctypes.c_char_p(filters), ctypes.c_void_p))
    arguments = (ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return bool(_libc.prctl(_PR_SET_SECCOMP, *arguments) == 0)


def _instructions(architecture: str, pid: int, role: Role) -> Iterator[tuple[int, int, int, int]]:
    """Yield the filter's instructions: code, jumps if true and if false, operand."""
    refuse, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    load_argument = (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET)  # its lower half: both architectures are little-endian

    def number(numbers: _Numbers) -> int:
        return numbers.x86_64 if architecture == "x86_64" else numbers.aarch64

    yield (_LOAD, 0, 0, _ARCHITECTURE_OFFSET)
    yield (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[architecture])
    yield refuse  # calls of another architecture, which has other numbers
    yield (_LOAD, 0, 0, _NUMBER_OFFSET)
    if architecture == "x86_64":
        yield (_JUMP_AT_LEAST, 0, 1, _X32_BIT)
        yield refuse
    for name, numbers in _REFUSED.items():
        if number(numbers) >= 0 and name not in _KEPT.get(role, ()):
            yield (_JUMP_EQUAL, 0, 1, number(numbers))
            yield refuse
    yield (_JUMP_EQUAL, 0, 1, number(_CLONE3))
    yield (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)  # its flags are in memory; the C library then uses clone
    yield (_JUMP_EQUAL, 0, 5, number(_CLONE))
    yield load_argument
    yield (_JUMP_ANY_BIT, 2, 0, _CLONE_NAMESPACES)
    yield (_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD)
    yield allow
    yield refuse
    allowed = {**dict.fromkeys(_OF_ITSELF.values(), (pid,)), **dict.fromkeys(_OF_THE_CALLER.values(), (0, pid))}
    for numbers, values in (*allowed.items(), (_SOCKET, tuple(sorted(SOCKET_FAMILIES[role])))):
        yield (_JUMP_EQUAL, 0, len(values) + 3, number(numbers))
        yield load_argument
        for index, value in enumerate(values):
            yield (_JUMP_EQUAL, len(values) - index, 0, value)
        yield refuse
        yield allow
    yield allow
