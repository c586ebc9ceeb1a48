"""proxy.runtime.process.seccomp: the filter's instructions, executed as the kernel does it, and in the kernel."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from proto.roles import Role
from proxy.runtime.process import seccomp

PID = 4711
ALLOWED, REFUSED, NOT_THERE = "allowed", errno.EPERM, errno.ENOSYS
THREAD = 0x003D0F00
"""The flags that the C library gives clone(2) for a thread."""

FORK = 0x01200011
NEW_USER = 0x10000000


def outcome(architecture: str, number: int, *arguments: int, audit: int | None = None, role: Role = Role.AUTH) -> Any:
    """What the filter says of a system call."""
    words = {0: number, 4: seccomp._ARCHITECTURES[architecture] if audit is None else audit}
    words |= {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate(arguments)}
    program = list(seccomp._instructions(architecture, PID, role))
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        if code == seccomp._LOAD:
            loaded, at = words.get(operand, 0), at + 1
        elif code == seccomp._RETURN:
            return ALLOWED if operand == seccomp._ALLOW else operand & 0xFFFF
        else:
            holds = {
                seccomp._JUMP_EQUAL: loaded == operand,
                seccomp._JUMP_AT_LEAST: loaded >= operand,
                seccomp._JUMP_ANY_BIT: bool(loaded & operand),
            }[code]
            at += 1 + (if_true if holds else if_false)


ARCHITECTURES = pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])


def of(architecture: str, numbers: Any) -> int:
    return int(getattr(numbers, architecture))


@ARCHITECTURES
@pytest.mark.parametrize("role", seccomp.SOCKET_FAMILIES)
def test_system_calls_that_no_worker_needs_are_refused_and_all_others_allowed(architecture: str, role: Role) -> None:
    kept = {"add_key", "request_key", "keyctl"} if role is Role.AUTH else set()
    refused = {of(architecture, one) for name, one in seccomp._REFUSED.items() if name not in kept} - {-1}
    depending = {**seccomp._OF_ITSELF, **seccomp._OF_THE_CALLER}
    depends = {of(architecture, one) for one in (*depending.values(), seccomp._CLONE, seccomp._SOCKET)}
    for number in set(range(500)) - depends - {435}:
        assert outcome(architecture, number, role=role) == (REFUSED if number in refused else ALLOWED), number


@ARCHITECTURES
def test_signals_and_limits_are_for_the_process_itself(architecture: str) -> None:
    for name, numbers in {**seccomp._OF_ITSELF, **seccomp._OF_THE_CALLER}.items():
        assert outcome(architecture, of(architecture, numbers), PID) == ALLOWED
        assert outcome(architecture, of(architecture, numbers), 1) == REFUSED
        assert outcome(architecture, of(architecture, numbers), -1) == REFUSED
        for_zero = ALLOWED if name in seccomp._OF_THE_CALLER else REFUSED
        assert outcome(architecture, of(architecture, numbers), 0) == for_zero


@ARCHITECTURES
def test_a_thread_may_begin_and_no_process(architecture: str) -> None:
    clone = of(architecture, seccomp._CLONE)
    assert outcome(architecture, clone, THREAD) == ALLOWED
    assert outcome(architecture, clone, FORK) == REFUSED
    assert outcome(architecture, clone, THREAD | NEW_USER) == REFUSED
    assert outcome(architecture, 435) == NOT_THERE, "the C library then calls clone"


@ARCHITECTURES
@pytest.mark.parametrize("role", seccomp.SOCKET_FAMILIES)
def test_sockets_are_of_the_families_that_the_role_uses(architecture: str, role: Role) -> None:
    call = of(architecture, seccomp._SOCKET)
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 40):
        expected = ALLOWED if family in seccomp.SOCKET_FAMILIES[role] else REFUSED
        assert outcome(architecture, call, family, role=role) == expected


def test_calls_of_another_architecture_are_refused() -> None:
    """Security: the same number is another call there."""
    assert outcome("x86_64", 0, audit=0x40000003) == REFUSED
    assert outcome("x86_64", 0x40000000) == REFUSED, "x32"


_TRY = """
import json, os, socket, subprocess, sys, threading
from proto.roles import Role
from proxy.runtime.process.hardening import harden_process
from proxy.runtime.process.seccomp import refuse_system_calls
harden_process()
assert refuse_system_calls(Role[sys.argv[1]])
def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0
def thread():
    one = threading.Thread(target=lambda: None)
    one.start()
    one.join()
print(json.dumps({
    "thread": outcome(thread),
    "fork": outcome(os.fork),
    "program": outcome(lambda: subprocess.run(["true"])),
    "signal": outcome(lambda: os.kill(os.getppid(), 0)),
    "itself": outcome(lambda: os.kill(os.getpid(), 0)),
    "inet": outcome(lambda: socket.socket(socket.AF_INET).close()),
    "netlink": outcome(lambda: socket.socket(socket.AF_NETLINK).close()),
    "names": outcome(lambda: socket.getaddrinfo("localhost", 80)),
}))
"""


@pytest.mark.parametrize(("role", "inet"), [("AUTH", 0), ("ADMIN", errno.EPERM)])
def test_the_kernel_takes_the_filter(role: str, inet: int) -> None:
    """Security."""
    done = subprocess.run([sys.executable, "-c", _TRY, role], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        **dict.fromkeys(["thread", "itself"], 0),
        **dict.fromkeys(["fork", "program", "signal", "netlink"], errno.EPERM),
        "inet": inet,
        "names": 0,
    }


def test_without_a_table_for_the_architecture_there_is_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")  # type: ignore[attr-defined]
    assert not seccomp.is_available()
    assert not seccomp.refuse_system_calls(Role.AUTH)


def test_a_kernel_that_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        @staticmethod
        def prctl(*_arguments: Any) -> int:
            return -1

    monkeypatch.setattr(seccomp, "_libc", Kernel)
    assert not seccomp.is_available()
    assert not seccomp.refuse_system_calls(Role.AUTH)
