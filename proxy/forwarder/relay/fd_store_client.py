"""The forwarder's client of the supervisor's fd store, which holds sockets and pipes for this forwarder's successor.

A relay is safe once its message is sent: descriptors on their way are in the kernel, and the supervisor reads the
channel to its end before it hands anything to a successor. Nothing is acknowledged.
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

DROPS_GATHER_S = 0.02
"""How long drops are gathered for one message: often a relay that starts takes them along."""


@dataclass(frozen=True, slots=True)
class InheritedRelay:
    """A predecessor's relay, and its two descriptors in this process."""

    record: StoredRelay
    client: int
    broker: int


class FdStoreClient:
    """The forwarder's end of the channel to its fd store.

    ``crash_safe`` (``relay.crash_safe``): False if the store holds nothing but listeners; what is to be stored is
    dropped then.
    """

    def __init__(self, sock: socket.socket, *, crash_safe: bool) -> None:
        self._channel = StoreChannel(sock)
        self.crash_safe = crash_safe
        self._sending = trio.Lock()
        self._dropped_relays: list[int] = []
        self._dropped_pipes: list[int] = []
        self._drops_pending = trio.Event()

    # ---- from a predecessor

    async def receive_handover(self) -> "RelayHandover":
        """Receive the clients' listeners, and all that the store holds for this forwarder. Raises StoreLost."""
        left = RelayHandover()
        while not left.complete:
            received = await self._channel.receive()
            if received is None:
                raise StoreLost("the fd store closed the channel")
            left.add_message(*received)
        return left

    # ---- for a successor

    async def store_relay(self, relay: StoredRelay, client: int, broker: int) -> None:
        """Store a relay's record and sockets. Raises MessageTooLong, StoreLost, OSError."""
        if self.store_relay_now(relay, client, broker):
            return
        async with self._sending:
            # The id may be one that was dropped a moment ago: drops go first.
            await self._send_dropped()
            await self._channel.send(StoreMessage(relays=[relay]), (client, broker))

    def store_relay_now(self, relay: StoredRelay, client: int, broker: int) -> bool:
        """Do the same if that needs no waiting; return whether it is done. Raises what ``store_relay`` does."""
        if not self.crash_safe:
            return True
        size = relay.ByteSize()
        if size > RECORD_BYTES_MAX:
            raise MessageTooLong(
                f"what would be kept of this client (its role, method and session) has {size} bytes, which is more "
                f"than {RECORD_BYTES_MAX}"
            )
        return self._send_now((relay,), (client, broker))

    def _send_now(self, relays: Sequence[StoredRelay] = (), descriptors: Sequence[int] = ()) -> bool:
        """Send all drops, then relays, in one message if there is room for it now; return whether it was sent."""
        dropped_relays, dropped_pipes = self._dropped_relays, self._dropped_pipes
        if self._sending.locked() or len(dropped_relays) + len(dropped_pipes) > DROPPED_PER_MESSAGE_MAX:
            return False
        # The store looks at the drops of a message first: a relay's id may be one that was dropped a moment ago.
        message = StoreMessage(dropped_relays=dropped_relays, dropped_pipes=dropped_pipes, relays=relays)
        try:
            self._channel.send_now(message, descriptors)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.ETOOMANYREFS}:
                return False
            raise
        dropped_relays.clear()
        dropped_pipes.clear()
        return True

    async def publish_address_table(self, table: int) -> None:
        """Send a table to the other forwarders (proxy.runtime.shared.address_tables); closes the descriptor."""
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
        """Receive until the channel ends: other forwarders' address tables (with their number), and the process ids of
        predecessors that have ended.
        """
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
        """Store pipes before any byte is in them. Raises OSError if the channel has no room now."""
        if not self.crash_safe:
            return
        message = StoreMessage(pipes=[StoredPipe(id=pipe.id, wanted_bytes=pipe.wanted_bytes) for pipe in pipes])
        try:
            self._channel.send_now(message, [end for pipe in pipes for end in (pipe.read_end, pipe.write_end)])
        except StoreLost:
            # The supervisor is gone, or has given this process up, which will end in a moment.
            raise BlockingIOError(errno.EAGAIN, "the channel to the fd store has ended") from None

    def drop_relay(self, relay_id: int) -> None:
        """Drop a relay that has ended from the store; its sockets are shut down already, since the store's copies keep
        them open.
        """
        if self.crash_safe:
            self._dropped_relays.append(relay_id)
            self._drops_pending.set()

    def drop_left_behind(self, relay_id: int) -> None:
        """Drop a relay that has ended in a predecessor: its id may be used again."""
        self._dropped_relays.append(relay_id)
        self._drops_pending.set()

    def drop_pipe(self, pipe: Pipe) -> None:
        """Drop a pipe that is closed from the store."""
        if self.crash_safe:
            self._dropped_pipes.append(pipe.id)
            self._drops_pending.set()

    async def run_sender(self) -> None:
        """Send drops to the store, many in a message, until the channel ends."""
        while True:
            await self._drops_pending.wait()
            await trio.sleep(DROPS_GATHER_S)
            self._drops_pending = trio.Event()
            try:
                if (self._dropped_relays or self._dropped_pipes) and not self._send_now():
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
        """Send what is still to be dropped and the relays that stay in this process, and close the channel: the store
        hands all that it holds to a successor.
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
    """What a forwarder starts with: listeners, and a predecessor's table, pipes and relays."""

    def __init__(self) -> None:
        self.complete = False
        self.table = -1
        self.listeners: list[int] = []
        self.pipes: list[Pipe] = []
        self.relays: list[InheritedRelay] = []
        self._ended_predecessors: set[int] = set()
        self.left_behind: dict[int, dict[int, str]] = {}
        """Relays that stay in predecessors, by their process id: ids of relays, and their clients' IP addresses."""

    def add_message(self, message: StoreMessage, descriptors: list[int]) -> None:
        """Add one message of the store's. Raises StoreLost if descriptors are missing: it cannot be adopted then."""
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
        for pid in self._ended_predecessors:  # they may be named before their relays are
            self.left_behind.pop(pid, None)
        self.complete = message.complete
