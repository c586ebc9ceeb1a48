"""Which clients are connected to a forwarder, for operators, and the end of those that an operator names.

A page looks at no more than SCANNED_MAX connections, in slices between which relays go on, so that what it costs does
not grow with the number of connections. A connection is matched and ended in the same moment, by its object: no id is
remembered that another connection could have by then. Connections that are no relay come first: one that becomes a
relay meanwhile is seen again there.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import NamedTuple

import trio

from proto.addresses import AddressInvalid, parse_host_port
from proto.rpc_pb2 import Connection, ConnectionFilter, ConnectionsPage, ConnectionsRequest, StoredRelay
from proxy.common.connection_kinds import COPIED, HANDSHAKE, KERNEL_TLS, KINDS, SPLICED, WEBSOCKET
from proxy.common.errors import ProxyError
from proxy.common.networks import NetworkRules
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.relay.relay import Relay

SCANNED_MAX = 1_000
"""Connections that one page looks at."""

SLICE = 100
"""Connections that are looked at before other tasks go on."""

FIRST_RELAY = 1 << 40
"""In a page's position: from here on it counts relays by their ids, before by the clients' numbers."""


class ListedConnection(NamedTuple):
    """A connection, and what ends it: ``end`` returns False if it has ended, or cannot be ended now."""

    connection: Connection
    end: Callable[[], bool]


Entry = tuple[int, Callable[[], ListedConnection | None]]
"""A connection's position, and what describes it when its turn comes; None: it has ended by then."""


class FilterInvalid(ProxyError):
    """A filter that no connection could be compared with. The text says why."""


class ConnectionMatcher:
    """What an operator's filter matches. Raises FilterInvalid."""

    def __init__(self, wanted: ConnectionFilter) -> None:
        self._principal = wanted.principal if wanted.HasField("principal") else None
        self._kinds = frozenset(wanted.kinds)
        if not self._kinds <= set(KINDS):
            raise FilterInvalid(f"a connection's kind is one of {', '.join(KINDS)}")
        self._broker = wanted.broker.lower()
        try:
            self._networks = NetworkRules([wanted.network] if wanted.network else [], [])
        except ValueError as error:
            raise FilterInvalid(f"neither an address nor a network: {error}") from None
        self._is_any_address = not wanted.network

    def matches(self, one: Connection) -> bool:
        """Return whether a connection is one of those that the filter names."""
        return (
            (self._principal is None or one.principal == self._principal)
            and (not self._kinds or one.kind in self._kinds)
            and (not self._broker or self._broker in _names_of(one.broker.lower()))
            and (self._is_any_address or self._networks.allows(one.client_address.rpartition(":")[0].strip("[]")))
        )


def _names_of(broker: str) -> tuple[str, ...]:
    """Return the forms by which a broker may be named: with its port, and without."""
    try:
        return broker, parse_host_port(broker).host
    except AddressInvalid:
        return (broker,)


async def page_of(
    request: ConnectionsRequest,
    others: Callable[[], Iterable[Entry]],
    relays: RelayManager,
    *,
    unix_ms: float,
    ends: bool,
) -> ConnectionsPage:
    """Return the next page of the connections that a filter matches; ``ends``: end them, and return only those that
    are ended by it. ``others``: the connections that are no relays. Raises FilterInvalid.
    """
    matcher, page = ConnectionMatcher(request.filter), ConnectionsPage()
    until = request.started_until_unix_ms or inf
    entries = sorted((entry for entry in others() if entry[0] > request.after), key=_position)[: SCANNED_MAX + 1]
    if len(entries) <= SCANNED_MAX:
        live = [relay for relay in relays.live if FIRST_RELAY + relay.record.id > request.after]
        await trio.lowlevel.checkpoint()  # all were looked at, if only at their ids
        live.sort(key=_relay_id)  # a heap for the first of them costs more
        first = live[: SCANNED_MAX + 1 - len(entries)]
        entries += [(FIRST_RELAY + relay.record.id, partial(_listed, relays, relay, unix_ms)) for relay in first]
    for number, (_, describe) in enumerate(entries[:SCANNED_MAX], start=1):
        listed = describe()
        is_wanted = listed and listed.connection.started_at_unix_ms <= until and matcher.matches(listed.connection)
        if listed and is_wanted and (not ends or listed.end()):
            page.connections.append(listed.connection)
        if number % SLICE == 0:
            await trio.lowlevel.checkpoint()
    if len(entries) > SCANNED_MAX:
        page.next = entries[SCANNED_MAX - 1][0]
    return page


def _position(entry: Entry) -> int:
    return entry[0]


def _relay_id(relay: Relay) -> int:
    return relay.record.id


def _listed(relays: RelayManager, relay: Relay, unix_ms: float) -> ListedConnection | None:
    record = relay.record
    if relay.is_over or relay.handed_over:  # its id and its rows may be another's
        return None
    to_broker, to_client = relays.bytes_moved(relay)
    ends_at = session_end(relay.session, relays.now(), unix_ms)
    connection = connection_of(record, kind_of(relay), ends_at or record.expires_at_unix_ms)
    connection.bytes_to_broker, connection.bytes_to_client = max(0, to_broker), max(0, to_client)
    return ListedConnection(connection, partial(relays.disconnect, relay))


def session_end(session: ExpiringSession | None, now_s: float, unix_ms: float) -> int:
    """Return when a session ends, in ms since 1970; 0: never. ``now_s``: by the sessions' clock."""
    if session is None or session.clock is None or not session.clock.expires:
        return 0
    return int(unix_ms + 1000 * (session.clock.expires_at_s - now_s))


def kind_of(relay: Relay) -> str:
    """Return a relay's kind."""
    record = relay.record
    if record.passed:
        return WEBSOCKET
    if not relay.is_spliced:
        return COPIED
    return KERNEL_TLS if record.client_kernel_tls or record.broker_kernel_tls else SPLICED


def connection_of(record: StoredRelay, kind: str = HANDSHAKE, ends_at_unix_ms: int = 0) -> Connection:
    """Return what an operator is told of a connection: nothing of its credentials."""
    return Connection(
        client_address=record.client_address,
        principal=record.principal,
        method=record.method or record.session.principal.method,
        proxy=record.proxy,
        broker=record.target,
        started_at_unix_ms=record.started_at_unix_ms,
        ends_at_unix_ms=max(0, ends_at_unix_ms) or None,
        kind=kind,
    )
