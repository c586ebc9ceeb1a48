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
        half_close_timeout_s = seconds(config.half_close_timeout_ms)
        for inherited in handover.relays:
            relay = Relay(inherited.record, inherited.client, inherited.broker, half_close_timeout_s)
            self._ledger.in_flight.increment()
            try:
                relay = self._restore_relay(relay, inherited)
                self._engine.adopt_relay(relay, pipes, self._framed_pump)
                on_adopted(relay)
            except Exception as error:  # noqa: BLE001 -- what a predecessor wrote of one relay costs no other one
                client = inherited.record.client_address
                get_logger().error("a relay cannot be taken over", client=client, reason=str(error) or repr(error))
                on_failed(relay)
        self._adopt_unbound_pipes(pipes)

    def _restore_relay(self, relay: Relay, inherited: InheritedRelay) -> Relay:
        """Return the relay itself, or a framed one where its frames are followed."""
        record = relay.record
        if not record.HasField("session") or not self._ledger.table.is_framed(record.id):
            return relay
        clock = self._framed_pump.journal.restore_clock(record)
        session = self._session_factory.restore_session(record, clock)
        return FramedRelay(record, inherited.client, inherited.broker, relay.half_close_timeout_s, session)

    def _adopt_unbound_pipes(self, pipes: dict[int, Pipe]) -> None:
        for pipe in pipes.values():
            if pipe.queued_bytes():  # of a relay that was ended in that very moment, or had never started
                self._pool.discard_pipe(pipe)
            else:
                self._pool.release_pipe(pipe)
        with contextlib.suppress(OSError):  # there may be no more descriptors; the engine copes
            self._pool.reserve_pipes()
