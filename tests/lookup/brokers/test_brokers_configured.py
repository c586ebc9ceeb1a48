"""lookup.brokers.configured: which targets are brokers of ``brokers.service_url``, and need no further word of the
operator.

DNS is a name server in memory. A stranger has a name server of their own, and certificates for the names in it; another
tenant can make names in the operator's zone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from fake_dns import Names
from lookup_fakes import make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.configured import configured_brokers, exact_address
from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.metrics import BrokerMetrics
from lookup.targets.rules import Target, TargetRules, host_pattern_for
from proto.addresses import HostPort
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer

SERVICE = "pulsar-broker.ns.svc.cluster.local"
POD = f"pulsar-broker-0.{SERVICE}"
SEARCH = "ns.svc.cluster.local svc.cluster.local cluster.local"


class Worker:
    """The rules of a lookup worker that looks for its brokers."""

    def __init__(
        self, nursery: trio.Nursery, service_url: str, before: Worker | None = None, /, **brokers: Any
    ) -> None:
        config = make_config(brokers={"service_url": service_url, **brokers})

        def resolver(*, own: bool) -> Resolver:
            return Resolver(nursery, timeout_s=5, ttl_max_s=300)

        metrics = BrokerMetrics(CollectorRegistry())
        earlier = None if before is None else before.brokers
        self.brokers = BrokerDirectory(
            config, Dialer(config.brokers), resolver(own=True), metrics, DirectoryOptions(earlier)
        )
        nursery.start_soon(self.brokers.discovery.run)
        self.rules = TargetRules(config.brokers, resolver(own=False), self.brokers)

    async def target(self, text: str) -> str:
        """Where a target leads, as the forwarder is told."""
        target = await self.rules.check_target(text)
        return f"{target.broker} at {' '.join(sorted(target.addresses))}"

    async def denied(self, text: str) -> TargetDenied:
        with pytest.raises(TargetDenied) as caught:
            await self.rules.check_target(text)
        return caught.value


Make = Callable[..., Worker]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """All that names are looked up in: a headless service and its pods, and what strangers have."""
    names = Names(monkeypatch)
    names.server.add(SERVICE, "A", "10.0.0.1", "10.0.0.2")
    names.server.add(POD, "A", "10.0.0.1")
    names.server.add(f"pulsar-broker-2.{SERVICE}", "A", "10.0.0.3")  # up, but not in the service's answer yet
    names.server.add("evil.example", "A", "203.0.113.66")
    return names


@pytest.fixture
def make(names: Names, nursery: trio.Nursery) -> Make:
    return lambda service_url, *before, **brokers: Worker(nursery, service_url, *before, **brokers)


# ---- by name


async def test_a_host_of_the_url(make: Make) -> None:
    worker = make(f"pulsar://{SERVICE}")
    assert await worker.target(f"{SERVICE}:6650") == f"{SERVICE}:6650 at 10.0.0.1 10.0.0.2"
    assert await worker.target(f"{SERVICE.upper()}:6650") == f"{SERVICE.upper()}:6650 at 10.0.0.1 10.0.0.2"
    assert await worker.target(f"{SERVICE}.:6650") == f"{SERVICE}.:6650 at 10.0.0.1 10.0.0.2"


async def test_a_name_below_a_host_of_the_url(make: Make) -> None:
    """A pod below its headless service; and one that the service does not list (yet)."""
    worker = make(f"pulsar://{SERVICE}")
    assert await worker.target(f"{POD}:6650") == f"{POD}:6650 at 10.0.0.1"
    unlisted = f"pulsar-broker-2.{SERVICE}"
    for spelling in (unlisted, unlisted.upper(), f"{unlisted}."):
        assert await worker.target(f"{spelling}:6650") == f"{spelling}:6650 at 10.0.0.3"


async def test_a_service_with_one_address_and_its_pods(make: Make, names: Names) -> None:
    names.server.add(SERVICE, "A", "10.96.0.1")
    assert await make(f"pulsar://{SERVICE}").target(f"{POD}:6650") == f"{POD}:6650 at 10.0.0.1"


@pytest.mark.parametrize("host", ["pulsar-broker", "pulsar-broker.ns", "pulsar-broker.ns.svc"])
async def test_names_are_compared_as_search_domains_make_them_whole(make: Make, names: Names, host: str) -> None:
    names.search = SEARCH
    worker = make(f"pulsar://{host}")
    unlisted = f"pulsar-broker-2.{SERVICE}"
    assert await worker.target(f"{unlisted}:6650") == f"{unlisted}:6650 at 10.0.0.3"
    assert await worker.target(f"{host}:6650") == f"{host}:6650 at 10.0.0.1 10.0.0.2"
    assert await worker.target("pulsar-broker-2.pulsar-broker:6650") == "pulsar-broker-2.pulsar-broker:6650 at 10.0.0.3"


@pytest.mark.parametrize(
    ("host", "below"),
    [
        ("pulsar-broker", "evil.pulsar-broker"),
        ("pulsar-broker.ns", "evil.pulsar-broker.ns"),
        ("pulsar-broker.ns.svc", "evil.pulsar-broker.ns.svc"),
    ],
)
async def test_a_strangers_name_below_a_short_host_is_not_below_the_whole_one(
    make: Make, names: Names, host: str, below: str
) -> None:
    """Security: `evil.broker` and the like may be registered, in a top-level domain of the operator's short name."""
    names.search = SEARCH
    names.server.add(below, "A", "203.0.113.66")
    worker = make(f"pulsar://{host}")
    assert (await worker.denied(f"{below}:6650")).reason == "host"
    names.server.add(f"{below}.ns.svc.cluster.local", "A", "10.0.0.9")
    assert (await worker.denied(f"{below}.:6650")).reason == "host"


async def test_a_host_spelt_as_a_whole_name_is_not_the_short_one(make: Make, names: Names) -> None:
    """Security: with a final dot it is not looked for in the search domains, and may be another's."""
    names.search = SEARCH
    names.server.add("pulsar-broker", "A", "203.0.113.66")
    assert (await make("pulsar://pulsar-broker").denied("pulsar-broker.:6650")).reason == "host"


async def test_a_target_that_a_search_domain_makes_another_name(make: Make, names: Names) -> None:
    """Security: what looks as if it were below may be found elsewhere."""
    names.search = "evil.example"
    names.server.add(f"x.{SERVICE}.evil.example", "A", "203.0.113.66")
    assert (await make(f"pulsar://{SERVICE}").denied(f"x.{SERVICE}:6650")).reason == "host"


@pytest.mark.parametrize("host", ["localhost", "com", "co.uk", "example.com", "brokers.internal"])
async def test_nothing_is_below_a_host_of_less_than_three_labels(make: Make, names: Names, host: str) -> None:
    """Security: it may be a public suffix, or a whole domain in which others have names, too."""
    names.server.add(host, "A", "10.0.0.1")
    names.server.add(f"evil.{host}", "A", "203.0.113.66")
    names.server.add(f"a.evil.{host}", "A", "203.0.113.66")
    worker = make(f"pulsar://{host}")
    assert await worker.target(f"{host}:6650") == f"{host}:6650 at 10.0.0.1"
    for name in (f"evil.{host}", f"a.evil.{host}"):
        assert (await worker.denied(f"{name}:6650")).reason == "host"


@pytest.mark.parametrize(
    "host",
    [
        f"evil{SERVICE}",  # not at a label
        f"{SERVICE}.evil.example",
        "other.ns.svc.cluster.local",  # beside it: of anyone who may make a service there
        "ns.svc.cluster.local",  # above it
        f"{SERVICE[:-1]}",
    ],
)
async def test_names_that_are_not_below(make: Make, names: Names, host: str) -> None:
    """Security: a client that can make a name in the operator's zone, and one that has a zone of its own."""
    names.server.add(host, "A", "203.0.113.66")
    denied = await make(f"pulsar://{SERVICE}").denied(f"{host}:6650")
    assert denied.reason == "host"
    assert "brokers.allowed_hosts" in str(denied)


async def test_nothing_is_below_an_address(make: Make, names: Names) -> None:
    names.server.add("evil.10.0.0.1", "A", "203.0.113.66")
    worker = make("pulsar://10.0.0.1,[fd00::1]")
    assert (await worker.denied("evil.10.0.0.1:6650")).reason == "host"
    assert await worker.target("10.0.0.1:6650") == "10.0.0.1:6650 at 10.0.0.1"
    assert await worker.target("[FD00:0::1]:6650") == "[fd00::1]:6650 at fd00::1"
    assert (await worker.denied("10.0.0.11:6650")).reason == "host"


async def test_a_name_that_leads_to_a_brokers_name_is_checked_by_its_address(make: Make, names: Names) -> None:
    """A CNAME is the word of the name's owner."""
    names.server.add("evil.example", "CNAME", "evil2.example.")
    names.server.add("evil2.example", "A", "203.0.113.66")
    names.server.remove("evil.example")
    names.server.add("evil.example", "CNAME", f"{POD}.")
    worker = make(f"pulsar://{SERVICE}")
    assert await worker.target("evil.example:6650") == f"{SERVICE}:6650 at 10.0.0.1"


async def test_hosts_of_the_table(make: Make, names: Names) -> None:
    """Security: it says where one host is, not that names below it are of the same owner's."""
    names.hosts = {"b.dc.example": ("10.0.0.7",), "b0.b.dc.example": ("10.0.0.8",), "b0": ("10.0.0.8",)}
    worker = make("pulsar://B.dc.example")
    assert await worker.target("b.DC.example:6650") == "b.DC.example:6650 at 10.0.0.7"
    assert (await worker.denied("b0.b.dc.example:6650")).reason == "host"
    assert (await worker.denied("b0:6650")).reason == "host"


async def test_below_a_host_any_address_but_those_that_are_never_allowed(make: Make, names: Names) -> None:
    """It is the operator's zone; but not even there is a broker at a metadata service, or on the proxy's machine."""
    worker = make(f"pulsar://{SERVICE}")
    for address, reason in (("169.254.169.254", "metadata"), ("127.0.0.1", "loopback"), ("0.0.0.0", "unspecified")):
        names.server.add(f"{reason}.{SERVICE}", "A", address)
        assert (await worker.denied(f"{reason}.{SERVICE}:6650")).reason == reason


# ---- by address


async def test_a_target_at_a_brokers_address_is_dialled_under_the_operators_name(make: Make, names: Names) -> None:
    """Security: behind an address that many share, TLS's server_name decides who answers."""
    names.server.add("advertised.example", "A", "10.0.0.2")
    worker = make(f"pulsar+ssl://{SERVICE}")
    assert await worker.target("advertised.example:6651") == f"{SERVICE}:6651 at 10.0.0.2"
    assert await worker.target("10.0.0.2:6651") == f"{SERVICE}:6651 at 10.0.0.2"
    assert (await worker.target("[::ffff:10.0.0.2]:6651")).startswith(f"{SERVICE}:6651 at ::ffff:")


async def test_of_several_addresses_only_a_brokers_are_dialled(make: Make, names: Names) -> None:
    names.server.add("mixed.example", "A", "203.0.113.66", "10.0.0.2", "10.0.0.77")
    names.server.add("mixed.example", "AAAA", "2001:db8::66")
    assert await make(f"pulsar://{SERVICE}").target("mixed.example:6650") == f"{SERVICE}:6650 at 10.0.0.2"


async def test_two_brokers_at_one_address_are_told_apart_by_port(make: Make, names: Names) -> None:
    names.server.add("a.example", "A", "10.0.0.7")
    names.server.add("b.example", "A", "10.0.0.7")
    worker = make("pulsar+ssl://a.example:7001,b.example:7002")
    assert await worker.target("10.0.0.7:7002") == "b.example:7002 at 10.0.0.7"
    assert (await worker.denied("10.0.0.7:6651")).reason == "port"


async def test_of_several_brokers_at_a_targets_addresses_one_is_taken(make: Make, names: Names) -> None:
    names.server.add("a.example", "A", "10.0.0.7")
    names.server.add("b.example", "A", "10.0.0.8")
    names.server.add("both.example", "A", "10.0.0.7", "10.0.0.8")
    found = await make("pulsar://a.example,b.example").target("both.example:6650")
    assert found in {"a.example:6650 at 10.0.0.7", "b.example:6650 at 10.0.0.8"}, "the name and address of one"


@pytest.mark.parametrize("target", ["64:ff9b::10.0.0.1", "2002:a00:1::1", "2001:0:c000:201:0:0:f5ff:fffe"])
async def test_a_tunnel_to_a_brokers_address_is_not_its_address(make: Make, target: str) -> None:
    """Security: who answers is for the routers between to say."""
    assert (await make(f"pulsar://{SERVICE}").denied(f"[{target}]:6650")).reason == "host"


def test_exact_addresses() -> None:
    assert str(exact_address("::ffff:10.0.0.1")) == "10.0.0.1"
    assert str(exact_address("fd00::1%eth0")) == "fd00::1"
    assert str(exact_address("2002:a00:1::1")) == "2002:a00:1::1"


# ---- ports


async def test_the_ports_of_the_url_are_allowed_for_its_brokers_alone(make: Make, names: Names) -> None:
    worker = make(f"pulsar://{SERVICE}:7000", allowed_hosts=["evil.example"])
    assert await worker.target(f"{POD}:7000") == f"{POD}:7000 at 10.0.0.1"
    assert await worker.target("10.0.0.1:7000") == f"{SERVICE}:7000 at 10.0.0.1"
    for elsewhere in (f"{POD}:6651", f"{SERVICE}:6651", "10.0.0.1:6651"):
        assert (await worker.denied(elsewhere)).reason == "port", "any program may listen there"
    assert (await worker.denied(f"{POD}:7001")).reason == "port"
    assert await worker.target("evil.example:6650") == "evil.example:6650 at 203.0.113.66"
    assert (await worker.denied("evil.example:7000")).reason == "port"


# ---- SRV records


async def test_hosts_of_srv_records(make: Make, names: Names, autojump_clock: trio.testing.MockClock) -> None:
    records = ("0 1 7001 b0.dc1.example.", "0 1 6650 B1.dc1.example.")
    names.server.add("_pulsar._tcp.brokers.example", "SRV", *records, ttl=10)
    for number in range(3):
        names.server.add(f"b{number}.dc1.example", "A", f"10.0.0.{number + 4}", ttl=10)
    names.server.add("x.b0.dc1.example", "A", "10.0.0.9")
    worker = make("pulsar+srv://brokers.example")
    assert await worker.target("b0.dc1.example:7001") == "b0.dc1.example:7001 at 10.0.0.4"
    assert await worker.target("b1.dc1.example:6650") == "b1.dc1.example:6650 at 10.0.0.5"
    assert await worker.target("10.0.0.5:6650") == "B1.dc1.example:6650 at 10.0.0.5"
    assert await worker.target("x.b0.dc1.example:7001") == "x.b0.dc1.example:7001 at 10.0.0.9"
    for stranger in ("b2.dc1.example:6650", "brokers.example:6650", "evil.example:7001"):
        assert (await worker.denied(stranger)).reason in {"host", "unknown_host"}
    names.server.add("_pulsar._tcp.brokers.example", "SRV", "0 1 6650 b2.dc1.example.", ttl=10)
    await trio.sleep(11)
    assert await worker.target("b2.dc1.example:6650") == "b2.dc1.example:6650 at 10.0.0.6"
    assert (await worker.denied("b0.dc1.example:6650")).reason == "host"
    assert (await worker.denied("b0.dc1.example:7001")).reason == "port"


async def test_hosts_of_srv_records_are_whole_names(make: Make, names: Names) -> None:
    """Security: the same text, made another name by a search domain."""
    names.search = "evil.example"
    names.server.add("_pulsar._tcp.brokers.example", "SRV", "0 1 6650 b0.")
    names.server.add("b0", "A", "10.0.0.4")
    names.server.add("b0.evil.example", "A", "203.0.113.66")
    worker = make("pulsar+srv://brokers.example")
    assert (await worker.denied("b0:6650")).reason == "host"
    assert await worker.target("b0.:6650") == "b0.:6650 at 10.0.0.4"


# ---- knowledge that a reload keeps


async def test_while_dns_fails_what_was_found_last_counts(
    make: Make, names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    worker = make(f"pulsar://{SERVICE}")
    await worker.target(f"{POD}:6650")
    names.server.broken = OSError("no name server")
    await trio.sleep(100)
    assert await worker.target("10.0.0.2:6650") == f"{SERVICE}:6650 at 10.0.0.2"
    assert (await worker.denied("10.0.0.3:6650")).reason == "host"
    names.hosts = {f"pulsar-broker-9.{SERVICE}": ("10.0.0.9",)}
    after = make(f"pulsar://{SERVICE}", worker)
    await trio.sleep(100)
    assert await after.target("10.0.0.2:6650") == f"{SERVICE}:6650 at 10.0.0.2"


async def test_after_a_reload_names_and_addresses_of_before_are_known_at_once(
    make: Make, names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    names.search = SEARCH
    worker = make("pulsar://pulsar-broker")
    await worker.target(f"{POD}:6650")
    names.server.delay_s = lambda name, _kind: 4 if name.startswith("pulsar-broker.") else 0
    after = make("pulsar://pulsar-broker", worker)
    assert {SERVICE} == after.brokers.discovery.configured.names
    assert after.brokers.discovery.configured.broker_at("10.0.0.2", 6650) is not None


async def test_a_host_that_moves(make: Make, names: Names, autojump_clock: trio.testing.MockClock) -> None:
    names.server.add(SERVICE, "A", "10.0.0.1", ttl=10)
    worker = make(f"pulsar://{SERVICE}")
    assert await worker.target("10.0.0.1:6650") == f"{SERVICE}:6650 at 10.0.0.1"
    names.server.add(SERVICE, "A", "10.0.0.5", ttl=10)
    await trio.sleep(11)
    assert (await worker.denied("10.0.0.1:6650")).reason == "host"
    assert await worker.target("10.0.0.5:6650") == f"{SERVICE}:6650 at 10.0.0.5"


async def test_a_host_of_the_url_does_not_wait_for_the_others(
    make: Make, names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    """At the start, one name that hangs keeps no client from the brokers of the other."""
    names.server.delay_s = lambda name, _kind: 100 if name.startswith("hangs") else 0
    worker = make(f"pulsar://hangs.example,{SERVICE}")
    assert await worker.target(f"{SERVICE}:6650") == f"{SERVICE}:6650 at 10.0.0.1 10.0.0.2"
    assert trio.current_time() < 1
    assert await worker.target(f"{POD}:6650") == f"{POD}:6650 at 10.0.0.1"
    assert trio.current_time() == pytest.approx(5, abs=0.5), "others wait until all is known"


async def test_a_target_check_is_denied_when_a_reload_ends_the_search(
    names: Names, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.delay_s = lambda name, _kind: 100 if name.startswith("hangs") else 0
    with trio.fail_after(60):
        async with trio.open_nursery() as search:
            worker = Worker(search, "pulsar://hangs.example,10.0.0.1")
            nursery.start_soon(trio.sleep, 0)
            denied: list[TargetDenied] = []

            async def ask() -> None:
                denied.append(await worker.denied("203.0.113.66:6650"))

            nursery.start_soon(ask)
            await trio.sleep(1)
            search.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert [one.reason for one in denied] == ["host"]


async def test_a_name_that_leads_elsewhere_at_the_second_look(
    make: Make, names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: what was checked is what is dialled; the next one is checked again."""
    names.server.add("evil.example", "A", "10.0.0.1", ttl=1)
    worker = make(f"pulsar://{SERVICE}")
    assert (await worker.rules.check_target("evil.example:6650")).addresses == ("10.0.0.1",)
    names.server.add("evil.example", "A", "203.0.113.66", ttl=1)
    await trio.sleep(1.1)
    assert (await worker.denied("evil.example:6650")).reason == "host"


# ---- the operator's rules


async def test_further_hosts_and_addresses(make: Make, names: Names) -> None:
    names.server.add("b0.dc.example", "A", "10.1.0.1")
    names.server.add("b1.dc.example", "A", "10.2.0.1")
    by_host = make(f"pulsar://{SERVICE}", allowed_hosts=["*.dc.example"])
    by_address = make(f"pulsar://{SERVICE}", allowed_addresses=["10.1.0.0/16"])
    both = make(f"pulsar://{SERVICE}", allowed_hosts=["*.dc.example"], allowed_addresses=["10.1.0.0/16"])
    for worker, hosts in (
        (by_host, {"b0.dc.example": True, "b1.dc.example": True, "10.1.0.1": False}),
        (by_address, {"b0.dc.example": True, "b1.dc.example": False, "10.1.0.1": True}),
        (both, {"b0.dc.example": True, "b1.dc.example": False, "10.1.0.1": False}),
    ):
        for host, good in {**hosts, POD: True, "10.0.0.1": True, "evil.example": False}.items():
            if good:
                assert (await worker.rules.check_target(f"{host}:6650")).addresses
            else:
                assert (await worker.denied(f"{host}:6650")).reason in {"host", "address"}


async def test_a_host_that_the_operator_vouches_for_keeps_its_name(make: Make, names: Names) -> None:
    """As behind a proxy that tells brokers apart by TLS's server_name: all are at one address."""
    names.server.add("lb.example", "A", "10.0.0.7")
    names.server.add("b0.dc.example", "A", "10.0.0.7")
    worker = make("pulsar+ssl://lb.example", allowed_hosts=["*.dc.example"])
    assert await worker.target("b0.dc.example:6651") == "b0.dc.example:6651 at 10.0.0.7"
    by_address = make("pulsar+ssl://lb.example", allowed_addresses=["10.0.0.0/8"])
    assert await by_address.target("b0.dc.example:6651") == "lb.example:6651 at 10.0.0.7"


async def test_patterns_are_held_against_whole_names_too(make: Make, names: Names) -> None:
    names.search = "dc.example"
    names.server.add("b0.dc.example", "A", "10.1.0.1")
    worker = make(f"pulsar://{SERVICE}", allowed_hosts=["*.dc.example"])
    for spelling in ("b0", "b0.dc.example", "B0.DC.example."):
        assert await worker.target(f"{spelling}:6650") == f"{spelling}:6650 at 10.1.0.1"


# ---- advice in the log


@pytest.mark.parametrize(
    ("target", "further", "advice"),
    [
        ("pod-0.other.ns.svc.cluster.local:6650", {}, 'brokers.allowed_hosts = ["*.other.ns.svc.cluster.local"]'),
        ("pod-0.other:6650", {}, 'brokers.allowed_hosts = ["*.other.ns.svc.cluster.local"]'),
        ("evil.example:6650", {}, 'brokers.allowed_hosts = ["evil.example"]'),
        ("10.9.9.9:6650", {}, 'brokers.allowed_addresses = ["10.9.9.9"]'),
        ("[fd00::9]:6650", {}, 'brokers.allowed_addresses = ["fd00::9"]'),
        ("evil.example:6650", {"allowed_hosts": ["a.b"]}, 'brokers.allowed_hosts = […, "evil.example"]'),
        ("10.9.9.9:6650", {"allowed_hosts": ["a.b"]}, 'brokers.allowed_hosts = […, "10.9.9.9"]'),
        (
            "evil.example:6650",
            {"allowed_addresses": ["10.9.0.0/16"]},
            'brokers.allowed_addresses = […, "203.0.113.66"]',
        ),
        (
            "evil.example:6650",
            {"allowed_hosts": ["a.b"], "allowed_addresses": ["10.9.0.0/16"]},
            'brokers.allowed_hosts = […, "evil.example"] and brokers.allowed_addresses = […, "203.0.113.66"]',
        ),
        (
            "10.9.9.9:6650",
            {"allowed_hosts": ["a.b"], "allowed_addresses": ["10.9.0.0/16"]},
            'brokers.allowed_hosts = […, "10.9.9.9"]',
        ),
    ],
)
async def test_a_denial_names_key_and_value(
    make: Make, names: Names, target: str, further: dict[str, Any], advice: str
) -> None:
    """And with that set, the target is allowed."""
    names.search = SEARCH
    names.server.add("pod-0.other.ns.svc.cluster.local", "A", "10.1.0.7")
    denied = await make(f"pulsar://{SERVICE}", **further).denied(target)
    assert str(denied).endswith(f"if it is a broker of yours, set {advice}")
    more = dict(further)
    for setting in advice.split(" and "):
        key, _, value = setting.removeprefix("brokers.").partition(" = ")
        more[key] = [*further.get(key, []), value.strip('[]"… ,').strip('"')]
    assert (await make(f"pulsar://{SERVICE}", **more).rules.check_target(target)).addresses


@pytest.mark.parametrize(
    ("host", "pattern"),
    [
        ("pulsar-broker-0.pulsar-broker.ns.svc.cluster.local", "*.pulsar-broker.ns.svc.cluster.local"),
        ("B-0.Pulsar.example.com.", "*.pulsar.example.com"),
        ("pulsar.example.com", "pulsar.example.com"),
        ("broker", "broker"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
    ],
)
def test_the_pattern_for_a_host(host: str, pattern: str) -> None:
    assert host_pattern_for(host) == pattern


def test_an_empty_configuration_knows_no_broker() -> None:
    none = configured_brokers((), (), ())
    assert not none.has_host("")
    assert not none.has_name("")
    assert none.broker_at("10.0.0.1", 6650) is None
    assert not none.any_at_loopback


def test_an_unknown_name_is_not_a_name_that_is_not_known() -> None:
    """Both are empty texts."""
    listed = configured_brokers([HostPort("10.0.0.1", 6650)], [""], [(HostPort("10.0.0.1", 6650), ("10.0.0.1",))])
    assert not listed.has_name("")
    assert not listed.has_name("a.b.c.d")


async def test_target_is_what_is_told(make: Make) -> None:
    assert await make(f"pulsar://{SERVICE}").rules.check_target(f"{POD}:6650") == Target(
        HostPort(POD, 6650), ("10.0.0.1",)
    )
