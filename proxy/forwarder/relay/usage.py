"""The use of relays by principal: bytes, messages and sessions.

Sums of the relay table's cells, so that no event touches a metric and a successor continues exactly where its
predecessor was killed. The names are in the table, too.

The number of names is bounded: the first principals keep theirs for as long as the cluster runs, all others are counted
together. No list of the busiest: the counter of a principal that left it would vanish from Prometheus, and one that
entered it would bring sums that were counted elsewhere before.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily

from proxy.runtime.observability.metrics import OTHER
from proxy.runtime.shared.relay_table import NAME_BYTES_MAX, PRINCIPALS_MAX, RelayTable

ANONYMOUS = "anonymous"
"""The label of relays of clients that were not authenticated."""

_QUOTE = "principal:"
"""Prefix of a role that reads like one of those two, or like a prefixed one: no client shares a row by its name."""

_OTHER = 0
_ANONYMOUS = 1
_FIRST = 2
_DIRECTIONS = ("to_broker", "to_client")


def label_of(role: str) -> str:
    """Return a role's value of the label `principal`: different for every role, and never OTHER or ANONYMOUS."""
    return f"{_QUOTE}{role}" if role in {OTHER, ANONYMOUS} or role.startswith(_QUOTE) else role


class PrincipalUsage:
    """The principals of which the use is counted by name, at most ``principals_max``; all others are OTHER."""

    def __init__(self, table: RelayTable, principals_max: int) -> None:
        self.principals_max = min(principals_max, PRINCIPALS_MAX)
        self._table = table
        self._numbers: dict[str, int] = {}
        for number in range(_FIRST, _FIRST + PRINCIPALS_MAX):
            name = table.principal_name(number)
            if not name:
                break
            self._numbers[name] = number

    def row_number_of(self, principal: str) -> int:
        """Return the number of a principal's row in the table; "" is a client that was not authenticated."""
        if not principal:
            return _ANONYMOUS
        number = self._numbers.get(principal)
        if number is not None:
            return number
        number = _FIRST + len(self._numbers)
        if number >= _FIRST + self.principals_max or len(principal.encode()) > NAME_BYTES_MAX:
            return _OTHER
        self._table.name_principal(number, principal)
        self._numbers[principal] = number
        return number

    def add_session(self, principal: str) -> None:
        """Count a relay that starts."""
        self._table.add_session(self.row_number_of(principal))

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
        sums = self._table.principal_sums(range(_FIRST + len(self._numbers)))
        rows = {OTHER: _OTHER, ANONYMOUS: _ANONYMOUS}
        rows |= {label_of(role): number for role, number in self._numbers.items()}
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
