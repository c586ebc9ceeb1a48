"""The ledger of a forwarder's relays: their rows in the relay table, and what is counted and logged at their end."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily

from proto.rpc_pb2 import StoredRelay
from proxy.common.logs import get_logger
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.relay.fd_store_client import FdStoreClient
from proxy.forwarder.relay.rates import PrincipalRates
from proxy.forwarder.relay.relay import Relay
from proxy.forwarder.relay.usage import PrincipalUsage
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.shared.relay_table import BYTES, OPERATIONS, TO_BROKER, TO_CLIENT, RelayTable

RELAY_CAUSES = {
    CloseReason.EXPIRED: DisconnectCause.SESSION_EXPIRED,
    CloseReason.STILL_SERVED: DisconnectCause.SESSION_EXPIRED,
    CloseReason.FAILED: DisconnectCause.REAUTHENTICATION_FAILED,
    CloseReason.CORRUPT: DisconnectCause.PROTOCOL_ERROR,
    CloseReason.MAX_AGE: DisconnectCause.MAX_AGE,
    CloseReason.SHUT_DOWN: DisconnectCause.SHUT_DOWN,
    CloseReason.DENIED: DisconnectCause.DENIED,
    CloseReason.OVER_SHARE: DisconnectCause.OVER_SHARE,
    CloseReason.DISCONNECTED: DisconnectCause.DISCONNECTED,
}
"""Why a relay has ended that the proxy itself has closed; for all other reasons it is RELAY_ENDED."""


class RelayLedger:
    """The rows and counts of one forwarder's relays.

    ``is_handing_over``: the rows of relays that have not started are a successor's from now on. ``on_end`` is called
    with the record of each relay that has ended, the cause, and its bytes to the broker and to the client.
    """

    def __init__(
        self,
        table: RelayTable,
        fd_store: FdStoreClient,
        on_end: Callable[[StoredRelay, DisconnectCause, int, int], None],
        principals: PrincipalUsage,
    ) -> None:
        self.table = table
        self.in_flight = InFlightCounter()
        self.is_handing_over = False
        self._fd_store = fd_store
        self._on_end = on_end
        self._principals = principals
        self._stay_behind: frozenset[int] | None = None
        self.rates = PrincipalRates(table, principals, lambda: not self.has_handed_over)

    # ---- relays in

    def open_rows(self, record: StoredRelay) -> None:
        """Allocate rows for a relay, and write their id to its record. Raises OverflowError if the table is full."""
        record.id = self.table.allocate_relay_id()

    def record_principal(self, record: StoredRelay) -> None:
        """Record in a relay's rows which principal it is counted for."""
        owner = f"proxy {record.proxy}" if record.proxy else owner_of("", record.client_address)
        self.table.record_principal(record.id, self._principals.row_number_of(record.principal, owner))

    def count_start(self, record: StoredRelay) -> None:
        """Count a relay that starts for its principal, in the row that its bytes are counted in."""
        self.table.add_session(self.table.principal_of(record.id))

    # ---- relays out

    def on_relay_end(self, relay: Relay, bytes_to_broker: int, bytes_to_client: int) -> None:
        """Count, log and report the end of a relay; its rows are released once its sockets are closed."""
        record = relay.record
        cause = RELAY_CAUSES.get(relay.close_reason, DisconnectCause.RELAY_ENDED)
        self.in_flight.decrement()
        get_logger().info(
            "a relay has ended",
            client=record.client_address,
            principal=record.principal,
            broker=record.target,
            seconds=round(time.time() - record.started_at_unix_ms / 1000, 3),
            bytes_to_broker=bytes_to_broker,
            bytes_to_client=bytes_to_client,
            cause=cause.value,
            **self._messages_of(record),
            **({"proxy": record.proxy} if record.proxy else {}),
        )
        self._on_end(record, cause, bytes_to_broker, bytes_to_client)

    def _messages_of(self, record: StoredRelay) -> dict[str, int]:
        if not record.session.counts_messages:
            return {}
        to_broker, to_client = self.table.messages_of(record.id)
        return {"messages_to_broker": to_broker, "messages_to_client": to_client}

    def release_relay(self, relay: Relay) -> None:
        """Release the rows of a relay of which the sockets are closed, and drop a spliced one from the fd store."""
        self.release_rows(relay.record.id)
        if relay.is_spliced:
            self._fd_store.drop_relay(relay.record.id)

    def release_rows(self, relay_id: int) -> None:
        """Sum up a relay's rows and free them, or leave that to the successor that has the table now."""
        if self._stay_behind is None:
            self.table.release_relay_id(relay_id)
        elif relay_id in self._stay_behind:
            self.table.record_ended_behind(relay_id)

    # ---- the hand-over

    @property
    def has_handed_over(self) -> bool:
        """Whether the table is a successor's."""
        return self._stay_behind is not None

    def hand_over_table(self, staying: Iterable[int]) -> None:
        """Leave the table to a successor, except for the rows of the relays that stay here."""
        self._stay_behind = frozenset(staying)

    # ---- metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return Prometheus counters: bytes and portions by direction, and use by principal.

        A successor continues the counters, and counts what predecessors' relays still move: so a predecessor returns
        nothing.
        """
        if self.has_handed_over:
            return
        bytes_moved = CounterMetricFamily(
            "pulsar_proxy_binary_bytes", "Bytes relayed, by direction.", labels=["direction"]
        )
        operations = CounterMetricFamily(
            "pulsar_proxy_binary_ops", "Portions of bytes relayed, by direction.", labels=["direction"]
        )
        for name, way in (("to_broker", TO_BROKER), ("to_client", TO_CLIENT)):
            bytes_moved.add_metric([name], self.table.total(way, BYTES))
            operations.add_metric([name], self.table.total(way, OPERATIONS))
        yield bytes_moved
        yield operations
        yield from self._principals.collect()
