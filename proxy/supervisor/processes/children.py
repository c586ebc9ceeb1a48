"""Reaping of child processes that the supervisor adopts as a subreaper, beside the workers that it started itself.

The code that spawned a worker waits for it. No code waits for an adopted child: it is reaped here, or the process ids
would run out. The two kinds must not be mixed up, since the kernel gives out an exit code only once.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import trio

REAP_INTERVAL_S = 1.0


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
