"""The images: what is copied into them, and how they are built."""

import json
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
from local import images
from local.environment import ROOT

from tests.local.conftest import FakeCommand

DOCKERFILE = (ROOT / "deploy/image/Dockerfile").read_text()


def packages() -> list[str]:
    """The packages that the wheel holds, and the folders of its other files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [*wheel["packages"], *wheel["shared-data"]]


@pytest.mark.parametrize("package", packages())
def test_every_package_of_the_wheel_is_copied_and_not_ignored(package: str) -> None:
    assert f"COPY {package} /build/tree/{package}" in DOCKERFILE
    assert f"!{package}" in (ROOT / ".dockerignore").read_text().splitlines()


def stage_text(stage: str) -> str:
    """A stage of the Dockerfile, without its first line."""
    (text,) = re.findall(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(text)


def test_dockerignore_excludes_all_files_that_it_does_not_name() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "**"
    assert not any("tests" in line or ".git" in line for line in lines)


@pytest.mark.parametrize("stage", ["proxy", "analytics"])
def test_an_image_that_is_run_has_a_numeric_user_and_no_tools(stage: str) -> None:
    text = stage_text(stage)
    # runAsNonRoot can be checked by a kubelet only for a number.
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert not re.search(r"\bpip\b|gcc|-dev\b", text)


def test_the_proxys_image_is_built_for_any_platform_without_running_its_programs() -> None:
    assert "\nFROM scratch AS proxy\n" in DOCKERFILE
    assert not re.search(r"^RUN ", stage_text("proxy"), re.MULTILINE)
    assert "\nFROM --platform=$BUILDPLATFORM ${BASE} AS build\n" in DOCKERFILE
    assert "\nFROM build AS build-proxy\n" in DOCKERFILE
    assert stage_text("build-proxy").count("$TARGETARCH") == 2


def test_the_proxy_is_what_is_built_without_a_target() -> None:
    assert re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "proxy"


def test_a_build_uses_no_cache_and_one_time_for_all(tmp_path: Path) -> None:
    command = images.build_command(images.PROXY, "base:1", 1234, tmp_path / "id")

    def after(option: str) -> str:
        return command[command.index(option) + 1]

    assert "--no-cache" in command
    assert after("--timestamp") == "1234"
    assert after("--target") == "proxy"
    assert {"BASE=base:1", "SOURCE_DATE_EPOCH=1234"} <= set(command)
    assert command[-1] == "."


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_a_build_runs_on_this_machines_platform(tmp_path: Path, architecture: str) -> None:
    command = images.build_command(images.PROXY, "base:1", 1234, tmp_path / "id", architecture)
    assert command[command.index("--platform") + 1] == f"linux/{architecture}"
    assert f"BUILDPLATFORM=linux/{images.NATIVE}" in command
    suffix = "" if architecture == images.NATIVE else f"-{architecture}"
    assert command[command.index("--tag") + 1] == f"lab.local/pulsar-trio-proxy:dev{suffix}"


BUILDAH = """
echo "$*" >> {log}
case "$1 $2" in
  "bud "*) while [ "$1" != --iidfile ]; do shift; done; echo "sha256:$(grep -c ^bud {log})" > "$2" ;;
  "inspect "*) echo "${{USER_OF_IMAGE:-10001:10001}}" ;;
  "from "*) echo container ;;
  "mount "*) echo {root} ;;
  "run "*) exit "${{IMPORTS_END_WITH:-0}}" ;;
  "manifest create") echo index ;;
  "manifest push") cd "${{6#oci:}}"; mkdir blobs; echo index > index.json; echo b > blobs/b ;;
esac
"""


@pytest.fixture
def buildah(tmp_path: Path, fake_command: FakeCommand) -> Path:
    """A stand-in for buildah; returns its log of calls."""
    (tmp_path / "root").mkdir()
    fake_command("buildah", BUILDAH.format(log=tmp_path / "log", root=tmp_path / "root"))
    return tmp_path / "log"


def test_an_archive_holds_an_index_of_all_architectures(
    tmp_path: Path, buildah: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "NATIVE", "amd64")
    archives = [images.write_archive(images.PROXY, tmp_path / name) for name in ("first", "second")]
    assert [path.relative_to(tmp_path).as_posix() for path in archives] == [
        "first/pulsar-trio-proxy.oci.tar",
        "second/pulsar-trio-proxy.oci.tar",
    ]
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        assert archive.getnames() == ["blobs", "blobs/b", "index.json"]
    calls = buildah.read_text().splitlines()
    platforms = re.findall(r"^bud .*--platform (\S+)", buildah.read_text(), re.MULTILINE)
    assert platforms == ["linux/amd64", "linux/arm64"] * 2
    assert [call for call in calls if call.startswith("manifest")][:3] == [
        "manifest create lab.local/pulsar-trio-proxy:dev-index",
        "manifest add index sha256:1",
        "manifest add index sha256:2",
    ]
    assert sum(call == "manifest rm index" for call in calls) == 2
    assert sum(call.startswith("run ") for call in calls) == 4  # none of another architecture


def test_the_bill_of_materials_of_each_architecture_is_copied(tmp_path: Path, buildah: Path) -> None:
    inside = tmp_path / "root/usr/share/sbom/pulsar-trio-proxy.cdx.json"
    inside.parent.mkdir(parents=True)
    inside.write_text('{"components": [], "dependencies": []}')
    paths = [images.write_bill_of_materials(images.PROXY, tmp_path / "dist", name) for name in ("amd64", "arm64")]
    assert [path.name for path in paths] == [f"pulsar-trio-proxy.image-{name}.cdx.json" for name in ("amd64", "arm64")]
    assert [json.loads(path.read_text())["components"] for path in paths] == [[], []]
    made_of = re.findall(r"^from .*--arch (\S+) (\S+)$", buildah.read_text(), re.MULTILINE)
    assert made_of == [(name, images.PROXY.tag(name)) for name in ("amd64", "arm64")]


@pytest.mark.usefixtures("buildah")
def test_a_bill_of_materials_has_the_packages_that_dpkg_installed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name, text in {
        "usr/share/sbom/pulsar-proxy-analytics.cdx.json": '{"components": [], "dependencies": []}',
        "usr/lib/os-release": 'VERSION_ID="13"\n',
        "var/lib/dpkg/status": """\
Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-3

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
""",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    path = images.write_bill_of_materials(images.ANALYTICS, tmp_path / "dist")
    assert path.name == f"pulsar-trio-proxy-analytics.image-{images.NATIVE}.cdx.json"
    purls = [component["purl"] for component in json.loads(path.read_text())["components"]]
    assert purls == ["pkg:deb/debian/tini@0.19.0-3?arch=amd64&distro=debian-13"]


@pytest.mark.usefixtures("buildah")
@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("USER_OF_IMAGE", "0", "its user is '0', not 10001:10001"),
        ("IMPORTS_END_WITH", "1", "Importing the proxy's modules"),
    ],
)
def test_a_built_image_is_checked(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(images.ImageError, match=problem):
        images.build_image(images.PROXY)


def test_a_built_images_files_are_checked(tmp_path: Path, buildah: Path) -> None:
    (tmp_path / "root/usr/bin").mkdir(parents=True)
    (tmp_path / "root/usr/bin/perl").touch()
    with pytest.raises(images.ImageError, match="/usr/bin/perl: does not belong"):
        images.build_image(images.PROXY)
    assert "rm container" in buildah.read_text().splitlines()


def test_times_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "77")
    assert images.source_date_epoch_s() == 77


def test_without_a_commit_times_are_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.setattr(images, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert images.source_date_epoch_s() == 0


DRIVER = """tini -s -- HOME/bin/spark-submit --conf spark.driver.bindAddress=10.0.0.1
--conf spark.executorEnv.SPARK_DRIVER_POD_IP=10.0.0.1 --deploy-mode client --class X cli.py"""
EXECUTOR = """tini -s -- java -Da=b c -Dx=2 -Dx=10 -Xms1g -Xmx1g -cp HOME/conf:HOME/jars/*
org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend --driver-url spark://d --executor-id 1
--cores 2 --app-id app --hostname 10.0.0.2 --resourceProfileId 0 --podName pod"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pulsar-proxy-analytics", "usage"], "pulsar-proxy-analytics usage"),
        (["driver", "--class", "X", "cli.py"], DRIVER),
        (["executor"], EXECUTOR),
    ],
)
def test_the_entry_point_keeps_sparks_contract(tmp_path: Path, arguments: list[str], expected: str) -> None:
    for name in ("tini", "pulsar-proxy-analytics"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho HOME\n")
    python.chmod(0o755)
    bash = shutil.which("bash")
    assert bash
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1",
        "SPARK_EXECUTOR_MEMORY": "1g",
        "SPARK_DRIVER_URL": "spark://d",
        "SPARK_EXECUTOR_ID": "1",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.2",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "pod",
        "SPARK_JAVA_OPT_10": "-Dx=10",
        "SPARK_JAVA_OPT_2": "-Dx=2",
        "SPARK_JAVA_OPT_0": "-Da=b c",  # one option with a blank in it
    }
    result = subprocess.run(
        [bash, str(ROOT / "deploy/image/spark-entrypoint.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == expected.split()
