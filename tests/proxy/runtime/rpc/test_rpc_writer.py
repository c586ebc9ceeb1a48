"""proxy.runtime.rpc.writer: what is said in one turn leaves together at its end, and not without bound."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc import writer as rpc_writer
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull


class Recorder(trio.abc.SendStream):
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gate = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))
        await self.gate.wait()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_data_written_during_a_send_leaves_with_the_next_send(nursery: trio.Nursery) -> None:
    stream = Recorder()
    writer = BatchedWriter(stream, max_buffered_bytes=1000)
    nursery.start_soon(writer.run)
    writer.write(b"first")
    await trio.testing.wait_all_tasks_blocked()
    for word in (b"a", b"b", b"c"):
        writer.write(word)
    stream.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert stream.sent == [b"first", b"abc"]
    nursery.cancel_scope.cancel()


async def test_the_bound() -> None:
    writer = BatchedWriter(Recorder(), max_buffered_bytes=10)
    writer.write(b"x" * 100)  # one always fits an empty queue
    with pytest.raises(WriterFull):
        writer.write(b"x")


async def test_up_to_the_bound() -> None:
    writer = BatchedWriter(Recorder(), max_buffered_bytes=10)
    writer.write(b"x" * 5)
    writer.write(b"x" * 5)
    with pytest.raises(WriterFull):
        writer.write(b"x")


async def test_a_broken_stream_ends_it() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.aclose()
    writer = BatchedWriter(ours, max_buffered_bytes=10)
    writer.write(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await writer.run()


async def test_write_when_room_waits_until_the_buffer_has_room(nursery: trio.Nursery) -> None:
    stream = Recorder()
    writer = BatchedWriter(stream, max_buffered_bytes=10)
    nursery.start_soon(writer.run)
    await writer.write_when_room(b"first")
    await trio.testing.wait_all_tasks_blocked()
    await writer.write_when_room(b"x" * 10)
    for word in (b"a" * 8, b"b" * 8):
        nursery.start_soon(writer.write_when_room, word)
    await trio.testing.wait_all_tasks_blocked()
    assert stream.sent == [b"first"]
    stream.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert stream.sent[:2] == [b"first", b"x" * 10]
    assert sorted(stream.sent[2:]) == [b"a" * 8, b"b" * 8]
    nursery.cancel_scope.cancel()


async def test_empty_means_that_all_has_left(nursery: trio.Nursery) -> None:
    stream = Recorder()
    writer = BatchedWriter(stream, max_buffered_bytes=10)
    assert writer.is_empty
    writer.write(b"x")
    assert not writer.is_empty
    nursery.start_soon(writer.run)
    await trio.testing.wait_all_tasks_blocked()
    assert not writer.is_empty, "it is being sent"
    stream.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert writer.is_empty


# ---- over a socket: in the caller's own turn


@asynccontextmanager
async def socket_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two ends of a connection, whose kernel takes some kilobytes at a time."""
    pair = [trio.SocketStream(end) for end in trio.socket.socketpair()]
    async with pair[0], pair[1]:
        pair[0].socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        yield pair[0], pair[1]


def received(stream: trio.SocketStream) -> bytes:
    """What is there, without waiting."""
    data = b""
    while True:
        try:
            data += stream.socket._sock.recv(65536)  # type: ignore[attr-defined]
        except BlockingIOError:
            return data


async def test_outside_of_a_tick_it_leaves_at_once() -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=1000)
        writer.write(b"written")
        assert received(theirs) == b"written"
        assert writer.is_empty
        writer.flush()
        assert received(theirs) == b""


async def test_in_a_tick_it_leaves_at_its_end_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=1000)
        calls: list[bytes] = []
        write = os.write

        def count(descriptor: int, data: bytearray) -> int:
            calls.append(bytes(data))
            return write(descriptor, data)

        monkeypatch.setattr(rpc_writer.os, "write", count)
        with current_tick():
            writer.write(b"held, ")
            writer.write(b"held, ")
            assert received(theirs) == b"", "what is said waits for the tick's end"
            assert not writer.is_empty
            writer.write(b"written")
        assert calls == [b"held, held, written"]
        assert received(theirs) == b"held, held, written"
        assert writer.is_empty


async def test_the_bound_holds_within_a_tick() -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=10)
        with current_tick():
            writer.write(b"x" * 10)
            with pytest.raises(WriterFull):
                writer.write(b"y")
        writer.write(b"z")
        assert received(theirs) == b"x" * 10 + b"z"


async def test_data_that_the_kernel_does_not_take_is_sent_later_and_in_order(nursery: trio.Nursery) -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=1 << 20)
        nursery.start_soon(writer.run)
        said = bytearray()
        for number in range(3000):
            word = b"<%d>" % number * 10
            writer.write(word)
            said += word
        assert not writer.is_empty
        heard = bytearray()
        while len(heard) < len(said):
            heard += await theirs.receive_some(1000)
        assert heard == said
        await trio.testing.wait_all_tasks_blocked()
        assert writer.is_empty
        writer.write(b"again")
        assert received(theirs) == b"again"
        nursery.cancel_scope.cancel()


async def test_the_bound_counts_what_has_not_left() -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=100_000)
        writer.write(b"x" * 1_000_000)  # one always fits an empty queue
        with pytest.raises(WriterFull):
            writer.write(b"x")
        left = 1_000_000
        while left > 99_000:
            left -= len(received(theirs))
            writer.flush()
        writer.write(b"x")


async def test_a_flush_to_a_peer_that_has_gone_is_left_to_run() -> None:
    async with socket_pair() as (ours, theirs):
        await theirs.aclose()
        writer = BatchedWriter(ours, max_buffered_bytes=1000)
        writer.write(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await writer.run()


async def test_a_flush_after_the_end_harms_nothing() -> None:
    """Another connection's descriptor may have the number that this one's had."""
    async with socket_pair() as (ours, _theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=1000)
        await ours.aclose()
        async with socket_pair() as others:
            writer.write(b"for nobody")
            assert [received(end) for end in others] == [b"", b""]


async def test_room_that_a_flush_makes_is_told_to_those_who_wait_for_it(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=10)
        full = b"x" * 500_000
        writer.write(full)
        nursery.start_soon(writer.write_when_room, b"late")
        await trio.testing.wait_all_tasks_blocked()
        heard = bytearray()
        while len(heard) < len(full + b"late"):
            heard += received(theirs)
            writer.flush()
            await trio.testing.wait_all_tasks_blocked()
        assert heard == full + b"late"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "twice", "wait"]), st.integers(1, 6000)),
        st.tuples(st.sampled_from(["flush", "read", "pass"]), st.just(0)),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_whatever_is_said_in_whatever_way_arrives_in_order_and_once(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        said, late, heard = bytearray(), [], bytearray()
        async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
            writer = BatchedWriter(ours, max_buffered_bytes=8192)
            nursery.start_soon(writer.run)
            number = 0
            for step, size in steps:
                number += 1
                word = b"<%d:%s>" % (number, b"x" * size)
                match step:
                    case "write" | "twice":
                        with current_tick():
                            for part in (word, b"!")[: 2 if step == "twice" else 1]:
                                try:
                                    writer.write(part)
                                except WriterFull:
                                    continue
                                said += part
                    case "wait":
                        late.append(word)
                        nursery.start_soon(writer.write_when_room, word)
                    case "flush":
                        writer.flush()
                    case "read":
                        heard += received(theirs)
                    case _:
                        await trio.lowlevel.checkpoint()
            writer.flush()
            expected = len(said) + sum(map(len, late))
            with trio.fail_after(60):
                while len(heard) < expected:
                    writer.flush()
                    heard += await theirs.receive_some(65536)
            await trio.testing.wait_all_tasks_blocked()
            assert writer.is_empty
            nursery.cancel_scope.cancel()
        for word in late:  # whole, wherever its turn came
            assert heard.count(word) == 1
            heard = heard.replace(word, b"")
        assert heard == said

    trio.run(main)


async def test_a_flush_does_not_overtake_what_is_being_sent(nursery: trio.Nursery) -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=1 << 20)
        nursery.start_soon(writer.run)
        writer.write(b"a" * 500_000)
        await trio.testing.wait_all_tasks_blocked()  # half of it waits for room, in ``run``
        heard = bytearray(received(theirs))
        writer.write(b"b")  # now there is room
        while len(heard) < 500_001:
            heard += await theirs.receive_some(65536)
        assert heard == b"a" * 500_000 + b"b"
        nursery.cancel_scope.cancel()


async def test_wait_until_sent_waits_for_the_data_queued_when_it_was_called(nursery: trio.Nursery) -> None:
    stream = Recorder()
    writer = BatchedWriter(stream, max_buffered_bytes=1000)
    nursery.start_soon(writer.run)
    await writer.wait_until_sent()
    done: list[str] = []

    async def wait(name: str) -> None:
        await writer.wait_until_sent()
        done.append(name)

    for word in ("first", "second"):
        writer.write(word.encode())
        nursery.start_soon(wait, word)
        await trio.testing.wait_all_tasks_blocked()
    assert done == []
    stream.gate.set()
    stream.gate = trio.Event()
    await trio.testing.wait_all_tasks_blocked()
    assert done == ["first"]
    writer.mark_closed()
    await trio.testing.wait_all_tasks_blocked()
    assert done == ["first", "second"], "it never will be"
    nursery.cancel_scope.cancel()


async def test_over_a_socket_too(nursery: trio.Nursery) -> None:
    async with socket_pair() as (ours, theirs):
        writer = BatchedWriter(ours, max_buffered_bytes=8 << 20)
        nursery.start_soon(writer.run)
        writer.write(b"x" * (4 << 20))
        async with trio.open_nursery() as waiting:
            waiting.start_soon(writer.wait_until_sent)
            await trio.testing.wait_all_tasks_blocked()
            assert len(waiting.child_tasks) == 1
            while waiting.child_tasks:
                received(theirs)
                await trio.testing.wait_all_tasks_blocked(0.001)
        nursery.cancel_scope.cancel()
