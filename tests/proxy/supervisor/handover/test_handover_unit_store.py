"""proxy.supervisor.handover.unit_store: what systemd keeps is enough for the next supervisor, and bounded."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import structlog.testing
import trio
from service_manager_fake import FakeManager
from supervisor_fakes import no_listeners, same_file

from proto.rpc_pb2 import StoredPipe, StoredRelay, StoreMessage
from proxy.runtime.shared.fd_store_channel import StoreChannel, create_store_sockets
from proxy.supervisor.handover import unit_store as module
from proxy.supervisor.handover.address_tables import AddressTableExchange
from proxy.supervisor.handover.exec_handover import HandoverState
from proxy.supervisor.handover.fd_store import FdStoreSlot
from proxy.supervisor.handover.unit_store import SlotJournal, UnitStore, restore

KEY = b"k" * 32
NO_TABLES = AddressTableExchange().open_channel(0)


class Unit:
    """A unit: its manager, and a supervisor with one forwarder slot."""

    def __init__(self, manager: FakeManager, nursery: trio.Nursery) -> None:
        self.manager = manager
        self._nursery = nursery
        self.ends = socket.socketpair()
        self.pipe = os.pipe()
        self.store = UnitStore(manager.client())
        self.slot = FdStoreSlot()
        self.journal = self._attach()
        self._forwarders: list[StoreChannel] = []

    def _attach(self) -> SlotJournal:
        journal = self.store.journal(0, 1)
        self.slot.journal = journal
        return journal

    async def start_forwarder(self) -> StoreChannel:
        """The forwarder's end of a channel that is served; the key is kept already."""
        await self.store.keep_state(KEY)
        ours, theirs = create_store_sockets()
        forwarder = StoreChannel(theirs)
        self._forwarders.append(forwarder)

        async def serve() -> None:
            await self.slot.serve_forwarder(StoreChannel(ours), no_listeners, pid=1, is_new=True, tables=NO_TABLES)

        self._nursery.start_soon(serve)
        while True:
            received = await forwarder.receive()
            assert received is not None
            for number in received[1]:
                os.close(number)
            if received[0].complete:
                return forwarder

    async def start_unread_forwarder(self) -> StoreChannel:
        """The forwarder's end of a channel whose other end the manager alone has."""
        ours, theirs = create_store_sockets()
        self._forwarders.append(StoreChannel(theirs))
        await self.store.keep_state(KEY)
        with ours:
            await self.journal.begin(self.slot, StoreChannel(ours), is_new=True)
        return self._forwarders[-1]

    async def send_relay(self, forwarder: StoreChannel, number: int, **more: int) -> None:
        await forwarder.send(StoreMessage(relays=[relay(number)], **more), [end.fileno() for end in self.ends])

    async def wait_for(self, *numbers: int) -> None:
        while sorted(self.slot.relays) != sorted(numbers):  # noqa: ASYNC110 -- the store tells nobody
            await trio.sleep(0.01)

    async def be_killed(self) -> HandoverState | None:
        """Nothing is told to the manager; another supervisor begins."""
        await self.manager_is_idle()
        return await restore(self.again())

    def again(self) -> UnitStore:
        """The store as the next supervisor gets it."""
        self.journal._close_queue()
        self.store = UnitStore(self.manager.client())
        return self.store

    async def manager_is_idle(self) -> None:
        assert await self.store.manager.wait_until_read()

    def close(self) -> None:
        self.journal._close_queue()
        for forwarder in self._forwarders:
            forwarder.close()
        for end in self.ends:
            end.close()
        for number in self.pipe:
            os.close(number)
        self.slot.close_stored()
        os.close(self.slot.table_fd)


def relay(number: int) -> StoredRelay:
    return StoredRelay(id=number, principal=f"alice-{number}")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    fake = FakeManager(tmp_path)
    yield fake
    fake.close()


@pytest.fixture
async def unit(manager: FakeManager, nursery: trio.Nursery) -> AsyncIterator[Unit]:
    nursery.start_soon(manager.run)
    with trio.fail_after(20):
        unit = Unit(manager, nursery)
        yield unit
    unit.close()
    nursery.cancel_scope.cancel()


def close_state(state: HandoverState) -> None:
    for slot in state.fd_store_slots:
        slot.close_stored()
        os.close(slot.table_fd)


async def test_the_next_supervisor_has_relays_pipes_table_and_key(unit: Unit) -> None:
    """Also of messages that the one before had not read."""
    forwarder = await unit.start_forwarder()
    await unit.send_relay(forwarder, 1)
    await forwarder.send(StoreMessage(pipes=[StoredPipe(id=7, wanted_bytes=4096)]), unit.pipe)
    await unit.send_relay(forwarder, 2, dropped_relays=[1])
    await unit.wait_for(2)
    unit.slot.journal = None  # from here on it is as if the supervisor did not run
    await unit.send_relay(forwarder, 3)
    os.pwrite(unit.slot.table_fd, b"12345678", 0)
    forwarder.close()
    state = await unit.be_killed()
    assert state is not None
    (slot,) = state.fd_store_slots
    assert state.seal_key == KEY
    assert os.pread(slot.table_fd, 8, 0) == b"12345678"
    assert same_file(slot.relays[2].first, unit.ends[0].fileno())
    assert same_file(slot.pipes[7].second, unit.pipe[1])
    assert StoredRelay.FromString(slot.relays[2].record) == relay(2)
    assert 1 not in slot.relays
    close_state(state)


async def test_a_message_on_its_way_is_read_by_the_next_supervisor(unit: Unit) -> None:
    forwarder = await unit.start_unread_forwarder()
    await unit.send_relay(forwarder, 5)
    forwarder.close()
    state = await unit.be_killed()
    assert state is not None
    assert list(state.fd_store_slots[0].relays) == [5]
    close_state(state)


async def test_a_kill_while_a_journal_replaces_another_loses_nothing(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens: both are read, the newer one last."""
    forwarder = await unit.start_forwarder()
    for number in (1, 2):
        await unit.send_relay(forwarder, number)
    await unit.wait_for(1, 2)

    async def drop_nothing(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(UnitStore, "drop", drop_nothing)
    await unit.journal.rewrite(unit.slot)
    await unit.send_relay(forwarder, 3, dropped_relays=[1])
    await unit.wait_for(2, 3)
    forwarder.close()
    assert len(unit.manager.names("journal")) == 2
    state = await unit.be_killed()
    assert state is not None
    assert sorted(state.fd_store_slots[0].relays) == [2, 3]
    close_state(state)


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_supervisor_that_ends_before_its_forwarders_run_leaves_all_to_the_next(
    unit: Unit, *, is_read: bool
) -> None:
    """It was killed, or its start failed: what it has read is still there, of journals and of channels."""
    forwarder = await unit.start_forwarder() if is_read else await unit.start_unread_forwarder()
    await unit.send_relay(forwarder, 1)
    await unit.send_relay(forwarder, 2, dropped_relays=[1])
    if is_read:
        await unit.wait_for(2)
    forwarder.close()
    for _ in range(3):
        state = await unit.be_killed()
        assert state is not None
        assert list(state.fd_store_slots[0].relays) == [2]
        close_state(state)


async def test_a_message_is_in_the_journal_before_it_leaves_the_channel(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it is in both places, which is as if it were in one."""
    unread: list[bytes] = []
    append_now = SlotJournal.append_now

    def append_and_look(journal: SlotJournal, message: StoreMessage, descriptors: Sequence[int]) -> None:
        append_now(journal, message, descriptors)
        number = next(number for name, number in unit.manager.kept if name.startswith("channel-"))
        with socket.socket(fileno=os.dup(number)) as sock:
            unread.append(sock.recv(10_000, socket.MSG_PEEK))

    monkeypatch.setattr(SlotJournal, "append_now", append_and_look)
    forwarder = await unit.start_forwarder()
    await unit.manager_is_idle()
    await unit.send_relay(forwarder, 2)
    await unit.wait_for(2)
    assert [StoreMessage.FromString(data).relays[0].id for data in unread] == [2]


@pytest.mark.parametrize(("kind", "left"), [("table", None), ("journal", [2])])
async def test_a_file_of_another_kind_is_no_reason_to_fail(unit: Unit, kind: str, left: list[int] | None) -> None:
    forwarder = await unit.start_unread_forwarder()
    await unit.send_relay(forwarder, 2)
    forwarder.close()
    await unit.manager_is_idle()
    for index, (name, number) in enumerate(unit.manager.kept):
        if name.startswith(kind):
            os.close(number)
            unit.manager.kept[index] = name, os.memfd_create("empty")
    state = await unit.be_killed()
    assert (None if state is None else list(state.fd_store_slots[0].relays)) == left
    if state is not None:
        close_state(state)


async def test_what_is_kept_is_bounded_however_many_relays_come_and_go(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GARBAGE_DESCRIPTORS", 20)
    monkeypatch.setattr(module, "QUEUE_BYTES", 8 * 1024)
    forwarder = await unit.start_forwarder()
    for number in range(1, 300):
        await unit.send_relay(forwarder, number, **({"dropped_relays": [number - 1]} if number > 1 else {}))  # type: ignore[arg-type]
    await unit.wait_for(299)
    await unit.manager_is_idle()
    assert len(unit.manager.names("journal")) <= 4
    assert len(unit.manager.kept) <= 8


async def test_a_captured_forwarder_cannot_fill_the_store_with_messages_that_only_drop(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 8 * 1024)
    forwarder = await unit.start_forwarder()
    for number in range(1, 500):
        await forwarder.send(StoreMessage(dropped_relays=[number]))
    await unit.send_relay(forwarder, 1)
    await unit.wait_for(1)
    await unit.manager_is_idle()
    assert len(unit.manager.names("journal")) <= module.GARBAGE_QUEUES + 3


@pytest.mark.parametrize("bound", ["descriptors", "capacity"])
async def test_relays_beyond_the_bound_are_counted_and_all_others_kept(
    unit: Unit, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    forwarder = await unit.start_forwarder()
    await unit.manager_is_idle()
    if bound == "descriptors":
        monkeypatch.setattr(unit.journal, "_descriptors_max", 4)
    else:
        unit.manager.capacity = len(unit.manager.kept)
        monkeypatch.setattr(module, "QUEUE_BYTES", 1)  # each message wants a queue of its own
    with structlog.testing.capture_logs() as logs:
        for number in range(1, 6):
            await unit.send_relay(forwarder, number)
        await unit.wait_for(1, 2, 3, 4, 5)
        await unit.manager_is_idle()
    assert unit.journal.relays_lost > 0
    assert len([entry for entry in logs if "would end with the supervisor" in entry["event"]]) == 1


async def test_another_attempt_is_made_once_many_relays_have_ended(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder = await unit.start_forwarder()
    monkeypatch.setattr(unit.journal, "_descriptors_max", 4)
    for number in range(1, 6):
        await unit.send_relay(forwarder, number)
    await unit.wait_for(1, 2, 3, 4, 5)
    await forwarder.send(StoreMessage(dropped_relays=[1, 2, 3]))
    await unit.wait_for(4, 5)
    await unit.manager_is_idle()
    forwarder.close()
    state = await unit.be_killed()
    assert state is not None
    assert sorted(state.fd_store_slots[0].relays) == [4, 5]
    close_state(state)


async def test_the_end_of_the_cluster_leaves_nothing(unit: Unit) -> None:
    forwarder = await unit.start_forwarder()
    await unit.send_relay(forwarder, 1)
    await unit.wait_for(1)
    await unit.journal.close()
    await unit.manager_is_idle()
    assert [name.split("-")[0] for name, _ in unit.manager.kept] == ["state"]


async def test_what_another_format_has_left_is_dropped(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder = await unit.start_forwarder()
    await unit.send_relay(forwarder, 1)
    await unit.wait_for(1)
    forwarder.close()
    monkeypatch.setattr(module, "FORMAT", 2)
    with structlog.testing.capture_logs() as logs:
        assert await unit.be_killed() is None
    assert "cannot be used" in logs[0]["event"]
    await unit.manager_is_idle()
    assert unit.manager.kept == []


async def test_a_supervisor_without_a_journal_leaves_nothing_of_the_one_before(unit: Unit) -> None:
    forwarder = await unit.start_unread_forwarder()
    await unit.send_relay(forwarder, 1)
    forwarder.close()
    await unit.manager_is_idle()
    state = await restore(unit.again(), is_crash_safe=False)
    assert state is not None
    assert list(state.fd_store_slots[0].relays) == [1]
    await unit.manager_is_idle()
    assert unit.manager.kept == []
    close_state(state)


async def test_what_the_manager_was_not_told_to_drop_is_dropped_later(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next supervisor would take relays that have ended for its own."""
    await unit.start_forwarder()
    await unit.manager_is_idle()
    with monkeypatch.context() as patch:
        patch.setitem(unit.store.manager.environment, "NOTIFY_SOCKET", "/nowhere")
        await unit.journal.rewrite(unit.slot)
    before = unit.manager.names("journal")
    await unit.journal.rewrite(unit.slot)
    await unit.manager_is_idle()
    assert before
    assert not {*before} & {*unit.manager.names("journal")}


async def test_nothing_is_kept_where_the_unit_has_no_store(manager: FakeManager) -> None:
    assert not UnitStore(manager.client(FDSTORE="0")).is_on
    assert UnitStore(manager.client()).is_on
    assert await restore(UnitStore(manager.client())) is None


def test_the_state_is_a_format_between_versions() -> None:
    assert msgspec.msgpack.encode(module.UnitState(1, b"k")) == b"\x82\xa6format\x01\xa8seal_key\xc4\x01k"
