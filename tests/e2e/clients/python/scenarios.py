"""The Python client's program of the end-to-end tests; ``../README.md`` has the contract.

It runs as a process of its own, because the C++ library below it may abort the process it is in.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pulsar
from pulsar import schema as pulsar_schema

MIB_5 = 5 * 1024 * 1024
RECEIVE_TIMEOUT_MS = 60_000

Options = dict[str, str]
Result = dict[str, Any]


class Tally:
    """Which numbered messages came, how often, and whether each was first seen in order."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.last: dict[str, int] = {}
        self.duplicates = 0
        self.in_order = True

    def see(self, number: int, lane: str = "") -> None:
        """Count message `number`; order is checked within a lane (a partition, a key, a topic)."""
        if number in self.seen:
            self.duplicates += 1
            return
        self.seen.add(number)
        self.in_order = self.in_order and number > self.last.get(lane, -1)
        self.last[lane] = number

    def result(self, sent: int, **more: Any) -> Result:
        """The part of a result that every scenario has."""
        return {
            "sent": sent,
            "received": len(self.seen),
            "missing": sent - len(self.seen),
            "duplicates": self.duplicates,
            "in_order": self.in_order,
            **more,
        }


class Outbox:
    """Sends asynchronously and counts what failed."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self.sent = 0
        self.failures: list[str] = []

    def send(self, data: Any, **more: Any) -> None:
        """Send one message; the receipt is looked at when it comes."""
        self.sent += 1
        self.producer.send_async(data, self._receipt, **more)

    def _receipt(self, result: Any, _message_id: Any) -> None:
        if result != pulsar.Result.Ok:
            self.failures.append(str(result))

    def flush(self) -> None:
        """Wait for every receipt; fail loudly when a message was refused."""
        self.producer.flush()
        if self.failures:
            raise RuntimeError(f"{len(self.failures)} sends failed, first {self.failures[0]}")


@contextmanager
def client(options: Options) -> Iterator[pulsar.Client]:
    """A client as the options ask for, its log on standard error."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    more: dict[str, Any] = {}
    if "token" in options:
        more["authentication"] = pulsar.AuthenticationToken(options["token"])
    if "basic" in options:
        user, _, password = options["basic"].partition(":")
        more["authentication"] = pulsar.AuthenticationBasic(user, password)
    if "certificate" in options:
        more["authentication"] = pulsar.AuthenticationTLS(options["certificate"], options["key"])
    if "trust" in options:
        more |= {"tls_trust_certs_file_path": options["trust"], "tls_validate_hostname": True}
    opened = pulsar.Client(
        options["url"],
        operation_timeout_seconds=int(options.get("timeout_s", "30")),
        connection_timeout_ms=5000,
        logger=logging.getLogger("pulsar"),
        **more,
    )
    try:
        yield opened
    finally:
        opened.close()


def producer_of(opened: pulsar.Client, topic: str, **more: Any) -> Any:
    """A producer that waits for room in its queue, and for a broker as long as that takes, rather than fail."""
    more.setdefault("batching_enabled", True)
    return opened.create_producer(topic, block_if_queue_full=True, send_timeout_millis=0, **more)


def produce_consume(opened: pulsar.Client, options: Options) -> Result:
    """One producer, one consumer, in order and complete; with ``consume_url`` the consumer is at another cluster."""
    if "consume_url" in options:
        with client({**options, "url": options["consume_url"]}) as other:
            return _produce_consume(opened, other, options)
    return _produce_consume(opened, opened, options)


def _produce_consume(opened: pulsar.Client, consuming: pulsar.Client, options: Options) -> Result:
    count, size, tally = int(options.get("count", "10000")), int(options.get("size", "0")), Tally()
    consumer = consuming.subscribe(options["topic"], "s")
    outbox = Outbox(producer_of(opened, options["topic"]))
    for number in range(count):
        outbox.send((b"%d" % number).ljust(size))
    while len(tally.seen) < count:
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        tally.see(int(message.data()))
        consumer.acknowledge(message)
    outbox.flush()
    return tally.result(count)


def partitioned(opened: pulsar.Client, options: Options) -> Result:
    """Round robin over the partitions; in order within each."""
    count, tally = int(options.get("count", "2000")), Tally()
    consumer = opened.subscribe(options["topic"], "s")
    mode = pulsar.PartitionsRoutingMode.RoundRobinDistribution
    outbox = Outbox(producer_of(opened, options["topic"], message_routing_mode=mode, batching_enabled=False))
    for number in range(count):
        outbox.send(b"%d" % number)
    while len(tally.seen) < count:
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        tally.see(int(message.data()), message.topic_name())
        consumer.acknowledge(message)
    outbox.flush()
    return tally.result(count, partitions=len(tally.last))


def pattern(opened: pulsar.Client, options: Options) -> Result:
    """A consumer on a pattern gets what goes to every topic that matches."""
    topics, each, tally = int(options.get("topics", "5")), int(options.get("count", "100")), Tally()
    outboxes = [Outbox(producer_of(opened, f"{options['topic']}-{i}")) for i in range(topics)]
    consumer = opened.subscribe(re.compile(options["topic"] + "-.*"), "s")
    for number in range(topics * each):
        outboxes[number % topics].send(b"%d" % number)
    while len(tally.seen) < topics * each:
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        tally.see(int(message.data()), message.topic_name())
        consumer.acknowledge(message)
    for outbox in outboxes:
        outbox.flush()
    return tally.result(topics * each, topics=len(tally.last))


def reader(opened: pulsar.Client, options: Options) -> Result:
    """A reader sees every message from the earliest on, then says that none is left."""
    count, tally = int(options.get("count", "1000")), Tally()
    outbox = Outbox(producer_of(opened, options["topic"]))
    for number in range(count):
        outbox.send(b"%d" % number)
    outbox.flush()
    opened_reader = opened.create_reader(options["topic"], pulsar.MessageId.earliest)
    while opened_reader.has_message_available():
        tally.see(int(opened_reader.read_next(RECEIVE_TIMEOUT_MS).data()))
    return tally.result(count, more_left=opened_reader.has_message_available())


class Reading(pulsar_schema.Record):  # type: ignore[misc]
    """The record that the schema scenario sends."""

    number = pulsar_schema.Integer()
    name = pulsar_schema.String()


def schema(opened: pulsar.Client, options: Options) -> Result:
    """Typed messages arrive as the values that were sent."""
    count, tally, equal = int(options.get("count", "200")), Tally(), True
    kind = options.get("kind", "json")
    chosen = pulsar_schema.StringSchema() if kind == "string" else pulsar_schema.JsonSchema(Reading)

    def value(number: int) -> Any:
        return f"reading {number}" if kind == "string" else Reading(number=number, name=f"reading {number}")

    consumer = opened.subscribe(options["topic"], "s", schema=chosen)
    outbox = Outbox(producer_of(opened, options["topic"], schema=chosen))
    for number in range(count):
        outbox.send(value(number))
    for number in range(count):
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        equal = equal and message.value() == value(number)
        tally.see(number)
        consumer.acknowledge(message)
    outbox.flush()
    return tally.result(count, values_equal=equal)


def key_shared(opened: pulsar.Client, options: Options) -> Result:
    """Each key goes to one consumer, in the key's order; together they get everything."""
    count, keys = int(options.get("count", "2000")), int(options.get("keys", "50"))
    consumers = [
        opened.subscribe(options["topic"], "s", consumer_type=pulsar.ConsumerType.KeyShared)
        for _ in range(int(options.get("consumers", "2")))
    ]
    outbox = Outbox(
        producer_of(opened, options["topic"], batching_type=pulsar.BatchingType.KeyBased)  # a key per batch
    )
    for number in range(count):
        outbox.send(b"%d" % number, partition_key=str(number % keys))
    outbox.flush()
    homes: dict[str, set[int]] = {}
    tally, per_consumer = Tally(), [0] * len(consumers)
    while len(tally.seen) < count:
        for index, consumer in enumerate(consumers):
            while (message := receive_or_none(consumer, 200)) is not None:
                tally.see(int(message.data()), message.partition_key())
                homes.setdefault(message.partition_key(), set()).add(index)
                per_consumer[index] += 1
                consumer.acknowledge(message)
    single = all(len(home) == 1 for home in homes.values())
    return tally.result(count, per_consumer=per_consumer, keys_on_one_consumer=single)


def receive_or_none(consumer: Any, timeout_ms: int) -> Any:
    """The next message, or None when there is none in time."""
    try:
        return consumer.receive(timeout_ms)
    except pulsar.Timeout:
        return None


def large(opened: pulsar.Client, options: Options) -> Result:
    """The largest message this client accepts: its metadata counts, so step down from 5 MiB."""
    consumer = opened.subscribe(options["topic"], "s")
    producer = producer_of(opened, options["topic"], batching_enabled=False)
    for size in range(MIB_5, MIB_5 - 1024, -16):
        payload = random.Random(size).randbytes(size)
        try:
            producer.send(payload)
        except pulsar.MessageTooBig:
            continue
        message = consumer.receive(RECEIVE_TIMEOUT_MS)
        consumer.acknowledge(message)
        return {"size": size, "payload_equal": message.data() == payload}
    raise RuntimeError("no size near 5 MiB was accepted")


def many_topics(opened: pulsar.Client, options: Options) -> Result:
    """Many topics at the same time, each with a producer and a consumer of its own."""
    topics, each = int(options.get("count", "50")), 20

    def one(index: int) -> Result:
        return produce_consume(opened, {"topic": f"{options['topic']}-{index}", "count": str(each)})

    with ThreadPoolExecutor(topics) as pool:
        results = list(pool.map(one, range(topics)))
    return {
        "topics": len(results),
        "received": sum(result["received"] for result in results),
        "in_order": all(result["in_order"] for result in results),
    }


class Stream:
    """Produces and consumes until told to stop, then drains; nothing may be missing."""

    def __init__(self, opened: pulsar.Client, options: Options) -> None:
        self.consumer = opened.subscribe(options["topic"], "s")
        self.outbox = Outbox(producer_of(opened, options["topic"]))
        self.stop = threading.Event()
        self.produced = threading.Event()
        self.tally = Tally()
        self.at_a_time = int(options.get("rate", "1000")) // 100

    def produce(self) -> None:
        """About `rate` messages a second until stopped."""
        while not self.stop.wait(0.01):
            for _ in range(self.at_a_time):
                self.outbox.send(b"%d" % self.outbox.sent)
        self.outbox.producer.flush()
        self.produced.set()

    def wait_for_stop(self) -> None:
        """The harness says when: a line (or the end) on standard input."""
        sys.stdin.readline()
        self.stop.set()

    def run(self) -> Result:
        """Consume and report progress until all is in or nothing more comes."""
        for target in (self.wait_for_stop, self.produce):
            threading.Thread(target=target, daemon=True).start()
        reported, quiet_since = 0, time.monotonic()
        while not (self.produced.is_set() and len(self.tally.seen) == self.outbox.sent):
            message = receive_or_none(self.consumer, 500)
            if message is None:
                if self.produced.is_set() and time.monotonic() - quiet_since > 60:
                    break
                continue
            quiet_since = time.monotonic()
            self.tally.see(int(message.data()))
            self.consumer.acknowledge(message)
            if len(self.tally.seen) - reported >= 100:
                reported = len(self.tally.seen)
                print("PROGRESS", json.dumps({"received": reported}), flush=True)
        return self.tally.result(self.outbox.sent, send_failures=len(self.outbox.failures))


def stream(opened: pulsar.Client, options: Options) -> Result:
    """See Stream."""
    return Stream(opened, options).run()


def attempt(opened: pulsar.Client, options: Options) -> Result:
    """Create a producer; the error, if any, is the result."""
    producer_of(opened, options["topic"]).close()
    return {}


SCENARIOS: dict[str, Callable[[pulsar.Client, Options], Result]] = {
    function.__name__: function
    for function in (
        produce_consume, partitioned, pattern, reader, schema, key_shared, large, many_topics, stream, attempt,
    )
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run one scenario and print its result."""
    options = dict(argument.split("=", 1) for argument in arguments)
    with client(options) as opened:
        try:
            result = {"ok": True, **SCENARIOS[options["scenario"]](opened, options)}
        except Exception as error:  # noqa: BLE001 -- every error is a result: the test checks it
            result = {"ok": False, "error_type": type(error).__name__, "error": str(error)}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
