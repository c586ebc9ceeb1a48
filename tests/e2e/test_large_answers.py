"""Schemas that are asked for and not read: what they cost is bounded in bytes, and no other client waits for them."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from local.standalone import Standalone

from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.cluster import ProxyCluster, Tables
from .lab.counting_broker import CountingBroker
from .lab.fakes import FakeBroker
from .lab.processes import memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.wire import WireClient

MIB = 1 << 20
REQUESTS = 400
LARGE_ANSWERS_BYTES = 64 * MIB
GROWTH_MIB_MAX = 150
"""Of each process: the configured bound, and what the few answers cost that are just being passed on."""

WATCHED_S = 4.0
STRANGERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Other addresses than the good client's; the kernel takes all of 127.0.0.0/8 for this machine's."""

TOPIC = "persistent://public/default/large"

_ids = itertools.count(1)


def get_schema(topic: str) -> bytes:
    """A request for a topic's schema, as a frame."""
    command = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": topic, "request_id": next(_ids)})
    return encode_frame(command.SerializeToString())


def hidden(topic: str) -> bytes:
    """The same, behind what begins as a LOOKUP: of a field that comes twice the last one counts."""
    looks_like = BaseCommand(type=BaseCommand.LOOKUP, lookup_topic={"topic": topic, "request_id": next(_ids)})
    command = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": topic, "request_id": next(_ids)})
    return encode_frame(looks_like.SerializeToString() + command.SerializeToString())


@dataclass(frozen=True)
class Bounded:
    """A cluster of one forwarder and one lookup worker, so that nothing is shared out among several."""

    cluster: ProxyCluster
    begin_kib: dict[int, int]
    """The memory of both by process id, before any client asked for much."""

    def growth_mib(self) -> int:
        """By how much the one has grown that has grown most."""
        return max(memory_kib(pid) - begin for pid, begin in self.begin_kib.items()) // 1024


@contextlib.contextmanager
def before_brokers(brokers: dict[str, object], topic: str) -> Iterator[Bounded]:
    """The cluster before some brokers where this topic has a schema of 1 MiB."""
    tables: Tables = {
        "cluster": {"forwarders": 1, "lookup_workers": 1},
        "brokers": brokers,
        "limits": {"max_topic_lists_bytes": LARGE_ANSWERS_BYTES},
    }
    with running(ProxyCluster(tables, ready_timeout_s=90)) as cluster:
        with WireClient(cluster.port) as client:
            client.connect()
            assert schema_bytes(client, topic) > MIB
        pids = [pid for name, pid in cluster.worker_pids().items() if name.startswith(("forwarder", "lookup"))]
        yield Bounded(cluster, {pid: memory_kib(pid) for pid in pids})


@pytest.fixture(scope="module")
def bounded() -> Iterator[Bounded]:
    """One for most tests here: the bound is on what all of them together cost."""
    with FakeBroker(CountingBroker(schema_bytes=MIB)) as fake:
        brokers: dict[str, object] = {"service_url": f"pulsar://127.0.0.1:{fake.port}"}
        with before_brokers(brokers, TOPIC) as cluster:
            yield cluster


def schema_bytes(client: WireClient, topic: str) -> int:
    """Ask for a schema; how large the answer is."""
    client.send_bytes(get_schema(topic))
    return len(client.receive_frame().command)


def attack(bounded: Bounded, topic: str, connections: int, request_of: Callable[[str], bytes]) -> None:
    """400 equal requests on each connection, nothing read; meanwhile another asks and is answered."""
    port = bounded.cluster.port
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(WireClient(port))
        good.connect()
        for _ in range(connections):
            stranger = stack.enter_context(WireClient(port, source=STRANGERS[0]))
            stranger.connect()
            stranger.send_bytes(b"".join(request_of(topic) for _ in range(REQUESTS)))
        growth_mib = asked = 0
        ends_at = time.monotonic() + WATCHED_S
        while time.monotonic() < ends_at or not asked:
            answer = good.lookup("persistent://public/default/meanwhile")
            assert answer.lookup_topic_response.response == LOOKUP_CONNECT, answer
            assert schema_bytes(good, topic) > MIB
            asked += 1
            growth_mib = max(growth_mib, bounded.growth_mib())
    print(f"{connections} connections: growth {growth_mib} MiB; another was answered {2 * asked} times")
    assert growth_mib < GROWTH_MIB_MAX


@pytest.mark.parametrize("request_of", [get_schema, hidden])
@pytest.mark.parametrize("connections", [1, 20])
def test_unread_schemas_cost_bounded_memory_and_delay_no_other_client(
    bounded: Bounded, connections: int, request_of: Callable[[str], bytes]
) -> None:
    """Of one client's connection, and of many; also where each request begins as one for little."""
    attack(bounded, TOPIC, connections, request_of)


def test_with_a_real_brokers_schema_too(broker: Standalone) -> None:
    """The same attack, once."""
    name = f"large-schema-{uuid.uuid4().hex[:8]}"
    schema = json.dumps({"type": "record", "name": "Large", "doc": "x" * MIB, "fields": []})
    body = {"type": "AVRO", "schema": schema, "properties": {}}
    broker.admin().request("POST", f"schemas/public/default/{name}/schema", body)
    topic = f"persistent://public/default/{name}"
    with before_brokers(before(broker), topic) as cluster:
        attack(cluster, topic, 1, get_schema)


def test_clients_that_read_nothing_keep_no_room_from_others(bounded: Bounded) -> None:
    """Strangers from three addresses take all the room; once another wants some, they lose their connections."""
    cluster = bounded.cluster
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(WireClient(cluster.port))
        good.connect()
        for address in STRANGERS * 6:
            stranger = stack.enter_context(WireClient(cluster.port, source=address))
            stranger.connect()
            stranger.send_bytes(get_schema(TOPIC) * REQUESTS)
        cluster.wait_for_log("does not take a large answer", "limits.max_topic_lists_bytes", within_s=60)
        for _ in range(3):
            assert schema_bytes(good, TOPIC) > MIB
        assert cluster.metrics().total("pulsar_proxy_ended_connections_total", cause="client_does_not_read") > 0
        assert bounded.growth_mib() < GROWTH_MIB_MAX
