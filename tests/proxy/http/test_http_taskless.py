"""proxy.http.taskless: requests that need no task, and what of them goes on in one.

All tests of test_http_server.py and others run with and without tasks, too: see conftest.py.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator

import pytest
import trio
from http_fakes import Client, Held, Received, Setup, UpstreamConnection, echo, opened
from trio.testing import MockClock, wait_all_tasks_blocked

from proxy.config.types import Http
from proxy.http.taskless import IDLE_SLACK_S, WATCH_AFTER_S, waiting_without_task
from proxy.runtime.loop.reactor import Reactor

REST = b" HTTP/1.1\r\nHost: proxy:8081\r\n\r\n"
GET = b"GET /admin/v2/a" + REST
IDLE_S = 7


class Steps(trio.abc.Instrument):
    """How often the task of a client's connection has run."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count it."""
        self.count += "HttpConnection" in task.name


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with opened(http=Http(idle_timeout_ms=IDLE_S * 1000)) as setup:
        yield setup


async def warm(setup: Setup) -> Client:
    """A client whose next request has the headers of its last one, and whose connection waits for it without a task."""
    client = setup.connect()
    for _ in range(2):
        await client.send(GET)
        assert (await client.answer()).status == 200
    await wait_all_tasks_blocked()
    return client


async def test_repeated_headers_need_no_task(setup: Setup) -> None:
    client = await warm(setup)
    trio.lowlevel.add_instrument(steps := Steps())
    for number in range(3):
        await client.send(b"GET /admin/%d?q" % number + REST)
        assert (await client.answer()).body == b"GET /admin/%d?q " % number
    assert steps.count == 0
    await client.send(b"GET /elsewhere" + REST)
    assert (await client.answer()).status == 404
    assert steps.count == 0
    await client.send(GET.replace(b"proxy:", b"other:"))
    assert (await client.answer()).status == 200
    assert steps.count
    assert len(setup.upstream.connections) == 1
    assert [one.status for one in setup.parts.records] == [200] * 5 + [404, 200]
    trio.lowlevel.remove_instrument(steps)


@pytest.mark.parametrize(
    "data",
    [
        GET + GET,
        GET[:-1],
        GET + b"x",
        b"\r\n" + GET,
        GET.replace(b"/a ", b"/a\r\nContent-Length: 3\r\nX: "),
        GET.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"),
        GET.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\n"),
        GET.replace(b" HTTP/1.1\r\n", b" HTTP/1.1"),
        GET.replace(b"/a ", b"/a\r "),
        GET.replace(b"/a ", b"/a b "),
        GET.replace(b"\r\nHost", b"\r\nTransfer-Encoding: chunked\r\nHost"),
        GET.replace(b"\r\nHost", b"\r\n\r\nHost"),
        GET.replace(b"\r\nHost", b"\r\n Host"),
    ],
)
async def test_only_one_whole_request_with_the_same_headers_is_as_before(setup: Setup, data: bytes) -> None:
    await warm(setup)
    connection = setup.connections[0]
    assert connection.is_as_before(GET)
    assert not connection.is_as_before(data)


@pytest.mark.parametrize(("line", "status"), [(b"TRACE /admin/a", 405), (b"GET /admin/%2e%2e/a", 400)])
async def test_what_is_refused_is_refused_without_a_task_too(setup: Setup, line: bytes, status: int) -> None:
    client = await warm(setup)
    assert setup.connections[0].is_as_before(line + REST)
    await client.send(line + REST)
    assert (await client.answer()).status == status
    assert await client.rest() == b""
    assert len(setup.upstream.requests) == 2


async def test_pipelined_requests_are_answered_in_turn(setup: Setup) -> None:
    client = await warm(setup)
    await client.send(b"".join(b"GET /admin/%d" % number + REST for number in range(4)))
    assert [(await client.answer()).body for _ in range(4)] == [b"GET /admin/%d " % number for number in range(4)]


async def test_a_request_that_comes_before_the_answer_waits_for_it(setup: Setup) -> None:
    client = await warm(setup)
    setup.upstream.behave = held = Held()
    await client.send(b"GET /admin/1" + REST)
    await held.asked.wait()
    assert waiting_without_task() == 1
    await client.send(b"GET /admin/2" + REST)
    held.goes_on.set()
    assert [(await client.answer()).body for _ in range(2)] == [b"GET /admin/1 ", b"GET /admin/2 "]
    assert waiting_without_task() == 0


async def test_a_slow_response_is_waited_for_in_the_task(setup: Setup, autojump_clock: MockClock) -> None:
    client = await warm(setup)
    setup.upstream.behave = held = Held()
    await client.send(GET)
    await held.asked.wait()
    await trio.sleep(IDLE_S + 2 * IDLE_SLACK_S)  # an exchange is not idle
    assert waiting_without_task() == 0
    held.goes_on.set()
    assert (await client.answer()).status == 200
    await client.send(GET)
    assert (await client.answer()).status == 200


async def test_a_client_that_leaves_a_slow_response_ends_the_exchange(setup: Setup, autojump_clock: MockClock) -> None:
    client = await warm(setup)
    setup.upstream.behave = held = Held()
    await client.send(GET)
    await held.asked.wait()
    client.close()
    await trio.sleep(4 * WATCH_AFTER_S)
    assert [(one.status, one.cause) for one in await setup.records(3)][2] == (499, "client_left")
    assert setup.pool.idle_count == 0


async def test_a_connection_that_is_ended_ends_its_request(setup: Setup) -> None:
    client = await warm(setup)
    setup.upstream.behave = held = Held()
    await client.send(GET)
    await held.asked.wait()
    setup.connections[0].scope.cancel()
    assert await client.rest() == b""
    assert [(one.status, one.cause) for one in await setup.records(3)][2] == (0, "ended")
    assert (setup.pool.idle_count, waiting_without_task()) == (0, 0)


async def test_without_room_in_the_kernel_connections_are_served_in_tasks(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "fs.epoll.max_user_watches")

    monkeypatch.setattr(Reactor, "watch", refuse)
    client = await warm(setup)
    await client.send(GET[:-1])
    await wait_all_tasks_blocked()
    await client.send(GET[-1:])
    assert (await client.answer()).status == 200
    setup.connections[0].drain()
    assert await client.rest() == b""


@pytest.mark.parametrize("request_", [GET, GET.replace(b"proxy:", b"other:")], ids=["without a task", "in the task"])
async def test_a_drain_lets_a_request_end(setup: Setup, request_: bytes) -> None:
    client = await warm(setup)
    setup.upstream.behave = held = Held()
    await client.send(request_)
    await held.asked.wait()
    await wait_all_tasks_blocked()
    setup.connections[0].drain()
    held.goes_on.set()
    answer = await client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
    assert await client.rest() == b""


@pytest.mark.parametrize("path", [b"/admin/v2/a", b"/elsewhere"])
async def test_a_client_that_ends_its_direction_with_a_request_has_its_answer_and_the_end(
    setup: Setup, autojump_clock: MockClock, path: bytes
) -> None:
    """The kernel tells of the end together with the request, and not once more."""
    client = await warm(setup)
    client.stream.socket.send(b"GET " + path + REST)
    client.stream.socket.shutdown(socket.SHUT_WR)
    began = trio.current_time()
    assert (await client.answer()).status == (404 if path == b"/elsewhere" else 200)
    assert await client.rest() == b""
    assert trio.current_time() - began < IDLE_S


async def test_a_request_behind_one_of_the_largest_size_is_served(autojump_clock: MockClock) -> None:
    size_bytes = 1024
    async with opened(http=Http(max_head_bytes=size_bytes)) as setup:
        client = await warm(setup)
        largest = b"GET /elsewhere?" + REST
        largest = largest.replace(b"?", b"?" + b"x" * (size_bytes - len(largest)))
        client.stream.socket.send(largest + GET)
        assert [(await client.answer()).status for _ in range(2)] == [404, 200]


async def test_a_drain_ends_a_connection_between_requests(setup: Setup) -> None:
    client = await warm(setup)
    setup.connections[0].drain()
    assert await client.rest() == b""


async def test_an_idle_connection_ends_after_its_last_request(setup: Setup, autojump_clock: MockClock) -> None:
    client = await warm(setup)
    for _ in range(3):
        await trio.sleep(IDLE_S - 0.1)
        await client.send(GET)
        assert (await client.answer()).status == 200
    began = trio.current_time()
    assert await client.rest() == b""
    assert IDLE_S <= trio.current_time() - began <= IDLE_S + IDLE_SLACK_S


@pytest.mark.parametrize(
    ("response", "status", "is_kept"),
    [
        (b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 200, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 502, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", 502, False),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, False),
        (b"nonsense\r\n\r\n", 502, False),
    ],
)
async def test_other_responses_have_their_rules(setup: Setup, response: bytes, status: int, *, is_kept: bool) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        setup.upstream.behave = echo
        await connection.send(response)
        await trio.sleep_forever()

    client = await warm(setup)
    setup.upstream.behave = behave
    await client.send(GET)
    assert (await client.answer()).status == status
    await wait_all_tasks_blocked()
    link = setup.pool.take_idle(setup.upstream.upstream)
    assert (link is not None) == is_kept
    if link is not None:
        link.wire.close()
    await client.send(GET)
    assert (await client.answer()).status == 200


@pytest.mark.parametrize("first", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_a_response_in_pieces_is_waited_for_in_the_task(setup: Setup, first: bytes) -> None:
    goes_on = trio.Event()

    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.send(first)
        await goes_on.wait()
        await connection.send((b"" if b"200" in first else b"HTTP/1.1 200 OK\r\n") + b"Content-Length: 0\r\n\r\n")

    client = await warm(setup)
    setup.upstream.behave = behave
    await client.send(GET)
    await wait_all_tasks_blocked()
    assert waiting_without_task() == 0
    goes_on.set()
    assert (await client.answer()).status == 200
    client.close()
