"""The chart's package in a release."""

import base64
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from local import go_tools, images, provenance, release
from local.release_chart import ChartRelease, ReleaseError, changes, package, with_digests, with_release

DIGESTS = {"pulsar-trio-proxy": f"sha256:{'a' * 64}", "pulsar-trio-proxy-analytics": f"sha256:{'b' * 64}"}
CHANGELOG = """\
# Changelog

## Unreleased
* Not yet.

## NUMBER (2026-11-23)

### Added
* A page ([how](docs/x.md)) in two
  lines.

### Security
* "Quoted": and more.

## 0.0.1 (2026-01-01)
* Old.
""".replace("NUMBER", release.version())
RELEASE = ChartRelease(release.version(), CHANGELOG, DIGESTS, 1_700_000_000)

needs_tools = pytest.mark.skipif(not go_tools.available(), reason="Go builds Helm: missing or too old")


def test_changes_of_a_version() -> None:
    assert list(changes(CHANGELOG, RELEASE.number)) == [
        ("added", "A page (how) in two lines."),
        ("security", '"Quoted": and more.'),
    ]
    assert list(changes(CHANGELOG, "9.9.9")) == []


def packaged(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return package(go_tools.tool("helm"), release.CHART.parent, directory, RELEASE)


@needs_tools
def test_equal_source_makes_an_equal_package(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = (
        package(go_tools.tool("helm"), release.CHART.parent, tmp_path / name, RELEASE) for name in ("one", "other")
    )
    assert one.name == f"pulsar-trio-proxy-{RELEASE.number}.tgz"
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        assert {member.mtime for member in archive.getmembers()} == {RELEASE.epoch_s}


@needs_tools
def test_the_package_names_the_images_by_digest(tmp_path: Path) -> None:
    made = packaged(tmp_path)
    brokers = "config.brokers.service_url=pulsar://broker:6650"
    for helm in go_tools.HELMS:
        template = [go_tools.tool(helm), "template", "r", made, "--kube-version", "1.33", "--set", brokers]
        for more, expected in (
            ([], ["pulsar-trio-proxy"]),
            (["--set", "analytics.receiver.enabled=true"], ["pulsar-trio-proxy", "pulsar-trio-proxy-analytics"]),
        ):
            result = subprocess.run([*template, *more], check=True, capture_output=True, text=True)
            found = set(re.findall(r"image: \"?([^\s\"]+)", result.stdout))
            assert found == {f"{name}@{DIGESTS[name]}" for name in expected}
        result = subprocess.run([*template, "--set", "image.tag=other"], capture_output=True, text=True)
        assert "image.tag: has no effect unless image.digest is empty" in result.stderr


@needs_tools
def test_the_package_says_what_artifact_hub_shows(tmp_path: Path) -> None:
    made = packaged(tmp_path)
    for helm in go_tools.HELMS:
        subprocess.run([go_tools.tool(helm), "lint", "--strict", made], check=True, capture_output=True)
        shown = subprocess.run([go_tools.tool(helm), "show", "chart", made], check=True, capture_output=True, text=True)
        annotations = yaml.safe_load(shown.stdout)["annotations"]
        images = yaml.safe_load(annotations["artifacthub.io/images"])
        assert {one["name"]: one["image"] for one in images} == {name: f"{name}@{DIGESTS[name]}" for name in DIGESTS}
        assert yaml.safe_load(annotations["artifacthub.io/changes"]) == [
            {"kind": "added", "description": "A page (how) in two lines."},
            {"kind": "security", "description": '"Quoted": and more.'},
        ]
        assert annotations["artifacthub.io/containsSecurityUpdates"] == "true"


def test_the_charts_images_are_those_that_are_built() -> None:
    chart: dict[str, Any] = yaml.safe_load(release.CHART.read_text())
    listed = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    built = {image.repository: list(image.architectures) for image in (images.PROXY,)}
    platforms = {one["name"]: [name.partition("/")[2] for name in one["platforms"]] for one in listed}
    assert platforms == {**built, images.ANALYTICS.repository: ["amd64"]}
    assert list(chart)[-1] == "annotations"  # the release adds lines at the end


def test_the_charts_own_description() -> None:
    chart: dict[str, Any] = yaml.safe_load(release.CHART.read_text())
    assert {"home", "sources", "maintainers", "icon", "kubeVersion", "keywords"} <= chart.keys()
    kind, _, content = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ET.fromstring(base64.b64decode(content)).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("image:\n  repository: pulsar-trio-proxy\n", "0 empty digests"),
        ('image:\n  repository: pulsar-trio-proxy\n  digest: "sha256:1"\n', "0 empty digests"),
        ('a:\n  repository: pulsar-trio-proxy\n  digest: ""\n' * 2, "2 empty digests"),
        ('a:\n  repository: pulsar-trio-proxy\nb:\n  digest: ""\n', "0 empty digests"),
    ],
)
def test_digests_that_have_no_place(values: str, problem: str) -> None:
    with pytest.raises(ReleaseError, match=rf"values.yaml: {problem} beside `repository: pulsar-trio-proxy`"):
        with_digests(values, {"pulsar-trio-proxy": "sha256:2"})


def test_a_chart_of_another_version_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"artifacthub\.io/images has no `image: pulsar-trio-proxy:9.9.9`"):
        with_release(release.CHART.read_text(), ChartRelease("9.9.9", CHANGELOG, DIGESTS, 0))


def test_provenance_names_what_the_release_is_made_of(tmp_path: Path) -> None:
    bill = tmp_path / "x.image-amd64.cdx.json"
    deb = {"purl": "pkg:deb/debian/libc6@2.41", "hashes": [{"alg": "SHA-256", "content": "1" * 64}]}
    bill.write_text(json.dumps({"components": [deb, deb, {"purl": "pkg:pypi/trio@0.35"}, {"name": "no purl"}]}))
    base = {"name": "base:1", "digest": {"sha256": "2" * 64}}
    release.write_provenance(tmp_path, "1.2.3", "c" * 40, {"image": f"sha256:{'3' * 64}"}, [base])
    made = json.loads((tmp_path / "pulsar-trio-proxy-1.2.3.intoto.json").read_text())
    assert (made["_type"], made["predicateType"]) == (provenance.STATEMENT_TYPE, provenance.PREDICATE_TYPE)
    subjects = {one["name"]: one["digest"]["sha256"] for one in made["subject"]}
    assert subjects == {bill.name: provenance.file_sha256(bill), "image": "3" * 64}
    materials = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert materials[0] == {"name": "source", "digest": {"gitCommit": "c" * 40}}
    assert materials[-2:] == [base, {"uri": deb["purl"], "digest": {"sha256": "1" * 64}}]
    lists = {one["name"] for one in materials[1:-2]}
    assert {"constraints.txt", "deploy/requirements/proxy.txt", "deploy/requirements/analytics.txt"} <= lists
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: digest for name, digest in release.sums(tmp_path).items() if name != "SHA256SUMS"}


@needs_tools
def test_no_released_text_names_a_registry(tmp_path: Path) -> None:
    made = packaged(tmp_path)
    release.write_chart(tmp_path, RELEASE.number, DIGESTS)
    with tarfile.open(made) as archive:
        values = archive.extractfile("pulsar-trio-proxy/values.yaml")
        assert values
        repositories = re.findall(r"repository: (\S+)", values.read().decode())
    assert repositories == list(DIGESTS)
    bill = json.loads((tmp_path / release.chart_bill_name(RELEASE.number)).read_text())
    assert [one["name"] for one in bill["components"]] == list(DIGESTS)
