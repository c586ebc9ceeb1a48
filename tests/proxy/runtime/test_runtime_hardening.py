"""proxy.runtime.hardening: what is asked of the kernel. Whether that helps: tests/e2e/test_inside.py."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

import pytest

from proxy.runtime import hardening
from proxy.runtime.hardening import adopt_orphans, confine_process, harden_process


class Kernel:
    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.error = 0
        self.landlock = -1
        self.rulesets: list[tuple[int, ...]] = []
        self.restricted = 0

    def syscall(self, number: int, *arguments: Any) -> int:
        if number == 446:
            self.restricted += 1
            return 0
        if arguments[0] is None:
            return self.landlock
        ruleset = arguments[0]._obj
        self.rulesets.append((ruleset.handled_fs, ruleset.handled_net, ruleset.scoped, arguments[1].value))
        ctypes.set_errno(self.error)
        return -1 if self.error else os.open("/dev/null", os.O_RDONLY)

    def prctl(self, option: int, *arguments: ctypes.c_ulong) -> int:
        self.asked.append((option, *(argument.value for argument in arguments)))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(hardening, "_libc", kernel)
    return kernel


def test_a_process_is_hardened(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security."""
    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *what: limits.append(what))
    harden_process()
    assert limits == [(resource.RLIMIT_CORE, (0, 0))]
    assert kernel.asked == [(4, 0, 0, 0, 0), (38, 1, 0, 0, 0)], "PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS"


@pytest.mark.parametrize(
    ("version", "size", "scoped"), [(1, 8, 0), (5, 8, 0), (6, 24, 2), (7, 24, 2)], ids=["1", "5", "6", "7"]
)
def test_a_worker_is_confined(kernel: Kernel, version: int, size: int, scoped: int) -> None:
    """Security: with as much of Landlock as the kernel knows."""
    kernel.landlock = version
    assert confine_process()
    assert kernel.rulesets == [(1 << 11, 0, scoped, size)]
    assert kernel.restricted == 1


def test_a_kernel_without_landlock(kernel: Kernel) -> None:
    assert not confine_process()
    assert kernel.restricted == 0


def test_a_ruleset_that_is_refused_is_an_error(kernel: Kernel) -> None:
    kernel.landlock, kernel.error = 7, 22
    with pytest.raises(OSError, match="landlock: Invalid argument"):
        confine_process()


def test_orphans_are_adopted(kernel: Kernel) -> None:
    adopt_orphans()
    assert kernel.asked == [(36, 1, 0, 0, 0)], "PR_SET_CHILD_SUBREAPER"


def test_a_kernel_that_refuses_is_an_error(kernel: Kernel) -> None:
    kernel.error = 22
    with pytest.raises(OSError, match=r"prctl\(36, 1\): Invalid argument"):
        adopt_orphans()
