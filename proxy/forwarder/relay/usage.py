"""The use of relays by principal: bytes, messages and sessions.

Sums of the relay table's cells, so that no event touches a metric and a successor continues exactly where its
predecessor was killed. The names are in the table, too.

The number of names is bounded. A principal that finds all rows taken gets the row of one that is idle, else it is
counted in OTHER. **Idle** is a principal without a relay since a collection of metrics that told its final sums, at
least ``idle_s`` ago: longer than any interval of scrapes, so Prometheus has them. Without scrapes no row is idle.

The sums of a row end with its series, and are not added to OTHER: they were scraped under the principal's own name, so
they would be billed twice. The row begins at zero, with a new ``_created``, for its next principal; so does the
principal, should it return. ``increase()`` and the analytics take both for a counter that began again, so each byte is
billed once. Relays that were counted in OTHER stay there: no sum moves from one series to another.

The **owner** of a row is the address or the proxy that its principal came from when it was named. Rows up to
``principals_max`` are first come, first served; as many again, and idle rows of others, are for owners with fewer
rows in use than an equal share, with one share kept for a newcomer: so one address or proxy cannot take all rows,
though each of its principals has a relay.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import takewhile

from prometheus_client.core import CounterMetricFamily

from proxy.runtime.observability.metrics import OTHER
from proxy.runtime.shared.relay_table import NAME_BYTES_MAX, PRINCIPALS_MAX, RelayTable, as_cell

ANONYMOUS = "anonymous"
"""The label of relays of clients that were not authenticated."""

LABEL_BYTES_MAX = 128
"""Of the label `principal`: so the most rows possible fit into proxy.admin.exposition.PROCESS_BYTES_MAX, even if each
character must be escaped.
"""

_QUOTE = "principal:"
"""Prefix of a role that reads like one of those two, or like a prefixed one: no client shares a row by its name."""
_SHORTENED = f"{_QUOTE}sha256:"
"""Prefix of the label of a longer role; then half of its hash in hexadecimal digits, a colon, and its beginning. No
other role's label has this prefix.
"""
_HASH_DIGITS = 32

_OTHER = 0
_ANONYMOUS = 1
_FIRST = 2
_UNKNOWN_OWNER = 0
_DIRECTIONS = ("to_broker", "to_client")


def label_of(role: str) -> str:
    """Return a role's value of the label `principal`: different for every role, and never OTHER or ANONYMOUS."""
    label = f"{_QUOTE}{role}" if role in {OTHER, ANONYMOUS} or role.startswith(_QUOTE) else role
    if len(label.encode()) <= LABEL_BYTES_MAX:
        return label
    name = role.encode()
    head = f"{_SHORTENED}{sha256(name).hexdigest()[:_HASH_DIGITS]}:"
    return head + name[: LABEL_BYTES_MAX - len(head)].decode(errors="ignore")


class PrincipalUsage:
    """The principals of which the use is counted by name, of one owner ``principals_max``; all others are OTHER.

    ``now``: seconds of a clock that only goes forward.
    """

    def __init__(
        self, table: RelayTable, principals_max: int, idle_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_come_max = principals_max
        self._rows_max = min(2 * principals_max, PRINCIPALS_MAX)
        self._table = table
        self._idle_s = idle_s
        self._now = now
        names = table.principal_names()
        self._numbers = {name: number for number, name in names.items() if name}
        self._free = sorted(set(range(_FIRST, _FIRST + PRINCIPALS_MAX)) - set(self._numbers.values()), reverse=True)
        self._owners = {name: table.owner_of_principal(number) for name, number in self._numbers.items()}
        self._rows_by_owner = Counter(self._owners.values())
        self._idle_since: dict[str, float] = {}
        """When the final sums of each role without a relay were first told, the earliest first."""

    def row_number_of(self, principal: str, owner: str = "") -> int:
        """Return the number of a principal's row in the table; "" is a client that was not authenticated.

        ``owner``: of the row, if it is to be named.
        """
        if not principal:
            return _ANONYMOUS
        number = self._numbers.get(principal)
        if number is None:
            number = self._name_row(principal, as_cell(sha256(owner.encode()).digest()[:8]))
        self._idle_since.pop(principal, None)
        return number

    def known_row_of(self, principal: str) -> int:
        """Return the number of the row in which a principal is counted as it is now, without naming one."""
        return self._numbers.get(principal, _OTHER) if principal else _ANONYMOUS

    def rows(self) -> dict[str, int]:
        """Return the rows' numbers by their value of the label `principal`."""
        own = {OTHER: _OTHER, ANONYMOUS: _ANONYMOUS}
        return own | {label_of(role): number for role, number in self._numbers.items()}

    def _name_row(self, principal: str, owner: int) -> int:
        number = self._find_row(owner) if len(principal.encode()) <= NAME_BYTES_MAX else _OTHER
        if number != _OTHER:
            self._table.name_principal(number, principal, owner)
            self._numbers[principal] = number
            self._owners[principal] = owner
            self._rows_by_owner[owner] += 1
        return number

    def _find_row(self, owner: int) -> int:
        """Return the number of a row that an owner may have, without a name; _OTHER if there is none."""
        used = len(self._numbers)
        if used < self._first_come_max:
            return self._free.pop()
        if used > self._rows_max:
            return _OTHER
        latest = self._now() - self._idle_s
        idle = [role for role, since in takewhile(lambda one: one[1] <= latest, self._idle_since.items())]
        busy = self._rows_by_owner - Counter(self._owners[role] for role in idle)
        newcomer = 1
        has_less_than_share = busy[owner] < self._rows_max // (len({*busy, owner}) + newcomer)
        takes = {owner, _UNKNOWN_OWNER, *(self._rows_by_owner if has_less_than_share else ())}
        loser = next((role for role in idle if self._owners[role] in takes), "")
        if loser:
            del self._idle_since[loser]
            self._rows_by_owner -= Counter((self._owners.pop(loser),))  # without owners that have none left
            return self._numbers.pop(loser)
        return self._free.pop() if used < self._rows_max and has_less_than_share else _OTHER

    def _note_idle_roles(self) -> None:
        """Note which roles have no relay, now that their sums are told."""
        with_relays, now = self._table.principals_with_relays(), self._now()
        for role, number in self._numbers.items():
            if number in with_relays:
                self._idle_since.pop(role, None)
            else:
                self._idle_since.setdefault(role, now)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return Prometheus counters of the principals with any use.

        With the moment from which each counter counts (`…_created`), unlike our other counters: these are billed, and
        what a principal used before its first scrape would be lost otherwise.
        """
        bytes_moved = CounterMetricFamily(
            "pulsar_proxy_principal_bytes",
            "Bytes relayed, by principal and direction.",
            labels=["principal", "direction"],
        )
        messages = CounterMetricFamily(
            "pulsar_proxy_principal_messages",
            "Messages relayed, by principal and direction, where metrics.count_messages is set: towards brokers those "
            "in a batch, towards clients a batch as one.",
            labels=["principal", "direction"],
        )
        sessions = CounterMetricFamily(
            "pulsar_proxy_principal_sessions", "Relays begun, by principal.", labels=["principal"]
        )
        rows = self.rows()
        self._note_idle_roles()
        sums = self._table.principal_sums(rows.values())
        for name, number in rows.items():
            mine = sums[number]
            if not any(mine):
                continue
            since_s = self._table.principal_since_s(number)
            for way, direction in enumerate(_DIRECTIONS):
                bytes_moved.add_metric([name, direction], mine[way], created=since_s)
                messages.add_metric([name, direction], mine[2 + way], created=since_s)
            sessions.add_metric([name], mine[4], created=since_s)
        yield from (bytes_moved, messages, sessions)
