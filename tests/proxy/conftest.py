"""Fixtures of all tests of the proxy."""

from __future__ import annotations

import pytest

from proxy.forwarder.relay import fd_store_client
from proxy.supervisor.handover import fd_store


@pytest.fixture(autouse=True)
def store_messages_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that waits for all tasks to be blocked waits for no pause."""
    monkeypatch.setattr(fd_store_client, "DROPS_GATHER_S", 0.0)
    monkeypatch.setattr(fd_store, "GATHER_S", 0.0)
