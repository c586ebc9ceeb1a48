"""proxy.runtime.hardening: what is asked of the kernel. Whether that helps: tests/e2e/test_inside.py."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

import pytest

from proxy.runtime import hardening
from proxy.runtime.hardening import adopt_orphans, harden_process


class Kernel:
    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.error = 0

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


def test_orphans_are_adopted(kernel: Kernel) -> None:
    adopt_orphans()
    assert kernel.asked == [(36, 1, 0, 0, 0)], "PR_SET_CHILD_SUBREAPER"


def test_a_kernel_that_refuses_is_an_error(kernel: Kernel) -> None:
    kernel.error = 22
    with pytest.raises(OSError, match=r"prctl\(36, 1\): Invalid argument"):
        adopt_orphans()
