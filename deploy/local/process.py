"""A child process that cannot outlive this process, and whose descendants end with it.

Each child joins the process group of a *watchdog*: a shell that blocks on a pipe which only this process holds open.
When this process exits, by any signal, the pipe closes and the watchdog kills its own group. Three consequences:

* the group's id is the watchdog's, which runs for as long as this process may signal it, so it is never reused;
* Ctrl-C in the terminal reaches only this process, which stops the children in the order it chooses;
* unlike PR_SET_PDEATHSIG it does not depend on the *thread* that started the child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from local.console import Console, Progress, tail

_POLL_S = 0.5
_WATCHDOG = 'trap "" TERM INT HUP; read -r _; kill -TERM 0; sleep 15; kill -KILL 0'


class OwnedProcess:
    """A running command whose output goes to a log file."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.log = log
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=cwd,
                    process_group=self._watchdog.pid,
                )
        except BaseException:
            self._end_group()
            raise

    @property
    def pid(self) -> int:
        """The command's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the exit and return the exit code; None after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Signal the command itself (not its descendants); does nothing if it has exited."""
        self._process.send_signal(number)

    def stop(self, timeout_s: float) -> int:
        """Send SIGTERM, wait, then send SIGKILL to the whole group. Return the exit code."""
        try:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a stopped process gets its SIGTERM only when it continues
            self.wait(timeout_s)
        finally:  # also when Ctrl-C ends the wait
            code = self.kill()
        return code

    def kill(self) -> int:
        """Send SIGKILL to the whole group at once; harmless if it has exited. Return the exit code."""
        self._end_group()
        return self._process.wait()

    def _end_group(self) -> None:
        if self._watchdog.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watchdog.pid, signal.SIGKILL)
            self._watchdog.wait()
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the output."""
        try:
            return tail(self.log.read_text(errors="replace"), lines)
        except OSError as error:
            return f"({error})"


class OwnedServer:
    """A server as an OwnedProcess, which can be started again. `stop_timeout_s`: what it has to end in, when asked."""

    stop_timeout_s = 20.0
    _process: OwnedProcess | None = None

    @property
    def running(self) -> bool:
        """True while the process runs, healthy or not."""
        return self._process is not None and self._process.exit_code() is None

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid if self._process else None

    def log_tail(self, lines: int = 25) -> str:
        """Return the end of the log."""
        return self._process.log_tail(lines) if self._process else ""

    def stop(self) -> None:
        """Send SIGTERM; kill the server after `stop_timeout_s`. Harmless if it does not run."""
        if self._process is not None:
            self._process.stop(self.stop_timeout_s)
            self._process = None

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _wait_until_ready(
        self,
        name: str,
        obstacle: Callable[[], str],
        error: type[Exception],
        *,
        timeout_s: float,
        poll_s: float,
        progress: Progress,
    ) -> None:
        """Return once there is no `obstacle` any more; raise `error` where the process ends, or takes too long."""
        assert self._process is not None  # it was started
        started_at = time.monotonic()
        while text := obstacle():
            elapsed_s = time.monotonic() - started_at
            if (code := self._process.exit_code()) is not None:
                raise error(f"{name} ended with code {code}:\n{self.log_tail()}")
            if elapsed_s > timeout_s:
                raise error(f"{name} was not ready after {elapsed_s:.0f} s ({text}):\n{self.log_tail()}")
            progress(f"Starting {name}: {elapsed_s:.0f} s ({text})")
            time.sleep(poll_s)


def run_reporting(
    command: Sequence[str | Path],
    describe: Callable[[float], str],
    progress: Progress,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str | None:
    """Run a long command, reporting `describe(elapsed seconds)`. Return the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="pulsar-trio-proxy-") as directory:
        process = OwnedProcess(command, log=Path(directory) / "output.log", env=env, cwd=cwd)
        try:
            started_at = time.monotonic()
            progress(describe(0.0))
            while process.wait(_POLL_S) is None:
                progress(describe(time.monotonic() - started_at))
        finally:
            code = process.kill()
        return None if code == 0 else f"{process.log_tail()}\n({command[0]} ended with code {code})"


def side_by_side(*works: Callable[[Progress], object]) -> None:
    """Do several works at once, each with a progress of its own, and raise the first error when all have ended.

    An interrupt does not wait for them: their threads, and the processes that they run, end with this process.
    """
    errors: list[BaseException] = []

    def do(work: Callable[[Progress], object]) -> None:
        try:
            work(Console(replaces=False))
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=do, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # in steps: a signal that comes just before Python waits does not end an endless wait
            thread.join(_POLL_S)
    if errors:
        raise errors[0]
