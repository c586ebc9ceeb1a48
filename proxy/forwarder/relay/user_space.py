"""Relays through user space: all with TLS on a side, and all where the kernel refuses to splice. One task for each.

They end with their process, and are counted in the relay table like all others. When the process is replaced, they stay
in it and go on counting in the same rows.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.relay.close_schedule import until_quiet
from proxy.forwarder.relay.copy_loop import copy_streams as blind_relay
from proxy.forwarder.relay.expiring.copy_loop import FramedCopyLoop
from proxy.forwarder.relay.expiring.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.relay.expiring.session import CloseReason, ExpiringSession
from proxy.forwarder.relay.start import RelayStart
from proxy.runtime.loop.tasks import close_gracefully, seconds
from proxy.runtime.shared.relay_table import (
    BYTES,
    MESSAGES,
    OPERATIONS,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    framed_row,
    row,
)

Ended = Callable[[StoredRelay, int, int], None]
Move = Callable[..., Awaitable[None]]
"""What moves a relay's bytes, and returns when it is over: see proxy.forwarder.relay.copy_loop.relay."""

LINGER_S = 5.0
"""How long a side of a relay that has ended may take to read what it was sent."""


class UserSpaceRelay:
    """One relay. ``leaving``: why the proxy ends it by itself; ``is_over``: whether it has ended."""

    def __init__(self, about: StoredRelay, followed: ExpiringSession | None) -> None:
        self.record = about
        self.session = followed
        self.close_reason = CloseReason.NOT_CLOSING
        self.is_over = False
        self.copy_scope = trio.CancelScope()
        self.client_read_scope = trio.CancelScope()


class UserSpaceRelays:
    """See the module. ``ended`` hears of each that is over, and of the bytes it moved to the broker and to the client;
    ``release`` lets go of its rows in the table; ``judge`` hears of those whose frames are followed.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        table: RelayTable,
        judge: ReauthenticationCoordinator,
        ended: Ended,
        release: Callable[[int], None],
    ) -> None:
        self._nursery = nursery
        self._table = table
        self._judge = judge
        self._ended = ended
        self._release = release
        self._living: dict[int, UserSpaceRelay] = {}

    def start_relay(self, relay: UserSpaceRelay, start: RelayStart) -> None:
        """Begin one; both streams are its own. It may be ended before its task runs."""
        about, followed = relay.record, relay.session
        move: Move = partial(blind_relay, reading_client=relay.client_read_scope)
        if followed is not None:
            self._table.record_framed(about.id)
            move = FramedCopyLoop(
                followed, partial(self._count_messages, about.id), self._judge, self._judge.now
            ).relay_streams
            self._judge.add_session(followed)
        self._living[about.id] = relay
        self._nursery.start_soon(self._relay, move, relay, start)

    @property
    def relays(self) -> list[UserSpaceRelay]:
        """Those that live."""
        return [*self._living.values()]

    @property
    def expiring_sessions(self) -> list[ExpiringSession]:
        """The sessions of those that live whose frames are followed."""
        return [relay.session for relay in self._living.values() if relay.session is not None]

    # ---- ends

    def close_relay(self, relay: UserSpaceRelay, why: CloseReason) -> None:
        """Begin to end one gently."""
        if relay.session is not None:
            relay.session.control.start_closing(why)
        else:
            self._nursery.start_soon(self._see_off, relay)

    async def _see_off(self, relay: UserSpaceRelay) -> None:
        """End a relay of whose frames nothing is known: when the broker has answered what it was sent."""
        relay.client_read_scope.cancel()
        position = row(relay.record.id, TO_CLIENT) + BYTES
        await until_quiet(lambda: self._table.cells[position])
        relay.copy_scope.cancel()

    @staticmethod
    def abort_relay(relay: UserSpaceRelay) -> None:
        """End one at once."""
        relay.copy_scope.cancel()

    # ---- a relay's life

    async def _relay(self, move: Move, this: UserSpaceRelay, start: RelayStart) -> None:
        about, client, broker = this.record, start.client, start.broker
        rows = row(about.id, TO_BROKER), row(about.id, TO_CLIENT)
        try:
            with this.copy_scope:
                await move(
                    client,
                    broker,
                    first_to_broker=start.first_to_broker,
                    first_to_client=start.first_to_client,
                    half_close_timeout_s=seconds(start.config.half_close_timeout_ms),
                    count_to_broker=partial(self._count, rows[0]),
                    count_to_client=partial(self._count, rows[1]),
                )
            this.is_over = True
            async with trio.open_nursery() as nursery:
                for stream in (client, broker):
                    nursery.start_soon(partial(close_gracefully, stream, linger_s=LINGER_S))
        finally:
            this.is_over = True
            with trio.CancelScope(shield=True):
                for stream in (client, broker):
                    await trio.aclose_forcefully(stream)
            self._ended(about, *(self._table.cells[at + BYTES] for at in rows))
            del self._living[about.id]
            self._release(about.id)

    def _count(self, at: int, size: int) -> None:
        self._table.cells[at + BYTES] += size
        self._table.cells[at + OPERATIONS] += 1

    def _count_messages(self, relay_id: int, way: int, messages: int) -> None:
        self._table.cells[framed_row(relay_id, way) + MESSAGES] += messages
