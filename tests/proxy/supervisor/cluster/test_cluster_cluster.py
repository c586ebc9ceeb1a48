"""proxy.supervisor.cluster.cluster: the order of starting, telling, reloading and draining."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from cluster_setup import KEY, Setup, config_with, forwarder_like
from supervisor_fakes import FakeSocket, FakeWorker, after, same_file

from proto.roles import Role
from proto.rpc_pb2 import DrainRequest, Method, Status, StoredRelay, StoreMessage
from proxy import __version__
from proxy.common.libraries import OPENSSL_VERSION, PYTHON_VERSION
from proxy.config.types import Config
from proxy.config.worker_config import decode_config
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcError
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters
from proxy.runtime.shared.fd_store_channel import StoreChannel, close_descriptors
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.cluster.slot import SlotState
from proxy.supervisor.handover.exec_handover import HandoverState, SerializedHandover
from proxy.supervisor.handover.fd_store import FdStoreSlot, StoredFds
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.startup.open_files import supervisor_reserve
from proxy.supervisor.startup.sockets import StartFailed


def start_request(worker: FakeWorker) -> Any:
    [request] = [request for method, request in worker.calls if method == Method.START]
    return request


def config_of(worker: FakeWorker) -> Config:
    """What a worker was told last."""
    requests = [request for method, request in worker.calls if method in {Method.START, Method.CONFIGURE}]
    return decode_config(requests[-1].config)


# ---- start


async def test_all_is_bound_before_anything_starts(setup: Setup) -> None:
    setup.make(listener=[{"bind": "0.0.0.0:1"}, {"bind": "0.0.0.0:2"}], cluster={"auth_workers": 2})
    assert set(setup.directory.sockets) == {"auth-0.sock", "auth-1.sock", "lookup-0.sock"}
    assert setup.workshop.workers == []


async def test_each_forwarder_has_its_part_of_the_fd_store(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: also of one that an earlier program has left."""
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (3000, 3000))
    handover = HandoverState(seal_key=KEY, fd_store_slots=[FdStoreSlot()])
    cluster = setup.make(handover, cluster={"forwarders": 2})
    most = (3000 - supervisor_reserve(cluster.config, 2)) // 2
    for index, slot in enumerate(cluster.fd_store_slots):
        assert (slot._forwarder, slot._descriptors_max) == (f"forwarder-{index}", most)


async def test_the_order_of_the_start(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    assert setup.events(Method.START)[:2] == ["auth-0", "lookup-0"]
    assert sorted(setup.events(Method.START)[2:]) == ["forwarder-0", "forwarder-1"]
    names = [f"{name} {event}" for name, event in setup.log if event in {"spawn", "listen", Method.START}]
    assert names.index("lookup spawn") > names.index(f"auth-0 {Method.START}")
    listen = names.index("listener[0].bind listen")
    assert names.index(f"lookup-0 {Method.START}") < listen < names.index("forwarder spawn")
    assert {slot.state for slot in cluster.slots} == {SlotState.RUNNING}
    nursery.cancel_scope.cancel()


async def test_versions_of_libraries_are_labels(setup: Setup, nursery: trio.Nursery) -> None:
    registry = (await setup.started(nursery)).registry
    labels = {"version": __version__, "python": PYTHON_VERSION, "openssl": OPENSSL_VERSION}
    assert registry.get_sample_value("pulsar_proxy_build_info", labels) == 1
    nursery.cancel_scope.cancel()


async def test_clients_may_not_come_while_a_worker_is_missing(setup: Setup, nursery: trio.Nursery) -> None:
    def prepare(worker: FakeWorker) -> None:
        if worker.role is Role.LOOKUP:
            worker.answers[Method.START] = lambda _request: trio.Event().wait()

    setup.workshop.prepare = prepare
    cluster = setup.make()
    ready = trio.Event()
    nursery.start_soon(cluster.run, ready)
    await trio.testing.wait_all_tasks_blocked()
    assert not ready.is_set()
    assert setup.events("listen") == []
    assert setup.workshop.of(Role.FORWARDER) == []
    nursery.cancel_scope.cancel()


async def test_each_worker_inherits_only_the_descriptors_of_its_role(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    given = {worker.name: what for worker, what in zip(setup.workshop.workers, setup.workshop.given, strict=True)}
    assert given["auth-0"] == {"service": setup.directory.sockets["auth-0.sock"].fileno()}
    assert given["lookup-0"] == {"service": setup.directory.sockets["lookup-0.sock"].fileno()}
    assert given["forwarder-0"].keys() == given["forwarder-1"].keys() == {"connections", "relay_requests", "audit_pipe"}
    assert given["forwarder-0"] == given["forwarder-1"]
    for forwarder in setup.workshop.of(Role.FORWARDER):
        assert forwarder.line is not None
        received = await forwarder.line.receive()
        assert received is not None
        message, descriptors = received
        assert (message.listeners, message.table) == (1, True)
        [listener] = cluster.listeners.sockets
        store_slot = cluster.fd_store_slots[forwarder.index]
        assert same_file(descriptors[0], store_slot.table_fd), "its counters outlive it, though its relays do not"
        assert same_file(descriptors[1], listener.fileno())
        close_descriptors(descriptors)
    nursery.cancel_scope.cancel()


async def test_forwarders_never_get_the_seal_key(setup: Setup, nursery: trio.Nursery) -> None:
    """Security: who reads what strangers send must not be able to mint a principal."""
    await setup.started(nursery)
    keys = {worker.name: start_request(worker).seal_key for worker in setup.workshop.workers}
    assert keys == {"auth-0": KEY, "lookup-0": KEY, "forwarder-0": b"", "forwarder-1": b""}
    nursery.cancel_scope.cancel()


async def test_each_worker_knows_all_other_workers(setup: Setup, nursery: trio.Nursery) -> None:
    await setup.started(nursery)
    all_workers = {(worker.pid, worker.role.value) for worker in setup.workshop.workers}
    for role in (Role.AUTH, Role.LOOKUP):
        [worker] = setup.workshop.of(role)
        requests = [request for method, request in worker.calls if method in {Method.START, Method.SET_PEERS}]
        assert {(peer.pid, peer.role) for peer in requests[-1].peers} == all_workers
    nursery.cancel_scope.cancel()


async def test_a_forwarder_is_known_before_it_begins(setup: Setup, nursery: trio.Nursery) -> None:
    """Or its first calls would be refused as a stranger's."""
    await setup.started(nursery)
    for forwarder in setup.workshop.of(Role.FORWARDER):
        started = setup.log.index((forwarder.name, Method.START))
        [lookup] = setup.workshop.of(Role.LOOKUP)
        told = [
            request
            for method, request in lookup.calls
            if method == Method.SET_PEERS and forwarder.pid in {peer.pid for peer in request.peers}
        ]
        assert told
        assert setup.log.index(("lookup-0", Method.SET_PEERS)) < started
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_listen_does_not_stop_the_others(setup: Setup, nursery: trio.Nursery) -> None:
    def prepare(worker: FakeWorker) -> None:
        if worker.role is Role.AUTH:
            worker.answers[Method.SET_PEERS] = lambda _request: RpcError("busy")

    setup.workshop.prepare = prepare
    with structlog.testing.capture_logs() as logs:
        await setup.started(nursery)
    assert "a worker was not told of its peers; ending it" in {entry["event"] for entry in logs}
    nursery.cancel_scope.cancel()


async def test_a_worker_that_cannot_start(setup: Setup) -> None:
    def prepare(worker: FakeWorker) -> None:
        if worker.role is Role.AUTH:
            worker.answers[Method.START] = lambda _request: RpcCallRefused(3, "authentication.token.secret_key: bad")

    setup.workshop.prepare = prepare
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match=r"authentication.token.secret_key: bad"), flatten_subgroups=True
    ):
        await setup.make().run(trio.Event())
    assert setup.workshop.of(Role.FORWARDER) == []


# ---- restart


async def test_a_worker_that_died_is_replaced_and_made_known(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    [lookup] = setup.workshop.of(Role.LOOKUP)
    [auth] = setup.workshop.of(Role.AUTH)
    lookup.end(-11)
    await trio.sleep(1)
    new = setup.workshop.of(Role.LOOKUP)[-1]
    assert new is not lookup
    pids = {peer.pid for peer in auth.calls[-1][1].peers}
    assert new.pid in pids
    assert lookup.pid not in pids, "a process id may be another's next"
    assert start_request(new).seal_key == KEY
    assert cluster.registry.get_sample_value("pulsar_proxy_worker_restarts_total", {"of": "lookup"}) == 1
    nursery.cancel_scope.cancel()


async def test_the_clients_of_a_dead_forwarder_count_no_more(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.started(nursery)
    [descriptor] = {given["connections"] for given in setup.workshop.given if "connections" in given}
    counters = ConnectionCounters(descriptor)
    counters.set_connections(0, 5)
    counters.set_connections(1, 7)
    next(worker for worker in setup.workshop.of(Role.FORWARDER) if worker.index == 0).end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert counters.total_connections() == 7
    nursery.cancel_scope.cancel()


# ---- reload


async def test_a_reload_tells_all_workers_in_order(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    config = config_with(limits={"max_connections": 5})
    await cluster.reload(config)
    told = setup.events(Method.CONFIGURE)
    assert (told[0], told[1], sorted(told[2:])) == ("auth-0", "lookup-0", ["forwarder-0", "forwarder-1"])
    assert all(config_of(worker) == config for worker in setup.workshop.workers)
    assert cluster.config == config
    nursery.cancel_scope.cancel()


async def test_a_reload_that_needs_a_restart_is_refused(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    before = cluster.config
    with pytest.raises(ReloadRefused) as refused:
        await cluster.reload(config_with(cluster={"forwarders": 3}, admin={"bind": "127.0.0.1:1"}))
    upgrade = "an upgrade (pulsar-trio-proxy upgrade) is needed to change: cluster.forwarders, admin.bind"
    assert str(refused.value) == upgrade, "no restart, which would end relays"
    with pytest.raises(ReloadRefused) as refused:
        await cluster.reload(config_with(cluster={"forwarders": 3}, relay={"crash_safe": not before.relay.crash_safe}))
    assert str(refused.value) == (
        "a restart is needed to change: relay.crash_safe; "
        "an upgrade (pulsar-trio-proxy upgrade) is needed to change: cluster.forwarders"
    )
    assert cluster.config is before
    assert setup.events(Method.CONFIGURE) == []
    nursery.cancel_scope.cancel()


async def test_a_reload_that_one_worker_refuses_changes_no_worker(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    before = cluster.config
    [lookup] = setup.workshop.of(Role.LOOKUP)
    [auth] = setup.workshop.of(Role.AUTH)
    lookup.answers[Method.CONFIGURE] = lambda _request: RpcCallRefused(3, "unlucky")
    with pytest.raises(ReloadRefused, match=r"the lookup worker with pid .* refused it: unlucky"):
        await cluster.reload(config_with(limits={"max_connections": 13}))
    assert cluster.config is before
    assert config_of(auth) == before, "taken back"
    assert all(config_of(worker) == before for worker in setup.workshop.of(Role.FORWARDER))
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_take_it_back_is_replaced(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    before = cluster.config
    [auth] = setup.workshop.of(Role.AUTH)
    [lookup] = setup.workshop.of(Role.LOOKUP)
    lookup.answers[Method.CONFIGURE] = lambda _request: RpcCallRefused(3, "unlucky")
    answers = iter([None, RpcError("gone")])
    auth.answers[Method.CONFIGURE] = lambda _request: next(answers)
    with pytest.raises(ReloadRefused):
        await cluster.reload(config_with(limits={"max_connections": 13}))
    await trio.sleep(1)
    assert auth.code == -9
    assert config_of(setup.workshop.of(Role.AUTH)[-1]) == before
    nursery.cancel_scope.cancel()


async def test_a_worker_that_is_starting_during_a_reload_gets_the_new_settings(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    gate = trio.Event()

    def prepare(worker: FakeWorker) -> None:
        worker.answers[Method.START] = lambda _request: gate.wait()

    setup.workshop.prepare = prepare
    setup.workshop.of(Role.LOOKUP)[0].end(1)
    await trio.sleep(1)  # its successor has been told the old settings, and is not ready yet
    config = config_with(limits={"max_connections": 5})
    async with trio.open_nursery() as reloading:
        reloading.start_soon(cluster.reload, config)
        await trio.sleep(1)
        gate.set()
    await trio.sleep(1)
    assert cluster.config == config
    for slot in cluster.slots:
        assert config_of(slot.worker) == config, f"{slot.role}-{slot.index}"  # type: ignore[arg-type]
    nursery.cancel_scope.cancel()


async def test_a_worker_that_starts_after_a_reload_gets_the_new_settings(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    config = config_with(limits={"max_connections": 5})
    await cluster.reload(config)
    setup.workshop.of(Role.LOOKUP)[0].end(1)
    await trio.sleep(1)
    assert config_of(setup.workshop.of(Role.LOOKUP)[-1]) == config
    nursery.cancel_scope.cancel()


# ---- drain


async def test_the_order_of_the_drain(
    setup: Setup,
    nursery: trio.Nursery,
    mock_clock: trio.testing.MockClock,
) -> None:
    cluster = await setup.started(nursery, limits={"drain_timeout_ms": 4000})
    gate = trio.Event()
    for forwarder in setup.workshop.of(Role.FORWARDER):
        forwarder.answers[Method.DRAIN] = lambda _request: gate.wait()
    nursery.start_soon(cluster.drain)
    await trio.testing.wait_all_tasks_blocked()
    assert cluster.draining
    assert all(listener.closed for listener in cluster.listeners.sockets)  # type: ignore[attr-defined]
    assert sorted(setup.events(Method.DRAIN)) == ["forwarder-0", "forwarder-1"], (
        "both at a time, and no other worker yet"
    )
    assert setup.events("stop") == []
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert setup.events("stop")[2:] == ["lookup-0", "auth-0"]
    [drained] = {request.timeout_ms for method, request in setup.workshop.workers[-1].calls if method == Method.DRAIN}
    assert drained == 4000
    assert setup.workshop.workers[-1].timeouts[-1] > 4
    assert {slot.state for slot in cluster.slots} == {SlotState.STOPPED}
    assert cluster.registry.get_sample_value("pulsar_proxy_worker_restarts_total", {"of": "forwarder"}) == 0
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_drain_is_stopped_all_the_same(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    for forwarder in setup.workshop.of(Role.FORWARDER):
        forwarder.answers[Method.DRAIN] = lambda _request: RpcError("no answer")
    with structlog.testing.capture_logs() as logs:
        await cluster.drain()
    assert len(setup.events("stop")) == 4
    assert sum(1 for entry in logs if entry["event"] == "a worker did not drain") == 2
    nursery.cancel_scope.cancel()


async def test_drain_while_a_worker_is_being_replaced(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    setup.workshop.of(Role.FORWARDER)[0].end(1)
    await trio.testing.wait_all_tasks_blocked()
    await cluster.drain()
    await trio.sleep(30)
    assert len(setup.workshop.of(Role.FORWARDER)) == 2, "no other is started"
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("role", [Role.AUTH, Role.LOOKUP, Role.FORWARDER])
async def test_drain_while_the_cluster_starts(setup: Setup, role: Role, autojump_clock: trio.testing.MockClock) -> None:
    gate = trio.Event()

    def prepare(worker: FakeWorker) -> None:
        if worker.role is role:
            worker.answers[Method.START] = lambda _request: gate.wait()

    setup.workshop.prepare = prepare
    cluster = setup.make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cluster.run, trio.Event())
        await trio.sleep(1)
        gate.set()  # the word that it is ready crosses with the drain
        await cluster.drain()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert all(worker.code is not None for worker in setup.workshop.workers)


async def test_stop_at_once(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    cluster.kill_workers()
    assert {worker.code for worker in setup.workshop.workers} == {-9}
    nursery.cancel_scope.cancel()


async def test_close(setup: Setup) -> None:
    cluster = setup.make()
    cluster.close_sockets()
    assert all(listener.closed for listener in cluster.listeners.sockets)  # type: ignore[attr-defined]
    assert all(sock.closed for sock in setup.directory.sockets.values())


# ---- a reload meets workers that start or hang


async def test_a_worker_that_starts_during_a_reload_gets_the_new_configuration(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    booting = trio.Event()

    def prepare(worker: FakeWorker) -> None:
        worker.answers[Method.START] = lambda _request: booting.wait()

    setup.workshop.prepare = prepare
    setup.workshop.of(Role.LOOKUP)[0].end(-9)
    await trio.sleep(1)
    new = config_with(brokers={"allowed_ports": [7000]})
    async with trio.open_nursery() as reloading:
        reloading.start_soon(cluster.reload, new)
        await trio.sleep(1)
        booting.set()
    assert config_of(setup.workshop.of(Role.LOOKUP)[-1]) == new
    nursery.cancel_scope.cancel()


async def test_a_worker_that_hangs_during_a_reload_is_ended(setup: Setup, nursery: trio.Nursery) -> None:
    """It may take the new configuration when it wakes up, long after the others took it back."""
    cluster = await setup.started(nursery)
    [lookup] = setup.workshop.of(Role.LOOKUP)
    lookup.answers[Method.CONFIGURE] = lambda _request: RpcDeadlineExceeded("no answer")
    new = config_with(brokers={"allowed_ports": [7000]})
    with pytest.raises(ReloadRefused):
        await cluster.reload(new)
    assert lookup.code == -9
    assert config_of(setup.workshop.of(Role.AUTH)[0]) == cluster.config
    assert cluster.config != new
    nursery.cancel_scope.cancel()


# ---- relays of forwarders


def relay(worker: FakeWorker, *ids: int) -> None:
    """A forwarder has relays."""
    ends = os.pipe()
    assert worker.line is not None
    worker.line.send_now(StoreMessage(relays=[StoredRelay(id=number) for number in ids]), ends * len(ids))
    close_descriptors(ends)


def in_place(cluster: Cluster, role: Role, index: int = 0) -> FakeWorker:
    return cluster.slots_of(role)[index].worker  # type: ignore[return-value]


def stored(cluster: Cluster) -> float | None:
    return cluster.registry.get_sample_value("pulsar_proxy_stored_relays")


async def test_a_dead_forwarders_relays_are_its_successors(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    first, second = in_place(cluster, Role.FORWARDER, 0), in_place(cluster, Role.FORWARDER, 1)
    relay(first, 1, 2)
    relay(second, 3)
    await trio.testing.wait_all_tasks_blocked()
    assert stored(cluster) == 3
    first.end(-9)
    await trio.sleep(1)
    assert in_place(cluster, Role.FORWARDER, 0).adopted == [1, 2], "and no other forwarder's"
    assert in_place(cluster, Role.FORWARDER, 1) is second
    assert stored(cluster) == 3
    nursery.cancel_scope.cancel()


async def test_nothing_is_kept_where_that_is_not_wanted(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    relay(in_place(cluster, Role.FORWARDER), 1)
    await trio.testing.wait_all_tasks_blocked()
    assert stored(cluster) == 0
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("crash_safe", [True, False])
async def test_a_forwarder_that_sends_malformed_messages_is_ended(
    setup: Setup, nursery: trio.Nursery, crash_safe: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: only its own clients may notice."""
    cluster = await (setup.crash_safe(nursery) if crash_safe else setup.started(nursery))
    bad = in_place(cluster, Role.FORWARDER)
    assert bad.line is not None
    bad.line.sock.send(b"\xff\xff\xff")
    await trio.sleep(1)
    assert bad.code == -9
    assert in_place(cluster, Role.FORWARDER).code is None
    assert sum(worker.code is not None for worker in setup.workshop.workers) == 1
    nursery.cancel_scope.cancel()


async def test_a_forwarder_without_a_line(setup: Setup) -> None:
    cluster = setup.make()
    with pytest.raises(RuntimeError, match="without a channel"):
        await cluster._serve_fd_store(cluster.fd_store_slots[0], FakeWorker(Role.FORWARDER))  # type: ignore[arg-type]


async def test_relays_without_a_successor_are_not_kept(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    relay(in_place(cluster, Role.FORWARDER), 1, 2)
    await trio.testing.wait_all_tasks_blocked()
    await cluster.drain()
    assert stored(cluster) == 0
    nursery.cancel_scope.cancel()


# ---- new processes


async def test_all_are_replaced_one_by_one(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    old = [slot.worker for slot in cluster.slots]
    relay(in_place(cluster, Role.FORWARDER, 0), 1, 2)
    relay(in_place(cluster, Role.FORWARDER, 1), 3)
    setup.log.clear()
    with structlog.testing.capture_logs() as logs:
        await cluster.replace_all()
    assert not cluster.replacing
    assert setup.events(Method.START) == ["auth-0", "lookup-0", "forwarder-0", "forwarder-1"]
    drains = [setup.log.index((name, Method.DRAIN)) for name in setup.events(Method.START)]
    assert drains == sorted(drains)
    assert [entry["who"] for entry in logs] == ["auth-0", "lookup-0", "forwarder-0", "forwarder-1"]
    assert not {slot.worker for slot in cluster.slots} & set(old)
    assert in_place(cluster, Role.FORWARDER, 0).adopted == [1, 2]
    assert in_place(cluster, Role.FORWARDER, 1).adopted == [3]
    await trio.sleep(1)
    assert [worker.code for worker in old if worker is not None] == [0, 0, 0, 0]  # type: ignore[attr-defined]
    for role in ("auth", "lookup", "forwarder"):
        assert cluster.registry.get_sample_value("pulsar_proxy_worker_restarts_total", {"of": role}) == 0
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("crash_safe", [True, False])
async def test_only_forwarders_leave_before_their_successor_begins(
    setup: Setup, nursery: trio.Nursery, crash_safe: bool, autojump_clock: trio.testing.MockClock
) -> None:
    limits = {"drain_timeout_ms": 4321}
    cluster = await (setup.crash_safe(nursery, limits=limits) if crash_safe else setup.started(nursery, limits=limits))
    old = [slot.worker for slot in cluster.slots]
    await cluster.replace_all()
    await trio.testing.wait_all_tasks_blocked()
    for worker in old:
        calls: Any = worker.calls  # type: ignore[union-attr]
        [request] = [request for method, request in calls if method == Method.DRAIN]
        assert (request.timeout_ms, request.hand_over) == (4321, True)
    for slot in cluster.slots:
        order = [what for name, what in setup.log if name == slot.name and what in {Method.START, Method.DRAIN}]
        leaves_first = slot.role is Role.FORWARDER  # also where nothing moves: two cannot write the same counters
        last = [Method.DRAIN, Method.START] if leaves_first else [Method.START, Method.DRAIN]
        assert order == [Method.START, *last]
    nursery.cancel_scope.cancel()


async def test_replace_all_replaces_one_worker_at_a_time(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    before = len(setup.workshop.workers)
    gate = trio.Event()
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: lambda _request: gate.wait()})
    nursery.start_soon(cluster.replace_all)
    await trio.sleep(10)
    assert cluster.replacing
    assert len(setup.workshop.workers) == before + 1
    gate.set()
    await trio.sleep(10)
    assert not cluster.replacing
    assert len(setup.workshop.workers) == 2 * before
    nursery.cancel_scope.cancel()


async def test_starting_and_draining_workers_are_peers_of_the_running_workers(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A draining forwarder still sends requests to the other workers, which reject processes that are no peers."""
    cluster = await setup.started(nursery)
    auth, lookup, forwarder = (in_place(cluster, role) for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER))
    for worker in (lookup, forwarder):
        worker.answers[Method.DRAIN] = leaving_line(worker, 100)
    await cluster.replace_all()
    new = setup.workshop.workers[4:]
    assert len(new) == 4
    for worker in (in_place(cluster, Role.AUTH), in_place(cluster, Role.LOOKUP)):
        [*_, last] = [request for method, request in worker.calls if method in {Method.START, Method.SET_PEERS}]
        pids = {peer.pid for peer in last.peers}
        assert pids >= {lookup.pid, forwarder.pid, *(worker.pid for worker in new)}, worker.name
        assert auth.pid not in pids
    nursery.cancel_scope.cancel()


def leaving_line(worker: FakeWorker, seconds: float) -> Callable[[Any], Any]:
    """Answers DRAIN as a forwarder does some of whose relays cannot move."""

    async def drain(_request: Any) -> None:
        worker.leave_line()
        await trio.sleep(seconds)

    return drain


async def test_no_process_to_replace_one_with(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    spawn = setup.workshop.spawn

    async def no_lookup(fork_server: object, role: Role, *files: Any, **given: Any) -> FakeWorker:
        if role is Role.LOOKUP:
            raise OSError(12, "Cannot allocate memory")
        return await spawn(fork_server, role, *files, **given)

    monkeypatch.setattr(setup.workshop, "spawn", no_lookup)
    lookup = in_place(cluster, Role.LOOKUP)
    with structlog.testing.capture_logs() as logs:
        await cluster.replace_all()
    assert [(entry["event"], entry["who"]) for entry in logs] == [
        ("replaced a worker", "auth-0"),
        ("a worker was not replaced", "lookup-0"),
        ("replaced a worker", "forwarder-0"),
        ("replaced a worker", "forwarder-1"),
    ]
    assert in_place(cluster, Role.LOOKUP) is lookup
    assert not cluster.replacing
    nursery.cancel_scope.cancel()


async def test_a_successor_that_does_not_start(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: lambda _request: RpcError("no")})
    old = [slot.worker for slot in cluster.slots]
    with structlog.testing.capture_logs() as logs:
        await cluster.replace_all([Role.AUTH, Role.LOOKUP])
    assert [entry["event"] for entry in logs] == ["a worker cannot start", "a worker's successor did not start"] * 2
    assert [slot.worker for slot in cluster.slots] == old
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("tables", [{"log": {"level": "debug"}}, {"limits": {"max_command_bytes": 70_000}}])
async def test_a_reload_by_new_processes(
    setup: Setup, nursery: trio.Nursery, tables: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    config = config_with(**tables)
    await cluster.reload(config)
    assert setup.events(Method.CONFIGURE) == []
    assert cluster.config == config
    assert len(setup.workshop.workers) == 8
    assert all(config_of(slot.worker) == config for slot in cluster.slots)  # type: ignore[arg-type]
    nursery.cancel_scope.cancel()


async def test_a_reload_that_changes_what_is_kept_is_refused(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    with pytest.raises(ReloadRefused, match=r"relay\.crash_safe"):
        await cluster.reload(config_with(relay={"crash_safe": True}, log={"level": "debug"}))
    assert len(setup.workshop.workers) == 4
    nursery.cancel_scope.cancel()


async def test_a_reload_does_not_bother_those_who_finish(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """They may end at any moment, which must not make the supervisor take a configuration back."""
    cluster = await setup.started(nursery)
    old = in_place(cluster, Role.LOOKUP)
    old.answers[Method.DRAIN] = after(100)
    old.answers[Method.CONFIGURE] = lambda _request: RpcError("the worker went away")
    await cluster.replace_all()
    await cluster.reload(config_with(limits={"max_connections": 5}))
    assert len(setup.events(Method.CONFIGURE)) == 4
    assert old.code is None
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("other", [{}, {"log": {"level": "debug"}}], ids=["as they are", "by new processes"])
async def test_a_reload_counts_for_relays_that_replaced_forwarders_still_have(
    setup: Setup, nursery: trio.Nursery, other: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    old: list[Any] = [slot.worker for slot in cluster.slots_of(Role.FORWARDER)]
    for worker in old:
        worker.answers[Method.DRAIN] = leaving_line(worker, 20)
    await cluster.replace_all([Role.FORWARDER])
    assert len([life for slot in cluster.slots for life in slot.leaving_runs]) == len(old) == 2
    await cluster.reload(config_with(relay={"crash_safe": True}, session={"enforcement": "observe"}, **other))
    assert [config_of(worker).session.enforcement for worker in old] == ["observe"] * 2
    assert all(worker.code is None for worker in old)
    nursery.cancel_scope.cancel()


async def test_workers_replaced_by_a_reload_receive_its_configuration_as_well(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """It applies to the relays they still have, though a running process cannot apply all of it."""
    cluster = await setup.crash_safe(nursery)
    old: list[Any] = [slot.worker for slot in cluster.slots_of(Role.FORWARDER)]
    for worker in old:
        worker.answers[Method.DRAIN] = leaving_line(worker, 20)
    tables = {"relay": {"crash_safe": True}, "session": {"enforcement": "observe"}, "log": {"level": "debug"}}
    await cluster.reload(config_with(**tables))
    assert [config_of(worker).session.enforcement for worker in old] == ["observe"] * 2
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RpcCallRefused(Status.INVALID_REQUEST, "a certificate cannot be read"), True),
        (RpcDeadlineExceeded("no answer"), True),
        (RpcConnectionLost("it has ended"), False),
    ],
    ids=["refuses", "hangs", "has ended"],
)
async def test_a_replaced_forwarder_refuses_no_reload(
    setup: Setup, nursery: trio.Nursery, error: RpcError, told: bool, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    old = in_place(cluster, Role.FORWARDER)
    old.answers[Method.DRAIN] = leaving_line(old, 20)
    old.answers[Method.CONFIGURE] = lambda _request: error
    await cluster.replace_all([Role.FORWARDER])
    config = config_with(relay={"crash_safe": True}, limits={"max_connections": 5})
    with structlog.testing.capture_logs() as logs:
        await cluster.reload(config)
    assert cluster.config == config
    assert config_of(in_place(cluster, Role.FORWARDER)) == config
    assert old.code is None
    warned = [entry["pid"] for entry in logs if "a replaced forwarder did not take over" in entry["event"]]
    assert warned == [old.pid] * told
    nursery.cancel_scope.cancel()


async def test_drain_while_all_are_replaced(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    for forwarder in setup.workshop.of(Role.FORWARDER):
        forwarder.answers[Method.DRAIN] = after(20)
    gate = trio.Event()
    prepare: Callable[[FakeWorker], None] = setup.workshop.prepare

    def slow(worker: FakeWorker) -> None:
        prepare(worker)
        if worker.role is Role.LOOKUP:
            worker.answers[Method.START] = lambda _request: gate.wait()

    setup.workshop.prepare = slow
    replaced = trio.Event()

    async def replace() -> None:
        await cluster.replace_all()
        replaced.set()

    nursery.start_soon(replace)
    await trio.sleep(1)
    before = len(setup.workshop.workers)
    nursery.start_soon(cluster.drain)
    await trio.sleep(1)
    gate.set()
    await replaced.wait()
    await trio.sleep(30)
    assert len(setup.workshop.workers) == before
    assert all(worker.code is not None for worker in setup.workshop.workers)
    nursery.cancel_scope.cancel()


async def test_the_numbers_of_listeners_that_a_drain_has_closed(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a forwarder that is still waiting for its predecessor's last word must not get whatever has these
    numbers by then.
    """
    cluster = await setup.crash_safe(nursery)
    await trio.sleep(10)
    slot = cluster.slots_of(Role.FORWARDER)[0]
    old = in_place(cluster, Role.FORWARDER)
    old.answers[Method.DRAIN] = after(5)  # it does not hurry to leave its line
    nursery.start_soon(lambda: slot.replace_worker(hand_over=True, drain_timeout_ms=30_000))
    await trio.sleep(1)
    new = setup.workshop.of(Role.FORWARDER)[2]
    assert new.line is not None
    del new.answers[Method.START]  # what it gets is read here
    theirs = StoreChannel(new.line.sock.dup())  # stays, if it is ended
    was = cluster.listeners.sockets[0].fileno()
    nursery.start_soon(cluster.drain)
    await trio.testing.wait_all_tasks_blocked()
    secret = os.memfd_create("another's")
    os.dup2(secret, was)
    assert same_file(secret, was)
    await trio.sleep(1)
    old.leave_line()
    await trio.sleep(1)
    with trio.move_on_after(1):
        while (received := await theirs.receive()) is not None:
            assert not any(same_file(secret, number) for number in received[1])
            close_descriptors(received[1])
    await trio.sleep(60)
    assert all(worker.code is not None for worker in setup.workshop.workers), "and the drain goes on to its end"
    theirs.close()
    close_descriptors(sorted({secret, was}))
    nursery.cancel_scope.cancel()


async def test_drain_leaves_those_who_finish_their_time(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery, limits={"drain_timeout_ms": 60_000})
    forwarder = in_place(cluster, Role.FORWARDER)
    forwarder.answers[Method.DRAIN] = leaving_line(forwarder, 30)
    await cluster.replace_all()
    nursery.start_soon(cluster.drain)
    await trio.sleep(25)
    assert forwarder.code is None
    told = [(request.hand_over, request.timeout_ms) for method, request in forwarder.calls if method == Method.DRAIN]
    assert told == [(True, 60_000), (False, 60_000)], "its relays end in order, too"
    await trio.sleep(10)
    assert forwarder.code == 0
    assert {slot.state for slot in cluster.slots} == {SlotState.STOPPED}
    nursery.cancel_scope.cancel()


# ---- for another program in this process


async def test_standing_still(setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    cluster = await setup.crash_safe(nursery)
    await trio.sleep(10)
    relay(in_place(cluster, Role.FORWARDER, 1), 7)
    async with cluster.quiesced() as inherited:
        assert [(one.role, one.index, one.pid) for one in inherited] == [
            (slot.role.value, slot.index, slot.worker.pid)  # type: ignore[union-attr]
            for slot in cluster.slots
        ]
        assert all(one.store >= 0 for one in inherited if one.role == "forwarder")
        workers = len(setup.workshop.workers)
        in_place(cluster, Role.LOOKUP).end(1)
        await trio.sleep(30)
        assert len(setup.workshop.workers) == workers, "no worker is started"
        told = cluster.handover_fields(inherited)
    state = SerializedHandover(**told, runtime_lock=setup.directory.lock_fd, control=1, admin={})
    assert (state.generation, state.seal_key, state.relay_count) == (2, KEY, 1)
    assert state.listeners == {"0.0.0.0:6650": cluster.listeners.sockets[0].fileno()}
    assert state.services == {
        name.removesuffix(".sock"): sock.fileno() for name, sock in setup.directory.sockets.items()
    }
    assert state.runtime_dir == cluster.config.cluster.runtime_dir
    assert [list(store_slot.relays) for store_slot in state.fd_store_slots] == [[], [7]]
    assert [store_slot.table for store_slot in state.fd_store_slots] == [
        store_slot.table_fd for store_slot in cluster.fd_store_slots
    ]
    await trio.sleep(1)
    assert in_place(cluster, Role.LOOKUP).code is None, "and all is as before"
    running = [worker for worker in setup.workshop.workers if worker.code is None and worker.story]
    assert len(running) == 3
    assert all(worker.story == ["pause", "resume"] for worker in running)
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_quiesce_is_killed(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery)
    restless = in_place(cluster, Role.FORWARDER, 1)

    async def never(_index: int, *, timeout_s: float) -> None:
        await trio.sleep(timeout_s)
        relay(restless, 4, 5)

    monkeypatch.setattr(restless, "quiesce_and_serialize", never)
    with structlog.testing.capture_logs() as logs:
        async with cluster.quiesced() as inherited:
            assert restless.code == -9
            assert [(one.role, one.index) for one in inherited] == [("auth", 0), ("lookup", 0), ("forwarder", 0)]
            assert sorted(cluster.handover_fields(inherited)["fd_store_slots"][1].relays) == [4, 5], (
                "it was heard to the end"
            )
    assert "a worker does not come to rest; ending it" in {entry["event"] for entry in logs}
    nursery.cancel_scope.cancel()


async def test_quiescing_waits_for_a_worker_that_is_starting(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery)
    gate = trio.Event()
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: lambda _request: gate.wait()})
    in_place(cluster, Role.LOOKUP).end(1)
    await trio.sleep(1)
    with trio.move_on_after(5) as scope:
        async with cluster.quiesced():
            pass
    assert scope.cancelled_caught
    gate.set()
    async with cluster.quiesced() as inherited:
        assert len(inherited) == 4
    nursery.cancel_scope.cancel()


async def test_wait_for_leaving(setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    cluster = await setup.started(nursery)
    await cluster.wait_for_leaving()
    for index in range(2):
        in_place(cluster, Role.FORWARDER, index).answers[Method.DRAIN] = after(20)
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: after(3)})
    nursery.start_soon(cluster.replace_all)
    await trio.sleep(1)
    assert trio.current_time() == pytest.approx(1)
    await cluster.wait_for_leaving()
    assert trio.current_time() == pytest.approx(4 * 3 + 20, abs=0.5)
    assert sum(worker.code is None for worker in setup.workshop.workers) == 4
    nursery.cancel_scope.cancel()


class Left:
    """What an earlier program left: two forwarders, a lookup and two auth workers, and a listener too many."""

    def __init__(self, setup: Setup, generation: int = 2) -> None:
        self.workers: dict[tuple[Role, int], FakeWorker] = {}
        for role, index in (*((role, 0) for role in Role if role in PLACES), (Role.AUTH, 1), (Role.FORWARDER, 1)):
            worker = self.workers[role, index] = FakeWorker(role, index, setup.log)
            worker.is_inherited = True
            if role is Role.FORWARDER:
                worker.open_line()
                forwarder_like(worker)
            setup.workshop.workers.append(worker)
        self.fd_store_slots = [FdStoreSlot(), FdStoreSlot()]
        self.connections = create_shared_counters(2)
        self.listeners = {bind: FakeSocket(f"left {bind}", setup.log) for bind in ("0.0.0.0:6650", "0.0.0.0:7")}
        self.services = {place: FakeSocket(f"left {place}", setup.log) for place in self.workers if place[1] == 0}
        self.handover = HandoverState(
            generation=generation,
            seal_key=KEY,
            listeners=dict(self.listeners),  # type: ignore[arg-type]
            service_sockets=dict(self.services),  # type: ignore[arg-type]
            connections_fd=self.connections,
            fd_store_slots=self.fd_store_slots,
            workers=dict(self.workers),  # type: ignore[arg-type]
        )
        self.services.pop((Role.FORWARDER, 0))
        setup.workshop.prepare = forwarder_like


PLACES = (Role.AUTH, Role.LOOKUP, Role.FORWARDER)


async def test_another_program_goes_on(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = Left(setup)
    ends = os.pipe()
    left.fd_store_slots[1].relays[5] = StoredFds(StoredRelay(id=5).SerializeToString(), *ends)
    ConnectionCounters(left.connections).set_connections(1, 9)
    relay(left.workers[Role.FORWARDER, 1], 6)  # on its way while no supervisor was there
    cluster = setup.make(left.handover, relay={"crash_safe": True})
    assert (cluster.generation, cluster.replacing) == (2, True), "from the very first look at it"
    assert cluster.listeners.sockets[0] is left.listeners["0.0.0.0:6650"]  # type: ignore[comparison-overlap]
    assert setup.directory.sockets == {}
    assert cluster._connections_fd == left.connections
    ready = trio.Event()
    nursery.start_soon(cluster.run, ready)
    await ready.wait()
    assert not cluster.replacing
    await trio.sleep(6)
    assert in_place(cluster, Role.FORWARDER, 1).adopted == [5, 6]
    assert {worker.code for worker in left.workers.values()} == {0}, "all are replaced, or have no place any more"
    new = [slot.worker for slot in cluster.slots]
    assert not set(new) & set(left.workers.values())
    assert start_request(in_place(cluster, Role.AUTH)).seal_key == KEY
    assert left.listeners["0.0.0.0:7"].closed
    assert not left.listeners["0.0.0.0:6650"].closed
    assert {place: sock.closed for place, sock in left.services.items()} == {
        (Role.AUTH, 0): False,
        (Role.LOOKUP, 0): False,
    }
    nursery.cancel_scope.cancel()


async def test_drain_as_soon_as_another_program_has_begun(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A signal that the exec has held back: workers from before are drained and stopped like others."""
    left = Left(setup)
    drained_at: dict[str, float] = {}
    for worker in left.workers.values():

        def drain(_request: object, worker: FakeWorker = worker) -> None:
            drained_at[worker.name] = trio.current_time()

        worker.answers[Method.DRAIN] = drain
    cluster = setup.make(left.handover, relay={"crash_safe": True}, limits={"drain_timeout_ms": 5000})
    assert not cluster.all_started.is_set()
    nursery.start_soon(cluster.run, trio.Event())
    await cluster.all_started.wait()
    assert all(slot.runs for slot in cluster.slots), "each of them has a task that talks to it"
    await cluster.drain()
    places = {(slot.role, slot.index) for slot in cluster.slots}
    assert {place for place, worker in left.workers.items() if worker.code == 0} >= places
    assert {"forwarder-0", "forwarder-1", "lookup-0", "auth-0"} <= set(drained_at)
    assert trio.current_time() < 1, "no worker has anything to finish"
    await trio.testing.wait_all_tasks_blocked()
    assert {slot.state for slot in cluster.slots} == {SlotState.STOPPED}
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("forwarders", [2, 4])
async def test_counters_for_another_number_of_forwarders(setup: Setup, forwarders: int) -> None:
    """Those of the program before are let go, or each upgrade would leave a descriptor."""
    left = Left(setup)
    ours = os.dup(left.connections)
    cluster = setup.make(left.handover, relay={"crash_safe": True}, cluster={"forwarders": forwarders})
    counters = cluster._connections_fd
    assert os.fstat(counters).st_size == forwarders * 8
    assert same_file(counters, ours) is (forwarders == 2)
    assert (open_files_like(ours) == {ours}) is (forwarders != 2)
    os.close(ours)


def open_files_like(descriptor: int) -> set[int]:
    """All descriptors of the same file."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one with which the folder was read
            if same_file(int(name), descriptor):
                found.add(int(name))
    return found


async def test_old_workers_serve_until_new_ones_are_ready(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = Left(setup)
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: after(10)})
    cluster = setup.make(left.handover)
    ready = trio.Event()
    nursery.start_soon(cluster.run, ready)
    await trio.sleep(1)
    assert cluster.started
    assert cluster.all_started.is_set(), "a drain need not wait for the new ones"
    assert cluster.replacing
    assert not ready.is_set()
    assert in_place(cluster, Role.AUTH) is left.workers[Role.AUTH, 0]
    assert all(worker.code is None for worker in left.workers.values())
    nursery.cancel_scope.cancel()


async def test_an_upgrade_cannot_take_forwarders_away(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A process has to go on with their relays."""
    left = Left(setup)
    cluster = await setup.started(nursery, left.handover, relay={"crash_safe": True}, cluster={"forwarders": 1})
    assert len(cluster.slots_of(Role.FORWARDER)) == 2
    assert cluster.fd_store_slots == left.fd_store_slots
    assert all(slot.state is SlotState.RUNNING for slot in cluster.slots)
    nursery.cancel_scope.cancel()


async def test_an_upgrade_can_bring_workers(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = Left(setup)
    cluster = await setup.started(
        nursery,
        left.handover,
        relay={"crash_safe": True},
        cluster={"forwarders": 4, "lookup_workers": 2},
        listener=[{"bind": "0.0.0.0:6650"}, {"bind": "0.0.0.0:8"}],
    )
    assert len(cluster.slots_of(Role.FORWARDER)) == 4
    assert cluster.fd_store_slots[:2] == left.fd_store_slots
    assert set(setup.directory.sockets) == {"lookup-1.sock"}
    assert [listener.name for listener in cluster.listeners.sockets] == ["left 0.0.0.0:6650", "listener[1].bind"]  # type: ignore[attr-defined]
    assert all(slot.state is SlotState.RUNNING for slot in cluster.slots)
    [connections] = {given["connections"] for given in setup.workshop.given if "connections" in given}
    assert connections != left.connections
    counters = ConnectionCounters(connections)
    counters.set_connections(3, 5)
    assert counters.total_connections() == 5
    nursery.cancel_scope.cancel()


async def test_a_place_that_was_left_empty_is_filled(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = Left(setup)
    del left.handover.workers[Role.LOOKUP, 0]
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: after(1)})
    cluster = setup.make(left.handover)
    ready = trio.Event()
    nursery.start_soon(cluster.run, ready)
    await trio.sleep(0.5)
    assert cluster.replacing, "an operator must not think that all is done"
    await ready.wait()
    assert in_place(cluster, Role.LOOKUP).code is None
    nursery.cancel_scope.cancel()


async def test_a_place_that_was_left_empty_and_cannot_be_filled_at_once(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    left = Left(setup)
    del left.handover.workers[Role.LOOKUP, 0]
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: lambda _request: RpcError("not now")})
    forwarder = left.workers[Role.FORWARDER, 0]
    forwarder.answers[Method.DRAIN] = leaving_line(forwarder, 30)
    cluster = setup.make(left.handover)
    nursery.start_soon(cluster.run, trio.Event())
    await trio.sleep(3)
    assert forwarder.code is None, "its relays go on"
    assert cluster.all_started.is_set(), "a drain must not wait for it"
    nursery.cancel_scope.cancel()


async def test_a_drain_in_the_middle_of_a_hand_over(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery, limits={"drain_timeout_ms": 30_000})
    await trio.sleep(10)
    old = in_place(cluster, Role.FORWARDER)
    relay(old, 1, 2)

    async def slowly(request: DrainRequest) -> None:
        await trio.sleep(2)
        if request.hand_over:
            old.leave_line()

    old.answers[Method.DRAIN] = slowly

    async def replace() -> None:
        await cluster.slots_of(Role.FORWARDER)[0].replace_worker(hand_over=True, drain_timeout_ms=30_000)

    nursery.start_soon(replace)
    await trio.sleep(1)
    nursery.start_soon(cluster.drain)
    await trio.sleep(5)
    new = setup.workshop.of(Role.FORWARDER)[2]
    assert new.adopted == [1, 2]
    assert any(method == Method.DRAIN for method, _request in new.calls), "they have their drain time"
    nursery.cancel_scope.cancel()


# ---- changed files of brokers


def files_told(worker: FakeWorker) -> list[dict[str, str]]:
    return [
        {one.path: one.stamp for one in told.files} for method, told in worker.calls if method == Method.TAKE_OVER_FILES
    ]


FILES = {
    "service_url": "pulsar+ssl://b0:6651",
    "tls": {"trust": "/trust.pem", "certificate": "/proxy.pem", "key": "/proxy.key"},
    "credentials": {"method": "token", "file": "/proxy.jwt"},
}
STAMPS = {"/trust.pem": "1", "/proxy.pem": "2", "/proxy.key": "3", "/proxy.jwt": "4"}


async def test_accepted_files_are_taken_over_by_those_that_may_know_them(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.started(nursery, brokers=FILES)
    assert await cluster.take_over_files(STAMPS) == []
    tls = {file: stamp for file, stamp in STAMPS.items() if file != "/proxy.jwt"}
    for role, told in ((Role.AUTH, STAMPS), (Role.LOOKUP, tls), (Role.FORWARDER, tls)):
        assert [files_told(worker) for worker in setup.workshop.of(role)] == [[told]] * len(setup.workshop.of(role))
    nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_take_files_over(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A refusal is told; one that hangs is ended, and its successor reads the files; one that has gone has no vote."""
    cluster = await setup.started(nursery, brokers=FILES)
    [auth], [lookup], [gone, _] = (setup.workshop.of(role) for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER))
    auth.answers[Method.TAKE_OVER_FILES] = lambda _: RpcCallRefused(Status.INVALID_REQUEST, "changed once more")
    lookup.answers[Method.TAKE_OVER_FILES] = lambda _: RpcDeadlineExceeded("no answer")
    gone.answers[Method.TAKE_OVER_FILES] = lambda _: RpcConnectionLost("the worker went away")
    [refusal] = await cluster.take_over_files(STAMPS)
    assert refusal == f"the auth worker with pid {auth.pid}: changed once more"
    assert (auth.code, lookup.code, gone.code) == (None, -9, None)
    nursery.cancel_scope.cancel()


async def test_a_replaced_forwarder_takes_files_over_too_and_has_no_vote(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery, brokers=FILES)
    old: list[Any] = [slot.worker for slot in cluster.slots_of(Role.FORWARDER)]
    for worker in old:
        worker.answers[Method.DRAIN] = leaving_line(worker, 20)
        worker.answers[Method.TAKE_OVER_FILES] = lambda _: RpcDeadlineExceeded("no answer")
    await cluster.replace_all([Role.FORWARDER])
    assert await cluster.take_over_files(STAMPS) == []
    assert [len(files_told(worker)) for worker in old] == [1, 1]
    assert [worker.code for worker in old] == [None, None]
    nursery.cancel_scope.cancel()


# ---- levels of logs, and unready


async def test_what_operators_change_reaches_workers_and_the_next_program(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    cluster.log_levels.change([Role.FORWARDER], "debug", None)
    first, second = setup.workshop.of(Role.FORWARDER)
    second.answers[Method.SET_LOG_LEVEL] = lambda _request: RpcCallRefused(Status.UNSUPPORTED_VERSION, "old")
    assert await cluster.send_log_levels([Role.FORWARDER]) == [second.name]
    [told] = [request for method, request in first.calls if method == Method.SET_LOG_LEVEL]
    assert told.level == "debug"
    assert not setup.events(Method.SET_LOG_LEVEL)[2:]
    await cluster.replace_all([Role.FORWARDER, Role.LOOKUP])
    assert config_of(setup.workshop.of(Role.FORWARDER)[-1]).log.level == "debug"
    assert config_of(setup.workshop.of(Role.LOOKUP)[-1]).log.level == "info"
    assert cluster.registry.get_sample_value("pulsar_proxy_unready") == 0
    cluster.unready_because = ""
    assert cluster.registry.get_sample_value("pulsar_proxy_unready") == 1
    assert cluster.handover_fields([])["unready_because"] == ""
    assert cluster.handover_fields([])["log_levels"] == {"forwarder": ("debug", None)}
    nursery.cancel_scope.cancel()
