"""`make publish` against a registry on loopback, with Helm and crane. cosign takes minutes to build: a stand-in has its
place here, test_local_publish_cosign.py has it itself.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local import base_image, go_tools, images, publish, release
from local.publish import Publisher, PublishError, check_destination, check_dist

from tests.local.conftest import FakeCommand
from tests.local.publish_scene import COMMIT, NUMBER, Release, rewrite, serve_registry, write_release

pytestmark = pytest.mark.skipif(not go_tools.available(), reason="Go builds Helm and crane: missing or too old")

COSIGN = """
echo "$*" >> "{log}"
for last; do :; done
case "$1" in
  sign) echo "sign $last" >> "{log}.made" ;;
  attest) type="${{*##*--type }}"; echo "attest ${{type%% *}} $last" >> "{log}.made" ;;
  verify) grep -qx "sign $last" "{log}.made" ;;
  verify-attestation) grep -qx "attest $3 $last" "{log}.made" ;;
esac
"""


@pytest.fixture
def cosign(tmp_path: Path, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cosign that keeps its signatures in a file; the file."""
    path = fake_command("cosign", COSIGN.format(log=tmp_path / "cosign.log"))
    real = go_tools.tool
    monkeypatch.setattr(go_tools, "tool", lambda name: path if name == "cosign" else real(name))
    made = tmp_path / "cosign.log.made"
    made.touch()
    return made


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry's host and a path in it."""
    with serve_registry(tmp_path) as host:
        yield f"{host}/pulsar"


@pytest.fixture
def made(tmp_path: Path) -> Release:
    return write_release(tmp_path / "release")


def crane(*arguments: str) -> str:
    command = [go_tools.tool("crane"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def contents(registry: str) -> dict[str, str]:
    """Digest of each tag."""
    host = registry.partition("/")[0]
    repositories = [f"{host}/{name}" for name in crane("catalog", host).split()]
    names = [f"{repository}:{tag}" for repository in repositories for tag in crane("ls", repository).split()]
    return {name.removeprefix(f"{registry}/"): crane("digest", name).strip() for name in names}


def test_images_and_chart_are_pushed_and_signed_by_digest(registry: str, cosign: Path, made: Release) -> None:
    references = Publisher(registry, "key").publish(made.dist, NUMBER)
    found = contents(registry)
    assert found == {
        f"pulsar-trio-proxy:{NUMBER}": made.digests["pulsar-trio-proxy"],
        f"pulsar-trio-proxy-analytics:{NUMBER}": made.digests["pulsar-trio-proxy-analytics"],
        f"charts/pulsar-trio-proxy:{NUMBER}": references[-1].partition("@")[2],
    }
    assert sorted(references) == sorted(f"{registry}/{name.partition(':')[0]}@{found[name]}" for name in found)
    platforms = {
        (name, entry["digest"])
        for name in made.digests
        for entry in json.loads(crane("manifest", f"{registry}/{name}:{NUMBER}"))["manifests"]
    }
    assert len(platforms) == 3
    expected = [f"sign {reference}" for reference in references]
    expected += [f"attest slsaprovenance1 {reference}" for reference in references]
    expected += [f"attest cyclonedx {references[-1]}"]
    for name, digest in platforms:
        expected += [f"{what} {registry}/{name}@{digest}" for what in ("sign", "attest cyclonedx")]
    assert sorted(cosign.read_text().splitlines()) == sorted(expected)


def test_the_chart_that_is_pulled_is_the_one_of_the_release(
    registry: str, cosign: Path, made: Release, tmp_path: Path
) -> None:
    Publisher(registry, "key").publish(made.dist, NUMBER)
    for helm in go_tools.HELMS:
        (target := tmp_path / helm).mkdir()
        chart = f"oci://{registry}/charts/pulsar-trio-proxy"
        pull = [go_tools.tool(helm), "pull", chart, "--version", NUMBER, "--plain-http", "--destination", target]
        subprocess.run(pull, check=True, capture_output=True)
        assert next(target.iterdir()).read_bytes() == (made.dist / f"pulsar-trio-proxy-{NUMBER}.tgz").read_bytes()


def test_a_second_run_changes_nothing(registry: str, cosign: Path, made: Release) -> None:
    first = Publisher(registry, "key").publish(made.dist, NUMBER)
    before, signed = contents(registry), cosign.read_text()
    assert Publisher(registry, "key").publish(made.dist, NUMBER) == first
    assert (contents(registry), cosign.read_text()) == (before, signed)


def test_an_interrupted_run_is_completed(registry: str, cosign: Path, made: Release) -> None:
    Publisher(registry, "key").publish(made.dist, NUMBER)
    whole = cosign.read_text().splitlines()
    cosign.write_text("\n".join(whole[:-3]) + "\n")
    Publisher(registry, "key").publish(made.dist, NUMBER)
    assert cosign.read_text().splitlines() == whole


@pytest.mark.parametrize("there", ["pulsar-trio-proxy", "pulsar-trio-proxy-analytics", "charts/pulsar-trio-proxy"])
def test_a_published_artifact_is_never_overwritten(
    registry: str, cosign: Path, made: Release, tmp_path: Path, there: str
) -> None:
    other = write_release(tmp_path / "other", b"other layer")
    Publisher(registry, "key").publish(other.dist, NUMBER)
    published = contents(registry)
    for name in published:
        if name != f"{there}:{NUMBER}":
            crane("delete", f"{registry}/{name}")
    cosign.write_text("")
    with pytest.raises(PublishError, match=rf"{there}:{NUMBER}: .* never overwritten: release another one"):
        Publisher(registry, "key").publish(made.dist, NUMBER)
    assert contents(registry)[f"{there}:{NUMBER}"] == published[f"{there}:{NUMBER}"]
    assert cosign.read_text() == ""


def test_a_registry_that_cannot_be_asked_is_not_an_empty_one(cosign: Path, made: Release, tmp_path: Path) -> None:
    with serve_registry(tmp_path) as host:
        pass
    with pytest.raises(PublishError, match=rf"{host}/pulsar/pulsar-trio-proxy-analytics:{NUMBER}: .*refused"):
        Publisher(f"{host}/pulsar", "key").publish(made.dist, NUMBER)


def test_nothing_goes_to_the_public_log_unless_it_is_asked_for(
    registry: str, cosign: Path, made: Release, tmp_path: Path
) -> None:
    Publisher(registry, "key").publish(made.dist, NUMBER)
    calls = (tmp_path / "cosign.log").read_text().splitlines()
    assert len([call for call in calls if re.match("sign |attest ", call)]) == 13
    for call in calls:
        if re.match("sign |attest ", call):
            assert "--signing-config" in call
        if call.startswith("verify"):
            assert "--private-infrastructure" in call
    public = Publisher(registry, "key", transparency_log=True)
    cosign.write_text("")
    (tmp_path / "cosign.log").write_text("")
    public.publish(made.dist, NUMBER)
    assert not re.search("signing-config|private-infra", (tmp_path / "cosign.log").read_text())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda dist: (dist / "pulsar-trio-proxy.oci.tar").write_bytes(b""), "dist/pulsar-trio-proxy.oci.tar: not as"),
        (lambda dist: (dist / "more.txt").write_text(""), "dist/more.txt: not as SHA256SUMS has it"),
        (lambda dist: (dist / "pulsar-trio-proxy.oci.tar").unlink(), "dist/pulsar-trio-proxy.oci.tar: not as"),
        (lambda dist: (dist / publish.chart_name(NUMBER)).unlink(), r"dist/ has no pulsar-trio-proxy-.*\.tgz"),
        (lambda dist: (dist / "SHA256SUMS").unlink(), "dist/ has no SHA256SUMS; run `make release`"),
    ],
)
def test_only_a_whole_release_is_published(made: Release, change: Callable[[Path], object], complaint: str) -> None:
    check_dist(made.dist, NUMBER, COMMIT)
    change(made.dist)
    with pytest.raises(PublishError, match=complaint):
        check_dist(made.dist, NUMBER, COMMIT)


def test_only_a_release_of_this_commit_is_published(made: Release) -> None:
    with pytest.raises(PublishError, match=f"dist/ is of commit {COMMIT}, this tree is at {'d' * 40}"):
        check_dist(made.dist, NUMBER, "d" * 40)


@pytest.mark.parametrize("base", ["registry.example.org/base:1", images.STAND_IN])
def test_images_on_a_base_without_a_digest_are_published_only_when_asked_for(tmp_path: Path, base: str) -> None:
    made = write_release(tmp_path / "other", base=base)
    with pytest.raises(
        base_image.BaseError, match=f"intoto.json: the base image {base} has no digest.* ARGS=--any-base"
    ):
        check_dist(made.dist, NUMBER, COMMIT)
    check_dist(made.dist, NUMBER, COMMIT, any_base=True)


def test_an_archive_whose_index_was_changed_is_refused(made: Release, tmp_path: Path) -> None:
    digest = made.digests["pulsar-trio-proxy"].removeprefix("sha256:")
    rewrite(made.dist / "pulsar-trio-proxy.oci.tar", f"blobs/sha256/{digest}", b'{"manifests": []}', tmp_path / "x")
    with pytest.raises(ValueError, match="its index is not of the digest"):
        Publisher("127.0.0.1:1/x", "key").publish(made.dist, NUMBER)


@pytest.mark.parametrize(
    ("registry", "key", "complaint"),
    [
        ("", "k", "REGISTRY: '' is no host/path"),
        ("registry.example.org", "k", "REGISTRY: .* is no host/path"),
        ("oci://registry.example.org/x", "k", "REGISTRY: .* is no host/path"),
        ("--help/x", "k", "REGISTRY: .* is no host/path"),
        ("registry.example.org/x", "", "COSIGN_KEY: empty"),
        ("registry.example.org/x", "missing.key", "COSIGN_KEY: no file missing.key"),
    ],
)
def test_destinations_that_are_refused(registry: str, key: str, complaint: str) -> None:
    check_destination("registry.example.org:5000/team/pulsar", "awskms:///alias/release")
    with pytest.raises(PublishError, match=complaint):
        check_destination(registry, key)


def test_a_tree_with_changes_is_not_published(
    tmp_path: Path, made: Release, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    subprocess.run(["git", "init", "-q", tree], check=True)
    (tree / "new.py").touch()
    monkeypatch.setattr(release, "DIST", made.dist)
    monkeypatch.setattr(release, "clean_commit", lambda clean=release.clean_commit: clean(tree))
    monkeypatch.setenv("COSIGN_KEY", "awskms:///alias/release")
    monkeypatch.setattr("sys.argv", ["publish", "127.0.0.1:1/x"])
    with pytest.raises(SystemExit, match="1"):
        publish.main()
    assert "commit or remove these:\n?? new.py" in capsys.readouterr().err
