"""The cache directory outside the tree, and the lock that guards it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local.console import Progress


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/pulsar-trio-proxy`, created if it is missing."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    directory = base / "pulsar-trio-proxy"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock during the block; the kernel releases it when this process exits, so it is never stale."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Waiting for another run that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
