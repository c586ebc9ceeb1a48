"""The tests of tests/kernel_tls, in a guest whose kernel has TLS (test_kernel_tls.py)."""

from __future__ import annotations

import os

import pytest

from .cluster import ROOT
from .user_mode_linux import be_first_process

MODULES = ("tls", "gcm", "ctr", "ghash-generic", "chacha20poly1305", "chacha_generic", "poly1305_generic")
"""TLS and its ciphers, which the kernel would have modprobe load."""

FOLDER = "tests/kernel_tls"
IS_INSIDE = "PULSAR_TRIO_PROXY_KERNEL_TLS"
"""Set where the kernel has TLS: only there tests/kernel_tls has tests."""

END = "kernel TLS: pytest ended with"


def main() -> None:
    """Run the tests; the console's last line tells pytest's exit code."""
    os.chdir(ROOT)
    os.environ[IS_INSIDE] = "1"
    code = pytest.main(["--color=no", "-p", "no:cacheprovider", FOLDER])
    print(f"{END} {int(code)}", flush=True)


if __name__ == "__main__":
    be_first_process(main, MODULES)
