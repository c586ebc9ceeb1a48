"""Clients while something happens to the pods: a fleet with relays, and newcomers one after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from proto.pulsar_pb2 import BaseCommand
from tests.e2e.lab.security import NAMESPACE
from tests.e2e.lab.waiting import eventually
from tests.e2e.lab.wire import WireClient
from tests.kubernetes.results import by_second, fleet_faults, spread_fault

_OPEN_WITHIN_S = 400.0
_END_WITHIN_S = 300.0
_NEWCOMERS_PAUSE_S = 0.2
_NEWCOMER_PATIENCE_S = 60.0


class FleetProcess:
    """A running `tests.kubernetes.fleet`."""

    def __init__(self, directory: Path, name: str, **options: object) -> None:
        self._output = directory / f"{name}.out"
        self.log = directory / f"{name}.log"
        arguments = [f"{key}={value}" for key, value in options.items()]
        with self._output.open("w") as output, (directory / f"{name}.err").open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kubernetes.fleet", f"log={self.log}", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._errors = directory / f"{name}.err"

    def _last(self, kind: str) -> dict[str, Any]:
        found = re.findall(rf"^{kind} (.*)\n", self._output.read_text(), re.MULTILINE)
        return json.loads(found[-1]) if found else {}

    def progress(self) -> dict[str, Any]:
        """Return what the fleet says of itself; it must live."""
        code = self._process.poll()
        assert code is None, f"the fleet ended with code {code}: {self._errors.read_text()[-2000:]}"
        return self._last("PROGRESS")

    def wait_until_flowing(self) -> None:
        """Wait until every client is there and messages flow."""
        eventually(lambda: self.progress().get("sent"), what="all clients send", within_s=_OPEN_WITHIN_S, every_s=1)

    def wait_for_messages(self, seconds: float = 5.0) -> None:
        """Wait until the fleet has gone on for so long with every client connected."""
        until = time.monotonic() + seconds
        eventually(
            lambda: time.monotonic() > until and self.progress()["away"] == 0,
            what="every client is connected",
            within_s=_END_WITHIN_S,
            every_s=0.5,
        )

    def finish(self) -> dict[str, Any]:
        """Stop sending, wait for all messages; returns the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"stop\n")
        self._process.stdin.flush()
        self._process.wait(_END_WITHIN_S)
        result = self._last("RESULT")
        assert result, f"the fleet told no result: {self._errors.read_text()[-2000:]}"
        return result

    def kill(self) -> None:
        """End it; harmless if it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Newcomers:
    """New clients, one after the other: connect, authenticate, ask for a topic's partitions, leave."""

    def __init__(self, host: str, port: int, token: str, topic: str) -> None:
        self._arguments = (host, port, token, topic)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.served = 0
        self.failures: list[str] = []

    def _run(self) -> None:
        host, port, token, topic = self._arguments
        while not self._stop.wait(_NEWCOMERS_PAUSE_S):
            try:
                with WireClient(port, host, timeout_s=_NEWCOMER_PATIENCE_S) as client:
                    client.send_connect(token=token)
                    answer = client.receive(_NEWCOMER_PATIENCE_S)
                    assert answer.type == BaseCommand.CONNECTED, answer
                    answer = client.partitions(topic)
                    assert answer.type == BaseCommand.PARTITIONED_METADATA_RESPONSE, answer
                    assert not answer.partition_metadata_response.HasField("error"), answer
            except Exception as error:  # noqa: BLE001 -- whatever keeps a newcomer out is a fault
                self.failures.append(f"{time.strftime('%T')} {type(error).__name__}: {error}"[:300])
            else:
                self.served += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_about: object) -> None:
        self._stop.set()
        self._thread.join(_NEWCOMER_PATIENCE_S * 3)


class Observation:
    """Observation of a fleet and of newcomers; the checks raise AssertionError for lost messages or refusals."""

    def __init__(self, fleet: FleetProcess, newcomers: Newcomers) -> None:
        self.fleet = fleet
        self.newcomers = newcomers
        self.ends_s: list[float] = []
        self._marked = 0

    def mark(self) -> None:
        """Count relays that end from here on for the next event."""
        self._marked = len(self.fleet.progress()["ends_s"])

    def event(self, what: str) -> str:
        """Check the relays' ends since the mark; return a line about them."""
        progress = self.fleet.progress()
        ends_s = progress["ends_s"][self._marked :]
        fault = spread_fault(ends_s, progress["clients"])
        seconds = by_second(ends_s)
        assert not fault, f"{what}: {fault}: {seconds}"
        span_s = max(seconds) - min(seconds) + 1 if seconds else 0
        most = max(seconds.values(), default=0)
        return f"{what}: {len(ends_s)} relays ended in {span_s} s, {most} at most in a second"

    def check_newcomers(self) -> str:
        """Check that no newcomer was refused so far; return a line about it."""
        failures = self.newcomers.failures
        assert not failures, f"{len(failures)} newcomers failed, first {failures[:3]}"
        assert self.newcomers.served, "no newcomer came"
        return f"{self.newcomers.served} newcomers, none refused"

    def check_messages(self) -> str:
        """Stop the fleet, and check that no message was lost or out of order; return a line about it."""
        result = self.fleet.finish()
        faults = fleet_faults(result)
        assert not faults, "; ".join(faults)
        return (
            f"{result['clients']} clients, {result['sent']} messages, none lost or out of order "
            f"({result['duplicates']} came twice)"
        )

    def check_result(self) -> str:
        """Stop the fleet, and check its messages and the newcomers; return a line about both."""
        return f"{self.check_messages()}; {self.check_newcomers()}"


@contextmanager
def observed(directory: Path, name: str, host: str, port: int, token: str, **options: object) -> Iterator[Observation]:
    """Run a fleet and newcomers for as long as the block; the fleet's messages flow when it begins."""
    topic = f"persistent://{NAMESPACE}/{name}-{int(time.time())}"
    fleet = FleetProcess(directory, name, url=f"pulsar://{host}:{port}", token=token, topic=topic, **options)
    try:
        fleet.wait_until_flowing()
        with Newcomers(host, port, token, f"{topic}-0") as newcomers:  # a topic that exists
            yield Observation(fleet, newcomers)
    finally:
        fleet.kill()
