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
        self._address = directory / "report.sock"
        self.report: Mapping[str, Any] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._address))
        self._address.chmod(0o777)
        self._listener.listen()
        self.control_trap = directory / "control.sock"
        """A socket of its own, to be moved to the place of the supervisor's of this name."""
        self.others = directory.parent / "others"  # not below the plugin, whose folder is one of Python's
        self.others.mkdir()
        (self.others / "secret").write_text("secret")
        about = directory / "captured-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: captured\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[pulsar_trio_proxy.authentication]\ncaptured = captured_plugin:Provider\n"
        )
        (directory / "captured_plugin.py").write_text(_PLUGIN.read_text())
        for one in (directory, self.others):
            one.chmod(0o777)  # the cluster may run as another user

    def options(self, runtime_dir: Path, requested: list[Path]) -> dict[str, Any]:
        """What the plugin has to know, as its table of the configuration. ``requested``: files that it requests.

        Paths are without the first slash: a worker may read what its plugins' tables name by path.
        """
        paths = {
            "control": runtime_dir / "control.sock",
            "socket": runtime_dir / "lookup-0.sock",
            "report": self._address,
            "directory": self.others,
        }
        told: dict[str, Any] = {name: str(path).lstrip("/") for name, path in paths.items()}
        return told | {"requested": [str(path).lstrip("/") for path in requested]}

    def attack(self, siblings: list[int], within_s: float = 60.0) -> Mapping[str, Any]:
        """Let it attack these processes, too, and return what it could do: by attempt, the error's name or what came
        of it.
        """
        self._listener.settimeout(within_s)
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(within_s)
        with socket.socket(socket.AF_UNIX) as trap:  # which it could not bind by itself
            trap.bind(str(self.control_trap))
            socket.send_fds(self._connection, [json.dumps(siblings).encode()], [trap.fileno()])
        self._lines = self._connection.makefile("rb")
        self.report = json.loads(self._lines.readline())
        return self.report

    def bytes_of_operators(self) -> int:
        """What the next process sent that has connected to ``control_trap``."""
        return int(self._lines.readline())

    def close(self) -> None:
        """Close the socket at which it reports."""
        for one in (self._listener, self._connection, self._lines):
            one.close()
