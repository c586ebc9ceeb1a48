"""proxy.runtime.rpc.pool: each call goes to the least busy worker."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from runtime_fakes import FRAME_BYTES_MAX, MakeWires, ask

from proto.rpc_pb2 import Method
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcDeadlineExceeded
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.pool import RpcPool

# ---- pools


async def test_a_pool_gives_the_least_busy_worker(wires: MakeWires, nursery: trio.Nursery) -> None:
    gate = trio.Event()

    async def gated(data: bytes, _caller: Caller) -> bytes:
        await gate.wait()
        return data

    lines = wires({Method.ENVELOPE: gated})
    clients = [RpcClient(lines.connect, max_frame_bytes=FRAME_BYTES_MAX) for _ in range(2)]
    pool = RpcPool(clients)
    nursery.start_soon(pool.run)
    assert {pool.pick_client(), pool.pick_client()} == set(clients), "in turn where they are equally busy"
    busy = pool.pick_client()
    nursery.start_soon(ask, busy)
    await trio.testing.wait_all_tasks_blocked()
    assert all(pool.pick_client() is not busy for _ in range(4))
    gate.set()


async def test_a_worker_that_let_a_deadline_pass_is_passed_over(
    wires: MakeWires, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    gate = trio.Event()

    async def hangs(_data: bytes, _caller: Caller) -> bytes:
        with trio.CancelScope(shield=True):
            await gate.wait()
        return b""

    hanging = RpcClient(wires({Method.ENVELOPE: hangs}).connect, max_frame_bytes=FRAME_BYTES_MAX)
    well = RpcClient(wires().connect, max_frame_bytes=FRAME_BYTES_MAX)
    pool = RpcPool([hanging, well])
    nursery.start_soon(pool.run)
    with pytest.raises(RpcDeadlineExceeded):
        await ask(hanging, timeout_s=1)
    assert {pool.pick_client() for _ in range(4)} == {well}
    gate.set()
    await trio.sleep(1)  # its late answer shows that it is there again
    assert {pool.pick_client() for _ in range(4)} == {hanging, well}


async def test_a_connected_worker_gets_a_single_call_until_it_has_answered(
    wires: MakeWires, nursery: trio.Nursery
) -> None:
    """The supervisor owns the socket, so a connection alone does not show that the worker runs."""
    gate = trio.Event()

    async def starting(data: bytes, _caller: Caller) -> bytes:
        await gate.wait()
        return data

    late = RpcClient(wires({Method.ENVELOPE: starting}).connect, max_frame_bytes=FRAME_BYTES_MAX)
    well = RpcClient(wires().connect, max_frame_bytes=FRAME_BYTES_MAX)
    pool = RpcPool([late, well])
    nursery.start_soon(pool.run)
    await ask(well)
    nursery.start_soon(ask, late)
    await trio.testing.wait_all_tasks_blocked()
    assert {pool.pick_client() for _ in range(4)} == {well}
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert {pool.pick_client() for _ in range(4)} == {late, well}


async def test_where_all_let_a_deadline_pass_all_are_asked(wires: MakeWires) -> None:
    clients = [RpcClient(wires().connect, max_frame_bytes=FRAME_BYTES_MAX) for _ in range(2)]
    for client in clients:
        client.suspect = True
    pool = RpcPool(clients)
    assert {pool.pick_client(), pool.pick_client()} == set(clients)


async def test_a_worker_that_was_replaced_is_not_passed_over_for_ever(
    wires: MakeWires, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A call that waited in vain for a worker's successor says nothing about the successor."""
    restarting = wires()
    restarting.refusals = 8
    late = RpcClient(restarting.connect, max_frame_bytes=FRAME_BYTES_MAX)
    pool = RpcPool([late, RpcClient(wires().connect, max_frame_bytes=FRAME_BYTES_MAX)])
    nursery.start_soon(pool.run)
    with pytest.raises(RpcDeadlineExceeded):
        await ask(late, timeout_s=1)
    await trio.sleep(60)
    assert len(restarting.connections) == 1
    assert late in {pool.pick_client() for _ in range(4)}
