"""The tree's virtual environment `.venv`, shared by `make run`, `make test`, `make check`, `make bench`,
`make bench-analytics`, `make fuzz` and `make docs`.

A stamp in it holds digests of what it was made from, so that a second run costs nothing. Where the lists of packages
have changed it is made again: it never holds another version than the listed ones, nor what a list no longer has.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from local.cache import cache_directory, locked
from local.console import MakeError, Progress, print_status
from local.process import run_reporting

ROOT = Path(__file__).resolve().parents[2]

BUILD = "build"
"""The list of what packages without wheels, and this tree, are built with."""

_REQUIREMENTS = Path("deploy/requirements")
_COVERS = {
    "run": ("run", "test", "test-kerberos"),
    "test": ("test", "test-kerberos"),
    "test-kerberos": ("test-kerberos",),
    "bench": ("bench",),
    "analytics": ("analytics", "test", "test-kerberos", "bench-analytics"),
    "bench-analytics": ("bench-analytics",),
    "docs": ("docs", "test", "test-kerberos"),
    "fuzz": ("fuzz",),
    "release": ("release",),
}
"""What an environment can be for (a file of deploy/requirements each), and what else holds all that this needs."""

_PROBE = "import sys, pip; sys.exit(sys.version_info < (3, 11))"


class _Stamp(TypedDict):
    """What is in it: the digests of all lists and of the tree's own requirements, and which lists were installed."""

    lists: str
    tree: str
    installed: list[str]


class SetupError(MakeError):
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
        """Make it hold what one of _COVERS needs."""
        if self.is_ready(what):
            return
        with locked(cache_directory() / "environment.lock", progress):
            if not self.is_ready(what):
                self._install(what, self._create(progress), progress)

    def is_ready(self, what: str) -> bool:
        """Whether it was made from the files as they are now."""
        stamp = self._read_stamp()
        if stamp["lists"] != self._lists() or stamp["tree"] != self._tree() or not self.python.exists():
            return False
        return any(done in stamp["installed"] for done in _COVERS[what])

    def _create(self, progress: Progress) -> list[str]:
        """Make it, unless it is there and the lists are as they were; return the lists that it holds."""
        stamp = self._read_stamp()
        if stamp["lists"] == self._lists() and _succeeds([self.python, "-c", _PROBE]):
            return stamp["installed"]
        command = [sys.executable, "-m", "venv", "--clear", str(self.directory)]
        self._run(command, "Creating .venv", progress)
        return []

    def _install(self, what: str, installed: list[str], progress: Progress) -> None:
        self._stamp.unlink(missing_ok=True)  # an interrupted installation must not look complete
        self._run(install_list(self.python, BUILD), "Installing what builds packages into .venv", progress)
        self._run(install_list(self.python, what), "Installing the dependencies into .venv", progress)
        self._run([*pip_install(self.python), "-e", "."], "Installing the project into .venv", progress)
        self._run(pip_check(self.python), "Comparing what is in .venv with what its packages need", progress)
        stamp: _Stamp = {"lists": self._lists(), "tree": self._tree(), "installed": sorted({what, *installed})}
        self._stamp.write_text(json.dumps(stamp))

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

    def _read_stamp(self) -> _Stamp:
        nothing = _Stamp(lists="", tree="", installed=[])
        try:
            stamp = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return nothing
        complete = isinstance(stamp, dict) and nothing.keys() <= stamp.keys()
        return cast("_Stamp", stamp) if complete else nothing

    def _lists(self) -> str:
        files = sorted((self.root / _REQUIREMENTS).glob("*.txt"))
        return _digest(b"".join(path.name.encode() + path.read_bytes() for path in files))

    def _tree(self) -> str:
        # An editable installation holds the tree's path.
        return _digest(str(self.root).encode() + (self.root / "pyproject.toml").read_bytes())


def pip_install(python: Path) -> list[str]:
    """Return the command that installs what follows it, and nothing else: no dependency, and no newer build tool."""
    return [*_pip(python), "install", "--no-deps", "--no-build-isolation"]


def install_list(python: Path, what: str) -> list[str]:
    """Return the command that installs a list of deploy/requirements, each package by its hash; run it in the tree."""
    return [*pip_install(python), "--require-hashes", "-r", str(_REQUIREMENTS / f"{what}.txt")]


def pip_check(python: Path) -> list[str]:
    """Return the command that fails where an installed package lacks another, or needs another version of it."""
    return [*_pip(python), "check"]


def clean_environment() -> dict[str, str]:
    """Our environment for other Pythons, without the path that brought this package in."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _succeeds(command: list[str | Path]) -> bool:
    try:
        result = subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    except OSError:
        return False
    return result.returncode == 0
