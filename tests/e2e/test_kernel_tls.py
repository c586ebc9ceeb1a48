"""Kernel TLS in a kernel that has it: tests/kernel_tls, in a guest."""

from __future__ import annotations

from .conftest import NEEDS_USER_MODE_LINUX
from .lab.kernel_tls_guest import END
from .lab.user_mode_linux import run_guest

pytestmark = NEEDS_USER_MODE_LINUX

GUEST = "tests.e2e.lab.kernel_tls_guest"
GUEST_MEMORY_MIB = 512
PATIENCE_S = 600.0
IMPORTED = (
    "hypothesis",
    "proxy.runtime.network.kernel_tls",
    "proxy.runtime.network.tls",
    "pytest_trio.plugin",
    "trustme",
)


def test_in_a_kernel_that_has_it() -> None:
    console = run_guest(GUEST, imports=IMPORTED, memory_mib=GUEST_MEMORY_MIB, timeout_s=PATIENCE_S)
    print(console)
    assert f"{END} 0" in console.splitlines()
    assert " passed" in console
