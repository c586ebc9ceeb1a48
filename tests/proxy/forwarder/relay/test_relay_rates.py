"""proxy.forwarder.relay.rates: connections and bytes a second by principal."""

from __future__ import annotations

import pytest
import trio
from test_relay_usage import begin, use

from proto.rpc_pb2 import ConnectionSums
from proxy.forwarder.relay.rates import INTERVAL_S_MAX, SLICE, PrincipalRates
from proxy.forwarder.relay.usage import ANONYMOUS, OTHER, PrincipalUsage
from proxy.runtime.observability.connection_sums import TOLD_MAX
from proxy.runtime.shared.relay_table import PRINCIPALS_MAX, TO_BROKER, RelayTable, row


class Setup:
    def __init__(self, principals_max: int = PRINCIPALS_MAX) -> None:
        self.now = 100.0
        self.has_table = True
        self.table = RelayTable()
        self.principals = PrincipalUsage(self.table, principals_max, 600.0, lambda: self.now)
        self.rates = PrincipalRates(self.table, self.principals, lambda: self.has_table, lambda: self.now)
        self.ids: list[int] = []

    def begin(self, name: str) -> int:
        self.ids.append(begin(self.table, self.principals, name))
        return self.ids[-1]

    async def sample(self, *others: str) -> ConnectionSums:
        return await self.rates.sample(self.ids, others)


def found(sums: ConnectionSums) -> dict[str, tuple[int, int, int]]:
    return {
        one.principal: (one.connections, one.bytes_per_s_to_broker, one.bytes_per_s_to_client)
        for one in sums.principals
    }


async def test_connections_and_rates() -> None:
    setup = Setup()
    first, second, anonymous = setup.begin("alice"), setup.begin("bob"), setup.begin("")
    setup.begin("alice")
    use(setup.table, first, 1000, 10)
    sums = await setup.sample("alice", "", "a-lookup-client-without-a-row")
    counts = {"alice": (3, 0, 0), "bob": (1, 0, 0), ANONYMOUS: (2, 0, 0), OTHER: (1, 0, 0)}
    assert found(sums) == counts
    assert sums.interval_ms == 0, "there is no rate yet"
    setup.now += 2
    use(setup.table, first, 500, 50)
    use(setup.table, second, 0, 7000)
    use(setup.table, anonymous, 2)
    sums = await setup.sample()
    assert sums.interval_ms == 2000
    assert found(sums) == {"bob": (1, 0, 3500), "alice": (2, 250, 25), ANONYMOUS: (1, 1, 0)}
    assert [one.principal for one in sums.principals] == ["bob", "alice", ANONYMOUS], "the busiest first"


async def test_a_relay_that_ended_counts_once() -> None:
    setup = Setup()
    first = setup.begin("alice")
    use(setup.table, first, 10_000)
    await setup.sample()
    use(setup.table, first, 4_000)
    setup.table.release_relay_id(first)
    setup.ids.clear()
    setup.now += 2
    assert found(await setup.sample()) == {"alice": (0, 2000, 0)}
    setup.now += 2
    assert found(await setup.sample()) == {}


async def test_no_mean_of_hours_is_told() -> None:
    setup = Setup()
    one = setup.begin("alice")
    await setup.sample()
    use(setup.table, one, 10**9)
    setup.now += INTERVAL_S_MAX + 1
    sums = await setup.sample()
    assert (sums.interval_ms, found(sums)) == (0, {"alice": (1, 0, 0)})


async def test_a_predecessor_tells_its_connections_alone() -> None:
    """Its successor tells all bytes of the table that they share."""
    setup = Setup()
    setup.has_table = False
    one = setup.begin("alice")
    await setup.sample()
    use(setup.table, one, 1000)
    setup.now += 1
    sums = await setup.sample()
    assert (sums.interval_ms, found(sums)) == (0, {"alice": (1, 0, 0)})


async def test_what_is_told_is_bounded() -> None:
    """Security: a client may come by many names."""
    setup = Setup()
    for number in range(3 * TOLD_MAX):
        for _ in range(1 + (number < TOLD_MAX)):
            setup.begin(f"user-{number}")
    sums = await setup.sample()
    assert len(sums.principals) == TOLD_MAX + 1
    assert found(sums)[OTHER] == (2 * TOLD_MAX, 0, 0)
    assert all(one.connections == 2 for one in sums.principals[:-1])


async def test_relays_go_on_between_slices() -> None:
    setup = Setup()
    for _ in range(4 * SLICE):
        setup.begin("alice")
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        await setup.sample()
        nursery.cancel_scope.cancel()
    assert turns >= 4


@pytest.mark.parametrize("nonsense", [-(2**63), 2**63 - 1])
async def test_nonsense_in_the_table_is_a_wrong_number_and_nothing_else(nonsense: int) -> None:
    """Security: a predecessor that was taken over wrote it."""
    setup = Setup()
    for name in ("alice", "alice", "bob"):
        setup.begin(name)
    await setup.sample()
    setup.now += 1
    setup.table.cells[row(1, TO_BROKER) + 1] = setup.table.cells[row(2, TO_BROKER) + 1] = nonsense
    setup.table.cells[row(3, TO_BROKER) + 3] = nonsense
    sums = await setup.sample()
    assert found(sums)["alice"][0] == 2
