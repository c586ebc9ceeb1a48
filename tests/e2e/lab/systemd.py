"""The cluster as a unit of a real systemd: the first process of namespaces of its own, with cgroups of version 2.

The network and /tmp are this machine's; /run, cgroups and process ids are its own. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from local.process import OwnedProcess

from .cluster import HOST, ROOT, ProxyCluster, Tables
from .processes import children
from .waiting import eventually

SYSTEMD = Path("/lib/systemd/systemd")
UNITS = ROOT / "deploy" / "systemd"
UNIT = "pulsar-trio-proxy.service"
TOOLS = ("unshare", "nsenter", "systemctl", "mount")

_OUTER = """
mount --make-rprivate /
umount -R /sys/fs/cgroup 2>/dev/null
mount -t cgroup2 none /sys/fs/cgroup || exit 1
mkdir -p "/sys/fs/cgroup/$1" && echo $$ > "/sys/fs/cgroup/$1/cgroup.procs" || exit 1
exec unshare --cgroup sh "$2"
"""
_INNER = """
umount /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup || exit 1
mount -t tmpfs none /run && mkdir -p /run/systemd/system && cp -r {units}/. /run/systemd/system/ || exit 1
export container=test
exec {systemd} --system --unit={first} --log-target=console --log-level=info --show-status=0
"""

_REMOVAL = """
mount -t cgroup2 none /mnt || exit 1
for _ in 1 2 3 4 5 6 7 8 9 10; do
    find "/mnt/$1" -depth -type d -exec rmdir {} + 2>/dev/null
    test -e "/mnt/$1" || exit 0
    sleep 1
done
exit 1
"""
"""As the shell in a mount namespace of its own runs it: a cgroup is busy until its last process is reaped."""


def obstacle() -> str:
    """What keeps systemd from running here; "" for nothing."""
    if os.geteuid() or not SYSTEMD.exists() or not all(map(shutil.which, TOOLS)):
        return "needs root, systemd, util-linux"
    probe = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        "mount -t cgroup2 none /sys/fs/cgroup",
    ]
    return "" if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else "cannot mount cgroup2"


class SystemdCluster(ProxyCluster):
    """The cluster as systemd runs it, by the unit file of deploy/systemd with a drop-in of the test's.

    ``service``: more lines of that drop-in.
    """

    def __init__(self, tables: Tables, *, service: Sequence[str] = ()) -> None:
        super().__init__(tables)
        self._units = self.directory / "units"
        shutil.copytree(UNITS, self._units)
        command = f"{sys.executable} -m proxy serve --config {self.config_path}"
        lines = [
            *("User=root", "PrivateTmp=no", f"ReadWritePaths={self.directory}", f"WorkingDirectory={ROOT}"),
            *("ExecStart=", f"ExecStart={command}", f"StandardOutput=append:{self.log_path}"),
            *("StandardError=inherit", "RestartSec=0", "ProtectHome=no", *service),
        ]
        self._add(UNIT, ["[Unit]", "DefaultDependencies=no", "[Service]", *lines])
        self._first = UNIT
        self._machine: OwnedProcess | None = None
        self._group = f"systemd-test-{os.getpid()}-{self.port}"

    def listen_by_systemd(self) -> None:
        """Have systemd bind both ports, and start the service for the first client."""
        ports = [f"ListenStream={HOST}:{port}" for port in (self.port, self.admin_port)]
        self._add("pulsar-trio-proxy.socket", ["[Unit]", "DefaultDependencies=no", "[Socket]", "ListenStream=", *ports])
        self._first = "pulsar-trio-proxy.socket"

    def _add(self, unit: str, lines: Sequence[str]) -> None:
        folder = self._units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text("\n".join([*lines, ""]))

    def start(self, *, ready: bool = True) -> None:
        """Boot, and return when the unit is active."""
        inner = self.directory / "inner.sh"
        inner.write_text(_INNER.format(units=self._units, systemd=SYSTEMD, first=self._first))
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*namespaces, "sh", "-c", _OUTER, "sh", self._group, str(inner)]
        self._machine = OwnedProcess(command, log=self.directory / "systemd.log")
        if ready:
            eventually(self.is_active, what=f"the unit is active; {self.log_tail()}", within_s=60)

    def is_active(self) -> bool:
        """Whether systemd takes the service for started."""
        return self.show("ActiveState") == "active"

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """What systemctl says inside."""
        assert self._machine is not None
        first = children(self._machine.pid)
        if not first:
            return ""
        command = ["nsenter", "--target", str(first[0]), "--mount", "--pid", "--cgroup", "systemctl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert not check or not done.returncode, done.stderr
        return done.stdout.strip()

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.systemctl("show", UNIT, f"--property={name}", "--value", check=False)

    @property
    def pid(self) -> int:
        """The supervisor's process id, as it is outside."""
        assert self._machine is not None
        (first,) = children(self._machine.pid)
        inside = self.show("MainPID")
        return next(
            pid for pid in children(first) if f"\nNSpid:\t{pid}\t{inside}\n" in Path(f"/proc/{pid}/status").read_text()
        )

    def kill_supervisor(self, *, is_awaited: bool = True) -> None:
        """SIGKILL, and wait until systemd has another, which clients are served by if ``is_awaited``."""
        before = self.show("MainPID")
        self.systemctl("kill", "--kill-whom=main", "--signal=KILL", UNIT)

        def is_there() -> bool:
            return self.show("MainPID") not in {before, "0"} and (not is_awaited or self.is_active())

        eventually(is_there, what="another", within_s=60)

    def stop(self) -> int | None:
        """Stop the unit as an operator does, then the machine."""
        if self._machine is None:
            return None
        self.systemctl("stop", "pulsar-trio-proxy.socket", UNIT, check=False)
        (first,) = children(self._machine.pid) or [0]
        if first:
            os.kill(first, signal.SIGKILL)
        code, self._machine = self._machine.stop(15.0), None
        removal = ["unshare", "--mount", "sh", "-c", _REMOVAL, "sh", self._group]
        subprocess.run(removal, check=True, timeout=30)
        return code
