"""proxy.runtime.rpc.client: calls against a server, and against one that misbehaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from runtime_fakes import FRAME_BYTES_MAX, MakeWires, RawServer, ask, echo, outcome, until

from proto.roles import MAY_CALL, Role
from proto.rpc_frames import Call, Cancel, Reply, encode_call, encode_cancel, encode_reply
from proto.rpc_pb2 import Empty, Method, Status, Text
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcError
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcRefused, RpcServer

# ---- both ends


async def test_a_call(wires: MakeWires) -> None:
    assert await ask(wires().client(), "hello") == "hello"


async def test_calls_are_multiplexed(wires: MakeWires, nursery: trio.Nursery) -> None:
    gates = {name: trio.Event() for name in "abc"}

    async def gated(data: bytes, _caller: Caller) -> bytes:
        await gates[Text.FromString(data).text].wait()
        return data

    client = wires({Method.ENVELOPE: gated}).client()
    answers: list[str] = []

    async def one(name: str) -> None:
        answers.append(await ask(client, name))

    for name in "abc":
        nursery.start_soon(one, name)
    await trio.testing.wait_all_tasks_blocked()
    assert client.in_flight == 3
    for name in "cab":
        gates[name].set()
        await trio.testing.wait_all_tasks_blocked()
    assert answers == ["c", "a", "b"]
    assert client.in_flight == 0


async def test_many_calls_at_once(wires: MakeWires) -> None:
    client = wires().client()
    answers: set[str] = set()

    async def one(text: str) -> None:
        answers.add(await ask(client, text))

    async with trio.open_nursery() as calls:
        for number in range(500):
            calls.start_soon(one, str(number))
    assert answers == {str(number) for number in range(500)}


@pytest.mark.conforms("kip-590.16")
async def test_the_handler_knows_who_calls(wires: MakeWires) -> None:
    callers: list[Caller] = []

    async def who(data: bytes, caller: Caller) -> bytes:
        callers.append(caller)
        return await echo(data, caller)

    await ask(wires({Method.ENVELOPE: who}).client())
    assert callers == [Caller(Role.FORWARDER, 4711)]


@pytest.mark.conforms("kip-590.4", "kip-590.15")
@pytest.mark.parametrize("method", sorted({*MAY_CALL, 0, 99}))
@pytest.mark.parametrize("role", list(Role))
async def test_the_role_table_is_enforced(wires: MakeWires, role: Role, method: int) -> None:
    """Security: KIP-590's ClusterAction. What a role may not call does not run."""
    ran: list[int] = []

    async def handler(data: bytes, _caller: Caller) -> bytes:
        ran.append(method)
        return await echo(data, _caller)

    client = wires({method: handler}, role).client()
    if role in MAY_CALL.get(method, frozenset()):
        assert await ask(client, "x", method) == "x"
    else:
        with structlog.testing.capture_logs() as logs, pytest.raises(RpcCallRefused) as caught:
            await ask(client, "x", method)
        assert caught.value.status == Status.CLUSTER_AUTHORIZATION_FAILED
        assert ran == []
        assert [(entry["log_level"], entry["caller"]) for entry in logs] == [("error", role.value)]


async def test_a_method_that_is_not_served_here(wires: MakeWires) -> None:
    with pytest.raises(RpcCallRefused) as caught:
        await ask(wires().client(), method=Method.RESOLVE_TARGET)
    assert caught.value.status == Status.UNSUPPORTED_VERSION


async def test_a_refusal_travels_with_status_and_detail(wires: MakeWires) -> None:
    async def refuse(_data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        raise RpcRefused(Status.INVALID_REQUEST, "because")

    with pytest.raises(RpcCallRefused, match="INVALID_REQUEST: because") as caught:
        await ask(wires({Method.ENVELOPE: refuse}).client())
    assert caught.value.status == Status.INVALID_REQUEST


async def test_a_handler_that_crashes_leaves_other_calls_unharmed(wires: MakeWires, nursery: trio.Nursery) -> None:
    gate = trio.Event()

    async def handler(data: bytes, _caller: Caller) -> bytes:
        await gate.wait()
        if Text.FromString(data).text == "bad":
            raise ZeroDivisionError("secret detail")
        return data

    client = wires({Method.ENVELOPE: handler}).client()
    answers: list[str] = []

    async def good() -> None:
        answers.append(await ask(client, "good"))

    nursery.start_soon(good)
    await trio.testing.wait_all_tasks_blocked()
    gate.set()
    with structlog.testing.capture_logs() as logs, pytest.raises(RpcCallRefused) as caught:
        await ask(client, "bad")
    assert caught.value.status == Status.UNKNOWN_SERVER_ERROR
    assert "secret detail" not in str(caught.value)
    await trio.testing.wait_all_tasks_blocked()
    assert answers == ["good"]
    assert await ask(client, "good") == "good"
    [entry] = logs
    assert entry["method"] == "ENVELOPE"


async def test_bytes_that_are_no_request(wires: MakeWires) -> None:
    async def parse(data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        return Text.FromString(b"\xff" + data).SerializeToString()

    with pytest.raises(RpcCallRefused) as caught:
        await ask(wires({Method.ENVELOPE: parse}).client())
    assert caught.value.status == Status.INVALID_REQUEST


async def test_the_callers_deadline(wires: MakeWires, autojump_clock: trio.testing.MockClock) -> None:
    cancelled: list[float] = []

    async def slow(_data: bytes, _caller: Caller) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(trio.current_time())
        return b""

    client = wires({Method.ENVELOPE: slow}).client()
    with pytest.raises(RpcError):
        await ask(client, timeout_s=2.0)
    assert trio.current_time() == pytest.approx(2)
    await trio.testing.wait_all_tasks_blocked()
    assert cancelled == [pytest.approx(2)], "the deadline travels: no worker works for a caller that has given up"
    assert client.in_flight == 0


async def test_the_deadline_holds_while_the_server_is_absent(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async def unreachable() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError

    client = RpcClient(unreachable, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)
    with pytest.raises(RpcDeadlineExceeded):
        await ask(client, timeout_s=3.0)
    assert trio.current_time() == pytest.approx(3)


@pytest.mark.conforms("kip-590.28")
async def test_a_call_waits_for_the_worker(wires: MakeWires, autojump_clock: trio.testing.MockClock) -> None:
    lines = wires()
    lines.refusals = 5
    assert await ask(lines.client(), "x") == "x"


async def test_a_call_whose_caller_leaves_is_forgotten(wires: MakeWires, nursery: trio.Nursery) -> None:
    gate = trio.Event()

    async def gated(data: bytes, _caller: Caller) -> bytes:
        await gate.wait()
        return data

    client = wires({Method.ENVELOPE: gated}).client()
    scope = trio.CancelScope()

    async def impatient() -> None:
        with scope:
            await ask(client, "first")

    nursery.start_soon(impatient)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert client.in_flight == 0
    gate.set()
    assert await ask(client, "second") == "second", "the late answer is given to no call"


async def test_calls_of_a_caller_that_goes_away_are_cancelled(nursery: trio.Nursery) -> None:
    ended = trio.Event()

    async def slow(_data: bytes, _caller: Caller) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return b""

    server = RpcServer({Method.ENVELOPE: slow}, max_frame_bytes=FRAME_BYTES_MAX)
    ours, theirs = trio.testing.memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs, Caller(Role.FORWARDER, 1))
    await ours.send_all(encode_call(Call(1, Method.ENVELOPE, 60_000, b"")))
    await trio.testing.wait_all_tasks_blocked()
    assert not ended.is_set()
    await ours.aclose()
    await ended.wait()


# ---- connections that break


@pytest.mark.conforms("kip-590.30")
async def test_a_lost_connection_without_retry(wires: MakeWires, nursery: trio.Nursery) -> None:
    """Security: a round of authentication is not asked again."""
    asked = 0

    async def slow(_data: bytes, _caller: Caller) -> bytes:
        nonlocal asked
        asked += 1
        await trio.sleep_forever()
        return b""

    lines = wires({Method.AUTHENTICATE: slow})
    client = lines.client()
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client, method=Method.AUTHENTICATE)))

    nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    await lines.cut()
    assert [type(result) for result in results] == [RpcConnectionLost]
    assert asked == 1


@pytest.mark.conforms("kip-590.30")
async def test_a_lost_connection_with_retry(
    wires: MakeWires, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    asked = 0

    async def first_dies(data: bytes, _caller: Caller) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 1:
            await trio.sleep_forever()
        return data

    lines = wires({Method.ENVELOPE: first_dies})
    client = lines.client()
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client, "x", retry=True)))

    nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    await lines.cut()
    await trio.sleep(1)
    assert results == ["x"]
    assert len(lines.connections) == 2


async def test_retries_are_bounded(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    raw = RawServer(nursery)
    client = RpcClient(raw.connect, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)

    dying = trio.CancelScope()

    async def always_dies() -> None:
        with dying:
            while True:
                await raw.read()
                await raw.stream.aclose()
                await trio.sleep(0.001)
                raw._arrived = trio.Event()

    nursery.start_soon(always_dies)
    with pytest.raises(RpcConnectionLost):
        await ask(client, timeout_s=60.0, retry=True)
    assert trio.current_time() < 10
    dying.cancel()


async def test_the_client_connects_again(wires: MakeWires, autojump_clock: trio.testing.MockClock) -> None:
    lines = wires()
    client = lines.client()
    for number in range(3):
        assert await ask(client, str(number)) == str(number)
        await lines.cut()
        await trio.sleep(0.001)


async def test_a_worker_that_is_gone_is_not_asked_too_often(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    attempts: list[float] = []

    async def unreachable() -> trio.abc.HalfCloseableStream:
        attempts.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        raise FileNotFoundError

    nursery.start_soon(RpcClient(unreachable, max_frame_bytes=FRAME_BYTES_MAX).run)
    await trio.sleep(60)
    assert len(attempts) < 80
    assert attempts[1] - attempts[0] < 0.1


# ---- a client, and a server that misbehaves


@pytest.fixture
def client(raw: RawServer, nursery: trio.Nursery) -> RpcClient:
    client = RpcClient(raw.connect, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)
    return client


async def test_a_call_carries_its_method_its_request_and_the_remaining_time(
    raw: RawServer, client: RpcClient, nursery: trio.Nursery
) -> None:
    nursery.start_soon(partial(ask, client, "x", timeout_s=3.0))
    call = await raw.read()
    assert (call.method, Text.FromString(call.request).text) == (Method.ENVELOPE, "x")
    assert 2900 <= call.timeout_ms <= 3000
    await raw.reply(call.correlation_id)


async def test_a_cancelled_or_expired_call_is_cancelled_at_the_server(
    raw: RawServer, client: RpcClient, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Otherwise clients that leave at once could keep a worker busy with unwanted work."""
    with trio.move_on_after(1):
        await ask(client, "left", timeout_s=5.0)
    with pytest.raises(RpcDeadlineExceeded):
        await ask(client, "too late", timeout_s=1.0)
    left, late = await raw.read(), await raw.read()
    nursery.start_soon(ask, client, "next")
    following = await raw.read()
    assert raw.cancelled == [left.correlation_id, late.correlation_id]
    await raw.reply(following.correlation_id)


async def test_an_answer_to_an_abandoned_call_is_dropped(raw: RawServer, client: RpcClient) -> None:
    client.send_notification(Method.ENVELOPE, Text(text="before there is a connection"), timeout_s=1.0)
    await trio.testing.wait_all_tasks_blocked()
    client.send_notification(Method.ENVELOPE, Text(text="bye"), timeout_s=1.0)
    call = await raw.read()
    assert (call.method, Text.FromString(call.request).text, call.timeout_ms) == (Method.ENVELOPE, "bye", 1000)
    assert client.in_flight == 0
    await raw.reply(call.correlation_id)


@pytest.mark.conforms("kip-590.29")
async def test_replies_late_or_twice_are_dropped(
    raw: RawServer, client: RpcClient, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    with pytest.raises(RpcDeadlineExceeded):
        await ask(client, "late", timeout_s=1.0)
    late = await raw.read()
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client, "next")))

    nursery.start_soon(one)
    following = await raw.read()
    assert following.correlation_id != late.correlation_id
    await raw.reply(late.correlation_id, "late")
    await raw.reply(following.correlation_id, "first")
    await raw.reply(following.correlation_id, "second")
    await raw.reply(999, "nobody's")
    await trio.testing.wait_all_tasks_blocked()
    assert results == ["first"]
    assert raw.connections == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",  # more than the limit
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x02\xff\xff",  # no frame
        b"\x00\x00\x00\x10" + b"\x09" + b"\x00" * 15,  # neither call nor reply
        encode_call(Call(1, Method.ENVELOPE, 1000, b"")),  # a call, to a client
        encode_cancel(Cancel(1)),
    ],
)
async def test_garbage_from_a_worker(
    raw: RawServer,
    client: RpcClient,
    nursery: trio.Nursery,
    garbage: bytes,
    autojump_clock: trio.testing.MockClock,
) -> None:
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client)))

    nursery.start_soon(one)
    await raw.read()
    await raw.stream.send_all(garbage)
    await trio.sleep(1)
    assert [type(result) for result in results] == [RpcConnectionLost]
    assert raw.connections == 2, "and connects again"


@pytest.mark.parametrize("status", [99, 1000])
async def test_a_status_that_is_newer_than_this_process(
    raw: RawServer, client: RpcClient, nursery: trio.Nursery, status: int
) -> None:
    """conformance.md: an unknown error is UNKNOWN_SERVER_ERROR to the client, not a crash."""
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client)))

    nursery.start_soon(one)
    await raw.reply((await raw.read()).correlation_id, status=status, detail="new")
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(results[0], RpcCallRefused)


async def test_a_response_that_is_none(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(client.call, Method.ENVELOPE, Empty(), Text, timeout_s=60)))

    nursery.start_soon(one)
    call = await raw.read()
    await raw.stream.send_all(encode_reply(Reply(call.correlation_id, response=b"\xff\xff")))
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(results[0], RpcError), "callers are told to expect RpcError's kinds and no others"


async def test_a_worker_that_does_not_keep_up(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _theirs = trio.testing.lockstep_stream_pair()

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return ours

    client = RpcClient(connect, max_frame_bytes=100)
    nursery.start_soon(client.run)
    await trio.testing.wait_all_tasks_blocked()
    results: list[Any] = []

    async def one() -> None:
        results.append(await outcome(partial(ask, client, "x" * 80)))

    for _ in range(20):
        nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    assert results
    assert {result.status for result in results} == {Status.TOO_MANY_REQUESTS}
    assert client.in_flight == 20 - len(results)
    nursery.cancel_scope.cancel()


# ---- a connection that another program takes over


async def test_quiesce_lets_calls_end_and_begins_none(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    results: list[Any] = []
    quiet: list[bool] = []

    async def one(text: str, timeout_s: float) -> None:
        results.append(await outcome(partial(ask, client, text, timeout_s=timeout_s)))

    async def quiesce() -> None:
        quiet.append(await client.quiesce(timeout_s=60))

    nursery.start_soon(one, "under way", 60)
    first = await raw.read()
    nursery.start_soon(quiesce)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(one, "too late", 1)
    await trio.testing.wait_all_tasks_blocked()
    assert (quiet, client.in_flight, len(client._pending)) == ([], 2, 1), "the second counts, but has not left"
    await raw.reply(first.correlation_id, "done")
    await until(lambda: quiet)
    assert (quiet, results) == ([True], ["done"])
    await until(lambda: len(results) == 2)
    assert isinstance(results[1], RpcDeadlineExceeded)
    with trio.move_on_after(0.02):
        pytest.fail(f"nothing more may leave: {await raw.read()}")


async def test_quiesce_waits_for_the_rest_of_a_frame(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    """Its other half would be the first that the next program reads."""
    await ask_and_be_answered(raw, client, nursery)
    late = encode_reply(Reply(4711))
    await raw.stream.send_all(late[:3])
    await trio.testing.wait_all_tasks_blocked()
    assert not await client.quiesce(timeout_s=0.05)
    await raw.stream.send_all(late[3:])
    assert await client.quiesce(timeout_s=60)


async def test_quiesce_waits_for_what_has_not_left(nursery: trio.Nursery) -> None:
    """Half a call on the wire, although its caller waits no more: the next program would write into its middle."""
    ours, theirs = trio.testing.lockstep_stream_pair()

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return ours

    client = RpcClient(connect, max_frame_bytes=FRAME_BYTES_MAX)
    nursery.start_soon(client.run)
    with pytest.raises(RpcDeadlineExceeded):
        await ask(client, "half of it", timeout_s=0.5)
    assert len(await theirs.receive_some(5)) == 5
    assert not await client.quiesce(timeout_s=0.05)
    while not await client.quiesce(timeout_s=0.02):
        with trio.move_on_after(0.02):
            await theirs.receive_some(100)
    nursery.cancel_scope.cancel()


async def ask_and_be_answered(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    results: list[str] = []

    async def one() -> None:
        results.append(await ask(client, "x"))

    nursery.start_soon(one)
    await raw.reply((await raw.read()).correlation_id, "y")
    await trio.testing.wait_all_tasks_blocked()
    assert results == ["y"]


async def test_nothing_to_hand_over_without_a_connection() -> None:
    async def unreachable() -> trio.abc.HalfCloseableStream:
        await trio.sleep_forever()
        raise AssertionError

    assert not await RpcClient(unreachable, max_frame_bytes=FRAME_BYTES_MAX).quiesce(timeout_s=1)


async def test_a_call_that_never_ends_is_not_waited_for(
    raw: RawServer, client: RpcClient, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    nursery.start_soon(outcome, partial(ask, client, timeout_s=100))
    await raw.read()
    started = trio.current_time()
    assert not await client.quiesce(timeout_s=3)
    assert trio.current_time() - started == pytest.approx(3)


async def test_resumed_calls_go_out(raw: RawServer, client: RpcClient, nursery: trio.Nursery) -> None:
    """The other program did not come up."""
    await ask_and_be_answered(raw, client, nursery)
    assert await client.quiesce(timeout_s=60)
    results: list[str] = []

    async def one() -> None:
        results.append(await ask(client, "patient"))

    nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    assert (client.in_flight, len(client._pending)) == (1, 0), "it counts, but has not left"
    client.resume()
    await raw.reply((await raw.read()).correlation_id, "at last")
    await trio.testing.wait_all_tasks_blocked()
    assert results == ["at last"]


async def test_no_call_outlives_the_client(raw: RawServer) -> None:
    client = RpcClient(raw.connect, max_frame_bytes=FRAME_BYTES_MAX)
    results: list[Any] = []

    async def one(*, retry: bool) -> None:
        results.append(await outcome(partial(ask, client, timeout_s=1000, retry=retry)))

    async with trio.open_nursery() as calls:
        async with trio.open_nursery() as running:
            running.start_soon(client.run)
            for retry in (False, True):
                calls.start_soon(partial(one, retry=retry))
            await raw.read()
            await trio.testing.wait_all_tasks_blocked()
            running.cancel_scope.cancel()
        await until(lambda: len(results) == 2)
        with trio.fail_after(60):
            await one(retry=True)
    assert [type(result) for result in results] == [RpcConnectionLost] * 3


async def test_two_programs_do_not_use_the_same_numbers() -> None:
    """Over an inherited connection, the answer to the other's call may still come."""
    numbers = {RpcClient(trio.sleep_forever, max_frame_bytes=1).new_id() for _ in range(20)}  # type: ignore[arg-type]
    assert len(numbers) > 15


async def test_ids_for_exchanges_are_unique(client: RpcClient) -> None:
    assert len({client.new_id() for _ in range(10)}) == 10
