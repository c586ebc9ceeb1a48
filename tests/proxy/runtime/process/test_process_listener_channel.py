"""proxy.runtime.process.listener_channel: both ends, over a real pair of sockets."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import trio

from proxy.config.types import HTTP_LISTENERS_MAX
from proxy.runtime.process.listener_channel import (
    LISTENERS_MAX,
    pass_listeners,
    request_listeners,
    wait_for_request,
)


def same_file(one: socket.socket, other: socket.socket) -> bool:
    return os.path.sameopenfile(one.fileno(), other.fileno())


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("count", [0, 1, LISTENERS_MAX])
async def test_listeners_come_with_their_numbers(ends: Ends, count: int) -> None:
    """After an exec one of them may be missing: the others keep their places in the configuration."""
    ours, theirs = ends
    with contextlib.ExitStack() as stack:
        bound = {2 * index: stack.enter_context(socket.socket()) for index in range(count)}
        received: dict[int, socket.socket] = {}

        async def ask() -> None:
            received.update(await request_listeners(theirs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            assert await wait_for_request(ours)
            await pass_listeners(ours, {number: sock.fileno() for number, sock in bound.items()})
        assert received.keys() == bound.keys()
        for number, sock in received.items():
            stack.enter_context(sock)
            assert same_file(sock, bound[number])
            assert not sock.getblocking()
            assert not sock.get_inheritable()


async def test_a_worker_that_has_gone_gets_none(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    assert not await wait_for_request(ours)


@pytest.mark.parametrize("answer", [b"", b"\x01", b"\x02\x00\x01"])
async def test_an_answer_without_what_it_promises(ends: Ends, answer: bytes) -> None:
    ours, theirs = ends
    if answer:
        ours.send(answer)
    else:
        ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionAbortedError, match="no listener"):
        await request_listeners(theirs)


def test_all_listeners_of_a_configuration_fit_into_one_message() -> None:
    assert HTTP_LISTENERS_MAX == LISTENERS_MAX
