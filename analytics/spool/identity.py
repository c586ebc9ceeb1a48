"""The identity of a spool: a file that is made once, so that an emptied and reused directory is another spool."""

import contextlib
import os
import uuid
from pathlib import Path

from analytics.spool.positions import sync_directory

IDENTITY = "id"


def spool_id(directory: str | os.PathLike[str]) -> str:
    """Return the spool's identity; make it, if it has none. Raises OSError."""
    root = Path(directory)
    target = root / IDENTITY
    if not target.exists():
        temporary = root / f"{IDENTITY}.{uuid.uuid4().hex}"
        temporary.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(temporary, target)
        temporary.unlink()
        sync_directory(root)
    return target.read_text().strip()
