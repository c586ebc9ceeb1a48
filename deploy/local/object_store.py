"""Spark's jars for an object store: Hadoop's connector for S3, in the version that Spark has of Hadoop.

They come from Maven Central. All together must have the digest below, so a dependency that is released later changes
nothing.
"""

from __future__ import annotations

from pathlib import Path

from local.broker_jars import digest_of_jars
from local.cache import cache_directory, locked
from local.console import Progress, print_status
from local.distribution import DistributionError, is_filled, maven_environment, replace_home, require_maven
from local.process import run_reporting

HADOOP_VERSION = "3.5.0"
_JARS_SHA256 = "9e7b1571982f8375f00d821e775bf3c2a0c721290e5eae3d620cb51ac11b9e2c"
_POM = Path(__file__).parent / "jars" / "s3a.xml"


def s3a_jars(progress: Progress = print_status) -> Path:
    """Return the directory of the jars, which the first call fetches. Raises DistributionError."""
    cache = cache_directory()
    home = cache / f"s3a-{HADOOP_VERSION}"
    if is_filled(home, _JARS_SHA256):
        return home
    with locked(cache / "lock", progress):
        if not is_filled(home, _JARS_SHA256):  # another run may have fetched them meanwhile
            problem = replace_home(home, _JARS_SHA256, lambda new: _fill(new, cache / "m2", progress))
            if problem is not None:
                raise DistributionError(f"The jars of Hadoop's S3 connector are not those that were tried: {problem}.")
    return home


def _fill(new: Path, repository: Path, progress: Progress) -> str | None:
    require_maven()
    command = [
        *("mvn", "--batch-mode", "--strict-checksums", "--update-snapshots", "--file", str(_POM)),
        *("dependency:copy-dependencies", "-DincludeScope=runtime", "-DexcludeGroupIds=org.slf4j,io.netty"),
        *(f"-DoutputDirectory={new}", f"-Dhadoop.version={HADOOP_VERSION}", f"-Dmaven.repo.local={repository}"),
    ]
    doing = "Fetching the jars of Hadoop's S3 connector"
    failure = run_reporting(command, lambda s: f"{doing}: {s:.0f} s", progress, env=maven_environment())
    if failure:
        raise DistributionError(f"Maven could not fetch the jars of Hadoop's S3 connector:\n{failure}")
    found = digest_of_jars(new)
    return None if found == _JARS_SHA256 else f"their digest is {found}, not {_JARS_SHA256}"
