"""A forwarder's relays as its successor needs to know them: which pipe holds whose bytes, and what was moved.

The table is memory that outlives the process: the supervisor made it and holds its descriptor. A forwarder that is
killed in the middle of anything leaves it as it was between two stores of eight bytes. Sockets and pipes themselves are
in the supervisor's fd store (proxy.supervisor.fd_store); all else of a relay (ends, errors) the kernel says again.

One row of four cells for each direction of a relay: the id of the pipe that is bound to it, bytes and operations moved,
and one to spare. The first two rows are no relay's: they sum up the relays that have ended, and the spare cell of the
first says how many ids were ever in use.
"""

import mmap

from proxy.runtime.shared_memory import new_shared_memory

RELAYS_MAX = (1 << 17) - 1
"""Relays of one forwarder. The memory is sparse: rows that were never used cost nothing."""

_CELLS_PER_ROW = 4
_BYTES = (RELAYS_MAX + 1) * 2 * _CELLS_PER_ROW * 8

PIPE = 0
"""The cell of a row that says which pipe is bound; 0: none. Set before bytes enter the pipe, cleared after the last
has left it: a pipe may be bound and empty, but never hold bytes and be unbound.
"""
BYTES = 1
OPERATIONS = 2
_IDS_USED = 3

TO_BROKER = 0
TO_CLIENT = 1


def new_table() -> int:
    """A descriptor of memory for a table, all zero."""
    return new_shared_memory("relay-table", _BYTES)


def row(relay_id: int, way: int) -> int:
    """Where the row of a relay's direction begins."""
    return (relay_id * 2 + way) * _CELLS_PER_ROW


class RelayTable:
    """The table, seen from a forwarder; which rows are taken, is its own knowledge."""

    def __init__(self, descriptor: int = -1) -> None:
        """Use a table that the supervisor keeps, or, without one, memory of this process."""
        self.cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        self._free: list[int] = []

    def take(self) -> int:
        """A free relay id; its rows are clear. Raises OverflowError where the table is full."""
        if self._free:
            return self._free.pop()
        if self.cells[_IDS_USED] == RELAYS_MAX:
            raise OverflowError(f"one forwarder keeps at most {RELAYS_MAX} relays")
        self.cells[_IDS_USED] += 1
        return self.cells[_IDS_USED]

    def give(self, relay_id: int) -> None:
        """Sum up a relay that has ended, and free its rows."""
        cells = self.cells
        for way in (TO_BROKER, TO_CLIENT):
            at, total = row(relay_id, way), row(0, way)
            for cell in (BYTES, OPERATIONS):
                moved, cells[at + cell] = cells[at + cell], 0
                cells[total + cell] += moved
            cells[at + PIPE] = 0
        self._free.append(relay_id)

    def adopt(self, taken: set[int]) -> None:
        """Go on where a predecessor ended, with the relays that are left."""
        for relay_id in range(1, self.cells[_IDS_USED] + 1):
            if relay_id not in taken:
                self.give(relay_id)

    def total(self, way: int, cell: int) -> int:
        """A counter, summed over all relays: those that have ended, and those that live."""
        cells = self.cells
        return sum(cells[row(0, way) + cell : row(cells[_IDS_USED] + 1, way) : 2 * _CELLS_PER_ROW])
