"""The start of a spliced relay: options, first bytes, the fd store, the engine."""

import errno
import os
from typing import Self

import trio

from proto.command_heads import FrameInvalid
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.fd_store_client import FdStoreClient
from proxy.forwarder.relay.framed_splice_pump import FramedSplicePump
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES
from proxy.forwarder.relay.relay import Relay, RelayMustWait, RelayStart, RelayStartFailed
from proxy.forwarder.relay.sockets import tune_for_relay
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import TcpStream
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
        client: TcpStream,
        broker: TcpStream,
        session: ExpiringSession | None,
    ) -> Relay:
        """Start a relay of which the rows are open; return it. Both sockets are detached from their streams then.

        Where the engine was frozen meanwhile, the relay is a successor's already. Raises RelayStartFailed: nothing is
        left of the relay then, and both streams are the caller's.
        """
        with _Starting(self, start, client, broker, session) as starting:
            relay = starting.relay
            await self._send_ahead(relay, broker, starting.first_to_broker)
            self._preload(relay, starting.first_to_broker, starting.first_to_client)
            await self._fd_store.store_relay(relay.record, *relay.sockets)
            self._run_relay(relay)
            starting.is_done = True
        return relay

    def start_relay_now(
        self,
        start: RelayStart,
        client: TcpStream,
        broker: TcpStream,
        session: ExpiringSession | None,
    ) -> Relay | None:
        """Do the same if that needs no waiting; otherwise return None: nothing is left of the relay then."""
        with _Starting(self, start, client, broker, session) as starting:
            relay = starting.relay
            if len(starting.first_to_broker) <= SMALL_PIPE_BYTES:
                self._preload(relay, starting.first_to_broker, starting.first_to_client)
                if self._fd_store.store_relay_now(relay.record, *relay.sockets):
                    self._run_relay(relay)
                    starting.is_done = True
        return relay if starting.is_done else None

    def _run_relay(self, relay: Relay) -> None:
        if not self._engine.frozen:  # otherwise it is the successor's already
            self._ledger.count_start(relay.record)
            self._engine.start_relay(relay)

    def follow_relay(self, relay: Relay, start: RelayStart) -> tuple[bytes, bytes]:
        """Return what goes first to the broker, and to the client."""
        first = start.first_to_broker, start.first_to_client
        return first if relay.session is None else self._framed_pump.follow_relay(relay, relay.session, *first)

    def abandon_relay(self, relay: Relay) -> None:
        """Release what a relay that has not started had acquired."""
        if self._ledger.is_handing_over:  # its rows, which nothing was written to, are the successor's
            for direction in (relay.to_broker, relay.to_client):
                direction.detach_source()
            return
        self._engine.abandon_relay(relay)
        self._ledger.release_relay(relay.record.id)

    async def _send_ahead(self, relay: Relay, broker: TcpStream, first_to_broker: bytes) -> None:
        """Send ahead to the broker what the client sent beyond what fits any pipe.

        The client has not received CONNECTED yet: should this process be killed now, it connects once more.
        """
        ahead = _bytes_ahead(first_to_broker)
        if not ahead:
            return
        with trio.move_on_after(relay.half_close_timeout_s) as scope:
            await broker.send_all(first_to_broker[:ahead])
        if scope.cancelled_caught:
            raise RelayStartFailed("the broker does not take what the client sent first")
        if self._ledger.is_handing_over:
            raise RelayStartFailed(REPLACED)
        self._ledger.table.add_bytes(relay.to_broker.row, ahead)

    def _preload(self, relay: Relay, first_to_broker: bytes, first_to_client: bytes) -> None:
        """Put what was read ahead into pipes: from then on it is in the kernel.

        No waiting from here to the start: a pipe that is lent must not be a successor's.
        """
        if first_to_client:
            if len(first_to_client) > self._engine.reserve_pipe(relay.to_client):
                raise RelayStartFailed(
                    f"the broker said {len(first_to_client)} bytes with CONNECTED, which is too much"
                )
            self._engine.preload_pipe(relay.to_client, first_to_client)
        if first_to_broker:
            self._engine.reserve_pipe(relay.to_broker)
            self._engine.preload_pipe(relay.to_broker, first_to_broker[_bytes_ahead(first_to_broker) :])


class _Starting:
    """A relay that starts within this context; at its end nothing is left of the relay, unless it ``is_done``.

    Raises RelayStartFailed for what a start may meet.
    """

    __slots__ = ("_start", "_starter", "_streams", "first_to_broker", "first_to_client", "is_done", "relay")

    def __init__(
        self,
        starter: SplicedRelayStarter,
        start: RelayStart,
        client: TcpStream,
        broker: TcpStream,
        session: ExpiringSession | None,
    ) -> None:
        sockets = client.socket.fileno(), broker.socket.fileno()
        self.relay = Relay(start.stored, *sockets, seconds(start.config.half_close_timeout_ms), session)
        self.is_done = False
        self._starter = starter
        self._start = start
        self._streams = client, broker

    def __enter__(self) -> Self:
        try:
            tune_for_relay(*self._streams, self._start.config)
            self.first_to_broker, self.first_to_client = self._starter.follow_relay(self.relay, self._start)
        except _START_ERRORS as error:
            self._starter.abandon_relay(self.relay)
            raise _start_failure(error) from error
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if self.is_done:
            for stream in self._streams:
                stream.socket.detach()
            return
        self._starter.abandon_relay(self.relay)
        if isinstance(error, _START_ERRORS):
            raise _start_failure(error) from error


def _start_failure(error: Exception) -> RelayStartFailed:
    must_wait = isinstance(error, OSError) and error.errno in {errno.EAGAIN, errno.ETOOMANYREFS}
    return (RelayMustWait if must_wait else RelayStartFailed)(f"a relay cannot begin: {error}")


def _bytes_ahead(first_to_broker: bytes) -> int:
    return max(0, len(first_to_broker) - SMALL_PIPE_BYTES)


def close_descriptors_of(relay: Relay) -> None:
    """Close this process's descriptors of a relay that is a successor's."""
    for direction in (relay.to_broker, relay.to_client):
        direction.detach_source()
        os.close(direction.source)
