"""proxy.forwarder.relay.fd_store_client: what is said to the fd store, in which order, and what comes from it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from relay_fakes import about_relay, descriptors, disabled_fd_store

from proto.rpc_pb2 import StoredPipe, StoreMessage
from proxy.forwarder.relay import fd_store_client
from proxy.forwarder.relay.fd_store_client import FdStoreClient, RelayHandover
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES, Pipe
from proxy.runtime.shared.fd_store_channel import (
    DESCRIPTORS_MAX,
    RECORD_BYTES_MAX,
    MessageTooLong,
    StoreChannel,
    StoreLost,
    close_descriptors,
    create_store_sockets,
)
from proxy.runtime.shared.relay_table import create_table


class Channel:
    """A client, and the store's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = create_store_sockets()
        self.store = StoreChannel(ours)
        self.fd_store = FdStoreClient(theirs, crash_safe=True)
        self.sock = theirs

    async def receive(self) -> StoreMessage:
        """The next message; its descriptors must be as many as it speaks of."""
        with trio.fail_after(60):
            received = await self.store.receive()
        assert received is not None, "the end of the channel"
        message, given = received
        assert len(given) == 2 * (len(message.relays) + len(message.pipes))
        close_descriptors(given)
        return message

    async def expect_nothing(self) -> bool:
        with trio.move_on_after(0.02) as scope:
            await self.store.receive()
        return scope.cancelled_caught


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    channel = Channel()
    yield channel
    channel.store.close()
    channel.sock.close()


@pytest.fixture
async def two_ends() -> AsyncIterator[tuple[int, int]]:
    one, other = socket.socketpair()
    with one, other:
        yield one.fileno(), other.fileno()


def some_pipe(number: int, ends: tuple[int, int]) -> Pipe:
    reading, writing = os.pipe()
    pipe = Pipe(number, reading, writing, SMALL_PIPE_BYTES)
    pipe.close()
    pipe.read_end, pipe.write_end = ends
    return pipe


# ---- what is said


async def test_a_relay_is_put_with_its_sockets(channel: Channel, two_ends: tuple[int, int]) -> None:
    about = about_relay(id=7)
    await channel.fd_store.store_relay(about, *two_ends)
    assert await channel.receive() == StoreMessage(relays=[about])


async def test_pipes_are_put_at_once(channel: Channel) -> None:
    pipes = [Pipe.create(number, SMALL_PIPE_BYTES) for number in (3, 4)]
    channel.fd_store.store_pipes(pipes)
    expected = [StoredPipe(id=number, wanted_bytes=SMALL_PIPE_BYTES) for number in (3, 4)]
    assert await channel.receive() == StoreMessage(pipes=expected)
    for pipe in pipes:
        pipe.close()


async def test_pipes_wait_for_room_or_are_not_used(channel: Channel) -> None:
    pipe = Pipe.create(3, SMALL_PIPE_BYTES)
    with contextlib.suppress(BlockingIOError):
        while True:
            channel.fd_store.store_pipes([pipe])
    with pytest.raises(BlockingIOError):
        channel.fd_store.store_pipes([pipe])
    channel.store.close()
    with pytest.raises(BlockingIOError):
        channel.fd_store.store_pipes([pipe])
    pipe.close()


async def test_drops_are_sent_before_a_new_relay_is_stored(channel: Channel, two_ends: tuple[int, int]) -> None:
    """The new relay may have the id of a dropped one."""
    channel.fd_store.drop_relay(7)
    channel.fd_store.drop_pipe(some_pipe(9, two_ends))
    await channel.fd_store.store_relay(about_relay(id=7), *two_ends)
    message = await channel.receive()  # of which the store looks at the drops first
    assert (message.dropped_relays, message.dropped_pipes) == ([7], [9])
    assert [relay.id for relay in message.relays] == [7]
    assert await channel.expect_nothing()


async def test_drops_are_sent_first_where_they_are_too_many_for_one_message(
    channel: Channel, two_ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_store_client, "DROPPED_PER_MESSAGE_MAX", 2)
    for number in (7, 8, 9):
        channel.fd_store.drop_relay(number)
    assert not channel.fd_store.store_relay_now(about_relay(id=7), *two_ends)
    await channel.fd_store.store_relay(about_relay(id=7), *two_ends)
    assert [list((await channel.receive()).dropped_relays) for _ in range(2)] == [[7, 8], [9]]
    assert [relay.id for relay in (await channel.receive()).relays] == [7]


async def test_drops_are_told_by_themselves_many_at_a_time(
    channel: Channel, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_store_client, "DROPPED_PER_MESSAGE_MAX", 100)
    nursery.start_soon(channel.fd_store.run_sender)
    for number in range(1, 251):
        channel.fd_store.drop_relay(number)
    batches = [list((await channel.receive()).dropped_relays) for _ in range(3)]
    assert [len(batch) for batch in batches] == [100, 100, 50]
    assert [*itertools.chain(*batches)] == list(range(1, 251))
    assert await channel.expect_nothing()
    channel.fd_store.drop_relay(300)
    assert await channel.receive() == StoreMessage(dropped_relays=[300])


async def test_drops_made_while_the_channel_is_full_are_all_sent(
    channel: Channel, nursery: trio.Nursery, two_ends: tuple[int, int]
) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            StoreChannel(channel.sock).send_now(StoreMessage(complete=True))
    nursery.start_soon(channel.fd_store.run_sender)
    channel.fd_store.drop_relay(1)
    await trio.testing.wait_all_tasks_blocked()
    channel.fd_store.drop_relay(2)
    channel.fd_store.drop_pipe(some_pipe(3, two_ends))
    relays: list[int] = []
    pipes: list[int] = []
    while len(relays) < 2 or not pipes:
        message = await channel.receive()
        relays += message.dropped_relays
        pipes += message.dropped_pipes
    assert (relays, pipes) == ([1, 2], [3])


async def test_the_most_that_one_message_may_drop_fits(channel: Channel, two_ends: tuple[int, int]) -> None:
    for number in range(fd_store_client.DROPPED_PER_MESSAGE_MAX):
        channel.fd_store.drop_relay((1 << 32) - 1 - number)
        pipe = some_pipe((1 << 64) - 1 - number, two_ends)
        channel.fd_store.drop_pipe(pipe)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.fd_store.close)
            assert len((await channel.receive()).dropped_relays) == fd_store_client.DROPPED_PER_MESSAGE_MAX


async def test_its_end_says_what_is_left_to_say(channel: Channel) -> None:
    channel.fd_store.drop_relay(5)
    await channel.fd_store.close()
    assert await channel.receive() == StoreMessage(dropped_relays=[5])
    assert await channel.store.receive() is None


async def test_the_store_is_gone(channel: Channel, two_ends: tuple[int, int]) -> None:
    channel.store.close()
    with pytest.raises(StoreLost):
        await channel.fd_store.store_relay(about_relay(id=1), *two_ends)
    channel.fd_store.drop_relay(1)
    with trio.fail_after(60):
        await channel.fd_store.run_sender()
        await channel.fd_store.close()


async def test_without_crash_safety_nothing_is_said(two_ends: tuple[int, int]) -> None:
    fd_store = disabled_fd_store()
    await fd_store.store_relay(about_relay(id=1), *two_ends)
    fd_store.store_pipes([some_pipe(1, two_ends)])
    fd_store.drop_relay(1)
    fd_store.drop_pipe(some_pipe(1, two_ends))
    with trio.move_on_after(0.02):
        await fd_store.run_sender()


# ---- what comes


async def test_an_inheritance_in_several_messages(channel: Channel, two_ends: tuple[int, int]) -> None:
    table = create_table()
    messages = [
        (StoreMessage(table=True, listeners=1), (table, two_ends[0])),
        (StoreMessage(pipes=[StoredPipe(id=1, wanted_bytes=4096), StoredPipe(id=2, wanted_bytes=65536)]), 2),
        (StoreMessage(relays=[about_relay(id=5), about_relay(id=6)]), 2),
        (StoreMessage(relays=[about_relay(id=9)]), 1),
        (StoreMessage(complete=True), ()),
    ]
    made = []
    for message, ends in messages:
        if isinstance(ends, int):
            pairs = [end for _ in range(ends) for end in os.pipe()]
            made += pairs
            await channel.store.send(message, pairs)
        else:
            await channel.store.send(message, ends)
    before = descriptors()
    left = await channel.fd_store.receive_handover()
    assert left.complete
    assert [kept.record.id for kept in left.relays] == [5, 6, 9]
    assert [(pipe.id, pipe.wanted_bytes) for pipe in left.pipes] == [(1, 4096), (2, 65536)]
    assert os.fstat(left.table).st_ino == os.fstat(table).st_ino
    assert len(left.listeners) == 1
    given = [left.table, *left.listeners]
    given += [end for kept in left.relays for end in (kept.client, kept.broker)]
    given += [end for pipe in left.pipes for end in (pipe.read_end, pipe.write_end)]
    assert len(set(given)) == len(given) == descriptors() - before
    for kept in left.relays:
        os.write(kept.broker, b"x")
        assert os.read(kept.client, 1) == b"x", "client first, then broker"
    for pipe in left.pipes:
        os.write(pipe.write_end, b"12")
        assert pipe.queued_bytes() == 2
    close_descriptors([*given, *made, table])


async def test_nothing_but_listeners(channel: Channel, two_ends: tuple[int, int]) -> None:
    await channel.store.send(StoreMessage(listeners=2, complete=True), two_ends)
    left = await channel.fd_store.receive_handover()
    assert (left.table, left.pipes, left.relays) == (-1, [], [])
    assert len(left.listeners) == 2
    close_descriptors(left.listeners)


async def test_the_line_ends_before_all_was_said(channel: Channel) -> None:
    await channel.store.send(StoreMessage(relays=[]), ())
    channel.store.close()
    with pytest.raises(StoreLost):
        await channel.fd_store.receive_handover()


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (StoreMessage(table=True), 0),
        (StoreMessage(table=True, listeners=1), 1),
        (StoreMessage(relays=[about_relay(id=1), about_relay(id=2)]), 3),
        (StoreMessage(pipes=[StoredPipe(id=1, wanted_bytes=4096)]), 0),
        (StoreMessage(complete=True), 1),
    ],
)
def test_descriptors_that_are_missing(message: StoreMessage, given: int) -> None:
    """This process may open no more files: none of them is mistaken for another, and none stays open."""
    before = descriptors()
    ends = [os.open("/dev/null", os.O_RDONLY) for _ in range(given)]
    left = RelayHandover()
    with pytest.raises(StoreLost, match=r"raise ulimit -n"):
        left.add_message(message, ends)
    assert (left.table, left.pipes, left.relays, left.listeners) == (-1, [], [], [])
    assert descriptors() == before


def test_a_reserve_fits_one_message() -> None:
    assert DESCRIPTORS_MAX >= 2 * 16


async def test_a_relay_record_above_the_size_limit_is_not_stored(channel: Channel, two_ends: tuple[int, int]) -> None:
    """Security: the supervisor keeps the record of every relay, and much of it was sent by the client."""
    about = about_relay()
    about.principal = "x" * RECORD_BYTES_MAX
    with pytest.raises(MessageTooLong, match=str(RECORD_BYTES_MAX)):
        await channel.fd_store.store_relay(about, *two_ends)
    assert await channel.expect_nothing()


async def test_tables_of_client_addresses(channel: Channel, nursery: trio.Nursery) -> None:
    heard: list[tuple[int, int]] = []
    nursery.start_soon(channel.fd_store.run_receiver, lambda forwarder, table: heard.append((forwarder, table)))
    table = create_table()
    await channel.fd_store.publish_address_table(table)
    received = await channel.store.receive()
    assert received is not None
    message, [copy] = received
    assert list(message.address_tables) == [0]
    await channel.store.send(StoreMessage(address_tables=[3]), (copy,))
    await trio.testing.wait_all_tasks_blocked()
    [(forwarder, got)] = heard
    assert forwarder == 3
    close_descriptors((copy, got))
    await channel.fd_store.close()
    await channel.fd_store.publish_address_table(create_table())
