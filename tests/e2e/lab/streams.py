"""Many relays with random bytes in both directions, each direction checked by its SHA-256, with TLS or without."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from proto import commands
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream

HOST = "127.0.0.1"
SLOWEST_END_S = 60.0
_FRAME_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 16

Stream = trio.SocketStream | TlsStream


@dataclass
class OneWay:
    """One direction of one stream: what its sender sent, and what its receiver got.

    ``sent_before``: digests of what was sent up to a number of bytes, where FollowingStreams send.
    """

    sent_bytes: int = 0
    got_bytes: int = 0
    over: trio.Event = field(default_factory=trio.Event)
    over_at_s: float = 0.0
    sent_before: dict[int, bytes] = field(default_factory=dict)
    longest_silence_s: float = 0.0
    sent: hashlib._Hash = field(default_factory=hashlib.sha256)
    got: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes arrived, none of them twice or changed."""
        return self.sent_bytes == self.got_bytes and self.sent.digest() == self.got.digest()

    @property
    def is_beginning(self) -> bool:
        """Whether what arrived are whole portions, from the first one on, none of them twice or changed."""
        return self.sent_before.get(self.got_bytes) == self.got.digest()


@dataclass
class Streams:
    """So many relays through a proxy, to a broker of our own in this process.

    ``portion_bytes_max``: the random sizes; ``pause_s_max``: how long a sender may rest between two of them;
    ``broker_port``: where the broker listens, 0: anywhere. ``client_tls``, ``broker_tls``: contexts of clients and of
    the broker, where they use TLS.
    """

    proxy_port: int
    count: int
    portion_bytes_max: int = 400_000
    pause_s_max: float = 0.01
    broker_port: int = 0
    client_tls: ssl.SSLContext | None = None
    broker_tls: ssl.SSLContext | None = None
    ways: list[OneWay] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: trio.Event = field(default_factory=trio.Event)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    async def run(self, chaos: Callable[[], Awaitable[None]]) -> None:
        """Open all streams, let them run during ``chaos``, then end them and wait for their last byte."""
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(self.broker_port, host=HOST)
            broker_port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, self._be_broker, listeners)
            async with trio.open_nursery() as clients:
                for _ in range(self.count):
                    stream, rest = await self._connect(broker_port)
                    clients.start_soon(self._be_client, stream, rest)
                await chaos()
                self._stop.set()
                clients.cancel_scope.deadline = trio.current_time() + SLOWEST_END_S
            with trio.move_on_after(SLOWEST_END_S):  # a client may be done before its broker's side
                for way in self.ways:
                    await way.over.wait()
            nursery.cancel_scope.cancel()

    @property
    def not_whole(self) -> list[OneWay]:
        """Directions of which not every byte arrived as it was sent."""
        return [way for way in self.ways if not way.is_whole]

    @property
    def moved_bytes(self) -> int:
        """All that arrived."""
        return sum(way.got_bytes for way in self.ways)

    @property
    def longest_silence_s(self) -> float:
        """The longest time for which a receiver got nothing."""
        return max(way.longest_silence_s for way in self.ways)

    # ---- both ends

    async def _connect(self, broker_port: int) -> tuple[Stream, bytes]:
        plain = await trio.open_tcp_stream(HOST, self.proxy_port)
        stream = await _with_tls(plain, self.client_tls, server_side=False)
        hello = CommandConnect(client_version="streams", protocol_version=commands.PROTOCOL_VERSION)
        hello.proxy_to_broker_url = f"{HOST}:{broker_port}"
        await stream.send_all(commands.connect(hello))
        command, rest = await _first_frame(stream)
        assert command.type == BaseCommand.CONNECTED, command
        return stream, rest

    async def _be_client(self, stream: Stream, rest: bytes) -> None:
        there, back = OneWay(), OneWay()
        self.ways += [there, back]
        number = len(self.ways) - 2
        await stream.send_all(number.to_bytes(4, "big"))  # which stream this is
        await self._both_ways(stream, rest, there, back)

    async def _be_broker(self, plain: trio.SocketStream) -> None:
        stream = await _with_tls(plain, self.broker_tls, server_side=True)
        command, rest = await _first_frame(stream)
        if command.type != BaseCommand.CONNECT:  # a health check's PING
            await stream.aclose()
            return
        await stream.send_all(
            commands.connected(
                CommandConnected(server_version="streams", protocol_version=command.connect.protocol_version)
            )
        )
        while len(rest) < 4:
            data = await stream.receive_some(4096)
            if not data:  # a lookup worker's
                return
            rest += data
        number = int.from_bytes(rest[:4], "big")
        await self._both_ways(stream, rest[4:], self.ways[number + 1], self.ways[number])

    async def _both_ways(self, stream: Stream, rest: bytes, sending: OneWay, getting: OneWay) -> None:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream, sending)
            nursery.start_soon(self._receive, stream, rest, getting)

    async def _send(self, stream: Stream, way: OneWay) -> None:
        try:
            while not self._stop.is_set():
                portion = self._random.randbytes(self._random.choice((1, 100, 3_000, 65_536, self.portion_bytes_max)))
                await stream.send_all(portion)
                way.sent.update(portion)
                way.sent_bytes += len(portion)
                await trio.sleep(self._random.random() * self.pause_s_max)
            await stream.send_eof()
        except trio.BrokenResourceError as error:
            self.errors.append(f"sending: {error.__cause__}")

    async def _receive(self, stream: Stream, rest: bytes, way: OneWay) -> None:
        way.got.update(rest)
        way.got_bytes += len(rest)
        last = trio.current_time()
        try:
            while data := await stream.receive_some(_CHUNK_BYTES):
                way.got.update(data)
                way.got_bytes += len(data)
                now = trio.current_time()
                way.longest_silence_s = max(way.longest_silence_s, now - last)
                last = now
        except trio.BrokenResourceError as error:
            self.errors.append(f"receiving: {error.__cause__}")
        finally:
            way.over_at_s = trio.current_time()
            way.over.set()


@dataclass
class FollowingStreams(Streams):
    """The same between peers that end as soon as the other has, as clients and brokers do. Their portions are so small
    that a socket always has room for one: none is left half sent.
    """

    async def _both_ways(self, stream: Stream, rest: bytes, sending: OneWay, getting: OneWay) -> None:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._send_until, getting.over, stream, sending)
            nursery.start_soon(self._receive, stream, rest, getting)

    async def _send_until(self, ended: trio.Event, stream: Stream, way: OneWay) -> None:
        try:
            while not ended.is_set():
                portion = self._random.randbytes(self._random.choice((1, 100, 3_000)))
                way.sent.update(portion)
                way.sent_bytes += len(portion)
                way.sent_before[way.sent_bytes] = way.sent.digest()
                await stream.send_all(portion)
                with trio.move_on_after(self._random.random() * self.pause_s_max):
                    await ended.wait()
            await stream.send_eof()
        except trio.BrokenResourceError as error:
            self.errors.append(f"sending: {error.__cause__}")


def client_hello(name: str) -> bytes:
    """The first bytes of a TLS client that asks for this name."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


@dataclass
class SniStreams(Streams):
    """The same at a listener with routing by SNI: a ClientHello for ``localhost`` goes first, bytes of no form follow.

    No TLS guards them here, so that what is lost is seen as such, and not as a connection that TLS ended.
    """

    _hellos: set[bytes] = field(default_factory=set)

    async def _connect(self, broker_port: int) -> tuple[Stream, bytes]:
        del broker_port  # the proxy knows it
        stream = await trio.open_tcp_stream(HOST, self.proxy_port)
        hello = client_hello("localhost")
        self._hellos.add(hello)
        await stream.send_all(hello)
        return stream, b""

    async def _be_broker(self, stream: trio.SocketStream) -> None:
        hello, rest = 5, b""
        while len(rest) < hello + 4:
            data = await stream.receive_some(4096)
            assert data, "the connection was closed within its hello"
            rest += data
            hello = 5 + int.from_bytes(rest[3:5])  # a record: its header says how long the rest is
        assert rest[:hello] in self._hellos
        number = int.from_bytes(rest[hello : hello + 4], "big")
        await self._both_ways(stream, rest[hello + 4 :], self.ways[number + 1], self.ways[number])


async def _with_tls(plain: trio.SocketStream, context: ssl.SSLContext | None, *, server_side: bool) -> Stream:
    if context is None:
        return plain
    sock = socket.socket(fileno=plain.socket.detach())
    stream = TlsStream(TcpStream(sock), context, server_side=server_side, host=None if server_side else HOST)
    await stream.handshake()
    return stream


async def _first_frame(stream: Stream) -> tuple[BaseCommand, bytes]:
    decoder = FrameDecoder(max_frame_bytes=_FRAME_BYTES_MAX)
    while (frame := decoder.next_frame()) is None:
        data = await stream.receive_some(65536)
        assert data, "the connection was closed before its first frame"
        decoder.receive_data(data)
    return commands.parse_command(frame.command), decoder.take_unread_data()
