"""lookup.targets.name_resolver: which names are the brokers' own, and that others have resolvers of their own."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from fake_dns import Names
from lookup_fakes import make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.brokers.names import LEARNED_MAX, BrokerNames
from lookup.metrics import BrokerMetrics
from lookup.targets.name_resolver import TargetResolver
from lookup.targets.rules import TargetRules
from proto.addresses import parse_broker_url
from proxy.runtime.dns.resolver import Addresses, Resolver
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer


def known_by(url: str, before: BrokerNames | None = None) -> BrokerNames:
    return BrokerNames(parse_broker_url(url), before)


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("pulsar://b0.example,b1.example", "b1.example", (True, False)),
        ("pulsar://b0.example", "B0.Example.", (True, False)),
        ("pulsar://b0.example", "x.b0.example", (False, True)),
        ("pulsar://b0.example", "X.Y.B0.example.", (False, True)),
        ("pulsar://b0.example", "xb0.example", (False, False)),
        ("pulsar://b0.example", "example", (False, False)),
        ("pulsar://b0.example", "b0.example.evil", (False, False)),
        ("pulsar+srv://brokers.example", "b0.brokers.example", (False, True)),
        ("pulsar+srv://brokers.example", "brokers.example", (False, False)),
        ("pulsar://10.0.0.1,[::1]", "x.10.0.0.1", (False, False)),
    ],
)
def test_names_in_the_service_url_are_configured_and_their_subdomains_known(
    url: str, host: str, expected: tuple[bool, bool]
) -> None:
    names = known_by(url)
    assert (names.is_configured(host), names.is_known(host)) == expected


def test_names_learned_from_brokers_are_known_also_after_a_reload() -> None:
    names = known_by("pulsar://b0.example")
    names.learn_name("One.example.")
    names.learn_url("pulsar://two.example:6650,three.example")
    names.learn_url("nonsense")
    names.learn_url("pulsar://10.0.0.1:6650")
    assert [names.is_known(f"{name}.example") for name in ("one", "two", "three", "four")] == [True, True, True, False]
    assert list(names._learned) == ["one.example", "two.example", "three.example"]
    assert known_by("pulsar://other", names).is_known("one.example"), "a reload forgets nothing"


def test_learned_names_are_bounded_and_the_least_recent_is_dropped() -> None:
    names = known_by("pulsar://b0.example")
    for number in range(LEARNED_MAX):
        names.learn_name(f"n{number}")
    names.learn_name("n0")
    names.learn_name("new")
    assert [names.is_known(name) for name in ("n0", "n1", "n2", "new")] == [True, False, True, True]


class Asked:
    """A group of names, as what it was asked."""

    def __init__(self) -> None:
        self.for_whom: list[tuple[str, str, bool]] = []

    async def resolve_addresses(self, host: str, *, owner: str = "", may_be_stale: bool = False) -> Addresses:
        self.for_whom.append((host, owner, may_be_stale))
        return Addresses(("10.0.0.1",), 0.0)


async def test_each_group_of_names_has_its_own_resolver() -> None:
    names = known_by("pulsar://b0.example")
    names.learn_name("said.example")
    groups = {name: Asked() for name in ("configured", "known", "others")}
    resolver = TargetResolver(names, **groups)  # type: ignore[arg-type]
    for host in ("b0.example", "x.b0.example", "said.example", "invented.example"):
        assert (await resolver.resolve_addresses(host, owner="alice")).addresses == ("10.0.0.1",)
    assert groups["configured"].for_whom == [("b0.example", "", True)]
    assert groups["known"].for_whom == [("x.b0.example", "alice", True), ("said.example", "alice", True)]
    assert groups["others"].for_whom == [("invented.example", "alice", True)]


async def test_an_address_that_has_just_expired_serves_until_a_newer_one_is_known(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: it is held against the rules at each time, and gone after its TTL and as long again at the latest."""
    dns = Names(monkeypatch)
    config = make_config(
        brokers={"service_url": "pulsar://10.9.9.9", "allowed_hosts": ["*"], "allowed_addresses": ["10.0.0.0/8"]}
    )

    def resolver() -> Resolver:
        return Resolver(nursery, timeout_s=5, ttl_max_s=30)

    brokers = BrokerDirectory(config, Dialer(config.brokers), resolver(), BrokerMetrics(CollectorRegistry()))
    targets = TargetResolver(brokers.names, configured=resolver(), known=resolver(), others=resolver())
    rules = TargetRules(config.brokers, targets, brokers)
    dns.server.add("broker", "A", "10.0.0.1", ttl=3)
    assert (await rules.check_target("broker:6650", "alice")).addresses == ("10.0.0.1",)
    dns.server.add("broker", "A", "169.254.169.254", ttl=3)
    dns.server.delay_s = lambda *_: 1
    await trio.sleep(3.1)
    before = trio.current_time()
    assert (await rules.check_target("broker:6650", "alice")).addresses == ("10.0.0.1",)
    assert trio.current_time() == before, "no request has waited"
    await trio.sleep(1.1)
    with pytest.raises(TargetDenied, match=r"169\.254\.169\.254"):
        await rules.check_target("broker:6650", "alice")


async def test_names_of_srv_records_are_known(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> None:
    dns = Names(monkeypatch)
    dns.server.add("_pulsar._tcp.brokers", "SRV", "0 1 6650 elsewhere.example.")
    dns.server.add("elsewhere.example", "A", "10.0.0.1")
    config = make_config(brokers={"service_url": "pulsar+srv://brokers"})
    resolver = Resolver(nursery, timeout_s=5, ttl_max_s=30)
    brokers = BrokerDirectory(config, Dialer(config.brokers), resolver, BrokerMetrics(CollectorRegistry()))
    assert not brokers.names.is_known("elsewhere.example")
    nursery.start_soon(brokers.discovery.run)
    await brokers.discovery.wait_until_any_found()
    assert brokers.names.is_known("elsewhere.example")
