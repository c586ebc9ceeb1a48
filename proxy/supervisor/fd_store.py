"""The fd store: copies of each relay's sockets and of the pipes, for a forwarder's successor.

A shelf belongs to one forwarder's place in the cluster. While a forwarder lives, it says over its line what to keep and
what to drop; when it is gone, whatever it had said is read to the end, and the next one gets all that is kept. Nothing
here ever looks into a relay: the sockets are only held.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import trio
from google.protobuf.message import DecodeError

from proto.rpc_pb2 import StoredPipe, StoredRelay, StoreMessage
from proxy.runtime.logs import get_logger
from proxy.runtime.relay_table import RELAYS_MAX, new_table, table_of_this_form
from proxy.runtime.store_channel import (
    DESCRIPTORS_MAX,
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    StoreChannel,
    StoreLost,
    close_all,
)
from proxy.supervisor.address_tables import AddressTableLine

PIPES_MAX = 2 * RELAYS_MAX + 1024
"""One for each direction, and those in hand."""

RECORDS_BYTES_MAX = 1024 * RELAYS_MAX
"""What may be kept of all relays of one forwarder together. Usual records take a few hundred bytes; a forwarder that
was taken over could otherwise fill the supervisor with its longest ones.
"""

RECORD_BYTES_OVERHEAD = 16
"""What a record costs in a message beside its own bytes, at most."""

Listeners = Callable[[], Sequence[int]]
"""Says the descriptors of the clients' listeners at the moment when they are sent: a drain closes them, and then their
numbers may be anybody's.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Two descriptors, and what was said about them: a serialized StoredRelay or StoredPipe."""

    about: bytes
    first: int
    second: int

    def close(self) -> None:
        """Close both."""
        os.close(self.first)
        os.close(self.second)


async def keep_nothing(channel: StoreChannel, listeners: Listeners, *, new: bool, tables: AddressTableLine) -> bool:
    """Give a forwarder its clients' listeners and no more; whether its line ended in order."""
    with contextlib.closing(channel):
        try:
            if new:
                numbers = listeners()
                channel.send_now(StoreMessage(listeners=len(numbers), complete=True), numbers)
                tables.begin(channel)
            while (received := await channel.receive()) is not None:
                if received[0].address_tables:
                    tables.take(received[1])
                else:
                    close_all(received[1])
        except (StoreLost, DecodeError, OSError) as error:
            _log_lost(error)
            return False
        finally:
            tables.end()
    return True


def _log_lost(error: Exception) -> None:
    get_logger().error("lost a forwarder's line to the fd store; ending it", reason=str(error) or type(error).__name__)


@dataclass(slots=True)
class Shelf:
    """What is kept for one place."""

    table: int = field(default_factory=new_table)
    relays: dict[int, Kept] = field(default_factory=dict)
    pipes: dict[int, Kept] = field(default_factory=dict)
    _in_use: trio.Lock = field(default_factory=trio.Lock)
    _record_bytes: int = field(default=0, init=False)
    _full_was_logged: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._record_bytes = sum(len(kept.about) for kept in self.relays.values())

    async def serve(self, channel: StoreChannel, listeners: Listeners, *, new: bool, tables: AddressTableLine) -> bool:
        """Keep what a forwarder says until its line has ended; a new one first gets the clients' listeners and what its
        predecessor left. Whether the line ended in order.

        One forwarder at a time: a successor waits here until its predecessor has said its last.
        """
        async with self._in_use:
            self._full_was_logged = False
            with contextlib.closing(channel):
                try:
                    if new:
                        await self.hand_over(channel, listeners())
                        tables.begin(channel)
                    await self.keep(channel, tables)
                except (StoreLost, DecodeError, OSError) as error:
                    _log_lost(error)
                    return False
                finally:
                    tables.end()
        return True

    async def keep(self, channel: StoreChannel, tables: AddressTableLine) -> None:
        """Do what a forwarder says, until its line has ended and all of it was read."""
        while (received := await channel.receive()) is not None:
            if received[0].address_tables:
                tables.take(received[1])
            else:
                self.take(*received)

    def take(self, message: StoreMessage, descriptors: list[int]) -> None:
        """Do what one message says. Raises StoreLost where it says what no forwarder would."""
        for relay_id in message.dropped_relays:
            self._drop_relay(relay_id)
        for pipe_id in message.dropped_pipes:
            self._drop_pipe(pipe_id)
        if len(descriptors) != 2 * (len(message.relays) + len(message.pipes)):
            close_all(descriptors)
            get_logger().error("a relay is not crash-safe: the supervisor may open no more files; raise ulimit -n")
            return
        if any(not 0 < relay.id <= RELAYS_MAX for relay in message.relays) or len(self.pipes) > PIPES_MAX:
            close_all(descriptors)
            raise StoreLost("a forwarder that wants more kept than it can have")
        ends = zip(descriptors[::2], descriptors[1::2], strict=True)
        for relay in message.relays:
            self._keep_relay(relay, *next(ends))
        for pipe in message.pipes:
            self._drop_pipe(pipe.id)
            # Not the message itself: it may hold fields that nobody knows, as long as a whole packet.
            about = StoredPipe(id=pipe.id, wanted_bytes=pipe.wanted_bytes).SerializeToString()
            self.pipes[pipe.id] = Kept(about, *next(ends))

    def _keep_relay(self, relay: StoredRelay, client: int, broker: int) -> None:
        """Keep one relay, unless one forwarder would fill the supervisor's memory with such records."""
        self._drop_relay(relay.id)
        record = relay.SerializeToString()
        too_long = len(record) > RECORD_BYTES_MAX
        if not too_long and self._record_bytes + len(record) <= RECORDS_BYTES_MAX:
            self.relays[relay.id] = Kept(record, client, broker)
            self._record_bytes += len(record)
            return
        close_all((client, broker))
        if too_long:
            get_logger().error("a relay is not crash-safe: its record is too long", bytes=len(record))
        elif not self._full_was_logged:
            self._full_was_logged = True
            get_logger().error(
                "relays are not crash-safe: the records of their forwarder's relays are too long together",
                bytes=self._record_bytes,
                most_bytes=RECORDS_BYTES_MAX,
            )

    def _drop_relay(self, relay_id: int) -> None:
        kept = self.relays.pop(relay_id, None)
        if kept is not None:
            self._record_bytes -= len(kept.about)
            kept.close()

    def _drop_pipe(self, pipe_id: int) -> None:
        kept = self.pipes.pop(pipe_id, None)
        if kept is not None:
            kept.close()

    async def hand_over(self, channel: StoreChannel, listeners: Sequence[int]) -> None:
        """Give a copy of everything to a new forwarder. Raises StoreLost where that one is gone, too."""
        self.table = table_of_this_form(self.table)  # an upgrade may have brought it from an older program
        channel.send_now(StoreMessage(table=True, listeners=len(listeners)), (self.table, *listeners))
        for batch in _batches(self.pipes.values()):
            pipes = [StoredPipe.FromString(kept.about) for kept in batch]
            await channel.send(StoreMessage(pipes=pipes), _ends(batch))
        for batch in _batches(self.relays.values()):
            relays = [StoredRelay.FromString(kept.about) for kept in batch]
            await channel.send(StoreMessage(relays=relays), _ends(batch))
        await channel.send(StoreMessage(complete=True))

    def clear(self) -> None:
        """Let go of all that is kept; the table stays."""
        for kept in (*self.relays.values(), *self.pipes.values()):
            kept.close()
        self.relays.clear()
        self.pipes.clear()
        self._record_bytes = 0


def _ends(batch: Iterable[Kept]) -> list[int]:
    return [end for kept in batch for end in (kept.first, kept.second)]


def _batches(shelf: Iterable[Kept]) -> Iterator[list[Kept]]:
    """As many at a time as one message may hold."""
    batch: list[Kept] = []
    size = 0
    for kept in shelf:
        more = len(kept.about) + RECORD_BYTES_OVERHEAD
        if batch and (2 * len(batch) + 2 > DESCRIPTORS_MAX or size + more > MESSAGE_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(kept)
        size += more
    if batch:
        yield batch
