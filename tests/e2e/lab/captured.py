"""An auth worker that was taken over: code of ours that runs in it as a plugin, and writes down what it could do.

A provider of `authentication.plugins` is imported by every auth worker, so what it tries is tried from where a captured
worker stands: same user, same descriptors, a child of the supervisor.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .captured_plugin import NONSENSE

__all__ = ["NONSENSE", "Captured"]

_PLUGIN = Path(__file__).with_name("captured_plugin.py")


class Captured:
    """The plugin's package in a folder of its own, and its report."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._report = directory / "report.sock"
        self._told: Mapping[str, Any] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._report))
        self._report.chmod(0o777)
        self._listener.listen()
        (directory / "others").mkdir(mode=0o777)
        (directory / "others" / "secret").write_text("secret")
        self._everybody_is_there = directory / "everybody-is-there"
        about = directory / "captured-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: captured\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[pulsar_trio_proxy.authentication]\ncaptured = captured_plugin:Provider\n"
        )
        (directory / "captured_plugin.py").write_text(_PLUGIN.read_text())
        for one in (directory, directory / "others"):
            one.chmod(0o777)  # the cluster may run as another user

    def options(self, runtime_dir: Path, requested: list[Path]) -> dict[str, Any]:
        """What the plugin has to know, as its table of the configuration. ``requested``: files that it requests.

        Paths are without the first slash: a worker may read what its plugins' tables name by path.
        """
        paths = {
            "control": runtime_dir / "control.sock",
            "socket": runtime_dir / "lookup-0.sock",
            "report": self._report,
            "everybody_is_there": self._everybody_is_there,
            "directory": self.directory / "others",
        }
        told: dict[str, Any] = {name: str(path).lstrip("/") for name, path in paths.items()}
        return told | {"requested": [str(path).lstrip("/") for path in requested]}

    def go_on(self) -> None:
        """Let it look at the others, once all of them have begun."""
        self._everybody_is_there.touch()

    def report(self, within_s: float = 60.0) -> Mapping[str, Any]:
        """What it could do: by attempt, the error's name or what came of it."""
        if self._told is None:
            self._listener.settimeout(within_s)
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as data:
                self._told = json.loads(data.read())
        return self._told

    def close(self) -> None:
        """Close the socket at which it reports."""
        self._listener.close()
