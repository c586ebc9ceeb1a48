"""Fixtures of the cluster's tests."""

from collections.abc import Iterator

import pytest
from cluster_setup import Setup


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    setup = Setup(monkeypatch)
    yield setup
    setup.close()
