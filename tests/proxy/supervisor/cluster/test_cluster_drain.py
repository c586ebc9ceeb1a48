"""proxy.supervisor.cluster.slot and cluster: a forwarder that dies in a drain has a successor, which goes on with the
drain."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from cluster_setup import Setup
from supervisor_fakes import FakeWorker, hang
from test_cluster_cluster import in_place, relay, stored
from test_cluster_slot import called

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.runtime.rpc.errors import RpcError
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.cluster.slot import SlotState
from proxy.supervisor.cluster.worker_run import DRAIN_GRACE_S

DRAIN_S = 60


async def _started(setup: Setup, nursery: trio.Nursery) -> tuple[Cluster, FakeWorker, trio.Event]:
    """A cluster of two forwarders that has drained for 20 s, its first one, which has two relays, and the event of the
    drain's end.
    """
    cluster = await setup.crash_safe(nursery, limits={"drain_timeout_ms": DRAIN_S * 1000})
    await trio.sleep(10)
    relay(in_place(cluster, Role.FORWARDER), 1, 2)
    await trio.testing.wait_all_tasks_blocked()
    prepare = setup.workshop.prepare

    def slow_to_drain(worker: FakeWorker) -> None:
        prepare(worker)
        worker.answers[Method.DRAIN] = hang

    setup.workshop.prepare = slow_to_drain
    first = in_place(cluster, Role.FORWARDER)
    for forwarder in (first, in_place(cluster, Role.FORWARDER, 1)):
        forwarder.answers[Method.DRAIN] = hang
    drained = trio.Event()

    async def drain() -> None:
        await cluster.drain()
        drained.set()

    nursery.start_soon(drain)
    await trio.sleep(20)
    return cluster, first, drained


async def test_a_forwarder_that_dies_in_the_drain_has_a_successor_for_the_rest_of_it(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster, first, drained = await _started(setup, nursery)
    began_at = trio.current_time() - 20
    first.end(-9)
    await trio.sleep(10)
    second = in_place(cluster, Role.FORWARDER)
    assert second is not first
    assert second.adopted == [1, 2]
    [request] = called(second, Method.DRAIN)
    assert request.timeout_ms == pytest.approx(1000 * (DRAIN_S - 20), abs=2000)
    assert not request.hand_over
    await drained.wait()
    assert trio.current_time() - began_at == pytest.approx(DRAIN_S + DRAIN_GRACE_S, abs=2)
    assert all(worker.code is not None for worker in setup.workshop.workers)
    nursery.cancel_scope.cancel()


async def test_the_successor_of_a_draining_forwarder_gets_no_listeners(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """It must not accept new clients."""
    cluster, first, _drained = await _started(setup, nursery)
    assert first.listeners == 1
    first.end(-9)
    await trio.sleep(5)
    second = in_place(cluster, Role.FORWARDER)
    assert (second.adopted, second.listeners) == ([1, 2], 0)
    nursery.cancel_scope.cancel()


async def test_again_and_again(setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    cluster, first, drained = await _started(setup, nursery)
    worker = first
    for _ in range(3):
        worker.end(-9)
        await trio.sleep(5)
        worker = in_place(cluster, Role.FORWARDER)
        assert worker.adopted == [1, 2]
        assert len(called(worker, Method.DRAIN)) == 1
    await drained.wait()
    nursery.cancel_scope.cancel()


async def test_a_forwarder_that_was_starting_when_the_drain_began_drains_too(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = await setup.crash_safe(nursery, limits={"drain_timeout_ms": DRAIN_S * 1000})
    await trio.sleep(10)
    relay(in_place(cluster, Role.FORWARDER), 1, 2)
    await trio.testing.wait_all_tasks_blocked()
    in_place(cluster, Role.FORWARDER).end(-9)
    await cluster.drain()
    drained = [worker for worker in setup.workshop.of(Role.FORWARDER) if worker.adopted == [1, 2]]
    assert [len(called(worker, Method.DRAIN)) for worker in drained] == [1]
    assert stored(cluster) == 0
    nursery.cancel_scope.cancel()


async def test_a_draining_forwarder_that_dies_without_relays_has_no_successor(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster, *_ = await _started(setup, nursery)
    second_place = cluster.slots_of(Role.FORWARDER)[1]
    before = len(setup.workshop.workers)
    in_place(cluster, Role.FORWARDER, 1).end(-9)
    await trio.sleep(10)
    assert len(setup.workshop.workers) == before
    assert second_place.state is SlotState.STOPPED
    nursery.cancel_scope.cancel()


async def test_successors_that_cannot_start_do_not_hold_the_drain_up(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    _cluster, first, drained = await _started(setup, nursery)
    began_at = trio.current_time() - 20
    setup.workshop.prepare = lambda worker: worker.answers.update({Method.START: lambda _request: RpcError("no")})
    first.end(-9)
    await drained.wait()
    assert trio.current_time() - began_at == pytest.approx(DRAIN_S + DRAIN_GRACE_S, abs=2)
    assert len(setup.workshop.workers) > 20, "it was tried all the time"
    nursery.cancel_scope.cancel()


async def test_all_roles_together_have_the_drains_time(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Not each of them."""
    cluster = await setup.started(nursery, limits={"drain_timeout_ms": DRAIN_S * 1000})
    for worker in setup.workshop.workers:
        worker.answers[Method.DRAIN] = hang
    began_at = trio.current_time()
    await cluster.drain()
    assert trio.current_time() - began_at == pytest.approx(DRAIN_S + 3 * DRAIN_GRACE_S, abs=1)
    nursery.cancel_scope.cancel()
