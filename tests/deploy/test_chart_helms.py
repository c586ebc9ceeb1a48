"""Helm 3 and Helm 4 make the same of the chart: `helm_template` compares them in each test, this is what is beside."""

import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from local import go_tools

from tests.deploy.chart import (
    CHART,
    OPTIONS,
    RELEASE,
    Outcome,
    Refused,
    assert_equal,
    helm_template,
    helms,
    needs_tools,
)

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


def test_both_versions_are_tried() -> None:
    versions = [result.stdout[:3] for result in helms("version", "--template", "{{.Version}}").values()]
    assert versions == ["v4.", "v3."]


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


def test_what_toml_cannot_express_is_refused() -> None:
    values = {"config": {"authentication": {"plugins": {"voucher": {"list": [1, None]}}}}}
    with pytest.raises(
        Refused, match=r"config: TOML cannot express this \(toml: cannot encode array with nil element\)"
    ):
        helm_template(values)
