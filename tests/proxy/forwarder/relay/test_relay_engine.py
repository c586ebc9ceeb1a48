"""proxy.forwarder.relay.engine: bytes through the kernel, over real sockets on loopback.

Splicing is the kernel's, so nothing but sockets can show it; they are pairs within this process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket

import pytest
import structlog.testing
import trio
import trio.testing
from relay_fakes import (
    Engine,
    Lane,
    about_relay,
    descriptors,
    digest_all,
    fill,
    open_lane,
    read,
    read_all,
    reset,
    send_random,
    until,
)

from proxy.forwarder.relay import engine as engine_module
from proxy.forwarder.relay import pipes, splice_pump
from proxy.forwarder.relay import relay as relay_module
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import SplicedRelay
from proxy.runtime.shared.relay_table import OPERATIONS, PIPE, TO_BROKER, TO_CLIENT

# ---- bytes


async def test_both_ways(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane)
    for number in range(50):
        await lane.client.send_all(b"there %d" % number)
        assert await read(lane.broker, len(b"there %d" % number)) == b"there %d" % number
        await lane.broker.send_all(b"back")
        assert await read(lane.client, 4) == b"back"
    assert engine.moved(relay)[TO_CLIENT] == 200
    assert engine.cells(relay, OPERATIONS)[TO_CLIENT] == 50
    assert len(engine.real) == 1


async def test_bytes_read_ahead_are_forwarded_first(engine: Engine, lane: Lane) -> None:
    await lane.client.send_all(b"second")
    engine.open(lane, to_broker=b"first ", to_client=b"connected")
    assert await read(lane.broker, 12) == b"first second"
    assert await read(lane.client, 9) == b"connected"


async def test_first_bytes_as_many_as_there_is_room_for(engine: Engine, lane: Lane) -> None:
    first = os.urandom(pipes.HUGE_PIPE_BYTES)
    relay = engine.open(lane, to_client=first)
    assert await read(lane.client, len(first)) == first
    assert engine.moved(relay) == (0, len(first))


async def test_many_streams_of_random_portions_arrive_whole(engine: Engine) -> None:
    size, lanes = 2 << 20, [Lane.new() for _ in range(8)]

    digests, relays = [], []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for lane in lanes:
                relays.append(engine.open(lane))
                for source, sink in ((lane.client, lane.broker), (lane.broker, lane.client)):
                    sent, received = hashlib.sha256(), hashlib.sha256()
                    digests.append((sent, received))
                    nursery.start_soon(send_random, source, size, 400_000, sent)
                    nursery.start_soon(digest_all, sink, [10, 1000, 1 << 18], received)
    assert all(sent.digest() == received.digest() for sent, received in digests)
    for lane, relay in zip(lanes, relays, strict=True):
        await engine.over(relay)
        assert not relay.broken
        assert engine.moved(relay) == (size, size)
        await lane.close()
    assert len(engine.real) == 0


async def test_many_small_portions_that_came_at_once_are_not_left_behind(engine: Engine, lane: Lane) -> None:
    """However many pieces the source's bytes lie in, and whatever the engine makes of their sizes."""
    lane.our_client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    said = b"".join(b"%d," % number for number in range(3000))
    for piece in said.split(b","):
        await lane.client.send_all(piece + b"," if piece else piece)
    engine.open(lane)
    assert await read(lane.broker, len(said)) == said


async def test_a_busy_relay_leaves_the_others_their_turn(engine: Engine, lane: Lane) -> None:
    engine.real.run_queue.portion_bytes_max = 1000  # many turns
    engine.open(lane)
    data = os.urandom(1 << 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.client.send_all, data)
        assert await read(lane.broker, len(data)) == data


async def test_between_steps_of_another_task_what_has_arrived_moves(engine: Engine, lane: Lane) -> None:
    """While that task does not wait for anything: only the kernel may need its time to deliver."""
    engine.open(lane)
    await trio.testing.wait_all_tasks_blocked()
    for source, sink in ((lane.client, lane.broker), (lane.broker, lane.client)):
        os.write(source.socket.fileno(), b"hello")
        while True:
            engine.real.run_between()
            with contextlib.suppress(BlockingIOError):
                assert os.read(sink.socket.fileno(), 10) == b"hello"
                break


async def test_between_steps_of_another_task_what_is_in_the_run_queue_waits(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as much time as it gets, which the other task needs."""
    monkeypatch.setattr(splice_pump, "FEW_BYTES", 1000)
    engine.real.run_queue.portion_bytes_max = 1000
    relay = engine.open(lane)
    await trio.testing.wait_all_tasks_blocked()
    data = os.urandom(10_000)
    os.write(lane.client.socket.fileno(), data)
    while not relay.to_broker.queued:
        engine.real.run_between()
    for _ in range(10):
        engine.real.run_between()
    assert engine.moved(relay)[TO_BROKER] == 1000
    assert await read(lane.broker, len(data)) == data


async def test_a_receiver_that_does_not_read_stops_the_sender(engine: Engine, narrow_lane: Lane) -> None:
    """Backpressure: what is on its way is bounded by the kernel's buffers, and none of it is in this process."""
    relay = engine.open(narrow_lane)
    sent = await fill(narrow_lane.client)
    assert sent < 8 << 20
    assert engine.cells(relay, PIPE)[TO_BROKER] > 0, "the bytes on their way are in a pipe that the table knows"
    assert engine.cells(relay, PIPE)[TO_CLIENT] == 0
    await narrow_lane.broker.send_all(b"the other way is free")
    assert await read(narrow_lane.client, 21) == b"the other way is free"
    await read(narrow_lane.broker, sent)
    assert engine.moved(relay)[TO_BROKER] == sent
    await until(lambda: engine.cells(relay, PIPE) == (0, 0))


async def test_idle_relays_hold_no_pipe(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane)
    await lane.client.send_all(b"x")
    await read(lane.broker, 1)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert engine.cells(relay, PIPE) == (0, 0)
    assert (relay.to_broker.pipe, relay.to_client.pipe) == (None, None)


async def test_pipes_that_receivers_gave_back_are_lent_again(engine: Engine) -> None:
    """One pipe after the other is stuck, then free: no more are made than were ever stuck at a time."""
    async with open_lane(buffer_bytes=4096) as first, open_lane(buffer_bytes=4096) as second:
        for lane in (first, second):
            engine.open(lane)
        made = 0
        for lane in (first, second, first, second):
            sent = await fill(lane.client, give_up_s=0.03)
            await read(lane.broker, sent)
            made = made or descriptors()
            assert descriptors() <= made


# ---- ends


@pytest.mark.conforms("pip-1.17")
async def test_half_close_both_ways(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane)
    await lane.client.send_all(b"question")
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b"question"
    assert not engine.is_over(relay)
    await lane.broker.send_all(b"answer")
    assert await read(lane.client, 6) == b"answer"
    await lane.broker.send_eof()
    assert await read_all(lane.client) == b""
    await engine.over(relay)
    assert not relay.broken


async def test_the_end_stands_behind_bytes_that_the_sink_takes_late(engine: Engine, narrow_lane: Lane) -> None:
    relay = engine.open(narrow_lane)
    sent = await fill(narrow_lane.client)
    await narrow_lane.client.send_eof()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(await read_all(narrow_lane.broker)) == sent
    await narrow_lane.broker.aclose()
    await engine.over(relay)


@pytest.mark.usefixtures("no_look")
async def test_a_portion_and_the_end_in_one(engine: Engine, lane: Lane) -> None:
    """Both raise a single edge; the end must not be left waiting for another."""
    await lane.client.send_all(b"x")
    await lane.client.send_eof()
    await lane.broker.send_all(b"y")
    await lane.broker.send_eof()
    await trio.sleep(0.01)
    relay = engine.open(lane)
    assert (await read_all(lane.broker), await read_all(lane.client)) == (b"x", b"y")
    await engine.over(relay)
    assert not relay.broken


async def test_bytes_sent_before_a_reset_are_delivered(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane)
    await lane.client.send_all(b"last words")
    assert await read(lane.broker, 4) == b"last"
    reset(lane.client)
    assert await read_all(lane.broker) == b" words"
    await lane.broker.aclose()
    await engine.over(relay)
    assert relay.broken


async def test_a_broken_sink_ends_the_relay(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane, half_close_s=0.1)
    reset(lane.broker)
    with trio.fail_after(60):
        while not engine.is_over(relay):
            try:
                await lane.client.send_all(b"x" * 65536)
            except trio.BrokenResourceError:
                break
            await trio.sleep(0.01)
    await lane.client.aclose()
    await engine.over(relay)
    assert relay.broken
    assert len(engine.real) == 0


async def test_bytes_queued_for_a_broken_sink_are_dropped_and_the_other_direction_is_delivered(
    engine: Engine, narrow_lane: Lane
) -> None:
    relay = engine.open(narrow_lane)
    await fill(narrow_lane.client)
    assert engine.cells(relay, PIPE)[TO_BROKER] > 0
    await narrow_lane.broker.send_all(b"it had said this")
    assert await read(narrow_lane.client, 16) == b"it had said this"
    reset(narrow_lane.broker)
    assert await read_all(narrow_lane.client) == b""
    await narrow_lane.client.aclose()
    await engine.over(relay)
    assert relay.broken
    assert engine.cells(relay, PIPE) == (0, 0)


@pytest.mark.usefixtures("quick_look")
async def test_a_half_closed_relay_without_bytes_ends_after_its_time(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane, half_close_s=0.3)
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b""
    for _ in range(4):
        await trio.sleep(0.1)
        await lane.broker.send_all(b"x")
        assert not engine.is_over(relay), "as long as bytes move"
    await engine.over(relay)
    assert relay.broken
    assert len(engine.real) == 0


async def test_drop_ends_at_once(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane, to_broker=b"never sent")
    engine.real.abort_relay(relay)
    assert engine.is_over(relay)
    engine.real.abort_relay(relay)
    assert len(engine.real) == 0


async def test_a_reset_after_a_half_close_ends_the_relay(engine: Engine, lane: Lane) -> None:
    relay = engine.open(lane)
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b""
    reset(lane.client)
    await engine.over(relay)
    assert len(engine.real) == 0


async def test_all_relays_are_ended_on_demand(engine: Engine, lane: Lane, narrow_lane: Lane) -> None:
    relays = [engine.open(lane), engine.open(narrow_lane)]
    await fill(narrow_lane.client)
    engine.real.abort_relays()
    assert all(engine.is_over(relay) and relay.broken for relay in relays)
    assert len(engine.real) == 0
    assert engine.cells(relays[1], PIPE) == (0, 0), "what was on its way is forgotten"


async def test_whatever_ends_the_engine_leaves_relays_as_they_are(lane: Lane, narrow_lane: Lane) -> None:
    """A defect anywhere in the process cancels everything: a successor must find the sockets open."""
    engine = Engine()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.real.run)
        relays = [engine.open(lane), engine.open(narrow_lane)]
        await fill(narrow_lane.client)
        nursery.cancel_scope.cancel()
    assert not any(engine.is_over(relay) for relay in relays)
    assert engine.cells(relays[1], PIPE)[0], "its bytes are still bound to it"
    await lane.client.send_all(b"to a successor")
    assert await read(lane.our_client, 14) == b"to a successor"
    engine.real.close_pipes(relays)


async def test_no_bytes_are_forgotten_before_their_sink_is_shut(
    engine: Engine, narrow_lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, its successor would go on behind a hole."""
    relay = engine.open(narrow_lane)
    await fill(narrow_lane.client)
    bound = []
    real = relay_module.shut_down

    def watched(descriptor: int, how: int) -> None:
        bound.append(engine.cells(relay, PIPE)[0])
        real(descriptor, how)

    monkeypatch.setattr(relay_module, "shut_down", watched)
    engine.real.abort_relay(relay)
    assert len(bound) == 2
    assert all(bound)


@pytest.mark.usefixtures("quick_look")
async def test_the_pipe_of_a_receiver_that_does_not_read_shrinks_and_keeps_its_bytes(engine: Engine) -> None:
    async with open_lane(buffer_bytes=4096) as stuck:
        relay = engine.open(stuck)
        sent = await fill(stuck.client)
        pipe = relay.to_broker.pipe
        assert pipe is not None
        await until(lambda: pipe.size_bytes < pipes.HUGE_PIPE_BYTES)
        assert relay.to_broker.pipe is pipe
        assert engine.cells(relay, PIPE)[TO_BROKER] == pipe.id
        assert await read(stuck.broker, sent) == bytes(sent)
        await until(lambda: relay.to_broker.pipe is None)
        await stuck.client.send_all(b"more")
        assert await read(stuck.broker, 4) == b"more"


async def test_a_relay_of_an_owner_above_its_share_uses_small_pipes_and_another_ones_huge_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = engine.pool.share_of("alice")
    monkeypatch.setattr(PipePool, "_may_hold", lambda _pool, share, _size_bytes: share is not limited)
    async with open_lane(buffer_bytes=4096) as one, open_lane(buffer_bytes=4096) as other:
        relays = engine.open(one), engine.open(other, principal="bob")
        limited.lane = engine.pool.lanes[-1]
        for lane in (one, other):
            await fill(lane.client)
        held = [relay.to_broker.pipe for relay in relays]
        assert [pipe and pipe.wanted_bytes for pipe in held] == [pipes.SMALL_PIPE_BYTES, pipes.HUGE_PIPE_BYTES]


# ---- what goes wrong


@pytest.mark.usefixtures("quick_look")
async def test_much_that_waited_for_a_pipe_moves_on_without_another_edge(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender has sent its end and no descriptor is ready: the loop must not sleep while a relay is queued."""
    engine.real.run_queue.portion_bytes_max = 1000  # many turns
    engine.open(lane)

    def none_left(_pool: PipePool, _size_bytes_max: int) -> Pipe:
        raise OSError(errno.EMFILE, "Too many open files")

    said = os.urandom(40_000)
    with monkeypatch.context() as patch:
        patch.setattr(PipePool, "acquire_pipe", none_left)
        patch.setattr(PipePool, "has_free_pipe", property(lambda _pool: False))
        await lane.client.send_all(said)
        await lane.client.send_eof()
        await trio.sleep(0.01)
    assert await read_all(lane.broker) == said


@pytest.mark.usefixtures("quick_look")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN])
async def test_without_a_pipe_a_relay_waits_for_one(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its edge has passed: it must be called again by itself, and lose nothing."""
    relay = engine.open(lane)

    def none_left(_pool: PipePool, _size_bytes_max: int) -> Pipe:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(PipePool, "acquire_pipe", none_left)
        patch.setattr(PipePool, "has_free_pipe", property(lambda _pool: False))
        await lane.client.send_all(b"patience")
        await trio.sleep(0.05)
        assert not engine.is_over(relay)
        assert engine.cells(relay, PIPE) == (0, 0)
    assert await read(lane.broker, 8) == b"patience"


async def test_relays_that_wait_for_a_pipe_get_the_one_that_comes_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this very moment, without another look."""
    monkeypatch.setattr(engine_module, "RECHECK_INTERVAL_S", 1000)
    take, scarce = PipePool.acquire_pipe, False

    def free_ones_only(pool: PipePool, size_bytes_max: int) -> Pipe:
        if scarce and not pool.has_free_pipe:
            raise OSError(errno.EMFILE, "Too many open files")
        return take(pool, size_bytes_max)

    monkeypatch.setattr(PipePool, "acquire_pipe", free_ones_only)
    async with open_lane(buffer_bytes=4096) as stuck, open_lane() as one, open_lane() as other:
        for lane in (stuck, one, other):
            engine.open(lane)
        sent = await fill(stuck.client)
        scarce = True
        await one.client.send_all(b"one")
        await other.client.send_all(b"other")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await read(stuck.broker, sent)
        assert await read(one.broker, 3) == b"one"
        assert await read(other.broker, 5) == b"other"


async def test_an_unexpected_error_ends_its_relay_and_no_other(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = engine.open(lane)

    def broken(*_: object, **__: object) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(os, "splice", broken)
        await lane.client.send_all(b"x")
        await engine.over(relay)
    assert relay.broken
    assert engine.cells(relay, PIPE) == (0, 0)
    assert "a relay was ended by an unexpected error" in {entry["event"] for entry in logs}
    async with open_lane() as other:
        engine.open(other)
        await other.client.send_all(b"fine")
        assert await read(other.broker, 4) == b"fine"


async def test_an_unexpected_error_where_a_pipe_is_taken(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = engine.open(lane)

    def broken(_pool: PipePool, _size_bytes_max: int) -> Pipe:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(PipePool, "acquire_pipe", broken)
        await lane.client.send_all(b"x")
        await engine.over(relay)
    assert [entry["log_level"] for entry in logs] == ["error"]


async def test_bytes_left_in_a_pipe_by_an_error_reach_no_other_relay(
    engine: Engine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: another client's bytes."""
    relay, splice, calls = engine.open(lane), os.splice, 0

    def fails_later(*arguments: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return splice(*arguments)

    with monkeypatch.context() as patch, structlog.testing.capture_logs():
        patch.setattr(os, "splice", fails_later)
        await lane.client.send_all(b"secret")
        await engine.over(relay)
    async with open_lane() as other:
        engine.open(other)
        await other.client.send_all(b"mine")
        assert await read(other.broker, 4) == b"mine"


async def test_a_relay_that_cannot_start(engine: Engine, lane: Lane) -> None:
    sockets = lane.our_client.socket.fileno(), os.open("/dev/null", os.O_RDONLY)  # which no epoll takes
    before = descriptors()
    relay = SplicedRelay(about_relay(id=engine.table.allocate_relay_id()), *sockets, 60)
    engine.real.set_owner(relay)
    engine.real.reserve_pipe(relay.to_broker)
    with pytest.raises(PermissionError):
        engine.real.start_relay(relay)
    engine.real.abandon_relay(relay)
    assert (len(engine.real), descriptors()) == (0, before)
    assert engine.cells(relay, PIPE) == (0, 0)
    os.close(sockets[1])
    engine.open(lane)
    await lane.client.send_all(b"now")
    assert await read(lane.broker, 3) == b"now"


async def test_a_relay_abandoned_before_its_start_returns_its_pipe(engine: Engine, lane: Lane) -> None:
    before = descriptors()
    sockets = lane.our_client.socket.fileno(), lane.our_broker.socket.fileno()
    relay = SplicedRelay(about_relay(id=engine.table.allocate_relay_id()), *sockets, 60)
    engine.real.set_owner(relay)
    room = engine.real.reserve_pipe(relay.to_client)
    assert engine.real.reserve_pipe(relay.to_client) == room
    assert descriptors() == before + 2, "the same pipe is meant"
    engine.real.preload_pipe(relay.to_client, b"1")
    assert engine.cells(relay, PIPE)[TO_CLIENT] > 0
    engine.real.abandon_relay(relay)
    assert descriptors() == before
    assert engine.cells(relay, PIPE) == (0, 0)
