"""proxy.runtime.rpc_writer: one task sends, what is said meanwhile leaves together, and not without bound."""

import pytest
import trio
import trio.testing

from proxy.runtime.rpc_writer import BatchedWriter, WriterFull


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


async def test_what_is_said_during_a_write_leaves_with_the_next(nursery: trio.Nursery) -> None:
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


async def test_who_waits_for_room_gets_it(nursery: trio.Nursery) -> None:
    stream = Recorder()
    writer = BatchedWriter(stream, max_buffered_bytes=10)
    nursery.start_soon(writer.run)
    await writer.write_when_there_is_room(b"first")
    await trio.testing.wait_all_tasks_blocked()
    await writer.write_when_there_is_room(b"x" * 10)
    for word in (b"a" * 8, b"b" * 8):
        nursery.start_soon(writer.write_when_there_is_room, word)
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
