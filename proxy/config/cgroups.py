"""Limits of this process's cgroups: CPUs and memory, as a container's runtime has set them.

Both versions are read, and machines that have both (hybrid: version 2 without controllers beside version 1). A limit
may stand at the process's own cgroup or at any one above it (Kubernetes sets some at the pod), so all of them up to the
mount are looked at, and the smallest counts. What cannot be read or understood limits nothing: it is no worse than
having no cgroups.
"""

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import PurePosixPath
from typing import NamedTuple

UNLIMITED_BYTES_MIN = 1 << 62
"""Version 1 writes no limit as the largest number of whole pages in 63 bits."""

_DIGITS_MAX = 20
_OCTAL = re.compile(r"\\([0-7]{3})")
_PERIOD_US = 100_000
"""The kernel's default where cpu.max names no period."""

Read = Callable[[str], str]
"""Returns a file's text, or "" where it cannot be read."""


class ContainerLimits(NamedTuple):
    """CPUs and bytes of memory that a container may use; None: no limit."""

    cpus: Fraction | None = None
    memory_bytes: int | None = None


class Mount(NamedTuple):
    """One hierarchy of cgroups, of which the part below ``root`` is seen at ``point``. No controllers: version 2."""

    root: str
    point: str
    controllers: frozenset[str] = frozenset()


def container_limits(read: Read | None = None) -> ContainerLimits:
    """Find out the limits of this process's cgroups. ``read``: another machine's files, in tests."""
    read = read or read_file
    mounts = parse_mounts(read("/proc/self/mountinfo"))
    own = parse_own_cgroups(read("/proc/self/cgroup"))
    cpus: list[Fraction | None] = []
    memory: list[int | None] = []
    for mount in mounts:
        path = own.get(mount.controllers)
        if path is None:
            continue
        for folder in _folders(mount, path):
            if not mount.controllers:
                cpus.append(parse_cpu_max(read(f"{folder}/cpu.max")))
                memory.append(parse_bytes(read(f"{folder}/memory.max")))
            if "cpu" in mount.controllers:
                quota = read(f"{folder}/cpu.cfs_quota_us").strip() or "max"
                cpus.append(parse_cpu_max(f"{quota} {read(f'{folder}/cpu.cfs_period_us')}"))
            if "memory" in mount.controllers:
                memory.append(parse_bytes(read(f"{folder}/memory.limit_in_bytes")))
    return ContainerLimits(
        min((one for one in cpus if one is not None), default=None),
        min((one for one in memory if one is not None), default=None),
    )


def read_file(path: str) -> str:
    """Return a small file's text; "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 -- the kernel's names are text
            return file.read(1 << 20)
    except OSError:
        return ""


def usable_cpus(affinity: int, limits: ContainerLimits) -> int:
    """Return how many CPUs may be used: the affinity, at most the quota rounded up, at least one."""
    quota = affinity if limits.cpus is None else math.ceil(limits.cpus)
    return max(1, min(affinity, quota))


# ---- texts


def parse_mounts(text: str) -> list[Mount]:
    """Find the cgroup hierarchies in /proc/PID/mountinfo (proc_pid_mountinfo(5))."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(source) < 3:  # noqa: PLR2004 -- as the manual has it
            continue
        root, point = (_unescaped(field) for field in fields[3:5])
        if source[0] == "cgroup2":
            mounts.append(Mount(root, point))
        elif source[0] == "cgroup":
            controllers = frozenset(source[2].split(",")) & {"cpu", "memory"}
            if controllers:
                mounts.append(Mount(root, point, controllers))
    return mounts


def parse_own_cgroups(text: str) -> dict[frozenset[str], str]:
    """Find the process's cgroup in each hierarchy in /proc/PID/cgroup, by the controllers that matter here."""
    own: dict[frozenset[str], str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if not colon or not path.startswith("/"):
            continue
        controllers = frozenset(names.split(",")) & {"cpu", "memory"}
        if controllers or (number == "0" and not names):
            own[controllers] = path
    return own


def parse_cpu_max(text: str) -> Fraction | None:
    """Read cpu.max (``QUOTA PERIOD`` in µs, QUOTA may be ``max``) as a number of CPUs."""
    fields = text.split()
    quota = _number(fields[0]) if fields else None
    period = _number(fields[1]) if len(fields) > 1 else _PERIOD_US
    return Fraction(quota, period) if quota and period else None


def parse_bytes(text: str) -> int | None:
    """Read memory.max or memory.limit_in_bytes."""
    number = _number(text.strip())
    return number if number and number < UNLIMITED_BYTES_MIN else None


def _number(text: str) -> int | None:
    """Read a number without a sign; ``max`` and -1 are none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def _folders(mount: Mount, path: str) -> Iterator[str]:
    """Yield the folders of a process's cgroup and of those above it, as far as the mount shows them.

    A path outside the mount (a namespace shows it with ``..``, a bind mount shows less than all) leaves the mount's own
    folder: what is limited for all below it is limited for this process.
    """
    own, root = PurePosixPath(path), PurePosixPath(mount.root)
    below = PurePosixPath()
    if ".." not in own.parts and own.is_relative_to(root):
        below = own.relative_to(root)
    point = PurePosixPath(mount.point)
    for one in (below, *below.parents):
        yield str(point / one)
