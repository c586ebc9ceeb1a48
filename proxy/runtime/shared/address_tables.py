"""Tables of the connections that each client address has at each forwarder, for ``limits.max_connections_per_address``.

Each forwarder writes a table of its own, in memory that it has created and sealed: no other process can ever map it for
writing (F_SEAL_FUTURE_WRITE, memfd_create(2)). The supervisor checks the seals and passes the descriptor on to the
others; they add up the tables. A reader may be late by the few connections that are being accepted at that very moment.

A table is trusted only as long as it claims no more connections than one forwarder may have: a compromised forwarder
can have some addresses refused, but not all.

Two cells of eight bytes before the rows hold the multiplier and the offset that spread addresses over the rows; the
writer chooses them at random, so no client can choose addresses that collide. Each row is an address as a number and
its connections. An address is in one of the _WINDOW rows from its own on; where all of them are taken, it is not
counted for others.
"""

import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import trio

from proxy.common.logs import get_logger

_ROWS_BITS = 15
_WINDOW = 16
_HEAD_CELLS = 2
_CELLS = _HEAD_CELLS + 2 * ((1 << _ROWS_BITS) + _WINDOW)
TABLE_BYTES = _CELLS * 8
_MASK = (1 << 64) - 1

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; the fcntl module has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE

CHECK_INTERVAL_S = 1.0
"""For how long a table's sum is used before it is added up again."""

_IPV4_AT = 0x0100_0000 << 32
"""Where IPv4 addresses are among IPv6 networks: in the discard prefix, which no host has (RFC 6666)."""


def _number_of(network: str) -> int:
    """Return a network's number, different for each network. Raises OSError if it is no network."""
    if ":" in network:
        return int.from_bytes(socket.inet_pton(socket.AF_INET6, network.removesuffix("/64"))[:8]) or 1
    return _IPV4_AT | int.from_bytes(socket.inet_pton(socket.AF_INET, network))


def is_sealed_table(descriptor: int) -> bool:
    """Return whether this is a table that only the process which created it can write, and no process can truncate."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEALS == _SEALS and os.fstat(descriptor).st_size == TABLE_BYTES


class _Rows:
    """A table's cells, for its writer or for a reader."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cells = memoryview(memory).cast("Q")
        self._factor, self._salt = 0, 0
        self._read_head()

    def _read_head(self) -> None:
        self._factor, self._salt = self._cells[0], self._cells[1]

    def spread(self, factor: int, salt: int) -> None:
        """Set how addresses are spread over the rows, before the first is written."""
        self._cells[0], self._cells[1] = factor, salt
        self._read_head()

    def _window_of(self, number: int) -> int:
        row = ((self._factor * number + self._salt) & _MASK) >> (64 - _ROWS_BITS)
        return _HEAD_CELLS + 2 * row

    def count_of(self, number: int) -> int:
        """Return an address's connections by this table."""
        at = self._window_of(number)
        window = self._cells[at : at + 2 * _WINDOW].tolist()
        for cell in range(0, 2 * _WINDOW, 2):
            if window[cell] == number:
                return int(window[cell + 1])
        return 0

    def set(self, number: int, count: int) -> None:
        """Write an address's connections, unless there is no row left for it."""
        at, cells = self._window_of(number), self._cells
        free = -1
        for cell in range(at, at + 2 * _WINDOW, 2):
            if cells[cell] == number:
                free = cell
                break
            if free < 0 and not cells[cell + 1]:
                free = cell
        if free >= 0 and (count or cells[free] == number):
            cells[free] = number
            cells[free + 1] = count

    def total(self) -> int:
        """Return the sum of all connections in the table."""
        return sum(self._cells[_HEAD_CELLS + 1 :: 2])


class _OthersTable:
    """Another forwarder's table, read only."""

    def __init__(self, descriptor: int) -> None:
        self.rows = _Rows(mmap.mmap(descriptor, TABLE_BYTES, prot=mmap.PROT_READ))
        self._added_up_at = float("-inf")
        self._total = 0

    def is_credible(self, connections_max: int) -> bool:
        """Return whether it claims no more connections than one forwarder may have."""
        now = trio.current_time()
        if now - self._added_up_at >= CHECK_INTERVAL_S:
            self._added_up_at, self._total = now, self.rows.total()
        return self._total <= connections_max


class AddressTables:
    """This forwarder's table, and those of the others."""

    def __init__(self) -> None:
        self._own: _Rows | None = None
        self._others: dict[int, _OthersTable] = {}
        self._publish: Callable[[int], None] | None = None
        self._unpublished = -1

    def start_publishing(self, publish: Callable[[int], None]) -> None:
        """Call ``publish`` with the descriptor of each table, which it closes; also of one that exists already."""
        self._publish = publish
        if self._unpublished >= 0:
            descriptor, self._unpublished = self._unpublished, -1
            publish(descriptor)

    def track_connections(self, by_address: Mapping[str, int] | None) -> None:
        """Write this forwarder's connections to a table from now on, which starts with these; None: to none."""
        if by_address is None:
            self._own = None
            return
        if self._own is not None:
            return
        descriptor = os.memfd_create("client-addresses", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, TABLE_BYTES)
        self._own = _Rows(mmap.mmap(descriptor, TABLE_BYTES))
        self._own.spread(secrets.randbits(64) | 1, secrets.randbits(64))
        for address, count in by_address.items():
            self.set_connections(address, count)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            get_logger().warning("max_connections_per_address is counted by each forwarder alone: this needs Linux 5.1")
            return
        if self._publish is None:
            self._unpublished = descriptor
        else:
            self._publish(descriptor)

    def set_connections(self, address: str, count: int) -> None:
        """Set how many connections an address has here."""
        if self._own is not None:
            with suppress(OSError):
                self._own.set(_number_of(address), count)

    def read_table(self, forwarder: int, descriptor: int) -> None:
        """Read another forwarder's new table from now on; closes the descriptor."""
        try:
            self._others[forwarder] = _OthersTable(descriptor)
        finally:
            os.close(descriptor)

    def others_connections(self, address: str, enough: int, connections_max: int) -> int:
        """Return how many connections an address has at the other forwarders.

        Only if there may be ``enough`` of them, each table is added up: one that claims more than ``connections_max``
        in all does not count.
        """
        if not self._others:
            return 0
        try:
            number = _number_of(address)
        except OSError:
            return 0
        counts = [(table, table.rows.count_of(number)) for table in self._others.values()]
        total = sum(count for _, count in counts)
        if total < enough:
            return total
        return sum(count for table, count in counts if count and table.is_credible(connections_max))
