"""Many relays of sessions that expire: frames of all sizes in both directions, each direction checked by its SHA-256.

The clients answer every challenge with a fresh token. Clients and the broker are sockets of our own, so that what no
real client would tell is seen: a frame that is torn, doubled, lost, or not meant for whom it reached.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from proto import commands
from proto.frames import Frame, FrameDecoder, encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected

from .streams import HOST, SLOWEST_END_S, OneWay

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]
CLIENT_VERSION = "framed streams"
METHOD = "token"
EXPIRED = "session expired"
TORN = "the end of a stream within a frame"
_FRAME_BYTES_MAX = 2 << 20
_CHUNK_BYTES = 1 << 16
_PAYLOAD_BYTES = (0, 1, 20, 100, 3_000, 40_000, 150_000)
_NOISE = random.Random(1).randbytes(1 << 20)
_BORDERS = (1, 7, 30, 1_000)
_LAST = b"the last one"


@dataclass
class FramedCopyLoop:
    """So many relays through a proxy, to a broker of our own in this process; ``token`` makes a fresh one each time."""

    proxy_port: int
    count: int
    token: Callable[[], str]
    broker_port: int
    tls: ssl.SSLContext | None = None
    pause_s_max: float = 0.1
    ways: list[OneWay] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)
    """What went wrong, and with which stream."""
    expired: set[int] = field(default_factory=set)
    """Those whose client was told that its session has expired. What their brokers got must still end with a frame."""
    challenges: list[int] = field(default_factory=list)
    """Of each stream."""
    _stop: trio.Event = field(default_factory=trio.Event)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    async def run(self, chaos: Callable[[], Awaitable[None]]) -> None:
        """Open all streams, let them run during ``chaos``, then end them and wait for their last byte."""
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(self.broker_port, host=HOST)
            nursery.start_soon(trio.serve_listeners, self._be_broker, listeners)
            async with trio.open_nursery() as clients:
                for _ in range(self.count):
                    clients.start_soon(self._be_client, await self._connect())
                await chaos()
                self._stop.set()
                clients.cancel_scope.deadline = trio.current_time() + SLOWEST_END_S
            with trio.move_on_after(SLOWEST_END_S):  # a client may be done before its broker's side
                for way in self.ways:
                    await way.over.wait()
            nursery.cancel_scope.cancel()

    @property
    def not_whole(self) -> list[OneWay]:
        """Directions of which not every byte arrived as it was sent, of those that have not expired."""
        return [way for at, way in enumerate(self.ways) if not way.is_whole and at // 2 not in self.expired]

    @property
    def errors(self) -> list[str]:
        """What went wrong with those that have not expired."""
        return [text for number, text in self.said if number not in self.expired or text == TORN]

    @property
    def moved_bytes(self) -> int:
        """All that arrived."""
        return sum(way.got_bytes for way in self.ways)

    # ---- the client

    async def _connect(self) -> Peer:
        stream: Stream = await trio.open_tcp_stream(HOST, self.proxy_port)
        if self.tls is not None:
            stream = trio.SSLStream(stream, self.tls, server_hostname="localhost")
        hello = CommandConnect(
            client_version=CLIENT_VERSION,
            protocol_version=commands.PROTOCOL_VERSION,
            auth_method_name=METHOD,
            auth_data=self.token().encode(),
            proxy_to_broker_url=f"{HOST}:{self.broker_port}",
            feature_flags={"supports_auth_refresh": True},
        )
        peer = Peer(stream)
        await stream.send_all(commands.connect(hello))
        command = await peer.next_command()
        assert command.type == BaseCommand.CONNECTED, command
        return peer

    async def _be_client(self, peer: Peer) -> None:
        there, back = OneWay(), OneWay()
        number = len(self.challenges)
        self.challenges.append(0)
        self.ways += [there, back]
        await peer.send(_frame(BaseCommand.SEND, number, b""))  # which stream this is
        await self._both_ways(peer, there, back, number, is_client=True)

    async def _answer(self, peer: Peer, number: int) -> None:
        self.challenges[number] += 1
        token = self.token().encode()
        await peer.send(commands.auth_response(CLIENT_VERSION, commands.PROTOCOL_VERSION, METHOD, token))

    # ---- the broker

    async def _be_broker(self, stream: trio.SocketStream) -> None:
        peer = Peer(stream)
        command = await peer.next_command()
        if command.type != BaseCommand.CONNECT:  # a health check's PING
            await stream.aclose()
            return
        version = command.connect.protocol_version
        await stream.send_all(commands.connected(CommandConnected(server_version="framed", protocol_version=version)))
        first = await peer.next_command()
        if first.type != BaseCommand.SEND:  # a lookup worker's
            return
        number = first.send.producer_id
        there, back = self.ways[2 * number], self.ways[2 * number + 1]
        await self._both_ways(peer, back, there, number, is_client=False)

    # ---- both

    async def _both_ways(self, peer: Peer, sending: OneWay, getting: OneWay, number: int, *, is_client: bool) -> None:
        async with peer.stream:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    self._send, peer, sending, number, BaseCommand.SEND if is_client else BaseCommand.MESSAGE
                )
                nursery.start_soon(self._receive, peer, getting, number, is_client)
            await sending.over.wait()  # a close might take away what is still on its way

    async def _send(self, peer: Peer, way: OneWay, number: int, kind: int) -> None:
        try:
            payload = b""
            while payload != _LAST:
                size, at = self._random.choice(_PAYLOAD_BYTES), self._random.randrange(len(_NOISE) // 2)
                payload = _NOISE[at : at + size]
                if self._stop.is_set():
                    payload = _LAST
                frame = _frame(kind, 0, payload)
                await peer.send(frame, torn_at=self._random.choice(_BORDERS))
                way.sent.update(frame)
                way.sent_bytes += len(frame)
                await trio.sleep(self._random.random() * self.pause_s_max)
        except trio.BrokenResourceError as error:
            self.said.append((number, f"sending: {error.__cause__}"))

    async def _receive(self, peer: Peer, way: OneWay, number: int, is_client: bool) -> None:
        try:
            while (frame := await peer.next_frame()) is not None:
                command = commands.parse_command(frame.command)
                if command.type == BaseCommand.AUTH_CHALLENGE and is_client:
                    await self._answer(peer, number)
                    continue
                data = frame.encode()
                way.got.update(data)
                way.got_bytes += len(data)
                if command.type not in {BaseCommand.SEND, BaseCommand.MESSAGE}:
                    self._note(number, command, is_client=is_client)
                if data.endswith(_LAST):
                    return
            self.said.append((number, "an early end" if peer.is_at_boundary else TORN))
        except trio.BrokenResourceError as error:
            self.said.append((number, f"receiving: {error.__cause__}"))
        finally:
            way.over.set()

    def _note(self, number: int, command: BaseCommand, *, is_client: bool) -> None:
        self.said.append((number, f"received: {command}"))
        if is_client and command.error.message.endswith(EXPIRED):
            self.expired.add(number)


class Peer:
    """A connection's end, in frames. Frames are whole, from either sender."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder(max_frame_bytes=_FRAME_BYTES_MAX)
        self._sending = trio.Lock()

    async def send(self, frame: bytes, *, torn_at: int = 0) -> None:
        """One frame; ``torn_at``: what stands before it is sent by itself."""
        async with self._sending:
            for part in (frame[:torn_at], frame[torn_at:]):
                if part:
                    await self.stream.send_all(part)

    @property
    def is_at_boundary(self) -> bool:
        """Whether nothing of a further frame has come; to be asked at the end."""
        return not self._decoder.take_unread_data()

    async def next_frame(self) -> Frame | None:
        """The next one; None: the other side has ended."""
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(_CHUNK_BYTES)
            if not data:
                return None
            self._decoder.receive_data(data)
        return frame

    async def next_command(self) -> BaseCommand:
        """That of the next frame; none of any type where the other side has ended."""
        frame = await self.next_frame()
        return BaseCommand() if frame is None else commands.parse_command(frame.command)


def _frame(kind: int, number: int, payload: bytes) -> bytes:
    """A SEND or MESSAGE as clients and brokers write it."""
    if kind == BaseCommand.SEND:
        command = BaseCommand(type=kind, send={"producer_id": number, "sequence_id": 1}).SerializeToString()
    else:
        command = b"\x08\x09\x4a\x04\x08\x01\x12\x00"  # proto/pulsar.proto has no more of a MESSAGE than its number
    return encode_frame(command, payload)
