"""The small parts of proxy.runtime: credentials, tasks, connection_count, descriptors, metrics."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from proto.rpc_pb2 import BrokerCredentialsResponse, Method
from proxy.runtime.loop.tasks import Backoff, InFlightCounter, close_gracefully, run_every, seconds
from proxy.runtime.network.credentials import CredentialExchange, NoCredentials, credentials_for
from proxy.runtime.process.descriptors import Descriptors, adopt_listener, adopt_stream
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters

# ---- credentials


class FakeAuth:
    def __init__(self) -> None:
        self.picked = 0
        self.expires_at_unix_ms = 0
        self.calls: list[tuple[int, Any, float]] = []

    def pick_client(self) -> FakeAuth:
        self.picked += 1
        return self

    def new_id(self) -> int:
        return self.picked

    async def call(self, method: int, request: Any, _type: Any, *, timeout_s: float, retry: bool) -> Any:
        await trio.lowlevel.checkpoint()
        assert retry is not request.HasField("challenge"), "a challenge must not be answered twice"
        self.calls.append((method, request, timeout_s))
        return BrokerCredentialsResponse(
            method="token", data=b"x", incomplete=not request.challenge, expires_at_unix_ms=self.expires_at_unix_ms
        )


async def test_an_exchange_stays_with_one_worker_under_one_id() -> None:
    auth = FakeAuth()
    credentials = credentials_for(auth, "broker", configured=True)  # type: ignore[arg-type]
    assert isinstance(credentials, CredentialExchange)
    assert not credentials.complete
    assert await credentials.auth_data_for(None) == ("token", b"x")
    await credentials.auth_data_for(b"")
    assert not credentials.complete
    await credentials.auth_data_for(b"q")
    assert credentials.complete
    assert auth.picked == 1
    requests = [request for _, request, _ in auth.calls]
    assert {method for method, _, _ in auth.calls} == {Method.BROKER_CREDENTIALS}
    assert {request.exchange_id for request in requests} == {1}
    assert {request.broker_host for request in requests} == {"broker"}
    assert [request.HasField("challenge") for request in requests] == [False, True, True], "empty is not absent"
    assert requests[2].challenge == b"q"


async def test_no_credentials_configured() -> None:
    credentials = credentials_for(FakeAuth(), "broker", configured=False)  # type: ignore[arg-type]
    assert isinstance(credentials, NoCredentials)
    assert await credentials.auth_data_for(None) == ("", b"")
    assert await credentials.auth_data_for(b"q") == ("none", b"")
    assert credentials.complete
    assert credentials.expires_at_unix_ms == 0


async def test_when_credentials_end_is_what_the_last_answer_says() -> None:
    auth = FakeAuth()
    credentials = credentials_for(auth, "broker", configured=True)  # type: ignore[arg-type]
    assert credentials.expires_at_unix_ms == 0
    for auth.expires_at_unix_ms in (2**53, 7, 0):
        await credentials.auth_data_for(None)
        assert credentials.expires_at_unix_ms == auth.expires_at_unix_ms


# ---- tasks


def test_seconds() -> None:
    assert seconds(1500) == 1.5


async def test_close_gracefully_waits_for_the_peer_to_read_to_the_end() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(b"last words")
    await theirs.send_all(b"unread")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_gracefully, ours)
        await trio.testing.wait_all_tasks_blocked()
        assert await theirs.receive_some(100) == b"last words"
        assert await theirs.receive_some(100) == b""
        await theirs.aclose()


async def test_close_gracefully_does_not_wait_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()

    async def chatter() -> None:
        while True:
            await theirs.send_all(b"x")
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        await close_gracefully(ours, linger_s=2)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == pytest.approx(2)


async def test_close_gracefully_of_what_is_broken() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.aclose()
    await close_gracefully(ours)
    await close_gracefully(ours)


async def test_repeat(autojump_clock: trio.testing.MockClock) -> None:
    times: list[float] = []

    async def work() -> None:
        times.append(trio.current_time())
        await trio.sleep(1)

    with trio.move_on_after(10):
        await run_every(2, work)
    assert times == pytest.approx([0, 3, 6, 9])


async def test_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    work = InFlightCounter()
    assert await work.wait_until_empty(timeout_s=0.1)

    async def one(duration_s: float) -> None:
        with work:
            await trio.sleep(duration_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, 2)
        nursery.start_soon(one, 4)
        await trio.sleep(1)
        assert work.count == 2
        assert not await work.wait_until_empty(timeout_s=2)
        assert await work.wait_until_empty(timeout_s=60)
        assert trio.current_time() == pytest.approx(4)


async def test_in_flight_empty_for_a_moment_only(autojump_clock: trio.testing.MockClock) -> None:
    work = InFlightCounter()

    async def relay_race() -> None:
        for _ in range(3):
            with work:
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay_race)
        await trio.sleep(0.5)
        assert await work.wait_until_empty(timeout_s=10)
        assert work.count == 0


async def test_in_flight_several_at_a_time(nursery: trio.Nursery) -> None:
    work = InFlightCounter()
    told: list[bool] = []

    async def wait() -> None:
        told.append(await work.wait_until_empty(timeout_s=60))

    work.increment(5)
    for _ in range(2):
        nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    work.decrement(3)
    work.increment()
    await trio.testing.wait_all_tasks_blocked()
    assert (work.count, told) == (3, [])
    work.decrement(3)
    await trio.testing.wait_all_tasks_blocked()
    assert (work.count, told) == (0, [True, True])


def test_backoff() -> None:
    backoff = Backoff(initial_s=1, max_s=5)
    assert [backoff.next_pause_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_pause_s() == 1


# ---- connection_count


def test_counters_are_shared() -> None:
    descriptor = create_shared_counters(3)
    one, other = ConnectionCounters(descriptor), ConnectionCounters(os.dup(descriptor))
    assert one.total_connections() == 0
    one.set_connections(0, 5)
    other.set_connections(2, 7)
    assert one.total_connections() == other.total_connections() == 12
    one.set_connections(0, 0)
    assert other.total_connections() == 7
    assert not os.get_inheritable(descriptor)


def test_who_has_more_than_the_mean() -> None:
    counters = ConnectionCounters(create_shared_counters(3))
    assert not any(counters.is_above_mean(number) for number in range(3))
    counters.set_connections(0, 2)
    counters.set_connections(1, 1)
    assert [counters.is_above_mean(number) for number in range(3)] == [True, False, False]
    counters.set_connections(2, 3)
    assert [counters.is_above_mean(number) for number in range(3)] == [False, False, True]


# ---- descriptors


@given(
    st.builds(
        Descriptors,
        channel=st.integers(0, 99),
        liveness=st.integers(0, 99),
        service=st.integers(-1, 99),
        connections=st.integers(-1, 99),
        store=st.integers(-1, 99),
    )
)
def test_descriptors_round_trip(descriptors: Descriptors) -> None:
    assert Descriptors.decode(descriptors.encode()) == descriptors


def test_all_descriptors() -> None:
    assert set(Descriptors(channel=3, liveness=4).inheritable()) == {3, 4}
    assert set(Descriptors(channel=3, liveness=4, service=5, connections=8, store=9).inheritable()) == {3, 4, 5, 8, 9}


async def test_adopted_sockets_are_ours_alone() -> None:
    ours, theirs = socket.socketpair()
    ours.set_inheritable(True)
    with theirs:
        stream = adopt_stream(ours.detach())
        assert not os.get_inheritable(stream.socket.fileno())
        await stream.send_all(b"x")
        assert theirs.recv(1) == b"x"
        await stream.aclose()


async def test_adopted_listener(tmp_path: Any) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "s"))
    sock.listen()
    listener = adopt_listener(sock.detach())
    assert not os.get_inheritable(listener.socket.fileno())
    await listener.aclose()
