"""proxy.forwarder.relay.manager: how a relay begins and ends, and what the fd store is told, in which order."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from framed_fakes import CHALLENGE, FakeReauthenticator, Now, answer, message_frame, send_frame, session
from prometheus_client import CollectorRegistry
from relay_fakes import (
    Contexts,
    Forwarder,
    Lane,
    Place,
    about_relay,
    busy_channel,
    descriptors,
    expect,
    fill,
    new_relays,
    open_lane,
    open_tls,
    read,
    read_all,
    reset,
    until,
    value,
)

from proto.rpc_pb2 import StoredRelay
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.relay import engine as engine_module
from proxy.forwarder.relay import manager
from proxy.forwarder.relay import relay as relay_module
from proxy.forwarder.relay import sockets as relay_sockets
from proxy.forwarder.relay.pipes import HUGE_PIPE_BYTES, SMALL_PIPE_BYTES, Pipe, PipePool
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.relay.sockets import splice_works
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.shared import relay_table
from proxy.runtime.shared.fd_store_channel import RECORD_BYTES_MAX, StoreLost
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "LINGER_S", 0.2)


async def says_nothing(stream: TcpStream, seconds: float = 0.05) -> bool:
    """Whether a peer is told nothing, not even an end."""
    with trio.move_on_after(seconds) as scope:
        await trio.lowlevel.wait_readable(stream.socket)
    return scope.cancelled_caught


async def still_the_callers(lane: Lane) -> None:
    """Both streams work as if nothing had been tried."""
    await lane.our_client.send_all(b"sorry")
    assert await read(lane.client, 5) == b"sorry"
    await lane.our_broker.send_all(b"bye")
    assert (await read(lane.broker, 3)).endswith(b"bye")


def is_refused(stream: TcpStream) -> bool:
    """Whether the other side takes nothing any more."""
    try:
        os.write(stream.socket.fileno(), b"x")
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


async def drink(stream: TcpStream) -> None:
    """Read whatever comes."""
    while await stream.receive_some(1 << 20):
        pass


# ---- the beginning


async def test_first_bytes_of_both_ways_go_first(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    await lane.client.send_all(b" and on")
    await lane.broker.send_all(b" welcome")
    about = await it.begin(lane, to_broker=b"held", to_client=b"connected")
    assert await read(lane.broker, 11) == b"held and on"
    assert await read(lane.client, 17) == b"connected welcome"
    assert (it.moved("to_broker"), it.moved("to_client")) == (11, 17)
    assert about.id == 1
    assert it.relays.in_flight.count == 1
    assert (lane.our_client.socket.fileno(), lane.our_broker.socket.fileno()) == (-1, -1), "they are the relay's"


async def test_bytes_are_sent_only_after_the_store_has_the_relay(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    async with busy_channel(it.fd_store) as free_it, trio.open_nursery() as nursery:

        async def begin() -> None:
            await it.begin(lane, to_client=b"connected", to_broker=b"held")

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert await says_nothing(lane.client)
        assert await says_nothing(lane.broker)
        free_it()
        assert await read(lane.client, 9) == b"connected"
        assert it.fd_store.said == [("put", 1)]
        await place.settle()
        assert list(place.slot.relays) == [1]


@pytest.mark.parametrize("size", [100_000, 2 * HUGE_PIPE_BYTES + 17])
async def test_first_bytes_that_fit_no_pipe_go_ahead_in_order(place: Place, lane: Lane, size: int) -> None:
    it = await place.forwarder()
    first = os.urandom(size)
    await lane.client.send_all(b"later")
    async with trio.open_nursery() as nursery:

        async def begin() -> None:
            await it.begin(lane, to_broker=first)

        nursery.start_soon(begin)
        assert await read(lane.broker, size + 5) == first + b"later"
    assert it.moved("to_broker") == size + 5


async def test_a_connected_that_is_too_large(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    await place.settle()
    before = descriptors()
    with pytest.raises(RelayStartFailed, match="too much"):
        await it.begin(lane, to_client=bytes(HUGE_PIPE_BYTES + 1), to_broker=b"held")
    assert descriptors() <= before
    assert it.relays.in_flight.count == 0
    await still_the_callers(lane)
    await place.settle()
    assert place.slot.relays == {}


async def test_a_broker_that_does_not_take_what_came_first(place: Place, narrow_lane: Lane) -> None:
    it = await place.forwarder(RelayConfig(half_close_timeout_ms=100))
    await place.settle()
    before = descriptors()
    with pytest.raises(RelayStartFailed, match="does not take"):
        await it.begin(narrow_lane, to_broker=bytes(8 << 20))
    assert descriptors() <= before
    assert (narrow_lane.our_client.socket.fileno(), narrow_lane.our_broker.socket.fileno()) != (-1, -1)
    assert it.relays.in_flight.count == 0


async def test_a_broker_that_is_gone_before_what_came_first(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    reset(lane.broker)
    await trio.sleep(0.01)
    with pytest.raises(RelayStartFailed):
        await it.begin(lane, to_broker=bytes(8 << 20))
    await lane.our_client.send_all(b"sorry")
    assert await read(lane.client, 5) == b"sorry"


async def test_a_client_that_is_gone_before_its_first_bytes(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    reset(lane.client)
    await trio.sleep(0.01)
    await it.begin(lane, to_client=b"connected")
    assert await read_all(lane.broker) == b""
    await lane.broker.aclose()
    await until(lambda: it.ended)


Trouble = Callable[[Forwarder, pytest.MonkeyPatch], None]


def store_is_lost(it: Forwarder, patch: pytest.MonkeyPatch) -> None:
    async def put(*_: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreLost("Broken pipe")

    patch.setattr(it.fd_store, "store_relay", put)


def no_memory_for_the_message(it: Forwarder, patch: pytest.MonkeyPatch) -> None:
    async def put(*_: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENOBUFS, "No buffer space available")

    patch.setattr(it.fd_store, "store_relay", put)


def no_room_in_the_epoll(it: Forwarder, patch: pytest.MonkeyPatch) -> None:
    def start(relay: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(it.relays._engine, "start_relay", start)


def no_pipe(it: Forwarder, patch: pytest.MonkeyPatch) -> None:
    def take(_pool: PipePool, _size_bytes_max: int) -> Pipe:
        raise OSError(errno.EMFILE, "Too many open files")

    patch.setattr(PipePool, "acquire_pipe", take)


@pytest.mark.parametrize("trouble", [store_is_lost, no_memory_for_the_message, no_room_in_the_epoll, no_pipe])
async def test_a_failed_start_releases_its_resources_and_leaves_the_sockets_to_the_caller(
    place: Place, lane: Lane, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = await place.forwarder()
    await it.begin(await other_lane(place))
    await place.settle()
    before = descriptors()
    with monkeypatch.context() as patch:
        trouble(it, patch)
        with pytest.raises(RelayStartFailed):
            await it.begin(lane, to_client=b"connected", to_broker=b"held")
    await place.settle()
    assert descriptors() <= before
    assert list(place.slot.relays) == [1]
    assert (it.pipe_of(2, TO_BROKER), it.pipe_of(2, TO_CLIENT)) == (0, 0)
    assert it.relays.in_flight.count == 1
    assert it.ended == []
    assert await says_nothing(lane.client, 0.01)
    await still_the_callers(lane)
    about = await it.begin(lane, to_client=b"at last")
    assert about.id == 2
    assert await read(lane.client, 7) == b"at last"


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_start_waits_until_a_pipe_can_be_stored(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch, *, gives_up: bool
) -> None:
    """Without privileges, so many starts at a time have more descriptors on their way than the kernel lets them."""
    it = await place.forwarder()
    acquire = PipePool.acquire_pipe
    failures = [OSError(errno.EAGAIN, "none now"), OSError(errno.ETOOMANYREFS, "too many")]

    def take(pool: PipePool, size_bytes_max: int) -> Pipe:
        if failures:
            raise failures.pop()
        return acquire(pool, size_bytes_max)

    monkeypatch.setattr(PipePool, "acquire_pipe", take)
    if gives_up:
        monkeypatch.setattr(manager, "STORE_WAIT_S", 0.0)
        with pytest.raises(RelayStartFailed, match="too many"):
            await it.begin(lane, to_client=b"connected")
        await still_the_callers(lane)
        failures.clear()
    assert (await it.begin(lane, to_client=b"connected")).id == 1
    assert failures == []
    assert await read(lane.client, 9) == b"connected"


async def test_a_relay_starts_and_moves_its_first_bytes_in_one_call(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    assert it.relays.start_relay_now(it.start(lane, about_relay(), b"held", b"connected"))
    assert os.read(lane.client.socket.fileno(), 100) == b"connected"
    assert os.read(lane.broker.socket.fileno(), 100) == b"held"
    assert it.relays.in_flight.count == 1
    await place.settle()
    assert list(place.slot.relays) == [1], "the store has had it before"
    await lane.client.send_all(b"and on")
    assert await read(lane.broker, 6) == b"and on"


@pytest.mark.parametrize("why", ["too much for a pipe", "the store's channel is busy", "no pipe"])
async def test_a_start_that_would_have_to_wait_leaves_all_to_the_task(
    place: Place, lane: Lane, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = await place.forwarder()
    await place.settle()
    before = descriptors()
    first = os.urandom(SMALL_PIPE_BYTES + 1) if why == "too much for a pipe" else b"held"
    start = it.start(lane, about_relay(), first, b"connected")
    with monkeypatch.context() as patch:
        if why == "no pipe":
            no_pipe(it, patch)
            with pytest.raises(RelayStartFailed):
                it.relays.start_relay_now(start)
        elif why == "the store's channel is busy":
            async with it.fd_store._sending:
                assert not it.relays.start_relay_now(start)
        else:
            assert not it.relays.start_relay_now(start)
    await place.settle()
    assert descriptors() <= before + 2 * len(place.slot.pipes)
    assert place.slot.relays == {}
    assert it.relays.in_flight.count == 0
    await still_the_callers(lane)
    await it.relays.start_relay(start)
    assert start.stored.id == 1
    assert await read(lane.client, 9) == b"connected"
    assert await read(lane.broker, len(first)) == first


async def other_lane(place: Place) -> Lane:
    """One that stays open as long as its place."""
    lane = Lane.new()

    async def hold() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await lane.close()

    place._nursery.start_soon(hold)
    await trio.lowlevel.checkpoint()
    return lane


async def test_a_record_that_is_too_long_for_the_store(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    with pytest.raises(RelayStartFailed, match=f"more than {RECORD_BYTES_MAX}"):
        await it.begin(lane, to_client=b"connected", about=about_relay(principal="x" * RECORD_BYTES_MAX))
    await still_the_callers(lane)
    await it.begin(lane)


async def test_a_table_that_is_full(place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    it = await place.forwarder()
    monkeypatch.setattr(relay_table, "RELAYS_MAX", 1)
    async with open_lane() as only:
        await it.begin(only)
        with pytest.raises(RelayStartFailed, match="at most 1 relays"):
            await it.begin(lane)
        await still_the_callers(lane)
    await until(lambda: it.ended)
    await it.begin(lane)


async def test_cancelled_while_it_waits_for_the_store(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    await place.settle()
    before = descriptors()
    async with busy_channel(it.fd_store):
        with trio.move_on_after(0.02) as scope:
            await it.begin(lane, to_client=b"connected", to_broker=b"held")
    assert scope.cancelled_caught
    await place.settle()
    assert place.slot.relays == {}
    assert descriptors() <= before
    assert it.relays.in_flight.count == 0
    await still_the_callers(lane)
    assert (await it.begin(lane)).id == 1


async def test_a_relay_whose_put_is_under_way_at_a_hand_over_is_the_successors(place: Place, lane: Lane) -> None:
    """The message may be sent already: nothing is shut down, and nothing is taken back."""
    it = await place.forwarder()
    await place.settle()
    before = descriptors()
    entered, go_on = trio.Event(), trio.Event()
    send = it.fd_store._channel.send

    async def slow_send(*arguments: Any) -> None:
        entered.set()
        await go_on.wait()
        await send(*arguments)

    it.fd_store.store_relay_now = lambda *_: False  # type: ignore[method-assign]
    it.fd_store._channel.send = slow_send  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:

        async def begin() -> None:
            await it.begin(lane, to_client=b"connected", to_broker=b"held")

        nursery.start_soon(begin)
        await entered.wait()
        nursery.start_soon(it.relays.hand_over_relays)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert lane.our_client.socket.fileno() == lane.our_broker.socket.fileno() == -1
    assert it.relays.in_flight.count == 0
    assert it.ended == []
    assert ("drop", 1) not in it.fd_store.said
    await place.settle()
    assert descriptors() <= before + 2, "the store's"
    successor = await place.forwarder()
    assert [about.id for about in successor.adopted] == [1]
    assert await read(lane.client, 9) == b"connected"
    assert await read(lane.broker, 4) == b"held"


async def test_a_put_that_comes_after_the_hand_over(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    released = trio.Event()
    put = it.fd_store.store_relay

    async def late(*arguments: Any) -> None:
        await released.wait()
        await put(*arguments)

    it.fd_store.store_relay = late  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:

        async def begin() -> None:
            with pytest.raises(RelayStartFailed):
                await it.begin(lane, to_client=b"connected")

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked()
        await it.relays.hand_over_relays()
        released.set()
    await still_the_callers(lane)
    assert (await place.forwarder()).adopted == []


async def test_a_start_still_waiting_at_a_hand_over_writes_into_no_pipe_of_the_successor(
    place: Place, narrow_lane: Lane, lane: Lane
) -> None:
    """Security: otherwise one client's bytes would get into another's relay."""
    it = await place.forwarder()
    over = trio.Event()
    async with trio.open_nursery() as nursery:

        async def begin() -> None:
            with pytest.raises(RelayStartFailed):
                await it.begin(narrow_lane, to_broker=bytes(4 << 20))
            over.set()

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked(0.02)
        await it.relays.hand_over_relays()
        successor = await place.forwarder()
        await successor.begin(lane)
        nursery.start_soon(drink, narrow_lane.broker)
        await over.wait()
        nursery.cancel_scope.cancel()
    await place.settle()
    assert all(pipe.queued_bytes() == 0 for pipe in successor.left.pipes)
    for number in range(20):
        await lane.client.send_all(b"mine %2d" % number)
        assert await read(lane.broker, 7) == b"mine %2d" % number


async def test_sockets_of_a_relay_are_tuned(place: Place, lane: Lane) -> None:
    config = RelayConfig(
        keep_alive_idle_ms=7000, keep_alive_probe_interval_ms=3000, keep_alive_probes=4, user_timeout_ms=9000
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay_sockets.tune_listener(listener, config)
        lane.client.close_now()
        lane.our_client.close_now()
        client = socket.create_connection(listener.getsockname())
        lane.our_client = TcpStream(listener.accept()[0])
    client.setblocking(False)
    lane.client = TcpStream(client)
    in_lookup_mode = relay_sockets.NOT_SENT_BYTES_IN_LOOKUP_MODE_MAX
    assert options(lane.our_client.socket) == [1, 1, 7, 3, 4, 9000, in_lookup_mode]
    lane.our_client.socket.setblocking(False)
    it = await place.forwarder(config)
    copies = [socket.socket(fileno=os.dup(stream.socket.fileno())) for stream in (lane.our_client, lane.our_broker)]
    lane.our_broker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # as it is dialled
    await it.begin(lane)
    for copy in copies:
        with copy:
            assert options(copy) == [1, 1, 7, 3, 4, 9000, relay_sockets.NOT_SENT_BYTES_MAX]


def options(sock: socket.socket) -> list[int]:
    """What is set of a socket's options that a relay needs."""
    of_tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT, 25)
    return [
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        *(sock.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp),
    ]


# ---- the end


@pytest.mark.conforms("pip-1.16")
@pytest.mark.usefixtures("short_linger")
async def test_a_clean_end_closes_both_at_once_whoever_else_holds_them(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    copies = [os.dup(stream.socket.fileno()) for stream in (lane.our_client, lane.our_broker)]
    await it.begin(lane)
    await place.settle()
    before = descriptors()
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b""
    await lane.broker.send_eof()
    assert await read_all(lane.client) == b"", "although the store and others hold copies"
    await until(lambda: it.ended)
    assert descriptors() <= before - 2
    assert it.relays.in_flight.count == 0
    await place.settle()
    assert place.slot.relays == {}
    for copy in copies:
        os.close(copy)


async def test_the_store_is_told_after_the_sockets_were_shut_down(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round, a store's copy could be the last, and a successor's death between would leave it open."""
    it = await place.forwarder()
    about = await it.begin(lane)
    story: list[str] = []
    shut_down, drop = relay_module.shut_down, it.fd_store.drop_relay

    def note_shut_down(descriptor: int, how: int) -> None:
        assert it.relays._ledger.table.allocate_relay_id() != about.id, "the id is free only afterwards"
        story.append("shut down")
        shut_down(descriptor, how)

    def note_drop(relay_id: int) -> None:
        story.append("drop")
        drop(relay_id)

    monkeypatch.setattr(relay_module, "shut_down", note_shut_down)
    monkeypatch.setattr(it.fd_store, "drop_relay", note_drop)
    await lane.client.send_eof()
    await lane.broker.send_eof()
    await until(lambda: it.ended)
    assert story == ["shut down", "shut down", "drop"]


async def test_a_side_that_breaks_leaves_the_other_time_to_read(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LINGER_S", 0.3)
    it = await place.forwarder()
    copies = [os.dup(stream.socket.fileno()) for stream in (lane.our_client, lane.our_broker)]
    about = await it.begin(lane)
    await lane.broker.send_all(b"why it ends")
    await trio.sleep(0.01)
    reset(lane.broker)
    await trio.sleep(0.01)
    for _ in range(3):
        await lane.client.send_all(b"more and more")
        await trio.sleep(0.005)
    await until(lambda: it.ended)
    assert ("drop", about.id) not in it.fd_store.said
    assert it.relays._ledger.table.allocate_relay_id() != about.id
    assert await read_all(lane.client) == b"why it ends", "no reset before it was read"
    await until(lambda: ("drop", about.id) in it.fd_store.said)
    await until(lambda: is_refused(lane.client))
    for copy in copies:
        os.close(copy)


async def test_the_process_ends_while_a_broken_relay_lingers(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    about = await it.begin(lane)
    reset(lane.broker)
    assert await read_all(lane.client) == b""
    await lane.client.send_all(b"to nobody")
    await until(lambda: it.ended)
    await it.leave()
    assert it.ended == [about]
    await lane.client.aclose()


async def test_the_process_ends_by_itself_and_its_relays_go_on(place: Place, lane: Lane) -> None:
    """As after a defect somewhere in it: not killed, but cancelled."""
    it = await place.forwarder()
    await it.begin(lane, to_client=b"hi")
    await read(lane.client, 2)
    await it.leave()
    assert not it.ended
    it.fd_store.close_all()  # as the end of a process does
    await place.forwarder()
    await lane.client.send_all(b"still here")
    assert await read(lane.broker, 10) == b"still here"


async def test_all_are_ended_when_a_drains_time_is_over(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    about = await it.begin(lane, to_client=b"hi")
    await read(lane.client, 2)
    it.relays.abort_relays()
    assert it.ended == [about]
    with pytest.raises((trio.BrokenResourceError, AssertionError)):
        await read(lane.client, 1)


async def test_a_client_that_reads_nothing_does_not_outlive_its_broker(
    place: Place, narrow_lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's end stands behind the bytes that the client does not take."""
    monkeypatch.setattr(engine_module, "RECHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(manager, "LINGER_S", 0.1)
    config = RelayConfig(user_timeout_ms=500, half_close_timeout_ms=200)
    relay_sockets.set_timeouts(narrow_lane.our_client.socket, config)  # as it inherits them
    it = await place.forwarder(config)
    about = await it.begin(narrow_lane)
    await fill(narrow_lane.broker)
    await narrow_lane.broker.aclose()
    await until(lambda: it.ended == [about])
    await until(lambda: not place.slot.relays)


async def test_the_end_is_logged_with_its_figures(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    with structlog.testing.capture_logs() as logs:
        await it.begin(lane, to_client=b"connected")
        await lane.client.send_all(b"12345")
        await lane.client.send_eof()
        await read_all(lane.broker)
        await lane.broker.aclose()
        await until(lambda: it.ended)
    [entry] = logs
    figures = (entry["client"], entry["principal"], entry["broker"], entry["bytes_to_broker"], entry["bytes_to_client"])
    assert figures == ("192.0.2.7:4000", "alice", "b0:6650", 5, 9)


async def test_an_id_is_dropped_before_it_is_put_again(place: Place) -> None:
    """Or the store would let go of the new one."""
    it = await place.forwarder()
    async with open_lane() as one, open_lane() as two:
        first = await it.begin(one)
        async with busy_channel(it.fd_store) as free_it, trio.open_nursery() as nursery:
            await one.client.aclose()
            await one.broker.aclose()
            await until(lambda: it.ended == [first])
            second = about_relay(target="the second's")

            async def begin() -> None:
                await it.begin(two, about=second)

            nursery.start_soon(begin)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.deadline = trio.current_time() + 5
            await place.settle()
            assert list(place.slot.relays) == [first.id], "it has heard of neither yet"
            free_it()
        assert second.id == first.id
        successor = await kill_and_follow(place)
        assert successor.adopted == [second]
        await two.client.send_all(b"x")
        assert await read(two.broker, 1) == b"x"


async def kill_and_follow(place: Place) -> Forwarder:
    await place.forwarders[-1].kill()
    return await place.forwarder()


# ---- counters


async def test_live_relays_are_counted_and_stay_counted(place: Place, lane: Lane) -> None:
    it = await place.forwarder()
    await it.begin(lane, to_broker=b"held", to_client=b"hello")
    assert await read(lane.broker, 4) == b"held"
    assert await read(lane.client, 5) == b"hello"
    assert (it.moved("to_broker"), it.moved("to_client")) == (4, 5)
    await lane.client.aclose()
    await lane.broker.aclose()
    await until(lambda: it.ended)
    assert (it.moved("to_broker"), it.moved("to_client")) == (4, 5)
    assert it.operations("to_client") == 1
    async with open_lane() as another:
        await it.begin(another)
        assert (it.moved("to_broker"), it.moved("to_client")) == (4, 5)


# ---- through user space


def test_this_kernel_splices() -> None:
    assert splice_works()


@pytest.fixture
def _no_splice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "splice", refuse)
        yield


@pytest.mark.usefixtures("_no_splice")
async def test_where_the_kernel_refuses_all_goes_through_user_space(nursery: trio.Nursery, lane: Lane) -> None:
    ended: list[StoredRelay] = []
    with structlog.testing.capture_logs() as logs:
        through = new_relays(nursery, ended.append)
        nursery.start_soon(through.run)
        await trio.testing.wait_all_tasks_blocked()
    [entry] = logs
    assert "refuses to splice" in entry["event"]
    registry = CollectorRegistry()
    registry.register(through)
    about = about_relay()
    await through.start_relay(
        RelayStart(lane.our_client, lane.our_broker, about, first_to_broker=b"a ", config=RelayConfig())
    )
    await lane.client.send_all(b"slower")
    assert await read(lane.broker, 8) == b"a slower"
    await until(lambda: value(registry, "pulsar_proxy_binary_bytes_total", "to_broker") == 8)
    assert through.in_flight.count == 1
    await lane.client.aclose()
    assert await read_all(lane.broker) == b""
    await lane.broker.aclose()
    await until(lambda: ended == [about])
    assert through.in_flight.count == 0
    assert value(registry, "pulsar_proxy_binary_bytes_total", "to_broker") == 8
    assert value(registry, "pulsar_proxy_binary_ops_total", "to_broker") == 2


SIDES = pytest.mark.parametrize("sides", ["client", "broker", "both"])


@pytest.mark.conforms("pip-1.23", "pip-1.25", "pip-1.26")
@SIDES
async def test_tls_on_any_side_goes_through_user_space(
    place: Place, lane: Lane, certificates: Contexts, sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would move the records as they are: never. The store is told nothing: it could keep no keys."""
    monkeypatch.setattr(manager.SplicedRelayStarter, "start_relay", None)
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    about = await tls.begin(it, to_broker=b"held ", to_client=b"connected ")
    await tls.client.send_all(b"from the client")
    await tls.broker.send_all(b"from the broker")
    assert await read(tls.broker, 20) == b"held from the client"
    assert await read(tls.client, 25) == b"connected from the broker"
    await until(lambda: (it.moved("to_broker"), it.moved("to_client")) == (20, 25))
    assert it.relays.in_flight.count == 1
    assert it.fd_store.said == []
    await place.settle()
    assert not place.slot.relays
    await tls.client.send_eof()
    await tls.broker.send_eof()
    assert await read_all(tls.client) == await read_all(tls.broker) == b""
    await until(lambda: it.ended == [about])
    assert it.relays.in_flight.count == 0
    assert (it.moved("to_broker"), it.moved("to_client")) == (20, 25)


@SIDES
async def test_frames_are_followed_through_tls(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, certificates: Contexts, sides: str, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """From the first byte on, wherever it is when the relay begins."""
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    frame, back = send_frame(b"there"), message_frame(b"back")
    await tls.client.send_all(frame[20:] + frame)
    await tls.broker.send_all(back[20:] + back)
    await tls.begin(
        it,
        to_broker=frame[:20],
        to_client=back[:20],
        session=session(now, reauthenticator, counts_messages=True),
    )
    await expect(tls.broker, frame * 2)
    await expect(tls.client, back * 2)
    now.s += 90
    it.relays.reauthentication.send_due_challenges()
    await expect(tls.client, CHALLENGE)
    await tls.client.send_all(frame + answer() + frame)
    await expect(tls.broker, frame * 2)
    await until(lambda: reauthenticator.given)
    assert (it.messages("alice", "to_broker"), it.messages("alice", "to_client")) == (4, 2)
    await tls.client.send_eof()
    await tls.broker.send_eof()
    assert await read_all(tls.client) == await read_all(tls.broker) == b""
    await until(lambda: it.ended)


@SIDES
async def test_much_both_ways_through_tls(place: Place, lane: Lane, certificates: Contexts, sides: str) -> None:
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    await tls.begin(it)
    there, back = os.urandom(2_000_003), os.urandom(2_000_003)
    found: dict[str, bytes] = {}

    async def receive(name: str, stream: trio.abc.HalfCloseableStream) -> None:
        found[name] = await read_all(stream)

    async def send(stream: trio.abc.HalfCloseableStream, data: bytes) -> None:
        await stream.send_all(data)
        await stream.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, tls.client, there)
        nursery.start_soon(send, tls.broker, back)
        nursery.start_soon(receive, "broker", tls.broker)
        nursery.start_soon(receive, "client", tls.client)
    assert found == {"broker": there, "client": back}
    await until(lambda: it.ended)


@SIDES
@pytest.mark.parametrize("first", ["client", "broker"])
async def test_a_half_closed_relay_of_tls_goes_on(
    place: Place, lane: Lane, certificates: Contexts, sides: str, first: str
) -> None:
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    await tls.begin(it)
    one, other = (tls.client, tls.broker) if first == "client" else (tls.broker, tls.client)
    await one.send_all(b"last words")
    await one.send_eof()
    assert await read_all(other) == b"last words"
    answer = os.urandom(300_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.send_all, answer)
        assert await read(one, 300_000) == answer
    assert not it.ended
    await other.send_eof()
    assert await read_all(one) == b""
    await until(lambda: it.ended)


async def test_bytes_of_a_tls_client_are_delivered_after_the_broker_half_closes(
    place: Place, narrow_lane: Lane, certificates: Contexts
) -> None:
    """The broker reads slowly: it still receives what the proxy holds of the client's bytes."""
    it = await place.forwarder()
    tls = await open_tls(narrow_lane, certificates, "client")
    await tls.begin(it)
    data = os.urandom(400_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.client.send_all, data)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await tls.broker.send_eof()
        assert await read_all(tls.client) == b""
        assert await read(tls.broker, 400_000) == data


@pytest.mark.usefixtures("short_linger")
@pytest.mark.parametrize("sides", ["client", "broker"])
@pytest.mark.parametrize("who", ["client", "broker"])
async def test_a_reset_ends_a_relay_of_tls(
    place: Place, lane: Lane, certificates: Contexts, sides: str, who: str
) -> None:
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    await tls.begin(it)
    gone, left = (lane.client, tls.broker) if who == "client" else (lane.broker, tls.client)
    reset(gone)
    assert await read_all(left) == b""
    await left.aclose()
    await until(lambda: it.ended)
    assert it.relays.in_flight.count == 0


@pytest.mark.usefixtures("short_linger")
async def test_a_corrupt_record_ends_the_relay_and_nothing_else(
    place: Place, lane: Lane, certificates: Contexts
) -> None:
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, "client")
    await tls.begin(it)
    await lane.client.send_all(b"no record of TLS at all, and no Pulsar either")
    assert await read_all(tls.broker) == b"", "raw bytes never pass"
    await tls.broker.aclose()
    await lane.client.aclose()
    await until(lambda: it.ended)
    async with open_lane() as another:
        await it.begin(another, to_client=b"welcome")
        assert await read(another.client, 7) == b"welcome"


@SIDES
async def test_a_reader_that_is_slow_bounds_what_a_relay_of_tls_takes(
    place: Place, narrow_lane: Lane, certificates: Contexts, sides: str
) -> None:
    it = await place.forwarder()
    tls = await open_tls(narrow_lane, certificates, sides)
    await tls.begin(it)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await tls.broker.send_all(bytes(16384))
            sent += 16384

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert sent < 2_000_000
        before = sent
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert sent == before, "no peer reads, so nothing more is taken"
        await tls.client.send_all(b"the other way is free")
        assert await read(tls.broker, 21) == b"the other way is free"
        nursery.cancel_scope.cancel()


@SIDES
async def test_the_sockets_below_tls_are_tuned(place: Place, lane: Lane, certificates: Contexts, sides: str) -> None:
    it = await place.forwarder(RelayConfig(keep_alive_idle_ms=7000, user_timeout_ms=9000))
    tls = await open_tls(lane, certificates, sides)
    await tls.begin(it)
    if lane.our_broker.socket.fileno() >= 0:
        assert options(lane.our_broker.socket)[2:6] == [7, 10, 6, 9000]
    for stream in (lane.our_client, lane.our_broker):
        if stream.socket.fileno() >= 0:
            assert options(stream.socket)[-1] == relay_sockets.NOT_SENT_BYTES_MAX


async def test_a_tls_client_that_is_gone_before_its_relay(place: Place, lane: Lane, certificates: Contexts) -> None:
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, "client")
    lane.our_client.socket.close()
    with pytest.raises(RelayStartFailed, match="cannot begin"):
        await tls.begin(it)
    assert it.relays.in_flight.count == 0
    async with open_lane() as another:
        assert (await it.begin(another)).id == 1, "its row is free again"


@SIDES
@pytest.mark.parametrize("how", ["leave", "kill"])
async def test_a_relay_of_tls_ends_with_its_process(
    place: Place, lane: Lane, certificates: Contexts, sides: str, how: str
) -> None:
    """Its keys are nowhere else. A plain one beside it goes on with the successor."""
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, sides)
    await tls.begin(it)
    async with open_lane() as plain:
        await it.begin(plain)
        await (it.leave() if how == "leave" else it.kill())
        it.fd_store.close_all()
        assert await read_all(tls.client) == await read_all(tls.broker) == b""
        successor = await place.forwarder()
        assert len(successor.adopted) == 1
        await plain.client.send_all(b"still here")
        assert await read(plain.broker, 10) == b"still here"


async def test_a_relay_of_tls_is_served_to_the_end_of_a_drain(place: Place, lane: Lane, certificates: Contexts) -> None:
    """A hand-over leaves it where it is; its rows stay its own, and the successor tells of its bytes."""
    it = await place.forwarder()
    tls = await open_tls(lane, certificates, "client")
    await tls.begin(it, to_client=b"connected")
    assert await read(tls.client, 9) == b"connected"
    await until(lambda: it.moved("to_client") == 9)
    await it.relays.hand_over_relays()
    successor = await place.forwarder()
    assert successor.moved("to_client") == 9
    assert it.relays.in_flight.count == 1
    await tls.client.send_all(b"still here")
    assert await read(tls.broker, 10) == b"still here"
    with pytest.raises(RelayStartFailed):
        async with open_lane() as another:
            await (await open_tls(another, certificates, "client")).begin(it)
    async with open_lane() as another:
        assert (await successor.begin(another)).id == 2
        await tls.client.aclose()
        await tls.broker.aclose()
        await until(lambda: not it.relays.in_flight.count)
        await another.client.send_all(b"not disturbed")
        assert await read(another.broker, 13) == b"not disturbed"


async def test_without_crash_safety_nothing_is_kept(nursery: trio.Nursery, lane: Lane) -> None:
    ended: list[StoredRelay] = []
    relays = new_relays(nursery, ended.append)
    nursery.start_soon(relays.run)
    await relays.start_relay(
        RelayStart(
            lane.our_client,
            lane.our_broker,
            about_relay(),
            first_to_client=b"connected",
            config=RelayConfig(),
        )
    )
    assert await read(lane.client, 9) == b"connected"
    await lane.client.aclose()
    await lane.broker.aclose()
    await until(lambda: ended)
