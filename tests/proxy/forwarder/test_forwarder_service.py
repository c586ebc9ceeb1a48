"""proxy.forwarder.service: clients in, limits, drain; one client's trouble harms no other."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from e2e.lab.certificates import Authority, Pair
from forwarder_fakes import Peer, connect, make_config
from prometheus_client import CollectorRegistry
from relay_fakes import Lane, end_all, kept_relay, open_lane, read, tcp_pair, unblocked_pair, until

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import Connected
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.roles import Role
from proto.rpc_pb2 import StoredRelay, StoreMessage
from proxy.common import reloading_file
from proxy.common.deny_list import DenyList, credential_digest
from proxy.common.errors import ConfigError
from proxy.forwarder import service as service_module
from proxy.forwarder.client import turning_away
from proxy.forwarder.client.connection import ClientConnection
from proxy.forwarder.client.handshake import Handshake
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime import denied as denied_module
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.listen.admission import Admission
from proxy.forwarder.service import ForwarderService
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientEndpoint, ClientIdentity
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network import session_tickets
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.observability.audit import connection_id
from proxy.runtime.process.descriptors import Descriptors, adopt_socket
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.runtime.shared.relay_request_channel import create_relay_request_sockets
from proxy.runtime.shared.relay_table import RelayTable
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot


class FakeListener:
    """Gives what the test puts in, in place of accept_clients."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        self.closed = False
        self.take_in_of: dict[Any, Any] = {}
        """What takes clients in that come to a listener, by its address."""

    async def accept_clients(self, listener: socket.socket, _admission: Admission, take_in: Any) -> None:
        self.take_in_of[listener.getsockname()] = take_in
        with listener:
            try:
                while True:
                    take_in(*await self._receive.receive())
            finally:
                self.closed = True

    def come(self, ip: str = "192.0.2.1", *, lockstep: bool = False) -> Peer:
        """A client connects."""
        ours, theirs = trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
        self._send.send_nowait((ours, (ip, 4000)))
        return Peer(theirs)


class Served:
    def __init__(
        self,
        *,
        listener: FakeListener,
        nursery: trio.Nursery,
        tables: dict[str, Any],
        store_slot: FdStoreSlot,
        counters: int,
    ) -> None:
        self.listener = listener
        self.registry = CollectorRegistry()
        self.tables = tables
        self.counters = ConnectionCounters(counters)
        self.store_slot = store_slot
        ours, theirs = create_store_sockets()
        self.real_listeners = [socket.create_server(("127.0.0.1", 0)) for _ in tables.get("listener", [{}])]
        self.real_listener = self.real_listeners[0]
        nursery.start_soon(self._keep, StoreChannel(ours))
        requests, self.relay_requests = create_relay_request_sockets()
        descriptors = Descriptors(
            channel=-1,
            liveness=-1,
            store=theirs.detach(),
            connections=counters,
            relay_requests=requests.detach(),
            audit=tables.pop("audit_pipe", -1),
        )
        reactor = Reactor()
        nursery.start_soon(reactor.run)
        config = make_config(**tables)
        context = WorkerContext(Role.FORWARDER, 0, config, b"", descriptors, self.registry, nursery, reactor)
        self.service = ForwarderService(context)

    async def _keep(self, channel: StoreChannel) -> None:
        with contextlib.ExitStack() as stack:
            descriptors = [stack.enter_context(listener).fileno() for listener in self.real_listeners]
            await self.store_slot.serve_forwarder(
                channel, lambda: descriptors, pid=1, is_new=True, tables=AddressTableExchange().open_channel(0)
            )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    async def in_lookup_mode(self, **how: Any) -> Peer:
        peer = self.listener.come(**how)
        await peer.send(connect())
        await peer.expect_command(BaseCommand.CONNECTED)
        return peer


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """A service with clients in memory; ``real=True``: over sockets, as the first forwarder of two."""
    monkeypatch.setattr("proxy.runtime.process.worker.unix_connector", lambda _path, **_: trio.sleep_forever)

    async def no_profile(_self: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.broker_profile", no_profile)
    adopted: list[socket.socket] = []

    def adopt(descriptor: int) -> socket.socket:
        adopted.append(adopt_socket(descriptor))
        return adopted[-1]

    monkeypatch.setattr(service_module, "adopt_socket", adopt)
    store_slot = FdStoreSlot()
    counters = create_shared_counters(2)

    senders: list[socket.socket] = []

    async def start(*, real: bool = False, **tables: Any) -> Served:
        listener = FakeListener()
        with monkeypatch.context() as patch:
            if not real:
                patch.setattr(service_module, "accept_clients", listener.accept_clients)
            served = Served(listener=listener, nursery=nursery, tables=tables, store_slot=store_slot, counters=counters)
            senders.append(served.relay_requests)
            await served.service.start()
            await trio.testing.wait_all_tasks_blocked()
        return served

    yield start
    await end_all(nursery)
    for sock in adopted + senders:
        sock.close()
    store_slot.close_stored()
    os.close(store_slot.table_fd)
    os.close(counters)


async def test_clients_are_served(serve: Serve) -> None:
    served = await serve()
    first, _second = await served.in_lookup_mode(), await served.in_lookup_mode(ip="2001:db8::1")
    assert served.value("pulsar_proxy_new_connections_total") == 2
    assert served.value("pulsar_proxy_active_connections") == 2
    assert served.value("pulsar_proxy_connections_by_state", state="lookup") == 2
    assert served.value("pulsar_proxy_connections_by_state", state="awaiting_connect") == 0
    states = {"connections": 2, "connections_by_state": {"lookup": 2, "relaying": 0}}
    assert served.service.status().items() >= states.items()
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    assert served.value("pulsar_proxy_ended_connections_total", cause="client_closed") == 1


def test_a_forwarder_serves_no_other_worker() -> None:
    assert ForwarderService.handlers(None) == {}  # type: ignore[arg-type]


async def test_addresses_in_logs_are_as_people_write_them(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await serve()
    await served.in_lookup_mode(ip="2001:db8::1")
    assert {session.address for session in served.service._client_connections} == {"[2001:db8::1]:4000"}


class AnonymousExchange:
    """Authenticates each client without a role."""

    def start_round(
        self, _command: BaseCommand, _tasks: TaskSpawner, on_outcome: Callable[[ClientIdentity], None]
    ) -> None:
        on_outcome(ANONYMOUS)

    def abandon_exchange(self) -> None:
        pass


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_the_auth_worker_is_told_the_certificate_and_the_listener_counts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, tls: bool
) -> None:
    authority = Authority(tmp_path, "ours")
    listeners: list[dict[str, Any]] = [{}, {}, {}]
    server, alice = authority.server("server"), authority.client("alice")
    if tls:
        listeners[number] = {"tls": {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}}
    served = await serve(listener=listeners, authentication={"enabled": True, "anonymous_role": "nobody"})
    told: list[ClientEndpoint] = []

    def new_authentication_exchange(_workers: WorkerClients, client: ClientEndpoint, _connect: CommandConnect) -> Any:
        told.append(client)
        return AnonymousExchange()

    monkeypatch.setattr(WorkerClients, "new_authentication_exchange", new_authentication_exchange)
    ours, theirs = (TcpStream(end) for end in unblocked_pair())
    served.listener.take_in_of[served.real_listeners[number].getsockname()](ours, ("192.0.2.1", 4000))
    if tls:
        context = ssl.create_default_context(cafile=authority.file)
        context.load_cert_chain(alice.certificate, alice.key)
        stream = TlsStream(theirs, context, server_side=False, host="localhost")
        await stream.handshake()
        peer = Peer(stream)
    else:
        peer = Peer(theirs)
    await peer.send(connect())
    await trio.testing.wait_all_tasks_blocked(0.01)
    [client] = told
    assert (client.address, client.listener) == ("192.0.2.1:4000", number)
    assert (b"alice" in client.certificate) == tls
    await peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_revoked_client_is_refused_and_logged(serve: Serve, tmp_path: Path) -> None:
    """Security: who it was, and why, is in one line; bob, whom the CRL does not name, is served."""
    authority, crl = Authority(tmp_path, "ours"), tmp_path / "crl.pem"
    server, alice, bob = authority.server("server"), authority.client("alice"), authority.client("bob")
    crl.write_bytes(authority.crl(alice))
    tls = {
        "certificate": server.certificate,
        "key": server.key,
        "client_ca": authority.file,
        "client_crl": str(crl),
    }
    served = await serve(listener=[{"tls": tls}])

    async def attempt(name: Pair, address: str) -> TlsStream:
        ours, theirs = (TcpStream(end) for end in unblocked_pair())
        served.listener.take_in_of[served.real_listener.getsockname()](ours, (address, 4000))
        context = ssl.create_default_context(cafile=authority.file)
        context.load_cert_chain(name.certificate, name.key)
        stream = TlsStream(theirs, context, server_side=False, host="localhost")
        await stream.handshake()
        return stream

    with structlog.testing.capture_logs() as logs:
        stream = await attempt(alice, "192.0.2.7")
        with pytest.raises(trio.BrokenResourceError, match="revoked"):  # of TLS 1.3: at the first read
            await stream.receive_some()
        await stream.aclose()
        await until(lambda: served.value("pulsar_proxy_ended_connections_total", cause="tls_failed") == 1)
    [entry] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert entry["event"] == "no TLS with a client"
    assert entry["client"] == "192.0.2.7:4000"
    assert entry["reason"] == "the peer's certificate is not accepted: certificate revoked"
    failed = {"listener": "0", "result": "failure", "reason": "certificate_revoked"}
    assert served.value("pulsar_proxy_tls_handshakes_total", **failed) == 1
    peer = Peer(await attempt(bob, "192.0.2.8"))
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    await peer.stream.aclose()


async def test_a_reload_without_session_tickets_forgets_the_certificate(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: once no client uses it any more, though the front with the tickets' keys stays."""
    authority = Authority(tmp_path, "ours")
    monkeypatch.setattr(session_tickets, "_shared_fronts", [session_tickets.TicketFront()])
    server, other = authority.server("server"), authority.server("other")
    tickets = {"certificate": server.certificate, "key": server.key, "minimum_version": "1.3", "session_tickets": True}
    served = await serve(listener=[{"tls": tickets}])
    loaded = (
        weakref.ref(served.service._transports[0].front_context),
        weakref.ref(reloading_file.files_in_use()["listener[0].tls"].value.default),
    )
    ours, theirs = (TcpStream(end) for end in unblocked_pair())
    served.listener.take_in_of[served.real_listener.getsockname()](ours, ("192.0.2.7", 4000))
    context = ssl.create_default_context(cafile=authority.file)
    stream = TlsStream(theirs, context, server_side=False, host="localhost")
    await stream.handshake()
    peer = Peer(stream)
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    without = {"certificate": other.certificate, "key": other.key}
    await served.service.configure(make_config(listener=[{"tls": without}]))
    await peer.stream.aclose()
    await until(lambda: served.service._connections == 0)
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    assert [one() is None for one in loaded] == [False, True]


async def test_the_limit_of_connections(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections": 1})
    first = await served.in_lookup_mode()
    second = served.listener.come()
    with structlog.testing.capture_logs() as logs:
        code, text = await second.expect_error()
    assert code == ServerError.NotAllowedError
    assert "max_connections" in text
    assert served.value("pulsar_proxy_rejected_connections_total", reason="max_connections") == 1
    assert [entry["client"] for entry in logs] == ["192.0.2.1:4000"]
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    await served.in_lookup_mode()
    assert served.value("pulsar_proxy_new_connections_total") == 2


async def test_connections_and_refreshes_are_audit_events(serve: Serve) -> None:
    reader, writer = os.pipe()
    audit = {"events": ["connections", "openings", "authentications"]}
    served = await serve(audit=audit, audit_pipe=writer, listener=[{"denied_networks": ["192.0.2.9/32"]}])
    await served.listener.come(ip="192.0.2.9").expect_end()
    peer = await served.in_lookup_mode(ip="192.0.2.1")
    await peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    record = StoredRelay(client_address="192.0.2.2:1", principal="alice", method="token", started_at_unix_ms=5)
    session: Any = SimpleNamespace(relay_record=record)
    for failure in ("", "denied"):
        served.service._relays.reauthentication.on_verdict(session, failure)
    await served.service.configure(make_config(audit={"events": []}))
    await served.listener.come(ip="192.0.2.9").expect_end()
    refused, opened, ended, refresh, failed = map(json.loads, os.read(reader, 10_000).splitlines())
    for end in (reader, writer):
        os.close(end)
    assert (refused["event"], refused["client"]) == ("connection_refused", "192.0.2.9:4000")
    assert refused["reason"] == "network"
    assert (opened["event"], opened["client"]) == ("connection_opened", "192.0.2.1:4000")
    assert opened["connection"] == ended["connection"]
    assert (ended["event"], ended["kind"], ended["cause"]) == ("connection_ended", "lookups", "client_closed")
    assert (refresh["event"], refresh["principal"]) == ("authentication_refresh", "alice")
    assert refresh["connection"] == connection_id("192.0.2.2:1", 5)
    assert (failed["event"], failed["reason"]) == ("authentication_refresh_failure", "denied")


@pytest.mark.parametrize(
    ("reason", "counted", "told"),
    [
        (CloseReason.NOT_CLOSING, "relay_ended", "relay_ended"),
        (CloseReason.ERROR_SENT, "relay_ended", "relay_ended"),
        (CloseReason.EXPIRED, "relay_ended", "session_expired"),
        (CloseReason.FAILED, "relay_ended", "reauthentication_failed"),
        (CloseReason.CORRUPT, "relay_ended", "protocol_error"),
        (CloseReason.STILL_SERVED, "relay_ended", "session_expired"),
        (CloseReason.MAX_AGE, "max_age", "max_age"),
        (CloseReason.SHUT_DOWN, "shut_down", "shut_down"),
        (CloseReason.OUT_OF_TURN, "relay_ended", "relay_ended"),
        (CloseReason.OVER_SHARE, "over_share", "over_share"),
        (CloseReason.DENIED, "denied", "denied"),
        (CloseReason.DISCONNECTED, "disconnected", "disconnected"),
    ],
)
async def test_the_cause_of_a_relays_end(serve: Serve, reason: CloseReason, counted: str, told: str) -> None:
    """The metric tells a session's end apart only in lookup mode, the audit and the log always."""
    reader, writer = os.pipe()
    served = await serve(audit={"events": ["connections"]}, audit_pipe=writer)
    served.service._admission.adopt_client("192.0.2.2")
    record = StoredRelay(client_address="192.0.2.2:1", principal="alice", started_at_unix_ms=5)
    ledger = served.service._relays._ledger
    ledger.in_flight.increment()
    relay: Any = SimpleNamespace(record=record, close_reason=reason)
    with structlog.testing.capture_logs() as logs:
        ledger.on_relay_end(relay, 3, 4)
    [line] = [entry for entry in logs if entry["event"] == "a relay has ended"]
    assert line["cause"] == told
    ended = json.loads(os.read(reader, 10_000))
    for end in (reader, writer):
        os.close(end)
    assert served.value("pulsar_proxy_ended_connections_total", cause=counted) == 1
    assert (ended["cause"], ended["kind"], ended["bytes_to_broker"], ended["bytes_to_client"]) == (told, "relay", 3, 4)


async def test_clients_of_other_networks_are_closed_at_once(serve: Serve) -> None:
    """Security: nothing is read of them; a reload applies to who comes from then on."""
    served = await serve(listener=[{"allowed_networks": ["192.0.2.0/24"], "denied_networks": ["192.0.2.9/32"]}])
    first = await served.in_lookup_mode(ip="::ffff:192.0.2.1")
    with structlog.testing.capture_logs() as logs:
        for ip in ("192.0.2.9", "198.51.100.1", "::1"):
            await served.listener.come(ip=ip).expect_end()
    assert [(entry["client"], entry["reason"]) for entry in logs] == [
        ("192.0.2.9:4000", "network"),
        ("198.51.100.1:4000", "network"),
        ("[::1]:4000", "network"),
    ]
    assert served.value("pulsar_proxy_rejected_connections_total", reason="network") == 3
    assert served.value("pulsar_proxy_new_connections_total") == 1
    await served.service.configure(make_config(listener=[{"denied_networks": ["192.0.2.0/24"]}]))
    await served.listener.come().expect_end()
    await served.in_lookup_mode(ip="198.51.100.1")
    await first.send(commands.ping())
    await first.expect_command(BaseCommand.PONG)


async def test_the_limit_by_address(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve(limits={"max_connections_per_address": 1})
    await served.in_lookup_mode()
    await served.listener.come().expect_error()
    await served.in_lookup_mode(ip="192.0.2.2")


async def test_a_quota_of_connections(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    """Security: and its error is one upon which clients retry. A reload applies to those that come then."""
    served = await serve(quota=[{"max_connections": 2}])  # of two forwarders
    first = await served.in_lookup_mode()
    second = served.listener.come()
    await second.send(connect())
    code, text = await second.expect_error()
    assert code == ServerError.ServiceNotReady
    assert "quota[0].max_connections" in text
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="quota") == 1
    labels = {"limit": "max_connections", "by": "principal", "dry_run": "false"}
    assert served.value("pulsar_proxy_quota_refusals_total", **labels) == 1
    await served.in_lookup_mode(ip="192.0.2.2")
    await first.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    await served.in_lookup_mode()
    await served.service.configure(make_config(quota=[{"max_connections": 4}]))
    await served.in_lookup_mode()
    third = served.listener.come()
    await third.send(connect())
    await third.expect_error()


async def test_a_quota_of_new_connections_by_address(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    """Security: an error before anything is read, upon which clients retry."""
    served = await serve(quota=[{"by": "address", "new_connections_per_second": 2, "burst_ms": 1000}])
    await served.in_lookup_mode()
    code, text = await served.listener.come().expect_error()
    assert code == ServerError.ServiceNotReady
    assert "new_connections_per_second" in text
    assert served.value("pulsar_proxy_rejected_connections_total", reason="new_connections_per_second") == 1
    await served.in_lookup_mode(ip="192.0.2.2")
    await trio.sleep(1)
    await served.in_lookup_mode()


async def test_a_quota_that_only_counts(serve: Serve) -> None:
    served = await serve(quota=[{"max_connections": 2, "dry_run": True}])
    for _ in range(3):
        await served.in_lookup_mode()
    labels = {"limit": "max_connections", "by": "principal", "dry_run": "true"}
    assert served.value("pulsar_proxy_quota_refusals_total", **labels) == 2


async def test_silent_clients_give_way_to_newcomers_and_known_ones_do_not(serve: Serve) -> None:
    """Security: strangers who say nothing cannot keep users out."""
    served = await serve(limits={"max_connections": 20, "max_unauthenticated_connections": 4})
    user = await served.in_lookup_mode()
    silent = served.listener.come()
    with structlog.testing.capture_logs() as logs:
        later = [await served.in_lookup_mode() for _ in range(5)]
        await silent.expect_end()
        silent = served.listener.come()
        await trio.testing.wait_all_tasks_blocked()
        served.listener.come()
        await silent.expect_end()
        await trio.testing.wait_all_tasks_blocked()
    assert len(logs) == 2
    assert served.value("pulsar_proxy_ended_connections_total", cause="gave_way") == 2
    for peer in (user, *later):
        await peer.send(commands.ping())
        await peer.expect_command(BaseCommand.PONG)


async def test_clients_that_the_proxy_works_for_do_not_give_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A fleet that comes back at once is not thrown out in the middle of its handshakes."""
    gate = trio.Event()

    async def slow(_self: object) -> None:
        await gate.wait()

    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.broker_profile", slow)
    served = await serve(limits={"max_unauthenticated_connections": 8})
    peers = [served.listener.come() for _ in range(2)]
    for peer in peers:
        await peer.send(connect())
    await trio.testing.wait_all_tasks_blocked()
    code, text = await served.listener.come().expect_error()
    assert code == ServerError.ServiceNotReady, "it comes again"
    assert "max_unauthenticated_connections" in text
    name = "pulsar_proxy_rejected_connections_total"
    assert served.value(name, reason="max_unauthenticated_connections") == 1
    gate.set()
    for peer in peers:
        await peer.expect_command(BaseCommand.CONNECTED)


async def test_a_denied_client_that_has_not_read_its_error_gives_way_to_the_next(
    serve: Serve, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve(limits={"max_unauthenticated_connections": 2})
    denied = served.listener.come(lockstep=True)
    await denied.send(connect(protocol_version=1))
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    began_at = trio.current_time()
    served.listener.come()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_active_connections") == 1
    assert trio.current_time() == began_at
    assert len(served.service._client_connections) == 1


async def test_a_storm_is_not_even_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(turning_away, "TOLD_AT_ONCE_MAX", 2)
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    told = [served.listener.come(lockstep=True) for _ in range(2)]
    await trio.testing.wait_all_tasks_blocked()
    await served.listener.come().expect_end()
    for peer in told:
        await peer.expect_error()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service._turned_away.being_told == 0


async def test_a_client_that_leaves_while_it_is_turned_away_is_no_longer_counted(
    serve: Serve, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    peer = served.listener.come()
    await peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service._turned_away.being_told == 0


async def test_a_client_that_does_not_read_its_rejection_is_no_longer_counted_in_time(
    serve: Serve, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve(limits={"max_connections": 1})
    await served.in_lookup_mode()
    served.listener.come(lockstep=True)
    await trio.sleep(5)
    assert served.service._turned_away.being_told == 0


async def test_a_defect_that_one_client_meets_does_not_end_the_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve()
    other = await served.in_lookup_mode()

    def broken(_self: Handshake) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(Handshake, "start_handshake", broken)
        await served.listener.come().expect_end()
        await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="defect") == 1
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert served.value("pulsar_proxy_active_connections") == 1
    await other.send(connect())
    await other.expect_error()


async def test_drain_closes_the_listeners_and_lets_idle_clients_go(serve: Serve) -> None:
    served = await serve()
    client = await served.in_lookup_mode()
    await served.service.drain(30, hand_over=False)
    await client.expect_end()
    assert served.listener.closed
    assert served.value("pulsar_proxy_active_connections") == 0
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


async def test_drain_gives_what_is_under_way_its_time_then_closes_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve()
    client = await served.in_lookup_mode()
    monkeypatch.setattr(ClientConnection, "drain", lambda self: None)  # as a relay does
    async with trio.open_nursery() as draining:
        draining.start_soon(partial(served.service.drain, 20, hand_over=False))
        await trio.sleep(1)
        assert served.listener.closed, "no new client comes in meanwhile"
    assert trio.current_time() == pytest.approx(20)
    await client.expect_end()
    await trio.testing.wait_all_tasks_blocked()
    assert served.value("pulsar_proxy_ended_connections_total", cause="defect") == 0, "an operator's alarm"
    assert served.value("pulsar_proxy_ended_connections_total", cause="shut_down") == 1


@pytest.mark.conforms("kip-368.39")
async def test_a_maximum_counts_for_sessions_that_begin_from_then_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """KIP-368's migration: no restart is needed, and who is there keeps what it came in by."""
    tables: dict[str, Any] = {"authentication": {"enabled": True, "anonymous_role": "nobody"}}
    served = await serve(**tables)
    relays = served.service._relays
    relays.now = relays.reauthentication.now = trio.current_time
    monkeypatch.setattr(WorkerClients, "new_authentication_exchange", lambda *_: AnonymousExchange())
    before = await served.in_lookup_mode()
    maximum = {"session": {"connections_max_reauth_ms": 5000}, "limits": {"keep_alive_interval_ms": 10**9}}
    await served.service.configure(make_config(**tables, **maximum))
    after = await served.in_lookup_mode()
    await trio.sleep(5)
    for client in (before, after):
        await client.send(BaseCommand(type=BaseCommand.SEEK, seek={"request_id": 1}))
    assert (await after.expect_error())[0] == ServerError.AuthenticationError
    assert (await before.expect_command(BaseCommand.ERROR)).error.request_id == 1, "refused as ever, and served on"


async def test_enforcement_counts_from_the_start_and_is_taken_over(serve: Serve) -> None:
    """Before relays of a predecessor are adopted, and for those that are there."""
    served = await serve(session={"enforcement": "observe"})
    assert served.service._relays.enforcement.observes_ends("0.0.0.0:6650")
    await served.service.configure(make_config())
    assert not served.service._relays.enforcement.observes_ends("0.0.0.0:6650")


async def test_a_limit_on_bytes_counts_from_the_start_and_for_open_relays_after_a_reload(serve: Serve) -> None:
    def limits(bytes_per_s: int) -> dict[str, dict[str, int]]:
        return {"cluster": {"forwarders": 2}, "limits": {"max_bytes_per_second_per_principal": bytes_per_s}}

    served = await serve(**limits(8000))
    turns = served.service._relays._engine.run_queue.turns_of("principal alice", 0)
    assert turns.bucket is not None
    assert turns.bucket.tokens == 4000
    await served.service.configure(make_config(**limits(2000)))
    assert turns.bucket.tokens == 1000
    await served.service.configure(make_config())
    assert turns.bucket is None


async def test_enforcement_is_taken_over_by_a_forwarder_that_was_replaced(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """For the relays that stay with it, even where it cannot use the rest; it accepts no clients all the same."""
    served = await serve(session={"enforcement": "observe"})
    service = served.service
    await service.drain(0, hand_over=True)
    await trio.testing.wait_all_tasks_blocked()
    transports = service._transports
    await service.configure(make_config())
    assert not service._relays.enforcement.observes_ends("0.0.0.0:6650")

    def unreadable(*_arguments: object) -> None:
        raise ConfigError("a certificate cannot be read")

    monkeypatch.setattr(service_module, "WorkerClients", unreadable)
    monkeypatch.setattr(service_module, "listener_transports", unreadable)
    with pytest.raises(ConfigError):
        await service.configure(make_config(session={"enforcement": "observe"}))
    assert service._relays.enforcement.observes_ends("0.0.0.0:6650")
    assert service._transports is transports
    assert all(listener.fileno() < 0 for listener in service._listeners)


async def test_a_configuration_that_cannot_be_used_changes_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(session={"enforcement": "observe"})

    def unreadable(*_arguments: object) -> None:
        raise ConfigError("a certificate cannot be read")

    for what in ("listener_transports", "WorkerClients"):
        monkeypatch.setattr(service_module, what, unreadable)
        before = served.service._workers, served.service._transports, served.service._admission.limits
        with pytest.raises(ConfigError):
            await served.service.configure(make_config(limits={"max_connections": 4}))
        assert served.service._relays.enforcement.observes_ends("0.0.0.0:6650")
        assert before == (served.service._workers, served.service._transports, served.service._admission.limits)


async def test_configure_counts_for_new_clients(serve: Serve, autojump_clock: trio.testing.MockClock) -> None:
    served = await serve()
    await served.in_lookup_mode()
    await served.service.configure(make_config(limits={"max_connections": 4, "handshake_timeout_ms": 3000}))
    started = trio.current_time()
    await served.listener.come().expect_end()
    assert trio.current_time() - started == pytest.approx(3)
    await trio.testing.wait_all_tasks_blocked()
    await served.in_lookup_mode()
    await served.listener.come().expect_error()


async def test_every_cause_is_a_series_from_the_start(serve: Serve) -> None:
    served = await serve()
    for cause in DisconnectCause:
        assert served.value("pulsar_proxy_ended_connections_total", cause=cause.value) == 0


# ---- denied credentials


async def named(served: Served, token_id: str = "") -> tuple[Peer, ClientConnection]:
    """A connection in lookup mode; one of a client with this token."""
    before = set(served.service._client_connections)
    peer = await served.in_lookup_mode()
    (connection,) = set(served.service._client_connections) - before
    if token_id:
        name_credential(connection, token_id)
    return peer, connection


def name_credential(connection: ClientConnection, token_id: str) -> None:
    connection.identity = replace(connection.identity, credentials=(credential_digest("token-id", token_id),))


def put(file: Path, text: str) -> None:
    """Replace a file at once: half a list is a list, too."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def test_connections_end_when_the_deny_list_comes_to_name_them(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: while the file is broken, what it was before stays in force, and clients are served."""
    file = tmp_path / "denied"
    for module in (denied_module, reloading_file):
        monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(reloading_file, "time", SimpleNamespace(time=itertools.count(1000.0).__next__))
    file.write_text("token-id 1")
    served = await serve(authentication={"deny_file": str(file)}, limits={"keep_alive_interval_ms": 10**9})
    assert served.value("pulsar_proxy_denied_credentials") == 1
    (leaked, _), _ = await named(served, "7"), await named(served, "8")
    with structlog.testing.capture_logs() as logs:
        put(file, "# broken next\ntoken-id")
        await until(lambda: logs)
        for _ in range(3):  # it tries again
            await trio.sleep(0.02)
            await served.service._denied._file.current_value()
        await served.in_lookup_mode()
    broken = [entry for entry in logs if entry["log_level"] == "error"]
    assert len(broken) == 1
    assert f"{file}, line 2: " in broken[0]["reason"]
    status: Any = served.service.status()["deny_list"]
    assert (status["entries"], status["error"]) == (1, broken[0]["reason"])
    assert served.value("pulsar_proxy_denied_credentials") == 1
    put(file, "token-id 1\ntoken-id 7\n")
    assert await leaked.expect_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    await until(lambda: served.value("pulsar_proxy_ended_connections_total", cause="denied") == 1)
    assert served.value("pulsar_proxy_denied_credentials") == 2
    after: Any = served.service.status()["deny_list"]
    assert (after["entries"], after["error"]) == (2, "")
    assert after["read_at_unix_s"] > status["read_at_unix_s"]
    assert len(served.service._client_connections) == 2


async def test_a_credential_that_comes_late_is_found_by_a_further_pass(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: as where an auth worker reads the list after the forwarder."""
    file = tmp_path / "denied"
    file.write_text("token-id 1")
    served = await serve(authentication={"deny_file": str(file)}, limits={"keep_alive_interval_ms": 10**9})
    peer, connection = await named(served)
    put(file, "token-id 1\ntoken-id 7\n")
    entries: list[int] = []
    deny = ClientConnection.deny_if_listed

    def note_pass(one: ClientConnection, denied: DenyList) -> None:
        entries.append(len(denied.kinds))
        deny(one, denied)

    monkeypatch.setattr(ClientConnection, "deny_if_listed", note_pass)
    await until(lambda: 2 in entries)
    name_credential(connection, "7")
    await peer.expect_error()


async def test_a_broken_deny_list_is_no_configuration(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "denied"
    file.write_text("token-id 1")
    authentication = {"deny_file": str(file)}
    served = await serve(authentication=authentication)
    file.write_text("token-id")
    denied = served.service._denied._file
    with pytest.raises(ConfigError, match=r"denied, line 1: "):
        await served.service.configure(make_config(authentication=authentication))
    assert served.service._denied._file is denied
    with pytest.raises(ConfigError, match=r"denied, line 1: "):
        denied_module.DeniedCredentials(make_config(authentication=authentication))


# ---- relays that a predecessor left


async def leave_relays(store_slot: FdStoreSlot, *lanes: Lane, ip: str = "192.0.2.9") -> None:
    """As a forwarder that was killed."""
    table = RelayTable(store_slot.table_fd)
    for lane in lanes:
        kept = kept_relay(lane, table.allocate_relay_id())
        kept.record.client_address = f"{ip}:4000"
        store_slot.apply_message(StoreMessage(relays=[kept.record]), [kept.client, kept.broker])
        await lane.our_client.aclose()
        await lane.our_broker.aclose()


async def test_adopted_relays_are_counted_and_limited(serve: Serve) -> None:
    first = await serve()
    async with open_lane() as one, open_lane() as two:
        await first.service.drain(1, hand_over=True)
        await leave_relays(first.store_slot, one, two)
        with structlog.testing.capture_logs() as logs:
            second = await serve(limits={"max_connections_per_address": 2})
        assert [(entry["log_level"], entry["relays"]) for entry in logs] == [("info", 2)]
        assert second.value("pulsar_proxy_adopted_relays_total") == 2
        assert second.value("pulsar_proxy_active_connections") == 2
        assert second.value("pulsar_proxy_new_connections_total") == 0
        assert second.value("pulsar_proxy_connections_by_state", state="relaying") == 2
        assert second.service.status().items() >= {"connections": 2, "connections_by_state": {"relaying": 2}}.items()
        assert second.counters.total_connections() == 2
        await second.listener.come("192.0.2.9").expect_error()
        await second.in_lookup_mode(ip="192.0.2.10")
        await one.client.send_all(b"x")
        assert await read(one.broker, 1) == b"x"
        await until(lambda: second.value("pulsar_proxy_binary_bytes_total", direction="to_broker") == 1)
        for lane in (one, two):
            await lane.client.aclose()
            await lane.broker.aclose()
        await until(lambda: second.value("pulsar_proxy_active_connections") == 1)
        assert second.value("pulsar_proxy_ended_connections_total", cause="relay_ended") == 2
        await second.in_lookup_mode(ip="192.0.2.9")


async def test_adopted_relays_count_for_quotas(serve: Serve) -> None:
    """Security: a forwarder that ends, or is upgraded, gives nobody a second quota."""
    first = await serve()
    async with open_lane() as one, open_lane() as two:
        await first.service.drain(1, hand_over=True)
        await leave_relays(first.store_slot, one, two)
        second = await serve(quota=[{"max_connections": 4}])
        quotas = second.service._admission.quotas
        assert quotas.check_owner("principal alice") == "quota[0].max_connections"
        for lane in (one, two):
            await lane.client.aclose()
            await lane.broker.aclose()
        await until(lambda: second.value("pulsar_proxy_active_connections") == 0)
        assert quotas.check_owner("principal alice") is None


async def test_without_crash_safety_nothing_is_adopted(serve: Serve) -> None:
    served = await serve(relay={"crash_safe": False})
    await served.in_lookup_mode()
    assert served.value("pulsar_proxy_adopted_relays_total") == 0
    await served.service.drain(1, hand_over=True)
    assert served.service._relays.in_flight.count == 0


async def test_a_client_that_becomes_a_relay(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets, from accept to the end."""
    served = await serve(real=True)
    our_broker, broker = tcp_pair()
    with structlog.testing.capture_logs():
        async with connected(served, our_broker, monkeypatch) as client:
            await until(lambda: not served.service._client_connections)
            assert served.value("pulsar_proxy_active_connections") == 1
            assert served.value("pulsar_proxy_connections_by_state", state="relaying") == 1
            await client.stream.send_all(b"to the broker")
            assert await read(broker, 13) == b"to the broker"
            assert len(served.store_slot.relays) == 1
            await client.stream.aclose()
            await broker.aclose()
            await until(lambda: served.value("pulsar_proxy_active_connections") == 0)
        assert served.value("pulsar_proxy_ended_connections_total", cause="relay_ended") == 1
        await until(lambda: not served.store_slot.relays)


@asynccontextmanager
async def connected(
    served: Served, our_broker: TcpStream, monkeypatch: pytest.MonkeyPatch, *, gate: trio.Event | None = None
) -> AsyncIterator[Peer]:
    """A client over a socket whose broker is there, or will be."""

    async def open_link(*_: Any) -> BrokerLink:
        if gate is not None:
            await gate.wait()
        await trio.lowlevel.checkpoint()
        greeting = CommandConnected(server_version="the broker", protocol_version=21)
        frame = Frame(BaseCommand(type=BaseCommand.CONNECTED, connected=greeting).SerializeToString())
        return BrokerLink(HostPort("b0", 6650), our_broker, Connected(frame, greeting, b""))

    monkeypatch.setattr("proxy.forwarder.workers.broker_links.BrokerLinks.open_link", open_link)
    stream = await trio.open_tcp_stream(*served.real_listener.getsockname())
    client = Peer(stream)
    try:
        await client.send(connect("b0:6650"))
        if gate is None:
            await client.expect_command(BaseCommand.CONNECTED)
        yield client
    finally:
        await trio.aclose_forcefully(stream)


# ---- handing over


async def test_a_hand_over_waits_for_handshakes_and_leaves_relays(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(real=True)
    our_broker, broker = tcp_pair()
    gate, drained = trio.Event(), trio.Event()

    async def drain() -> None:
        await served.service.drain(30, hand_over=True)
        drained.set()

    async with connected(served, our_broker, monkeypatch, gate=gate) as client:
        await until(lambda: len(served.service._client_connections) == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await trio.testing.wait_all_tasks_blocked()
            assert not drained.is_set()
            gate.set()
            with trio.fail_after(60):
                await drained.wait()
        assert served.value("pulsar_proxy_ended_connections_total", cause="relay_ended") == 0
        served.counters.set_connections(0, 77)
        second = await serve()
        await client.expect_command(BaseCommand.CONNECTED)  # from whichever of the two
        assert second.value("pulsar_proxy_adopted_relays_total") == 1
        assert second.counters.total_connections() == 1
        await client.stream.send_all(b"goes on")
        assert await read(broker, 7) == b"goes on"
        await broker.aclose()


@pytest.mark.parametrize(("hand_over", "after_s"), [(True, 15.0), (False, 0.0)])
async def test_relays_that_stay_after_a_hand_over_have_half_of_the_time_to_end_by_themselves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, hand_over: bool, after_s: float
) -> None:
    served = await serve()
    spread: list[tuple[float, float]] = []
    monkeypatch.setattr(
        served.service._relays, "spread_closes", lambda timeout_s, *, after_s: spread.append((timeout_s, after_s))
    )
    await served.service.drain(30, hand_over=hand_over)
    assert spread == [(30, after_s)]


async def test_a_handshake_that_takes_too_long_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    served = await serve()
    client = served.listener.come()
    await trio.testing.wait_all_tasks_blocked()
    started = trio.current_time()
    await served.service.drain(30, hand_over=True)
    assert trio.current_time() - started == pytest.approx(service_module.HANDSHAKES_GRACE_S, abs=0.1)
    await client.expect_end()


async def test_after_a_hand_over_the_counter_is_the_successors(serve: Serve) -> None:
    first = await serve()
    client = await first.in_lookup_mode()
    stays = trio.Event()
    monkey = first.service._client_connections.copy().pop()
    monkey.drain = lambda: None  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:

        async def drain() -> None:
            await first.service.drain(30, hand_over=True)
            stays.set()

        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        second = await serve()
        for _ in range(3):
            await second.in_lookup_mode()
        assert second.counters.total_connections() == 3
        await client.stream.aclose()
        with trio.fail_after(60):
            await stays.wait()
    assert second.counters.total_connections() == 3
    assert first.value("pulsar_proxy_active_connections") == 0


async def test_a_client_in_the_very_instant_of_a_drain(serve: Serve) -> None:
    served = await serve()
    peer = served.listener.come()
    await trio.testing.wait_all_tasks_blocked()
    ours, theirs = tcp_pair()
    with ours.socket, theirs.socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(served.service.drain, 5, hand_over=False))
            await trio.testing.wait_all_tasks_blocked()
            served.service._admit_client(0, ours, ("192.0.2.1", 4000))
        assert await theirs.receive_some(1) == b""
    assert served.value("pulsar_proxy_new_connections_total") == 1
    await peer.expect_end()


# ---- outliers


async def test_outcomes_of_relays_are_counted_only_if_the_setting_asks_for_it(serve: Serve) -> None:
    """One object counts them across reloads; its windows are judged from the start on."""
    served = await serve()
    service, on = served.service, make_config(brokers={"ejection_by_relays": True})
    outcomes = service._outcomes
    assert service._workers.broker_links.outcomes is None
    await service.configure(on)
    assert service._workers.broker_links.outcomes is outcomes
    await service.configure(make_config())
    assert service._workers.broker_links.outcomes is None
