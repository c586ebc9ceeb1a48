"""accept_clients: fair shares, and a listener that outlives every trouble of accept."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from relay_fakes import until

from proxy.config.types import Limits
from proxy.forwarder.listen import admission as accepting
from proxy.forwarder.listen.admission import Admission, accept_clients
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.accepting import NO_DESCRIPTORS_PAUSE_S
from proxy.runtime.shared.connection_count import SLACK_PART, ConnectionCounters, create_shared_counters


class SharedListener:
    """Forwarders that wait at one listener."""

    def __init__(self, nursery: trio.Nursery, forwarders: int = 2) -> None:
        self.nursery = nursery
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        memory = create_shared_counters(forwarders)
        self.admissions = [Admission(Limits(), ConnectionCounters(memory), number) for number in range(forwarders)]
        self.taken: list[int] = []
        self.is_taken = trio.Event()
        self.addresses: list[tuple[str, int]] = []
        self.clients: list[socket.socket] = []
        self.streams: list[TcpStream] = []
        self.scopes: list[trio.CancelScope] = []
        self.copies: list[socket.socket] = []

    def open(self, forwarder: int, *, sock: Any = None) -> None:
        copy = sock or self.listener.dup()
        self.copies.append(copy)
        scope = trio.CancelScope()
        self.scopes.append(scope)

        def take_in(stream: TcpStream, address: tuple[str, int]) -> None:
            self.taken.append(forwarder)
            self.addresses.append(address)
            self.streams.append(stream)
            self.admissions[forwarder].admit_client(address[0])
            self.is_taken.set()

        async def accept() -> None:
            with scope:
                await accept_clients(copy, self.admissions[forwarder], take_in)

        self.nursery.start_soon(accept)

    async def come(self) -> None:
        """A client, until it is taken."""
        self.is_taken = trio.Event()
        self.clients.append(socket.create_connection(self.listener.getsockname()))
        await self.is_taken.wait()


@pytest.fixture
async def shared(nursery: trio.Nursery) -> AsyncIterator[SharedListener]:
    shared = SharedListener(nursery)
    yield shared
    nursery.cancel_scope.cancel()
    shared.listener.close()
    for client in shared.clients:
        client.close()
    for stream in shared.streams:
        stream.socket.close()


async def test_clients_are_taken(shared: SharedListener) -> None:
    shared.open(0)
    for _ in range(3):
        await shared.come()
    assert shared.taken == [0, 0, 0]
    assert shared.addresses == [client.getsockname() for client in shared.clients]


async def test_a_forwarder_above_its_fair_share_leaves_the_client_to_another(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "GIVE_WAY_S", 0.2)
    shared.admissions[0].admit_client("127.0.0.1")
    shared.open(0)
    shared.open(1)
    await shared.come()
    assert shared.taken == [1]


async def test_shares_become_even(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(accepting, "GIVE_WAY_S", 1)
    mock_clock.autojump_threshold = 0.02  # once nothing has come for so long; each that gives way wakes up on its own
    shared.open(0)
    shared.open(1)
    for come in range(1, 31):
        await shared.come()
        mock_clock.jump(0.001)
        difference = abs(shared.taken.count(0) - shared.taken.count(1))
        assert difference <= (1 if come < SLACK_PART else 1 + come // SLACK_PART)


async def test_a_forwarder_above_its_share_takes_clients_left_by_the_others(shared: SharedListener) -> None:
    """The others are gone, or hang."""
    for _ in range(5):
        shared.admissions[0].admit_client("127.0.0.1")
    shared.open(0)
    await shared.come()
    assert shared.taken == [0]


async def test_another_was_faster(shared: SharedListener) -> None:
    shared.open(0)
    shared.open(0)
    for _ in range(5):
        await shared.come()
    await trio.testing.wait_all_tasks_blocked()
    assert len(shared.taken) == 5


class TroubledListener:
    """A listener whose accept fails first."""

    def __init__(self, real: socket.socket, *errors: OSError) -> None:
        self._real = real
        self.errors = list(errors)

    def accept(self) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self._real.accept()

    def fileno(self) -> int:
        return self._real.fileno()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._real.close()


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EAGAIN])
async def test_accept_errors_of_one_client_are_not_reported(shared: SharedListener, number: int) -> None:
    listener = TroubledListener(shared.listener.dup(), *(OSError(number, "trouble") for _ in range(3)))
    shared.open(0, sock=listener)
    with structlog.testing.capture_logs() as logs:
        await shared.come()
    assert listener.errors == []
    assert logs == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_no_descriptors_left(
    shared: SharedListener, number: int, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client stays in the queue; to try again at once would only burn the CPU."""
    listener = TroubledListener(shared.listener.dup(), *(OSError(number, "none left") for _ in range(3)))
    with structlog.testing.capture_logs() as logs:
        shared.open(0, sock=listener)
        await shared.come()
    assert trio.current_time() >= 3 * NO_DESCRIPTORS_PAUSE_S
    assert [entry["log_level"] for entry in logs] == ["error"] * 3
    assert {entry["reason"] for entry in logs} == {"none left"}


@pytest.mark.parametrize("giving_way", [False, True])
async def test_cancelled_it_keeps_no_client_waiting(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch, *, giving_way: bool
) -> None:
    monkeypatch.setattr(accepting, "GIVE_WAY_S", 1000)
    if giving_way:
        shared.admissions[0].admit_client("127.0.0.1")
    shared.open(0)
    await trio.testing.wait_all_tasks_blocked()
    if giving_way:
        shared.clients.append(socket.create_connection(shared.listener.getsockname()))
        await trio.testing.wait_all_tasks_blocked(0.01)
    shared.scopes[0].cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert shared.copies[0].fileno() == -1
    address = shared.listener.getsockname()
    shared.listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    assert shared.taken == []


async def test_sockets_are_ours_alone_and_do_not_block(shared: SharedListener) -> None:
    seen: list[tuple[bool, bool]] = []
    copy = shared.listener.dup()

    def take_in(stream: TcpStream, _address: tuple[str, int]) -> None:
        with stream.socket as client:
            seen.append((client.get_inheritable(), os.get_blocking(client.fileno())))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_clients, copy, shared.admissions[0], take_in)
        with socket.create_connection(shared.listener.getsockname()):
            await until(lambda: seen)
        nursery.cancel_scope.cancel()
    assert seen == [(False, False)]


# ---- a forwarder that has no room


def let_in_one(shared: SharedListener) -> None:
    for admission in shared.admissions:
        admission.limits = Limits(max_connections=2)


async def test_a_full_forwarder_leaves_clients_to_one_with_room(shared: SharedListener) -> None:
    let_in_one(shared)
    shared.admissions[0].admit_client("a").stop_counting()
    shared.open(0)
    shared.open(1)
    await shared.come()
    assert shared.taken == [1]


async def test_where_all_are_full_a_client_is_told_at_once(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "FULL_MAX_S", 1000)
    let_in_one(shared)
    for admission in shared.admissions:
        admission.admit_client("a").stop_counting()
    shared.open(0)
    await shared.come()
    assert shared.taken == [0]


@pytest.mark.parametrize("what", ["full", "busy"])
async def test_a_full_or_busy_forwarder_takes_a_waiting_client_once_a_place_is_released(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(accepting, "FULL_MAX_S", 1000)
    [admission, _] = shared.admissions
    admission.limits = Limits(max_connections=2 if what == "full" else 100, max_unauthenticated_connections=2)
    place = admission.admit_client("a")
    place.mark_busy()
    if what == "full":
        place.stop_counting()
    shared.open(0)
    shared.clients.append(socket.create_connection(shared.listener.getsockname()))
    await trio.sleep(4 * accepting.FULL_LOOK_S)
    assert shared.taken == []
    place.release()
    await until(lambda: shared.taken == [0])


async def test_a_full_forwarder_waits_a_bounded_time_for_another_to_accept(
    shared: SharedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other forwarders report room but accept no client: they hang, or are captured."""
    monkeypatch.setattr(accepting, "FULL_MAX_S", 0.3)
    monkeypatch.setattr(accepting, "TURN_AWAY_S", 1000)
    let_in_one(shared)
    shared.admissions[0].admit_client("a").stop_counting()
    began_at = trio.current_time()
    shared.open(0)
    await shared.come()
    assert trio.current_time() >= began_at + 0.3
    silent = shared.admissions[0]._pre_auth.find_longest_silent()
    assert silent is not None
    silent.stop_counting()
    monkeypatch.setattr(accepting, "FULL_MAX_S", 1000)
    await shared.come()
    assert shared.taken == [0, 0], "those behind it in the queue are told at once"
