"""A machine of its own for a test: User-Mode Linux, a kernel that runs as an ordinary process of this user.

Its root is this machine's file system, read-only. It has one CPU, cgroups of version 2, and no network but the loopback
interface. A guest program is a module that calls `be_first_process`.
"""

from __future__ import annotations

import ctypes
import errno
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
from collections.abc import Callable, Sequence
from pathlib import Path

from local.machine import UML_KERNEL
from local.process import OwnedProcess

from .cluster import ROOT

GUEST_TMP = "/dev/shm"
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("cgroup2", "/sys/fs/cgroup"), ("tmpfs", GUEST_TMP))
STOP_TIMEOUT_S = 60.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
MODULES = Path("/usr/lib/uml/modules")
_FINIT_MODULE = 313  # of x86_64, the one architecture of this kernel
_libc = ctypes.CDLL(None, use_errno=True)
_IFREQ = struct.Struct("16sh22x")


def run_guest(module: str, *, imports: Sequence[str], memory_mib: int, timeout_s: float) -> str:
    """Boot, run a module as the first process, and return the console's text once the guest is off.

    ``imports``: what the guest's processes import. It is compiled here, where that takes a tenth of the time.
    """
    # Not pytest's tmp_path: the kernel's socket is in there, whose path is limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="uml-")
    python = {"PYTHONPATH": f"{ROOT}:{ROOT}/deploy", "PYTHONPYCACHEPREFIX": f"{directory}/compiled"}
    guest = {"PATH": GUEST_PATH, "TMPDIR": GUEST_TMP, "PYTHONUNBUFFERED": "1", **python}
    command = [
        *(UML_KERNEL, f"mem={memory_mib}M", f"uml_dir={directory}", "root=/dev/root", "rootfstype=hostfs", "ro"),
        *("con=null", "con0=null,fd:1", "ssl=null", "loglevel=1", "init=/usr/bin/env", "--"),
        *(f"{name}={value}" for name, value in guest.items()),
        *(sys.executable, "-m", module),
    ]
    try:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(
            [sys.executable, "-c", f"import {', '.join((module, *imports))}"], env={**own, **python}, check=True
        )
        # The guest's memory is a file in TMPDIR: the kernel's own choice, /dev/shm, often has 64 MiB in containers.
        console = Path(directory, "console.log")
        kernel = OwnedProcess(command, log=console, env={**os.environ, "TMPDIR": directory})
        try:
            kernel.wait(timeout_s)
        finally:
            kernel.stop(STOP_TIMEOUT_S)  # by SIGTERM, at which it ends its helpers, too
        return console.read_text(errors="replace")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def be_first_process(work: Callable[[], None]) -> None:
    """In the guest: prepare the machine, do the work, switch off. An error's text is on the console."""
    try:
        Path(GUEST_TMP).mkdir(exist_ok=True)
        for kind, place in MOUNTS:
            subprocess.run(["mount", "-t", kind, kind, place], check=True)
        _bring_loopback_up()
        work()
    except Exception:  # noqa: BLE001 -- no matter which, the guest must switch off
        traceback.print_exc()
    finally:
        Path("/proc/sysrq-trigger").write_text("o")
        signal.pause()  # the kernel would panic at the end of its first process


def load_modules(*names: str) -> None:
    """In the guest: load modules of its kernel, and what they need. Raises OSError."""
    folder = MODULES / os.uname().release
    lines = [line.split(":") for line in (folder / "modules.dep").read_text().splitlines()]
    needed_by = {path: needed.split() for path, needed in lines}
    paths = {path.rpartition("/")[2].partition(".")[0].replace("-", "_"): path for path in needed_by}
    for name in names:
        if name in paths:  # otherwise it is built in
            for path in (*reversed(needed_by[paths[name]]), paths[name]):
                _load_module(folder / path)


def _load_module(path: Path) -> None:
    with path.open("rb") as file:
        if _libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0) and ctypes.get_errno() != errno.EEXIST:
            raise OSError(ctypes.get_errno(), f"the module {path} cannot be loaded")


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
