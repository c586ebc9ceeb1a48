"""proxy.forwarder.wire: frames in and out, with a deadline for one and a patience for the other."""

import pytest
import trio
import trio.testing

from proto import commands
from proto.errors import RemoteProtocolError
from proto.frames import FrameTooLarge, encode_frame
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
