"""What hostile clients and brokers can make the HTTP worker do: turns that they take from others, and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import h11
import trio
from http_fakes import Held, Received, Setup, UpstreamConnection, pair

from proxy.http.exchange import KEPT_PORTION_BYTES_MIN, RequestBody
from proxy.http.messages import CHUNKS_MAX, PORTION_BYTES, ChunkedBody, MessageStream, SizedBody
from proxy.runtime.fairness.byte_budget import ByteBudget, ByteReservation

GET = b"GET /admin/v2/tenants HTTP/1.1\r\nHost: x\r\n\r\n"


async def longest_turn(progress: Callable[[], int], end: int) -> int:
    """How far something goes, at most, while another task waits for its turn."""
    seen = [progress()]
    while seen[-1] < end:
        await trio.lowlevel.checkpoint()
        seen.append(progress())
    return max(after - before for before, after in itertools.pairwise(seen))


async def test_pipelined_requests_leave_others_their_turns(setup: Setup) -> None:
    """64 KiB of them, all there already, would otherwise hold the worker for a second."""
    client, count = setup.connect(), 100
    await client.send(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n" * count)
    assert await longest_turn(lambda: len(setup.parts.records), count) <= 2


async def test_tiny_chunks_leave_others_their_turns() -> None:
    ours, theirs = pair()
    wire, http = MessageStream(ours, head_bytes_max=8192), h11.Connection(h11.SERVER)
    http.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    http.next_event()
    body, count = ChunkedBody(wire, http), 10 * CHUNKS_MAX
    wire.unread = b"1\r\na\r\n" * count + b"0\r\n\r\nnext"

    async def receive() -> None:
        while not body.ended:
            await body.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        assert await longest_turn(lambda: body.size_bytes, count) <= 2 * CHUNKS_MAX
    assert (body.size_bytes, wire.unread) == (count, b"next")
    ours.close_now()
    theirs.close_now()


async def test_a_body_in_tiny_portions_is_kept_in_larger_ones() -> None:
    """An object for each two bytes would take twenty times the memory that the budget counts."""
    ours, theirs = pair()
    wire, count = MessageStream(ours, head_bytes_max=8192), 2 * KEPT_PORTION_BYTES_MIN
    reservation = ByteReservation(ByteBudget(2**20), "x")
    source = SizedBody(wire, 2 * count)
    body = RequestBody(wire, source, reservation=reservation, keep_max=2**20, expects_continue=False)
    for _ in range(count):
        wire.unread = b"ab"
        await body.receive()
    assert body.ended
    assert b"".join(body.kept) == b"ab" * count
    assert len(body.kept) == 4
    assert reservation.size_bytes == 2 * count
    ours.close_now()
    theirs.close_now()


async def test_a_connection_of_before_a_reload_serves_no_further_request(setup: Setup) -> None:
    """It may have been opened with an authority that is trusted no longer."""
    setup.upstream.behave = held = Held()
    client = setup.connect()
    await client.send(GET)
    await held.asked.wait()
    setup.pool.set_dial(setup.parts.dial)
    held.goes_on.set()
    assert (await client.answer()).status == 200
    await client.send(GET)
    assert (await client.answer()).status == 200
    assert [one.connection for one in setup.upstream.requests] == [0, 1]


async def test_a_client_that_sends_all_of_its_body_first_gets_the_early_response(setup: Setup) -> None:
    client, body = setup.connect(), bytes(16 * 2**20)
    await client.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    await client.send(body)
    assert (await client.answer("POST")).status == 404


def held_bytes(awaited: Any) -> int:
    """How many bytes the frames of a task hold, each object once."""
    held: dict[int, int] = {}
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            held |= {id(one): len(one) for one in frame.f_locals.values() if isinstance(one, bytes)}
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return sum(held.values())


async def test_a_client_that_does_not_read_makes_the_worker_hold_one_portion(setup: Setup) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 2**30)
        while True:
            await connection.send(bytes(PORTION_BYTES))

    setup.upstream.behave = behave
    client = setup.connect()
    await client.send(GET)
    await trio.testing.wait_all_tasks_blocked()
    task = next(one for one in setup.nursery.child_tasks if "HttpConnection" in one.name)
    assert 0 < held_bytes(task.coro) < PORTION_BYTES + 1024
