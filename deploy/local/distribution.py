"""The Pulsar distribution (broker, tools, Java client): fetched once by Maven, verified, unpacked, cached.

Maven fetches it so that the user's own mirrors and proxies apply and no address has to be configured here. After an
interrupted or failed run, the next run produces a complete distribution:

* fetching: Maven resumes its own partial file; a partial file that it cannot use is removed and fetched again;
* the archive must have the digest below, else it is removed and fetched once more;
* unpacking goes to a temporary directory that is renamed when complete, and a list of all files and sizes is
  written last; a directory that lacks the list or does not match it is unpacked again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from local.cache import cache_directory, locked
from local.console import MakeError, Progress, print_status
from local.process import run_reporting
from local.provenance import file_sha256

_MANIFEST = ".complete.json"


class DistributionError(MakeError):
    """The distribution cannot be fetched; the text says why and what to do."""


class Source(Protocol):
    """Where the files of a Pulsar release come from, and the digest that they must have."""

    @property
    def version(self) -> str:
        """The release."""

    @property
    def sha256(self) -> str:
        """The digest, which the list of a complete directory holds."""

    def install(self, home: Path, repository: Path, progress: Progress) -> None:
        """Put a complete directory in the place of `home`, with what Maven has or fetches into its repository."""


@dataclass(frozen=True)
class Archive:
    """A tar.gz by its Maven coordinates, with its digest and approximate size."""

    group: str
    name: str
    version: str
    classifier: str
    sha256: str
    megabytes: int

    @property
    def coordinates(self) -> str:
        """The archive's Maven coordinates."""
        return f"{self.group}:{self.name}:{self.version}:tar.gz:{self.classifier}"

    @property
    def label(self) -> str:
        """The archive's name for messages."""
        return f"Pulsar {self.version}"

    def directory(self, repository: Path) -> Path:
        """Return the archive's directory in Maven's repository."""
        return repository.joinpath(*self.group.split("."), self.name, self.version)

    def path(self, repository: Path) -> Path:
        """Return the archive's path in Maven's repository."""
        file = f"{self.name}-{self.version}-{self.classifier}.tar.gz"
        return self.directory(repository) / file

    def install(self, home: Path, repository: Path, progress: Progress) -> None:
        """Fetch, check and unpack the archive."""
        _install(home, self, repository, progress)


PULSAR = Archive(
    group="org.apache.pulsar",
    name="pulsar-server-distribution",
    version="4.0.8",
    classifier="bin",
    sha256="35c7d064c9e0928edbf2e708989faba0379662f98aa84ce0d4190c59efb6765e",
    megabytes=245,
)


def pulsar_home(progress: Progress = print_status, source: Source = PULSAR) -> Path:
    """Return the release's directory; the first call fetches and unpacks it."""
    return filled_home(
        f"pulsar-{source.version}",
        source.sha256,
        lambda home, repository: source.install(home, repository, progress),
        progress,
    )


def filled_home(name: str, sha256: str, install: Callable[[Path, Path], None], progress: Progress) -> Path:
    """Return a directory of the cache. If it is not complete, have `install` fill it, under the cache's lock: `install`
    takes the directory and Maven's repository.
    """
    cache = cache_directory()
    home = cache / name
    if is_complete(home, sha256):
        return home
    with locked(cache / "lock", progress):
        if not is_complete(home, sha256):  # another run may have filled it meanwhile
            install(home, cache / "m2")
    return home


def is_complete(home: Path, sha256: str) -> bool:
    """Return True if the directory has every file that `replace_home` put there, at its size."""
    try:
        manifest = json.loads((home / _MANIFEST).read_text())
        if manifest["sha256"] != sha256:
            return False
        return all((home / name).lstat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _install(home: Path, archive: Archive, repository: Path, progress: Progress) -> None:
    for attempt in (1, 2):
        path = archive.path(repository)
        if not path.exists():
            _fetch(archive, repository, progress)
        if not path.exists():
            raise DistributionError(f"Maven says it fetched {archive.coordinates}, but {path} is missing.")
        problem = _digest_problem(path, archive, progress) or _unpack(path, home, archive, progress)
        if problem is None:
            progress(f"{archive.label} is ready in {home}")
            return
        # Only a new copy can help, and Maven does not look into what it already has.
        shutil.rmtree(archive.directory(repository))
        if attempt == 1:
            progress(f"{archive.label} is broken, fetching it again ({problem})")
    raise DistributionError(
        f"{archive.coordinates} is broken, twice: {problem}.\n"
        "A mirror or proxy between this machine and the Maven repository may be altering it."
    )


def _digest_problem(path: Path, archive: Archive, progress: Progress) -> str | None:
    progress(f"Checking {archive.label}")
    found = file_sha256(path)
    return None if found == archive.sha256 else f"its SHA-256 is {found}, not {archive.sha256}"


def _unpack(path: Path, home: Path, archive: Archive, progress: Progress) -> str | None:
    """Replace `home` by the archive's content. Return what is wrong with the archive, or None."""
    progress(f"Unpacking {archive.label}")

    def unpack(new: Path) -> str | None:
        command = ["tar", "-xzf", str(path), "-C", str(new), "--strip-components=1", "--no-same-owner"]
        result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return f"tar: {result.stderr.strip()[-500:]}" if result.returncode else None

    return replace_home(home, archive.sha256, unpack)


def replace_home(home: Path, sha256: str, fill: Callable[[Path], str | None]) -> str | None:
    """Replace `home` by what `fill` puts into a new directory, unless that returns a problem. Return the problem.

    The caller holds the lock.
    """
    for stale in home.parent.glob(f".{home.name}.*"):  # this process has the lock: no other one uses it
        shutil.rmtree(stale)
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        new = work / "new"
        new.mkdir()
        if problem := fill(new):
            return problem
        files = {str(file.relative_to(new)): file.lstat().st_size for file in _files(new)}
        (new / _MANIFEST).write_text(json.dumps({"sha256": sha256, "files": files}))
        if home.exists():
            home.rename(work / "old")
        new.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]


def _fetch(archive: Archive, repository: Path, progress: Progress) -> None:
    require_maven()
    directory = archive.directory(repository)
    resumed = any(directory.glob("*.part")) if directory.exists() else False
    failure = _run_maven(archive, repository, progress)
    if failure and resumed:
        progress(f"{archive.label} could not be resumed, fetching all of it")
        shutil.rmtree(directory, ignore_errors=True)
        failure = _run_maven(archive, repository, progress)
    if failure:
        raise DistributionError(f"Maven could not fetch {archive.coordinates}:\n{failure}")


def require_maven() -> None:
    """Raise DistributionError if there is no Maven."""
    if shutil.which("mvn") is None:
        raise DistributionError("Maven (mvn) is missing; `make run` and `make test` say how to install it.")


def _run_maven(archive: Archive, repository: Path, progress: Progress) -> str | None:
    """Run `mvn dependency:get` with progress reports. Return the end of its output if it failed."""
    command = [
        "mvn",
        "--batch-mode",
        "--strict-checksums",
        "--update-snapshots",  # else a failure that Maven remembers is not tried again
        "dependency:get",
        f"-Dartifact={archive.coordinates}",
        "-Dtransitive=false",
        f"-Dmaven.repo.local={repository}",
    ]
    meter = _Meter(archive, repository)
    return run_reporting(
        command, lambda elapsed_s: f"{archive.label}: {meter.text(elapsed_s)}", progress, env=maven_environment()
    )


def maven_environment() -> dict[str, str]:
    """Return our environment for Maven, whose messages shall have no colours."""
    return {**os.environ, "MAVEN_OPTS": f"{os.environ.get('MAVEN_OPTS', '')} -Djansi.mode=strip"}


class _Meter:
    """Meter of Maven's progress by the size of its files: without a terminal Maven reports none."""

    def __init__(self, archive: Archive, repository: Path) -> None:
        self._archive = archive
        self._directory = archive.directory(repository)
        self._bytes_before = self._bytes()

    def _bytes(self) -> int:
        sizes = [0]
        for path in self._directory.glob(f"{self._archive.name}*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # renamed since it was listed
                continue
        return max(sizes)

    def text(self, elapsed_s: float) -> str:
        done = self._bytes()
        if done == 0 or elapsed_s == 0:
            return f"preparing, {elapsed_s:.0f} s"
        rate = (done - self._bytes_before) / elapsed_s / 1e6
        return f"{done / 1e6:.0f} of about {self._archive.megabytes} MB, {rate:.1f} MB/s"
