"""The start of a spliced relay: options, first bytes, the fd store, the engine."""

import os

import trio

from proto.command_heads import FrameInvalid
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.expiring.framed_relay import FramedRelay
from proxy.forwarder.relay.expiring.session import ExpiringSession
from proxy.forwarder.relay.expiring.splice_pump import FramedSplicePump
from proxy.forwarder.relay.fd_store_client import FdStoreClient
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES
from proxy.forwarder.relay.relay import Relay
from proxy.forwarder.relay.sockets import tune_for_relay
from proxy.forwarder.relay.start import RelayStart, RelayStartFailed
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.fd_store_channel import MessageTooLong, StoreLost

REPLACED = "this forwarder is being replaced"

_START_ERRORS = (
    OSError,
    StoreLost,
    MessageTooLong,
    FrameInvalid,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class SplicedRelayStarter:
    """Starts relays between two plain sockets."""

    def __init__(
        self, engine: RelayEngine, framed_pump: FramedSplicePump, fd_store: FdStoreClient, ledger: RelayLedger
    ) -> None:
        self._engine = engine
        self._framed_pump = framed_pump
        self._fd_store = fd_store
        self._ledger = ledger

    async def start_relay(
        self,
        start: RelayStart,
        client: trio.SocketStream,
        broker: trio.SocketStream,
        session: ExpiringSession | None,
    ) -> Relay:
        """Start a relay of which the rows are open; return it. Both sockets are detached from their streams then.

        Where the engine was frozen meanwhile, the relay is a successor's already. Raises RelayStartFailed: nothing is
        left of the relay then, and both streams are the caller's.
        """
        record = start.stored
        sockets = client.socket.fileno(), broker.socket.fileno()
        timeout_s = seconds(start.config.half_close_timeout_ms)
        if session is None:
            relay = Relay(record, *sockets, timeout_s)
        else:
            relay = FramedRelay(record, *sockets, timeout_s, session)
        started = False
        try:
            for stream in (client, broker):
                tune_for_relay(stream, start.config)
            first_to_broker, first_to_client = start.first_to_broker, start.first_to_client
            if isinstance(relay, FramedRelay):
                first_to_broker, first_to_client = self._framed_pump.follow_relay(
                    relay, first_to_broker, first_to_client
                )
            await self._preload(relay, broker, first_to_broker, first_to_client)
            await self._fd_store.store_relay(record, *sockets)
            if not self._engine.frozen:  # otherwise it is the successor's already
                self._ledger.count_start(record)
                self._engine.start_relay(relay)
            started = True
        except _START_ERRORS as error:
            raise RelayStartFailed(f"a relay cannot begin: {error}") from error
        finally:
            if not started:
                self._abandon_relay(relay)
        for stream in (client, broker):
            stream.socket.detach()
        return relay

    def _abandon_relay(self, relay: Relay) -> None:
        """Release what a relay that has not started had acquired."""
        if self._ledger.is_handing_over:  # its rows, which nothing was written to, are the successor's
            for direction in (relay.to_broker, relay.to_client):
                direction.detach_source()
            return
        self._engine.abandon_relay(relay)
        self._ledger.release_relay(relay.record.id)

    async def _preload(
        self, relay: Relay, broker: trio.SocketStream, first_to_broker: bytes, first_to_client: bytes
    ) -> None:
        """Put what was read ahead into pipes: from then on it is in the kernel.

        What the client sent, beyond what fits any pipe, is sent ahead to the broker. The client has not received
        CONNECTED yet: should this process be killed now, it connects once more.
        """
        ahead = max(0, len(first_to_broker) - SMALL_PIPE_BYTES)
        if ahead:
            with trio.move_on_after(relay.half_close_timeout_s) as scope:
                await broker.send_all(first_to_broker[:ahead])
            if scope.cancelled_caught:
                raise RelayStartFailed("the broker does not take what the client sent first")
            if self._ledger.is_handing_over:
                raise RelayStartFailed(REPLACED)
            self._ledger.table.add_bytes(relay.to_broker.row, ahead)
        # No waiting from here on: a pipe that is lent must not be a successor's.
        if first_to_client:
            if len(first_to_client) > self._engine.reserve_pipe(relay.to_client):
                raise RelayStartFailed(
                    f"the broker said {len(first_to_client)} bytes with CONNECTED, which is too much"
                )
            self._engine.preload_pipe(relay.to_client, first_to_client)
        if first_to_broker:
            self._engine.reserve_pipe(relay.to_broker)
            self._engine.preload_pipe(relay.to_broker, first_to_broker[ahead:])


def close_descriptors_of(relay: Relay) -> None:
    """Close this process's descriptors of a relay that is a successor's."""
    for direction in (relay.to_broker, relay.to_client):
        direction.detach_source()
        os.close(direction.source)
