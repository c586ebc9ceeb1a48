"""lookup.requests.executor: which of the configured brokers a lookup asks, and what it reports of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from lookup_fakes import (
    CONNECT,
    FakeAuth,
    FakeBroker,
    Network,
    Script,
    asked,
    connect_to,
    lookup,
    make_config,
    redirect_to,
)
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.connections.losses import LossHistory
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipal
from lookup.metrics import BrokerMetrics
from lookup.requests.executor import FATAL_REQUEST_TEXT, LookupExecutor
from lookup.targets.rules import TargetRules
from proto.lookup_answers import BrokerAnswer
from proto.lookup_kinds import kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dialing import Dialer

CLIENT = "192.0.2.7:4000"
TWO = "pulsar://b0,b1"


class Worker:
    """Lookups as the service builds them, over a fake network; brokers are looked for, but not looked at."""

    def __init__(self, network: Network, nursery: trio.Nursery, service_url: str = TWO, **brokers: Any) -> None:
        self.network = network
        config = make_config(brokers={"service_url": service_url, **brokers})
        dialer = Dialer(config.brokers)

        def resolver() -> Resolver:
            return Resolver(nursery, timeout_s=5, ttl_max_s=300)

        self.brokers = BrokerDirectory(config, dialer, resolver(), BrokerMetrics(CollectorRegistry()))
        nursery.start_soon(self.brokers.discovery.run)
        self.pool = BrokerPool(config, dialer, FakeAuth(), nursery)  # type: ignore[arg-type]
        self.lookups = LookupExecutor(
            config, self.pool, TargetRules(config.brokers, resolver(), self.brokers), self.brokers
        )
        self.asker = LookupPrincipal("alice")

    def broker(self, number: int, script: Script | None = None) -> FakeBroker:
        broker = FakeBroker(script or connect_to("pulsar://b9:6650"))
        return self.network.add(f"b{number}", f"10.0.0.{number + 1}", broker)

    async def ask(self, asker: LookupPrincipal | None = None, timeout_s: float = 10) -> Any:
        """As the scheduler does: the fast path, or else the slow one."""
        command, kind, trial = lookup(), kind_of(lookup()), LossHistory()
        answers: list[BaseCommand | None] = []
        done = trio.Event()

        def on_broker_answer(answer: BrokerAnswer | None) -> None:
            assert connection is not None
            self.lookups.record_fast_path_outcome(connection, answer)
            answers.append(None if answer is None else answer.command)
            if answer is None:
                trial.record_loss(connection.broker, connection.loss)
            done.set()

        deadline = trio.current_time() + timeout_s
        asker = asker or self.asker
        waiting: Any = SimpleNamespace(on_broker_answer=on_broker_answer, proxy_id=b"")
        connection = self.lookups.send_on_open_connection(asked(), asker, waiting, trio.current_time())
        if connection is not None:
            with trio.move_on_at(deadline) as scope:
                await done.wait()
            if scope.cancelled_caught:
                self.lookups.abandon_request(connection, waiting)
                return None
            if answers[0] is not None and self.lookups.is_final_answer(answers[0], kind):
                return answers[0].lookup_topic_response
        known = answers[0] if answers else None
        answer = await self.lookups.execute_lookup(command, kind, asker, CLIENT, known, deadline=deadline, losses=trial)
        return answer.lookup_topic_response

    def failures(self) -> dict[str, int]:
        return {one.host: one.health.failures for one in self.brokers.discovery.endpoints}


Make = Callable[..., Worker]


@pytest.fixture
def make(network: Network, nursery: trio.Nursery) -> Make:
    return lambda *arguments, **brokers: Worker(network, nursery, *arguments, **brokers)


async def test_brokers_take_turns_and_each_gets_its_connection(make: Make) -> None:
    worker = make()
    brokers = [worker.broker(number) for number in (0, 1)]
    for _ in range(8):
        assert (await worker.ask()).response == CONNECT
    assert [len(broker.requests) for broker in brokers] == [4, 4]
    assert [len(broker.connects) for broker in brokers] == [1, 1]
    assert worker.lookups._unconnected == {}


async def test_the_first_lookup_waits_for_the_first_answer_of_dns(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make()
    worker.broker(0)
    assert (await worker.ask()).response == CONNECT


async def test_no_broker_is_known(make: Make) -> None:
    response = await make().ask()
    assert (response.error, response.message) == (ServerError.ServiceNotReady, "The proxy cannot connect to the broker")


async def test_each_address_of_a_name_is_asked(make: Make) -> None:
    worker = make("pulsar://b")
    worker.network.names["b"] = [["10.0.0.1", "10.0.0.2"]]
    brokers = [FakeBroker(connect_to("pulsar://b9:6650")) for _ in range(2)]
    worker.network.brokers = {("10.0.0.1", 6650): brokers[0], ("10.0.0.2", 6650): brokers[1]}
    for _ in range(6):
        assert (await worker.ask()).response == CONNECT
    assert [len(broker.requests) for broker in brokers] == [3, 3]
    assert [len(broker.connects) for broker in brokers] == [1, 1]


async def test_a_broker_that_is_down_is_set_aside(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    worker = make(ejection_failures=2)
    worker.network.names["b0"] = [["10.0.0.1"]]
    good = worker.broker(1)
    for _ in range(10):
        assert (await worker.ask()).response == CONNECT
    assert worker.network.dialled.count(("10.0.0.1", 6650)) == 2
    assert len(good.requests) == 10


async def test_a_broker_that_hangs_up_is_set_aside(make: Make) -> None:
    worker = make(ejection_failures=2)
    bad = worker.broker(0)
    bad.hang_up_after_requests = 100
    worker.broker(1)
    for _ in range(10):
        assert (await worker.ask()).response == CONNECT
    assert len(bad.requests) == 2, "no request is to blame, since the other broker answers it"


async def test_an_open_connection_that_is_lost_is_reported(make: Make) -> None:
    worker = make("pulsar://b0")
    broker = worker.broker(0)
    await worker.ask()
    broker.hang_up_after_requests = 1
    assert (await worker.ask()).response == CONNECT, "the long way"
    assert worker.failures() == {"b0": 1}, "no request is to blame"
    await worker.ask()
    await worker.ask()
    assert worker.failures() == {"b0": 0}, "it has answered since"


async def test_connections_lost_to_a_fatal_request_count_against_no_broker(make: Make) -> None:
    """Otherwise a client could have all brokers ejected."""
    worker = make(ejection_failures=1)
    brokers = [worker.broker(number) for number in (0, 1)]
    for _ in range(4):
        await worker.ask()
    for _ in range(3):
        for broker in brokers:
            broker.hang_up_after_requests = 1
        response = await worker.ask()
        assert (response.error, response.message) == (ServerError.ServiceNotReady, FATAL_REQUEST_TEXT)
        assert (await worker.ask()).response == CONNECT
        assert (await worker.ask()).response == CONNECT
        assert worker.failures() == {"b0": 0, "b1": 0}
    assert not any(one.health.ejected for one in worker.brokers.discovery.endpoints)


async def test_no_answer_in_time_is_reported_once_a_connection(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make("pulsar://b0")
    broker = worker.broker(0)
    broker.script = lambda _request: None
    await worker.ask(timeout_s=1)
    assert worker.failures() == {"b0": 1}, "the long way"
    await worker.ask(timeout_s=1)
    assert worker.failures() == {"b0": 1}, "the short way, over the same connection"
    await worker.ask(LookupPrincipal("bob"), timeout_s=1)
    assert worker.failures() == {"b0": 2}
    broker.script = connect_to("pulsar://b9:6650")
    await worker.ask()
    assert worker.failures() == {"b0": 0}


async def test_no_answer_in_time_over_an_open_connection(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    worker = make("pulsar://b0")
    broker = worker.broker(0)
    await worker.ask()
    broker.script = lambda _request: None
    assert await worker.ask(timeout_s=1) is None
    assert worker.failures() == {"b0": 1}


async def test_an_error_of_the_broker_is_an_answer(make: Make) -> None:
    worker = make("pulsar://b0")
    worker.broker(0, lambda _request: None).greeting = BaseCommand(
        type=BaseCommand.ERROR, error={"request_id": 1, "error": ServerError.AuthorizationError, "message": "no"}
    )
    response = await worker.ask()
    assert (response.error, response.message) == (ServerError.AuthorizationError, "no")
    assert worker.failures() == {"b0": 0}


async def test_a_redirect_to_a_configured_broker_uses_its_connection(make: Make) -> None:
    worker = make()
    worker.broker(0, redirect_to("pulsar://b1:6650"))
    second = worker.broker(1)
    for _ in range(6):
        assert (await worker.ask()).response == CONNECT
    assert len(second.connects) == 1


async def test_a_redirect_to_a_configured_broker_needs_no_further_rule(make: Make) -> None:
    worker = make(allowed_hosts=["b7"], allowed_addresses=["10.7.0.0/16"])
    worker.broker(0, redirect_to("pulsar://b1:6650"))
    worker.broker(1)
    assert {(await worker.ask()).response for _ in range(4)} == {CONNECT}


async def test_a_redirect_to_loopback(make: Make) -> None:
    worker = make("pulsar://b0")
    worker.broker(0, redirect_to("pulsar://127.0.0.1:6650"))
    assert (await worker.ask()).message == "The topic's broker cannot be validated"
    assert [address for address, _ in worker.network.dialled] == ["10.0.0.1"]
