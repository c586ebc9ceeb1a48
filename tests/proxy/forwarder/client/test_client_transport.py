"""proxy.forwarder.client.transport: frames in by callback, frames out at the end of a tick, and what slow clients
make of both."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing
from e2e.lab.certificates import Authority
from hypothesis import given
from hypothesis import strategies as st
from relay_fakes import unblocked_pair

from proto.errors import RemoteProtocolError
from proto.frames import Frame, FrameDecoder, FrameTooLarge, encode_frame
from proxy.config.types import ListenerTls
from proxy.forwarder.client.transport import ClientSlow, ClientTransport
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.tls import PENDING_RECORDS_BYTES_MAX, TlsStream, listener_contexts

PATIENCE_S = 5
LARGE = encode_frame(b"x" * 100_000)
"""More than a socket takes at once."""


class Setup:
    """A transport, what its owner was told, and the client at the other end."""

    def __init__(self, nursery: trio.Nursery, ours: Any, theirs: Any, *, begins: bool = True) -> None:
        self.nursery = nursery
        self.transport = ClientTransport(ours, nursery, max_frame_bytes=1024, write_timeout_ms=PATIENCE_S * 1000)
        self.client = theirs
        self.frames: list[Frame] = []
        self.calls = 0
        self.ends: list[Exception | None] = []
        self.ended = trio.Event()
        self.take = self.take_all
        if begins:
            self.begin()

    def begin(self) -> None:
        self.transport.start_reading(self._on_frames, self._on_end)

    def _on_frames(self) -> None:
        self.calls += 1
        self.take()

    def take_all(self) -> None:
        """As a session does that has room."""
        while (frame := self.transport.next_frame()) is not None:
            self.frames.append(frame)

    def _on_end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()

    async def send(self, frames: bytes) -> bool:
        """Say it, and wait until it has left."""
        self.transport.send(frames)
        return await self.transport.wait_until_sent()

    async def receive(self, size: int) -> bytes:
        """So many bytes, at the client's."""
        data = b""
        while len(data) < size:
            more = await self.client.receive_some(size - len(data))
            assert more, f"the end of the stream after {len(data)} bytes"
            data += more
        return data


Make = Callable[..., Setup]


def socket_pair() -> tuple[TcpStream, TcpStream]:
    """Two ends of a connection whose kernel takes some kilobytes at a time."""
    ours, theirs = (TcpStream(end) for end in unblocked_pair())
    ours.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
    OPEN.extend((ours, theirs))
    return ours, theirs


OPEN: list[TcpStream] = []


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A listener's, and a client's that trusts it."""
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    pair = authority.server("server")
    config = ListenerTls(certificate=pair.certificate, key=pair.key)
    return listener_contexts("listener[0].tls", config).value.default, ssl.create_default_context(cafile=authority.file)


def tls_pair(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[TlsStream, TlsStream]:
    """The same with TLS, behind the handshake."""
    here, there = socket_pair()
    ours = TlsStream(here, contexts[0], server_side=True)
    theirs = TlsStream(there, contexts[1], server_side=False, host="localhost")
    while not (theirs.session.continue_handshake(ours.session.take_outgoing()) and ours.session.version):
        ours.session.continue_handshake(theirs.session.take_outgoing())
    assert ours.session.continue_handshake(theirs.session.take_outgoing())
    return ours, theirs


@pytest.fixture(params=["reactor", "tls", "socket", "memory"])
async def make(
    request: pytest.FixtureRequest, nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> AsyncIterator[Make]:
    """A connection is the reactor's, where there is one, with TLS, too."""
    if request.param in {"reactor", "tls"}:
        await run_reactor(nursery)

    def make(**how: Any) -> Setup:
        match request.param:
            case "memory":
                pair: tuple[Any, Any] = trio.testing.memory_stream_pair()
            case "tls":
                pair = tls_pair(contexts)
            case _:
                pair = socket_pair()
        return Setup(nursery, *pair, **how)

    yield make
    nursery.cancel_scope.cancel()


async def run_reactor(nursery: trio.Nursery) -> None:
    reactor = Reactor()
    reactor.may_linger = lambda: False
    nursery.start_soon(reactor.run)
    await trio.testing.wait_all_tasks_blocked()


settle = trio.testing.wait_all_tasks_blocked


def received(stream: TcpStream) -> bytes:
    """What is there, without waiting."""
    data = b""
    while True:
        try:
            more = stream.socket.recv(65536)
        except BlockingIOError:
            return data
        if not more:
            return data
        data += more


# ---- in


async def test_frames_split_at_every_byte(make: Make) -> None:
    frames = encode_frame(b"first", b"payload") + encode_frame(b"second")
    for cut in range(0, len(frames) + 1, 3):
        setup = make()
        for piece in (frames[:cut], frames[cut:]):
            if piece:
                await setup.client.send_all(piece)
                await settle()
        assert setup.frames == [(b"first", b"payload"), (b"second", b"")]
        assert await setup.transport.stop_reading() == b""


async def test_frames_read_together_are_delivered_in_one_call(make: Make) -> None:
    setup = make()
    await setup.client.send_all(encode_frame(b"x") * 5)
    await settle()
    assert (setup.calls, len(setup.frames)) == (1, 5)


@pytest.mark.parametrize("behind", [b"", encode_frame(b"x")[:5]])
async def test_the_end_of_what_the_client_sends(make: Make, behind: bytes) -> None:
    setup = make()
    await setup.client.send_all(encode_frame(b"last") + behind)
    await setup.client.send_eof()
    await setup.ended.wait()
    assert (setup.frames, setup.ends) == ([(b"last", b"")], [None])
    setup.transport.pause_reading()
    setup.transport.resume_reading()
    await settle()
    assert setup.ends == [None], "told once"
    assert await setup.send(encode_frame(b"the other direction is open"))


@pytest.mark.parametrize(
    ("garbage", "kind"),
    [(b"\x7f\xff\xff\xff", FrameTooLarge), (b"\x00\x00\x00\x01\x00\x00\x00\x01", RemoteProtocolError)],
)
async def test_an_exception_from_the_frame_callback_ends_reading(
    make: Make, garbage: bytes, kind: type[Exception]
) -> None:
    setup = make()
    await setup.client.send_all(encode_frame(b"x") + garbage)
    await setup.ended.wait()
    assert setup.frames == [(b"x", b"")]
    assert [type(error) for error in setup.ends] == [kind] or isinstance(setup.ends[0], kind)
    await setup.client.send_all(b"more")
    await settle()
    assert (setup.calls, len(setup.ends)) == (1, 1)


@pytest.mark.parametrize("plain", [True, False])
async def test_a_reset(nursery: trio.Nursery, plain: bool) -> None:
    if plain:
        await run_reactor(nursery)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    ours = TcpStream(accepted)
    setup = Setup(nursery, ours, None)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with trio.fail_after(60):
        await setup.ended.wait()
    assert [type(error) for error in setup.ends] == [trio.BrokenResourceError]
    await trio.aclose_forcefully(ours)
    nursery.cancel_scope.cancel()


async def test_when_the_client_was_heard(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    """Half a frame will do: its sender is there."""
    setup = make()
    began = trio.current_time()
    assert setup.transport.received_at == pytest.approx(began)
    for at in (3, 7):
        await trio.sleep(at - (trio.current_time() - began))
        await setup.client.send_all(encode_frame(b"x")[:4] if at == 3 else b"")
        await setup.client.send_all(encode_frame(b"x")[4:] if at == 7 else b"")
        await settle()
        assert setup.transport.received_at == pytest.approx(began + at)
    setup.transport.send(b"not what it is told")
    await trio.sleep(1)
    assert setup.transport.received_at == pytest.approx(began + 7)


async def test_paused_what_comes_stays_where_it_is(make: Make) -> None:
    """A stream in memory has a portion under way already; no more than that."""
    setup = make()
    await settle()
    setup.transport.pause_reading()
    for word in (b"a", b"b", b"c"):
        await setup.client.send_all(encode_frame(word))
        await settle()
    await setup.client.send_eof()
    await settle()
    assert len(setup.frames) <= 1
    assert setup.ends == []
    setup.transport.resume_reading()
    await setup.ended.wait()
    assert [frame.command for frame in setup.frames] == [b"a", b"b", b"c"]
    assert setup.ends == [None]


async def test_resumed_and_paused_again(make: Make) -> None:
    setup = make()
    for _ in range(3):
        setup.transport.pause_reading()
        setup.transport.resume_reading()
        setup.transport.resume_reading()
        await setup.client.send_all(encode_frame(b"x"))
        await settle()
    assert len(setup.frames) == 3


# ---- to the relay


async def test_bytes_of_an_unfinished_frame_are_returned_when_reading_stops(make: Make) -> None:
    setup = make()
    await setup.client.send_all(encode_frame(b"x") + b"rest")
    await settle()
    assert await setup.transport.stop_reading() == b"rest"
    assert await setup.transport.stop_reading() == b""


async def test_no_byte_is_lost_between_the_wire_and_the_relay(make: Make) -> None:
    """Wherever reading ends: what was taken is the owner's, the rest is the wire's or still in the stream."""
    frame = encode_frame(b"12345")
    for taken in range(4):
        setup = make()

        def take(setup: Setup = setup, taken: int = taken) -> None:
            while len(setup.frames) < taken:
                got = setup.transport.next_frame()
                if got is None:
                    return
                setup.frames.append(got)
            setup.transport.pause_reading()

        setup.take = take
        await setup.client.send_all(frame * 2 + frame[:3])
        await settle()
        await setup.client.send_all(frame[3:] + b"raw")
        rest = await setup.transport.stop_reading()
        held = b"".join(one.encode() for one in setup.frames)
        left = b""
        whole = frame * 3 + b"raw"
        while len(held + rest + left) < len(whole):
            left += await setup.transport.stream.receive_some(65536)  # as the relay does: the only reader
        assert held + rest + left == whole
        assert setup.ends == []


async def test_bytes_that_come_in_the_very_instant_are_not_lost(make: Make) -> None:
    setup = make()
    await settle()
    await setup.client.send_all(b"\x00\x00\x00\x09half")
    rest = await setup.transport.stop_reading()
    if rest != b"\x00\x00\x00\x09half":
        rest += await setup.transport.stream.receive_some(100)
    assert rest == b"\x00\x00\x00\x09half"


async def test_after_the_end_of_reading_the_stream_is_free(make: Make) -> None:
    setup = make()
    await settle()
    await setup.transport.stop_reading()
    await setup.client.send_all(b"for the relay")
    await settle()
    assert await setup.transport.stream.receive_some(100) == b"for the relay"
    assert (setup.calls, setup.ends) == (0, [])


async def test_a_stream_that_is_closed_here_has_no_end_to_tell(make: Make) -> None:
    setup = make()
    await settle()
    setup.transport.pause_reading()
    await setup.transport.stream.aclose()
    await settle()
    assert setup.ends == []


# ---- out


async def test_a_frame_that_is_sent_reaches_the_client(make: Make) -> None:
    setup = make()
    for word in (b"a", b"b"):
        assert await setup.send(encode_frame(word))
        assert setup.transport.unsent_bytes == 0
        assert await setup.receive(9) == encode_frame(word)


async def test_nothing_to_send_is_sent(make: Make) -> None:
    setup = make()
    assert await setup.transport.wait_until_sent()
    setup.transport.flush()
    assert setup.transport.unsent_bytes == 0


async def test_outside_of_a_tick_it_leaves_at_once_in_a_tick_at_its_end(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(nursery, *socket_pair())
    calls: list[bytes] = []
    write = os.write

    def count(descriptor: int, data: bytearray) -> int:
        calls.append(bytes(data))
        return write(descriptor, data)

    monkeypatch.setattr("proxy.forwarder.client.transport.os.write", count)
    setup.transport.send(b"at once")
    assert received(setup.client) == b"at once"
    with current_tick():
        setup.transport.send(b"one, ")
        setup.transport.send(b"two")
        assert received(setup.client) == b""
        assert setup.transport.unsent_bytes == 8
    assert received(setup.client) == b"one, two"
    assert calls == [b"at once", b"one, two"], "each in one system call"
    assert setup.transport.unsent_bytes == 0
    nursery.cancel_scope.cancel()


async def test_frames_the_client_does_not_take_at_once_are_sent_later_in_order(make: Make) -> None:
    setup = make()
    small = encode_frame(b"small")
    setup.transport.send(LARGE)
    setup.transport.send(small)
    if isinstance(setup.client, TcpStream):
        assert setup.transport.unsent_bytes > len(small), "behind what waits, although it would fit"
    await settle()
    setup.transport.send(encode_frame(b"last"))
    expected = LARGE + small + encode_frame(b"last")
    assert await setup.receive(len(expected)) == expected
    assert await setup.transport.wait_until_sent()
    assert setup.transport.unsent_bytes == 0
    setup.transport.send(small)
    assert await setup.receive(len(small)) == small


async def test_nothing_is_put_into_the_middle_of_what_is_being_sent(nursery: trio.Nursery) -> None:
    setup = Setup(nursery, *socket_pair())
    setup.transport.send(LARGE)
    await settle()
    data = received(setup.client)
    assert data, "half of it has left, and there is room"
    second = encode_frame(b"second")
    setup.transport.send(second)
    setup.transport.flush()
    data += await setup.receive(len(LARGE + second) - len(data))
    assert data == LARGE + second
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("paused", [False, True])
async def test_frames_sent_on_the_notice_of_room_follow_those_already_queued(make: Make, paused: bool) -> None:
    """Security: a frame put into the middle of another would be read as the answer to another request.

    The owner takes more frames when it is told of room, and answers them at once, while the sending task is between two
    portions.
    """
    setup = make()
    portions = trio.Semaphore(0)
    send_all = setup.transport.stream.send_all
    under_way = 0

    async def slowly(data: bytes) -> None:
        nonlocal under_way
        under_way += 1
        assert under_way == 1, "two tasks send"
        await portions.acquire()
        await send_all(data)
        under_way -= 1

    setup.transport.stream.send_all = slowly
    said: list[bytes] = []
    answers = [encode_frame(b"answer %d" % number) + LARGE for number in range(3)]

    def deliver(data: bytes) -> None:
        said.append(data)
        setup.transport.send(data)

    setup.take = lambda: deliver(answers.pop(0)) if answers else None
    if paused:
        setup.transport.pause_reading()
    deliver(LARGE)
    deliver(encode_frame(b"behind it"))
    data = b""

    async def read() -> None:
        nonlocal data
        while True:
            data += await setup.client.receive_some(65536)

    setup.nursery.start_soon(read)
    for number in range(8):
        await settle()
        deliver(encode_frame(b"meanwhile %d" % number))
        portions.release()
    for _ in range(3):
        await settle()
        portions.release()
    await settle()
    assert data == b"".join(said)
    assert await setup.transport.wait_until_sent()
    assert (setup.transport.unsent_bytes, answers) == (0, [])


async def test_until_sent_means_all(make: Make, nursery: trio.Nursery) -> None:
    setup = make()
    told: list[bool] = []

    async def wait() -> None:
        told.append(await setup.transport.wait_until_sent())

    if isinstance(setup.client, TcpStream | TlsStream):
        setup.transport.send(LARGE)
        for _ in range(2):
            nursery.start_soon(wait)
        await settle()
        setup.transport.send(encode_frame(b"more"))
        await setup.receive(len(LARGE) - 10)
        await settle()
        received(setup.client.transport if isinstance(setup.client, TlsStream) else setup.client)
        with trio.fail_after(60):
            await setup.transport.wait_until_sent()
        await settle()
    else:
        gate = trio.Event()
        setup.transport.stream.send_all = lambda _data: gate.wait()
        setup.transport.send(LARGE)
        for _ in range(2):
            nursery.start_soon(wait)
        await settle()
        assert told == []
        gate.set()
        await settle()
    assert told == [True, True]
    assert setup.transport.unsent_bytes == 0


# ---- room


@pytest.mark.parametrize("task", [True, False])
async def test_a_paused_owner_is_told_after_its_bytes_have_been_sent(nursery: trio.Nursery, task: bool) -> None:
    """The bytes no longer count as unsent by then: otherwise the owner would see no room, and wait for ever."""
    setup = Setup(nursery, *socket_pair())
    seen: list[int] = []
    setup.take = lambda: seen.append(setup.transport.unsent_bytes)
    setup.transport.pause_reading()
    data = LARGE if task else b"x"
    with current_tick():
        setup.transport.send(data)
        assert setup.transport.unsent_bytes == len(data)
    if task:
        await settle()
        assert seen == []
        assert len(data) > setup.transport.unsent_bytes > 0
    await setup.receive(len(data))
    await settle()
    assert seen[-1:] == [0]
    assert await setup.transport.wait_until_sent()
    nursery.cancel_scope.cancel()


async def test_a_client_that_goes_while_it_is_paused_is_noticed(make: Make) -> None:
    """What it never took must not count for ever: the session would not read on, and see that it has gone."""
    setup = make()
    gate = trio.Event()

    async def broken(_data: bytes) -> None:
        await gate.wait()
        raise trio.BrokenResourceError

    setup.transport.stream.send_all = broken

    def take() -> None:
        if setup.transport.unsent_bytes < 1000:
            setup.transport.resume_reading()
        else:
            setup.transport.pause_reading()
        setup.take_all()

    setup.take = take
    setup.transport.send(LARGE)
    await settle()
    setup.transport.send(encode_frame(b"y" * 1000))
    await setup.client.send_all(encode_frame(b"x"))
    await settle()
    await setup.client.aclose()
    await settle()
    gate.set()
    with trio.fail_after(60):
        await setup.ended.wait()
    assert not await setup.transport.wait_until_sent()


# ---- clients that are slow, or have gone


async def test_a_client_that_does_not_read(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    setup = make()
    stuck(setup)
    began = trio.current_time()
    setup.transport.send(LARGE)
    assert not await setup.transport.wait_until_sent()
    assert trio.current_time() - began == pytest.approx(PATIENCE_S)
    assert [type(error) for error in setup.ends] == [ClientSlow]
    assert not await setup.send(encode_frame(b"more")), "and no task waits a second time"
    assert trio.current_time() - began == pytest.approx(PATIENCE_S)


def stuck(setup: Setup) -> None:
    """A stream in memory takes anything."""
    if not isinstance(setup.client, TcpStream):

        async def never(_data: bytes) -> None:
            await trio.sleep_forever()

        setup.transport.stream.send_all = never


async def test_nothing_goes_out_behind_half_a_frame(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A client that was too slow has half a frame; whatever else were sent would be read as its other half."""
    setup = Setup(nursery, *socket_pair())
    setup.transport.send(LARGE)
    await settle()
    setup.transport.send(encode_frame(b"waits"))
    assert not await setup.transport.wait_until_sent()
    half = received(setup.client)  # now there is room
    assert LARGE.startswith(half)
    setup.transport.send(encode_frame(b"its other half"))
    setup.transport.flush()
    assert not await setup.transport.wait_until_sent()
    await trio.sleep(10)
    assert received(setup.client) == b""
    assert [type(error) for error in setup.ends] == [ClientSlow], "told once"
    nursery.cancel_scope.cancel()


async def test_a_client_that_has_gone_is_no_error_of_who_sends(make: Make) -> None:
    """Whoever reads is told; the first of the two that notice counts."""
    setup = make()
    await setup.client.aclose()
    setup.transport.send(encode_frame(b"a"))
    setup.transport.send(encode_frame(b"b"))
    assert not await setup.transport.wait_until_sent()
    await settle()
    assert {type(error) for error in setup.ends} <= {type(None), trio.BrokenResourceError}
    assert 1 <= len(setup.ends) <= 2


async def test_a_stream_that_is_closed_here_while_it_sends(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    setup = make()
    stuck(setup)
    setup.transport.send(LARGE)
    await settle()
    setup.transport.pause_reading()
    await trio.aclose_forcefully(setup.transport.stream)
    setup.transport.send(b"more")
    if isinstance(setup.client, TcpStream):
        with trio.fail_after(PATIENCE_S * 2):
            assert not await setup.transport.wait_until_sent()


async def test_a_cancelled_send_still_sends_the_whole_frame() -> None:
    """Half a frame would have a relay's bytes behind it."""
    sent = bytearray()
    half, gate = trio.Event(), trio.Event()
    frame = encode_frame(b"x" * 100)

    async def slowly(data: bytes) -> None:
        sent.extend(data[:50])
        half.set()
        await gate.wait()
        sent.extend(data[50:])

    async def open_later() -> None:
        await trio.testing.wait_all_tasks_blocked()
        gate.set()

    async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
        setup = Setup(nursery, *trio.testing.memory_stream_pair())
        setup.transport.stream.send_all = slowly
        setup.transport.send(frame)
        await half.wait()
        nursery.cancel_scope.cancel()
        outer.start_soon(open_later)
    assert sent == frame


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "tick", "wait", "read", "pass", "settle"]), st.integers(1, 20_000)),
    min_size=1,
    max_size=25,
)


@given(steps=STEPS, answers=st.integers(0, 3))
def test_whatever_way_frames_are_sent_they_arrive_whole_once_and_in_order(
    steps: list[tuple[str, int]], answers: int
) -> None:
    async def main() -> None:
        said: list[bytes] = []
        data = bytearray()
        async with trio.open_nursery() as nursery:
            ours, theirs = socket_pair()
            async with ours, theirs:
                setup = Setup(nursery, ours, theirs)

                def deliver(command: bytes) -> None:
                    said.append(command)
                    setup.transport.send(encode_frame(command))

                def answer() -> None:  # a sender that is told of room has more to send
                    if len(said) % 4 < answers and len(said) < 60:
                        deliver(b"answer %d" % len(said))

                setup.take = answer
                for number, (step, size) in enumerate(steps):
                    command = b"%d:" % number + b"x" * size
                    match step:
                        case "send":
                            deliver(command)
                        case "tick":
                            with current_tick():
                                deliver(command)
                                deliver(b"and more")
                        case "wait":
                            nursery.start_soon(setup.transport.wait_until_sent)
                        case "read":
                            data += received(theirs)
                        case "settle":
                            await settle()
                        case _:
                            await trio.lowlevel.checkpoint()
                with trio.fail_after(60):
                    while len(data) < sum(len(encode_frame(command)) for command in said):
                        data += await theirs.receive_some(65536)
                        await settle()  # a sender that is told of room has sent its part
                assert await setup.transport.wait_until_sent()
                assert setup.transport.unsent_bytes == 0
                nursery.cancel_scope.cancel()
        OPEN.clear()
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        decoder.receive_data(bytes(data))
        heard = []
        while (frame := decoder.next_frame()) is not None:
            heard.append(frame.command)
        assert heard == said

    trio.run(main)


# ---- TLS, without a task


async def test_tls_is_read_and_written_without_a_task(
    nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """What came with the handshake is read, too, and what is no frame yet is the relay's."""
    await run_reactor(nursery)
    async with trio.open_nursery() as spawner:
        ours, theirs = tls_pair(contexts)
        ours.session.unread = theirs.session.encrypt(memoryview(encode_frame(b"with the Finished")))
        setup = Setup(spawner, ours, theirs)
        assert [frame.command for frame in setup.frames] == [b"with the Finished"]
        await theirs.send_all(encode_frame(b"CONNECT") + b"\0\0")
        await settle()
        assert [frame.command for frame in setup.frames[1:]] == [b"CONNECT"]
        setup.transport.send(encode_frame(b"CONNECTED"))
        assert await setup.receive(len(encode_frame(b"CONNECTED"))) == encode_frame(b"CONNECTED")
        assert setup.transport.stop_reading_now() == b"\0\0"
        assert not spawner.child_tasks


async def test_a_relay_does_not_start_before_tls_has_sent_its_own_records(
    nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    await run_reactor(nursery)
    ours, theirs = tls_pair(contexts)
    setup = Setup(nursery, ours, theirs)
    ours.session._outgoing.write(b"an answer to new keys")
    assert setup.transport.stop_reading_now() is None
    setup.transport.flush()
    assert received(theirs.transport) == b"an answer to new keys"
    assert setup.transport.stop_reading_now() == b""


async def test_a_client_that_asks_for_new_keys_and_reads_nothing_is_given_up(
    nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """Security: the answers would fill the memory."""
    await run_reactor(nursery)
    ours, theirs = tls_pair(contexts)
    setup = Setup(nursery, ours, theirs)
    setup.transport.send(LARGE)  # which it does not take
    await settle()
    ours.session._outgoing.write(b"k" * (PENDING_RECORDS_BYTES_MAX + 1))
    await theirs.send_all(encode_frame(b"x"))
    await settle()
    assert [type(end) for end in setup.ends] == [ClientSlow]


async def test_an_end_that_tls_tells_of_waits_while_reading_is_paused(
    nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    await run_reactor(nursery)
    setup = Setup(nursery, *tls_pair(contexts))
    setup.take = setup.transport.pause_reading
    await setup.client.send_all(encode_frame(b"x"))
    await setup.client.transport.send_all(setup.client.session.close())  # without TCP's end
    await settle()
    setup.transport._receive_records(setup.transport._tls, received(setup.transport._plain))  # type: ignore[arg-type]
    assert not setup.ends
    setup.take = setup.take_all
    setup.transport.resume_reading()
    assert setup.ends == [None]


async def test_a_damaged_record_ends_the_connection(
    nursery: trio.Nursery, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    await run_reactor(nursery)
    setup = Setup(nursery, *tls_pair(contexts))
    await setup.client.transport.send_all(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    await setup.ended.wait()
    [end] = setup.ends
    assert isinstance(end, trio.BrokenResourceError)
    assert isinstance(end.__cause__, ssl.SSLError)
