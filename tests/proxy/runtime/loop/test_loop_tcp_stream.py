"""proxy.runtime.loop.tcp_stream: as Trio's own stream behaves, for one task that sends and one that receives."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from runtime_fakes import tcp_streams

from proxy.runtime.loop.tasks import close_forcefully, close_gracefully
from proxy.runtime.loop.tcp_stream import TcpStream

Pair = tuple[TcpStream, TcpStream]
MUCH = bytes(8 << 20)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one, other = tcp_streams()
    yield one, other
    one.close_now()
    other.close_now()


async def test_bytes_end_and_a_second_end_of_one_direction(pair: Pair, nursery: trio.Nursery) -> None:
    one, other = pair
    nursery.start_soon(one.send_all, MUCH)
    received = 0
    while received < len(MUCH):
        received += len(await other.receive_some())
    await one.send_eof()
    assert await other.receive_some() == b""
    await one.send_eof()  # again


async def test_what_is_sent_arrives_though_it_has_to_wait_for_room(pair: Pair, nursery: trio.Nursery) -> None:
    one, other = pair
    done = trio.Event()

    async def send() -> None:
        await one.send_all(MUCH)
        done.set()

    nursery.start_soon(send)
    await trio.testing.wait_all_tasks_blocked()
    assert not done.is_set(), "more than the kernel takes"
    received = 0
    while received < len(MUCH):
        received += len(await other.receive_some(1 << 20))
    await done.wait()


async def test_room_is_waited_for(pair: Pair, nursery: trio.Nursery) -> None:
    one, other = pair
    await one.wait_send_all_might_not_block()
    nursery.start_soon(one.send_all, MUCH)
    await trio.testing.wait_all_tasks_blocked()
    assert len(await other.receive_some(10)) == 10
    nursery.cancel_scope.cancel()


async def test_the_end_of_one_direction_leaves_the_other(pair: Pair) -> None:
    one, other = pair
    await one.send_eof()
    assert await other.receive_some() == b""
    await other.send_all(b"still")
    assert await one.receive_some() == b"still"


async def test_a_reset_is_a_broken_stream(pair: Pair) -> None:
    one, other = pair
    other.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close_now()
    with pytest.raises(trio.BrokenResourceError):
        await one.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await one.send_all(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await one.send_eof()


@pytest.mark.parametrize("how", ["now", "aclose", "forcefully", "gracefully"])
async def test_a_task_that_waits_is_told_of_the_close(pair: Pair, how: str) -> None:
    _, other = pair
    await other.send_eof()
    seen: list[Exception] = []

    async def receive() -> None:
        try:
            await other.receive_some()
        except trio.ClosedResourceError as error:
            seen.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        match how:
            case "now":
                other.close_now()
            case "aclose":
                await other.aclose()
            case "forcefully":
                await close_forcefully(other)
            case _:
                await close_gracefully(other, linger_s=0)
    assert len(seen) == 1
    other.close_now()  # again
    await other.aclose()
    for use in (other.receive_some, other.send_eof, other.wait_send_all_might_not_block):
        with pytest.raises(trio.ClosedResourceError):
            await use()
    with pytest.raises(trio.ClosedResourceError):
        await other.send_all(b"x")


async def test_each_call_is_a_checkpoint(pair: Pair) -> None:
    one, other = pair
    with trio.testing.assert_checkpoints():
        await one.send_all(b"x")
    with trio.testing.assert_checkpoints():
        await other.receive_some()
    with trio.testing.assert_checkpoints():
        await one.send_eof()
    with trio.testing.assert_checkpoints():
        await one.aclose()


async def test_it_does_not_block_where_another_process_has_made_it_block(pair: Pair) -> None:
    """Security: O_NONBLOCK is the connection's, which a captured process may have, too."""
    one, _other = pair
    os.set_blocking(one.socket.fileno(), True)
    for wait in (one.receive_some, lambda: one.send_all(MUCH)):
        with trio.move_on_after(0.05) as scope:
            await wait()
        assert scope.cancelled_caught
