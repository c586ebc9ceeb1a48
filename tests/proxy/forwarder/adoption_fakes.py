"""Forwarders that follow each other at a place: killed at any step, or handed over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from relay_fakes import (
    Forwarder,
    Place,
    WatchedFdStoreClient,
)

from proxy.forwarder.relay import manager as relays_module
from proxy.runtime.shared.relay_table import RelayTable

WAYS = ["killed", "handed over"]


async def successor(place: Place, way: str) -> Forwarder:
    """The next forwarder, whichever way the one before it goes."""
    old = place.forwarders[-1]
    if way == "killed":
        await old.kill()
    else:
        await old.relays.hand_over_relays()
    return await place.forwarder()


# ---- bytes


class Fuse:
    """Blows after so many steps that another process could see."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.left = 0
        self.steps = 0

    def arm(self, place: Place, steps: int) -> None:
        self.place, self.left = place, steps

    def disarm(self) -> None:
        self.place = None

    def step(self) -> None:
        if self.place is not None:
            self.steps += 1
            self.left -= 1
            if self.left == 0:
                self.place.forwarders[-1].blow()


class FusedCells:
    """A table's cells; each store may be the one before which the process dies."""

    def __init__(self, cells: memoryview, fuse: Fuse) -> None:
        self._cells = cells
        self._fuse = fuse

    def __getitem__(self, key: Any) -> Any:
        return self._cells[key]

    def __setitem__(self, key: int, new: int) -> None:
        self._fuse.step()
        self._cells[key] = new


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fuse]:
    fuse = Fuse()

    class FusedTable(RelayTable):
        def __init__(self, descriptor: int = -1) -> None:
            super().__init__(descriptor)
            self.cells = FusedCells(self.cells, fuse)  # type: ignore[assignment]

    splice, shut_down, drop_relay = os.splice, relays_module.shut_down, WatchedFdStoreClient.drop_relay

    def fused_splice(*arguments: Any, **named: Any) -> int:
        fuse.step()
        moved = splice(*arguments, **named)
        fuse.step()
        return moved

    def fused_shut_down(descriptor: int, how: int) -> None:
        fuse.step()
        shut_down(descriptor, how)
        fuse.step()

    def fused_drop_relay(fd_store: WatchedFdStoreClient, relay_id: int) -> None:
        fuse.step()
        drop_relay(fd_store, relay_id)
        fuse.step()

    monkeypatch.setattr(relays_module, "RelayTable", FusedTable)
    monkeypatch.setattr(relays_module, "shut_down", fused_shut_down)
    monkeypatch.setattr("proxy.forwarder.relay.relay.shut_down", fused_shut_down)
    monkeypatch.setattr(os, "splice", fused_splice)
    monkeypatch.setattr(WatchedFdStoreClient, "drop_relay", fused_drop_relay)
    yield fuse
    fuse.disarm()
