"""The relay table: what a forwarder's successor needs to know of its relays, in memory that outlives the process.

It tells which pipe holds the bytes of which direction, and how much was moved. The supervisor creates the table and
holds its descriptor. A forwarder that is killed in the middle of anything leaves it as it was between two stores of
eight bytes. Sockets and pipes themselves are in the supervisor's fd store (proxy.supervisor.handover.fd_store); all
else of a relay (ends, errors) the kernel says again.

Four parts, one after the other, all of cells of eight bytes:

* One row of four cells for each direction of a relay: the id of the pipe that is bound to it, bytes and operations
  moved, and one more. The first two rows are no relay's: they sum up the relays that have ended.
  A relay that stays in a forwarder which was replaced keeps its rows, and that process alone writes them until it sets
  ENDED_BEHIND or ends itself. Everything else (sums, journal, names, free rows) is the current forwarder's.
* One row for each direction of a framed relay, written and read by proxy.forwarder.relay.framed_journal; the first
  two sum up again.
* One row for each principal of which the use is counted by name (proxy.forwarder.relay.usage): sums of relays that have
  ended. Relays refer to it by its number, so it gets another name only while no relay does.
* The journal of a sum: see ``RelayTable.release_relay_id``.

**No cell is trusted.** A forwarder that was taken over may have written anything, so a number is only used within its
range: a relay with nonsense in its rows may end, or be counted wrongly, and nothing else.

The memory is sparse: rows that were never used cost nothing, so the second part is read only for framed relays.
"""

import mmap
import os
import sys
import time
from collections.abc import Iterable, Sequence

from proxy.runtime.shared.memory import create_shared_memory

RELAYS_MAX = (1 << 17) - 1
"""Relays of one forwarder."""

PRINCIPALS_MAX = 1000
"""Principals that one forwarder can count by name."""

_PRINCIPALS_OF_OUR_OWN = 2
"""Further rows: of all others together, and of clients that were not authenticated."""

TO_BROKER = 0
TO_CLIENT = 1
WAYS = (TO_BROKER, TO_CLIENT)

# ---- the cells of a direction

_CELLS_PER_ROW = 4
PIPE = 0
"""The id of the bound pipe; 0: none. Set before bytes enter the pipe, cleared after the last has left it: a pipe may be
bound and empty, but never hold bytes and be unbound.
"""
ENDED_BEHIND = -1
"""In PIPE of the way to the broker: the process that a relay was left behind in writes nothing more to its rows."""
BYTES = 1
OPERATIONS = 2
_MORE = 3
IDS_USED = _MORE
"""Of the very first row: how many ids were ever in use."""
_PRINCIPAL = _MORE
"""Of a relay's first row: the number of its principal's row."""
_FRAMED = _CELLS_PER_ROW + _MORE
"""Of a relay's second row: whether it is framed, and has rows of the second part."""

# ---- the cells of a direction of a framed relay

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
"""What is about to be injected into the empty pipe that is bound; 0: nothing. While it is set, nothing leaves the
pipe.
"""
MESSAGES = 7
PHASE = 8
EXPIRES_AT = 9
CHALLENGE_AT = 10
LAST_AT = 11
"""This and the two before it: monotonic time in ns; 0: never. From PHASE on of the way to the client only."""
CLOSING = 12
HAS_PRODUCER = 13
EXCHANGE = 14
"""Of the way to the broker only: the phase of the proxy's own re-authentication at the broker
(proto.broker_exchange).
"""
OBSERVED = 15
"""Of the way to the client only: whether the session's end was counted where ends are only observed."""

# ---- the cells of a principal

_CELLS_PER_PRINCIPAL = 64
_PRINCIPAL_BYTES = 0
_PRINCIPAL_MESSAGES = 2
"""This and the one before it: of the way to the broker; the next cell is of the way to the client."""
PRINCIPAL_SESSIONS = 4
_PRINCIPAL_SINCE = 5
"""When its first session began, in ms since 1970; 0: it had none."""
_OWNER = 6
"""A number for the owner of the row: the address or proxy of the client that it was named for; 0: unknown."""
_NAME_BYTES = 7
"""0: the row never had a name."""
_NO_NAME = -1
"""In _NAME_BYTES while a row gets another name."""
_NAME = 8
NAME_BYTES_MAX = (_CELLS_PER_PRINCIPAL - _NAME) * 8

# ---- the journal of a sum

_JOURNAL_CELLS = 32
_SUMMED = 0
"""Which relay is being summed up, and its principal's number; the new sums are behind it."""
_IDS = 1 << 20

_ROW_MAX = 1 << 60
_SUM_MAX = 1 << 62
"""Bounds of a counter and of a sum of counters, so that no addition leaves a cell's range."""

ROW_CELLS = 2 * _CELLS_PER_ROW
ROW_PRINCIPAL = _PRINCIPAL
ROW_TO_BROKER = BYTES
ROW_TO_CLIENT = _CELLS_PER_ROW + BYTES
"""See ``RelayTable.principals_and_bytes``."""

_FRAMED_AT = (RELAYS_MAX + 1) * 2 * _CELLS_PER_ROW
_PRINCIPALS_AT = _FRAMED_AT + (RELAYS_MAX + 1) * 2 * _CELLS_PER_FRAMED_ROW
_JOURNAL_AT = _PRINCIPALS_AT + (PRINCIPALS_MAX + _PRINCIPALS_OF_OUR_OWN) * _CELLS_PER_PRINCIPAL
TABLE_BYTES = (_JOURNAL_AT + _JOURNAL_CELLS) * 8


def row(relay_id: int, way: int) -> int:
    """Return where the row of a relay's direction begins."""
    return (relay_id * 2 + way) * _CELLS_PER_ROW


def framed_row(relay_id: int, way: int) -> int:
    """Return where the second row of a relay's direction begins, for framed relays."""
    return _FRAMED_AT + (relay_id * 2 + way) * _CELLS_PER_FRAMED_ROW


def principal_row(number: int) -> int:
    """Return where the row of a principal begins."""
    return _PRINCIPALS_AT + number * _CELLS_PER_PRINCIPAL


def as_cell(data: bytes) -> int:
    """Return up to eight bytes as a cell holds them, in memory's own order."""
    return int.from_bytes(data.ljust(8, b"\0"), sys.byteorder, signed=True)


_MOVED = tuple(way * _CELLS_PER_ROW + cell for way in WAYS for cell in (BYTES, OPERATIONS))
_SUMMED_MESSAGES = tuple(framed_row(0, way) + MESSAGES for way in WAYS)
_CLEARED = tuple(way * _CELLS_PER_ROW + cell for way in WAYS for cell in (BYTES, OPERATIONS, PIPE))


def _sums_at(principal: int) -> tuple[int, ...]:
    """Return the cells that a relay of this principal is summed up in."""
    to_broker = principal_row(principal) + _PRINCIPAL_BYTES
    messages = principal_row(principal) + _PRINCIPAL_MESSAGES
    return (*_MOVED, to_broker, to_broker + 1, messages, messages + 1, *_SUMMED_MESSAGES)


def _within(number: int, most: int) -> int:
    """Return a number's nearest one from 0 to ``most``."""
    return min(max(number, 0), most)


class RelayTable:
    """The table as a forwarder uses it. Which rows are free is known to the forwarder alone.

    Operations on a direction's row take the row's position (``row``). A successor relies on their order: ``bind_pipe``
    before bytes enter the pipe, ``add_moved`` once they have left it, ``unbind_pipe`` when it is empty. Only the
    methods of the pumps that run for each portion write ``cells`` themselves, in the same order.
    """

    def __init__(self, descriptor: int = -1) -> None:
        """Use a table that the supervisor keeps or, without one, memory of this process."""
        self.cells = memoryview(mmap.mmap(descriptor, TABLE_BYTES)).cast("q")
        self._free: list[int] = []
        self._framed: set[int] = set()

    # ---- a direction

    def bind_pipe(self, direction_row: int, pipe_id: int) -> None:
        """Bind a pipe to a direction, before any of its bytes enter the pipe."""
        self.cells[direction_row + PIPE] = pipe_id

    def unbind_pipe(self, direction_row: int) -> None:
        """Unbind a direction's pipe, which is empty, or of which the bytes are dropped."""
        self.cells[direction_row + PIPE] = 0

    def bound_pipe(self, direction_row: int) -> int:
        """Return the id of the pipe that is bound to a direction; 0: none."""
        return self.cells[direction_row + PIPE]

    def add_moved(self, direction_row: int, size: int) -> None:
        """Count a portion of ``size`` bytes that has reached a direction's sink."""
        self.cells[direction_row + BYTES] += size
        self.cells[direction_row + OPERATIONS] += 1

    def add_bytes(self, direction_row: int, size: int) -> None:
        """Count bytes that were sent ahead of a relay, and are no portion."""
        self.cells[direction_row + BYTES] += size

    def bytes_moved(self, direction_row: int) -> int:
        """Return how many bytes have ever reached a direction's sink."""
        return self.cells[direction_row + BYTES]

    def add_messages(self, relay_id: int, way: int, messages: int) -> None:
        """Count messages of a direction of a framed relay."""
        self.cells[framed_row(relay_id, way) + MESSAGES] += messages

    # ---- rows

    def allocate_relay_id(self) -> int:
        """Return a free relay id, of which the rows are zero. Raises OverflowError if the table is full."""
        if self._free:
            return self._free.pop()
        used = self._ids_used()
        if used == RELAYS_MAX:
            raise OverflowError(f"one forwarder keeps at most {RELAYS_MAX} relays")
        self.cells[IDS_USED] = used + 1
        return used + 1

    def _ids_used(self) -> int:
        return _within(self.cells[IDS_USED], RELAYS_MAX)

    def principal_of(self, relay_id: int) -> int:
        """Return the number of a relay's principal; 0, which all others share, where the row has none."""
        number = self.cells[row(relay_id, TO_BROKER) + _PRINCIPAL]
        return number if 0 <= number < PRINCIPALS_MAX + _PRINCIPALS_OF_OUR_OWN else 0

    def record_principal(self, relay_id: int, principal: int) -> None:
        """Record the number of the principal's row that a relay is counted in."""
        self.cells[row(relay_id, TO_BROKER) + _PRINCIPAL] = principal

    def record_framed(self, relay_id: int) -> None:
        """Record that a relay has rows of the second part."""
        self.cells[row(relay_id, TO_BROKER) + _FRAMED] = 1
        self._framed.add(relay_id)

    def is_framed(self, relay_id: int) -> bool:
        """Return whether a relay has rows of the second part."""
        return bool(self.cells[row(relay_id, TO_BROKER) + _FRAMED])

    def release_relay_id(self, relay_id: int) -> None:
        """Sum up a relay that has ended, and free its rows.

        Exact, whenever this process is killed: the new sums are written to the journal first, and a successor writes
        them where they belong once more.
        """
        cells = self.cells
        for position, sum_ in enumerate(self._new_sums(relay_id)):
            cells[_JOURNAL_AT + 1 + position] = sum_
        cells[_JOURNAL_AT + _SUMMED] = relay_id + _IDS * self.principal_of(relay_id)
        self._sum_up()
        self._framed.discard(relay_id)
        self._free.append(relay_id)

    def _sum_up(self) -> None:
        """Write the sums of the journal where they belong; doing so again changes nothing."""
        cells = self.cells
        principal, relay_id = divmod(cells[_JOURNAL_AT + _SUMMED], _IDS)
        if 0 <= principal < PRINCIPALS_MAX + _PRINCIPALS_OF_OUR_OWN and 0 < relay_id <= RELAYS_MAX:
            for position, total in enumerate(_sums_at(principal)):
                cells[total] = cells[_JOURNAL_AT + 1 + position]
            self._clear(relay_id)
        cells[_JOURNAL_AT + _SUMMED] = 0

    def record_ended_behind(self, relay_id: int) -> None:
        """Record that this process writes nothing more to the rows of a relay that was left behind in it: the successor
        may sum them up.
        """
        self.cells[row(relay_id, TO_BROKER) + PIPE] = ENDED_BEHIND  # last: it may be summed up from now on

    def has_ended_behind(self, relay_id: int) -> bool:
        """Return whether the process that a relay was left behind in writes nothing more to the relay's rows."""
        return self.cells[row(relay_id, TO_BROKER) + PIPE] == ENDED_BEHIND

    def _clear(self, relay_id: int) -> None:
        cells = self.cells
        first = row(relay_id, TO_BROKER)
        if cells[first + _FRAMED]:
            framed = framed_row(relay_id, TO_BROKER)
            for cell in range(framed, framed + 2 * _CELLS_PER_FRAMED_ROW):
                cells[cell] = 0
        for cell in _CLEARED:
            cells[first + cell] = 0
        cells[first + _FRAMED] = 0
        cells[first + _PRINCIPAL] = 0

    def _new_sums(self, relay_id: int) -> list[int]:
        cells = self.cells
        first = row(relay_id, TO_BROKER)
        moved = [cells[first + cell] for cell in _MOVED]
        messages = self.messages_of(relay_id)
        more = [*moved, moved[0], moved[2], *messages, *messages]
        sums = []
        for total, one in zip(_sums_at(self.principal_of(relay_id)), more, strict=True):
            sum_ = cells[total] + one
            in_range = 0 <= one <= _ROW_MAX and one <= sum_ <= _SUM_MAX
            sums.append(sum_ if in_range else _within(cells[total] + _within(one, _ROW_MAX), _SUM_MAX))
        return sums

    def adopt_rows(self, taken: set[int]) -> None:
        """Continue a predecessor's table: keep the rows of the relays in ``taken``, and sum up all others.

        ``taken``: the relays that were taken over, and those that predecessors still have.
        """
        if self.cells[_JOURNAL_AT + _SUMMED]:
            self._sum_up()
        used = self.cells[IDS_USED] = max(self._ids_used(), *taken, 0)
        for relay_id in range(1, used + 1):
            if relay_id not in taken:
                if any(self.cells[row(relay_id, TO_BROKER) : row(relay_id + 1, TO_BROKER)]):
                    self.release_relay_id(relay_id)
                else:
                    self._free.append(relay_id)
                continue
            self._repair(relay_id)
            if self.cells[row(relay_id, TO_BROKER) + _FRAMED]:
                self._framed.add(relay_id)

    def _repair(self, relay_id: int) -> None:
        """Bring the numbers of a relay into their range. A session without a sensible end has ended."""
        cells, framed = self.cells, self.cells[row(relay_id, TO_BROKER) + _FRAMED]
        for way in WAYS:
            numbers = {row(relay_id, way) + cell: 0 for cell in (BYTES, OPERATIONS)}
            if framed:
                at = framed_row(relay_id, way)
                numbers |= {at + MESSAGES: 0, at + CHALLENGE_AT: 0, at + LAST_AT: 0, at + EXPIRES_AT: 1}
                if abs(cells[at + BOUNDARY]) > _ROW_MAX:
                    cells[at + BOUNDARY] = 0
            for cell, otherwise in numbers.items():
                if not 0 <= cells[cell] <= _ROW_MAX:
                    cells[cell] = otherwise

    # ---- sums

    def total(self, way: int, cell: int) -> int:
        """Return a counter summed over all relays, live ones and those that have ended."""
        cells = self.cells
        return sum(cells[row(0, way) + cell : row(self._ids_used() + 1, way) : 2 * _CELLS_PER_ROW])

    def messages_of(self, relay_id: int) -> tuple[int, int]:
        """Return a relay's messages to the broker and to the client; zeros where they are not counted."""
        cells = self.cells
        if not cells[row(relay_id, TO_BROKER) + _FRAMED]:
            return 0, 0
        return tuple(cells[framed_row(relay_id, way) + MESSAGES] for way in WAYS)  # type: ignore[return-value]

    def messages_total(self, way: int) -> int:
        """Return the messages of one direction, summed over all relays of which they are counted."""
        ended = self.cells[framed_row(0, way) + MESSAGES]
        return ended + sum(self.messages_of(relay_id)[way] for relay_id in self._framed)

    # ---- principals

    def principal_names(self) -> dict[int, str]:
        """Return the name in each row that ever had one, by number; empty where a predecessor was killed while it wrote
        another one.
        """
        names: dict[int, str] = {}
        for number in range(_PRINCIPALS_OF_OUR_OWN, PRINCIPALS_MAX + _PRINCIPALS_OF_OUR_OWN):
            if not self.cells[principal_row(number) + _NAME_BYTES]:
                break  # rows are first named in order; those that never were take no memory unless they are read
            names[number] = self.principal_name(number)
        return names

    def principal_name(self, number: int) -> str:
        """Return the name in a principal's row; empty if the row is free."""
        at = principal_row(number)
        size = _within(self.cells[at + _NAME_BYTES], NAME_BYTES_MAX)
        return self.cells[at + _NAME : at + _CELLS_PER_PRINCIPAL].tobytes()[:size].decode(errors="replace")

    def owner_of_principal(self, number: int) -> int:
        """Return the number of the owner of a principal's row; 0 if it is unknown."""
        return self.cells[principal_row(number) + _OWNER]

    def name_principal(self, number: int, name: str, owner: int = 0) -> None:
        """Write a name of at most NAME_BYTES_MAX bytes, and the number of its owner, to a row that no relay refers to;
        its sums begin at zero.
        """
        at, data = principal_row(number), name.encode()
        self.cells[at + _NAME_BYTES] = _NO_NAME  # first: the sums of a name are never told in part
        for cell in range(at, at + _NAME_BYTES):
            self.cells[cell] = 0
        self.cells[at + _OWNER] = owner
        for cell, part in enumerate(range(0, len(data), 8)):
            self.cells[at + _NAME + cell] = as_cell(data[part : part + 8])
        self.cells[at + _NAME_BYTES] = len(data)  # last: a name that is half written does not count

    def add_session(self, number: int) -> None:
        """Count a relay that starts."""
        at = principal_row(number)
        if not self.cells[at + _PRINCIPAL_SINCE]:
            self.cells[at + _PRINCIPAL_SINCE] = int(time.time() * 1000)
        self.cells[at + PRINCIPAL_SESSIONS] = _within(self.cells[at + PRINCIPAL_SESSIONS] + 1, _SUM_MAX)

    def principal_since_s(self, number: int) -> float | None:
        """Return when a principal's first session began, in seconds since 1970; all its sums were zero before.

        None if it had no session yet.
        """
        return self.cells[principal_row(number) + _PRINCIPAL_SINCE] / 1000 or None

    def principals_with_relays(self) -> set[int]:
        """Return the numbers of the rows that relays refer to, those left behind in predecessors included."""
        first, end = row(1, TO_BROKER) + _PRINCIPAL, row(self._ids_used() + 1, TO_BROKER)
        return set(self.cells[first : end : 2 * _CELLS_PER_ROW])

    def sums_of_ended(self, number: int) -> tuple[int, int]:
        """Return a principal's bytes to the broker and to the client, over its relays that have ended."""
        at = principal_row(number) + _PRINCIPAL_BYTES
        return self.cells[at], self.cells[at + 1]

    def principals_and_bytes(self) -> Sequence[int]:
        """Return a copy of all relays' rows: of each relay, the first one's at 0, ROW_CELLS cells, with the principal's
        number, the bytes to the broker and those to the client at the offsets ROW_PRINCIPAL, ROW_TO_BROKER and
        ROW_TO_CLIENT.
        """
        rows = self.cells[row(1, TO_BROKER) : row(self._ids_used() + 1, TO_BROKER)]
        return memoryview(rows.tobytes()).cast("q")

    def principal_sums(self, numbers: Iterable[int]) -> dict[int, list[int]]:
        """Return five sums for each of these principals, over all its relays: bytes to the broker, bytes to the client,
        messages to the broker, messages to the client, sessions.
        """
        cells = self.cells
        sums = {number: list(cells[principal_row(number) : principal_row(number) + 5]) for number in numbers}
        for relay_id in range(1, self._ids_used() + 1):  # those that are free are clear, and add nothing
            first = row(relay_id, TO_BROKER)
            mine = sums.get(cells[first + _PRINCIPAL])
            if mine is not None:
                mine[0] += cells[first + BYTES]
                mine[1] += cells[first + _CELLS_PER_ROW + BYTES]
        for relay_id in self._framed:
            mine = sums.get(cells[row(relay_id, TO_BROKER) + _PRINCIPAL])
            if mine is not None:
                mine[2] += cells[framed_row(relay_id, TO_BROKER) + MESSAGES]
                mine[3] += cells[framed_row(relay_id, TO_CLIENT) + MESSAGES]
        return sums


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
