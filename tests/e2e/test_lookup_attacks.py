"""Requests of lookup mode upon which a broker closes the connection that others share: they hurt their sender only."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from pulsar_bytes import field, varint

from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.cluster import ProxyCluster, Tables
from .lab.counting_broker import CountingBroker
from .lab.fakes import FakeBroker
from .lab.processes import children
from .lab.schema import LOOKUP_CONNECT, LOOKUP_FAILED, Command
from .lab.security import NAMESPACE
from .lab.wire import Ended, WireClient

REFUSED = "pulsar_proxy_invalid_lookup_requests_total"
BLAMED = "pulsar_proxy_fatal_lookup_requests_total"
EJECTIONS = "pulsar_proxy_broker_ejections_total"
LOOKUPS = 99
PER_SECOND = 190
LOOKUP, METADATA, TOPICS, SCHEMA = 23, 21, 32, 34


# ---- a client's bytes, by hand


def request(kind: int, *fields: tuple[int, int | bytes], inside: bytes = b"", beside: bytes = b"") -> bytes:
    body = b"".join(field(number, value) for number, value in fields) + inside
    return encode_frame(field(1, kind) + field(kind, body) + beside)


TOPIC = b"persistent://public/default/attack"
GROUP = varint(90 << 3 | 3) + varint(90 << 3 | 4)
BAD = {
    "a lookup about nothing": lambda number: request(LOOKUP, (2, number)),
    "metadata about nothing": lambda number: request(METADATA, (2, number)),
    "topics of nothing": lambda number: request(TOPICS, (1, number)),
    "a schema of nothing": lambda number: request(SCHEMA, (1, number)),
    "an empty property": lambda number: request(LOOKUP, (1, TOPIC), (2, number), (8, b"")),
    "a group in a lookup": lambda number: request(LOOKUP, (1, TOPIC), (2, number), inside=GROUP),
    "a group in metadata": lambda number: request(METADATA, (1, TOPIC), (2, number), inside=GROUP),
    "a group beside a lookup": lambda number: request(LOOKUP, (1, TOPIC), (2, number), beside=GROUP),
    "a lookup and an empty send": lambda number: request(LOOKUP, (1, TOPIC), (2, number), beside=field(6, b"")),
    "no namespace": lambda number: request(TOPICS, (1, number), (2, b"none")),
    "half a schema version": lambda number: request(SCHEMA, (1, number), (2, TOPIC), (3, b"half")),
}
"""Upon each of these Pulsar 4.0.8's broker closes the connection."""


@contextlib.contextmanager
def attack(
    port: int, make: Callable[[int], bytes], *, one_by_one: bool = False, **credentials: str
) -> Iterator[list[Any]]:
    """Requests, so many a second at most, and whatever is answered; the attacker comes back when it is thrown out.

    ``one_by_one``: it waits for each answer, so that a busy machine is not asked for more than it can do.
    """
    answers: list[Any] = []
    over = threading.Event()

    def go_on() -> None:
        numbers = itertools.count(1)
        while not over.is_set():
            with contextlib.suppress(Ended, OSError, TimeoutError), WireClient(port) as client:
                client.connect(**credentials)
                while not over.wait(1 / PER_SECOND):
                    client.send_bytes(make(next(numbers)))
                    if one_by_one:
                        answers.append(client.receive(within_s=60))
                        continue
                    with contextlib.suppress(TimeoutError):
                        while True:
                            answers.append(client.receive(within_s=0.0005))

    attacker = threading.Thread(target=go_on, daemon=True)
    attacker.start()
    try:
        yield answers
    finally:
        over.set()
        attacker.join(20)


def failed_lookups(port: int, namespace: str, count: int = LOOKUPS, **credentials: str) -> list[Any]:
    """Of so many lookups of a client that does nothing wrong, those that failed, each over a connection of its own."""
    failed: list[Any] = []
    for number in range(count):
        try:
            with WireClient(port) as client:
                client.connect(**credentials)
                response = client.lookup(f"persistent://{namespace}/t-{number}").lookup_topic_response
        except (Ended, TimeoutError) as error:
            failed.append(error)
        else:
            if response.response != LOOKUP_CONNECT:
                failed.append(response)
    return failed


def pooled_connections(cluster: ProxyCluster, broker_port: int) -> set[int]:
    """The lookup workers' ports of connections to the broker."""
    ours = set()
    for pid in children(cluster.pid, "lookup"):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                ours |= set(re.findall(r"socket:\[(\d+)\]", str(path.readlink())))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            established = words[3] == "01"
            if established and words[9] in ours and int(words[2].rpartition(":")[2], 16) == broker_port:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


# ---- requests that the proxy knows to be fatal


@pytest.fixture(scope="module", params=["no client authenticates", "all are one principal"])
def target(
    request: pytest.FixtureRequest, proxy: ProxyCluster, broker: Standalone
) -> tuple[ProxyCluster, Standalone, str, dict[str, str]]:
    """A cluster, its broker, a namespace, and who all clients say they are: they share connections to the broker."""
    if request.param == "no client authenticates":
        return proxy, broker, "public/default", {}
    secured, secured_broker = (request.getfixturevalue(name) for name in ("secured_proxy", "secured_broker"))
    return secured, secured_broker, NAMESPACE, {"token": secured_broker.token("alice")}


def test_bad_requests_hurt_their_sender_only(target: tuple[ProxyCluster, Standalone, str, dict[str, str]]) -> None:
    cluster, broker, namespace, credentials = target
    assert failed_lookups(cluster.port, namespace, **credentials) == []
    connections = pooled_connections(cluster, broker.broker_port)
    before = cluster.metrics()
    kinds = list(BAD.values())
    with attack(cluster.port, lambda number: kinds[number % len(kinds)](number), **credentials) as answers:
        failed = failed_lookups(cluster.port, namespace, **credentials)
        print(f"{len(failed)} of {LOOKUPS} lookups failed")
        while len(answers) < 3 * len(kinds):
            time.sleep(0.05)
    assert failed == []
    assert connections
    assert connections <= pooled_connections(cluster, broker.broker_port), "no connection to the broker was lost"
    assert cluster.metrics().total(REFUSED) >= before.total(REFUSED) + len(answers) - 1
    assert {answer.type for answer in answers} == {24, 22, 14, 35}, "each in the form of its own request"


@pytest.mark.parametrize("what", BAD)
def test_each_is_answered_under_its_own_id_and_the_connection_goes_on(proxy: ProxyCluster, what: str) -> None:
    with WireClient(proxy.port) as client:
        client.connect()
        client.send_bytes(BAD[what](4711))
        frame = client.receive_frame()
        kind = BaseCommand.FromString(frame.command).type
        names = {24: "lookup_topic_response", 22: "partition_metadata_response", 14: "error", 35: "get_schema_response"}
        answer = getattr(BaseCommand.FromString(frame.command), names[kind])
        assert answer.request_id == 4711
        code = answer.error_code if kind == SCHEMA + 1 else answer.error
        assert code in {ServerError.InvalidTopicName, ServerError.NotAllowedError, ServerError.IncompatibleSchema}
        assert client.lookup("persistent://public/default/after").lookup_topic_response.response == LOOKUP_CONNECT


def test_without_an_id_the_clients_own_connection_ends(proxy: ProxyCluster) -> None:
    for data in (request(LOOKUP, (1, TOPIC)), request(SCHEMA, (2, TOPIC)), request(TOPICS, (2, b"public/default"))):
        with WireClient(proxy.port) as client:
            client.connect()
            client.send_bytes(data)
            [last] = client.wait_for_end()
            assert last.type == BaseCommand.ERROR


# ---- requests of which only the broker knows


class DyingBroker(CountingBroker):
    """Closes a connection upon a topic that begins with "fatal", after some time in which others come in."""

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        with contextlib.suppress(_Fatal):
            super().__call__(connection)

    def _answer(self, data: bytes) -> bytes:
        topic = Command.FromString(data).lookup_topic.topic
        if "/fatal" in topic:
            self._count(topic)
            time.sleep(0.01)
            raise _Fatal
        return super()._answer(data)


class _Fatal(Exception):
    pass


def test_a_request_that_only_the_broker_knows_to_be_fatal_hurts_its_sender_only() -> None:
    """Two brokers, so that others could be asked; neither is set aside."""
    behaviours = [DyingBroker() for _ in range(2)]
    with FakeBroker(behaviours[0]) as first, FakeBroker(behaviours[1]) as second:
        url = f"pulsar://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {"service_url": url, "allowed_ports": [first.port, second.port]},
            "limits": {"lookup_timeout_ms": 60_000},  # a busy machine is no broken broker
        }
        with running(ProxyCluster(tables)) as cluster:
            assert failed_lookups(cluster.port, "public/before", count=10) == []

            def fatal(number: int) -> bytes:
                return request(LOOKUP, (1, b"persistent://public/attack/fatal-%d" % number), (2, number))

            with attack(cluster.port, fatal, one_by_one=True) as answers:
                failed = failed_lookups(cluster.port, "public/during", count=30)
                while not answers:
                    time.sleep(0.05)
            print(f"{len(failed)} of 30 lookups failed; {len(answers)} answers for the attacker")
            assert failed == []
            assert answers
            assert {answer.lookup_topic_response.response for answer in answers} == {LOOKUP_FAILED}
            scrape = cluster.metrics()
            assert scrape.total(BLAMED) > 0
            assert scrape.total(EJECTIONS, reason="lost") == 0


# ---- clients without credentials


def test_anonymous_clients_share_by_address(tmp_path: Path) -> None:
    """One of them has as many lookups under way as it may; another address's are answered all the same."""
    counting = CountingBroker()
    (key := tmp_path / "secret.key").write_bytes(b"k" * 32)
    with FakeBroker(counting) as fake:
        tables: Tables = {
            "cluster": {"forwarders": 1, "lookup_workers": 1},
            "brokers": {"service_url": f"pulsar://127.0.0.1:{fake.port}"},
            "authentication": {"enabled": True, "anonymous_role": "guest", "token": {"secret_key": str(key)}},
            "limits": {"max_lookup_bytes": 64 * 1024, "lookup_timeout_ms": 100_000},
        }
        with (
            running(ProxyCluster(tables)) as cluster,
            WireClient(cluster.port, source="127.0.0.2") as attacker,
            WireClient(cluster.port, source="127.0.0.3") as other,
        ):
            attacker.connect()
            other.connect()
            counting.may_answer.clear()
            attacker.send_bytes(b"".join(request(LOOKUP, (1, TOPIC), (2, number)) for number in range(100)))
            refused = attacker.receive().lookup_topic_response
            assert refused.error == ServerError.TooManyRequests, refused
            other.send_bytes(request(LOOKUP, (1, TOPIC), (2, 7)))
            other.send(BaseCommand.PING, ping={})
            first = other.receive()
            assert first.type == BaseCommand.PONG, first  # no refusal has come before
            counting.may_answer.set()
            answer = other.receive().lookup_topic_response
            assert answer.response == LOOKUP_CONNECT, answer
