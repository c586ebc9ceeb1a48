"""proxy.supervisor.processes.children: adopted children are reaped, the supervisor's own are left to the one who waits
for them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from proxy.supervisor.processes.children import REAP_INTERVAL_S, ChildReaper


class Kernel:
    """The children that have ended, in the kernel's order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: list[int] = []
        self.reaped: list[int] = []
        self.any_children = True
        monkeypatch.setattr(os, "waitid", self._waitid)
        monkeypatch.setattr(os, "waitpid", self._waitpid)

    def _waitid(self, kind: int, _pid: int, options: int) -> Any:
        assert (kind, options) == (os.P_ALL, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not self.any_children:
            raise ChildProcessError(10, "No child processes")
        return SimpleNamespace(si_pid=self.ended[0]) if self.ended else None

    def _waitpid(self, pid: int, options: int) -> tuple[int, int]:
        assert options == 0
        self.ended.remove(pid)
        self.reaped.append(pid)
        return pid, 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


class Own:
    def __init__(self, pid: int, returncode: int | None = None) -> None:
        self.pid = pid
        self.returncode = returncode


def test_adopted_ones_are_reaped(kernel: Kernel) -> None:
    kernel.ended = [7, 8]
    ChildReaper().reap_ended()
    assert kernel.reaped == [7, 8]


def test_nobody_has_ended(kernel: Kernel) -> None:
    ChildReaper().reap_ended()
    kernel.any_children = False
    ChildReaper().reap_ended()
    assert kernel.reaped == []


def test_own_ones_are_left_to_who_waits_for_them(kernel: Kernel) -> None:
    """An exit code can be fetched once."""
    children = ChildReaper()
    children.register_own(Own(7))
    kernel.ended = [7, 8]
    children.reap_ended()
    assert kernel.reaped == []
    kernel.ended = [8]
    children.reap_ended()
    assert kernel.reaped == [8]


def test_a_number_that_was_an_own_ones(kernel: Kernel) -> None:
    children = ChildReaper()
    own = Own(7)
    children.register_own(own)
    own.returncode = 0
    kernel.ended = [7]
    children.reap_ended()
    assert kernel.reaped == [7]


def test_nobody_is_reaped_while_one_starts(kernel: Kernel) -> None:
    """Its number is not known yet."""
    children = ChildReaper()
    kernel.ended = [7]
    with children.pause_while_spawning():
        children.reap_ended()
    assert kernel.reaped == []
    children.register_own(Own(7))
    children.reap_ended()
    assert kernel.reaped == []


def test_those_that_were_waited_for_are_forgotten() -> None:
    children = ChildReaper()
    for pid in range(100):
        children.register_own(Own(pid, returncode=0))
    assert len(children._own) == 1


async def test_it_looks_again_and_again(kernel: Kernel, autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(2.5 * REAP_INTERVAL_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ChildReaper().reap_adopted)
            for pid in (7, 8):
                kernel.ended.append(pid)
                await trio.sleep(1.1 * REAP_INTERVAL_S)
    assert kernel.reaped == [7, 8]
