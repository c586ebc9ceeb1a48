"""Roots of Delta tables on this disk and on an object store, and what their files tell of changes under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_IDENTITY_CHARACTERS = 32


@dataclass(frozen=True)
class TableRoot:
    """A root's URL for jobs and for delta-rs with its options, its files' place on this disk, the jobs' environment."""

    url: str
    delta_url: str
    disk: Path
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def on_disk(cls, directory: Path) -> TableRoot:
        """Return a root that is a directory."""
        return cls(directory.as_uri(), str(directory), directory)

    def changes(self) -> set[str]:
        """Return the directories of changes, committed or not: table and identity."""
        found = self.disk.glob("*/*")
        return {f"{path.parent.name}/{path.name}" for path in found if len(path.name) == _IDENTITY_CHARACTERS}

    def versions(self, table: str = "*") -> set[str]:
        """Return the versions of one table, or of all."""
        return {f"{path.parts[-3]}/{path.stem}" for path in self.disk.glob(f"{table}/_delta_log/*.json")}
