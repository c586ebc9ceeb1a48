"""Reaping of child processes that the supervisor adopts as a subreaper, beside the workers that it started itself.

The code that spawned a worker waits for it. No code waits for an adopted child: it is reaped here, or the process ids
would run out. The two kinds must not be mixed up, since the kernel gives out an exit code only once.

None of either kind outlives the supervisor's own end: what a captured worker has left would hold its clients' sockets.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import trio

from proxy.common.logs import get_logger

REAP_INTERVAL_S = 1.0
END_TIMEOUT_S = 5.0
_END_POLL_S = 0.01


class AwaitedProcess(Protocol):
    """A child process that its spawner waits for."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code; None until the spawner has fetched it."""
        ...


class ChildReaper:
    """Registry of this process's own children, and reaper of all others."""

    def __init__(self) -> None:
        self._own: dict[int, AwaitedProcess] = {}
        self._spawning = 0

    @contextlib.contextmanager
    def pause_while_spawning(self) -> Iterator[None]:
        """Suspend reaping: a child may exist whose process id is not registered yet."""
        self._spawning += 1
        try:
            yield
        finally:
            self._spawning -= 1

    def register_own(self, process: AwaitedProcess) -> None:
        """Register a child whose spawner fetches the exit code."""
        self._own = {pid: one for pid, one in self._own.items() if one.returncode is None}
        self._own[process.pid] = process

    async def reap_adopted(self) -> None:
        """Reap adopted children that have ended, every ``REAP_INTERVAL_S``, until cancelled."""
        while True:
            await trio.sleep(REAP_INTERVAL_S)
            self.reap_ended()

    def reap_ended(self) -> None:
        """Reap adopted children that have ended, up to the first own child whose exit code is not fetched yet.

        The kernel reports the ended children in an order of its own and repeats the first until it is reaped.
        """
        while not self._spawning and (pid := _ended_child()):
            process = self._own.get(pid)
            if process is None:
                os.waitpid(pid, 0)  # it has ended: this does not wait
            elif process.returncode is None:
                return  # its spawner has to fetch the exit code first
            else:
                del self._own[pid]  # its exit code was fetched: the process id is another's now


def _ended_child() -> int:
    """Return the process id of a child that has ended, without fetching its exit code; 0 where there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found is not None else 0


child_reaper = ChildReaper()
"""The reaper of this process; one instance, as the kernel has one set of children for each process."""


def end_descendants() -> None:
    """Kill and reap every process that this one has begun, directly or not, within END_TIMEOUT_S.

    Call it last: no exit code can be fetched afterwards. Descendants of a child that has ended are children of this
    process (``become_subreaper``), so they come in turn. Children from before this program stay, as a shell's
    ``exec pulsar-trio-proxy serve > >(logger)`` has them. They lack the flag that descendants inherit and never lose
    (PR_SET_NO_NEW_PRIVS); where the service's own processes have it, systemd or the container ends all of them anyway.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := [pid for pid in children_of(os.getpid()) if _has_no_new_privileges(pid)]:
        if time.monotonic() >= deadline:
            get_logger().error("processes that a worker has begun cannot be ended", pids=left)
            return
        for pid in left:
            with contextlib.suppress(ChildProcessError, PermissionError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_END_POLL_S)


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children, those included that have ended and were not reaped."""
    parent_line = f"\nPPid:\t{pid}\n"
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and parent_line in _status(path)]


def _has_no_new_privileges(pid: int) -> bool:
    return "\nNoNewPrivs:\t1\n" in _status(Path(f"/proc/{pid}"))


def _status(process: Path) -> str:
    """Return /proc/<pid>/status; "" for a process that has ended and was reaped."""
    try:
        return (process / "status").read_text(errors="replace")
    except OSError:
        return ""
