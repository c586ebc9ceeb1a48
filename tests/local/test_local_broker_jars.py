"""The directory of a release that Maven Central has as jars only: complete with the jars that were tried, or absent."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from local import run
from local.broker_jars import BrokerJars, digest_of_jars, source_of
from local.distribution import DistributionError, is_complete, pulsar_home

FakeCommand = Callable[[str, str], Path]

# The first calls deliver what `broken` holds, one line each; the jar is good from then on.
_MAVEN = """
for argument in "$@"; do
  case $argument in
    -DoutputDirectory=*) jars=${argument#*=};;
    -Dmaven.repo.local=*) repository=${argument#*=};;
  esac
done
echo "$@" >> "{directory}/calls"
number=$(wc -l < "{directory}/calls")
content=$(sed -n ${number}p "{directory}/broken")
[ "$content" != fail ] || { echo "no such artifact"; exit 1; }
mkdir -p "$jars"
echo "${content:-good}" > "$jars/pulsar-broker-5.0.jar"
echo other > "$jars/other.jar"
"""


class Maven:
    """The fake `mvn`: what it delivers, and how often it was called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.deliver()

    def deliver(self, *broken: str) -> None:
        """Deliver these jars first, and good ones after them."""
        (self.directory / "broken").write_text("".join(f"{content}\n" for content in broken))

    @property
    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local.process._POLL_S", 0.01)


@pytest.fixture
def maven(tmp_path: Path, fake_command: FakeCommand) -> Maven:
    fake_command("mvn", _MAVEN.replace("{directory}", str(tmp_path)))
    return Maven(tmp_path)


@pytest.fixture
def jars(tmp_path: Path) -> BrokerJars:
    good = tmp_path / "good"
    good.mkdir()
    (good / "pulsar-broker-5.0.jar").write_text("good\n")
    (good / "other.jar").write_text("other\n")
    return BrokerJars("5.0", "v5", digest_of_jars(good))


def quiet(_text: str) -> None:
    """No progress."""


def test_digest_is_that_of_a_list_by_sha256sum(tmp_path: Path) -> None:
    for name in ("b.jar", "a.jar", "A.jar", "c.JAR"):  # java takes all of these
        (tmp_path / name).write_text(name)
    command = "LC_ALL=C; export LC_ALL; sha256sum * | sha256sum"
    listed = subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert digest_of_jars(tmp_path) == listed.split()[0]


def test_fetches_once(cache: Path, maven: Maven, jars: BrokerJars) -> None:
    home = pulsar_home(quiet, jars)
    assert home == cache / "pulsar-5.0"
    assert is_complete(home, jars.sha256)
    assert (home / "lib" / "other.jar").exists()
    assert (home / "conf" / "standalone.conf").exists()
    assert os.access(home / "bin" / "pulsar", os.X_OK)
    assert pulsar_home(quiet, jars) == home
    assert len(maven.calls) == 1
    for part in ("--strict-checksums", "-Dpulsar.version=5.0", "--activate-profiles v5"):
        assert part in maven.calls[0]


def test_another_jar_is_fetched_again_into_an_empty_repository(cache: Path, maven: Maven, jars: BrokerJars) -> None:
    maven.deliver("altered")
    home = pulsar_home(quiet, jars)
    assert (home / "lib" / "pulsar-broker-5.0.jar").read_text() == "good\n"
    assert [call.endswith(f"-Dmaven.repo.local={cache / 'm2'}") for call in maven.calls] == [True, False]
    assert sorted(path.name for path in cache.iterdir()) == ["lock", "pulsar-5.0"]


def test_untested_jars_are_refused(cache: Path, maven: Maven, jars: BrokerJars) -> None:
    maven.deliver("released tomorrow", "released tomorrow")
    with pytest.raises(DistributionError, match=r"not those that were tried: their digest is [0-9a-f]{64}, not "):
        pulsar_home(quiet, jars)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_interrupted_copy_is_done_again(
    cache: Path, maven: Maven, jars: BrokerJars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_directory: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("local.broker_jars.digest_of_jars", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pulsar_home(quiet, jars)
    assert not (cache / "pulsar-5.0").exists()
    (cache / ".pulsar-5.0.killed" / "new" / "lib").mkdir(parents=True)  # what SIGKILL would have left
    assert is_complete(pulsar_home(quiet, jars), jars.sha256)
    assert [path.name for path in cache.glob(".pulsar*")] == []


def test_missing_jar_is_fetched_again(cache: Path, maven: Maven, jars: BrokerJars) -> None:
    home = pulsar_home(quiet, jars)
    (home / "lib" / "other.jar").unlink()
    assert is_complete(pulsar_home(quiet, jars), jars.sha256)
    assert len(maven.calls) == 2


def test_our_own_files_belong_to_it(jars: BrokerJars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed script or configuration makes a new directory."""
    files = shutil.copytree(Path(run.__file__).parent / "jars", tmp_path / "files")
    before = jars.sha256
    monkeypatch.setattr("local.broker_jars._FILES", files)
    assert jars.sha256 == before
    (files / "standalone.conf").write_text("other=1\n")
    assert jars.sha256 != before


def test_maven_fails(cache: Path, maven: Maven, jars: BrokerJars) -> None:
    maven.deliver("fail")
    with pytest.raises(DistributionError, match="no such artifact"):
        pulsar_home(quiet, jars)
    assert len(maven.calls) == 1


@pytest.mark.parametrize(("jar", "kept"), [("pulsar-broker-5.0.0.jar", False), ("pulsar-broker-4.2.4.jar", True)])
@pytest.mark.usefixtures("cache", "maven")
def test_script(jars: BrokerJars, fake_command: FakeCommand, jar: str, kept: bool) -> None:
    """The port of the bookie is for those that know the option."""
    home = pulsar_home(quiet, jars)
    (home / "lib" / "pulsar-broker-5.0.jar").rename(home / "lib" / jar)
    fake_command("java", 'printf "%s\\n" "$@"')
    command = [home / "bin" / "pulsar", "standalone", "--bookkeeper-port", "1", "--metadata-dir", "d"]
    environment = {**os.environ, "PULSAR_MEM": "-Xmx1g -Xms1g", "PULSAR_STANDALONE_CONF": "/conf"}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    said = result.stdout.splitlines()
    assert said[:2] == ["-Xmx1g", "-Xms1g"]
    start = said.index("org.apache.pulsar.PulsarStandaloneStarter")
    port = ["--bookkeeper-port", "1"] if kept else []
    assert said[start + 1 :] == ["-c", "/conf", *port, "--metadata-dir", "d"]


def test_known_releases() -> None:
    assert [source_of(version).version for version in ("4.0.8", "4.2.4", "5.0.0-M1")] == ["4.0.8", "4.2.4", "5.0.0-M1"]
    with pytest.raises(DistributionError, match=r"Pulsar '5.1' is not known here; known are 4.0.8, 4.2.4, 5.0.0-M1\."):
        source_of("5.1")


def test_make_run_of_an_unknown_release(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is installed or started."""
    monkeypatch.setattr("sys.argv", ["run"])
    monkeypatch.setenv("BROKER_VERSION", "6.0.0")
    monkeypatch.delenv("BROKER", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert run.main() == 1
    assert "known are 4.0.8, 4.2.4, 5.0.0-M1" in capsys.readouterr().out
