"""What a process and all its descendants use: CPU time, memory."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_PARENT, _CHILDREN_USER, _CHILDREN_SYSTEM = 1, 13, 14  # of /proc/PID/stat, counted after the command's name
_CLOCK_SCHEDULER = 2
_ESTABLISHED = "01"  # of /proc/net/tcp


def cpu_seconds(root: int) -> float:
    """CPU time of the tree, of those in it that have ended too."""
    return sum(_own_cpu_seconds(pid) + _ended_children_cpu_seconds(fields) for pid, fields in _tree(root))


def pss_bytes(root: int) -> int:
    """Memory of the tree; what processes share counts once."""
    total = 0
    for pid, _ in _tree(root):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
            found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


def established(port: int) -> int:
    """Connections that a server on 127.0.0.1 has now."""
    server = f"0100007F:{port:04X}"
    lines = (_PROC / "net" / "tcp").read_text().splitlines()[1:]
    return sum(line.split()[1] == server and line.split()[3] == _ESTABLISHED for line in lines)


def _own_cpu_seconds(pid: int) -> float:
    # The process' CPU clock (clock_getcpuclockid(3) makes its number so) counts nanoseconds, /proc only ticks of 10 ms.
    try:
        return time.clock_gettime((~pid << 3) | _CLOCK_SCHEDULER)
    except OSError:  # it has ended since; its parent counts it from now on
        return 0.0


def _ended_children_cpu_seconds(fields: list[str]) -> float:
    return (int(fields[_CHILDREN_USER]) + int(fields[_CHILDREN_SYSTEM])) / _TICKS_PER_S


def _tree(root: int) -> Iterator[tuple[int, list[str]]]:
    """Each process of the tree with what its `stat` says."""
    fields = {int(entry.name): _stat(entry) for entry in _PROC.iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, values in fields.items():
        if values:
            children.setdefault(int(values[_PARENT]), []).append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        if fields.get(pid):
            yield pid, fields[pid]


def _stat(entry: Path) -> list[str]:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
