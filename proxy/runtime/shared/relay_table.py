"""A forwarder's relays as its successor needs to know them: which pipe holds whose bytes, and what was moved.

The table is memory that outlives the process: the supervisor made it and holds its descriptor. A forwarder that is
killed in the middle of anything leaves it as it was between two stores of eight bytes. Sockets and pipes themselves are
in the supervisor's fd store (proxy.supervisor.handover.fd_store); all else of a relay (ends, errors) the kernel says
again.

Four parts, one after the other, all of cells of eight bytes:

* One row of four cells for each direction of a relay: the id of the pipe that is bound to it, bytes and operations
  moved, and one more. The first two rows are no relay's: they sum up the relays that have ended.
  A relay that stays in a forwarder which was replaced keeps its rows, and that process alone writes them until it sets
  ENDED_BEHIND or ends itself. Everything else (sums, journal, names, free rows) is the place's current forwarder's.
* One row for each direction of a relay whose frames are followed (proxy.forwarder.relay.expiring.splice_pump); the
first two sum up again.
* One row for each principal whose use is counted by name (proxy.forwarder.relay.usage): sums of relays that have ended.
* The journal of a sum: see ``RelayTable.give``.

The memory is sparse: rows that were never used cost nothing, so what is not followed is not looked for in the second.
"""

import mmap
import os
import sys
import time

from proxy.runtime.shared.memory import create_shared_memory

RELAYS_MAX = (1 << 17) - 1
"""Relays of one forwarder."""

PRINCIPALS_MAX = 1000
"""Principals that one forwarder can count by name."""

TO_BROKER = 0
TO_CLIENT = 1
WAYS = (TO_BROKER, TO_CLIENT)

# ---- the cells of a direction

_CELLS_PER_ROW = 4
PIPE = 0
"""Which pipe is bound; 0: none. Set before bytes enter the pipe, cleared after the last has left it: a pipe may be
bound and empty, but never hold bytes and be unbound.
"""
ENDED_BEHIND = -1
"""In PIPE of the way to the broker: the process that a relay was left behind in writes nothing more to its rows."""
BYTES = 1
OPERATIONS = 2
_MORE = 3
_IDS_USED = _MORE
"""Of the very first row: how many ids were ever in use."""
_PRINCIPAL = _MORE
"""Of a relay's first row: the number of its principal's row."""
_FOLLOWED = _CELLS_PER_ROW + _MORE
"""Of a relay's second row: whether its frames are followed."""

# ---- the cells of a direction whose frames are followed

_CELLS_PER_FRAMED_ROW = 16
BOUNDARY = 0
"""The next boundary between two frames, as an offset in what the source has ever sent. Set before bytes before it are
moved. Negative: the frame that ends there is being taken out. Less than what was consumed: the bytes of a frame's
beginning between the two are held in HEAD.
"""
HEAD = 1
HEAD_CELLS = 5
"""How many cells a frame's beginning may take. Set before it is consumed."""
INJECTING = 6
"""What is about to be put into the empty pipe that is bound; 0: nothing. While it is set, nothing leaves the pipe."""
MESSAGES = 7
PHASE = 8
EXPIRES_AT = 9
CHALLENGE_AT = 10
LAST_AT = 11
"""This and the two before it: monotonic time in ns; 0: never. From PHASE on of the way to the client only."""
CLOSING = 12
HAS_PRODUCER = 13
EXCHANGE = 14
"""Of the way to the broker only: where the proxy's own re-authentication at the broker stands
(proto.broker_exchange).
"""
OBSERVED = 15
"""Of the way to the client only: whether the end of this life was counted where ends are only observed."""

# ---- the cells of a principal

_CELLS_PER_PRINCIPAL = 64
_PRINCIPAL_BYTES = 0
_PRINCIPAL_MESSAGES = 2
"""This and the one before it: of the way to the broker; the next cell is of the way to the client."""
PRINCIPAL_SESSIONS = 4
_PRINCIPAL_SINCE = 5
"""When its first session began, in ms since 1970; 0: it had none."""
_NAME_BYTES = 7
_NAME = 8
NAME_BYTES_MAX = (_CELLS_PER_PRINCIPAL - _NAME) * 8

# ---- the journal of a sum

_JOURNAL_CELLS = 32
_SUMMED = 0
"""Which relay is being summed up, and its principal's number; the new sums stand behind it."""
_IDS = 1 << 20

_FRAMED_AT = (RELAYS_MAX + 1) * 2 * _CELLS_PER_ROW
_PRINCIPALS_AT = _FRAMED_AT + (RELAYS_MAX + 1) * 2 * _CELLS_PER_FRAMED_ROW
_JOURNAL_AT = _PRINCIPALS_AT + (PRINCIPALS_MAX + 2) * _CELLS_PER_PRINCIPAL
_BYTES = (_JOURNAL_AT + _JOURNAL_CELLS) * 8


def create_table() -> int:
    """A descriptor of memory for a table, all zero."""
    return create_shared_memory("relay-table", _BYTES)


def upgrade_table(descriptor: int) -> int:
    """A table that an older program made, in this one's size: a new descriptor, or the same. The rest of it is clear.

    Parts are only ever added behind those that are there. Nobody may use the table meanwhile.
    """
    size = os.fstat(descriptor).st_size
    if size >= _BYTES:
        return descriptor
    new = create_table()
    with mmap.mmap(descriptor, size) as old, mmap.mmap(new, _BYTES) as copy:
        used = int.from_bytes(old[_IDS_USED * 8 : _IDS_USED * 8 + 8], sys.byteorder)
        rows = min(size, (used + 1) * 2 * _CELLS_PER_ROW * 8)
        copy[:rows] = old[:rows]
    os.close(descriptor)
    return new


def row(relay_id: int, way: int) -> int:
    """Where the row of a relay's direction begins."""
    return (relay_id * 2 + way) * _CELLS_PER_ROW


def framed_row(relay_id: int, way: int) -> int:
    """Where the second row of a relay's direction begins, for those whose frames are followed."""
    return _FRAMED_AT + (relay_id * 2 + way) * _CELLS_PER_FRAMED_ROW


def principal_row(number: int) -> int:
    """Where the row of a principal begins."""
    return _PRINCIPALS_AT + number * _CELLS_PER_PRINCIPAL


def as_cell(data: bytes) -> int:
    """Up to eight bytes as a cell holds them, in memory's own order."""
    return int.from_bytes(data.ljust(8, b"\0"), sys.byteorder, signed=True)


def _sums_at(principal: int) -> list[int]:
    """The cells that a relay of this principal's is summed up in."""
    at = principal_row(principal)
    moved = [row(0, way) + cell for way in WAYS for cell in (BYTES, OPERATIONS)]
    messages = [framed_row(0, way) + MESSAGES for way in WAYS]
    return [
        *moved,
        *(at + _PRINCIPAL_BYTES + way for way in WAYS),
        *(at + _PRINCIPAL_MESSAGES + way for way in WAYS),
        *messages,
    ]


class RelayTable:
    """The table, seen from a forwarder; which rows are taken, is its own knowledge."""

    def __init__(self, descriptor: int = -1) -> None:
        """Use a table that the supervisor keeps, or, without one, memory of this process."""
        self.cells = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        self._free: list[int] = []
        self._followed: set[int] = set()

    # ---- rows

    def allocate_relay_id(self) -> int:
        """A free relay id; its rows are clear. Raises OverflowError where the table is full."""
        if self._free:
            return self._free.pop()
        if self.cells[_IDS_USED] == RELAYS_MAX:
            raise OverflowError(f"one forwarder keeps at most {RELAYS_MAX} relays")
        self.cells[_IDS_USED] += 1
        return self.cells[_IDS_USED]

    def record_principal(self, relay_id: int, principal: int) -> None:
        """Note whose a relay is: the number of the principal's row."""
        self.cells[row(relay_id, TO_BROKER) + _PRINCIPAL] = principal

    def record_framed(self, relay_id: int) -> None:
        """Note that a relay has rows of the second kind."""
        self.cells[row(relay_id, TO_BROKER) + _FOLLOWED] = 1
        self._followed.add(relay_id)

    def is_framed(self, relay_id: int) -> bool:
        """Whether a relay has rows of the second kind."""
        return bool(self.cells[row(relay_id, TO_BROKER) + _FOLLOWED])

    def release_relay_id(self, relay_id: int) -> None:
        """Sum up a relay that has ended, and free its rows.

        Exact, whenever this process is killed: the new sums are written down first, and who follows writes them where
        they belong once more.
        """
        cells = self.cells
        for place, sum_ in enumerate(self._new_sums(relay_id)):
            cells[_JOURNAL_AT + 1 + place] = sum_
        cells[_JOURNAL_AT + _SUMMED] = relay_id + _IDS * cells[row(relay_id, TO_BROKER) + _PRINCIPAL]
        self._sum_up()
        self._followed.discard(relay_id)
        self._free.append(relay_id)

    def _sum_up(self) -> None:
        """Do what the journal says; as often as needed."""
        cells = self.cells
        principal, relay_id = divmod(cells[_JOURNAL_AT + _SUMMED], _IDS)
        for place, total in enumerate(_sums_at(principal)):
            cells[total] = cells[_JOURNAL_AT + 1 + place]
        self._clear(relay_id)
        cells[_JOURNAL_AT + _SUMMED] = 0

    def record_ended_behind(self, relay_id: int) -> None:
        """Leave the final counts of a relay that was left behind to the forwarder whose table this is now."""
        self.cells[row(relay_id, TO_BROKER) + PIPE] = ENDED_BEHIND  # last: it may be summed up from now on

    def has_ended_behind(self, relay_id: int) -> bool:
        """Whether the process that a relay was left behind in has written its last to the relay's rows."""
        return self.cells[row(relay_id, TO_BROKER) + PIPE] == ENDED_BEHIND

    def _clear(self, relay_id: int) -> None:
        cells = self.cells
        first = row(relay_id, TO_BROKER)
        if cells[first + _FOLLOWED]:
            framed = framed_row(relay_id, TO_BROKER)
            for cell in range(framed, framed + 2 * _CELLS_PER_FRAMED_ROW):
                cells[cell] = 0
        for way in WAYS:
            for cell in (BYTES, OPERATIONS, PIPE):
                cells[row(relay_id, way) + cell] = 0
        cells[first + _FOLLOWED] = 0
        cells[first + _PRINCIPAL] = 0

    def _new_sums(self, relay_id: int) -> list[int]:
        cells = self.cells
        moved = [cells[row(relay_id, way) + cell] for way in WAYS for cell in (BYTES, OPERATIONS)]
        messages = self.messages_of(relay_id)
        more = [*moved, moved[0], moved[2], *messages, *messages]
        at = _sums_at(cells[row(relay_id, TO_BROKER) + _PRINCIPAL])
        return [cells[total] + one for total, one in zip(at, more, strict=True)]

    def adopt_rows(self, taken: set[int]) -> None:
        """Go on where a predecessor ended, with the relays that are left, and sum up all others.

        ``taken``: those that were taken over, and those that predecessors still have.
        """
        if self.cells[_JOURNAL_AT + _SUMMED]:
            self._sum_up()
        for relay_id in range(1, self.cells[_IDS_USED] + 1):
            if relay_id not in taken:
                self.release_relay_id(relay_id)
            elif self.cells[row(relay_id, TO_BROKER) + _FOLLOWED]:
                self._followed.add(relay_id)

    # ---- sums

    def total(self, way: int, cell: int) -> int:
        """A counter, summed over all relays: those that have ended, and those that live."""
        cells = self.cells
        return sum(cells[row(0, way) + cell : row(cells[_IDS_USED] + 1, way) : 2 * _CELLS_PER_ROW])

    def messages_of(self, relay_id: int) -> tuple[int, int]:
        """Messages to the broker and to the client; none where nobody counts them."""
        cells = self.cells
        if not cells[row(relay_id, TO_BROKER) + _FOLLOWED]:
            return 0, 0
        return tuple(cells[framed_row(relay_id, way) + MESSAGES] for way in WAYS)  # type: ignore[return-value]

    def messages_total(self, way: int) -> int:
        """Of all relays whose messages are counted."""
        ended = self.cells[framed_row(0, way) + MESSAGES]
        return ended + sum(self.messages_of(relay_id)[way] for relay_id in self._followed)

    # ---- principals

    def principal_name(self, number: int) -> str:
        """The name in a principal's row; empty: the row is free."""
        at = principal_row(number)
        size = self.cells[at + _NAME_BYTES]
        return self.cells[at + _NAME : at + _CELLS_PER_PRINCIPAL].tobytes()[:size].decode()

    def name_principal(self, number: int, name: str) -> None:
        """Take a free row for a name of at most NAME_BYTES_MAX bytes."""
        at, data = principal_row(number), name.encode()
        for cell, part in enumerate(range(0, len(data), 8)):
            self.cells[at + _NAME + cell] = as_cell(data[part : part + 8])
        self.cells[at + _NAME_BYTES] = len(data)  # last: a name that is half written is none

    def add_session(self, number: int) -> None:
        """Count a relay that begins."""
        at = principal_row(number)
        if not self.cells[at + _PRINCIPAL_SINCE]:
            self.cells[at + _PRINCIPAL_SINCE] = int(time.time() * 1000)
        self.cells[at + PRINCIPAL_SESSIONS] += 1

    def principal_since_s(self, number: int) -> float | None:
        """When a principal's first session began, in seconds since 1970; all its sums were zero before."""
        return self.cells[principal_row(number) + _PRINCIPAL_SINCE] / 1000 or None

    def principal_sums(self, numbers: range) -> dict[int, list[int]]:
        """For each of these principals: bytes and messages of all its relays, [to the broker, to the client] each, then
        sessions.
        """
        cells = self.cells
        sums = {number: list(cells[principal_row(number) : principal_row(number) + 5]) for number in numbers}
        for relay_id in range(1, cells[_IDS_USED] + 1):  # those that are free are clear, and add nothing
            first = row(relay_id, TO_BROKER)
            mine = sums.get(cells[first + _PRINCIPAL])
            if mine is not None:
                mine[0] += cells[first + BYTES]
                mine[1] += cells[first + _CELLS_PER_ROW + BYTES]
        for relay_id in self._followed:
            mine = sums.get(cells[row(relay_id, TO_BROKER) + _PRINCIPAL])
            if mine is not None:
                mine[2] += cells[framed_row(relay_id, TO_BROKER) + MESSAGES]
                mine[3] += cells[framed_row(relay_id, TO_CLIENT) + MESSAGES]
        return sums
