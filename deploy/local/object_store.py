"""Spark's jars for an object store: Hadoop's connector for S3, in the version that Spark has of Hadoop.

They come from Maven Central. All together must have the digest below, so a dependency that is released later changes
nothing.
"""

from __future__ import annotations

from pathlib import Path

from local.broker_jars import copy_jars
from local.console import Progress, print_status
from local.distribution import DistributionError, filled_home, replace_home

HADOOP_VERSION = "3.5.0"
_JARS_SHA256 = "9e7b1571982f8375f00d821e775bf3c2a0c721290e5eae3d620cb51ac11b9e2c"
_POM = Path(__file__).parent / "jars" / "s3a.xml"


def s3a_jars(progress: Progress = print_status) -> Path:
    """Return the directory of the jars, which the first call fetches. Raises DistributionError."""

    def install(home: Path, repository: Path) -> None:
        problem = replace_home(home, _JARS_SHA256, lambda new: _fill(new, repository, progress))
        if problem is not None:
            raise DistributionError(f"The jars of Hadoop's S3 connector are not those that were tried: {problem}.")

    return filled_home(f"s3a-{HADOOP_VERSION}", _JARS_SHA256, install, progress)


def _fill(new: Path, repository: Path, progress: Progress) -> str | None:
    options = (f"-Dhadoop.version={HADOOP_VERSION}", "-DexcludeGroupIds=org.slf4j,io.netty")
    found = copy_jars(_POM, new, repository, "the jars of Hadoop's S3 connector", progress, *options)
    return None if found == _JARS_SHA256 else f"their digest is {found}, not {_JARS_SHA256}"
