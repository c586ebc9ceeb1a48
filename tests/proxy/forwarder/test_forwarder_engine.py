"""proxy.forwarder.engine, .pipes and .relays: bytes through the kernel, over real sockets on loopback.

Splicing is the kernel's, so nothing but sockets can show it; they are pairs within this process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
import structlog.testing
import trio
from prometheus_client import CollectorRegistry

from proxy.config.types import Relay as RelayConfig
from proxy.forwarder import engine as engine_module
from proxy.forwarder import pipes
from proxy.forwarder.engine import FIRST_BYTES_MAX, Relay, RelayEngine
from proxy.forwarder.pipes import LARGE_PIPES_MAX, Pipe, PipePool
from proxy.forwarder.relays import Relays, splice_works

DEFAULTS = RelayConfig()


def tcp_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    streams = []
    for sock in (one, other):
        sock.setblocking(False)
        streams.append(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
    return streams[0], streams[1]


@dataclass
class Lane:
    """A relay under test: the far ends, and the two sockets that the proxy holds."""

    client: trio.SocketStream
    broker: trio.SocketStream
    our_client: trio.SocketStream
    our_broker: trio.SocketStream
    relay: Relay | None = None

    def open(
        self, engine: RelayEngine, *, to_broker: bytes = b"", to_client: bytes = b"", half_close_s: float = 60
    ) -> Relay:
        self.relay = engine.add(
            self.our_client.socket,
            self.our_broker.socket,
            to_broker=to_broker,
            to_client=to_client,
            half_close_timeout_s=half_close_s,
        )
        return self.relay

    async def close(self) -> None:
        for stream in (self.client, self.broker, self.our_client, self.our_broker):
            await trio.aclose_forcefully(stream)


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    client, our_client = tcp_pair()
    our_broker, broker = tcp_pair()
    lane = Lane(client, broker, our_client, our_broker)
    yield lane
    await lane.close()


@pytest.fixture
def engine(nursery: trio.Nursery) -> RelayEngine:
    engine = RelayEngine()
    nursery.start_soon(engine.run)
    return engine


async def read_all(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(5):
        return b"".join([data async for data in stream])


async def read(stream: trio.SocketStream, size: int) -> bytes:
    found = b""
    with trio.fail_after(5):
        while len(found) < size:
            data = await stream.receive_some(size - len(found))
            assert data, "an early end"
            found += data
    return found


async def finished(relay: Relay) -> None:
    with trio.fail_after(5):
        await relay.finished.wait()


def reset(stream: trio.SocketStream) -> None:
    """Close with a reset instead of an end."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


# ---- bytes


async def test_both_ways(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine)
    for number in range(50):
        await lane.client.send_all(b"there %d" % number)
        assert await read(lane.broker, len(b"there %d" % number)) == b"there %d" % number
        await lane.broker.send_all(b"back")
        assert await read(lane.client, 4) == b"back"
    assert relay.to_client.bytes_moved == 200
    assert relay.to_client.operations == 50
    assert len(engine) == 1


async def test_what_was_read_ahead_goes_first(engine: RelayEngine, lane: Lane) -> None:
    await lane.client.send_all(b"second")
    lane.open(engine, to_broker=b"first ", to_client=b"connected")
    assert await read(lane.broker, 12) == b"first second"
    assert await read(lane.client, 9) == b"connected"


async def test_first_bytes_fit_the_smallest_pipe(
    engine: RelayEngine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "LARGE_PIPES_MAX", 0)
    first = os.urandom(FIRST_BYTES_MAX)
    lane.open(engine, to_broker=first)
    assert await read(lane.broker, len(first)) == first


async def test_many_streams_of_random_portions_arrive_whole(engine: RelayEngine) -> None:
    size, lanes = 2 << 20, []
    for _ in range(8):
        client, our_client = tcp_pair()
        our_broker, broker = tcp_pair()
        lanes.append(Lane(client, broker, our_client, our_broker))

    async def send(stream: trio.SocketStream, digest: hashlib._Hash) -> None:
        left = size
        while left:
            data = os.urandom(min(left, random.choice([1, 100, 3000, 65536, 400_000])))
            left -= len(data)
            digest.update(data)
            await stream.send_all(data)
        await stream.send_eof()

    async def receive(stream: trio.SocketStream, digest: hashlib._Hash) -> None:
        while data := await stream.receive_some(random.choice([10, 1000, 1 << 18])):
            digest.update(data)

    digests = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for lane in lanes:
                lane.open(engine)
                for source, sink in ((lane.client, lane.broker), (lane.broker, lane.client)):
                    sent, received = hashlib.sha256(), hashlib.sha256()
                    digests.append((sent, received))
                    nursery.start_soon(send, source, sent)
                    nursery.start_soon(receive, sink, received)
    assert all(sent.digest() == received.digest() for sent, received in digests)
    for lane in lanes:
        assert lane.relay is not None
        await finished(lane.relay)
        assert lane.relay.to_broker.bytes_moved == lane.relay.to_client.bytes_moved == size
        await lane.close()
    assert len(engine) == 0


async def test_a_busy_relay_leaves_the_others_their_turn(
    engine: RelayEngine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SPLICES_PER_TURN", 1)
    lane.open(engine)
    data = os.urandom(1 << 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.client.send_all, data)
        assert await read(lane.broker, len(data)) == data


async def test_a_receiver_that_does_not_read_stops_the_sender(engine: RelayEngine, lane: Lane) -> None:
    """Backpressure: what is on its way is bounded by the kernel's buffers, and none of it is in this process."""
    relay = lane.open(engine)
    sent = 0
    with trio.move_on_after(0.5):
        while True:
            await lane.client.send_all(b"x" * 65536)
            sent += 65536
    assert sent < 64 << 20
    got = 0
    with trio.move_on_after(0.5):
        while True:
            got += len(await lane.broker.receive_some(1 << 20))
    assert got >= sent
    assert relay.to_broker.bytes_moved == got


# ---- ends


async def test_half_close_both_ways(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine)
    await lane.client.send_all(b"question")
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b"question"
    assert not relay.finished.is_set()
    await lane.broker.send_all(b"answer")
    assert await read(lane.client, 6) == b"answer"
    await lane.broker.send_eof()
    assert await read_all(lane.client) == b""
    await finished(relay)


async def test_what_was_sent_before_a_reset_arrives(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine)
    await lane.client.send_all(b"last words")
    assert await read(lane.broker, 4) == b"last"
    reset(lane.client)
    assert await read_all(lane.broker) == b" words"
    await lane.broker.aclose()
    await finished(relay)


async def test_a_broken_sink_ends_the_relay(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine, half_close_s=0.1)
    reset(lane.broker)
    await trio.sleep(0.05)
    with trio.move_on_after(5):
        while not relay.finished.is_set():
            try:
                await lane.client.send_all(b"x" * 65536)
            except trio.BrokenResourceError:
                break
            await trio.sleep(0.01)
    await lane.client.aclose()
    await finished(relay)
    assert len(engine) == 0


async def test_a_half_closed_relay_without_bytes_ends_after_its_time(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine, half_close_s=0.5)
    await lane.client.send_eof()
    with trio.fail_after(10):
        await relay.finished.wait()
    assert len(engine) == 0


async def test_drop_ends_at_once(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine, to_broker=b"never sent")
    engine.drop(relay)
    assert relay.finished.is_set()
    engine.drop(relay)
    assert len(engine) == 0


async def test_without_descriptors_for_a_pipe_a_relay_waits_for_one(
    engine: RelayEngine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its edge has passed: it must be called again by itself, and lose nothing."""
    relay = lane.open(engine)

    def none_left(_pool: PipePool) -> Pipe:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(PipePool, "take", none_left)
        patch.setattr(PipePool, "has_free", property(lambda _pool: False))
        await lane.client.send_all(b"patience")
        await trio.sleep(0.05)
        assert not relay.finished.is_set()
    assert await read(lane.broker, 8) == b"patience"


async def test_an_unexpected_error_ends_its_relay_and_no_other(
    engine: RelayEngine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = lane.open(engine)

    def broken(*_: object, **__: object) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(os, "splice", broken)
        await lane.client.send_all(b"x")
        await finished(relay)
    assert "a relay was ended by an unexpected error" in {entry["event"] for entry in logs}
    client, our_client = tcp_pair()
    our_broker, broker = tcp_pair()
    other = Lane(client, broker, our_client, our_broker)
    other.open(engine)
    await other.client.send_all(b"fine")
    assert await read(other.broker, 4) == b"fine"
    await other.close()


async def test_a_reset_after_a_half_close_ends_the_relay(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine)
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b""
    reset(lane.client)
    await finished(relay)
    assert len(engine) == 0


async def test_a_relay_that_cannot_begin_leaves_nothing_behind(
    engine: RelayEngine, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Pipe] = []

    def one_left(_pool: PipePool) -> Pipe:
        if taken:
            raise OSError(errno.EMFILE, "Too many open files")
        taken.append(Pipe(large=True))
        return taken[0]

    before = descriptors()
    monkeypatch.setattr(PipePool, "take", one_left)
    with pytest.raises(OSError, match="Too many"):
        lane.open(engine, to_broker=b"1", to_client=b"2")
    assert (len(engine), descriptors()) == (0, before)


# ---- pipes


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_pipes_are_lent_again_and_bounded() -> None:
    before = descriptors()
    pool = PipePool()
    lent = [pool.take() for _ in range(LARGE_PIPES_MAX + 100)]
    assert [pipe.large for pipe in lent] == [True] * LARGE_PIPES_MAX + [False] * 100
    for pipe in lent:
        pool.give(pipe)
    assert pool.take().large
    kept = descriptors() - before
    assert kept == 2 * (LARGE_PIPES_MAX + pipes.FREE_SMALL_PIPES_MAX)
    pool.give(pool.take())
    for _ in range(LARGE_PIPES_MAX):
        pool.discard(pool.take())
    pool.close()
    assert descriptors() - before <= 2


def test_a_kernel_that_grants_no_larger_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(pipes.fcntl, "fcntl", refuse)
    Pipe(large=True).close()


async def test_idle_relays_hold_no_pipe(engine: RelayEngine, lane: Lane) -> None:
    relay = lane.open(engine)
    await lane.client.send_all(b"x")
    await read(lane.broker, 1)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert (relay.to_broker.pipe, relay.to_client.pipe) == (None, None)


# ---- the relays of a forwarder


def test_this_kernel_splices() -> None:
    assert splice_works()


@pytest.fixture
def _no_splice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "splice", refuse)
        yield


@pytest.mark.usefixtures("_no_splice")
async def test_where_the_kernel_refuses_all_goes_through_user_space(nursery: trio.Nursery, lane: Lane) -> None:
    with structlog.testing.capture_logs() as logs:
        through = Relays()
        nursery.start_soon(through.run)
        await trio.testing.wait_all_tasks_blocked()
    [entry] = logs
    assert "refuses to splice" in entry["event"]
    nursery.start_soon(relay_of(through, lane))
    await lane.client.send_all(b"slower")
    assert await read(lane.broker, 6) == b"slower"
    nursery.cancel_scope.cancel()


def relay_of(
    through: Relays, lane: Lane, *, to_client: bytes = b"", config: RelayConfig = DEFAULTS
) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await through.relay(
            lane.our_client,
            lane.our_broker,
            first_to_broker=b"",
            first_to_client=to_client,
            config=config,
        )

    return run


def value(registry: CollectorRegistry, name: str, direction: str) -> float | None:
    return registry.get_sample_value(name, {"direction": direction})


async def test_live_relays_are_counted_and_stay_counted(nursery: trio.Nursery, lane: Lane) -> None:
    through = Relays()
    registry = CollectorRegistry()
    registry.register(through)
    nursery.start_soon(through.run)
    large = os.urandom(3 * FIRST_BYTES_MAX)
    over = trio.Event()

    async def run() -> None:
        flows = await through.relay(
            lane.our_client,
            lane.our_broker,
            first_to_broker=large,
            first_to_client=b"hello",
            config=RelayConfig(),
        )
        assert (flows.to_broker.bytes_moved, flows.to_client.bytes_moved) == (len(large) + 4, 5)
        over.set()

    nursery.start_soon(run)
    assert await read(lane.broker, len(large)) == large
    assert await read(lane.client, 5) == b"hello"
    await lane.client.send_all(b"more")
    assert await read(lane.broker, 4) == b"more"
    assert value(registry, "pulsar_proxy_binary_bytes_total", "to_broker") == len(large) + 4
    assert value(registry, "pulsar_proxy_binary_bytes_total", "to_client") == 5
    await lane.client.aclose()
    await lane.broker.aclose()
    with trio.fail_after(5):
        await over.wait()
    assert value(registry, "pulsar_proxy_binary_bytes_total", "to_broker") == len(large) + 4
    assert value(registry, "pulsar_proxy_binary_ops_total", "to_client") == 1
    nursery.cancel_scope.cancel()


async def test_a_client_that_is_gone_before_its_first_bytes(nursery: trio.Nursery, lane: Lane) -> None:
    through = Relays()
    nursery.start_soon(through.run)
    reset(lane.client)
    await trio.sleep(0.05)
    await lane.broker.aclose()
    with trio.fail_after(5):
        await relay_of(through, lane, to_client=os.urandom(3 * FIRST_BYTES_MAX))()
    nursery.cancel_scope.cancel()


async def test_a_client_that_reads_nothing_does_not_outlive_its_broker(nursery: trio.Nursery, lane: Lane) -> None:
    """The broker's end stands behind the bytes that the client does not take."""
    through = Relays()
    nursery.start_soon(through.run)
    over = trio.Event()

    async def run() -> None:
        await relay_of(through, lane, config=RelayConfig(user_timeout_ms=500, half_close_timeout_ms=500))()
        over.set()

    nursery.start_soon(run)
    with trio.move_on_after(0.3):
        while True:
            await lane.broker.send_all(b"x" * 65536)
    await lane.broker.aclose()
    with trio.fail_after(20):
        await over.wait()
    nursery.cancel_scope.cancel()
