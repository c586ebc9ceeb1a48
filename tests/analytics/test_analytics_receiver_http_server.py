"""HTTP over a stream in memory: what comes in, what must go out, and when it is too late."""

from __future__ import annotations

import h11
import msgspec
import pytest
import trio
import trio.testing

from analytics.receiver import http_server
from analytics.receiver.config import Limits
from analytics.receiver.http_server import HttpServer, RequestHead, Response

LIMITS = Limits(
    header_timeout_ms=1_000,
    body_timeout_ms=2_000,
    idle_timeout_ms=3_000,
    write_timeout_ms=4_000,
    drain_timeout_ms=5_000,
)
POST = b"POST /x HTTP/1.1\r\nHost: h\r\n"


class Echo:
    body_bytes_max = 100
    authenticates = False

    def __init__(self) -> None:
        self.refused: list[tuple[RequestHead | None, int]] = []
        self.answered: list[bytes] = []
        self.early: Response | None = None
        self.gate: trio.Event | None = None
        self.text = "echo:"

    async def check_head(self, head: RequestHead) -> Response | None:
        return self.early

    async def respond(self, head: RequestHead, body: bytes) -> Response:
        if self.gate is not None:
            await self.gate.wait()
        self.answered.append(body)
        return Response(200, self.text + body.decode(), [("X-Path", head.path)])

    def on_refusal(self, head: RequestHead | None, response: Response) -> Response:
        self.refused.append((head, response.status))
        return response


class Dialogue:
    """A client's end, and the server running at the other."""

    def __init__(self, nursery: trio.Nursery, endpoint: Echo, limits: Limits = LIMITS) -> None:
        self.endpoint = endpoint
        self.stream, server = trio.testing.memory_stream_pair()
        self.server = HttpServer(endpoint, limits)
        self._http = h11.Connection(h11.CLIENT)
        self.ended = trio.Event()
        nursery.start_soon(self._serve, server)

    async def _serve(self, stream: trio.StapledStream) -> None:
        await self.server.serve_connection(stream)
        self.ended.set()

    async def answer(self) -> tuple[int, bytes, dict[bytes, bytes]]:
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        if self._http.our_state is h11.IDLE:  # whatever was really sent
            self._http.send(h11.Request(method="POST", target="/", headers=[("Host", "h"), ("Content-Length", "0")]))
            self._http.send(h11.EndOfMessage())
        status, text, headers = 0, b"", {}
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.stream.receive_some())
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                text += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, text, headers
            elif isinstance(event, h11.ConnectionClosed):
                return 0, b"", {}


def post(body: bytes, *headers: bytes) -> bytes:
    return POST + b"".join(one + b"\r\n" for one in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_requests_of_a_connection_are_answered_one_after_another(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        for text in (b"one", b"", b"three"):
            await talk.stream.send_all(post(text))
            status, answer, headers = await talk.answer()
            assert (status, answer) == (200, b"echo:" + text)
            assert headers[b"x-path"] == b"/x"
            assert b"connection" not in headers
        await talk.stream.send_all(post(b"a") + post(b"b"))  # without waiting for the answer
        assert [(await talk.answer())[1], (await talk.answer())[1]] == [b"echo:a", b"echo:b"]
        await talk.stream.aclose()
        await talk.ended.wait()


async def test_split_at_every_byte(autojump_clock: object) -> None:
    data = post(b"body", b"X-More: yes")
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nbod\r\n1\r\ny\r\n0\r\n\r\n"
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        for request in (data, chunked):
            for position in range(1, len(request)):
                await talk.stream.send_all(request[:position])
                await trio.testing.wait_all_tasks_blocked()
                await talk.stream.send_all(request[position:])
                assert (await talk.answer())[1] == b"echo:body"
        await talk.stream.aclose()


async def test_a_senders_wish_to_close_is_followed(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await talk.stream.send_all(post(b"last", b"Connection: close"))
        assert (await talk.answer())[0] == 200
        await talk.ended.wait()


@pytest.mark.parametrize(
    ("sent", "after_s", "status"),
    [
        (b"", 1.0, None),  # nothing at all
        (POST, 1.0, None),  # half a head
        (POST + b"Content-Length: 10\r\n\r\nhalf", 2.0, 503),  # half a body: it shall be sent again
    ],
)
async def test_requests_that_come_too_slowly_are_ended(
    sent: bytes, after_s: float, status: int | None, autojump_clock: object
) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        began_at = trio.current_time()
        await talk.stream.send_all(sent)
        if status is None:
            assert await talk.stream.receive_some() == b""
        else:
            found, _, headers = await talk.answer()
            assert (found, headers[b"retry-after"], headers[b"connection"]) == (status, b"1", b"close")
            assert talk.endpoint.refused[0][1] == status
        assert trio.current_time() - began_at == pytest.approx(after_s)
        await talk.stream.aclose()
        assert talk.endpoint.answered == []


async def test_an_idle_connection_is_closed(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await talk.stream.send_all(post(b"x"))
        await talk.answer()
        began_at = trio.current_time()
        assert await talk.stream.receive_some() == b""
        assert trio.current_time() - began_at == pytest.approx(3.0)


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", POST + b"X: " + b"y" * 40_000 + b"\r\n\r\n"]
)
async def test_bytes_that_are_no_http_are_refused(sent: bytes, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        nursery.start_soon(talk.stream.send_all, sent)
        status, _, headers = await talk.answer()
        assert status in {400, 431}
        assert headers[b"connection"] == b"close"
        assert talk.endpoint.refused == [(None, status)]
        await talk.stream.aclose()


async def test_a_body_that_grows_beyond_the_bound_is_refused_while_it_grows(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await talk.stream.send_all(POST + b"Transfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101)
        assert (await talk.answer())[0] == 413
        assert talk.endpoint.answered == []
        await talk.stream.aclose()
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await talk.stream.send_all(post(b"x" * 100))
        assert (await talk.answer())[0] == 200
        await talk.stream.aclose()


def chunked(chunk: bytes, count: int) -> bytes:
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(chunk), chunk) * count + b"0\r\n\r\n"


async def test_small_chunks_are_bounded_in_number_and_large_ones_are_not(autojump_clock: object) -> None:
    most, least = http_server.CHUNKS_SMALL_MAX, http_server.CHUNK_BYTES_MIN
    for request, expected in (
        (chunked(b"xx", most + 1), 200),  # two bytes each: the last one is that for CHUNK_BYTES_MIN
        (chunked(b"xx", most + 10), 400),
        (chunked(b"x" * least, 2 * most), 200),
    ):
        endpoint = Echo()
        endpoint.body_bytes_max = 1024 * 1024
        async with trio.open_nursery() as nursery:
            talk = Dialogue(nursery, endpoint)
            await talk.stream.send_all(request)
            status, text, _ = await talk.answer()
            assert status == expected
            assert (status == 400) == (b"too many chunks" in text)
            await talk.stream.aclose()


async def test_other_tasks_have_turns_while_chunks_are_parsed(autojump_clock: object) -> None:
    """All are in one read, so nothing is waited for between the head and the answer."""
    turns = 0
    seen: list[int] = []

    class Watching(Echo):
        body_bytes_max = 1024

        async def check_head(self, head: RequestHead) -> Response | None:
            seen.append(turns)
            return None

        async def respond(self, head: RequestHead, body: bytes) -> Response:
            seen.append(turns)
            return Response(200)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        talk = Dialogue(nursery, Watching())
        await talk.stream.send_all(chunked(b"xx", http_server.CHUNKS_SMALL_MAX))
        assert (await talk.answer())[0] == 200
        nursery.cancel_scope.cancel()
    assert seen[1] - seen[0] >= http_server.CHUNKS_SMALL_MAX // http_server.CHUNKS_AT_ONCE - 1  # tasks run in any order


async def test_an_early_answer_arrives_although_the_body_is_not_read(autojump_clock: object) -> None:
    endpoint = Echo()
    endpoint.early = Response(401, "who are you?", [("WWW-Authenticate", "Bearer")])
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, endpoint)
        await talk.stream.send_all(POST + b"Content-Length: 50\r\n\r\nhalf")
        assert (await talk.answer())[:2] == (401, b"who are you?")
        assert await talk.stream.receive_some() == b""  # its end, while ours is still open
        await talk.stream.send_all(b"and the rest")
        began_at = trio.current_time()
        await talk.ended.wait()  # though this end is never closed
        assert trio.current_time() - began_at <= http_server.LINGER_S


async def test_the_body_is_asked_for_only_if_it_is_wanted(autojump_clock: object) -> None:
    endpoint = Echo()
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, endpoint)
        head = POST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        await talk.stream.send_all(head)
        assert (await talk.stream.receive_some()).startswith(b"HTTP/1.1 100")
        await talk.stream.send_all(b"body")
        assert (await talk.answer())[1] == b"echo:body"
        endpoint.early = Response(415)
        await talk.stream.send_all(head)
        assert (await talk.answer())[0] == 415
        await talk.stream.aclose()


async def test_a_sender_that_goes_away_within_a_body_is_no_request(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await talk.stream.send_all(POST + b"Content-Length: 10\r\n\r\nhalf")
        await talk.stream.aclose()
        await talk.ended.wait()
        assert talk.endpoint.answered == []


async def test_draining_ends_idle_connections_and_lets_requests_finish(autojump_clock: object) -> None:
    endpoint = Echo()
    endpoint.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, endpoint)
        await talk.stream.send_all(post(b"busy"))
        await trio.testing.wait_all_tasks_blocked()
        talk.server.start_drain()
        await trio.testing.wait_all_tasks_blocked()
        assert not talk.ended.is_set()
        endpoint.gate.set()
        status, text, headers = await talk.answer()
        assert (status, text, headers[b"connection"]) == (200, b"echo:busy", b"close")
        await talk.ended.wait()
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo())
        await trio.testing.wait_all_tasks_blocked()
        talk.server.start_drain()
        began_at = trio.current_time()
        await talk.ended.wait()
        assert trio.current_time() == began_at
        late = Dialogue(nursery, Echo())
        late.server.draining = True
        await late.ended.wait()


async def test_a_sender_that_does_not_take_its_answer(autojump_clock: object) -> None:
    """Nothing waits for ever: the answer's bound, then the bound on closing."""

    class Stuck(trio.abc.SendStream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await trio.sleep_forever()

        async def wait_send_all_might_not_block(self) -> None:
            await trio.sleep_forever()

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    receive = trio.testing.MemoryReceiveStream()
    receive.put_data(post(b"x"))
    server = HttpServer(Echo(), msgspec.structs.replace(LIMITS, write_timeout_ms=7_000))
    began_at = trio.current_time()
    await server.serve_connection(trio.StapledStream(Stuck(), receive))
    assert trio.current_time() - began_at == pytest.approx(7.0)


async def test_body_bytes_are_bounded_and_released(autojump_clock: trio.testing.MockClock) -> None:
    """One that does not fit is told to come again; room is there again once another was answered, or went away."""
    limits = msgspec.structs.replace(LIMITS, max_held_bytes=20)
    async with trio.open_nursery() as nursery:
        talk = Dialogue(nursery, Echo(), limits)
        other = Dialogue(nursery, talk.endpoint, limits)
        other.server.body_budget = talk.server.body_budget  # one receiver's
        await other.stream.send_all(POST + b"Content-Length: 9\r\n\r\n12345678")
        await trio.testing.wait_all_tasks_blocked()
        assert talk.server.body_budget.held_bytes == 8
        await talk.stream.send_all(POST + b"Content-Length: 9\r\n\r\n123456789")
        status, text, headers = await talk.answer()
        assert (status, headers[b"retry-after"]) == (503, b"5")
        assert b"limits.max_held_bytes" in text
        assert talk.server.body_budget.held_bytes == 8
        await other.stream.send_all(b"9")
        assert (await other.answer())[:2] == (200, b"echo:123456789")
        await talk.ended.wait()
        assert talk.server.body_budget.held_bytes == 0
        await other.stream.send_all(POST + b"Content-Length: 9\r\n\r\n1234")
        await trio.testing.wait_all_tasks_blocked()
        assert talk.server.body_budget.held_bytes == 4
        await other.stream.aclose()
        await other.ended.wait()
        assert talk.server.body_budget.held_bytes == 0
