"""What the machine lacks is detected, installed by root, and told to all other users."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from local import machine
from local.machine import MachineError, Need

FakeCommand = Callable[[str, str], Path]


_APT_CACHE = """
case $2 in
  openjdk-17-*) echo '  Candidate: (none)';;
  *) echo '  Candidate: 1.0';;
esac
"""


@pytest.mark.parametrize(
    ("output", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ("javac 25.0.1", 25),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", 0),
    ],
)
def test_java_version(fake_command: FakeCommand, output: str, major: int) -> None:
    fake_command("java", f'cat >&2 <<"END"\n{output}\nEND')
    assert machine.java_major() == major


def test_java_home_goes_first(fake_command: FakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command("java", "echo 'version \"17.0.1\"'")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    assert machine.java_major() == 0


def test_java_that_fails_is_none(fake_command: FakeCommand) -> None:
    fake_command("java", "echo 'version \"17.0.1\"'; exit 1")
    assert machine.java_major() == 0


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo go version go1.26.8 linux/amd64", (1, 26)),
        ("echo go version go1.19 linux/amd64", (1, 19)),
        ("exit 1", (0, 0)),
    ],
)
def test_go_version(fake_command: FakeCommand, script: str, version: tuple[int, int]) -> None:
    fake_command("go", script)
    assert machine.go_version() == version
    said: list[str] = []
    machine.note_go(said.append)
    assert bool(said) == (version < (1, 21))


def test_prometheus_is_the_server_and_promtool(fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fake_command("promtool", "").parent
    monkeypatch.setenv("PATH", str(directory))
    assert not machine.PROMETHEUS.present()
    fake_command("prometheus", "")
    assert machine.PROMETHEUS.present()
    (directory / "promtool").unlink()
    assert not machine.PROMETHEUS.present()


def test_this_machine_has_what_the_tests_need() -> None:
    assert machine.has_venv()
    machine.ensure([], lambda _: None)


def _need(name: str, *packages: str, present: bool = False) -> Need:
    return Need(name, lambda: present, packages)


def test_others_are_told_the_one_command(fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command("apt-get", "echo must not be called; exit 1")
    fake_command("apt-cache", _APT_CACHE)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    needs = [
        _need("Java", "openjdk-17-jre-headless", "openjdk-21-jre-headless"),
        _need("Maven", "maven"),
        _need("venv", "python3-venv", present=True),
    ]
    with pytest.raises(MachineError) as caught:
        machine.ensure(needs, lambda _: None)
    assert "lacks Java, Maven." in str(caught.value)
    command = "sudo apt-get install -y --no-install-recommends openjdk-21-jre-headless maven"
    assert f"\n    {command}\n" in str(caught.value)


def test_other_systems_are_told_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(MachineError, match=r"lacks Java, Maven\. Install that"):
        machine.ensure([_need("Java", "j"), _need("Maven", "m")], lambda _: None)


@pytest.fixture
def root(fake_command: FakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root with an `apt-get` that writes down its arguments and whether services are held."""
    log, policy = tmp_path / "apt.log", tmp_path / "policy-rc.d"
    held = f"$([ -x {policy} ] && echo held)"
    fake_command("apt-get", f'echo "$@" $DEBIAN_FRONTEND {held} >> {log}; touch {tmp_path}/installed')
    fake_command("apt-cache", _APT_CACHE)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "_POLICY", policy)
    monkeypatch.setattr("local.process._POLL_S", 0.01)
    return tmp_path


def test_root_installs_once(root: Path) -> None:
    needs = [
        Need("Maven", (root / "installed").exists, ("maven",)),
        Need("promtool", (root / "installed").exists, ("prometheus",)),
    ]
    said: list[str] = []
    machine.ensure(needs, said.append)
    machine.ensure(needs, said.append)
    lock = "-o DPkg::Lock::Timeout=300"
    assert (root / "apt.log").read_text().splitlines() == [
        f"{lock} update noninteractive",
        f"{lock} install -y --no-install-recommends maven prometheus noninteractive held",
    ]
    assert not (root / "policy-rc.d").exists()
    assert said[0] == "This machine lacks Maven, promtool: installing"


def test_a_policy_of_the_machine_stays(root: Path) -> None:
    (root / "policy-rc.d").write_text("mine")
    machine.ensure([Need("Maven", (root / "installed").exists, ("maven",))], lambda _: None)
    assert (root / "policy-rc.d").read_text() == "mine"


def test_installed_but_not_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/old/java")
    with pytest.raises(MachineError, match=r"still not found: Java\. JAVA_HOME is /old/java\."):
        machine.ensure([_need("Java", "openjdk-21-jre-headless")], lambda _: None)


def test_installation_fails(root: Path, fake_command: FakeCommand) -> None:
    fake_command("apt-get", "echo E: no space left; exit 100")
    with pytest.raises(MachineError, match="no space left"):
        machine.ensure([_need("Java", "openjdk-21-jre-headless")], lambda _: None)


@pytest.fixture
def without_kerberos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks the one thing until apt-get was there."""
    monkeypatch.setattr(machine, "KERBEROS", (Need("a KDC", (tmp_path / "installed").exists, ("krb5-kdc",)),))


@pytest.mark.usefixtures("without_kerberos")
def test_root_gets_kerberos(root: Path) -> None:
    said: list[str] = []
    assert machine.ensure_kerberos(said.append)
    assert "install -y --no-install-recommends krb5-kdc noninteractive held" in (root / "apt.log").read_text()
    assert not any("skipped" in line for line in said)


@pytest.mark.usefixtures("root", "without_kerberos")
@pytest.mark.parametrize("user", [0, 1000])
def test_others_go_on_without_kerberos(fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    fake_command("apt-get", "echo E: no such package; exit 100")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    said: list[str] = []
    assert not machine.ensure_kerberos(said.append)
    assert "The tests with Kerberos will be skipped." in said[-1]
    assert ("sudo apt-get install" in said[-1]) == (user == 1000)


def test_missing_requirements_of_kerberos_are_detected(
    fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fake_command("krb5-config", "").parent
    fake_command("gcc", "")
    assert machine.KRB5_HEADERS.present()
    assert machine.GCC.present()
    monkeypatch.setattr(shutil, "which", lambda name, path="": f"{directory}/{name}" if "/usr/sbin" in path else None)
    assert machine.KDC.present()
    assert machine.KADMIN.present()
    assert not machine.KRB5_HEADERS.present()
    assert not machine.GCC.present()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(directory))
    assert not machine.PYTHON_HEADERS.present()
    (directory / "Python.h").touch()
    assert machine.PYTHON_HEADERS.present()


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PYTHON_MINIMUM", (99, 0))
    with pytest.raises(MachineError, match=r"Python 99\.0 or newer"):
        machine.ensure([], lambda _: None)


def test_another_kernel_is_installed_or_its_tests_are_skipped(
    root: Path, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need = Need("User-Mode Linux", (tmp_path / "installed").exists, ("user-mode-linux",))
    monkeypatch.setattr(machine, "USER_MODE_LINUX", need)
    said: list[str] = []
    assert machine.ensure_user_mode_linux(said.append)
    assert "install -y --no-install-recommends user-mode-linux" in (root / "apt.log").read_text()
    (tmp_path / "installed").unlink()
    fake_command("apt-get", "echo E: no such package; exit 100")
    assert not machine.ensure_user_mode_linux(said.append)
    assert "The tests with cgroups of version 2 and kernel TLS will be skipped." in said[-1]


def test_a_kernel_is_installed_or_its_tests_are_skipped(
    root: Path, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need = replace(machine.USER_MODE_LINUX, present=(tmp_path / "installed").exists)
    monkeypatch.setattr(machine, "USER_MODE_LINUX", need)
    said: list[str] = []
    assert machine.ensure_user_mode_linux(said.append)
    assert "install -y --no-install-recommends user-mode-linux" in (root / "apt.log").read_text()
    (tmp_path / "installed").unlink()
    fake_command("apt-get", "echo E: no such package; exit 100")
    assert not machine.ensure_user_mode_linux(said.append)
    assert "The tests with cgroups of version 2 and kernel TLS will be skipped." in said[-1]
