"""proxy.common.http_server: one request a connection, every wait, size and number bounded."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.common import http_server
from proxy.common.http_server import (
    ANSWER_TIMEOUT_S,
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    HEAD_TIMEOUT_S,
    LINGER_S,
    PART_TIMEOUT_S,
    HttpRequest,
    HttpResponse,
    HttpServer,
    Send,
)

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Setup:
    """A server whose clients are memory streams."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.requests: list[HttpRequest] = []
        self.reply: Callable[[], Awaitable[HttpResponse]] | None = None
        self.server = HttpServer(self._answer)
        self._nursery = nursery

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        return HttpResponse(200, b"ok\n") if self.reply is None else await self.reply()

    async def connect(self, address: str = "10.0.0.1") -> trio.StapledStream[Any, Any]:
        ours, theirs = trio.testing.memory_stream_pair()
        await self.server.admit_connection(theirs, address, self._nursery)
        return ours

    async def ask(self, data: bytes, address: str = "10.0.0.1") -> bytes:
        stream = await self.connect(address)
        await stream.send_all(data)
        answer = await everything(stream)
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        return answer


async def everything(stream: trio.abc.ReceiveStream) -> bytes:
    got = b""
    while data := await stream.receive_some(4096):
        got += data
    return got


@pytest.fixture
def setup(nursery: trio.Nursery) -> Setup:
    return Setup(nursery)


async def test_a_request(setup: Setup) -> None:
    answer = await setup.ask(b"GET /status?x=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
    assert b"Content-Length: 3" in head
    assert b"Connection: close" in head
    assert body == b"ok\n"
    assert setup.requests == [HttpRequest("GET", "/status", [b"Bearer t"], "10.0.0.1", "x=1", b"x")]
    assert setup.server.connections == 0


async def test_a_request_of_http_1_0_may_have_no_host_and_none_may_have_two(setup: Setup) -> None:
    assert b"200 OK" in await setup.ask(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert setup.requests[0].host == b""
    assert b" 400 " in await setup.ask(b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")


async def test_split_at_every_byte(setup: Setup) -> None:
    stream = await setup.connect()
    for byte in GET:
        await stream.send_all(bytes([byte]))
    assert (await everything(stream)).endswith(b"ok\n")


async def test_head_has_no_body(setup: Setup) -> None:
    answer = await setup.ask(GET.replace(b"GET", b"HEAD"))
    assert b"Content-Length: 3" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_body_is_not_wanted(setup: Setup) -> None:
    """It is answered all the same, whether or not the body comes."""
    post = b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    assert b"200 OK" in await setup.ask(post)
    assert b"200 OK" in await setup.ask(post + b"x" * 100)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_an_invalid_http_request_is_answered_with_400(setup: Setup, data: bytes) -> None:
    assert (await setup.ask(data)).startswith(b"HTTP/1.1 400 ")
    assert setup.requests == []


async def test_a_head_is_bounded(setup: Setup) -> None:
    """Security."""
    answer = await setup.ask(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_slow_head_has_a_deadline(setup: Setup, autojump_clock: trio.testing.MockClock) -> None:
    """Security: slow loris."""
    stream = await setup.connect()
    began = trio.current_time()

    async def trickle() -> None:
        while True:
            await stream.send_all(b"G")
            await trio.sleep(0.5)

    with pytest.raises(trio.BrokenResourceError):
        await trickle()
    assert trio.current_time() - began == pytest.approx(HEAD_TIMEOUT_S, abs=1)


async def test_an_answer_that_is_not_taken_has_a_deadline(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a slow reader."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    await setup.server.admit_connection(theirs, "10.0.0.1", nursery)
    await ours.send_all(GET)
    await trio.sleep(ANSWER_TIMEOUT_S - 0.1)
    assert setup.server.connections == 1
    await trio.sleep(0.2)
    assert setup.server.connections == 0


async def test_a_client_that_does_not_close_is_disconnected_after_linger_s(
    setup: Setup, autojump_clock: trio.testing.MockClock
) -> None:
    stream = await setup.connect()
    await stream.send_all(GET)
    await trio.sleep(LINGER_S + 0.1)
    assert setup.server.connections == 0


async def test_a_client_that_closes_without_a_request_gets_no_answer(setup: Setup) -> None:
    stream = await setup.connect()
    await stream.send_eof()
    assert await everything(stream) == b""
    await (await setup.connect()).aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert setup.server.connections == 0


async def test_open_connections_keep_no_other_client_out(setup: Setup) -> None:
    """Security: as many as there may be, and more, from one address, none of which ever asks."""
    loris = [await setup.connect("192.0.2.1") for _ in range(CONNECTIONS_MAX + 50)]
    assert setup.server.connections == CONNECTIONS_MAX
    assert setup.server.displaced == 50
    assert (await setup.ask(GET, "10.0.0.1")).endswith(b"ok\n")
    assert await loris[0].receive_some(1) == b"", "the oldest has gone"
    assert setup.server.connections == CONNECTIONS_MAX - 1


async def test_the_address_that_has_the_most_goes_first(setup: Setup) -> None:
    """Security: a scrape under way is not cut for another's connections, older as it is."""
    scraping = await setup.connect("10.0.0.1")
    for _ in range(2 * CONNECTIONS_MAX):
        await setup.connect("192.0.2.1")
    await scraping.send_all(GET)
    assert (await everything(scraping)).endswith(b"ok\n")


async def test_a_defect_ends_its_connection_only(setup: Setup) -> None:
    async def broken() -> HttpResponse:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    setup.reply = broken
    with structlog.testing.capture_logs() as logs:
        assert await setup.ask(GET) == b""
    assert [entry["event"] for entry in logs] == ["the admin port met a defect"]
    setup.reply = None
    assert (await setup.ask(GET)).endswith(b"ok\n")


class Listener:
    """Gives out what a test puts in: streams or errors."""

    def __init__(self, *waiting: Any) -> None:
        self._waiting = list(waiting)

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        if not self._waiting:
            await trio.sleep_forever()
        one = self._waiting.pop(0)
        if isinstance(one, OSError):
            raise one
        return one


async def test_a_listener_until_it_is_told_to_stop(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Those that are here are answered. Out of descriptors, it waits for some."""
    monkeypatch.setattr(http_server, "peer_address", lambda _stream: "10.0.0.1")
    ours, theirs = trio.testing.memory_stream_pair()
    ended = trio.Event()

    async def serve() -> None:
        await setup.server.serve(Listener(OSError(errno.EMFILE, "Too many open files"), theirs))  # type: ignore[arg-type]
        ended.set()

    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(serve)
        await ours.send_all(GET[:5])
        await trio.sleep(1)
    assert [entry["event"] for entry in logs] == ["the admin port cannot accept a connection"]
    setup.server.stop_accepting()
    await trio.testing.wait_all_tasks_blocked()
    assert not ended.is_set()
    await ours.send_all(GET[5:])
    assert (await everything(ours)).endswith(b"ok\n")
    await ours.aclose()
    await ended.wait()


# ---- streams


async def start_stream(setup: Setup) -> trio.StapledStream[Any, Any]:
    """The client's end of a stream that never ends by itself."""

    async def parts(send: Send) -> None:
        while True:
            await send(b"part;" * 1000)
            await trio.sleep(1)

    async def reply() -> HttpResponse:
        await trio.lowlevel.checkpoint()
        return HttpResponse(200, b"", "text/event-stream", stream=parts)

    setup.reply = reply
    stream = await setup.connect()
    await stream.send_all(GET)
    return stream


async def test_a_stream_outlives_the_time_of_an_answer(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    stream = await start_stream(setup)
    got = b""
    while got.count(b"part;") < 1000 * 3 * ANSWER_TIMEOUT_S:
        got += await stream.receive_some()
    assert b"Transfer-Encoding: chunked" in got
    assert b"Content-Length" not in got
    await stream.aclose()
    await trio.sleep(2)
    assert setup.server.connections == 0


async def test_a_viewer_that_reads_nothing_is_closed(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: it would hold a place for ever."""

    sent: list[float] = []

    async def get_stuck() -> None:
        sent.append(trio.current_time())
        if len(sent) > 1:  # the head alone is received
            await trio.sleep_forever()

    async def parts(send: Send) -> None:
        await send(b"part;")

    async def reply() -> HttpResponse:
        await trio.lowlevel.checkpoint()
        return HttpResponse(200, b"", stream=parts)

    setup.reply = reply
    sending = trio.testing.MemorySendStream(send_all_hook=get_stuck)
    receiving = trio.testing.MemoryReceiveStream()
    receiving.put_data(GET)
    await setup.server.admit_connection(trio.StapledStream(sending, receiving), "10.0.0.1", nursery)  # type: ignore[arg-type]
    await trio.sleep(PART_TIMEOUT_S - 0.1)
    assert setup.server.connections == 1
    await trio.sleep(0.2)
    assert setup.server.connections == 0


async def test_a_drain_ends_streams(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    stream = await start_stream(setup)
    await stream.receive_some()
    setup.server.stop_accepting()
    await everything(stream)
    assert trio.current_time() < PART_TIMEOUT_S
    await trio.testing.wait_all_tasks_blocked()
    assert setup.server.connections == 0


async def test_a_head_alone(setup: Setup, nursery: trio.Nursery) -> None:
    async def parts(_send: Send) -> None:
        raise AssertionError

    async def reply() -> HttpResponse:
        await trio.lowlevel.checkpoint()
        return HttpResponse(200, b"", "text/event-stream", stream=parts)

    setup.reply = reply
    head, _, body = (await setup.ask(GET.replace(b"GET", b"HEAD"))).partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"")
