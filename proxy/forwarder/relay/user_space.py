"""Relays that are not spliced and of which the frames are followed. One task for each.

They end with their process, and are counted in the relay table like all others. When the process is replaced, they stay
in it and go on counting in the same rows.
"""

from functools import partial

import trio

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.framed_copy_loop import FramedCopyLoop
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.relay import BaseRelay, RelayStart
from proxy.forwarder.relay.sockets import LINGER_S
from proxy.runtime.loop.tasks import close_gracefully, seconds
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, row


class UserSpaceRelay(BaseRelay):
    """One relay with inspected frames. ``copy_scope`` is cancelled to end it at once."""

    is_over = False

    def __init__(self, record: StoredRelay, session: ExpiringSession) -> None:
        self.record = record
        self.session = session
        self.close_reason = CloseReason.NOT_CLOSING
        self.copy_scope = trio.CancelScope()

    def abort(self) -> None:
        """End at once."""
        self.copy_scope.cancel()


class UserSpaceRelays:
    """The live relays of a forwarder that go through user space; ``ledger`` counts them and their ends."""

    def __init__(
        self, nursery: trio.Nursery, ledger: RelayLedger, reauthentication: ReauthenticationCoordinator
    ) -> None:
        self._nursery = nursery
        self._ledger = ledger
        self._table = ledger.table
        self._reauthentication = reauthentication
        self._live: dict[int, UserSpaceRelay] = {}

    def start_relay(self, start: RelayStart, session: ExpiringSession) -> UserSpaceRelay:
        """Start a relay; both streams are its own from now on. It may be ended before its task runs."""
        record = start.stored
        relay = UserSpaceRelay(record, session)
        self._table.record_framed(record.id)
        count_messages = partial(self._table.add_messages, record.id)
        loop = FramedCopyLoop(session, count_messages, self._reauthentication, self._reauthentication.now)
        self._live[record.id] = relay
        self._nursery.start_soon(self._run_relay, loop, relay, start)
        return relay

    @property
    def relays(self) -> list[UserSpaceRelay]:
        """The live relays."""
        return [*self._live.values()]

    async def _run_relay(self, loop: FramedCopyLoop, relay: UserSpaceRelay, start: RelayStart) -> None:
        record, client, broker = relay.record, start.client, start.broker
        to_broker, to_client = row(record.id, TO_BROKER), row(record.id, TO_CLIENT)
        try:
            with relay.copy_scope:
                await loop.relay_streams(
                    client,
                    broker,
                    first_to_broker=start.first_to_broker,
                    first_to_client=start.first_to_client,
                    half_close_timeout_s=seconds(start.config.half_close_timeout_ms),
                    count_to_broker=partial(self._table.add_moved, to_broker),
                    count_to_client=partial(self._table.add_moved, to_client),
                )
            relay.is_over = True
            async with trio.open_nursery() as nursery:
                for stream in (client, broker):
                    nursery.start_soon(partial(close_gracefully, stream, linger_s=LINGER_S))
        finally:
            relay.is_over = True
            with trio.CancelScope(shield=True):
                for stream in (client, broker):
                    await trio.aclose_forcefully(stream)
            self._ledger.on_relay_end(relay, self._table.bytes_moved(to_broker), self._table.bytes_moved(to_client))
            del self._live[record.id]
            self._ledger.release_rows(record.id)
