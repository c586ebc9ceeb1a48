"""The node as an object: what it takes for built, and which commands it runs."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local import e2e_kubernetes
from local.console import silent
from local.environment import ROOT
from local.kubernetes import PAUSE_IMAGE, PROGRAMS, SCRIPTS, Lab, LabError


def built(directory: Path) -> Lab:
    """A node's directory with all files that a build makes, empty ones."""
    for name in ("bin", "images"):
        (directory / name).mkdir()
    for path in [directory / "bin" / name for name in PROGRAMS] + [directory / "images" / PAUSE_IMAGE]:
        path.touch()
    return Lab(directory, silent)


def test_nothing_is_missing_once_all_is_built(tmp_path: Path) -> None:
    assert built(tmp_path).missing() == []


@pytest.mark.parametrize("name", [*(f"bin/{name}" for name in PROGRAMS), f"images/{PAUSE_IMAGE}"])
def test_each_file_of_a_build_counts(tmp_path: Path, name: str) -> None:
    lab = built(tmp_path)
    (tmp_path / name).unlink()
    assert lab.missing() == [Path(name).name]


def test_the_programs_are_those_that_the_scripts_build() -> None:
    text = (SCRIPTS / "setup.sh").read_text() + (SCRIPTS / "cluster.sh").read_text()
    assert [name for name in PROGRAMS if name not in text] == []


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8S_LAB", str(tmp_path))
    assert Lab().directory == tmp_path


def test_a_command_runs_in_the_tree() -> None:
    command = Lab(Path("/lab"), silent).command("kubectl", "get", "nodes")
    assert command[1:] == ["exec", "env", f"--chdir={ROOT}", "kubectl", "get", "nodes"]


def test_a_script_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cluster.sh"
    script.write_text("#!/bin/sh\necho why it failed >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr("local.kubernetes.SCRIPTS", tmp_path)
    with pytest.raises(LabError, match="why it failed"):
        Lab(tmp_path, silent).stop_node()


def test_options_and_steps_are_told_apart() -> None:
    options = e2e_kubernetes.parse(["--keep-images", "rollout", "oom"])
    assert (options.keep_images, options.keep_node, options.steps) == (True, False, ["rollout", "oom"])


# ---- processes that `down` ends


def shell(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run lines of bash that know the functions of common.sh."""
    command = ["bash", "-c", f'. "{SCRIPTS}/common.sh"; {script}', "bash", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is called as the node's holder is, once it is."""
    with subprocess.Popen(["sleep", "600"]) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        while comm.read_text() != "sleep\n":
            time.sleep(0.01)
        yield process
        process.kill()


def down(directory: Path, pid: int, identity: str | None) -> str:
    """`cluster.sh down` after an `up` that noted this; returns what it says."""
    run = directory / "run"
    run.mkdir()
    (run / "holder.pid").write_text(f"{pid}\n")
    if identity is not None:
        (run / "holder.identity").write_text(identity)
    command = [SCRIPTS / "cluster.sh", "down"]
    environment = {**os.environ, "K8S_LAB": str(directory)}
    result = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert not run.exists()
    return result.stdout


def test_down_kills_the_process_that_up_noted(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    down(tmp_path, sleeper.pid, shell('identity "$1"', str(sleeper.pid)).stdout)
    assert sleeper.wait(30) == -9


@pytest.mark.parametrize("identity", [None, "", "another-boot 1\n"])
def test_down_leaves_a_process_alone_that_only_has_the_number(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], identity: str | None
) -> None:
    assert "left alone" in down(tmp_path, sleeper.pid, identity)
    assert sleeper.poll() is None


def test_down_leaves_a_process_alone_that_is_no_holder(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        down(tmp_path, process.pid, shell('identity "$1"', str(process.pid)).stdout)
        assert process.poll() is None
        process.communicate()
        assert process.returncode == 0


def test_only_the_cgroups_of_this_session_are_the_nodes(tmp_path: Path) -> None:
    listing = tmp_path / "cgroup"
    listing.write_text("9:name=systemd:/\n4:memory:/own\n1:cpu,cpuacct:/not/there\n0::/\n")
    for directory in ("systemd", "memory/own", "memory/other", "cpu"):
        (tmp_path / directory).mkdir(parents=True)
    found = shell('kubepods_cgroups "$1" "$2"', str(listing), str(tmp_path)).stdout.split()
    assert found == [f"{tmp_path}/systemd/kubepods", f"{tmp_path}/memory/own/kubepods"]


@pytest.mark.parametrize(
    ("cgroups", "code"),
    [("4:memory:/\n0::/\n", 0), ("7:cpu,memory:/x\n", 0), ("0::/user.slice\n", 1), ("1:name=memory:/\n", 1)],
)
def test_the_node_needs_cgroups_of_version_1(tmp_path: Path, cgroups: str, code: int) -> None:
    listing = tmp_path / "cgroup"
    listing.write_text(cgroups)
    result = shell('needs_cgroup_v1 "$1"', str(listing))
    assert result.returncode == code
    assert ("needs cgroups of version 1" in result.stderr) is bool(code)
