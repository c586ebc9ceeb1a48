"""What the kernel tells of the cluster's processes: who is there, what they have open, how much memory they use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def children(pid: int, words: str = "") -> list[int]:
    """A process's children that live and have these words in their command line, running long or just begun."""
    return [child for child in _pids() if _parent(child) == pid and words in _command_line(child)]


def zombies(pid: int) -> list[int]:
    """A process's children that have ended, and that have not been reaped."""
    return [child for child in _pids() if _stat(child)[:2] == ["Z", str(pid)]]


def _pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    """Its parent's id; 0 where it has gone or has not been reaped yet."""
    state, parent = _stat(pid)[:2] or ("Z", "0")
    return 0 if state == "Z" else int(parent)


def _stat(pid: int) -> list[str]:
    """Its state, its parent, and more; nothing where it has gone."""
    try:
        return (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command_line(pid: int) -> str:
    try:
        return (PROC / f"{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def holds(pid: int, secret: bytes) -> bool:
    """Whether a secret stands anywhere in what a process may write to."""
    with (PROC / f"{pid}/mem").open("rb", buffering=0) as memory:
        for line in (PROC / f"{pid}/maps").read_text().splitlines():
            where, mode = line.split()[:2]
            first, last = (int(part, 16) for part in where.split("-"))
            if mode.startswith("rw"):
                memory.seek(first)
                if secret in memory.read(last - first):
                    return True
    return False


@dataclass(frozen=True)
class Use:
    """What one process uses."""

    descriptors: int
    pipe_ends: int
    memory_kib: int

    @property
    def files(self) -> int:
        """Descriptors that are no pipe's: pipes stay in their pool for the next relays."""
        return self.descriptors - self.pipe_ends

    @classmethod
    def of(cls, pid: int) -> Use:
        """Right now."""
        opened = [_target(path) for path in (PROC / f"{pid}/fd").iterdir()]
        return cls(len(opened), sum(target.startswith("pipe:") for target in opened), memory_kib(pid))


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed in that moment
        return ""


def memory_kib(pid: int) -> int:
    """Proportional set size, without the pages of files: its share of those depends on who else on this machine has
    mapped the same libraries.
    """
    lines = (PROC / f"{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
