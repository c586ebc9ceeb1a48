"""Quotas at a real broker: what one credential, or one tenant's topics, may take; and what it leaves others without any
quota."""

from __future__ import annotations

import contextlib
import json

from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, running
from .lab.cluster import ProxyCluster
from .lab.schema import LOOKUP_CONNECT
from .lab.security import NAMESPACE
from .lab.wire import WireClient

TENANT = NAMESPACE.partition("/")[0]
TOPIC = f"persistent://{NAMESPACE}/t"
OTHER = "bob"
PLACES = 200
REFUSALS = "pulsar_proxy_quota_refusals_total"


def opened(stack: contextlib.ExitStack, cluster: ProxyCluster, token: str) -> tuple[WireClient, BaseCommand]:
    """A connection, and what its CONNECT was answered."""
    client = stack.enter_context(WireClient(cluster.port))
    return client, client.connect(token=token)


def test_one_credential_that_takes_all_connections_leaves_others_theirs(secured_broker: Standalone) -> None:
    """Without a quota: shares are on by default."""
    tables = authentication(secured_broker) | {"limits": {"max_connections": PLACES}}
    alice, other = secured_broker.token("alice"), secured_broker.token(OTHER)
    with running(ProxyCluster(tables)) as cluster, contextlib.ExitStack() as stack:
        answers = [opened(stack, cluster, alice)[1].type for _ in range(PLACES)]
        assert answers.count(BaseCommand.CONNECTED) > PLACES * 3 // 4
        for _ in range(PLACES // 10):
            client, answer = opened(stack, cluster, other)
            assert answer.type == BaseCommand.CONNECTED
            assert client.partitions(TOPIC).type == BaseCommand.PARTITIONED_METADATA_RESPONSE


def test_quotas_of_one_principal_and_of_a_tenant(secured_broker: Standalone) -> None:
    quotas: list[dict[str, object]] = [
        {"principals": ["alic*"], "max_connections": 4, "dry_run": True},
        {"principals": ["alice"], "max_connections": 8},
        {"by": "tenant", "tenant": TENANT, "lookups_per_second": 1, "burst_ms": 3000},
    ]
    environment = {
        f"PULSAR_TRIO_PROXY__QUOTA__{index}__{key.upper()}": value if isinstance(value, str) else json.dumps(value)
        for index, quota in enumerate(quotas)
        for key, value in quota.items()
    }
    tables = authentication(secured_broker)
    alice, other = secured_broker.token("alice"), secured_broker.token(OTHER)
    with running(ProxyCluster(tables, environment=environment)) as cluster, contextlib.ExitStack() as stack:
        clients = [opened(stack, cluster, alice) for _ in range(20)]
        errors = [answer.error for _, answer in clients if answer.type == BaseCommand.ERROR]
        assert 12 <= len(errors) <= 16, "each of two forwarders has four, and may not have been asked for all"
        assert {error.error for error in errors} == {ServerError.ServiceNotReady}
        assert {error.message for error in errors} == {"The proxy has reached its limit (quota[1].max_connections)"}
        assert opened(stack, cluster, other)[1].type == BaseCommand.CONNECTED
        client = next(client for client, answer in clients if answer.type == BaseCommand.CONNECTED)
        responses = [client.lookup(TOPIC).lookup_topic_response for _ in range(50)]
        assert responses[0].response == LOOKUP_CONNECT
        refused = [one for one in responses if one.error == ServerError.TooManyRequests]
        assert refused
        assert {one.message for one in refused} == {"The proxy has reached its limit (quota[2].lookups_per_second)"}
        metrics = cluster.metrics()
        assert metrics.total(REFUSALS, limit="max_connections", dry_run="false") == len(errors)
        assert metrics.total(REFUSALS, limit="max_connections", dry_run="true") >= len(errors)
        assert metrics.total(REFUSALS, by="tenant", dry_run="false") == len(refused)
