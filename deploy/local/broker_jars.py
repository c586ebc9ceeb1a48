"""Pulsar releases without a server distribution in Maven Central: a broker and Java client of the jars that are there.

The directory looks like a distribution's to who starts a broker: `bin/pulsar`, `conf/standalone.conf`, `lib/*.jar`. All
jars together must have the digest below, so a dependency that is released later changes nothing. What an interruption
leaves behind is removed by the next run, as with a distribution.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from local.console import Progress
from local.distribution import (
    PULSAR,
    DistributionError,
    Source,
    maven_environment,
    replace_home,
    require_maven,
)
from local.process import run_reporting
from local.provenance import file_sha256

_FILES = Path(__file__).parent / "jars"
_PLACES = {"pulsar": "bin", "standalone.conf": "conf", "log4j2.properties": "conf"}
"""Of our own files in the directory."""


@dataclass(frozen=True)
class BrokerJars:
    """All jars of a release's broker and Java client. `profile`: the one in jars/pom.xml."""

    version: str
    profile: str
    jars_sha256: str
    """The digest of a list of all jars by name: digest, two spaces, name, newline, as `sha256sum *.jar` prints it."""

    @property
    def sha256(self) -> str:
        """The digest of the jars and of our own files beside them."""
        digest = hashlib.sha256(self.jars_sha256.encode())
        for name in _PLACES:
            digest.update((_FILES / name).read_bytes())
        return digest.hexdigest()

    def install(self, home: Path, repository: Path, progress: Progress) -> None:
        """Have Maven fetch and copy the jars; a second time from an empty repository if any is not what it should be.

        Raises DistributionError.
        """
        problem = replace_home(home, self.sha256, lambda new: self._fill(new, repository, progress))
        if problem is not None:
            progress(f"Pulsar {self.version} is broken, fetching it again ({problem})")
            problem = replace_home(home, self.sha256, lambda new: self._fill(new, new.parent / "m2", progress))
        if problem is not None:
            raise DistributionError(
                f"The jars of Pulsar {self.version} are not those that were tried: {problem}.\n"
                "A mirror or proxy between this machine and the Maven repository may be altering them."
            )
        progress(f"Pulsar {self.version} is ready in {home}")

    def _fill(self, new: Path, repository: Path, progress: Progress) -> str | None:
        found = copy_jars(
            _FILES / "pom.xml",
            new / "lib",
            repository,
            f"the jars of Pulsar {self.version}",
            progress,
            *("--activate-profiles", self.profile, f"-Dpulsar.version={self.version}"),
        )
        for name, place in _PLACES.items():
            (new / place).mkdir(exist_ok=True)
            shutil.copy(_FILES / name, new / place / name)  # with its mode
        return None if found == self.jars_sha256 else f"their digest is {found}, not {self.jars_sha256}"


def copy_jars(pom: Path, directory: Path, repository: Path, what: str, progress: Progress, *options: str) -> str:
    """Have Maven copy all jars that a project needs at run time into a directory, and return their digest. `what` names
    them for a reader. Raises DistributionError.
    """
    require_maven()
    command = [
        *("mvn", "--batch-mode", "--strict-checksums", "--update-snapshots", "--file", str(pom), *options),
        *("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={directory}"),
        f"-Dmaven.repo.local={repository}",
    ]
    failure = run_reporting(command, lambda s: f"Fetching {what}: {s:.0f} s", progress, env=maven_environment())
    if failure:
        raise DistributionError(f"Maven could not fetch {what}:\n{failure}")
    return digest_of_jars(directory)


def digest_of_jars(directory: Path) -> str:
    """Return the digest of the list of all jars."""
    listing = hashlib.sha256()
    for path in sorted(directory.iterdir(), key=lambda path: path.name):  # java takes .JAR, too
        listing.update(f"{file_sha256(path)}  {path.name}\n".encode())
    return listing.hexdigest()


PULSAR_5 = BrokerJars(
    version="5.0.0-M1",
    profile="v5",
    jars_sha256="9aa4f3d48d686c6f9bc1b1ef776cfbc64b9ed94f476e575290bf3adce2460a29",
)
PULSAR_4_2 = BrokerJars(
    version="4.2.4",
    profile="v4",
    jars_sha256="854811be4621384a8751ddcd06bc5b5d8504ee6736d1d98bbee88c0bc065adda",
)
_SOURCES: dict[str, Source] = {source.version: source for source in (PULSAR, PULSAR_4_2, PULSAR_5)}


def source_of(version: str) -> Source:
    """Return where a release comes from. Raises DistributionError for one that is not known."""
    source = _SOURCES.get(version)
    if source is None:
        raise DistributionError(f"Pulsar {version!r} is not known here; known are {', '.join(_SOURCES)}.")
    return source
