"""lookup.connections.pool: one connection for each broker and principal, opened once, bounded, ended when idle."""

import gc
import random
import time
from contextlib import suppress
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import (
    CONNECT,
    EXCHANGE_LIFETIME_S,
    BrokerEnd,
    FakeAuth,
    FakeBroker,
    Network,
    asked,
    connect_to,
    gather,
    host_port,
    lookup,
    make_config,
)

from lookup.connections.broker_connection import BrokerConnection, BrokerConnectionLost
from lookup.connections.pool import RENEWAL_RETRY_S, ROOM_WAIT_S, BrokerPool
from lookup.connections.principals import LookupPrincipals
from lookup.targets.rules import Target
from proto import commands
from proto.connect_rules import OriginalCredentials
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import OriginalData
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.network.broker_refusals import CREDENTIALS_REFUSED
from proxy.runtime.network.dialing import Dialer

BROKER = host_port("broker")


async def here() -> Target:
    await trio.lowlevel.checkpoint()
    return Target(BROKER, ("10.0.0.1",))


async def elsewhere() -> Target:
    await trio.lowlevel.checkpoint()
    return Target(BROKER, ("10.9.9.9",))


class Pools:
    """A pool, its broker, and how to ask it."""

    def __init__(self, network: Network, nursery: trio.Nursery, credentials: bool = False, **brokers: Any) -> None:
        config = make_config(brokers=brokers)
        if credentials:
            config = make_config(brokers={**brokers, "credentials": {"method": "token", "file": "x"}})
        self.auth = FakeAuth()
        self.broker = network.add("broker", "10.0.0.1", FakeBroker(connect_to("pulsar://x:1")))
        self.pool = BrokerPool(config, Dialer(config.brokers), self.auth, nursery)  # type: ignore[arg-type]
        self.askers = LookupPrincipals()
        self.anonymous = self.askers.get_principal("")

    async def get(
        self, principal: str = "", host: str = "broker", token: str = "", expires_at_unix_ms: int = 0
    ) -> BrokerConnection:
        credentials = OriginalCredentials("token", token) if token else None
        asker = self.askers.get_principal(principal, credentials, expires_at_unix_ms)
        return await self.pool.get_connection(host_port(host), here, asker)

    async def say_answer(self, number: int) -> None:
        """Have the broker answer the request that it got as the one with this number."""
        request_id = self.broker.requests[number][1].lookup_topic.request_id
        answer = {"request_id": request_id, "response": CONNECT}
        await self.broker.ends[number].send(BaseCommand(type=BaseCommand.LOOKUP_RESPONSE, lookup_topic_response=answer))
        await trio.testing.wait_all_tasks_blocked()


async def test_a_connection_is_shared(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    first = await pools.get("alice")
    assert await pools.get("alice") is first
    assert len(pools.broker.connects) == 1
    assert len(pools.pool) == 1


async def test_only_one_task_opens_it(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    network.dial_delay_s = 0.01
    connections = await gather(*[lambda: pools.get("alice")] * 20)
    assert len(set(connections)) == 1
    assert len(network.dialled) == 1


@pytest.mark.conforms("pip-1.28", "kip-590.17")
async def test_principals_never_share_a_connection(network: Network, nursery: trio.Nursery) -> None:
    """Security: the broker takes a lookup for the principal of its connection."""
    pools = Pools(network, nursery)
    connections = await gather(*(lambda name=name: pools.get(name) for name in ("alice", "bob", "", "alice")))  # type: ignore[misc]
    alice, bob, anonymous, alice_again = connections
    assert alice is alice_again
    assert len({alice, bob, anonymous}) == 3
    assert sorted(connect.original_principal for connect in pools.broker.connects) == ["", "alice", "bob"]
    for principal, connection in (("alice", alice), ("bob", bob), ("", anonymous)):
        await connection.request_answer(asked(lookup(f"of-{principal}")))
    assert [(principal, request.lookup_topic.topic) for principal, request in pools.broker.requests] == [
        ("alice", "of-alice"),
        ("bob", "of-bob"),
        ("", "of-"),
    ]


async def test_clients_of_one_principal_with_other_credentials_never_share_a_connection(
    network: Network, nursery: trio.Nursery
) -> None:
    """Security: the broker authorizes a lookup by the credentials that were forwarded for its connection."""
    pools = Pools(network, nursery, credentials=True)
    first, second = await pools.get("alice", token="first"), await pools.get("alice", token="second")
    plain = await pools.get("alice")
    assert len({first, second, plain}) == 3
    assert await pools.get("alice", token="first") is first
    assert [
        (connect.original_principal, connect.original_auth_method, connect.original_auth_data)
        for connect in pools.broker.connects
    ] == [("alice", "token", "first"), ("alice", "token", "second"), ("alice", "", "")]
    assert not pools.broker.connects[2].HasField("original_auth_data")
    assert [connect.auth_data for connect in pools.broker.connects] == [b"proxy-1", b"proxy-2", b"proxy-3"]


async def test_a_challenge_for_a_clients_credentials_is_not_answered_with_the_proxys(
    network: Network, nursery: trio.Nursery
) -> None:
    """Security: the proxy has no fresh ones of the client's, and its own would make another principal of it."""
    pools = Pools(network, nursery, credentials=True)
    connection = await pools.get("alice", token="s3cret")
    [end] = pools.broker.ends
    with structlog.testing.capture_logs() as logs:
        await end.send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
        await trio.testing.wait_all_tasks_blocked()
    assert connection.closed
    assert pools.broker.open == 0
    assert len(pools.auth.calls) == 1, "for CONNECT, and never again"
    assert "s3cret" not in repr(logs)
    assert await pools.get("alice", token="s3cret") is not connection


async def test_a_challenge_for_a_client_costs_no_request_its_answer(network: Network, nursery: trio.Nursery) -> None:
    """The broker asks when it finds that the credentials have ended, and closes the connection some time later."""
    pools = Pools(network, nursery, credentials=True)
    pools.broker.script = lambda _request: None
    connection = await pools.get("alice", token="ended")
    answers: list[BaseCommand] = []

    async def ask() -> None:
        answers.append(await connection.request_answer(asked()))

    nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    await pools.broker.ends[0].send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
    await trio.testing.wait_all_tasks_blocked()
    assert await pools.get("alice", token="ended") is not connection, "it takes no more requests"
    assert not connection.closed
    await pools.say_answer(0)
    assert len(answers) == 1
    assert connection.closed


async def test_a_broker_that_closes_a_challenged_connection_blames_no_request(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery, credentials=True)
    pools.broker.script = lambda _request: None
    connection = await pools.get("alice", token="ended")
    lost: list[BrokerConnectionLost] = []

    async def ask() -> None:
        try:
            await connection.request_answer(asked())
        except BrokerConnectionLost as error:
            lost.append(error)

    nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    await pools.broker.ends[0].send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
    await trio.aclose_forcefully(pools.broker.ends[0].stream)
    await trio.testing.wait_all_tasks_blocked()
    assert [error.loss for error in lost] == [None]


async def test_credentials_of_one_text_and_two_methods_are_not_the_same(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery)
    token, basic = (
        pools.askers.get_principal("alice", OriginalCredentials(method, "s3cret")) for method in ("token", "basic")
    )
    connections = [await pools.pool.get_connection(BROKER, here, asker) for asker in (token, basic)]
    assert connections[0] is not connections[1]


async def test_credentials_are_not_shown(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    with structlog.testing.capture_logs() as logs:
        connection = await pools.get("alice", token="s3cret-token")
        network.brokers.clear()
        with pytest.raises(BrokerLinkFailed) as caught:
            await pools.get("bob", token="s3cret-token")
    shown = repr([*pools.pool._slots, *pools.pool._slots.values(), connection]) + str(caught.value) + repr(logs)
    assert "s3cret" not in shown
    assert "alice" in shown


def test_an_asker_is_the_same_as_long_as_somebody_holds_it() -> None:
    """Found by what it is; and what no request holds any more is forgotten, with its credentials."""
    askers = LookupPrincipals()
    alice = askers.get_principal("alice")
    assert askers.get_principal("alice") is alice
    assert askers.get_principal("alice", OriginalCredentials("token", "x")) is not alice
    assert askers._budget.used_bytes == 0, "its credentials are forgotten with it"
    kept = askers.get_principal("alice", OriginalCredentials("token", "yy"))
    assert askers._budget.used_bytes == len("token") + len("yy")
    assert askers.get_principal("bob") is not alice
    gc.collect()
    assert list(askers._principals.values()) == [alice, kept]


async def test_brokers_never_share_a_connection(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    assert await pools.get(host="broker") is not await pools.get(host="other")
    network.brokers["10.0.0.1", 6651] = FakeBroker()
    assert await pools.pool.get_connection(host_port("broker", 6651), here, pools.anonymous) is not await pools.get()


async def test_the_addresses_given_are_those_dialled(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    await pools.get()
    assert network.dialled == [("10.0.0.1", 6650)]
    assert network.resolved == []


async def test_addresses_are_asked_for_only_when_a_connection_is_opened(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery)
    asked = 0

    async def counted() -> Target:
        nonlocal asked
        asked += 1
        return await here()

    for _ in range(3):
        await pools.pool.get_connection(BROKER, counted, pools.anonymous)
    assert asked == 1


async def test_an_error_of_the_address_resolution_is_raised_to_the_caller(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery)

    async def unknown() -> Target:
        await trio.lowlevel.checkpoint()
        raise LookupError("no such host")

    with pytest.raises(LookupError):
        await pools.pool.get_connection(BROKER, unknown, pools.anonymous)
    assert not (await pools.get()).closed


async def test_requests_that_wait_for_a_connection_attempt_share_its_failure(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Attempts one after the other, each with its own timeout, would last longer than a lookup may take."""
    pools = Pools(network, nursery, connect_timeout_ms=5000)
    network.silent.add("10.0.0.1")
    started = trio.current_time()
    results = await gather(*[pools.get] * 10)
    assert [type(result) for result in results] == [BrokerLinkFailed] * 10
    assert trio.current_time() - started == pytest.approx(5)


@pytest.mark.conforms("pip-1.27", "pip-30.9")
async def test_the_proxy_says_who_it_is(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery, credentials=True)
    await pools.get("alice")
    [connect] = pools.broker.connects
    assert (connect.auth_method_name, connect.auth_data) == ("token", b"proxy-1")
    assert connect.HasField("proxy_version")
    assert connect.feature_flags.supports_auth_refresh
    assert not connect.HasField("proxy_to_broker_url")
    assert pools.auth.calls[0].broker_host == "broker"


@pytest.mark.conforms("kip-368.11")
async def test_a_challenge_later_on_is_answered_with_fresh_credentials(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The auth worker has forgotten the exchange of the handshake by then: a refresh begins another one, in which the
    broker's further rounds are answered, too.
    """
    pools = Pools(network, nursery, credentials=True)
    end, answers = await listened_to(pools)
    for refresh in range(2):
        await trio.sleep(EXCHANGE_LIFETIME_S + 1)
        for challenge in (b"PulsarAuthRefresh", b"a further round"):
            await end.send(commands.auth_challenge("broker", 21, "token", challenge))
            with trio.fail_after(5):
                answer = (await answers.receive()).auth_response.response
            assert answer.auth_data == b"proxy-%d" % len(pools.auth.calls)
        first, second = pools.auth.calls[-2:]
        assert not first.HasField("challenge")
        assert second.challenge == b"a further round"
        assert first.exchange_id == second.exchange_id == refresh + 2, "each refresh is an exchange of its own"
    assert len(pools.auth.calls) == 5
    assert not (await pools.get("alice")).closed


@pytest.mark.conforms("kip-368.33")
async def test_the_time_of_an_answer_is_from_the_challenge_through_all_rounds(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, credentials=True)
    took_s: list[float] = []
    pools.pool.observe_reauthentication = took_s.append
    end, answers = await listened_to(pools)
    assert took_s == [], "the handshake is none"
    pools.auth.takes_s = 1.0
    for has_rounds in (False, True):
        pools.auth.has_rounds = has_rounds
        await end.send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
        await answers.receive()
    assert took_s == [pytest.approx(1)], "an exchange that is not over is not counted"
    await trio.sleep(2)
    await end.send(commands.auth_challenge("broker", 21, "token", b"a further round"))
    await answers.receive()
    assert took_s == [pytest.approx(1), pytest.approx(4)]


async def test_a_further_round_in_a_forgotten_exchange_ends_the_connection(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, credentials=True)
    end, _ = await listened_to(pools)
    connection = await pools.get("alice")
    await trio.sleep(EXCHANGE_LIFETIME_S + 1)
    await end.send(commands.auth_challenge("broker", 21, "token", b"a further round"))
    await trio.sleep(1)
    assert connection.closed


async def listened_to(pools: Pools) -> tuple[BrokerEnd, trio.MemoryReceiveChannel[BaseCommand]]:
    """Alice's connection: the broker's end, and the AUTH_RESPONSEs that come over it."""
    connection = await pools.get("alice")
    send, receive = trio.open_memory_channel[BaseCommand](10)
    send_all = connection._link.stream.send_all

    async def spy(data: bytes) -> None:
        command = commands.parse_command(bytes(data)[8:])
        if command.type == BaseCommand.AUTH_RESPONSE:
            await send.send(command)
        else:
            await send_all(data)

    connection._link.stream.send_all = spy  # type: ignore[method-assign]
    return pools.broker.ends[0], receive


async def test_without_credentials_none_are_asked_for(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    await pools.get("alice")
    assert pools.auth.calls == []
    assert not pools.broker.connects[0].HasField("auth_method_name")


async def test_no_credentials_to_be_had(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery, credentials=True)
    pools.auth.broken = True
    with pytest.raises(BrokerLinkFailed) as caught:
        await pools.get()
    assert caught.value.reason == "credentials"
    assert network.dialled == []


async def test_a_lost_connection_is_replaced(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    first = await pools.get()
    await trio.aclose_forcefully(pools.broker.ends[0].stream)
    await trio.testing.wait_all_tasks_blocked()
    assert len(pools.pool) == 0
    second = await pools.get()
    assert second is not first
    assert not second.closed


async def test_a_failure_is_not_remembered(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    broker = network.brokers.pop(("10.0.0.1", 6650))
    with pytest.raises(BrokerLinkFailed) as caught:
        await pools.get()
    assert caught.value.reason == "unreachable"
    network.brokers["10.0.0.1", 6650] = broker
    assert not (await pools.get()).closed


async def test_the_profile_is_what_a_broker_last_said(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    assert pools.pool.profile is None
    await pools.get()
    assert pools.pool.profile is not None
    assert pools.pool.profile.server_version == "fake"


# ---- bounds


async def test_the_bound_evicts_what_is_unused_for_longest(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, pooled_connections_max=2)
    oldest = await pools.get("a")
    await trio.sleep(1)
    newer = await pools.get("b")
    await trio.sleep(1)
    await oldest.request_answer(asked())  # now "b" is the one unused for longest
    await pools.get("c")
    await trio.testing.wait_all_tasks_blocked()
    assert newer.closed
    assert not oldest.closed
    assert pools.broker.open == 2


async def test_the_bound_never_takes_a_connection_from_those_who_wait_on_it(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery, pooled_connections_max=1)
    pools.broker.script = lambda _request: None
    busy = await pools.get("a")
    nursery.start_soon(busy.request_answer, asked())
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BrokerLinkFailed) as caught:
        await pools.get("b")
    assert (caught.value.reason, caught.value.code) == ("pool_full", ServerError.TooManyRequests)
    assert not busy.closed
    assert await pools.get("a") is busy
    await pools.say_answer(0)
    assert not (await pools.get("b")).closed


async def test_the_bound_holds_for_connections_being_opened_too(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery, pooled_connections_max=3)
    network.dial_delay_s = 0.01
    results = await gather(*(lambda name=name: pools.get(name) for name in "abcdef"))  # type: ignore[misc]
    refused = [result for result in results if isinstance(result, BrokerLinkFailed)]
    assert len(refused) == 3
    assert {one.reason for one in refused} == {"pool_full"}
    assert pools.broker.open == 3


async def test_a_broker_that_cannot_be_reached_does_not_fill_the_pool(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery, pooled_connections_max=2)
    kept = await pools.get("kept")
    for number in range(5):
        with pytest.raises(BrokerLinkFailed):
            await pools.pool.get_connection(host_port(f"down-{number}"), elsewhere, pools.anonymous)
    assert not kept.closed


async def test_idle_connections_end(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, idle_connection_timeout_ms=1000)
    nursery.start_soon(pools.pool.run)
    used, unused = await pools.get("used"), await pools.get("unused")
    for _ in range(8):
        await trio.sleep(0.25)
        await used.request_answer(asked())
    await trio.testing.wait_all_tasks_blocked()
    assert unused.closed
    assert not used.closed
    assert pools.broker.open == 1
    await trio.sleep(1.5)
    assert used.closed
    assert len(pools.pool._slots) == 0, "what has ended is forgotten"


async def test_a_connection_with_a_request_under_way_is_not_idle(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, idle_connection_timeout_ms=1000)
    pools.broker.script = lambda _request: None
    nursery.start_soon(pools.pool.run)
    busy = await pools.get()
    nursery.start_soon(busy.request_answer, asked())
    await trio.sleep(10)
    assert not busy.closed


async def test_retire_gives_time_then_closes_everything(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery)
    ended: list[float] = []
    connections = [await pools.get("a"), await pools.get("b")]

    async def run() -> None:
        await pools.pool.run()
        ended.append(trio.current_time())

    nursery.start_soon(run)
    started = trio.current_time()
    nursery.start_soon(pools.pool.retire_after, 5.0)
    await trio.sleep(4.9)
    assert ended == [started]
    assert not any(connection.closed for connection in connections)
    await trio.sleep(0.2)
    assert all(connection.closed for connection in connections)
    assert pools.broker.open == 0


async def test_the_first_who_asked_gives_up_and_the_others_do_not_begin_again(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery)
    network.dial_delay_s = 3.0

    async def impatient() -> None:
        with trio.move_on_after(1):
            await pools.get()

    nursery.start_soon(impatient)
    await trio.sleep(0.5)
    assert not (await pools.get()).closed
    assert trio.current_time() == pytest.approx(3)
    assert len(network.dialled) == 1


async def test_a_connection_that_is_opened_while_the_pool_retires_is_closed(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery)
    network.dial_delay_s = 3.0
    nursery.start_soon(pools.get)
    await trio.sleep(1)
    await pools.pool.retire_after(0.0)
    await trio.sleep(10)
    assert len(network.dialled) == 1
    assert pools.broker.open == 0


async def test_a_retired_pool_holds_nothing_open_whatever_is_asked_of_it_later(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A lookup that outlives the patience asks its pool again; what that opened would never be closed."""
    pools = Pools(network, nursery)
    await pools.pool.retire_after(0.0)
    try:
        connection = await pools.get("late")
        await connection.request_answer(asked())
    except BrokerLinkFailed:
        pass
    await trio.sleep(10 * 60)
    assert pools.broker.open == 0


async def test_eviction_takes_from_the_principal_with_the_most(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """One principal that comes with ever new credentials must not drive the others out."""
    pools = Pools(network, nursery, pooled_connections_max=4)
    oldest = await pools.get("bob")
    greedy = []
    for number in range(8):
        await trio.sleep(1)
        greedy.append(await pools.get("alice", token=f"t{number}"))
    await trio.testing.wait_all_tasks_blocked()
    assert not oldest.closed, "it is the one unused for longest, but bob has no other"
    assert [connection.closed for connection in greedy] == [True] * 5 + [False] * 3
    await trio.sleep(1)
    await pools.get("carol")
    await trio.testing.wait_all_tasks_blocked()
    assert [connection.closed for connection in (oldest, *greedy[5:])] == [False, True, False, False]


async def test_connections_in_use_are_not_evicted_at_the_bound(network: Network, nursery: trio.Nursery) -> None:
    """Of the principal with the most only what is idle can go, and what it uses cannot."""
    pools = Pools(network, nursery, pooled_connections_max=4)
    pools.broker.script = lambda _request: None
    busy = [await pools.get("alice", token=f"t{number}") for number in range(2)]
    for connection in busy:
        nursery.start_soon(connection.request_answer, asked())
    bobs = [await pools.get("bob", token=f"t{number}") for number in range(2)]
    await trio.testing.wait_all_tasks_blocked()
    await pools.get("carol")
    await trio.testing.wait_all_tasks_blocked()
    assert [connection.closed for connection in (*busy, *bobs)] == [False, False, True, False]


async def test_a_principal_has_so_many_connections_to_a_broker(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Each of its clients may have credentials of its own; other principals and other brokers do not count."""
    pools = Pools(network, nursery, pooled_connections_per_principal_max=2)
    bob = await pools.get("bob", token="b")
    network.add("other", "10.0.0.1", pools.broker)
    elsewhere = await pools.get("alice", host="other", token="t9")
    alices = []
    for number in range(4):
        await trio.sleep(1)
        alices.append(await pools.get("alice", token=f"t{number}"))
    await trio.testing.wait_all_tasks_blocked()
    assert [connection.closed for connection in (bob, elsewhere, *alices)] == [False, False, True, True, False, False]


async def test_lookups_wait_while_all_connections_of_their_principal_are_in_use(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """In the order in which they came; those of other principals, and of open connections, do not wait."""
    pools = Pools(network, nursery, pooled_connections_per_principal_max=1)
    pools.broker.script = lambda _request: None
    served: list[str] = []

    async def ask(token: str) -> None:
        connection = await pools.get("alice", token=token)
        await connection.request_answer(asked())
        served.append(token)

    for token in ("t0", "t1", "t2"):
        nursery.start_soon(ask, token)
        await trio.sleep(0.1)
    assert len(pools.broker.connects) == 1
    with trio.fail_after(0.005):
        await pools.get("bob", token="b")
        await pools.get("alice", token="t0")
    pools.broker.ends.pop(1)  # bob's, which was asked nothing
    for number in range(3):
        await trio.sleep(0.1)
        assert [
            connect.original_auth_data for connect in pools.broker.connects if connect.original_principal == "alice"
        ][-1] == f"t{number}"
        await pools.say_answer(number)
    assert served == ["t0", "t1", "t2"]
    assert len(pools.pool) == 2


async def test_a_request_cancelled_while_it_waits_leaves_no_slot_and_no_share(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, pooled_connections_per_principal_max=1, idle_connection_timeout_ms=1000)
    pools.broker.script = lambda _request: None
    busy = await pools.get("alice", token="t0")
    nursery.start_soon(busy.request_answer, asked())
    await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(0.2) as gave_up:
        await pools.get("alice", token="t1")
    assert gave_up.cancelled_caught
    await pools.say_answer(0)
    nursery.start_soon(pools.pool.run)
    await trio.sleep(3)
    assert (pools.pool._slots, pools.pool._shares) == ({}, {})


async def test_busy_credentials_do_not_starve_others_of_their_principal(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """With overlapping lookups a connection is never unused; it makes room, and answers what is under way."""
    pools = Pools(network, nursery, pooled_connections_per_principal_max=1)
    pools.broker.script = lambda _request: None
    served: list[str] = []

    async def ask(token: str) -> None:
        await (await pools.get("alice", token=token)).request_answer(asked())
        served.append(token)

    nursery.start_soon(ask, "busy")
    await trio.sleep(0.1)
    nursery.start_soon(ask, "new")
    await trio.sleep(2 * ROOM_WAIT_S)
    assert [connect.original_auth_data for connect in pools.broker.connects] == ["busy", "new"]
    await pools.say_answer(0)
    assert served == ["busy"]
    assert pools.broker.open == 1
    await pools.say_answer(1)
    assert served == ["busy", "new"]


async def test_connections_that_made_room_are_bounded_too(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A broker that answers nothing keeps at most twice as many as there may be."""
    pools = Pools(network, nursery, pooled_connections_per_principal_max=2)
    pools.broker.script = lambda _request: None

    async def ask(number: int) -> None:
        await (await pools.get("alice", token=f"t{number}")).request_answer(asked())

    for number in range(10):
        nursery.start_soon(ask, number)
        await trio.sleep(2 * ROOM_WAIT_S)
    assert pools.broker.open == 4


async def test_connections_that_a_challenge_retired_are_bounded(network: Network, nursery: trio.Nursery) -> None:
    """A broker may challenge each connection, and answer nothing."""
    pools = Pools(network, nursery, credentials=True)
    pools.broker.script = lambda _request: None

    async def ask() -> None:
        with suppress(BrokerConnectionLost):
            await (await pools.get("alice", token="t")).request_answer(asked())

    for number in range(10):
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await pools.broker.ends[number].send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
        await trio.testing.wait_all_tasks_blocked()
    assert pools.broker.open == 2


async def test_a_retired_connection_ends_when_its_last_request_is_given_up(
    network: Network, nursery: trio.Nursery
) -> None:
    pools = Pools(network, nursery, credentials=True)
    pools.broker.script = lambda _request: None
    connection = await pools.get("alice", token="t")
    scope = trio.CancelScope()

    async def ask() -> None:
        with scope:
            await connection.request_answer(asked())

    nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    await pools.broker.ends[0].send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
    await trio.testing.wait_all_tasks_blocked()
    assert not connection.closed
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert connection.closed


async def test_the_same_credentials_share_a_connection_whatever_end_is_said(
    network: Network, nursery: trio.Nursery
) -> None:
    """A plugin may count the end from each connect."""
    pools = Pools(network, nursery)
    ends = [2_000_000_000_000 + number for number in range(3)]
    connections = [await pools.get("alice", token="same", expires_at_unix_ms=end) for end in ends]
    assert len(set(connections)) == 1
    assert [asker.expires_at_unix_ms for _, asker in pools.pool._slots] == [ends[-1]]


async def test_a_connection_that_was_just_opened_is_not_taken_from_its_caller(
    network: Network, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its request is on its way, it looks unused."""
    pools = Pools(network, nursery, pooled_connections_per_principal_max=1)
    complete = SingleFlight._complete
    taken: list[bool] = []

    async def complete_and_look(*arguments: Any) -> None:
        await complete(*arguments)
        taken.append(pools.pool._make_room(pools.pool._shares[BROKER, "alice"], waits_until=0.0))

    monkeypatch.setattr(SingleFlight, "_complete", complete_and_look)
    connection = await pools.get("alice", token="t0")
    assert taken == [False]
    assert not connection.closed
    assert pools.pool._make_room(pools.pool._shares[BROKER, "alice"], waits_until=0.0)


# ---- without waiting


async def test_an_open_connection_is_given_at_once(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    alice = pools.askers.get_principal("alice")
    assert pools.pool.get_open_connection(BROKER, alice, trio.current_time()) is None
    connection = await pools.get("alice")
    assert pools.pool.get_open_connection(BROKER, alice, trio.current_time()) is connection
    assert pools.pool.get_open_connection(BROKER, pools.askers.get_principal("bob"), trio.current_time()) is None
    assert pools.pool.get_open_connection(host_port("other"), alice, trio.current_time()) is None
    assert len(network.dialled) == 1
    await trio.aclose_forcefully(pools.broker.ends[0].stream)
    await trio.testing.wait_all_tasks_blocked()
    assert pools.pool.get_open_connection(BROKER, alice, trio.current_time()) is None


async def test_while_one_is_being_opened_there_is_none(network: Network, nursery: trio.Nursery) -> None:
    pools = Pools(network, nursery)
    network.dial_delay_s = 0.01
    nursery.start_soon(pools.get, "alice")
    await trio.testing.wait_all_tasks_blocked()
    assert pools.pool.get_open_connection(BROKER, pools.askers.get_principal("alice"), trio.current_time()) is None


# ---- renewal


LIFETIME_S = 100.0


@pytest.fixture
def unix_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes with Trio's."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0 + trio.current_time())


@pytest.mark.usefixtures("unix_time")
async def test_a_connection_ends_with_the_forwarded_credentials(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery, credentials=True, idle_connection_timeout_ms=60_000)
    nursery.start_soon(pools.pool.run)
    end_unix_ms = int((time.time() + 100) * 1000)
    ends, goes_on = await pools.get("alice", "broker", "t0", end_unix_ms), await pools.get("alice", "broker", "t1")
    for _ in range(9):
        await trio.sleep(10)
        await ends.request_answer(asked())
        await goes_on.request_answer(asked())
    assert not ends.closed
    await trio.sleep(30)
    assert ends.closed
    assert not goes_on.closed


class Renewing(Pools):
    """Credentials with an end."""

    def __init__(self, network: Network, nursery: trio.Nursery, lifetime_s: float = LIFETIME_S, **brokers: Any) -> None:
        super().__init__(network, nursery, credentials=True, **brokers)
        self.auth.lifetime_s = lifetime_s
        self.asker = self.askers.get_principal("alice")

    def open(self) -> BrokerConnection:
        connection = self.pool.get_open_connection(BROKER, self.asker, trio.current_time())
        assert connection is not None, "there always is one"
        return connection

    async def renewed_at(self, first: BrokerConnection, *, step_s: float = 1.0) -> float:
        """Use it until there is another one; when that was begun."""
        while self.open() is first:
            await trio.sleep(step_s)
            await self.open().request_answer(asked())
        return trio.current_time()


@pytest.mark.conforms("kip-368.11")
async def test_a_connection_is_renewed_at_85_to_95_percent_of_its_credentials_lifetime(
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    unix_time: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KIP-368; at a random point, so that not all are replaced at once."""
    monkeypatch.setattr(random, "uniform", random.Random(7).uniform)
    points = []
    for number in range(20):
        pools = Renewing(network, nursery)
        first = await pools.pool.get_connection(BROKER, here, pools.asker)
        started = trio.current_time()
        points.append(first.renew_at - started)
        if number == 0:
            assert await pools.renewed_at(first) == pytest.approx(first.renew_at, abs=2.5)
            assert [connect.auth_data for connect in pools.broker.connects] == [b"proxy-1", b"proxy-2"]
    assert all(0.85 * LIFETIME_S <= point <= 0.95 * LIFETIME_S for point in points), points
    assert max(points) - min(points) > 0.05 * LIFETIME_S


async def test_credentials_without_an_end_are_not_renewed(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None
) -> None:
    pools = Renewing(network, nursery, lifetime_s=0)
    first = await pools.pool.get_connection(BROKER, here, pools.asker)
    await trio.sleep(1000)
    assert pools.open() is first


@pytest.mark.conforms("kip-368.11")
@pytest.mark.parametrize("way", ["short", "long"])
async def test_the_old_one_serves_until_the_new_one_is_there_and_no_request_fails(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None, way: str
) -> None:
    pools = Renewing(network, nursery)
    first = await pools.pool.get_connection(BROKER, here, pools.asker)
    network.dial_delay_s = 2.0
    pools.broker.script = lambda _request: None
    await trio.sleep(0.96 * LIFETIME_S)
    used = []
    for _ in range(5):
        used.append(pools.open() if way == "short" else await pools.pool.get_connection(BROKER, here, pools.asker))
        nursery.start_soon(used[-1].request_answer, asked())
        await trio.sleep(0.1)
    assert used == [first] * 5, "no lookup waits for the new one"
    assert len(network.dialled) == 2, "and only one is opened"
    await trio.sleep(2)
    second = pools.open()
    assert second is not first
    assert not first.closed, "there are requests under way"
    assert pools.broker.open == 2
    for _, request in pools.broker.requests:
        await pools.broker.ends[0].send(connect_to("pulsar://x:1")(request))
    await trio.sleep(0.1)
    assert first.closed
    assert not second.closed
    assert pools.broker.open == 1
    assert len(pools.pool) == 1


async def test_a_renewal_that_fails_is_tried_again_later(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None
) -> None:
    pools = Renewing(network, nursery)
    first = await pools.pool.get_connection(BROKER, here, pools.asker)
    await trio.sleep(0.96 * LIFETIME_S)
    pools.auth.broken = True
    before = len(pools.auth.calls)
    for _ in range(40):
        assert pools.open() is first
        await pools.open().request_answer(asked())
        await trio.sleep(0.25)
    tried = len(pools.auth.calls) - before
    assert tried == 2, f"within 10 s, and not at each request: once in {RENEWAL_RETRY_S} s"
    pools.auth.broken = False
    await trio.sleep(RENEWAL_RETRY_S)
    pools.open()
    await trio.sleep(0.1)
    assert pools.open() is not first
    assert first.closed


@pytest.mark.parametrize("lifetime_s", [-3600.0, 0.001, 1.0])
async def test_credentials_that_have_ended_or_nearly_are_no_reason_for_a_storm(
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    unix_time: None,
    lifetime_s: float,
) -> None:
    """A broker whose clock is behind, or that does not look, takes them."""
    pools = Renewing(network, nursery, lifetime_s=lifetime_s)
    await pools.pool.get_connection(BROKER, here, pools.asker)
    for _ in range(100):
        await pools.open().request_answer(asked())
        await trio.sleep(0.1)
    assert len(pools.broker.connects) <= 1 + 10 / RENEWAL_RETRY_S


async def test_an_unused_connection_is_not_renewed(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None
) -> None:
    pools = Renewing(network, nursery, idle_connection_timeout_ms=10**7)
    await pools.pool.get_connection(BROKER, here, pools.asker)
    await trio.sleep(2 * LIFETIME_S)
    assert len(pools.broker.connects) == 1


async def test_a_renewal_under_way_while_the_pool_retires(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None
) -> None:
    pools = Renewing(network, nursery)
    await pools.pool.get_connection(BROKER, here, pools.asker)
    await trio.sleep(0.96 * LIFETIME_S)
    network.dial_delay_s = 2.0
    pools.open()
    await trio.sleep(1)
    await pools.pool.retire_after(0.0)
    await trio.sleep(10)
    assert pools.broker.open == 0
    assert len(network.dialled) == 2


async def test_a_broker_lost_while_its_connection_is_renewed(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, unix_time: None
) -> None:
    """Who asks then waits for the renewal rather than for yet another attempt."""
    pools = Renewing(network, nursery)
    first = await pools.pool.get_connection(BROKER, here, pools.asker)
    await trio.sleep(0.96 * LIFETIME_S)
    network.dial_delay_s = 2.0
    pools.open()
    await trio.sleep(1)
    await trio.aclose_forcefully(pools.broker.ends[0].stream)
    await trio.testing.wait_all_tasks_blocked()
    assert pools.pool.get_open_connection(BROKER, pools.asker, trio.current_time()) is None
    second = await pools.pool.get_connection(BROKER, here, pools.asker)
    assert second is not first
    assert not second.closed
    assert len(network.dialled) == 2


# ---- a frozen broker


async def test_the_patience_follows_from_a_lookups_time(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    pools = Pools(network, nursery)
    pools.broker.script = lambda _request: None
    pools.broker.answers_pings = False
    connection = await pools.get("alice")
    started = trio.current_time()
    with pytest.raises(BrokerConnectionLost):
        await connection.request_answer(asked())
    assert 5.0 <= trio.current_time() - started <= 5.5, "half of limits.lookup_timeout_ms"
    assert not (await pools.get("alice")).closed


# ---- refusals


async def test_a_broker_that_wants_the_clients_own_credentials_is_explained(
    network: Network, nursery: trio.Nursery
) -> None:
    """A client that cannot forward any is told so, and not that the proxy's were refused."""
    pools = Pools(network, nursery, credentials=True)
    pools.pool.original_data_of = lambda _broker, _addresses: OriginalData.ORIGINAL_DATA_CHECKED
    pools.broker.greeting = BaseCommand(
        type=BaseCommand.ERROR,
        error={"request_id": commands.NO_REQUEST_ID, "error": ServerError.AuthenticationError, "message": "no"},
    )
    asker = pools.askers.get_principal("alice", method="tls")
    with pytest.raises(BrokerLinkFailed) as caught:
        await pools.pool.get_connection(BROKER, here, asker)
    assert caught.value.code == ServerError.AuthenticationError
    assert "a certificate cannot be forwarded" in caught.value.message
    with pytest.raises(BrokerLinkFailed) as caught:
        await pools.get("alice", token="s3cret")
    assert (caught.value.code, caught.value.message) == (ServerError.ServiceNotReady, CREDENTIALS_REFUSED)
