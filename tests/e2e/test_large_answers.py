"""Schemas that are asked for and not read: what they cost is bounded in bytes, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from local.standalone import Standalone

from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.cluster import ProxyCluster, Tables
from .lab.processes import memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.wire import WireClient

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
REQUESTS = 400
LARGE_ANSWERS_BYTES = 64 * MIB
GROWTH_BYTES_MAX = 150 * MIB
"""Of each process: the configured bound, and what the few answers cost that are just being passed on."""

WATCHED_S = 6.0
STRANGER = "127.0.0.2"
"""Another address than the good client's; the kernel takes all of 127.0.0.0/8 for this machine's."""

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


@pytest.fixture(scope="module")
def large_topic(broker: Standalone) -> str:
    """A topic with a schema of 1 MiB."""
    name = f"large-schema-{uuid.uuid4().hex[:8]}"
    schema = json.dumps({"type": "record", "name": "Large", "doc": "x" * MIB, "fields": []})
    body = {"type": "AVRO", "schema": schema, "properties": {}}
    broker.admin().request("POST", f"schemas/public/default/{name}/schema", body)
    return f"persistent://public/default/{name}"


@contextlib.contextmanager
def bounded_cluster(broker: Standalone) -> Iterator[ProxyCluster]:
    """One forwarder and one lookup worker, so that nothing is shared out among several."""
    tables: Tables = {
        "cluster": {"forwarders": 1, "lookup_workers": 1},
        "brokers": before(broker),
        "limits": {"max_topic_lists_bytes": LARGE_ANSWERS_BYTES},
    }
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


def schema_bytes(client: WireClient, topic: str) -> int:
    """Ask for a schema; how large the answer is."""
    client.send_bytes(get_schema(topic))
    return len(client.receive_frame().command)


@pytest.mark.parametrize("request_of", [get_schema, hidden])
@pytest.mark.parametrize("connections", [1, 20])
def test_schemas_that_nobody_reads_cost_bounded_memory_and_hold_up_nobody(
    broker: Standalone, large_topic: str, connections: int, request_of: Callable[[str], bytes]
) -> None:
    """400 equal requests on each connection, nothing read; meanwhile somebody else asks and is answered."""
    with bounded_cluster(broker) as cluster, contextlib.ExitStack() as stack:
        pids = [pid for name, pid in cluster.worker_pids().items() if name.startswith(("forwarder", "lookup"))]
        good = stack.enter_context(WireClient(cluster.port))
        good.connect()
        assert schema_bytes(good, large_topic) > MIB
        begin = {pid: memory_kib(pid) for pid in pids}
        strangers = [stack.enter_context(WireClient(cluster.port, source=STRANGER)) for _ in range(connections)]
        for stranger in strangers:
            stranger.connect()
            stranger.send_bytes(b"".join(request_of(large_topic) for _ in range(REQUESTS)))
        most = dict(begin)
        slowest_lookup_s = slowest_schema_s = 0.0
        ends_at = time.monotonic() + WATCHED_S
        while time.monotonic() < ends_at:
            asked_at = time.monotonic()
            answer = good.lookup("persistent://public/default/meanwhile")
            assert answer.lookup_topic_response.response == LOOKUP_CONNECT, answer
            slowest_lookup_s = max(slowest_lookup_s, time.monotonic() - asked_at)
            asked_at = time.monotonic()
            assert schema_bytes(good, large_topic) > MIB
            slowest_schema_s = max(slowest_schema_s, time.monotonic() - asked_at)
            most = {pid: max(size, memory_kib(pid)) for pid, size in most.items()}
        growth = {pid: (most[pid] - begin[pid]) // 1024 for pid in pids}
        print(f"growth in MiB {growth}; lookup {slowest_lookup_s:.2f} s, schema {slowest_schema_s:.2f} s")
        assert max(growth.values()) < GROWTH_BYTES_MAX // MIB
