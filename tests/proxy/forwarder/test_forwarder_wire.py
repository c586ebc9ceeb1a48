"""proxy.forwarder.wire: frames in and out, with a deadline for one and a patience for the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from proto import commands
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder, FrameTooLarge, encode_frame
from proxy.forwarder.wire import ClientSlow, ClientWire


def wire_pair(*, lockstep: bool = False) -> tuple[ClientWire, trio.abc.HalfCloseableStream]:
    pair = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
    ours, theirs = pair()
    return ClientWire(ours, max_frame_bytes=1024, write_timeout_ms=5000), theirs


async def test_frames_split_at_every_byte() -> None:
    frames = encode_frame(b"first", b"payload") + encode_frame(b"second")
    for cut in range(len(frames) + 1):
        wire, client = wire_pair()
        await client.send_all(frames[:cut])
        await client.send_all(frames[cut:])
        got = [await wire.receive(), await wire.receive()]
        assert [(frame.command, frame.payload) for frame in got if frame] == [(b"first", b"payload"), (b"second", b"")]
        assert wire.take_rest() == b""


async def test_end_of_stream() -> None:
    wire, client = wire_pair()
    await client.send_all(encode_frame(b"x")[:5])
    await client.send_eof()
    assert await wire.receive() is None


async def test_deadline(autojump_clock: trio.testing.MockClock) -> None:
    wire, _client = wire_pair()
    wire.deadline = trio.current_time() + 3
    with pytest.raises(trio.TooSlowError):
        await wire.receive()
    assert trio.current_time() == pytest.approx(3)


@pytest.mark.parametrize("new", [2, 8])
async def test_a_new_deadline_counts_for_the_wait_under_way(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, new: int
) -> None:
    wire, _client = wire_pair()
    wire.deadline = trio.current_time() + 5

    async def change() -> None:
        await trio.sleep(1)
        wire.deadline = new

    nursery.start_soon(change)
    with pytest.raises(trio.TooSlowError):
        await wire.receive()
    assert trio.current_time() == pytest.approx(new)
    assert wire.deadline == new


async def test_a_client_that_drips_does_not_stretch_the_deadline(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    wire, client = wire_pair()

    async def drip() -> None:
        for byte in encode_frame(b"x" * 100):
            await client.send_all(bytes([byte]))
            await trio.sleep(1)

    nursery.start_soon(drip)
    wire.deadline = trio.current_time() + 5
    with pytest.raises(trio.TooSlowError):
        await wire.receive()
    assert trio.current_time() == pytest.approx(5)
    nursery.cancel_scope.cancel()


async def test_too_large() -> None:
    wire, client = wire_pair()
    await client.send_all(b"\x7f\xff\xff\xff")
    with pytest.raises(FrameTooLarge):
        await wire.receive()


async def test_corrupt() -> None:
    wire, client = wire_pair()
    await client.send_all(b"\x00\x00\x00\x01\x00\x00\x00\x01")
    with pytest.raises(RemoteProtocolError):
        await wire.receive()


async def test_a_broken_stream() -> None:
    wire, client = wire_pair()
    await client.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await wire.send(commands.ping())


async def test_what_is_no_frame_yet_is_the_relays() -> None:
    wire, client = wire_pair()
    await client.send_all(encode_frame(b"x") + b"rest")
    assert await wire.receive() is not None
    assert wire.take_rest() == b"rest"
    assert wire.take_rest() == b""


async def test_frames_of_several_tasks_do_not_mix(nursery: trio.Nursery) -> None:
    wire, client = wire_pair(lockstep=True)
    frames = [encode_frame(bytes([65 + number]) * 50) for number in range(5)]
    for frame in frames:
        nursery.start_soon(wire.send, frame)
    data = b""
    while len(data) < sum(map(len, frames)):
        data += await client.receive_some(7)
    assert sorted(data[at : at + len(frames[0])] for at in range(0, len(data), len(frames[0]))) == frames


async def test_a_client_that_does_not_read(autojump_clock: trio.testing.MockClock) -> None:
    wire, _client = wire_pair(lockstep=True)
    with pytest.raises(ClientSlow):
        await wire.send(commands.ping())
    assert trio.current_time() == pytest.approx(5)


async def test_a_cancelled_send_still_sends_the_whole_frame(nursery: trio.Nursery) -> None:
    """Half a frame would have a relay's bytes behind it."""
    wire, _client = wire_pair()
    frame = encode_frame(b"x" * 100)
    scope = trio.CancelScope()
    sent = bytearray()
    half = trio.Event()
    gate = trio.Event()

    async def slowly(data: bytes) -> None:
        sent.extend(data[:50])
        half.set()
        await gate.wait()
        sent.extend(data[50:])

    wire.stream.send_all = slowly  # type: ignore[method-assign]

    async def send() -> None:
        with scope:
            await wire.send(frame)

    nursery.start_soon(send)
    await half.wait()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert sent == frame


async def test_after_half_a_frame_nothing_more_is_sent(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A client that was too slow has half a frame; whatever else were sent would be read as its other half."""
    wire, client = wire_pair(lockstep=True)
    ends: list[float] = []

    async def send() -> None:
        with pytest.raises((ClientSlow, trio.BrokenResourceError)):
            await wire.send(encode_frame(b"x" * 100))
        ends.append(trio.current_time())

    nursery.start_soon(send)
    nursery.start_soon(send)
    assert len(await client.receive_some(10)) == 10
    await trio.sleep(20)
    assert ends == pytest.approx([5, 5]), "those who wait to send to it are told at once"


# ---- without waiting


@asynccontextmanager
async def socket_wire(write_timeout_ms: int = 5000) -> AsyncIterator[tuple[ClientWire, trio.SocketStream]]:
    """Over a socket whose kernel takes some kilobytes at a time."""
    ours, theirs = (trio.SocketStream(end) for end in trio.socket.socketpair())
    async with ours, theirs:
        ours.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        yield ClientWire(ours, max_frame_bytes=1024, write_timeout_ms=write_timeout_ms), theirs


def received(stream: trio.SocketStream) -> bytes:
    """What is there, without waiting."""
    data = b""
    while True:
        try:
            data += stream.socket._sock.recv(65536)  # type: ignore[attr-defined]
        except BlockingIOError:
            return data


async def test_what_the_socket_takes_leaves_at_once() -> None:
    async with socket_wire() as (wire, client):
        assert wire.send_now(encode_frame(b"a"))
        assert wire.send_now(encode_frame(b"b"))
        assert received(client) == encode_frame(b"a") + encode_frame(b"b")


async def test_what_it_does_not_take_leaves_with_the_next_send_and_in_order() -> None:
    async with socket_wire() as (wire, client), trio.open_nursery() as nursery:
        large, small = encode_frame(b"x" * 100_000), encode_frame(b"small")
        assert not wire.send_now(large)
        assert not wire.send_now(small), "behind what waits, although it would fit"
        nursery.start_soon(wire.send, encode_frame(b"last"))
        expected = large + small + encode_frame(b"last")
        data = b""
        while len(data) < len(expected):
            data += await client.receive_some(65536)
        assert data == expected
        assert wire.send_now(small), "all has left"
        assert received(client) == small


async def test_nothing_is_put_into_the_middle_of_a_send() -> None:
    async with socket_wire() as (wire, client), trio.open_nursery() as nursery:
        first, second = encode_frame(b"x" * 100_000), encode_frame(b"second")
        nursery.start_soon(wire.send, first)
        await trio.testing.wait_all_tasks_blocked()
        data = received(client)
        assert data, "half of it has left, and there is room"
        assert not wire.send_now(second)
        nursery.start_soon(wire.send, b"")
        while len(data) < len(first + second):
            data += await client.receive_some(65536)
        assert data == first + second


async def test_a_stream_that_cannot_send_at_once() -> None:
    """TLS: its bytes are not the socket's."""
    wire, client = wire_pair()
    assert not wire.send_now(encode_frame(b"a"))
    assert not wire.send_now(encode_frame(b"b"))
    await wire.send(b"")
    assert await client.receive_some(100) == encode_frame(b"a") + encode_frame(b"b")


async def test_a_client_that_has_gone_is_met_by_the_next_send() -> None:
    async with socket_wire() as (wire, client):
        await client.aclose()
        assert not wire.send_now(encode_frame(b"a"))
        with pytest.raises(trio.BrokenResourceError):
            await wire.send(b"")


async def test_nothing_goes_out_at_once_behind_half_a_frame(autojump_clock: trio.testing.MockClock) -> None:
    async with socket_wire() as (wire, client):
        with pytest.raises(ClientSlow):
            await wire.send(encode_frame(b"x" * 1_000_000))
        received(client)  # now there is room
        assert not wire.send_now(encode_frame(b"its other half"))
        assert received(client) == b""
        with pytest.raises(ClientSlow):
            await wire.send(b"")


STEPS = st.lists(
    st.tuples(st.sampled_from(["now", "send", "read", "pass"]), st.integers(1, 20_000)), min_size=1, max_size=25
)


@given(steps=STEPS)
def test_whatever_way_frames_are_sent_they_arrive_whole_and_once(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        said: list[bytes] = []
        data = bytearray()
        async with socket_wire() as (wire, client), trio.open_nursery() as nursery:
            for number, (step, size) in enumerate(steps):
                command = b"%d:" % number + b"x" * size
                match step:
                    case "now":
                        said.append(command)
                        if not wire.send_now(encode_frame(command)):
                            nursery.start_soon(wire.send, b"")
                    case "send":
                        said.append(command)
                        nursery.start_soon(wire.send, encode_frame(command))
                    case "read":
                        data += received(client)
                    case _:
                        await trio.lowlevel.checkpoint()
            with trio.fail_after(5):
                while len(data) < sum(len(encode_frame(command)) for command in said):
                    data += await client.receive_some(65536)
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        decoder.receive_data(bytes(data))
        heard = []
        while (frame := decoder.next_frame()) is not None:
            heard.append(frame.command)
        assert sorted(heard) == sorted(said)
        ways = [step for step, _ in steps if step in {"now", "send"}]
        now = [command for command, way in zip(said, ways, strict=True) if way == "now"]
        assert [command for command in heard if command in now] == now, "answers keep their order"

    trio.run(main)
