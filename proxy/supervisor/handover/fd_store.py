"""The fd store: copies of each relay's sockets and of the pipes, for a forwarder's successor.

One FdStoreSlot belongs to one forwarder slot of the cluster. A running forwarder sends over its channel what to store
and what to drop. After its end, its channel is read to the end, and its successor gets all that is stored. The fd store
only holds the sockets: it never reads from or writes to them.

The last message of a replaced forwarder names the relays that cannot move. Its successor gets their ids, and a message
once the process has ended: until then the old forwarder goes on counting in the slot's relay table.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio
from google.protobuf.message import DecodeError

from proto.rpc_pb2 import RelayLeftBehind, StoredPipe, StoredRelay, StoreMessage
from proxy.common.logs import get_logger
from proxy.runtime.shared.fd_store_channel import (
    CLIENT_IP_CHARACTERS_MAX,
    DESCRIPTORS_MAX,
    LEFT_BEHIND_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    StoreChannel,
    StoreLost,
    close_descriptors,
)
from proxy.runtime.shared.relay_table import RELAYS_MAX, create_table, upgrade_table
from proxy.supervisor.handover.address_tables import AddressTableChannel

PIPES_MAX = 2 * RELAYS_MAX + 1024
"""One for each direction, and spare ones that a forwarder has open."""

RECORDS_BYTES_MAX = 1024 * RELAYS_MAX
"""Bound on the records of all relays of one forwarder together. Usual records take a few hundred bytes; a compromised
forwarder could otherwise fill the supervisor's memory with its longest ones.
"""

GATHER_S = 0.02
"""How long messages are gathered, which are safe in the kernel: in a storm, one wake-up serves many."""

RECORD_BYTES_OVERHEAD = 16
"""Bytes that a record takes in a message beside its own, at most."""


class Journal(Protocol):
    """Where all that is stored is kept beyond this process (proxy.supervisor.handover.unit_store).

    ``relays_lost``: how many relays are stored here alone, since there was no room.
    """

    relays_lost: int

    async def begin(self, stored: "FdStoreSlot", channel: StoreChannel, *, is_new: bool) -> None:
        """Keep all that is stored, and the channel of the forwarder that runs from now on."""
        ...

    def append_now(self, message: StoreMessage, descriptors: Sequence[int]) -> None:
        """Keep a message without waiting; where it cannot be kept, ``tend`` makes it good."""
        ...

    async def tend(self, stored: "FdStoreSlot") -> None:
        """Do what ``append_now`` left to do, once its message is stored."""
        ...

    async def close(self) -> None:
        """Drop all that is kept."""
        ...


ListenerFds = Callable[[], Sequence[int]]
"""Returns the descriptors of the clients' listeners at the moment of sending: a drain closes them, and then the kernel
may give their numbers to other files.
"""


@dataclass(frozen=True, slots=True)
class StoredFds:
    """Two descriptors and their record: a serialized StoredRelay or StoredPipe."""

    record: bytes
    first: int
    second: int

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.first)
        os.close(self.second)


def _log_channel_lost(error: Exception) -> None:
    get_logger().error(
        "lost a forwarder's channel to the fd store; ending it", reason=str(error) or type(error).__name__
    )


@dataclass(slots=True)
class FdStoreSlot:
    """Table, sockets and pipes that are stored for one forwarder slot."""

    table_fd: int = field(default_factory=create_table)
    relays: dict[int, StoredFds] = field(default_factory=dict)
    pipes: dict[int, StoredFds] = field(default_factory=dict)
    left_behind: dict[int, dict[int, str]] = field(default_factory=dict)
    """Relays that stay in a replaced forwarder, by its process id: ids and clients' IP addresses."""
    journal: Journal | None = field(default=None, init=False)
    _channel: StoreChannel | None = field(default=None, init=False)
    """The channel of the running forwarder, which gets a message when a predecessor has ended."""
    _in_use: trio.Lock = field(default_factory=trio.Lock)
    _record_bytes: int = field(default=0, init=False)
    _forwarder: str = field(default="", init=False)
    _descriptors_max: int = field(default=sys.maxsize, init=False)
    _logged: set[str] = field(default_factory=set, init=False)
    """The events that the present forwarder has caused."""

    def __post_init__(self) -> None:
        self._record_bytes = sum(len(stored.record) for stored in self.relays.values())

    def limit_descriptors(self, forwarder: str, descriptors_max: int) -> None:
        """Store no more than ``descriptors_max`` of the slot's forwarder, which has this name in the log.

        What an earlier program has stored stays.
        """
        self._forwarder, self._descriptors_max = forwarder, descriptors_max

    async def serve_forwarder(
        self,
        channel: StoreChannel,
        listeners: ListenerFds,
        *,
        pid: int,
        is_new: bool,
        tables: AddressTableChannel,
        stores_relays: bool = True,
    ) -> bool:
        """Serve a forwarder until its channel has ended; return True if it ended in order.

        A new forwarder (``is_new``) first gets the clients' listeners and what its predecessor left. One forwarder at a
        time: a successor waits here until its predecessor's channel was read to the end. ``stores_relays``: whether
        sockets and pipes are stored (``relay.crash_safe``).
        """
        async with self._in_use:
            self._logged.clear()
            with contextlib.closing(channel):
                try:
                    self._channel = channel
                    if self.journal is not None and stores_relays:
                        await self.journal.begin(self, channel, is_new=is_new)
                    if is_new:
                        await self.send_contents(channel, listeners())
                        tables.on_forwarder_started(channel)
                    await self.receive_messages(channel, tables, pid, stores_relays=stores_relays)
                except (StoreLost, DecodeError, OSError) as error:
                    _log_channel_lost(error)
                    return False
                finally:
                    self._channel = None
                    tables.on_channel_closed()
        return True

    async def receive_messages(
        self, channel: StoreChannel, tables: AddressTableChannel, pid: int = 0, *, stores_relays: bool = True
    ) -> None:
        """Apply a forwarder's messages until its channel has ended and was read to the end."""
        journal = self.journal if stores_relays else None
        keep = None if journal is None else journal.append_now
        while (received := await channel.receive(gather_s=GATHER_S, keep=keep)) is not None:
            message, descriptors = received
            if message.address_tables:
                tables.accept_published(descriptors)
            elif stores_relays or not descriptors:
                # Nothing may wait before: an exec could take the place of this program.
                self.apply_message(message, descriptors, pid)
                if journal is not None:
                    await journal.tend(self)
            else:
                close_descriptors(descriptors)

    async def replay(self, channel: StoreChannel) -> None:
        """Apply all that is in a queue of messages, of processes that have ended, and leave it there.

        Raises StoreLost, DecodeError, OSError.
        """
        channel.keep_queue()
        while (received := await channel.receive()) is not None:
            message, descriptors = received
            message.ClearField("left_behind")  # they have ended with their processes
            if message.address_tables:
                close_descriptors(descriptors)
            else:
                self.apply_message(message, descriptors)

    def apply_message(self, message: StoreMessage, descriptors: list[int], pid: int = 0) -> None:
        """Apply one message of a forwarder. Raises StoreLost for a message that no sound forwarder sends."""
        for relay_id in message.dropped_relays:
            self._drop_relay(relay_id)
            self._drop_left_behind(relay_id)
        for pipe_id in message.dropped_pipes:
            self._drop_pipe(pipe_id)
        if len(descriptors) != 2 * (len(message.relays) + len(message.pipes)):
            close_descriptors(descriptors)
            get_logger().error("a relay is not crash-safe: the supervisor may open no more files; raise ulimit -n")
            return
        if any(not 0 < relay.id <= RELAYS_MAX for relay in message.relays) or len(self.pipes) > PIPES_MAX:
            close_descriptors(descriptors)
            raise StoreLost("a forwarder that stores more than it can have")
        ends = zip(descriptors[::2], descriptors[1::2], strict=True)
        for relay in message.relays:
            self._store_relay(relay, *next(ends))
        for pipe in message.pipes:
            self._drop_pipe(pipe.id)
            first, second = next(ends)
            if not self._has_room():
                close_descriptors((first, second))
                continue
            # Not the message itself: it may hold unknown fields, as long as a whole packet.
            record = StoredPipe(id=pipe.id, wanted_bytes=pipe.wanted_bytes).SerializeToString()
            self.pipes[pipe.id] = StoredFds(record, first, second)
        if message.left_behind:
            self._record_left_behind(message.left_behind, pid)

    def _record_left_behind(self, relays: Iterable[RelayLeftBehind], pid: int) -> None:
        """Record the relays that stay in a replaced forwarder; each id once, which bounds their number."""
        mine = self.left_behind.setdefault(pid, {})
        for relay in relays:
            if not 0 < relay.id <= RELAYS_MAX or len(relay.client_ip) > CLIENT_IP_CHARACTERS_MAX:
                raise StoreLost("a forwarder that leaves behind what is no relay")
            self._drop_left_behind(relay.id)
            mine[relay.id] = relay.client_ip

    def _drop_left_behind(self, relay_id: int) -> None:
        for relays in self.left_behind.values():
            relays.pop(relay_id, None)

    def on_process_ended(self, pid: int) -> None:
        """Tell the running forwarder that a predecessor has ended, which no longer writes the rows of its relays."""
        if self.left_behind.pop(pid, None) is None or self._channel is None:
            return
        try:
            self._channel.send_now(StoreMessage(ended_predecessor_pids=[pid]))
        except (OSError, StoreLost) as error:  # the slot's next forwarder will see that no process has them
            get_logger().warning(
                "a forwarder was not told that its predecessor has ended; it goes on counting the predecessor's "
                "connections until it is replaced itself",
                predecessor_pid=pid,
                reason=str(error),
            )

    def _store_relay(self, relay: StoredRelay, client: int, broker: int) -> None:
        """Store one relay, unless the records of this forwarder would exceed RECORDS_BYTES_MAX."""
        self._drop_relay(relay.id)
        record = relay.SerializeToString()
        if not self._has_room():
            close_descriptors((client, broker))
            return
        too_long = len(record) > RECORD_BYTES_MAX
        if not too_long and self._record_bytes + len(record) <= RECORDS_BYTES_MAX:
            self.relays[relay.id] = StoredFds(record, client, broker)
            self._record_bytes += len(record)
            return
        close_descriptors((client, broker))
        if too_long:
            get_logger().error("a relay is not crash-safe: its record is too long", bytes=len(record))
        else:
            self._log_once(
                "relays are not crash-safe: the records of their forwarder's relays are too long together",
                bytes=self._record_bytes,
                most_bytes=RECORDS_BYTES_MAX,
            )

    def _has_room(self) -> bool:
        """Return True if two more descriptors may be stored; log the first time that they may not."""
        stored = 2 * (len(self.relays) + len(self.pipes))
        if stored + 2 <= self._descriptors_max:
            return True
        self._log_once(
            "a relay is not crash-safe: its forwarder has its part of the supervisor's open files; raise ulimit -n",
            who=self._forwarder,
            stored=stored,
            most=self._descriptors_max,
        )
        return False

    def _log_once(self, event: str, **fields: object) -> None:
        """Log an error, once for each forwarder process: each further relay would cause it again."""
        if event not in self._logged:
            self._logged.add(event)
            get_logger().error(event, **fields)

    def _drop_relay(self, relay_id: int) -> None:
        stored = self.relays.pop(relay_id, None)
        if stored is not None:
            self._record_bytes -= len(stored.record)
            stored.close()

    def _drop_pipe(self, pipe_id: int) -> None:
        stored = self.pipes.pop(pipe_id, None)
        if stored is not None:
            stored.close()

    async def send_contents(self, channel: StoreChannel, listeners: Sequence[int]) -> None:
        """Send a copy of everything to a new forwarder. Raises StoreLost where that one has ended, too."""
        self.table_fd = upgrade_table(self.table_fd)  # an upgrade may have brought it from an older program
        channel.send_now(StoreMessage(table=True, listeners=len(listeners)), (self.table_fd, *listeners))
        for message, descriptors in self.stored_messages():
            await channel.send(message, descriptors)
        for pid, behind in list(self.left_behind.items()):
            entries = [RelayLeftBehind(id=number, client_ip=ip) for number, ip in behind.items()]
            for first in range(0, len(entries), LEFT_BEHIND_PER_MESSAGE_MAX):
                part = entries[first : first + LEFT_BEHIND_PER_MESSAGE_MAX]
                await channel.send(StoreMessage(left_behind=part, predecessor_pid=pid))
        await channel.send(StoreMessage(complete=True))

    def stored_messages(self) -> Iterator[tuple[StoreMessage, list[int]]]:
        """Make the messages, with their descriptors, that store again what is stored: all pipes, then all relays."""
        for batch in batches([*self.pipes.values()]):
            yield StoreMessage(pipes=[StoredPipe.FromString(one.record) for one in batch]), _descriptors(batch)
        for batch in batches([*self.relays.values()]):
            yield StoreMessage(relays=[StoredRelay.FromString(one.record) for one in batch]), _descriptors(batch)

    def close_stored(self) -> None:
        """Close all stored sockets and pipes; the table stays."""
        for stored in (*self.relays.values(), *self.pipes.values()):
            stored.close()
        self.relays.clear()
        self.pipes.clear()
        self._record_bytes = 0


def _descriptors(batch: Iterable[StoredFds]) -> list[int]:
    return [end for stored in batch for end in (stored.first, stored.second)]


def batches(entries: Iterable[StoredFds]) -> Iterator[list[StoredFds]]:
    """Split into batches that fit into one message each."""
    batch: list[StoredFds] = []
    size = 0
    for stored in entries:
        more = len(stored.record) + RECORD_BYTES_OVERHEAD
        if batch and (2 * len(batch) + 2 > DESCRIPTORS_MAX or size + more > MESSAGE_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(stored)
        size += more
    if batch:
        yield batch
