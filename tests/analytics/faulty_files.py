"""A filesystem that is killed at a chosen step: that step and all after it fail, as for a process that is gone."""

from typing import Any

import pytest

from analytics.tables.filesystem import Filesystem, FilesystemError


class Killed(FilesystemError):
    """The process is dead; nobody catches this but the test."""


class Steps:
    """Counts the operations that change something, over all Filesystem objects, and dies before number `at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.count = 0
        for name in ("create_text", "move", "delete"):
            monkeypatch.setattr(Filesystem, name, self._wrapped(getattr(Filesystem, name)))

    def _wrapped(self, function: Any) -> Any:
        def step(files: Filesystem, *arguments: Any) -> Any:
            self.count += 1
            if self.at is not None and self.count > self.at:
                raise Killed(f"killed before step {self.count}: {function.__name__} {arguments}")
            return function(files, *arguments)

        return step

    def kill_after(self, steps: int | None) -> None:
        """Let so many steps be made from now on, then none; None: all."""
        self.count, self.at = 0, steps
