"""proxy.supervisor.handover.fd_store: what a forwarder leaves to its successor, over real lines and with real
descriptors."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import make_config, no_listeners, same_file

from proto.rpc_pb2 import RelayLeftBehind, StoredPipe, StoredRelay, StoreMessage
from proxy.runtime.shared.fd_store_channel import (
    DESCRIPTORS_MAX,
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    StoreChannel,
    StoreLost,
    close_descriptors,
    create_store_sockets,
)
from proxy.runtime.shared.relay_table import RELAYS_MAX, RelayTable, row
from proxy.supervisor.handover import fd_store as module
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot, ListenerFds, StoredFds, batches
from proxy.supervisor.startup.open_files import stored_descriptors_max, supervisor_reserve

NO_TABLES = AddressTableExchange().open_channel(0)
PID = 4711


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Store:
    """A slot of the fd store, forwarders' channels to it, and the two sockets that every relay has here."""

    def __init__(self) -> None:
        self.store_slot = FdStoreSlot()
        self.client, self.broker = socket.socketpair()
        self.reading, self.writing = os.pipe()
        self.before = open_files()
        self._lines: list[StoreChannel] = []

    def line(self) -> tuple[StoreChannel, StoreChannel]:
        """The store's end, and the forwarder's."""
        ours, theirs = create_store_sockets()
        ends = StoreChannel(ours), StoreChannel(theirs)
        self._lines += ends
        return ends

    async def send(self, line: StoreChannel, *ids: int, **fields: Any) -> None:
        """A forwarder has relays."""
        for number in ids:
            relay = StoredRelay(id=number, **fields)
            await line.send(StoreMessage(relays=[relay]), (self.client.fileno(), self.broker.fileno()))

    async def say_pipes(self, line: StoreChannel, *ids: int) -> None:
        for number in ids:
            pipe = StoredPipe(id=number, wanted_bytes=4096)
            await line.send(StoreMessage(pipes=[pipe]), (self.reading, self.writing))

    async def told(self, *messages: StoreMessage) -> None:
        """Serve a forwarder that says this, and ends."""
        ours, theirs = self.line()
        for message in messages:
            ends = [self.client.fileno(), self.broker.fileno()] * len(message.relays)
            ends += [self.reading, self.writing] * len(message.pipes)
            await theirs.send(message, ends)
        theirs.close()
        await self.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)

    @property
    def kept(self) -> int:
        """How many descriptors are open more than at first."""
        return open_files() - self.before

    def close(self) -> None:
        self.store_slot.close_stored()
        for line in self._lines:
            line.sock.close()
        close_descriptors((self.store_slot.table_fd, self.reading, self.writing))
        self.client.close()
        self.broker.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    await trio.lowlevel.checkpoint()
    gc.disable()  # what earlier tests left must not be closed in the middle
    try:
        before = open_files()
        store = Store()
        yield store
        store.close()
        assert open_files() == before, "nothing is left open"
    finally:
        gc.enable()


async def inherit(line: StoreChannel) -> list[tuple[StoreMessage, list[int]]]:
    """All that a new forwarder gets; only the descriptors of the first message stay open."""
    got: list[tuple[StoreMessage, list[int]]] = []
    while not (got and got[-1][0].complete):
        received = await line.receive()
        assert received is not None
        if got:
            close_descriptors(received[1])
        got.append(received)
    return got


def relay_ids(got: list[tuple[StoreMessage, list[int]]]) -> list[int]:
    return [relay.id for message, _descriptors in got for relay in message.relays]


# ---- a forwarder's messages


async def test_stored_relays_and_pipes_are_kept_with_their_descriptors(store: Store) -> None:
    about = StoredRelay(id=7, client_address="1.2.3.4:5", principal="p", target="b:6650", expires_at_unix_ms=9)
    await store.told(StoreMessage(relays=[about]), StoreMessage(pipes=[StoredPipe(id=3, wanted_bytes=4096)]))
    [(number, kept)] = store.store_slot.relays.items()
    assert (number, StoredRelay.FromString(kept.record)) == (7, about)
    assert same_file(kept.first, store.client.fileno())
    assert same_file(kept.second, store.broker.fileno())
    assert not os.get_inheritable(kept.first), "no process that is started by chance may have it"
    [(pipe_number, pipe)] = store.store_slot.pipes.items()
    assert (pipe_number, StoredPipe.FromString(pipe.record).wanted_bytes) == (3, 4096)
    os.write(pipe.second, b"bytes")
    assert os.read(store.reading, 10) == b"bytes"
    assert store.kept == 4


async def test_dropped_relays_and_pipes_are_removed_and_closed(store: Store) -> None:
    await store.told(
        StoreMessage(relays=[StoredRelay(id=1), StoredRelay(id=2)], pipes=[StoredPipe(id=1), StoredPipe(id=2)]),
        StoreMessage(dropped_relays=[1], dropped_pipes=[2]),
    )
    assert (list(store.store_slot.relays), list(store.store_slot.pipes)) == ([2], [1])
    assert store.kept == 4, "what is dropped is closed"


async def test_dropping_an_unknown_relay_or_pipe_changes_nothing(store: Store) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1)]), StoreMessage(dropped_relays=[5, 5], dropped_pipes=[6]))
    assert list(store.store_slot.relays) == [1]


async def test_an_id_that_is_used_again(store: Store) -> None:
    """Whether its relay was dropped before, in the same breath, or not at all."""
    for dropped in ([], [1]):
        await store.told(
            StoreMessage(relays=[StoredRelay(id=1, target="old")], pipes=[StoredPipe(id=1, wanted_bytes=1)]),
            StoreMessage(dropped_relays=dropped, relays=[StoredRelay(id=1, target="new")]),
            StoreMessage(dropped_pipes=dropped, pipes=[StoredPipe(id=1, wanted_bytes=2)]),
        )
        assert [StoredRelay.FromString(kept.record).target for kept in store.store_slot.relays.values()] == ["new"]
        assert [StoredPipe.FromString(kept.record).wanted_bytes for kept in store.store_slot.pipes.values()] == [2]
        assert store.kept == 4


async def test_the_sockets_stay_open_after_the_forwarder_died(store: Store) -> None:
    client, peer = socket.socketpair()
    ours, theirs = store.line()
    await theirs.send(StoreMessage(relays=[StoredRelay(id=1)]), (client.fileno(), client.fileno()))
    client.close()
    theirs.close()
    await store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    store.store_slot.close_stored()
    assert peer.recv(1) == b""
    peer.close()


async def test_a_relay_whose_descriptors_did_not_arrive(store: Store) -> None:
    """The supervisor may open no more files: that relay is not safe, and all others are as before."""
    ours, theirs = store.line()
    await store.send(theirs, 1)
    message = StoreMessage(relays=[StoredRelay(id=1, target="new"), StoredRelay(id=2)], dropped_pipes=[4])
    await store.say_pipes(theirs, 4)
    rights = array.array("i", [store.client.fileno(), store.broker.fileno(), store.client.fileno()])
    theirs.sock.sendmsg([message.SerializeToString()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    await store.send(theirs, 3)
    theirs.close()
    with structlog.testing.capture_logs() as logs:
        await store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    assert [StoredRelay.FromString(kept.record).target for kept in store.store_slot.relays.values()] == ["", ""]
    assert sorted(store.store_slot.relays) == [1, 3]
    assert not store.store_slot.pipes, "what it says beside is done"
    assert store.kept == 4, "what did arrive is closed"
    [entry] = logs
    assert (entry["log_level"], "ulimit" in entry["event"]) == ("error", True)


async def test_clear(store: Store) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1), StoredRelay(id=2)], pipes=[StoredPipe(id=1)]))
    assert store.kept == 6
    store.store_slot.close_stored()
    assert store.kept == 0
    assert not store.store_slot.relays
    assert not store.store_slot.pipes
    os.fstat(store.store_slot.table_fd)  # stays


async def test_the_line_is_closed_in_the_end(store: Store) -> None:
    ours, theirs = store.line()
    theirs.close()
    await store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    assert ours.sock.fileno() == -1


def junk(bytes_: int) -> bytes:
    """A field that no message knows: number 15, as long as wanted."""
    length = bytes([bytes_ & 0x7F | 0x80, bytes_ >> 7 & 0x7F | 0x80, bytes_ >> 14])
    return b"\x7a" + length + bytes(bytes_)


async def test_of_a_pipe_only_what_is_known_is_kept(store: Store) -> None:
    """Security: a forwarder may say it of hundreds of thousands."""
    about = StoredPipe(id=3, wanted_bytes=4096)
    padded = StoredPipe.FromString(about.SerializeToString() + junk(150_000))
    assert len(padded.SerializeToString()) > 150_000
    await store.told(StoreMessage(pipes=[padded]))
    assert store.store_slot.pipes[3].record == about.SerializeToString()


async def test_all_records_together_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: a forwarder that was taken over fills the supervisor with nothing."""
    monkeypatch.setattr(module, "RECORDS_BYTES_MAX", 10_000)
    long = [StoreMessage(relays=[StoredRelay(id=number, target="t" * 4000)]) for number in (1, 2, 3, 4)]
    with structlog.testing.capture_logs() as logs:
        await store.told(*long)
    assert list(store.store_slot.relays) == [1, 2]
    assert store.kept == 4, "the others are closed"
    assert [entry["event"].partition(":")[0] for entry in logs] == ["relays are not crash-safe"], "said once"
    await store.told(long[1], long[1], StoreMessage(dropped_relays=[1], relays=[StoredRelay(id=3, target="t" * 4000)]))
    assert list(store.store_slot.relays) == [2, 3], "what is dropped or said again makes room"
    inherited = FdStoreSlot(store.store_slot.table_fd, store.store_slot.relays)
    ends = os.dup(store.reading), os.dup(store.reading)
    with structlog.testing.capture_logs():
        inherited.apply_message(long[3], list(ends))
    assert list(inherited.relays) == [2, 3], "an upgrade does not forget what there is"
    store.store_slot.close_stored()
    await store.told(*long[:2])
    assert list(store.store_slot.relays) == [1, 2]


async def test_a_forwarder_takes_no_descriptor_of_the_supervisors_reserve_or_of_another_forwarder(store: Store) -> None:
    """Security: with as many relays and pipes as it can name. All that the supervisor has to open, it can open."""
    config = make_config(cluster={"forwarders": 2})
    reserve = supervisor_reserve(config, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    orderly, opened = FdStoreSlot(), []
    lines = store.line(), store.line()
    before = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reserve + 400, hard))
        for index, one in enumerate((store.store_slot, orderly)):
            one.limit_descriptors(f"forwarder-{index}", stored_descriptors_max(config, 2))
        # As in a supervisor that has nothing else open: other tests have left descriptors in this process.
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + reserve + 400, hard))
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                serve = partial(store.store_slot.receive_messages, lines[0][0], NO_TABLES)
                nursery.start_soon(serve)
                for first in range(1, 1000, 100):
                    ids = range(first, first + 100)
                    await lines[0][1].send(
                        StoreMessage(relays=[StoredRelay(id=one) for one in ids]),
                        [store.client.fileno(), store.broker.fileno()] * 100,
                    )
                    await lines[0][1].send(
                        StoreMessage(pipes=[StoredPipe(id=one) for one in ids]), [store.reading, store.writing] * 100
                    )
                lines[0][1].close()
            assert len(store.store_slot.relays) == 100
            assert not store.store_slot.pipes
            serve = partial(orderly.receive_messages, lines[1][0], NO_TABLES)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                await store.send(lines[1][1], *range(1, 101))
                lines[1][1].close()
        assert sorted(orderly.relays) == list(range(1, 101)), "each has an equal part"
        opened += [os.dup(0) for _ in range(reserve)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_descriptors(opened)
        orderly.close_stored()
        os.close(orderly.table_fd)
    [entry] = logs
    assert (entry["who"], entry["stored"], entry["most"]) == ("forwarder-0", 200, 200)


async def test_replaced_and_dropped_entries_free_descriptors_for_others(store: Store) -> None:
    store.store_slot.limit_descriptors("forwarder-0", 4)
    with structlog.testing.capture_logs() as logs:
        await store.told(
            StoreMessage(relays=[StoredRelay(id=1), StoredRelay(id=1), StoredRelay(id=2)]),
            StoreMessage(dropped_relays=[1], pipes=[StoredPipe(id=1), StoredPipe(id=1)]),
        )
        assert not logs
        await store.told(StoreMessage(pipes=[StoredPipe(id=2), StoredPipe(id=3)]))
        await store.told(StoreMessage(relays=[StoredRelay(id=3)]))
    assert (list(store.store_slot.relays), list(store.store_slot.pipes)) == ([2], [1])
    assert store.kept == 4
    assert len(logs) == 2, "once for each forwarder"


# ---- the successor's share


async def test_the_very_first_gets_a_table_and_nothing_else(store: Store, nursery: trio.Nursery) -> None:
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    (first, [descriptor]), (last, nothing) = await inherit(theirs)
    assert (first.table, first.complete, last) == (True, False, StoreMessage(complete=True))
    assert not nothing
    table = RelayTable(store.store_slot.table_fd)
    table.cells[row(5, 0)] = 77
    assert RelayTable(descriptor).cells[row(5, 0)] == 77, "the same memory for all forwarders of a place"
    os.close(descriptor)
    theirs.close()


async def keep_no_relays(store: Store, channel: StoreChannel, listeners: ListenerFds, **what: Any) -> bool:
    """relay.crash_safe = false."""
    return await store.store_slot.serve_forwarder(channel, listeners, stores_relays=False, **what)


async def test_a_new_one_gets_its_clients_listeners(store: Store, nursery: trio.Nursery) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1)]))
    listeners = [store.client.fileno(), store.reading]
    for keeps in (True, False):
        serve = partial(store.store_slot.serve_forwarder, stores_relays=keeps)
        ours, theirs = store.line()
        nursery.start_soon(
            lambda serve=serve, ours=ours: serve(ours, lambda: listeners, is_new=True, pid=PID, tables=NO_TABLES)
        )  # type: ignore[misc]
        got = await inherit(theirs)
        (first, descriptors), last = got[0], got[-1][0]
        assert (first.listeners, first.table) == (2, True)
        assert (last.complete, relay_ids(got)) == (True, [1])
        assert len(descriptors) == 2 + int(first.table)
        for ours_, theirs_ in zip(listeners, descriptors[-2:], strict=True):
            assert same_file(ours_, theirs_)
        close_descriptors(descriptors)
        theirs.close()
        await trio.testing.wait_all_tasks_blocked()


async def test_nothing_is_kept(store: Store, nursery: trio.Nursery) -> None:
    """relay.crash_safe = false: the line is for the listeners alone."""
    ended: list[bool] = []

    async def serve(line: StoreChannel, *, new: bool) -> None:
        ended.append(await keep_no_relays(store, line, lambda: [store.reading], is_new=new, pid=PID, tables=NO_TABLES))

    ours, theirs = store.line()
    nursery.start_soon(lambda: serve(ours, new=False))
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BlockingIOError):
        theirs.sock.recv(1)
    assert ended == []
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert (ended, ours.sock.fileno()) == ([True], -1)
    ours, theirs = store.line()
    theirs.close()
    with structlog.testing.capture_logs() as logs:
        await serve(ours, new=True)
    assert (ended, ours.sock.fileno(), len(logs)) == ([True, False], -1, 1)


# ---- relays that cannot move


def behind(*ids: int, ip: str = "192.0.2.1") -> StoreMessage:
    return StoreMessage(left_behind=[RelayLeftBehind(id=number, client_ip=ip) for number in ids])


async def test_a_successor_is_told_what_stays_behind_and_when_that_has_ended(
    store: Store, nursery: trio.Nursery
) -> None:
    store.store_slot.apply_message(behind(*range(1, 2001)), [], 7)
    store.store_slot.apply_message(behind(2001), [], 8)
    store.store_slot.on_process_ended(99)
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    got = await inherit(theirs)
    for _message, descriptors in got:
        close_descriptors(descriptors)
    named = {(message.predecessor_pid, one.id) for message, _descriptors in got for one in message.left_behind}
    assert named == {(7, number) for number in range(1, 2001)} | {(8, 2001)}
    store.store_slot.on_process_ended(7)
    received = await theirs.receive()
    assert received is not None
    assert list(received[0].ended_predecessor_pids) == [7]
    assert store.store_slot.left_behind == {8: {2001: "192.0.2.1"}}
    await theirs.send(StoreMessage(dropped_relays=[2001]))
    await trio.testing.wait_all_tasks_blocked()
    assert store.store_slot.left_behind == {8: {}}
    theirs.close()


async def test_a_predecessor_that_ends_before_its_successor_reads(store: Store) -> None:
    store.store_slot.apply_message(behind(1), [], 7)
    store.store_slot.on_process_ended(7)
    assert store.store_slot.left_behind == {}


async def test_a_successor_that_does_not_read(store: Store, nursery: trio.Nursery) -> None:
    """Its line is full: the supervisor does not wait for it."""
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    await trio.testing.wait_all_tasks_blocked()
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send_now(StoreMessage(dropped_relays=[1]))
    store.store_slot.apply_message(behind(1), [], 7)
    with structlog.testing.capture_logs() as logs:
        store.store_slot.on_process_ended(7)
    assert [(entry["log_level"], entry["predecessor_pid"]) for entry in logs] == [("warning", 7)]
    theirs.close()


@pytest.mark.parametrize("message", [behind(0), behind(RELAYS_MAX + 1), behind(1, ip="1" * 65)])
async def test_invalid_left_behind_relays_end_the_forwarder(store: Store, message: StoreMessage) -> None:
    """Security: a forwarder that was taken over must not fill the supervisor's memory."""
    with pytest.raises(StoreLost):
        store.store_slot.apply_message(message, [], 7)


async def test_each_relay_stays_behind_once(store: Store) -> None:
    """Security: so all together are no more than there are rows."""
    for pid in (7, 8, 8, 9):
        store.store_slot.apply_message(behind(1, 2), [], pid)
    assert sum(len(relays) for relays in store.store_slot.left_behind.values()) == 2


@pytest.mark.parametrize("what", [b"\xff\xff\xff\xff", b"\x0a"])
async def test_a_forwarder_that_sends_malformed_messages_is_cut_off(store: Store, what: bytes) -> None:
    """Security: a forwarder reads what strangers send; it must not be able to end the supervisor."""
    for keeps in (True, False):
        serve = partial(store.store_slot.serve_forwarder, stores_relays=keeps)
        ours, theirs = store.line()
        theirs.sock.send(what)
        with structlog.testing.capture_logs() as logs:
            assert await serve(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES) is False
        assert [entry["log_level"] for entry in logs] == ["error"]
        assert ours.sock.fileno() == -1
        theirs.close()


async def test_a_line_that_cannot_be_written_to(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = store.line()
    with structlog.testing.capture_logs() as logs:
        assert (
            await store.store_slot.serve_forwarder(ours, lambda: [-1], is_new=True, pid=PID, tables=NO_TABLES) is False
        )  # a listener that is closed
    assert len(logs) == 1
    theirs.close()


async def test_listeners_that_are_closed_where_nothing_is_kept(store: Store) -> None:
    ours, theirs = store.line()
    with structlog.testing.capture_logs() as logs:
        assert await keep_no_relays(store, ours, lambda: [-1], is_new=True, pid=PID, tables=NO_TABLES) is False
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert ours.sock.fileno() == -1
    theirs.close()


async def test_descriptors_sent_without_crash_safe_relays_are_closed(store: Store, nursery: trio.Nursery) -> None:
    """Security: a forwarder reads what strangers send; it must not be able to use up the supervisor's descriptors."""
    ours, theirs = store.line()
    nursery.start_soon(lambda: keep_no_relays(store, ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES))
    await store.send(theirs, *range(1, 51))
    await store.say_pipes(theirs, *range(1, 51))
    await trio.testing.wait_all_tasks_blocked()
    assert store.kept == 2, "the two ends of this line"
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert store.kept == 0


async def test_whether_the_end_was_in_order(store: Store) -> None:
    ours, theirs = store.line()
    theirs.close()
    assert await store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES) is True
    ours, theirs = store.line()
    theirs.close()
    assert await store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES) is False


async def test_a_forwarder_that_is_not_new_gets_no_stored_relays(store: Store, nursery: trio.Nursery) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1)]))
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BlockingIOError):
        theirs.sock.recv(1)
    await store.send(theirs, 2)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(store.store_slot.relays) == [1, 2]
    theirs.close()


async def test_a_dead_one_is_heard_to_the_end_before_its_successor_gets_anything(
    store: Store, nursery: trio.Nursery
) -> None:
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    next_ours, next_theirs = store.line()
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(next_ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    await store.send(theirs, *range(1, 101))
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BlockingIOError):
        next_theirs.sock.recv(1)
    for number in range(101, 151):  # there is no reader while these are sent
        theirs.send_now(StoreMessage(relays=[StoredRelay(id=number)]), (store.client.fileno(), store.broker.fileno()))
    theirs.send_now(StoreMessage(dropped_relays=[1, 2, 3]))
    theirs.close()
    got = await inherit(next_theirs)
    assert relay_ids(got) == list(range(4, 151))
    os.close(got[0][1][0])
    next_theirs.close()


async def test_listeners_are_asked_for_once_the_predecessors_line_has_ended(
    store: Store, nursery: trio.Nursery
) -> None:
    """Numbers from before may be another socket's by then: a drain closes the listeners."""
    asked: list[str] = []

    def listeners(who: str) -> Sequence[int]:
        asked.append(who)
        return [store.reading]

    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(
            ours, lambda: listeners("one that is not new"), is_new=False, pid=PID, tables=NO_TABLES
        )
    )
    next_ours, next_theirs = store.line()
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(
            next_ours, lambda: listeners("its successor"), is_new=True, pid=PID, tables=NO_TABLES
        )
    )
    await store.send(theirs, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert asked == []
    theirs.close()
    got = await inherit(next_theirs)
    assert (asked, relay_ids(got)) == (["its successor"], [1])
    _table, listener = got[0][1]
    assert same_file(listener, store.reading)
    close_descriptors(got[0][1])
    next_theirs.close()


async def test_all_messages_of_a_forwarder_that_dies_with_unread_data_are_read(
    store: Store, nursery: trio.Nursery
) -> None:
    """The kernel reports the reset before the messages that the dead forwarder had sent."""
    ours, theirs = store.line()
    ended: list[bool] = []

    async def serve() -> None:
        ended.append(await store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES))

    nursery.start_soon(serve)
    await trio.testing.wait_all_tasks_blocked()  # what is handed over lies there, unread
    for number in (1, 2):
        relay = StoreMessage(relays=[StoredRelay(id=number)])
        theirs.send_now(relay, (store.client.fileno(), store.broker.fileno()))
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert (sorted(store.store_slot.relays), ended) == ([1, 2], [True])


async def test_stored_descriptors_are_handed_over_in_boundedbatches(store: Store, nursery: trio.Nursery) -> None:
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    await store.send(theirs, *range(1, 301), target="broker:6650", principal="me")
    await store.say_pipes(theirs, 5, 6)
    theirs.close()
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    sizes: list[int] = []
    kinds: list[str] = []
    relays: list[StoredRelay] = []
    while not kinds or kinds[-1] != "complete":
        received = await theirs.receive()
        assert received is not None
        message, descriptors = received
        [kind] = {field.name for field, _value in message.ListFields()} - {"listeners"}
        kinds.append(kind)
        sizes.append(len(descriptors))
        assert len(descriptors) == int(message.table) + 2 * (len(message.pipes) + len(message.relays))
        ends = (store.client.fileno(), store.broker.fileno()) if kind == "relays" else (store.reading, store.writing)
        if kind == "table":
            ends = (store.store_slot.table_fd,)  # type: ignore[assignment]
        assert all(same_file(got, ends[at % len(ends)]) for at, got in enumerate(descriptors)), kind
        close_descriptors(descriptors)
        relays += message.relays
    assert kinds == ["table", "pipes", "relays", "relays", "relays", "complete"]
    assert sizes == [1, 4, DESCRIPTORS_MAX, DESCRIPTORS_MAX, 600 - 2 * DESCRIPTORS_MAX, 0]
    assert [relay.id for relay in relays] == list(range(1, 301))
    assert {(relay.target, relay.principal) for relay in relays} == {("broker:6650", "me")}
    assert store.kept == 600 + 4 + 2, "the store still has its copies, and this line"
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()


async def test_large_records_are_bounded_by_their_bytes(store: Store, nursery: trio.Nursery) -> None:
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    principal = "p" * (RECORD_BYTES_MAX - 5)
    assert StoredRelay(id=41, principal=principal).ByteSize() == RECORD_BYTES_MAX
    await store.send(theirs, *range(1, 42), principal=principal)
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    got = await inherit(theirs)
    assert all(message.ByteSize() <= MESSAGE_BYTES_MAX for message, _descriptors in got)
    assert [[relay.id for relay in message.relays] for message, _descriptors in got] == [
        [],
        [*range(1, 20)],
        [*range(20, 39)],
        [39, 40, 41],
        [],
    ]
    os.close(got[0][1][0])
    theirs.close()


def testbatches() -> None:
    def sizes(*records: int) -> list[int]:
        return [len(batch) for batch in batches(StoredFds(b"x" * size, 0, 0) for size in records)]

    assert sizes() == []
    assert sizes(*[10] * (DESCRIPTORS_MAX // 2)) == [DESCRIPTORS_MAX // 2]
    assert sizes(*[10] * (DESCRIPTORS_MAX // 2 + 1)) == [DESCRIPTORS_MAX // 2, 1]
    assert sizes(MESSAGE_BYTES_MAX, 1, 1, MESSAGE_BYTES_MAX) == [1, 2, 1], "one that fills a message goes alone"


async def test_a_successor_that_dies_in_the_middle(store: Store, nursery: trio.Nursery) -> None:
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=False, pid=PID, tables=NO_TABLES)
    )
    await store.send(theirs, *range(1, 101), principal="p" * 8_000)
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    ended = trio.Event()

    async def serve(line: StoreChannel) -> None:
        await store.store_slot.serve_forwarder(line, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
        ended.set()

    ours, theirs = store.line()
    nursery.start_soon(serve, ours)
    await trio.testing.wait_all_tasks_blocked()
    assert not ended.is_set(), "not all of it is on its way yet"
    with structlog.testing.capture_logs() as logs:
        theirs.close()
        await ended.wait()
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert ours.sock.fileno() == -1
    assert store.kept == 200
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    got = await inherit(theirs)
    assert relay_ids(got) == list(range(1, 101)), "the next one gets everything"
    os.close(got[0][1][0])
    theirs.close()


async def test_a_successor_that_dies_before_it_read_anything(store: Store) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1)]))
    ours, theirs = store.line()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
        )
        await trio.testing.wait_all_tasks_blocked()
        theirs.close()
    assert list(store.store_slot.relays) == [1]
    assert store.kept == 2


async def test_a_successor_continues_with_the_fd_store_slot(store: Store, nursery: trio.Nursery) -> None:
    await store.told(StoreMessage(relays=[StoredRelay(id=1), StoredRelay(id=2)]))
    ours, theirs = store.line()
    nursery.start_soon(
        lambda: store.store_slot.serve_forwarder(ours, no_listeners, is_new=True, pid=PID, tables=NO_TABLES)
    )
    got = await inherit(theirs)
    os.close(got[0][1][0])
    await store.send(theirs, 3)
    await theirs.send(StoreMessage(dropped_relays=[1]))
    theirs.close()
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(store.store_slot.relays) == [2, 3]


async def test_a_record_that_is_too_long_is_not_kept(store: Store) -> None:
    """Security: a forwarder that was taken over must not fill the supervisor's memory."""
    with structlog.testing.capture_logs() as logs:
        await store.told(
            StoreMessage(relays=[StoredRelay(id=1, principal="x" * RECORD_BYTES_MAX)]),
            StoreMessage(relays=[StoredRelay(id=2)]),
        )
    assert list(store.store_slot.relays) == [2]
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert store.kept == 2
