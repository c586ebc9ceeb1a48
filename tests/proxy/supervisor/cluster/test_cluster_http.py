"""proxy.supervisor.cluster.cluster: HTTP workers among the others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from cluster_setup import KEY, Setup
from supervisor_fakes import FakeSocket, FakeWorker, after, make_config, same_file

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.config.changes import reload_refusal
from proxy.runtime.process.listener_channel import LISTENER_REQUEST
from proxy.supervisor.cluster.cluster import ENDED_BEFORE_EXEC, Cluster
from proxy.supervisor.handover.exec_handover import HandoverState
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.startup.sockets import StartFailed

HTTP: dict[str, Any] = {
    "cluster": {"forwarders": 1, "http_workers": 2},
    "brokers": {"web_service_url": "http://broker:8080", "credentials": {"method": "token", "token": "a-secret"}},
    "http_listener": [{"bind": "0.0.0.0:8081"}, {"bind": "0.0.0.0:8443"}],
}


class HttpSetup(Setup):
    """A cluster of fakes with two HTTP workers, which ask for their listeners at START, as real ones do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.passed: list[dict[int, int]] = []
        self.channels: dict[FakeWorker, socket.socket] = {}
        self.workshop.prepare = self.give_channel

    def give_channel(self, worker: FakeWorker) -> None:
        if worker.role is Role.HTTP:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            worker.questions_socket = ours
            self.channels[worker] = theirs
            worker.answers[Method.START] = lambda _request: self.ask(theirs)

    async def ask(self, theirs: socket.socket) -> None:
        theirs.send(LISTENER_REQUEST)
        await trio.lowlevel.wait_readable(theirs)
        data, descriptors, _flags, _address = socket.recv_fds(theirs, 9, 9)
        self.passed.append(dict(zip(data[1:], descriptors, strict=True)))

    def close(self) -> None:
        for sock in self.channels.values():
            sock.close()
        for listeners in self.passed:
            for descriptor in listeners.values():
                os.close(descriptor)
        super().close()


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpSetup]:
    setup = HttpSetup(monkeypatch)
    yield setup
    setup.close()


def in_slot(cluster: Cluster, index: int = 0) -> FakeWorker:
    worker = cluster.slots_of(Role.HTTP)[index].worker
    assert isinstance(worker, FakeWorker)
    return worker


async def test_there_are_none_without_a_listener(setup: HttpSetup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery, cluster={"http_workers": 3})
    assert cluster.slots_of(Role.HTTP) == []
    nursery.cancel_scope.cancel()


async def test_each_gets_the_listeners_when_it_is_started(setup: HttpSetup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery, **HTTP)
    assert [sorted(listeners) for listeners in setup.passed] == [[0, 1], [0, 1]]
    for listeners in setup.passed:
        for index, descriptor in listeners.items():
            assert same_file(descriptor, cluster.http_listeners.sockets[index].fileno())
    listens = setup.log.index(("http_listener[0].bind", "listen"))
    assert listens < setup.log.index(("http", "spawn")), "clients queue from then on"
    nursery.cancel_scope.cancel()


async def test_http_workers_and_forwarders_have_the_two_ends_of_relay_requests(
    setup: HttpSetup, nursery: trio.Nursery
) -> None:
    """The pair outlives an exec."""
    cluster = await setup.started(nursery, **HTTP)
    given = {worker.name: what for worker, what in zip(setup.workshop.workers, setup.workshop.given, strict=True)}
    receiving, sending = (sock.fileno() for sock in cluster._relay_requests)
    assert given["http-0"] == given["http-1"] == {"relay_requests": sending, "audit_pipe": cluster.audit_pipe[1]}
    assert given["forwarder-0"]["relay_requests"] == receiving
    assert cluster.handover_fields([])["relay_requests"] == (receiving, sending)
    nursery.cancel_scope.cancel()


async def test_a_process_that_was_not_started_holds_no_listener(setup: HttpSetup, nursery: trio.Nursery) -> None:
    """Or it would keep the port if the supervisor were killed."""
    started = trio.Event()

    def slow(worker: FakeWorker) -> None:
        setup.give_channel(worker)
        if worker.role is Role.HTTP:
            worker.answers[Method.START] = lambda _request: started.wait()

    setup.workshop.prepare = slow
    nursery.start_soon(setup.started, nursery)
    cluster = setup.make(**HTTP)
    nursery.start_soon(cluster.run, trio.Event())
    await trio.testing.wait_all_tasks_blocked()
    for channel in setup.channels.values():
        with pytest.raises(BlockingIOError):
            channel.recv(1)
        channel.send(LISTENER_REQUEST)
    await trio.testing.wait_all_tasks_blocked()
    for channel in setup.channels.values():
        data, descriptors, _flags, _address = socket.recv_fds(channel, 9, 9)
        assert data == b"\x02\x00\x01"
        for descriptor in descriptors:
            os.close(descriptor)
    nursery.cancel_scope.cancel()


async def test_they_receive_no_secret_and_may_call_auth_and_lookup_workers(
    setup: HttpSetup, nursery: trio.Nursery
) -> None:
    """Security: they read what strangers send."""
    await setup.started(nursery, HandoverState(seal_key=KEY), **HTTP)
    for worker in setup.workshop.of(Role.HTTP):
        [told] = [request for method, request in worker.calls if method == Method.START]
        assert told.seal_key == b""
        assert b"a-secret" not in told.SerializeToString()
    [auth] = setup.workshop.of(Role.AUTH)
    peers = [request.peers for method, request in auth.calls if method == Method.SET_PEERS][-1]
    assert [peer.role for peer in peers].count("http") == 2
    nursery.cancel_scope.cancel()


async def test_a_dead_one_is_replaced_alone(
    setup: HttpSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery, **HTTP)
    await trio.sleep(2)
    others = {slot: slot.worker for slot in cluster.slots}
    ended = in_slot(cluster)
    ended.end(-9)
    with structlog.testing.capture_logs():
        await trio.sleep(2)
    assert in_slot(cluster) is not ended
    assert len(setup.passed) == 3
    assert [slot.name for slot, worker in others.items() if slot.worker is not worker] == ["http-0"]
    nursery.cancel_scope.cancel()


async def test_one_that_never_asks_ends_like_any_other(
    setup: HttpSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a captured one keeps no task of the supervisor."""
    setup.workshop.prepare = lambda worker: (
        setup.give_channel(worker),
        worker.answers.pop(Method.START, None),
    )[1]
    cluster = await setup.started(nursery, **HTTP)
    await cluster.drain()
    assert not cluster.slots_of(Role.HTTP)[0].runs
    nursery.cancel_scope.cancel()


async def test_they_are_drained_beside_the_forwarders(
    setup: HttpSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Both have the whole of limits.drain_timeout_ms; those that they call come after."""
    cluster = await setup.started(nursery, **HTTP, limits={"drain_timeout_ms": 10_000})
    for worker in (*setup.workshop.of(Role.FORWARDER), *setup.workshop.of(Role.HTTP)):
        worker.answers[Method.DRAIN] = after(8)
    began = trio.current_time()
    await cluster.drain()
    assert trio.current_time() - began == pytest.approx(8)
    stopped = [name for name, event in setup.log if event == "stop"]
    assert set(stopped[:3]) == {"forwarder-0", "http-0", "http-1"}
    assert stopped[3:] == ["lookup-0", "auth-0"]
    assert all(sock.closed for sock in cluster.http_listeners.sockets)  # type: ignore[attr-defined]
    nursery.cancel_scope.cancel()


async def test_a_reload_reaches_them_and_takes_no_other_address(setup: HttpSetup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery, **HTTP)
    relay = {"crash_safe": False}
    await cluster.reload(make_config(**HTTP, relay=relay, http={"max_redirects": 1}))
    assert Method.CONFIGURE in {method for method, _request in in_slot(cluster).calls}
    for name, value in (
        ("http_listener", [{"bind": "0.0.0.0:8082"}]),
        ("http_listener", [{**HTTP["http_listener"][0], "tls": {"certificate": "c", "key": "k"}}]),
        ("cluster", {"forwarders": 1, "http_workers": 1}),
    ):
        with pytest.raises(ReloadRefused, match=r"upgrade.*http"):
            await cluster.reload(make_config(**{**HTTP, name: value}, relay=relay))
    nursery.cancel_scope.cancel()


def test_an_overlapping_address_needs_a_restart() -> None:
    old, new = (make_config(**{**HTTP, "http_listener": [{"bind": bind}]}) for bind in ("0.0.0.0:1", "127.0.0.1:1"))
    assert reload_refusal(old, new) == "a restart is needed to change: http_listener[0].bind"


async def test_the_next_program_gets_them_and_their_listeners(setup: HttpSetup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery, **HTTP)
    async with cluster.quiesced() as inherited:
        assert [one.index for one in inherited if one.role == "http"] == [0, 1]
        fields = cluster.handover_fields(inherited)
    assert fields["http_listeners"].keys() == {"0.0.0.0:8081", "0.0.0.0:8443"}
    nursery.cancel_scope.cancel()


async def test_a_next_program_without_them_gets_neither(setup: HttpSetup, nursery: trio.Nursery) -> None:
    """One from before them would not know what they are."""
    cluster = await setup.started(nursery, **HTTP)
    ended = ENDED_BEFORE_EXEC | {Role.HTTP}
    with structlog.testing.capture_logs():
        async with cluster.quiesced(ended) as inherited:
            assert "http" not in {one.role for one in inherited}
            assert cluster.handover_fields(inherited, ended)["http_listeners"] == {}
            assert {worker.code for worker in setup.workshop.of(Role.HTTP)} == {0}
    nursery.cancel_scope.cancel()


async def test_an_exec_takes_listeners_and_workers_over(
    setup: HttpSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = {bind: FakeSocket(f"left {bind}", setup.log) for bind in ("0.0.0.0:8443", "0.0.0.0:9")}
    worker = FakeWorker(Role.HTTP, 0, setup.log)
    worker.is_inherited = True
    worker.questions_socket = None
    setup.workshop.workers.append(worker)
    handover = HandoverState(
        generation=2,
        seal_key=KEY,
        http_listeners=dict(left),
        workers={(Role.HTTP, 0): worker},  # type: ignore[arg-type,dict-item]
    )
    cluster = await setup.started(nursery, handover, **HTTP)
    assert [sock.name for sock in cluster.http_listeners.sockets] == ["http_listener[0].bind", "left 0.0.0.0:8443"]  # type: ignore[attr-defined]
    assert (left["0.0.0.0:8443"].closed, left["0.0.0.0:9"].closed) == (False, True)
    await trio.sleep(6)
    assert worker.code == 0, "replaced by one of the new program"
    assert in_slot(cluster) is not worker
    nursery.cancel_scope.cancel()


async def test_a_listener_that_cannot_be_bound_moves_no_other(
    setup: HttpSetup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: or the TLS of the one would be missing at the other."""

    def bind(key: str, _bind: str) -> FakeSocket:
        if key == "http_listener[0].bind":
            raise StartFailed("taken")
        return FakeSocket(key, setup.log)

    monkeypatch.setattr("proxy.supervisor.cluster.client_listeners.bind_tcp", bind)
    with structlog.testing.capture_logs(), contextlib.suppress(StartFailed):
        setup.make(HandoverState(seal_key=KEY), **HTTP)
        pytest.fail("a first start goes on without a listener")
    with structlog.testing.capture_logs():
        cluster = setup.make(HandoverState(generation=2, seal_key=KEY), **HTTP)
    assert list(cluster.http_listeners.descriptors_by_index()) == [1]
