"""A receiver in a process of its own, as an operator starts it, and a sender that knows what it was told."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PROGRAM = "from analytics.receiver.command import receive; receive()"


_begun: list[ReceiverProcess | Sender] = []


def end_all() -> None:
    """End what a test that failed has left: it would take CPU time from those that follow."""
    while _begun:
        _begun.pop().end()


class ReceiverProcess:
    """Started with a configuration; says where it listens, as its log does."""

    def __init__(self, config: Path, prepare: str = "") -> None:
        command = [sys.executable, "-c", f"{prepare}\n{PROGRAM}", "--config", str(config)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        _begun.append(self)
        self.log: list[dict[str, object]] = []
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if self.log[-1]["event"] == "the receiver takes writes":
                break
        else:
            raise AssertionError(f"it did not start: {self.log}")
        self.write, self.admin = (_first(self.log[-1][name]) for name in ("write", "admin"))
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        code = self.process.wait(30)
        self._reader.join(30)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def page(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.admin, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found


def _first(value: object) -> str:
    assert isinstance(value, list)
    return str(value[0])


class Sender(threading.Thread):
    """Sends requests number by number until it is stopped; one that is not answered with 2xx is sent again."""

    def __init__(
        self, where: Callable[[], str], make: Callable[[int], tuple[bytes, dict[str, str]]], step: int, first: int
    ) -> None:
        super().__init__(daemon=True)
        self._where = where
        self._make = make
        self._step = step
        self._number = first
        self.stop = threading.Event()
        self.attempts: dict[int, int] = {}
        self.acknowledged: set[int] = set()
        _begun.append(self)

    def end(self) -> None:
        self.stop.set()

    def run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self.stop.is_set():
            body, headers = self._make(self._number)
            try:
                connection = connection or http.client.HTTPConnection(self._where(), timeout=60)
                self.attempts[self._number] = self.attempts.get(self._number, 0) + 1
                connection.request("POST", "/api/v1/write", body, headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                if connection is not None:
                    connection.close()
                connection = None
                self.stop.wait(0.01)
                continue
            if answer.status // 100 == 2:
                self.acknowledged.add(self._number)
                self._number += self._step
        if connection is not None:
            connection.close()
