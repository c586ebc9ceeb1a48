"""A service manager: its notification socket, and a descriptor store that does what systemd's does."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import trio
from supervisor_fakes import same_file

from proxy.supervisor.startup.service_manager import ServiceManager


class FakeManager:
    """Holds what it is sent. ``capacity``: FileDescriptorStoreMax."""

    def __init__(self, folder: Path, capacity: int = 512) -> None:
        self.capacity = capacity
        self.kept: list[tuple[str, int]] = []
        self.messages: list[list[str]] = []
        self._path = folder / "notify"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(self._path))
        self._sock.setblocking(False)

    def client(self, **more: str) -> ServiceManager:
        """What a supervisor has of it; with what is kept passed on, as to one that is started."""
        manager = ServiceManager({"NOTIFY_SOCKET": str(self._path), "FDSTORE": "512", **more})
        self.drop_hung_up()
        manager.passed = [(name, os.dup(number)) for name, number in self.kept]
        return manager

    async def run(self) -> None:
        """Read messages until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            data, numbers, _, _ = socket.recv_fds(self._sock, 10_000, 10)
            self._on_message(data.decode().splitlines(), numbers)

    def _on_message(self, lines: list[str], numbers: list[int]) -> None:
        self.messages.append(lines)
        fields = dict(line.split("=", 1) for line in lines)
        name = fields.get("FDNAME", "stored")
        if "FDSTORE" in fields:
            for number in numbers:
                if len(self.kept) >= self.capacity or any(same_file(number, one) for _, one in self.kept):
                    os.close(number)
                else:
                    self.kept.append((name if fields.get("FDPOLL") == "0" else f"polled:{name}", number))
            return
        if "FDSTOREREMOVE" in fields:
            for one in [one for one in self.kept if one[0] == name]:
                self.kept.remove(one)
                os.close(one[1])
        for number in numbers:
            os.close(number)

    def drop_hung_up(self) -> None:
        """Close what systemd watches and has hung up."""
        for name, number in list(self.kept):
            poll = select.poll()
            poll.register(number, 0)
            if name.startswith("polled:") and poll.poll(0):
                self.kept.remove((name, number))
                os.close(number)

    def names(self, kind: str) -> list[str]:
        """Names of one kind."""
        return [name for name, _ in self.kept if name.startswith(f"{kind}-")]

    def close(self) -> None:
        """Close everything."""
        self._sock.close()
        for _, number in self.kept:
            os.close(number)
