"""Each real client library does its everyday work through the cluster."""

from __future__ import annotations

import pytest
from local.standalone import Standalone

from .lab.programs import Program

MIB_5 = 5 * 1024 * 1024


def assert_complete(result: dict[str, object], sent: int) -> None:
    """Everything that was sent came, once and in order."""
    expected = {"sent": sent, "received": sent, "missing": 0, "duplicates": 0, "in_order": True}
    assert {key: result[key] for key in expected} == expected


@pytest.mark.conforms("pip-1.4")
def test_produces_and_consumes_10000_messages_in_order(client: Program, url: str, topic: str) -> None:
    result = client.succeed("produce_consume", url, topic, count=10_000)
    assert_complete(result, 10_000)


@pytest.mark.conforms("pip-1.18")
def test_partitioned_topic_uses_every_partition(client: Program, broker: Standalone, url: str, topic: str) -> None:
    """The number of partitions comes through the proxy, and each partition is looked up by itself."""
    broker.admin().create_partitioned_topic(topic, 4)
    result = client.succeed("partitioned", url, topic, count=2000)
    assert_complete(result, 2000)
    assert result["partitions"] == 4


def test_pattern_subscription_finds_every_topic(client: Program, url: str, topic: str) -> None:
    """The namespace's topics come through the proxy."""
    result = client.succeed("pattern", url, topic, topics=5, count=100)
    assert_complete(result, 500)
    assert result["topics"] == 5


def test_reader_reads_from_the_earliest_message_to_the_last(client: Program, url: str, topic: str) -> None:
    result = client.succeed("reader", url, topic, count=1000)
    assert_complete(result, 1000)
    assert result["more_left"] is False


@pytest.mark.parametrize("kind", ["json", "string"])
def test_typed_messages_arrive_as_they_were_sent(client: Program, url: str, topic: str, kind: str) -> None:
    result = client.succeed("schema", url, topic, kind=kind)
    assert result["values_equal"] is True


@pytest.mark.parametrize("kind", ["avro", "auto"])
def test_java_avro_and_a_consumer_that_asks_for_the_schema(
    java_client: Program, url: str, topic: str, kind: str
) -> None:
    """`auto` knows no schema and asks for it: GET_SCHEMA on a connection in lookup mode."""
    result = java_client.succeed("schema", url, topic, kind=kind)
    assert result["values_equal"] is True


def test_key_shared_gives_each_key_to_one_consumer(client: Program, url: str, topic: str) -> None:
    result = client.succeed("key_shared", url, topic, consumers=3, keys=50, count=2000)
    assert_complete(result, 2000)
    assert result["keys_on_one_consumer"] is True
    assert sum(1 for count in result["per_consumer"] if count) >= 2


def test_the_largest_message_arrives_unharmed(client: Program, url: str, topic: str) -> None:
    """5 MiB less the few bytes of metadata: the largest that the client itself accepts for this broker."""
    result = client.succeed("large", url, topic)
    assert result["payload_equal"] is True
    assert MIB_5 - 1024 < result["size"] <= MIB_5


def test_fifty_topics_at_once(client: Program, url: str, topic: str) -> None:
    result = client.succeed("many_topics", url, topic, count=50)
    assert (result["topics"], result["received"], result["in_order"]) == (50, 50 * 20, True)
