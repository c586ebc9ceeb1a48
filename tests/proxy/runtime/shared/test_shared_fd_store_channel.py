"""proxy.runtime.shared.fd_store_channel: whole messages with their descriptors, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

from proto.rpc_pb2 import StoredRelay, StoreMessage
from proxy.runtime.shared.fd_store_channel import (
    DESCRIPTORS_MAX,
    MESSAGE_BYTES_MAX,
    MessageTooLong,
    StoreChannel,
    StoreLost,
    close_descriptors,
    create_store_sockets,
)

MESSAGE = StoreMessage(dropped_relays=[1, 2, 3])


@pytest.fixture
def ends() -> Iterator[tuple[StoreChannel, StoreChannel]]:
    ours, theirs = create_store_sockets()
    yield StoreChannel(ours), StoreChannel(theirs)
    ours.close()
    theirs.close()


Ends = tuple[StoreChannel, StoreChannel]


def sized(size: int) -> StoreMessage:
    """A message of so many bytes."""
    for length in range(size - 12, size):
        message = StoreMessage(relays=[StoredRelay(principal="x" * length)])
        if message.ByteSize() == size:
            return message
    raise AssertionError("no such size")


def fill(channel: StoreChannel) -> int:
    """Send until there is no room; how many messages."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            channel.send_now(sized(10_000))
            sent += 1
    return sent


async def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    one, other = ends
    for number in range(1, 20):
        await one.send(StoreMessage(dropped_relays=[number]))
    await other.send(MESSAGE)
    for number in range(1, 20):
        assert await other.receive() == (StoreMessage(dropped_relays=[number]), [])
    assert await one.receive() == (MESSAGE, [])


@pytest.mark.parametrize("number", [1, 2, DESCRIPTORS_MAX])
async def test_descriptors_arrive_with_their_message(ends: Ends, number: int) -> None:
    one, other = ends
    reading, writing = os.pipe()
    await one.send(MESSAGE, [writing] * number)
    await one.send(StoreMessage(complete=True))
    os.close(writing)
    received = await other.receive()
    assert received is not None
    message, given = received
    assert (message, len(given)) == (MESSAGE, number)
    assert await other.receive() == (StoreMessage(complete=True), [])
    for descriptor in given:
        assert not os.get_inheritable(descriptor)
        os.write(descriptor, b"x")
    close_descriptors(given)
    assert os.read(reading, 1000) == b"x" * number
    assert os.read(reading, 1) == b"", "no copy is left anywhere"
    os.close(reading)


async def test_the_largest_message_with_the_most_descriptors(ends: Ends) -> None:
    one, other = ends
    message = sized(MESSAGE_BYTES_MAX)
    await one.send(message, [0] * DESCRIPTORS_MAX)
    received = await other.receive()
    assert received is not None
    assert received[0] == message
    close_descriptors(received[1])


async def test_a_message_above_the_limits_is_not_sent(ends: Ends) -> None:
    one, other = ends
    with pytest.raises(MessageTooLong):
        await one.send(sized(MESSAGE_BYTES_MAX + 1))
    with pytest.raises(MessageTooLong, match=f"{DESCRIPTORS_MAX + 1} descriptors"):
        one.send_now(MESSAGE, [0] * (DESCRIPTORS_MAX + 1))
    await one.send(MESSAGE)
    assert await other.receive() == (MESSAGE, [])


async def test_a_message_is_received_after_its_sender_has_closed(ends: Ends) -> None:
    one, other = ends
    reading, writing = os.pipe()
    one.send_now(MESSAGE, [reading])
    one.close()
    one.close()
    os.close(reading)
    received = await other.receive()
    assert received is not None
    os.write(writing, b"still open")
    assert os.read(received[1][0], 10) == b"still open"
    assert await other.receive() is None
    assert await other.receive() is None
    close_descriptors([*received[1], writing])


async def test_a_send_to_a_closed_channel_raises_store_lost(ends: Ends) -> None:
    one, other = ends
    other.close()
    with pytest.raises(StoreLost):
        one.send_now(MESSAGE)
    with pytest.raises(StoreLost):
        await one.send(MESSAGE)


async def test_the_other_end_was_closed_with_unread_messages(ends: Ends) -> None:
    """The kernel says that with a reset."""
    one, other = ends
    one.send_now(MESSAGE)
    other.close()
    assert await one.receive() is None


async def test_sending_waits_for_room_in_the_socket(ends: Ends, nursery: trio.Nursery) -> None:
    one, other = ends
    sent = fill(one)
    done = trio.Event()

    async def send() -> None:
        await one.send(MESSAGE)
        done.set()

    nursery.start_soon(send)
    await trio.testing.wait_all_tasks_blocked()
    assert not done.is_set()
    for _ in range(sent):
        received = await other.receive()
        assert received is not None
        assert received[0].ByteSize() == 10_000
    with trio.fail_after(60):
        await done.wait()
    assert await other.receive() == (MESSAGE, [])


async def test_the_other_end_goes_while_it_waits_for_room(ends: Ends, nursery: trio.Nursery) -> None:
    one, other = ends
    fill(one)
    lost = trio.Event()

    async def send() -> None:
        with pytest.raises(StoreLost):
            await one.send(MESSAGE)
        lost.set()

    nursery.start_soon(send)
    await trio.testing.wait_all_tasks_blocked()
    other.close()
    with trio.fail_after(60):
        await lost.wait()


async def test_cancelled_it_was_not_sent(ends: Ends) -> None:
    one, other = ends
    with trio.CancelScope() as scope:
        scope.cancel()
        await one.send(MESSAGE)
    assert scope.cancelled_caught
    with pytest.raises(BlockingIOError):
        other.sock.recv(1)


class TroubledSocket:
    """A socket whose sendmsg fails first."""

    def __init__(self, real: socket.socket, *errors: int) -> None:
        self._real = real
        self.errors = list(errors)

    def sendmsg(self, *arguments: Any) -> int:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return self._real.sendmsg(*arguments)


async def test_too_many_descriptors_on_their_way(ends: Ends, autojump_clock: trio.testing.MockClock) -> None:
    """The kernel bounds them for each user; the supervisor only has to read."""
    one, other = ends
    troubled = TroubledSocket(one.sock, *[errno.ETOOMANYREFS] * 3)
    one.sock = troubled  # type: ignore[assignment]
    await one.send(MESSAGE)
    assert troubled.errors == []
    assert trio.current_time() > 0
    assert await other.receive() == (MESSAGE, [])


async def test_other_errors_are_the_senders(ends: Ends) -> None:
    one, _ = ends
    one.sock = TroubledSocket(one.sock, errno.ENOBUFS)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No buffer space"):
        await one.send(MESSAGE)


async def test_a_message_waits_for_its_reader(ends: Ends, nursery: trio.Nursery) -> None:
    one, other = ends
    found: list[Any] = []

    async def receive() -> None:
        found.append(await other.receive())

    nursery.start_soon(receive)
    await trio.testing.wait_all_tasks_blocked()
    assert found == []
    await one.send(MESSAGE)
    await trio.testing.wait_all_tasks_blocked()
    assert found == [(MESSAGE, [])]


async def test_messages_that_follow_are_gathered_before_the_first_is_received(
    ends: Ends, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    one, other = ends
    found: list[Any] = []

    async def receive() -> None:
        found.append(await other.receive(gather_s=1000))

    nursery.start_soon(receive)
    await trio.sleep(5)
    await one.send(MESSAGE)
    await trio.sleep(999)
    assert found == []
    await trio.sleep(2)
    assert found == [(MESSAGE, [])]


@pytest.mark.parametrize("closes", ["before the message is awaited", "while others are gathered"])
async def test_nothing_is_gathered_once_the_other_end_is_closed(ends: Ends, closes: str, nursery: trio.Nursery) -> None:
    one, other = ends
    found: list[Any] = []

    async def receive_all() -> None:
        while (received := await other.receive(gather_s=1_000_000)) is not None:
            found.append(received)
        found.append(None)

    nursery.start_soon(receive_all)
    await trio.testing.wait_all_tasks_blocked()
    await one.send(MESSAGE)
    if closes == "while others are gathered":
        await trio.testing.wait_all_tasks_blocked()
        assert found == []
    one.close()
    await trio.testing.wait_all_tasks_blocked()
    assert found == [(MESSAGE, []), None]
    other.close()


async def test_nothing_is_lost_to_a_cancelled_reader(ends: Ends) -> None:
    one, other = ends
    await one.send(MESSAGE)
    with trio.CancelScope() as scope:
        scope.cancel()
        await other.receive()
    assert scope.cancelled_caught
    assert await other.receive() == (MESSAGE, [])


async def test_no_room_for_descriptors_here(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel cannot hand over is missing; the rest is whole."""
    one, other = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await one.send(MESSAGE, [0, 0, 0])
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        received = await other.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_descriptors(spare)
    assert received is not None
    assert received[0] == MESSAGE
    assert len(received[1]) < 3
    close_descriptors(received[1])
