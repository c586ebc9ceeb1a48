"""The lists of deploy/requirements, installed with the pip that this Python brings (Python 3.11.7: pip 23.2.1), from an
index of the day after tomorrow: a folder with an empty package for each pin, and newer releases beside them.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from local.environment import ROOT, clean_environment, install_list
from local.lock import EXTRAS, REQUIREMENTS, SOURCES, read_pins, render

TOMORROW = "9999"

_BACKEND = """\
import shutil
def build_wheel(directory, config_settings=None, metadata_directory=None):
    shutil.copy({wheel!r}, directory)
    return {wheel!r}
"""
_PYPROJECT = """\
[build-system]
requires = ["tool-that-only-an-isolated-build-fetches"]
build-backend = "backend"
backend-path = ["."]
"""


class Index:
    """A folder that pip takes packages from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def add(self, name: str, version: str, *, needs: str = "") -> str:
        """Add an empty package with one extra; return its hash."""
        stem = f"{name.replace('-', '_')}-{version}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: extra\n"
        metadata += f"Requires-Dist: {needs}\n" if needs else ""
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{stem}.dist-info/METADATA", metadata)
            archive.writestr(
                f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{stem}.dist-info/RECORD", "")
        file, data = f"{stem}-py3-none-any.whl", wheel.getvalue()
        if name in SOURCES:
            file, data = f"{stem}.tar.gz", _source(stem, file, data, metadata)
        (self.directory / file).write_bytes(data)
        return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _source(stem: str, wheel: str, data: bytes, metadata: str) -> bytes:
    files = {
        wheel: data,
        "PKG-INFO": metadata.encode(),
        "backend.py": _BACKEND.format(wheel=wheel).encode(),
        "pyproject.toml": _PYPROJECT.encode(),
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment, made as `.venv` is."""
    directory = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory / "bin" / "python"


class Tomorrow:
    """A tree with one list, and an index in which each pin of it has a newer release. The list's first package asks for
    its second one with an extra, as pytest-cov does for coverage.
    """

    def __init__(self, directory: Path, what: str) -> None:
        text = (REQUIREMENTS / f"{what}.txt").read_text()
        self.pins = read_pins(text)
        asks, asked, *_ = (name for name in self.pins if name not in SOURCES)
        needs = {asks: f"{self.pins[asked][0]}[extra]"}
        index = Index(directory / "index")
        hashes = {}
        for key, (name, version, _) in self.pins.items():
            hashes[key] = (name, version, (index.add(name, version, needs=needs.get(key, "")),))
            index.add(name, TOMORROW)
        self._tree, self._target = directory / "tree", directory / "target"
        requirements = self._tree / "deploy" / "requirements"
        requirements.mkdir(parents=True)
        options = [line for line in text.splitlines() if line.startswith("--")]
        (requirements / f"{what}.txt").write_text(render(what, hashes, options))
        kept = {key: value for key, value in clean_environment().items() if not key.startswith("PIP_")}
        self._environment = kept | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index.directory),
            "PIP_TARGET": str(self._target),
            "PIP_NO_CACHE_DIR": "1",
        }

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=self._tree, env=self._environment
        )

    def installed(self) -> set[str]:
        return {path.name.removesuffix(".dist-info") for path in self._target.glob("*.dist-info")}

    def listed(self) -> set[str]:
        return {f"{name.replace('-', '_')}-{version}" for name, version, _ in self.pins.values()}


@pytest.mark.parametrize("what", EXTRAS)
def test_a_list_is_installed_as_it_is(what: str, python: Path, tmp_path: Path) -> None:
    tomorrow = Tomorrow(tmp_path, what)
    result = tomorrow.run(install_list(python, what))
    assert result.returncode == 0, result.stderr
    assert tomorrow.installed() == tomorrow.listed()


def test_with_a_resolver_it_could_not_be(python: Path, tmp_path: Path) -> None:
    """Where a newer pip resolves this, too, the releases of tomorrow must stay outside nevertheless."""
    tomorrow = Tomorrow(tmp_path, "proxy")
    result = tomorrow.run([word for word in install_list(python, "proxy") if word != "--no-deps"])
    if _version(python)[:2] == (23, 2):
        assert result.returncode != 0
        assert "all requirements must have their versions pinned" in result.stderr
    assert not any(name.endswith(f"-{TOMORROW}") for name in tomorrow.installed())


def test_an_isolated_build_would_fetch_its_tools(python: Path, tmp_path: Path) -> None:
    tomorrow = Tomorrow(tmp_path, "kerberos")
    result = tomorrow.run([word for word in install_list(python, "kerberos") if word != "--no-build-isolation"])
    assert result.returncode != 0
    assert "tool-that-only-an-isolated-build-fetches" in result.stderr


def _version(python: Path) -> tuple[int, ...]:
    text = subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(map(int, text.split()[1].split(".")))


# ---- no other installation

_PROGRAMS = [
    ROOT / "deploy/image/Dockerfile",  # python_application.py: tests/local/test_local_image_root.py
    ROOT / "Makefile",
    ROOT / ".ci/run",
]
_PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
_LISTED = re.compile(r"(?=.* --no-deps )(?=.* --require-hashes )")
_OURS = re.compile(r"--no-deps --no-build-isolation (--wheel-dir dist \./tree|\.)")


def _words(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}


def test_only_environment_py_installs_packages_with_pip() -> None:
    """`make lock` runs pip as well, but only with --dry-run."""
    modules = [path for path in (ROOT / "deploy/local").glob("*.py") if {"pip", "install"} <= _words(path)]
    assert [path.name for path in sorted(modules)] == ["environment.py", "lock.py"]
    assert "--dry-run" in _words(ROOT / "deploy/local/lock.py")


def test_no_module_upgrades() -> None:
    upgrades = {"--upgrade", "-U", "--upgrade-strategy", "--upgrade-deps"}
    assert [path.name for path in (ROOT / "deploy/local").glob("*.py") if upgrades & _words(path)] == []


def _installations(path: Path) -> list[str]:
    """The commands of a program, or those that a page shows, that install with pip or build what is installed."""
    start = r"^\$ " if path.suffix == ".md" else "^(?!#)"
    lines = re.findall(rf"{start}.*$", path.read_text(), re.MULTILINE)
    return [part for line in lines for part in line.split(" && ") if re.search(r"pip (install|wheel) ", part)]


@pytest.mark.parametrize("path", [*_PROGRAMS, *_PAGES], ids=lambda path: path.name)
def test_no_command_resolves(path: Path) -> None:
    for command in _installations(path):
        if "pulsar-client==" not in command:  # at a client's machine
            assert _LISTED.search(command) or _OURS.search(command), command


def test_installations_are_found() -> None:
    assert [len(_installations(path)) for path in _PROGRAMS] == [2, 0, 0]
    assert {path.name for path in _PAGES if _installations(path)} >= {"README.md", "getting-started.md"}
