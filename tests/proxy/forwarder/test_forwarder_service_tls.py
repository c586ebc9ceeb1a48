"""proxy.forwarder.service: clients of a listener with TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
import structlog.testing
import trio
import trio.testing
from e2e.lab.certificates import Authority
from forwarder_fakes import Peer, connect
from relay_fakes import unblocked_pair
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture

from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream

OPEN: list[TcpStream] = []


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def tables(authority: Authority) -> dict[str, object]:
    pair = authority.server("server")
    return {"listener": [{"tls": {"certificate": pair.certificate, "key": pair.key}}]}


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


async def come(served: Served) -> TcpStream:
    """A client, before its first byte."""
    ours, theirs = (TcpStream(end) for end in unblocked_pair())
    OPEN.extend((ours, theirs))
    await served.service._transports[0].check_files()  # in a thread, which nothing waits for here
    served.listener._send.send_nowait((ours, ("192.0.2.1", 4000)))  # type: ignore[arg-type]
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    return theirs


def client_of(stream: TcpStream, authority: Authority) -> TlsStream:
    context = ssl.create_default_context(cafile=authority.file)
    return TlsStream(stream, context, server_side=False, host="localhost")


async def test_a_client_in_lookup_mode_costs_no_task(
    serve: Serve,  # noqa: F811
    authority: Authority,
    tables: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.is_profile_fresh", property(lambda _: True))
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.profile", None, raising=False)
    served = await serve(**tables)
    before = len(served.service._clients.child_tasks)
    stream = client_of(await come(served), authority)
    await stream.handshake()
    peer = Peer(stream)
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    assert len(served.service._clients.child_tasks) == before


async def test_no_tls_with_a_client(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    with structlog.testing.capture_logs() as logs:
        await client.send_all(b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x02\x12\x06hello")
        assert await client.receive_some() == b""
        await client.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert served.value("pulsar_proxy_ended_connections_total", cause="tls_failed") == 1
    assert served.value("pulsar_proxy_active_connections") == 0
    assert [(entry["client"], entry["reason"]) for entry in logs] == [("192.0.2.1:4000", "the peer does not speak TLS")]


async def test_a_drain_ends_a_tls_handshake_under_way(
    serve: Serve,  # noqa: F811
    authority: Authority,
    tables: dict[str, object],
) -> None:
    """It has no session yet that could be told."""
    served = await serve(**tables)
    stream = client_of(await come(served), authority)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: served.service.drain(10.0, hand_over=False))
        await trio.testing.wait_all_tasks_blocked()
        await stream.handshake()
        assert await stream.receive_some() == b""
    assert served.value("pulsar_proxy_active_connections") == 0
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


async def test_a_shut_down_ends_a_tls_handshake_under_way(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables)
    client = await come(served)
    await served.service.drain(0, hand_over=False)
    assert await client.receive_some() == b""
    assert served.value("pulsar_proxy_active_connections") == 0


async def test_a_silent_handshake_gives_way_to_the_next(serve: Serve, tables: dict[str, object]) -> None:  # noqa: F811
    served = await serve(**tables, limits={"max_unauthenticated_connections": 2})
    first = await come(served)
    with structlog.testing.capture_logs() as logs:
        await come(served)
    assert await first.receive_some() == b""
    assert served.value("pulsar_proxy_ended_connections_total", cause="gave_way") == 1
    assert ["limits.max_unauthenticated_connections" in entry["event"] for entry in logs] == [True]
