"""The forwarder's line to the supervisor's fd store: what it keeps for this forwarder's successor.

A relay is safe once its message is sent: descriptors on their way are in the kernel, and the supervisor reads the line
to its end before it hands anything to a successor. Nothing is acknowledged.
"""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from proto.rpc_pb2 import RelayLeftBehind, StoredPipe, StoredRelay, StoreMessage
from proxy.common.logs import get_logger
from proxy.forwarder.relay.pipes import Pipe
from proxy.runtime.shared.fd_store_channel import (
    LEFT_BEHIND_PER_MESSAGE_MAX,
    RECORD_BYTES_MAX,
    MessageTooLong,
    StoreChannel,
    StoreLost,
    close_descriptors,
)

DROPPED_PER_MESSAGE_MAX = 5_000


@dataclass(frozen=True, slots=True)
class InheritedRelay:
    """A relay that a predecessor left; the descriptors are ours now."""

    record: StoredRelay
    client: int
    broker: int


class FdStoreClient:
    """See the module. ``keeps``: whether anything is kept (``relay.crash_safe``)."""

    def __init__(self, sock: socket.socket, *, crash_safe: bool) -> None:
        self._channel = StoreChannel(sock)
        self.crash_safe = crash_safe
        self._sending = trio.Lock()
        self._dropped_relays: list[int] = []
        self._dropped_pipes: list[int] = []
        self._something_dropped = trio.Event()

    # ---- what a predecessor left

    async def receive_handover(self) -> "RelayHandover":
        """The clients' listeners, and all that the store keeps for this forwarder. Raises StoreLost."""
        left = RelayHandover()
        while not left.complete:
            received = await self._channel.receive()
            if received is None:
                raise StoreLost("the fd store closed the line")
            left.add_message(*received)
        return left

    # ---- what is kept from now on

    async def store_relay(self, relay: StoredRelay, client: int, broker: int) -> None:
        """Make a relay safe. Raises MessageTooLong, StoreLost, OSError."""
        if not self.crash_safe:
            return
        size = relay.ByteSize()
        if size > RECORD_BYTES_MAX:
            raise MessageTooLong(
                f"what would be kept of this client (its role, method and session) has {size} bytes, which is more "
                f"than {RECORD_BYTES_MAX}"
            )
        async with self._sending:
            # An id may be new and dropped a moment ago: what was dropped goes first.
            await self._send_dropped()
            await self._channel.send(StoreMessage(relays=[relay]), (client, broker))

    async def publish_address_table(self, table: int) -> None:
        """Have the other forwarders read a table (proxy.runtime.shared.address_tables). Closes the descriptor."""
        try:
            async with self._sending:
                await self._channel.send(StoreMessage(address_tables=[0]), (table,))
        except (StoreLost, trio.ClosedResourceError, OSError) as error:
            get_logger().warning("the other forwarders do not count this one's clients", reason=str(error))
        finally:
            os.close(table)

    async def run_receiver(
        self,
        on_address_table: Callable[[int, int], None],
        on_predecessor_ended: Callable[[int], None] = lambda _pid: None,
    ) -> None:
        """Take the other forwarders' tables, and the ends of predecessors by their process ids, until the line ends."""
        try:
            while (received := await self._channel.receive()) is not None:
                message, descriptors = received
                for forwarder, table in zip(message.address_tables, descriptors, strict=False):
                    on_address_table(forwarder, table)
                for pid in message.ended_predecessor_pids:
                    on_predecessor_ended(pid)
        except (trio.ClosedResourceError, OSError):
            return

    def store_pipes(self, pipes: Sequence[Pipe]) -> None:
        """Make pipes safe before anything is in them. Raises OSError where the line has no room now."""
        if not self.crash_safe:
            return
        message = StoreMessage(pipes=[StoredPipe(id=pipe.id, wanted_bytes=pipe.wanted_bytes) for pipe in pipes])
        try:
            self._channel.send_now(message, [end for pipe in pipes for end in (pipe.read_end, pipe.write_end)])
        except StoreLost:
            # The supervisor is gone, or has given this process up: which will end in a moment.
            raise BlockingIOError(errno.EAGAIN, "the line to the fd store has ended") from None

    def drop_relay(self, relay_id: int) -> None:
        """A relay has ended; its sockets are shut down already, since the store's copies keep them open."""
        if self.crash_safe:
            self._dropped_relays.append(relay_id)
            self._something_dropped.set()

    def drop_left_behind(self, relay_id: int) -> None:
        """A relay that a predecessor still had has ended there: its id may be used again."""
        self._dropped_relays.append(relay_id)
        self._something_dropped.set()

    def drop_pipe(self, pipe: Pipe) -> None:
        """A pipe is closed."""
        if self.crash_safe:
            self._dropped_pipes.append(pipe.id)
            self._something_dropped.set()

    async def run_sender(self) -> None:
        """Tell the store what was dropped, many in a message, until the line ends."""
        while True:
            await self._something_dropped.wait()
            self._something_dropped = trio.Event()
            try:
                async with self._sending:
                    await self._send_dropped()
            except (StoreLost, trio.ClosedResourceError, OSError):
                return

    async def _send_dropped(self) -> None:
        while self._dropped_relays or self._dropped_pipes:
            relays = self._dropped_relays[:DROPPED_PER_MESSAGE_MAX]
            pipes = self._dropped_pipes[:DROPPED_PER_MESSAGE_MAX]
            await self._channel.send(StoreMessage(dropped_relays=relays, dropped_pipes=pipes))
            del self._dropped_relays[: len(relays)]
            del self._dropped_pipes[: len(pipes)]

    async def close(self, left_behind: Sequence[RelayLeftBehind] = ()) -> None:
        """Say what is left to say, name the relays that stay in this process, and end the line: the store hands all
        that it keeps to a successor.
        """
        try:
            async with self._sending:
                await self._send_dropped()
                for first in range(0, len(left_behind), LEFT_BEHIND_PER_MESSAGE_MAX):
                    part = left_behind[first : first + LEFT_BEHIND_PER_MESSAGE_MAX]
                    await self._channel.send(StoreMessage(left_behind=part))
        except StoreLost:
            pass
        self._channel.close()


class RelayHandover:
    """What comes with a START: listeners; and what a predecessor left: the table, pipes, relays."""

    def __init__(self) -> None:
        self.complete = False
        self.table = -1
        self.listeners: list[int] = []
        self.pipes: list[Pipe] = []
        self.relays: list[InheritedRelay] = []
        self._ended_predecessors: set[int] = set()
        self.left_behind: dict[int, dict[int, str]] = {}
        """By the process id of the predecessor that has them: ids of relays, and their clients' IP addresses."""

    def add_message(self, message: StoreMessage, descriptors: list[int]) -> None:
        """One message of the store's. What came without its descriptors cannot be taken over. Raises StoreLost."""
        single = int(message.table) + message.listeners
        expected = single + 2 * (len(message.relays) + len(message.pipes))
        if len(descriptors) != expected:
            close_descriptors(descriptors)
            raise StoreLost(f"{len(descriptors)} of {expected} descriptors arrived; raise ulimit -n")
        if message.table:
            self.table = descriptors[0]
        self.listeners += descriptors[int(message.table) : single]
        ends = zip(descriptors[single::2], descriptors[single + 1 :: 2], strict=True)
        self.relays += [InheritedRelay(about, *next(ends)) for about in message.relays]
        self.pipes += [Pipe(about.id, *next(ends), about.wanted_bytes) for about in message.pipes]
        self._ended_predecessors.update(message.ended_predecessor_pids)
        if message.left_behind:
            behind = self.left_behind.setdefault(message.predecessor_pid, {})
            behind.update((relay.id, relay.client_ip) for relay in message.left_behind)
        for pid in self._ended_predecessors:  # which may be said before their relays are
            self.left_behind.pop(pid, None)
        self.complete = message.complete
