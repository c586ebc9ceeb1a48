"""Exchange of the forwarders' tables of client addresses (proxy.runtime.shared.address_tables)."""

import errno
import os
from collections.abc import Sequence

from proto.rpc_pb2 import StoreMessage
from proxy.common.logs import get_logger
from proxy.runtime.shared.address_tables import is_sealed_table
from proxy.runtime.shared.fd_store_channel import StoreChannel, StoreLost, close_descriptors

PUBLISHED_MAX = 100
"""Tables that one forwarder may publish: it makes one whenever a reload turns the limit on."""


class AddressTableExchange:
    """The latest table of each forwarder slot, and the channels that receive the others' tables."""

    def __init__(self) -> None:
        self._tables: dict[int, int] = {}
        self._subscribers: list[AddressTableChannel] = []

    def open_channel(self, index: int) -> "AddressTableChannel":
        """Create the channel of the forwarder slot with this index."""
        return AddressTableChannel(self, index)

    def subscribe(self, channel: "AddressTableChannel") -> None:
        """Send a channel the other slots' tables, those that exist and every later one."""
        self._subscribers.append(channel)
        for index, table in self._tables.items():
            channel.send_table(index, table)

    def unsubscribe(self, channel: "AddressTableChannel") -> None:
        """Stop sending tables to a channel; does nothing for one that is not subscribed."""
        if channel in self._subscribers:
            self._subscribers.remove(channel)

    def publish_table(self, index: int, table: int) -> None:
        """Replace a slot's table by this descriptor, and send it to all other slots."""
        old = self._tables.pop(index, -1)
        if old >= 0:
            os.close(old)
        self._tables[index] = table
        for channel in self._subscribers:
            channel.send_table(index, table)

    def close(self) -> None:
        """Close the descriptors of all tables."""
        close_descriptors(list(self._tables.values()))
        self._tables.clear()


class AddressTableChannel:
    """The part of a forwarder's fd store channel that carries address tables."""

    def __init__(self, exchange: AddressTableExchange, index: int) -> None:
        self._exchange = exchange
        self._index = index
        self._published = 0
        self._channel: StoreChannel | None = None

    def on_forwarder_started(self, channel: StoreChannel) -> None:
        """Send a forwarder that has started the others' tables over its channel."""
        self._channel = channel
        self._exchange.subscribe(self)

    def on_channel_closed(self) -> None:
        """Forget the channel of a forwarder that has ended."""
        self._exchange.unsubscribe(self)
        self._channel = None

    def send_table(self, index: int, table: int) -> None:
        """Send another slot's table to the forwarder; one that does not read its channel goes without it."""
        if self._channel is None or index == self._index:
            return
        try:
            self._channel.send_now(StoreMessage(address_tables=[index]), (table,))
        except (OSError, StoreLost) as error:
            if getattr(error, "errno", 0) != errno.EBADF:  # its channel has just been closed
                get_logger().warning(
                    "a forwarder counts max_connections_per_address without another one's clients", reason=str(error)
                )

    def accept_published(self, descriptors: Sequence[int]) -> None:
        """Publish the one table that the forwarder has sent. Raises StoreLost for what is none."""
        self._published += 1
        if len(descriptors) != 1 or not is_sealed_table(descriptors[0]) or self._published > PUBLISHED_MAX:
            close_descriptors(descriptors)
            raise StoreLost("a forwarder that publishes what is no table of client addresses")
        self._exchange.publish_table(self._index, descriptors[0])
