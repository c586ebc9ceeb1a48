"""proxy.http.server: a client's connection, over loopback, with a fake upstream behind it."""

from __future__ import annotations

import contextlib
import json
import random

import h11
import pytest
import trio
from http_fakes import Held, Received, Setup, UpstreamConnection, pair
from trio.testing import MockClock, wait_all_tasks_blocked

from proto.http_rules import RequestRefused
from proxy.http.exchange import UNREAD_BYTES_MAX, RequestBody
from proxy.http.messages import MessageStream, SizedBody
from proxy.runtime.fairness.byte_budget import ByteBudget, ByteReservation

GET = b"GET /admin/v2/tenants HTTP/1.1\r\nHost: proxy:8081\r\n\r\n"

CHUNKED = b"POST /admin/v2/x HTTP/1.1\r\nHost: proxy\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(body: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    lines = [method + b" /admin/v2/x HTTP/1.1", b"Host: proxy:8081", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


async def test_a_get_is_passed_on_and_the_connection_goes_on(setup: Setup) -> None:
    client = setup.connect()
    for _ in range(3):
        await client.send(GET)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"GET /admin/v2/tenants ")
        assert b"connection" not in answer.headers
    assert setup.parts.dials == ["broker-1"]
    assert [one.header(b"host") for one in setup.upstream.requests] == [b"broker-1:8080"] * 3
    assert [(one.status, one.route, one.upstream) for one in await setup.records(3)] == [
        (200, "brokers", "broker-1:8080")
    ] * 3


async def test_requests_with_equal_headers_differ_in_all_else(setup: Setup) -> None:
    client = setup.connect()
    rest = b" HTTP/1.1\r\nHost: proxy:8081\r\nAccept: */*\r\n\r\n"
    setup.parts.role = "alice"
    for line in (
        b"GET /admin/a",
        b"PUT /admin/b?c",
        b"DELETE /admin/d",
        b"GET /elsewhere",
        b"TRACE /admin/e",
    ):
        await client.send(line + rest)
        answer = await client.answer()
        assert answer.status == {b"GET /elsewhere": 404, b"TRACE /admin/e": 405}.get(line, 200)
        setup.parts.role += "2"
    found = [(one.method, one.target, one.header(b"x-original-principal")) for one in setup.upstream.requests]
    assert found == [
        (b"GET", b"/admin/a", b"alice"),
        (b"PUT", b"/admin/b?c", b"alice2"),
        (b"DELETE", b"/admin/d", b"alice22"),
    ]
    assert [(one.method, one.path) for one in setup.parts.records][:4] == [
        ("GET", "/admin/a"),
        ("PUT", "/admin/b"),
        ("DELETE", "/admin/d"),
        ("GET", "/elsewhere"),
    ]


@pytest.mark.parametrize(
    ("second", "closes"),
    [
        (post(b"body"), False),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), True),
        (GET.replace(b"1.1", b"1.0"), True),
    ],
)
async def test_other_headers_count_after_equal_ones(setup: Setup, second: bytes, closes: bool) -> None:
    client = setup.connect()
    for data in (GET, GET, second):
        await client.send(data)
        answer = await client.answer()
    assert (answer.headers.get(b"connection") == b"close") == closes
    assert answer.body.endswith(b"body") != closes
    if not closes:
        await client.send(GET)
        assert (await client.answer()).body == b"GET /admin/v2/tenants "


async def test_a_body_is_passed_on(setup: Setup) -> None:
    answer = await setup.ask(post(b"the body"), method="POST")
    assert answer.body == b"POST /admin/v2/x the body"
    assert (await setup.records())[0].request_bytes == 8


async def test_a_refusal_is_json(setup: Setup) -> None:
    answer = await setup.ask(b"GET /elsewhere HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.status == 404
    assert "reason" in json.loads(answer.body)


async def test_a_path_of_a_function_goes_to_function_workers(setup: Setup) -> None:
    await setup.ask(b"GET /admin/v3/functions/a HTTP/1.1\r\nHost: x\r\n\r\n")
    assert [one.target for one in setup.functions.requests] == [b"/admin/v3/functions/a"]
    assert (await setup.records())[0].route == "functions"
    assert setup.parts.authenticated_for == ["functions"]  # security: the proxy's own credentials depend on it


async def test_pipelined_requests_are_answered_in_order(setup: Setup) -> None:
    client = setup.connect()
    await client.send(post(b"first") + GET + post(b"third"))
    assert [(await client.answer()).body for _ in range(3)] == [
        b"POST /admin/v2/x first",
        b"GET /admin/v2/tenants ",
        b"POST /admin/v2/x third",
    ]


async def test_a_pipelined_request_waits_while_one_is_answered(setup: Setup, autojump_clock: MockClock) -> None:
    setup.upstream.behave = held = Held()
    client = setup.connect()
    await client.send(GET)
    await held.asked.wait()
    await trio.sleep(1)  # the client is watched by now
    await client.send(post(b"second"))
    await trio.sleep(1)
    assert len(setup.upstream.requests) == 1
    held.goes_on.set()
    assert (await client.answer()).body == b"GET /admin/v2/tenants "
    assert (await client.answer()).body == b"POST /admin/v2/x second"


async def test_head(setup: Setup) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.answer(200, [("Content-Length", "4711")])

    setup.upstream.behave = behave
    client = setup.connect()
    await client.send(GET.replace(b"GET", b"HEAD"))
    answer = await client.answer("HEAD")
    assert (answer.headers[b"content-length"], answer.body) == (b"4711", b"")
    await client.send(GET.replace(b"GET", b"HEAD"))
    answer = await client.answer("HEAD")
    assert (answer.status, answer.headers[b"content-length"]) == (200, b"4711")
    assert setup.parts.dials == ["broker-1"]


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body(setup: Setup, status: int) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.answer(status, [("ETag", "x")])

    setup.upstream.behave = behave
    client = setup.connect()
    for _ in range(2):
        await client.send(GET)
        answer = await client.answer()
        assert (answer.status, answer.body) == (status, b"")
        assert b"content-length" not in answer.headers
        assert b"transfer-encoding" not in answer.headers


async def test_http_1_0_gets_a_body_until_the_end(setup: Setup, autojump_clock: MockClock) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.answer(200, [("Transfer-Encoding", "chunked")], b"in chunks")

    setup.upstream.behave = behave
    client = setup.connect()
    await client.send(GET.replace(b"1.1", b"1.0"))
    answer = await client.rest()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"in chunks"
    assert b"chunked" not in head
    assert b"connection: close" in head


async def test_chunks_pass_both_ways(setup: Setup) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        request.body = await connection.body()
        await connection.answer(200, [("Transfer-Encoding", "chunked")], request.body * 2)

    setup.upstream.behave = behave
    client = setup.connect()
    for _ in range(2):
        await client.send(CHUNKED + b"5;name=value\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n")
        answer = await client.answer("POST")
        assert answer.body == b"hello!hello!"
    assert [one.header(b"transfer-encoding") for one in setup.upstream.requests] == [b"chunked"] * 2
    assert setup.parts.dials == ["broker-1"]


async def test_a_large_body_passes_both_ways(setup: Setup) -> None:
    body = random.Random(1).randbytes(9 * 2**20)
    client = setup.connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, post(body))
        answer = await client.answer("POST")
    assert answer.body == b"POST /admin/v2/x " + body
    assert setup.upstream.requests[0].header(b"expect") == b"100-continue"
    assert setup.services.replay.used_bytes == 0


async def test_a_body_until_the_upstreams_end(setup: Setup, autojump_clock: MockClock) -> None:
    async def behave(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the ")
        await trio.sleep(1)
        await connection.send(b"end")
        connection.stream.close_now()

    setup.upstream.behave = behave
    client = setup.connect()
    await client.send(GET)
    answer = await client.answer()
    assert answer.body == b"to the end"
    await client.send(GET)
    assert (await client.answer()).body == b"to the end"
    assert len(setup.parts.dials) == 2


async def test_a_client_that_expects_100_gets_it_once_its_body_is_wanted(setup: Setup) -> None:
    client = setup.connect()
    request = post(b"body", b"Expect: 100-continue")
    await client.send(request[:-4])
    assert await client.raw() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(b"body")
    assert (await client.answer()).body == b"POST /admin/v2/x body"
    await client.send(GET)
    assert (await client.answer()).status == 200


async def test_a_client_that_expects_100_gets_a_refusal_without_it(setup: Setup, autojump_clock: MockClock) -> None:
    setup.parts.refusal = RequestRefused(401, "who is this?", "no_credentials")
    client = setup.connect()
    await client.send(post(b"body", b"Expect: 100-continue")[:-4])
    answer = await client.rest()
    assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert b"connection: close" in answer
    assert b"100" not in answer


async def test_a_refusal_of_the_authenticator(setup: Setup) -> None:
    setup.parts.refusal = RequestRefused(401, "who is this?", "no_credentials")
    client = setup.connect()
    await client.send(post(b"body"))
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)) == (401, {"reason": "who is this?"})
    assert answer.headers[b"www-authenticate"] == b'Bearer realm="pulsar"'
    setup.parts.refusal = None
    await client.send(GET)  # the refused request's body was read
    assert (await client.answer()).body == b"GET /admin/v2/tenants "
    assert [(one.status, one.cause) for one in await setup.records(2)] == [(401, "no_credentials"), (200, "")]


async def test_the_brokers_are_told_of_the_client(setup: Setup) -> None:
    setup.parts.role, setup.parts.authorization = "alice", b"Bearer ours"
    await setup.ask(GET.replace(b"\r\n\r\n", b"\r\nX-Original-Principal: root\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n"))
    request = setup.upstream.requests[0]
    assert request.header(b"x-original-principal") == b"alice"
    assert request.header(b"x-forwarded-for") == b"203.0.113.7"
    assert request.header(b"authorization") == b"Bearer ours"
    assert (await setup.records())[0].principal == "alice"


async def test_configured_headers_are_in_every_response(setup: Setup) -> None:
    setup.services.response_headers = [(b"content-type", b"text/x"), (b"x-frame-options", b"DENY")]
    for path in (b"/admin/v2/tenants", b"/nowhere", b"/status.html"):
        answer = await setup.ask(GET.replace(b"/admin/v2/tenants", path))
        assert answer.headers[b"x-frame-options"] == b"DENY"
        assert answer.headers[b"content-type"] == b"text/x"


async def test_the_worker_answers_probes_itself(setup: Setup) -> None:
    setup.parts.refusal = RequestRefused(401, "who is this?")
    answer = await setup.ask(b"GET /status.html HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (answer.status, answer.body) == (200, b"OK")


# ---- smuggling


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(
            CHUNKED[:-2] + b"Content-Length: 30\r\n\r\n0\r\n\r\n",
            400,
            id="length and chunks",
        ),
        pytest.param(
            b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, id="lengths"
        ),
        pytest.param(b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n", 400, id="length list"),
        pytest.param(b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n", 400, id="signed length"),
        pytest.param(
            b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, id="codings"
        ),
        pytest.param(
            b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n", 501, id="unknown coding"
        ),
        pytest.param(
            b"POST /admin/v2/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n", 400, id="space before colon"
        ),
        pytest.param(
            b"POST /admin/v2/x HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="chunks in 1.0"
        ),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n", 400, id="bare line feed"),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\nHost: x\n\nGET / HTTP/1.1\r\n\r\n", 400, id="bare blank line"),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\nHost: x\r\nX-A: b\rX-C: d\r\n\r\n", 400, id="bare return"),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, id="hosts"),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\nHost: x\r\nX-A: \0\r\n\r\n", 400, id="NUL"),
        pytest.param(b"GET /admin/v2/x HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /admin/../x HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="dots"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="TLS"),
        pytest.param(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405, id="CONNECT"),
    ],
)
async def test_an_ambiguous_request_reaches_no_upstream(
    setup: Setup, autojump_clock: MockClock, request_bytes: bytes, status: int
) -> None:
    client = setup.connect()
    await client.send(request_bytes + GET)
    answer = await client.rest()
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"content-length") == 1  # what follows is no request
    assert b"connection: close" in answer
    assert setup.upstream.requests == []
    assert [one.status for one in await setup.records()] == [status]


async def test_a_request_hidden_in_a_body_is_a_body(setup: Setup) -> None:
    hidden = b"DELETE /admin/v2/tenants/all HTTP/1.1\r\nHost: x\r\n\r\n"
    client = setup.connect()
    await client.send(post(hidden) + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden) + GET)
    for _ in range(3):
        assert (await client.answer()).status == 200
    assert [(one.method, one.body) for one in setup.upstream.requests] == [
        (b"POST", hidden),
        (b"POST", hidden),
        (b"GET", b""),
    ]


async def test_a_refused_requests_body_is_no_request(setup: Setup, autojump_clock: MockClock) -> None:
    setup.parts.refusal = RequestRefused(401, "who is this?")
    client = setup.connect()
    await client.send(CHUNKED)  # its body is not read
    await client.send(GET)
    answer = await client.rest()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert setup.upstream.requests == []


async def test_a_folded_header_does_not_leave_folded(setup: Setup) -> None:
    answer = await setup.ask(GET[:-2] + b"X-A: b\r\n  Transfer-Encoding: chunked\r\n\r\n")
    assert answer.status == 200
    assert setup.upstream.requests[0].header(b"x-a") == b"b Transfer-Encoding: chunked"
    assert setup.upstream.requests[0].header(b"transfer-encoding") is None


@pytest.mark.parametrize(
    "chunks",
    [b"x\r\n", b"5\r\nhelloXX0\r\n\r\n", b"-1\r\n\r\n", b"f" * 30 + b"\r\n", b"1" * 70_000, b"5\nhello\r\n0\r\n\r\n"],
)
async def test_malformed_chunks(setup: Setup, autojump_clock: MockClock, chunks: bytes) -> None:
    client = setup.connect()
    await client.send(CHUNKED + chunks)
    answer = await client.rest()
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert (await setup.records())[0].cause == "malformed_body"
    assert all(one.http.their_state is not h11.DONE for one in setup.upstream.connections)


# ---- bounds


async def test_a_head_that_is_too_large(setup: Setup, autojump_clock: MockClock) -> None:
    for filler in (b"a" * 8192, b"a" * 100_000):
        client = setup.connect()
        with contextlib.suppress(trio.BrokenResourceError):
            await client.send(GET[:-2] + b"X: " + filler)
        assert (await client.rest()).startswith(b"HTTP/1.1 431 ")


async def test_the_largest_head(setup: Setup) -> None:
    head = GET[:-2] + b"X: \r\n\r\n"
    room = 8192 - len(head)
    assert (await setup.ask(head.replace(b"X: ", b"X: " + b"a" * room))).status == 200
    assert (await setup.ask(head.replace(b"X: ", b"X: " + b"a" * (room + 1)))).status == 431


async def test_a_pipelined_head_has_the_same_bound(setup: Setup) -> None:
    client = setup.connect()
    await client.send(post(b"b" * 100_000) + GET[:-2] + b"X: " + b"a" * 8192 + b"\r\n\r\n")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 431


async def test_a_head_that_does_not_end(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    started = trio.current_time()
    await client.send(GET[:-2])
    assert (await client.answer()).status == 408
    assert trio.current_time() - started == pytest.approx(10, abs=0.5)
    assert [(one.status, one.cause) for one in await setup.records()] == [(408, "head_timeout")]


async def test_tls_where_there_is_none_is_told_at_once(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    started = trio.current_time()
    await client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert (await client.answer()).status == 400
    assert trio.current_time() - started < 1
    assert [(one.status, one.cause) for one in await setup.records()] == [(400, "tls")]


async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    started = trio.current_time()
    for byte in GET[:8]:
        await client.send(bytes([byte]))
        await trio.sleep(1.2)
    assert (await client.answer()).status == 408
    assert trio.current_time() - started == pytest.approx(10, abs=0.5)


async def test_idle_connections_end(setup: Setup, autojump_clock: MockClock) -> None:
    started = trio.current_time()
    assert await setup.connect().rest() == b""
    assert trio.current_time() - started == pytest.approx(10, abs=1.1)
    client = setup.connect()
    await client.send(GET)
    await client.answer()
    started = trio.current_time()
    assert await client.rest() == b""
    assert trio.current_time() - started == pytest.approx(60, abs=1.1)
    assert len(setup.parts.records) == 1


async def test_a_body_that_does_not_come(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    started = trio.current_time()
    await client.send(post(b"a body")[:-1])
    answer = await client.answer()
    assert answer.status == 408
    assert answer.headers[b"connection"] == b"close"
    assert trio.current_time() - started == pytest.approx(60, abs=0.5)
    assert (await setup.records())[0].cause == "client_slow"


async def test_a_response_that_does_not_come(setup: Setup, autojump_clock: MockClock) -> None:
    async def never(connection: UpstreamConnection, request: Received) -> None:
        await trio.sleep_forever()

    setup.upstream.behave = never
    for count, request in enumerate((GET, post(b"body")), 1):
        started = trio.current_time()
        answer = await setup.ask(request)
        assert answer.status == 504
        assert trio.current_time() - started == pytest.approx(300, abs=0.5)
        await setup.records(count)
    assert setup.pool.idle_count == 0


async def test_a_response_that_stops_is_cut(setup: Setup, autojump_clock: MockClock) -> None:
    async def stops(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nso far")
        await trio.sleep_forever()

    setup.upstream.behave = stops
    client = setup.connect()
    await client.send(GET)
    with pytest.raises(trio.BrokenResourceError):  # a reset, not an end
        await client.rest()
    assert [(one.status, one.cause) for one in await setup.records()] == [(200, "upstream_slow")]
    assert setup.pool.idle_count == 0


async def test_a_client_that_does_not_read_is_cut(setup: Setup, autojump_clock: MockClock) -> None:
    async def floods(connection: UpstreamConnection, request: Received) -> None:
        await connection.body()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" + bytes(100_000_000))

    setup.upstream.behave = floods
    client = setup.connect()
    await client.send(GET)
    await trio.sleep(100)
    assert [one.cause for one in await setup.records()] == ["client_slow"]
    assert setup.upstream.closed == 1


async def test_a_client_that_leaves_ends_its_exchange(setup: Setup, autojump_clock: MockClock) -> None:
    asked = trio.Event()

    async def never(connection: UpstreamConnection, request: Received) -> None:
        asked.set()
        assert await connection.stream.receive_some(1) in {b"", b"b"}  # the end, before any timeout
        connection.stream.close_now()

    setup.upstream.behave = never
    for request in (GET, post(b"body"), post(b"body")[:-1]):
        asked = trio.Event()
        client = setup.connect()
        await client.send(request)
        await asked.wait()
        started = trio.current_time()
        client.close()
        await setup.records()
        assert trio.current_time() - started < 1
        assert [(one.status, one.cause) for one in await setup.records()] == [(499, "client_left")]
        setup.parts.records.clear()


async def test_a_client_that_pipelines_without_end_is_held_up(setup: Setup, autojump_clock: MockClock) -> None:
    async def never(connection: UpstreamConnection, request: Received) -> None:
        await trio.sleep_forever()

    setup.upstream.behave = never
    client = setup.connect()
    await client.send(GET)
    with trio.move_on_after(60):
        await client.send(GET * 10_000)
    await trio.sleep(60)
    assert len(setup.connections[0]._wire.unread) == UNREAD_BYTES_MAX


async def test_an_early_response_reaches_a_client_that_still_sends(setup: Setup, autojump_clock: MockClock) -> None:
    async def refuses(connection: UpstreamConnection, request: Received) -> None:
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno\n")
        await trio.sleep_forever()

    setup.upstream.behave = refuses
    client = setup.connect()
    await client.send(post(bytes(20_000_000))[:70_000])
    answer = await client.answer()
    assert (answer.status, answer.body) == (413, b"no\n")
    assert answer.headers[b"connection"] == b"close"
    await setup.records()
    assert setup.pool.idle_count == 0


async def test_an_early_response_follows_no_100(setup: Setup, autojump_clock: MockClock) -> None:
    """A client that waits for its 100 gets none after the response has begun."""

    async def refuses(connection: UpstreamConnection, request: Received) -> None:
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\n")
        await trio.sleep(10)
        await connection.send(b"no\n")

    setup.upstream.behave = refuses
    client = setup.connect()
    await client.send(post(bytes(20_000_000), b"Expect: 100-continue")[:200].partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    answer = await client.rest()
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_refusal_is_not_lost_to_a_client_that_still_sends(setup: Setup, autojump_clock: MockClock) -> None:
    setup.parts.refusal = RequestRefused(401, "who is this?")
    client = setup.connect()
    await client.send(CHUNKED + b"10000\r\n" + bytes(65_536))
    await trio.sleep(10)
    assert (await client.rest()).endswith(b"}")  # to close with bytes unread would have reset the connection


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET.replace(b"1.1", b"1.0"),
        GET.replace(b"1.1\r\n", b"1.0\r\nConnection: keep-alive\r\n"),
        GET.replace(b"1.1\r\n", b"1.1\r\nConnection: close\r\n"),
        GET.replace(b"1.1\r\n", b"1.1\r\nConnection: x\r\nConnection: y, CLOSE\r\n"),
    ],
)
async def test_a_client_that_wants_no_further_response(setup: Setup, request_bytes: bytes) -> None:
    client = setup.connect()
    await client.send(request_bytes + GET)
    answer = await client.answer()
    assert answer.headers[b"connection"] == b"close"
    assert await client.rest() == b""
    await setup.records(1)


async def test_a_failure_within_a_response_is_no_second_response(setup: Setup, autojump_clock: MockClock) -> None:
    async def begins(connection: UpstreamConnection, request: Received) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nso")
        await trio.sleep(30)
        await connection.send(b" far")
        await trio.sleep_forever()

    setup.upstream.behave = begins
    client = setup.connect()
    await client.send(post(b"a body")[:-1])  # the client's time is over before the upstream's
    with pytest.raises(trio.BrokenResourceError):
        await client.rest()
    assert [(one.status, one.cause) for one in await setup.records()] == [(200, "client_slow")]


async def test_a_body_that_is_no_longer_wanted_is_not_asked_for() -> None:
    ours, theirs = pair()
    wire = MessageStream(ours, head_bytes_max=100)
    reservation = ByteReservation(ByteBudget(100), "owner")
    body = RequestBody(wire, SizedBody(wire, 1), reservation=reservation, keep_max=9, expects_continue=True)
    body.stop_keeping()  # as a response begins
    await theirs.send_all(b"x")
    assert await body.receive() == b"x"
    ours.close_now()
    assert await theirs.receive_some() == b""
    theirs.close_now()


# ---- drain


async def test_a_drain_ends_an_idle_connection_at_once(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    await client.send(GET)
    await client.answer()
    await wait_all_tasks_blocked()
    setup.connections[0].drain()
    assert await client.rest() == b""


async def test_a_drain_serves_a_new_connections_first_request(setup: Setup, autojump_clock: MockClock) -> None:
    """Its client would not repeat it."""
    client = setup.connect()
    await wait_all_tasks_blocked()
    setup.connections[0].drain()
    await client.send(GET + GET)
    answer = await client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
    assert await client.rest() == b""


async def test_a_drain_does_not_wait_for_a_first_request_that_does_not_come(
    setup: Setup, autojump_clock: MockClock
) -> None:
    client = setup.connect()
    await wait_all_tasks_blocked()
    setup.connections[0].drain()
    began = trio.current_time()
    assert await client.rest() == b""
    assert trio.current_time() - began < 15  # head_timeout_ms, and what the connection lingers


async def test_a_drain_serves_a_request_that_has_come(setup: Setup, autojump_clock: MockClock) -> None:
    client = setup.connect()
    await client.send(GET)
    await client.answer()
    await wait_all_tasks_blocked()
    client.stream.socket.send(GET)  # nobody has read it yet
    setup.connections[0].drain()
    answer = await client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
    assert await client.rest() == b""


async def test_a_drain_lets_the_request_under_way_end(setup: Setup, autojump_clock: MockClock) -> None:
    setup.upstream.behave = held = Held()
    client = setup.connect()
    await client.send(GET)
    await held.asked.wait()
    setup.connections[0].drain()
    held.goes_on.set()
    answer = await client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
    assert await client.rest() == b""
