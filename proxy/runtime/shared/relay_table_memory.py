"""The memory of a relay table: made by the supervisor, and made larger for a program whose table has more parts."""

import mmap
import os
import sys

from proxy.runtime.shared.memory import create_shared_memory
from proxy.runtime.shared.relay_table import IDS_USED, RELAYS_MAX, TABLE_BYTES, TO_BROKER, row


def create_table() -> int:
    """Create memory for a table, all zero; return its descriptor."""
    return create_shared_memory("relay-table", TABLE_BYTES)


def upgrade_table(descriptor: int) -> int:
    """Return a table in this program's size: a copy of one that an older program created, or the same.

    Closes the descriptor if a copy was made. Parts are only ever added behind those that are there; the rest of a copy
    is zero. No process may use the table meanwhile.
    """
    size = os.fstat(descriptor).st_size
    if size >= TABLE_BYTES:
        return descriptor
    new = create_table()
    with mmap.mmap(descriptor, size) as old, mmap.mmap(new, TABLE_BYTES) as copy:
        used = int.from_bytes(old[IDS_USED * 8 : IDS_USED * 8 + 8], sys.byteorder)
        rows = min(size, row(min(used, RELAYS_MAX) + 1, TO_BROKER) * 8)
        copy[:rows] = old[:rows]
    os.close(descriptor)
    return new
