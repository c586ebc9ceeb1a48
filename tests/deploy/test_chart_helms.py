"""Helm 3 and Helm 4 make the same of the chart: `helm_template` compares their servers for each line whose shape is new
among all tests; a server answers what its Helm does."""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from local import go_tools

from tests.deploy.chart import (
    CHART,
    NEWEST,
    OLDEST,
    OPTIONS,
    RELEASE,
    Refused,
    assert_equal,
    helm_template,
    helms,
    needs_tools,
    shapes,
    with_same_token,
    write,
)
from tests.deploy.served_helm import Outcome, served_helms

pytestmark = needs_tools


def answer(returncode: int, stdout: str = "", stderr: str = "") -> Outcome:
    return Outcome(["helm"], returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (answer(0, "a: 1\n"), answer(0, "a: 2\n")),
        (answer(0, "a: 1\n"), answer(1, stderr="Error: refused")),
        (answer(1, stderr="Error: one"), answer(1, stderr="Error: two")),
    ],
)
def test_a_difference_between_helms_is_an_error(one: Outcome, other: Outcome) -> None:
    with pytest.raises(AssertionError, match="other and one differ"):
        assert_equal({"one": one, "other": other})
    assert_equal({"one": one, "other": one})


def test_the_order_in_a_refusals_list_is_no_difference() -> None:
    one, other = (answer(1, stderr=f"additional properties {names} not allowed") for names in ("'a', 'b'", "'b', 'a'"))
    assert_equal({"one": one, "other": other})


@pytest.mark.parametrize(
    ("one", "other", "is_new"),
    [
        ("replicas: 3\n", "replicas: 12\n", False),
        ("name: one\n", "name: other\n", False),
        ("replicas: 3\n", "replicas: 3e+06\n", True),
        ("replicas: 3\n", 'replicas: "3"\n', True),
        ("replicas: 3\n", "  replicas: 3\n", True),
        ("name: one\n", "label: one\n", True),
        ("bind = 3\n", "max = 3\n", True),
        ("name: one\n", "name: one two\n", True),
        ("name: one\n", "name:\n", True),
    ],
)
def test_a_line_is_new_with_another_key_or_kind_of_value(one: str, other: str, *, is_new: bool) -> None:
    assert bool(shapes(answer(0, other)) - shapes(answer(0, one))) == is_new


def test_both_versions_are_tried() -> None:
    versions = [result.stdout[:3] for result in helms("version", "--template", "{{.Version}}").values()]
    assert versions == ["v4.", "v3."]


@pytest.mark.parametrize(
    ("values", "kubernetes", "release"),
    [
        ({}, NEWEST, RELEASE),
        (
            {"tls": {"existingSecret": "t", "enabled": True}, "monitoring": {"dashboard": {"enabled": True}}},
            OLDEST,
            "other",
        ),
        ({"replicaCount": "three"}, NEWEST, RELEASE),
        ({"image": {"tga": "1", "tagg": "2"}}, NEWEST, RELEASE),
        ({"tls": {"enabled": True}}, NEWEST, RELEASE),
        ({"config": 1}, NEWEST, RELEASE),
        ({}, "1.20.0", RELEASE),
        ({}, "newest", RELEASE),
        ({}, NEWEST, "Name_without_sense"),
        ({"replicaCount": 2}, NEWEST, RELEASE),
    ],
)
def test_a_server_answers_what_its_helm_does(
    values: dict[str, Any], kubernetes: str, release: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "values.yaml", json.dumps(values))
    real = helms("template", release, CHART, *OPTIONS, f"--kube-version={kubernetes}", "--values", file)
    call = (json.dumps(values), kubernetes, release, RELEASE, str(CHART), *OPTIONS)
    served = with_same_token(served_helms(go_tools.HELMS, *call))
    assert [*real] == [*served]
    for helm in real:
        assert (served[helm].returncode, served[helm].stdout) == (real[helm].returncode, real[helm].stdout)
        assert_equal({"real": real[helm], "served": served[helm]})
        assert real[helm].stdout or "Error: " in real[helm].stderr


def files(package: Path) -> dict[str, bytes]:
    with tarfile.open(package) as archive:
        members = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read() for name, file in members.items() if file}


def test_packages_hold_the_same_and_render_what_the_folder_does(tmp_path: Path) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    packages = []
    for helm in go_tools.HELMS:
        command = [go_tools.tool(helm), "package", CHART, "--destination", tmp_path / helm]
        subprocess.run(command, check=True, capture_output=True)
        packages.append(tmp_path / helm / f"{CHART.name}-{version}.tgz")
    assert files(packages[0]) == files(packages[1])
    rendered = helms("template", RELEASE, packages[0], *OPTIONS)
    assert_equal(rendered)
    assert rendered["helm"].stdout == helm_template({})


def test_a_value_that_toml_cannot_express_is_refused() -> None:
    values = {"config": {"authentication": {"plugins": {"voucher": {"list": [1, None]}}}}}
    with pytest.raises(
        Refused, match=r"config: TOML cannot express this \(toml: cannot encode array with nil element\)"
    ):
        helm_template(values)
