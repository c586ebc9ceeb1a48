"""Children end with us, whichever way we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from local.console import Progress
from local.process import OwnedProcess, run_reporting, side_by_side

_DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# The FIFO is open for writing in the child and its own child: a reader sees its end when both are gone.
_HOLD = 'exec 3>"$0"; echo ready >&3; sleep 1000 & wait'
_PARENT = """
import os, signal, sys, time
from pathlib import Path
from local.process import OwnedProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
owned = OwnedProcess(["sh", "-c", sys.argv[1], sys.argv[2]], log=Path(sys.argv[2] + ".log"))
with open(sys.argv[2] + ".started", "w"):
    while True:  # not signal.pause(), which misses a signal that comes just before it
        time.sleep(0.1)
"""

_SIDE_BY_SIDE = """
import signal, sys
from local.process import run_reporting, side_by_side
signal.signal(signal.SIGINT, signal.default_int_handler)
side_by_side(lambda progress: run_reporting(["sh", "-c", *sys.argv[1:]], str, progress))
"""

# The signal's handler runs in the work's own thread, as for one that comes just before the main thread waits.
_UNNOTICED_SIGNAL = """
import signal, threading, time
from local.process import side_by_side
signal.signal(signal.SIGINT, signal.default_int_handler)
def work(progress):
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait()
side_by_side(work)
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_child_ends_with_its_parent(fifo: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _PARENT, _HOLD, str(fifo)]
    environment = {**os.environ, "PYTHONPATH": str(_DEPLOY)}
    parent_process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    with parent_process as parent, fifo.open() as reader:
        assert reader.readline() == "ready\n"
        parent.send_signal(number)
        assert reader.read() == ""


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_descendants_end_too(fifo: Path, tmp_path: Path, end: str) -> None:
    process = OwnedProcess(["sh", "-c", _HOLD, fifo], log=tmp_path / "log")
    with fifo.open() as reader:
        assert reader.readline() == "ready\n"
        code = process.stop(10) if end == "stop" else process.kill()
        assert reader.read() == ""
    assert code == (-signal.SIGTERM if end == "stop" else -signal.SIGKILL)
    assert process.kill() == code


def test_stop_forces_what_ignores_it(fifo: Path, tmp_path: Path) -> None:
    process = OwnedProcess(["sh", "-c", f'trap "" TERM; {_HOLD}', fifo], log=tmp_path / "log")
    with fifo.open() as reader:
        assert reader.readline() == "ready\n"
        assert process.stop(0.05) == -signal.SIGKILL
        assert reader.read() == ""


def test_stop_ends_what_was_paused(fifo: Path, tmp_path: Path) -> None:
    process = OwnedProcess(["sh", "-c", _HOLD, fifo], log=tmp_path / "log")
    with fifo.open() as reader:
        assert reader.readline() == "ready\n"
        process.signal(signal.SIGSTOP)
        assert process.stop(10) == -signal.SIGTERM
        assert reader.read() == ""


def test_command_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OwnedProcess([tmp_path / "nothing"], log=tmp_path / "log")


def test_run_reporting_gives_the_end_of_the_output() -> None:
    said: list[str] = []
    failure = run_reporting(["sh", "-c", "echo why; exit 3"], lambda elapsed_s: f"{elapsed_s:.0f}", said.append)
    assert failure == "why\n(sh ended with code 3)"
    assert said[0] == "0"
    assert run_reporting(["true"], str, said.append) is None


def test_works_side_by_side_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=60)
    side_by_side(lambda _: meeting.wait(), lambda _: meeting.wait())


def test_the_first_error_of_works_side_by_side_comes_when_all_have_ended() -> None:
    failed = threading.Event()
    done = []

    def fail(_: Progress) -> None:
        failed.set()
        raise ValueError("the first")

    def end(_: Progress) -> None:
        failed.wait(60)
        done.append(True)

    with pytest.raises(ValueError, match="the first"):
        side_by_side(fail, end)
    assert done == [True]


def test_works_side_by_side_end_at_an_interrupt_with_what_they_run(fifo: Path) -> None:
    command = [sys.executable, "-c", _SIDE_BY_SIDE, _HOLD, str(fifo)]
    environment = {**os.environ, "PYTHONPATH": str(_DEPLOY)}
    parent_process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with parent_process as parent, fifo.open() as reader:
        assert reader.readline() == "ready\n"
        parent.send_signal(signal.SIGINT)
        assert reader.read() == ""
        assert b"KeyboardInterrupt" in parent.communicate()[1]


def test_a_signal_that_does_not_wake_the_main_thread_ends_works_side_by_side() -> None:
    environment = {**os.environ, "PYTHONPATH": str(_DEPLOY)}
    ended = subprocess.run([sys.executable, "-c", _UNNOTICED_SIGNAL], env=environment, capture_output=True, check=False)
    assert b"KeyboardInterrupt" in ended.stderr
