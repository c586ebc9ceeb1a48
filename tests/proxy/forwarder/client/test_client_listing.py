"""proxy.forwarder.client.listing: pages of connections for operators, and the end of exactly those that match."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from relay_fakes import about_relay, expect, open_lane, open_place, read_all, until

from proto.rpc_pb2 import Connection, ConnectionFilter, ConnectionsPage, ConnectionsRequest, Principal, StoredSession
from proxy.common.connection_kinds import COPIED, KERNEL_TLS, LOOKUP, SPLICED, WEBSOCKET
from proxy.forwarder.client.listing import (
    FIRST_RELAY,
    SCANNED_MAX,
    SLICE,
    ConnectionMatcher,
    Entry,
    FilterInvalid,
    ListedConnection,
    connection_of,
    kind_of,
    page_of,
)
from proxy.forwarder.lifetime.closing import CloseReason

ALICE = Connection(client_address="192.0.2.7:4000", principal="alice", broker="B0.example:6650", kind=SPLICED)


@pytest.mark.parametrize(
    ("matches", "fields"),
    [
        (True, {}),
        (True, {"principal": "alice"}),
        (False, {"principal": "bob"}),
        (False, {"principal": "alic"}),
        (False, {"principal": ""}),
        (True, {"network": "192.0.2.7"}),
        (True, {"network": "192.0.2.0/24"}),
        (True, {"network": "::ffff:192.0.2.7"}),
        (False, {"network": "198.51.100.0/24"}),
        (False, {"network": "2001:db8::/32"}),
        (True, {"broker": "b0.example"}),
        (True, {"broker": "b0.EXAMPLE:6650"}),
        (False, {"broker": "b0.example:6651"}),
        (False, {"broker": "b0"}),
        (True, {"kinds": [LOOKUP, SPLICED]}),
        (False, {"kinds": [LOOKUP]}),
        (False, {"principal": "alice", "kinds": [COPIED]}),
    ],
)
def test_a_connection_matches_where_each_part_of_the_filter_does(matches: bool, fields: dict[str, Any]) -> None:
    assert ConnectionMatcher(ConnectionFilter(**fields)).matches(ALICE) is matches


def test_an_empty_principal_names_those_without() -> None:
    assert ConnectionMatcher(ConnectionFilter(principal="")).matches(Connection(client_address="[2001:db8::1]:1"))


def test_a_network_of_ipv6() -> None:
    matcher = ConnectionMatcher(ConnectionFilter(network="2001:db8::/32"))
    assert matcher.matches(Connection(client_address="[2001:db8::1]:1"))
    assert not matcher.matches(Connection(client_address="[2001:db9::1]:1"))


@pytest.mark.parametrize("fields", [{"network": "all"}, {"network": "192.0.2.0/33"}, {"kinds": ["none"]}])
def test_a_filter_that_cannot_be_used_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FilterInvalid):
        ConnectionMatcher(ConnectionFilter(**fields))


def test_kinds_of_relays() -> None:
    def relay(*, is_spliced: bool = True, **record: Any) -> Any:
        return SimpleNamespace(is_spliced=is_spliced, record=about_relay(**record))

    assert kind_of(relay()) == SPLICED
    assert kind_of(relay(is_spliced=False)) == COPIED
    assert kind_of(relay(client_kernel_tls=True)) == kind_of(relay(broker_kernel_tls=True)) == KERNEL_TLS
    assert kind_of(relay(is_spliced=False, passed=True)) == WEBSOCKET


def test_nothing_of_the_credentials_is_told() -> None:
    """Security."""
    session = StoredSession(principal=Principal(method="token"), context=b"secret", challenge=b"secret")
    told = connection_of(about_relay(credentials=[b"secret"], session=session))
    assert b"secret" not in told.SerializeToString()
    assert told.method == "token"  # of a relay that an older program has stored


class Many:
    """So many connections that are no relays, with numbers from 1 on; every second one is alice's."""

    def __init__(self, count: int) -> None:
        self.ended: list[int] = []
        self.described = 0
        self.entries: list[Entry] = [(number, partial(self._describe, number)) for number in range(1, count + 1)]
        self.entries.reverse()
        self.relays: Any = SimpleNamespace(live=[])

    def _describe(self, number: int) -> ListedConnection:
        self.described += 1
        name = "alice" if number % 2 else "bob"
        one = Connection(client_address=f"192.0.2.7:{number}", principal=name, kind=LOOKUP, started_at_unix_ms=number)
        return ListedConnection(one, partial(self._end, number))

    def _end(self, number: int) -> bool:
        self.ended.append(number)
        return number != 7

    async def page(self, *, ends: bool = False, **fields: Any) -> ConnectionsPage:
        return await page_of(ConnectionsRequest(**fields), lambda: self.entries, self.relays, unix_ms=0, ends=ends)


async def test_pages_have_each_connection_once() -> None:
    """Each looks at a bounded number of them, whatever the filter matches."""
    many, ports, after = Many(2 * SCANNED_MAX + 1), list[int](), 0
    for described in (SCANNED_MAX, 2 * SCANNED_MAX, 2 * SCANNED_MAX + 1):
        page = await many.page(filter=ConnectionFilter(principal="alice"), after=after)
        assert many.described == described
        ports += [int(one.client_address.rpartition(":")[2]) for one in page.connections]
        after = page.next
    assert after == 0
    assert ports == list(range(1, 2 * SCANNED_MAX + 2, 2))


async def test_other_tasks_have_turns_within_a_page() -> None:
    many, seen = Many(SCANNED_MAX), list[int]()

    async def look() -> None:
        while many.described < SCANNED_MAX:
            seen.append(many.described)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await many.page()
    assert max(later - before for before, later in pairwise(seen)) <= 2 * SLICE  # of two tasks, either comes first


async def test_exactly_those_that_match_are_ended_and_told_of() -> None:
    """Not bob's, nor those that came later; one that cannot be ended is not said to be."""
    many = Many(20)
    wanted = ConnectionFilter(principal="alice")
    page = await many.page(filter=wanted, started_until_unix_ms=9, ends=True)
    assert many.ended == [1, 3, 5, 7, 9]
    assert [one.started_at_unix_ms for one in page.connections] == [1, 3, 5, 9]
    many.ended.clear()
    await many.page(filter=wanted)
    assert many.ended == []


async def test_a_connection_that_has_ended_by_its_turn_is_left_out() -> None:
    many = Many(1)
    many.entries.append((2, lambda: None))
    assert len((await many.page()).connections) == 1


Relays = Callable[[], Iterable[Any]]


async def test_live_relays_are_listed_and_ended_by_themselves() -> None:
    """The relay of the same id that comes next is another one."""
    async with open_place() as place, open_lane() as one, open_lane() as two:
        forwarder = await place.forwarder()
        relays = forwarder.relays
        first = await forwarder.begin(one, about=about_relay(started_at_unix_ms=1000))
        await forwarder.begin(two, about=about_relay(principal="bob"))
        await one.client.send_all(b"hello")
        await expect(one.broker, b"hello")
        await until(lambda: forwarder.moved("to_broker") == 5)

        async def page(**fields: Any) -> ConnectionsPage:
            ends = fields.pop("ends", False)
            return await page_of(ConnectionsRequest(**fields), lambda: (), relays, unix_ms=0, ends=ends)

        listed = (await page()).connections
        assert [(row.principal, row.bytes_to_broker, row.bytes_to_client) for row in listed] == [
            ("alice", 5, 0),
            ("bob", 0, 0),
        ]
        assert (await page(after=FIRST_RELAY + first.id)).connections == listed[1:]
        relay = next(relay for relay in relays.live if relay.record.id == first.id)
        ended = (await page(filter=ConnectionFilter(principal="alice"), ends=True)).connections
        assert [row.principal for row in ended] == ["alice"]
        assert relay.close_reason is CloseReason.DISCONNECTED
        assert not (await page(filter=ConnectionFilter(principal="alice"), ends=True)).connections, "it is closing"
        await until(lambda: relay.is_over)
        assert [about.principal for about in forwarder.ended] == ["alice"]
        assert [row.principal for row in (await page()).connections] == ["bob"]
        relay.handed_over = True
        assert not relays.disconnect(relay)


async def test_a_blind_relay_that_is_being_ended_does_not_go_on_in_a_successor() -> None:
    """Which would not know of it."""
    async with open_place() as place, open_lane() as one, open_lane() as two:
        forwarder = await place.forwarder()
        for lane, name in ((one, "alice"), (two, "bob")):
            await forwarder.begin(lane, about=about_relay(principal=name))
        await place.settle()
        relay = next(relay for relay in forwarder.relays.live if relay.record.principal == "alice")
        assert forwarder.relays.disconnect(relay)
        await forwarder.relays.hand_over_relays()
        await place.forwarder()
        assert not await read_all(one.client), "its end"
        await two.broker.send_all(b"on")
        await expect(two.client, b"on")
