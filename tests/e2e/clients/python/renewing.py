"""The Python client with tokens that it mints itself and that end soon; ``../RENEWING.md`` has the contract."""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jwt
import pulsar
from scenarios import Options, Outbox, Result, Tally, producer_of, receive_or_none

NUMBER_AND_SUM = 12
QUIET_S = 60.0


class Mint:
    """Counts the tokens that it makes; each ends soon."""

    def __init__(self, key: bytes, lifetime_s: int) -> None:
        self.minted = 0
        self._key = key
        self._lifetime_s = lifetime_s

    def token(self) -> str:
        """A fresh one."""
        self.minted += 1
        return jwt.encode({"sub": "alice", "exp": int(time.time()) + self._lifetime_s}, self._key, "HS256")


def sum_of(message: bytes) -> bytes:
    """Over the number and what follows the sum itself."""
    return zlib.crc32(message[NUMBER_AND_SUM:], zlib.crc32(message[:8])).to_bytes(4, "big")


class Renewing:
    """Produces, consumes, or both, until told to stop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._mint = Mint(Path(options["key"]).read_bytes(), int(options["lifetime_s"]))
        self._tally = Tally()
        self._corrupt = 0
        self._outbox: Outbox | None = None
        self._stop = threading.Event()
        self._total: int | None = None

    def run(self) -> Result:
        """Until the end."""
        does = self._options.get("does", "both")
        opened = pulsar.Client(
            self._options["url"],
            authentication=pulsar.AuthenticationToken(self._mint.token),
            operation_timeout_seconds=30,
            connection_timeout_ms=5000,
            logger=logging.getLogger("pulsar"),
        )
        consumer = None
        if does != "produce":
            earliest = pulsar.InitialPosition.Earliest
            consumer = opened.subscribe(self._options["topic"], "s", initial_position=earliest)
        if does != "consume":
            producer = producer_of(opened, self._options["topic"], batching_enabled=False, max_pending_messages=100)
            self._outbox = Outbox(producer)
            threading.Thread(target=self._produce, args=(self._outbox,), daemon=True).start()
        threading.Thread(target=self._wait_for_stop, daemon=True).start()
        self._report()
        if consumer is not None:
            self._consume(consumer)
        while not self._stop.is_set() or (self._outbox is not None and self._total is None):
            time.sleep(0.5)
            self._report()
        return self._result()

    def _result(self) -> Result:
        sent = self._outbox.sent if self._outbox is not None else self._total or 0
        failures = self._outbox.failures if self._outbox is not None else []
        return self._tally.result(
            sent, corrupt=self._corrupt, send_failures=len(failures), why=failures[:1], minted=self._mint.minted
        )

    def _wait_for_stop(self) -> None:
        sys.stdin.readline()
        self._stop.set()

    def _produce(self, outbox: Outbox) -> None:
        filler = random.Random(1).randbytes(max(0, int(self._options["size"]) - NUMBER_AND_SUM))
        pause_s = 1 / int(self._options["rate"])
        due = time.monotonic()
        while not self._stop.is_set():
            number = outbox.sent.to_bytes(8, "big")
            outbox.send(number + sum_of(number + b"sum-" + filler) + filler)
            due += pause_s
            self._stop.wait(max(0.0, due - time.monotonic()))
        number = outbox.sent.to_bytes(8, "big")
        outbox.send(number + sum_of(number + b"sum-"))  # without anything behind it: it is the last
        outbox.producer.flush()
        self._total = outbox.sent

    def _consume(self, consumer: Any) -> None:
        quiet_since = time.monotonic()
        while self._total is None or len(self._tally.seen) < self._total:
            message = receive_or_none(consumer, 500)
            if message is None:
                if self._stop.is_set() and time.monotonic() - quiet_since > QUIET_S:
                    break
                continue
            quiet_since = time.monotonic()
            data = message.data()
            self._corrupt += data[8:NUMBER_AND_SUM] != sum_of(data)
            self._tally.see(int.from_bytes(data[:8], "big"))
            if len(data) == NUMBER_AND_SUM:
                self._total = int.from_bytes(data[:8], "big") + 1
            consumer.acknowledge(message)
            self._report()

    def _report(self) -> None:
        received = len(self._tally.seen) or (self._outbox.sent if self._outbox is not None else 0)
        print("PROGRESS", json.dumps({"received": received, "minted": self._mint.minted}), flush=True)


def main(arguments: list[str]) -> None:
    """Run until told to stop, and print the result."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        result = {"ok": True, **Renewing(dict(argument.split("=", 1) for argument in arguments)).run()}
    except Exception as error:  # noqa: BLE001 -- every error is a result: the test checks it
        result = {"ok": False, "error_type": type(error).__name__, "error": str(error)}
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
