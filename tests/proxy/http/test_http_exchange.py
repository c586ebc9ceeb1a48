"""proxy.http.exchange: redirects, connections that turn out closed, upstreams that fail, bodies that are sent again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import trio
from http_fakes import Behaviour, FakeUpstream, Received, Setup, UpstreamConnection, echo, opened
from trio.testing import MockClock

from proxy.config.types import Http
from proxy.http.exchange import ATTEMPTS_MAX
from proxy.http.upstream import FAILING_S, IDLE_S, RESPONSE_HEAD_BYTES_MAX

GET = b"GET /admin/v2/tenants?x=1 HTTP/1.1\r\nHost: proxy:8081\r\n\r\n"
KEPT_MAX = 100_000


def request(method: bytes, body: bytes) -> bytes:
    return b"%b /admin/v2/x HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%b" % (method, len(body), body)


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return b"POST /admin/v2/x HTTP/1.1\r\nHost: proxy\r\nTransfer-Encoding: chunked\r\n\r\n" + body


def redirects(
    status: int = 307, host: str = "broker-2", *, reads_body: bool = True, path: str = "/admin/y"
) -> Behaviour:
    async def redirect(connection: UpstreamConnection, received: Received) -> None:
        if reads_body:
            received.body = await connection.body()
        await connection.answer(status, [("Location", f"http://{host}:8080{path}"), ("Content-Length", "0")])

    return redirect


def raw(response: bytes, *, stays_open: bool = False) -> Behaviour:
    async def send(connection: UpstreamConnection, received: Received) -> None:
        received.body = await connection.body()
        await connection.send(response)
        if stays_open:
            await trio.sleep_forever()

    return send


async def hang_up(connection: UpstreamConnection, received: Received) -> None:
    """Read the request, and close."""
    received.body = await connection.body()
    connection.stream.close_now()


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with opened(hosts=("broker-1", "broker-2"), http=Http(max_replay_bytes=KEPT_MAX)) as setup:
        yield setup


# ---- redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_of_a_get_is_followed(setup: Setup, status: int) -> None:
    setup.upstream.behave = redirects(status)
    answer = await setup.ask(GET)
    assert (answer.status, answer.body) == (200, b"GET /admin/y ")
    assert setup.upstreams[1].requests[0].header(b"host") == b"broker-2:8080"
    assert (await setup.records())[0].upstream == "broker-2:8080"
    assert setup.pool.idle_count == 2  # the redirecting one's connection is of use


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        pytest.param(request(b"PUT", b"small"), b"small", id="small"),
        pytest.param(request(b"POST", b"b" * KEPT_MAX), b"b" * KEPT_MAX, id="largest"),
        pytest.param(chunked(b"in ", b"chunks"), b"in chunks", id="chunked"),
        pytest.param(chunked(), b"", id="no chunk"),
    ],
)
async def test_a_body_is_sent_again_to_the_right_broker(
    setup: Setup, sent: bytes, body: bytes, autojump_clock: MockClock
) -> None:
    setup.upstream.behave = redirects()
    answer = await setup.ask(sent, method="POST")
    assert answer.body.endswith(b" /admin/y " + body)
    assert setup.upstream.requests[0].body == body
    assert setup.upstreams[1].requests[0].body == body
    assert setup.services.replay.used_bytes == 0


async def test_a_large_body_waits_for_the_right_broker(setup: Setup) -> None:
    """A redirect costs nothing: the body is asked for only by the broker that wants it (apache/pulsar#25919)."""
    body = b"b" * (KEPT_MAX * 20)

    async def takes(connection: UpstreamConnection, received: Received) -> None:
        await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await echo(connection, received)

    setup.upstream.behave = redirects(reads_body=False)
    setup.upstreams[1].behave = takes
    client = setup.connect()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, request(b"POST", body))
        answer = await client.answer("POST")
    assert answer.body == b"POST /admin/y " + body
    assert setup.upstream.requests[0].header(b"expect") == b"100-continue"


async def test_a_body_too_large_for_a_late_redirect(setup: Setup, autojump_clock: MockClock) -> None:
    setup.upstream.behave = redirects()  # after it has had all of the body, for which it did not ask
    answer = await setup.ask(request(b"POST", b"b" * (KEPT_MAX + 1)), method="POST")
    assert answer.status == 502
    assert "too large to be sent once more" in json.loads(answer.body)["reason"]
    assert (await setup.records())[0].cause == "body_not_kept"
    assert setup.upstreams[1].requests == []


async def test_a_body_for_which_there_is_no_room(setup: Setup) -> None:
    setup.services.replay.resize(10)
    setup.upstream.behave = redirects()
    answer = await setup.ask(request(b"PUT", b"b" * 11), method="PUT")
    assert answer.status == 502
    assert setup.upstream.requests[0].body == b"b" * 11
    assert setup.services.replay.used_bytes == 0


async def test_a_redirect_of_a_post_that_changes_the_method_is_the_clients(setup: Setup) -> None:
    setup.upstream.behave = redirects(302)
    answer = await setup.ask(request(b"POST", b"body"), method="POST")
    assert (answer.status, answer.headers[b"location"]) == (302, b"http://broker-2:8080/admin/y")


async def test_a_redirects_body_that_has_not_come_is_no_response(setup: Setup) -> None:
    location = b"Location: http://broker-2:8080/admin/y\r\n"
    response = b"HTTP/1.1 307 Elsewhere\r\n" + location + b"Content-Length: 5\r\n\r\n"
    setup.upstream.behave = raw(response, stays_open=True)
    assert (await setup.ask(GET)).body == b"GET /admin/y "
    await setup.records()
    assert setup.pool.idle_count == 1  # to the second broker


async def test_redirects_end(setup: Setup) -> None:
    setup.upstream.behave, setup.upstreams[1].behave = redirects(), redirects(host="broker-1")
    answer = await setup.ask(GET)
    assert answer.status == 502
    assert len(setup.parts.redirects) == 6
    assert (await setup.records())[0].cause == "redirects"


async def test_a_redirect_to_no_broker(setup: Setup) -> None:
    setup.upstream.behave = redirects(host="metadata.internal")
    answer = await setup.ask(GET)
    assert (answer.status, json.loads(answer.body)["reason"]) == (502, "this is no broker")


# ---- connections


async def test_a_kept_connection_that_was_closed_is_not_used(setup: Setup) -> None:
    client = setup.connect()
    for _ in range(2):
        await client.send(request(b"POST", b"x"))
        assert (await client.answer("POST")).status == 200
        await setup.close_idle_upstreams()
    assert setup.parts.dials == ["broker-1"] * 2


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"DELETE"])
async def test_an_idempotent_request_is_repeated(setup: Setup, method: bytes) -> None:
    client = setup.connect()
    await client.send(GET)
    await client.answer()
    setup.upstream.behave = first_on_a_kept_connection(hang_up)
    await client.send(request(method, b"x"))
    assert (await client.answer()).body == method + b" /admin/v2/x x"
    assert setup.parts.dials == ["broker-1"] * 2


async def test_a_post_is_not_repeated(setup: Setup) -> None:
    client = setup.connect()
    await client.send(GET)
    await client.answer()
    setup.upstream.behave = first_on_a_kept_connection(hang_up)
    await client.send(request(b"POST", b"x"))
    assert (await client.answer()).status == 502
    assert len(setup.upstream.requests) == 2


async def test_nothing_is_repeated_on_a_new_connection(setup: Setup) -> None:
    setup.upstream.behave = hang_up
    answer = await setup.ask(GET)
    assert answer.status == 502
    assert (await setup.records())[0].cause == "no_response"
    assert len(setup.upstream.requests) == 1


async def test_nothing_is_repeated_once_a_response_has_begun(setup: Setup) -> None:
    async def begins(connection: UpstreamConnection, received: Received) -> None:
        await connection.send(b"HTTP/1.1 ")
        connection.stream.close_now()

    client = setup.connect()
    await client.send(GET)
    await client.answer()
    setup.upstream.behave = first_on_a_kept_connection(begins)
    await client.send(GET)
    assert (await client.answer()).status == 502
    assert len(setup.upstream.requests) == 2


def first_on_a_kept_connection(first: Behaviour) -> Behaviour:
    """Behave so on connections that are used once more, and answer on new ones."""

    async def behave(connection: UpstreamConnection, received: Received) -> None:
        await (echo if connection.number else first)(connection, received)

    return behave


async def test_the_next_upstream_is_tried(setup: Setup, autojump_clock: MockClock) -> None:
    setup.upstream.refuses = True
    assert (await setup.ask(GET)).status == 200
    assert setup.parts.dials == ["broker-1", "broker-2"]
    assert (await setup.ask(GET)).status == 200
    assert setup.parts.dials == ["broker-1", "broker-2"]  # the one that failed is not tried first
    await trio.sleep(FAILING_S)
    assert (await setup.ask(GET)).status == 200
    assert setup.parts.dials == ["broker-1", "broker-2", "broker-1"]


async def test_no_upstream_can_be_reached(setup: Setup) -> None:
    for one in setup.upstreams:
        one.refuses = True
    answer = await setup.ask(request(b"PUT", b"x"), method="PUT")
    assert (answer.status, json.loads(answer.body)["reason"]) == (502, "no broker can be reached")
    assert (await setup.records())[0].cause == "unreachable"


async def test_few_upstreams_are_tried_for_one_request(setup: Setup) -> None:
    for number in range(9):
        setup.upstreams.append(FakeUpstream(setup.nursery, f"further-{number}"))
    for one in setup.upstreams:
        one.refuses = True
    assert (await setup.ask(GET)).status == 502
    assert len(setup.parts.dials) == ATTEMPTS_MAX


# ---- responses that a proxy must not believe

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(SIZED + b"Content-Length: 3\r\n\r\nok\n", id="lengths"),
        pytest.param(SIZED + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", id="length and chunks"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", id="coding"),
        pytest.param(b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="chunks in 1.0"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", id="upgrade"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * RESPONSE_HEAD_BYTES_MAX + b"\r\n\r\n", id="large head"),
        pytest.param(b"HTTP/1.1 103 Hints\r\n\r\n" * 100, id="hints"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\n\r\n", id="bare line feed"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nx\r\n", id="chunks"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", id="status"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", id="SSH"),
    ],
)
async def test_a_malformed_response(setup: Setup, response: bytes) -> None:
    setup.upstream.behave = raw(response)
    answer = await setup.ask(GET)
    assert answer.status == 502
    assert (await setup.records())[0].cause == "malformed_response"
    assert setup.pool.idle_count == 0


async def test_hints_are_dropped(setup: Setup) -> None:
    setup.upstream.behave = raw(b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + SIZED + b"\r\nok")
    client = setup.connect()
    await client.send(GET + GET)
    for _ in range(2):
        assert (await client.answer()).body == b"ok"


@pytest.mark.parametrize("late", [False, True])
async def test_more_than_the_length_says_is_no_response(setup: Setup, late: bool) -> None:
    surplus = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"

    async def too_much(connection: UpstreamConnection, received: Received) -> None:
        received.body = await connection.body()
        await connection.send(SIZED + b"\r\nok" + (b"" if late else surplus))
        if late:
            await goes_on.wait()
            await connection.send(surplus)
            sent.set()
        await trio.sleep_forever()

    goes_on, sent = trio.Event(), trio.Event()
    setup.upstream.behave = too_much
    client = setup.connect()
    await client.send(GET)
    assert (await client.answer()).body == b"ok"
    if late:
        goes_on.set()
        await sent.wait()
    setup.upstream.behave = echo
    await client.send(GET)
    assert (await client.answer()).body == b"GET /admin/v2/tenants?x=1 "
    assert setup.parts.dials == ["broker-1"] * 2


async def test_a_body_of_a_head_request_is_no_response(setup: Setup) -> None:
    setup.upstream.behave = raw(SIZED + b"\r\nok", stays_open=True)
    client = setup.connect()
    for _ in range(2):
        await client.send(GET.replace(b"GET", b"HEAD"))
        assert (await client.answer("HEAD")).status == 200
    assert setup.parts.dials == ["broker-1"] * 2


@pytest.mark.parametrize(
    "response",
    [
        SIZED.replace(b"2\r\n", b"20\r\n\r\nok"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
async def test_a_response_that_ends_early_is_cut(setup: Setup, response: bytes) -> None:
    async def ends(connection: UpstreamConnection, received: Received) -> None:
        await raw(response)(connection, received)
        connection.stream.close_now()

    setup.upstream.behave = ends
    client = setup.connect()
    await client.send(GET)
    with pytest.raises(trio.BrokenResourceError):
        await client.rest()
    assert (await setup.records())[0].cause == "upstream_cut"


async def test_a_connection_is_not_kept_where_the_upstream_says_so(setup: Setup) -> None:
    setup.upstream.behave = raw(SIZED + b"Connection: Foo, Close\r\n\r\nok", stays_open=True)
    client = setup.connect()
    for _ in range(2):
        await client.send(GET)
        answer = await client.answer()
        assert b"connection" not in answer.headers
    assert setup.parts.dials == ["broker-1"] * 2


async def test_idle_upstream_connections_end(setup: Setup, autojump_clock: MockClock) -> None:
    await setup.ask(GET)
    await setup.records()
    assert setup.pool.idle_count == 1
    setup.nursery.start_soon(setup.pool.run)
    await trio.sleep(IDLE_S * 1.6)
    assert setup.pool.idle_count == 0
    await trio.testing.wait_all_tasks_blocked()
    assert setup.upstream.closed == 1


async def test_a_connection_that_was_idle_for_long_is_not_used(setup: Setup, autojump_clock: MockClock) -> None:
    await setup.ask(GET)
    await trio.sleep(IDLE_S + 1)
    await setup.ask(GET)
    assert setup.parts.dials == ["broker-1"] * 2
