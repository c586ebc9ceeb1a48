"""proxy.runtime.dns.resolver: names to addresses, by files, DNS and the system; bounded, shared, and kept until the
TTL is over.

DNS is dnspython's own resolver over a name server in memory.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
import trio
import trio.testing
from fake_dns import Names

from proto.addresses import HostPort
from proxy.common import reloading_file as watched
from proxy.runtime.dns import queries as dns_queries
from proxy.runtime.dns import resolver as runtime_dns
from proxy.runtime.dns.queries import FAILED_TTL_S, QUERIES_MAX, QUERIES_PER_OWNER_MAX
from proxy.runtime.dns.resolver import (
    OTHER_FAMILY_WAIT_S,
    ResolutionFailed,
    Resolver,
    Service,
)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


class Group:
    """One group of names."""

    def __init__(self, nursery: trio.Nursery, **settings: Any) -> None:
        self.failures = 0
        settings = {"timeout_s": 5, "ttl_max_s": 300, **settings}
        self.resolver = Resolver(nursery, on_failure=self._count, **settings)

    def _count(self) -> None:
        self.failures += 1

    async def at(self, host: str) -> tuple[str, ...]:
        return (await self.resolver.resolve_addresses(host)).addresses

    async def lifetime_s(self, host: str) -> float:
        return (await self.resolver.resolve_addresses(host)).expires_at - trio.current_time()

    async def failure(self, host: str) -> str:
        with pytest.raises(ResolutionFailed) as caught:
            await self.resolver.resolve_addresses(host)
        return str(caught.value)


# ---- where answers come from


@pytest.mark.parametrize("address", ["10.0.0.1", "::1", "fd00::1"])
async def test_an_address_is_its_own(names: Names, nursery: trio.Nursery, address: str) -> None:
    answer = await Group(nursery).resolver.resolve_addresses(address)
    assert (answer.addresses, answer.expires_at) == ((address,), math.inf)
    assert names.server.asked == []


async def test_both_families_are_asked_for_at_once(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b.example", "A", "10.0.0.1", "10.0.0.2")
    names.server.add("b.example", "AAAA", "fd00::1")
    names.server.delay_s = lambda _name, _kind: 1
    assert sorted(await Group(nursery).at("b.example")) == ["10.0.0.1", "10.0.0.2", "fd00::1"]
    assert (await Group(nursery).at("b.example"))[0] == "fd00::1", "RFC 8305, 4"
    assert trio.current_time() == pytest.approx(2)


async def test_a_name_with_addresses_of_a_single_family_is_resolved(names: Names, nursery: trio.Nursery) -> None:
    names.server.add("v4", "A", "10.0.0.1")
    names.server.add("v6", "AAAA", "fd00::1")
    group = Group(nursery)
    assert (await group.at("v4"), await group.at("v6")) == (("10.0.0.1",), ("fd00::1",))


async def test_the_other_family_is_not_waited_for_long(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Many name servers never answer one kind of question."""
    names.server.add("b", "A", "10.0.0.1", ttl=200)
    names.server.add("b", "AAAA", "fd00::1", ttl=200)
    names.server.delay_s = lambda _name, kind: 100 if kind == "AAAA" else 1
    group = Group(nursery)
    assert await group.at("b") == ("10.0.0.1",)
    assert trio.current_time() == pytest.approx(1 + OTHER_FAMILY_WAIT_S)
    assert await group.lifetime_s("b") == pytest.approx(FAILED_TTL_S), "half an answer does not count for long"


async def test_a_family_that_fails(names: Names, nursery: trio.Nursery) -> None:
    names.server.add("b", "A", "10.0.0.1", ttl=200)
    names.server.rcode["b.", "AAAA"] = dns.rcode.REFUSED
    group = Group(nursery)
    assert await group.at("b") == ("10.0.0.1",)
    assert await group.lifetime_s("b") <= FAILED_TTL_S


async def test_hosts_come_first_in_any_case(names: Names, nursery: trio.Nursery) -> None:
    names.hosts["broker"] = ("127.0.0.1", "::1")
    names.server.add("broker", "A", "10.0.0.1")
    group = Group(nursery)
    for name in ("broker", "BROKER", "broker."):
        assert await group.at(name) == ("127.0.0.1", "::1")
    assert 0 < await group.lifetime_s("broker") <= 5
    assert names.server.asked == []


async def test_search_domains(names: Names, nursery: trio.Nursery) -> None:
    names.search = "a.example b.example"
    names.server.add("broker.b.example", "A", "10.0.0.1")
    names.server.add("x.y", "A", "10.0.0.2")
    group = Group(nursery)
    assert await group.at("broker") == ("10.0.0.1",)
    assert names.server.count("broker.a.example") == 1
    assert await group.at("x.y") == ("10.0.0.2",)
    assert names.server.count("x.y.a.example") == 0, "as many dots as ndots: the name itself first"
    assert "not known" in await group.failure("broker.")


async def test_search_domains_do_not_mix_hosts(names: Names, nursery: trio.Nursery) -> None:
    names.search = "a.example b.example"
    names.server.add("broker.a.example", "A", "10.0.0.1")
    names.server.rcode["broker.a.example.", "AAAA"] = dns.rcode.NXDOMAIN
    names.server.add("broker.b.example", "AAAA", "fd00::1")
    assert await Group(nursery).at("broker") == ("10.0.0.1",)


async def test_without_name_servers_only_the_table_of_hosts_is_used(names: Names, nursery: trio.Nursery) -> None:
    names.no_server = True
    names.hosts = {"b": ("10.0.0.9",)}
    group = Group(nursery)
    assert await group.at("b") == ("10.0.0.9",)
    assert "c: is not in /etc/hosts, and there is no name server in /etc/resolv.conf" in await group.failure("c")
    with pytest.raises(ResolutionFailed, match="SRV records need a name server"):
        await group.resolver.resolve_services("_pulsar._tcp.b")


# ---- names without addresses


async def test_unknown(names: Names, nursery: trio.Nursery) -> None:
    names.server.add("text", "TXT", "x")
    group = Group(nursery)
    assert await group.failure("nowhere") == "nowhere: is not known, or has no address"
    assert await group.failure("text") == "text: is not known, or has no address"
    assert group.failures == 2


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", ".", "a" * 300])
async def test_names_that_cannot_be_names(names: Names, nursery: trio.Nursery, host: str) -> None:
    await Group(nursery).failure(host)


@pytest.mark.parametrize("error", [OSError(101, "Network is unreachable"), ValueError("what bytes can do")])
async def test_a_name_server_that_cannot_be_asked(names: Names, nursery: trio.Nursery, error: Exception) -> None:
    names.server.broken = error
    await Group(nursery, timeout_s=0.2).failure("b")


async def test_an_unexpected_error_of_the_dns_library_fails_only_the_query(
    names: Names, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: an answer of a stranger's name server must not end the worker."""

    async def defect(*_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("what bytes can do")

    monkeypatch.setattr("dns.asyncresolver.Resolver.resolve", defect)
    assert "what bytes can do" in await Group(nursery).failure("b")


async def test_a_query_without_an_answer_times_out(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.delay_s = lambda *_: math.inf
    assert await Group(nursery, timeout_s=1.5).failure("b") == "b: no answer within 1.5 s"
    assert trio.current_time() == pytest.approx(1.5)


# ---- how long answers are kept


@pytest.mark.parametrize(("ttl", "kept_s"), [(0, 1), (1, 1), (20, 20), (9999, 300)])
async def test_an_answer_counts_until_its_ttl_is_over(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, ttl: int, kept_s: float
) -> None:
    names.server.add("b", "A", "10.0.0.1", ttl=ttl)
    group = Group(nursery)
    assert await group.lifetime_s("b") == pytest.approx(kept_s)
    names.server.add("b", "A", "10.0.0.2", ttl=ttl)
    await trio.sleep(kept_s - 0.01)
    assert await group.at("B") == ("10.0.0.1",)
    assert names.server.count("b") == 1
    await trio.sleep(0.02)
    assert await group.at("b") == ("10.0.0.2",)


async def test_the_least_ttl_counts(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("alias", "CNAME", "b.", ttl=7)
    names.server.add("b", "A", "10.0.0.1", ttl=60)
    names.server.add("b", "AAAA", "fd00::1", ttl=30)
    group = Group(nursery)
    assert await group.lifetime_s("alias") == pytest.approx(7)
    assert await group.lifetime_s("b") == pytest.approx(30)


async def test_a_failed_resolution_is_cached_for_failed_ttl_s(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    group = Group(nursery)
    await group.failure("b")
    names.server.add("b", "A", "10.0.0.1")
    await trio.sleep(FAILED_TTL_S - 0.01)
    await group.failure("b")
    assert (names.server.count("b"), group.failures) == (1, 1)
    await trio.sleep(0.02)
    assert await group.at("b") == ("10.0.0.1",)


async def test_no_more_than_so_many_answers_are_kept(
    names: Names, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_queries, "ANSWERS_KEPT_MAX", 3)
    group = Group(nursery)
    for name in ("b", "n1", "n2", "n3"):
        names.server.add(name, "A", "10.0.0.1")
        await group.at(name)
    assert len(group.resolver._cache._answers) == 3
    await group.at("b")
    assert names.server.count("b") == 2, "the oldest went"


async def test_names_without_addresses_push_no_answer_out(
    names: Names, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: there are as many of them as a client likes."""
    monkeypatch.setattr(dns_queries, "ANSWERS_KEPT_MAX", 3)
    monkeypatch.setattr(dns_queries, "FAILURES_KEPT_MAX", 2)
    group = Group(nursery)
    names.server.add("b", "A", "10.0.0.1")
    await group.at("b")
    for number in range(9):
        await group.failure(f"n{number}")
    await group.failure("n8")
    assert (len(group.resolver._cache._failures), names.server.count("n8.")) == (2, 1)
    await group.at("b")
    assert names.server.count("b") == 1
    assert (len(group.resolver._cache._answers), len(group.resolver._cache._under_way)) == (1, 0)


async def outcome(group: Group, name: str, owner: str = "") -> Any:
    try:
        return (await group.resolver.resolve_addresses(name, owner=owner)).addresses
    except ResolutionFailed as error:
        return error


# ---- together, and many


async def test_concurrent_requests_for_a_name_share_one_query(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1")
    names.server.delay_s = lambda *_: 1
    group = Group(nursery)
    found: list[Any] = []

    async def ask() -> None:
        found.append(await group.at("b"))

    async with trio.open_nursery() as askers:
        for _ in range(10):
            askers.start_soon(ask)
    assert found == [("10.0.0.1",)] * 10
    assert names.server.count("b") == 1


async def test_a_caller_that_gives_up_leaves_the_answer_to_the_others(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1")
    names.server.delay_s = lambda *_: 2
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        with trio.move_on_after(1):
            askers.start_soon(partial(group.at, "b"))
            await group.at("b")
        assert await group.at("b") == ("10.0.0.1",)
    assert trio.current_time() == pytest.approx(2)
    assert names.server.count("b") == 1


async def test_a_flood_of_slow_names_is_bounded_and_does_not_delay_another_group(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: names that clients choose must not keep configured brokers unresolved."""
    names.server.delay_s = lambda name, _kind: 0.1 if name == "broker." else math.inf
    names.server.add("broker", "A", "10.0.0.1")
    clients, operator = Group(nursery), Group(nursery)
    async with trio.open_nursery() as askers:
        for number in range(5000):
            askers.start_soon(outcome, clients, f"n{number}", f"owner {number % 500}")
        await trio.sleep(1)
        assert names.server.at_once == 2 * QUERIES_MAX
        assert await operator.at("broker") == ("10.0.0.1",)
        assert trio.current_time() == pytest.approx(1.1)
        assert clients.resolver._cache._queue.waiting_count == dns_queries.WAITING_MAX
        late = await outcome(clients, "one-more", "owner 7")
        assert "one-more: too many names" in str(late)
    assert trio.current_time() == pytest.approx(5), "who waits for a turn waits no longer than others"
    names.server.delay_s = lambda *_: 0
    names.server.add("late", "A", "10.0.0.2")
    assert await clients.at("late") == ("10.0.0.2",), "it is over when it is over"


async def test_an_owners_slow_names_delay_no_other_owner(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: whatever a client invents, another one's names are asked for at once."""
    names.server.delay_s = lambda name, _kind: 0.1 if name.startswith("good") else math.inf
    for name in ("good1", "good2"):
        names.server.add(name, "A", "10.0.0.1")
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        for owner in ("evil", "worse", "worst"):
            for number in range(400):
                askers.start_soon(outcome, group, f"{owner}{number}", owner)
            await trio.testing.wait_all_tasks_blocked()
        assert names.server.at_once == 2 * (QUERIES_PER_OWNER_MAX * 3)
        assert await outcome(group, "good1", "alice") == ("10.0.0.1",)
        assert trio.current_time() == pytest.approx(0.1)
        # Nor does a name that another has let wait wait among theirs.
        askers.start_soon(outcome, group, "good2", "evil")
        await trio.testing.wait_all_tasks_blocked()
        assert names.server.count("good2") == 0
        assert await outcome(group, "good2", "alice") == ("10.0.0.1",)
        assert trio.current_time() == pytest.approx(0.2)
        askers.cancel_scope.cancel()


async def test_the_more_owners_have_many_queries_the_fewer_each_gets(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.delay_s = lambda *_: math.inf
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        at_once = []
        for owner in range(8):
            for number in range(20):
                askers.start_soon(outcome, group, f"n{owner}-{number}", f"owner {owner}")
            await trio.testing.wait_all_tasks_blocked()
            at_once.append(names.server.at_once // 2)
        assert at_once == [16, 32, 48, 56, 60, 62, 63, 64]
        askers.cancel_scope.cancel()


async def test_a_name_that_joins_another_owners_queue_late_has_its_own_time(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.delay_s = lambda name, _kind: 1 if name == "good." else math.inf
    names.server.add("good", "A", "10.0.0.1")
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        for number in range(QUERIES_PER_OWNER_MAX):
            askers.start_soon(outcome, group, f"n{number}", "evil")
        await trio.testing.wait_all_tasks_blocked()
        askers.start_soon(outcome, group, "good", "evil")
        await trio.sleep(4.5)
        assert await outcome(group, "good", "alice") == ("10.0.0.1",)
        askers.cancel_scope.cancel()


async def test_a_name_that_was_not_asked_for_in_its_time_is_not_known_to_have_none(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: or who lets a name wait among slow ones of its own would take it from all other clients for a while."""
    names.server.delay_s = lambda name, _kind: 0 if name == "good." else math.inf
    names.server.add("good", "A", "10.0.0.1")
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        for number in range(200):
            askers.start_soon(outcome, group, f"n{number}", "evil")
            await trio.testing.wait_all_tasks_blocked()
        assert "good: no answer within" in str(await outcome(group, "good", "evil"))
        assert names.server.count("good") == 0
        assert await outcome(group, "good", "alice") == ("10.0.0.1",)
        askers.cancel_scope.cancel()


async def test_a_name_without_waiting_callers_is_not_queried(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.delay_s = lambda *_: math.inf
    group = Group(nursery)
    async with trio.open_nursery() as askers:
        for number in range(100):
            askers.start_soon(outcome, group, f"n{number}", "evil")
        await trio.testing.wait_all_tasks_blocked()
        askers.start_soon(outcome, group, "last", "evil")
        await trio.testing.wait_all_tasks_blocked()
        askers.cancel_scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    cache = group.resolver._cache
    assert (cache._queue.waiting_count, len(cache._under_way)) == (0, QUERIES_PER_OWNER_MAX)
    await trio.sleep(6)
    assert names.server.count("last") == 0
    assert (len(cache._under_way), len(cache._answers), len(cache._failures)) == (0, 0, 16)
    names.server.delay_s = lambda *_: 0
    names.server.add("last", "A", "10.0.0.1")
    assert await outcome(group, "last", "evil") == ("10.0.0.1",), "it was never known to have none"


async def test_where_too_many_wait_the_owner_with_most_loses_its_newest(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_queries, "WAITING_MAX", 4)
    names.server.delay_s = lambda *_: math.inf
    group = Group(nursery)
    lost: dict[str, str] = {}

    async def ask(name: str, owner: str) -> None:
        lost[name] = str(await outcome(group, name, owner))

    async with trio.open_nursery() as askers:
        for number in range(QUERIES_PER_OWNER_MAX + 4):
            askers.start_soon(ask, f"e{number}", "evil")
            await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(dns_queries, "QUERIES_PER_OWNER_MAX", 0)  # so that the others wait, too
        askers.start_soon(ask, "e2", "alice")
        askers.start_soon(ask, "a1", "alice")
        await trio.testing.wait_all_tasks_blocked()
        assert lost == {"e19": "e19: too many names are being asked for"}
        askers.start_soon(ask, "e18", "bob")
        await trio.testing.wait_all_tasks_blocked()
        assert len(lost) == 1, "it waits for another's turn now"
        askers.cancel_scope.cancel()


# ---- answers that have just expired


async def stale(group: Group, name: str) -> Any:
    try:
        return (await group.resolver.resolve_addresses(name, owner="alice", may_be_stale=True)).addresses
    except ResolutionFailed as error:
        return str(error)


async def test_an_answer_that_has_just_expired_is_given_while_it_is_renewed(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1", ttl=5)
    group = Group(nursery)
    assert await stale(group, "b") == ("10.0.0.1",)
    names.server.add("b", "A", "10.0.0.2", ttl=5)
    names.server.delay_s = lambda *_: 1
    await trio.sleep(9)
    before = trio.current_time()
    for _ in range(3):
        assert await stale(group, "b") == ("10.0.0.1",)
    assert trio.current_time() == before
    assert await group.at("b") == ("10.0.0.2",), "who wants no old answer waits"
    assert trio.current_time() == pytest.approx(before + 1)
    assert await stale(group, "b") == ("10.0.0.2",)
    assert names.server.count("b") == 2


@pytest.mark.parametrize(("ttl", "counts_s"), [(1, 2), (5, 10), (300, 310)])
async def test_an_answer_counts_for_its_ttl_and_as_long_again_at_most(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, ttl: int, counts_s: float
) -> None:
    """Security: an address that has gone is not dialled for long."""
    assert dns_queries.STALE_MAX_S == 10
    for name in ("b", "c"):
        names.server.add(name, "A", "10.0.0.1", ttl=ttl)
    group = Group(nursery)
    assert await stale(group, "b") == await stale(group, "c") == ("10.0.0.1",)
    for name in ("b", "c"):
        names.server.add(name, "A", "10.0.0.2", ttl=ttl)
    names.server.delay_s = lambda *_: 3
    await trio.sleep(counts_s - 0.1)
    assert await stale(group, "b") == ("10.0.0.1",)
    await trio.sleep(0.2)
    assert await stale(group, "b") == ("10.0.0.2",), "not even while it is being renewed"
    assert await stale(group, "c") == ("10.0.0.2",)


async def test_no_old_answer_covers_a_failure_up(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1", ttl=60)
    group = Group(nursery)
    assert await stale(group, "b") == ("10.0.0.1",)
    names.server.remove("b")
    await trio.sleep(60.1)
    assert await stale(group, "b") == ("10.0.0.1",)
    await trio.testing.wait_all_tasks_blocked()
    assert "not known" in await stale(group, "b")
    await trio.sleep(FAILED_TTL_S + 0.1)
    names.server.delay_s = lambda *_: 1
    assert "not known" in await stale(group, "b")


# ---- SRV


async def services(group: Group, name: str) -> set[tuple[str, int, int]]:
    found = (await group.resolver.resolve_services(name)).services
    return {(str(one.target), one.priority, one.weight) for one in found}


async def test_services(names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    names.server.add("_pulsar._tcp.b", "SRV", "1 2 6650 h1.example.", "0 5 7000 h2.example.", ttl=20)
    group = Group(nursery)
    assert await services(group, "_pulsar._tcp.b") == {("h1.example:6650", 1, 2), ("h2.example:7000", 0, 5)}
    found = await group.resolver.resolve_services("_pulsar._tcp.b")
    assert found.expires_at == pytest.approx(trio.current_time() + 20)
    assert names.server.count("_pulsar._tcp.b", "SRV") == 1
    with pytest.raises(ResolutionFailed, match=r"^_pulsar\._tcp\.c: has no SRV records"):
        await group.resolver.resolve_services("_pulsar._tcp.c")


async def test_records_that_name_no_host(names: Names, nursery: trio.Nursery) -> None:
    names.server.add("none", "SRV", "0 0 0 .")
    names.server.add("some", "SRV", "0 0 0 h.", "0 0 6650 a\\032b.", "0 0 6650 good.")
    group = Group(nursery)
    assert await services(group, "none") == set(), 'RFC 2782: "." means that the service is not there'
    assert (await group.resolver.resolve_services("some")).services == (Service(HostPort("good", 6650), 0, 0),)


# ---- files


def test_hosts_as_the_manual_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "127.0.0.1 localhost\n# 1.1.1.1 no\n\n::1\tLocalHost  ip6 # 2.2.2.2\n10.0.0.1 b.example. b\nnonsense b\n"
        "10.0.0.2\n10.0.0.1 b\n"
    )
    monkeypatch.setattr(runtime_dns, "HOSTS", str(file))
    assert runtime_dns._read_hosts() == {
        "localhost": ("127.0.0.1", "::1"),
        "ip6": ("::1",),
        "b.example": ("10.0.0.1",),
        "b": ("10.0.0.1",),
    }
    file.unlink()
    assert runtime_dns._read_hosts() == {}


def test_resolv_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "resolv.conf"
    monkeypatch.setattr(runtime_dns, "RESOLV_CONF", str(file))
    assert runtime_dns._read_resolv_conf() is None
    file.write_text("search a.example b.example\nnameserver 192.0.2.1\noptions ndots:5\n")
    resolver = runtime_dns._read_resolv_conf()
    assert resolver is not None
    assert (resolver.nameservers, resolver.ndots, len(resolver.search)) == (["192.0.2.1"], 5, 2)
    for text in ("", "search a.example\n", "nameserver nonsense\n", "nameserver 192.0.2.1\nsearch a..b\n"):
        file.write_text(text)
        assert runtime_dns._read_resolv_conf() is None


async def test_files_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    for name in ("HOSTS", "RESOLV_CONF"):
        monkeypatch.setattr(runtime_dns, name, str(tmp_path / name))
    monkeypatch.setattr(watched, "CHECK_INTERVAL_S", 0)
    (tmp_path / "HOSTS").write_text("10.0.0.1 broker\n")
    group = Group(nursery)
    assert await group.at("broker") == ("10.0.0.1",)
    (tmp_path / "HOSTS").write_text("10.0.0.22 broker\n")
    assert await group.at("broker") == ("10.0.0.22",)
