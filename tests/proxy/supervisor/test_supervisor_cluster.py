"""proxy.supervisor.cluster: the order of starting, telling, reloading and draining."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeDirectory, FakeSocket, FakeWorker, Workshop, make_config

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.config.load import decode_config
from proxy.config.types import Config
from proxy.runtime.connection_count import ConnectionCounters
from proxy.runtime.rpc_client import RpcCallRefused, RpcDeadlineExceeded, RpcError
from proxy.supervisor import cluster as module
from proxy.supervisor.cluster import Cluster, ReloadRefused
from proxy.supervisor.slot import SlotState
from proxy.supervisor.sockets import StartFailed

KEY = b"s" * 32


class Setup:
    """A cluster of fakes, and the log of all that happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.workshop = Workshop(self.log)
        self.directory = FakeDirectory(self.log)
        self._clusters: list[Cluster] = []
        monkeypatch.setattr(module, "WorkerProcess", self.workshop)
        monkeypatch.setattr(module, "bind_tcp", lambda key, _bind: FakeSocket(key, self.log))

    def make(self, **tables: Any) -> Cluster:
        tables.setdefault("cluster", {}).setdefault("forwarders", 2)
        cluster = Cluster(make_config(**tables), self.directory, KEY)  # type: ignore[arg-type]
        self._clusters.append(cluster)
        return cluster

    async def started(self, nursery: trio.Nursery, **tables: Any) -> Cluster:
        cluster = self.make(**tables)
        ready = trio.Event()
        nursery.start_soon(cluster.run, ready)
        await ready.wait()
        return cluster

    def events(self, what: Any) -> list[str]:
        return [name for name, event in self.log if event == what]

    def close(self) -> None:
        for cluster in self._clusters:
            cluster.close()


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    setup = Setup(monkeypatch)
    yield setup
    setup.close()


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


async def test_the_order_of_the_start(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    assert setup.events(Method.START)[:2] == ["auth-0", "lookup-0"]
    assert sorted(setup.events(Method.START)[2:]) == ["forwarder-0", "forwarder-1"]
    names = [f"{name} {event}" for name, event in setup.log if event in {"spawn", "listen", Method.START}]
    assert names.index("lookup-0 spawn") > names.index(f"auth-0 {Method.START}")
    listen = names.index("listener[0].bind listen")
    assert names.index(f"lookup-0 {Method.START}") < listen < names.index("forwarder-0 spawn")
    assert {slot.state for slot in cluster.slots} == {SlotState.RUNNING}
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


async def test_what_each_role_is_given(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    given = {worker.name: what for worker, what in zip(setup.workshop.workers, setup.workshop.given, strict=True)}
    assert given["auth-0"] == {"service": setup.directory.sockets["auth-0.sock"].fileno()}
    assert given["lookup-0"] == {"service": setup.directory.sockets["lookup-0.sock"].fileno()}
    assert given["forwarder-0"]["listeners"] == [listener.fileno() for listener in cluster.listeners]
    assert given["forwarder-0"]["connections"] >= 0
    assert "service" not in given["forwarder-0"]
    nursery.cancel_scope.cancel()


async def test_forwarders_never_get_the_seal_key(setup: Setup, nursery: trio.Nursery) -> None:
    """Security: who reads what strangers send must not be able to mint a principal."""
    await setup.started(nursery)
    keys = {worker.name: start_request(worker).seal_key for worker in setup.workshop.workers}
    assert keys == {"auth-0": KEY, "lookup-0": KEY, "forwarder-0": b"", "forwarder-1": b""}
    nursery.cancel_scope.cancel()


async def test_everybody_knows_everybody(setup: Setup, nursery: trio.Nursery) -> None:
    await setup.started(nursery)
    everybody = {(worker.pid, worker.role.value) for worker in setup.workshop.workers}
    for role in (Role.AUTH, Role.LOOKUP):
        [worker] = setup.workshop.of(role)
        requests = [request for method, request in worker.calls if method in {Method.START, Method.SET_PEERS}]
        assert {(peer.pid, peer.role) for peer in requests[-1].peers} == everybody
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
    assert lookup.pid not in pids, "a process id may be somebody else's next"
    assert start_request(new).seal_key == KEY
    assert cluster.registry.get_sample_value("pulsar_proxy_worker_restarts_total", {"of": "lookup"}) == 1
    nursery.cancel_scope.cancel()


async def test_the_clients_of_a_dead_forwarder_count_no_more(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.started(nursery)
    [descriptor] = {given["connections"] for given in setup.workshop.given if "connections" in given}
    counters = ConnectionCounters(descriptor)
    counters.set(0, 5)
    counters.set(1, 7)
    next(worker for worker in setup.workshop.of(Role.FORWARDER) if worker.index == 0).end(1)
    await trio.testing.wait_all_tasks_blocked()
    assert counters.total() == 7
    nursery.cancel_scope.cancel()


# ---- reload


async def test_reload_tells_everybody_in_order(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    config = make_config(cluster={"forwarders": 2}, limits={"max_connections": 5})
    await cluster.reload(config)
    told = setup.events(Method.CONFIGURE)
    assert (told[0], told[1], sorted(told[2:])) == ("auth-0", "lookup-0", ["forwarder-0", "forwarder-1"])
    assert all(config_of(worker) == config for worker in setup.workshop.workers)
    assert cluster.config == config
    nursery.cancel_scope.cancel()


async def test_a_reload_that_needs_a_restart_is_refused(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    before = cluster.config
    with pytest.raises(ReloadRefused, match="a restart is needed to change: cluster, admin"):
        await cluster.reload(make_config(cluster={"forwarders": 3}, admin={"bind": "127.0.0.1:1"}))
    assert cluster.config is before
    assert setup.events(Method.CONFIGURE) == []
    nursery.cancel_scope.cancel()


async def test_all_or_nobody(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery)
    before = cluster.config
    [lookup] = setup.workshop.of(Role.LOOKUP)
    [auth] = setup.workshop.of(Role.AUTH)
    lookup.answers[Method.CONFIGURE] = lambda _request: RpcCallRefused(3, "unlucky")
    with pytest.raises(ReloadRefused, match=r"the lookup worker with pid .* refused it: INVALID_REQUEST: unlucky"):
        await cluster.reload(make_config(cluster={"forwarders": 2}, limits={"max_connections": 13}))
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
        await cluster.reload(make_config(cluster={"forwarders": 2}, limits={"max_connections": 13}))
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
    config = make_config(cluster={"forwarders": 2}, limits={"max_connections": 5})
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
    config = make_config(cluster={"forwarders": 2}, limits={"max_connections": 5})
    await cluster.reload(config)
    setup.workshop.of(Role.LOOKUP)[0].end(1)
    await trio.sleep(1)
    assert config_of(setup.workshop.of(Role.LOOKUP)[-1]) == config
    nursery.cancel_scope.cancel()


# ---- drain


async def test_the_order_of_the_drain(setup: Setup, nursery: trio.Nursery) -> None:
    cluster = await setup.started(nursery, limits={"drain_timeout_ms": 4000})
    gate = trio.Event()
    for forwarder in setup.workshop.of(Role.FORWARDER):
        forwarder.answers[Method.DRAIN] = lambda _request: gate.wait()
    nursery.start_soon(cluster.drain)
    await trio.testing.wait_all_tasks_blocked()
    assert cluster.draining
    assert all(listener.closed for listener in cluster.listeners)  # type: ignore[attr-defined]
    assert sorted(setup.events(Method.DRAIN)) == ["forwarder-0", "forwarder-1"], "both at a time, and nobody else yet"
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
    cluster.stop_at_once()
    assert {worker.code for worker in setup.workshop.workers} == {-9}
    nursery.cancel_scope.cancel()


async def test_close(setup: Setup) -> None:
    cluster = setup.make()
    cluster.close()
    assert all(listener.closed for listener in cluster.listeners)  # type: ignore[attr-defined]
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
    new = make_config(cluster={"forwarders": 2}, brokers={"allowed_ports": [7000]})
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
    new = make_config(cluster={"forwarders": 2}, brokers={"allowed_ports": [7000]})
    with pytest.raises(ReloadRefused):
        await cluster.reload(new)
    assert lookup.code == -9
    assert config_of(setup.workshop.of(Role.AUTH)[0]) == cluster.config
    assert cluster.config != new
    nursery.cancel_scope.cancel()
