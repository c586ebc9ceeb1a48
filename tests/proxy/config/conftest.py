"""Fixtures of this room."""

from pathlib import Path

import pytest
from config_files import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
