"""proxy.http.server: a client's connection, over loopback, with a fake upstream behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from http_fakes import Received, Setup, UpstreamConnection

GET = b"GET /admin/v2/tenants HTTP/1.1\r\nHost: proxy:8081\r\n\r\n"


def post(body: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    lines = [method + b" /admin/v2/x HTTP/1.1", b"Host: proxy:8081", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


@pytest.fixture
async def setup(autojump_clock: MockClock) -> AsyncIterator[Setup]:
    async with trio.open_nursery() as nursery:
        setup = Setup(nursery)
        yield setup
        nursery.cancel_scope.cancel()
    setup.close()


async def test_a_get_is_passed_on_and_the_connection_goes_on(setup: Setup) -> None:
    client = setup.connect()
    for _ in range(3):
        await client.send(GET)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"GET /admin/v2/tenants ")
        assert b"connection" not in answer.headers
    assert setup.parts.dials == ["broker-1"]
    assert [one.header(b"host") for one in setup.upstream.requests] == [b"broker-1:8080"] * 3
    assert [(one.status, one.route, one.upstream) for one in setup.parts.records] == [
        (200, "brokers", "broker-1:8080")
    ] * 3


async def test_a_body_is_passed_on(setup: Setup) -> None:
    answer = await setup.ask(post(b"the body"), method="POST")
    assert answer.body == b"POST /admin/v2/x the body"
    assert setup.parts.records[0].request_bytes == 8


async def test_a_refusal_is_json(setup: Setup) -> None:
    answer = await setup.ask(b"GET /elsewhere HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.status == 404
    assert "reason" in json.loads(answer.body)
