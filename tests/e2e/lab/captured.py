"""An auth worker that was taken over: code of ours that runs in it as a plugin, and writes down what it could do.

A provider of `authentication.plugins` is imported by every auth worker, so what it tries is tried from where a captured
worker stands: same user, same descriptors, a child of the supervisor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .captured_plugin import NONSENSE
from .waiting import eventually

__all__ = ["NONSENSE", "Captured"]

_PLUGIN = Path(__file__).with_name("captured_plugin.py")


class Captured:
    """The plugin's package in a folder of its own, and its report."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._report = directory / "report.json"
        self._calls = directory / "calls"
        self._everybody_is_there = directory / "everybody-is-there"
        about = directory / "captured-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: captured\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[pulsar_trio_proxy.authentication]\ncaptured = captured_plugin:Provider\n"
        )
        (directory / "captured_plugin.py").write_text(_PLUGIN.read_text())
        directory.chmod(0o777)  # the cluster may run as another user

    def options(self, runtime_dir: Path) -> dict[str, Any]:
        """What the plugin has to know, as its table of the configuration."""
        return {
            "control": str(runtime_dir / "control.sock"),
            "socket": str(runtime_dir / "lookup-0.sock"),
            "calls": str(self._calls),
            "report": str(self._report),
            "everybody_is_there": str(self._everybody_is_there),
        }

    def go_on(self) -> None:
        """Let it look at the others, once all of them have begun."""
        self._everybody_is_there.touch()

    def bytes_received(self) -> list[int]:
        """Of each process that has connected to the socket that it put in the place of a lookup worker's."""
        return [int(line) for line in self._calls.read_text().split()] if self._calls.exists() else []

    def report(self, within_s: float = 60.0) -> Mapping[str, Any]:
        """What it could do: by attempt, the error's name or what came of it."""
        eventually(self._report.exists, what="the captured worker has tried everything", within_s=within_s)
        report: Mapping[str, Any] = json.loads(self._report.read_text())
        return report
