"""The directory of Spark's jars for an object store: complete with the jars that were tried, or absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
from local.broker_jars import digest_of_jars
from local.distribution import DistributionError
from local.environment import ROOT
from local.object_store import HADOOP_VERSION, s3a_jars

FakeCommand = Callable[[str, str], Path]

_MAVEN = """
for argument in "$@"; do
  case $argument in -DoutputDirectory=*) jars=${argument#*=};; esac
done
echo "$@" >> "{directory}/calls"
cp "{directory}/jars/"* "$jars" || { echo "no such artifact"; exit 1; }
"""


@pytest.fixture
def jars(tmp_path: Path, fake_command: FakeCommand, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the jar that a fake Maven has, which is the one that was tried."""
    monkeypatch.setattr("local.process._POLL_S", 0.01)
    fake_command("mvn", _MAVEN.replace("{directory}", str(tmp_path)))
    directory = tmp_path / "jars"
    directory.mkdir()
    (directory / "hadoop-aws.jar").write_text("good")
    monkeypatch.setattr("local.object_store._JARS_SHA256", digest_of_jars(directory))
    return directory


def quiet(_text: str) -> None:
    """No progress."""


def test_jars_are_fetched_once(jars: Path, cache: Path, tmp_path: Path) -> None:
    home = s3a_jars(quiet)
    assert home.parent == cache
    assert (home / "hadoop-aws.jar").read_text() == "good"
    assert s3a_jars(quiet) == home
    (call,) = (tmp_path / "calls").read_text().splitlines()
    for part in ("--strict-checksums", f"-Dmaven.repo.local={cache / 'm2'}", "s3a.xml"):
        assert part in call


def test_a_jar_that_is_cut_off_is_fetched_again(jars: Path) -> None:
    home = s3a_jars(quiet)
    (home / "hadoop-aws.jar").write_text("")
    assert (s3a_jars(quiet) / "hadoop-aws.jar").read_text() == "good"


def test_untested_jars_are_refused(jars: Path, cache: Path) -> None:
    (jars / "released-tomorrow.jar").write_text("new")
    with pytest.raises(DistributionError, match="not those that were tried: their digest is"):
        s3a_jars(quiet)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_mavens_reason_is_told(jars: Path) -> None:
    (jars / "hadoop-aws.jar").unlink()
    with pytest.raises(DistributionError, match="no such artifact"):
        s3a_jars(quiet)


def test_the_connector_is_of_the_version_that_spark_has_of_hadoop() -> None:
    """An update of PySpark may bring another Hadoop, whose classes the connector then would not find."""
    jars = Path(pyspark.__file__).parent / "jars"
    assert (jars / f"hadoop-client-api-{HADOOP_VERSION}.jar").exists(), [path.name for path in jars.glob("hadoop-*")]
    assert f"hadoop-aws:{HADOOP_VERSION}" in (ROOT / "docs/analytics.md").read_text()
