"""A reader who does what a page says: types its commands, writes its files, compares what comes with what is shown.

What cannot be the same on this machine is replaced in all of them by one table (hosts, ports, folders); the test that
makes the table is its documentation.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from local.process import OwnedProcess

from tests.docs.blocks import Block, Command, commands
from tests.docs.plan import reason

COMMAND_TIMEOUT_S = 900
"""Of one command on a busy machine: `pip install` fetches, Spark starts a JVM."""

_REMEMBER = '\n{ code=$?; pwd > "$READER_STATE"; umask >> "$READER_STATE"; exit $code; }\n'
"""Behind a command: where its shell is now and what its umask is, which count for the next command."""

_UNWANTED = ("PULSAR_", "BOOKIE_", "BK_", "OPTS", "CLASSPATH", "PYTHONPATH", "VIRTUAL_ENV")
"""What the user of this machine has set for other programs must not change these."""


class Reader:
    """A shell's folder, umask and environment from command to command, below one directory.

    ``replace``: what stands for what in commands, files and outputs; where two fit, the longer one counts.
    ``background``: by a command's head, what to wait for after it was started; it goes on until `close`.
    ``answers``: by a command's head, what to type at each of its prompts.
    """

    def __init__(
        self,
        directory: Path,
        replace: Mapping[str, str],
        *,
        path: str,
        background: Mapping[str, Callable[[OwnedProcess], None]],
        answers: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.home = directory / "home"
        self.home.mkdir()
        self.folder = self.home
        self.done: list[str] = []
        self._replace = dict(replace)
        self._pattern = re.compile("|".join(re.escape(one) for one in sorted(replace, key=len, reverse=True)))
        self._background = background
        self._answers = answers or {}
        self._processes: list[OwnedProcess] = []
        self._umask = "0022"
        self._state = directory / "state"
        self._logs = directory
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_UNWANTED)}
        self.environment = kept | {"HOME": str(self.home), "PATH": path, "READER_STATE": str(self._state)}
        self.environment.setdefault("PIP_CACHE_DIR", str(Path("~/.cache/pip").expanduser()))

    def here(self, text: str) -> str:
        """A text of the page as it has to be on this machine."""
        return self._pattern.sub(lambda found: self._replace[found[0]], text)

    def read(self, block: Block) -> None:
        """Do what a block says: write it to the file that it names, or run its commands, one after the other."""
        if block.file:
            path = self.folder / self.here(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.here(block.text))
        for command in commands(block):
            if not reason(block.page, command.head):
                self._run(command)
                self.done.append(command.head)

    def close(self) -> None:
        """End what runs in the background, the last one first."""
        while self._processes:
            self._processes.pop().stop(15.0)

    def type(self, text: str, answers: tuple[str, ...] = ()) -> str:
        """Run one command line in the shell's folder; returns what it wrote. AssertionError if it fails."""
        started_at = time.monotonic()
        code, output = self._shell(f"set -o pipefail; umask {self._umask}\n{text}{_REMEMBER}", answers)
        print(f"$ {text}\n{output}[{code}, {time.monotonic() - started_at:.1f} s]")
        assert code == 0, f"{text}\nended with code {code}:\n{output}"
        folder, self._umask = self._state.read_text().splitlines()
        self.folder = Path(folder)
        return output

    def _run(self, command: Command) -> None:
        if command.head in self._background:
            self._start(command)
            return
        try:
            output = self.type(self.here(command.text), self._answers.get(command.head, ()))
        except AssertionError as failure:
            logs = "\n".join(f"in the background:\n{process.log_tail()}" for process in self._processes)
            raise AssertionError(f"{command.where}: {failure}\n{logs}") from None
        self._compare(command, output)

    def _start(self, command: Command) -> None:
        line = self.here(command.head).rstrip(" &")
        log = self._logs / f"background-{len(self._processes)}.log"
        process = OwnedProcess(["bash", "-c", f"exec {line}"], log=log, env=self.environment, cwd=self.folder)
        self._processes.append(process)
        self._background[command.head](process)

    def _compare(self, command: Command, output: str) -> None:
        """Each line that the page shows has to come, in this order; there may be others between."""
        lines = iter(output.splitlines())
        for expected in filter(None, map(str.rstrip, map(self.here, command.output))):
            assert any(line.rstrip() == expected for line in lines), (
                f"{command.where}: {command.head}\nthe page shows {expected!r}, but this came:\n{output}"
            )

    def _shell(self, script: str, answers: tuple[str, ...]) -> tuple[int, str]:
        """The exit code of a script and all that it wrote."""
        if answers:
            return _at_a_terminal(script, answers, self.folder, self.environment)
        result = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        return result.returncode, result.stdout


def _at_a_terminal(
    script: str, answers: tuple[str, ...], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a script at a terminal, and answer each line that ends with a colon."""
    terminal, end = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", "bash", "-c", script],
        stdin=end,
        stdout=end,
        stderr=end,
        cwd=folder,
        env=dict(environment),
    )
    os.close(end)
    waiting = list(answers)
    shown = written = ""
    try:
        while data := _read(terminal):
            shown += data
            written += data
            if waiting and shown.rstrip(" ").endswith(":"):
                os.write(terminal, f"{waiting.pop(0)}\n".encode())
                shown = ""
    finally:
        os.close(terminal)
        code = process.wait(COMMAND_TIMEOUT_S)
    assert not waiting, f"it asked for {len(answers) - len(waiting)} of {len(answers)} answers:\n{written}"
    return code, written


def _read(terminal: int) -> str:
    """What a program wrote; nothing at its end, which the kernel tells as an error (EIO)."""
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:
        return ""
