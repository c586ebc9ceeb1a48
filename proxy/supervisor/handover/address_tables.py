"""The forwarders' tables of client addresses (proxy.runtime.shared.address_tables), passed on from each to all
others.
"""

import errno
import os
from collections.abc import Sequence

from proto.rpc_pb2 import StoreMessage
from proxy.runtime.observability.logs import get_logger
from proxy.runtime.shared.address_tables import is_sealed_table
from proxy.runtime.shared.fd_store_channel import StoreChannel, StoreLost, close_descriptors

PUBLISHED_MAX = 100
"""Tables that one forwarder may publish in its life: it makes one whenever the limit is set where it was not."""


class AddressTableExchange:
    """The last table of each place, and the lines over which the others are told."""

    def __init__(self) -> None:
        self._tables: dict[int, int] = {}
        self._lines: list[AddressTableChannel] = []

    def line(self, place: int) -> "AddressTableChannel":
        """A forwarder's part in it."""
        return AddressTableChannel(self, place)

    def join(self, line: "AddressTableChannel") -> None:
        """Tell a line of the other places' tables, now and from now on."""
        self._lines.append(line)
        for place, table in self._tables.items():
            line.tell(place, table)

    def leave(self, line: "AddressTableChannel") -> None:
        """Tell a line of nothing more."""
        if line in self._lines:
            self._lines.remove(line)

    def put(self, place: int, table: int) -> None:
        """Keep a place's table, and tell the others of it."""
        old = self._tables.pop(place, -1)
        if old >= 0:
            os.close(old)
        self._tables[place] = table
        for line in self._lines:
            line.tell(place, table)

    def close(self) -> None:
        """Close all tables."""
        close_descriptors(list(self._tables.values()))
        self._tables.clear()


class AddressTableChannel:
    """One forwarder's line to the fd store, as far as tables go over it."""

    def __init__(self, exchange: AddressTableExchange, place: int) -> None:
        self._exchange = exchange
        self._place = place
        self._published = 0
        self._channel: StoreChannel | None = None

    def begin(self, channel: StoreChannel) -> None:
        """Tell the forwarder, which has started, of the others' tables."""
        self._channel = channel
        self._exchange.join(self)

    def end(self) -> None:
        """The forwarder's line has ended."""
        self._exchange.leave(self)
        self._channel = None

    def tell(self, place: int, table: int) -> None:
        """Send a table on, if it is another place's. One that does not listen goes without it."""
        if self._channel is None or place == self._place:
            return
        try:
            self._channel.send_now(StoreMessage(address_tables=[place]), (table,))
        except (OSError, StoreLost) as error:
            if getattr(error, "errno", 0) != errno.EBADF:  # its line has just ended
                get_logger().warning(
                    "a forwarder counts max_connections_per_address without another one's clients", reason=str(error)
                )

    def take(self, descriptors: Sequence[int]) -> None:
        """Pass on the table that the forwarder has published. Raises StoreLost where it is none."""
        self._published += 1
        if len(descriptors) != 1 or not is_sealed_table(descriptors[0]) or self._published > PUBLISHED_MAX:
            close_descriptors(descriptors)
            raise StoreLost("a forwarder that publishes what is no table of client addresses")
        self._exchange.put(self._place, descriptors[0])
