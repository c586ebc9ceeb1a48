"""proxy.forwarder.client.passed: connections from HTTP workers, and what a captured one may send."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from relay_fakes import unblocked_pair, until
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture

from proto.rpc_pb2 import RelayRequest
from proxy.forwarder.client import passed
from proxy.forwarder.relay import blocked_splice
from proxy.forwarder.relay.relay import RelayStart
from proxy.runtime.shared.relay_request_channel import (
    ACCEPTED,
    REFUSED,
    RelayRequestChannel,
    create_relay_request_sockets,
    working_relay_request_sockets,
)

Pair = tuple[socket.socket, socket.socket]


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def request_of(**fields: Any) -> RelayRequest:
    return RelayRequest(**{"client_address": "192.0.2.1:4000", "principal": "alice", "target": "broker:8080"} | fields)


class Worker:
    """An HTTP worker: it passes connections of which the test has the other ends."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.channel = RelayRequestChannel(served.relay_requests)
        self._open: list[socket.socket] = []

    def pair(self, make: Callable[[], Any] = tcp_pair) -> Pair:
        pair = make()
        self._open += pair
        return pair

    async def relay(self, request: RelayRequest, make: Callable[[], Any] = tcp_pair) -> tuple[bytes, Pair]:
        """What was answered; the ends of the client and the broker."""
        client, broker = self.pair(make), self.pair(make)
        answer = await self.channel.request(request, client[1], broker[1], 5)
        client[1].close()
        broker[1].close()
        return answer, (client[0], broker[0])

    def results(self, result: str) -> float | None:
        return self.served.value("pulsar_proxy_websocket_relays_total", result=result)

    async def works(self) -> None:
        """The forwarder still relays."""
        answer, (client, _broker) = await self.relay(request_of(first_to_client=b"101"))
        assert answer == ACCEPTED
        assert await received(client) == b"101"

    def close(self) -> None:
        for sock in self._open:
            sock.close()


async def received(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    with trio.fail_after(5):
        await trio.lowlevel.wait_readable(sock)
    return sock.recv(65536)


Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker(serve: Serve) -> AsyncIterator[Start]:  # noqa: F811
    workers: list[Worker] = []

    async def start(**tables: Any) -> Worker:
        workers.append(Worker(await serve(**tables)))
        return workers[-1]

    yield start
    for one in workers:
        one.close()


@pytest.fixture
async def worker(start_worker: Start) -> Worker:
    return await start_worker()


@pytest.mark.parametrize("make", [tcp_pair, unblocked_pair])
async def test_two_connections_become_a_relay(worker: Worker, make: Callable[[], Any]) -> None:
    """Also Unix sockets, which stand for TLS: bytes, half-closes, counts."""
    request = request_of(first_to_client=b"101", first_to_broker=b"x" * 10_000)
    answer, (client, broker) = await worker.relay(request, make)
    assert answer == ACCEPTED
    assert await received(client) == b"101"
    got = b""
    while len(got) < 10_000:
        got += await received(broker)
    assert got == b"x" * 10_000
    client.send(b"up")
    assert await received(broker) == b"up"
    broker.send(b"down" * 10)
    assert await received(client) == b"down" * 10
    [stored] = worker.served.store_slot.relays.values()
    assert b"alice" in stored.record
    assert worker.served.value("pulsar_proxy_active_connections") == 1
    client.shutdown(socket.SHUT_WR)
    assert await received(broker) == b""
    broker.send(b"last")
    assert await received(client) == b"last"
    broker.close()
    assert await received(client) == b""
    await until(lambda: worker.served.value("pulsar_proxy_active_connections") == 0)
    assert worker.served.value("pulsar_proxy_principal_bytes_total", principal="alice", direction="to_client") == 47
    assert not worker.served.service._relay_places
    assert worker.served.service._admission.connections == 0


async def test_the_deny_list_ends_it(start_worker: Start, tmp_path: Path) -> None:
    denied = tmp_path / "denied"
    denied.write_text("token-id mallory\n")
    worker = await start_worker(authentication={"deny_file": str(denied)})
    [digest] = worker.served.service._denied.value.kinds
    _answer, (client, _broker) = await worker.relay(request_of(credentials=[digest]))
    assert await received(client) == b""


async def test_it_ends_with_its_clients_credentials(worker: Worker) -> None:
    """Security: nobody can be asked for others."""
    answer, _ = await worker.relay(request_of(expires_at_unix_ms=int(time.time() * 1000) + 3_600_000))
    assert answer == ACCEPTED
    [relay] = worker.served.service._relays._engine.relays
    left_s = relay.record.leave_at_ms / 1000 - worker.served.service._relays.now()
    assert 3_590 < left_s < 3_610


async def test_the_bound_of_their_number(start_worker: Start) -> None:
    """Security: a captured HTTP worker leaves half of the places to others; each that ends makes room."""
    worker = await start_worker(limits={"max_connections": 8})  # of two forwarders
    first, (client, broker) = await worker.relay(request_of())
    assert first == (await worker.relay(request_of()))[0] == ACCEPTED
    assert (await worker.relay(request_of()))[0] == REFUSED
    client.close()
    broker.close()
    await until(lambda: worker.served.service._passed.relay_count == 1)
    assert (await worker.relay(request_of()))[0] == ACCEPTED


async def test_the_limit_by_address(start_worker: Start) -> None:
    worker = await start_worker(limits={"max_connections_per_address": 1})
    assert (await worker.relay(request_of()))[0] == ACCEPTED
    assert (await worker.relay(request_of()))[0] == REFUSED
    assert worker.results("max_connections_per_address") == 1


async def test_a_quota(start_worker: Start) -> None:
    """Security: WebSocket connections count as all others."""
    worker = await start_worker(quota=[{"max_connections": 2}])
    first, (client, broker) = await worker.relay(request_of())
    assert first == ACCEPTED
    assert (await worker.relay(request_of()))[0] == REFUSED
    assert worker.results("quota") == 1
    client.close()
    broker.close()
    await until(lambda: worker.served.service._passed.relay_count == 0)
    assert (await worker.relay(request_of()))[0] == ACCEPTED


async def test_a_relay_that_cannot_begin(worker: Worker) -> None:
    ledger = worker.served.service._relays._ledger
    ledger.is_handing_over = True
    assert (await worker.relay(request_of()))[0] == REFUSED
    ledger.is_handing_over = False
    assert worker.results("not_begun") == 1
    assert worker.served.service._admission.connections == 0
    await worker.works()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_defect_in_the_start_of_a_relay_takes_no_place(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    worker = await start_worker(limits={"max_connections": 2})  # of two forwarders: there is one place

    def start_now(_start: RelayStart) -> bool:
        if waits:
            return False
        raise RuntimeError("a defect")

    async def start(_start: RelayStart) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(worker.served.service._relays, "start_relay_now", start_now)
        patch.setattr(worker.served.service._relays, "start_relay", start)
        assert (await worker.relay(request_of()))[0] == b""
    assert [one["event"] for one in logs] == ["a request of an HTTP worker met a defect"]
    assert worker.served.service._admission.connections == 0
    await worker.works()


def pipe_ends() -> list[int]:
    return list(os.pipe())


def listeners() -> list[int]:
    return [socket.create_server(("127.0.0.1", 0)).detach() for _ in range(2)]


def datagrams() -> list[int]:
    return [one.detach() for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)]


def not_connected() -> list[int]:
    return [socket.socket().detach() for _ in range(2)]


def epolls() -> list[int]:
    return [os.eventfd(0) for _ in range(2)]


def streams(count: int) -> Callable[[], list[int]]:
    return lambda: [socket.socket(socket.AF_UNIX).detach() for _ in range(count)]


@pytest.mark.parametrize(
    "make", [pipe_ends, listeners, datagrams, not_connected, epolls, *(streams(n) for n in (0, 1, 2, 4, 200))]
)
async def test_descriptors_that_are_no_connections(worker: Worker, make: Callable[[], list[int]]) -> None:
    """Security: each message is dropped with all its descriptors, whatever they are."""
    descriptors = make()
    before = len(os.listdir("/proc/self/fd"))
    third = [] if make.__name__ == "<lambda>" else [os.dup(worker.served.relay_requests.fileno())]
    worker.channel.send_now(request_of(), descriptors + third)
    await until(lambda: (worker.results("malformed") or 0) + (worker.results("gone") or 0) == 1)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(third))  # none of them stays open
    for descriptor in descriptors + third:
        os.close(descriptor)
    await worker.works()


@pytest.mark.parametrize(
    "fields",
    [
        {"client_address": "nowhere"},
        {"client_address": "host.example:80"},
        {"client_address": ""},
        {"principal": "x" * 2000},
        {"principal": "a\nb"},
        {"target": "x" * 2000},
        {"credentials": [b"x"] * 100},
        {"credentials": [b"x" * 100]},
    ],
)
async def test_texts_that_no_worker_sends(worker: Worker, fields: dict[str, Any]) -> None:
    answer, (client, _broker) = await worker.relay(request_of(**fields))
    assert answer == b""
    assert await received(client) == b""
    assert worker.results("malformed") == 1
    await worker.works()


async def test_messages_that_are_none(worker: Worker) -> None:
    worker.served.relay_requests.send(b"\xff" * 1000)
    worker.served.relay_requests.send(b"")
    await worker.works()
    assert worker.results("malformed") == 1


async def test_a_flood_leaves_time_for_others(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: after a bounded number of requests all other tasks have their turn."""
    pauses = 0
    sleep = trio.sleep

    async def counted(duration_s: float) -> None:
        nonlocal pauses
        pauses += duration_s == passed.PAUSE_S
        await sleep(duration_s)

    monkeypatch.setattr(passed.trio, "sleep", counted)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 1_000:
            worker.channel.send_now(request_of())
            sent += 1
    assert sent > 2 * passed.REQUESTS_PER_WAKE_UP_MAX
    await until(lambda: worker.results("malformed") == sent)
    assert pauses >= sent // passed.REQUESTS_PER_WAKE_UP_MAX
    await worker.works()


async def test_a_forwarder_that_drains_takes_none(worker: Worker) -> None:
    await worker.works()  # a relay, for whose end the drain waits
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: worker.served.service.drain(30, hand_over=False))
        await trio.testing.wait_all_tasks_blocked()
        client, broker = worker.pair(), worker.pair()
        with pytest.raises(trio.TooSlowError):
            await worker.channel.request(request_of(), client[1], broker[1], 0.1)
        nursery.cancel_scope.cancel()


def test_a_pair_that_was_shut_down_is_replaced() -> None:
    """Security: what a captured worker may break, an upgrade mends; a pair that works stays, and what waits in it."""
    pair = create_relay_request_sockets()
    pair[1].send(b"x")
    assert working_relay_request_sockets(pair) is pair
    pair[1].shutdown(socket.SHUT_RDWR)
    other = working_relay_request_sockets(pair)
    assert other is not pair
    assert pair[0].fileno() == -1
    for sock in other:
        sock.close()


@pytest.mark.parametrize("to_broker", [True, False], ids=["source", "sink"])
async def test_a_connection_that_is_made_to_block_ends_with_all_that_were_passed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, to_broker: bool
) -> None:
    """Security: a captured HTTP worker keeps a copy and takes O_NONBLOCK away; forwarder and successors must go on."""
    monkeypatch.setattr(blocked_splice, "LOOK_S", 0.05)
    _answer, (other, _broker) = await worker.relay(request_of())
    client, broker = worker.pair(), worker.pair()
    assert await worker.channel.request(request_of(), client[1], broker[1], 5) == ACCEPTED
    await trio.testing.wait_all_tasks_blocked()
    (client if to_broker else broker)[1].setblocking(True)
    with structlog.testing.capture_logs() as logs:
        if to_broker:
            client[0].send(b"x" * 1000)  # more than that is looked for, which waits
        else:
            client[0].setblocking(False)
            with contextlib.suppress(OSError):  # it is full, or was ended already
                while True:
                    client[0].send(b"x" * 65536)
                    await trio.testing.wait_all_tasks_blocked()
        assert await received(other) == b"", "another one of these"
    assert [entry["log_level"] for entry in logs if "has blocked" in entry["event"]] == ["critical"]
    await until(lambda: worker.served.service._passed.relay_count == 0)
    assert (await worker.relay(request_of()))[0] == REFUSED
    assert worker.results("closed") == 1
    with pytest.raises(trio.TooSlowError):  # the next ones are for other forwarders
        await worker.channel.request(request_of(), *worker.pair(), 0.1)
