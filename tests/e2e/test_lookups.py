"""Lookups of many at once: each sees what its own principal may see, none waits for others, nothing gets lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import pytest
import trio
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.counting_broker import CountingBroker, broker_of
from .lab.counts import count_of
from .lab.fakes import FakeBroker
from .lab.lookup_load import (
    RETRIABLE,
    Load,
    SentRequest,
    lookup,
    partitions,
    questioner,
    topics_of_namespace,
    wait_for_answers,
)
from .lab.processes import memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.security import NAMESPACE
from .lab.waiting import BUSY_S, eventually
from .lab.wire import WireClient
from .test_failing_brokers import comparable

MIB = 1 << 20
PRINCIPALS = 100
EVENS_NAMESPACE = "secured/evens"
EVENS_TOPIC = f"persistent://{EVENS_NAMESPACE}/topic"
"""Those with an even number may use it."""


# ---- principals


@dataclass(frozen=True)
class Principal:
    """A role with grants of its own: a namespace, or one topic."""

    number: int
    token: str = field(repr=False)

    @property
    def role(self) -> str:
        """Its name."""
        return f"principal-{self.number}"

    @property
    def has_namespace(self) -> bool:
        """Whether it is granted its namespace rather than its topic."""
        return self.number % 4 < 2

    @property
    def namespace(self) -> str:
        """Where its topic is."""
        return f"secured/of-{self.number}"

    @property
    def topic(self) -> str:
        """A topic that only it may use."""
        return f"persistent://{self.namespace}/topic"

    def may_use(self, topic: str) -> bool:
        """Whether it was granted this topic."""
        return topic == self.topic or (topic == EVENS_TOPIC and self.number % 2 == 0)


@pytest.fixture(scope="module")
def principals(secured_broker: Standalone) -> list[Principal]:
    """Each with its grant."""
    key, admin = secured_broker.secret_key.read_bytes(), secured_broker.admin()
    all_principals = [Principal(number, make_token(key, f"principal-{number}")) for number in range(PRINCIPALS)]

    def prepare(principal: Principal) -> None:
        admin.create_namespace(principal.namespace)
        admin.create_topic(principal.topic)
        if principal.has_namespace:
            admin.grant_namespace(principal.namespace, principal.role)
        else:
            admin.grant_topic(principal.topic, principal.role)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(prepare, all_principals))
    admin.create_namespace(EVENS_NAMESPACE)
    admin.create_topic(EVENS_TOPIC)
    for principal in all_principals[::2]:  # one after the other: they are written to the same policies
        admin.grant_topic(EVENS_TOPIC, principal.role)
    return all_principals


@pytest.fixture(scope="module")
def secured(secured_broker: Standalone) -> Iterator[ProxyCluster]:
    """One lookup worker, so that connections to the broker can be counted; two forwarders."""
    with running(ProxyCluster(authentication(secured_broker))) as cluster:
        yield cluster


def requests_of(principal: Principal, neighbour: Principal) -> list[SentRequest]:
    """What is its own, its neighbour's, and what half of all may use; each twice, in any order."""
    topics = (principal.topic, neighbour.topic, EVENS_TOPIC)
    requests = [ask(topic) for topic in topics for ask in (lookup, partitions) for _ in range(2)]
    random.shuffle(requests)
    return requests


async def ask_all(port: int, principals: Sequence[Principal]) -> list[tuple[Principal, list[SentRequest]]]:
    """All clients ask at the same moment, each over its own connection."""
    async with AsyncExitStack() as stack:
        askers = [await stack.enter_async_context(questioner(port, token=one.token)) for one in principals]
        asked = []
        async with trio.open_nursery() as nursery:
            for index, asker in enumerate(askers):
                requests = requests_of(principals[index], principals[(index + 1) % len(principals)])
                asked.append((principals[index], requests))
                nursery.start_soon(asker.ask, requests)
        for asker in askers:
            await wait_for_answers(asker.asked, BUSY_S)
            assert (asker.in_flight, asker.strays, asker.ended) == (0, [], "")
        return asked


@pytest.mark.conforms("kip-590.6")
def test_a_hundred_principals_see_what_the_broker_lets_each_of_them(
    secured_broker: Standalone, secured: ProxyCluster, principals: list[Principal]
) -> None:
    """Coalescing and shared connections must confuse no principals. Codes and texts are the broker's own."""
    asked = trio.run(ask_all, secured.port, principals)
    direct = trio.run(ask_all, secured_broker.broker_port, principals)
    for (principal, requests), (_, directly) in zip(asked, direct, strict=True):
        the_brokers = {(request.topic, request.answer.type): comparable(request.answer) for request in directly}
        for request in requests:
            said = request.error
            if principal.may_use(request.topic):
                assert said is None, (principal, request)
            else:
                assert (said or (None, ""))[0] == ServerError.AuthorizationError, (principal, request)
            assert comparable(request.answer) == the_brokers[request.topic, request.answer.type]


def lookup_status(cluster: ProxyCluster) -> list[dict[str, Any]]:
    """What /status says of the lookup workers."""
    return [worker for worker in cluster.status()["workers"] if worker["role"] == "lookup"]


def connections_at(broker: Standalone) -> float:
    """How many connections the broker has, says itself."""
    text = broker.admin().request("GET", "/metrics/")
    lines = [line for line in str(text).splitlines() if line.startswith("pulsar_active_connections{")]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.conforms("pip-1.39")
def test_clients_of_one_principal_share_a_connection_to_the_broker(
    secured_broker: Standalone, secured: ProxyCluster, principals: list[Principal]
) -> None:
    """In our own view and in the broker's: 20 clients, 400 lookups, one connection."""
    newcomer = Principal(PRINCIPALS, make_token(secured_broker.secret_key.read_bytes(), "newcomer"))
    pooled, at_broker = lookup_status(secured)[0]["broker_connections"], connections_at(secured_broker)

    async def twenty_clients() -> tuple[int, float]:
        async with AsyncExitStack() as stack:
            askers = [
                await stack.enter_async_context(questioner(secured.port, token=newcomer.token)) for _ in range(20)
            ]
            async with trio.open_nursery() as nursery:
                for asker in askers:
                    nursery.start_soon(asker.ask, [lookup(one.topic) for one in principals[:20]])
            for asker in askers:
                await wait_for_answers(asker.asked, BUSY_S)
                assert asker.in_flight == 0
                assert {request.error[0] for request in asker.asked if request.error is not None} == {
                    ServerError.AuthorizationError
                }
            now = await trio.to_thread.run_sync(connections_at, secured_broker)
            return lookup_status(secured)[0]["broker_connections"], now

    pooled_now, at_broker_now = trio.run(twenty_clients)
    assert pooled_now == pooled + 1
    assert at_broker_now - at_broker <= 2  # one of them may be a look at the broker's health


def test_clients_with_tokens_of_their_own_share_a_bounded_number_of_connections(secured_broker: Standalone) -> None:
    """A forwarded token needs a connection of its own; 40 of one principal take turns on four."""
    brokers = {"forward_authorization_credentials": True, "pooled_connections_per_principal_max": 4}
    key = secured_broker.secret_key.read_bytes()
    topics = [f"persistent://{NAMESPACE}/of-many-tokens-{number}" for number in range(3)]

    async def forty_clients(cluster: ProxyCluster) -> None:
        async with AsyncExitStack() as stack:
            tokens = [make_token(key, "alice", jti=str(number)) for number in range(40)]
            askers = [await stack.enter_async_context(questioner(cluster.port, token=token)) for token in tokens]
            async with trio.open_nursery() as nursery:
                for asker in askers:
                    nursery.start_soon(asker.ask, [lookup(topic) for topic in topics])
            for asker in askers:
                await wait_for_answers(asker.asked, BUSY_S)
                assert [request.error for request in asker.asked] == [None] * len(topics)

    with running(ProxyCluster(merged(authentication(secured_broker), {"brokers": brokers}))) as cluster:
        trio.run(forty_clients, cluster)
        assert lookup_status(cluster)[0]["broker_connections"] == 4


def test_in_broker_4_0_8_the_connections_original_principal_decides(secured_broker: Standalone) -> None:
    """Why connections are pooled by principal: what a lookup itself says of its original principal changes nothing."""
    topic = f"persistent://{NAMESPACE}/whose"
    proxy_token = secured_broker.token("proxy")
    for of_connection, of_lookup, allowed in (("alice", "bob", True), ("bob", "alice", False)):
        with WireClient(secured_broker.broker_port) as client:
            assert client.connect(token=proxy_token, original_principal=of_connection).type == BaseCommand.CONNECTED
            answer = client.lookup(topic, original_principal=of_lookup).lookup_topic_response
            assert (answer.response == LOOKUP_CONNECT) is allowed, answer
            assert (answer.error == ServerError.AuthorizationError) is not allowed


# ---- before a broker that counts


@pytest.fixture(scope="module")
def counting() -> Iterator[tuple[ProxyCluster, CountingBroker]]:
    """A cluster with one lookup worker before a broker that counts what it is asked."""
    counts = CountingBroker()
    with FakeBroker(counts) as broker:
        tables: Tables = {"brokers": {"service_url": f"pulsar://127.0.0.1:{broker.port}"}}
        with running(ProxyCluster(tables)) as cluster:
            yield cluster, counts


def wait_for_lookups_under_way(cluster: ProxyCluster, count: int) -> None:
    """Until the lookup worker has taken so many in."""
    eventually(lambda: lookup_status(cluster)[0]["lookups_under_way"] == count, what=f"{count} lookups under way")


def test_equal_lookups_at_the_same_time_ask_the_broker_once(counting: tuple[ProxyCluster, CountingBroker]) -> None:
    """50 clients, four times each, while the broker is busy; and once more by the next who comes after the answer."""
    cluster, counts = counting
    topic = "persistent://public/default/asked-by-many"

    async def ask() -> None:
        async with AsyncExitStack() as stack:
            askers = [await stack.enter_async_context(questioner(cluster.port)) for _ in range(50)]
            await askers[0].ask([lookup("persistent://public/default/warm")])
            await wait_for_answers(askers[0].asked, BUSY_S)
            counts.may_answer.clear()
            try:
                for asker in askers:
                    await asker.ask([lookup(topic) for _ in range(4)])
                await trio.to_thread.run_sync(partial(wait_for_lookups_under_way, cluster, 200))
            finally:
                counts.may_answer.set()
            for asker in askers:
                await wait_for_answers(asker.asked, BUSY_S)
                assert asker.in_flight == 0
                assert asker.strays == []
            assert counts.asked[topic] == 1
            again = [lookup(topic)]
            await askers[-1].ask(again)
            await wait_for_answers(again, BUSY_S)
            assert counts.asked[topic] == 2
            urls = {q.answer.lookup_topic_response.broker_service_url for a in askers[1:] for q in a.asked}
            assert urls == {broker_of(topic)}

    trio.run(ask)
    assert counts.connections == 1


def test_thousands_of_lookups_on_one_connection_are_answered_once_and_in_order(
    counting: tuple[ProxyCluster, CountingBroker],
) -> None:
    """2,000 in one go, each another topic; the broker answers in order, so the proxy has no reason not to."""
    cluster, counts = counting
    topics = [f"persistent://public/default/pipelined-{number}" for number in range(2000)]

    async def ask() -> float:
        async with questioner(cluster.port) as asker:
            await asker.ask([lookup("persistent://public/default/warm")])
            await wait_for_answers(asker.asked, BUSY_S)
            requests = [lookup(topic) for topic in topics]
            await asker.ask(requests)
            await wait_for_answers(requests, 2 * BUSY_S)
            assert (asker.in_flight, asker.strays, asker.ended) == (0, [], "")
            for request in requests:
                assert request.answer.lookup_topic_response.broker_service_url == broker_of(request.topic)
            assert asker.order[1:] == [request.request_id for request in requests]
            return max(request.took_s for request in requests)

    assert trio.run(ask) < 2 * BUSY_S
    assert {counts.asked[topic] for topic in topics} == {1}


# ---- lookup workers that die

KILLS = count_of("KILLS", in_ci=12)
"""By hand PULSAR_PROXY_TEST_KILLS, as 50."""
LOOKUP_WORKERS = 3
LOOKUP_TIMEOUT_S = 8.0
ANSWERED_WITHIN_S = LOOKUP_TIMEOUT_S + BUSY_S
KILLED = "pulsar_proxy_worker_restarts_total"


def lookup_workers_that_run(cluster: ProxyCluster) -> list[int]:
    """Their process ids."""
    return [worker["pid"] for worker in lookup_status(cluster) if worker["state"] == "running"]


def spare_lookup_workers(cluster: ProxyCluster) -> list[int]:
    """Those of which one may die, as at least one other runs."""
    pids = lookup_workers_that_run(cluster)
    return pids if len(pids) > 1 else []


@pytest.mark.conforms("kip-590.28")
def test_lookup_workers_killed_at_random_under_load_lose_no_lookup(secured_broker: Standalone) -> None:
    """No client sees its connection end; each lookup has one answer in time, or an error upon which it is asked again.

    Any of those that run may be the next to die, however young, but one always runs.
    """
    limits = {"lookup_timeout_ms": int(BUSY_S * 1000)}  # a busy machine is no broken broker
    tables: Tables = {"cluster": {"lookup_workers": LOOKUP_WORKERS}, "limits": limits}
    topics = [f"persistent://{NAMESPACE}/while-workers-die-{number}" for number in range(20)]
    plan = {"clients": 6, "batch": 10, "pause_s": 0.1, "patience_s": 2 * BUSY_S}
    with running(ProxyCluster(merged(authentication(secured_broker), tables))) as cluster:
        with Load(cluster.port, topics, token=secured_broker.token("alice"), **plan) as load:
            for _ in range(KILLS):
                pids = eventually(
                    # Those that die young are replaced after pauses that grow.
                    lambda: spare_lookup_workers(cluster),
                    what="two lookup workers run",
                    within_s=120,
                    every_s=0.02,
                )
                victim = random.choice(pids)
                os.kill(victim, signal.SIGKILL)

                def is_known_to_be_dead(victim: int = victim) -> bool:
                    return victim not in lookup_workers_that_run(cluster)

                eventually(is_known_to_be_dead, what="/status, which is kept for a moment, tells of it", every_s=0.02)
                time.sleep(random.uniform(0, 0.1))
        asked, failed = load.assert_well(2 * BUSY_S)
        assert asked > KILLS * 10
        assert failed < asked / 100, f"{failed} of {asked} failed"

        def all_there() -> bool:
            return len(lookup_workers_that_run(cluster)) == LOOKUP_WORKERS

        eventually(all_there, what="all lookup workers run", within_s=120)
        cluster.wait_for_total(KILLED, KILLS, of="lookup")
    took_s = sorted(request.took_s for request in load.requests)
    late = sum(one > 0.5 for one in took_s)
    print(f"{asked} lookups, {failed} failed; {late} took more than 0.5 s, the longest {took_s[-1]:.2f} s")


# ---- lists of topics

CROWD = 40
LIST_BYTES = 4 * MIB
LISTS_AT_A_TIME = 2


def test_unread_topic_lists_cost_bounded_memory_and_delay_no_lookup() -> None:
    """40 clients ask for 4 MB each, half of them never read. limits.max_topic_lists_bytes is what two of them cost."""
    counts = CountingBroker(LIST_BYTES)
    frame_bytes = counts.list_bytes + MIB // 2
    limits = {
        "lookup_timeout_ms": int(LOOKUP_TIMEOUT_S * 1000),
        "max_broker_frame_bytes": frame_bytes,
        "max_topic_lists_bytes": LISTS_AT_A_TIME * frame_bytes,
    }
    tables: Tables = {"cluster": {"forwarders": 1}, "limits": limits}
    with FakeBroker(counts) as broker:
        own: Tables = {"brokers": {"service_url": f"pulsar://127.0.0.1:{broker.port}"}}
        with running(ProxyCluster(merged(own, tables))) as cluster:
            outcome = trio.run(lists_for_a_crowd, cluster)
            assert_serves_lists(cluster)
    print(outcome)
    assert outcome.readers_unanswered == 0
    assert outcome.codes <= RETRIABLE
    assert outcome.longest_list_s < ANSWERED_WITHIN_S
    assert outcome.longest_lookup_s < ANSWERED_WITHIN_S
    assert outcome.median_lookup_s < 1  # lookups share connections with lists, and wait for those on their way only
    copies = 8  # of each list, in each of the two processes, at the worst moment; not one for each who asked
    assert outcome.memory_growth_bytes < 2 * copies * LISTS_AT_A_TIME * frame_bytes


@dataclass
class Lists:
    """What came of a crowd that asks for lists."""

    lists: int
    codes: set[int]
    readers_unanswered: int
    longest_list_s: float
    longest_lookup_s: float
    median_lookup_s: float
    memory_growth_bytes: int


async def lists_for_a_crowd(cluster: ProxyCluster) -> Lists:
    """All ask at once; meanwhile another client looks topics up, and we look at the memory."""
    pids = [pid for name, pid in cluster.worker_pids().items() if name.startswith(("forwarder", "lookup"))]

    def memory_bytes() -> int:
        return 1024 * sum(memory_kib(pid) for pid in pids)

    async with AsyncExitStack() as stack:
        bystander = await stack.enter_async_context(questioner(cluster.port))
        await bystander.ask([lookup("persistent://public/default/warm")])
        await wait_for_answers(bystander.asked, BUSY_S)
        readers = [await stack.enter_async_context(questioner(cluster.port)) for _ in range(CROWD // 2)]
        others = [await stack.enter_async_context(questioner(cluster.port, reads=False)) for _ in range(CROWD // 2)]
        before = most = memory_bytes()
        for reader, other in zip(readers, others, strict=True):
            for asker in (other, reader):
                await asker.ask([topics_of_namespace("public/many")])
        deadline = trio.current_time() + LOOKUP_TIMEOUT_S + 1.5
        while trio.current_time() < deadline:
            await bystander.ask([lookup("persistent://public/default/meanwhile")])
            await trio.sleep(0.05)
            most = max(most, memory_bytes())
        asked = [reader.asked[0] for reader in readers]
        await wait_for_answers([*bystander.asked, *asked], BUSY_S)
        answered = [request for request in asked if request.answer is not None]
        errors = [request.error for request in answered if request.error is not None]
        return Lists(
            lists=len(answered) - len(errors),
            codes={code for code, _ in errors},
            readers_unanswered=len(asked) - len(answered),
            longest_list_s=max(request.took_s for request in answered),
            longest_lookup_s=max(request.took_s for request in bystander.asked),
            median_lookup_s=median(request.took_s for request in bystander.asked),
            memory_growth_bytes=most - before,
        )


def assert_serves_lists(cluster: ProxyCluster) -> None:
    """Now that those have gone who did not read, lists come at once again."""

    async def ask() -> None:
        async with questioner(cluster.port) as asker:
            await asker.ask([topics_of_namespace("public/many")])
            await wait_for_answers(asker.asked, ANSWERED_WITHIN_S)
            assert asker.asked[0].size_bytes > LIST_BYTES * 0.9

    trio.run(ask)
