"""The tree's virtual environment `.venv`, shared by `make run`, `make test`, `make check`, `make bench` and
`make bench-analytics`.

A stamp in it holds the digest of what it was made from, so that a second run costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from local.cache import cache_directory, locked
from local.console import Progress, print_status
from local.process import run_reporting

ROOT = Path(__file__).resolve().parents[2]

_REQUIREMENTS = Path("deploy/requirements")
_COVERS = {
    "run": ("run", "test", "test-kerberos"),
    "test": ("test", "test-kerberos"),
    "test-kerberos": ("test-kerberos",),
    "bench": ("bench",),
    "bench-analytics": ("bench-analytics",),
    "release": ("release",),
}
"""What an environment can be for (a file of deploy/requirements each), and what else holds all that this needs."""

_PROBE = "import sys, pip; sys.exit(sys.version_info < (3, 11))"


class SetupError(Exception):
    """The virtual environment cannot be made; the text holds pip's reason."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment inside a source tree."""

    root: Path = ROOT

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def tool(self, name: str) -> Path:
        """Return the path of a command in the environment."""
        return self.directory / "bin" / name

    def prepare(self, what: str, progress: Progress = print_status) -> None:
        """Make it hold what `run`, `test`, `test-kerberos`, `bench` (with `--write`) or `bench-analytics` needs."""
        if self.is_ready(what):
            return
        with locked(cache_directory() / "environment.lock", progress):
            if not self.is_ready(what):
                self._create(progress)
                self._install(what, progress)

    def is_ready(self, what: str) -> bool:
        """Whether it was made from the files as they are now."""
        stamp = self._read_stamp()
        if stamp is None or stamp["digest"] != self._digest() or not self.python.exists():
            return False
        return any(done in stamp["installed"] for done in _COVERS[what])

    def _create(self, progress: Progress) -> None:
        if _succeeds([self.python, "-c", _PROBE]):
            return
        command = [sys.executable, "-m", "venv", "--clear", str(self.directory)]
        self._run(command, "Creating .venv", progress)

    def _install(self, what: str, progress: Progress) -> None:
        stamp = self._read_stamp()
        fresh = stamp is not None and stamp["digest"] == self._digest()
        self._stamp.unlink(missing_ok=True)  # an interrupted installation must not look complete
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        # pip has no hash of a directory: the packages first, each by its hash, then the tree without its dependencies.
        packages = [*pip, "--no-deps", "--require-hashes", "-r", str(_REQUIREMENTS / f"{what}.txt")]
        self._run(packages, "Installing the dependencies into .venv", progress)
        tree = [*pip, "--no-deps", "--no-build-isolation", "-e", "."]
        self._run(tree, "Installing the project into .venv", progress)
        installed = {what, *(stamp["installed"] if stamp and fresh else ())}
        self._stamp.write_text(json.dumps({"digest": self._digest(), "installed": sorted(installed)}))

    def _run(self, command: list[str], doing: str, progress: Progress) -> None:
        failure = run_reporting(
            command,
            lambda s: f"{doing}: {s:.0f} s",
            progress,
            env=clean_environment(),
            cwd=self.root,
        )
        if failure:
            raise SetupError(f"{doing} failed:\n{failure}")

    @property
    def _stamp(self) -> Path:
        return self.directory / ".pulsar-trio-proxy.json"

    def _read_stamp(self) -> dict[str, list[str] | str] | None:
        try:
            stamp = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return None
        complete = isinstance(stamp, dict) and {"digest", "installed"} <= stamp.keys()
        return stamp if complete else None

    def _digest(self) -> str:
        digest = hashlib.sha256(str(self.root).encode())  # an editable installation holds the tree's path
        for path in (self.root / "pyproject.toml", *sorted((self.root / _REQUIREMENTS).glob("*.txt"))):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def clean_environment() -> dict[str, str]:
    """Our environment for other Pythons, without the path that brought this package in."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _succeeds(command: list[str | Path]) -> bool:
    try:
        result = subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    except OSError:
        return False
    return result.returncode == 0
