"""The load: clients that speak just enough Pulsar, from this process."""

import time
from dataclasses import dataclass

import trio

from proto import commands
from proto.frames import Frame, FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect

_FRAME_BYTES_MAX = 6 * 1024 * 1024


@dataclass(frozen=True)
class Endpoint:
    """Where clients connect; ``target`` makes it a relay (PIP-1: proxy_to_broker_url)."""

    host: str
    port: int
    target: str = ""


class Client:
    """One connection that has been told CONNECTED."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder(max_frame_bytes=_FRAME_BYTES_MAX)

    @classmethod
    async def connect(cls, endpoint: Endpoint) -> "Client":
        stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        client = cls(stream)
        hello = CommandConnect(client_version="bench", protocol_version=commands.PROTOCOL_VERSION)
        if endpoint.target:
            hello.proxy_to_broker_url = endpoint.target
        await stream.send_all(commands.connect(hello))
        answer = commands.parse_command((await client.receive()).command)
        if answer.type != BaseCommand.CONNECTED:
            raise RuntimeError(f"not connected: {answer}")
        return client

    async def receive(self) -> Frame:
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(262_144)
            if not data:
                raise RuntimeError("the connection was closed")
            self._decoder.receive_data(data)
        return frame


async def pings(endpoint: Endpoint, *, connections: int, count: int) -> float:
    """PING round trips a second. In a relay it is the broker that answers."""
    clients = [await Client.connect(endpoint) for _ in range(connections)]

    async def one(client: Client) -> None:
        for _ in range(count // connections):
            await client.stream.send_all(commands.ping())
            await client.receive()

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(one, client)
    elapsed = time.perf_counter() - started
    for client in clients:
        await client.stream.aclose()
    return count / elapsed


async def connects(endpoint: Endpoint, *, at_once: int, count: int) -> float:
    """Connections a second, from dialling to CONNECTED and close, so many at a time."""

    async def some() -> None:
        for _ in range(count // at_once):
            await (await Client.connect(endpoint)).stream.aclose()

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(some)
    return count / (time.perf_counter() - started)


async def lookups(endpoint: Endpoint, *, window: int, count: int) -> float:
    """Lookups a second on one connection, so many under way at a time."""
    client = await Client.connect(endpoint)
    slots = trio.Semaphore(window)

    async def ask() -> None:
        for number in range(count):
            await slots.acquire()
            lookup = {"topic": "persistent://public/default/bench", "request_id": number, "authoritative": False}
            await client.stream.send_all(
                commands.encode(BaseCommand(type=BaseCommand.LOOKUP, lookup_topic=lookup))  # type: ignore[arg-type]
            )

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for _ in range(count):
            await client.receive()
            slots.release()
    elapsed = time.perf_counter() - started
    await client.stream.aclose()
    return count / elapsed
