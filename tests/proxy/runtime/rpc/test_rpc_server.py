"""proxy.runtime.rpc.server: a caller that misbehaves, and a listener's end."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from runtime_fakes import FRAME_BYTES_MAX, MakeWires, ask, echo

from proto.roles import Role
from proto.rpc_frames import Call, Cancel, Reply, RpcDecoder, encode_call, encode_cancel, encode_reply
from proto.rpc_pb2 import Method, Status
from proxy.common.eager import enter_task
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.rpc import server as rpc_server
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import EAGER_CALLS_PER_TURN_MAX, EagerHandler, RpcRefused, RpcServer

# ---- a server, and a caller that misbehaves


class RawCaller:
    def __init__(self, nursery: trio.Nursery, role: Role = Role.FORWARDER, handlers: Any = None) -> None:
        server = RpcServer(handlers or {Method.ENVELOPE: echo}, max_frame_bytes=FRAME_BYTES_MAX)
        self.stream, theirs = trio.testing.memory_stream_pair()
        self._decoder = RpcDecoder(max_frame_bytes=1 << 24)
        self.ended = trio.Event()

        async def serve() -> None:
            await server.serve_connection(theirs, Caller(role, 1))
            self.ended.set()

        nursery.start_soon(serve)

    async def call(self, correlation_id: int, method: int = Method.ENVELOPE, timeout_ms: int = 60_000) -> None:
        await self.stream.send_all(encode_call(Call(correlation_id, method, timeout_ms, b"")))

    async def read(self) -> Reply:
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(65536)
            assert data, "the server closed"
            self._decoder.receive_data(data)
        assert isinstance(frame, Reply)
        return frame


async def test_a_call_that_is_called_off_ends(nursery: trio.Nursery) -> None:
    ended: list[str] = []

    async def slow(_data: bytes, _caller: Caller) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("slow")
        raise AssertionError

    caller = RawCaller(nursery, handlers={Method.ENVELOPE: slow})
    for correlation_id in (1, 2):
        await caller.call(correlation_id, timeout_ms=60_000)
    await caller.stream.send_all(encode_cancel(Cancel(1)))
    assert (await caller.read()).correlation_id == 1
    assert ended == ["slow"], "and the other goes on"
    await caller.stream.send_all(encode_cancel(Cancel(77)))
    await caller.stream.send_all(encode_cancel(Cancel(2)))
    assert (await caller.read()).correlation_id == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x02\xff\xff",
        b"\x00\x00\x00\x10" + b"\x09" + b"\x00" * 15,
        encode_reply(Reply(1)),
    ],
)
async def test_garbage_from_a_caller_ends_its_connection(nursery: trio.Nursery, garbage: bytes) -> None:
    caller = RawCaller(nursery)
    with structlog.testing.capture_logs() as logs:
        await caller.stream.send_all(garbage)
        await caller.ended.wait()
    assert await caller.stream.receive_some(10) == b""
    assert [entry["event"] for entry in logs] == ["lost an internal connection"]


async def test_a_frame_at_the_limit_passes(wires: MakeWires) -> None:
    text = "x" * (FRAME_BYTES_MAX - 100)
    assert await ask(wires().client(), text) == text


async def test_the_limit_of_calls_in_flight(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_PER_CONNECTION_MAX", 2)
    gate = trio.Event()

    async def gated(data: bytes, _caller: Caller) -> bytes:
        await gate.wait()
        return data

    caller = RawCaller(nursery, handlers={Method.ENVELOPE: gated})
    for number in (1, 2, 3):
        await caller.call(number)
    refused = await caller.read()
    assert (refused.correlation_id, refused.status) == (3, Status.TOO_MANY_REQUESTS)
    gate.set()
    assert {(await caller.read()).correlation_id for _ in range(2)} == {1, 2}
    await caller.call(4)
    assert (await caller.read()).status == Status.OK


@pytest.mark.conforms("kip-590.27")
async def test_a_call_that_takes_too_long_is_told_so(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async def slow(data: bytes, _caller: Caller) -> bytes:
        await trio.sleep(10)
        return data

    caller = RawCaller(nursery, handlers={Method.ENVELOPE: slow})
    await caller.call(1, timeout_ms=2000)
    reply = await caller.read()
    assert (reply.status, trio.current_time()) == (Status.REQUEST_TIMED_OUT, pytest.approx(2))


async def test_a_caller_that_reads_its_replies_late_loses_none(nursery: trio.Nursery) -> None:
    """Large answers wait for room, each in its own call: the connection of all the others must not break."""

    async def large(_data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        return b"x" * 900

    server = RpcServer({Method.ENVELOPE: large}, max_frame_bytes=1000)
    ours, theirs = trio.testing.lockstep_stream_pair()
    nursery.start_soon(server.serve_connection, theirs, Caller(Role.FORWARDER, 1))
    for number in range(100):
        await ours.send_all(encode_call(Call(number, Method.ENVELOPE, 60_000, b"")))
    decoder = RpcDecoder(max_frame_bytes=1000)
    heard: set[int] = set()
    while len(heard) < 100:
        while (frame := decoder.next_frame()) is None:
            decoder.receive_data(await ours.receive_some(300))
        assert isinstance(frame, Reply)
        assert (frame.status, len(frame.response)) == (Status.OK, 900)
        heard.add(frame.correlation_id)
    await ours.aclose()


# ---- handlers that are started without a task


def eager_handler(handle: Any) -> dict[int, Any]:
    return {Method.ENVELOPE: EagerHandler(handle)}


async def test_a_call_that_needs_no_task_is_answered_without_one(nursery: trio.Nursery) -> None:
    async def handle(data: bytes, _caller: Caller) -> bytes:
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        return b"answer to " + data

    caller = RawCaller(nursery, handlers=eager_handler(handle))
    await trio.testing.wait_all_tasks_blocked()
    tasks = trio.lowlevel.current_statistics().tasks_living
    await caller.stream.send_all(encode_call(Call(1, Method.ENVELOPE, 60_000, b"one")))
    reply = await caller.read()
    assert (reply.correlation_id, reply.status, reply.response) == (1, Status.OK, b"answer to one")


async def test_a_call_that_waits_gets_a_task_a_deadline_and_can_be_cancelled(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[bytes] = []

    async def handle(data: bytes, _caller: Caller) -> bytes:
        try:
            await enter_task()
            await trio.sleep_forever()
        finally:
            ended.append(data)
        raise AssertionError

    caller = RawCaller(nursery, handlers=eager_handler(handle))
    for number, timeout_ms in ((1, 60_000), (2, 2000)):
        await caller.stream.send_all(encode_call(Call(number, Method.ENVELOPE, timeout_ms, b"%d" % number)))
    await caller.stream.send_all(encode_cancel(Cancel(1)))
    assert (await caller.read()).correlation_id == 1
    assert ended == [b"1"], "and the other goes on"
    late = await caller.read()
    assert (late.correlation_id, late.status) == (2, Status.REQUEST_TIMED_OUT)
    assert (ended, trio.current_time()) == ([b"1", b"2"], pytest.approx(2))


@pytest.mark.parametrize("in_task", [False, True])
async def test_an_error_ends_that_call_alone(nursery: trio.Nursery, in_task: bool) -> None:
    async def handle(data: bytes, _caller: Caller) -> bytes:
        if in_task:
            await enter_task()
        if data == b"defect":
            raise ZeroDivisionError
        if data == b"refused":
            raise RpcRefused(Status.INVALID_REQUEST, "not so")
        return data

    caller = RawCaller(nursery, handlers=eager_handler(handle))
    with structlog.testing.capture_logs() as logs:
        for number, data in enumerate((b"defect", b"refused", b"good")):
            await caller.stream.send_all(encode_call(Call(number, Method.ENVELOPE, 60_000, data)))
        replies = {reply.correlation_id: reply for reply in [await caller.read() for _ in range(3)]}
    assert [replies[number].status for number in range(3)] == [
        Status.UNKNOWN_SERVER_ERROR,
        Status.INVALID_REQUEST,
        Status.OK,
    ]
    assert replies[0].detail == "ZeroDivisionError"
    assert [entry["event"] for entry in logs] == ["an internal call failed; this is a defect"]


async def test_a_wait_without_a_task_fails_that_call_alone(nursery: trio.Nursery) -> None:
    async def handle(data: bytes, _caller: Caller) -> bytes:
        if data == b"careless":
            await trio.lowlevel.checkpoint()
        return data

    caller = RawCaller(nursery, handlers=eager_handler(handle))
    for number, data in enumerate((b"careless", b"good")):
        await caller.stream.send_all(encode_call(Call(number, Method.ENVELOPE, 60_000, data)))
    assert [(await caller.read()).status for _ in range(2)] == [Status.UNKNOWN_SERVER_ERROR, Status.OK]


async def test_calls_off_what_was_answered_already(nursery: trio.Nursery) -> None:
    async def handle(data: bytes, _caller: Caller) -> bytes:
        return data

    caller = RawCaller(nursery, handlers=eager_handler(handle))
    await caller.stream.send_all(
        encode_call(Call(1, Method.ENVELOPE, 60_000, b"")) + encode_cancel(Cancel(1)) + encode_cancel(Cancel(1))
    )
    assert (await caller.read()).status == Status.OK
    await caller.call(1)
    assert (await caller.read()).correlation_id == 1, "and its number may be used again"


async def test_calls_that_are_answered_at_once_are_no_more_under_way(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_PER_CONNECTION_MAX", 2)
    gate = trio.Event()

    async def handle(data: bytes, _caller: Caller) -> bytes:
        if data == b"wait":
            await enter_task()
            await gate.wait()
        if data == b"defect":
            raise ZeroDivisionError
        return data

    caller = RawCaller(nursery, handlers=eager_handler(handle))

    async def status(number: int, data: bytes) -> int:
        await caller.stream.send_all(encode_call(Call(number, Method.ENVELOPE, 60_000, data)))
        return (await caller.read()).status

    assert [await status(number, b"x") for number in range(3)] == [Status.OK] * 3
    assert [await status(number, b"defect") for number in range(3)] == [Status.UNKNOWN_SERVER_ERROR] * 3
    for number in (10, 11):
        await caller.stream.send_all(encode_call(Call(number, Method.ENVELOPE, 60_000, b"wait")))
    assert await status(12, b"x") == Status.TOO_MANY_REQUESTS, "those in tasks count"
    gate.set()
    assert {(await caller.read()).correlation_id for _ in range(2)} == {10, 11}
    assert await status(13, b"x") == Status.OK


async def test_a_caller_whose_role_may_not_starts_nothing(nursery: trio.Nursery) -> None:
    started: list[bytes] = []

    async def handle(data: bytes, _caller: Caller) -> bytes:
        started.append(data)
        return data

    caller = RawCaller(nursery, role=Role.AUTH, handlers=eager_handler(handle))
    await caller.call(1)
    assert (await caller.read()).status == Status.CLUSTER_AUTHORIZATION_FAILED
    assert started == []


async def test_a_flood_of_calls_leaves_others_their_turn(nursery: trio.Nursery) -> None:
    """All calls of a chunk could be answered in one go: other callers, and the process's tasks, would wait for them."""
    order: list[str] = []

    async def handle(data: bytes, _caller: Caller) -> bytes:
        order.append(data.decode())
        return b""

    async def be_a_task() -> None:
        while True:
            order.append("task")
            await trio.lowlevel.checkpoint()

    nursery.start_soon(Reactor().run)
    await trio.testing.wait_all_tasks_blocked()
    server = RpcServer(eager_handler(handle), max_frame_bytes=FRAME_BYTES_MAX)
    streams = []
    for pid in (1, 2):
        ours, theirs = trio.socket.socketpair()
        streams.append(trio.SocketStream(ours))
        nursery.start_soon(server.serve_connection, trio.SocketStream(theirs), Caller(Role.FORWARDER, pid))
    flooding, patient = streams
    await trio.testing.wait_all_tasks_blocked()
    count = 10 * EAGER_CALLS_PER_TURN_MAX
    calls = [encode_call(Call(number, Method.ENVELOPE, 60_000, b"flood")) for number in range(count)]
    await flooding.send_all(b"".join(calls))
    await patient.send_all(encode_call(Call(1, Method.ENVELOPE, 60_000, b"other")))
    nursery.start_soon(be_a_task)
    replies, decoder = 0, RpcDecoder(max_frame_bytes=FRAME_BYTES_MAX)
    while replies < count:
        decoder.receive_data(await flooding.receive_some(65536))
        while decoder.next_frame() is not None:
            replies += 1
    assert "other" in order[: order.index("flood") + count // 2]
    runs = "".join(one[0] for one in order).replace("o", "").split("t")
    assert max(map(len, runs)) <= 2 * EAGER_CALLS_PER_TURN_MAX, "Trio lets each task run once in a turn, in any order"
    for stream in streams:
        await stream.aclose()
    await server.connections.wait_until_empty(timeout_s=60)
    nursery.cancel_scope.cancel()


# ---- a listener, and its end


class FakeListener(trio.abc.Listener[Any]):
    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](10)
        self.closed = False

    async def accept(self) -> Any:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()

    def come(self) -> trio.abc.HalfCloseableStream:
        ours, theirs = trio.testing.memory_stream_pair()
        theirs.socket = None  # type: ignore[attr-defined]
        self._send.send_nowait(theirs)
        return ours


async def test_a_server_that_accepts_no_more_serves_those_who_are_here(nursery: trio.Nursery) -> None:
    server, listener = RpcServer({Method.ENVELOPE: echo}, max_frame_bytes=FRAME_BYTES_MAX), FakeListener()
    over = trio.Event()

    async def serve() -> None:
        await server.serve_listener(listener, lambda _socket: Caller(Role.FORWARDER, 1))
        over.set()

    nursery.start_soon(serve)
    stream = listener.come()

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return stream

    client = RpcClient(connect, max_frame_bytes=FRAME_BYTES_MAX)
    scope = trio.CancelScope()

    async def call_for_a_while() -> None:
        with scope:
            await client.run()

    nursery.start_soon(call_for_a_while)
    assert await ask(client, "before") == "before"
    assert server.connections.count == 1
    server.stop_accepting()
    listener.come()
    await trio.testing.wait_all_tasks_blocked()
    assert server.connections.count == 1
    assert listener._receive.statistics().current_buffer_used == 1
    assert listener.closed
    assert await ask(client, "after") == "after"
    assert not over.is_set()
    scope.cancel()
    with trio.fail_after(60):
        assert await server.connections.wait_until_empty(timeout_s=60)
        await over.wait()
