"""The adoption of a predecessor's relays: their rows, pipes and sockets become this forwarder's, or they stay there.

Relays that stay in predecessors of this forwarder, because they cannot be handed over: those with TLS in user space,
for example.

Such a relay goes on counting in its own rows of the relay table, which is this forwarder's now. So the use by principal
stays in one series without a gap, and nothing is lost when the predecessor is killed: what it has counted is in memory
that outlives it. This forwarder sums up its rows once no process writes to them any more: the predecessor has recorded
that in the table, or the supervisor reports that its process has ended.
"""

import contextlib
from collections.abc import Callable, Mapping

import trio

from proxy.common.logs import get_logger
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime.session_factory import SessionFactory
from proxy.forwarder.relay.engine import RelayEngine
from proxy.forwarder.relay.fd_store_client import RelayHandover
from proxy.forwarder.relay.framed_splice_pump import FramedSplicePump
from proxy.forwarder.relay.kernel_tls_pump import KernelTlsRelay, new_spliced_relay
from proxy.forwarder.relay.ledger import RelayLedger
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import Relay
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.shared.relay_table import RelayTable

LOOK_INTERVAL_S = 1.0
"""Between two checks whether relays have ended in a live predecessor."""


class RelaysLeftBehind:
    """The relays that stay in predecessors, by process id.

    ``on_end`` is called for each that has ended, with its id and its client's IP address, after its rows were summed
    up.
    """

    def __init__(self, table: RelayTable, on_end: Callable[[int, str], None]) -> None:
        self._table = table
        self._on_end = on_end
        self._by_process: dict[int, dict[int, str]] = {}

    @property
    def count(self) -> int:
        """The number of relays."""
        return sum(len(relays) for relays in self._by_process.values())

    @property
    def client_ips(self) -> list[str]:
        """The IP addresses of their clients, one for each."""
        return [ip for relays in self._by_process.values() for ip in relays.values()]

    @property
    def ids(self) -> set[int]:
        """The ids of the relays."""
        return {relay_id for relays in self._by_process.values() for relay_id in relays}

    def adopt_relays(self, by_process: Mapping[int, Mapping[int, str]], taken: set[int]) -> None:
        """Start with the relays that the fd store names, except those in ``taken``, which this forwarder has itself."""
        for pid, relays in by_process.items():
            self._by_process[pid] = {relay_id: ip for relay_id, ip in relays.items() if relay_id not in taken}

    async def run(self) -> None:
        """Check for relays that have ended, until none is left."""
        while self.count:
            await trio.sleep(LOOK_INTERVAL_S)
            self.sum_up_ended()

    def sum_up_ended(self) -> None:
        """Sum up the relays that a predecessor has recorded as ended."""
        for relays in self._by_process.values():
            for relay_id in [relay_id for relay_id in relays if self._table.has_ended_behind(relay_id)]:
                self._end(relay_id, relays.pop(relay_id))

    def on_process_ended(self, pid: int) -> None:
        """Sum up all relays of a predecessor that has ended."""
        for relay_id, ip in self._by_process.pop(pid, {}).items():
            self._end(relay_id, ip)

    def forget_relays(self) -> list[str]:
        """Forget all relays, since the table is a successor's from now on; return the clients' IP addresses."""
        client_ips = self.client_ips
        self._by_process.clear()
        return client_ips

    def _end(self, relay_id: int, ip: str) -> None:
        self._table.release_relay_id(relay_id)
        self._on_end(relay_id, ip)


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
            relay = new_spliced_relay(inherited.record, inherited.client, inherited.broker, half_close_timeout_s)
            self._ledger.in_flight.increment()
            try:
                if isinstance(relay, KernelTlsRelay):
                    relay.check_keys()
                self._restore_session(relay)
                self._engine.adopt_relay(relay, pipes, self._framed_pump)
                on_adopted(relay)
            except Exception as error:  # noqa: BLE001 -- what a predecessor wrote of one relay costs no other one
                client = inherited.record.client_address
                get_logger().error("a relay cannot be taken over", client=client, reason=str(error) or repr(error))
                on_failed(relay)
        self._adopt_unbound_pipes(pipes)

    def _restore_session(self, relay: Relay) -> None:
        """Give a relay of which the frames are followed its session."""
        record = relay.record
        if record.HasField("session") and self._ledger.table.is_framed(record.id):
            clock = self._framed_pump.journal.restore_clock(record)
            relay.session = self._session_factory.restore_session(record, clock)

    def _adopt_unbound_pipes(self, pipes: dict[int, Pipe]) -> None:
        for pipe in pipes.values():
            if pipe.queued_bytes():  # of a relay that was ended in that very moment, or had never started
                self._pool.discard_pipe(pipe)
            else:
                self._pool.release_pipe(pipe)
        with contextlib.suppress(OSError):  # there may be no more descriptors; the engine copes
            self._pool.reserve_pipes()
