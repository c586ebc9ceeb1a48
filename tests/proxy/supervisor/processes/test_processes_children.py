"""proxy.supervisor.processes.children: adopted children are reaped, the supervisor's own are left to the one who waits
for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.supervisor.processes import children as children_module
from proxy.supervisor.processes.children import REAP_INTERVAL_S, ChildReaper, end_descendants


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


def test_without_ended_children_none_is_reaped(kernel: Kernel) -> None:
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


def test_no_child_is_reaped_while_one_starts(kernel: Kernel) -> None:
    """Its number is not known yet."""
    children = ChildReaper()
    kernel.ended = [7]
    with children.pause_while_spawning():
        children.reap_ended()
    assert kernel.reaped == []
    children.register_own(Own(7))
    children.reap_ended()
    assert kernel.reaped == []


def test_own_children_that_were_waited_for_are_forgotten() -> None:
    children = ChildReaper()
    for pid in range(100):
        children.register_own(Own(pid, returncode=0))
    assert len(children._own) == 1


async def test_adopted_children_are_reaped_at_each_interval(
    kernel: Kernel, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.move_on_after(2.5 * REAP_INTERVAL_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ChildReaper().reap_adopted)
            for pid in (7, 8):
                kernel.ended.append(pid)
                await trio.sleep(1.1 * REAP_INTERVAL_S)
    assert kernel.reaped == [7, 8]


# ---- the end


_END = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from proxy.runtime.process.hardening import become_subreaper, harden_process
from proxy.supervisor.processes.children import end_descendants
def running(pid):
    try:
        return "State:\\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
before = subprocess.Popen(["sleep", "60"])
harden_process()
become_subreaper()
reading, writing = os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
        os.write(writing, (str(os.getpid()) + " ").encode())
    time.sleep(60)
told = b""
while told.count(b" ") < 2:
    told += os.read(reading, 100)
left = [int(one) for one in told.split()]
assert len(left) == 2 and all(map(running, left)), left
began = time.monotonic()
end_descendants()
print(json.dumps({
    "left": [running(pid) for pid in left],
    "before": running(before.pid),
    "at once": time.monotonic() - began < 2,
}))
before.kill()
"""


def test_nothing_lives_on_but_what_was_there_before() -> None:
    """Security: a child, its child and its grandchild, in sessions of their own and deaf to SIGTERM."""
    done = subprocess.run([sys.executable, "-c", _END], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "left": [False, False],
        "before": "NoNewPrivs:\t1" not in Path("/proc/self/status").read_text(),
        "at once": True,
    }


def test_descendants_that_survive_sigkill_are_logged_with_their_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "children_of", lambda _pid: [os.getpid()])
    monkeypatch.setattr(children_module, "_has_no_new_privileges", lambda _pid: True)
    monkeypatch.setattr(children_module, "END_TIMEOUT_S", 0.05)
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: signals.append(number))
    with structlog.testing.capture_logs() as logs:
        end_descendants()
    assert set(signals) == {signal.SIGKILL}
    assert [entry["pids"] for entry in logs] == [[os.getpid()]]
