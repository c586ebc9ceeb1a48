"""Files with keys."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokens import SECRET

KeyFile = Callable[[bytes], str]


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    """Writes a new file; gives its path."""

    def write(content: bytes) -> str:
        path = tmp_path / f"key-{len(list(tmp_path.iterdir()))}"
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def secret_file(key_file: KeyFile) -> str:
    """The file of SECRET."""
    return key_file(SECRET)
