"""Whatever an earlier run left behind, the next one ends with a complete distribution."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from local import distribution
from local.distribution import Archive, DistributionError, is_complete, pulsar_home

FakeCommand = Callable[[str, str], Path]


# Delivers deliver/1 at the first call, deliver/2 at the second; a missing one is a failing Maven.
_MAVEN = """
for argument in "$@"; do
  case $argument in -Dmaven.repo.local=*) repository=${argument#*=};; esac
done
cd "{directory}"
echo "$@" >> calls
number=$(wc -l < calls)
[ -e deliver/$number ] || { echo "no such artifact"; exit 1; }
target=$repository/org/example/server/1.0
mkdir -p $target
rm -f $target/*.part
cp deliver/$number $target/server-1.0-bin.tar.gz
"""


class Maven:
    """The fake `mvn`: what it delivers, and how often it was called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "deliver").mkdir(parents=True)

    def deliver(self, *contents: bytes) -> None:
        for number, content in enumerate(contents, 1):
            (self.directory / "deliver" / str(number)).write_bytes(content)

    @property
    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local.process._POLL_S", 0.01)


@pytest.fixture
def maven(tmp_path: Path, fake_command: FakeCommand) -> Maven:
    maven = Maven(tmp_path / "maven")
    fake_command("mvn", _MAVEN.replace("{directory}", str(maven.directory)))
    return maven


@pytest.fixture
def tarball(tmp_path: Path) -> bytes:
    top = tmp_path / "content" / "server-1.0"
    (top / "bin").mkdir(parents=True)
    (top / "bin" / "pulsar").write_text("#!/bin/sh\n")
    (top / "lib.jar").write_bytes(bytes(1000))
    file = tmp_path / "server.tar.gz"
    subprocess.run(["tar", "-czf", file, "-C", top.parent, top.name], check=True)
    return file.read_bytes()


@pytest.fixture
def archive(tarball: bytes) -> Archive:
    digest = hashlib.sha256(tarball).hexdigest()
    return Archive("org.example", "server", "1.0", "bin", sha256=digest, megabytes=1)


def test_fetches_and_unpacks_once(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    maven.deliver(tarball)
    said: list[str] = []
    home = pulsar_home(said.append, archive)
    assert home == cache / "pulsar-1.0"
    assert (home / "bin" / "pulsar").read_text() == "#!/bin/sh\n"
    assert any("MB" in text or "preparing" in text for text in said)
    said.clear()
    assert pulsar_home(said.append, archive) == home
    assert said == []
    assert len(maven.calls) == 1
    assert "--strict-checksums" in maven.calls[0]
    assert "-Dartifact=org.example:server:1.0:tar.gz:bin" in maven.calls[0]


def test_corrupt_tarball_is_fetched_again(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    maven.deliver(b"<html>a captive portal</html>", tarball)
    said: list[str] = []
    assert is_complete(pulsar_home(said.append, archive), archive.sha256)
    assert len(maven.calls) == 2
    assert any("broken, fetching it again" in text for text in said)


def test_tarball_that_went_bad_in_the_cache(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    path = archive.path(cache / "m2")
    path.parent.mkdir(parents=True)
    path.write_bytes(tarball[:-10])
    maven.deliver(tarball)
    assert is_complete(pulsar_home(lambda _: None, archive), archive.sha256)
    assert len(maven.calls) == 1


def test_tarball_that_tar_refuses_is_fetched_again_once(cache: Path, maven: Maven) -> None:
    content = b"right digest, but no archive"
    digest = hashlib.sha256(content).hexdigest()
    archive = Archive("org.example", "server", "1.0", "bin", sha256=digest, megabytes=1)
    maven.deliver(content, content, content)
    with pytest.raises(DistributionError, match="broken, twice: tar: "):
        pulsar_home(lambda _: None, archive)
    assert len(maven.calls) == 2
    assert [path.name for path in cache.iterdir() if "pulsar" in path.name] == []


def test_interrupted_unpack_is_done_again(
    cache: Path, maven: Maven, tarball: bytes, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    maven.deliver(tarball)

    def interrupted(_directory: Path) -> list[Path]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distribution, "_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pulsar_home(lambda _: None, archive)
    (cache / ".pulsar-1.0.killed" / "new").mkdir(parents=True)  # what SIGKILL would have left
    home = pulsar_home(lambda _: None, archive)
    assert is_complete(home, archive.sha256)
    assert len(maven.calls) == 1
    assert [path.name for path in cache.glob(".pulsar*")] == []


@pytest.mark.parametrize("damage", ["file missing", "file shorter", "manifest missing", "manifest torn"])
def test_damaged_unpack_is_done_again(cache: Path, maven: Maven, tarball: bytes, archive: Archive, damage: str) -> None:
    maven.deliver(tarball)
    home = pulsar_home(lambda _: None, archive)
    manifest = home / ".complete.json"
    match damage:
        case "file missing":
            (home / "lib.jar").unlink()
        case "file shorter":
            (home / "lib.jar").write_bytes(b"")
        case "manifest missing":
            manifest.unlink()
        case "manifest torn":
            manifest.write_text(manifest.read_text()[:20])
    assert not is_complete(home, archive.sha256)
    assert is_complete(pulsar_home(lambda _: None, archive), archive.sha256)
    assert (home / "lib.jar").stat().st_size == 1000
    assert len(maven.calls) == 1  # the tarball was still good


@pytest.mark.parametrize("content", [{}, [], {"sha256": "other", "files": {}}, {"files": {}}])
def test_manifest_of_something_else(tmp_path: Path, archive: Archive, content: object) -> None:
    (tmp_path / ".complete.json").write_text(json.dumps(content))
    assert not is_complete(tmp_path, archive.sha256)


def test_partial_file_that_cannot_be_resumed(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    partial = archive.path(cache / "m2").with_suffix(".gz.part")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    maven.deliver(b"", tarball)
    (maven.directory / "deliver" / "1").unlink()
    said: list[str] = []
    assert is_complete(pulsar_home(said.append, archive), archive.sha256)
    assert any("could not be resumed" in text for text in said)


def test_maven_fails(cache: Path, maven: Maven, archive: Archive) -> None:
    with pytest.raises(DistributionError, match="no such artifact"):
        pulsar_home(lambda _: None, archive)
    assert len(maven.calls) == 1


def test_maven_missing(cache: Path, monkeypatch: pytest.MonkeyPatch, archive: Archive) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(DistributionError, match="Maven"):
        pulsar_home(lambda _: None, archive)


def test_new_digest_means_a_new_distribution(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    maven.deliver(tarball, tarball)
    home = pulsar_home(lambda _: None, archive)
    assert not is_complete(home, "0" * 64)


def test_second_run_waits_for_the_first(cache: Path, maven: Maven, tarball: bytes, archive: Archive) -> None:
    maven.deliver(tarball)
    cache.mkdir(parents=True)
    waiting = threading.Event()
    homes: list[Path] = []

    def progress(text: str) -> None:
        if text.startswith("Waiting for another run"):
            waiting.set()

    with (cache / "lock").open("w") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: homes.append(pulsar_home(progress, archive)))
        thread.start()
        assert waiting.wait(60)
        assert maven.calls == []
    thread.join(10)
    assert homes == [cache / "pulsar-1.0"]
    assert len(maven.calls) == 1
