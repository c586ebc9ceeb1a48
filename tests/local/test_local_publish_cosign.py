"""What `make publish` pushes, signed by cosign itself. It runs where `make publish` has built cosign; in CI it does not
(conftest.py), since that takes minutes.
"""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from local import go_tools
from local.publish import Publisher, PublishError

from tests.local.publish_scene import NUMBER, Layout, Release, serve_registry, write_release

PLATFORMS = "pulsar-trio-proxy"


def cosign(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [go_tools.tool("cosign"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def crane(*arguments: str | Path) -> str:
    command = [go_tools.tool("crane"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def key_pair(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSIGN_PASSWORD", "of-the-test")
    directory.mkdir()
    subprocess.run([go_tools.tool("cosign"), "generate-key-pair"], check=True, cwd=directory, capture_output=True)
    return directory / "cosign.key"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], Path, Release]]:
    """The references, the public key, the release."""
    key = key_pair(tmp_path / "keys", monkeypatch)
    made = write_release(tmp_path / "release")
    with serve_registry(tmp_path) as host:
        yield Publisher(f"{host}/pulsar", str(key)).publish(made.dist, NUMBER), key.with_suffix(".pub"), made


def verify(public: Path, reference: str) -> "subprocess.CompletedProcess[str]":
    return cosign("verify", "--key", public, "--private-infrastructure", reference)


def test_signatures_and_attestations(published: tuple[list[str], Path, Release]) -> None:
    references, public, made = published
    assert len(references) == 3
    for reference in references:
        assert verify(public, reference).returncode == 0
        attested = ("verify-attestation", "--key", public, "--private-infrastructure", "--type", "slsaprovenance1")
        result = cosign(*attested, reference)
        assert result.returncode == 0, result.stderr
        statement = json.loads(base64.b64decode(json.loads(result.stdout)["payload"]))
        own = json.loads((made.dist / f"pulsar-trio-proxy-{NUMBER}.intoto.json").read_text())
        assert statement["predicate"] == own["predicate"]
        assert [one["digest"]["sha256"] for one in statement["subject"]] == [reference.rpartition(":")[2]]


def test_an_index_with_another_byte_does_not_verify(
    published: tuple[list[str], Path, Release], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references, public, _ = published
    image = next(one for one in references if "/pulsar-trio-proxy@" in one and "/charts/" not in one)
    repository = image.partition("@")[0]
    changed = tmp_path / "manifest.json"
    changed.write_text(crane("manifest", image) + " ")
    layout = Layout(tmp_path / "layout")
    entry = layout.blob(changed.read_bytes(), "index.v1+json")
    for one in json.loads(changed.read_text())["manifests"]:
        crane("pull", "--format", "oci", f"{repository}@{one['digest']}", tmp_path / "layout")
    (layout.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    crane("push", layout.directory, f"{repository}:{NUMBER}")
    assert crane("digest", f"{repository}:{NUMBER}").strip() == entry["digest"]
    assert verify(public, image).returncode == 0
    result = verify(public, f"{repository}:{NUMBER}")
    assert result.returncode != 0
    assert "no signatures found" in result.stderr
    other = key_pair(tmp_path / "other", monkeypatch).with_suffix(".pub")
    assert verify(other, image).returncode != 0


def test_a_key_that_cannot_be_read_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_pair(tmp_path / "keys", monkeypatch)
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    made = write_release(tmp_path / "release")
    with serve_registry(tmp_path) as host:
        with pytest.raises(PublishError, match="cosign public-key failed"):
            Publisher(f"{host}/pulsar", str(key)).publish(made.dist, NUMBER)
        assert crane("catalog", host) == ""
