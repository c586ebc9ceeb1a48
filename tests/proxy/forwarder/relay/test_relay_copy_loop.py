"""proxy.forwarder.relay.copy_loop: every byte, both ways, each direction to its own end."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from proxy.forwarder.relay.copy_loop import CHUNK_BYTES, copy_streams


class Relayed:
    """A relay under test between a client's and a broker's stream."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        first_to_broker: bytes = b"",
        first_to_client: bytes = b"",
        half_close_timeout_s: float = 60.0,
        lockstep: bool = False,
    ) -> None:
        pair = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
        self._client_side, self.client = pair()
        self._broker_side, self.broker = pair()
        self.to_broker: list[int] = []
        self.to_client: list[int] = []
        self.ended = trio.Event()
        self._arguments = {
            "first_to_broker": first_to_broker,
            "first_to_client": first_to_client,
            "half_close_timeout_s": half_close_timeout_s,
            "count_to_broker": self.to_broker.append,
            "count_to_client": self.to_client.append,
        }
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        await copy_streams(self._client_side, self._broker_side, **self._arguments)  # type: ignore[arg-type]
        self.ended.set()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    data = b""
    while more := await stream.receive_some(100_000):
        data += more
    return data


async def read(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        assert more
        data += more
    return data


async def test_bytes_pass_both_ways(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.client.send_all(b"to the broker")
    assert await read(relayed.broker, 13) == b"to the broker"
    await relayed.broker.send_all(b"to the client")
    assert await read(relayed.client, 13) == b"to the client"
    assert (relayed.to_broker, relayed.to_client) == ([13], [13])
    assert not relayed.ended.is_set()


async def test_bytes_read_ahead_are_forwarded_first(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery, first_to_broker=b"held ", first_to_client=b"connected ")
    await relayed.client.send_all(b"later")
    await relayed.broker.send_all(b"message")
    assert await read(relayed.broker, 10) == b"held later"
    assert await read(relayed.client, 17) == b"connected message"
    assert sum(relayed.to_broker) == 10, "what was read ahead counts too"
    assert sum(relayed.to_client) == 17


async def test_large_streams_arrive_whole(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    data = random.Random(1).randbytes(5 * CHUNK_BYTES + 17)
    back = data[::-1]
    await relayed.client.send_all(data)
    await relayed.client.send_eof()
    await relayed.broker.send_all(back)
    await relayed.broker.send_eof()
    assert await read_all(relayed.broker) == data
    assert await read_all(relayed.client) == back
    await relayed.ended.wait()
    assert sum(relayed.to_broker) == sum(relayed.to_client) == len(data)


@pytest.mark.conforms("pip-1.17")
async def test_the_client_half_closes(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.client.send_all(b"last words")
    await relayed.client.send_eof()
    assert await read_all(relayed.broker) == b"last words"
    assert not relayed.ended.is_set()
    await relayed.broker.send_all(b"answer")
    assert await read(relayed.client, 6) == b"answer"
    await relayed.broker.send_eof()
    assert await read_all(relayed.client) == b""
    await relayed.ended.wait()


async def test_the_broker_half_closes(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.broker.send_all(b"last words")
    await relayed.broker.send_eof()
    assert await read_all(relayed.client) == b"last words"
    await relayed.client.send_all(b"still here")
    assert await read(relayed.broker, 10) == b"still here"
    await relayed.client.send_eof()
    assert await read_all(relayed.broker) == b""
    await relayed.ended.wait()


async def test_bytes_in_flight_are_delivered_when_the_sender_closes(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.broker.send_all(b"x" * (3 * CHUNK_BYTES))
    await relayed.broker.aclose()
    assert len(await read_all(relayed.client)) == 3 * CHUNK_BYTES
    await relayed.client.aclose()
    await relayed.ended.wait()


async def test_the_reader_goes_while_bytes_are_on_their_way_to_it(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.client.send_all(b"important")
    await relayed.client.aclose()
    await relayed.broker.send_all(b"to nobody")
    assert await read_all(relayed.broker) == b"important", "what the client had sent still arrives"
    await relayed.broker.aclose()
    await relayed.ended.wait()


@pytest.mark.conforms("pip-1.16")
async def test_a_broken_source_ends_the_other_side(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    relayed = Relayed(nursery)
    await trio.testing.wait_all_tasks_blocked()
    await relayed.client.send_all(b"x")
    assert await read(relayed.broker, 1) == b"x"

    async def reset(_size: int) -> bytes:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    monkeypatch.setattr(relayed._broker_side, "receive_some", reset)
    await relayed.broker.send_all(b"y")
    assert await read(relayed.client, 1) == b"y"  # was under way before the reset
    assert await read_all(relayed.client) == b"", "told of the end"
    await relayed.client.send_eof()
    await relayed.ended.wait()


@pytest.mark.conforms("pip-1.17")
async def test_half_close_timeout(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    relayed = Relayed(nursery, half_close_timeout_s=5)
    await trio.sleep(100)
    assert not relayed.ended.is_set(), "an idle relay lives as long as its client likes"
    await relayed.client.send_eof()
    await relayed.ended.wait()
    assert trio.current_time() == pytest.approx(105)


async def test_half_close_lives_as_long_as_bytes_move(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    relayed = Relayed(nursery, half_close_timeout_s=5)
    await relayed.client.send_eof()
    for _ in range(5):
        await trio.sleep(4)
        await relayed.broker.send_all(b"x")
    assert len(await read(relayed.client, 5)) == 5
    await relayed.ended.wait()
    assert trio.current_time() == pytest.approx(25)


async def test_bytes_still_to_be_written_keep_a_half_closed_relay_no_longer_than_the_timeout(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    relayed = Relayed(nursery, half_close_timeout_s=5, lockstep=True)
    await relayed.client.send_eof()
    nursery.start_soon(relayed.broker.send_all, b"x" * 10)  # and the client never reads
    await relayed.ended.wait()
    assert trio.current_time() == pytest.approx(5)


async def test_a_slow_reader_bounds_what_is_read_from_the_other_side(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery, lockstep=True)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await relayed.broker.send_all(b"x" * CHUNK_BYTES)
            sent += CHUNK_BYTES

    nursery.start_soon(flood)
    await trio.testing.wait_all_tasks_blocked()
    assert sent <= CHUNK_BYTES, "one chunk is in the relay's hand, and no more is taken from the broker"
    for _ in range(8):
        await read(relayed.client, CHUNK_BYTES)
    await trio.testing.wait_all_tasks_blocked()
    assert sent <= 9 * CHUNK_BYTES


async def test_directions_do_not_wait_for_each_other(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery, lockstep=True)
    nursery.start_soon(relayed.broker.send_all, b"unread")
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(relayed.client.send_all, b"through")
    assert await read(relayed.broker, 7) == b"through"


async def test_a_finished_copy_loop_leaves_both_streams_open(nursery: trio.Nursery) -> None:
    relayed = Relayed(nursery)
    await relayed.client.send_eof()
    await relayed.broker.send_eof()
    await relayed.ended.wait()
    assert await relayed._client_side.receive_some(10) == b""
    assert await relayed._broker_side.receive_some(10) == b""
