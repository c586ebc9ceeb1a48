"""Files with keys."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tokens import SECRET

# A busy machine is no failure: no deadline for a single example. All else stays as it is, so CI's profile too.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

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
