"""The supervisor's children: those that it started, and those that it adopts when their parents end.

Its own are waited for by whoever started them. Adopted ones are nobody's: they are reaped here, or their numbers would
run out. The two must not be mixed up: an exit code can be fetched once.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import trio

LOOK_INTERVAL_S = 1.0


class AwaitedProcess(Protocol):
    """A child that somebody waits for."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, once it is known."""
        ...


class ChildReaper:
    """Which of this process's children are its own."""

    def __init__(self) -> None:
        self._own: dict[int, AwaitedProcess] = {}
        self._spawning = 0

    @contextlib.contextmanager
    def pause_while_spawning(self) -> Iterator[None]:
        """While it lasts, a child may be there whose number is not known yet, and nobody is reaped."""
        self._spawning += 1
        try:
            yield
        finally:
            self._spawning -= 1

    def register_own(self, process: AwaitedProcess) -> None:
        """Leave a child's exit code to whoever waits for it."""
        self._own = {pid: one for pid, one in self._own.items() if one.returncode is None}
        self._own[process.pid] = process

    async def reap_adopted(self) -> None:
        """Reap adopted children that have ended, until cancelled."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            self.reap_ended()

    def reap_ended(self) -> None:
        """Reap the adopted children that have ended, as far as none of our own stands before them."""
        while not self._spawning and (pid := _ended_child()):
            process = self._own.get(pid)
            if process is None:
                os.waitpid(pid, 0)  # it has ended: this does not wait
            elif process.returncode is None:
                return  # whoever waits for it comes first
            else:
                del self._own[pid]  # that one is known already: the number is another's now


def _ended_child() -> int:
    """A child that has ended, whose exit code is not fetched by this; 0 where there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found is not None else 0


child_reaper = ChildReaper()
"""This process's. The kernel knows only one set of children for each process, too."""
