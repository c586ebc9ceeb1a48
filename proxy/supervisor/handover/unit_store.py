"""What the unit's descriptor store at systemd keeps, so that relays outlive the supervisor.

systemd compares each descriptor with every one that it has, so it must not get those of each relay. It gets a *journal*
for each forwarder slot: Unix sockets that nobody reads. The supervisor sends on into them, with their descriptors, the
messages that forwarders send to the fd store; they stay in the sockets' queues, in the kernel. The next supervisor
reads the queues, by the code that reads a forwarder's channel. When a journal holds far more than there is, another
takes its place, which begins with all that is stored. Each has a number; what has a higher one is newer.

Beside it the store has, for each slot, the relay table and the supervisor's end of the running forwarder's channel,
whose messages the supervisor may not have read; and the key of sealed principals. Names in the store and the content of
the messages are a format between versions.
"""

import contextlib
import os
import re
import resource
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import trio
from google.protobuf.message import DecodeError

from proto.rpc_pb2 import StoreMessage
from proxy.common.logs import get_logger
from proxy.runtime.shared.fd_store_channel import StoreChannel, StoreLost, create_store_sockets
from proxy.runtime.shared.relay_table import IDS_USED, upgrade_table
from proxy.supervisor.handover.exec_handover import HandoverState
from proxy.supervisor.handover.fd_store import FdStoreSlot
from proxy.supervisor.startup.service_manager import ServiceManager

FORMAT = 1
"""Of all that is kept. A program discards what has another one: its relays end."""

IN_FLIGHT_MAX = 16_384
"""Descriptors in all journals together, at most: half of what the HTTP workers' limit allows this user to have on their
way through Unix sockets, beyond which no process could pass any (``proxy.runtime.process.limits``).
"""
IN_FLIGHT_PART = 4
"""And no more than this part of the supervisor's limit on open files, by the same rule."""

GARBAGE_DESCRIPTORS = 512
"""What a journal may hold of ended relays beside twice what there is, before another takes its place."""

GARBAGE_QUEUES = 8
"""How many queues a journal may have beside twice what it began with: messages that only drop have no descriptors, and
a captured forwarder could fill the store, which is the other slots' as well.
"""

RETRY_PART = 0.75
"""Of the descriptors that were stored when not all of them could be kept: how few there must be for another attempt."""

QUEUE_BYTES = 128 * 1024
"""What a queue takes before the next one is opened: well below the usual buffer (net.core.wmem_default, 208 KiB)."""

MESSAGE_BYTES_OVERHEAD = 1024
"""What the kernel adds to a message in that buffer, about."""

READ_TIMEOUT_S = 5.0
"""How long to wait for the end of a queue, which is there unless a process has outlived the supervisor."""

_NAME = re.compile(r"(state|table|journal|channel)-(\d{1,4})-(\d{1,15})")


class UnitState(msgspec.Struct, frozen=True):
    """Content of the memfd "state". Programs of two versions share it: add fields with defaults, never change one."""

    format: int
    seal_key: bytes


@dataclass(slots=True)
class UnitStore:
    """The names in the unit's store, and what is put there. Without a store, nothing is."""

    manager: ServiceManager
    names: set[str] = field(default_factory=set)

    @property
    def is_on(self) -> bool:
        """Whether the unit has a store: systemd says so from version 254 on, before the unit has to."""
        capacity = self.manager.environment.get("FDSTORE", "")
        return self.manager.is_there and capacity.isdecimal() and int(capacity) > 0

    async def keep(self, kind: str, slot: int, descriptor: int) -> str:
        """Have a descriptor kept; return its name.

        Its number is a time, so it is higher than that of any program before, also of one that has told nothing.
        """
        newest = max((_number(one) for one in self.names), default=0)
        name = f"{kind}-{slot}-{max(newest + 1, time.monotonic_ns() // 1000)}"
        self.names.add(name)
        await self.manager.notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=[descriptor])
        return name

    async def drop(self, names: Sequence[str]) -> None:
        """Have descriptors closed, the oldest first: what a journal's newer part says must not be lost before.

        A manager that takes no message is asked again the next time.
        """
        for name in sorted(names, key=_number):
            if await self.manager.notify("FDSTOREREMOVE=1", f"FDNAME={name}"):
                self.names.discard(name)

    def names_of(self, kind: str, slot: int) -> list[str]:
        """Return the names of one kind of a slot, the oldest first."""
        prefix = f"{kind}-{slot}-"
        return sorted((name for name in self.names if name.startswith(prefix)), key=_number)

    async def keep_state(self, seal_key: bytes) -> None:
        """Keep what all slots share, once."""
        if self.is_on and not self.names_of("state", 0):
            memory = os.memfd_create("unit-state")
            try:
                os.write(memory, msgspec.msgpack.encode(UnitState(FORMAT, seal_key)))
                await self.keep("state", 0, memory)
            finally:
                os.close(memory)

    def journal(self, slot: int, slots: int) -> "SlotJournal":
        """Return the journal of one of so many forwarder slots."""
        limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = IN_FLIGHT_MAX if limit == resource.RLIM_INFINITY else min(IN_FLIGHT_MAX, limit // IN_FLIGHT_PART)
        return SlotJournal(self, slot, most // slots)


class SlotJournal:
    """The journal of one forwarder slot. ``descriptors_max``: what its queues may hold."""

    def __init__(self, store: UnitStore, slot: int, descriptors_max: int) -> None:
        self._store = store
        self._slot = slot
        self._descriptors_max = descriptors_max
        self._queue: StoreChannel | None = None
        self._descriptors = 0
        self._queue_bytes = 0
        self._queues = self._queues_at_first = 0
        self._is_whole = False
        """Whether all that is stored is kept, so that it is enough to keep what is new."""
        self._is_lossy = False
        """Whether there was no room for all when the journal was begun."""
        self._live_at_loss = 0
        self.relays_lost = 0
        """Relays that are not kept, or were not."""

    async def begin(self, stored: FdStoreSlot, channel: StoreChannel, *, is_new: bool) -> None:
        """Keep all that is stored, and the channel of the forwarder that runs from now on."""
        before, tables = stored.table_fd, self._store.names_of("table", self._slot)
        if is_new:
            stored.table_fd = upgrade_table(before)  # an upgrade may have brought it from an older program
        # systemd keeps no file twice: one that it has keeps its name.
        if stored.table_fd != before or not tables:
            await self._store.keep("table", self._slot, stored.table_fd)
            await self._store.drop(tables)
        await self.rewrite(stored)
        channels = self._store.names_of("channel", self._slot)
        if is_new or not channels:
            await self._store.keep("channel", self._slot, channel.sock.fileno())
            await self._store.drop(channels)

    def append_now(self, message: StoreMessage, descriptors: Sequence[int]) -> None:
        """Keep a message without waiting; where it cannot be kept, ``tend`` makes it good."""
        if message.address_tables or not (
            message.relays or message.pipes or message.dropped_relays or message.dropped_pipes
        ):
            return
        kept = StoreMessage(
            dropped_relays=message.dropped_relays,
            dropped_pipes=message.dropped_pipes,
            relays=message.relays,
            pipes=message.pipes,
        )
        if not self._send_now(kept, descriptors):
            self._is_whole = False
            self.relays_lost += len(message.relays)

    async def tend(self, stored: FdStoreSlot) -> None:
        """Do what ``append_now`` left to do, once its message is stored."""
        live = 2 * (len(stored.relays) + len(stored.pipes))
        if self._is_lossy:
            # Another attempt waits for many ends of relays, since it costs as much as all that is stored.
            if live < RETRY_PART * self._live_at_loss:
                await self.rewrite(stored)
        elif (
            not self._is_whole
            or self._descriptors > 2 * live + GARBAGE_DESCRIPTORS
            or self._queues > 2 * self._queues_at_first + GARBAGE_QUEUES
        ):
            await self.rewrite(stored)
        elif self._queue_bytes > QUEUE_BYTES:
            await self._open_queue()

    async def rewrite(self, stored: FdStoreSlot) -> None:
        """Begin another journal with all that is stored, then drop the one before."""
        before = self._store.names_of("journal", self._slot)
        self._descriptors = self._queues = 0
        await self._open_queue()
        kept, self.relays_lost = True, 0
        for message, descriptors in stored.stored_messages():
            relays = len(message.relays)
            if relays:
                del message.relays[(self._descriptors_max - self._descriptors) // 2 :]  # those that do not fit
                del descriptors[2 * len(message.relays) :]
            is_sent = bool(descriptors) and await self._send(message, descriptors)
            lost = relays - (len(message.relays) if is_sent else 0)
            kept = kept and is_sent and not lost
            self.relays_lost += lost
        await self._store.drop(before)
        self._queues_at_first = self._queues
        self._is_whole, was_lossy, self._is_lossy = kept, self._is_lossy, not kept
        self._live_at_loss = 2 * (len(stored.relays) + len(stored.pipes))
        if self._is_lossy and not was_lossy:
            get_logger().error(
                "some relays would end with the supervisor: raise LimitNOFILE and FileDescriptorStoreMax",
                forwarder=self._slot,
                descriptors=self._live_at_loss,
                most=self._descriptors_max,
            )

    async def close(self) -> None:
        """Drop all that is kept of this slot."""
        self._close_queue()
        for kind in ("journal", "channel", "table"):
            await self._store.drop(self._store.names_of(kind, self._slot))

    async def _send(self, message: StoreMessage, descriptors: Sequence[int]) -> bool:
        if self._queue_bytes and self._queue_bytes + message.ByteSize() > QUEUE_BYTES:
            await self._open_queue()
        return self._send_now(message, descriptors)

    def _send_now(self, message: StoreMessage, descriptors: Sequence[int]) -> bool:
        """Put a message into the queue; return whether it is there."""
        if self._queue is None or self._descriptors + len(descriptors) > self._descriptors_max:
            return False
        try:
            self._queue.send_now(message, descriptors)
        except (StoreLost, OSError):  # it is full, systemd had no room for it, or too many are on their way
            return False
        self._descriptors += len(descriptors)
        self._queue_bytes += message.ByteSize() + MESSAGE_BYTES_OVERHEAD
        return True

    async def _open_queue(self) -> None:
        """Have systemd keep another queue.

        Where it has no room it closes it and says nothing: hence the barrier, after which the first message fails.
        """
        ours, kept = create_store_sockets()
        with kept:
            await self._store.keep("journal", self._slot, kept.fileno())
        self._close_queue()
        self._queue_bytes = 0
        self._queues += 1
        if await self._store.manager.wait_until_read():
            self._queue = StoreChannel(ours)
        else:
            ours.close()

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def restore(store: UnitStore, *, is_crash_safe: bool = True) -> HandoverState | None:
    """Return what an earlier supervisor of this unit has left, of the files that systemd has passed; None for nothing.

    What cannot be used is dropped. All else stays there until a journal of this supervisor has taken its place: it may
    be killed before, or fail to start. Without ``is_crash_safe`` it will have no journal, and nothing stays.
    """
    kept = [one for one in store.manager.passed if _NAME.fullmatch(one[0])]
    if not kept:
        return None
    store.manager.passed = [one for one in store.manager.passed if one not in kept]
    store.names.update(name for name, _ in kept)
    descriptors = dict(kept)
    state = _read_state([descriptors[name] for name in store.names_of("state", 0)])
    slots: list[FdStoreSlot] = []
    while state is not None and (tables := store.names_of("table", len(slots))):
        if not _is_table(descriptors[tables[-1]]):
            state = None
            break
        slots.append(await _restore_slot(store, len(slots), descriptors, descriptors.pop(tables[-1])))
    for descriptor in descriptors.values():
        os.close(descriptor)
    if state is None or not slots:
        get_logger().error("what systemd has kept of an earlier supervisor cannot be used; its relays end")
        for slot in slots:
            slot.close_stored()
            os.close(slot.table_fd)
        await store.drop(list(store.names))
        return None
    if not is_crash_safe:
        await store.drop(list(store.names))
    relays = sum(len(slot.relays) for slot in slots)
    get_logger().warning("an earlier supervisor has ended; its relays go on", relays=relays, forwarders=len(slots))
    return HandoverState(seal_key=state.seal_key, fd_store_slots=slots)


def _read_state(descriptors: Sequence[int]) -> UnitState | None:
    try:
        state = msgspec.msgpack.decode(os.pread(descriptors[-1], 4096, 0), type=UnitState)
    except (IndexError, OSError, msgspec.MsgspecError):
        return None
    return state if state.format == FORMAT else None


def _is_table(descriptor: int) -> bool:
    """Return whether a file can be a relay table, of this version or an older one."""
    state = os.fstat(descriptor)
    return stat.S_ISREG(state.st_mode) and state.st_size >= (IDS_USED + 1) * 8


async def _restore_slot(store: UnitStore, slot: int, descriptors: dict[str, int], table: int) -> FdStoreSlot:
    stored = FdStoreSlot(table)
    for name in (*store.names_of("journal", slot), *store.names_of("channel", slot)):
        try:
            sock = socket.socket(fileno=descriptors[name])
            del descriptors[name]  # it is the socket's now
            sock.setblocking(False)
            with contextlib.closing(StoreChannel(sock)) as channel, trio.fail_after(READ_TIMEOUT_S):
                await stored.replay(channel)
        except (StoreLost, DecodeError, OSError, trio.TooSlowError) as error:
            get_logger().error("a part of what systemd has kept cannot be read", name=name, reason=str(error))
    return stored
