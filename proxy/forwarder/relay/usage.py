"""Who uses the proxy how much: bytes, messages and sessions of relays by principal.

Sums of the relay table's cells, so that no event touches a metric and a successor goes on exactly where its predecessor
was killed. The names stand in the table, too.

The number of names is bounded: the first that come keep theirs for as long as the cluster runs, all others are counted
together. No list of the busiest: a principal that left it would take its counter away from under Prometheus, and one
that came would bring sums with it that were counted elsewhere before.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily

from proxy.runtime.shared.relay_table import NAME_BYTES_MAX, PRINCIPALS_MAX, RelayTable

OTHER = "other"
ANONYMOUS = "anonymous"
"""Of relays whose client was not authenticated."""

_QUOTE = "principal:"
"""Stands before a role that reads like one of those two, or like a quoted one: no client shares a row by its name."""

_OTHER = 0
_ANONYMOUS = 1
_FIRST = 2
_DIRECTIONS = ("to_broker", "to_client")


def label_of(role: str) -> str:
    """How a role stands in the label `principal`: different for every role, and for none as the rows of no role."""
    return f"{_QUOTE}{role}" if role in {OTHER, ANONYMOUS} or role.startswith(_QUOTE) else role


class PrincipalUsage:
    """See the module. ``max``: how many are counted by name."""

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
        """The number of a principal's row in the table; "": not authenticated."""
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
        """Count a relay that begins."""
        self._table.add_session(self.row_number_of(principal))

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Prometheus: what those used of whom there was anything.

        With the moment from which each counter counts (`…_created`), unlike our other counters: these are billed, and
        what a principal used before its first scrape would be nobody's otherwise.
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
