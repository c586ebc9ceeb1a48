"""The client programs of `clients/`: how each is built and run, and what its run tells."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local.cache import cache_directory, locked
from local.console import print_status

from .waiting import eventually

CLIENTS = Path(__file__).resolve().parents[1] / "clients"
RUN_TIMEOUT_S = 180.0
_RECONNECT = re.compile(r"reconnect", re.IGNORECASE)


class NotAvailableError(Exception):
    """This machine cannot build or run the client; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What one run printed."""

    result: dict[str, Any]
    log: str

    @property
    def reconnect_lines(self) -> list[str]:
        """What the client's own log says about reconnecting."""
        return [line for line in self.log.splitlines() if _RECONNECT.search(line)]


class Run:
    """A program that runs: its progress, its end."""

    def __init__(self, process: subprocess.Popen[str], output: Path, log: Path) -> None:
        self._process = process
        self._output = output
        self._log = log

    def progress(self) -> int:
        """How many messages a stream has received so far."""
        numbers = re.findall(r"^PROGRESS (.*)\n", self._output.read_text(), re.MULTILINE)
        return int(json.loads(numbers[-1])["received"]) if numbers else 0

    def wait_for_progress(self, more: int, within_s: float = 120.0) -> None:
        """Wait until it has received `more` messages than now; fail at once if it ends before."""
        goal = self.progress() + more

        def reached() -> bool:
            assert self._process.poll() is None, f"the client ended:\n{self.tail()}"
            return self.progress() >= goal

        eventually(reached, what=f"{goal} messages received\n{self.tail()}", within_s=within_s)

    def stop(self) -> Outcome:
        """Tell a stream to stop and drain; returns its outcome."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Outcome:
        """Wait for the end; the result must be there."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the client did not end within {timeout_s:g} s:\n{self.tail()}") from None
        found = re.search(r"^RESULT (.*)$", self._output.read_text(), re.MULTILINE)
        assert found, f"the client ended with code {code} and no result:\n{self.tail()}"
        return Outcome(json.loads(found[1]), self._log.read_text(errors="replace"))

    def reconnects(self) -> int:
        """How many lines of its log so far speak of reconnecting."""
        return len(Outcome({}, self._log.read_text(errors="replace")).reconnect_lines)

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@dataclass(frozen=True)
class Program:
    """One client library's program. `directory` receives what its runs print."""

    name: str
    command: tuple[str, ...]
    directory: Path

    @contextmanager
    def start(self, scenario: str, url: str, topic: str, **options: object) -> Iterator[Run]:
        """Start a scenario; it is ended when the block is left."""
        stem = f"{self.name}-{scenario}-{time.monotonic_ns()}"
        output, log = self.directory / f"{stem}.out", self.directory / f"{stem}.log"
        arguments = [f"{key}={value}" for key, value in options.items()]
        command = [*self.command, f"url={url}", f"scenario={scenario}", f"topic={topic}", *arguments]
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True)
        run = Run(process, output, log)
        try:
            yield run
        finally:
            run.kill()

    def run(self, scenario: str, url: str, topic: str, **options: object) -> Outcome:
        """Run a scenario to its end."""
        with self.start(scenario, url, topic, **options) as run:
            return run.wait()

    def succeed(self, scenario: str, url: str, topic: str, **options: object) -> dict[str, Any]:
        """Run a scenario to its end, which must be a good one."""
        outcome = self.run(scenario, url, topic, **options)
        assert outcome.result["ok"], f"{outcome.result}\n{outcome.log[-4000:]}"
        return outcome.result


def python_program(directory: Path, _pulsar_home: Path) -> Program:
    """The Python client, in this interpreter's environment."""
    return Program("python", (sys.executable, str(CLIENTS / "python" / "scenarios.py")), directory)


def java_program(directory: Path, pulsar_home: Path) -> Program:
    """The Java client of the distribution."""
    return _java_program("java", "E2eClient", directory, pulsar_home)


def java5_program(directory: Path, pulsar_home: Path) -> Program:
    """Pulsar 5's Java client, both its APIs, of a directory that has its jars."""
    return _java_program("java5", "FeaturesClient", directory, pulsar_home)


def _java_program(name: str, main: str, directory: Path, pulsar_home: Path) -> Program:
    sources = sorted((CLIENTS / name).glob("*.java"))
    libraries = f"{pulsar_home}/lib/*"
    classes = _built(name, [*sources, Path(pulsar_home.name)], lambda target: _compile(sources, libraries, target))
    settings = f"-Dlog4j2.configurationFile={CLIENTS / 'java' / 'log4j2.xml'}"
    fast = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
    command = (_tool("java"), *fast, settings, "-cp", f"{classes}:{libraries}", main)
    return Program(name, command, directory)


def _compile(sources: list[Path], libraries: str, target: Path) -> None:
    _build([_tool("javac"), "-cp", libraries, "-d", str(target), *map(str, sources)])


def go_program(directory: Path, _pulsar_home: Path) -> Program:
    """The Go client; its modules come from the Go module proxy at the first build."""
    source = CLIENTS / "go"
    go = _tool("go")
    sources = sorted(path for path in source.iterdir() if path.name.startswith("go.") or path.suffix == ".go")
    build = [go, "build", "-mod=readonly", "-buildvcs=false"]
    built = _built("go", sources, lambda target: _build([*build, "-o", str(target / "client"), "."], cwd=source))
    return Program("go", (str(built / "client"),), directory)


PROGRAMS: dict[str, Callable[[Path, Path], Program]] = {
    "python": python_program,
    "java": java_program,
    "go": go_program,
}


def _tool(name: str) -> str:
    path = shutil.which(name) or ("/usr/local/go/bin/go" if name == "go" else "")
    if not path or not os.access(path, os.X_OK):
        raise NotAvailableError(f"`{name}` is not installed")
    return path


def _built(name: str, inputs: list[Path], build: Callable[[Path], None]) -> Path:
    """A directory with what `build` makes, kept in the cache for as long as the inputs stay the same."""
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    target = cache_directory() / "e2e-clients" / f"{name}-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    with locked(cache_directory() / "e2e-clients.lock", print_status):
        if not target.exists():  # another process may have built it meanwhile
            target.parent.mkdir(exist_ok=True)
            unfinished = target.with_name(f"{target.name}.{os.getpid()}")
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _build(command: list[str], cwd: Path | None = None) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, cwd=cwd)
    if result.returncode == 0:
        return
    # Modules that cannot be fetched say something about the machine; anything else is a defect of the program.
    if any(word in result.stderr for word in ("dial tcp", "i/o timeout", "module lookup disabled")):
        raise NotAvailableError(f"its modules cannot be had: {result.stderr[-500:]}")
    raise AssertionError(f"{' '.join(command)}:\n{result.stderr}")
