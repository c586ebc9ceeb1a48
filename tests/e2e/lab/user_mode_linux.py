"""A machine of its own for a test: User-Mode Linux, a kernel that runs as an ordinary process of this user.

Its root is this machine's file system, read-only. It has one CPU, cgroups of version 2, and no network but the loopback
interface; no Landlock. A guest program is a module that calls `be_first_process`.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from local.machine import UML_KERNEL
from local.process import OwnedProcess

from .cluster import ROOT

GUEST_TMP = "/dev/shm"
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("cgroup2", "/sys/fs/cgroup"), ("tmpfs", GUEST_TMP))
STOP_TIMEOUT_S = 60.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = struct.Struct("16sh22x")
_FINIT_MODULE = 313  # User-Mode Linux has no other architecture than x86
MODULES = Path("/usr/lib/uml/modules")


def run_guest(
    module: str,
    *,
    imports: Sequence[str],
    memory_mib: int,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Boot, run a module as the first process, and return the console's text once the guest is off.

    ``imports``: what the guest's processes import. It is compiled here, where that takes a tenth of the time.
    ``variables``: more of the guest's environment, without spaces.
    """
    # Not pytest's tmp_path: the kernel's socket is in there, whose path is limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="uml-")
    python = {"PYTHONPATH": f"{ROOT}:{ROOT}/deploy:{ROOT}/tests", "PYTHONPYCACHEPREFIX": f"{directory}/compiled"}
    guest = {"PATH": GUEST_PATH, "TMPDIR": GUEST_TMP, "PYTHONUNBUFFERED": "1", **python, **(variables or {})}
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


def be_first_process(work: Callable[[], None], modules: Sequence[str] = ()) -> None:
    """In the guest: prepare the machine, load modules of its kernel, do the work, switch off.

    An error's text is on the console.
    """
    try:
        Path(GUEST_TMP).mkdir(exist_ok=True)
        for kind, place in MOUNTS:
            subprocess.run(["mount", "-t", kind, kind, place], check=True)
        _bring_loopback_up()
        _load_modules(modules)
        work()
    except Exception:  # noqa: BLE001 -- no matter which, the guest must switch off
        traceback.print_exc()
    finally:
        Path("/proc/sysrq-trigger").write_text("o")
        signal.pause()  # the kernel would panic at the end of its first process


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def _load_modules(names: Sequence[str]) -> None:
    """Load modules, and before them those that they need. (There may be no modprobe.)"""
    folder = MODULES / os.uname().release
    lines = (line.partition(":") for line in (folder / "modules.dep").read_text().splitlines())
    needed = {path: others.split()[::-1] for path, _, others in lines}
    paths = {Path(path).stem: path for path in needed}
    loaded: set[str] = set()
    for path in (part for name in names for part in (*needed[paths[name]], paths[name])):
        if path not in loaded:
            loaded.add(path)
            _load_module(folder / path)


def _load_module(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        if libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0):
            raise OSError(ctypes.get_errno(), f"the kernel does not load {path}")
