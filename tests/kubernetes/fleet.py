"""Many real clients in one process, each with connections of its own: `python -m tests.kubernetes.fleet KEY=VALUE…`.

Each produces numbered messages to a topic of its own and consumes them. It prints `PROGRESS {…}` every second, goes on
until a line comes on standard input, then waits for every message and prints `RESULT {…}`. The process is one of its
own since the C++ library below may abort it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar

from tests.kubernetes.results import RelayEnds

_DRAIN_S = 150.0
_OPENING_AT_ONCE = 10
_OPERATION_TIMEOUT_S = 120


class LogWatch(logging.Handler):
    """Takes what the client library logs: relays' ends, and all lines for who looks for a fault."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.ends = RelayEnds()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 -- open for as long as the process

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record; the handler's lock is held."""
        line = record.getMessage()
        now_s = time.time()
        self.ends.receive_line(line, now_s)
        self._file.write(f"{now_s:.3f} {record.levelname} {line}\n")


class Member:
    """One client with one producer and one consumer."""

    def __init__(self, options: dict[str, str], number: int, logger: logging.Logger) -> None:
        more: dict[str, Any] = {"authentication": pulsar.AuthenticationToken(options["token"])}
        if "trust" in options:
            more |= {"tls_trust_certs_file_path": options["trust"], "tls_validate_hostname": True}
        self.client = pulsar.Client(
            options["url"],
            operation_timeout_seconds=_OPERATION_TIMEOUT_S,
            connection_timeout_ms=30_000,
            logger=logger,
            **more,
        )
        topic = f"{options['topic']}-{number}"
        self.sent = self.duplicates = self.failures = 0
        self.seen: set[int] = set()
        self.last = -1
        self.in_order = True
        self.consumer = self.client.subscribe(topic, "s", message_listener=self._receive)
        self.producer = self.client.create_producer(
            topic, batching_enabled=False, block_if_queue_full=True, send_timeout_millis=0
        )

    def _receive(self, consumer: Any, message: Any) -> None:
        number = int(message.data())
        if number in self.seen:
            self.duplicates += 1
        else:
            self.seen.add(number)
            # A message that comes again after a reconnect is no disorder: the first sight of each counts.
            self.in_order = self.in_order and number > self.last
            self.last = number
        consumer.acknowledge(message)

    def _receipt(self, result: Any, _message_id: Any) -> None:
        if result != pulsar.Result.Ok:
            self.failures += 1

    def send(self) -> None:
        """Send one message; the receipt comes later."""
        self.producer.send_async(b"%d" % self.sent, self._receipt)
        self.sent += 1


class Fleet:
    """All members, and what they have seen."""

    def __init__(self, options: dict[str, str]) -> None:
        logger = logging.getLogger("fleet")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self._watch = LogWatch(options["log"])
        logger.addHandler(self._watch)
        self._interval_s = 1 / float(options.get("rate", "2"))
        count = int(options["clients"])
        with ThreadPoolExecutor(_OPENING_AT_ONCE) as pool:
            self._members = list(pool.map(lambda number: Member(options, number, logger), range(count)))

    def run(self) -> dict[str, Any]:
        """Send until told to stop, then wait until all has come."""
        stop = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
        told_s = 0.0
        while not stop.is_set():
            begin_s = time.monotonic()
            for member in self._members:
                member.send()
            if begin_s - told_s >= 1:
                told_s = begin_s
                print("PROGRESS", json.dumps(self.result()), flush=True)
            stop.wait(max(0.0, self._interval_s - (time.monotonic() - begin_s)))
        deadline = time.monotonic() + _DRAIN_S
        while self.result()["missing"] and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.result()

    def result(self) -> dict[str, Any]:
        """Return the sums over all members, and the moments of relays' ends (Unix time, s)."""
        ends = self._watch.ends
        return {
            "clients": len(self._members),
            "sent": sum(member.sent for member in self._members),
            "missing": sum(member.sent - len(member.seen) for member in self._members),
            "duplicates": sum(member.duplicates for member in self._members),
            "disordered": sum(not member.in_order for member in self._members),
            "send_failures": sum(member.failures for member in self._members),
            "away": ends.away,
            "ends_s": list(ends.moments_s),
        }


def main() -> None:
    """Run a fleet as the arguments say."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    print("RESULT", json.dumps(Fleet(options).run()), flush=True)
    sys.stdout.flush()
    # Closing hundreds of clients in order takes long and tells nothing more.
    import os

    os._exit(0)


if __name__ == "__main__":
    main()
