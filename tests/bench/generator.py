"""The two ends of what is measured, both in Go (`go/`): the load, and the scripted broker behind the proxies."""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.cache import cache_directory
from local.ports import free_port, is_free
from local.process import OwnedProcess

from tests.e2e.lab.certificates import Pair

_SOURCE = Path(__file__).with_name("go")
_BROKER_START_TIMEOUT_S = 10.0


class BenchError(Exception):
    """A measurement could not be made; the text says why."""


def build() -> Path:
    """The generator's program, kept in the cache for as long as its source stays the same."""
    sources = sorted(path for path in _SOURCE.iterdir() if path.suffix in {".go", ".mod"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    program = cache_directory() / f"bench-generator-{digest[:16]}"
    if not program.exists():
        go = shutil.which("go") or "/usr/local/go/bin/go"
        unfinished = program.with_name(f"{program.name}.{os.getpid()}")
        command = [go, "build", "-buildvcs=false", "-o", str(unfinished), "."]
        result = subprocess.run(command, cwd=_SOURCE, capture_output=True, text=True)
        if result.returncode != 0:
            raise BenchError(f"{' '.join(command)}:\n{result.stderr}")
        unfinished.rename(program)
    return program


@dataclass(frozen=True)
class Broker:
    """The scripted broker."""

    port: int
    pid: int
    trust: str = ""
    """The file of the authority of its certificate; empty: it does without TLS."""
    web_address: str = ""
    """Of its web port, which is a process of its own: that of ``pid`` then."""

    @property
    def address(self) -> str:
        """What a client says as proxy_to_broker_url."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What a proxy is configured with."""
        return f"pulsar{'+ssl' if self.trust else ''}://{self.address}"


@contextmanager
def broker(
    program: Path, log: Path, certificate: Pair | None = None, trust: str = "", *, what: str = "broker"
) -> Iterator[Broker]:
    """Run it, in TLS if it is given a certificate and who has issued that. ``what``: `http-server` is its web port."""
    port = free_port()
    command = [program, what, f"-port={port}"]
    if certificate:
        command += [f"-certificate={certificate.certificate}", f"-key={certificate.key}"]
    process = OwnedProcess(command, log=log)
    try:
        deadline = time.monotonic() + _BROKER_START_TIMEOUT_S
        while is_free(port):
            if process.exit_code() is not None or time.monotonic() > deadline:
                raise BenchError(f"the scripted broker did not start:\n{process.log_tail()}")
            time.sleep(0.05)
        yield Broker(port, process.pid, trust)
    finally:
        process.kill()


@dataclass(frozen=True)
class Window:
    """What the load itself saw while it was measured; it begins and ends with nothing under way."""

    operations: int
    bytes: int
    retries: int
    resumed: int
    cipher: str
    seconds: float
    load_cpu_s: float
    p50_us: float
    p99_us: float


class Load:
    """A load that waits for our word before it is measured and before it ends."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._expect("ready")

    def measure(self) -> Window:
        """Let it run for its window."""
        return Window(**json.loads(self.run_next_step()))

    def take_report(self) -> dict[str, float]:
        """Return what the load reports for the time since its last step."""
        report: dict[str, float] = json.loads(self.run_next_step())
        return report

    def run_next_step(self) -> str:
        """Make the load run its next step; return the line that it prints then."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def _expect(self, text: str) -> None:
        if (line := self._line()) != text:
            raise BenchError(f"the load said {line!r} instead of {text!r}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            assert self._process.stderr is not None
            raise BenchError(f"the load failed: {self._process.stderr.read().strip()}")
        return line


@contextmanager
def load(program: Path, what: str, **options: object) -> Iterator[Load]:
    """Start a load; when this returns it has opened its connections and warmed up."""
    command = [str(program), what, *(f"-{key.replace('_', '-')}={value}" for key, value in options.items())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Load(process)
        finally:
            process.kill()
