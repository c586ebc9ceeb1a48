"""proxy.forwarder.relay.copy_pump: every byte, both ways, with TLS on a side or none, over real sockets on loopback."""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import errno
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import structlog.testing
import trio
import trio.testing
from relay_fakes import (
    Contexts,
    Engine,
    Lane,
    TlsLane,
    digest_all,
    expect,
    fill,
    open_tls,
    read,
    read_all,
    reset,
    send_random,
    tcp_pair,
    until,
)

from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.relay import copy_pump
from proxy.forwarder.relay.copy_pump import CopiedRelay, CopyDirection, Stream
from proxy.forwarder.relay.relay import Direction
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.network.tls_session import TlsSession
from proxy.runtime.shared.relay_table import OPERATIONS, TO_BROKER, TO_CLIENT

KINDS = pytest.mark.parametrize("kind", ["plain", "client", "broker", "both", "both 1.2"])
TLS_SOURCES = pytest.mark.parametrize("kind", ["client", "client 1.2", "broker", "broker 1.2"])


class Copies:
    """Copied relays in an engine, each with its lane."""

    def __init__(self, engine: Engine, contexts: Contexts, stack: AsyncExitStack) -> None:
        self.engine = engine
        self._contexts = contexts
        self._stack = stack

    async def lane(self, kind: str, narrow: str = "") -> TlsLane:
        """A lane of which the handshakes are done. ``narrow``: the sides that feel soon where a peer does not read."""
        client, our_client = tcp_pair(buffer_bytes=4096 if "client" in narrow else 0)
        our_broker, broker = tcp_pair(buffer_bytes=4096 if "broker" in narrow else 0)
        lane = Lane(client, broker, our_client, our_broker)
        self._stack.push_async_callback(lane.close)
        return await open_tls(lane, self._contexts, kind)

    async def open(self, kind: str, narrow: str = "") -> tuple[TlsLane, CopiedRelay]:
        tls = await self.lane(kind, narrow)
        return tls, self.engine.copy(tls)

    async def goes_on(self) -> None:
        """Show that another relay is served."""
        other, _ = await self.open("both")
        await other.client.send_all(b"fine")
        await expect(other.broker, b"fine")


@pytest.fixture
async def copies(engine: Engine, certificates: Contexts) -> AsyncIterator[Copies]:
    async with AsyncExitStack() as stack:
        yield Copies(engine, certificates, stack)
        engine.real.abort_relays()


def directions(relay: CopiedRelay) -> tuple[CopyDirection, CopyDirection]:
    to_broker, to_client = relay.to_broker, relay.to_client
    assert isinstance(to_broker, CopyDirection)
    assert isinstance(to_client, CopyDirection)
    return to_broker, to_client


def session_of(stream: Stream) -> TlsSession:
    assert isinstance(stream, TlsStream)
    return stream.session


def was_told_the_end(stream: Stream) -> bool:
    """Whether close_notify has been read, and not only TCP's end."""
    if not isinstance(stream, TlsStream):
        return True
    try:
        stream.session._tls.unwrap()
    except ssl.SSLWantReadError:
        return False
    return True


class Peer:
    """The far end that speaks TLS, which sends what no well-behaved one does, as it likes to cut it."""

    def __init__(self, tls: TlsLane, kind: str) -> None:
        side = kind.partition(" ")[0]
        self.stream: TlsStream = getattr(tls, side)
        self.transport = self.stream.transport
        self.session = self.stream.session
        self.sink: Stream = tls.broker if side == "client" else tls.client
        self.way = TO_BROKER if side == "client" else TO_CLIENT

    def record(self, data: bytes = b"") -> bytes:
        return self.session.encrypt(memoryview(data))

    def damaged(self) -> bytes:
        record = bytearray(self.record(b"damaged"))
        record[-1] ^= 1
        return bytes(record)

    def _call(self, name: str, *arguments: object) -> int:
        """Call a function of OpenSSL's that Python has no name for."""
        # Of PyPySSLSocket: the head of an object, a reference, and the SSL.
        ssl_pointer = ctypes.c_void_p.from_address(id(self.session._tls._sslobj) + object.__basicsize__ + 8)
        return int(getattr(ctypes.CDLL(_ssl.__file__), name)(ssl_pointer, *arguments))

    def _begin(self, name: str, *arguments: object) -> bytes:
        assert self._call(name, *arguments) == 1
        with contextlib.suppress(ssl.SSLWantReadError):
            self.session._tls.do_handshake()
        return self.session.take_outgoing()

    def new_keys(self) -> bytes:
        """A KeyUpdate that asks for one (RFC 8446, section 4.6.3)."""
        return self._begin("SSL_key_update", 1)

    def renegotiation(self) -> bytes:
        self._call("SSL_clear_options", ctypes.c_uint64(ssl.OP_NO_RENEGOTIATION))
        return self._begin("SSL_renegotiate")


def take_nothing(_data: object) -> int:
    """As a socket does of which the peer does not read."""
    raise BlockingIOError


def fail(*_: object) -> int:
    raise ZeroDivisionError


async def hold(source: Stream, direction: CopyDirection, data: bytes = bytes(10_000)) -> Callable[[bytes], int]:
    """Have a direction hold data from a source; what its sink takes it with."""
    send, direction.send = direction.send, take_nothing
    await source.send_all(data)
    await until(lambda: direction.held_bytes)
    return send


# ---- bytes


@KINDS
async def test_bytes_pass_both_ways_and_are_counted(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    for number in range(20):
        await tls.client.send_all(b"there %2d" % number)
        await expect(tls.broker, b"there %2d" % number)
        await tls.broker.send_all(b"back")
        await expect(tls.client, b"back")
    assert copies.engine.moved(relay) == (160, 80)
    assert copies.engine.cells(relay, OPERATIONS) == (20, 20)
    assert len(copies.engine.real) == 1


@KINDS
async def test_bytes_read_ahead_are_forwarded_first(copies: Copies, kind: str) -> None:
    tls = await copies.lane(kind)
    await tls.client.send_all(b"later")
    await tls.broker.send_all(b"message")
    relay = copies.engine.copy(tls, to_broker=b"held ", to_client=b"connected ")
    await expect(tls.broker, b"held later")
    await expect(tls.client, b"connected message")
    assert copies.engine.moved(relay) == (10, 17), "what was read ahead counts too"


@TLS_SOURCES
async def test_records_that_came_with_the_handshake_are_forwarded_first(copies: Copies, kind: str) -> None:
    """Whole ones, which raise no edge, and the beginning of another."""
    tls = await copies.lane(kind)
    peer = Peer(tls, kind)
    ours = session_of(tls.our_client if peer.way == TO_BROKER else tls.our_broker)
    more = peer.record(b"one ") + peer.record(b"two ") + peer.record(b"three")
    ours.unread += more[:-7]
    copies.engine.copy(tls, to_broker=b"zero ", to_client=b"zero ")
    await expect(peer.sink, b"zero one two ")
    await peer.transport.send_all(more[-7:])
    await expect(peer.sink, b"three")


async def test_large_streams_of_many_relays_arrive_whole_and_do_not_mix(copies: Copies) -> None:
    """They share their buffers."""
    size, digests, kinds = 400_000, [], ("plain", "client", "broker", "both", "both 1.2", "client 1.2")
    opened = [await copies.open(kind) for kind in kinds * 2]

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for tls, _ in opened:
                for source, sink in ((tls.client, tls.broker), (tls.broker, tls.client)):
                    digests.append((hashlib.sha256(), hashlib.sha256()))
                    nursery.start_soon(send_random, source, size, 300_000, digests[-1][0])
                    nursery.start_soon(digest_all, sink, [1000, 1 << 18], digests[-1][1])
    assert all(sent.digest() == received.digest() for sent, received in digests)
    for tls, relay in opened:
        await copies.engine.over(relay)
        assert not relay.broken
        assert copies.engine.moved(relay) == (size, size)
        assert was_told_the_end(tls.client)
        assert was_told_the_end(tls.broker)


@TLS_SOURCES
async def test_a_record_in_many_segments(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    peer, sent = Peer(tls, kind), []
    direction = directions(relay)[peer.way]
    send = direction.send

    def watched(data: memoryview | bytes) -> int:
        sent.append(len(data))
        return send(data)

    direction.send = watched
    for byte in peer.record(b"in pieces"):
        await peer.transport.send_all(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
    await expect(peer.sink, b"in pieces")
    assert sent == [9], "nothing is sent where nothing is there"


@TLS_SOURCES
async def test_many_small_records_at_once(copies: Copies, kind: str) -> None:
    tls = await copies.lane(kind)
    peer = Peer(tls, kind)
    said = [b"%d," % number for number in range(3000)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.transport.send_all, b"".join(map(peer.record, said)))
        await trio.testing.wait_all_tasks_blocked()
        relay = copies.engine.copy(tls)
        await expect(peer.sink, b"".join(said))
    assert relay.to_broker.portion_bytes == relay.to_client.portion_bytes == copy_pump.SMALL_PORTION_BYTES, (  # type: ignore[attr-defined]
        "they cost as much as full ones"
    )


@pytest.mark.usefixtures("no_look")
@KINDS
async def test_a_receiver_that_does_not_read_stops_the_sender_and_not_the_other_direction(
    copies: Copies, kind: str
) -> None:
    tls, relay = await copies.open(kind, "client and broker")
    _, to_client = directions(relay)
    data, sent = os.urandom(600_000), trio.Event()

    async def send() -> None:
        await tls.broker.send_all(data)
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await until(lambda: to_client.held_bytes)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert to_client.held_bytes <= copy_pump.PORTION_BYTES + copy_pump.RECORD_BYTES_MAX
        assert to_client.portion_bytes == copy_pump.SMALL_PORTION_BYTES
        assert not sent.is_set()
        assert copies.engine.moved(relay)[TO_CLIENT] < len(data)
        await tls.client.send_all(b"the other way is free")
        await expect(tls.broker, b"the other way is free")
        await expect(tls.client, data)
    assert copies.engine.moved(relay)[TO_CLIENT] == len(data)
    assert not copies.engine.real._copy_pump._holding


@KINDS
async def test_what_a_sink_takes_of_a_portion_counts(copies: Copies, kind: str) -> None:
    """So a half-closed relay lives as long as a slow reader reads, however little at a time."""
    tls, relay = await copies.open(kind)
    to_broker, _ = directions(relay)
    send = to_broker.send
    shares = [2, 4]  # of what is offered; then nothing

    def take_little(data: memoryview | bytes) -> int:
        if not shares:
            raise BlockingIOError
        return send(data[: len(data) // shares.pop()])

    to_broker.send = take_little
    await tls.client.send_all(bytes(1000))
    await until(lambda: not shares)
    assert 600 <= copies.engine.moved(relay)[TO_BROKER] <= 625, "a quarter, and half of the rest"
    assert to_broker.held_bytes
    to_broker.send = send
    to_broker.pump(to_broker)
    await expect(tls.broker, bytes(1000))
    assert copies.engine.moved(relay)[TO_BROKER] == 1000


async def test_directions_that_hold_much_are_few(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all had kept up, before they all stop; the others go on."""
    small, large, count = 1000, 8000, copy_pump.LARGE_HOLDERS_MAX + 16
    monkeypatch.setattr(copy_pump, "SMALL_PORTION_BYTES", small)
    monkeypatch.setattr(copy_pump, "PORTION_BYTES", large)
    stuck = []
    for _ in range(count):
        tls, relay = await copies.open("plain", "broker")
        await tls.client.send_all(bytes(1500))
        await expect(tls.broker, bytes(1500))
        assert directions(relay)[0].portion_bytes == large
        stuck.append((tls.lane.client.socket, directions(relay)[0]))
    for sock, _ in stuck:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(100_000))
    await until(lambda: all(direction.held_bytes for _, direction in stuck))
    held = [direction.held_bytes for _, direction in stuck]
    assert sum(size > small for size in held) <= copy_pump.LARGE_HOLDERS_MAX + 1
    assert max(held) <= large
    assert {direction.portion_bytes for _, direction in stuck} == {small}
    await copies.goes_on()


# ---- what TLS itself says


@pytest.mark.parametrize("kind", ["client", "broker"])
async def test_a_peer_asks_for_new_keys(copies: Copies, kind: str) -> None:
    """What comes behind is read with them, and what it is sent is written with the proxy's own new ones."""
    tls, relay = await copies.open(kind)
    peer = Peer(tls, kind)
    for number in range(3):
        said = peer.record(b"old %d " % number) + peer.new_keys() + peer.record(b"new %d " % number)
        await peer.transport.send_all(said)
        await expect(peer.sink, b"old %d new %d " % (number, number))
        await peer.sink.send_all(b"answer")
        await expect(peer.stream, b"answer")
    await peer.transport.send_all(peer.new_keys() + peer.new_keys())  # OpenSSL may answer the first one later
    peer.session.unread += await read(peer.transport, 27)  # the answer comes by itself
    await peer.sink.send_all(b"read with the keys of the answer")
    await expect(peer.stream, b"read with the keys of the answer")
    assert relay.to_broker.held_bytes == relay.to_client.held_bytes == 0
    assert sum(copies.engine.moved(relay)) == 3 * (12 + 6) + 32, "TLS's own records do not count"


async def test_a_peer_that_asks_for_new_keys_and_reads_nothing(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pump, "RECORDS_HELD_BYTES_MAX", limit := 40_000)
    tls, relay = await copies.open("client")
    peer, to_client = Peer(tls, "client"), directions(relay)[1]
    await hold(tls.broker, to_client)
    assert 0 < (before := to_client.held_bytes) < limit
    answers = 0
    with trio.fail_after(60):
        while not copies.engine.is_over(relay):
            held = to_client.held_bytes
            await peer.transport.send_all(b"".join(peer.new_keys() for _ in range(16)) + peer.record(b"x"))
            await until(lambda: copies.engine.moved(relay)[TO_BROKER] > answers or copies.engine.is_over(relay))  # noqa: B023
            assert to_client.held_bytes <= limit
            assert copies.engine.is_over(relay) or to_client.held_bytes > held
            answers += 1
    assert relay.broken
    assert answers > (limit - before) // (16 * 100)
    await copies.goes_on()


async def test_a_peer_that_asks_for_new_keys_instead_of_sending_ends_its_relay(copies: Copies) -> None:
    tls, relay = await copies.open("client")
    peer = Peer(tls, "client")
    await peer.transport.send_all(peer.record(b"said before") + b"".join(peer.new_keys() for _ in range(33)))
    assert await read_all(tls.broker) == b"said before"
    assert relay.broken
    await copies.goes_on()


async def test_renegotiation_is_refused(copies: Copies) -> None:
    tls, relay = await copies.open("client 1.2")
    peer = Peer(tls, "client")
    await peer.transport.send_all(peer.record(b"x") + peer.renegotiation())
    await expect(tls.broker, b"x")
    await tls.broker.send_all(b"goes on")
    answer = await read(peer.transport, 5)
    assert answer[0] == 21, "an alert"
    await read(peer.transport, int.from_bytes(answer[3:], "big"))
    assert (await read(peer.transport, 5))[0] == 23, "data, and no handshake"
    assert not copies.engine.is_over(relay)


async def test_bytes_that_came_with_what_cannot_be_answered_are_delivered_in_order(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer meets a broken connection, of which more can be read."""
    tls = await copies.lane("client")
    peer = Peer(tls, "client")
    first = peer.record(b"first ") + peer.new_keys() + peer.new_keys()  # OpenSSL may answer the first one later
    monkeypatch.setattr(copy_pump, "SMALL_PORTION_BYTES", len(first))
    await peer.transport.send_all(first + peer.record(b"second"))
    await peer.transport.send_eof()
    relay = copies.engine.copy(tls)

    def broken(_data: object) -> int:
        raise ConnectionResetError

    directions(relay)[1].send = broken
    assert await read_all(tls.broker) == b"first second"
    await copies.engine.over(relay)
    assert relay.broken


# ---- ends


@pytest.mark.conforms("pip-1.17")
@pytest.mark.usefixtures("no_look")
@pytest.mark.parametrize("first", ["client", "broker"])
@KINDS
async def test_half_close_both_ways(copies: Copies, kind: str, first: str) -> None:
    tls, relay = await copies.open(kind)
    one, other = (tls.client, tls.broker) if first == "client" else (tls.broker, tls.client)
    await one.send_all(b"question")
    await one.send_eof()
    assert await read_all(other) == b"question"
    assert not copies.engine.is_over(relay)
    answer = os.urandom(300_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.send_all, answer)
        await expect(one, answer)
    await other.send_eof()
    assert await read_all(one) == b""
    await copies.engine.over(relay)
    assert not relay.broken
    assert was_told_the_end(one)
    assert was_told_the_end(other)


@pytest.mark.usefixtures("no_look")
@KINDS
async def test_bytes_and_the_end_in_one(copies: Copies, kind: str) -> None:
    """Both raise a single edge; the end must not be left waiting for another."""
    tls = await copies.lane(kind)
    for stream, data in ((tls.client, b"x"), (tls.broker, b"y")):
        await stream.send_all(data)
        await stream.send_eof()
    relay = copies.engine.copy(tls)
    assert (await read_all(tls.broker), await read_all(tls.client)) == (b"x", b"y")
    await copies.engine.over(relay)
    assert not relay.broken


@pytest.mark.usefixtures("quick_look")
async def test_urgent_data_holds_nothing_up(copies: Copies) -> None:
    """A read ends before it although more is there, of which no edge tells."""
    tls = await copies.lane("plain")
    sock = tls.lane.client.socket
    for data, flags in ((b"abc", 0), (b"!", socket.MSG_OOB), (b"def", 0)):
        sock.send(data, flags)
    copies.engine.copy(tls)
    await expect(tls.broker, b"abcdef")


@pytest.mark.usefixtures("no_look")
@TLS_SOURCES
async def test_close_notify_alone_is_passed_on_and_the_answer_still_comes(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    peer = Peer(tls, kind)
    await peer.transport.send_all(peer.record(b"question") + peer.session.close() + b"and nothing behind it")
    assert await read_all(peer.sink) == b"question"
    await peer.sink.send_all(b"answer")
    await expect(peer.stream, b"answer")
    await peer.sink.send_eof()
    assert await read_all(peer.stream) == b""
    await copies.engine.over(relay)
    assert not relay.broken
    assert relay.must_linger, "TCP's own end is still to come"


@pytest.mark.usefixtures("no_look")
@TLS_SOURCES
async def test_an_end_that_came_with_the_handshake_is_passed_on(copies: Copies, kind: str) -> None:
    """No edge tells of it, since TCP's own end does not come."""
    tls = await copies.lane(kind)
    peer = Peer(tls, kind)
    ours = session_of(tls.our_client if peer.way == TO_BROKER else tls.our_broker)
    ours.unread += peer.session.close()
    relay = copies.engine.copy(tls)
    assert await read_all(peer.sink) == b""
    await peer.sink.send_eof()
    await copies.engine.over(relay)
    assert not relay.broken
    assert copies.engine.cells(relay, OPERATIONS) == (0, 0), "TLS's own records are none"


@KINDS
async def test_bytes_in_flight_are_delivered_when_the_sender_closes(copies: Copies, kind: str) -> None:
    """TCP's end without close_notify is an end: Pulsar's frames say themselves whether they are whole."""
    tls, relay = await copies.open(kind)
    data = os.urandom(800_000)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await tls.broker.send_all(data)
            await tls.broker.aclose()

        nursery.start_soon(send)
        assert await read_all(tls.client) == data
    assert was_told_the_end(tls.client)
    await tls.client.aclose()
    await copies.engine.over(relay)


@KINDS
async def test_the_reader_goes_while_bytes_are_on_their_way_to_it(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    await tls.client.send_all(b"important")
    await tls.client.aclose()
    await tls.broker.send_all(b"to nobody")
    assert await read_all(tls.broker) == b"important", "what the client had sent still arrives"
    await tls.broker.aclose()
    await copies.engine.over(relay)


@KINDS
async def test_what_is_held_for_a_broken_sink_is_dropped_and_the_other_direction_is_delivered(
    copies: Copies, kind: str
) -> None:
    tls, relay = await copies.open(kind)
    to_broker, _ = directions(relay)
    send = await hold(tls.client, to_broker)
    await tls.broker.send_all(b"it had said this")
    await expect(tls.client, b"it had said this")
    to_broker.send = send
    reset(tls.lane.broker)
    assert await read_all(tls.client) == b""
    await tls.client.aclose()
    await copies.engine.over(relay)
    assert relay.broken
    assert not to_broker.held_bytes
    await copies.goes_on()


@pytest.mark.conforms("pip-1.16")
@pytest.mark.usefixtures("no_look")
@KINDS
async def test_a_broken_source_ends_the_other_side(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    await tls.broker.send_all(b"last words")
    await expect(tls.client, b"last")
    reset(tls.lane.broker)
    assert await read_all(tls.client) == b" words"
    await tls.client.aclose()
    await copies.engine.over(relay)
    assert relay.broken


@pytest.mark.conforms("pip-1.17")
@pytest.mark.usefixtures("quick_look")
@KINDS
async def test_half_close_timeout(copies: Copies, kind: str) -> None:
    tls = await copies.lane(kind)
    relay = copies.engine.copy(tls, half_close_s=0.05)
    await tls.client.send_eof()
    await copies.engine.over(relay)
    assert relay.broken
    assert await read_all(tls.client) == await read_all(tls.broker) == b""


@pytest.mark.usefixtures("quick_look")
@pytest.mark.parametrize("early", [True, False], ids=["with the handshake", "later"])
async def test_an_end_behind_bytes_that_are_not_taken_keeps_a_relay_no_longer_than_the_timeout(
    copies: Copies, *, early: bool
) -> None:
    """Also close_notify, behind which the client's TCP goes on."""
    tls = await copies.lane("client", "broker")
    peer, ours = Peer(tls, "client"), session_of(tls.our_client)
    await fill(tls.lane.our_broker)
    last = peer.record(b"last words") + peer.session.close()
    if early:
        ours.unread += last
    else:
        await peer.transport.send_all(last)
    relay = copies.engine.copy(tls, half_close_s=0.05)
    await copies.engine.over(relay)
    assert relay.broken


@TLS_SOURCES
async def test_a_damaged_record_ends_its_relay_behind_what_came_before(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind)
    peer = Peer(tls, kind)
    with structlog.testing.capture_logs() as logs:
        data = peer.record(b"good ") + peer.record(b"too") + peer.damaged() + peer.record(b"bad")
        await peer.transport.send_all(data)
        assert await read_all(peer.sink) == b"good too"
    assert relay.broken
    [line] = logs
    assert (line["event"], line["log_level"]) == ("a relay ends, since TLS has failed", "warning")
    assert line["side"] == kind.partition(" ")[0]
    assert line["reason"] in {"decryption failed or bad record mac", "bad record mac"}
    with pytest.raises(trio.BrokenResourceError, match=r"bad record mac|decryption failed"):
        await peer.stream.receive_some()  # it is told by an alert
    with structlog.testing.capture_logs() as logs:
        await peer.sink.send_all(b"to nobody")
        await copies.engine.over(relay)
    assert not logs, "no defect of the proxy"
    await copies.goes_on()


async def test_a_damaged_record_that_came_with_the_handshake(copies: Copies) -> None:
    tls = await copies.lane("client")
    peer = Peer(tls, "client")
    session_of(tls.our_client).unread += peer.record(b"good") + peer.damaged()
    relay = copies.engine.copy(tls)
    assert await read_all(tls.broker) == b"good"
    await until(lambda: relay.broken)


@TLS_SOURCES
async def test_close_notify_follows_what_a_sink_takes_late(copies: Copies, kind: str) -> None:
    tls, relay = await copies.open(kind, "client and broker")
    peer = Peer(tls, kind)
    back = relay.to_client if peer.way == TO_BROKER else relay.to_broker
    data = os.urandom(300_000)

    async def send() -> None:
        await peer.sink.send_all(data)
        await peer.sink.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await until(lambda: back.held_bytes)
        assert await read_all(peer.stream) == data
    assert was_told_the_end(peer.stream)


async def test_close_notify_for_which_there_is_no_room_is_sent_later(copies: Copies) -> None:
    tls, relay = await copies.open("client")
    to_client, sent = directions(relay)[1], bytearray()
    send = to_client.send

    def cut(data: memoryview | bytes) -> int:
        """Take half, then nothing for once."""
        sent.extend(data[: len(data) // 2])
        to_client.send = send
        return send(data[: len(data) // 2])

    to_client.send = cut
    await tls.broker.send_eof()
    await until(lambda: to_client.held_bytes)
    assert not to_client.done
    to_client.pump(to_client)
    assert await read_all(tls.client) == b""
    assert sent
    assert was_told_the_end(tls.client)


@pytest.mark.parametrize("kind", ["client", "client 1.2"])
async def test_nothing_is_sent_behind_a_record_that_is_cut_off(copies: Copies, kind: str) -> None:
    """It would be read as the record's rest."""
    tls, relay = await copies.open(kind)
    to_client, sent = directions(relay)[1], []
    await hold(tls.broker, to_client)
    to_client.send = lambda data: sent.append(data) or 0  # type: ignore[func-returns-value]
    session_of(tls.our_client)._outgoing.write(b"an alert")
    copies.engine.real.abort_relay(relay)
    assert not sent
    assert not to_client.held_bytes
    assert not copies.engine.real._copy_pump._holding
    assert len(copies.engine.real) == 0


async def test_nothing_is_sent_behind_a_record_that_an_error_cuts_off(copies: Copies) -> None:
    tls, relay = await copies.open("client")
    to_client, offered = directions(relay)[1], []

    def no_memory(data: object) -> int:
        offered.append(data)
        raise OSError(errno.ENOBUFS, "No buffer space available")

    await hold(tls.broker, to_client)
    to_client.send = no_memory
    to_client.pump(to_client)
    assert len(offered) == 1
    assert to_client.done


async def test_a_relay_that_is_aborted_tells_both_sides_its_end(copies: Copies) -> None:
    tls, relay = await copies.open("both")
    copies.engine.real.abort_relay(relay)
    for stream in (tls.client, tls.broker):
        assert await read_all(stream) == b""
        assert was_told_the_end(stream)
    assert copies.engine.is_over(relay)
    for direction in directions(relay):  # which may still be in the queue
        direction.recv_into = direction.send = fail
        copies.engine.real._copy_pump.pump(direction)
        copies.engine.real._copy_pump.drain_only(direction)


async def test_nothing_is_received_behind_the_end(copies: Copies) -> None:
    tls, relay = await copies.open("client")
    peer, to_broker = Peer(tls, "client"), directions(relay)[0]
    send = await hold(peer.transport, to_broker, peer.record(b"last words") + peer.session.close())
    assert to_broker.source_has_ended
    to_broker.recv_into, to_broker.send = fail, send
    to_broker.pump(to_broker)
    assert await read_all(tls.broker) == b"last words"
    await tls.broker.send_eof()
    await copies.engine.over(relay)
    assert not relay.broken


async def test_the_last_bytes_meet_a_broken_sink(copies: Copies) -> None:
    """The relay ends once."""
    tls, relay = await copies.open("client")
    peer, to_broker = Peer(tls, "client"), directions(relay)[0]
    await tls.broker.send_eof()
    assert await read_all(tls.client) == b""

    def broken(_data: object) -> int:
        raise BrokenPipeError

    to_broker.send = broken
    await peer.transport.send_all(peer.record(b"last words") + peer.session.close())
    await copies.engine.over(relay)
    assert relay.broken


async def test_what_came_from_a_sink_that_is_broken_is_looked_for(copies: Copies) -> None:
    """Its edge may have passed."""
    tls, relay = await copies.open("plain")
    await trio.testing.wait_all_tasks_blocked()
    pumped: list[Direction] = []

    def broken(_data: object) -> int:
        raise ConnectionResetError

    relay.to_broker.pump, directions(relay)[1].send = pumped.append, broken
    await tls.broker.send_all(b"to nobody")
    await until(lambda: pumped == [relay.to_broker])


async def test_tls_says_nothing_to_a_broken_sink(copies: Copies) -> None:
    tls, relay = await copies.open("client")
    to_client, offered = directions(relay)[1], []

    def broken(data: object) -> int:
        offered.append(data)
        raise ConnectionResetError

    to_client.send = broken
    session_of(tls.our_client)._outgoing.write(b"an answer")
    await tls.client.send_all(b"one")
    await expect(tls.broker, b"one")
    assert to_client.done
    before = len(offered)
    session_of(tls.our_client)._outgoing.write(b"an answer")
    await tls.client.send_all(b"two")
    await expect(tls.broker, b"two")
    assert len(offered) == before


@pytest.mark.parametrize("held", [False, True], ids=["sent", "held"])
async def test_tls_says_nothing_behind_its_end(copies: Copies, *, held: bool) -> None:
    tls, relay = await copies.open("client")
    to_client, ours = directions(relay)[1], session_of(tls.our_client)
    send = to_client.send
    if held:
        to_client.send = take_nothing
    await tls.broker.send_eof()
    await until(lambda: to_client.held_bytes if held else to_client.done)
    ours._outgoing.write(b"an answer")
    unsent = to_client.unsent
    await tls.client.send_all(b"still here")
    await expect(tls.broker, b"still here")
    assert not ours.waiting_record_bytes
    assert to_client.unsent == unsent
    to_client.send = send
    to_client.pump(to_client)
    assert await read_all(tls.client) == b""
    assert was_told_the_end(tls.client)
    assert session_of(tls.client).error is None
    await tls.client.send_eof()
    await copies.engine.over(relay)
    assert not relay.broken


@pytest.mark.parametrize("kind", ["plain", "both"])
async def test_a_relay_that_closes_gently_delivers_what_it_holds_and_takes_nothing_more(
    copies: Copies, kind: str
) -> None:
    tls, relay = await copies.open(kind)
    to_broker, _ = directions(relay)
    send = await hold(tls.client, to_broker)
    relay.close(CloseReason.MAX_AGE)
    await tls.client.send_all(b"nothing of this")
    to_broker.send = send
    to_broker.pump(to_broker)
    await expect(tls.broker, bytes(10_000))
    await tls.broker.send_all(b"the last answer")
    await expect(tls.client, b"the last answer")
    await copies.engine.over(relay)
    assert copies.engine.moved(relay) == (10_000, 15)
    assert await read_all(tls.client) == await read_all(tls.broker) == b""


# ---- what goes wrong, and hand-overs


@pytest.mark.parametrize("how", ["open", "closing", "bad descriptor"])
async def test_an_unexpected_error_ends_its_relay_and_no_other(copies: Copies, how: str) -> None:
    tls, relay = await copies.open("client")
    to_broker, _ = directions(relay)

    def bad_descriptor(*_: object) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with structlog.testing.capture_logs() as logs:
        if how == "closing":
            await hold(tls.client, to_broker)
            relay.close(CloseReason.MAX_AGE)
            to_broker.send = fail
            to_broker.pump(to_broker)
        else:
            to_broker.recv_into = fail if how == "open" else bad_descriptor
            await tls.client.send_all(b"x")
        await copies.engine.over(relay)
    assert relay.broken
    assert "a relay was ended by an unexpected error" in {entry["event"] for entry in logs}
    assert not to_broker.held_bytes
    await copies.goes_on()


async def test_a_hand_over_leaves_copied_relays_where_they_are(copies: Copies, lane: Lane) -> None:
    tls, relay = await copies.open("both")
    spliced = copies.engine.open(lane)
    assert copies.engine.real.freeze() == [spliced]
    await tls.client.send_all(b"still here")
    await expect(tls.broker, b"still here")
    assert copies.engine.moved(relay) == (10, 0)
    assert copies.engine.real.relays == [relay]
    await tls.client.aclose()
    assert await read_all(tls.broker) == b""
    await tls.broker.aclose()
    await copies.engine.over(relay)


async def test_copied_relays_end_with_their_engine(certificates: Contexts, lane: Lane) -> None:
    engine = Engine()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.real.run)
        tls = await open_tls(lane, certificates, "both")
        relay = engine.copy(tls)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert engine.is_over(relay)
    assert await read_all(tls.client) == await read_all(tls.broker) == b""
