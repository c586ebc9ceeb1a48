"""A cache of its own for each test, and stand-ins for the commands of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy"))

from local import go_tools

collect_ignore = [] if go_tools.tool("cosign").exists() else ["test_local_publish_cosign.py"]
"""cosign takes minutes to build, so `make test` does not: its tests are only where `make publish` has built it."""

FakeCommand = Callable[[str, str], Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pulsar-trio-proxy"


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommand:
    """Puts a shell script of that name in front of PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.delenv("JAVA_HOME", raising=False)

    def make(name: str, script: str) -> Path:
        path = directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make
