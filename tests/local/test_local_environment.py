"""The virtual environment is made once, and again when what it was made from changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local import environment
from local.environment import Environment, SetupError, clean_environment

FakeCommand = Callable[[str, str], Path]


# Stands for `python -m venv --clear DIRECTORY`: a "python" that logs and obeys.
_PYTHON = """#!/bin/sh
echo "$@" >> {log}
[ ! -e {log}.fail ] || {{ echo no such package; exit 1; }}
[ ! -e {log}.check ] || case "$*" in *" check") echo a needs b; exit 1; esac
"""


@pytest.fixture
def tree(tmp_path: Path, cache: Path, fake_command: FakeCommand, monkeypatch: pytest.MonkeyPatch) -> Environment:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "pyproject.toml").write_text("one")
    (root / "deploy/requirements").mkdir(parents=True)
    (root / "deploy/requirements/test.txt").write_text("two")
    template = tmp_path / "python"
    template.write_text(_PYTHON.format(log=tmp_path / "log"))
    template.chmod(0o755)
    script = f'rm -rf "$4"; mkdir -p "$4/bin"; cp {template} "$4/bin/python"; echo venv >> {tmp_path}/log'
    monkeypatch.setattr(sys, "executable", str(fake_command("python-of-the-system", script)))
    monkeypatch.setattr("local.process._POLL_S", 0.01)
    return Environment(root)


def _installs(tree: Environment) -> list[str]:
    """What was done since the last call: `venv`, and the lists that pip was asked for."""
    log = tree.root.parent / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    lines = [line.replace("-m pip --disable-pip-version-check ", "") for line in lines if not line.startswith("-c ")]
    made = [line for line in lines if line == "venv"]
    done = lines[len(made) :]
    if not done:
        return made
    exact = "install --no-deps --no-build-isolation"
    build, packages, *rest = done
    assert build == f"{exact} --require-hashes -r deploy/requirements/build.txt"
    assert rest == [f"{exact} -e .", "check"]
    assert packages.startswith(f"{exact} --require-hashes -r ")
    return [*made, packages.rpartition(" ")[2]]


def _prepare(tree: Environment, what: str) -> list[str]:
    tree.prepare(what, lambda _: None)
    return _installs(tree)


def test_made_once(tree: Environment) -> None:
    assert not tree.is_ready("run")
    assert _prepare(tree, "run") == ["venv", "deploy/requirements/run.txt"]
    assert tree.is_ready("run")
    assert _prepare(tree, "run") == []


def test_changed_requirements_of_the_tree(tree: Environment) -> None:
    _prepare(tree, "test")
    (tree.root / "pyproject.toml").write_text("changed")
    assert not tree.is_ready("run")
    assert _prepare(tree, "run") == ["deploy/requirements/run.txt"]
    assert tree.is_ready("test")


def test_changed_lists_leave_no_package_of_before(tree: Environment) -> None:
    _prepare(tree, "run")
    (tree.directory / "lib").mkdir()
    (tree.root / "deploy/requirements/test.txt").write_text("changed")
    assert not tree.is_ready("run")
    assert _prepare(tree, "run") == ["venv", "deploy/requirements/run.txt"]
    assert not (tree.directory / "lib").exists()


def test_an_environment_for_tests_serves_a_run_as_well(tree: Environment) -> None:
    _prepare(tree, "test")
    assert _prepare(tree, "run") == []
    assert _prepare(tree, "analytics") == []


def test_an_environment_for_a_run_is_extended_for_tests(tree: Environment) -> None:
    _prepare(tree, "run")
    assert _prepare(tree, "test") == ["deploy/requirements/test.txt"]
    assert tree.is_ready("run")
    assert tree.is_ready("test")


def test_with_kerberos(tree: Environment) -> None:
    _prepare(tree, "test")
    assert _prepare(tree, "test-kerberos") == ["deploy/requirements/test-kerberos.txt"]
    assert _prepare(tree, "test-kerberos") == []
    assert _prepare(tree, "test") == []


def test_the_tests_with_kerberos_cover_those_without(tree: Environment) -> None:
    _prepare(tree, "test-kerberos")
    assert _prepare(tree, "test") == []
    assert _prepare(tree, "run") == []


def test_the_measurements_of_the_analytics_have_a_set_of_their_own(tree: Environment) -> None:
    assert _prepare(tree, "bench-analytics") == ["venv", "deploy/requirements/bench-analytics.txt"]
    assert _prepare(tree, "bench-analytics") == []
    assert not tree.is_ready("run")


def test_fuzzing_has_a_set_of_its_own(tree: Environment) -> None:
    assert _prepare(tree, "fuzz")[-1] == "deploy/requirements/fuzz.txt"
    assert not tree.is_ready("test")


def test_changed_lists_forget_what_else_was_installed(tree: Environment) -> None:
    _prepare(tree, "test")
    (tree.root / "deploy/requirements/test.txt").write_text("changed")
    _prepare(tree, "run")
    assert not tree.is_ready("test")


def test_failed_installation_is_done_again(tree: Environment) -> None:
    _prepare(tree, "run")
    (tree.root / "deploy/requirements/test.txt").write_text("changed")
    monkey = tree.root.parent / "log.fail"
    monkey.touch()
    with pytest.raises(SetupError, match="no such package"):
        tree.prepare("run", lambda _: None)
    monkey.unlink()
    (tree.root / "deploy/requirements/test.txt").write_text("two")  # the stamp of the first time must be gone
    (tree.root.parent / "log").unlink()
    assert _prepare(tree, "run") == ["venv", "deploy/requirements/run.txt"]


def test_a_package_that_lacks_another(tree: Environment) -> None:
    (tree.root.parent / "log.check").touch()
    with pytest.raises(SetupError, match=r"what its packages need failed:\na needs b"):
        tree.prepare("run", lambda _: None)
    assert not tree.is_ready("run")


def test_python_was_removed_from_the_system(tree: Environment) -> None:
    _prepare(tree, "run")
    tree.python.unlink()
    tree.python.symlink_to("/nothing/python3")
    assert not tree.is_ready("run")


@pytest.mark.parametrize("stamp", ["", "[]", "{}", '{"lists": "x"}'])
def test_torn_stamp(tree: Environment, stamp: str) -> None:
    _prepare(tree, "run")
    next(tree.directory.glob(".pulsar*")).write_text(stamp)
    assert not tree.is_ready("run")


def test_moved_tree(tree: Environment) -> None:
    _prepare(tree, "run")
    moved = tree.root.rename(tree.root.with_name("moved"))
    assert not Environment(moved).is_ready("run")


def test_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "deploy")
    assert clean_environment() == {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_root_is_the_tree() -> None:
    assert (environment.ROOT / "deploy" / "local" / "environment.py").is_file()
