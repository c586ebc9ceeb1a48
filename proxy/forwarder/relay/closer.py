"""The closer of relays: closes them gently or at once, and closes the sockets of those that have ended."""

import os
import socket
from functools import partial

import trio

from proxy.common.logs import get_logger
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.close_schedule import until_quiet
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.expiring.framed_relay import FramedRelay
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.relay import Relay, shut_down
from proxy.forwarder.relay.sockets import read_to_the_end
from proxy.forwarder.relay.user_space import UserSpaceRelay, UserSpaceRelays
from proxy.runtime.process.descriptors import adopt_stream


class RelayCloser:
    """Closes the relays of one forwarder."""

    def __init__(
        self, nursery: trio.Nursery, engine: RelayEngine, user_space: UserSpaceRelays, ledger: RelayLedger
    ) -> None:
        self._nursery = nursery
        self._engine = engine
        self._user_space = user_space
        self._ledger = ledger

    # ---- closing

    def close_relay(self, relay: Relay | UserSpaceRelay, why: CloseReason) -> None:
        """Begin to close a relay gently."""
        record = relay.record
        get_logger().debug(
            "a relay is being ended",
            client=record.client_address,
            principal=record.principal,
            reason=why.name.lower(),
        )
        self._ledger.close_reasons[record.id] = why
        if isinstance(relay, UserSpaceRelay):
            self._user_space.close_relay(relay, why)
        elif self._engine.frozen:
            return  # it is a successor's
        elif isinstance(relay, FramedRelay):
            relay.session.control.start_closing(why)
        else:
            self._engine.stop_client_input(relay)
            self._nursery.start_soon(self._close_when_quiet, relay)

    async def _close_when_quiet(self, relay: Relay) -> None:
        """Close a blind relay when the broker has answered what it was sent."""

        def position() -> object:  # which differs from itself as long as bytes are on their way
            in_pipes = relay.to_broker.in_pipe or relay.to_client.in_pipe
            return object() if in_pipes else self._engine.bytes_moved(relay)

        await until_quiet(position)
        if not (relay.is_over or self._engine.frozen):
            self._engine.close_relay(relay)

    def abort_relay(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay at once that takes too long to close."""
        get_logger().info("a relay that does not end is closed", client=relay.record.client_address)
        self._abort(relay)

    def evict_relay(self, relay: Relay | UserSpaceRelay) -> None:
        """End a relay at once, for another owner's connection."""
        self._ledger.close_reasons[relay.record.id] = CloseReason.OVER_SHARE
        self._abort(relay)

    def _abort(self, relay: Relay | UserSpaceRelay) -> None:
        if isinstance(relay, UserSpaceRelay):
            self._user_space.abort_relay(relay)
        elif not self._engine.frozen:
            self._engine.abort_relay(relay)

    # ---- after the end

    def on_relay_end(self, relay: Relay) -> None:
        """Report a spliced relay that has ended, and close its sockets; where one side broke, only once the other has
        read what it was sent.
        """
        self._ledger.on_relay_end(relay.record, *self._engine.bytes_moved(relay))
        if relay.broken:
            self._nursery.start_soon(self._linger, relay)
            return
        for descriptor in relay.sockets:
            shut_down(descriptor, socket.SHUT_RDWR)  # the store's copy would keep it open
            os.close(descriptor)
        self._ledger.release_relay(relay.record.id)

    async def _linger(self, relay: Relay) -> None:
        streams = [adopt_stream(descriptor) for descriptor in relay.sockets]
        try:
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(partial(read_to_the_end, stream))
        finally:
            for stream in streams:
                if not self._engine.frozen:
                    shut_down(stream.socket.fileno(), socket.SHUT_RDWR)
                stream.socket.close()
            if not self._engine.frozen:
                self._ledger.release_relay(relay.record.id)
