"""An RPC server and clients of it, connected in memory."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio
import trio.testing

from proto.roles import Role
from proto.rpc_frames import Call, Cancel, Reply, RpcDecoder, encode_reply
from proto.rpc_pb2 import Method, Text
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import Handler, RpcServer

FRAME_BYTES_MAX = 65536


class Wires:
    """Gives a client connections to a server, as often as it asks, and can cut them."""

    def __init__(self, nursery: trio.Nursery, handlers: Mapping[int, Handler], role: Role) -> None:
        self._nursery = nursery
        self.server = RpcServer(handlers, max_frame_bytes=FRAME_BYTES_MAX)
        self.caller = Caller(role, 4711)
        self.connections: list[trio.CancelScope] = []
        self.refusals = 0
        """How many attempts to refuse before one is let through."""

    async def connect(self) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        if self.refusals:
            self.refusals -= 1
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        scope = trio.CancelScope()
        self.connections.append(scope)
        self._nursery.start_soon(self._serve, theirs, scope)
        return ours

    async def _serve(self, stream: trio.abc.HalfCloseableStream, scope: trio.CancelScope) -> None:
        with scope:
            await self.server.serve_connection(stream, self.caller)

    async def cut(self) -> None:
        """As if the worker died."""
        self.connections[-1].cancel()
        await trio.testing.wait_all_tasks_blocked()

    def client(self) -> RpcClient:
        """A client that is running."""
        client = RpcClient(self.connect, max_frame_bytes=FRAME_BYTES_MAX)
        self._nursery.start_soon(client.run)
        return client


class RawServer:
    """The other end of a client's connection, written frame by frame."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._ends: list[trio.abc.HalfCloseableStream] = []
        self._arrived = trio.Event()
        self.cancelled: list[int] = []
        self._decoder = RpcDecoder(max_frame_bytes=1 << 24)

    async def connect(self) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        ours, theirs = trio.testing.memory_stream_pair()
        self._ends.append(theirs)
        self._decoder = RpcDecoder(max_frame_bytes=1 << 24)
        self._arrived.set()
        return ours

    @property
    def connections(self) -> int:
        return len(self._ends)

    @property
    def stream(self) -> trio.abc.HalfCloseableStream:
        return self._ends[-1]

    async def read(self) -> Call:
        """The next call; what is called off on the way is in ``cancelled``."""
        await self._arrived.wait()
        while True:
            while (frame := self._decoder.next_frame()) is None:
                data = await self.stream.receive_some(65536)
                assert data, "the client closed"
                self._decoder.receive_data(data)
            if isinstance(frame, Call):
                return frame
            assert isinstance(frame, Cancel)
            self.cancelled.append(frame.correlation_id)

    async def reply(self, correlation_id: int, text: str = "", status: int = 0, detail: str = "") -> None:
        body = Text(text=text).SerializeToString()
        await self.stream.send_all(encode_reply(Reply(correlation_id, status, body, detail=detail)))


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what another task brings about, within real time."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 -- no event tells
            await trio.sleep(0.002)


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a call gives or raises."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 -- handed to the test
        return error


MakeWires = Callable[..., Wires]


async def echo(data: bytes, _caller: Caller) -> bytes:
    await trio.lowlevel.checkpoint()
    return data


async def ask(client: RpcClient, text: str = "", method: int = Method.ENVELOPE, **how: Any) -> str:
    how.setdefault("timeout_s", 60.0)
    return (await client.call(method, Text(text=text), Text, **how)).text


def tcp_streams() -> tuple[TcpStream, TcpStream]:
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return TcpStream(one), TcpStream(other)
