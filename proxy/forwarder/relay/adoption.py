"""The adoption of a predecessor's relays: their rows, pipes and sockets become this forwarder's."""

import contextlib
from collections.abc import Callable

from proxy.common.logs import get_logger
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.expiring.framed_relay import FramedRelay
from proxy.forwarder.relay.expiring.splice_pump import FramedSplicePump
from proxy.forwarder.relay.fd_store_client import InheritedRelay, RelayHandover
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import Relay
from proxy.forwarder.relay.session_factory import SessionFactory
from proxy.runtime.loop.tasks import seconds


class RelayAdopter:
    """Adopts the spliced relays of a predecessor."""

    def __init__(
        self,
        engine: RelayEngine,
        framed_pump: FramedSplicePump,
        pool: PipePool,
        ledger: RelayLedger,
        session_factory: SessionFactory,
    ) -> None:
        self._engine = engine
        self._framed_pump = framed_pump
        self._pool = pool
        self._ledger = ledger
        self._session_factory = session_factory

    def adopt_relays(
        self,
        handover: RelayHandover,
        config: RelayConfig,
        on_adopted: Callable[[Relay], None],
        on_failed: Callable[[Relay], None],
    ) -> None:
        """Continue a predecessor's relays, of which the rows have been adopted.

        ``on_adopted`` is called with each relay that goes on, ``on_failed`` with each that cannot.
        """
        pipes = {pipe.id: pipe for pipe in handover.pipes}
        for pipe in handover.pipes:
            self._pool.adopt_pipe(pipe)
        for inherited in handover.relays:
            relay = self._restore_relay(inherited, seconds(config.half_close_timeout_ms))
            self._ledger.in_flight.increment()
            try:
                self._engine.adopt_relay(relay, pipes, self._framed_pump)
                on_adopted(relay)
            except OSError as error:
                client = inherited.record.client_address
                get_logger().error("a relay cannot be taken over", client=client, reason=str(error))
                on_failed(relay)
        self._adopt_unbound_pipes(pipes)

    def _restore_relay(self, inherited: InheritedRelay, half_close_timeout_s: float) -> Relay:
        record, sockets = inherited.record, (inherited.client, inherited.broker)
        if record.HasField("session") and self._ledger.table.is_framed(record.id):
            clock = self._framed_pump.journal.restore_clock(record)
            session = self._session_factory.restore_session(record, clock)
            return FramedRelay(record, *sockets, half_close_timeout_s, session)
        return Relay(record, *sockets, half_close_timeout_s)

    def _adopt_unbound_pipes(self, pipes: dict[int, Pipe]) -> None:
        for pipe in pipes.values():
            if pipe.queued_bytes():  # of a relay that was ended in that very moment, or had never started
                self._pool.discard_pipe(pipe)
            else:
                self._pool.release_pipe(pipe)
        with contextlib.suppress(OSError):  # there may be no more descriptors; the engine copes
            self._pool.reserve_pipes()
