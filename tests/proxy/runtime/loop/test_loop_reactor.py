"""proxy.runtime.loop.reactor: real sockets, read by callback. Bytes of a socketpair are there at once: no test
sleeps."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from proxy.runtime.loop.epoll_loop import EVENTS_PER_BATCH, LINGER_S
from proxy.runtime.loop.reactor import (
    RECEIVE_BYTES,
    Reactor,
    Reading,
    current_reactor,
    read_all,
)
from proxy.runtime.loop.tick import current_tick


class Ear:
    """What one connection's callbacks were told."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.rounds: list[int] = []
        self.failure: Exception | None = None

    def on_data(self, data: bytes | bytearray) -> None:
        if self.failure is not None:
            raise self.failure
        self.data.append(bytes(data))

    def on_end(self, error: Exception | None) -> None:
        self.ends.append(error)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def reactor(nursery: trio.Nursery, clock: ManualClock) -> AsyncIterator[Reactor]:
    reactor = Reactor(clock)
    reactor.may_linger = lambda: False
    nursery.start_soon(reactor.run)
    await settle()
    yield reactor
    nursery.cancel_scope.cancel()


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Closed at the end."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


Sockets = list[socket.socket]


def pair(sockets: Sockets) -> tuple[socket.socket, socket.socket]:
    """Ours, and the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    sockets += [ours, theirs]
    return ours, theirs


def listen(reactor: Reactor, sockets: Sockets) -> tuple[Ear, Reading, socket.socket]:
    """A connection that is being read."""
    ours, theirs = pair(sockets)
    ear = Ear()
    return ear, reactor.start_reading(ours.fileno(), ear.on_data, ear.on_end), theirs


async def settle() -> None:
    """Until the reactor has read what there is: bytes of a socketpair are there at once."""
    await trio.testing.wait_all_tasks_blocked()


# ---- a single connection


async def test_received_data_is_passed_to_on_data(reactor: Reactor, sockets: Sockets) -> None:
    ear, _reading, theirs = listen(reactor, sockets)
    for word in (b"one", b"two"):
        theirs.send(word)
        await settle()
    assert ear.data == [b"one", b"two"]
    assert ear.ends == []


async def test_data_received_before_reading_started_is_passed_to_on_data(reactor: Reactor, sockets: Sockets) -> None:
    ours, theirs = pair(sockets)
    theirs.send(b"early")
    ear = Ear()
    reactor.start_reading(ours.fileno(), ear.on_data, ear.on_end)
    await settle()
    assert ear.data == [b"early"]


async def test_more_than_a_portion_is_told_in_portions(reactor: Reactor, sockets: Sockets) -> None:
    ear, reading, theirs = listen(reactor, sockets)
    theirs.setblocking(False)
    reading.pause()
    sent = theirs.send(bytes(range(256)) * 600)
    assert sent > RECEIVE_BYTES
    reading.resume()
    await settle()
    assert b"".join(ear.data) == (bytes(range(256)) * 600)[:sent]
    assert max(map(len, ear.data)) <= RECEIVE_BYTES


async def test_the_end_is_told_once_and_after_all_bytes(reactor: Reactor, sockets: Sockets) -> None:
    ear, reading, theirs = listen(reactor, sockets)
    theirs.send(b"last words")
    theirs.shutdown(socket.SHUT_WR)
    await settle()
    assert (ear.data, ear.ends) == ([b"last words"], [None])
    reading.pause()
    reading.resume()
    await settle()
    assert ear.ends == [None], "what has ended does not begin again"


async def test_a_reset_is_told_with_its_cause(reactor: Reactor, sockets: Sockets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    sockets += [ours, theirs]
    ours.setblocking(False)
    ear = Ear()
    reactor.start_reading(ours.fileno(), ear.on_data, ear.on_end)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with trio.fail_after(60):
        while not ear.ends:
            await trio.lowlevel.checkpoint()
    [error] = ear.ends
    assert isinstance(error, trio.BrokenResourceError)
    assert isinstance(error.__cause__, ConnectionResetError)


async def test_paused_nothing_is_read(reactor: Reactor, sockets: Sockets) -> None:
    ear, reading, theirs = listen(reactor, sockets)
    reading.pause()
    reading.pause()
    theirs.send(b"wait")
    theirs.shutdown(socket.SHUT_WR)
    await settle()
    assert (ear.data, ear.ends) == ([], [])
    reading.resume()
    reading.resume()
    await settle()
    assert (ear.data, ear.ends) == ([b"wait"], [None])


async def test_paused_by_its_own_data(reactor: Reactor, sockets: Sockets) -> None:
    """The rest stays in the kernel, even what belongs to the same round."""
    ours, theirs = pair(sockets)
    heard: list[bytes] = []

    def on_data(data: bytes | bytearray) -> None:
        heard.append(bytes(data))
        reading.pause()

    reading = reactor.start_reading(ours.fileno(), on_data, Ear().on_end)
    theirs.send(b"x" * (RECEIVE_BYTES + 5))
    await settle()
    assert [len(data) for data in heard] == [RECEIVE_BYTES]
    reading.resume()
    await settle()
    assert [len(data) for data in heard] == [RECEIVE_BYTES, 5]


async def test_a_spurious_event_harms_nothing(reactor: Reactor, sockets: Sockets) -> None:
    """What the epoll told of was read already."""
    ear, reading, _theirs = listen(reactor, sockets)
    reading.on_readable()
    assert (ear.data, ear.ends) == ([], [])


# ---- callbacks that fail


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("x"), BlockingIOError(11, "on_data's own"), OSError(5, "its own")]
)
async def test_an_exception_of_on_data_ends_only_its_own_connection(
    reactor: Reactor, sockets: Sockets, failure: Exception
) -> None:
    broken, _reading, to_broken = listen(reactor, sockets)
    fine, _fine_reading, to_fine = listen(reactor, sockets)
    broken.failure = failure
    for word in (b"1", b"2"):
        to_broken.send(word)
        to_fine.send(word)
        await settle()
    assert broken.ends == [failure], "as it is, and once"
    assert (fine.data, fine.ends) == ([b"1", b"2"], [])


# ---- rounds


async def test_several_in_one_round_are_one_tick(reactor: Reactor, sockets: Sockets) -> None:
    """All that they have to say to one peer leaves in one push, when the round is over."""
    order: list[str] = []

    class Speaker:
        def flush(self) -> None:
            order.append("flush")

    speaker, tick = Speaker(), current_tick()

    def on_data(data: bytes | bytearray) -> None:
        order.append(bytes(data).decode())
        tick.schedule_flush(speaker)

    theirs = []
    for _ in range(3):
        ours, other = pair(sockets)
        reactor.start_reading(ours.fileno(), on_data, Ear().on_end)
        theirs.append(other)
    for other in theirs:
        other.send(b"data")
    await settle()
    assert order == ["data", "data", "data", "flush"]


async def test_more_connections_than_a_round_takes(reactor: Reactor, sockets: Sockets) -> None:
    ears = []
    for _ in range(EVENTS_PER_BATCH + 10):
        ear, _reading, theirs = listen(reactor, sockets)
        theirs.send(b"x")
        ears.append(ear)
    await settle()
    assert [ear.data for ear in ears] == [[b"x"]] * len(ears)


async def test_a_reading_paused_earlier_in_the_same_batch_gets_no_data(reactor: Reactor, sockets: Sockets) -> None:
    """The batch already holds its event, but its owner may have closed the descriptor."""
    heard: list[int] = []
    readings: list[Reading] = []
    theirs = []
    for number in range(2):
        ours, other = pair(sockets)

        def on_data(_data: bytes | bytearray, number: int = number, ours: socket.socket = ours) -> None:
            heard.append(number)
            readings[1 - number].pause()

        readings.append(reactor.start_reading(ours.fileno(), on_data, Ear().on_end))
        theirs.append(other)
    for other in theirs:
        other.send(b"x")
    await settle()
    assert len(heard) == 1
    readings[1 - heard[0]].resume()
    await settle()
    assert sorted(heard) == [0, 1], "nothing was lost"


async def test_a_reading_of_a_reused_descriptor_gets_no_event_of_the_previous_reading(
    reactor: Reactor, sockets: Sockets
) -> None:
    """The kernel gives the number of a closed descriptor to the next one."""
    first, second = Ear(), Ear()
    (a, to_a), (b, to_b) = pair(sockets), pair(sockets)
    replacement, to_replacement = pair(sockets)

    def replace(_data: bytes | bytearray) -> None:
        for reading, ours in ((reading_a, a), (reading_b, b)):
            reading.pause()
            number = ours.fileno()
            ours.close()
            os.dup2(replacement.fileno(), number)
        numbers.append(number)
        reactor.start_reading(number, second.on_data, second.on_end)

    numbers: list[int] = []
    reading_a = reactor.start_reading(a.fileno(), replace, first.on_end)
    reading_b = reactor.start_reading(b.fileno(), replace, first.on_end)
    stray = [a.fileno(), b.fileno()]
    to_a.send(b"x")
    to_b.send(b"y")
    await settle()
    assert len(numbers) == 1
    assert (second.data, second.ends) == ([], []), "an event of the one before is none of its own"
    to_replacement.send(b"for the second")
    await settle()
    assert second.data == [b"for the second"]
    for number in stray:
        os.close(number)


# ---- lingering


class SpyOnPolls:
    """The reactor's epoll, and how long it is waited for. Its alarm does not depend on real time: it rings, and the
    clock moves on, when the reactor waits without a timeout.
    """

    def __init__(self, reactor: Reactor, clock: ManualClock) -> None:
        self._epoll = reactor.epoll
        self._timer = reactor._timer
        self._clock = clock
        self.timeouts: list[float] = []
        self.timers: list[float] = []
        reactor.epoll = self  # type: ignore[assignment]
        reactor._timer = self  # type: ignore[assignment]

    def arm(self, seconds: float) -> None:
        """As a TimerFd's."""
        self.timers.append(seconds)

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        self.timeouts.append(timeout)
        events = self._epoll.poll(0, most)
        return events if events or timeout == 0 else self._ring(most)

    def _ring(self, most: int) -> list[tuple[int, int]]:
        self._clock.now += self.timers.pop()  # without an alarm nothing would end this
        self._timer.fire_now()
        return self._epoll.poll(-1, most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("gap_s", [0.0, 60.0])
async def test_where_much_goes_on_the_next_bytes_are_waited_for(
    reactor: Reactor, clock: ManualClock, sockets: Sockets, gap_s: float, allowed: bool
) -> None:
    """Without going back to Trio; and only where no other task of this process is runnable."""
    ear, _reading, theirs = listen(reactor, sockets)
    asked: list[bool] = []

    def may_linger() -> bool:
        asked.append(True)
        return allowed

    reactor.may_linger = may_linger
    theirs.send(b"w")
    await settle()
    asked.clear()
    clock.now += gap_s
    spy = SpyOnPolls(reactor, clock)
    theirs.send(b"x")
    assert reactor.is_busy is (not gap_s)
    began = clock.now
    await settle()
    lingers = allowed and not gap_s
    assert bool(asked) is (not gap_s), "after a pause there is no query"
    assert spy.timeouts[0] == 0, "what is there comes first"
    assert (-1 in spy.timeouts) is lingers
    assert clock.now - began == pytest.approx(LINGER_S if lingers else 0)
    assert ear.data == [b"w", b"x"]


async def test_a_batch_after_which_another_task_is_in_a_hurry_is_the_last(
    reactor: Reactor, clock: ManualClock, sockets: Sockets
) -> None:
    """As a TLS handshake that waits for its turn: with a millisecond without a turn, a flood would keep others out."""
    ear, _reading, theirs = listen(reactor, sockets)
    reactor.may_linger = lambda: b"x" not in ear.data
    theirs.send(b"w")
    await settle()
    spy = SpyOnPolls(reactor, clock)
    theirs.send(b"x")
    await settle()
    assert ear.data == [b"w", b"x"]
    assert -1 not in spy.timeouts


async def test_data_that_arrives_while_the_reactor_lingers_is_a_batch_of_its_own(
    reactor: Reactor, clock: ManualClock, sockets: Sockets
) -> None:
    reactor.may_linger = lambda: True
    order: list[str] = []
    ours, theirs = pair(sockets)
    tick = current_tick()

    class Answer:
        """A peer that asks again as soon as it is answered."""

        def flush(self) -> None:
            order.append("flush")
            if len(order) < 6:
                theirs.send(b"again")

    answer = Answer()

    def on_data(_data: bytes | bytearray) -> None:
        order.append("data")
        tick.schedule_flush(answer)

    reactor.start_reading(ours.fileno(), on_data, Ear().on_end)
    reactor._processed_at = clock.now
    SpyOnPolls(reactor, clock)
    theirs.send(b"x")
    await settle()
    assert order == ["data", "flush"] * 3


# ---- the reactor's own life


async def test_read_by_a_reactor_that_has_gone(sockets: Sockets) -> None:
    """At a worker's end the order of things is not known; nothing may raise."""
    reactor = Reactor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reactor.run)
        await settle()
        ear, reading, theirs = listen(reactor, sockets)
        assert current_reactor() is reactor
        nursery.cancel_scope.cancel()
    theirs.send(b"nobody hears")
    await settle()
    reading.pause()
    reading.resume()
    reading.pause()
    assert (ear.data, ear.ends) == ([], [])
    assert current_reactor() is None, "a new caller reads by itself"


async def test_without_one_there_is_none() -> None:
    assert current_reactor() is None


async def test_no_descriptor_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    reactor = Reactor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reactor.run)
        await settle()
        nursery.cancel_scope.cancel()
    assert os.listdir("/proc/self/fd") == before


# ---- read_all


async def streams() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


@pytest.mark.parametrize("kind", ["socket", "memory", "socket without a reactor"])
async def test_read_all_until_the_end(nursery: trio.Nursery, kind: str) -> None:
    if kind == "socket":
        nursery.start_soon(Reactor().run)
        await settle()
    ours, theirs = trio.testing.memory_stream_pair() if kind == "memory" else await streams()
    heard: list[bytes] = []
    ended = trio.Event()

    async def read() -> None:
        await read_all(ours, lambda data: heard.append(bytes(data)))
        ended.set()

    nursery.start_soon(read)
    for word in (b"one", b"two"):
        await theirs.send_all(word)
        await settle()
    assert heard == [b"one", b"two"]
    assert not ended.is_set()
    await theirs.send_eof()
    await ended.wait()
    for stream in (ours, theirs):
        await stream.aclose()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("memory", [False, True])
async def test_read_all_raises_what_its_callback_raises(nursery: trio.Nursery, memory: bool) -> None:
    if not memory:
        nursery.start_soon(Reactor().run)
        await settle()
    ours, theirs = trio.testing.memory_stream_pair() if memory else await streams()
    failure = ZeroDivisionError()

    def on_data(_data: bytes | bytearray) -> None:
        raise failure

    await theirs.send_all(b"x")
    with pytest.raises(ZeroDivisionError) as caught:
        await read_all(ours, on_data)
    assert caught.value is failure
    for stream in (ours, theirs):
        await stream.aclose()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("memory", [False, True])
async def test_nothing_is_read_while_turns_are_left(nursery: trio.Nursery, memory: bool) -> None:
    if not memory:
        nursery.start_soon(Reactor().run)
        await settle()
    ours, theirs = trio.testing.memory_stream_pair() if memory else await streams()
    order: list[str] = []
    turns = iter([*[True] * 19, False] * 2)  # many, so that what comes meanwhile would be read in between
    ended = trio.Event()

    def on_data(data: bytes | bytearray) -> bool:
        order.append(bytes(data).decode())
        return data != b"three"

    def process_turn() -> bool:
        order.append("turn")
        if len(order) == 2:
            theirs_now("two")
        return next(turns)

    def theirs_now(word: str) -> None:
        nursery.start_soon(theirs.send_all, word.encode())

    async def read() -> None:
        await read_all(ours, on_data, process_turn)
        ended.set()

    nursery.start_soon(read)
    for word in ("one", "three"):
        theirs_now(word)
        await settle()
    assert order == ["one", *["turn"] * 20, "two", *["turn"] * 20, "three"]
    await theirs.send_eof()
    await ended.wait()
    for stream in (ours, theirs):
        await stream.aclose()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("memory", [False, True])
async def test_read_all_raises_what_a_turn_raises(nursery: trio.Nursery, memory: bool) -> None:
    if not memory:
        nursery.start_soon(Reactor().run)
        await settle()
    ours, theirs = trio.testing.memory_stream_pair() if memory else await streams()

    def process_turn() -> bool:
        raise ZeroDivisionError

    await theirs.send_all(b"x")
    with pytest.raises(ZeroDivisionError):
        await read_all(ours, lambda _data: True, process_turn)
    for stream in (ours, theirs):
        await stream.aclose()
    nursery.cancel_scope.cancel()


async def test_read_all_raises_broken(reactor: Reactor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    ours = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
        await read_all(ours, Ear().on_data)
    await ours.aclose()


async def test_a_cancelled_reader_is_heard_of_no_more(reactor: Reactor) -> None:
    ours, theirs = await streams()
    ear = Ear()
    with trio.move_on_after(60) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, ours, ear.on_data)
            await settle()
            assert len(reactor._readings) == 1
            scope.cancel()
    assert reactor._readings == {}
    await theirs.send_all(b"late")
    await settle()
    assert ear.data == []
    assert await ours.receive_some(10) == b"late", "it is the next reader's"
    for stream in (ours, theirs):
        await stream.aclose()


async def test_a_stream_in_memory_has_a_tick_for_each_chunk(nursery: trio.Nursery) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    order: list[str] = []
    tick = current_tick()

    class Speaker:
        def flush(self) -> None:
            order.append("flush")

    speaker = Speaker()

    def on_data(data: bytes | bytearray) -> None:
        order.append(bytes(data).decode())
        for _ in range(2):
            tick.schedule_flush(speaker)
        order.append("still in the tick")

    nursery.start_soon(read_all, ours, on_data)
    for word in (b"one", b"two"):
        await theirs.send_all(word)
        await settle()
    assert order == ["one", "still in the tick", "flush", "two", "still in the tick", "flush"]
    nursery.cancel_scope.cancel()
