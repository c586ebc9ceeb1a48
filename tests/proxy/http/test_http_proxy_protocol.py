"""proxy.http.service: clients that a load balancer announces by a PROXY header."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from test_http_service import GET, Serve, Served, authority, ended, serve, tls  # noqa: F401 -- fixtures

from proxy.http import service as service_module

V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 4000 8080\r\n"
V2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c" + bytes([192, 0, 2, 7, 198, 51, 100, 1, 15, 160, 31, 144])
LOCAL = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00"


def listener(mode: str = "required", source: str = "127.0.0.0/8", **keys: Any) -> list[dict[str, Any]]:
    return [{"bind": "127.0.0.1:1", "proxy_protocol": mode, "proxy_protocol_sources": [source], **keys}]


def seen(served: Served) -> list[str]:
    return [one.client.ip for one in served.service._connections._open.values()]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.005)


@pytest.mark.parametrize("mode", ["optional", "required"])
@pytest.mark.parametrize(("header", "ip"), [(V1, "192.0.2.7"), (V2, "192.0.2.7"), (LOCAL, "127.0.0.1")])
async def test_the_announced_client_counts(serve: Serve, mode: str, header: bytes, ip: str) -> None:  # noqa: F811
    """For the log, the limits and X-Forwarded-For, which are all of the client that its connection has."""
    served = await serve(http_listener=listener(mode))
    client = await served.connect()
    await client.send(header[:5])
    await trio.testing.wait_all_tasks_blocked(0.01)
    await client.send(header[5:] + GET)
    assert (await client.answer()).status == 200
    assert seen(served) == [ip]


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PROPFIND"])
async def test_optional_is_without_a_header_too(serve: Serve, method: bytes) -> None:  # noqa: F811
    """A method may begin as a header does, split wherever it is."""
    served = await serve(http_listener=listener("optional"))
    client = await served.connect()
    await client.send(method[:1])
    await trio.testing.wait_all_tasks_blocked(0.01)
    await client.send(method[1:] + b" /admin/v2/clusters HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert (await client.answer()).status in {200, 405, 501}
    assert seen(served) == ["127.0.0.1"]


@pytest.mark.parametrize("header", [V1, V2])
async def test_a_stranger_cannot_announce_a_client(serve: Serve, header: bytes) -> None:  # noqa: F811
    """Security."""
    served = await serve(http_listener=listener("optional", "10.0.0.0/8"))
    assert await served.status(header + GET) == 400
    assert not served.upstream.requests
    served = await serve(http_listener=listener("required", "10.0.0.0/8"))
    assert await ended(await served.connect())
    assert served.value("closed_connections_total", reason="proxy_protocol") == 1


@pytest.mark.parametrize("sent", [b"PROXY nonsense\r\n", GET, b"PRO"])
async def test_what_is_refused(serve: Serve, sent: bytes) -> None:  # noqa: F811
    served = await serve(http_listener=listener())
    with structlog.testing.capture_logs() as logs:
        client = await served.connect()
        await client.send(sent)
        if sent == b"PRO":
            await client.stream.send_eof()
        assert await ended(client)
        await until(lambda: served.value("closed_connections_total", reason="proxy_protocol") == 1)
    assert [entry["event"] for entry in logs] == ["no HTTP client behind a load balancer"]
    assert not served.service._header_scopes


async def test_a_health_check_is_no_news(serve: Serve) -> None:  # noqa: F811
    served = await serve(http_listener=listener())
    with structlog.testing.capture_logs() as logs:
        client = await served.connect()
        await until(lambda: len(served.service._header_scopes) == 1)
        await client.stream.send_eof()
        assert await ended(client)
    assert (logs, served.value("closed_connections_total", reason="proxy_protocol")) == ([], None)


async def test_the_header_has_the_time_of_a_head(
    serve: Serve,  # noqa: F811
    autojump_clock: trio.testing.MockClock,
) -> None:
    served = await serve(http_listener=listener(), http={"head_timeout_ms": 5_000, "access_log": False})
    client = await served.connect()
    with trio.fail_after(6):
        assert await ended(client)


async def test_networks_are_the_clients(serve: Serve) -> None:  # noqa: F811
    """Security."""
    served = await serve(http_listener=listener(allowed_networks=["192.0.2.0/24"]))
    assert await served.status(V2 + GET) == 200
    client = await served.connect()
    await client.send(LOCAL)
    assert await ended(client)
    assert served.value("closed_connections_total", reason="network") == 1


async def test_what_waits_for_its_header_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Security: it takes no client's place, and gives way to the next."""
    monkeypatch.setattr(service_module, "HEADERS_AWAITED_MAX", 2)
    http = {"max_connections": 1, "access_log": False, "head_timeout_ms": 600_000}
    served = await serve(http_listener=listener(), http=http, cluster={"http_workers": 1})
    client = await served.connect()
    await client.send(V2 + GET)
    assert (await client.answer()).status == 200
    waiting = []
    for count in (1, 2, 2):
        waiting.append(await served.connect())
        await until(lambda: len(served.service._header_scopes) == count)  # noqa: B023
        await trio.testing.wait_all_tasks_blocked(0.01)
    with trio.fail_after(30):
        assert await ended(waiting[0])
    assert seen(served) == ["192.0.2.7"]
    await waiting[1].send(V1 + GET)
    assert (await waiting[1].answer()).status == 200


async def test_a_drain_ends_what_waits_for_its_header(serve: Serve) -> None:  # noqa: F811
    served = await serve(http_listener=listener())
    client = await served.connect()
    await until(lambda: len(served.service._header_scopes) == 1)
    await served.service.drain(1, hand_over=False)
    assert await ended(client)
