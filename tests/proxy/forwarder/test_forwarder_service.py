"""proxy.forwarder.service: clients in, limits, drain; one client's trouble is nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import Peer, connect, make_config
from prometheus_client import CollectorRegistry

from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.roles import Role
from proxy.forwarder import service as service_module
from proxy.forwarder.cause import Cause
from proxy.forwarder.service import ForwarderService
from proxy.forwarder.session import ClientSession
from proxy.runtime.connection_count import new_shared_counters
from proxy.runtime.descriptors import Descriptors
from proxy.runtime.worker import WorkerContext


class FakeSocket:
    """What the service wants to know of a client's socket."""

    def __init__(self, ip: str, port: int, *, gone: bool = False) -> None:
        self._peer = (ip, port)
        self._gone = gone

    def getpeername(self) -> tuple[str, int]:
        if self._gone:
            raise OSError(107, "Transport endpoint is not connected")
        return self._peer

    def setsockopt(self, *_: Any) -> None:
        pass


class FakeListener(trio.abc.Listener[Any]):
    """Gives what the test puts in."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        self.closed = False

    async def accept(self) -> Any:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()

    def come(self, ip: str = "192.0.2.1", *, gone: bool = False, lockstep: bool = False) -> Peer:
        """A client connects."""
        ours, theirs = trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
        ours.socket = FakeSocket(ip, 4000, gone=gone)  # type: ignore[attr-defined]
        self._send.send_nowait(ours)
        return Peer(theirs)


class Served:
    def __init__(self, listener: FakeListener, nursery: trio.Nursery, tables: dict[str, Any]) -> None:
        self.listener = listener
        self.registry = CollectorRegistry()
        self.tables = tables
        descriptors = Descriptors(channel=-1, liveness=-1, listeners=(99,), connections=new_shared_counters(1))
        context = WorkerContext(Role.FORWARDER, 0, make_config(**tables), b"", descriptors, self.registry, nursery)
        self.service = ForwarderService(context)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    async def in_lookup_mode(self, **how: Any) -> Peer:
        peer = self.listener.come(**how)
        await peer.say(connect())
        await peer.must_hear(BaseCommand.CONNECTED)
        return peer


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    listener = FakeListener()
    monkeypatch.setattr(service_module, "adopt_listener", lambda descriptor: listener)
    monkeypatch.setattr(service_module, "connect_unix", lambda _path: trio.sleep_forever)

    async def no_profile(_self: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr("proxy.forwarder.backends.Backends.broker_profile", no_profile)

    async def start(**tables: Any) -> Served:
        served = Served(listener, nursery, tables)
        await served.service.start()
        return served

    yield start
    nursery.cancel_scope.cancel()


async def test_clients_are_served(serve: Serve) -> None:
    served = await serve()
    first, _second = await served.in_lookup_mode(), await served.in_lookup_mode(ip="2001:db8::1")
    assert served.value("pulsar_proxy_new_connections_total") == 2
    assert served.value("pulsar_proxy_active_connections") == 2
    assert served.value("pulsar_proxy_connections_by_state", state="lookup") == 2
    assert served.value("pulsar_proxy_connections_by_state", state="awaiting_connect") == 0
    assert served.service.status() == {"connections": 2, "connections_by_state": {"lookup": 2}}
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    assert served.value("pulsar_proxy_ended_connections_total", cause="client_closed") == 1


def test_a_forwarder_serves_no_other_worker() -> None:
    assert ForwarderService.handlers(None) == {}  # type: ignore[arg-type]


async def test_addresses_in_logs_are_as_people_write_them(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await serve()
    await served.in_lookup_mode(ip="2001:db8::1")
    assert {session.address for session in served.service._sessions} == {"[2001:db8::1]:4000"}


async def test_the_limit_of_connections(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections": 1})
    first = await served.in_lookup_mode()
    second = served.listener.come()
    with structlog.testing.capture_logs() as logs:
        code, text = await second.must_hear_error()
    assert code == ServerError.NotAllowedError
    assert "max_connections" in text
    assert served.value("pulsar_proxy_rejected_connections_total", reason="max_connections") == 1
    assert [entry["client"] for entry in logs] == ["192.0.2.1:4000"]
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    await served.in_lookup_mode()
    assert served.value("pulsar_proxy_new_connections_total") == 2


async def test_the_limit_by_address(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections_per_address": 1})
    await served.in_lookup_mode()
    await served.listener.come().must_hear_error()
    await served.in_lookup_mode(ip="192.0.2.2")


async def test_a_storm_is_not_even_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(service_module, "TURNED_AWAY_AT_ONCE_MAX", 2)
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    told = [served.listener.come(lockstep=True) for _ in range(2)]
    await trio.testing.wait_all_tasks_blocked()
    await served.listener.come().must_hear_end()
    for peer in told:
        await peer.must_hear_error()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service._turning_away == 0


async def test_one_that_is_turned_away_and_has_gone(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    peer = served.listener.come()
    await peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service._turning_away == 0


async def test_one_that_is_turned_away_and_does_not_read(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    served.listener.come(lockstep=True)
    await trio.sleep(5)
    assert served.service._turning_away == 0


async def test_one_that_has_gone_before_it_was_looked_at(serve: Serve) -> None:
    served = await serve()
    peer = served.listener.come(gone=True)
    await peer.must_hear_end()
    await served.in_lookup_mode()
    assert served.value("pulsar_proxy_new_connections_total") == 1


async def test_a_defect_that_one_client_meets_does_not_end_the_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve()
    other = await served.in_lookup_mode()

    async def broken(_self: ClientSession) -> None:
        await trio.lowlevel.checkpoint()
        raise ExceptionGroup("", [ZeroDivisionError()])

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(ClientSession, "run", broken)
        served.listener.come()
        await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="defect") == 1
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert served.value("pulsar_proxy_active_connections") == 1
    await other.say(connect())
    await other.must_hear_error()


async def test_drain_closes_the_listeners_and_lets_idle_clients_go(serve: Serve) -> None:
    served = await serve()
    client = await served.in_lookup_mode()
    await served.service.drain(30)
    await client.must_hear_end()
    assert served.listener.closed
    assert served.value("pulsar_proxy_active_connections") == 0
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


async def test_drain_gives_what_is_under_way_its_time_then_closes_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve()
    client = await served.in_lookup_mode()
    monkeypatch.setattr(ClientSession, "drain", lambda self: None)  # as a relay does
    async with trio.open_nursery() as draining:
        draining.start_soon(served.service.drain, 20)
        await trio.sleep(1)
        assert served.listener.closed, "nobody new comes in meanwhile"
    assert trio.current_time() == pytest.approx(20)
    await client.must_hear_end()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="defect") == 0, "an operator's alarm"
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


async def test_configure_counts_for_new_clients(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve()
    await served.in_lookup_mode()
    await served.service.configure(make_config(limits={"max_connections": 2, "handshake_timeout_ms": 3000}))
    started = trio.current_time()
    await served.listener.come().must_hear_end()
    assert trio.current_time() - started == pytest.approx(3)
    await served.in_lookup_mode()
    await served.listener.come().must_hear_error()


async def test_every_cause_is_a_series_from_the_start(serve: Serve) -> None:
    served = await serve()
    for cause in Cause:
        assert served.value("pulsar_proxy_ended_connections_total", cause=cause.value) == 0
