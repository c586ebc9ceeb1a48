"""proxy.supervisor.cluster.cluster: the admin worker among the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from cluster_setup import KEY, Setup
from supervisor_fakes import FakeWorker, hang, make_config

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.config.worker_config import decode_config
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost
from proxy.supervisor.cluster.cluster import QUIESCE_TIMEOUT_S, Cluster
from proxy.supervisor.handover.exec_handover import HandoverState
from proxy.supervisor.processes.configure import ReloadRefused


class AdminSetup(Setup):
    """A cluster of fakes with an admin worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.served: list[FakeWorker] = []
        self.serve_admin = self._serve

    async def _serve(self, worker: Any) -> None:
        self.served.append(worker)
        await worker.wait()

    async def start(self, nursery: trio.Nursery, generation: int = 1) -> Cluster:
        return await self.started(
            nursery,
            HandoverState(generation=generation, seal_key=KEY),
            cluster={"forwarders": 1},
            brokers={"credentials": {"method": "token", "token": "a-secret"}},
        )


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminSetup]:
    setup = AdminSetup(monkeypatch)
    yield setup
    setup.close()


def requests(worker: FakeWorker, method: int) -> list[Any]:
    return [request for asked, request in worker.calls if asked == method]


async def test_the_admin_worker_starts_beside_the_auth_worker_and_is_served(
    setup: AdminSetup, nursery: trio.Nursery
) -> None:
    await setup.start(nursery)
    spawned = [name for name, event in setup.log if event == "spawn"]
    assert (set(spawned[:2]), spawned[2:]) == ({"admin", "auth"}, ["lookup", "forwarder"]), "beside the first"
    assert setup.served == setup.workshop.of(Role.ADMIN)
    nursery.cancel_scope.cancel()


async def test_the_cluster_is_ready_when_it_is(setup: AdminSetup, nursery: trio.Nursery) -> None:
    gate = trio.Event()

    def slow_admin(worker: FakeWorker) -> None:
        if worker.role is Role.ADMIN:
            worker.answers[Method.START] = lambda _request: gate.wait()

    setup.workshop.prepare = slow_admin
    begun = trio.Event()

    async def start() -> None:
        await setup.start(nursery)
        begun.set()

    nursery.start_soon(start)
    await trio.testing.wait_all_tasks_blocked()
    assert not begun.is_set()
    gate.set()
    await begun.wait()
    nursery.cancel_scope.cancel()


async def test_the_admin_worker_receives_no_secret(setup: AdminSetup, nursery: trio.Nursery) -> None:
    """Security: the admin worker reads what strangers send."""
    await setup.start(nursery)
    [admin], [auth] = setup.workshop.of(Role.ADMIN), setup.workshop.of(Role.AUTH)
    [told], [known] = requests(admin, Method.START), requests(auth, Method.START)
    assert (told.seal_key, known.seal_key) == (b"", KEY)
    assert b"a-secret" not in told.SerializeToString()
    assert b"a-secret" in known.config
    assert decode_config(told.config).admin.bind
    nursery.cancel_scope.cancel()


async def test_to_the_others_it_is_a_stranger(setup: AdminSetup, nursery: trio.Nursery) -> None:
    """Security: it asks only the supervisor."""
    await setup.start(nursery)
    for worker in setup.workshop.workers:
        for request in [*requests(worker, Method.START), *requests(worker, Method.SET_PEERS)]:
            assert "admin" not in {peer.role for peer in request.peers}
    nursery.cancel_scope.cancel()


async def test_a_dead_admin_worker_is_replaced_alone(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.start(nursery)
    await trio.sleep(2)
    setup.workshop.of(Role.ADMIN)[0].end(1)
    with structlog.testing.capture_logs():
        await trio.sleep(2)
    roles = sorted(worker.role.value for worker in setup.workshop.workers)
    assert roles == ["admin", "admin", "auth", "forwarder", "lookup"]
    nursery.cancel_scope.cancel()


async def test_the_admin_worker_is_stopped_last_in_a_drain(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Metrics and readiness are served until the end of the drain."""
    cluster = await setup.start(nursery)
    await cluster.drain()
    stopped = [name for name, event in setup.log if event == "stop"]
    assert stopped == ["forwarder-0", "lookup-0", "auth-0", "admin-0"]
    nursery.cancel_scope.cancel()


async def test_another_program_begins_with_another(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """It is not inherited (a program from before it would not know what it is), and is back if there is no other."""
    cluster = await setup.start(nursery)
    await trio.sleep(2)
    with structlog.testing.capture_logs() as logs:
        async with cluster.quiesced() as inherited:
            assert {one.role for one in inherited} == {"auth", "lookup", "forwarder"}
            assert "stop" in setup.workshop.of(Role.ADMIN)[0].story
        await trio.sleep(2)
    assert len(setup.workshop.of(Role.ADMIN)) == 2
    assert "a worker ended; starting another" not in {entry["event"] for entry in logs}
    nursery.cancel_scope.cancel()


async def test_workers_that_do_not_come_to_rest_are_waited_for_at_once_and_it_answers_until_then(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: captured workers cannot keep a cluster without /healthz for long, nor can it itself."""
    cluster = await setup.start(nursery)
    await trio.sleep(2)
    [admin] = setup.workshop.of(Role.ADMIN)
    seen: list[int | None] = []

    async def never(_index: int, *, timeout_s: float) -> None:
        await trio.sleep(timeout_s)
        seen.append(admin.code)

    restless = [worker for worker in setup.workshop.workers if worker is not admin]
    for worker in restless:
        monkeypatch.setattr(worker, "quiesce_and_serialize", never)
    admin.answers[Method.DRAIN] = hang
    began = trio.current_time()
    with structlog.testing.capture_logs():
        async with cluster.quiesced() as inherited:
            assert inherited == []
            assert trio.current_time() - began == pytest.approx(2 * QUIESCE_TIMEOUT_S), "for all, then for it"
            assert seen == [None, None, None]
            assert [worker.code for worker in (*restless, admin)] == [-9] * 4
    nursery.cancel_scope.cancel()


async def test_after_an_upgrade_it_is_new_and_not_replaced_once_more(setup: AdminSetup, nursery: trio.Nursery) -> None:
    cluster = await setup.start(nursery, generation=2)
    assert len(setup.workshop.of(Role.ADMIN)) == 1
    assert not cluster.replacing
    nursery.cancel_scope.cancel()


async def test_an_upgrade_goes_on_without_it(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """What the program before left must not end, or wait for ever, because the port's worker cannot start."""

    def broken_admin(worker: FakeWorker) -> None:
        if worker.role is Role.ADMIN:
            worker.answers[Method.START] = lambda _request: RpcConnectionLost("it ended")

    setup.workshop.prepare = broken_admin
    with structlog.testing.capture_logs():
        cluster = await setup.start(nursery, generation=2)
    assert not cluster.replacing
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["refuses", "hangs", "goes away"])
async def test_an_admin_worker_that_fails_a_reload_is_killed_and_replaced(
    setup: AdminSetup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    """Security: it reads what strangers send; its successor starts with the configuration of the other workers."""
    cluster = await setup.start(nursery)
    await trio.sleep(2)
    [admin] = setup.workshop.of(Role.ADMIN)
    answers = {
        "refuses": lambda _request: RpcCallRefused(3, "captured"),
        "hangs": hang,
        "goes away": lambda _request: RpcConnectionLost("it ended"),
    }
    admin.answers[Method.CONFIGURE] = answers[how]
    config = make_config(cluster={"forwarders": 1}, relay={"crash_safe": False}, limits={"max_connections": 13})
    with structlog.testing.capture_logs() as logs:
        await cluster.reload(config)
        await trio.sleep(2)
    assert cluster.config is config
    for role in (Role.AUTH, Role.LOOKUP, Role.FORWARDER):
        [worker] = setup.workshop.of(role)
        assert decode_config(requests(worker, Method.CONFIGURE)[-1].config).limits.max_connections == 13
    assert admin.code == -9
    [_, successor] = setup.workshop.of(Role.ADMIN)
    [told] = requests(successor, Method.START)
    assert decode_config(told.config).limits.max_connections == 13
    assert "a worker did not take over a configuration; ending it" in {entry["event"] for entry in logs}
    nursery.cancel_scope.cancel()


async def test_a_configuration_that_another_worker_refuses_is_not_sent_to_the_admin_worker(
    setup: AdminSetup, nursery: trio.Nursery
) -> None:
    cluster = await setup.start(nursery)
    [admin], [lookup] = setup.workshop.of(Role.ADMIN), setup.workshop.of(Role.LOOKUP)
    lookup.answers[Method.CONFIGURE] = lambda _request: RpcCallRefused(3, "unlucky")
    with pytest.raises(ReloadRefused, match="unlucky"):
        await cluster.reload(
            make_config(cluster={"forwarders": 1}, relay={"crash_safe": False}, limits={"max_connections": 13})
        )
    assert requests(admin, Method.CONFIGURE) == []
    nursery.cancel_scope.cancel()
