"""The forwarders' tables of client addresses (proxy.runtime.shared.address_tables), passed on from each to all
others.
"""

import errno
import os
from collections.abc import Sequence

from proto.rpc_pb2 import StoreMessage
from proxy.common.logs import get_logger
from proxy.runtime.shared.address_tables import is_sealed_table
from proxy.runtime.shared.fd_store_channel import StoreChannel, StoreLost, close_descriptors

PUBLISHED_MAX = 100
"""Tables that one forwarder may publish in its life: it makes one whenever the limit is set where it was not."""


class AddressTableExchange:
    """The last table of each place, and the lines over which the others are told."""

    def __init__(self) -> None:
        self._tables: dict[int, int] = {}
        self._subscribers: list[AddressTableChannel] = []

    def open_channel(self, place: int) -> "AddressTableChannel":
        """A forwarder's part in it."""
        return AddressTableChannel(self, place)

    def subscribe(self, line: "AddressTableChannel") -> None:
        """Tell a line of the other places' tables, now and from now on."""
        self._subscribers.append(line)
        for place, table in self._tables.items():
            line.send_table(place, table)

    def unsubscribe(self, line: "AddressTableChannel") -> None:
        """Tell a line of nothing more."""
        if line in self._subscribers:
            self._subscribers.remove(line)

    def publish_table(self, place: int, table: int) -> None:
        """Keep a place's table, and tell the others of it."""
        old = self._tables.pop(place, -1)
        if old >= 0:
            os.close(old)
        self._tables[place] = table
        for line in self._subscribers:
            line.send_table(place, table)

    def close(self) -> None:
        """Close all tables."""
        close_descriptors(list(self._tables.values()))
        self._tables.clear()


class AddressTableChannel:
    """One forwarder's line to the fd store, as far as tables go over it."""

    def __init__(self, exchange: AddressTableExchange, place: int) -> None:
        self._exchange = exchange
        self._index = place
        self._published = 0
        self._channel: StoreChannel | None = None

    def on_forwarder_started(self, channel: StoreChannel) -> None:
        """Tell the forwarder, which has started, of the others' tables."""
        self._channel = channel
        self._exchange.subscribe(self)

    def on_channel_closed(self) -> None:
        """The forwarder's line has ended."""
        self._exchange.unsubscribe(self)
        self._channel = None

    def send_table(self, place: int, table: int) -> None:
        """Send a table on, if it is another place's. One that does not listen goes without it."""
        if self._channel is None or place == self._index:
            return
        try:
            self._channel.send_now(StoreMessage(address_tables=[place]), (table,))
        except (OSError, StoreLost) as error:
            if getattr(error, "errno", 0) != errno.EBADF:  # its line has just ended
                get_logger().warning(
                    "a forwarder counts max_connections_per_address without another one's clients", reason=str(error)
                )

    def accept_published(self, descriptors: Sequence[int]) -> None:
        """Pass on the table that the forwarder has published. Raises StoreLost where it is none."""
        self._published += 1
        if len(descriptors) != 1 or not is_sealed_table(descriptors[0]) or self._published > PUBLISHED_MAX:
            close_descriptors(descriptors)
            raise StoreLost("a forwarder that publishes what is no table of client addresses")
        self._exchange.publish_table(self._index, descriptors[0])
