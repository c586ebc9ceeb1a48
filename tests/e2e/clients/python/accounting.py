"""The Python client that counts what it sends and receives as a proxy's bill should: messages, and entries of brokers.

Beside the contract in ``../README.md``: scenario `spend` with the options count, size and batching (`yes`, `no`). Its
result has also `entries`, the batches (or single messages) that the broker gave out, and `payload_bytes`.
"""

from __future__ import annotations

import sys
import time

import pulsar
from scenarios import RECEIVE_TIMEOUT_MS, SCENARIOS, Options, Outbox, Result, Tally, main, producer_of

AT_A_TIME = 100
PAUSE_S = 0.03


def spend(opened: pulsar.Client, options: Options) -> Result:
    """One producer, one consumer; it takes some seconds, so that several scrapes see it."""
    count, size, batching = int(options["count"]), int(options["size"]), options["batching"] == "yes"
    consumer = opened.subscribe(options["topic"], "s")
    outbox = Outbox(producer_of(opened, options["topic"], batching_enabled=batching))
    tally, entries = Tally(), set()
    for number in range(count):
        outbox.send((b"%d" % number).ljust(size))
        if number % AT_A_TIME == 0:
            time.sleep(PAUSE_S)
    while len(tally.seen) < count:
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        tally.see(int(message.data()))
        place = message.message_id()
        entries.add((place.ledger_id(), place.entry_id()))
        consumer.acknowledge(message)
    outbox.flush()
    return tally.result(count, entries=len(entries), payload_bytes=count * size)


if __name__ == "__main__":
    SCENARIOS["spend"] = spend
    main(sys.argv[1:])
