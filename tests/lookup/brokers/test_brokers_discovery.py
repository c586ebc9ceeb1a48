"""lookup.brokers.discovery: brokers by name, by SRV records, found again and again; DNS is a name server in memory."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing
from fake_dns import Names

from lookup.brokers import discovery
from lookup.brokers.discovery import RETRY_INTERVAL_S, WEIGHT_ZERO, BrokerDiscovery, Endpoint
from proto.addresses import HostPort, parse_broker_url
from proxy.runtime.dns.resolver import Resolver


class Finder:
    """A discovery that runs, in what DNS knows."""

    def __init__(self, names: Names, nursery: trio.Nursery, url: str, before: BrokerDiscovery | None = None) -> None:
        self.names = names
        self.changes = 0
        resolver = Resolver(nursery, timeout_s=5, ttl_max_s=300)
        self.discovery = BrokerDiscovery(parse_broker_url(url), resolver, before)
        self.discovery.on_change = self._count
        nursery.start_soon(self.discovery.run)

    def _count(self) -> None:
        self.changes += 1

    @property
    def found(self) -> list[str]:
        return [f"{one} {'+'.join(one.addresses)}" for one in self.discovery.endpoints]

    def named(self, host: str) -> Endpoint:
        [endpoint] = [one for one in self.discovery.endpoints if one.host == host]
        return endpoint


class Find:
    def __init__(self, names: Names, nursery: trio.Nursery) -> None:
        self.names, self.nursery = names, nursery

    async def __call__(self, url: str, before: BrokerDiscovery | None = None) -> Finder:
        finder = Finder(self.names, self.nursery, url, before)
        await finder.discovery.wait_until_all_resolved()
        return finder


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> Find:
    return Find(Names(monkeypatch), nursery)


# ---- endpoints


def test_an_endpoint_is_a_host_and_port_but_equal_to_itself_only() -> None:
    one, other = (Endpoint("b", 6650, ("10.0.0.1",)) for _ in range(2))
    assert one != other
    assert one == one  # noqa: PLR0124
    assert one != HostPort("b", 6650)
    assert HostPort("b", 6650) != one
    assert len({one, other, HostPort("b", 6650)}) == 3
    assert str(one) == "b:6650"
    assert isinstance(one, HostPort)


async def test_addresses_are_there_at_once(find: Find, nursery: trio.Nursery) -> None:
    finder = Finder(find.names, nursery, "pulsar://10.0.0.1:1,[fd00::1]")
    assert finder.found == ["10.0.0.1:1 10.0.0.1", "[fd00::1]:6650 fd00::1"]
    await finder.discovery.wait_until_any_found()
    await finder.discovery.wait_until_all_resolved()


async def test_each_address_of_a_name_is_a_broker(find: Find) -> None:
    find.names.server.add("b", "A", "10.0.0.2", "10.0.0.1")
    find.names.server.add("c", "A", "10.0.0.1")
    finder = await find("pulsar://b,c")
    assert finder.found == ["b:6650 10.0.0.1", "b:6650 10.0.0.2", "c:6650 10.0.0.1"]
    assert {one.health.weight for one in finder.discovery.endpoints} == {1}


async def test_a_name_with_a_single_address_of_each_family_is_one_broker(find: Find) -> None:
    find.names.hosts["localhost"] = ("127.0.0.1", "::1")
    find.names.server.add("b", "A", "10.0.0.1")
    find.names.server.add("b", "AAAA", "fd00::1")
    find.names.server.add("c", "A", "10.0.0.2", "10.0.0.3")
    find.names.server.add("c", "AAAA", "fd00::2")
    finder = await find("pulsar://localhost,b,c")
    assert finder.found == [
        "localhost:6650 127.0.0.1+::1",
        "b:6650 fd00::1+10.0.0.1",
        "c:6650 10.0.0.2",
        "c:6650 10.0.0.3",
        "c:6650 fd00::2",
    ]


async def test_a_name_written_twice_counts_once(find: Find) -> None:
    find.names.server.add("b", "A", "10.0.0.1")
    assert len((await find("pulsar://b,b")).found) == 1


async def test_no_more_than_so_many(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ENDPOINTS_MAX", 2)
    find.names.server.add("b", "A", "10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert len((await find("pulsar://b")).found) == 2


# ---- again and again


async def test_names_are_asked_for_again_when_the_ttl_is_over(
    find: Find, autojump_clock: trio.testing.MockClock
) -> None:
    find.names.server.add("b", "A", "10.0.0.1", "10.0.0.2", ttl=20)
    finder = await find("pulsar://b")
    stays, leaves = finder.discovery.endpoints
    stays.health.failures = 2
    find.names.server.add("b", "A", "10.0.0.1", "10.0.0.3", ttl=20)
    await trio.sleep(19.9)
    assert finder.discovery.endpoints == (stays, leaves)
    await trio.sleep(0.2)
    assert finder.found == ["b:6650 10.0.0.1", "b:6650 10.0.0.3"]
    assert finder.discovery.endpoints[0] is stays, "the same object for the same broker"
    assert stays.health.failures == 2
    await trio.sleep(100)
    assert find.names.server.count("b") == 7


async def test_the_brokers_found_last_stay_while_dns_fails(find: Find, autojump_clock: trio.testing.MockClock) -> None:
    find.names.server.add("b", "A", "10.0.0.1", ttl=20)
    with structlog.testing.capture_logs() as logs:
        finder = await find("pulsar://b")
        [before] = finder.discovery.endpoints
        find.names.server.remove("b")
        await trio.sleep(60)
        assert finder.discovery.endpoints == (before,)
        assert "not known" in finder.discovery.failures["b:6650"]
        assert finder.discovery.has_brokers("b:6650")
        find.names.server.add("b", "A", "10.0.0.2")
        await trio.sleep(RETRY_INTERVAL_S + 0.1)
        assert finder.found == ["b:6650 10.0.0.2"]
        assert finder.discovery.failures == {}
    assert [entry["event"].partition(";")[0] for entry in logs] == [
        "found brokers",
        "brokers' names are not resolved",
        "brokers' names are resolved again",
        "found brokers",
    ], "one entry a change, not one a question"


async def test_a_slow_name_holds_up_no_other(
    find: Find, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    find.names.server.add("b", "A", "10.0.0.1")
    find.names.server.delay_s = lambda name, _kind: 1 if name == "b." else 1000
    finder = Finder(find.names, nursery, "pulsar://slow,b")
    await finder.discovery.wait_until_any_found()
    assert trio.current_time() == pytest.approx(1)
    assert finder.found == ["b:6650 10.0.0.1"]
    await finder.discovery.wait_until_all_resolved()
    assert trio.current_time() == pytest.approx(5)


async def test_no_name_is_known(find: Find, autojump_clock: trio.testing.MockClock) -> None:
    finder = await find("pulsar://a,b")
    await finder.discovery.wait_until_any_found()
    assert finder.found == []
    assert set(finder.discovery.failures) == {"a:6650", "b:6650"}
    assert not finder.discovery.has_brokers("a:6650")
    find.names.server.add("b", "A", "10.0.0.1")
    await trio.sleep(RETRY_INTERVAL_S + 0.1)
    assert finder.found == ["b:6650 10.0.0.1"]


async def test_a_reload_keeps_what_was_found(find: Find, nursery: trio.Nursery) -> None:
    find.names.server.add("b", "A", "10.0.0.1")
    find.names.server.add("c", "A", "10.0.0.2")
    old = await find("pulsar://b,c")
    new = Finder(find.names, nursery, "pulsar://b", old.discovery)
    assert new.discovery.endpoints == (old.named("b"),)


# ---- SRV


async def test_srv_records(find: Find) -> None:
    find.names.server.add("_pulsar._tcp.b", "SRV", "0 10 6650 h1.example.", "1 20 7000 h2.example.")
    find.names.server.add("h1.example", "A", "10.0.0.1", "10.0.0.2")
    find.names.server.add("h2.example", "A", "10.0.0.3")
    finder = await find("pulsar+srv://b")
    assert sorted(finder.found) == [
        "h1.example:6650 10.0.0.1",
        "h1.example:6650 10.0.0.2",
        "h2.example:7000 10.0.0.3",
    ]
    ranks = sorted((one.health.priority, one.health.weight) for one in finder.discovery.endpoints)
    assert ranks == [(0, 5), (0, 5), (1, 20)], "a record's weight is shared by its addresses"


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("pulsar+srv://b.example", ["_pulsar._tcp.b.example.", "b.example."]),
        ("pulsar+ssl+srv://b.example", ["_pulsar-ssl._tcp.b.example.", "b.example."]),
        ("pulsar+srv://_mine._tcp.b.example", ["_mine._tcp.b.example."]),
    ],
)
async def test_under_which_names(find: Find, url: str, asked: list[str]) -> None:
    finder = await find(url)
    assert [name for name, kind in find.names.server.asked if kind == "SRV"] == asked
    [(name, reason)] = finder.discovery.failures.items()
    assert name == asked[-1].removesuffix(".")
    assert all(one.removesuffix(".") in reason for one in asked)


async def test_records_of_the_name_itself(find: Find) -> None:
    find.names.server.add("pulsar.service.consul", "SRV", "1 1 6650 h.example.")
    find.names.server.add("h.example", "A", "10.0.0.1")
    assert (await find("pulsar+srv://pulsar.service.consul")).found == ["h.example:6650 10.0.0.1"]


async def test_targets_are_whole_names(find: Find) -> None:
    find.names.search = "search.example"
    find.names.server.add("_pulsar._tcp.b.search.example", "SRV", "0 0 6650 h.")
    find.names.server.add("h.search.example", "A", "10.0.0.66")
    find.names.server.add("h", "A", "10.0.0.1")
    assert (await find("pulsar+srv://b")).found == ["h:6650 10.0.0.1"]


async def test_weight_zero_is_a_very_small_chance(find: Find) -> None:
    find.names.server.add("_pulsar._tcp.b", "SRV", "0 0 6650 h1.", "0 1 6650 h2.")
    for host in ("h1", "h2"):
        find.names.server.add(host, "A", "10.0.0.1")
    finder = await find("pulsar+srv://b")
    assert (finder.named("h1").health.weight, finder.named("h2").health.weight) == (WEIGHT_ZERO, 1)


async def test_records_change_and_the_least_ttl_counts(find: Find, autojump_clock: trio.testing.MockClock) -> None:
    find.names.server.add("_pulsar._tcp.b", "SRV", "0 1 6650 h1.", "0 1 6650 h2.", ttl=30)
    find.names.server.add("h1", "A", "10.0.0.1", ttl=10)
    find.names.server.add("h2", "A", "10.0.0.2", ttl=60)
    finder = await find("pulsar+srv://b")
    first = finder.named("h1")
    find.names.server.add("h1", "A", "10.0.0.9", ttl=60)
    await trio.sleep(10.1)
    assert sorted(finder.found) == ["h1:6650 10.0.0.9", "h2:6650 10.0.0.2"]
    assert finder.named("h1") is not first
    find.names.server.add("_pulsar._tcp.b", "SRV", "3 7 6650 h2.", ttl=30)
    second = finder.named("h2")
    await trio.sleep(20)
    assert finder.discovery.endpoints == (second,)
    assert (second.health.priority, second.health.weight) == (3, 7)


async def test_a_target_that_is_not_resolved(find: Find, autojump_clock: trio.testing.MockClock) -> None:
    find.names.server.add("_pulsar._tcp.b", "SRV", "0 1 6650 h1.", "0 1 6650 h2.", ttl=10)
    find.names.server.add("h1", "A", "10.0.0.1", ttl=10)
    finder = await find("pulsar+srv://b")
    assert finder.found == ["h1:6650 10.0.0.1"]
    find.names.server.add("h2", "A", "10.0.0.2", ttl=10)
    await trio.sleep(RETRY_INTERVAL_S + 0.1)
    assert sorted(finder.found) == ["h1:6650 10.0.0.1", "h2:6650 10.0.0.2"], "it is asked for again soon"
    find.names.server.remove("h1")
    await trio.sleep(20)
    assert sorted(finder.found) == ["h1:6650 10.0.0.1", "h2:6650 10.0.0.2"], "where it was counts"
    find.names.server.remove("h2")
    await trio.sleep(20)
    assert len(finder.found) == 2
    assert finder.discovery.failures


async def test_no_such_service(find: Find) -> None:
    find.names.server.add("_pulsar._tcp.b", "SRV", "0 0 0 .")
    finder = await find("pulsar+srv://b")
    assert finder.found == []
