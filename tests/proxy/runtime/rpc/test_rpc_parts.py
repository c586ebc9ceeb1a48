"""proxy.runtime.rpc.client and rpc_server where no task waits: calls begun at once, and replies that come in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from runtime_fakes import FRAME_BYTES_MAX, RawServer, Wires, outcome

from proto.roles import Role
from proto.rpc_frames import Call, Reply, RpcDecoder, encode_call, encode_reply
from proto.rpc_pb2 import Empty, Method, Status, Text
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc import server as rpc_server
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcResponseCorrupt
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import WAITING_BYTES_MAX, ReplyStream, RpcRefused, RpcServer, StreamingHandler


@pytest.fixture
async def client(raw: RawServer, nursery: trio.Nursery) -> RpcClient:
    client = RpcClient(raw.connect, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)
    await trio.testing.wait_all_tasks_blocked()
    return client


async def send_reply(
    raw: RawServer, correlation_id: int, response: bytes = b"", *, more: bool = False, status: int = 0
) -> None:
    await raw.stream.send_all(encode_reply(Reply(correlation_id, status, response, more)))
    await trio.testing.wait_all_tasks_blocked()


Heard = list[tuple[bytes, bool] | None]


def listener(heard: Heard) -> Callable[[Reply | None], None]:
    return lambda reply: heard.append(None if reply is None else (reply.response, reply.has_more))


def start_call(client: RpcClient, heard: Heard, body: bytes = b"body", timeout_s: float = 5.0) -> bool:
    deadline = trio.current_time() + timeout_s
    number = client.start_call(
        Method.ENVELOPE, body, listener(heard), timeout_ms=int(timeout_s * 1000), deadline=deadline
    )
    return number is not None


# ---- the caller: a call without a task


async def test_a_call_without_a_task(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []
    assert start_call(client, heard, timeout_s=60)
    assert client.in_flight == 1
    call = await raw.read()
    assert (call.method, call.request, call.timeout_ms) == (Method.ENVELOPE, b"body", 60_000)
    await send_reply(raw, call.correlation_id, b"answer")
    assert heard == [(b"answer", False)]
    assert client.in_flight == 0


async def test_its_reply_may_come_in_parts(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []
    start_call(client, heard)
    call = await raw.read()
    await send_reply(raw, call.correlation_id, b"a", more=True)
    await send_reply(raw, call.correlation_id, b"b", more=True)
    assert client.in_flight == 1
    await send_reply(raw, call.correlation_id, b"c")
    await send_reply(raw, call.correlation_id, b"too much")
    assert heard == [(b"a", True), (b"b", True), (b"c", False)]
    assert client.in_flight == 0


async def test_a_refusal_is_a_reply(raw: RawServer, client: RpcClient) -> None:
    replies: list[Reply | None] = []
    client.start_call(Method.ENVELOPE, b"", replies.append, timeout_ms=5000, deadline=trio.current_time() + 5)
    await send_reply(raw, (await raw.read()).correlation_id, status=Status.TOO_MANY_REQUESTS)
    [reply] = replies
    assert reply is not None
    assert reply.status == Status.TOO_MANY_REQUESTS


async def test_calls_of_one_tick_are_sent_together_at_its_end(raw: RawServer, nursery: trio.Nursery) -> None:
    ours, theirs = (trio.SocketStream(end) for end in trio.socket.socketpair())

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return ours

    client = RpcClient(connect, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)
    await trio.testing.wait_all_tasks_blocked()
    with current_tick():
        start_call(client, [], b"one")
        start_call(client, [], b"two")
        with pytest.raises(BlockingIOError):
            theirs.socket._sock.recv(1)  # type: ignore[attr-defined]
    decoder = RpcDecoder(max_frame_bytes=FRAME_BYTES_MAX)
    decoder.receive_data(theirs.socket._sock.recv(65536))  # type: ignore[attr-defined]
    calls = [decoder.next_frame(), decoder.next_frame()]
    assert [call.request for call in calls if isinstance(call, Call)] == [b"one", b"two"]
    await theirs.aclose()
    nursery.cancel_scope.cancel()


async def test_without_a_connection_there_is_no_now(nursery: trio.Nursery) -> None:
    async def unreachable() -> trio.abc.HalfCloseableStream:
        await trio.sleep_forever()
        raise AssertionError

    client = RpcClient(unreachable, max_frame_bytes=FRAME_BYTES_MAX)
    heard: Heard = []
    assert not start_call(client, heard)
    nursery.start_soon(client.run)
    await trio.testing.wait_all_tasks_blocked()
    assert not start_call(client, heard)
    assert (client.in_flight, heard) == (0, [])


async def test_once_the_connection_is_lost_there_is_no_now(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []
    start_call(client, heard)
    await raw.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [None]
    assert not start_call(client, heard)
    assert (heard, client.in_flight) == ([None], 0)


async def test_while_quiesced_there_is_no_now(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []
    assert await client.quiesce(timeout_s=1)
    assert not start_call(client, heard)
    client.resume()
    assert start_call(client, heard)
    assert (await raw.read()).request == b"body"


async def test_a_call_without_a_task_is_waited_for_before_all_is_quiet(
    raw: RawServer, client: RpcClient, autojump_clock: trio.testing.MockClock
) -> None:
    start_call(client, [])
    assert not await client.quiesce(timeout_s=0.1)
    await send_reply(raw, (await raw.read()).correlation_id)
    assert await client.quiesce(timeout_s=0.1)


async def test_where_the_worker_does_not_keep_up_there_is_no_now(nursery: trio.Nursery) -> None:
    ours, _theirs = trio.testing.lockstep_stream_pair()

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return ours

    client = RpcClient(connect, max_frame_bytes=100)
    nursery.start_soon(client.run)
    await trio.testing.wait_all_tasks_blocked()
    heard: Heard = []
    taken = 0
    while start_call(client, heard, b"x" * 80):
        taken += 1
        assert taken < 100
    assert 0 < taken == client.in_flight, "what did not go out is not waited for"
    assert heard == []
    nursery.cancel_scope.cancel()


async def test_the_deadline_of_a_call_without_a_task(
    raw: RawServer, client: RpcClient, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[float] = []
    heard: Heard = []

    def on_reply(reply: Reply | None) -> None:
        ended.append(trio.current_time())
        listener(heard)(reply)

    started = trio.current_time()
    client.start_call(Method.ENVELOPE, b"", on_reply, timeout_ms=3000, deadline=started + 3)
    call = await raw.read()
    await send_reply(raw, call.correlation_id, b"a part", more=True)
    await trio.sleep(10)
    assert heard == [(b"a part", True), None], "told once"
    assert 3.0 <= ended[1] - started <= 3.25
    assert client.suspect
    assert client.in_flight == 0
    await send_reply(raw, call.correlation_id, b"late")
    assert len(heard) == 2, "what comes after the deadline is dropped"
    assert not client.suspect, "but it shows that the worker is there"


async def test_only_calls_without_a_task_are_ended_here(
    raw: RawServer, client: RpcClient, autojump_clock: trio.testing.MockClock
) -> None:
    """The other kind's caller keeps its own time."""
    async with client.open_call(Method.ENVELOPE, b"", trio.current_time() + 1) as call:
        await trio.sleep(5)
        assert not client.suspect
        await send_reply(raw, (await raw.read()).correlation_id, b"late but welcome")
        assert await call.next_part() == (b"late but welcome", False)


async def test_when_the_worker_goes_each_is_told_once(raw: RawServer, client: RpcClient) -> None:
    heard: list[Heard] = [[], [], []]
    for one in heard:
        start_call(client, one)
    answered = await raw.read()
    await send_reply(raw, answered.correlation_id, b"in time")
    await raw.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [[(b"in time", False)], [None], [None]]


async def test_a_listener_that_raises_leaves_other_calls_unharmed(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []

    def broken(_reply: Reply | None) -> None:
        raise ZeroDivisionError

    client.start_call(Method.ENVELOPE, b"", broken, timeout_ms=5000, deadline=trio.current_time() + 5)
    client.start_call(Method.ENVELOPE, b"", broken, timeout_ms=5000, deadline=trio.current_time() + 5)
    start_call(client, heard)
    with structlog.testing.capture_logs() as logs:
        await send_reply(raw, (await raw.read()).correlation_id, b"x")
        await raw.read()
        await send_reply(raw, (await raw.read()).correlation_id, b"y")
        assert heard == [(b"y", False)]
        start_call(client, heard)
        await raw.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
    assert heard == [(b"y", False), None]
    assert [entry["log_level"] for entry in logs] == ["error", "error"]


async def test_no_call_without_a_task_outlives_the_client(raw: RawServer) -> None:
    client = RpcClient(raw.connect, max_frame_bytes=FRAME_BYTES_MAX)
    heard: Heard = []
    async with trio.open_nursery() as running:
        running.start_soon(client.run)
        await trio.testing.wait_all_tasks_blocked()
        start_call(client, heard)
        running.cancel_scope.cancel()
    assert heard == [None]
    assert not start_call(client, heard)


async def test_a_call_without_a_task_that_is_cancelled_gets_no_reply(raw: RawServer, client: RpcClient) -> None:
    heard: Heard = []
    deadline = trio.current_time() + 5
    number = client.start_call(Method.AUTHENTICATE, b"body", listener(heard), timeout_ms=5000, deadline=deadline)
    assert number is not None
    client.cancel_call(number)
    client.cancel_call(number)
    assert await raw.read() == Call(number, Method.AUTHENTICATE, 5000, b"body")
    await send_reply(raw, number)
    start_call(client, heard)
    await raw.read()
    assert raw.cancelled == [number], "the worker is told once"
    assert (heard, client.in_flight) == ([], 1)


# ---- the caller: a task that waits for parts


async def test_parts_are_given_as_they_come(raw: RawServer, client: RpcClient) -> None:
    async with client.open_call(Method.ENVELOPE, b"body", trio.current_time() + 5) as call:
        correlation_id = (await raw.read()).correlation_id
        await send_reply(raw, correlation_id, b"a", more=True)
        await send_reply(raw, correlation_id, b"b", more=True)
        assert await call.next_part() == (b"a", True)
        assert await call.next_part() == (b"b", True)
        await send_reply(raw, correlation_id, b"c")
        assert await call.next_part() == (b"c", False)
    assert client.in_flight == 0


async def test_reply_parts_received_before_a_connection_loss_are_delivered(raw: RawServer, client: RpcClient) -> None:
    async with client.open_call(Method.ENVELOPE, b"", trio.current_time() + 5) as call:
        await send_reply(raw, (await raw.read()).correlation_id, b"a", more=True)
        await raw.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await call.next_part() == (b"a", True)
        with pytest.raises(RpcConnectionLost):
            await call.next_part()


async def test_a_refusal_after_a_part(raw: RawServer, client: RpcClient) -> None:
    async with client.open_call(Method.ENVELOPE, b"", trio.current_time() + 5) as call:
        correlation_id = (await raw.read()).correlation_id
        await send_reply(raw, correlation_id, b"a", more=True)
        await send_reply(raw, correlation_id, status=Status.UNKNOWN_SERVER_ERROR)
        assert await call.next_part() == (b"a", True)
        with pytest.raises(RpcCallRefused):
            await call.next_part()


async def test_parts_of_an_abandoned_call_are_dropped(raw: RawServer, client: RpcClient) -> None:
    async with client.open_call(Method.ENVELOPE, b"", trio.current_time() + 5):
        correlation_id = (await raw.read()).correlation_id
        await send_reply(raw, correlation_id, b"a", more=True)
    await send_reply(raw, correlation_id, b"b")
    assert client.in_flight == 0


async def test_a_part_where_the_whole_is_expected(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(client.call, Method.ENVELOPE, Empty(), Text, timeout_s=60)))

    nursery.start_soon(one)
    await send_reply(raw, (await raw.read()).correlation_id, b"", more=True)
    assert [type(result) for result in results] == [RpcResponseCorrupt]
    assert client.in_flight == 0


# ---- the answering side


class Scripted:
    """A handler in parts that remembers whom it owes an answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, Caller]] = []
        self.answers: list[ReplyStream] = []
        self.failure: Exception | None = None

    def __call__(self, data: bytes, caller: Caller, answer: ReplyStream) -> None:
        self.asked.append((data, caller))
        self.answers.append(answer)
        if self.failure is not None:
            raise self.failure


class Line:
    """A server of one handler in parts, and its caller, written frame by frame."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        narrow: bool = False,
        max_frame_bytes: int = FRAME_BYTES_MAX,
        max_waiting_bytes: int = WAITING_BYTES_MAX,
        beside: Line | None = None,
        pid: int = 1,
    ) -> None:
        """``beside``: another line of the same server."""
        self.handler = Scripted() if beside is None else beside.handler
        handlers = {Method.ENVELOPE: StreamingHandler(self.handler)}
        self.server = RpcServer(handlers, max_frame_bytes=max_frame_bytes, max_waiting_bytes=max_waiting_bytes)
        if beside is not None:
            self.server = beside.server
        pair = trio.testing.lockstep_stream_pair if narrow else trio.testing.memory_stream_pair
        self.stream, theirs = pair()
        self._decoder = RpcDecoder(max_frame_bytes=1 << 24)
        self.ended = trio.Event()

        async def serve() -> None:
            await self.server.serve_connection(theirs, Caller(Role.FORWARDER, pid))
            self.ended.set()

        nursery.start_soon(serve)

    async def call(self, correlation_id: int, request: bytes = b"") -> None:
        await self.stream.send_all(encode_call(Call(correlation_id, Method.ENVELOPE, 1000, request)))
        await trio.testing.wait_all_tasks_blocked()

    async def read(self) -> Reply:
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(65536)
            assert data, "the server closed"
            self._decoder.receive_data(data)
        assert isinstance(frame, Reply)
        return frame

    async def nothing_more(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        assert self._decoder.next_frame() is None
        with trio.move_on_after(0.01):
            pytest.fail(f"{await self.stream.receive_some(100)!r}")


@pytest.fixture
def line(nursery: trio.Nursery) -> Line:
    return Line(nursery)


async def test_a_handler_in_parts_answers_when_it_can(line: Line) -> None:
    await line.call(1, b"one")
    await line.call(2, b"two")
    assert [data for data, _ in line.handler.asked] == [b"one", b"two"]
    assert line.handler.asked[0][1] == Caller(Role.FORWARDER, 1)
    first, second = line.handler.answers
    assert (first._call.request, second._call.request) == (b"", b""), "kept by the handler alone, if it needs it"
    second(b"2a", True)
    first(b"1", False)
    second(b"2b", False)
    replies = [await line.read() for _ in range(3)]
    assert [(one.correlation_id, one.response, one.has_more, one.status) for one in replies] == [
        (2, b"2a", True, Status.OK),
        (1, b"1", False, Status.OK),
        (2, b"2b", False, Status.OK),
    ]


async def test_a_client_hears_every_part(nursery: trio.Nursery) -> None:
    """Both ends together."""
    handler = Scripted()
    client = Wires(nursery, {Method.ENVELOPE: StreamingHandler(handler)}, Role.FORWARDER).client()  # type: ignore[dict-item]
    async with client.open_call(Method.ENVELOPE, b"q", trio.current_time() + 5) as call:
        await trio.testing.wait_all_tasks_blocked()
        handler.answers[0](b"a", True)
        handler.answers[0](b"b", False)
        assert [await call.next_part(), await call.next_part()] == [(b"a", True), (b"b", False)]


@pytest.mark.conforms("kip-590.15")
@pytest.mark.parametrize("role", [Role.AUTH, Role.LOOKUP])
async def test_the_role_table_holds_for_handlers_in_parts(nursery: trio.Nursery, role: Role) -> None:
    """Security: KIP-590's ClusterAction."""
    handler = Scripted()
    client = Wires(nursery, {Method.ENVELOPE: StreamingHandler(handler)}, role).client()  # type: ignore[dict-item]
    with structlog.testing.capture_logs(), pytest.raises(RpcCallRefused) as caught:
        await client.call(Method.ENVELOPE, Empty(), Empty, timeout_s=60)
    assert caught.value.status == Status.CLUSTER_AUTHORIZATION_FAILED
    assert handler.asked == []


@pytest.mark.parametrize(
    ("failure", "status", "logged"),
    [
        (RpcRefused(Status.INVALID_REQUEST, "because"), Status.INVALID_REQUEST, 0),
        (ZeroDivisionError("secret detail"), Status.UNKNOWN_SERVER_ERROR, 1),
    ],
)
async def test_an_exception_of_a_handler_in_parts_becomes_its_reply(
    line: Line, failure: Exception, status: int, logged: int
) -> None:
    line.handler.failure = failure
    with structlog.testing.capture_logs() as logs:
        await line.call(1)
    reply = await line.read()
    assert (reply.correlation_id, reply.status, reply.has_more) == (1, status, False)
    assert "secret detail" not in reply.detail
    assert len(logs) == logged
    line.handler.answers[0](b"late", False)
    await line.nothing_more()


async def test_after_the_last_part_nothing_more_is_said(line: Line) -> None:
    await line.call(1)
    line.handler.answers[0](b"all", False)
    line.handler.answers[0](b"more", True)
    line.handler.answers[0](b"again", False)
    assert (await line.read()).response == b"all"
    await line.nothing_more()


async def test_calls_in_parts_count_until_their_last_part(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_PER_CONNECTION_MAX", 2)
    line = Line(nursery)
    for number in (1, 2, 3):
        await line.call(number)
    refused = await line.read()
    assert (refused.correlation_id, refused.status) == (3, Status.TOO_MANY_REQUESTS)
    line.handler.answers[0](b"", True)
    await line.call(4)
    assert [(await line.read()).correlation_id, (await line.read()).status] == [1, Status.TOO_MANY_REQUESTS]
    line.handler.answers[0](b"", False)
    line.handler.answers[0](b"", False)  # counted once
    line.handler.failure = RpcRefused(Status.INVALID_REQUEST, "")
    for number in (5, 6):  # a failure is a last part too
        await line.call(number)
    line.handler.failure = None
    for number in (7, 8):
        await line.call(number)
    statuses = [(await line.read()).status for _ in range(4)]
    assert statuses == [Status.OK, Status.INVALID_REQUEST, Status.INVALID_REQUEST, Status.TOO_MANY_REQUESTS]


async def test_answers_after_the_caller_has_gone_are_dropped(line: Line) -> None:
    await line.call(1)
    await line.call(2)
    line.handler.answers[0](b"a", True)
    await line.stream.aclose()
    await line.ended.wait()
    for answer in line.handler.answers:
        answer(b"x" * FRAME_BYTES_MAX, True)
        answer(b"late", False)


@pytest.mark.parametrize("fill", range(1, 12))
async def test_answers_while_the_connection_ends_start_nothing(nursery: trio.Nursery, fill: int) -> None:
    """The nursery closes a moment before the connection does; what then finds the writer full must not reach it."""
    line = Line(nursery, narrow=True, max_frame_bytes=100)
    await line.call(1)
    answer = line.handler.answers[0]
    for _ in range(fill):  # the writer is nearly full, full, or more than that
        answer(b"x" * 90, True)
    await trio.testing.wait_all_tasks_blocked()
    await line.stream.aclose()
    with structlog.testing.capture_logs():
        await line.ended.wait()
        for _ in range(12):
            answer(b"x" * 90, True)
    answer(b"", False)


async def test_parts_keep_their_order_where_the_caller_reads_slowly(nursery: trio.Nursery) -> None:
    """The last part ends the call at its caller: one that is late behind it would be lost."""
    line = Line(nursery, narrow=True, max_frame_bytes=1000)
    await line.call(1)
    await line.call(2)
    first, second = line.handler.answers
    for number in range(40):
        first(b"%03d" % number + b"x" * 900, True)
        second(b"%03d" % number, True)
    first(b"end", False)
    second(b"end", False)
    heard: dict[int, list[bytes]] = {1: [], 2: []}
    ends = 0
    while ends < 2:
        reply = await line.read()
        heard[reply.correlation_id].append(reply.response[:3])
        ends += not reply.has_more
    expected = [b"%03d" % number for number in range(40)] + [b"end"]
    assert heard == {1: expected, 2: expected}


async def test_a_caller_that_reads_no_replies_loses_its_connection(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: a caller that was taken over must not fill its worker's memory."""
    monkeypatch.setattr("proxy.runtime.rpc.server.UNCHECKED_BYTES", 0)
    line = Line(nursery, narrow=True, max_frame_bytes=100, max_waiting_bytes=2000)
    await line.call(1)
    answer = line.handler.answers[0]
    with structlog.testing.capture_logs() as logs:
        for _ in range(17):  # eight frames in the buffer, one on its way, and the rest behind them
            answer(b"x" * 90, True)
            await trio.testing.wait_all_tasks_blocked()
        assert not line.ended.is_set()
        for _ in range(3):
            answer(b"x" * 90, True)
        await line.ended.wait()
    assert [entry["reason"] for entry in logs] == ["the caller does not take its replies"]
    answer(b"", False)


async def test_unsent_replies_are_bounded_over_all_connections(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: a caller that was taken over spreads what it does not read over its connections, each within the bound.
    It loses them, until the rest is within the bound, and a caller that only reads slowly keeps its own.
    """
    monkeypatch.setattr("proxy.runtime.rpc.server.UNCHECKED_BYTES", 0)
    slow = Line(nursery, narrow=True, max_frame_bytes=100, max_waiting_bytes=4000)
    captured = [Line(nursery, narrow=True, beside=slow, pid=666) for _ in range(4)]
    for number, line in enumerate((slow, *captured)):
        await line.call(number)
    mine, *others = slow.handler.answers
    for _ in range(15):
        mine(b"x" * 90, True)
    for _ in range(15):
        for answer in others:
            answer(b"x" * 90, True)
        await trio.testing.wait_all_tasks_blocked()
        assert sum(one.waiting_bytes for one in slow.server._open) <= 4000
    assert [line.ended.is_set() for line in captured].count(True) >= 3
    assert not slow.ended.is_set()
    mine(b"end", False)
    while (await slow.read()).has_more:
        pass


async def test_a_reply_of_the_largest_size_may_wait(nursery: trio.Nursery) -> None:
    line = Line(nursery, narrow=True, max_frame_bytes=1 << 20, max_waiting_bytes=1000)
    await line.call(1)
    line.handler.answers[0](b"x" * ((1 << 20) - 100), False)
    assert len((await line.read()).response) == (1 << 20) - 100


async def test_a_call_is_under_way_until_its_reply_is_written(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.runtime.rpc.server.CALLS_PER_CONNECTION_MAX", 20)
    line = Line(nursery, narrow=True, max_frame_bytes=100)
    for number in range(20):
        await line.call(number)
        line.handler.answers[number](b"x" * 90, False)
    for _ in range(20):
        await line.read()
    await line.call(20)
    assert len(line.handler.asked) == 21, "all were read"
    for number in range(21, 80):
        await line.call(number)
        for answer in line.handler.answers[20:]:
            answer(b"x" * 90, False)
    assert len(line.handler.asked) < 60
    replies = [await line.read() for _ in range(60)]
    assert {reply.status for reply in replies} == {Status.OK, Status.TOO_MANY_REQUESTS}


@pytest.mark.parametrize("narrow", [True, False])
async def test_wait_until_sent_returns_when_the_replies_are_sent(nursery: trio.Nursery, narrow: bool) -> None:
    line = Line(nursery, narrow=narrow, max_frame_bytes=100)
    await line.call(1)
    answer = line.handler.answers[0]
    for _ in range(20):  # more than the buffer takes
        answer(b"x" * 90, True)
    sent: list[int] = []

    async def wait(number: int) -> None:
        await answer.wait_until_sent()
        sent.append(number)

    nursery.start_soon(wait, 20)
    await trio.testing.wait_all_tasks_blocked()
    assert sent == ([] if narrow else [20])
    answer(b"x" * 90, False)
    if narrow:
        for number in range(20):
            assert sent == [] or number > 10
            await line.read()
            await trio.testing.wait_all_tasks_blocked()
    assert sent == [20]


async def test_wait_until_sent_returns_when_the_connection_ends(nursery: trio.Nursery) -> None:
    line = Line(nursery, narrow=True, max_frame_bytes=100)
    await line.call(1)
    answer = line.handler.answers[0]
    for _ in range(20):
        answer(b"x" * 90, True)
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as waiting:
            waiting.start_soon(answer.wait_until_sent)
            await trio.testing.wait_all_tasks_blocked()
            assert len(waiting.child_tasks) == 1
            answer.close_connection("enough")
        await line.ended.wait()
        await answer.wait_until_sent()
        answer.close_connection("twice")
    assert [entry["reason"] for entry in logs] == ["enough"]


async def test_a_connection_that_ends_drops_what_waits_for_room(nursery: trio.Nursery) -> None:
    line = Line(nursery, narrow=True, max_frame_bytes=100)
    await line.call(1)
    for _ in range(100):
        line.handler.answers[0](b"x" * 90, True)
    await line.stream.aclose()
    with structlog.testing.capture_logs(), trio.fail_after(60):
        await line.ended.wait()
