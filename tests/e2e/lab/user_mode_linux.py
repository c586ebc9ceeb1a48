"""A machine of its own for a test: User-Mode Linux, a kernel that runs as an ordinary process of this user.

Its root is this machine's file system, read-only; it has no network but the loopback interface that a guest program
brings up, and one CPU. A guest program is a module with a `main` that calls `serve_as_init`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from .cluster import ROOT

KERNEL = "linux.uml"
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GUEST_TMP = "/dev/shm"
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("cgroup2", "/sys/fs/cgroup"), ("tmpfs", GUEST_TMP))
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = struct.Struct("16sh22x")


def run_guest(module: str, *, memory_mib: int, timeout_s: float) -> str:
    """Boot, run a module as the first process, and return the console's text once the guest is off."""
    kernel = shutil.which(KERNEL)
    assert kernel is not None, KERNEL
    # Not pytest's tmp_path: the kernel's socket is in there, whose path is limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="uml-")
    variables = {"PATH": GUEST_PATH, "PYTHONPATH": f"{ROOT}:{ROOT}/deploy", "TMPDIR": GUEST_TMP, "PYTHONUNBUFFERED": "1"}
    command = [
        kernel,
        f"mem={memory_mib}M",
        f"uml_dir={directory}",
        *("root=/dev/root", "rootfstype=hostfs", "ro"),
        *("con=null", "con0=null,fd:1", "ssl=null", "loglevel=1", "panic=-1"),
        *("init=/usr/bin/env", "--"),
        *(f"{name}={value}" for name, value in variables.items()),
        *(sys.executable, "-m", module),
    ]
    try:
        # The guest's memory is a file in TMPDIR: containers have only 64 MiB in /dev/shm, the kernel's own choice.
        environment = {**os.environ, "TMPDIR": directory}
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return result.stdout.decode(errors="replace")


def serve_as_init(work: Callable[[], None]) -> None:
    """In the guest: prepare the machine, do the work, switch off. An error's text is on the console."""
    try:
        Path("/dev/shm").mkdir(exist_ok=True)  # noqa: S108 -- the guest's own
        for kind, place in MOUNTS:
            subprocess.run(["mount", "-t", kind, kind, place], check=True)
        _bring_loopback_up()
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        Path("/proc/sysrq-trigger").write_text("o")
        signal.pause()  # the kernel would panic at the end of its first process


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
