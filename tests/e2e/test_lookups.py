"""Lookups of many at once: each sees what its own principal may see, nobody waits for others, nothing gets lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from local.ports import free_port
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.counting_broker import CountingBroker, broker_of
from .lab.fakes import FakeBroker
from .lab.lookup_load import (
    RETRIABLE,
    Load,
    Question,
    Questioner,
    lookup,
    partitions,
    questioner,
    topics_of_namespace,
    wait_for_answers,
)
from .lab.processes import memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.security import NAMESPACE
from .lab.waiting import eventually
from .lab.wire import WireClient
from .test_failing_brokers import comparable

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
PRINCIPALS = 100
SHARED_NAMESPACE = "secured/by-topic"
EVENS_TOPIC = f"persistent://{SHARED_NAMESPACE}/evens"
"""Those with an even number may use it."""


# ---- principals


@dataclass(frozen=True)
class Principal:
    """A role with grants of its own: a namespace, or one topic."""

    number: int
    token: str

    @property
    def role(self) -> str:
        """Its name."""
        return f"principal-{self.number}"

    @property
    def has_namespace(self) -> bool:
        """Whether it is granted a namespace rather than a topic."""
        return self.number % 4 < 2

    @property
    def topic(self) -> str:
        """A topic that it may use, and nobody else."""
        if self.has_namespace:
            return f"persistent://secured/of-{self.number}/topic"
        return f"persistent://{SHARED_NAMESPACE}/of-{self.number}"

    def may_use(self, topic: str) -> bool:
        """Whether it was granted this topic."""
        return topic == self.topic or (topic == EVENS_TOPIC and self.number % 2 == 0)


@pytest.fixture(scope="module")
def principals(secured_broker: Standalone) -> list[Principal]:
    """Each with its grant."""
    key, admin = secured_broker.secret_key.read_bytes(), secured_broker.admin()
    everybody = [Principal(number, make_token(key, f"principal-{number}")) for number in range(PRINCIPALS)]
    admin.create_namespace(SHARED_NAMESPACE)

    admin.create_topic(EVENS_TOPIC)

    def prepare(principal: Principal) -> None:
        if principal.has_namespace:
            admin.create_namespace(f"secured/of-{principal.number}")
            admin.grant_namespace(f"secured/of-{principal.number}", principal.role)
        admin.create_topic(principal.topic)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(prepare, everybody))
    for principal in everybody:  # one after the other: they are written to the same policies
        if not principal.has_namespace:
            admin.grant_topic(principal.topic, principal.role)
        if principal.may_use(EVENS_TOPIC):
            admin.grant_topic(EVENS_TOPIC, principal.role)
    return everybody


@pytest.fixture(scope="module")
def secured(secured_broker: Standalone) -> Iterator[ProxyCluster]:
    """One lookup worker, so that connections to the broker can be counted; two forwarders."""
    with running(ProxyCluster(authentication(secured_broker))) as cluster:
        yield cluster


def questions_of(principal: Principal, neighbour: Principal) -> list[Question]:
    """What is its own, its neighbour's, and what half of all may use; each twice, in any order."""
    topics = (principal.topic, neighbour.topic, EVENS_TOPIC)
    questions = [ask(topic) for topic in topics for ask in (lookup, partitions) for _ in range(2)]
    random.shuffle(questions)
    return questions


async def ask_all(port: int, principals: Sequence[Principal]) -> list[tuple[Principal, list[Question]]]:
    """Everybody asks at the same moment, over a connection of its own."""
    async with AsyncExitStack() as stack:
        askers = [await stack.enter_async_context(questioner(port, token=one.token)) for one in principals]
        asked = []
        async with trio.open_nursery() as nursery:
            for index, asker in enumerate(askers):
                questions = questions_of(principals[index], principals[(index + 1) % len(principals)])
                asked.append((principals[index], questions))
                nursery.start_soon(asker.ask, questions)
        for asker in askers:
            await wait_for_answers(asker.asked, 15)
            assert (asker.in_flight, asker.strays, asker.ended) == (0, [], "")
        return asked


def test_a_hundred_principals_see_what_the_broker_lets_each_of_them(
    secured_broker: Standalone, secured: ProxyCluster, principals: list[Principal]
) -> None:
    """All at once: coalescing and shared connections must mix nobody up. Codes and texts are the broker's own."""
    asked = trio.run(ask_all, secured.port, principals)
    direct = trio.run(ask_all, secured_broker.broker_port, principals)
    for (principal, questions), (_, directly) in zip(asked, direct, strict=True):
        the_brokers = {(question.topic, question.answer.type): comparable(question.answer) for question in directly}
        for question in questions:
            said = question.error
            if principal.may_use(question.topic):
                assert said is None, (principal, question)
            else:
                assert said is not None and said[0] == ServerError.AuthorizationError, (principal, question)
            assert comparable(question.answer) == the_brokers[question.topic, question.answer.type]


def lookup_status(cluster: ProxyCluster) -> list[dict[str, Any]]:
    """What /status says of the lookup workers."""
    return [worker for worker in cluster.status()["workers"] if worker["role"] == "lookup"]


def connections_at(broker: Standalone) -> float:
    """How many connections the broker has, says itself."""
    text = broker.admin().request("GET", "/metrics/")
    lines = [line for line in str(text).splitlines() if line.startswith("pulsar_active_connections{")]
    return sum(float(line.split()[-1]) for line in lines)


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
                await wait_for_answers(asker.asked, 15)
                assert asker.in_flight == 0
                assert {question.error[0] for question in asker.asked if question.error is not None} == {
                    ServerError.AuthorizationError
                }
            now = await trio.to_thread.run_sync(connections_at, secured_broker)
            return lookup_status(secured)[0]["broker_connections"], now

    pooled_now, at_broker_now = trio.run(twenty_clients)
    assert pooled_now == pooled + 1
    assert at_broker_now - at_broker <= 2  # one of them may be a look at the broker's health


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


def test_what_many_ask_at_the_same_time_is_asked_once(counting: tuple[ProxyCluster, CountingBroker]) -> None:
    """50 clients, four times each, while the broker is busy; and once more by the next who comes after the answer."""
    cluster, counts = counting
    topic = "persistent://public/default/asked-by-many"

    async def ask() -> None:
        async with AsyncExitStack() as stack:
            askers = [await stack.enter_async_context(questioner(cluster.port)) for _ in range(50)]
            await askers[0].ask([lookup("persistent://public/default/warm")])
            await wait_for_answers(askers[0].asked, 5)
            counts.may_answer.clear()
            try:
                for asker in askers:
                    await asker.ask([lookup(topic) for _ in range(4)])
                with trio.fail_after(5):
                    while lookup_status(cluster)[0]["lookups_under_way"] < 200:
                        await trio.sleep(0.05)
            finally:
                counts.may_answer.set()
            for asker in askers:
                await wait_for_answers(asker.asked, 5)
                assert asker.in_flight == 0
                assert asker.strays == []
            assert counts.asked[topic] == 1
            again = [lookup(topic)]
            await askers[-1].ask(again)
            await wait_for_answers(again, 5)
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
            await wait_for_answers(asker.asked, 5)
            questions = [lookup(topic) for topic in topics]
            await asker.ask(questions)
            await wait_for_answers(questions, 20)
            assert (asker.in_flight, asker.strays, asker.ended) == (0, [], "")
            for question in questions:
                assert question.answer.lookup_topic_response.broker_service_url == broker_of(question.topic)
            assert asker.order[1:] == [question.request_id for question in questions]
            return max(question.took_s for question in questions)

    assert trio.run(ask) < 10
    assert {counts.asked[topic] for topic in topics} == {1}


# ---- lookup workers that die

KILLS = 50
LOOKUP_TIMEOUT_S = 4.0
KILLED = "pulsar_proxy_worker_restarts_total"


def running_lookup_workers(cluster: ProxyCluster) -> list[int]:
    """Process ids of those that are there for lookups."""
    return [worker["pid"] for worker in lookup_status(cluster) if worker["state"] == "running" and worker.get("pid")]


def test_lookup_workers_killed_fifty_times_under_load(secured_broker: Standalone) -> None:
    """One of two at a time, at random. No client sees its connection end, each lookup has one answer in time."""
    tables: Tables = {"cluster": {"lookup_workers": 2}, "limits": {"lookup_timeout_ms": int(LOOKUP_TIMEOUT_S * 1000)}}
    topics = [f"persistent://{NAMESPACE}/while-workers-die-{number}" for number in range(20)]
    with running(ProxyCluster(merged(authentication(secured_broker), tables))) as cluster:
        plan = {"clients": 6, "batch": 10, "pause_s": 0.05, "patience_s": LOOKUP_TIMEOUT_S + 5}
        with Load(cluster.port, topics, token=secured_broker.token("alice"), **plan) as load:
            for _ in range(KILLS):
                alive = eventually(lambda: running_lookup_workers(cluster), what="a lookup worker runs", every_s=0.02)
                os.kill(random.choice(alive), signal.SIGKILL)
                time.sleep(random.uniform(0, 0.3))
        asked, failed = load.assert_well(LOOKUP_TIMEOUT_S + 1.5)
        restarts = cluster.metrics().total(KILLED, of="lookup")
        longest_s = max(question.took_s for question in load.questions)
    print(f"{asked} lookups, {failed} failed, the longest took {longest_s:.2f} s; {restarts:.0f} restarts")
    assert restarts >= KILLS - 2
    assert failed < asked / 10
