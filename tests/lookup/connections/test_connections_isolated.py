"""lookup.connections.isolated and lookup.connections.losses: a request upon which brokers close connections costs
no other request an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from lookup_fakes import (
    CONNECT,
    FAILED,
    FakeAuth,
    FakeBroker,
    Network,
    connect_to,
    gather,
    host_port,
    lookup,
    make_config,
)
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.connections.isolated import UNUSED_TIMEOUT_S, IsolatedConnections
from lookup.connections.losses import ConnectionLoss, LossHistory, SuspectGroup
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipals
from lookup.metrics import BrokerMetrics, LookupMetrics
from lookup.requests.envelope_reply import EnvelopeReply
from lookup.requests.executor import FATAL_REQUEST_TEXT, LookupExecutor
from lookup.requests.scheduler import LookupScheduler, RequestBatch
from lookup.targets.rules import TargetRules
from proto.addresses import HostPort
from proto.frames import FrameDecoder
from proto.lookup_requests import RequestParser
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeResponse
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.network.dialing import Dialer

BROKER = object()


class DyingBroker(FakeBroker):
    """Closes a connection upon a topic that begins with "fatal"; answers others only where ``answers`` is set."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.answers = True
        self.connections_at_once = 0

    def _answer(self, request: BaseCommand) -> BaseCommand | None:
        self.connections_at_once = max(self.connections_at_once, self.open)
        if request.lookup_topic.topic.startswith("fatal"):
            raise trio.BrokenResourceError
        return connect_to("pulsar://b0:6650")(request) if self.answers else None  # type: ignore[return-value]


class Worker:
    """A scheduler with all below it, over a fake network; and what its clients are told, by their request ids."""

    def __init__(self, network: Network, nursery: trio.Nursery, brokers: int, **table: Any) -> None:
        names = ",".join(f"b{number}" for number in range(brokers))
        config: Config = make_config(brokers={"service_url": f"pulsar://{names}", "ejection_failures": 1, **table})
        dialer = Dialer(config.brokers)

        def resolver() -> Resolver:
            return Resolver(nursery, timeout_s=5, ttl_max_s=300)

        self.registry = CollectorRegistry()
        self.network = network
        self.fakes = [self._add(number) for number in range(brokers)]
        self.brokers = BrokerDirectory(config, dialer, resolver(), BrokerMetrics(self.registry))
        nursery.start_soon(self.brokers.discovery.run)
        self.pool = BrokerPool(config, dialer, FakeAuth(), nursery)  # type: ignore[arg-type]
        lookups = LookupExecutor(config, self.pool, TargetRules(config.brokers, resolver(), self.brokers), self.brokers)
        self.scheduler = LookupScheduler(config, lookups, LookupMetrics(self.registry), nursery)
        nursery.start_soon(self.scheduler.run)
        self.askers = LookupPrincipals()
        self.told: dict[int, tuple[int, int, str]] = {}

    def _add(self, number: int) -> DyingBroker:
        broker = DyingBroker()
        self.network.add(f"b{number}", f"10.0.0.{number + 1}", broker)
        return broker

    def ask(self, *requests: tuple[int, str], principal: str = "alice") -> None:
        """Requests with these ids and topics, sent in one go."""

        def heard(part: bytes, _more: bool) -> None:
            decoder = FrameDecoder(max_frame_bytes=1 << 24)
            decoder.receive_data(EnvelopeResponse.FromString(part).frames)
            while (frame := decoder.next_frame()) is not None:
                answer = BaseCommand.FromString(frame.command).lookup_topic_response
                assert answer.request_id not in self.told, "answered twice"
                self.told[answer.request_id] = answer.response, answer.error, answer.message

        sender = RequestBatch(
            self.askers.get_principal(principal), "192.0.2.7:4000", EnvelopeReply(len(requests), heard)
        )
        with current_tick():
            for index, (request_id, topic) in enumerate(requests):
                asked, number = RequestParser().parse_request(lookup(topic, request_id).SerializeToString())
                self.scheduler.submit_request(asked, number, index, sender)

    async def open_connections(self, *principals: str) -> None:
        """Have a pooled connection to each broker."""
        for principal in principals or ("alice",):
            for number in range(2 * len(self.fakes)):
                self.ask((2**40 + number, f"first-{principal}-{number}"), principal=principal)
                await trio.testing.wait_all_tasks_blocked()
            self.told.clear()

    def blamed(self) -> float:
        return self.registry.get_sample_value("pulsar_proxy_fatal_lookup_requests_total", {"request": "lookup"}) or 0

    def failures(self) -> list[int]:
        return [one.health.failures for one in self.brokers.discovery.endpoints]


Make = Callable[..., Worker]


@pytest.fixture
def make(network: Network, nursery: trio.Nursery) -> Make:
    return lambda brokers=2, **table: Worker(network, nursery, brokers, **table)


async def settled(worker: Worker) -> None:
    assert await worker.scheduler.under_way.wait_until_empty(timeout_s=60)


@pytest.mark.parametrize("brokers", [1, 2])
@pytest.mark.parametrize("place", [0, 13, 99])
async def test_a_fatal_request_leaves_the_other_requests_answered(
    make: Make, brokers: int, place: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: all hundred are of one principal, and so on the same connections."""
    worker = make(brokers)
    await worker.open_connections()
    for fake in worker.fakes:
        fake.answers = False  # or those before it would be answered before the broker meets it
    worker.ask(*[(number, "fatal" if number == place else f"t-{number}") for number in range(100)])
    for fake in worker.fakes:
        fake.answers = True
    await settled(worker)
    assert worker.told.pop(place) == (FAILED, ServerError.ServiceNotReady, FATAL_REQUEST_TEXT)
    assert worker.told == dict.fromkeys(set(range(100)) - {place}, (CONNECT, 0, ""))
    assert worker.blamed() == 1
    assert worker.failures() == [0] * brokers, "no broker is to blame"
    assert not any(one.health.ejected for one in worker.brokers.discovery.endpoints)
    assert sum(len(fake.connects) for fake in worker.fakes) <= brokers * (1 + 2 * 8), "a bisection's, and no hundred"
    fatal = [one for fake in worker.fakes for _, one in fake.requests if one.lookup_topic.topic == "fatal"]
    assert len(fatal) <= 1 + 8


async def test_a_fatal_request_that_is_alone_is_tried_once_more_and_no_oftener(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make(3)
    await worker.open_connections()
    worker.ask((1, "fatal"))
    await settled(worker)
    assert worker.told == {1: (FAILED, ServerError.ServiceNotReady, FATAL_REQUEST_TEXT)}
    assert [one.lookup_topic.topic for fake in worker.fakes for _, one in fake.requests].count("fatal") == 2


async def test_many_fatal_requests_among_others(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    worker = make(2)
    await worker.open_connections("alice", "bob")
    fatal = {3, 4, 40, 77, 99}
    worker.ask(*[(number, f"fatal-{number}" if number in fatal else f"t-{number}") for number in range(100)])
    worker.ask(*[(number, f"t-{number}") for number in range(100, 110)], principal="bob")
    await settled(worker)
    assert {number for number, (response, _, _) in worker.told.items() if response == FAILED} == fatal
    assert len(worker.told) == 110
    assert worker.blamed() == len(fatal)
    assert worker.failures() == [0, 0]


async def test_other_clients_are_answered_while_a_client_repeats_fatal_requests(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    """A client that has found such a request gets an error each time; other clients are answered."""
    worker = make(2)
    await worker.open_connections()
    for number in range(50):
        worker.ask((1000 + number, f"fatal-{number}"))
        worker.ask((number, f"t-{number}"))
        await trio.sleep(0.005)
    await settled(worker)
    assert {number for number, (response, _, _) in worker.told.items() if response == CONNECT} == set(range(50))
    assert worker.failures() == [0, 0]


async def test_a_broker_that_dies_under_thousands_takes_few_connections_and_is_to_blame(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make(2, pooled_connections_max=100)
    await worker.open_connections()
    before = sum(len(fake.connects) for fake in worker.fakes)
    for fake in worker.fakes:
        fake.answers = False
    worker.ask(*[(number, f"t-{number}") for number in range(4000)])
    await trio.testing.wait_all_tasks_blocked()
    for fake in worker.fakes:
        fake.answers = True
    dying = worker.fakes[0]
    del worker.network.brokers["10.0.0.1", 6650]
    await trio.aclose_forcefully(dying.end_of["alice"].stream)
    lost = sum(1 for _, one in dying.requests if one.lookup_topic.topic.startswith("t-"))
    assert lost >= 1000
    await trio.sleep(1)
    assert len(worker.told) == lost
    assert {response for response, _, _ in worker.told.values()} == {CONNECT}
    assert sum(len(fake.connects) for fake in worker.fakes) - before <= 4
    assert worker.brokers.discovery.endpoints[0].health.ejected
    assert worker.blamed() == 0


async def test_connections_for_suspects_are_bounded_and_taken_in_turn(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    """With pooled_connections_max = 40 there are ten more for suspects, of which no principal gets the last one."""
    worker = make(1, pooled_connections_max=40)
    principals = [f"p{number}" for number in range(30)]
    await worker.open_connections(*principals, "bob")
    worker.network.dial_delay_s = 0.05
    [broker] = worker.fakes
    deadline = trio.current_time() + 60
    for number, principal in enumerate(principals):
        worker.ask((number, f"t-{number}"), (100 + number, f"fatal-{number}"), principal=principal)
    most = 0
    while not await worker.scheduler.under_way.wait_until_empty(timeout_s=0.01):
        assert trio.current_time() < deadline
        most = max(most, worker.pool._isolated._room._held.total())
    assert 0 < most <= 10
    assert {number for number, (response, _, _) in worker.told.items() if response == CONNECT} == set(range(30))
    await trio.sleep(5)
    assert len(worker.pool._isolated) == 0
    assert broker.open <= 31


async def test_a_request_that_times_out_leaves_no_isolated_connection(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make(1)
    await worker.open_connections()
    worker.network.dial_delay_s = 30  # longer than a lookup's time
    worker.ask((1, "fatal"))
    await settled(worker)
    assert worker.told[1][:2] == (FAILED, ServerError.ServiceNotReady)
    worker.network.dial_delay_s = 0
    await trio.sleep(60)
    assert len(worker.pool._isolated) == 0
    assert worker.fakes[0].open == 0


async def test_a_connection_for_suspects_ends_with_their_answers(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    """Its place is another company's at once."""
    worker = make(1)
    await worker.open_connections()
    worker.ask((1, "fatal"), *[(number, f"t-{number}") for number in range(2, 20)])
    await settled(worker)
    await trio.sleep(UNUSED_TIMEOUT_S / 10)
    assert len(worker.pool._isolated) == 0
    assert worker.fakes[0].open == 0


class FakeConnection:
    """A connection to a broker that is open until it is told to retire."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.closed = False
        self.retires_once_asked = False

    async def run(self) -> None:
        await self.over.wait()

    def retire_when_idle(self) -> None:
        self.over.set()

    def retire_after_use(self) -> None:
        self.retires_once_asked = True


async def nowhere() -> tuple[str, ...]:
    await trio.lowlevel.checkpoint()
    return ("10.0.0.1",)


async def test_an_unused_connection_ends(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    suspects, fake = IsolatedConnections(nursery, 2), FakeConnection()

    async def open_connection(_broker: HostPort, _addresses: tuple[str, ...]) -> Any:
        await trio.sleep(2)
        return fake

    with trio.move_on_after(1):
        await suspects.get_connection(host_port("b0"), nowhere, open_connection, "alice", SuspectGroup())
    await trio.sleep(1 + UNUSED_TIMEOUT_S + 0.1)
    assert fake.over.is_set()
    assert len(suspects) == 0


async def test_for_those_who_have_given_up_nothing_is_opened(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    suspects, fakes = IsolatedConnections(nursery, 1), [FakeConnection(), FakeConnection()]
    opened: list[str] = []

    async def open_connection(broker: HostPort, _addresses: tuple[str, ...]) -> Any:
        await trio.lowlevel.checkpoint()
        opened.append(broker.host)
        return fakes[len(opened) - 1]

    await suspects.get_connection(host_port("b0"), nowhere, open_connection, "alice", SuspectGroup())
    with trio.move_on_after(UNUSED_TIMEOUT_S / 2):
        await suspects.get_connection(host_port("b1"), nowhere, open_connection, "alice", SuspectGroup())
    assert len(suspects) == 2
    await trio.sleep(2 * UNUSED_TIMEOUT_S)
    assert opened == ["b0"]
    assert len(suspects) == 0


async def test_a_late_request_gets_an_open_isolated_connection(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A connection that ended before the request was sent would count as the broker's failure."""
    suspects, fakes, company = IsolatedConnections(nursery, 2), [FakeConnection(), FakeConnection()], SuspectGroup()
    opened: list[Any] = []

    async def open_connection(_broker: HostPort, _addresses: tuple[str, ...]) -> Any:
        await trio.lowlevel.checkpoint()
        opened.append(fakes[len(opened)])
        return opened[-1]

    assert await suspects.get_connection(host_port("b0"), nowhere, open_connection, "alice", company) is fakes[0]
    fakes[0].closed = True
    fakes[0].over.set()
    assert await suspects.get_connection(host_port("b0"), nowhere, open_connection, "alice", company) is fakes[1]


async def test_a_failure_to_connect_is_raised_to_all_waiting_requests(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    suspects, company = IsolatedConnections(nursery, 1), SuspectGroup()

    async def open_connection(_broker: HostPort, _addresses: tuple[str, ...]) -> Any:
        await trio.sleep(1)
        raise BrokerLinkFailed("unreachable", "no broker is there", message="no")

    broker = host_port("b0")
    ways = [lambda: suspects.get_connection(broker, nowhere, open_connection, "alice", company)] * 3
    assert [type(one) for one in await gather(*ways)] == [BrokerLinkFailed] * 3
    assert len(suspects) == 0


# ---- the request that is to blame


@given(count=st.integers(1, 300), fatal=st.sets(st.integers(0, 299), max_size=5))
def test_a_bisection_finds_just_those_that_are_to_blame(count: int, fatal: set[int]) -> None:
    """Each round, all of one company are asked over one connection, which is lost if a fatal one is among them."""
    trials = [LossHistory() for _ in range(count)]
    broker: Any = BROKER
    left = {number: trials[number] for number in range(count)}
    rounds, connections = 0, 0
    blamed_brokers: list[ConnectionLoss] = []
    while left:
        companies: dict[SuspectGroup | None, list[int]] = {}
        for number, trial in left.items():
            companies.setdefault(trial.suspect_group, []).append(number)
        for members in companies.values():
            connections += 1
            if not fatal & set(members):
                for number in members:
                    blamed_brokers += left.pop(number).settle_losses()
                continue
            loss = ConnectionLoss(broker, len(members))
            for number in members:
                if left[number].record_loss(broker, loss):
                    assert number in fatal
                    blamed_brokers += left.pop(number).settle_losses()
        rounds += 1
    assert blamed_brokers == []
    assert {number for number, trial in enumerate(trials) if trial.is_to_blame} == {one for one in fatal if one < count}
    assert rounds <= 2 + count.bit_length()
    assert connections <= 1 + 2 * (1 + count.bit_length()) * max(1, len(fatal))


def test_a_loss_that_no_request_is_to_blame_for_is_a_brokers_once_all_have_their_answers() -> None:
    broker: Any = BROKER
    trials = [LossHistory() for _ in range(3)]
    loss = ConnectionLoss(broker, 3)
    assert [trial.record_loss(broker, loss) for trial in trials] == [False] * 3
    assert [list(trial.settle_losses()) for trial in trials] == [[], [], [loss]]
    assert [list(trial.settle_losses()) for trial in trials] == [[], [], []]


def test_a_loss_that_says_nothing_of_a_request_makes_it_no_suspect() -> None:
    broker: Any = BROKER
    trial = LossHistory()
    assert not trial.record_loss(broker, None)
    assert (trial.suspect_group, trial.last_lost_at) == (None, BROKER)


def test_alone_on_a_shared_connection_it_is_not_to_blame_yet() -> None:
    broker: Any = BROKER
    trial = LossHistory()
    assert not trial.record_loss(broker, ConnectionLoss(broker, 1))
    assert trial.record_loss(broker, ConnectionLoss(broker, 1))
