"""proxy.forwarder.service: clients that do not get through a listener's listener."""

from __future__ import annotations

from typing import Any

import structlog.testing
import trio
import trio.testing
from forwarder_fakes import connect
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture

from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.loop.tasks import close_forcefully
from proxy.runtime.network.tls import TlsFailed


class FakeTransport:
    """Lets no client in before its gate is open; then as ``failure`` says."""

    uses_tls = True
    routes_sni = False
    congestion_control = ""

    def __init__(self, failure: Exception | None = None) -> None:
        self.gate = trio.Event()
        self._failure = failure

    async def accept_client(self, transport: Any, *, timeout_s: float) -> tuple[Any, bytes]:
        assert timeout_s > 0
        try:
            await self.gate.wait()
        except trio.Cancelled:
            await close_forcefully(transport)
            raise
        if self._failure is not None:
            await trio.aclose_forcefully(transport)
            raise self._failure
        return transport, b""


async def come(served: Served, listener: FakeTransport) -> Any:
    """A client in front of that listener."""
    served.service._transports = (listener,)  # type: ignore[assignment]
    peer = served.listener.come()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    return peer


async def test_no_tls_with_a_client(serve: Serve) -> None:  # noqa: F811
    served = await serve()
    listener = FakeTransport(TlsFailed("the peer does not speak TLS"))
    peer = await come(served, listener)
    with structlog.testing.capture_logs() as logs:
        listener.gate.set()
        await peer.expect_end()
        await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="tls_failed") == 1
    assert served.value("pulsar_proxy_active_connections") == 0
    assert [(entry["client"], entry["reason"]) for entry in logs] == [("192.0.2.1:4000", "the peer does not speak TLS")]


async def test_a_drain_ends_a_tls_handshake_under_way(serve: Serve) -> None:  # noqa: F811
    """It has no session yet that could be told."""
    served = await serve()
    listener = FakeTransport()
    peer = await come(served, listener)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: served.service.drain(10.0, hand_over=False))
        await trio.testing.wait_all_tasks_blocked()
        listener.gate.set()
        await peer.expect_end()
    assert served.value("pulsar_proxy_active_connections") == 0


async def test_a_silent_handshake_gives_way_to_the_next(serve: Serve) -> None:  # noqa: F811
    served = await serve(limits={"max_unauthenticated_connections": 2})
    first = await come(served, FakeTransport())
    assert served.value("pulsar_proxy_active_connections") == 1
    with structlog.testing.capture_logs() as logs:
        served.listener.come()
        await first.expect_end()
        await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    assert served.value("pulsar_proxy_ended_connections_total", cause="gave_way") == 1
    assert ["limits.max_unauthenticated_connections" in entry["event"] for entry in logs] == [True]


async def test_a_client_evicted_as_its_tls_handshake_completes_is_closed(serve: Serve) -> None:  # noqa: F811
    served = await serve(limits={"max_unauthenticated_connections": 2})
    listener = FakeTransport()
    first = await come(served, listener)
    listener.gate.set()
    second = served.listener.come()
    await first.expect_end()
    await second.send(connect())
    await second.expect_command(BaseCommand.CONNECTED)
    assert served.value("pulsar_proxy_active_connections") == 1
